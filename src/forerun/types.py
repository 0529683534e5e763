"""What crosses the engine's boundaries: requests with their sampling parameters going in, events coming out, and the
draft and the verdict that pass between drafter, verifier and engine. Frozen values; no module here computes anything,
and torch is only named in annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


class SettingError(ValueError):
    """A setting that cannot be used. The message names the setting, the value given and one that works."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        super().__init__(f"{name}={value!r}: {remedy}")
        self.name, self.value, self.remedy = name, value, remedy


class LoadError(SettingError):
    """A model's files cannot be used. The message names the file and what is wrong in it."""


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Raise SettingError(name, value, remedy) unless ok."""
    if not ok:
        raise SettingError(name, value, remedy)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; every one of these holds with speculation, at every position.

    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0, the penalties' 1, 0, 0 and logit_bias None mean off.
    repetition_penalty looks at prompt and output, presence_penalty and frequency_penalty at the output.
    logit_bias maps a token id to what is added to its logit (-100 .. 100; -100 bans). bad_words are texts that are
    never produced in the tokens that the tokenizer writes them with, alone or behind a space; banned_token_ids are
    sequences of token ids that are never produced. min_tokens: no stop token before that many.
    max_tokens None: as many as the context allows. logprobs: how many of the most likely tokens to report beside the
    chosen one, from the model's own distribution (before any of these parameters). prediction: the expected output,
    for the drafter `prediction`.
    Raises SettingError.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    banned_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    seed: int | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            else:
                object.__setattr__(self, name, tuple(value))
            require(all(isinstance(s, str) and s for s in getattr(self, name)), name, value, "give non-empty strings")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "banned_token_ids", tuple(tuple(ids) for ids in self.banned_token_ids))
        require(isinstance(self.n, int) and self.n >= 1, "n", self.n, "give 1 or more")
        require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "give 0 (greedy) to 100, for instance 0.7")
        require(self.top_k >= -1, "top_k", self.top_k, "give 1 or more, or 0 for no limit")
        require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "give more than 0 and at most 1, for instance 0.9")
        require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "give 0 to 1, for instance 0.05")
        require(
            0.0 < self.repetition_penalty <= 100.0,
            "repetition_penalty",
            self.repetition_penalty,
            "give more than 0, for instance 1.1",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "give -2 to 2, for instance 0.5")
        for bias in (self.logit_bias or {}).values():
            require(-100.0 <= bias <= 100.0, "logit_bias", bias, "give -100 (banned) to 100")
        require(all(self.banned_token_ids), "banned_token_ids", self.banned_token_ids, "give sequences of at least one id")
        require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "give 1 or more, or None for what the context allows",
        )
        require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "give 0 or more")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"give at most max_tokens ({self.max_tokens})",
        )
        require(
            self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", self.logprobs, "give 0 to 100, or None for none"
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue, with every text already turned into ids and every default filled in.

    stop_ids: the tokens that end it (the model's end-of-sequence ids, unless ignore_eos, and stop_token_ids).
    banned: token sequences that must not appear. prediction: the ids expected as output. seed: always set.
    max_tokens: what params asked for, cut to what the context leaves.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()


class Logprob(NamedTuple):
    """Of one output token: its log-probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """What one step did to one request: the tokens it committed (nothing past a stop), the text they set free (it may
    lag behind the tokens while a character or a possible stop string is unfinished), and whether it ended. error: why, if the
    finish reason is "error"."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...]
    finish_reason: FinishReason | None
    error: str | None = None


class Draft(NamedTuple):
    """What a drafter proposes for the B rows of a step, K the widest row.

    tokens: [B,K] int64, anything past a row's size; size: [B] int64, 0 where it proposes nothing;
    probs: [B,K,V] float32, the distributions that the tokens were drawn from, or None: point masses.
    """

    tokens: Tensor
    size: Tensor
    probs: Tensor | None = None


class Verdict(NamedTuple):
    """What verification made of a draft: the accepted draft tokens and one of the target's own behind them.

    tokens: [B,K+1] int64, valid up to count; count: [B] int64, 1 .. K+1; so count - 1 drafted tokens were accepted.
    """

    tokens: Tensor
    count: Tensor  # type: ignore[assignment]
