"""What a user asks of a run: the options of `forerun bench` as values, which of them go together, how they are written again on
a command line and in a record, and which may differ when a run is resumed. Knows no engine and starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.engines.endpoint import Timeouts
from forerun.bench.records.redaction import HIDDEN, hide, hide_command
from forerun.bench.workloads import tasks as workloads
from forerun.checks import LARGEST, SettingError, Whole, require

LIMITS = Timeouts()


@dataclass(frozen=True, slots=True)
class Options:
    """As on the command line, where each is explained."""

    model: str | None = None
    engine: str = "forerun"
    arms: tuple[str, ...] = ()
    tasks: tuple[str, ...] = workloads.DEFAULT_TASKS
    prompts: tuple[Path, ...] = ()
    trace: Path | None = None
    trace_speed: float = 1.0
    concurrency: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    requests: int | None = None
    repetitions: int = 8
    warmups: int = 1
    max_tokens: int = 128
    control: bool = False
    samples: int = 0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    template: Path | None = None
    program: str | None = None
    server_args: str = ""
    context: int = 4096
    slots: int | None = None
    alive: str = "auto"
    logs: Path | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    headers: tuple[str, ...] = ()
    body: str = "{}"
    timeout_s: float = LIMITS.request_s
    connect_timeout_s: float = LIMITS.connect_s
    idle_timeout_s: float = LIMITS.idle_s
    tokenizer: str | None = None

    @property
    def remote(self) -> bool:
        """Whether a server is measured."""
        return self.engine != "forerun"

    @property
    def running(self) -> bool:
        """Whether that server runs already."""
        return self.engine.lower().startswith(("http://", "https://"))

    @property
    def timeouts(self) -> Timeouts:
        """Of a request to a server. Raises SettingError."""
        return Timeouts(self.timeout_s, self.connect_timeout_s, self.idle_timeout_s)

    def check(self) -> None:
        """Raises SettingError for options that do not go together; nothing that was given is silently ignored."""
        for name in ("program", "template", "server_args", "logs", "alive", "context"):
            fits = self.remote and not self.running
            self._only(name, fits, "it is for servers that are started here; give --engine vllm")
        for name in ("served_model", "api_key_env", "headers"):
            self._only(name, self.running, "it is for a server that runs already; give --engine URL")
        for name in ("body", "timeout_s", "connect_timeout_s", "idle_timeout_s", "tokenizer"):
            self._only(name, self.remote, "it is for servers; give --engine")
        for name in ("dtype", "device"):
            self._only(
                name, not self.remote, "it is for the engine in this process; give a server its own flags with --server-args"
            )
        self._only("slots", not self.running, "a server that runs has its own; leave it out")
        self._only("trace_speed", self.trace is not None, "it is for a recorded log; give --trace")
        self._only("tasks", self.trace is None, "a trace has requests of its own; leave --tasks out")
        self._only("prompts", self.trace is None, "a trace has requests of its own; leave --prompts out")
        Whole(2, LARGEST, 4096)("context", self.context)
        if self.slots is not None:
            Whole(1, LARGEST, 32)("slots", self.slots)
        _ = self.timeouts
        require(self.logs is None or self.logs.is_dir(), "logs", str(self.logs), "no such folder; make it first")
        if self.trace is not None:
            alone = not self.rates and not self.concurrency
            require(alone, "trace", str(self.trace), "a trace is a load of its own; leave --concurrency and --rate out")
        else:
            require(bool(self.concurrency or self.rates), "concurrency", (), "give at least one number")
        for name in SECRET:
            hidden = HIDDEN in str(getattr(self, name))
            require(not hidden, _flag(name), "...", f"{HIDDEN} stands for a secret that was left out; give it in its place")

    def _only(self, name: str, fits: bool, remedy: str) -> None:
        value = getattr(self, name)
        require(fits or value == getattr(DEFAULTS, name), _flag(name), _hidden(name, value), remedy)


DEFAULTS = Options()
FLAGS = {
    "model": "-m", "engine": "-e", "program": "--program", "template": "--template", "arms": "-a", "tasks": "--tasks",
    "prompts": "--prompts", "trace": "--trace", "trace_speed": "--trace-speed", "concurrency": "-c", "rates": "--rate",
    "requests": "--requests", "repetitions": "-r", "warmups": "--warmups", "max_tokens": "-n", "control": "--control",
    "samples": "--samples", "seed": "--seed", "dtype": "--dtype", "device": "--device", "server_args": "--server-args",
    "context": "--context", "slots": "--slots", "alive": "--alive", "logs": "--logs", "served_model": "--served-model",
    "api_key_env": "--api-key-env", "headers": "--header", "body": "--body", "timeout_s": "--timeout",
    "connect_timeout_s": "--connect-timeout", "idle_timeout_s": "--idle-timeout",
    "tokenizer": "--tokenizer",
}  # fmt: skip
"""The option of each field on the command line."""

EACH = ("arms", "prompts", "headers")
"""Options that are given once for each value; of several others the values are separated by commas."""

STATED = ("tasks", "arms", "repetitions", "warmups", "max_tokens", "concurrency")
"""Written on a command line whatever their value is, so that it means the same with other defaults and under a time budget."""

SECRET = ("engine", "arms", "headers", "body", "server_args", "program")
"""Options in which a secret may stand."""

FREE = ("timeout_s", "connect_timeout_s", "idle_timeout_s", "logs", "api_key_env")
"""Options that may differ when a run is resumed: they change nothing of what is measured."""


def _flag(field: str) -> str:
    """The option's name, as messages give it."""
    long = {"-m": "model", "-e": "engine", "-a": "arm", "-c": "concurrency", "-r": "repetitions", "-n": "max_tokens"}
    flag = FLAGS[field]
    return long.get(flag, flag.lstrip("-").replace("-", "_"))


def words(options: Options) -> list[str]:
    """The command line that gives these options again, secrets left out."""
    found = ["forerun", "bench"]
    for name, flag in FLAGS.items():
        value = getattr(options, name)
        said = value != getattr(DEFAULTS, name) or name in STATED
        without = (options.trace is not None and name == "tasks") or (name == "concurrency" and not value)
        if not said or value is None or without:
            continue
        if value is True:
            found.append(flag)
            continue
        values = _hidden(name, value)
        texts = (
            values if name in EACH else [",".join(map(str, values)) or "none"] if isinstance(values, list) else [str(values)]
        )
        for text in texts:
            found += [flag, text]
    return found


def asked(options: Options) -> dict[str, Any]:
    """What differs from the defaults, as plain JSON values, secrets left out."""
    changed = {name: getattr(options, name) for name in FLAGS if getattr(options, name) != getattr(DEFAULTS, name)}
    return {name: _hidden(name, value) for name, value in changed.items()}


def read(values: Mapping[str, Any]) -> Options:
    """The options that `asked` wrote. Raises SettingError for a name that is none of them."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Options)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        require(name in kinds, "options", name, "the record is of a version that had other options; measure again")
        if isinstance(value, list):
            found[name] = tuple(Path(one) if "Path" in kinds[name] else one for one in value)
        else:
            found[name] = Path(value) if "Path" in kinds[name] else value
    return Options(**found)


def resumed(stored: Mapping[str, Any], given: Mapping[str, Any]) -> Options:
    """The options of an earlier run. given: those that are given again, by field; each must be what it was, but for those that
    change nothing of what is measured. Secrets, which no record holds, have to be given again. Raises SettingError."""
    again = asked(dataclasses.replace(DEFAULTS, **given))
    differing = [
        f"{_flag(name)}: {_said(stored.get(name, _hidden(name, getattr(DEFAULTS, name))))} in the record, {_said(now)} now"
        for name in given
        if name not in FREE
        and (now := again.get(name, _hidden(name, getattr(DEFAULTS, name))))
        != stored.get(name, _hidden(name, getattr(DEFAULTS, name)))
    ]
    if differing:
        raise SettingError("resume", "; ".join(differing), "another run is no part of this one; leave these options out")
    secret = [name for name, value in stored.items() if name not in given and HIDDEN in json.dumps(value)]
    if secret:
        raise SettingError(
            "resume",
            ", ".join(_flag(name) for name in secret),
            "the record does not hold what is secret; give these options again",
        )
    return dataclasses.replace(read(stored), **given)


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _hidden(name: str, value: Any) -> Any:
    """As plain JSON, without what is secret in it."""
    plain = _plain(value)
    if name == "headers":
        return [f"{text.partition(':')[0]}: {HIDDEN}" for text in plain]
    if name == "body":
        return _hidden_json(plain)
    if name in ("arms", "server_args", "program", "engine"):
        return [_hidden_text(one) for one in plain] if isinstance(plain, list) else plain and _hidden_text(plain)
    return plain


def _hidden_text(text: str) -> str:
    if text.startswith("{"):
        return _hidden_json(text)
    kind, colon, rest = text.partition(":")
    return f"{kind}:{hide_command(rest)}" if kind == "flags" and colon else hide_command(text)


def _hidden_json(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return str(hide(text))
    hidden = hide(value)
    return text if hidden == value else json.dumps(hidden, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
