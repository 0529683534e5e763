"""`forerun bench`: measure whether speculation pays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forerun.bench.options import Options, resumed
from forerun.checks import require
from forerun.cli.errors import INTERRUPTED, UNANSWERED, complain, tell
from forerun.cli.outputs import Outputs, load_record
from forerun.cli.parameters import given_names
from forerun.options import OUTPUT, RUN, SERVERS, option

if TYPE_CHECKING:
    from forerun.bench.command import Limit
    from forerun.bench.records.record import Record


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that the record does not keep."""

    print_template: bool = option(False, SERVERS, "Print the engine's template and exit.")
    output: Path | None = option(
        None, OUTPUT, "The record: every raw sample, settings, versions, machine. It is written after each batch.",
        "-o", metavar="FILE", default_text="bench-DATE-TIME.json",
    )  # fmt: skip
    budget_minutes: float | None = option(
        None, RUN,
        "Take no longer than that: with fewer repetitions, shorter answers and fewer tasks, unless those are given. "
        "0: no limit.",
        metavar="MINUTES",
        default_text="4 where none of -r, -n, --tasks and the options of the load are given; otherwise no limit",
    )  # fmt: skip
    resume: Path | None = option(
        None, RUN,
        "Go on with an interrupted run: measure what its record is missing, with its options. Give secrets again, since no "
        "record has them.",
        metavar="RECORD",
    )  # fmt: skip


def bench(ctx: typer.Context, options: Options, run: RunOptions, outputs: Outputs) -> None:
    """Does speculation pay here? Measures it against plain decoding on this machine, with the same prompts, and says so.

    Each task is run with no drafter (the baseline) and with each arm, in the order A B C, C B A, on prompts that differ
    between repetitions and are the same for every arm. The result of each is a speed-up with its 95 % interval, the reasons
    for it, whether the greedy answers stayed the same, and a verdict: faster, slower, no difference or not enough data. The
    expected duration is printed first; without options the run is fitted to four minutes.

    **Examples**

        forerun bench

        forerun bench -m HuggingFaceTB/SmolLM2-360M-Instruct --tasks copy,explain -a ngram:k=2,4,8 -a suffix

        forerun bench -a '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}' -r 10 --control --markdown result.md

        forerun bench -e vllm --program venv/bin/vllm -a ngram:k=2,4,8 --tasks copy,explain -c 1,8,32

        forerun bench -e http://127.0.0.1:8000 -a ngram=http://127.0.0.1:8001 --rate 2 --requests 64

        forerun bench --html result.html --ci 'speedup.copy >= 1.3' --ci 'identical == all' --junit result.xml
    """
    from forerun.bench import command

    if run.print_template:
        from forerun.bench.engines import launching

        print(launching.text_of(options.engine), end="")
        return
    names = given_names(ctx)
    if options.tasks == ("none",):
        options = dataclasses.replace(options, tasks=())
    if "concurrency" not in names or not options.concurrency:
        open_loop = options.rates or options.trace is not None
        options = dataclasses.replace(options, concurrency=() if open_loop else (1,))
    given, earlier = {name: getattr(options, name) for name in names if hasattr(options, name)}, None
    chosen = given.keys() | ({"tasks"} if outputs.ci else set())  # a threshold may name a task
    limit = command.limit_of(run.budget_minutes, chosen)
    if run.resume is not None:
        minutes = run.budget_minutes
        require(minutes is None, "budget_minutes", minutes, "a run is resumed as it was begun; leave it out")
        earlier, limit = load_record(run.resume), command.Limit()
        known = bool(earlier.settings.options)
        require(known, "resume", str(run.resume), "it is of a version that could not resume; measure anew")
        options = resumed(earlier.settings.options, given)
    options.check()
    path = run.output or run.resume or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.json")
    execute(options, earlier, limit, path, outputs)


def execute(options: Options, earlier: Record | None, limit: Limit, path: Path, outputs: Outputs) -> None:
    """Measure what the options ask for, or what an earlier part of that run is missing; write the record and the outputs."""
    from rich.console import Console

    from forerun.bench import command
    from forerun.bench.load.plan import scheduled_s
    from forerun.bench.pages import progress, words
    from forerun.bench.records.keeping import Keeper
    from forerun.bench.records.summary import unanswered

    console = Console()
    keeper = Keeper(path, replacing=earlier is not None)
    plan = command.plan_of(options)
    outputs.check_files([path])
    tasks, loads = [task.name for task in plan.tasks], [load.label for load in plan.loads]
    outputs.check_thresholds(tasks, loads, command.arm_names(options))
    with progress.waiting(console, "Preparing" if options.remote else "Loading the model"):
        subject = command.subject_of(options, plan)
    subject = command.described(subject, options, plan)
    if earlier is not None:
        command.resumable(earlier, subject)
    least = scheduled_s(plan, len(subject.sides), subject.together)
    if (long := words.long_wait(least, plan.loads)) is not None:
        tell(f"Note: {long}")
    tell(f"Record: {path}, written after each batch. If the run is interrupted, go on with: {keeper.resume}")
    try:
        with progress.watcher(console) as course:
            prepare = partial(command.prepare, options, limit, course, tell)
            measured = command.measure(plan, subject, course, keeper.write, earlier, prepare)
    except BaseException:
        if keeper.saved:
            tell(f"What was measured until then is in {keeper.close()}. Go on with: {keeper.resume}")
        raise
    if (where := keeper.close()) != path:
        complain(f"{path} cannot be written ({keeper.trouble}); the record is in {where}")
    passed = outputs.write(measured, console)
    console.print(f"\nAll samples, settings and versions: {where}", highlight=False, soft_wrap=True)
    if not measured.finished:
        tell(f"Interrupted. Go on with: {keeper.resume}")
        raise typer.Exit(INTERRUPTED)
    if measured.given_up or unanswered(measured):
        raise typer.Exit(UNANSWERED)
    if not passed:
        raise typer.Exit(1)
