"""The wire: every figure of a scripted server comes back as scripted, and nothing that was not completed is credited."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import pytest

from forerun.bench.engines import metrics
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.endpoint import Piece, Request
from forerun.bench.engines.openai import Address, HttpEndpoint, Timeouts
from forerun.bench.engines.reply import Reply
from forerun.bench.engines.sse import EventReader
from forerun.bench.load import latency
from forerun.bench.load import sending as load
from forerun.bench.records import summary
from forerun.bench.records.record import Answer, Chunk, Counts, Load, ServerCounters
from forerun.engine.stats import DraftStats
from tests.mock_server import ENDINGS, MockServer, Script

CHAT = Request("a", 6, messages=({"role": "user", "content": "hello"},))
TEXT = Request("b", 6, text="hello")


def ask(script: Script, asked: Request = TEXT, dialect: str = "vllm", **address: Any) -> tuple[Answer, MockServer]:
    async def run() -> tuple[Answer, MockServer]:
        async with MockServer(lambda body: script) as server:
            where = Address(server.url, "target", DIALECTS[dialect], **address)
            async with HttpEndpoint(where) as endpoint:
                now = time.perf_counter()
                return load.answer_of(asked, await load.exchange(endpoint, asked, now, time.perf_counter), now), server

    return asyncio.run(run())


def answer(chunks: tuple[Chunk, ...], tokens: int | None, ids: tuple[int, ...] = ()) -> Answer:
    counts = Counts(0, 0, 0, 0, (), ())
    return Answer("x", 1, ids, "length", None, chunks[0].at_s, chunks[-1].at_s, counts, "t", tokens, chunks=chunks)


# definitions


def test_tpot_and_chunk_gaps_of_the_worked_examples() -> None:
    """Chunks of 1, 3, 2 tokens at 0, 30, 60 ms: 12 ms a token, gaps of 30 ms. Of 4 and 4 at 0 and 60 ms: 15 ms a token."""
    one = answer((Chunk(0.0, 1, 4), Chunk(0.03, 3, 9), Chunk(0.06, 2, 6)), 6)
    assert latency.tpot(one) == pytest.approx(0.012) and latency.chunk_gaps(one) == pytest.approx([0.03, 0.03])
    two = answer((Chunk(0.0, 4, 9), Chunk(0.06, 4, 9)), 8)
    assert latency.tpot(two) == pytest.approx(0.015) and latency.chunk_gaps(two) == pytest.approx([0.06])
    unknown = answer((Chunk(0.0, None, 9), Chunk(0.06, None, 9)), 5)
    assert latency.tpot(unknown) == pytest.approx(0.015), "without counts the first chunk is one token of the usage's five"
    assert latency.tpot(answer((Chunk(0.0, 4, 9),), 4)) is None
    failed = dataclasses.replace(one, failure="x")
    assert latency.tpot(failed) is None and latency.chunk_gaps(failed) == []


@pytest.mark.parametrize("asked", [CHAT, TEXT], ids=["chat", "completions"])
def test_a_stream_comes_back_as_scripted(asked: Request) -> None:
    got, server = ask(Script(chunks=((0.05, 1), (0.11, 3), (0.17, 2))), asked)
    assert not got.failed and got.tokens == 6 and got.finish_reason == "length" and got.prompt_tokens == 7
    assert got.token_ids == (100, 101, 102, 103, 104, 105) and got.text == "100 101 102 103 104 105 "
    assert [c.tokens for c in got.chunks] == [1, 3, 2] and [c.chars for c in got.chunks] == [4, 12, 8]
    for chunk, sent, due in zip(got.chunks, server.sent[0], (0.05, 0.11, 0.17), strict=True):
        assert chunk.at_s >= due, "nothing can arrive before it was due"
        assert chunk.at_s - got.sent_s >= sent - server.arrived[0] - 1e-4
    assert got.ttft_s == got.chunks[0].at_s and got.e2e_s == got.chunks[-1].at_s
    assert latency.tpot(got) == pytest.approx((got.e2e_s - got.ttft_s) / 5)


def test_what_is_asked_reaches_the_server() -> None:
    _, server = ask(Script(), dataclasses.replace(TEXT, ids=(5, 6), text=None, temperature=1.0, seed=3, ignore_eos=True),
                    headers={"Authorization": "Bearer k"}, body={"top_k": 7})
    (body,) = server.seen
    assert body["prompt"] == [5, 6] and body["temperature"] == 1.0 and body["seed"] == 3 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["return_token_ids"] is True and body["top_k"] == 7
    assert server.headers[0]["authorization"] == "Bearer k"
    _, plain = ask(Script(), dataclasses.replace(CHAT, ignore_eos=True, prediction="old", logprobs=2), dialect="openai")
    assert "ignore_eos" not in plain.seen[0] and "return_token_ids" not in plain.seen[0]
    assert plain.seen[0]["prediction"] == {"type": "content", "content": "old"} and plain.seen[0]["top_logprobs"] == 2


# failures

BAD = {
    "no-done": "without its end mark",
    "no-finish": "without a finish reason",
    "no-usage": "no usage",
    "drop": "connection dropped",
    "cut": "inside an event",
    "error-event": "error under HTTP 200: CUDA out of memory",
    "error-object": "error under HTTP 200: CUDA out of memory",
    "bare-error": "error under HTTP 200: CUDA out of memory",
    "not-json": "not JSON",
    "empty": "finish reason",
    "nothing": "an empty stream",
    "http-500": "HTTP 500: out of paper",
    "hang": "not finished after",
}


@pytest.mark.parametrize("ending", [e for e in ENDINGS if e != "done"])
@pytest.mark.parametrize("asked", [CHAT, TEXT], ids=["chat", "completions"])
def test_what_was_not_completed_is_a_failure_with_a_reason_and_no_tokens(ending: str, asked: Request) -> None:
    got, _ = ask(Script(ending=ending, ids=ending != "no-usage"), asked, timeouts=Timeouts(0.3 if ending == "hang" else 10.0))
    assert got.failed and got.failure is not None and BAD[ending] in got.failure
    assert got.tokens == 0 and got.token_ids == () and latency.tpot(got) is None


def test_a_server_that_is_not_there() -> None:
    async def run() -> Answer:
        async with HttpEndpoint(Address("http://127.0.0.1:9", "m", DIALECTS["openai"])) as endpoint:
            assert await endpoint.counters() is None
            return load.answer_of(TEXT, await load.exchange(endpoint, TEXT, 0.0, time.perf_counter), 0.0)

    got = asyncio.run(run())
    assert got.failed and "connection" in str(got.failure)


def test_an_answer_of_no_tokens_has_failed() -> None:
    got, _ = ask(Script(chunks=((0.0, 0),)))
    assert got.failed


# events


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_the_bytes_were_cut(size: int) -> None:
    text = b': hello\n\ndata: {"a": 1}\n\nevent: error\r\ndata: one\r\ndata: two\r\n\r\n'
    text += b'id: 4\ndata:x\n\n{"error": 1}\n\ndata: [DO'
    reader, events = EventReader(), []
    for i in range(0, len(text), size):
        events += reader.feed(text[i : i + size])
    assert [tuple(e) for e in events] == [
        ("message", b'{"a": 1}'), ("error", b"one\ntwo"), ("message", b"x"), ("message", b'{"error": 1}')
    ]
    assert reader.unfinished and not EventReader().unfinished


def read(*events: bytes, asked: Request = CHAT) -> list[Piece]:
    """The pieces of a stream of these events, the concluding one last."""
    reply, reader, pieces = Reply(dataclasses.replace(asked, max_tokens=100)), EventReader(), []
    for data in (*events, b"[DONE]"):
        pieces += [piece for event in reader.feed(b"data: " + data + b"\n\n") if (piece := reply.read(event, 1.0)) is not None]
    return [*pieces, reply.conclude(reader, 1.0)]


SAID = b'{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}'


def test_what_engines_add_is_read() -> None:
    llama = read(SAID, b'{"choices": [], "usage": {"completion_tokens": 20, "prompt_tokens": 3}, "timings": '
                 b'{"predicted_n": 20, "draft_n": 16, "draft_n_accepted": 9}}')[-1]
    assert llama.counts == Counts(10, 0, 16, 9, (), ()) and llama.prompt_tokens == 3
    chat = read(b'{"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -0.1, '
                b'"top_logprobs": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2.0}]}]}}]}', SAID, USED)
    assert chat[0].logprobs == (("a", -0.1, (("a", -0.1), ("b", -2.0))),)
    old = read(b'{"choices": [{"text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.1], '
               b'"top_logprobs": [{"b": -2.0, "a": -0.1}]}}]}', USED, asked=TEXT)
    assert old[0].logprobs == chat[0].logprobs


USED = b'{"choices": [], "usage": {"completion_tokens": 20}}'


def test_rejected_tokens_of_a_prediction_are_no_output() -> None:
    """The API counts them as output. 20 with 7 rejected are 13 delivered ones, of which 9 were accepted: 3 verify steps."""
    hosted = read(SAID, b'{"choices": [], "usage": {"completion_tokens": 20, "completion_tokens_details": '
                  b'{"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 7}}}')[-1]
    assert hosted.output_tokens == 13 and hosted.counts == Counts(3, 0, 16, 9, (), ())


def test_the_same_text_in_the_same_time_is_the_same_speed_whatever_was_rejected() -> None:
    """One server says that it rejected tokens of the prediction, the other was given none."""
    speeds = []
    for rejected in (0, 5):
        details = {"completion_tokens_details": {"rejected_prediction_tokens": rejected}}
        got, _ = ask(Script(ids=False, usage_off=rejected, usage_more=details), CHAT, dialect="openai")
        speeds.append(got.tokens)
        assert got.usage is not None and got.usage["completion_tokens"] == 6 + rejected
    assert speeds == [6, 6]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_that_streams_is_content(field: str) -> None:
    thought = json.dumps({"choices": [{"delta": {field: "hm"}, "finish_reason": None}]}).encode()
    first, _, last = read(thought, SAID, b'{"choices": [], "usage": {"completion_tokens": 20, "completion_tokens_details": '
                          b'{"reasoning_tokens": 15}}}')  # fmt: skip
    assert first.text == "hm" and (last.output_tokens, last.hidden_tokens) == (20, 0)


def test_reasoning_that_is_hidden_does_not_flatter_the_time_of_a_token() -> None:
    """Of 9,006 tokens the last 6 were streamed, at 0, 30 and 60 ms."""
    more = {"completion_tokens_details": {"reasoning_tokens": 9000}}
    got, _ = ask(Script(ids=False, usage_off=9000, usage_more=more), CHAT, dialect="openai")
    assert (got.tokens, got.hidden_tokens) == (9006, 9000) and not got.notes
    assert latency.tpot(got) == pytest.approx((got.e2e_s - got.ttft_s) / 5)
    assert summary.step_time([got], DraftStats(steps=9005)) is None, "those steps were before the first text"


@pytest.mark.parametrize("total", [None, 27, 42])
def test_reasoning_that_is_counted_beside_the_output_is_no_part_of_it(total: int | None) -> None:
    """Some servers count it beside completion_tokens; the total says so. Without one it is part of the output."""
    usage = {"prompt_tokens": 7, "completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": 15}}
    usage |= {} if total is None else {"total_tokens": total}
    last = read(SAID, json.dumps({"choices": [], "usage": usage}).encode())[-1]
    assert (last.output_tokens, last.hidden_tokens) == ((20, 0) if total == 42 else (20, 15))


def test_tool_calls_and_refusals_are_answers() -> None:
    call = {"tool_calls": [{"index": 0, "id": "call_7f", "function": {"name": "look", "arguments": '{"at": 1}'}}]}
    pieces = read(json.dumps({"choices": [{"delta": call, "finish_reason": "tool_calls"}]}).encode(), USED)
    assert pieces[0].text == 'look{"at": 1}' and pieces[0].finish_reason == "tool_calls" and pieces[-1].output_tokens == 20
    refused = read(b'{"choices": [{"delta": {"refusal": "I will not."}, "finish_reason": "stop"}]}', USED)
    assert refused[0].text == "I will not." and refused[-1].output_tokens == 20


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "?"])
def test_an_answer_that_was_broken_off_has_failed_and_says_so(reason: str) -> None:
    got, _ = ask(Script(reason=reason))
    assert got.failed and reason in str(got.failure) and got.tokens == 0


@pytest.mark.parametrize(("reason", "kept"), [("tool_calls", "tool_calls"), ("eos", "stop"), ("max_tokens", "length")])
def test_an_answer_that_was_ended_counts(reason: str, kept: str) -> None:
    got, _ = ask(Script(reason=reason))
    assert not got.failed and got.finish_reason == kept and got.tokens == 6


# counters

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b{}\\"c"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 4.8e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 11.0
vllm:request_queue_time_seconds_bucket{le="+Inf"} 4.0
vllm:request_queue_time_seconds_sum{engine="0"} 0.5
vllm:request_queue_time_seconds_count{engine="0"} 4.0
vllm:prefix_cache_hits_total{engine="0"} NaNsense
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="40208"} 1.0
"""


def test_counters_are_read_by_name_and_summed_over_labels() -> None:
    got = metrics.counters_of(DIALECTS["vllm"].metrics, VLLM)
    assert got == ServerCounters(drafts=12.0, draft_tokens=48.0, accepted_tokens=30.0, accepted_at=(11.0, 9.0), queue_s=0.5,
                                 queue_count=4.0)
    assert metrics.kv_tokens_of(DIALECTS["vllm"].metrics, VLLM) == 40208
    assert metrics.kv_tokens_of(DIALECTS["sglang"].metrics, "sglang:max_total_num_tokens{model_name=\"m\"} 30832.0\n") == 30832
    assert metrics.kv_tokens_of(DIALECTS["vllm"].metrics, "") is None
    assert metrics.kv_tokens_of(DIALECTS["openai"].metrics, VLLM) is None
    trt = "trtllm_spec_decode_num_draft_tokens_total 8.0\ntrtllm_spec_decode_num_accepted_tokens_total{a=\"b\"} 3.0\n"
    assert metrics.counters_of(DIALECTS["tensorrt-llm"].metrics, trt) == ServerCounters(draft_tokens=8.0, accepted_tokens=3.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-3", "1e999", "x", "", "²"])
@pytest.mark.parametrize("place", ["value", "position", "label"])
def test_values_that_no_counter_can_have_are_left_out(value: str, place: str) -> None:
    """And nothing breaks on them, then or when differences are taken."""
    good = 'vllm:spec_decode_num_drafts_total{a="x\u2028y\u0085z"} 3.0\n'
    bad = {
        "value": f"vllm:spec_decode_num_drafts_total {value}\nvllm:prefix_cache_hits_total {value}\n",
        "position": f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{value}"}} 2.0\n',
        "label": f'vllm:cache_config_info{{kv_cache_size_tokens="{value}"}} 1.0\n',
    }[place]
    got = metrics.counters_of(DIALECTS["vllm"].metrics, bad + good)
    assert got == ServerCounters(drafts=3.0)
    assert metrics.kv_tokens_of(DIALECTS["vllm"].metrics, bad + good) is None
    assert metrics.kv_tokens_of(DIALECTS["sglang"].metrics, f"sglang:max_total_num_tokens {value}\n") is None
    assert metrics.difference(got, got) is not None


def test_differences_of_counters() -> None:
    before = ServerCounters(drafts=1.0, accepted_at=(1.0,))
    after = ServerCounters(drafts=4.0, accepted_at=(3.0, 2.0), preemptions=1.0)
    assert metrics.difference(before, after) == ServerCounters(drafts=3.0, accepted_at=(2.0, 2.0), preemptions=1.0)
    assert metrics.difference(after, before) is None, "a counter that falls means another server"


def test_facts_and_counters_over_http() -> None:
    async def run() -> None:
        async with (
            MockServer(lambda body: Script(counted=(3, 9, 4, (2, 1, 1)))) as server,
            HttpEndpoint(Address(server.url + "/v1/", "target", DIALECTS["vllm"])) as endpoint,
        ):
            facts = await endpoint.facts()
            assert (facts.engine, facts.version, facts.kv_tokens, facts.url) == ("vllm", "9.9", 4096, server.url)
            before = await endpoint.counters()
            await load.drive(endpoint, [TEXT, CHAT], Load(concurrency=2, requests=2), None)
            after = await endpoint.counters()
            assert before is not None and after is not None
            grown = metrics.difference(before, after)
            assert grown is not None and (grown.drafts, grown.draft_tokens, grown.accepted_tokens) == (6, 18, 8)
            assert grown.accepted_at == (4, 2, 2) and grown.generation_tokens == 12 and grown.prompt_tokens == 14

    asyncio.run(run())
