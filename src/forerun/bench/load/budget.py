"""The time that a run will take, estimated from a short measurement of the baseline, and a smaller run that fits a time budget.
Every arm is assumed to be as slow as plain decoding, since a drafter's acceptance is not known in advance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from forerun.bench.engines.subject import Subject, request_of
from forerun.bench.formats import duration
from forerun.bench.load import sending as loads
from forerun.bench.load.plan import Plan, PlannedBatch, arrivals_of, batches_of
from forerun.bench.workloads.tasks import Prompt, Task

DEFAULT_MINUTES = 4.0
TOKENS = 16  # output tokens of a request that measures the pace
BATCHED = 0.05  # added share of a step's time for each further request in it: a guess between a GPU and a CPU
SMALLER = (
    (6, 128, 4), (5, 96, 4), (5, 64, 4), (4, 64, 4), (4, 48, 4), (4, 48, 3), (4, 48, 2), (4, 32, 2),
)  # fmt: skip
"""Repetitions, output tokens and tasks of smaller and smaller runs. There is no verdict below 4 repetitions. Short answers
measure mostly the prompt."""

KEPT = ("copy", "explain", "return-code", "edit-code")
"""The tasks that are kept, the most important first: the best and the worst case of drafting from the prompt lead."""


class Pace(NamedTuple):
    """Plain decoding of one request: seconds for each character of the prompt, and for each step."""

    prompt_s: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s if self.step_s > 0 else math.inf


class Failed(NamedTuple):
    """The pace could not be measured, and why."""

    reason: str


async def pace_of(plan: Plan, subject: Subject, clock: Callable[[], float]) -> Pace | Failed:
    """From two requests to the baseline; the first one is a warm-up. Raises SettingError if the baseline does not start."""
    side, task = subject.sides[0], plan.tasks[0]
    await subject.up(side)
    prompt, answer = task.prompt(task.variants - 1), None
    for attempt in range(2):
        request = request_of(plan, subject, task, prompt, 0, False, f"pace {attempt}")
        request = dataclasses.replace(request, max_tokens=max(2, min(request.max_tokens, TOKENS)))
        await side.fresh()
        begin = clock()
        answer = loads.answer_of(request, await loads.exchange(side.endpoint, request, begin, clock), begin)
        if answer.failed:
            return Failed(answer.reason or "")
    assert answer is not None
    steps = max(answer.tokens - 1, 1)
    return Pace(answer.ttft_s / max(_characters(prompt), 1), max(answer.e2e_s - answer.ttft_s, 0.0) / steps)


def _characters(prompt: Prompt) -> int:
    if prompt.conversation is not None:
        return sum(len(str(message.get("content", ""))) for message in prompt.conversation)
    return len(prompt.text or "") or 4 * prompt.random_ids


def seconds_of(plan: Plan, pace: Pace) -> Callable[[PlannedBatch], float]:
    """The estimated seconds of each batch, which are mostly too many."""
    lengths = {task.name: _characters(task.prompt(0)) for task in plan.tasks}

    def seconds(planned: PlannedBatch) -> float:
        together = min(planned.load.concurrency, planned.load.requests)
        tokens = min(plan.max_tokens, plan.warmup_tokens) if planned.warmup else plan.max_tokens
        prompts = pace.prompt_s * lengths[planned.task.name] * together
        decoding = pace.step_s * (1 + BATCHED * (together - 1)) * tokens
        due = arrivals_of(plan, planned.load, planned.round_)
        if due is not None:
            return due[-1] + pace.prompt_s * lengths[planned.task.name] + pace.step_s * tokens
        return (prompts + decoding) * math.ceil(planned.load.requests / together)

    return seconds


def estimate(plan: Plan, pace: Pace, sides: int, together: bool) -> float:
    """The estimated seconds of the plan, without the start of engines."""
    return sum(map(seconds_of(plan, pace), batches_of(plan, sides, together)))


def fitted(plan: Plan, pace: Pace, sides: int, together: bool, seconds: float, may: Collection[str]) -> Plan:
    """The plan, or the largest smaller plan that takes at most `seconds`, or the smallest one. may: which of repetitions,
    max_tokens and tasks may be reduced."""
    smaller = plan
    if estimate(plan, pace, sides, together) <= seconds:
        return plan
    for repetitions, max_tokens, tasks in SMALLER:
        smaller = dataclasses.replace(
            plan,
            repetitions=min(plan.repetitions, repetitions) if "repetitions" in may else plan.repetitions,
            max_tokens=min(plan.max_tokens, max_tokens) if "max_tokens" in may else plan.max_tokens,
            tasks=_kept(plan.tasks, tasks) if "tasks" in may else plan.tasks,
        )
        if estimate(smaller, pace, sides, together) <= seconds:
            break
    return smaller


def _kept(tasks: Sequence[Task], count: int) -> tuple[Task, ...]:
    """This many of the tasks, in their order."""
    ranked = sorted(tasks, key=lambda task: KEPT.index(task.name) if task.name in KEPT else len(KEPT))
    return tuple(task for task in tasks if task in ranked[:count])


def said(plan: Plan, smaller: Plan, pace: Pace, sides: int, together: bool, seconds: float | None) -> str:
    """What is printed before the run: its estimated time, and how it was reduced."""
    takes = estimate(smaller, pace, sides, together)
    per_prompt = pace.prompt_s * _characters(smaller.tasks[0].prompt(0))
    speed = f"plain decoding makes {pace.tokens_per_s:.0f} tokens/s here, and a prompt takes {per_prompt:.1f} s"
    what = f"This run takes about {duration(takes)} or less: {speed}."
    if smaller is plan:
        return what
    assert seconds is not None
    tasks = "" if smaller.tasks == plan.tasks else f" on {', '.join(task.name for task in smaller.tasks)}"
    why = f"{_size(plan)} would take about {duration(estimate(plan, pace, sides, together))}"
    if takes <= seconds:
        return f"{what} {why}; to stay within {duration(seconds)} (--budget-minutes) it has {_size(smaller)}{tasks}."
    return (
        f"{what} {why}; the smallest that can be has {_size(smaller)}{tasks}, which is more than the {duration(seconds)} of "
        "--budget-minutes."
    )


def _size(plan: Plan) -> str:
    return f"{plan.repetitions} repetitions of {plan.max_tokens} tokens"
