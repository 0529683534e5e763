"""What servers count, from their Prometheus metrics: the text format, and each engine's own names. Knows no HTTP.

Names as the engines document them: vLLM 0.31 to 0.33, SGLang 0.5, TensorRT-LLM 1.x. A counter never falls while a server runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from forerun.bench.records.record import ServerCounters

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_POSITION = re.compile(r"[0-9]{1,3}")
MOST = 1 << 53  # no counter is larger
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of the Prometheus text format; lines that are none are left out, and values that no counter can have."""
    samples = []
    for line in text.split("\n"):  # a label may hold other characters that end a line elsewhere
        match = _LINE.match(line) if not line.startswith("#") else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if 0 <= value <= MOST:
            samples.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return samples


@dataclass(frozen=True, slots=True)
class Names:
    """Where an engine's counters are. counters: field of ServerCounters -> name of the metric, summed over its labels.
    by_position: metric with a label `position`. kv_tokens: (metric, label) of an information metric, or a gauge without one."""

    path: str
    counters: Mapping[str, str]
    by_position: str | None = None
    kv_tokens: tuple[str, str | None] | None = None


def _histogram(field: str, name: str) -> dict[str, str]:
    return {f"{field}_s": f"{name}_sum", f"{field}_count": f"{name}_count"}


READERS = {
    "vllm": Names(
        "/metrics",
        {
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
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        ("vllm:cache_config_info", "kv_cache_size_tokens"),
    ),
    "sglang": Names(
        "/metrics",
        {
            "prompt_tokens": "sglang:prompt_tokens_total",
            "generation_tokens": "sglang:generation_tokens_total",
            "cached_tokens": "sglang:cached_tokens_total",
            **_histogram("queue", "sglang:queue_time_seconds"),
        },
        kv_tokens=("sglang:max_total_num_tokens", None),
    ),
    "tensorrt-llm": Names(
        "/prometheus/metrics",
        {
            "draft_tokens": "trtllm_spec_decode_num_draft_tokens_total",
            "accepted_tokens": "trtllm_spec_decode_num_accepted_tokens_total",
            **_histogram("queue", "trtllm_request_queue_time_seconds"),
        },
    ),
    "llamacpp": Names(
        "/metrics",
        {
            "prompt_tokens": "llamacpp:prompt_tokens_total",
            "generation_tokens": "llamacpp:tokens_predicted_total",
            "prefill_s": "llamacpp:prompt_seconds_total",
            "decode_s": "llamacpp:tokens_predicted_seconds_total",
        },
    ),
}


def counters_of(names: Names, text: str) -> ServerCounters:
    """What the server has counted; None for each counter that is not in the text."""
    found: dict[str, float] = {}
    wanted = {metric: field for field, metric in names.counters.items()}
    positions: dict[int, float] = {}
    for sample in parse(text):
        if sample.name in wanted:
            field = wanted[sample.name]
            found[field] = found.get(field, 0.0) + sample.value
        elif sample.name == names.by_position and _POSITION.fullmatch(sample.labels.get("position", "")):
            at = int(sample.labels["position"])
            positions[at] = positions.get(at, 0.0) + sample.value
    accepted_at = tuple(positions.get(i, 0.0) for i in range(max(positions, default=-1) + 1))
    return ServerCounters(accepted_at=accepted_at, **found)


def kv_tokens_of(engine: str, text: str) -> int | None:
    """How many tokens the KV cache holds, where the metrics say so."""
    place = READERS[engine].kv_tokens if engine in READERS else None
    if place is None:
        return None
    metric, label = place
    for sample in parse(text):
        if sample.name == metric:
            try:
                value = sample.value if label is None else float(sample.labels.get(label, ""))
            except ValueError:
                continue
            if 0 <= value <= MOST:
                return int(value)
    return None


def difference(before: ServerCounters, after: ServerCounters) -> ServerCounters | None:
    """What was counted in between; None if a counter fell, which means that the server was started anew."""
    grown: dict[str, float | None] = {}
    for field in dataclasses.fields(ServerCounters):
        if field.name == "accepted_at":
            continue
        a, b = getattr(before, field.name), getattr(after, field.name)
        grown[field.name] = None if a is None and b is None else (b or 0.0) - (a or 0.0)
    width = max(len(before.accepted_at), len(after.accepted_at))
    at = [_at(after, i) - _at(before, i) for i in range(width)]
    if any(v is not None and v < -1e-9 for v in grown.values()) or any(v < 0 for v in at):
        return None
    return ServerCounters(accepted_at=tuple(at), **grown)


def _at(counters: ServerCounters, position: int) -> float:
    return counters.accepted_at[position] if position < len(counters.accepted_at) else 0.0
