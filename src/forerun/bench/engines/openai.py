"""An OpenAI-compatible server as an endpoint: streaming chat and completions over HTTP. Knows how to ask and how a connection
ends; what the events say is read in reply.py. Starts no server, counts nothing, compares nothing.

A request has failed, whatever the HTTP status was, unless its stream had content, a finish reason, the end mark and output
tokens that can be counted. Whatever goes wrong with a request, RequestFailed is what it raises.
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

from forerun.bench.engines.endpoint import Ask, Piece, RequestFailed, Timeouts
from forerun.bench.engines.metrics import READERS, counters_of, kv_tokens_of
from forerun.bench.engines.reply import Reply, error_of, readable
from forerun.bench.engines.sse import EventReader
from forerun.bench.records.record import Facts, ServerCounters
from forerun.types import SettingError, require

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONGEST_EVENT = 16 << 20  # bytes
LONGEST_ERROR = 64 << 10  # bytes of the body of an error that are read
ERROR_BODY_S = 5.0  # seconds within which that body has to come
END_S = 0.05  # seconds within which a stream has to end after its end mark, for the connection to be used again
SECRET = 8  # characters from which the value of a header counts as secret
OWN_FIELDS = {
    "model": "it has an option of its own: --served-model",
    "max_tokens": "it has an option of its own: --max-tokens",
    "max_completion_tokens": "the length has an option of its own: --max-tokens",
    "n": "one answer for each request is measured; leave it out",
    "stream": "answers are measured as they stream; leave it out",
    "stream_options": "the usage is needed to count tokens; leave it out",
    "messages": "the tasks make the prompts; give your own with --prompts",
    "prompt": "the tasks make the prompts; give your own with --prompts",
    "prediction": "the arm prediction makes them; give -a prediction",
}


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


SMALL = aiohttp.ClientTimeout(total=10)  # of what is asked beside the requests

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
    request, the key among them; never written down. body: fields added to every request, over the dialect's."""

    url: str
    model: str
    dialect: Dialect
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)

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
        limits = self.address.timeouts
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            # a compressed stream would be cut into other pieces than the server's
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **self.address.headers},
            timeout=aiohttp.ClientTimeout(total=limits.request_s, connect=limits.connect_s, sock_read=limits.idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, ask: Ask) -> AsyncIterator[Piece]:
        """As in endpoint.Endpoint."""
        assert self._session is not None, "use it as a context manager"
        limits = self.address.timeouts
        path, body = self._request(ask)
        reply, reader = Reply(ask), EventReader()
        reached = False
        try:
            async with self._session.post(
                self._urls[path], data=json.dumps(body).encode(), allow_redirects=False
            ) as response:
                reached = True
                if response.status != 200:
                    raise RequestFailed(await self._refusal(response))
                async for data in response.content.iter_any():
                    now = self._clock()
                    for event in reader.feed(data):
                        if (piece := reply.read(event, now)) is not None:
                            yield piece
                        if reply.done:
                            break
                    if reply.done:
                        await _finish(response)
                        break
                    if reader.pending > LONGEST_EVENT:
                        raise RequestFailed(f"an event of more than {LONGEST_EVENT >> 20} MiB")
            yield reply.conclude(reader, self._clock())
        except RequestFailed as error:
            raise RequestFailed(self._without_secrets(str(error))) from None
        except aiohttp.ConnectionTimeoutError:
            raise RequestFailed(f"no connection within {limits.connect_s:g} s", unanswered=True) from None
        except aiohttp.SocketTimeoutError:
            raise RequestFailed(f"nothing came for {limits.idle_s:g} s", unanswered=True) from None
        except TimeoutError:
            raise RequestFailed(f"not finished after {limits.request_s:g} s", unanswered=True) from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise RequestFailed(f"no connection: {readable(str(error), 200)}", unanswered=True) from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            said = f"connection dropped: {type(error).__name__}: {readable(str(error), 200)}"
            raise RequestFailed(self._without_secrets(said), unanswered=not reached) from None
        except Exception as error:  # whatever else this answer made fail: the other requests of the run go on
            said = f"the answer could not be read: {type(error).__name__}: {readable(str(error), 200)}"
            raise RequestFailed(self._without_secrets(said)) from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> str:
        """Why, of an answer whose status is not 200: the status and as much of its body as comes soon."""
        said = f"HTTP {response.status}"
        if response.status in range(300, 400):
            return f"{said}: the server redirects to {readable(response.headers.get('Location', '?'), 200)}; give that address"
        body = b""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ERROR_BODY_S):
                async for data in response.content.iter_any():
                    body += data
                    if len(body) > LONGEST_ERROR:
                        break
        words = error_of(body[:LONGEST_ERROR])
        wait = response.headers.get("Retry-After")
        return f"{said}: {words or response.reason}" + (f" (Retry-After: {readable(wait, 40)})" if wait else "")

    def _without_secrets(self, text: str) -> str:
        """Servers repeat a key that they refuse."""
        for value in self.address.headers.values():
            for secret in (value, *value.split()):
                if len(secret) >= SECRET:
                    text = text.replace(secret, "***")
        return text

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
            version = readable(str(said[key]), 80) if isinstance(said, dict) and said.get(key) else None
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
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                async with self._session.post(self.address.root + self.address.dialect.flush, timeout=SMALL) as response:
                    await response.read()

    async def get_text(self, path: str) -> str | None:
        """What a GET answers; None if it does not answer with status 200, or with something that is no text."""
        assert self._session is not None, "use it as a context manager"
        try:
            async with self._session.get(self.address.root + path, timeout=SMALL) as response:
                return (await response.read()).decode(errors="replace") if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def get_json(self, path: str) -> Any:
        """The same, as JSON; None if it is none."""
        text = await self.get_text(path)
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return None


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read what is behind the end mark, which is nothing or a few bytes, so that the connection can be used again. The answer
    is complete whatever happens here."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(END_S):
            async for _ in response.content.iter_any():
                pass


def check_body(body: Mapping[str, Any], samples: int = 0) -> None:
    """Raises SettingError if these fields, added to each request, would change what is measured. samples: draws from each arm
    for the test that all draw alike, which needs its own temperature and seeds."""
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        raise SettingError("body", "NaN or infinity", "JSON has no such number; leave the field out") from None
    for name, why in OWN_FIELDS.items():
        require(name not in body, "body", name, why)
    temperature = body.get("temperature", 0.0)
    fine = type(temperature) in (int, float) and 0 <= temperature <= 100
    require(fine, "body", f"temperature {temperature!r}", "give a temperature of 0 or more, for instance 0.7")
    for name in ("temperature", "seed"):
        needs = "--samples draws at temperature 1 with seeds of its own; leave one of the two out"
        require(not samples or name not in body, "body", name, needs)
