"""What each server offers beyond the OpenAI API: fields of requests, and where its version and its counters are. Data only.

The names are those that the engines document: vLLM 0.31 to 0.33, SGLang 0.5, TensorRT-LLM 1.x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Metrics:
    """An engine's Prometheus metrics at `path`. counters: a field of ServerCounters -> a metric, summed over its labels.
    by_position: a metric with the label `position`. kv_tokens: the metric that holds the capacity of the KV cache, as its value
    or, with a second name, in that label."""

    path: str = "/metrics"
    counters: Mapping[str, str] = field(default_factory=dict)
    by_position: str | None = None
    kv_tokens: tuple[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """owner: a regular expression for `owned_by` in the server's list of models. ignore_eos: answers can be made to go on
    past the end-of-text token. ids: a prompt may be token ids. extra: fields of every request. version: (path, key) of a GET.
    salt: the field that keeps prefix caches apart. flush: the path of a POST that empties the prefix cache."""

    name: str
    owner: str | None = None
    ignore_eos: bool = True
    ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: tuple[str, str] | None = None
    salt: str | None = None
    flush: str | None = None
    metrics: Metrics | None = None


def _histogram(name: str, metric: str) -> dict[str, str]:
    return {f"{name}_s": f"{metric}_sum", f"{name}_count": f"{metric}_count"}


VLLM = Metrics(
    counters={
        "drafts": "vllm:spec_decode_num_drafts_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "preemptions": "vllm:num_preemptions_total",
        **_histogram("queue", "vllm:request_queue_time_seconds"),
        **_histogram("prefill", "vllm:request_prefill_time_seconds"),
        **_histogram("decode", "vllm:request_decode_time_seconds"),
    },
    by_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    kv_tokens=("vllm:cache_config_info", "kv_cache_size_tokens"),
)
SGLANG = Metrics(
    counters={
        "prompt_tokens": "sglang:prompt_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
        **_histogram("queue", "sglang:queue_time_seconds"),
    },
    kv_tokens=("sglang:max_total_num_tokens", None),
)
TENSORRT_LLM = Metrics(
    "/prometheus/metrics",
    {
        "draft_tokens": "trtllm_spec_decode_num_draft_tokens_total",
        "accepted_tokens": "trtllm_spec_decode_num_accepted_tokens_total",
        **_histogram("queue", "trtllm_request_queue_time_seconds"),
    },
)
LLAMACPP = Metrics(
    counters={
        "prompt_tokens": "llamacpp:prompt_tokens_total",
        "generation_tokens": "llamacpp:tokens_predicted_total",
        "prefill_s": "llamacpp:prompt_seconds_total",
        "decode_s": "llamacpp:tokens_predicted_seconds_total",
    }
)

DIALECTS = {
    d.name: d
    for d in (
        Dialect(
            "vllm", "vllm", extra={"return_token_ids": True}, version=("/version", "version"), salt="cache_salt", metrics=VLLM
        ),
        Dialect(
            "llamacpp", r"llama\.?cpp", extra={"cache_prompt": False}, version=("/props", "build_info"), metrics=LLAMACPP
        ),
        Dialect("sglang", "sglang", version=("/server_info", "version"), flush="/flush_cache", metrics=SGLANG),
        Dialect("tensorrt-llm", ".*tensorrt.*", version=("/version", "version"), metrics=TENSORRT_LLM),
        Dialect("openai", ignore_eos=False, ids=False),
    )
}  # fmt: skip
