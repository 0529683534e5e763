"""A server in trouble, in every way that servers have been. No answer makes a run fail or hang; what is credited is what was
delivered; what is not has its reason, and what was odd a note."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import re
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import run
from forerun.bench.engines.arms import BASELINE, Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.endpoint import Piece, Request
from forerun.bench.engines.openai import Address, HttpEndpoint, Timeouts
from forerun.bench.engines.reply import Reply
from forerun.bench.engines.sides import Running
from forerun.bench.engines.sse import Event, EventReader
from forerun.bench.load import latency
from forerun.bench.load import sending as load
from forerun.bench.load.patience import Patience
from forerun.bench.pages import words
from forerun.bench.records import record, summary
from forerun.bench.records.record import Answer, Load, Record, ServerCounters
from tests.mock_server import END, HEAD, MockServer, Script, chunk, events, response, stream
from tests.records import as_markdown, as_page, as_text
from tests.test_run import Quiet, Subject, plan

TOKENS = 6
"""The scripted truth: every answer that is complete has six tokens, and this text."""
WORDS = ("one ", "two three four ", "five six ")
TEXT = "".join(WORDS)
CHAT = Request("chat", 8, messages=({"role": "user", "content": "hello"},))
PLAIN = Request("text", 8, text="hello")
DONE = b"[DONE]"
USAGE = {"prompt_tokens": 7, "completion_tokens": TOKENS, "total_tokens": 7 + TOKENS}
USED = {"choices": [], "usage": USAGE}


def said(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


ONE, TWO, THREE = (said({"content": w}, "stop" if w == WORDS[-1] else None) for w in WORDS)
GOOD = (ONE, TWO, THREE, USED, DONE)
IDS = tuple(said({"content": w}, "stop" if w == WORDS[-1] else None, token_ids=ids)
            for w, ids in zip(WORDS, ([1], [2, 3, 4], [5, 6]), strict=True))  # fmt: skip


def called(finish: str | None = None, **function: str) -> dict[str, Any]:
    return said({"tool_calls": [{"index": 0, "id": "call_1", "function": function}]}, finish)


def used(**fields: Any) -> dict[str, Any]:
    """The last event, with other fields in its usage."""
    return {"choices": [], "usage": {**USAGE, **fields}}


def detailed(**fields: Any) -> dict[str, Any]:
    return {"completion_tokens_details": fields}


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What a server sends and what is to come of it: bytes, with seconds to wait between them, and how the connection ends.
    failure, note: what is said of it, as a regular expression and as a part. failure None: the answer is complete, with all six
    tokens. hidden: how many of them do not stream. chunks: with content."""

    sent: tuple[bytes | float, ...]
    failure: str | None = None
    note: str | None = None
    text: str = TEXT
    close: Any = "stays open"
    hidden: int = 0
    dialect: str = "openai"
    chunks: int = 3


def whole(*values: Any, **fields: Any) -> Trouble:
    return Trouble((stream(*values),), **fields)


EVENTS = events(*GOOD)
LINES = "a\u2028b\x85c\u2029"
UNPACKED = json.dumps(said({"content": "zwei drei ä€😀 "}), ensure_ascii=False).encode()
SPLIT = events(ONE, UNPACKED, THREE, USED, DONE)
DEEP = b'{"choices": ' + b"[" * 100_000
TROUBLE = {
    # answers that are complete, in unusual dress
    "nothing wrong": whole(*GOOD),
    "CR LF": Trouble((stream(*GOOD, end=b"\r\n"),)),
    "CR alone": Trouble((stream(*GOOD, end=b"\r"),)),
    "comments and other fields": Trouble((HEAD + chunk(b": ping\n\nid: 7\nretry: 10\n\n" + EVENTS.replace(b"\n\n",
        b"\n: x\n\n")) + END,)),
    "byte-order mark": Trouble((HEAD + chunk(b"\xef\xbb\xbf" + EVENTS) + END,)),
    "no space behind the colon": Trouble((HEAD + chunk(EVENTS.replace(b"data: ", b"data:")) + END,)),
    "event over two data lines": Trouble((HEAD + chunk(EVENTS.replace(b', "choices"', b',\ndata: "choices"')) + END,)),
    "one byte at a time": Trouble((HEAD, *[chunk(bytes([b])) for b in EVENTS], END), chunks=3),
    "split inside a character": Trouble((HEAD, *[chunk(SPLIT[i : i + 1]) for i in range(len(SPLIT))], END),
        text="one zwei drei ä€😀 five six "),
    "U+2028 and NEL in the text": whole(ONE, json.dumps(said({"content": LINES}), ensure_ascii=False).encode(), THREE, USED,
        DONE, text=f"one {LINES}five six "),
    "a line of 2 MB": whole({**ONE, "padding": "x" * (2 << 20)}, TWO, THREE, USED, DONE),
    "content in parts": whole(said({"content": [{"type": "text", "text": "one "}]}), TWO, THREE, USED, DONE),
    "thinking in parts": whole(said({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "one "}]}]}),
        TWO, THREE, USED, DONE),
    "a role first": whole(said({"role": "assistant", "content": ""}), *GOOD),
    "empty choices between": whole({"choices": []}, ONE, {"choices": []}, TWO, THREE, USED, DONE),
    "no choices at all": whole({"id": "x"}, ONE, {"prompt_filter_results": []}, TWO, THREE, USED, DONE),
    "usage on every chunk": whole(*({**e, "usage": {"prompt_tokens": 7, "completion_tokens": n}} for e, n in ((ONE, 1),
        (TWO, 4), (THREE, 6))), DONE),
    "usage null on every chunk": whole(*({**e, "usage": None} for e in (ONE, TWO, THREE)), USED, DONE),
    "usage twice": whole(ONE, TWO, THREE, USED, USED, DONE),
    "usage of a float": whole(ONE, TWO, THREE, used(completion_tokens=6.0), DONE),
    "usage with unknown fields": whole(ONE, TWO, THREE, used(cost=0.1, cost_details={"a": {"b": None}}), DONE),
    "end mark without a blank line": Trouble((HEAD + chunk(events(*GOOD[:-1]) + b"data: [DONE]") + END,)),
    "more behind the end mark": whole(*GOOD, {"error": {"message": "too late"}}, b"{oops", ONE),
    "open after the end mark": Trouble((HEAD + chunk(EVENTS), 0.3)),
    "closed without a last chunk after the end mark": Trouble((HEAD + chunk(EVENTS),), close="closed"),
    "reset after the end mark": Trouble((HEAD + chunk(EVENTS),), close="reset"),
    "HTTP/1.0, ended by closing": Trouble((b"HTTP/1.0 200 OK\r\n\r\n" + EVENTS,), close="closed"),
    "packed": Trouble((response(zlib.compress(EVENTS), headers=("content-encoding: deflate",)),)),
    "tool calls only": whole(called(name="one ", arguments=""), called(arguments="two three four "),
        called("tool_calls", arguments="five six "), USED, DONE),
    "a function call": whole(said({"function_call": {"name": "one "}}),
        said({"function_call": {"arguments": "two three four "}}),
        said({"function_call": {"arguments": "five six "}}, "function_call"), USED, DONE),
    "a refusal": whole(*(said({"content": None, "refusal": w}, "stop" if w == WORDS[-1] else None) for w in WORDS), USED,
        DONE),
    "reasoning that streams": whole(said({"reasoning_content": "one "}), said({"reasoning": "two three four "}), THREE,
        used(**detailed(reasoning_tokens=4)), DONE),
    "the same reasoning in two fields": whole(said({"reasoning_content": "one ", "reasoning": "one "}), TWO, THREE, USED,
        DONE),
    "reasoning that is hidden": whole(*(said({"content": w}, "stop" if "six" in w else None) for w in WORDS),
        used(**detailed(reasoning_tokens=3)), DONE, hidden=3),
    "reasoning that is more than the output": whole(ONE, TWO, THREE, used(**detailed(reasoning_tokens=900)), DONE),
    "rejected tokens of a prediction": whole(ONE, TWO, THREE, used(completion_tokens=8, total_tokens=15, **detailed(
        accepted_prediction_tokens=3, rejected_prediction_tokens=2)), DONE),
    "a surrogate pair in two events": whole(said({"content": "one \ud83d"}), said({"content": "\ude00 two "}),
        THREE, USED, DONE, text="one 😀 two five six "),
    "another word for stop": whole(ONE, TWO, said({"content": "five six "}, "eos"), USED, DONE),
    # answers of which something cannot be used
    "half of a character": whole(ONE, said({"content": "two \ud800 "}), THREE, USED, DONE, text="one two � five six ",
        note="half of a character"),
    "bytes that are not UTF-8": Trouble((HEAD + chunk(EVENTS.replace(b"two", b"t\xffo")) + END,), note="not UTF-8",
        text="one t�o three four five six "),
    "NaN in the JSON": whole(b'{"choices": [{"delta": {"content": "one "}, "score": NaN}]}', TWO, THREE, USED, DONE,
        note="NaN"),
    "logprobs of null": whole(said({"content": "one "}, logprobs={"content": [{"token": "a", "logprob": None}]}), TWO,
        THREE, USED, DONE, note="logprobs"),
    "logprobs of a number": whole(said({"content": "one "}, logprobs=5), TWO, THREE, USED, DONE, note="logprobs"),
    "prompt tokens of a text": whole(ONE, TWO, THREE, used(prompt_tokens="7"), DONE, note="usage.prompt_tokens"),
    "details of a list": whole(ONE, TWO, THREE, used(completion_tokens_details=[1]), DONE, note="completion_tokens_details"),
    "rejected tokens of -2": whole(ONE, TWO, THREE, used(**detailed(rejected_prediction_tokens=-2)), DONE,
        note="rejected_prediction_tokens"),
    "metrics of a text": whole(ONE, TWO, THREE, {**USED, "metrics": "n/a"}, DONE, note="metrics"),
    "timings that contradict": whole(ONE, TWO,
        THREE, {**USED, "timings": {"predicted_n": 6, "draft_n": 2, "draft_n_accepted": 9}}, DONE, note="timings"),
    "usage of -5 beside token ids": whole(*IDS, used(completion_tokens=-5), DONE, note="token ids were counted",
        dialect="vllm"),
    "usage too large beside token ids": whole(*IDS, used(completion_tokens=10**9), DONE, note="token ids were counted",
        dialect="vllm"),
    "no usage beside token ids": whole(*IDS, DONE, note="no usage; the token ids were counted", dialect="vllm"),
    "usage that the token ids deny": whole(*IDS[:2], said({"content": "five six "}, "stop", token_ids=[5]), USED, DONE,
        note="usage counts 6 output tokens and the stream had 5", dialect="vllm"),
    "token ids of texts": whole(said({"content": "one "}, token_ids=["a"]), TWO, THREE, USED, DONE, note="token_ids"),
    "content that is a number": whole(said({"content": 17}), ONE, TWO, THREE, USED, DONE, note="delta.content"),
    "a delta that is a text": whole({"choices": [{"delta": "x"}]}, ONE, TWO, THREE, USED, DONE, note="choices.delta"),
    "choices that are no list": whole({"choices": "x"}, ONE, TWO, THREE, USED, DONE, note="choices"),
    # requests that failed
    "usage of -5": whole(ONE, TWO, THREE, used(completion_tokens=-5), DONE, failure="completion_tokens is -5"),
    "usage of a text": whole(ONE, TWO, THREE, used(completion_tokens="n/a"), DONE, failure='completion_tokens is "n/a"'),
    "usage of true": whole(ONE, TWO, THREE, used(completion_tokens=True), DONE, failure="completion_tokens is true"),
    "usage of 6.5": whole(ONE, TWO, THREE, used(completion_tokens=6.5), DONE, failure="completion_tokens is 6.5"),
    "usage of null": whole(ONE, TWO, THREE, used(completion_tokens=None), DONE, failure="completion_tokens is null"),
    "usage of NaN": whole(ONE, TWO, THREE, used(completion_tokens=math.nan), DONE, failure="completion_tokens is null"),
    "usage of 1e999": whole(ONE, TWO, THREE, json.dumps(USED).replace(": 6", ": 1e999").encode(), DONE,
        failure="completion_tokens is Infinity"),
    "usage of 0": whole(ONE, TWO, THREE, used(completion_tokens=0), DONE, failure="completion_tokens is 0"),
    "usage of too many": whole(ONE, TWO, THREE, used(completion_tokens=9), DONE,
        failure="more than the 8 that were asked for"),
    "usage that is a list": whole(ONE, TWO, THREE, {"choices": [], "usage": [6]}, DONE, failure="cannot be counted"),
    "usage before the text": whole(ONE, {**USED, "usage": {**USAGE, "completion_tokens": 1}}, TWO, THREE, DONE,
        failure="more text came after it"),
    "more rejected tokens than tokens": whole(ONE, TWO, THREE, used(**detailed(rejected_prediction_tokens=9)), DONE,
        failure="rejected"),
    "no usage": whole(ONE, TWO, THREE, DONE, failure="no usage"),
    "two answers": whole({"choices": [*ONE["choices"], {**TWO["choices"][0], "index": 1}]}, DONE, failure="several answers"),
    "the second answer": whole({"choices": [{**TWO["choices"][0], "index": 1}]}, DONE, failure="several answers"),
    "hidden reasoning only": whole(said({}, "length"), used(**detailed(reasoning_tokens=6)), DONE,
        failure="6 tokens of reasoning"),
    "nothing in it": whole(said({"content": ""}, "stop"), USED, DONE, failure="nothing in it"),
    "no events": Trouble((HEAD + END,), failure="empty stream"),
    "no body": Trouble((response(b""),), failure="empty stream"),
    "an end mark only": whole(DONE, failure="finish reason"),
    "no finish reason": whole(ONE, TWO, said({"content": "five six "}), USED, DONE, failure="finish reason"),
    "a finish reason that is a number": whole(ONE, TWO, said({"content": "five six "}, 3), USED, DONE,
        failure="finish reason"),  # type: ignore[arg-type]
    "aborted": whole(ONE, TWO, said({"content": "five six "}, "abort"), USED, DONE, failure="finish reason 'abort'"),
    "no end mark": whole(ONE, TWO, THREE, USED, failure="end mark"),
    "an error event": Trouble((HEAD + chunk(events(ONE) + b"event: error\ndata: out of memory\n\n" + events(DONE)) + END,),
        failure="HTTP 200: out of memory"),
    "an error object": whole(ONE, {"error": {"message": "out of memory", "code": 500}}, DONE,
        failure="HTTP 200: out of memory"),
    "an error in one piece": Trouble((response(b'{"object": "error", "message": "no such model"}'),),
        failure="no such model"),
    "an error over several lines": Trouble((response(b'{\n  "error": {\n    "message": "no such model"\n  }\n}\n'),),
        failure="no such model"),
    "an answer in one piece": Trouble((response(b'{"choices": [{"message": {"content": "one"}}]}'),),
        failure="in one piece"),
    "a page of HTML": Trouble((response(b"<html>\n<body>Welcome</body>\n</html>"),), failure="cut off|not JSON"),
    "an event that is not JSON": whole(ONE, b"{oops", DONE, failure="not JSON"),
    "an event that is a number": whole(ONE, b"17", DONE, failure="no object"),
    "an event that is too deep": whole(ONE, DEEP, DONE, failure="not JSON"),
    "a number of 5000 digits": whole(ONE, b'{"usage": ' + b"9" * 5000 + b"}", DONE, failure="not JSON"),
    "an event that does not end": Trouble((HEAD, *[chunk(b"data: " + b"x" * (1 << 20))] * 17), failure="more than 16 MiB",
        close="closed"),
    "cut inside an event": Trouble((HEAD + chunk(events(ONE) + b'data: {"choi') + END,), failure="cut off"),
    "cut inside a character": Trouble((HEAD + chunk(events(ONE) + "data: ä".encode()[:-1]) + END,), failure="cut off"),
    "dead before the answer": Trouble((), failure="connection dropped", close="closed"),
    "reset before the answer": Trouble((), failure="connection dropped", close="reset"),
    "dead midway": Trouble((HEAD + chunk(events(ONE, TWO)),), failure="connection dropped", close="closed"),
    "reset midway": Trouble((HEAD + chunk(events(ONE, TWO)), 0.02), failure="connection dropped", close="reset"),
    "a wrong length of a chunk": Trouble((HEAD + b"5\r\n" + events(ONE) + END,), failure="connection dropped",
        close="closed"),
    "a length that is not reached": Trouble((response(EVENTS[:-20]).replace(b"content-length: ", b"content-length: 9"),),
        failure="connection dropped", close="closed"),
    "packed data that is not": Trouble((response(EVENTS, headers=("content-encoding: gzip",)),),
        failure="connection dropped|could not be read"),
    "a hang before the answer": Trouble((2.0,), failure="nothing came for 0.25 s"),
    "a hang after the head": Trouble((HEAD, 2.0), failure="nothing came for 0.25 s"),
    "a hang midway": Trouble((HEAD + chunk(events(ONE, TWO)), 2.0), failure="nothing came for 0.25 s"),
    "a trickle": Trouble((HEAD, *[s for _ in range(40) for s in (chunk(b": wait\n\n"), 0.05)]),
        failure="not finished after 0.6 s"),
    "garbage": Trouble((b"\x00\x01\x02 what is this\r\n\r\n",), failure="connection dropped|could not be read",
        close="closed"),
    "a header that is too long": Trouble((b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",),
        failure="connection dropped|could not be read", close="closed"),
    "400": Trouble((response(b'{"error": {"message": "Unknown field ignore_eos"}}', "400 Bad Request"),),
        failure="HTTP 400: Unknown field ignore_eos"),
    "a prompt that is too long": Trouble((response(b'{"message": "maximum context length is 512"}', "400 Bad Request"),),
        failure="HTTP 400: maximum context length is 512"),
    "401 that repeats the key": Trouble((response(b'{"error": {"message": "Incorrect key: sk-secret-17"}}', "401 X"),),
        failure=r"HTTP 401: Incorrect key: \*\*\*"),
    "404": Trouble((response(b'{"detail": "Not Found"}', "404 Not Found"),), failure="HTTP 404: Not Found"),
    "422 with a list": Trouble((response(b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "422 X"),),
        failure="HTTP 422: .*field required"),
    "429": Trouble((response(b"slow down", "429 Too Many Requests", ("retry-after: 20",)),),
        failure=r"HTTP 429: slow down \(Retry-After: 20\)"),
    "500 with a binary body": Trouble((response(bytes(range(256)) * 9, "500 Internal Server Error",
        ("content-type: text/html; charset=nonsense",)),), failure="HTTP 500: "),
    "500 without a body": Trouble((response(b"", "500 Internal Server Error"),), failure="HTTP 500: Internal Server Error"),
    "500 whose body hangs": Trouble((b"HTTP/1.1 500 X\r\ncontent-length: 100\r\n\r\nout of", 2.0),
        failure="HTTP 500: out of"),
    "500 whose body is cut": Trouble((b"HTTP/1.1 500 X\r\ncontent-length: 100\r\n\r\nout of",), failure="HTTP 500: out of",
        close="closed"),
    "503 with endless body": Trouble((b"HTTP/1.1 503 X\r\n\r\n" + b"x" * (1 << 20),), failure="HTTP 503: xxx",
        close="closed"),
    "a redirect": Trouble((response(b"", "307 Temporary Redirect", ("location: http://127.0.0.1:9/v2",)),),
        failure="HTTP 307: .*http://127.0.0.1:9/v2"),
    "204": Trouble((b"HTTP/1.1 204 No Content\r\n\r\n",), failure="HTTP 204"),
}  # fmt: skip


def test_there_are_as_many_kinds_as_promised() -> None:
    failing = [t for t in TROUBLE.values() if t.failure]
    assert len(failing) >= 40 and len(TROUBLE) - len(failing) >= 40


def send(names: list[str], asks: list[Request]) -> tuple[tuple[Answer, ...], MockServer]:
    """The server answers the requests in turn with these kinds of trouble."""

    async def run() -> tuple[tuple[Answer, ...], MockServer]:
        waiting = iter(names)

        def script(body: dict[str, Any]) -> Script:
            one = TROUBLE[next(waiting)]
            return Script(raw=one.sent, close=one.close)

        async with MockServer(script) as server:
            key = {"Authorization": "Bearer sk-secret-17"}
            dialect = DIALECTS[TROUBLE[names[0]].dialect]
            where = Address(server.url, "target", dialect, key, timeouts=Timeouts(0.6, 5.0, 0.25))
            async with HttpEndpoint(where) as endpoint:
                patience = Patience(most=len(names) + 1)
                return (await load.drive(endpoint, asks, Load(requests=len(asks)), None, patience=patience))[0], server

    return asyncio.run(run())


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_is_one_requests_own(name: str) -> None:
    """A good request before it and one behind it are as they should be; the one in trouble is complete with its six tokens or
    has failed with its reason."""
    trouble = TROUBLE[name]
    (before, got, after), _ = send(["nothing wrong", name, "nothing wrong"], [CHAT] * 3)
    for good in (before, after):
        assert good.failure is None and (good.tokens, good.text, good.notes, len(good.chunks)) == (TOKENS, TEXT, (), 3)
    check(name, trouble, got)


def check(name: str, trouble: Trouble, got: Answer) -> None:
    json.dumps(dataclasses.asdict(got), ensure_ascii=False, allow_nan=False).encode()
    if trouble.failure is not None:
        assert got.failed and re.search(trouble.failure, str(got.failure)), got.failure
        assert "\n" not in str(got.failure) and str(got.failure).isprintable() and len(str(got.failure)) < 500
        assert "sk-secret-17" not in json.dumps(dataclasses.asdict(got))
        assert got.tokens == 0 and got.token_ids == () and latency.tpot(got) is None and got.finish_reason == "failed"
        return
    assert got.failure is None and got.tokens == TOKENS and got.text == trouble.text, name
    assert got.hidden_tokens == trouble.hidden and got.prompt_tokens in (0, 7)
    assert len(got.chunks) == trouble.chunks and sum(c.chars for c in got.chunks) >= len(got.text)
    assert 0 < got.ttft_s == got.chunks[0].at_s <= got.e2e_s == got.chunks[-1].at_s
    assert latency.tpot(got) == pytest.approx((got.e2e_s - got.ttft_s) / (TOKENS - trouble.hidden - latency.first_tokens(got)))
    assert (trouble.note is None) == (got.notes == ()) and (trouble.note or "") in " ".join(got.notes), got.notes


# the same at random


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -5, 6, 9, 1.5, 1e30, 10**30, "", "n/a", "6", "\ud800", "[DONE]", [], [1], ["a"], [None], [[]], {},
    {"a": 1}, {"text": 3}, {"message": None},
)  # fmt: skip
FULL: dict[str, Any] = {
    "id": "x", "object": "chunk", "created": 5, "model": "m", "error": None,
    "choices": [{
        "index": 0, "finish_reason": "stop", "token_ids": [1, 2, 3, 4, 5, 6], "text": TEXT,
        "delta": {
            "role": "assistant", "content": TEXT, "reasoning_content": "", "reasoning": "", "refusal": None,
            "tool_calls": [{"index": 0, "id": "c", "function": {"name": "", "arguments": ""}}],
            "function_call": {"name": "", "arguments": ""},
        },
        "logprobs": {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}]},
    }],
    "usage": {
        **USAGE, "reasoning_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "audio_tokens": 0,
        },
    },
    "timings": {"predicted_n": 6, "draft_n": 4, "draft_n_accepted": 2},
    "metrics": {"queue_time_ms": 1.0, "speculative_decoding": {
        "num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 2, "acceptance_histogram": [1, 0, 1],
    }},
}  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every field, however deep."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from paths(one, (*at, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy in which that field is another."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(copy[key], tuple(rest), new)
    return copy


class Stream:
    """A server as far as it can be had without a connection: each request is answered with the next of these events."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = iter(values)

    async def generate(self, ask: Request) -> AsyncIterator[Piece]:
        reply, reader = Reply(ask), EventReader()
        for event in reader.feed(events(next(self._values), DONE)):
            if (piece := reply.read(event, 1.0)) is not None:
                yield piece
        yield reply.conclude(reader, 1.0)


def answered(ask: Request, values: Sequence[Any]) -> list[Answer]:
    async def run() -> list[Answer]:
        server: Any = Stream(values)
        return [load.answer_of(ask, await load.exchange(server, ask, 0.0, lambda: 2.0), 0.0) for _ in values]

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [CHAT, PLAIN], ids=["chat", "completions"])
@pytest.mark.parametrize("path", list(paths(FULL)), ids=lambda path: ".".join(map(str, path)))
def test_any_value_in_any_field_is_used_or_noted_or_fails_the_request(path: tuple[Any, ...], ask: Request) -> None:
    """A failure has a reason that is not an exception's. What is complete has its six tokens, but for changes of those fields
    that say how many there are."""
    counting = {"completion_tokens", "rejected_prediction_tokens", "usage", "token_ids", "completion_tokens_details"}
    for value, got in zip(VALUES, answered(ask, [changed(FULL, path, value) for value in VALUES]), strict=True):
        json.dumps(dataclasses.asdict(got), ensure_ascii=False, allow_nan=False).encode()
        assert not re.match("[A-Z][A-Za-z]+Error", str(got.failure)), (value, got.failure)
        if got.failure is None:
            assert got.tokens == TOKENS or counting & set(path), (value, got)
            assert 0 <= got.hidden_tokens <= got.tokens and got.counts.accepted <= got.counts.drafted
            assert 0 < got.tokens <= ask.max_tokens


def test_two_and_more_odd_values_at_once() -> None:
    draw, every = random.Random(9), list(paths(FULL))
    outcomes, values = set(), []
    for _ in range(1500):
        value: Any = FULL
        for _ in range(draw.randint(2, 6)):
            try:
                value = changed(value, draw.choice(every), draw.choice(VALUES))
            except (KeyError, IndexError, TypeError, AttributeError):
                continue  # the field is gone by an earlier change
        values.append(value)
    for got in answered(CHAT, values[::2]) + answered(PLAIN, values[1::2]):
        json.dumps(dataclasses.asdict(got), ensure_ascii=False, allow_nan=False).encode()
        assert not re.match("[A-Z][A-Za-z]+Error", str(got.failure)), got.failure
        assert got.failed or 0 < got.tokens <= CHAT.max_tokens
        outcomes.add((got.failed, bool(got.notes)))
    assert {(False, False), (False, True), (True, False)} <= outcomes


def reference(data: bytes) -> list[Event]:
    """Events as section 9.2.6 of the HTML standard has them, read in one go."""
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found, kind, held = [], "message", list[bytes]()
    for line in text.split(b"\n")[:-1]:
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line and held:
            found.append(Event(kind, b"\n".join(held)))
        if not line:
            kind, held = "message", []
        elif field == b"data":
            held.append(value)
        elif field == b"event":
            kind = value.decode("utf-8", "replace") or "message"
    return found


def test_events_are_those_of_the_standard_however_the_bytes_come() -> None:
    draw = random.Random(4)
    pieces = [b"data: a", b"data:b", b"data:  c", b"data", b"event: error", b"event:", b": note", b"id: 1", b"retry: 3",
              "data: ä€😀\u2028\x85".encode(), b"data: \xff\xfe", b"", b"", b""]  # fmt: skip
    seen = 0
    for _ in range(400):
        ends = draw.choice(((b"\n",), (b"\r\n",), (b"\r",), (b"\n", b"\r\n", b"\r")))
        data = b"".join(draw.choice(pieces) + draw.choice(ends) for _ in range(draw.randint(1, 30)))
        data = draw.choice((b"", b"\xef\xbb\xbf")) + data
        reader, got, at = EventReader(), list[Event](), 0
        while at < len(data):
            size = draw.choice((1, 2, 3, 7, 50))
            got += reader.feed(data[at : at + size])
            at += size
        assert got == reference(data), data
        seen += len(got)
    assert seen > 500


def test_a_reader_does_not_hold_what_it_has_given_out() -> None:
    reader = EventReader()
    for _ in range(50):
        assert len(reader.feed(b"data: " + b"x" * 1000 + b"\n\n")) == 1 and reader.pending == 0
    reader.feed(b"data: abc")
    assert reader.pending == 9
    reader.feed(b"def\ndata: g")
    assert 10 <= reader.pending <= 25 and reader.rest == b"abcdef\ng"


# what is asked beside the requests


PAGES = {
    "no answer": b"",
    "not found": response(b"no", "404 Not Found"),
    "a page of HTML": response(b"<html>{}</html>"),
    "binary": response(bytes(range(256)) * 50, headers=("content-type: text/plain; charset=nonsense",)),
    "a list": response(b"[1, 2]"),
    "a number": response(b"17"),
    "NaN": response(b"NaN"),
    "another type": response(b'{"version": {"a": ["\\ud800"]}, "build_info": -5}'),
    "null": response(b'{"version": null, "build_info": null}'),
    "too deep": response(b"[" * 100_000),
    "5000 digits": response(b"9" * 5000),
    "packed data that is not": response(b"{}", headers=("content-encoding: gzip",)),
    "garbage": b"\x00\x01 what is this\r\n\r\n",
    "counters of odd values": response(
        b"vllm:prompt_tokens_total NaN\nvllm:generation_tokens_total 1e400\nvllm:spec_decode_num_drafts_total x\n"
        b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999999999"} 1.0\n\xff\xfe\x00\n'
    ),
    "a redirect": response(b"", "302 Found", ("location: /elsewhere",)),
}


@pytest.mark.parametrize("dialect", ["vllm", "llamacpp", "sglang", "tensorrt-llm", "openai"])
def test_odd_facts_and_counters_are_none(dialect: str) -> None:
    async def run() -> None:
        async with MockServer() as server, HttpEndpoint(Address(server.url, "m", DIALECTS[dialect])) as endpoint:
            for name, page in PAGES.items():
                server.pages = dict.fromkeys(
                    ("/version", "/props", "/server_info", "/metrics", "/prometheus/metrics", "/elsewhere"), page
                )
                facts, counters = await endpoint.facts(), await endpoint.counters()
                assert facts.kv_tokens is None and (facts.version is None or facts.version.isprintable()), name
                assert counters in (None, ServerCounters()), (name, counters)
                await endpoint.flush()
                json.dumps(dataclasses.asdict(facts), ensure_ascii=False, allow_nan=False).encode()

    asyncio.run(run())


# a whole run


def test_no_run_is_lost(tmp_path: Path) -> None:
    """One arm's server has every kind of trouble, a good answer between each two. All that was measured is in the record, with
    each reason, and the reports of it can be made."""
    names = [name for kind in TROUBLE for name in (kind, "nothing wrong")]
    waiting = iter(names)

    def troubled(body: dict[str, Any]) -> Script:
        one = TROUBLE[next(waiting)]
        return Script(raw=one.sent, close=one.close)

    async def go() -> Record:
        good = Script(raw=TROUBLE["nothing wrong"].sent)
        async with MockServer(lambda body: good) as base, MockServer(troubled) as bad:
            key = {"Authorization": "Bearer sk-secret-17"}
            where = Address(base.url, "target", DIALECTS["vllm"], key, timeouts=Timeouts(0.6, 5.0, 0.25))
            sides = (
                Running(Arm(BASELINE), where),
                Running(Arm("troubled", {"method": "ngram"}), dataclasses.replace(where, url=bad.url)),
            )
            what = plan(loads=(Load(concurrency=1, requests=len(names)),), repetitions=1, warmups=0, max_tokens=8)
            return await run.measure(what, Subject("m", "vllm", sides), Quiet())

    made = asyncio.run(go())
    base, bad = (b.answers for b in sorted(made.batches, key=lambda b: b.arm))
    assert made.finished and len(base) == len(bad) == len(names) and not any(a.failed for a in base)
    for name, answer in zip(names, bad, strict=True):
        check(name, TROUBLE[name], answer)
    cell = next(c for c in summary.cells(made) if c.arm == "troubled")
    failed = [kind for kind, trouble in TROUBLE.items() if trouble.failure is not None]
    assert cell.failures == len(failed) and cell.output_tokens == TOKENS * (len(names) - len(failed))
    record.save(made, tmp_path / "r.json.gz")
    assert record.load(tmp_path / "r.json.gz") == made
    notes = "\n".join(words.warnings(made))
    for trouble in TROUBLE.values():
        assert trouble.note is None or trouble.note in notes
    assert f"{len(failed)} of {len(names)} requests failed" in notes
    assert all(text.encode() for text in (as_markdown(made), as_page(made)))
    assert as_text(made, 120)
