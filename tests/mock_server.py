"""A server that follows a script: it sends chunks of given numbers of tokens at given times, and can end in every wrong way. It
has just enough HTTP for the instrument, over asyncio streams, so that tests control every byte and its time.

As a program it takes the place of an engine that is launched: it prints log lines as engines do, then serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ENDINGS = (
    "done", "no-done", "no-finish", "no-usage", "drop", "cut", "error-event", "error-object", "bare-error", "not-json",
    "empty", "nothing", "http-500", "hang",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """The answer to a request. chunks: (seconds after the request's arrival, tokens). ending: one of ENDINGS. counted:
    additions to the counters: drafts, draft tokens, accepted tokens, accepted by position. ids: whether chunks have token ids;
    first_id: the first of them. usage_off: an error in the reported number of tokens. raw: bytes to send instead of all that,
    and seconds to wait between them; then `close` says what happens to the connection."""

    chunks: tuple[tuple[float, int], ...] = ((0.0, 1), (0.03, 3), (0.06, 2))
    ending: str = "done"
    counted: tuple[int, int, int, tuple[int, ...]] = (0, 0, 0, ())
    ids: bool = True
    timings: dict[str, int] | None = None
    first_id: int = 100
    reason: str = "length"
    usage_off: int = 0
    usage_more: dict[str, Any] = field(default_factory=dict)
    raw: tuple[bytes | float, ...] | None = None
    close: Literal["stays open", "closed", "reset"] = "stays open"


@dataclass
class MockServer:
    """Use it with `async with`. script: from a request's body to its script. pages: raw responses to GETs, by path; an empty
    one closes the connection. key: the API key that a client must give. seen: the bodies of the requests. sent: for each
    request the times at which its chunks were sent."""

    script: Callable[[dict[str, Any]], Script] = lambda body: Script()
    engine: str = "vllm"
    port: int = 0
    extra_metrics: str = ""
    foreign_tokens: int = 0
    key: str | None = None
    pages: dict[str, bytes] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    aborted: int = 0

    def __post_init__(self) -> None:
        self.counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self.accepted_at: list[int] = []

    async def __aenter__(self) -> MockServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.key is not None and path != "/health" and headers.get("authorization") != f"Bearer {self.key}":
                    writer.write(response(b"no key", "401 Unauthorized"))
                elif method == "GET" and path in self.pages:
                    writer.write(self.pages[path])
                    if not self.pages[path]:
                        return
                elif method == "GET":
                    self._get(path, writer)
                else:
                    self.headers.append(headers)
                    if not await self._answer(path, json.loads(body), writer):
                        return
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.aborted += 1
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        answers: dict[str, tuple[str, str]] = {
            "/health": ("text/plain", ""),
            "/metrics": ("text/plain", self.metrics()),
            "/version": ("application/json", json.dumps({"version": "9.9"})),
            "/v1/models": ("application/json", json.dumps({"data": [{"id": "target", "owned_by": self.engine}]})),
        }
        status = "200 OK" if path in answers else "404 Not Found"
        kind, text = answers.get(path, ("text/plain", "no"))
        data = text.encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    def metrics(self) -> str:
        """The counters under vLLM's names."""
        c = self.counts
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="target"}} {float(c["drafts"])}',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="target"}} {float(c["draft_tokens"])}',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="target"}} {float(c["accepted_tokens"])}',
            f'vllm:prompt_tokens_total{{engine="0",model_name="target"}} {float(c["prompt_tokens"])}',
            f'vllm:generation_tokens_total{{engine="0",model_name="target"}} {float(c["generation_tokens"])}',
            'vllm:num_preemptions_total{engine="0"} 0.0',
            'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096",num_gpu_blocks="256"} 1.0',
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {float(n)}'
            for i, n in enumerate(self.accepted_at)
        ]
        return "\n".join(lines) + "\n" + self.extra_metrics

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Returns False if the connection is to be closed."""
        begin = time.perf_counter()
        script = self.script(body)
        self.seen.append(body)
        self.arrived.append(begin)
        times: list[float] = []
        self.sent.append(times)
        chat = path.endswith("/chat/completions")
        if script.raw is not None:
            for step in script.raw:
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await asyncio.sleep(step)
            if script.close == "reset":
                writer.transport.abort()
            return script.close == "stays open"
        if script.ending == "http-500":
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 12\r\n\r\nout of paper")
            return True
        writer.write(HEAD)
        if script.ending == "nothing":
            writer.write(b"0\r\n\r\n")
            return True
        made = 0
        chunks = script.chunks if script.ending != "empty" else ()
        for index, (at, tokens) in enumerate(chunks):
            if (left := begin + at - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            last = index == len(chunks) - 1 and script.ending != "no-finish"
            ids = list(range(script.first_id + made, script.first_id + made + tokens))
            made += tokens
            self._send(writer, self._event(chat, ids, script, script.reason if last else None))
            times.append(time.perf_counter())
            if writer.transport.is_closing():
                raise ConnectionError
        if script.ending == "hang":
            await asyncio.sleep(60)
        if script.ending in ("drop", "cut"):
            if script.ending == "cut":
                self._raw(writer, b'data: {"choices": [{"te')
                writer.write(b"0\r\n\r\n")
            await writer.drain()
            writer.transport.abort() if script.ending == "drop" else None
            return script.ending == "cut"
        bad = {
            "error-event": b'event: error\ndata: {"message": "CUDA out of memory"}\n\n',
            "error-object": b'data: {"error": {"message": "CUDA out of memory", "code": 500}}\n\n',
            "bare-error": b'{"error": {"message": "CUDA out of memory"}}\n\n',
            "not-json": b"data: {oops\n\n",
        }
        if script.ending in bad:
            self._raw(writer, bad[script.ending])
            self._raw(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return True
        self.counts["prompt_tokens"] += 7
        self.counts["generation_tokens"] += made + self.foreign_tokens
        drafts, drafted, accepted, at = script.counted
        for key, n in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted)):
            self.counts[key] += n
        self.accepted_at += [0] * (len(at) - len(self.accepted_at))
        for i, n in enumerate(at):
            self.accepted_at[i] += n
        if script.ending != "no-usage":
            n = made + script.usage_off
            usage = {"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n, **script.usage_more}
            timings = {} if script.timings is None else {"timings": {"predicted_n": made, **script.timings}}
            self._send(writer, {"choices": [], "usage": usage, **timings})
        if script.ending != "no-done":
            self._raw(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _event(self, chat: bool, ids: list[int], script: Script, reason: str | None) -> dict[str, Any]:
        text = "".join(f"{i} " for i in ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if script.ids:
            choice["token_ids"] = ids
        return {"id": "x", "object": "chunk", "choices": [choice]}

    def _send(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        self._raw(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(chunk(data))


def response(body: bytes, status: str = "200 OK", headers: tuple[str, ...] = ()) -> bytes:
    """A complete HTTP response with a content length."""
    head = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def events(*values: Any, end: bytes = b"\n") -> bytes:
    """The values as server-sent events. Bytes are sent as they are, other values as JSON."""
    data = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    return b"".join(b"data: " + one + 2 * end for one in data)


def stream(*values: Any, end: bytes = b"\n") -> bytes:
    """A complete streamed response with these events."""
    return HEAD + chunk(events(*values, end=end)) + END


def paced(step_s: float, tokens: int, per_chunk: int, first_s: float = 0.0) -> tuple[tuple[float, int], ...]:
    """A script's chunks: one of one token at first_s, then one of per_chunk tokens every step_s."""
    chunks, made = [(first_s, 1)], 1
    while made < tokens:
        n = min(per_chunk, tokens - made)
        chunks.append((first_s + step_s * len(chunks), n))
        made += n
    return tuple(chunks)


def main() -> None:
    """Takes the place of an engine. --step: seconds of a step. --speculative-config: if given, a step has --per tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--speculative-config", default="")
    parser.add_argument("--step", type=float, default=0.002)
    parser.add_argument("--per", type=int, default=3)
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--die-after", type=int, default=-1)
    args = parser.parse_args()
    print("INFO engine is starting", flush=True)
    print("GPU KV cache size: 12,288 tokens" if args.speculative_config else "GPU KV cache size: 16,384 tokens", flush=True)
    if args.speculative_config:
        print("WARNING Async scheduling not supported with ngram-based speculative decoding and will be disabled.", flush=True)
    else:
        print("INFO Using V2 Model Runner", flush=True)
    if args.die:
        print("ValueError: the drafter does not fit", file=sys.stderr, flush=True)
        raise SystemExit(3)
    per = args.per if args.speculative_config else 1

    def script(body: dict[str, Any]) -> Script:
        n = body["max_tokens"]
        if args.die_after >= 0 and len(server.seen) >= args.die_after:
            raise SystemExit(4)
        chunks = paced(args.step, n, per)
        steps = len(chunks) - 1
        counted = (steps, steps * 2, n - 1 - steps, (n - 1 - steps,)) if per > 1 else (0, 0, 0, ())
        return Script(chunks, counted=counted)

    server = MockServer(script, port=args.port, key=args.api_key)

    async def serve() -> None:
        await asyncio.sleep(args.start)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with server:
            await stop.wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
