"""Invented records for tests, with known step times, drafts, loads and costs, and with seeded noise if wanted."""

from __future__ import annotations

import dataclasses
import io
import random
from typing import Any

from rich.console import Console

from forerun.bench.pages import html, markdown, report, terminal
from forerun.bench.pages.view import row
from forerun.bench.records.record import (
    TIMES_UNKNOWN,
    Answer,
    ArmRecord,
    Batch,
    Chunk,
    Counts,
    Facts,
    Load,
    Machine,
    Record,
    ServerCounters,
    Settings,
    Times,
)
from forerun.bench.records.summary import Cell

SINGLE = Load()
SWEEP = (Load("concurrency", 1, requests=4), Load("concurrency", 8, requests=16), Load("poisson", rate=2.0, requests=24))
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}


@dataclasses.dataclass(frozen=True)
class Way:
    """How an arm decodes: ms of a step, tokens drafted in each step, and the tokens accepted of them, as a repeating
    sequence."""

    step_ms: float = 10.0
    drafted: int = 0
    accepted: tuple[int, ...] = (0,)


def answer(
    way: Way, task: str, index: int, tokens: int = 73, factor: float = 1.0, chunks: bool = False, wait_s: float = 0.0
) -> Answer:
    """A request of `tokens` tokens: the first after 100 ms, then the steps of `way`, all times `factor`; wait_s comes before
    it."""
    at, made, turn = 0.1 * factor + wait_s, 1, 0
    steps, drafts, drafted_at, accepted_at = 0, 0, [0] * way.drafted, [0] * way.drafted
    pieces = [Chunk(at, 1, 4)]
    while made < tokens:
        got = min(way.accepted[turn % len(way.accepted)], tokens - made - 1)
        for i in range(way.drafted):
            drafted_at[i] += 1
            accepted_at[i] += i < got
        steps, drafts, turn = steps + 1, drafts + (way.drafted > 0), turn + 1
        at += way.step_ms * factor / 1000
        made += got + 1
        pieces.append(Chunk(at, got + 1, 4 * (got + 1)))
    counts = Counts(steps, drafts, sum(drafted_at), sum(accepted_at), tuple(drafted_at), tuple(accepted_at))
    ids = tuple(random.Random(f"{task} {index}").choices(range(1000), k=tokens))
    return Answer(
        f"{task} {index}", 200, ids, "length", wait_s, 0.1 * factor + wait_s, at, counts, "text",
        chunks=tuple(pieces) if chunks else (),
    )  # fmt: skip


def fake(
    ways: dict[str, Way],
    tasks: tuple[str, ...] = ("copy",),
    loads: tuple[Load, ...] = (SINGLE,),
    repetitions: int = 5,
    noise: float = 0.0,
    control: str | None = None,
    facts: dict[str, Facts] | None = None,
    chunks: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Record:
    """A run of these arms; the first one is the baseline. A step takes longer under more load, and longer still with drafts.
    noise: relative standard deviation of a batch's times."""
    draw, batches = random.Random(seed), []
    for task in tasks:
        for load in loads:
            for repetition in range(-1, repetitions):
                hard = random.Random(f"{task} {repetition}").uniform(0.8, 1.25) if noise else 1.0
                for name, way in ways.items():
                    busy = 1 + 0.02 * (load.concurrency - 1) * (1 + way.drafted)
                    factor = hard * busy * (1 + noise * draw.gauss(0, 1))
                    first, wait = max(repetition, 0) * load.requests, 0.01 * (len(loads) > 1)
                    answers = tuple(
                        answer(way, task, first + i, 73, factor, chunks, wait * (i % 3)) for i in range(load.requests)
                    )
                    rounds = -(-load.requests // load.concurrency)
                    wall = max(a.e2e_s for a in answers) * rounds
                    part = wall / 10
                    times = Times(100, part * (way.drafted > 0), 6 * part, 2 * part, part, 0)
                    batches.append(Batch(task, name, repetition, len(batches), repetition < 0, wall, answers, times, load))
    known = facts or {}
    arms = tuple(
        ArmRecord(n, {**NGRAM, "num_speculative_tokens": w.drafted} if w.drafted else None, {"dtype": "float32"}, known.get(n))
        for n, w in ways.items()
    )
    whole = Settings(
        "tiny", tasks, next(iter(ways)), arms, repetitions, 1, 32, 73, loads[0].concurrency, control, seed, loads, **settings
    )
    machine = Machine("Imagined CPU", 2, 8 << 30, None, "Linux", 0.1)
    versions = {"forerun": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}
    return Record("2026-11-01T12:00:00+00:00", 60.0, True, versions, machine, whole, tuple(batches), ())


def server(record: Record) -> Record:
    """The record as it would come from a server: counters around each batch, no counts of single requests and no engine
    times."""
    none = Counts(0, 0, 0, 0, (), ())
    batches = []
    for b in record.batches:
        c = [a.counts for a in b.answers]
        width = max(len(x.accepted_at) for x in c)
        at = tuple(sum(x.accepted_at[i] for x in c) for i in range(width))
        total = Counts(0, sum(x.drafting_steps for x in c), sum(x.drafted for x in c), sum(x.accepted for x in c), (), at)
        n = len(b.answers)
        after = ServerCounters(queue_s=107.0 + 0.01 * n, queue_count=7.0 + n, prefill_s=0.2 * n, prefill_count=float(n),
                               decode_s=0.5 * n, decode_count=float(n))  # fmt: skip
        before = ServerCounters(queue_s=107.0, queue_count=7.0, prefill_s=0.0, prefill_count=0.0,
                                decode_s=0.0, decode_count=0.0)  # fmt: skip
        answers = tuple(dataclasses.replace(a, counts=none, queued_s=None, output_tokens=a.tokens) for a in b.answers)
        batches.append(
            dataclasses.replace(b, answers=answers, times=TIMES_UNKNOWN, drafting=total, before=before, after=after)
        )
    return dataclasses.replace(record, batches=tuple(batches))


def rich() -> Record:
    """A record with something of everything: three tasks, three loads, four arms with the control, costs, failures,
    differences."""
    from forerun.bench.records.record import Difference, FirstTokens

    scheduler = {"async scheduling": "on", "model runner": "V2"}
    facts = {
        "baseline": Facts(
            "vllm", "0.32.0", "http://127.0.0.1:8001", ("vllm", "serve", "tiny"), 40208, 32.0, 3_100_000_000, scheduler
        ),
        "ngram k=4": Facts(
            "vllm", "0.32.0", "http://127.0.0.1:8002", ("vllm", "serve", "tiny", "--speculative-config", "{}"), 30832, 78.0,
            3_400_000_000, {"async scheduling": "off", "model runner": "V1"}, ("Async scheduling not supported with ngram",),
        ),
    }  # fmt: skip
    ways = {
        "baseline": Way(10.0),
        "ngram k=4": Way(12.0, 4, (4, 1, 0, 2)),
        "suffix": Way(14.0, 8, (8, 0, 0, 5, 1)),
        "baseline again": Way(10.0),
    }
    made = fake(ways, ("copy", "explain", "own prompts"), SWEEP, 5, 0.02, "baseline again", facts, chunks=True, engine="vllm",
                command=("forerun", "bench", "--engine", "vllm", "-m", "tiny", "-a", "ngram:k=4", "-a", "suffix"))  # fmt: skip

    def slower(b: Batch) -> Batch:
        """Make arms with drafts slower on the task explain, so that speculation does not pay there."""
        if b.task != "explain" or not b.answers[0].counts.drafted:
            return b
        stretched = tuple(dataclasses.replace(a, e2e_s=a.e2e_s * 2.4) for a in b.answers)
        return dataclasses.replace(b, wall_s=b.wall_s * 2.4, answers=stretched)

    batches = [slower(b) for b in made.batches]
    at = next(i for i, b in enumerate(batches) if b.arm == "suffix" and b.load == SWEEP[1] and not b.warmup)
    failed = dataclasses.replace(batches[at].answers[0], finish_reason="", failure="the stream ended early")
    batches[at] = dataclasses.replace(batches[at], answers=(failed, *batches[at].answers[1:]))
    differences = (Difference("copy", "suffix", 1, 0, 40, 0.02, SWEEP[0]),)
    draw = random.Random(3)
    first = [
        FirstTokens(arm.name, f"p{i}", 1.0, tuple(draw.choices(["a", "b", "c", "d"], [4, 3, 2, 1], k=200)))
        for arm in made.settings.arms
        for i in range(3)
    ]
    return dataclasses.replace(made, batches=tuple(batches), differences=differences, first_tokens=tuple(first))


def figures(cell: Cell) -> list[str]:
    """The row of a cell in the table of figures."""
    return row(cell, report.FIGURES)


def waiting(cell: Cell) -> list[str]:
    """The row of a cell in the table of waiting times."""
    return row(cell, report.WAITING)


def as_markdown(record: Record) -> str:
    return markdown.markdown(report.view(record))


def as_page(record: Record) -> str:
    return html.page(report.view(record))


def as_text(record: Record, width: int) -> str:
    """The output on a terminal of that width."""
    console = Console(width=width, record=True, file=io.StringIO())
    terminal.show(report.view(record), console)
    return console.export_text()
