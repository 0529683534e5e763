"""The Prometheus metrics of the server. What the engine counts comes from its last snapshot, which costs the engine nothing.
The times of requests are observed here, once for each event of a step. docs/server.md lists all of them.

Most have the meaning that vLLM gives to those of the same name. The others (Metrics._own) are about drafting.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from forerun.engine.stats import EngineSnapshot, EngineStats
from forerun.server.forms import Live
from forerun.types import Event, Request

PREFIX, VLLM = "forerun:", "vllm:"
REASONS = ("stop", "length", "abort", "error")
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)  # seconds
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)  # seconds
TIMES = {  # seconds; name: what it is, buckets
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", LONG),
    "inter_token_latency_seconds": ("Between two steps that gave tokens to a request; a step may give several.", SHORT),
    "request_time_per_output_token_seconds": ("From the first token to the last, over the tokens after the first.", SHORT),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", LONG),
    "request_queue_time_seconds": ("From the arrival of a request in the engine to its first admission.", LONG),
    "request_prefill_time_seconds": ("From the first admission of a request to its first token.", LONG),
    "request_decode_time_seconds": ("From the first token of a request to its end.", LONG),
}
PARTS = {"drafting": "draft_s", "forward": "forward_s", "verifying": "verify_s", "waiting": "wait_s", "coordinating": "other_s"}
LABEL = "model_name"
SHOWN = 50  # requests on the page


class _Live:
    """A request under way. arrived, first, last: perf_counter seconds of its arrival, first and last token; tokens: so far."""

    __slots__ = ("arrived", "first", "last", "prompt", "tokens")

    def __init__(self, prompt: int) -> None:
        self.prompt, self.arrived = prompt, time.perf_counter()
        self.first = self.last = 0.0
        self.tokens = 0


class Metrics:
    """snapshot: the engine's last, None before the first."""

    def __init__(self) -> None:
        self.snapshot: EngineSnapshot | None = None
        self._live: dict[str, _Live] = {}
        self._observed = CollectorRegistry()
        self._times = {
            name: Histogram(PREFIX + name, what, registry=self._observed, buckets=buckets)
            for name, (what, buckets) in TIMES.items()
        }
        self._prompt = Counter(PREFIX + "prompt_tokens", "Tokens of prompts that are in the KV cache.", registry=self._observed)

    @property
    def under_way(self) -> int:
        """Requests that are observed and have not ended."""
        return len(self._live)

    def submitted(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._live[request.id] = _Live(len(request.prompt_ids))

    def forget(self, ids: Iterable[str]) -> None:
        """These requests were refused or abandoned."""
        for name in ids:
            self._live.pop(name, None)

    def observe(self, at: float, events: Sequence[Event]) -> None:
        """Take what one step did. at: when, in perf_counter seconds."""
        times = self._times
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if event.tokens:
                if live.first:
                    times["inter_token_latency_seconds"].observe(at - live.last)
                else:
                    live.first = at
                    times["time_to_first_token_seconds"].observe(at - live.arrived)
                    self._prompt.inc(live.prompt)
                live.last = at
                live.tokens += len(event.tokens)
            if event.finish_reason is not None:
                del self._live[event.request_id]
                self._ended(live, at, event)

    def _ended(self, live: _Live, at: float, event: Event) -> None:
        times, stats = self._times, event.stats
        times["e2e_request_latency_seconds"].observe(at - live.arrived)
        if stats is None:
            return
        times["request_queue_time_seconds"].observe(stats.queued_s)
        times["request_prefill_time_seconds"].observe(stats.prefill_s)
        times["request_decode_time_seconds"].observe(stats.decode_s)
        if stats.output_tokens > 1:
            each = (live.last - live.first) / (stats.output_tokens - 1)
            times["request_time_per_output_token_seconds"].observe(each)

    def live(self, model: str) -> Live:
        """What the page at / shows: the engine's last snapshot, and up to SHOWN requests under way, the oldest first."""
        now, at = self.snapshot, time.perf_counter()
        totals = now.totals if now else EngineStats()
        drafts = totals.drafts
        return {
            "time": at, "model": model, "running": now.running if now else 0, "waiting": now.waiting if now else 0,
            "kv_used": now.kv_used if now else 0, "kv_tokens": now.kv_tokens if now else 0,
            "output_tokens": totals.output_tokens, "verify_steps": drafts.steps, "drafting_steps": drafts.drafting_steps,
            "drafted": drafts.drafted, "accepted": drafts.accepted, "drafted_by_position": list(drafts.drafted_at),
            "accepted_by_position": list(drafts.accepted_at), "speedup": now.speedup if now else None,
            "requests": [
                {"id": name, "prompt_tokens": one.prompt, "output_tokens": one.tokens, "seconds": at - one.arrived}
                for name, one in islice(self._live.items(), SHOWN)
            ],
        }  # fmt: skip

    def text(self, model: str, kv_tokens: int, names: str) -> bytes:
        """All metrics, in Prometheus' text format. model: the label model_name. kv_tokens: capacity of the KV cache.
        names: ServerSettings.metrics_names; "vllm" adds those that vLLM has under its names."""
        registry = CollectorRegistry()
        shared, own = list(self._shared(kv_tokens)), list(self._own())
        metrics = [_named(metric, PREFIX, model) for metric in (*shared, *own)]
        if names == "vllm":
            metrics += [_named(metric, VLLM, model) for metric in shared]
        registry.register(_Given(metrics))
        return generate_latest(registry)

    def _shared(self, kv_tokens: int) -> Iterator[Metric]:
        yield from self._observed.collect()
        now = self.snapshot
        totals = now.totals if now else EngineStats()
        drafts = totals.drafts
        yield _gauge("num_requests_running", "Requests with a slot.", now.running if now else 0)
        yield _gauge("num_requests_waiting", "Requests without a slot.", now.waiting if now else 0)
        yield _gauge("kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", now.kv_used / now.kv_tokens if now else 0)
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache.", labels=["kv_cache_size_tokens"])
        cache.add_metric([str(kv_tokens)], 1)
        yield cache
        yield _counter("generation_tokens", "Tokens of answers.", totals.output_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.queried_tokens)
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache.", totals.cached_tokens)
        yield _counter("num_preemptions", "How often a request lost its slot.", totals.preemptions)
        ended = CounterMetricFamily(PREFIX + "request_success", "Requests that ended.", labels=["finished_reason"])
        for reason in dict.fromkeys((*REASONS, *totals.finished)):
            ended.add_metric([reason], totals.finished.get(reason, 0))
        yield ended
        yield _counter("spec_decode_num_drafts", "Verify steps of a request with a draft.", drafts.drafting_steps)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", drafts.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", drafts.accepted)
        where = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", labels=["position"]
        )
        for i, count in enumerate(drafts.accepted_at):
            where.add_metric([str(i)], count)
        yield where

    def _own(self) -> Iterator[Metric]:
        now = self.snapshot
        totals = now.totals if now else EngineStats()
        drafts = totals.drafts
        yield _counter("spec_decode_num_steps", "Verify steps of a request, with a draft or without.", drafts.steps)
        share = drafts.drafting_steps / drafts.steps if drafts.steps else 0
        yield _gauge("spec_decode_drafting_share", "Share of these steps with a draft, since the start.", share)
        where = CounterMetricFamily(
            PREFIX + "spec_decode_num_draft_tokens_per_pos", "Verified draft tokens by position.", labels=["position"]
        )
        for i, count in enumerate(drafts.drafted_at):
            where.add_metric([str(i)], count)
        yield where
        yield _counter("engine_steps", "Steps of the engine.", totals.steps)
        parts = CounterMetricFamily(PREFIX + "engine_step_seconds", "The host's time in steps, by part.", labels=["part"])
        for part, name in PARTS.items():
            parts.add_metric([part], getattr(totals, name))
        yield parts
        divided = now.divided if now else True
        yield _gauge("engine_step_seconds_divided", "1: drafting and verifying are timed apart from the rest.", int(divided))
        speedup = GaugeMetricFamily(
            PREFIX + "speculation_speedup", "Speed over plain decoding, estimated over the last steps; absent if not known."
        )
        if now and now.speedup is not None:
            speedup.add_metric([], now.speedup)
        yield speedup


class _Given(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


def _named(metric: Metric, prefix: str, model: str) -> Metric:
    """It with this prefix and the label of the model. The _created samples are left out."""
    found = Metric(prefix + metric.name.removeprefix(PREFIX), metric.documentation, metric.type)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            name = prefix + sample.name.removeprefix(PREFIX)
            found.samples.append(Sample(name, {LABEL: model, **sample.labels}, sample.value))
    return found


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, what, value=value)
