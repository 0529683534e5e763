"""The plan of a run: its tasks and loads, how often and in which order they are measured, and with which prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from forerun.bench.load.sending import arrivals
from forerun.bench.records.record import Load
from forerun.bench.workloads.tasks import Task
from forerun.checks import LARGEST, Flag, Number, Seed, Whole, convert, require, setting

RATE = Number(1e-4, 1e6, 2.0, also=" requests a second")
SPEED = Number(1e-4, 1e6, 1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Each task is measured under each load. repetitions: measured batches of each cell, after `warmups` batches of at most
    warmup_tokens that do not count. control: the baseline is measured a second time, as the last arm. trace: the times of a
    trace load's requests in seconds. samples: draws from each arm and prompt, for the test of their distributions. Raises
    SettingError."""

    tasks: tuple[Task, ...]
    loads: tuple[Load, ...] = (Load(),)
    repetitions: int = setting(8, Whole(1, LARGEST, 8))
    warmups: int = setting(1, Whole(0, LARGEST, 1))
    warmup_tokens: int = setting(32, Whole(1, LARGEST, 32))
    max_tokens: int = setting(128, Whole(2, LARGEST, 128))
    control: bool = setting(False, Flag())
    seed: int = setting(0, Seed())
    trace: tuple[float, ...] = ()
    samples: int = setting(0, Whole(0, LARGEST, 300, " (0: none)"))

    def __post_init__(self) -> None:
        convert(self)
        require(bool(self.tasks), "tasks", (), "give at least one")
        require(bool(self.loads), "loads", (), "give at least one")
        labels = [load.label for load in self.loads]
        for label in labels:
            require(labels.count(label) == 1, "loads", label, "give each load once")
        for load in self.loads:
            if load.kind == "concurrency":
                Whole(1, LARGEST, 8)("concurrency", load.concurrency)
            elif load.kind == "poisson":
                RATE("rate", load.rate)
            else:
                SPEED("trace_speed", load.speed)
            Whole(1, LARGEST, 16)("requests", load.requests)
        for task in self.tasks:
            self._enough(task)

    def _enough(self, task: Task) -> None:
        """Raises SettingError if the task has fewer different prompts than the run needs."""
        each = sum(load.requests for load in self.loads)
        needed, there, most = self.prompts_needed, task.variants, task.variants // each - self.warmups
        why = f"with {self.warmups} warm-ups and {each} requests a round that is {needed} prompts of the task {task.name}, "
        why += f"which has {there} different ones; "
        if most >= 1:
            require(needed <= there, "repetitions", self.repetitions, f"{why}give at most {most}, or fewer requests")
        fewer = max(there // self.rounds // len(self.loads), 1)
        require(needed <= there, "requests", each, f"{why}give at most {fewer} for each load, or fewer warm-ups")

    @property
    def rounds(self) -> int:
        return self.warmups + self.repetitions

    @property
    def prompts_needed(self) -> int:
        """The number of different prompts of each task. No prompt comes twice, since it would be found in the prefix cache."""
        return self.rounds * sum(load.requests for load in self.loads)

    def first_variant(self, load: Load, round_: int) -> int:
        """The variant of the first prompt of a batch."""
        before = self.loads.index(load)
        return self.rounds * sum(one.requests for one in self.loads[:before]) + round_ * load.requests


class PlannedBatch(NamedTuple):
    """One batch of the plan. side: its index. visit: 0 or 1; sides that are not up together are visited twice, with warm-ups
    in each visit."""

    task: Task
    load: Load
    round_: int
    side: int
    warmup: bool
    visit: int = 0


Done = tuple[str, Load, int, int]
"""A measured batch: the name of its task, its load, round and side."""


def order_of(sides: int, repetition: int) -> list[int]:
    """The order of the sides: A B C, then C B A, so that a slow drift of the machine favours none of them."""
    forward = list(range(sides))
    return forward if repetition % 2 == 0 else forward[::-1]


def batches_of(plan: Plan, sides: int, together: bool) -> Iterator[PlannedBatch]:
    """All batches in their order. together: all sides are up at once."""
    return interleaved(plan, sides) if together else in_turns(plan, sides)


def interleaved(plan: Plan, sides: int) -> Iterator[PlannedBatch]:
    """For sides that are up together: A B C, then C B A, within each task and load."""
    for task in plan.tasks:
        for load in plan.loads:
            for round_ in range(plan.rounds):
                for side in order_of(sides, round_ - plan.warmups):
                    yield PlannedBatch(task, load, round_, side, round_ < plan.warmups)


def in_turns(plan: Plan, sides: int) -> Iterator[PlannedBatch]:
    """For sides that are up one at a time: A B C, then C B A. Each visit has half of the repetitions, after warm-ups."""
    half = (plan.repetitions + 1) // 2
    halves = (range(plan.warmups, plan.warmups + half), range(plan.warmups + half, plan.rounds))
    for visit, rounds in enumerate(halves):
        for side in order_of(sides, visit) if len(rounds) else ():
            for task in plan.tasks:
                for load in plan.loads:
                    for round_ in (*range(plan.warmups), *rounds):
                        yield PlannedBatch(task, load, round_, side, round_ < plan.warmups, visit)


def missing(batches: Iterable[PlannedBatch], done: Collection[Done]) -> list[PlannedBatch]:
    """The batches that are not done, with the warm-ups of each group that has some."""

    def group(planned: PlannedBatch) -> tuple[int, str, Load, int]:
        return planned.visit, planned.task.name, planned.load, planned.side

    def left(planned: PlannedBatch) -> bool:
        return not planned.warmup and (planned.task.name, planned.load, planned.round_, planned.side) not in done

    every = list(batches)
    groups = {group(planned) for planned in every if left(planned)}
    return [planned for planned in every if left(planned) or (planned.warmup and group(planned) in groups)]


def arrivals_of(plan: Plan, load: Load, round_: int) -> list[float] | None:
    """The times of a batch's requests, as in `arrivals`. Those of a trace count from the batch's first request."""
    first = plan.first_variant(load, round_)
    window = plan.trace[first : first + load.requests]
    return arrivals(load, plan.seed + round_, [at - window[0] for at in window])


def scheduled_s(plan: Plan, sides: int, together: bool) -> float:
    """The least seconds of the run: requests of an open loop are not sent before their times."""
    last = {
        (load, round_): due[-1]
        for load in plan.loads
        for round_ in range(plan.rounds)
        if (due := arrivals_of(plan, load, round_)) is not None
    }
    return sum(last.get((planned.load, planned.round_), 0.0) for planned in batches_of(plan, sides, together))


def fingerprint(plan: Plan) -> str:
    """A hash of the plan's prompts and of its trace, which must be the same when a run is resumed."""
    digest = hashlib.sha256(repr(plan.trace).encode())
    for task in plan.tasks:
        for variant in range(plan.prompts_needed):
            asked = (task.name, task.temperature, task.fixed_length, task.prompt(variant))
            digest.update(repr(asked).encode("utf-8", "replace"))
    return digest.hexdigest()[:16]
