"""An OpenAI-compatible server as an endpoint: streaming chat and completions over HTTP, read strictly. Knows the wire format
and what engines add to it; starts no server, counts nothing, compares nothing.

A request has failed, whatever the HTTP status was, unless its stream had content, a finish reason, a usage and the end mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from forerun.bench.endpoint import Ask, Piece, RequestFailed, TokenLogprob
from forerun.bench.metrics import READERS, counters_of, kv_tokens_of
from forerun.bench.record import Counts, Facts, ServerCounters
from forerun.bench.sse import Event, EventReader

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an engine understands beyond the OpenAI API. ignore_eos: it can be told to go on past the end-of-text token.
    extra: fields that every request carries. ids: it takes token ids as a prompt. version: (path, key) of a GET that says its
    version. salt: the field that keeps prefix caches apart; flush: path of a POST that empties the cache."""

    name: str
    ignore_eos: bool = True
    ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: tuple[str, str] | None = None
    salt: str | None = None
    flush: str | None = None


DIALECTS = {
    d.name: d
    for d in (
        Dialect("vllm", extra={"return_token_ids": True}, version=("/version", "version"), salt="cache_salt"),
        Dialect("llamacpp", extra={"cache_prompt": False}, version=("/props", "build_info")),
        Dialect("sglang", version=("/server_info", "version"), flush="/flush_cache"),
        Dialect("tensorrt-llm", version=("/version", "version")),
        Dialect("openai", ignore_eos=False, ids=False),
    )
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and how to speak to it. url: with or without /v1. model: the name it serves. headers: sent with every
    request, the key among them; never written down. body: fields added to every request, over the dialect's.
    timeout_s: of a whole request, after which it has failed."""

    url: str
    model: str
    dialect: Dialect
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def root(self) -> str:
        """Without a slash at the end and without /v1: where /health and /metrics are."""
        return self.url.rstrip("/").removesuffix("/v1")


class HttpEndpoint:
    """Use it as an async context manager, in one event loop."""

    def __init__(self, address: Address, clock: Callable[[], float] = time.perf_counter) -> None:
        self.address, self._clock = address, clock
        self._session: aiohttp.ClientSession | None = None
        # when many requests are due at once, what each costs here is time that the last one is late
        self._urls = {path: URL(address.root + path) for path in (CHAT, COMPLETIONS)}

    async def __aenter__(self) -> HttpEndpoint:
        # no limit on connections: with one, a request would wait in the client and the wait would look like the server's
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Content-Type": "application/json", **self.address.headers},
            timeout=aiohttp.ClientTimeout(total=self.address.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, ask: Ask) -> AsyncIterator[Piece]:
        """As in endpoint.Endpoint."""
        assert self._session is not None, "use it as a context manager"
        path, body = self._request(ask)
        chat = ask.messages is not None
        seen = _Seen()
        reader = EventReader()
        try:
            async with self._session.post(self._urls[path], data=json.dumps(body).encode()) as response:
                if response.status != 200:
                    said = (await response.text())[:300].replace("\n", " ")
                    raise RequestFailed(f"HTTP {response.status}: {said}")
                async for data in response.content.iter_any():
                    now = self._clock()
                    for event in reader.feed(data):
                        if seen.done:
                            break
                        piece = _piece(event, chat, now, seen)
                        if piece is not None:
                            yield piece
        except TimeoutError:
            raise RequestFailed(f"not finished after {self.address.timeout_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise RequestFailed(f"connection dropped: {type(error).__name__}: {error}") from None
        seen.check(reader)

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        dialect = self.address.dialect
        body: dict[str, Any] = {
            "model": self.address.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.ignore_eos and dialect.ignore_eos:
            body["ignore_eos"] = True
        if ask.salt is not None and dialect.salt is not None:
            body[dialect.salt] = ask.salt
        if ask.prediction is not None:
            body["prediction"] = {"type": "content", "content": ask.prediction}
        if ask.messages is not None:
            path = CHAT
            body["messages"] = list(ask.messages)
            if ask.logprobs is not None:
                body["logprobs"], body["top_logprobs"] = True, ask.logprobs
        else:
            path = COMPLETIONS
            body["prompt"] = ask.text if ask.ids is None else list(ask.ids)
            if ask.logprobs is not None:
                body["logprobs"] = ask.logprobs
        return path, {**body, **dialect.extra, **self.address.body}

    async def facts(self) -> Facts:
        """Engine, version and KV tokens, as far as the server tells them over HTTP."""
        dialect, version, kv = self.address.dialect, None, None
        if dialect.version is not None:
            path, key = dialect.version
            said = await self.get_json(path)
            version = str(said[key]) if isinstance(said, dict) and key in said else None
        text = await self.get_text("/metrics")
        if text is not None:
            kv = kv_tokens_of(dialect.name, text)
        return Facts(dialect.name, version, self.address.root, kv_tokens=kv)

    async def counters(self) -> ServerCounters | None:
        """From the engine's Prometheus metrics; None for a dialect without any, or if they cannot be had."""
        reader = READERS.get(self.address.dialect.name)
        text = None if reader is None else await self.get_text(reader.path)
        return None if reader is None or text is None else counters_of(reader, text)

    async def flush(self) -> None:
        """Empty the prefix cache, where the engine has a request for that."""
        assert self._session is not None, "use it as a context manager"
        if self.address.dialect.flush is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.post(self.address.root + self.address.dialect.flush) as response:
                    await response.read()

    async def get_text(self, path: str) -> str | None:
        """What a GET answers; None if it does not answer with status 200."""
        assert self._session is not None, "use it as a context manager"
        try:
            async with self._session.get(self.address.root + path, timeout=aiohttp.ClientTimeout(total=30)) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def get_json(self, path: str) -> Any:
        """The same, as JSON; None if it is none."""
        text = await self.get_text(path)
        try:
            return None if text is None else json.loads(text)
        except json.JSONDecodeError:
            return None


class _Seen:
    """What of a complete stream has been seen."""

    def __init__(self) -> None:
        self.content = self.finish = self.usage = self.done = False

    def check(self, reader: EventReader) -> None:
        """At the end of the stream. Raises RequestFailed for whatever is missing."""
        if reader.unfinished and not self.done:
            raise RequestFailed("the stream was cut off inside an event")
        if not (self.content or self.finish or self.usage or self.done):
            raise RequestFailed("an empty stream")
        if not self.finish:
            raise RequestFailed("the stream ended without a finish reason")
        if not self.done:
            raise RequestFailed("the stream ended without its end mark [DONE]")
        if not self.content:
            raise RequestFailed("an answer with nothing in it")
        if not self.usage:
            raise RequestFailed("the server sent no usage, so its tokens cannot be counted")


def _piece(event: Event, chat: bool, now: float, seen: _Seen) -> Piece | None:
    """What one event says; None if that is nothing. Raises RequestFailed for an error event."""
    if event.data == b"[DONE]":
        seen.done = True
        return None
    try:
        value = json.loads(event.data)
    except ValueError:
        raise RequestFailed(f"an event that is not JSON: {event.data[:100].decode('utf-8', 'replace')}") from None
    if not isinstance(value, dict):
        raise RequestFailed(f"an event that is no object: {event.data[:100].decode('utf-8', 'replace')}")
    if event.kind == "error" or value.get("error") is not None or value.get("object") == "error":
        said = value.get("error") or value
        if isinstance(said, dict):
            said = said.get("message", said)
        raise RequestFailed(f"an error under HTTP 200: {str(said)[:300]}")
    usage, text, ids, finish, prompt_tokens = value.get("usage"), "", None, None, None
    logprobs: tuple[TokenLogprob, ...] = ()
    for choice in value.get("choices") or ():
        if chat:
            delta = choice.get("delta") or {}
            text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
        else:
            text = choice.get("text") or ""
        finish = choice.get("finish_reason")
        ids = choice.get("token_ids")
        if choice.get("logprobs"):
            logprobs = _logprobs(choice["logprobs"], chat)
    if usage is not None:
        seen.usage = True
        prompt_tokens = usage.get("prompt_tokens")
    seen.content = seen.content or bool(text) or bool(ids)
    seen.finish = seen.finish or finish is not None
    counts = _counts(value, usage)
    queued_ms = (value.get("metrics") or {}).get("queue_time_ms")
    queued_s = None if queued_ms is None else queued_ms / 1000
    if not (text or ids or finish or usage or counts):
        return None
    return Piece(now, text, None if ids is None else tuple(ids), finish, usage, counts, prompt_tokens, logprobs, queued_s)


def _logprobs(value: Mapping[str, Any], chat: bool) -> tuple[TokenLogprob, ...]:
    if chat or "content" in value:
        return tuple(
            TokenLogprob(
                t["token"], t["logprob"], tuple((o["token"], o["logprob"]) for o in t.get("top_logprobs") or ())
            )
            for t in value.get("content") or ()
        )
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        TokenLogprob(token, logprob, tuple(sorted((top or {}).items(), key=lambda item: -item[1])))
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _counts(value: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Counts | None:
    """Drafting of one request: vLLM's `metrics`, llama.cpp's `timings`, or the prediction counts of the OpenAI API.

    vLLM counts the verify steps that had a draft, in a histogram of how many of its tokens were accepted, and includes tokens
    that were accepted behind the end of the answer.

    A verify step gives one token more than it accepts, and the step that ends the prompt gives the first token, so there were
    n - 1 - accepted verify steps.
    """
    own = (value.get("metrics") or {}).get("speculative_decoding")
    if own is not None:
        histogram, accepted = own["acceptance_histogram"], own["num_accepted_draft_tokens"]
        drafting, at = own["num_spec_steps"], tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
        steps = max((usage or {}).get("completion_tokens", 0) - 1 - accepted, drafting)
        return Counts(steps, drafting, own["num_draft_tokens"], accepted, (), at)
    timings = value.get("timings")
    if timings is not None and "predicted_n" in timings:
        accepted = timings.get("draft_n_accepted") or 0
        return Counts(max(timings["predicted_n"] - 1 - accepted, 0), 0, timings.get("draft_n") or 0, accepted, (), ())
    details = (usage or {}).get("completion_tokens_details") or {}
    if details.get("accepted_prediction_tokens") or details.get("rejected_prediction_tokens"):
        accepted, rejected = details.get("accepted_prediction_tokens") or 0, details.get("rejected_prediction_tokens") or 0
        steps = max((usage or {}).get("completion_tokens", 0) - 1 - accepted, 0)
        return Counts(steps, 0, accepted + rejected, accepted, (), ())
    return None
