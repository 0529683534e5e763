"""What happens to a server's requests: clients that leave, full queues, failing steps, broken engines, limits, shutdowns."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from forerun.llm import LLM, LoadedModel
from forerun.types import SamplingParams
from tests.serving import Inside, Served, wait_for
from tests.tiny import tiny_model

HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LLM.load(tiny_model(tmp_path_factory.mktemp("tiny"), positions=16384))


def engine(loaded: LoadedModel, **settings: Any) -> LLM:
    return LLM(loaded, **({"max_num_seqs": 2, "kv_cache_tokens": 20480, "max_num_batched_tokens": 64} | settings))


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Inside]:
    inside = Inside(engine(loaded), max_queue=2, max_body_bytes=100_000, body_timeout=0.5, max_n=3, max_prompt_tokens=3500)
    yield inside
    inside.close()
    assert inside.held == 0


def send(server: Inside | Served, body: dict[str, Any] | bytes, path: str = "/v1/completions") -> socket.socket:
    """Send a request and do not wait for its answer."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sock.sendall(HEAD.format(path, len(data)).encode() + data)
    return sock


def received(sock: socket.socket) -> tuple[int, Any]:
    """The status and the content of an answer after which the connection is closed."""
    with sock, sock.makefile("rb") as file:
        head, _, content = file.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def post(server: Inside | Served, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


@pytest.fixture
def slow(server: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """Each step takes 50 ms longer."""
    step = server.llm.engine.step

    def slowly() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(server.llm.engine, "step", slowly)
    return server


@pytest.mark.parametrize("state", ["streaming", "whole", "queued", "prefill"])
def test_a_client_that_leaves_frees_pages_within_two_steps(slow: Inside, state: str) -> None:
    engine = slow.llm.engine
    others = [send(slow, {"prompt": "in the thing", **LONG}) for _ in range(2)] if state == "queued" else []
    wait_for(lambda: len(engine.scheduler.running) == len(others))
    held = slow.held
    prompt = [5 + i % 90 for i in range(3000)] if state == "prefill" else "the thing"
    sock = send(slow, {"prompt": prompt, "stream": state == "streaming", **LONG, "max_tokens": 900})
    if state == "queued":
        wait_for(lambda: len(engine.scheduler.waiting) == 1)
    else:
        wait_for(lambda: slow.held > (20 if state == "prefill" else 0))
    if state == "streaming":
        sock.recv(1)
    steps = engine.stats.steps
    sock.close()
    wait_for(lambda: len(engine.scheduler.running) == len(others) and not engine.scheduler.waiting)
    assert engine.stats.steps - steps <= 2
    assert slow.held <= held + len(others)  # the others may have grown by a page
    for other in others:
        other.close()
    wait_for(lambda: slow.held == 0)


def test_a_full_queue_is_429_and_empties(slow: Inside) -> None:
    socks = [send(slow, {"prompt": "the thing", **LONG}) for _ in range(4)]
    wait_for(lambda: slow.client.under_way == 4)
    got = post(slow, {"prompt": "one", "max_tokens": 2})
    assert got.status_code == 429 and int(got.headers["retry-after"]) >= 1
    assert got.json()["error"]["code"] == "queue_full"
    for sock in socks:
        sock.close()
    wait_for(lambda: slow.client.under_way == 0)
    assert post(slow, {"prompt": "one", "max_tokens": 2}).status_code == 200
    assert post(slow, {"prompt": ["one"] * 2, "max_tokens": 2, "n": 3}).status_code == 429, "each of n counts"


def test_a_failing_step_fails_its_requests_and_the_server_goes_on(
    server: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, engine = server.llm.engine._step, server.llm.engine
    launch = step.launch

    def failing(plan: Any) -> Any:
        if any(row.sequence.request.prompt_ids[-1] == 7 for row in plan.rows):
            raise RuntimeError("no such kernel")
        return launch(plan)

    monkeypatch.setattr(step, "launch", failing)
    texts: list[Any] = []
    body = {"prompt": "the thing", **LONG, "max_tokens": 600}
    other = threading.Thread(target=lambda: texts.append(post(server, body).json()))
    other.start()
    wait_for(lambda: engine.stats.output_tokens > 10)
    got = post(server, {"prompt": [5, 6, 7]})
    assert got.status_code == 500 and "no such kernel" in got.json()["error"]["message"]
    got = post(server, {"prompt": [5, 6, 7], "stream": True})
    assert got.status_code == 200 and "no such kernel" in got.text and "[DONE]" not in got.text
    other.join()
    assert texts[0]["usage"]["completion_tokens"] == 600, "the other request is answered"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.client.broken is None and "[DONE]" in post(server, {"prompt": "one", "stream": True}).text


def test_an_engine_beyond_repair(server: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(plan: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(server.llm.engine._step, "launch", failing)
    assert post(server, {"prompt": "one"}).status_code == 500
    wait_for(lambda: server.client.broken)
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and "device lost" in health.text
    assert post(server, {"prompt": "one"}).status_code == 503
    wait_for(lambda: server.exit_code == 1)


REFUSED: dict[str, tuple[Any, int, str | None]] = {
    "unknown field": ({"prompt": "a", "tempratur": 1}, 400, "tempratur"),
    "wrong type": ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens"),
    "true is no number": ({"prompt": "a", "n": True}, 400, "n"),
    "out of range": ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    "above the server's n": ({"prompt": "a", "n": 4}, 400, "n"),
    "two that do not go together": ({"prompt": "a", "max_tokens": 3, "min_tokens": 5}, 400, "min_tokens"),
    "no prompt": ({}, 400, "prompt"),
    "an empty prompt": ({"prompt": ""}, 400, "prompt"),
    "a token that the model lacks": ({"prompt": [999_999]}, 400, "prompt"),
    "a bias of a token that it lacks": ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    "a long prompt": ({"prompt": [5] * 3600}, 400, "prompt"),
    "too long an answer": ({"prompt": "a", "max_tokens": 20000}, 400, "max_tokens"),
    "another model": ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
    "stream options of no stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "echo with logprobs": ({"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo"),
    "a prediction without its drafter": ({"prompt": "a", "prediction": {"type": "content", "content": "a"}}, 400, "prediction"),
    "no JSON": (b'{"prompt": ', 400, None),
    "not a number of JSON": (b'{"prompt": "a", "temperature": NaN}', 400, None),
    "infinite": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "a list": (b"[1]", 400, None),
    "deep": (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None),
    "half a character": (b'{"prompt": "\\ud800"}', 400, None),
    "long": (b'{"prompt": "' + b"a" * 100_000 + b'"}', 413, None),
}


@pytest.fixture(scope="module")
def shared(loaded: LoadedModel) -> Iterator[Inside]:
    inside = Inside(engine(loaded), max_queue=8, max_body_bytes=100_000, body_timeout=0.3, max_n=3, max_prompt_tokens=3500)
    yield inside
    inside.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named_before_any_event(shared: Inside, name: str, stream: bool) -> None:
    body, status, field = REFUSED[name]
    if isinstance(body, dict):
        body = json.dumps(body | ({"stream": True} if stream and "stream_options" not in body else {})).encode()
    got = httpx.post(f"{shared.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (status, field) and set(error) == {"message", "type", "param", "code"}
    assert field is None or field in error["message"]


def test_other_requests_that_are_refused(shared: Inside) -> None:
    assert httpx.post(f"{shared.url}/v1/completions", data={"prompt": "a"}).status_code == 415
    assert httpx.get(f"{shared.url}/v1/completions").status_code == 405
    assert httpx.get(f"{shared.url}/v1/nothing").json()["error"]["message"]
    assert httpx.get(f"{shared.url}/v1/models/gpt-9").status_code == 404
    with socket.create_connection(shared.address) as sock:  # the body never comes
        sock.sendall(HEAD.format("/v1/completions", 50).encode() + b"{")
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(shared.address) as sock:  # a cut body
        sock.sendall(HEAD.format("/v1/completions", 50).encode() + b"{")
    assert post(shared, {"prompt": "a"}).status_code == 200 and shared.held == 0


def test_keys(loaded: LoadedModel) -> None:
    server = Inside(engine(loaded), api_keys=["one", "two"])
    try:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer three"}, 401),
            ({"Authorization": "one"}, 401),
            ({"Authorization": "Bearer"}, 401),
            ({"Authorization": "Bearer one"}, 200),
            ({"Authorization": "bearer two"}, 200),
        ):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        server.close()


def test_a_request_that_takes_too_long(loaded: LoadedModel) -> None:
    server = Inside(engine(loaded), request_timeout=0.2)
    try:
        got = post(server, {"prompt": "the thing", **LONG})
        assert got.status_code == 504
        got = post(server, {"prompt": "the thing", **LONG, "stream": True})
        assert got.status_code == 200 and "too long" in got.text and "[DONE]" not in got.text
        wait_for(lambda: server.held == 0)
    finally:
        server.close()


def test_a_shutdown_ends_or_fails_cleanly_what_runs(loaded: LoadedModel) -> None:
    """Answers within the grace time are whole, and the others end with an error that says why."""
    served = Served(loaded.folder, "--grace", "2", "--kv-cache-tokens", "65536")
    body = {"prompt": "the thing", **LONG, "max_tokens": 16000}
    short, long = send(served, body | {"max_tokens": 20}), send(served, body)
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)  # the server has read the others
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    status, answer = received(short)
    assert status == 200 and answer["usage"]["completion_tokens"] == 20
    status, answer = received(long)
    assert status == 503 and "shutting down" in answer["error"]["message"]
    assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert served.process.wait(30) == 0


def test_the_server_ends_with_an_error_if_its_engine_process_does(loaded: LoadedModel) -> None:
    served = Served(loaded.folder, "--kv-cache-tokens", "16384")
    (worker,) = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    with httpx.stream("POST", f"{served.url}/v1/completions", json={"prompt": "a", **LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(int(worker), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert httpx.get(f"{served.url}/health").status_code == 503
    assert served.process.wait(30) == 4


def test_the_engine_process_ends_when_the_server_is_killed(loaded: LoadedModel) -> None:
    served = Served(loaded.folder, "--kv-cache-tokens", "16384")
    (worker,) = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    served.process.kill()
    served.process.wait()
    wait_for(lambda: not Path(f"/proc/{worker}/stat").exists() or " Z " in Path(f"/proc/{worker}/stat").read_text())


def test_settings_that_cannot_be_used_end_the_start(loaded: LoadedModel, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from forerun import cli

    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, words in (
            (["--port", str(taken.getsockname()[1])], ["port", "cannot listen"]),
            (["--port", "0", "--max-num-seqs", "0"], ["max_num_seqs"]),
            (["--port", "0", "-s", '{"method": "nothing"}'], ["method"]),
            (["--port", "0", "--max-queue", "-1"], ["max_queue"]),
            (["--port", "0", "--api-key-file", str(tmp_path / "none")], ["api_key_file"]),
        ):
            got = CliRunner().invoke(cli.app, ["serve", str(loaded.folder), *arguments])
            assert got.exit_code == 2 and all(word in got.stderr for word in words), got.stderr


def test_an_aborted_first_of_n_leaves_the_others(loaded: LoadedModel) -> None:
    """The n requests of a long prompt are queued one after the other; greedy ones are equal."""
    server = Inside(engine(loaded))
    try:
        prompt = "the thing in the thing in the thing in the thing"
        got = post(server, {"prompt": prompt, "n": 3, "max_tokens": 8, "temperature": 0}).json()
        expected = server.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].text
        assert [choice["text"] for choice in got["choices"]] == [expected] * 3
        assert got["usage"]["completion_tokens"] == 24
    finally:
        server.close()


def test_usage_counts_the_tokens_of_a_prediction(loaded: LoadedModel) -> None:
    server = Inside(engine(loaded, speculative_config="prediction", adaptive_drafts=False))
    bias = {str(token): 100 for token in loaded.tokenizer.encode("xyz", False)}  # the answer has a token for each letter
    asked = {"messages": [{"role": "user", "content": "the thing"}], "temperature": 0, "max_tokens": 30, "logit_bias": bias}
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    try:
        done = post(server, asked, "/v1/chat/completions").json()
        answer = done["choices"][0]["message"]["content"]
        assert len(answer) == 30 and done["usage"]["completion_tokens_details"] == none
        for extra in ("", "wwww"):
            content = [{"type": "text", "text": part} for part in (answer[:20], extra, answer[20:])]
            predicted = asked | {"prediction": {"type": "content", "content": content}}
            expected = {"accepted_prediction_tokens": 30, "rejected_prediction_tokens": len(extra)}
            got = post(server, predicted, "/v1/chat/completions").json()
            assert got["choices"] == done["choices"] and got["usage"]["completion_tokens_details"] == expected
            told, drafts = got["metrics"], server.llm.stats.drafts
            assert told["accepted_tokens"] + told["steps"] == 29 and 0 < told["drafted_tokens"] <= drafts.drafted
            assert sum(told["accepted_lengths"]) == told["drafting_steps"] and told["decode_s"] > 0
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = post(server, predicted | options, "/v1/chat/completions").text.split("\n\n")
            last = json.loads(events[-3].removeprefix("data: "))
            assert last["usage"]["completion_tokens_details"] == expected
        assert server.llm.stats.drafts.accepted > 0
    finally:
        server.close()
