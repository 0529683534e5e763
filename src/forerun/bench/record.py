"""What a run leaves behind: its settings, the machine, the versions and every raw sample, as frozen values that go to JSON
and come back equal. Knows no engine and derives no figure; summary.py and report.py read nothing but this.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.types import SettingError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: those this process may use. load: the machine's load average over a minute as the run began."""

    cpu: str
    cores: int
    memory_bytes: int | None
    accelerator: str | None
    system: str
    load: float | None


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """One side of the comparison: speculation is what was asked for (None: no drafter), engine the settings in force."""

    name: str
    speculation: dict[str, Any] | None
    engine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked of the run. arms: in their order, the reference first. concurrency: requests of a batch."""

    model: str
    tasks: tuple[str, ...]
    reference: str
    arms: tuple[ArmRecord, ...]
    repetitions: int
    warmups: int
    warmup_tokens: int
    max_tokens: int
    concurrency: int
    control: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The drafting counts of one request, as in engine/stats.py: drafted = verified by the target, accepted = committed."""

    steps: int
    drafting_steps: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since it was sent: queued_s to its first step, ttft_s to its first token, e2e_s to its end."""

    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    queued_s: float
    ttft_s: float
    e2e_s: float
    counts: Counts
    text: str

    @property
    def failed(self) -> bool:
        return self.finish_reason not in ("stop", "length") or not self.token_ids


@dataclass(frozen=True, slots=True)
class Times:
    """Where the engine's host time of one batch went, in seconds, over so many engine steps. cached_tokens: prompt tokens found
    in the prefix cache; the cell was warm if there are any."""

    steps: int
    draft_s: float
    forward_s: float
    verify_s: float
    other_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What was measured at once: `concurrency` requests sent together to one arm. Batches of different arms with the same
    task and repetition got the same prompts and form a pair. order: its place in the run. warmup: not to be counted."""

    task: str
    arm: str
    repetition: int
    order: int
    warmup: bool
    wall_s: float
    answers: tuple[Answer, ...]
    times: Times


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a greedy answer of an arm first left the reference's. gap: the reference's log-probability of its own token there
    less that of the next best; a small one is a near-tie that rounding decides. None if one is a prefix of the other or if
    it was not looked at."""

    task: str
    arm: str
    repetition: int
    index: int
    position: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """A whole run. started: UTC, ISO 8601. finished False: it was interrupted, and the batches are those
    measured until then."""

    started: str
    seconds: float
    finished: bool
    versions: dict[str, str]
    machine: Machine
    settings: Settings
    batches: tuple[Batch, ...]
    differences: tuple[Difference, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises SettingError if it is not a record, or one of another schema."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingError("record", text[:40], f"not JSON ({error}); give a file that `forerun bench` wrote") from None
        if not isinstance(value, dict) or "schema" not in value:
            raise SettingError("record", text[:40], "no record of a run; give a file that `forerun bench` wrote")
        if value["schema"] != SCHEMA:
            raise SettingError(
                "schema",
                value["schema"],
                f"this version reads schema {SCHEMA}; measure again, or use the version that wrote it",
            )
        record = _build(cls, value)
        assert isinstance(record, Record)
        return record


def save(record: Record, path: Path) -> None:
    """Write it as JSON. The file appears whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(record.to_json() + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Record:
    """Raises SettingError if the file is not a record of this schema, OSError if it cannot be read."""
    return Record.from_json(path.read_text(encoding="utf-8"))


def _build(kind: Any, value: Any) -> Any:
    """The value of JSON turned into `kind`, which is a dataclass of this module, a tuple of something, or plain."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise SettingError("record", value, f"expected the fields of a {kind}")
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]
        for name in value:
            if name not in names:
                raise SettingError("record", name, f"unknown field; known are {', '.join(names)}")
        for name in names:
            if name not in value:
                raise SettingError("record", name, "this field is missing; the file is cut off or was changed")
        return kind(**{name: _build(hints[name], value[name]) for name in names})  # type: ignore[operator]
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _build(next(a for a in typing.get_args(kind) if a is not type(None)), value)
    return value
