"""Runs a plan: every task, under every load, on every side, interleaved, and writes down what happened. Knows in which order
and which prompts; what a side is and how requests are sent is known elsewhere, and no conclusion is drawn here.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from forerun.bench import load as loads
from forerun.bench import machine
from forerun.bench.arms import BASELINE, CONTROL
from forerun.bench.embedded import Watcher, first_difference, order_of
from forerun.bench.endpoint import Ask, TokenLogprob
from forerun.bench.metrics import difference
from forerun.bench.patience import Patience
from forerun.bench.record import (
    Answer,
    ArmRecord,
    Batch,
    Counts,
    Difference,
    FirstTokens,
    Load,
    Record,
    ServerCounters,
    Settings,
)
from forerun.bench.sides import Side
from forerun.bench.workloads import TASKS, Prompt, Task, coin_tosses
from forerun.engine.stats import DraftStats
from forerun.types import require

COUNTERS_SETTLE_S = 2.0  # a server may count a request a moment after its last byte was sent
TOLERANCE = 0.02  # of the tokens: more than that beyond the client's own count is somebody else's traffic


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. tasks, loads: every one with every other. repetitions: measured batches of each cell, after `warmups`
    unmeasured ones of at most warmup_tokens. control: measure the baseline a second time as an arm of its own. trace: when
    the requests of a trace load are due, in seconds. samples: so many draws from each arm and prompt for the test that all draw
    alike. Raises SettingError."""

    tasks: tuple[Task, ...]
    loads: tuple[Load, ...] = (Load(),)
    repetitions: int = 8
    warmups: int = 1
    warmup_tokens: int = 32
    max_tokens: int = 128
    control: bool = False
    seed: int = 0
    trace: tuple[float, ...] = ()
    samples: int = 0

    def __post_init__(self) -> None:
        require(bool(self.tasks), "tasks", (), "give at least one")
        require(bool(self.loads), "loads", (), "give at least one")
        labels = [load.label for load in self.loads]
        for label in labels:
            require(labels.count(label) == 1, "loads", label, "give each load once")
        require(self.repetitions >= 1, "repetitions", self.repetitions, "give 1 or more, for instance 8")
        require(self.warmups >= 0, "warmups", self.warmups, "give 0 or more, for instance 1")
        require(self.warmup_tokens >= 1, "warmup_tokens", self.warmup_tokens, "give 1 or more, for instance 32")
        require(self.max_tokens >= 2, "max_tokens", self.max_tokens, "give 2 or more, for instance 128")
        require(self.samples >= 0, "samples", self.samples, "give 0 (none) or more, for instance 300")
        for load in self.loads:
            require(load.requests >= 1, "requests", load.requests, "give 1 or more")
            require(load.concurrency >= 1, "concurrency", load.concurrency, "give 1 or more")
            rate = load.rate if load.kind == "poisson" else 1.0
            require(rate is not None and rate > 0, "rate", load.rate, "give more than 0 requests a second, for instance 2")
            require(load.speed > 0, "trace_speed", load.speed, "give more than 0, for instance 1")
        for task in self.tasks:
            needed = self.prompts_needed
            require(
                needed <= task.variants,
                "repetitions",
                self.repetitions,
                f"with these warm-ups and loads that is {needed} prompts of the task {task.name}, which has {task.variants} "
                "different ones; lower --repetitions, --concurrency or --requests",
            )

    @property
    def rounds(self) -> int:
        return self.warmups + self.repetitions

    @property
    def prompts_needed(self) -> int:
        """Different prompts of each task: no batch repeats one of another, or the prefix cache would answer."""
        return self.rounds * sum(load.requests for load in self.loads)

    def first_variant(self, load: Load, round_: int) -> int:
        """The number of the first prompt of a batch."""
        before = self.loads.index(load)
        return self.rounds * sum(one.requests for one in self.loads[:before]) + round_ * load.requests


class Step(NamedTuple):
    """One batch to come. side: its index. visit: servers that take turns are restarted between visits."""

    task: Task
    load: Load
    round_: int
    side: int
    warmup: bool


def interleaved(plan: Plan, sides: int) -> Iterator[Step]:
    """All sides up together: A B C, then C B A, within each task and load."""
    for task in plan.tasks:
        for load in plan.loads:
            for round_ in range(plan.rounds):
                for side in order_of(sides, round_ - plan.warmups):
                    yield Step(task, load, round_, side, round_ < plan.warmups)


def in_turns(plan: Plan, sides: int) -> Iterator[Step]:
    """One side up at a time: A B C, then C B A, each visit half of the repetitions of everything, after warm-ups of its own."""
    half = (plan.repetitions + 1) // 2
    halves = (range(plan.warmups, plan.warmups + half), range(plan.warmups + half, plan.rounds))
    for visit, rounds in enumerate(halves):
        for side in order_of(sides, visit) if len(rounds) else ():
            for task in plan.tasks:
                for load in plan.loads:
                    for round_ in (*range(plan.warmups), *rounds):
                        yield Step(task, load, round_, side, round_ < plan.warmups)


def batches_of(plan: Plan, sides: int, together: bool) -> int:
    """How many batches a run is."""
    return sum(1 for _ in (interleaved if together else in_turns)(plan, sides))


def arrivals_of(plan: Plan, load: Load, round_: int) -> list[float] | None:
    """When the requests of a batch are due, as in load.arrivals; the times of a trace count from the batch's first request."""
    first = plan.first_variant(load, round_)
    window = plan.trace[first : first + load.requests]
    return loads.arrivals(load, plan.seed + round_, [at - window[0] for at in window])


def scheduled_s(plan: Plan, sides: int, together: bool) -> float:
    """Seconds that the run takes at least, because requests of an open loop are not sent before their times."""
    last = {
        (load, round_): due[-1]
        for load in plan.loads
        for round_ in range(plan.rounds)
        if (due := arrivals_of(plan, load, round_)) is not None
    }
    steps = (interleaved if together else in_turns)(plan, sides)
    return sum(last.get((step.load, step.round_), 0.0) for step in steps)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. sides: the baseline first; with plan.control the last one is the baseline again. ids: what a prompt of
    random token ids is made of; None if the vocabulary is not known. together: all sides are up at once. body: fields that the
    requests of all sides carry over those of the plan."""

    model: str
    engine: str
    sides: tuple[Side, ...]
    ids: Callable[[Prompt], tuple[int, ...]] | None = None
    together: bool = True
    command: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)

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


async def measure(
    plan: Plan, subject: Subject, watcher: Watcher, clock: Callable[[], float] = time.perf_counter
) -> Record:
    """Run the plan. Cancelled (as an interrupt from the keyboard does under asyncio.run), it brings all sides down and returns
    what was measured until then as unfinished. Raises SettingError if a side does not come up."""
    started, begin, busy = datetime.now(UTC).isoformat(timespec="seconds"), clock(), machine.load_average()
    batches: list[Batch] = []
    differences: list[Difference] = []
    drawn: list[FirstTokens] = []
    patience = [Patience() for _ in subject.sides]
    given_up: dict[str, None] = {}
    finished = True
    try:
        steps = interleaved if subject.together else in_turns
        for step in steps(plan, len(subject.sides)):
            side = subject.sides[step.side]
            patience[step.side].enter((step.task.name, step.load))
            if (lost := patience[step.side].lost) is not None:
                arm = _name(plan, subject, step.side)
                given_up[f"{arm} was given up on {step.task.name} at {step.load.label}: {lost}"] = None
                continue
            await subject.up(side)
            label = step.task.name if len(plan.loads) == 1 else f"{step.task.name} at {step.load.label}"
            watcher.began(label, _name(plan, subject, step.side), step.round_ - plan.warmups, step.warmup)
            batch = await _batch(plan, subject, step, len(batches), clock, patience[step.side])
            batches.append(batch)
            watcher.ended(batch)
        differences = await _differences(plan, subject, batches, clock)
        drawn = await _draws(plan, subject, clock)
    except asyncio.CancelledError:
        finished = False
    finally:
        arms = [
            ArmRecord(
                _name(plan, subject, index),
                None if side.arm.settings is None and not side.arm.flags else {**(side.arm.settings or {}), **_flags(side)},
                side.settings,
                await side.facts(),
            )
            for index, side in enumerate(subject.sides)
        ]
        for side in subject.sides:
            await side.down()
    settings = Settings(
        subject.model,
        tuple(task.name for task in plan.tasks),
        BASELINE,
        tuple(arms),
        plan.repetitions,
        plan.warmups,
        plan.warmup_tokens,
        plan.max_tokens,
        plan.loads[0].concurrency,
        CONTROL if plan.control else None,
        plan.seed,
        plan.loads,
        subject.engine,
        subject.command,
        {task.name: subject.temperature(task) for task in plan.tasks},
    )
    cautions = [f"{task.name}: {task.caution}." for task in plan.tasks if task.caution and task is not TASKS.get(task.name)]
    seconds, here = clock() - begin, machine.describe(busy)
    return Record(
        started, seconds, finished, machine.versions(), here, settings, tuple(batches), tuple(differences), tuple(drawn),
        (*cautions, *given_up),
    )  # fmt: skip


def names(plan: Plan, subject: Subject) -> list[str]:
    """Of the arms, in their order."""
    return [_name(plan, subject, index) for index in range(len(subject.sides))]


def _name(plan: Plan, subject: Subject, index: int) -> str:
    if plan.control and index == len(subject.sides) - 1:
        return CONTROL
    return BASELINE if index == 0 else subject.sides[index].arm.name


def _flags(side: Side) -> dict[str, str]:
    return {"flags": " ".join(side.arm.flags)} if side.arm.flags else {}


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


async def _batch(
    plan: Plan, subject: Subject, step: Step, order: int, clock: Callable[[], float], patience: Patience
) -> Batch:
    side = subject.sides[step.side]
    asks, due = asks_of(plan, subject, step), arrivals_of(plan, step.load, step.round_)
    await side.fresh()
    before = await side.endpoint.counters()
    answers, wall = await loads.drive(side.endpoint, asks, step.load, due, clock, patience)
    after = await _settled(side, before, answers)
    times = side.times()
    drafting, notes = judge(answers, before, after, side.arm.settings is not None or bool(side.arm.flags))
    if after is not None and before is not None and (grown := difference(before, after)) is not None:
        times = replace(times, cached_tokens=times.cached_tokens + int(grown.cached_tokens or 0))
    return Batch(
        step.task.name,
        _name(plan, subject, step.side),
        step.round_ - plan.warmups,
        order,
        step.warmup,
        wall,
        answers,
        times,
        step.load,
        drafting,
        before,
        after,
        notes,
    )


async def _settled(side: Side, before: ServerCounters | None, answers: Sequence[Answer]) -> ServerCounters | None:
    """The counters once they have caught up with what was received, or after a while."""
    mine, until = sum(a.tokens for a in answers), time.monotonic() + COUNTERS_SETTLE_S
    while True:
        after = await side.endpoint.counters()
        if before is None or after is None or after.generation_tokens is None or time.monotonic() > until:
            return after
        if after.generation_tokens - (before.generation_tokens or 0.0) >= mine:
            return after
        await asyncio.sleep(0.05)


def judge(
    answers: Sequence[Answer], before: ServerCounters | None, after: ServerCounters | None, drafts: bool
) -> tuple[Counts | None, tuple[str, ...]]:
    """The drafting counts of a batch, and what makes its counters doubtful. Counts that came with the answers are taken first;
    the server's counters only where they agree with what this client received.

    The counters count steps that had a draft; a step gives one token more than it accepts and the first token comes with the
    prompt, so all of them together were tokens - requests - accepted.
    """
    good = [a for a in answers if not a.failed]
    known = [a.counts for a in good if a.counts.steps or a.counts.drafted]
    grown = None if before is None or after is None else difference(before, after)
    notes = []
    if before is not None and after is not None and grown is None:
        notes.append("the server's counters fell during the batch: it was started anew, or another answered")
    mine = sum(a.tokens for a in good)
    foreign = False
    if grown is not None and grown.generation_tokens is not None and len(good) == len(answers):
        theirs = grown.generation_tokens
        foreign = theirs > mine * (1 + TOLERANCE) + 2
        if foreign:
            notes.append(
                f"the server produced {theirs:.0f} tokens during the batch and this client received {mine}: it has other "
                "traffic, so its counters are not used and the times are not its own"
            )
        elif theirs < mine * (1 - TOLERANCE) - 2:
            notes.append(f"the server counted {theirs:.0f} tokens of the {mine} that this client received")
    if good and len(known) == len([a for a in good if a.tokens > 1]):
        return total(known), tuple(notes)
    if not drafts or grown is None or foreign or grown.draft_tokens is None or len(good) < len(answers):
        return None, tuple(notes)
    accepted, drafting = int(grown.accepted_tokens or 0), int(grown.drafts or 0)
    steps = max(mine - len(good) - accepted, drafting)
    at = tuple(int(n) for n in grown.accepted_at)
    return Counts(steps, drafting, int(grown.draft_tokens), accepted, (), at), tuple(notes)


def total(counts: Sequence[Counts]) -> Counts:
    """All of them together."""
    sum_ = DraftStats()
    for c in counts:
        sum_.add(DraftStats(c.steps, c.drafting_steps, c.drafted, c.accepted, list(c.drafted_at), list(c.accepted_at)))
    return Counts(
        sum_.steps, sum_.drafting_steps, sum_.drafted, sum_.accepted, tuple(sum_.drafted_at), tuple(sum_.accepted_at)
    )


async def _differences(plan: Plan, subject: Subject, batches: Sequence[Batch], clock: Callable[[], float]) -> list[Difference]:
    """Where greedy answers left the baseline's, token by token where both sides give ids, else character by character. The
    baseline answers those prompts once more with logprobs, so that its margin there is known; the timed runs carry none."""
    tasks = {task.name: task for task in plan.tasks}
    reference = {(b.task, b.load, b.repetition): b for b in batches if b.arm == BASELINE and not b.warmup}
    found = []
    for batch in batches:
        theirs = reference.get((batch.task, batch.load, batch.repetition))
        if batch.warmup or batch.arm == BASELINE or theirs is None or subject.temperature(tasks[batch.task]) != 0.0:
            continue
        for index, (a, b) in enumerate(zip(batch.answers, theirs.answers, strict=True)):
            if a.failed or b.failed:
                continue
            by_token = bool(a.token_ids and b.token_ids)
            ours, other = (a.token_ids, b.token_ids) if by_token else (a.text, b.text)
            if ours == other:
                continue
            position = first_difference(ours, other)  # type: ignore[arg-type]
            gap = None
            if position < min(len(ours), len(other)):
                variant = plan.first_variant(batch.load, batch.repetition + plan.warmups) + index
                prompt = tasks[batch.task].prompt(variant)
                gap = await _gap(plan, subject, tasks[batch.task], prompt, b, position, by_token, clock)
            unit = "token" if by_token else "character"
            found.append(
                Difference(batch.task, batch.arm, batch.repetition, index, position, gap, batch.load, unit)  # type: ignore[arg-type]
            )
    return found


async def _gap(
    plan: Plan, subject: Subject, task: Task, prompt: Prompt, expected: Answer, position: int, by_token: bool,
    clock: Callable[[], float],
) -> float | None:  # fmt: skip
    """By how much the baseline preferred its token there to the next best; None if it answers differently this time, or gives
    no logprobs."""
    side = subject.sides[0]
    await subject.up(side)
    ask = ask_of(plan, subject, task, prompt, 0, False, "gap")
    ask = replace(ask, logprobs=2, max_tokens=position + 1 if by_token else ask.max_tokens)
    now = clock()
    exchange = await loads.exchange(side.endpoint, ask, now, clock)
    answer = loads.answer_of(ask, exchange, now)
    got = [one for piece in exchange.pieces for one in piece.logprobs]
    if answer.failed or not got:
        return None
    if by_token:
        same = answer.token_ids == expected.token_ids[: position + 1] and len(got) > position
        return margin_at(got[position]) if same else None
    if answer.text[: position + 1] != expected.text[: position + 1]:
        return None
    at = 0
    for one in got:
        if at + len(one.token) > position:
            return margin_at(one)
        at += len(one.token)
    return None


async def _draws(plan: Plan, subject: Subject, clock: Callable[[], float]) -> list[FirstTokens]:
    """What every arm draws first behind the same prompts at temperature 1: the first token, which no draft was made for, and
    the second, which is verified, together as one. The seeds of two arms differ, so that their draws are independent."""
    found = []
    for index, side in enumerate(subject.sides if plan.samples else ()):
        await subject.up(side)
        for prompt in coin_tosses():
            first = plan.seed + 10_000 * (index + 1)
            asks = [
                Ask(prompt.name, 3, text=prompt.text, temperature=1.0, seed=first + i, ignore_eos=True)
                for i in range(plan.samples)
            ]
            together = max(load.concurrency for load in plan.loads)
            answers, _ = await loads.drive(side.endpoint, asks, Load(concurrency=together, requests=plan.samples), None, clock)
            tokens = [" ".join(map(str, a.token_ids[:2])) or a.text for a in answers if not a.failed]
            found.append(FirstTokens(_name(plan, subject, index), prompt.name, 1.0, tuple(tokens)))
    return found


def margin_at(one: TokenLogprob) -> float | None:
    """The chosen token's log-probability less the best other's; None if no other was reported."""
    others = [value for token, value in one.top if token != one.token]
    return one.logprob - max(others) if others else None
