"""The interface of an engine that answers requests: a request in, and pieces of its answer out as they arrive. Knows no
protocol and no engine; openai.py implements it over HTTP, inprocess.py for the engine in this process.
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
class Request:
    """One request, with exactly one of messages (for the chat template), text (to be continued) and ids (token ids, to be
    continued). name: the task and the variant. temperature: 0 is greedy. ignore_eos: do not stop at the end-of-text token.
    prediction: the expected output, for engines that draft from it. logprobs: the number of most likely tokens that are
    reported at each position. salt: requests with different salts share no prefix cache, where the engine supports it."""

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
    """An output token (as text, or its id as text), its log-probability, and the most likely tokens with theirs."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class Piece(NamedTuple):
    """What arrived at one time. at_s: on the clock of the endpoint. token_ids: None if the server does not give them.

    The last pieces describe the whole answer. usage: as the server sent it. counts: the drafting counts of this request.
    queued_s: seconds in the queue. output_tokens: None: the number of token_ids. hidden_tokens: output tokens that were not
    streamed, such as reasoning. notes: what was odd in the answer."""

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
    """A request without a complete answer; the message says why. unanswered: there was no connection, or no data until a
    time-out, so that the next request will probably fail, too."""

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
    """An engine that answers many requests at once."""

    def generate(self, request: Request) -> AsyncIterator[Piece]:
        """The answer as it arrives. Raises RequestFailed if it is not complete, for any reason. Closing the iterator aborts the
        request."""

    async def facts(self) -> Facts:
        """What the engine says of itself."""

    async def counters(self) -> ServerCounters | None:
        """The counts since the engine's start; None if it does not count."""
