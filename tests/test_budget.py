"""What a run says of its time before it begins and while it lasts, and how it is fitted to a time budget."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from forerun.bench import command
from forerun.bench.formats import duration
from forerun.bench.load import budget
from forerun.bench.load.budget import Failed, Pace
from forerun.bench.load.plan import Plan, PlannedBatch, batches_of
from forerun.bench.pages.progress import EVERY_S, Course, Following, Lines
from forerun.bench.records import record
from forerun.bench.records.record import Batch, Load
from forerun.bench.workloads import tasks as workloads
from tests.scripted import FAST, Script, refused, scripted
from tests.tiny import tiny_model

DEMO = Plan(workloads.find(workloads.DEFAULT_TASKS))
ALL = frozenset({"repetitions", "max_tokens", "tasks"})


def pace(bench: Any) -> Pace | Failed:
    return asyncio.run(budget.pace_of(bench.plan, bench.subject, bench.clock))


# the estimate


def test_the_pace_is_that_of_the_baseline() -> None:
    found = pace(scripted({"baseline": Script(first_s=0.3, step_s=0.02), "fast": FAST}))
    length = len(str(workloads.TASKS["return-code"].prompt(511).message))
    assert isinstance(found, Pace) and found.step_s == pytest.approx(0.02) and found.tokens_per_s == pytest.approx(50)
    assert found.prompt_s * length == pytest.approx(0.3)


def test_without_an_answer_there_is_no_pace() -> None:
    found = pace(scripted({"baseline": Script(fault=refused("HTTP 401: no key"))}))
    assert found == Failed("HTTP 401: no key")


def test_the_prompts_of_the_measurement_are_none_of_the_run() -> None:
    bench = scripted({"fast": FAST})
    pace(bench)
    before = {one.prompt for one in bench.log}
    bench.log.clear()
    bench.measure()
    assert before and not before & {one.prompt for one in bench.log}


@pytest.mark.parametrize("concurrency, tasks", [(1, ("copy", "explain")), (1, ("chat",)), (1, ("random",))])
def test_the_estimate_is_what_a_run_without_drafts_takes(concurrency: int, tasks: tuple[str, ...]) -> None:
    """A prompt's time goes with its length in the estimate and does not in the script, so roughly."""
    slow = Script(first_s=0.05, step_s=0.02)
    bench = scripted({"baseline": slow, "same": slow}, tasks=tasks, concurrency=concurrency, max_tokens=60, repetitions=4)
    found = pace(bench)
    assert isinstance(found, Pace)
    begin = bench.clock.now
    bench.measure()
    assert budget.estimate(bench.plan, found, 2, True) == pytest.approx(bench.clock.now - begin, rel=0.3)


def test_an_open_loop_lasts_as_long_as_its_arrivals() -> None:
    plan = Plan(workloads.find(("explain",)), (Load("poisson", rate=0.5, requests=9),), repetitions=3, warmups=0)
    assert budget.estimate(plan, Pace(0.0, 0.0), 2, True) > 2 * 3 * 8


# the budget


def test_a_run_is_no_larger_than_the_budget_or_as_small_as_it_can_be() -> None:
    draw = random.Random(0)
    smallest = budget.SMALLER[-1]
    for _ in range(300):
        plan = dataclasses.replace(
            DEMO,
            repetitions=draw.choice((2, 5, 8, 20)),
            max_tokens=draw.choice((16, 64, 128, 400)),
            tasks=workloads.find(tuple(draw.sample(list(workloads.TASKS), draw.randrange(1, 6)))),
        )
        may = frozenset(name for name in ALL if draw.random() < 0.6)
        found, seconds = Pace(10 ** draw.uniform(-6, -2), 10 ** draw.uniform(-4, 0)), 10 ** draw.uniform(0, 4)
        sides = draw.choice((2, 3, 5))
        together = draw.random() < 0.5
        smaller = budget.fitted(plan, found, sides, together, seconds, may)
        assert smaller.repetitions <= plan.repetitions and smaller.max_tokens <= plan.max_tokens
        assert set(smaller.tasks) <= set(plan.tasks) and list(smaller.tasks) == [t for t in plan.tasks if t in smaller.tasks]
        for name in ALL - may:
            assert getattr(smaller, name) == getattr(plan, name), "what is given stays"
        takes = budget.estimate(smaller, found, sides, together)
        if budget.estimate(plan, found, sides, together) <= seconds:
            assert smaller is plan
        elif takes > seconds:
            least = min(plan.repetitions, smallest[0]), min(plan.max_tokens, smallest[1]), min(len(plan.tasks), smallest[2])
            made = smaller.repetitions, smaller.max_tokens, len(smaller.tasks)
            names = ("repetitions", "max_tokens", "tasks")
            assert all(a == b for a, b, name in zip(made, least, names, strict=True) if name in may)
        assert budget.said(plan, smaller, found, sides, together, seconds)


def test_a_slow_machine_keeps_a_verdict_and_both_extremes() -> None:
    """A prompt of 2,000 characters in 2.5 s, 31 tokens/s; and 11 tokens/s, as in float32."""
    for step_s, tasks in ((1 / 31, 4), (1 / 11, 3)):
        found = Pace(2.5 / 2000, step_s)
        smaller = budget.fitted(DEMO, found, 3, True, 60 * budget.DEFAULT_MINUTES, ALL)
        assert budget.estimate(smaller, found, 3, True) <= 300 and smaller.repetitions >= 4 and len(smaller.tasks) == tasks
        assert {"copy", "explain"} <= {task.name for task in smaller.tasks}
        text = budget.said(DEMO, smaller, found, 3, True, 60 * budget.DEFAULT_MINUTES)
        assert f"{1 / step_s:.0f} tokens/s here" in text and "8 repetitions of 128 tokens would take about" in text
        assert ("on copy, return-code, explain" in text) == (tasks == 3)


def test_a_fast_machine_measures_all() -> None:
    assert budget.fitted(DEMO, Pace(0.2 / 2000, 1 / 90), 3, True, 240, ALL) is DEMO
    assert "about 2 min 30 s" in budget.said(DEMO, DEMO, Pace(0.2 / 2000, 1 / 90), 3, True, 240)


@pytest.mark.parametrize(
    "given, seconds, may",
    [
        ({}, 240.0, ALL),
        ({"model": 1, "arms": 1, "seed": 1}, 240.0, ALL),
        ({"repetitions": 8}, None, ALL - {"repetitions"}),
        ({"tasks": 1}, None, ALL - {"tasks"}),
        ({"concurrency": 1}, None, ALL),
    ],
)
def test_the_default_budget_is_for_runs_whose_size_nobody_chose(
    given: dict[str, Any], seconds: float | None, may: frozenset[str]
) -> None:
    assert command.limit_of(None, given) == command.Limit(seconds, may)
    assert command.limit_of(2.0, given) == command.Limit(120.0, may) and command.limit_of(0.0, given).seconds is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("budget") / "tiny", positions=4096))


def test_a_fitted_run_says_so_and_can_be_resumed(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it came to is what its record and its command say, so that neither depends on how fast the machine is next time."""

    async def slow(*_: Any) -> Pace:
        return Pace(1e-6, 1.0)

    monkeypatch.setattr(budget, "pace_of", slow)
    path = tmp_path / "r.json"
    shown = CliRunner().invoke(cli.app, ["bench", "-m", model, "-a", "ngram", "-o", str(path)])
    assert shown.exit_code == 0, shown.output
    for words in ("8 repetitions of 128 tokens would take about", "more than the 4 min of --budget-minutes"):
        assert words in shown.stderr
    made = record.load(path)
    s = made.settings
    assert s.repetitions < 8 and s.options["repetitions"] == s.repetitions and "-r" in s.command
    assert (s.options["max_tokens"], s.options["tasks"]) == (s.max_tokens, list(s.tasks)) or len(s.tasks) == 4
    record.save(dataclasses.replace(made, batches=made.batches[:4], finished=False), path)
    monkeypatch.setattr(budget, "pace_of", lambda *_: asyncio.sleep(0, Pace(1e-9, 1e-4)))
    again = CliRunner().invoke(cli.app, ["bench", "--resume", str(path)])
    assert again.exit_code == 0 and len(record.load(path).batches) >= len(made.batches)
    for bad in (["--resume", str(path), "--budget-minutes", "2"], ["--budget-minutes", "-1"], ["--budget-minutes", "nan"],
                ["-r", "4", "-n", "8", "--tasks", "copy", "--budget-minutes", "2"]):  # fmt: skip
        refused_ = CliRunner().invoke(cli.app, ["bench", *bad])
        assert refused_.exit_code == 2 and "budget_minutes" in refused_.stderr


# progress


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(step: PlannedBatch, arm: str = "a", wall_s: float = 2.0) -> Batch:
    from tests.records import Way, answer

    return Batch(step.task.name, arm, step.round_ - 1, 0, step.warmup, wall_s, (answer(Way(), "copy", 0, 20),), None)  # type: ignore[arg-type]


def test_the_time_that_is_left_follows_from_what_was_measured() -> None:
    time, lines = Time(), []  # type: ignore[var-annotated]
    course = Course(lambda course: lines.append(course.line()), time)
    course.doing("starting baseline")
    assert lines[-1] == "starting baseline" and course.left_s is None
    course.seconds_of = lambda step: 1.0 if step.warmup else 10.0
    steps = list(batches_of(dataclasses.replace(DEMO, repetitions=1), 2, True))
    course.planned(steps)
    assert course.left_s == pytest.approx(4 * 2 * 11) and "16 batches" in lines[-1]
    for number, step in enumerate(steps[:6]):
        course.began(step.task.name, "a", step.round_ - 1, step.warmup)
        time.now += 0.5 if step.warmup else 5.0
        course.ended(batch(step))
        assert course.done == number + 1
    assert course.left_s == pytest.approx(sum(course.seconds_of(s) for s in steps[6:]) / 2), "twice as fast as expected"
    assert lines[-1].startswith("6 of 16 batches, about") and "tokens/s: a 10" in lines[-1]
    for step in steps[6:]:
        course.left_out(step, "given up")
    assert course.total == 6 and course.left_s == 0


def test_something_is_said_every_ten_seconds_and_not_more_often() -> None:
    time, said = Time(), []  # type: ignore[var-annotated]
    lines = Lines(lambda line: said.append((time.now, line)), time)
    course = Course(lines.show, time)
    steps = list(batches_of(DEMO, 2, True))
    course.planned(steps)
    for step in steps:
        course.began(step.task.name, "a", step.round_ - 1, step.warmup)
        for _ in range(25):  # of a batch of 25 s
            time.now += 1.0
            lines.check()
        course.ended(batch(step))
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(said)]
    assert said[0][0] == 0.0 and min(gaps) >= EVERY_S and max(gaps) <= EVERY_S + 1
    quick = len(said)
    for _ in range(9):
        course.doing("quick")
        time.now += 0.1
    assert len(said) <= quick + 1


def test_parts_of_a_run_say_what_is_left_of_them() -> None:
    """The pace is that since the part began; what was done before does not count."""
    time, said = Time(), []  # type: ignore[var-annotated]
    course = Following(lambda course: said.append(course.line()), time)
    assert course.line() == ""
    course.begin("answers", 600, 1000)
    assert said[-1] == "600 of 1000 answers"
    time.now += 10.0
    course.at(700, "5 tokens/s")
    assert said[-1] == "700 of 1000 answers, about 30 s left (5 tokens/s)"
    course.at(1000, "")
    assert said[-1] == "1000 of 1000 answers"
    course.begin("loading", 0, 0)
    assert said[-1] == "loading"


@pytest.mark.parametrize(
    "seconds, words",
    [(1, "5 s"), (42, "40 s"), (94, "95 s"), (100, "1 min 30 s"), (150, "2 min 30 s"), (181, "3 min"), (600, "10 min"),
     (4000, "1 h 5 min"), (7199, "2 h"), (3590, "1 h")],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
