"""Runs the server: the engine process, then HTTP until a signal comes or the engine breaks."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from forerun.checks import SettingError
from forerun.models.tokenizer import Tokenizer
from forerun.prompts import Prompts
from forerun.server.app import Server
from forerun.server.client import Client, Gone
from forerun.server.messages import Ready
from forerun.server.settings import ServerSettings

SHOWN = 5.0  # seconds that /health tells of a broken engine before the process ends
LAST = 5.0  # seconds that answers have to end after their requests were ended


def serve(settings: ServerSettings, llm: Mapping[str, Any], say: Callable[[str], None]) -> str | None:
    """Serve until a signal comes; return None, or why the engine does not work any more. llm: the arguments of LLM; say: takes
    a line once the server listens. Raises SettingError for settings that cannot be used."""
    with listening(settings) as sock:
        return asyncio.run(_serve(settings, llm, say, sock))


def listening(settings: ServerSettings) -> socket.socket:
    """A bound socket. Raises SettingError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        name, value = ("port", settings.port) if settings.port else ("host", settings.host)
        remedy = f"cannot listen at {settings.host} ({error.strerror or error}); give another, or port 0 for a free one"
        raise SettingError(name, value, remedy) from None


async def _serve(
    settings: ServerSettings, llm: Mapping[str, Any], say: Callable[[str], None], sock: socket.socket
) -> str | None:
    broken = asyncio.Event()
    most = settings.max_queue + int(llm.get("max_num_seqs", 32))
    client = Client(most, broken.set)
    try:
        ready = await client.start(llm)
        http = HTTP(configured(client, ready, settings))
        watch = asyncio.create_task(_end(http, client, broken, settings.grace))
        host, port = sock.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port} serves {ready.name}")
        await http.serve(sockets=[sock])
        watch.cancel()
    except Gone as error:
        return str(error)
    finally:
        await client.stop()
    return client.broken


class HTTP(uvicorn.Server):
    """It takes signals as the start of a shutdown and does not raise them again afterwards."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, names = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for name in names:
            loop.add_signal_handler(name, self.handle_exit, name, None)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(name)


def configured(client: Client, ready: Ready, settings: ServerSettings) -> uvicorn.Config:
    app = Server(client, ready, Prompts(Tokenizer(Path(ready.folder)), ready.limits), settings).app()
    return uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=int(settings.grace + LAST + 1),
    )  # fmt: skip


async def _end(http: uvicorn.Server, client: Client, broken: asyncio.Event, grace: float) -> None:
    """Once a signal has come, no request is taken any more, and those under way have the grace time. If the engine breaks, end
    the server after a while."""
    while not http.should_exit:
        if broken.is_set():
            await asyncio.sleep(SHOWN)
            http.should_exit = True
        await asyncio.sleep(0.1)
    client.closing = True
    loop = asyncio.get_running_loop()
    end = loop.time() + grace
    while client.under_way and loop.time() < end:
        await asyncio.sleep(0.05)
    client.fail_all(f"the server is shutting down, and the request did not end within {grace:g} s")
