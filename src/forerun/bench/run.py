"""The runner: measures every task under every load on every side, and makes the record. Draws no conclusion.

The record is handed on after each batch and when the run ends, for whatever reason, so no measurement is lost. A request
without a complete answer is a failed request. A side that died is started again. A side that does not answer is given up, and
the other sides are still measured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from forerun.bench.engines.arms import BASELINE, CONTROL
from forerun.bench.engines.endpoint import Request
from forerun.bench.engines.metrics import difference
from forerun.bench.engines.sides import Side
from forerun.bench.engines.subject import Subject, names, requests_of
from forerun.bench.load import equality
from forerun.bench.load import sending as loads
from forerun.bench.load.patience import Patience
from forerun.bench.load.plan import Plan, PlannedBatch, arrivals_of, batches_of, missing
from forerun.bench.records import machine
from forerun.bench.records.record import (
    NOT_COUNTED,
    TIMES_UNKNOWN,
    Answer,
    ArmRecord,
    Batch,
    Counts,
    Difference,
    FirstTokens,
    Record,
    ServerCounters,
    Settings,
)
from forerun.bench.records.redaction import hide
from forerun.bench.workloads.tasks import TASKS, Task
from forerun.checks import SettingError
from forerun.engine.stats import DraftStats

LOG = logging.getLogger("forerun")

COUNTERS_SETTLE_S = 2.0  # seconds that a server's counters may lag behind its answers
TOLERANCE = 0.02  # share of the client's tokens by which the server's count may differ; a larger count is other traffic
RESTARTS = 3  # how often a side that died is started again


class Watcher(Protocol):
    """Follows the progress of a run."""

    def planned(self, batches: Sequence[PlannedBatch]) -> None:
        """These batches will be measured."""

    def doing(self, what: str) -> None:
        """Work between batches that may take long has begun."""

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        """A batch is about to be sent."""

    def ended(self, batch: Batch) -> None:
        """The batch was measured."""

    def left_out(self, planned: PlannedBatch, why: str) -> None:
        """This batch will not be measured."""


def nothing(record: Record) -> None:
    """Does not keep a record during the run."""


async def measure(
    plan: Plan,
    subject: Subject,
    watcher: Watcher,
    keep: Callable[[Record], None] = nothing,
    earlier: Record | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Record:
    """Measure the plan, or the part of it that `earlier`, the record of an interrupted run, does not have. keep: gets the
    record after each batch and when the run ends, for whatever reason.

    If it is cancelled, as by an interrupt under asyncio.run, it returns an unfinished record of what was measured. Raises
    SettingError if a side does not start and nothing was measured yet. Raises any other error that ends the run, after the
    record was kept. All sides are down at the end.
    """
    run = _Run(plan, subject, watcher, earlier, clock)
    finished, ended = False, False
    try:
        await run.measure_missing(keep)
        await run.compare()
        finished = ended = True
    except asyncio.CancelledError:
        ended = True
    finally:
        made = run.record(finished)
        if ended or run.measured:
            keep(made)
        await subject.down()
    return made


class _Run:
    """The state of a run: what was measured and what was given up."""

    def __init__(
        self, plan: Plan, subject: Subject, watcher: Watcher, earlier: Record | None, clock: Callable[[], float]
    ) -> None:
        self.plan, self.subject, self.watcher, self.earlier, self.clock = plan, subject, watcher, earlier, clock
        self.begin, self.started = clock(), datetime.now(UTC).isoformat(timespec="seconds")
        self.names = names(plan, subject)
        self.machine = replace(machine.describe(machine.load_average()), client_only=subject.elsewhere)
        self.versions = machine.versions()
        self.batches: list[Batch] = list(earlier.batches) if earlier else []
        self.known = len(self.batches)
        self.given_up: dict[str, None] = {}
        self.differences: list[Difference] = []
        self.drawn: list[FirstTokens] = []
        cautions = [f"{task.name}: {task.caution}." for task in plan.tasks if task.caution and task is not TASKS.get(task.name)]
        self.notes: list[str] = [*(earlier.notes if earlier else ()), *subject.notes, *cautions]
        self.patience = [Patience() for _ in subject.sides]
        self.gone: dict[int, str] = {}  # the sides that were given up, and why
        self.restarts: dict[int, int] = {}

    @property
    def measured(self) -> bool:
        """Whether anything was measured since the run began or was resumed."""
        return len(self.batches) > self.known

    async def measure_missing(self, keep: Callable[[Record], None]) -> None:
        """Measure the batches that the record does not have."""
        index = {name: i for i, name in enumerate(self.names)}
        done = {
            (b.task, b.load, b.repetition + self.plan.warmups, index[b.arm])
            for b in self.batches
            if not b.warmup and b.arm in index
        }
        left = missing(batches_of(self.plan, len(self.names), self.subject.together), done)
        self.watcher.planned(left)
        if self.earlier is not None and left:
            self._note_resumed(left)
        task = None
        for planned in left:
            if planned.task is not task:
                task = planned.task
                await self._begin(task)
            if (why := self._left_out(planned)) is not None or (why := await self._up(planned.side)) is not None:
                self.watcher.left_out(planned, why)
                continue
            label = planned.task.name if len(self.plan.loads) == 1 else f"{planned.task.name} at {planned.load.label}"
            self.watcher.began(label, self.names[planned.side], planned.round_ - self.plan.warmups, planned.warmup)
            batch = await self._batch(planned)
            self.batches.append(batch)
            await self._restart_if_dead(planned, batch)
            self.watcher.ended(batch)
            keep(self.record(finished=False))

    def _note_resumed(self, left: Sequence[PlannedBatch]) -> None:
        """Note what a resumed run has lost: what drafters remembered of earlier answers, and equal versions."""
        begun = {b.task for b in self.batches if not b.warmup} & {planned.task.name for planned in left}
        if begun:
            self.notes.append(
                f"the run was resumed within {', '.join(sorted(begun))}: drafters that remember earlier answers of a task "
                "began anew there."
            )
        before, after = self.earlier.versions if self.earlier else {}, self.versions
        changed = [f"{name} {before.get(name)} to {after.get(name)}" for name in after if before.get(name) != after.get(name)]
        if changed:
            self.notes.append(f"versions changed before the run was resumed: {', '.join(changed)}.")

    async def _begin(self, task: Task) -> None:
        """Drafters that remember answers begin anew with each task. Sides that are up together all start before the task's
        first batch."""
        for side in self.subject.sides:
            await side.renew()
        if self.subject.together:
            for index in range(len(self.subject.sides)):
                await self._up(index)

    async def _up(self, index: int) -> str | None:
        """Bring a side up. Returns why this failed, None if it did not. Raises the error if nothing was measured yet."""
        side = self.subject.sides[index]
        if index in self.gone:
            return self.gone[index]
        if not side.is_up:
            self.watcher.doing(f"starting {self.names[index]}")
        try:
            await self.subject.up(side)
        except Exception as error:
            if not self.measured:
                raise
            LOG.debug("%s did not come up", self.names[index], exc_info=True)
            self._give_up(index, f"it did not come up again: {said(error)}")
        return self.gone.get(index)

    def _give_up(self, index: int, why: str) -> None:
        """Give up a side, with all its indices: the control may be the same side as the baseline."""
        for i, side in enumerate(self.subject.sides):
            if side is self.subject.sides[index]:
                self.gone[i] = why
        self.given_up[f"{self.names[index]} was given up: {hide(why)}"] = None

    def _left_out(self, planned: PlannedBatch) -> str | None:
        """Why a batch is left out, None if it is not: its side or the baseline, to which it would be compared, was given up."""
        for index in dict.fromkeys((planned.side, 0)):
            if index in self.gone:
                return self.gone[index]
            patience = self.patience[index]
            patience.enter((planned.task.name, planned.load))
            if patience.lost is not None:
                where = f"{planned.task.name} at {planned.load.label}"
                self.given_up[f"{self.names[index]} was given up on {where}: {hide(patience.lost)}"] = None
                return patience.lost
        return None

    async def _restart_if_dead(self, planned: PlannedBatch, batch: Batch) -> None:
        """After a batch with failures, bring a side down if it died, so that it is started again."""
        failed, index = next((a for a in batch.answers if a.failed), None), planned.side
        side, name = self.subject.sides[index], self.names[index]
        if failed is None or await side.survived():
            return
        await side.down()
        self.restarts[index] = self.restarts.get(index, 0) + 1
        self.notes.append(f"{name} died while it measured {planned.task.name} and was started again: {hide(failed.reason)}")
        if self.restarts[index] > RESTARTS:
            self._give_up(index, f"it died {self.restarts[index]} times, at last with: {failed.reason}")

    async def _batch(self, planned: PlannedBatch) -> Batch:
        """Measure a batch. An error in this program makes all its requests fail, with the error as the reason."""
        requests = requests_of(self.plan, self.subject, planned)
        try:
            return await self._sent(planned, requests)
        except Exception as error:
            LOG.debug("a batch failed", exc_info=True)
            why = f"an error in the measuring itself: {said(error)}"
            failed = [Answer(one.name, 0, (), "failed", None, 0.0, 0.0, NOT_COUNTED, "", 0, failure=why) for one in requests]
            return self._as_batch(planned, 0.0, tuple(failed))

    async def _sent(self, planned: PlannedBatch, requests: Sequence[Request]) -> Batch:
        side = self.subject.sides[planned.side]
        due = arrivals_of(self.plan, planned.load, planned.round_)
        await side.fresh()
        before = await side.endpoint.counters()
        answers, wall = await loads.drive(side.endpoint, requests, planned.load, due, self.clock, self.patience[planned.side])
        after = await _settled(side, before, answers)
        times = side.times()
        drafting, notes = judge(answers, before, after, side.arm.settings is not None or bool(side.arm.flags))
        if after is not None and before is not None and (counted := difference(before, after)) is not None:
            times = replace(times, cached_tokens=times.cached_tokens + int(counted.cached_tokens or 0))
        made = self._as_batch(planned, wall, answers)
        return replace(made, times=times, drafting=drafting, before=before, after=after, notes=notes)

    def _as_batch(self, planned: PlannedBatch, wall: float, answers: tuple[Answer, ...]) -> Batch:
        repetition = planned.round_ - self.plan.warmups
        arm, order = self.names[planned.side], len(self.batches)
        return Batch(planned.task.name, arm, repetition, order, planned.warmup, wall, answers, TIMES_UNKNOWN, planned.load)

    async def compare(self) -> None:
        """Compare greedy answers with the baseline's, and sample first tokens."""
        plan, subject = self.plan, self.subject
        try:
            self.watcher.doing("looking at where greedy answers differ")
            async for one in equality.differences(plan, subject, self.batches, self.clock):
                self.differences.append(one)
            if plan.samples:
                self.watcher.doing(f"drawing {plan.samples} samples of each arm")
                async for drawn in equality.draws(plan, subject, self.clock):
                    self.drawn.append(drawn)
        except Exception as error:
            LOG.debug("comparing answers failed", exc_info=True)
            self.notes.append(f"comparing the answers ended with an error, so a part of that is missing: {hide(said(error))}")

    def record(self, finished: bool) -> Record:
        """The record of what was measured so far."""
        plan, subject, earlier = self.plan, self.subject, self.earlier
        arms = tuple(
            ArmRecord(name, _speculation(side), hide(side.settings), side.facts)
            for name, side in zip(self.names, subject.sides, strict=True)
        )
        if earlier is not None:
            # sides that were not up since the run was resumed are known from the earlier record
            arms = tuple(now if now.facts else then for now, then in zip(arms, earlier.settings.arms, strict=True))
        settings = Settings(
            subject.model,
            tuple(task.name for task in plan.tasks),
            BASELINE,
            arms,
            plan.repetitions,
            plan.warmups,
            plan.warmup_tokens,
            plan.max_tokens,
            plan.loads[0].concurrency,
            CONTROL if plan.control else None,
            plan.seed,
            plan.loads,
            subject.engine,
            subject.origin.command,
            {task.name: subject.temperature(task) for task in plan.tasks},
            subject.origin.options,
            subject.origin.contents,
        )
        return Record(
            earlier.started if earlier else self.started,
            (earlier.seconds if earlier else 0.0) + self.clock() - self.begin,
            finished,
            self.versions,
            self.machine,
            settings,
            tuple(self.batches),
            tuple(self.differences),
            tuple(self.drawn),
            tuple(dict.fromkeys(self.notes)),
            (*(earlier.resumed if earlier else ()), *((self.started,) if earlier else ())),
            tuple(self.given_up),
        )


def _speculation(side: Side) -> dict[str, Any] | None:
    """The settings and flags of the side's drafter; None if it has no drafter."""
    settings, flags = side.arm.settings, side.arm.flags
    if settings is None and not flags:
        return None
    return {**hide(dict(settings or {})), **({"flags": " ".join(hide(flags))} if flags else {})}


def said(error: BaseException) -> str:
    """An error in one line: its type and its message. Of a group, the first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, SettingError) else f"{type(error).__name__}: {error}".rstrip(": ")


async def _settled(side: Side, before: ServerCounters | None, answers: Sequence[Answer]) -> ServerCounters | None:
    """The counters when they include the answers, or after COUNTERS_SETTLE_S."""
    received, until = sum(a.tokens for a in answers), time.monotonic() + COUNTERS_SETTLE_S
    while True:
        after = await side.endpoint.counters()
        if before is None or after is None or after.generation_tokens is None or time.monotonic() > until:
            return after
        if after.generation_tokens - (before.generation_tokens or 0.0) >= received:
            return after
        await asyncio.sleep(0.05)


def judge(
    answers: Sequence[Answer], before: ServerCounters | None, after: ServerCounters | None, drafts: bool
) -> tuple[Counts | None, tuple[str, ...]]:
    """The drafting counts of a batch, and notes about its counters. Counts that came with the answers are preferred. The
    server's counters are used only if they agree with the tokens that this client received.

    The counters count only steps with a draft. A step gives one token more than it accepts, and the first token of a request
    comes with its prompt, so the number of verify steps is tokens - requests - accepted.
    """
    good = [a for a in answers if not a.failed]
    known = [a.counts for a in good if a.counts.steps or a.counts.drafted]
    counted = None if before is None or after is None else difference(before, after)
    notes = []
    if before is not None and after is not None and counted is None:
        notes.append("the server's counters fell during the batch: it was restarted, or another server answered")
    received = sum(a.tokens for a in good)
    foreign = False
    if counted is not None and counted.generation_tokens is not None and len(good) == len(answers):
        produced = counted.generation_tokens
        foreign = produced > received * (1 + TOLERANCE) + 2
        if foreign:
            notes.append(
                f"the server produced {produced:.0f} tokens during the batch and this client received {received}: it has other "
                "traffic, so its counters are not used and the times are not its own"
            )
        elif produced < received * (1 - TOLERANCE) - 2:
            notes.append(f"the server counted {produced:.0f} tokens of the {received} that this client received")
    if good and len(known) == len([a for a in good if a.tokens > 1]):
        return total(known), tuple(notes)
    if not drafts or counted is None or foreign or counted.draft_tokens is None or len(good) < len(answers):
        return None, tuple(notes)
    accepted, drafting = int(counted.accepted_tokens or 0), int(counted.drafts or 0)
    steps = max(received - len(good) - accepted, drafting)
    at = tuple(int(n) for n in counted.accepted_at)
    return Counts(steps, drafting, int(counted.draft_tokens), accepted, (), at), tuple(notes)


def total(counts: Sequence[Counts]) -> Counts:
    """The sum of the counts."""
    sum_ = DraftStats()
    for c in counts:
        sum_.add(c.stats())
    return Counts.of(sum_)
