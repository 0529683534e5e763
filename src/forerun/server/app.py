"""The routes. A request is read and checked, its prompt is encoded, and the engine has accepted it before the answer begins, so
whatever is wrong with it is an error of its own and no part of a stream. A client that leaves ends its requests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun import __version__
from forerun.checks import SettingError, require
from forerun.prompts import Prompts
from forerun.server import openapi, schemas, tools
from forerun.server.client import Answers, Busy, Client, Gone
from forerun.server.forms import Model, error_body
from forerun.server.messages import Ready
from forerun.server.replies import ChatReply, CompletionReply, Piece, Reply, RequestError
from forerun.server.settings import ServerSettings
from forerun.structured import StructuredOutput
from forerun.types import Request

INLINE = 16384  # bytes of a body; the prompt of a longer one is encoded in a thread
RETRY_AFTER = 1  # seconds
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
POLICY = (  # nothing from elsewhere, and no script but the page's own
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    f"frame-ancestors 'none'; script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)

Asked = TypeVar("Asked", bound=schemas.Strict)


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class Refusal(HTTPException):
    """An answer with an error. kind, param, code: as OpenAI's errors have them."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message, headers)
        self.body = error_body(message, kind or ("invalid_request_error" if status < 500 else "server_error"), param, code)


class Left(Exception):
    """The client has closed its connection."""


class Server:
    def __init__(self, client: Client, ready: Ready, prompts: Prompts, settings: ServerSettings) -> None:
        self._client, self._ready, self._prompts, self._settings = client, ready, prompts, settings
        self._names = settings.served_model_names or (ready.name,)
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/live", self.live),
            Route("/", self.page),
        ]
        app: ASGIApp = Starlette(routes=routes, exception_handlers={HTTPException: refused, Exception: failed})
        return with_keys(app, self._settings.api_keys) if self._settings.api_keys else app

    async def chat(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        asked = parsed(schemas.ChatRequest, body)

        def prompts() -> list[tuple[int, ...]]:
            return [self._conversation(asked)]

        groups = await self._groups(asked, prompts, len(body))
        reasoning = self._settings.reasoning_parser == "think"
        reply = ChatReply(asked, groups, self._names[0], self._prompts.tokenizer, reasoning)
        return await self._answer(request, asked, reply, groups)

    async def completions(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        asked = parsed(schemas.CompletionRequest, body)

        def prompts() -> list[tuple[int, ...]]:
            return [self._prompts.ids(one) for one in asked.prompts]

        groups = await self._groups(asked, prompts, len(body))
        reply = CompletionReply(asked, groups, self._names[0], self._prompts.tokenizer)
        return await self._answer(request, asked, reply, groups)

    async def tokenize(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        asked = parsed(schemas.TokenizeRequest, body)
        self._check_model(asked.model)

        def encode() -> Sequence[int]:
            if asked.messages is not None:
                return self._conversation(asked)
            return self._prompts.tokenizer.encode(asked.prompt or "", asked.add_special_tokens is not False)

        with settings_named():
            ids = await self._encoded(encode, len(body))
        return JSON({"count": len(ids), "max_model_len": self._ready.limits.max_model_len, "tokens": ids})

    async def detokenize(self, request: HTTPRequest) -> Response:
        asked = parsed(schemas.DetokenizeRequest, await self._body(request))
        self._check_model(asked.model)
        return JSON({"prompt": self._prompts.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    async def models(self, request: HTTPRequest) -> Response:
        return JSON({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: HTTPRequest) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSON(self._model(name))

    async def health(self, request: HTTPRequest) -> Response:
        if self._client.broken is not None:
            return JSON({"status": "broken", "error": self._client.broken}, 503)
        if self._client.closing:
            return JSON({"status": "shutting down"}, 503)
        return JSON({"status": "ok"})

    async def version(self, request: HTTPRequest) -> Response:
        return JSON({"version": __version__})

    async def metrics(self, request: HTTPRequest) -> Response:
        text = self._client.metrics.text(self._names[0], self._ready.kv_tokens, self._settings.metrics_names)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def live(self, request: HTTPRequest) -> Response:
        return JSON(self._client.metrics.live(self._names[0]))

    async def page(self, request: HTTPRequest) -> Response:
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def openapi(self, request: HTTPRequest) -> Response:
        return JSON(openapi.document(bool(self._settings.api_keys)))

    def _model(self, name: str) -> Model:
        length = self._ready.limits.max_model_len
        return {"id": name, "object": "model", "created": self._created, "owned_by": "forerun", "max_model_len": length}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            known = ", ".join(self._names)
            raise Refusal(404, f"model {name!r} is not served; give {known}", "model", "model_not_found")

    async def _body(self, request: HTTPRequest) -> bytes:
        """The body. Raises Refusal if it is of another type, is too long, or comes too slowly."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, f"content-type is {kind or 'missing'!r}; give application/json")
        most, data = self._settings.max_body_bytes, bytearray()
        if int(request.headers.get("content-length") or 0) > most:
            raise too_long(most)
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise too_long(most)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self._settings.body_timeout:g} s") from None
        return bytes(data)

    def _conversation(self, asked: schemas.ChatRequest | schemas.TokenizeRequest) -> tuple[int, ...]:
        """The ids of its messages and tools."""
        messages, described = tools.conversation(
            self._prompts.tokenizer,
            [message.plain() for message in asked.messages or ()],
            [tool.plain() for tool in asked.shown],
        )
        ids = self._prompts.chat_ids(
            messages,
            tools=described,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=bool(asked.continue_final_message),
            chat_template_kwargs=asked.chat_template_kwargs,
        )
        return tuple(ids)

    async def _groups(
        self, asked: schemas.Sampling, prompts: Callable[[], list[tuple[int, ...]]], size: int
    ) -> list[list[Request]]:
        """The engine's requests: n for each prompt. size: bytes of the body. Raises Refusal."""
        self._check_model(asked.model)
        most, length = self._settings.max_prompt_tokens, self._ready.limits.max_model_len

        def make() -> list[list[Request]]:
            params = asked.sampling(self._ready.sampling)
            if isinstance(asked, schemas.ChatRequest) and asked.shown:
                form = tools.form(self._prompts.tokenizer)
                if forced := [(function.name, function.parameters) for function in asked.forced]:
                    several = asked.tool_choice == "required" and asked.parallel_tool_calls is not False
                    params = replace(params, structured=StructuredOutput(grammar=tools.grammar(forced, form, several)))
            require(params.n <= self._settings.max_n, "n", params.n, f"this server allows at most {self._settings.max_n}")
            found = []
            for ids in prompts():
                if len(ids) >= length or (most is not None and len(ids) > most):
                    allowed = length - 1 if most is None else min(length - 1, most)
                    where = "messages" if isinstance(asked, schemas.ChatRequest) else "prompt"
                    raise Refusal(400, f"{where}: {len(ids)} tokens; give at most {allowed}", where, "context_length_exceeded")
                found.append(self._prompts.requests(ids, params))
            return found

        with settings_named(asked.field_of):
            return await self._encoded(make, size)

    @staticmethod
    async def _encoded(make: Callable[[], Any], size: int) -> Any:
        """Call it, in a thread if there is much to encode."""
        return make() if size <= INLINE else await asyncio.to_thread(make)

    async def _answer(
        self, request: HTTPRequest, asked: schemas.Sampling, reply: Reply, groups: Sequence[Sequence[Request]]
    ) -> Response:
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout
        try:
            answers = self._client.submit(groups)
        except Busy:
            message = f"the queue is full: {self._client.under_way} requests are under way"
            raise Refusal(
                429, message, code="queue_full", kind="rate_limit_error", headers={"Retry-After": str(RETRY_AFTER)}
            ) from None
        except Gone as error:
            raise Refusal(503, str(error)) from None
        with ExitStack() as closing:
            closing.callback(answers.close)
            try:
                with settings_named(asked.field_of):
                    async with asyncio.timeout_at(deadline), watched(request.receive, answers):
                        await answers.accepted()
                        if not asked.stream:
                            return JSON(await collected(answers, reply))
                return EventStream(asked, reply, answers, deadline, closing.pop_all())
            except TimeoutError:
                raise Refusal(504, f"the answer took longer than {self._settings.request_timeout:g} s") from None
            except RequestError as error:
                raise Refusal(500, f"the request failed: {error}") from None
            except Gone as error:
                raise Refusal(503, str(error)) from None
            except Left:
                return Response(status_code=499)  # nobody reads it


async def collected(answers: Answers, reply: Reply) -> dict[str, Any]:
    """The whole answer."""
    pieces: dict[str, Piece] = {}
    while arrived := await answers.next():
        for name, piece in reply.take(arrived).items():
            pieces.setdefault(name, Piece()).add(piece)
    return reply.whole(pieces)


class EventStream(Response):
    """The answer as server-sent events. One that fails ends with an event that has an error, and without [DONE]."""

    def __init__(
        self, asked: schemas.Sampling, reply: Reply, answers: Answers, deadline: float, closing: ExitStack
    ) -> None:
        """deadline: in the loop's seconds; closing: left at the end."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._asked, self._reply, self._answers = asked, reply, answers
        self._deadline, self._closing = deadline, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._closing:
            try:
                async with asyncio.timeout_at(self._deadline), watched(receive, self._answers):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._send_events(send)
                last = b"data: [DONE]\n\n"
            except Left:
                return
            except (TimeoutError, RequestError, Gone) as error:
                why = "the answer took too long" if isinstance(error, TimeoutError) else str(error)
                last = event(error_body(why, "server_error"))
            try:
                async with asyncio.timeout(1):  # a client that does not read gets no more
                    await send({"type": "http.response.body", "body": last, "more_body": False})
            except TimeoutError:
                return

    async def _send_events(self, send: Send) -> None:
        asked, reply = self._asked, self._reply
        while arrived := await self._answers.next():
            chunks = reply.chunks(reply.take(arrived))
            if asked.wants_usage_always:
                chunks = [chunk | {"usage": reply.usage()} for chunk in chunks]
            elif asked.wants_usage:
                chunks = [chunk | {"usage": None} for chunk in chunks]
            if chunks:
                body = b"".join(map(event, chunks))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if asked.wants_usage:
            await send({"type": "http.response.body", "body": event(reply.last()), "more_body": True})


def event(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


@asynccontextmanager
async def watched(receive: Receive, answers: Answers) -> AsyncIterator[None]:
    """A context in which the answers fail with Left when the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answers.fail(Left())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class settings_named:
    """A context that turns a SettingError into a Refusal that names the field. field_of: the field of a setting."""

    def __init__(self, field_of: Callable[[str], str] = str) -> None:
        self._field_of = field_of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SettingError):
            field = self._field_of(error.name)
            raise Refusal(400, str(error) if field == error.name else f"{field}: {error}", field) from None


def parsed(kind: type[Asked], body: bytes) -> Asked:
    """The request in a body. Raises Refusal that names the first field that is wrong."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        message, field = schemas.refusal(error)
        raise Refusal(400, message, field) from None


def too_long(most: int) -> Refusal:
    return Refusal(413, f"the body has more than {most} bytes")


async def refused(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error.body if isinstance(error, Refusal) else error_body(error.detail, "invalid_request_error")
    return JSON(body, error.status_code, headers=error.headers)


async def failed(request: HTTPRequest, error: Exception) -> Response:
    return JSON(error_body(f"{type(error).__name__} in the server", "server_error"), 500)


def with_keys(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """The app behind keys. The comparison takes the same time for all keys of a length and for all places of a difference."""
    known = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in openapi.UNGUARDED:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            word, _, key = given.partition(b" ")
            digest = hashlib.sha256(key.strip()).digest()
            same = [hmac.compare_digest(digest, one) for one in known]
            if word.lower() != b"bearer" or not any(same):
                body = error_body("the API key is missing or wrong", "invalid_request_error", code="invalid_api_key")
                await JSON(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
