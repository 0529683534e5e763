"""Launch templates: from an engine's TOML file and an arm's settings to a command line, and from its log to facts. Knows the
format of those files and no engine by name; starts nothing.
"""

from __future__ import annotations

import importlib.resources
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun import textfile
from forerun.bench.engines.openai import DIALECTS
from forerun.checks import SettingError, require

ENGINES = ("vllm", "llamacpp", "xllamacpp", "sglang", "tensorrt-llm")
_PLACE = re.compile(r"\{(\w+)\}")
_LOGGER = re.compile(r"^(\([^()]*pid=\d+\)\s*)?([A-Z]+\s+\d[\d: -]*\s*\[[^\]]*\]\s*)?")  # who says it and when: vLLM's form


@dataclass(frozen=True, slots=True)
class SchedulerFact:
    """found: (regular expression, value) in order; the first that is in the log gives the value, else `otherwise`."""

    name: str
    found: tuple[tuple[str, str], ...]
    otherwise: str


@dataclass(frozen=True, slots=True)
class Template:
    """One engine's way of being launched; the fields are those of the TOML files in launch/, explained in vllm.toml."""

    engine: str
    command: tuple[str, ...]
    served: str
    ready: str
    ready_seconds: float
    model_kind: str
    environment: Mapping[str, str] = field(default_factory=dict)
    speculative: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    file: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kv_tokens: str | None = None
    version: str | None = None
    fallbacks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scheduler: tuple[SchedulerFact, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedArm:
    """One side of a comparison on a server. settings: in vLLM's keys, None for the baseline; flags: added to the command as
    they stand."""

    name: str
    settings: Mapping[str, Any] | None
    flags: tuple[str, ...] = ()


def text_of(engine: str) -> str:
    """The template of an engine as it is kept. Raises SettingError for an engine without one."""
    require(engine in ENGINES, "engine", engine, f"give forerun, the URL of a running server, or one of {', '.join(ENGINES)}")
    return importlib.resources.files("forerun.bench.engines.launch").joinpath(f"{engine}.toml").read_text(encoding="utf-8")


def parse(text: str) -> Template:
    """Raises SettingError for what is no template."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError("template", text[:40], f"not TOML ({error}); start from what --print-template prints") from None
    known = {"engine", "command", "served", "ready", "ready_seconds", "model_kind", "environment", "speculative", "file", "log"}
    log_keys = {"kv_tokens", "version", "fallbacks", "warnings", "scheduler"}
    log = value.get("log", {})
    for key in [*(k for k in value if k not in known), *(k for k in log if k not in log_keys)]:
        raise SettingError("template", key, f"unknown key; known are {', '.join(sorted(known | log_keys))}")
    for key in ("engine", "command", "served", "ready"):
        require(bool(value.get(key)), "template", key, "this key is missing; start from what --print-template prints")
    require(value["engine"] in DIALECTS, "engine", value["engine"], f"give one of {', '.join(DIALECTS)}")
    for pattern in (*log.get("fallbacks", ()), *log.get("warnings", ()), log.get("kv_tokens", ""), log.get("version", "")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingError("template", pattern, f"not a regular expression ({error})") from None
    return Template(
        value["engine"],
        tuple(value["command"]),
        value["served"],
        value["ready"],
        float(value.get("ready_seconds", 600)),
        value.get("model_kind", "folder"),
        value.get("environment", {}),
        {method: tuple(flags) for method, flags in value.get("speculative", {}).items()},
        value.get("file", {}),
        log.get("kv_tokens"),
        log.get("version"),
        tuple(log.get("fallbacks", ())),
        tuple(log.get("warnings", ())),
        tuple(
            SchedulerFact(one["name"], tuple((p, v) for p, v in one["found"]), one["otherwise"])
            for one in log.get("scheduler", ())
        ),
    )


def places(
    arm: ServedArm, model: str, port: int, context: int, slots: int, file: str, memory_share: float = 0.9
) -> dict[str, Any]:
    """What the words in braces stand for."""
    settings = dict(arm.settings or {})
    k = settings.get("num_speculative_tokens")
    drafter = settings.pop("model", None)
    own = {
        "model": model,
        "port": port,
        "context": context,
        "slots": slots,
        "context_of_all": context * slots,
        "file": file,
        "memory_share": memory_share,
        "llamacpp_server": str(importlib.resources.files("forerun.bench.engines").joinpath("llamacpp_server.py")),
        "speculative_json": json.dumps(dict(arm.settings or {})),
    }
    if drafter is not None:
        own["model_of_drafter"] = drafter
    if k is not None:
        own["k"], own["k_and_bonus"] = k, int(k) + 1
    return {**settings, **own}


def command_of(template: Template, arm: ServedArm, values: Mapping[str, Any], program: str | None = None) -> list[str]:
    """The command line of an arm. program replaces its first word. Raises SettingError for a method that the template does not
    know and for a placeholder that nothing fills."""
    words = [*template.command, *_speculative(template, arm), *arm.flags]
    command = [str(_fill(word, values)) for word in words]
    return [program, *command[1:]] if program is not None else command


def _speculative(template: Template, arm: ServedArm) -> tuple[str, ...]:
    if arm.settings is None:
        return ()
    method = str(arm.settings.get("method"))
    known = template.speculative
    in_file = method in template.file or not template.file
    if method in known:
        return known[method]
    if "*" in known and in_file:
        return known["*"]
    methods = sorted((set(known) | set(template.file)) - {"*", "always"})
    raise SettingError(
        "arms",
        arm.name,
        f"the template of {template.engine} does not know method {method}; it knows {', '.join(methods)}. Add it with "
        "--print-template and --template, or give the engine's own flags as flags:--some-flag value",
    )


def file_of(template: Template, arm: ServedArm, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the configuration file of an arm holds; None if the engine takes none."""
    if not template.file:
        return None
    method = None if arm.settings is None else str(arm.settings.get("method"))
    parts = [template.file.get("always", {})] + ([template.file.get(method, {})] if method is not None else [])
    return {key: _fill(value, values) for part in parts for key, value in part.items()}


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Placeholders filled in, in strings and tables of them; one that is a whole string keeps its type."""
    if isinstance(value, Mapping):
        return {key: _fill(inner, values) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    if whole is not None:
        return _value(whole[1], values)
    return _PLACE.sub(lambda match: str(_value(match[1], values)), value)


def _value(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values:
        raise SettingError("template", f"{{{name}}}", f"nothing fills this placeholder; there are {', '.join(sorted(values))}")
    return values[name]


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a server's log says of it."""

    kv_tokens: int | None
    version: str | None
    scheduler: dict[str, str]
    fallbacks: tuple[str, ...]
    warnings: tuple[str, ...]


def read_log(template: Template, log: str) -> LogFacts:
    """By the template's patterns. Lines are given once each, without colours and time, at most 300 characters."""
    log = re.sub(r"\x1b\[[0-9;]*m", "", log)
    kv = re.findall(template.kv_tokens, log) if template.kv_tokens else []
    version = re.search(template.version, log) if template.version else None
    scheduler = {
        fact.name: next((value for pattern, value in fact.found if re.search(pattern, log)), fact.otherwise)
        for fact in template.scheduler
    }
    return LogFacts(
        int(kv[-1].replace(",", "")) if kv else None,
        version[1] if version else None,
        scheduler,
        _lines(template.fallbacks, log),
        _lines(template.warnings, log),
    )


def _lines(patterns: tuple[str, ...], log: str) -> tuple[str, ...]:
    found = [_LOGGER.sub("", line).strip()[:300] for line in log.splitlines() if any(re.search(p, line) for p in patterns)]
    return tuple(dict.fromkeys(found))


def load_template(engine: str, path: Path | None) -> Template:
    """The engine's own, or that of a file."""
    if path is None:
        return parse(text_of(engine))
    return parse(textfile.read("template", path))
