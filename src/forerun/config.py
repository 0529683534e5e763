"""The engine's and the drafters' settings. The keys of Speculation are those of vLLM's --speculative-config, with the
same meanings, so that a configuration moves over unchanged. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.types import SettingError, require

METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model", "prediction")
NGRAM_DEFAULT = 5  # vLLM's: both look-up lengths unset means 5 and 5


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made. Build it with `parse`, which fills the defaults in; `effective` reads them back.

    num_speculative_tokens: at most so many tokens are drafted a row and step (k).
    ngram: prompt_lookup_min .. prompt_lookup_max is the length of the suffix looked up; one unset mirrors the other.
    suffix: the four suffix_decoding_* settings; suffix_decoding_max_cached_requests 0 turns the shared tree off.
    draft_model: model, and max_model_len if its context is to be shorter than its own; draft_sample_method
    greedy or probabilistic.
    rejection_sample_method: standard, or block (block verification; differs for drafts with probabilities only).
    num_speculative_tokens_per_batch_size: [[low, high, k], ...]: while low .. high sequences run, k (0: no drafts) instead.
    Raises SettingError.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | None = None
    max_model_len: int | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, f"give one of {', '.join(METHODS)}")
        k = self.num_speculative_tokens
        require(isinstance(k, int) and 1 <= k <= 64, "num_speculative_tokens", k, "give 1 to 64, for instance 4")
        if self.method in ("ngram", "ngram_gpu"):
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            low, high = (low or high or NGRAM_DEFAULT, high or low or NGRAM_DEFAULT) if low != 0 and high != 0 else (low, high)
            require(low is not None and low >= 1, "prompt_lookup_min", low, "give 1 or more, for instance 2")
            require(high is not None and high >= 1, "prompt_lookup_max", high, "give 1 or more, for instance 5")
            assert low is not None and high is not None
            require(low <= high, "prompt_lookup_min", low, f"give at most prompt_lookup_max ({high})")
            object.__setattr__(self, "prompt_lookup_min", low)
            object.__setattr__(self, "prompt_lookup_max", high)
        depth = self.suffix_decoding_max_tree_depth
        require(depth >= 2, "suffix_decoding_max_tree_depth", depth, "give 2 or more, for instance 24")
        cached = self.suffix_decoding_max_cached_requests
        require(cached >= 0, "suffix_decoding_max_cached_requests", cached, "give 0 (no shared tree) or more")
        factor = self.suffix_decoding_max_spec_factor
        require(factor > 0, "suffix_decoding_max_spec_factor", factor, "give more than 0, for instance 1.0")
        floor = self.suffix_decoding_min_token_prob
        require(0 <= floor <= 1, "suffix_decoding_min_token_prob", floor, "give 0 to 1, for instance 0.1")
        require(
            self.method != "draft_model" or bool(self.model),
            "model",
            self.model,
            "method draft_model needs the drafter's path or id",
        )
        require(
            self.draft_sample_method in ("greedy", "probabilistic"),
            "draft_sample_method",
            self.draft_sample_method,
            "give greedy or probabilistic",
        )
        require(
            self.rejection_sample_method in ("standard", "block"),
            "rejection_sample_method",
            self.rejection_sample_method,
            "give standard or block",
        )

        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is not None:
            remedy = (
                f"give [[low, high, k], ...] with 1 <= low <= high and 0 <= k <= num_speculative_tokens ({k}), "
                f"for instance [[1, 8, {k}], [9, 64, 0]]"
            )
            try:
                schedule = tuple((int(low), int(high), int(width)) for low, high, width in schedule)
            except (TypeError, ValueError):
                raise SettingError("num_speculative_tokens_per_batch_size", schedule, remedy) from None
            require(
                all(1 <= low <= high and 0 <= width <= k for low, high, width in schedule),
                "num_speculative_tokens_per_batch_size",
                schedule,
                remedy,
            )
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", schedule)

    # which settings each method reads; a setting given to a method that does not read it is an error, not ignored
    @staticmethod
    def keys_of(method: str) -> frozenset[str]:
        own = {
            "ngram": {"prompt_lookup_min", "prompt_lookup_max"},
            "ngram_gpu": {"prompt_lookup_min", "prompt_lookup_max"},
            "suffix": {f.name for f in dataclasses.fields(Speculation) if f.name.startswith("suffix_")},
            "draft_model": {"model", "max_model_len", "draft_sample_method"},
            "prediction": set(),
        }
        return frozenset(
            {"method", "num_speculative_tokens", "rejection_sample_method", "num_speculative_tokens_per_batch_size"}
            | own[method]
        )

    @classmethod
    def parse(cls, value: Speculation | Mapping[str, Any] | str | None) -> Speculation | None:
        """From a mapping or its JSON text; None stays None. The word ngram, suffix or prediction alone is that method
        with its defaults. Raises SettingError for unknown keys, keys that the method does not read, and bad values."""
        if value is None or isinstance(value, Speculation):
            return value
        if isinstance(value, str):
            if value == "none":
                return None
            text = value
            value = {"method": text} if text in METHODS else None
            if value is None:
                try:
                    value = json.loads(text)
                except json.JSONDecodeError as error:
                    raise SettingError(
                        "speculative_config",
                        text,
                        f'not JSON ({error}); for instance {{"method": "ngram", "num_speculative_tokens": 4}}',
                    ) from None
        require(
            isinstance(value, Mapping),
            "speculative_config",
            value,
            'give a mapping such as {"method": "ngram", "num_speculative_tokens": 4}',
        )
        given = dict(value)  # type: ignore[arg-type]
        known = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            close = difflib.get_close_matches(key, known, 1)
            require(
                key in known,
                key,
                given[key],
                f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are {', '.join(known)}",
            )
        method = given.get("method")
        require(method in METHODS, "method", method, f"give one of {', '.join(METHODS)}")
        for key in given:
            require(key in cls.keys_of(str(method)), key, given[key], f"method {method} does not read it; leave it out")
        if "num_speculative_tokens" not in given:
            # vLLM: suffix decoding sizes its own drafts, up to the depth of the tree
            given["num_speculative_tokens"] = given.get("suffix_decoding_max_tree_depth", 24) if method == "suffix" else 4
        return cls(**given)

    def effective(self) -> dict[str, Any]:
        """The settings in force for this method, defaults included."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k in self.keys_of(self.method)}


BUDGET = {"cpu": 2048, "cuda": 8192}  # max_num_batched_tokens where none is given


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    max_num_seqs: sequences that decode at once. max_num_batched_tokens: positions of one step, drafts included;
    None: 2048 on a CPU, 8192 on a GPU.
    max_model_len: None takes the model's. block_size: tokens of a KV page. kv_cache_tokens: tokens that the KV cache
    holds; None takes on a CPU max_num_seqs sequences of max_model_len, at most a quarter of the free memory, and on a GPU
    what weights, buffers and CUDA graphs leave of gpu_memory_utilization, the share of the GPU's memory that the engine may
    have in all (engines on one GPU: give each less).
    dtype: auto (the checkpoint's; bfloat16 on a CPU that multiplies it), float32, bfloat16 or float16.
    seed: seeds the requests that bring none. adaptive_drafts: draft no more than pays, by what steps cost and what became of
    earlier drafts (off: always as much as num_speculative_tokens allows; drawn drafts are never adapted on a CPU, so that
    a seed repeats them). Raises SettingError.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    adaptive_drafts: bool = True
    gpu_memory_utilization: float = 0.9
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        tokens = self.max_num_batched_tokens or BUDGET["cpu"]
        require(
            tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            tokens,
            f"give at least max_num_seqs ({self.max_num_seqs}): every sequence gets a token in each step",
        )
        require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "dtype",
            self.dtype,
            "give auto, float32, bfloat16 or float16",
        )
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "give auto, cpu or cuda")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "give 2 or more")
        require(1 <= self.max_num_seqs <= 1024, "max_num_seqs", self.max_num_seqs, "give 1 to 1024")
        require(self.block_size in (8, 16, 32, 64, 128), "block_size", self.block_size, "give 8, 16, 32, 64 or 128")
        k = self.speculation.num_speculative_tokens if self.speculation else 0
        require(
            tokens >= k + 1,
            "max_num_batched_tokens",
            tokens,
            f"give at least num_speculative_tokens + 1 ({k + 1})",
        )
        require(
            self.kv_cache_tokens is None or self.kv_cache_tokens >= self.block_size,
            "kv_cache_tokens",
            self.kv_cache_tokens,
            f"give at least one page ({self.block_size})",
        )
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", share, "give a share above 0 and at most 1, for instance 0.9")
