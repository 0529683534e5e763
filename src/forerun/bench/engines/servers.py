"""Servers as processes: starting them, waiting until they are ready, and ending them with all their children. Knows processes
and logs; launching.py makes the command lines.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from forerun.bench.engines.arms import Arm
from forerun.bench.engines.launching import Template, command_of, file_of, places, read_log
from forerun.bench.engines.logs import ended, reason
from forerun.bench.records.machine import available_memory, total_memory
from forerun.bench.records.record import Facts
from forerun.bench.records.redaction import hide
from forerun.checks import SettingError

TAIL = 12  # lines of the log in the message about a server that does not become ready
SHARE = 0.9  # of the free memory, for all servers that are up at once


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch settings that all arms of a run share. program: replaces the template's. context: the most tokens of a
    sequence. slots: the most requests at once. extra: words at the end of the command. logs: the folder in which logs are kept,
    None: they are deleted. memory_share: of the device's memory, for one server."""

    template: Template
    model: str
    program: str | None = None
    context: int = 4096
    slots: int = 1
    extra: tuple[str, ...] = ()
    logs: Path | None = None
    memory_share: float = SHARE


class Server:
    """The server process of one arm. It can be started and stopped many times. facts: of the first start."""

    def __init__(self, launch: Launch, arm: Arm) -> None:
        self.launch, self.arm = launch, arm
        self.port = 0
        self.grace_s = 15.0
        self.facts: Facts | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forerun-")
        self._log = (launch.logs or Path(self._folder.name)) / (re.sub(r"[^\w-]", "_", arm.name) + ".log")
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The command line, with the port of the last start. Writes the configuration file. Raises SettingError."""
        template, launch = self.launch.template, self.launch
        file = Path(self._folder.name) / "config.yaml"
        values = places(self.arm, launch.model, self.port, launch.context, launch.slots, str(file), launch.memory_share)
        content = file_of(template, self.arm, values)
        if content is not None:
            file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return [*command_of(template, self.arm, values, launch.program), *launch.extra]

    async def start(self) -> None:
        """Start it and wait until it answers. The process is ended if this is cancelled. Raises SettingError, with the reason
        found in the log, if the process ends or is not ready in time."""
        if self.running:
            return
        begin = time.perf_counter()
        command = self._spawn()
        try:
            while not self._ready(begin):
                await asyncio.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        if self.facts is None:
            assert self._process is not None
            said = read_log(self.launch.template, self.log())
            self.facts = Facts(
                self.launch.template.engine,
                said.version,
                None,
                tuple(_from_home(word) for word in hide(command)),
                said.kv_tokens,
                time.perf_counter() - begin,
                memory_of_session(self._process.pid),
                said.scheduler,
                hide(said.fallbacks),
                hide(said.warnings),
            )

    def _spawn(self) -> list[str]:
        self.port = _free_port()
        command, template = self.command(), self.launch.template
        with open(self._log, "wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **template.environment},
                    start_new_session=True,  # so that its children can be found and ended with it
                )
            except OSError as error:
                raise SettingError(
                    "engine", command[0], f"cannot be started ({error.strerror}); give the program's path with --program"
                ) from None
        return command

    def _ready(self, begin: float) -> bool:
        template = self.launch.template
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise SettingError("engine", self.arm.name, f"its server {ended(code)} before it was ready{self._why()}")
        if time.perf_counter() - begin > template.ready_seconds:
            late = f"its server was not ready after {template.ready_seconds:g} s; set ready_seconds in a --template"
            raise SettingError("engine", self.arm.name, late + self._why())
        return _answers(self.url + template.ready)

    def stop(self) -> None:
        """End the process and all its children: by SIGTERM, and after grace_s seconds by SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal(process.pid, signal.SIGTERM)
        _until_gone(process, self.grace_s)
        _signal(process.pid, signal.SIGKILL)
        for pid in session_of(process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _until_gone(process, self.grace_s)
        self._clean_log()

    def _clean_log(self) -> None:
        """Hide secrets in a log that is kept."""
        if self.launch.logs is not None:
            with contextlib.suppress(OSError):
                said = self.log()
                if (hidden := hide(said)) != said:
                    self._log.write_text(hidden, encoding="utf-8")

    def log(self) -> str:
        """The log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _why(self) -> str:
        """The reason found in the log, the log's end, and the path of a copy that stays when this program has ended."""
        said = self.log()
        if not said.strip():
            return ". It logged nothing."
        path = self._log
        if self.launch.logs is None:
            path = Path(tempfile.mkdtemp(prefix="forerun-log-")) / self._log.name
        path.write_text(hide(said), encoding="utf-8")
        found = reason(said)
        why = f": {found}" if found else "; its log names no reason."
        tail = "\n".join(f"  {line}" for line in said.splitlines()[-TAIL:])
        return f"{why}\nThe end of its log:\n{tail}\nThe whole log: {path}"


def _until_gone(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (process.poll() is None or session_of(process.pid)):
        time.sleep(0.02)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _from_home(word: str) -> str:
    """A path with ~ for the user's home folder; a path in this package as forerun/..."""
    home, source = str(Path.home()) + os.sep, str(Path(__file__).parents[3]) + os.sep
    if word.startswith(source):
        return word.removeprefix(source)
    return "~/" + word.removeprefix(home) if word.startswith(home) else word


def session_of(leader: int) -> list[int]:
    """The ids of the running processes in the session of this leader. Empty on systems without /proc."""
    found = []
    if sys.platform == "linux":
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == leader and fields[0] != "Z":
                        found.append(int(entry.name))
    return found


def memory_of_session(leader: int) -> int | None:
    """The proportional set size of the session's processes in bytes, which counts shared memory once. None if unknown."""
    total = 0
    for pid in session_of(leader):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total or None


def memory_share(servers: int) -> float:
    """The share of a device's memory for each of this many servers, so that all fit into what is free. The device is the GPU
    with the least free memory, or the machine itself if it has no GPU."""
    import torch

    if torch.cuda.is_available():
        free = min(free / total for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count())))
    else:
        available, whole = available_memory(), total_memory()
        free = available / whole if available and whole else 1.0
    return max(math.floor(100 * SHARE * free / servers) / 100, 0.01)
