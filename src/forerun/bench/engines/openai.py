"""An OpenAI-compatible server as an endpoint: streamed chat and completions over HTTP. Knows requests and connections; reply.py
reads the events of an answer.

A request has failed, whatever the HTTP status was, unless its stream had content, a finish reason, the end mark and output
tokens that can be counted. Every failure is raised as RequestFailed.
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

from forerun.bench.engines.dialects import Dialect
from forerun.bench.engines.endpoint import Piece, Request, RequestFailed, Timeouts
from forerun.bench.engines.fields import readable
from forerun.bench.engines.metrics import counters_of, kv_tokens_of
from forerun.bench.engines.reply import Reply, error_of
from forerun.bench.engines.sse import EventReader
from forerun.bench.records.record import Facts, ServerCounters
from forerun.bench.records.redaction import remember
from forerun.checks import SettingError, require

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONGEST_EVENT = 16 << 20  # bytes
LONGEST_ERROR = 64 << 10  # bytes of an error's body that are read
ERROR_BODY_S = 5.0  # seconds that are waited for that body
END_S = 0.05  # seconds between the end mark and the end of the stream, after which the connection is not used again
SMALL = aiohttp.ClientTimeout(total=10)  # of requests for facts and counters
SECRET = 8  # characters from which a word in a header counts as secret
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
class Address:
    """Where a server is and what requests to it have. url: with or without /v1. model: its name there. headers: of every
    request, the key among them; they are secret. body: fields of every request, over the dialect's."""

    url: str
    model: str
    dialect: Dialect
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def root(self) -> str:
        """The URL without /v1, below which /health and /metrics are."""
        return self.url.rstrip("/").removesuffix("/v1")


class HttpEndpoint:
    """Use it as an async context manager, in one event loop."""

    def __init__(self, address: Address, clock: Callable[[], float] = time.perf_counter) -> None:
        self.address, self._clock = address, clock
        self._session: aiohttp.ClientSession | None = None
        remember(*(w for value in address.headers.values() for w in (value, *value.split()) if len(w) >= SECRET))
        # made once: when many requests are due at once, the work before each delays the later ones
        self._urls = {path: URL(address.root + path) for path in (CHAT, COMPLETIONS)}

    async def __aenter__(self) -> HttpEndpoint:
        # no limit on connections: a request would wait for one here, and the wait would count as the server's
        limits = self.address.timeouts
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            # no compression: it would change the boundaries of the chunks
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **self.address.headers},
            timeout=aiohttp.ClientTimeout(total=limits.request_s, connect=limits.connect_s, sock_read=limits.idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: Request) -> AsyncIterator[Piece]:
        assert self._session is not None, "use it as a context manager"
        limits = self.address.timeouts
        path, body = self._request(request)
        reply, reader = Reply(request), EventReader()
        reached = False
        try:
            async with self._session.post(self._urls[path], data=json.dumps(body).encode(), allow_redirects=False) as response:
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
        except RequestFailed:
            raise
        except aiohttp.ConnectionTimeoutError:
            raise RequestFailed(f"no connection within {limits.connect_s:g} s", unanswered=True) from None
        except aiohttp.SocketTimeoutError:
            raise RequestFailed(f"nothing came for {limits.idle_s:g} s", unanswered=True) from None
        except TimeoutError:
            raise RequestFailed(f"not finished after {limits.request_s:g} s", unanswered=True) from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise RequestFailed(f"no connection: {readable(str(error), 200)}", unanswered=True) from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            said = f"{type(error).__name__}: {readable(str(error), 200)}"
            raise RequestFailed(f"connection dropped: {said}", unanswered=not reached) from None
        except Exception as error:  # an error in reading this answer must not end the other requests
            said = f"{type(error).__name__}: {readable(str(error), 200)}"
            raise RequestFailed(f"the answer could not be read: {said}") from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> str:
        """Why the status is not 200: the status and the part of the body that comes within ERROR_BODY_S."""
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

    def _request(self, request: Request) -> tuple[str, dict[str, Any]]:
        dialect = self.address.dialect
        body: dict[str, Any] = {
            "model": self.address.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos and dialect.ignore_eos:
            body["ignore_eos"] = True
        if request.salt is not None and dialect.salt is not None:
            body[dialect.salt] = request.salt
        if request.prediction is not None:
            body["prediction"] = {"type": "content", "content": request.prediction}
        if request.messages is not None:
            path = CHAT
            body["messages"] = list(request.messages)
            if request.logprobs is not None:
                body["logprobs"], body["top_logprobs"] = True, request.logprobs
        else:
            path = COMPLETIONS
            body["prompt"] = request.text if request.ids is None else list(request.ids)
            if request.logprobs is not None:
                body["logprobs"] = request.logprobs
        return path, {**body, **dialect.extra, **self.address.body}

    async def facts(self) -> Facts:
        """Engine, version and capacity of the KV cache, as far as the server tells them over HTTP."""
        dialect, version, kv = self.address.dialect, None, None
        if dialect.version is not None:
            path, key = dialect.version
            said = await self._get_json(path)
            version = readable(str(said[key]), 80) if isinstance(said, dict) and said.get(key) else None
        if (text := await self._get_text("/metrics")) is not None:
            kv = kv_tokens_of(dialect.metrics, text)
        return Facts(dialect.name, version, self.address.root, kv_tokens=kv)

    async def counters(self) -> ServerCounters | None:
        """From the server's metrics; None if it has none or does not answer."""
        metrics = self.address.dialect.metrics
        text = None if metrics is None else await self._get_text(metrics.path)
        return None if metrics is None or text is None else counters_of(metrics, text)

    async def flush(self) -> None:
        """Empty the prefix cache, if the dialect has a request for that."""
        assert self._session is not None, "use it as a context manager"
        if self.address.dialect.flush is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                async with self._session.post(self.address.root + self.address.dialect.flush, timeout=SMALL) as response:
                    await response.read()

    async def _get_text(self, path: str) -> str | None:
        """The body of a GET; None if there is no answer with status 200."""
        assert self._session is not None, "use it as a context manager"
        try:
            async with self._session.get(self.address.root + path, timeout=SMALL) as response:
                return (await response.read()).decode(errors="replace") if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def _get_json(self, path: str) -> Any:
        """The same as JSON; None if it is not JSON."""
        text = await self._get_text(path)
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return None


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read the few bytes behind the end mark, so that the connection can be used again. The answer is complete already."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(END_S):
            async for _ in response.content.iter_any():
                pass


def check_body(body: Mapping[str, Any], samples: int = 0) -> None:
    """Raises SettingError for fields that must not be added to requests, since they would change what is measured. samples: the
    number of draws from each arm that test its distribution, which need their own temperature and seeds."""
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
