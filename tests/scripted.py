"""A side of a comparison that follows a script on a simulated clock: known step times, drafts and answers, and faults if
wanted. The runner measures it like any other side.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from forerun.bench import run as runner
from forerun.bench.engines.arms import BASELINE, CONTROL, Arm
from forerun.bench.engines.endpoint import Piece, Request, RequestFailed, TokenLogprob
from forerun.bench.engines.subject import Subject, random_ids
from forerun.bench.load.plan import Plan, PlannedBatch
from forerun.bench.records.record import Batch, Counts, Facts, Load, Record, ServerCounters, Times
from forerun.bench.workloads import tasks as workloads
from forerun.engine.stats import DraftStats

SPECIAL = frozenset({0, 1, 2})


class Clock:
    """A simulated clock, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Script(NamedTuple):
    """What an arm does. first_s, step_s: seconds to the first token and of each step after it. drafted, accepted: tokens of
    each step, as repeating sequences. noise: relative, of the step time. change: alters the answer. cached: prompt tokens found
    in the prefix cache. fault: the exception of a request, or None."""

    first_s: float = 0.1
    step_s: float = 0.01
    drafted: tuple[int, ...] = (0,)
    accepted: tuple[int, ...] = (0,)
    noise: float = 0.0
    change: Callable[[list[int]], list[int]] = list
    cached: int = 0
    reason: str = "length"
    fault: Callable[[Request], Exception | None] = lambda ask: None


@dataclasses.dataclass
class Sent:
    """A request, and the arm that received it."""

    arm: str
    ask: Request

    @property
    def prompt(self) -> str:
        return str(self.ask.messages or self.ask.text or self.ask.ids)


class ScriptedSide:
    """Takes the place of an engine in this process. Its answers depend on the prompt alone. The script sets the clock."""

    def __init__(self, arm: Arm, script: Script, clock: Clock, log: list[Sent], built: list[str]) -> None:
        self.arm, self.script, self.clock, self.log, self.built = arm, script, clock, log, built
        self.settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
        self.facts: Facts | None = None
        self.is_up = self.cleared = False
        self.alive = True
        self.fails_to_start: list[Exception] = []
        self.draw = random.Random(arm.name)
        self.begin, self.steps = clock.now, 0

    @property
    def endpoint(self) -> ScriptedSide:
        return self

    async def survived(self) -> bool:
        return self.alive

    async def up(self) -> None:
        if not self.is_up:
            if self.fails_to_start:
                raise self.fails_to_start.pop(0)
            self.built.append(self.arm.name)
            self.is_up = self.alive = True
            self.facts = Facts("forerun", "1", kv_tokens=1000)

    async def down(self) -> None:
        self.is_up = False

    async def renew(self) -> None:
        if self.arm.settings is not None:
            await self.down()

    async def fresh(self) -> None:
        self.cleared, self.begin, self.steps = True, self.clock.now, 0

    def times(self) -> Times:
        self.cleared, wall = False, self.clock.now - self.begin
        return Times(self.steps, 0.1 * wall, 0.6 * wall, 0.2 * wall, 0.1 * wall, self.script.cached)

    async def counters(self) -> ServerCounters | None:
        return None

    async def generate(self, ask: Request) -> AsyncIterator[Piece]:
        assert self.is_up and (self.cleared or ask.logprobs), "a batch was sent to a warm prefix cache"
        self.log.append(Sent(self.arm.name, ask))
        begin, script = self.clock.now, self.script
        await asyncio.sleep(0)  # all requests of a batch start together
        if (fault := script.fault(ask)) is not None:
            raise fault
        stats, at, made = DraftStats(), begin + script.first_s, 1
        ends = [(at, 1)]
        while made < ask.max_tokens:
            turn = stats.steps % len(script.drafted)
            accepted = min(script.accepted[turn], ask.max_tokens - made)
            stats.count(script.drafted[turn], accepted)
            made = min(made + accepted + 1, ask.max_tokens)
            at += script.step_s * (1 + script.noise * self.draw.gauss(0, 1))
            ends.append((at, made))
        ids = script.change(random.Random(str(ask.messages or ask.text or ask.ids)).choices(range(10, 1000), k=made))
        self.clock.now = max(self.clock.now, at)
        self.steps += stats.steps
        counts = Counts(stats.steps, stats.drafting_steps, stats.drafted, stats.accepted, tuple(stats.drafted_at),
                        tuple(stats.accepted_at))  # fmt: skip
        before = 0
        for when, until in ends:
            some, before = tuple(ids[before:until]), until
            top = tuple(TokenLogprob(str(i), -0.5, ((str(i), -0.5), ("9", -0.75))) for i in some) if ask.logprobs else ()
            last = until == made
            yield Piece(
                when, "text " * len(some), some, script.reason if last else None, None, counts if last else None,
                7 if last else None, top, 0.0 if last else None,
            )  # fmt: skip


class Quiet:
    """A watcher that records what it is told. stop_at: raise `stop` before the batch of this number."""

    def __init__(self, stop_at: int = -1, stop: type[BaseException] = asyncio.CancelledError) -> None:
        self.seen: list[tuple[str, str, int, bool]] = []
        self.batches: list[Batch] = []
        self.total: list[PlannedBatch] = []
        self.left: list[tuple[PlannedBatch, str]] = []
        self.stop_at, self.stop = stop_at, stop

    def planned(self, steps: Sequence[PlannedBatch]) -> None:
        self.total = list(steps)

    def doing(self, what: str) -> None:
        pass

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        if len(self.seen) == self.stop_at:
            raise self.stop
        self.seen.append((task, arm, repetition, warmup))

    def ended(self, batch: Batch) -> None:
        self.batches.append(batch)

    def left_out(self, step: PlannedBatch, why: str) -> None:
        self.left.append((step, why))


NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
FAST = Script(step_s=0.0125, drafted=(4, 4, 0, 2), accepted=(4, 1, 0, 0))  # 9 tokens in 4 steps


@dataclasses.dataclass
class Bench:
    """A scripted comparison, which can be measured several times. sides: those without the control."""

    plan: Plan
    subject: Subject
    sides: list[ScriptedSide]
    clock: Clock
    log: list[Sent]
    built: list[str]
    kept: list[Record] = dataclasses.field(default_factory=list)

    def measure(self, watcher: Quiet | None = None, earlier: Record | None = None) -> Record:
        gc.freeze()  # each batch begins with a garbage collection, which would visit all imported modules
        how = runner.measure(self.plan, self.subject, watcher or Quiet(), self.kept.append, earlier, self.clock)
        return asyncio.run(how)


def scripted(scripts: dict[str, Script], together: bool = True, **plan: Any) -> Bench:
    """A comparison of these scripts, by arm. The baseline has the default script unless one is given."""
    names = [n for n in scripts if n not in (BASELINE, CONTROL)]
    given: dict[str, Any] = {"tasks": ("return-code",), "repetitions": 5, "max_tokens": 73, "concurrency": 1} | plan
    count = given.pop("concurrency")
    given["tasks"] = workloads.find(given["tasks"])
    given.setdefault("loads", (Load(concurrency=count, requests=count),))
    clock, log, built = Clock(), [], []  # type: ignore[var-annotated]
    sides = [ScriptedSide(Arm(BASELINE), scripts.get(BASELINE, Script()), clock, log, built)]
    for i, name in enumerate(names):
        arm = Arm(name, {**NGRAM, "num_speculative_tokens": i + 2})
        sides.append(ScriptedSide(arm, scripts[name], clock, log, built))
    every = tuple(sides) + ((sides[0],) if given.get("control") else ())
    subject = Subject("fake", "forerun", every, random_ids(1000, SPECIAL), together)
    return Bench(Plan(**given), subject, sides, clock, log, built)


def refused(message: str) -> Callable[[Request], Exception | None]:
    """A fault of every request, for Script."""
    return lambda ask: RequestFailed(message)
