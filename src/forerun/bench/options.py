"""The options of `forerun bench` that its record keeps: their declarations, which of them go together, their forms on a command
line and in a record, and what may differ when a run is resumed. Knows no engine and starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.engines.endpoint import Timeouts
from forerun.bench.records.redaction import HIDDEN, hide, hide_command
from forerun.bench.workloads.tasks import DEFAULT_TASKS, TASKS
from forerun.checks import LARGEST, SettingError, Whole, require
from forerun.options import (
    LOAD,
    RUN,
    SERVERS,
    Scope,
    device_option,
    dtype_option,
    model_option,
    option,
    option_of,
    quantization_option,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LIMITS = Timeouts()
STARTED = Scope(lambda o: o.remote and not o.running, "it is for servers that are started here; give --engine vllm")
RUNNING = Scope(lambda o: o.running, "it is for a server that runs already; give --engine URL")
REMOTE = Scope(lambda o: o.remote, "it is for servers; give --engine")
HERE = Scope(lambda o: not o.remote, "it is for the engine in this process; give a server its own flags with --server-args")
NOT_RUNNING = Scope(lambda o: not o.running, "a server that runs has its own; leave it out")
TRACE = Scope(lambda o: o.trace is not None, "it is for a recorded log; give --trace")
NO_TRACE = Scope(lambda o: o.trace is None, "a trace has requests of its own; leave {flag} out")


@dataclass(frozen=True, slots=True)
class Options:
    """Their order is that of the command that repeats a run."""

    model: str | None = model_option()
    engine: str = option(
        "forerun", SERVERS,
        "forerun: the engine in this process. forerun-server, vllm, llamacpp, xllamacpp, sglang, tensorrt-llm: a server is "
        "started for each arm. A URL: a server that runs already, without speculation; the arms are then NAME=URL.",
        "-e", metavar="ENGINE|URL", secret=True,
    )  # fmt: skip
    program: str | None = option(
        None, SERVERS, "The server's program, in place of the template's.", metavar="PATH", scope=STARTED, secret=True
    )
    template: Path | None = option(
        None, SERVERS, "How to start the server, as --print-template prints it.", metavar="FILE", scope=STARTED
    )
    arms: tuple[str, ...] = option(
        (), RUN,
        "A way of drafting to compare with plain decoding: ngram, suffix, eagle3, eagle3+ngram (both at once), ngram:k=2,4,8 "
        "(one arm for each) or JSON with vLLM's keys; on a server also flags:... with its own flags. May be repeated.",
        "--arm", "-a", metavar="ARM", stated=True, secret=True,
        default_text="ngram, suffix and the drafters that come with Forerun for the model; ngram on a server",
    )  # fmt: skip
    tasks: tuple[str, ...] = option(
        DEFAULT_TASKS, RUN, f"The tasks, separated by commas: {', '.join(TASKS)}; none: only those of --prompts.",
        metavar="NAMES", separated=True, scope=NO_TRACE, stated=True,
    )  # fmt: skip
    prompts: tuple[Path, ...] = option(
        (), LOAD,
        "Your own prompts as JSON Lines (prompt, messages, or Spec-Bench's turns), a task in addition to --tasks; with --tasks "
        "none, alone. May be repeated.",
        metavar="FILE", scope=NO_TRACE,
    )  # fmt: skip
    trace: Path | None = option(
        None, LOAD,
        "Replay a request log: JSON Lines with timestamp and prompt, messages or input_length. Instead of --tasks; each "
        "repetition takes the next --requests of it.",
        metavar="FILE",
    )  # fmt: skip
    trace_speed: float = option(1.0, LOAD, "Replay the trace so many times as fast.", scope=TRACE)
    concurrency: tuple[int, ...] = option(
        (1,), LOAD, "Requests in flight at once; several numbers, as in 1,8,32, measure each.", "-c",
        metavar="N,...", separated=True, default_text="1; none with --rate or --trace", stated=True,
    )  # fmt: skip
    rates: tuple[float, ...] = option(
        (), LOAD,
        "Open loop: so many requests a second on average, at random (Poisson) times, whether or not earlier ones have ended. "
        "Instead of --concurrency, or in addition to it if both are given.",
        "--rate", metavar="R,...", separated=True,
    )  # fmt: skip
    requests: int | None = option(None, LOAD, "Requests of a batch.", default_text="the concurrency; 16 with --rate or --trace")
    repetitions: int = option(8, RUN, "Measured batches for each arm and task; below 4 there is no verdict.", "-r", stated=True)
    warmups: int = option(1, RUN, "Shorter batches before those, which are not counted.", stated=True)
    max_tokens: int = option(128, RUN, "The most output tokens of a request.", "-n", stated=True)
    control: bool = option(
        False, RUN, "Measure the baseline twice; its difference from itself is the least difference that counts."
    )
    samples: int = option(
        0, RUN, "Draw the first tokens after two prompts so many times from every arm, and test that all arms draw alike."
    )
    seed: int = option(0, RUN, "Of the sampled task, random; the same in every arm.")
    dtype: str = dtype_option(scope=HERE)
    quantization: str = quantization_option(scope=HERE)
    device: str = device_option(scope=HERE)
    server_args: str = option(
        "", SERVERS, "More of the server's own flags, for every arm.", metavar="TEXT", scope=STARTED, secret=True
    )
    context: int = option(4096, SERVERS, "Tokens of a sequence that a started server allows.", scope=STARTED)
    slots: int | None = option(
        None, SERVERS, "Requests that an engine runs at once.",
        default_text="the highest concurrency; 32 with --rate or --trace", scope=NOT_RUNNING,
    )  # fmt: skip
    alive: str = option(
        "auto", SERVERS,
        "Whether all servers are up at once, or one after the other, twice; auto: together if memory allows. Only one "
        "at a time has work.",
        metavar="together|in-turns|auto", scope=STARTED,
    )  # fmt: skip
    logs: Path | None = option(
        None, SERVERS, "Keep the servers' logs in this folder.", metavar="FOLDER", scope=STARTED, free=True
    )
    served_model: str | None = option(
        None, SERVERS, "With a URL: the model's name there.",
        metavar="NAME", default_text="the first that the server lists", scope=RUNNING,
    )  # fmt: skip
    api_key_env: str | None = option(
        None, SERVERS, "With a URL: the environment variable that holds its key.", metavar="NAME", scope=RUNNING, free=True
    )
    headers: tuple[str, ...] = option(
        (), SERVERS, "With a URL: sent with each request. May be repeated.",
        "--header", metavar="'NAME: VALUE'", scope=RUNNING, secret=True,
    )  # fmt: skip
    body: str = option("{}", SERVERS, "Fields to add to each request to a server.", metavar="JSON", scope=REMOTE, secret=True)
    timeout_s: float = option(
        LIMITS.request_s, SERVERS, "Seconds after which a request to a server has failed.", "--timeout", scope=REMOTE, free=True
    )
    connect_timeout_s: float = option(
        LIMITS.connect_s, SERVERS, "The same for making the connection.", "--connect-timeout", scope=REMOTE, free=True
    )
    idle_timeout_s: float = option(
        LIMITS.idle_s, SERVERS, "The same for a time in which nothing came.", "--idle-timeout", scope=REMOTE, free=True
    )
    tokenizer: str | None = option(
        None, SERVERS, "The model whose vocabulary the task random draws from.", metavar="MODEL", scope=REMOTE
    )

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
        """Raises SettingError for options that do not go together, and for one that would have no effect."""
        for name, known in OPTIONS.items():
            value, default = getattr(self, name), getattr(DEFAULTS, name)
            if known.scope is not None and value != default and not known.scope.holds(self):
                raise SettingError(label(name), plain(self)[name], known.scope.remedy.format(flag=known.flags[0]))
        Whole(2, LARGEST, 4096)("context", self.context)
        if self.slots is not None:
            Whole(1, LARGEST, 32)("slots", self.slots)
        _ = self.timeouts
        require(self.logs is None or self.logs.is_dir(), "logs", str(self.logs), "no such folder; make it first")
        loads = bool(self.concurrency or self.rates)
        if self.trace is not None:
            require(not loads, "trace", str(self.trace), "a trace is a load of its own; leave --concurrency and --rate out")
        else:
            require(loads, "concurrency", (), "give at least one number")
        for name, known in OPTIONS.items():
            hidden = known.secret and HIDDEN in str(getattr(self, name))
            require(not hidden, label(name), "...", f"{HIDDEN} stands for a secret that was left out; give it in its place")


OPTIONS = {field.name: option_of(field) for field in dataclasses.fields(Options)}
DEFAULTS = Options()


def label(name: str) -> str:
    """The option's name in messages: its long flag without the dashes."""
    return OPTIONS[name].flags[0].lstrip("-").replace("-", "_")


def words(options: Options) -> list[str]:
    """The command line with these options, without secrets."""
    found, plain_values = ["forerun", "bench"], plain(options)
    for name, known in OPTIONS.items():
        value, flag = getattr(options, name), known.flags[-1]
        needed = value != getattr(DEFAULTS, name) or known.stated
        left_out = (options.trace is not None and name == "tasks") or (name == "concurrency" and not value)
        if not needed or value is None or left_out:
            continue
        if value is True:
            found.append(flag)
            continue
        shown = plain_values[name]
        texts = shown if isinstance(shown, list) else [str(shown)]
        for text in [_said(shown) or "none"] if known.separated else texts:
            found += [flag, text]
    return found


def plain(options: Options) -> dict[str, Any]:
    """All options as plain JSON values, without secrets."""
    return {name: _hidden(name, value) for name, value in _form().dump_python(options, mode="json").items()}


def asked(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, as plain JSON values, without secrets."""
    return {name: value for name, value in plain(options).items() if getattr(options, name) != getattr(DEFAULTS, name)}


def read(values: Mapping[str, Any]) -> Options:
    """The options from the values of `asked`. Raises SettingError for an unknown name and for a value of another type."""
    try:
        return _form().validate_python(dict(values))
    except ValueError as error:
        name = error.errors()[0]["loc"][0]  # type: ignore[attr-defined]
        raise SettingError("options", name, "the record is of a version that had other options; measure again") from None


def resumed(stored: Mapping[str, Any], given: Mapping[str, Any]) -> Options:
    """The options with which a run is resumed. stored: those of its record. given: those that are given again, by name, which
    must be equal unless they are free. Secrets must be given again, since no record has them. Raises SettingError."""
    before, now = plain(DEFAULTS) | dict(stored), plain(dataclasses.replace(DEFAULTS, **given))
    differing = [
        f"{label(name)}: {_said(before[name])} in the record, {_said(now[name])} now"
        for name in given
        if not OPTIONS[name].free and now[name] != before[name]
    ]
    if differing:
        raise SettingError("resume", "; ".join(differing), "another run is no part of this one; leave these options out")
    secret = [name for name, value in stored.items() if name not in given and HIDDEN in json.dumps(value)]
    if secret:
        missing = ", ".join(label(name) for name in secret)
        raise SettingError("resume", missing, "the record does not hold what is secret; give these options again")
    return dataclasses.replace(read(stored), **given)


@cache
def _form() -> TypeAdapter[Options]:
    """Converts options from and to the values of a record."""
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(Options))


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _hidden(name: str, value: Any) -> Any:
    """A plain JSON value without its secrets."""
    if not OPTIONS[name].secret or not value:
        return value
    if isinstance(value, list):
        return [_hidden(name, text) for text in value]
    text = str(value)
    kind, colon, rest = text.partition(":")
    if name == "headers":
        return f"{kind}: {HIDDEN}"
    if text.lstrip().startswith(("{", "[")):
        return _hidden_json(text)
    return f"{kind}:{hide_command(rest)}" if kind == "flags" and colon else hide_command(text)


def _hidden_json(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return str(hide(text))
    hidden = hide(value)
    return text if hidden == value else json.dumps(hidden, ensure_ascii=False)
