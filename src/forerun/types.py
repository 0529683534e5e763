"""What crosses the engine's boundaries: requests with their sampling parameters going in, events coming out, and the
draft and the verdict that pass between drafter, verifier and engine. Frozen values; nothing here computes anything,
and torch is only named in annotations. SettingError and require are those of checks.py.
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

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]

MOST_COMPLETIONS = 1024  # n at most
COLDEST = 1e-5  # lower temperatures are greedy, as in vLLM: logits are divided in float32, where 1e-46 is 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; every one of these holds with speculation, at every position.

    temperature 0 is greedy, and so is one below 1e-5, which becomes 0. top_k 0 or -1, top_p 1, min_p 0, the penalties' 1, 0, 0
    and logit_bias None mean off. repetition_penalty (0.01 .. 100) looks at prompt and output, presence_penalty and
    frequency_penalty (-2 .. 2) at the output.
    logit_bias maps a token id to what is added to its logit (-100 .. 100; -100 bans). bad_words are texts that are
    never produced in the tokens that the tokenizer writes them with, alone or behind a space; banned_token_ids are
    sequences of token ids that are never produced. min_tokens: no stop token before that many.
    max_tokens None: as many as the context allows. logprobs: how many of the most likely tokens to report beside the
    chosen one, from the model's own distribution (before any of these parameters). seed: any whole number; of one that
    does not fit 64 bits the lowest 64 count. prediction: the expected output, for the drafter `prediction`.

    Values are converted as checks.py says: numpy's and torch's scalars, 7.0 for 7, a list for a tuple, digits as keys of
    logit_bias. None takes the default (for max_tokens it has a meaning of its own). Raises SettingError.
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

    def __post_init__(self) -> None:
        convert(self)
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        least, most = self.min_tokens, self.max_tokens
        require(most is None or least <= most, "min_tokens", least, f"give at most max_tokens, for instance {most}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def sampling_params(name: str, value: Any) -> SamplingParams:
    """The value if it is SamplingParams. Raises SettingError."""
    require(isinstance(value, SamplingParams), name, value, "give SamplingParams, for instance SamplingParams(max_tokens=64)")
    return value


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue, with every text already turned into ids and every default filled in.

    stop_ids: the tokens that end it (the model's end-of-sequence ids, unless ignore_eos, and stop_token_ids).
    banned: token sequences that must not appear. prediction: the ids expected as output. seed: always set.
    max_tokens: what params asked for, cut to what the context leaves. Values are converted as checks.py says; what they
    must be for a given model and context is checked where it is added (Engine.add). Raises SettingError.
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
    """Of one output token: its log-probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """What one step did to one request: the tokens it committed (nothing past a stop), the text they set free (it may
    lag behind the tokens while a character or a possible stop string is unfinished), and whether it ended. counts: how many
    tokens were drafted for it and how many of these committed, None if the step verified nothing (a prompt's end). error:
    why, if the finish reason is "error"."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...]
    finish_reason: FinishReason | None
    counts: tuple[int, int] | None = None
    error: str | None = None


class Draft(NamedTuple):
    """What a drafter proposes for the B rows of a step, K the widest row.

    tokens: [B,K] int64, anything past a row's size; size: [B] int64, 0 where it proposes nothing;
    probs: [B,K,V] float32, the distributions that the tokens were drawn from, or None: point masses.
    confidence: [B,K] float32, the drafter's estimate that this token and all before it are accepted, or None: it has none.
    """

    tokens: Tensor
    size: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None


class Verdict(NamedTuple):
    """What verification made of a draft: the accepted draft tokens and one of the target's own behind them.

    tokens: [B,K+1] int64, valid up to count; count: [B] int64, 1 .. K+1; so count - 1 drafted tokens were accepted.
    """

    tokens: Tensor
    count: Tensor  # type: ignore[assignment]
