"""What is measured: the sides of a comparison together, and the requests that a plan's prompts become. Sends none of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.engines.arms import BASELINE, CONTROL
from forerun.bench.engines.endpoint import Ask
from forerun.bench.engines.sides import Side
from forerun.bench.load.plan import Plan, Step
from forerun.bench.workloads.tasks import Prompt, Task
from forerun.types import require


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run was asked for with; the fields are those of record.Settings."""

    command: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. sides: the baseline first; with plan.control the last one is the baseline again. ids: what a prompt of
    random token ids is made of; None if the vocabulary is not known. together: all sides are up at once. body: fields that the
    requests of all sides carry over those of the plan. elsewhere: the engine runs on another machine. notes: what could mislead
    and is known before anything is measured. settled: options that were left to a default, as they came out."""

    model: str
    engine: str
    sides: tuple[Side, ...]
    ids: Callable[[Prompt], tuple[int, ...]] | None = None
    together: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: bool = False
    notes: tuple[str, ...] = ()
    settled: dict[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    def temperature(self, task: Task) -> float:
        """At which its requests are sent."""
        return float(self.body.get("temperature", task.temperature))

    async def up(self, side: Side) -> None:
        """Have this side up: beside the others, or alone where they take turns."""
        if not self.together:
            for other in self.sides:
                if other is not side:
                    await other.down()
        await side.up()

    async def down(self) -> None:
        """Have no side up."""
        for side in self.sides:
            await side.down()


def names(plan: Plan, subject: Subject) -> list[str]:
    """Of the arms, in their order."""
    return [name_of(plan, subject, index) for index in range(len(subject.sides))]


def name_of(plan: Plan, subject: Subject, index: int) -> str:
    """Of the arm that this side is."""
    if plan.control and index == len(subject.sides) - 1:
        return CONTROL
    return BASELINE if index == 0 else subject.sides[index].arm.name


def asks_of(plan: Plan, subject: Subject, step: Step) -> list[Ask]:
    """The requests of a batch, the same for every side but that an arm `prediction` is given one."""
    first = plan.first_variant(step.load, step.round_)
    salt = f"{step.side} {step.task.name} {step.load.label} {step.round_}"
    return [
        ask_of(plan, subject, step.task, step.task.prompt(v), step.side, step.warmup, salt)
        for v in range(first, first + step.load.requests)
    ]


def ask_of(plan: Plan, subject: Subject, task: Task, prompt: Prompt, side: int, warmup: bool, salt: str) -> Ask:
    """One of them."""
    settings = subject.sides[side].arm.settings
    predicts = settings is not None and settings.get("method") == "prediction"
    tokens = plan.max_tokens if prompt.max_tokens is None else prompt.max_tokens
    messages = prompt.messages
    if messages is None and prompt.message is not None:
        messages = ({"role": "user", "content": prompt.message},)
    ids = None
    if prompt.random_ids:
        require(subject.ids is not None, "tasks", task.name, "random token ids need the vocabulary; give --tokenizer")
        assert subject.ids is not None
        ids = subject.ids(prompt)
    return Ask(
        prompt.name,
        min(tokens, plan.warmup_tokens) if warmup else tokens,
        messages,
        prompt.text,
        ids,
        subject.temperature(task),
        plan.seed + prompt.seed,
        task.fixed_length,
        prompt.prediction if predicts else None,
        None,
        salt,
    )


def random_ids(size: int, special: frozenset[int]) -> Callable[[Prompt], tuple[int, ...]]:
    """Ids drawn evenly from a vocabulary of that size, but for those that stand for structure (end of text, roles)."""
    ordinary = [i for i in range(size) if i not in special]
    return lambda prompt: tuple(random.Random(prompt.seed).choices(ordinary, k=prompt.random_ids))
