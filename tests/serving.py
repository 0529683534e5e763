"""A real server on a free port of the loopback address, for tests: `forerun serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

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
