"""Servers as processes: started, watched until they are ready, measured, and ended with everything they started. Knows
processes and logs; launching.py makes the command lines.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.bench.engines.launching import ServedArm, Template, command_of, file_of, places, read_log
from forerun.bench.engines.logs import ended, reason
from forerun.bench.records.record import Facts
from forerun.bench.records.redaction import hide
from forerun.types import SettingError

TAIL = 12  # lines of the log that are shown when a server does not come up
SHARE = 0.9  # of the memory that is free, for all servers that are up at once


@dataclass(frozen=True, slots=True)
class Launch:
    """What every arm of a run is launched with. program: in place of the template's own. context: tokens of a sequence. slots:
    requests at once. logs: a folder to leave the logs in; None: they are deleted. memory_share: of the device's memory, for one
    server."""

    template: Template
    model: str
    program: str | None = None
    context: int = 4096
    slots: int = 1
    extra: tuple[str, ...] = ()
    logs: Path | None = None
    memory_share: float = SHARE


class Server:
    """One arm's process. start() and stop() may be called again and again; the facts are those of the first start."""

    def __init__(self, launch: Launch, arm: ServedArm) -> None:
        self.launch, self.arm = launch, arm
        self.port = 0
        self.grace_s = 15.0
        self.facts: Facts | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forerun-")
        self._log = (launch.logs or Path(self._folder.name)) / f"{_file_name(arm.name)}.log"
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The command line as it will be run. Raises SettingError if it cannot be made."""
        template, launch = self.launch.template, self.launch
        file = Path(self._folder.name) / "config.yaml"
        values = places(
            self.arm, launch.model, self.port, launch.context, launch.slots, str(file), launch.memory_share
        )
        content = file_of(template, self.arm, values)
        if content is not None:
            file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return [*command_of(template, self.arm, values, launch.program), *launch.extra]

    async def start(self) -> None:
        """Until it answers. Cancelled, it ends the process. Raises SettingError, with the reason that its log gives, if the
        server ends or takes too long."""
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
                    start_new_session=True,  # so that what it starts can be found and ended with it
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
        """End it and everything it started: asked to, and after grace_s seconds made to."""
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
        """A log that is left to the user holds no secret that the command line gave away."""
        if self.launch.logs is not None:
            with contextlib.suppress(OSError):
                said = self.log()
                if (hidden := hide(said)) != said:
                    self._log.write_text(hidden, encoding="utf-8")

    def log(self) -> str:
        """All it has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _why(self) -> str:
        """The reason that the log gives, its end, and where the whole of it is, which outlives this program."""
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


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def _from_home(word: str) -> str:
    """A path below the user's folder without naming the user, one of this package as forerun/..."""
    home, source = str(Path.home()) + os.sep, str(Path(__file__).parents[3]) + os.sep
    if word.startswith(source):
        return word.removeprefix(source)
    return "~/" + word.removeprefix(home) if word.startswith(home) else word


def session_of(leader: int) -> list[int]:
    """The processes of the session that this process leads, itself included; none where /proc does not tell."""
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
    """Bytes of memory that its processes hold, memory they share counted once in all (proportional set size); None where it
    cannot be read."""
    total = 0
    for pid in session_of(leader):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total or None


def available_memory() -> int | None:
    """Bytes that can be used without swapping; None where it cannot be read."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    return None


def memory_share(servers: int) -> float:
    """The share of a device's memory that each of so many servers may take, so that all of them fit beside what is in use
    already. The device is the GPU that has least free, or the machine's own memory where there is no GPU."""
    import torch

    if torch.cuda.is_available():
        free = min(free / total for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count())))
    else:
        available, whole = available_memory(), total_memory()
        free = available / whole if available and whole else 1.0
    return max(math.floor(100 * SHARE * free / servers) / 100, 0.01)


def total_memory() -> int | None:
    """Bytes of the machine's memory; None where it cannot be read."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def describe(arms: Mapping[str, Server]) -> dict[str, str]:
    """The command line of each, for a look before anything is started."""
    return {name: " ".join(server.command()) for name, server in arms.items()}
