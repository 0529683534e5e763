"""Servers on a free port of the loopback address, for tests: `forerun serve` in a process of its own, and one whose engine is
in this process, where a test can look at it and break it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from forerun.llm import LLM
from forerun.server.client import Client
from forerun.server.messages import Channel
from forerun.server.run import configured
from forerun.server.settings import ServerSettings
from forerun.server.worker import Worker, ready

SLOW = 120.0  # seconds to start


class Served:
    """url: of the server. lines: what it has written so far."""

    def __init__(self, model: Path | str | None, *options: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "forerun", "serve", *([str(model)] if model else []), "--port", "0", *options]
        given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FORERUN_CPU_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=given | dict(environment or {})
        )
        self.url, self.lines = "", [""]
        self._listens = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._listens.wait(SLOW) and self.url, "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.match(r"(http://\S+) serves ", line):
                self.url = found[1]
                self._listens.set()
        self._listens.set()

    def end(self, name: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(name)
        return self.process.wait(seconds)


class Inside:
    """A server with the engine of `llm`: the worker in a thread, HTTP in another. exit_code: the worker's, once it ended."""

    def __init__(self, llm: LLM, **settings: Any) -> None:
        self.llm, self.exit_code = llm, -1
        self._settings = ServerSettings(port=0, **settings)
        ours, its = socket.socketpair()
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = self._sock.getsockname()[:2]
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.client = Client(self._settings.max_queue + llm.engine.config.max_num_seqs)
        self._worker = threading.Thread(target=self._work, args=(its,), daemon=True)
        self._http = threading.Thread(target=lambda: asyncio.run(self._serve(ours)), daemon=True)
        self._worker.start()
        self._http.start()
        wait_for(lambda: self.http is not None and self.http.started)

    http: uvicorn.Server | None = None

    def _work(self, its: socket.socket) -> None:
        with its:
            self.exit_code = Worker(self.llm, Channel(its)).run()

    async def _serve(self, ours: socket.socket) -> None:
        await self.client.attach(ours)
        http = uvicorn.Server(configured(self.client, ready(self.llm), self._settings))
        self.http = http
        await http.serve(sockets=[self._sock])
        await self.client.stop()

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        pages = self.llm.engine.scheduler.pages
        return pages.count - pages.free

    def close(self) -> None:
        assert self.http is not None
        self.http.should_exit = self.http.force_exit = True
        self._http.join(20)
        self._worker.join(20)
        assert not self._http.is_alive() and not self._worker.is_alive()


def wait_for(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until it holds; fail if that takes longer."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
