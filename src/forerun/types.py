"""The values that cross the engine's boundaries: requests with their sampling parameters go in, events come out. Draft and
Verdict pass between drafter, verifier and engine. All of them are frozen values without computation. torch is named in
annotations only. SettingError, LoadError and require are those of checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from forerun.checks import (
    LARGEST,
    Biases,
    Flag,
    Number,
    Seed,
    Text,
    Texts,
    TokenIds,
    TokenSequences,
    Whole,
    convert,
    require,
    required,
    setting,
)
from forerun.checks import LoadError as LoadError
from forerun.checks import SettingError as SettingError
from forerun.structured import StructuredOutput, structured

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from forerun.engine.stats import RequestStats

FinishReason = Literal["stop", "length", "abort", "error"]

MOST_COMPLETIONS = 1024  # n at most
COLDEST = 1e-5  # a lower temperature is greedy, as in vLLM: logits are divided in float32, where 1e-46 is 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Every parameter works with speculation, at every position.

    n: completions of the prompt. temperature: 0 is greedy; a value below 1e-5 becomes 0. top_k, top_p, min_p: filters, off at
    0 or -1, 1, and 0. repetition_penalty (0.01 .. 100, off at 1) applies to tokens of prompt and output; presence_penalty and
    frequency_penalty (-2 .. 2, off at 0) apply to tokens of the output.
    logit_bias: token id -> addition to its logit (-100 .. 100; -100 bans the token). bad_words: texts that are never produced;
    this covers the tokens of the text with and without a space before it. banned_token_ids: sequences that are never produced.
    max_tokens: None means as many as the context allows. min_tokens: no stop token before that many tokens.
    stop: texts that end the answer; include_stop_str_in_output keeps them in it. stop_token_ids: tokens that end it.
    ignore_eos: the model's end-of-sequence ids do not end it.
    logprobs: the number of most likely tokens to report with the chosen one; they are the model's own, before any of these
    parameters. seed: any whole number; only the lowest 64 bits count. prediction: the expected output, for the drafter
    `prediction`. detokenize: off: the answer has token ids and no text, which saves the host half of its work for a token.
    cache_salt: what the request leaves in the prefix cache and in the shared suffix tree is found by requests with the same
    text here only; "" is None. priority: lower ones are admitted first and preempted last; of equal ones the first that came.
    num_speculative_tokens: drafted tokens of a step at most, where the engine's is more; 0: no drafts. drafters: the names of
    those that may draft, of the ones that the engine has loaded (Speculation.drafters); empty: all.
    structured: the form that the answer must have, StructuredOutput or a mapping with one of its fields.

    checks.py says how values are converted: numpy's and torch's scalars, 7.0 for 7, a list for a tuple, digits as keys of
    logit_bias. None means the default, except for max_tokens. Raises SettingError.
    """

    n: int = setting(1, Whole(1, MOST_COMPLETIONS, 4))
    temperature: float = setting(1.0, Number(0, 100, 0.7, also=" (0 is greedy)"))
    top_k: int = setting(0, Whole(-1, LARGEST, 50, " (0 and -1: no limit)"))
    top_p: float = setting(1.0, Number(0, 1, 0.9, above=True))
    min_p: float = setting(0.0, Number(0, 1, 0.05))
    repetition_penalty: float = setting(1.0, Number(0.01, 100, 1.1))
    presence_penalty: float = setting(0.0, Number(-2, 2, 0.5))
    frequency_penalty: float = setting(0.0, Number(-2, 2, 0.5))
    logit_bias: Mapping[int, float] | None = setting(None, Biases({50: -100.0}))
    bad_words: tuple[str, ...] = setting((), Texts(("maybe",)))
    banned_token_ids: tuple[tuple[int, ...], ...] = setting((), TokenSequences(((5, 6), (7,))))
    max_tokens: int | None = setting(16, Whole(1, LARGEST, 256, ", or None for what the context allows"), none=True)
    min_tokens: int = setting(0, Whole(0, LARGEST, 1))
    stop: tuple[str, ...] = setting((), Texts(("END",)))
    stop_token_ids: tuple[int, ...] = setting((), TokenIds((2,)))
    ignore_eos: bool = setting(False, Flag())
    include_stop_str_in_output: bool = setting(False, Flag())
    logprobs: int | None = setting(None, Whole(0, 100, 5, ", or None for none"))
    seed: int | None = setting(None, Seed())
    prediction: str | None = setting(None, Text("the text that is expected", empty=True))
    detokenize: bool = setting(True, Flag())
    cache_salt: str | None = setting(None, Text("client-1", empty=True))
    priority: int = setting(0, Whole(-LARGEST, LARGEST, 0))
    num_speculative_tokens: int | None = setting(None, Whole(0, LARGEST, 2, " (0: no drafts), or None for no other limit"))
    drafters: tuple[str, ...] = setting((), Texts(("ngram",)))
    structured: StructuredOutput | None = setting(None, structured)

    def __post_init__(self) -> None:
        convert(self)
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "cache_salt", self.cache_salt or None)
        least, most = self.min_tokens, self.max_tokens
        require(most is None or least <= most, "min_tokens", least, f"give at most max_tokens, for instance {most}")
        searched = self.detokenize or not self.stop
        require(searched, "detokenize", False, "stop strings are searched for in the text; give True, or leave stop out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def sampling_params(name: str, value: Any) -> SamplingParams:
    """The value if it is SamplingParams. Raises SettingError."""
    require(isinstance(value, SamplingParams), name, value, "give SamplingParams, for instance SamplingParams(max_tokens=64)")
    return value


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. Its texts are token ids, and its defaults are filled in.

    stop_ids: the tokens that end it: stop_token_ids and, unless ignore_eos, the model's end-of-sequence ids.
    banned: token sequences that must not appear. prediction: the token ids that are expected as output. seed: always set.
    max_tokens: the number that was asked for, or what the context leaves. checks.py says how values are converted.
    Engine.add checks them against the model and its context. Raises SettingError.
    """

    id: str = required(Text("request-1"))
    prompt_ids: tuple[int, ...] = required(TokenIds((1, 2, 3), ordered=True))
    params: SamplingParams = required(sampling_params)
    max_tokens: int = required(Whole(0, LARGEST, 256))
    seed: int = required(Seed())
    stop_ids: tuple[int, ...] = setting((), TokenIds((2,)))
    banned: tuple[tuple[int, ...], ...] = setting((), TokenSequences(((5, 6), (7,))))
    prediction: tuple[int, ...] = setting((), TokenIds((1, 2, 3), ordered=True))

    def __post_init__(self) -> None:
        convert(self)


class Logprob(NamedTuple):
    """An output token, its log-probability (natural logarithm), and the most likely tokens with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """What one step did to one request. tokens: those that it committed, none past a stop. text: the new text; it may lag
    behind the tokens while a character or a possible stop string is incomplete. finish_reason: None if the request goes on.
    counts: tokens drafted and accepted; None if the step verified nothing (the end of a prompt). error: the cause if the finish
    reason is "error". stats: the request's counts and times, with its last event."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...]
    finish_reason: FinishReason | None
    counts: tuple[int, int] | None = None
    error: str | None = None
    stats: RequestStats | None = None


class Draft(NamedTuple):
    """What a drafter proposes for the B rows of a step. K is the length of the longest draft.

    tokens: [B,K] int64, undefined past a row's size. size: [B] int64, 0 for a row without a draft.
    probs: [B,K,V] float32, the distributions that the tokens were drawn from; None: point masses.
    confidence: [B,K] float32, the drafter's estimate of the probability that this token and all before it are accepted; None:
    the drafter has no estimate. cheap: [B,K] float32, the same of the draft that it would have made without a pass of a model.
    """

    tokens: Tensor
    size: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    cheap: Tensor | None = None


class Verdict(NamedTuple):
    """The result of verifying a draft: the accepted draft tokens, then one token of the target's own.

    tokens: [B,K+1] int64, valid up to count. count: [B] int64, 1 .. K+1; count - 1 drafted tokens were accepted.
    """

    tokens: Tensor
    count: Tensor  # type: ignore[assignment]
