"""Launch templates: the command line and the configuration file of an arm from an engine's TOML file and the arm's settings,
and facts from the engine's log. Knows no engine by name and starts nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forerun import textfile
from forerun.bench.engines.arms import Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.checks import SettingError, require

FOLDER = Path(__file__).with_name("launch")
ENGINES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
REMEDY = "start from what --print-template prints"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGGER = re.compile(r"^(\([^()]*pid=\d+\)\s*)?([A-Z]+\s+\d[\d: -]*\s*\[[^\]]*\]\s*)?")  # process and time, in vLLM's form


@dataclass(frozen=True, slots=True)
class SchedulerFact:
    """found: (pattern, value) in order; the first pattern that is in the log gives the value, else `otherwise`."""

    name: str
    found: tuple[tuple[re.Pattern[str], str], ...]
    otherwise: str


@dataclass(frozen=True, slots=True)
class LogPatterns:
    """What is read from a server's log."""

    kv_tokens: re.Pattern[str] | None = None
    version: re.Pattern[str] | None = None
    fallbacks: tuple[re.Pattern[str], ...] = ()
    warnings: tuple[re.Pattern[str], ...] = ()
    scheduler: tuple[SchedulerFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """How an engine is launched. The fields are the keys of the TOML files in launch/, which launch/vllm.toml explains."""

    engine: str
    command: tuple[str, ...]
    served: str
    ready: str
    ready_seconds: float = 600.0
    model_kind: Literal["folder", "gguf"] = "folder"
    environment: Mapping[str, str] = field(default_factory=dict)
    speculative: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    file: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    log: LogPatterns = field(default_factory=LogPatterns)


def text_of(engine: str) -> str:
    """An engine's template file. Raises SettingError for an engine without one."""
    require(engine in ENGINES, "engine", engine, f"give forerun, the URL of a running server, or one of {', '.join(ENGINES)}")
    return (FOLDER / f"{engine}.toml").read_text(encoding="utf-8")


def load_template(engine: str, path: Path | None) -> Template:
    """The template of a file, or the engine's own. Raises SettingError."""
    return parse(text_of(engine) if path is None else textfile.read("template", path))


def parse(text: str) -> Template:
    """Raises SettingError for a text that is not a template."""
    from pydantic import ValidationError

    try:
        template: Template = _decoder().validate_python(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingError("template", text[:40], f"not TOML ({error}); {REMEDY}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingError("template", ".".join(map(str, first["loc"])), f"{first['msg']}; {REMEDY}") from None
    for key in ("command", "served", "ready"):
        require(bool(getattr(template, key)), "template", key, f"it is empty; {REMEDY}")
    require(template.engine in DIALECTS, "engine", template.engine, f"give one of {', '.join(DIALECTS)}")
    return template


@functools.cache
def _decoder() -> Any:
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(Template))


def places(arm: Arm, model: str, port: int, context: int, slots: int, file: str, memory_share: float = 0.9) -> dict[str, Any]:
    """The values of the placeholders, by name: these settings, and the arm's own."""
    settings = dict(arm.settings or {})
    drafter, k = settings.pop("model", None), settings.get("num_speculative_tokens")
    of_drafter = {} if drafter is None else {"model_of_drafter": drafter}
    of_k = {} if k is None else {"k": k, "k_and_bonus": int(k) + 1}
    return {
        **settings, **of_drafter, **of_k,
        "model": model, "port": port, "context": context, "slots": slots, "context_of_all": context * slots, "file": file,
        "memory_share": memory_share, "llamacpp_server": str(Path(__file__).with_name("llamacpp_server.py")),
        "python": sys.executable,
        "speculative_json": json.dumps(dict(arm.settings or {})),
    }  # fmt: skip


def command_of(template: Template, arm: Arm, values: Mapping[str, Any], program: str | None = None) -> list[str]:
    """The command line of an arm. program: replaces the first word. Raises SettingError for a method that the template does not
    have and for a placeholder without a value."""
    command = [str(_filled(word, values)) for word in (*template.command, *_speculative(template, arm), *arm.flags)]
    return command if program is None else [program, *command[1:]]


def _speculative(template: Template, arm: Arm) -> tuple[str, ...]:
    if arm.settings is None:
        return ()
    method, known = str(arm.settings.get("method")), template.speculative
    if method in known:
        return known[method]
    if "*" in known and (method in template.file or not template.file):
        return known["*"]
    methods = sorted((set(known) | set(template.file)) - {"*", "always"})
    remedy = (
        f"the template of {template.engine} does not know method {method}; it knows {', '.join(methods)}. Add it with "
        "--print-template and --template, or give the engine's own flags as flags:--some-flag value"
    )
    raise SettingError("arms", arm.name, remedy)


def file_of(template: Template, arm: Arm, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of an arm's configuration file; None if the engine has none."""
    if not template.file:
        return None
    method = {} if arm.settings is None else template.file.get(str(arm.settings.get("method")), {})
    return {key: _filled(value, values) for key, value in {**template.file.get("always", {}), **method}.items()}


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A string or a table with its placeholders filled in. A string that is one placeholder gets the value with its type."""

    def value_of(match: re.Match[str]) -> Any:
        known = f"nothing fills this placeholder; there are {', '.join(sorted(values))}"
        require(match[1] in values, "template", match[0], known)
        return values[match[1]]

    if isinstance(value, Mapping):
        return {key: _filled(inner, values) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    single = _PLACEHOLDER.fullmatch(value)
    return value_of(single) if single else _PLACEHOLDER.sub(lambda match: str(value_of(match)), value)


def key_of(command: list[str]) -> str | None:
    """The key that a server with this command line asks of its clients; None: it asks for none. The last option counts."""
    key = None
    for word, following in itertools.pairwise([*command, ""]):
        option, equals, value = word.partition("=")
        if option == "--api-key":
            key = (value if equals else following).partition(",")[0]
    return key or None


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a server's log says of it."""

    kv_tokens: int | None
    version: str | None
    scheduler: dict[str, str]
    fallbacks: tuple[str, ...]
    warnings: tuple[str, ...]


def read_log(template: Template, log: str) -> LogFacts:
    """By the template's patterns. Each line is given once, without colours and time, in at most 300 characters."""
    log, patterns = _COLOUR.sub("", log), template.log
    kv = patterns.kv_tokens.findall(log) if patterns.kv_tokens else []
    version = patterns.version.search(log) if patterns.version else None
    return LogFacts(
        int(kv[-1].replace(",", "")) if kv else None,
        version[1] if version else None,
        {f.name: next((value for found, value in f.found if found.search(log)), f.otherwise) for f in patterns.scheduler},
        _lines(patterns.fallbacks, log),
        _lines(patterns.warnings, log),
    )


def _lines(patterns: tuple[re.Pattern[str], ...], log: str) -> tuple[str, ...]:
    found = [_LOGGER.sub("", line).strip()[:300] for line in log.splitlines() if any(p.search(line) for p in patterns)]
    return tuple(dict.fromkeys(found))
