"""The settings of the engine and of the drafters. The keys of Speculation and their meanings are those of vLLM's
--speculative-config, so a configuration for vLLM works unchanged. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.checks import (
    LARGEST,
    Choice,
    Flag,
    Number,
    Seed,
    SettingError,
    Text,
    Whole,
    alternatives,
    convert,
    require,
    required,
    setting,
    several,
    whole,
)

HEADS = ("eagle", "eagle3", "mtp", "dflash")  # learned drafters that read the target's hidden states
METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model", "prediction", *HEADS)
NGRAM_DEFAULT = 5  # as in vLLM, if neither look-up length is set
MOST_DRAFTED = 64  # num_speculative_tokens at most
MOST_SEQUENCES = 1024  # max_num_seqs at most
CACHED = 8192  # an example of kv_cache_tokens
DTYPE = Choice(("auto", "float32", "bfloat16", "float16"))
QUANTIZATION = Choice(("auto", "int8", "int4"))
DEVICE = Choice(("auto", "cpu", "cuda"))
BLOCK_SIZES = (8, 16, 32, 64, 128)
DEPTH = Whole(2, 1024, 24)
APART = "[[1, 8, 1], [9, 64, 0]]"
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def known_method(name: str, value: Any, also: str = "") -> str:
    """The value if it is a method. also: an addition to the message. Raises SettingError."""
    word = value if isinstance(value, str) else ""
    require(word in METHODS, name, value, f"give {alternatives(METHODS)}{also}")
    return METHODS[METHODS.index(word)]


def model_name(name: str, value: Any) -> str:
    """A model's folder, file or id as a text. Raises SettingError."""
    return Text("smollm2-135m-instruct")(name, str(value) if isinstance(value, Path) else value)


def needs_model(method: str) -> str:
    """The message for a method without a drafter."""
    return f"method {method} needs the drafter's path or id, for instance owner/name"


def _block_size(name: str, value: Any) -> int:
    found = whole(value)
    require(found in BLOCK_SIZES, name, value, f"give {alternatives(map(str, BLOCK_SIZES))}")
    assert found is not None
    return found


def _schedule(name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
    """num_speculative_tokens_per_batch_size, ordered by batch size."""
    remedy = f"give [[low, high, k], ...] with 1 <= low <= high and k of 0 or more, for instance {APART}"
    ranges = []
    for one in several(name, value, remedy):
        numbers = [whole(number) for number in several(name, one, remedy)]
        found = [number for number in numbers if number is not None and 0 <= number <= LARGEST]
        require(len(numbers) == len(found) == 3 and 1 <= found[0] <= found[1], name, value, remedy)
        ranges.append((found[0], found[1], found[2]))
    require(bool(ranges), name, value, remedy)
    ranges.sort()
    for (_, before, _), (low, _, _) in itertools.pairwise(ranges):
        require(before < low, name, value, f"two ranges hold batch size {low}; give each size once, for instance {APART}")
    return tuple(ranges)


def _unread(method: str) -> str:
    return f"method {method} does not read it; leave it out"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made. `parse` builds it and fills the defaults in; `effective` returns the values in force.

    num_speculative_tokens: the most tokens that are drafted for a row in a step (k).
    ngram: the suffix looked up has prompt_lookup_min .. prompt_lookup_max tokens; if one is unset, it takes the other's value.
    suffix: the four suffix_decoding_* settings; suffix_decoding_max_cached_requests 0 turns the shared tree off.
    draft_model: model; max_model_len, to shorten its context; draft_sample_method, greedy or probabilistic.
    eagle, eagle3, mtp, dflash: model, the head's checkpoint; draft_sample_method. If either prompt_lookup_* is set, the look-up
    of ngram drafts beside the head: for each row and step the one that is expected to bring more tokens drafts.
    model None: the drafter that comes with Forerun for the target (models/shipped.py); mtp: otherwise the target's own modules.
    rejection_sample_method: standard, or block (block verification); it makes a difference for drafts with probabilities only.
    num_speculative_tokens_per_batch_size: [[low, high, k], ...]; k applies while low .. high sequences run (0: no drafts).
    checks.py says how values are converted. A setting that the method does not read is an error. Raises SettingError.
    """

    method: str = required(known_method)
    num_speculative_tokens: int = required(Whole(1, MOST_DRAFTED, 4))
    prompt_lookup_min: int | None = setting(None, Whole(1, 64, 1))
    prompt_lookup_max: int | None = setting(None, Whole(1, 64, 5))
    suffix_decoding_max_tree_depth: int = setting(24, DEPTH)
    suffix_decoding_max_cached_requests: int = setting(10000, Whole(0, LARGEST, 10000, " (0: no shared tree)"))
    suffix_decoding_max_spec_factor: float = setting(1.0, Number(0, 100, 1.0, above=True))
    suffix_decoding_min_token_prob: float = setting(0.1, Number(0, 1, 0.1))
    model: str | None = setting(None, model_name)
    max_model_len: int | None = setting(None, Whole(2, LARGEST, 2048))
    draft_sample_method: str = setting("greedy", Choice(("greedy", "probabilistic")))
    rejection_sample_method: str = setting("standard", Choice(("standard", "block")))
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = setting(None, _schedule)

    def __post_init__(self) -> None:
        convert(self)
        read, k = self.keys_of(self.method), self.num_speculative_tokens
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(field.name in read or value == field.default, field.name, value, _unread(self.method))
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if "prompt_lookup_min" in read and (self.method not in HEADS or low or high):
            low, high = low or high or NGRAM_DEFAULT, high or low or NGRAM_DEFAULT
            require(low <= high, "prompt_lookup_min", low, f"give at most prompt_lookup_max, for instance {high}")
            object.__setattr__(self, "prompt_lookup_min", low)
            object.__setattr__(self, "prompt_lookup_max", high)
        require(self.method != "eagle" or self.model is not None, "model", None, needs_model(self.method))
        schedule = self.num_speculative_tokens_per_batch_size or ()
        over = [one for one in schedule if one[2] > k]
        remedy = f"k is at most num_speculative_tokens ({k}); give for instance [[1, 8, {k}], [9, 64, 0]]"
        require(not over, "num_speculative_tokens_per_batch_size", over, remedy)

    @staticmethod
    def keys_of(method: str) -> frozenset[str]:
        """The settings that a method reads. Any other one given with it is an error."""
        own = {
            "ngram": {"prompt_lookup_min", "prompt_lookup_max"},
            "ngram_gpu": {"prompt_lookup_min", "prompt_lookup_max"},
            "suffix": {f.name for f in dataclasses.fields(Speculation) if f.name.startswith("suffix_")},
            "draft_model": {"model", "max_model_len", "draft_sample_method"},
            "prediction": set(),
            **{head: {"model", "draft_sample_method", "prompt_lookup_min", "prompt_lookup_max"} for head in HEADS},
        }
        return frozenset(
            {"method", "num_speculative_tokens", "rejection_sample_method", "num_speculative_tokens_per_batch_size"}
            | own[method]
        )

    @classmethod
    def parse(cls, value: Speculation | Mapping[str, Any] | str | None) -> Speculation | None:
        """Speculation from a mapping or its JSON text; None stays None. The name of a method alone (ngram, suffix, prediction)
        means the method with its defaults. Raises SettingError for unknown keys, keys that the method does not read, and bad
        values."""
        if value is None or isinstance(value, Speculation):
            return value
        given = _from_text(value) if isinstance(value, str) else value
        if given is None:
            return None
        require(isinstance(given, Mapping), "speculative_config", value, f"give a mapping, for instance {EXAMPLE}")
        assert isinstance(given, Mapping)
        known = [f.name for f in dataclasses.fields(cls)]
        for key, one in given.items():
            close = difflib.get_close_matches(str(key), known, 1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}; give for instance {EXAMPLE}"
            require(key in known, str(key), one, f"unknown key; {remedy}")
        settings = {key: one for key, one in given.items() if one is not None}
        method = known_method("method", settings.get("method"))
        for key, one in settings.items():
            require(key in cls.keys_of(method), key, one, _unread(method))
        if "num_speculative_tokens" not in settings:
            settings["num_speculative_tokens"] = 4
            if method == "suffix":  # vLLM: suffix decoding sizes its own drafts, up to the depth of the tree
                name = "suffix_decoding_max_tree_depth"
                depth = DEPTH(name, settings.get(name, 24))
                settings["num_speculative_tokens"] = min(depth, MOST_DRAFTED)
        return cls(**settings)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of the drafters that these settings load: the method, and ngram if a look-up drafts beside a head."""
        return (self.method, "ngram") if self.method in HEADS and self.prompt_lookup_min else (self.method,)

    def effective(self) -> dict[str, Any]:
        """The settings that this method reads, with the values in force."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k in self.keys_of(self.method)}


def _from_text(text: str) -> Any:
    """The value of a JSON text; None for the word none; a mapping for the name of a method."""
    word = text.strip()
    if word == "none":
        return None
    if not word.startswith(("{", "[", '"')):
        return {"method": known_method("speculative_config", word, f" alone, or JSON such as {EXAMPLE}")}
    try:
        return json.loads(word)
    except (ValueError, RecursionError) as error:
        raise SettingError("speculative_config", text, f"not JSON ({error}); give for instance {EXAMPLE}") from None


BUDGET = {"cpu": 2048, "cuda": 8192}  # the default of max_num_batched_tokens


def _speculation(name: str, value: Any) -> Speculation | None:
    return Speculation.parse(value)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    dtype: auto, float32, bfloat16 or float16: of weights, activations and KV cache. auto: the checkpoint's, and on a CPU with
    AVX2 bfloat16 for 16 bits; on a CPU the matrices of a GGUF file stay in its blocks, and the rest counts as 16 bits.
    quantization: auto: weights as dtype says; int8 or int4: a checkpoint of 16 bits or more is quantised while it loads, in
    blocks of 32 (Q8_0 or Q4_0 of GGUF), on a CPU; a drafter's model too.
    device: auto, cpu or cuda. max_model_len: the longest context in tokens; None: the model's, on a CPU no
    more than fits into the default KV cache. max_num_seqs: sequences that decode at once. max_num_batched_tokens:
    positions of one step, drafts included; None: 2048 on a CPU, 8192 on a GPU. block_size: tokens of a KV page.
    kv_cache_tokens: capacity of the KV cache in tokens. None on a CPU: max_num_seqs sequences of max_model_len, but at most a
    quarter of the memory that this process can still get. None on a GPU: what weights, buffers and CUDA graphs leave of the
    engine's share.
    gpu_memory_utilization: the engine's share of the GPU's memory, 0 .. 1; several engines on one GPU need smaller shares.
    enable_prefix_caching: reuse the keys and values of equal prefixes. seed: for requests without a seed.
    adaptive_drafts: verify the drafts that are expected to give the most tokens a second; off: always full drafts. Drawn
    drafts always have their full length, so that a seed repeats its tokens. speculation: anything that Speculation.parse takes.
    checks.py says how values are converted. Raises SettingError.
    """

    dtype: str = setting("auto", DTYPE)
    quantization: str = setting("auto", QUANTIZATION)
    device: str = setting("auto", DEVICE)
    max_model_len: int | None = setting(None, Whole(2, LARGEST, 2048, ", or None for the model's"))
    max_num_seqs: int = setting(32, Whole(1, MOST_SEQUENCES, 32))
    max_num_batched_tokens: int | None = setting(None, Whole(1, LARGEST, 2048, ", or None for the device's default"))
    block_size: int = setting(16, _block_size)
    kv_cache_tokens: int | None = setting(None, Whole(1, 2**40, CACHED, ", or None for the default"))
    enable_prefix_caching: bool = setting(True, Flag())
    seed: int = setting(0, Seed())
    adaptive_drafts: bool = setting(True, Flag())
    gpu_memory_utilization: float = setting(0.9, Number(0, 1, 0.9, above=True))
    speculation: Speculation | None = setting(None, _speculation)

    def __post_init__(self) -> None:
        convert(self)
        budget, seqs, page = self.max_num_batched_tokens, self.max_num_seqs, self.block_size
        k = self.speculation.num_speculative_tokens if self.speculation else 0
        least = max(seqs, k + 1)
        why = f"each of max_num_seqs={seqs} sequences gets a token in every step; lower that, or"
        if k >= seqs:
            why = f"a step holds a draft of num_speculative_tokens={k} and one token more; lower that, or"
        enough = budget is None or budget >= least
        require(enough, "max_num_batched_tokens", budget, f"{why} give {least} or more")
        room = self.kv_cache_tokens
        remedy = f"a page (block_size) has {page} tokens; give {page} or more, for instance {CACHED}"
        require(room is None or room >= page, "kv_cache_tokens", room, remedy)
