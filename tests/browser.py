"""A headless Chromium for tests, controlled through its DevTools protocol over two pipes, without a driver, a port or a
library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
PATIENCE_S = 60.0


def program() -> str | None:
    """The path of a Chromium, None if there is none."""
    return next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


class Page:
    """One page. seen: the protocol's events since it was opened, as (method, params)."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._last = send, receive, b"", 0
        self.seen: list[tuple[str, dict[str, Any]]] = []
        target = self._call("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, None)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, params, self._session)

    def open(self, path: Path, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Open a file in a window of width x height pixels and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.seen.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.seen):
            self._message()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that the page requested, its own first."""
        return [p["request"]["url"] for method, p in self.seen if method == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """The messages of the console and of the browser's log."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(p) for method, p in self.seen if method in names]

    def shoot(self, path: Path) -> None:
        """Save a picture of the whole page, as PNG."""
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(png))

    def _call(self, method: str, params: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {PATIENCE_S:.0f} s"
            piece = os.read(self._receive, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        message = dict(json.loads(line))
        if "method" in message:
            self.seen.append((message["method"], message.get("params", {})))
        return message


@contextmanager
def page() -> Iterator[Page]:
    """A page of a new browser, which is ended with the block."""
    found = program()
    assert found is not None
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            spare = os.dup(to_read), os.dup(to_write)
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        command = [found, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        quiet = subprocess.DEVNULL
        browser = subprocess.Popen(command, preexec_fn=pipes, close_fds=False, stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            browser.terminate()
            browser.wait(30)
            os.close(receive)
