"""What the instrument asks an engine for, whatever kind it is: one request in, pieces of its answer out as they arrive. Knows
no wire and no engine; openai.py speaks HTTP, inprocess.py drives the engine in this process.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from forerun.checks import require

if TYPE_CHECKING:
    from forerun.bench.records.record import Counts, Facts, ServerCounters


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. One of: messages (for the chat template), text (continued as it stands), ids (token ids, continued).
    name says task and variant. ignore_eos: go on past the end-of-text token. prediction: the expected output, for engines that
    draft from it. logprobs: report so many of the most likely tokens at each position. salt: requests with different ones share
    no prefix cache, where the engine can do that. temperature 0 is greedy."""

    name: str
    max_tokens: int
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    prediction: str | None = None
    logprobs: int | None = None
    salt: str | None = None


class TokenLogprob(NamedTuple):
    """Of one output token: its text (or its id as text), its log-probability, and the most likely tokens with theirs."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class Piece(NamedTuple):
    """What arrived at once, at_s on the clock of the endpoint's caller. token_ids None: the server does not give them.

    The last pieces say what is known of the whole answer: usage (as the server sent it), counts (drafting of this request),
    queued_s (seconds it waited), output_tokens (None: count the token_ids), hidden_tokens (those of the output that were not
    streamed, as some servers do with reasoning) and notes (what was odd in the answer)."""

    at_s: float
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    counts: Counts | None = None
    prompt_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    queued_s: float | None = None
    output_tokens: int | None = None
    hidden_tokens: int = 0
    notes: tuple[str, ...] = ()


class RequestFailed(Exception):
    """A request that was not answered as asked; the message says why. unanswered: because nothing came, so that the next
    request will hardly fare better: no connection, or silence until a time-out."""

    def __init__(self, message: str, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a request has failed: in all, without a connection, and in which nothing came."""

    request_s: float = 600.0
    connect_s: float = 30.0
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        for name, option, seconds in (
            ("timeout", self.request_s, 600), ("connect_timeout", self.connect_s, 30), ("idle_timeout", self.idle_s, 300)
        ):  # fmt: skip
            require(math.isfinite(option) and option > 0, name, option, f"give more than 0 seconds, for instance {seconds}")


class Endpoint(Protocol):
    """An engine that answers requests, many at once."""

    def generate(self, ask: Ask) -> AsyncIterator[Piece]:
        """The answer as it arrives. Raises RequestFailed whenever it is not complete: an error, whatever the HTTP status,
        a stream with no end, an empty one, a dropped connection, a time-out, a fault of the engine. Closing the iterator
        aborts the request."""

    async def facts(self) -> Facts:
        """What the engine says of itself."""

    async def counters(self) -> ServerCounters | None:
        """What it has counted since it started; None if it does not count."""
