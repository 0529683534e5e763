"""What a run leaves behind: its settings, the machine, the versions and every raw sample, as frozen values that go to JSON
and come back equal. Knows no engine and derives no figure; summary.py and report.py read nothing but this.

Schema 2 has everything of schema 1 and adds loads, servers and chunks; schema 3 adds what a run needs to be resumed. Files of
schemas 1 and 2 are still read.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forerun.bench.records.redaction import hide
from forerun.types import SettingError

SCHEMA = 3
READABLE = (1, 2, 3)

HIDDEN_IN = ("settings", "notes", "given_up")
"""Parts of a record whose texts come from the command line and from logs."""

FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")
"""The finish reasons of the OpenAI API, all of which end an answer. Others (abort, error) end a request that failed."""

LoadKind = Literal["concurrency", "poisson", "trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests of a batch arrive. concurrency: `concurrency` requests are kept in flight, a new one sent when one ends
    (1: a single stream). poisson: open loop, `rate` requests a second on average, sent whether or not earlier ones have
    ended. trace: open loop, at the times of a recorded trace, divided by `speed`. requests: how many a batch has."""

    kind: LoadKind = "concurrency"
    concurrency: int = 1
    rate: float | None = None
    requests: int = 1
    speed: float = 1.0

    @property
    def label(self) -> str:
        """Short and distinct among the loads of a run: c=8, 2.5/s, trace."""
        if self.kind == "poisson":
            return f"{self.rate:g}/s"
        return "trace" if self.kind == "trace" else f"c={self.concurrency}"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where `forerun bench` ran. cores: those this process may use. load: the machine's load average over a minute as the run
    began. client_only: the engine ran elsewhere, on hardware that is not known; this is the machine that sent the requests."""

    cpu: str
    cores: int
    memory_bytes: int | None
    accelerator: str | None
    system: str
    load: float | None
    client_only: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an arm's engine beside its settings; None: not to be had. command: how it was launched, secrets left
    out. kv_tokens: tokens that its KV cache holds. startup_s: from launch to ready. memory_bytes: resident, of all its
    processes, when ready. scheduler: what the log or the API says of it ("async scheduling", "model runner"). fallbacks:
    lines of the log in which the engine says that it does something other than asked; warnings: others that matter here."""

    engine: str
    version: str | None = None
    url: str | None = None
    command: tuple[str, ...] = ()
    kv_tokens: int | None = None
    startup_s: float | None = None
    memory_bytes: int | None = None
    scheduler: dict[str, str] = dataclasses.field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """One side of the comparison: speculation is what was asked for (None: no drafter), engine the settings in force."""

    name: str
    speculation: dict[str, Any] | None
    engine: dict[str, Any]
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked of the run. arms: in their order, the reference first. concurrency: of the first load. loads: every
    task is measured under each. engine: forerun for the one in this process, else the server's kind. command: the command line
    that repeats the run, secrets left out. temperatures: of the requests of each task, as they were sent. options: what was
    asked for on the command line, as far as it is not the default. contents: a hash of the prompts and of the template, which
    a resumed run must have in common with this one."""

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
    loads: tuple[Load, ...] = (Load(),)
    engine: str = "forerun"
    command: tuple[str, ...] = ()
    temperatures: dict[str, float] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    contents: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """The drafting counts of one request, as in engine/stats.py: drafted = verified by the target, accepted = committed.

    An engine that does not give all of them leaves what cannot be: with drafted > 0, drafting_steps 0 means not counted, and
    empty drafted_at or accepted_at mean not counted by position."""

    steps: int
    drafting_steps: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]


NOT_COUNTED = Counts(0, 0, 0, 0, (), ())
"""No steps: the engine gives no drafting counts for a single request."""


class Chunk(NamedTuple):
    """A piece of an answer as it arrived, at_s after the request was scheduled. tokens: how many it holds, None if the server
    does not say; chars: of text."""

    at_s: float
    tokens: int | None
    chars: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since it was scheduled: sent_s until it was sent, queued_s to its first step (None: not known),
    ttft_s to its first content, e2e_s to its end (of a failed one: until it failed). scheduled_s: since the batch began.

    output_tokens: as the server's usage says; None: the number of token_ids. token_ids: empty if the server gives none.
    hidden_tokens: those of them that were not streamed, as some servers do with reasoning. failure: why it counts as failed,
    None if it does not; a failed request is credited no tokens. usage: as the server sent it. notes: what was odd in the
    answer, such as a value that could not be used.
    """

    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    queued_s: float | None
    ttft_s: float
    e2e_s: float
    counts: Counts
    text: str
    output_tokens: int | None = None
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    chunks: tuple[Chunk, ...] = ()
    failure: str | None = None
    usage: dict[str, Any] | None = None
    hidden_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.finish_reason not in FINISHED or not self.tokens

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it did not. Older records have requests that failed without saying why."""
        if not self.failed or self.failure is not None:
            return self.failure
        return f"it ended with the reason {self.finish_reason!r}" if self.tokens else "it gave no output tokens"

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return len(self.token_ids) if self.output_tokens is None else self.output_tokens


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


TIMES_UNKNOWN = Times(0, 0.0, 0.0, 0.0, 0.0, 0)
"""No steps and no seconds: the engine does not say where its time went."""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What a server has counted since it started, read from its metrics; None: it has no such counter. drafts: sequence steps
    that had a draft. accepted_at: accepted up to the first, second, ... draft position. *_s with *_count: sum and number of
    its histogram, over requests that have ended. cached_tokens: prompt tokens found in the prefix cache."""

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_at: tuple[float, ...] = ()
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cached_tokens: float | None = None
    preemptions: float | None = None
    queue_s: float | None = None
    queue_count: float | None = None
    prefill_s: float | None = None
    prefill_count: float | None = None
    decode_s: float | None = None
    decode_count: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What was measured at once: the requests of one load sent to one arm. Batches of different arms with the same task, load
    and repetition got the same prompts and form a pair. order: its place in the run. warmup: not to be counted.

    drafting: the drafting counts of the whole batch where the engine gives them, per request or by its counters; None: it
    does not. Where its `steps` is 0 but something was drafted, the engine does not count steps. before, after: the server's
    counters around the batch. notes: what makes it doubtful (traffic of others, counters that fell)."""

    task: str
    arm: str
    repetition: int
    order: int
    warmup: bool
    wall_s: float
    answers: tuple[Answer, ...]
    times: Times
    load: Load = Load()
    drafting: Counts | None = None
    before: ServerCounters | None = None
    after: ServerCounters | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a greedy answer of an arm first left the reference's. gap: the reference's log-probability of its own token there
    less that of the next best; a small one is a near-tie that rounding decides. None if one is a prefix of the other or if
    it was not looked at. unit: what position counts, tokens, or characters where the server gives no token ids."""

    task: str
    arm: str
    repetition: int
    index: int
    position: int
    gap: float | None
    load: Load = Load()
    unit: Literal["token", "character"] = "token"


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens that an arm drew for one prompt at a temperature above 0, one for each sample (its text, or its id as
    text), for the test that all arms draw from the same distribution. logprobs: the arm's own log-probabilities of the most
    likely ones, where it gives them."""

    arm: str
    prompt: str
    temperature: float
    tokens: tuple[str, ...]
    logprobs: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A whole run. started: UTC, ISO 8601. seconds: of all its parts, if it was resumed. finished False: it was interrupted or
    ended by an error, and the batches are those measured until then. resumed: when it was taken up again. given_up: arms and
    tasks that were not measured to the end, and why."""

    started: str
    seconds: float
    finished: bool
    versions: dict[str, str]
    machine: Machine
    settings: Settings
    batches: tuple[Batch, ...]
    differences: tuple[Difference, ...]
    first_tokens: tuple[FirstTokens, ...] = ()
    notes: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    schema: int = SCHEMA

    def to_json(self) -> str:
        return _text(self, [_batch_text(batch) for batch in self.batches])

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises SettingError if it is not a record, or one of another schema."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingError("record", text[:40], f"not JSON ({error}); give a file that `forerun bench` wrote") from None
        if not isinstance(value, dict) or "schema" not in value:
            raise SettingError("record", text[:40], "no record of a run; give a file that `forerun bench` wrote")
        if value["schema"] not in READABLE:
            raise SettingError(
                "schema",
                value["schema"],
                f"this version reads schemas {', '.join(map(str, READABLE))}; measure again, or use the version that wrote it",
            )
        try:
            record = _build(cls, _without_secrets(_from_1(value) if value["schema"] == 1 else value))
        except (TypeError, AttributeError, KeyError) as error:
            raise SettingError("record", text[:40], f"a value in it is of another kind ({error}); it was changed") from None
        assert isinstance(record, Record)
        return record


class RecordFile:
    """A record's file while the run goes on: written whole after each batch, packed if its name ends in .gz. The file is either
    the one before or the new one, never a part of one. Each batch is turned into text once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches: list[str] = []

    def write(self, record: Record) -> None:
        """record: with the batches of the one before and more behind them. Raises OSError."""
        self._batches += [_batch_text(batch) for batch in record.batches[len(self._batches) :]]
        # a lone surrogate, which a server may send, is written as JSON's escape of it
        data = (_text(record, self._batches) + "\n").encode("utf-8", "backslashreplace")
        data = gzip.compress(data, 6, mtime=0) if self.path.suffix == ".gz" else data
        if self.path.exists() and not self.path.is_file():
            self.path.write_bytes(data)  # a device such as /dev/null, which is not to be replaced
            return
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_bytes(data)
        os.replace(partial, self.path)


def save(record: Record, path: Path) -> None:
    """Write it as JSON, packed if the name ends in .gz. The file appears whole or not at all."""
    RecordFile(path).write(record)


def _batch_text(batch: Batch) -> str:
    return _dumps(_batch_without_secrets(dataclasses.asdict(batch)))


def _text(record: Record, batches: list[str]) -> str:
    """The record's JSON, a batch on each line."""
    value = _without_secrets(dataclasses.asdict(dataclasses.replace(record, batches=())))
    texts = {name: _dumps(part) for name, part in value.items()}
    texts["batches"] = f"[{','.join(chr(10) + batch for batch in batches)}]"
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def _without_secrets(value: dict[str, Any]) -> dict[str, Any]:
    """Older versions wrote some down, so they are taken out of what is read as well."""
    hidden = {name: hide(part) if name in HIDDEN_IN else part for name, part in value.items()}
    return {**hidden, "batches": [_batch_without_secrets(batch) for batch in value.get("batches", ())]}


def _batch_without_secrets(batch: dict[str, Any]) -> dict[str, Any]:
    """Reasons of failures and notes come from outside, and servers repeat a key that they refuse."""
    answers = [
        {**answer, "failure": hide(answer.get("failure")), "notes": hide(answer.get("notes", ()))}
        for answer in batch.get("answers", ())
    ]
    return {**batch, "notes": hide(batch.get("notes", ())), "answers": answers}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def load(path: Path) -> Record:
    """Raises SettingError if the file is not a record of a schema that is read, OSError if it cannot be read."""
    data = path.read_bytes()
    try:
        return Record.from_json((gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode())
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SettingError("record", str(path), f"cannot be read ({error}); give a file that `forerun bench` wrote") from None


def _from_1(value: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 knew one load, so many requests sent together."""
    settings = value.get("settings", {})
    together = settings.get("concurrency", 1)
    only = {"kind": "concurrency", "concurrency": together, "rate": None, "requests": together, "speed": 1.0}
    batches = [{**b, "load": only} for b in value.get("batches", [])]
    differences = [{**d, "load": only} for d in value.get("differences", [])]
    return {
        **value,
        "schema": SCHEMA,
        "settings": {**settings, "loads": [only]},
        "batches": batches,
        "differences": differences,
    }


@functools.cache
def _shape(kind: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """The types of a dataclass's fields, and the fields."""
    return typing.get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}


def _build(kind: Any, value: Any) -> Any:
    """The value of JSON turned into `kind`, which is a dataclass or named tuple of this module, a tuple of something, or plain.
    Fields with a default may be absent."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise SettingError("record", value, f"expected the fields of a {kind}")
        hints, fields = _shape(kind)
        for name in value:
            if name not in fields:
                raise SettingError("record", name, f"unknown field; known are {', '.join(fields)}")
        for name, field in fields.items():
            needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if needed and name not in value:
                raise SettingError("record", name, "this field is missing; the file is cut off or was changed")
        return kind(**{name: _build(hints[name], value[name]) for name in value})
    origin = typing.get_origin(kind)
    if kind is Chunk:
        return Chunk(*value)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return tuple(value) if item in (int, float, str) else tuple(_build(item, one) for one in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _build(next(a for a in typing.get_args(kind) if a is not type(None)), value)
    return value
