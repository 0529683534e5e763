"""/metrics of the server, beside what the requests got and what the engine counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.metrics import counters_of, kv_tokens_of
from forerun.llm import LLM
from tests.serving import Inside, wait_for
from tests.tiny import tiny_model

BODY = {"prompt": [1, 2, 3, 4, 5, 6] * 4, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    llm = LLM(
        tiny_model(tmp_path_factory.mktemp("tiny")), speculative_config="suffix", adaptive_drafts=False, max_num_seqs=2,
        kv_cache_tokens=4096,
    )  # fmt: skip
    inside = Inside(llm, metrics_names="vllm")
    for body in (BODY, BODY | {"n": 2}):  # the second drafts the first answer
        assert httpx.post(inside.url + "/v1/completions", json=body).status_code == 200
    assert httpx.post(inside.url + "/v1/completions", json=BODY | {"max_tokens": 100_000}).status_code == 400  # not counted
    yield inside
    inside.close()


def text(server: Inside) -> str:
    """The metrics once the engine has told of its last step."""

    def told() -> bool:
        last = server.client.metrics.snapshot
        return last is not None and last.totals == server.llm.stats

    wait_for(told)
    answer = httpx.get(server.url + "/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


def values(text: str) -> dict[tuple[str, Any], float]:
    """By name and labels without the model's."""
    found = {}
    for family in families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name")
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_metrics_are_the_engines_counts(server: Inside) -> None:
    found, totals = values(text(server)), server.llm.stats
    drafts = totals.drafts
    assert drafts.drafting_steps > 0 and drafts.accepted > 0
    one = {name: value for (name, labels), value in found.items() if not labels}
    assert one["forerun:generation_tokens_total"] == totals.output_tokens
    assert one["forerun:prefix_cache_queries_total"] == totals.queried_tokens
    assert one["forerun:prefix_cache_hits_total"] == totals.cached_tokens > 0
    assert one["forerun:num_requests_running"] == one["forerun:num_requests_waiting"] == one["forerun:kv_cache_usage_perc"] == 0
    assert one["forerun:spec_decode_num_drafts_total"] == drafts.drafting_steps
    assert one["forerun:spec_decode_num_draft_tokens_total"] == drafts.drafted
    assert one["forerun:spec_decode_num_accepted_tokens_total"] == drafts.accepted
    assert one["forerun:spec_decode_drafting_share"] == drafts.drafting_steps / drafts.steps
    for i, count in enumerate(drafts.accepted_at):
        assert found["forerun:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(i)),)] == count
    assert found["forerun:engine_step_seconds_total", (("part", "drafting"),)] == totals.draft_s > 0
    ended = {dict(labels)["finished_reason"]: v for (name, labels), v in found.items() if "request_success" in name}
    assert {reason: count for reason, count in ended.items() if count} == totals.finished


def test_each_request_is_observed_once(server: Inside) -> None:
    found = values(text(server))
    requests = sum(server.llm.stats.finished.values())
    assert requests >= 3
    for name in (
        "time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
        "request_time_per_output_token",
    ):  # fmt: skip
        assert found[f"forerun:{name}_seconds_count", ()] == requests, name
    assert found["forerun:prompt_tokens_total", ()] == requests * len(BODY["prompt"])  # type: ignore[arg-type]
    steps = server.llm.stats.drafts.steps
    assert found["forerun:inter_token_latency_seconds_count", ()] == steps  # the first token comes before the verify steps
    names = ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    queue, first, whole = (found[f"forerun:{name}_seconds_sum", ()] for name in names)
    assert 0 < queue <= first <= whole
    assert not server.client.metrics.under_way


def test_vllms_names_have_the_same_values(server: Inside) -> None:
    found = values(text(server))
    theirs = {key: value for key, value in found.items() if key[0].startswith("vllm:")}
    assert len(theirs) > 100
    for (name, labels), value in theirs.items():
        assert found[name.replace("vllm:", "forerun:"), labels] == value
    assert not any("drafting_share" in name or "speedup" in name for name, _ in theirs)


@pytest.mark.parametrize("dialect", ["vllm", "forerun-server"])
def test_the_instrument_reads_them(server: Inside, dialect: str) -> None:
    metrics = DIALECTS[dialect].metrics
    assert metrics is not None
    read = text(server)
    counters, totals = counters_of(metrics, read), server.llm.stats
    for field in metrics.counters:
        assert getattr(counters, field) is not None, field
    assert counters.drafts == totals.drafts.drafting_steps and counters.generation_tokens == totals.output_tokens
    assert counters.accepted_at == tuple(totals.drafts.accepted_at)
    assert kv_tokens_of(metrics, read) == server.llm.engine.kv_tokens


def test_the_dashboard_asks_for_metrics_that_there_are(server: Inside) -> None:
    """By the names of their samples, and with labels that these have. The estimated speed-up may not be known yet."""
    board = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text(encoding="utf-8"))
    there: dict[str, set[str]] = {"forerun:speculation_speedup": {"model_name"}}
    for family in families(text(server)):
        for sample in family.samples:
            there.setdefault(sample.name, set()).update(sample.labels)
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 12
    for query in asked:
        names = re.findall(r"forerun:\w+", query)
        assert names and set(names) <= set(there), query
        labels = set(re.findall(r"by \((\w+)\)", query)) | set(re.findall(r"(\w+)=~", query))
        assert all(labels <= there[name] for name in names), query
    assert "forerun:generation_tokens_total" in board["templating"]["list"][1]["query"]
