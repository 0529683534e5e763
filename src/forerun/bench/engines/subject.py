"""The subject of a run: all sides of a comparison, and the requests that a plan's prompts become. Sends none of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.engines.arms import CONTROL
from forerun.bench.engines.endpoint import Request
from forerun.bench.engines.sides import Side
from forerun.bench.load.plan import Plan, PlannedBatch
from forerun.bench.workloads.tasks import Prompt, Task
from forerun.checks import require


@dataclass(frozen=True, slots=True)
class Origin:
    """The command and the options of a run; the fields are those of record.Settings."""

    command: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """sides: the baseline first; with plan.control the last one is the baseline again. ids: makes the token ids of a prompt
    of random ids; None if the vocabulary is not known. together: all sides are up at once. body: fields of every request,
    over those of the plan. elsewhere: the engine runs on another machine. notes: warnings that are known before anything is
    measured. settled: the values of options that were left to a default."""

    model: str
    engine: str
    sides: tuple[Side[Any], ...]
    ids: Callable[[Prompt], tuple[int, ...]] | None = None
    together: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: bool = False
    notes: tuple[str, ...] = ()
    settled: dict[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    def temperature(self, task: Task) -> float:
        """Of the requests of a task."""
        return float(self.body.get("temperature", task.temperature))

    async def up(self, side: Side[Any]) -> None:
        """Bring a side up, and the others down unless all are up together."""
        if not self.together:
            for other in self.sides:
                if other is not side:
                    await other.down()
        await side.up()

    async def down(self) -> None:
        """Bring all sides down."""
        for side in self.sides:
            await side.down()


def names(plan: Plan, subject: Subject) -> list[str]:
    """The names of the arms, in the order of the sides."""
    found = [side.arm.name for side in subject.sides]
    return [*found[:-1], CONTROL] if plan.control else found


def requests_of(plan: Plan, subject: Subject, planned: PlannedBatch) -> list[Request]:
    """The requests of a batch. They are the same for every side, except that the arm `prediction` gets a prediction."""
    first = plan.first_variant(planned.load, planned.round_)
    salt = f"{planned.side} {planned.task.name} {planned.load.label} {planned.round_}"
    return [
        request_of(plan, subject, planned.task, planned.task.prompt(v), planned.side, planned.warmup, salt)
        for v in range(first, first + planned.load.requests)
    ]


def request_of(plan: Plan, subject: Subject, task: Task, prompt: Prompt, side: int, warmup: bool, salt: str) -> Request:
    """The request that a prompt becomes. Raises SettingError for random ids where the vocabulary is not known."""
    tokens = plan.max_tokens if prompt.max_tokens is None else prompt.max_tokens
    ids = None
    if prompt.random_ids:
        require(subject.ids is not None, "tasks", task.name, "random token ids need the vocabulary; give --tokenizer")
        assert subject.ids is not None
        ids = subject.ids(prompt)
    return Request(
        prompt.name,
        max_tokens=min(tokens, plan.warmup_tokens) if warmup else tokens,
        messages=prompt.conversation,
        text=prompt.text,
        ids=ids,
        temperature=subject.temperature(task),
        seed=plan.seed + prompt.seed,
        ignore_eos=task.fixed_length,
        prediction=prompt.prediction if (subject.sides[side].arm.settings or {}).get("method") == "prediction" else None,
        salt=salt,
    )


def random_ids(size: int, special: frozenset[int]) -> Callable[[Prompt], tuple[int, ...]]:
    """Makes the ids of a prompt: drawn uniformly from a vocabulary of this size, without the special ones."""
    ordinary = [i for i in range(size) if i not in special]
    return lambda prompt: tuple(random.Random(prompt.seed).choices(ordinary, k=prompt.random_ids))
