"""The record of a run: settings, machine, versions and every raw sample, as frozen values that are written as JSON and come
back equal. Knows no engine and derives no figure; every figure and page is made from a record alone.

Schema 2 added loads, servers and chunks to schema 1; schema 3 added what resuming a run needs. All three are read.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forerun.bench.records.redaction import hide
from forerun.engine.stats import DraftStats
from forerun.types import SettingError, require

SCHEMA = 3
READABLE = (1, 2, 3)
REMEDY = "give a file that `forerun bench` wrote"

HIDDEN_IN = ("settings", "notes", "given_up")
"""The parts of a record, besides its batches, that may hold secrets: their texts come from the command line and from logs."""

FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")
"""The finish reasons of the OpenAI API, each of which ends an answer. With any other (abort, error) the request failed."""

LoadKind = Literal["concurrency", "poisson", "trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests of a batch arrive. concurrency: closed loop, `concurrency` requests in flight, a new one sent when one
    ends. poisson: open loop, `rate` requests a second on average. trace: open loop, at the times of a recorded trace,
    divided by `speed`. requests: how many a batch has."""

    kind: LoadKind = "concurrency"
    concurrency: int = 1
    rate: float | None = None
    requests: int = 1
    speed: float = 1.0

    @property
    def label(self) -> str:
        """Short, and distinct among the loads of a run: c=8, 2.5/s, trace."""
        if self.kind == "poisson":
            return f"{self.rate:g}/s"
        return "trace" if self.kind == "trace" else f"c={self.concurrency}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that `forerun bench` ran on. cores: those that this process may use. load: the load average over a minute
    at the start. client_only: it only sent the requests; the engine ran on unknown hardware."""

    cpu: str
    cores: int
    memory_bytes: int | None
    accelerator: str | None
    system: str
    load: float | None
    client_only: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What an arm's engine reports of itself; None: not known. command: how it was launched, without secrets. kv_tokens: the
    capacity of its KV cache in tokens. startup_s: from launch to ready. memory_bytes: resident memory of all its processes
    when ready. scheduler: settings found in its log or API ("async scheduling", "model runner"). fallbacks: lines of its log
    that say that it does something other than asked. warnings: other lines that matter for the comparison."""

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
    """One arm of the comparison. speculation: the settings asked for, None without a drafter. engine: the settings in force."""

    name: str
    speculation: dict[str, Any] | None
    engine: dict[str, Any]
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked of the run. arms: in their order, the reference first. concurrency: of the first load. loads: each task
    is measured under every load. engine: forerun for the engine in this process, else the kind of server. command: the
    command line that repeats the run, without secrets. temperatures: of each task's requests, as sent. options: the command
    line's options that are not the default. contents: hashes of the prompts and of the template, which must be the same
    when the run is resumed."""

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
    """The drafting counts of one request, as in engine/stats.py. drafted: tokens that the target verified. accepted: drafted
    tokens that were committed. Where an engine does not count something: with drafted > 0, drafting_steps is 0; drafted_at
    or accepted_at, the counts by draft position, are empty."""

    steps: int
    drafting_steps: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @classmethod
    def of(cls, s: DraftStats) -> Counts:
        """The engine's counts, for a record."""
        return cls(s.steps, s.drafting_steps, s.drafted, s.accepted, tuple(s.drafted_at), tuple(s.accepted_at))

    def stats(self) -> DraftStats:
        """The same counts, to be added to others."""
        at = list(self.drafted_at), list(self.accepted_at)
        return DraftStats(self.steps, self.drafting_steps, self.drafted, self.accepted, *at)


NOT_COUNTED = Counts(0, 0, 0, 0, (), ())
"""No steps: the engine gives no drafting counts for a single request."""


class Chunk(NamedTuple):
    """One piece of a streamed answer. at_s: its arrival, from the request's scheduled time. tokens: how many it holds, None
    if the server does not say. chars: its length as text."""

    at_s: float
    tokens: int | None
    chars: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Its times are seconds from its scheduled time: sent_s until it was sent, queued_s to its first step (None:
    not known), ttft_s to its first content, e2e_s to its end or its failure. scheduled_s: from the start of the batch.

    output_tokens: the number in the server's usage; None: the number of token_ids. token_ids: empty if the server gives none.
    hidden_tokens: output tokens that were not streamed, such as reasoning. failure: why the request failed, None if it did
    not; a failed request is credited no tokens. usage: as the server sent it. notes: oddities of the answer, such as an
    unusable value.
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
        """Why it failed, None if it did not. Older records have failed requests without a stated reason."""
        if not self.failed or self.failure is not None:
            return self.failure
        return f"it ended with the reason {self.finish_reason!r}" if self.tokens else "it gave no output tokens"

    @property
    def tokens(self) -> int:
        """The number of output tokens."""
        return len(self.token_ids) if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True, slots=True)
class Times:
    """The engine's host time in one batch, by part, over `steps` engine steps. cached_tokens: prompt tokens found in the prefix
    cache."""

    steps: int
    draft_s: float
    forward_s: float
    verify_s: float
    other_s: float
    cached_tokens: int


TIMES_UNKNOWN = Times(0, 0.0, 0.0, 0.0, 0.0, 0)
"""No steps and no seconds: the engine does not report its times."""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """A server's counters since its start, read from its metrics; None: it has no such counter. drafts: sequence steps with a
    draft. accepted_at: tokens accepted at each draft position. *_s and *_count: the sum and the number of a histogram over
    ended requests. cached_tokens: prompt tokens found in the prefix cache."""

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
    """The requests of one load, sent to one arm. Batches of different arms with the same task, load and repetition have the
    same prompts and form a pair. order: its place in the run. warmup: it does not count.

    drafting: the drafting counts of the whole batch, where the engine gives them by request or by its counters, else None;
    steps 0 with drafted tokens means that steps are not counted. before, after: the server's counters around the batch.
    notes: reasons for doubt (requests of other clients, counters that fell)."""

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
    """The first position at which a greedy answer of an arm differs from the reference's. gap: the reference's log-probability
    of its own token there less that of the next best, small at a near-tie, which rounding decides; None if one answer is a
    prefix of the other or if it was not measured. unit: of position; characters where the server gives no token ids."""

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
    """The first tokens that an arm sampled for one prompt at a temperature above 0, as texts or as ids in decimal, for the test
    of distribution.py. logprobs: the arm's own log-probabilities of the likeliest tokens, where it gives them."""

    arm: str
    prompt: str
    temperature: float
    tokens: tuple[str, ...]
    logprobs: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A whole run. started: UTC, ISO 8601. seconds: of all its parts, if resumed. finished: False if interrupted or ended by an
    error; the batches are those measured before. resumed: when it was resumed. given_up: the arms and tasks
    whose measurement was stopped early, and why."""

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
        """Raises SettingError for a text that is no record, or a record of an unknown schema."""
        from pydantic import ValidationError

        try:
            value = json.loads(text)
        except ValueError as error:
            raise SettingError("record", text[:40], f"not JSON ({error}); {REMEDY}") from None
        require(isinstance(value, dict) and "schema" in value, "record", text[:40], f"not the record of a run; {REMEDY}")
        known = f"this version reads schemas {', '.join(map(str, READABLE))}; measure again, or use the version that wrote it"
        require(value["schema"] in READABLE, "schema", value["schema"], known)
        try:
            return _decoder().validate_python(_without_secrets(_from_1(value) if value["schema"] == 1 else value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise SettingError("record", where, f"{first['msg']}; the file is cut off or was changed") from None
        except (TypeError, AttributeError, KeyError) as error:
            raise SettingError("record", text[:40], f"a value has another type ({error}); the file was changed") from None


@functools.cache
def _decoder() -> Any:
    """Turns the values of JSON into a Record. Fields with a default may be absent, unknown fields are errors."""
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(Record))


class RecordFile:
    """The file of a record during a run, packed if its name ends in .gz. It is written anew after each batch and replaces the
    file before, so that it is whole at any time. Each batch is encoded once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches: list[str] = []

    def write(self, record: Record) -> None:
        """record: has the batches of the record before, and may have more. Raises OSError."""
        self._batches += [_batch_text(batch) for batch in record.batches[len(self._batches) :]]
        # a lone surrogate, which a server may send, is written as its JSON escape
        data = (_text(record, self._batches) + "\n").encode("utf-8", "backslashreplace")
        data = gzip.compress(data, 6, mtime=0) if self.path.suffix == ".gz" else data
        if self.path.exists() and not self.path.is_file():
            self.path.write_bytes(data)  # a device such as /dev/null must not be replaced
            return
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_bytes(data)
        os.replace(partial, self.path)


def save(record: Record, path: Path) -> None:
    """Write the record as JSON, packed if the name ends in .gz. The file appears whole or not at all. Raises OSError."""
    RecordFile(path).write(record)


def load(path: Path) -> Record:
    """Raises SettingError if the file is not a record of a known schema, OSError if it cannot be read."""
    data = path.read_bytes()
    try:
        return Record.from_json((gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode())
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SettingError("record", str(path), f"cannot be read ({error}); {REMEDY}") from None


def _batch_text(batch: Batch) -> str:
    return _dumps(_batch_without_secrets(dataclasses.asdict(batch)))


def _text(record: Record, batches: list[str]) -> str:
    """The record's JSON, with each batch on a line."""
    value = _without_secrets(dataclasses.asdict(dataclasses.replace(record, batches=())))
    texts = {name: _dumps(part) for name, part in value.items()}
    texts["batches"] = f"[{','.join(chr(10) + batch for batch in batches)}]"
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _without_secrets(value: dict[str, Any]) -> dict[str, Any]:
    """Applied when writing, and when reading, because older versions wrote secrets."""
    hidden = {name: hide(part) if name in HIDDEN_IN else part for name, part in value.items()}
    return {**hidden, "batches": [_batch_without_secrets(batch) for batch in value.get("batches", ())]}


def _batch_without_secrets(batch: dict[str, Any]) -> dict[str, Any]:
    """Servers repeat a refused key in the reason of a failure and in notes."""
    answers = [
        {**answer, "failure": hide(answer.get("failure")), "notes": hide(answer.get("notes", ()))}
        for answer in batch.get("answers", ())
    ]
    return {**batch, "notes": hide(batch.get("notes", ())), "answers": answers}


def _from_1(value: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1, which had a single load: so many requests sent together."""
    together = value["settings"].get("concurrency", 1)
    only = {"kind": "concurrency", "concurrency": together, "requests": together}
    parts = {name: [{**part, "load": only} for part in value.get(name, ())] for name in ("batches", "differences")}
    return {**value, **parts, "schema": SCHEMA, "settings": {**value["settings"], "loads": [only]}}
