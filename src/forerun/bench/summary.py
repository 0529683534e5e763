"""The figures of a run, a cell for each task and arm, computed from its record alone. Knows the definitions of
docs/measuring.md; says nothing in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.record import Answer, Batch, Record
from forerun.bench.statistics import MARGIN, Call, Ratio, median, paired_ratio, verdict
from forerun.bench.workloads import TASKS
from forerun.engine.stats import DraftStats


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one task. Speeds are in output tokens a second, times in seconds, shares from 0 to 1; None: not to be had.

    tokens_per_s: all output tokens over the wall time of the batches. speedup, verdict: against the reference, None for itself.
    step_s: mean time of a decode step of one request, from its first token on. counts: drafting over all measured requests.
    needed: tokens a step must give to break even, the arm's step time over the reference's. got: tokens a step gave.
    identical: (greedy answers equal to the reference's token by token, answers compared). failures: of so many requests.
    draft_share ..: shares of the engine's time. cached_tokens: prompt tokens that were found in the prefix cache.
    """

    task: str
    arm: str
    batches: int
    requests: int
    failures: int
    output_tokens: int
    tokens_per_s: float | None
    speedup: Ratio | None
    verdict: Call | None
    step_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    counts: DraftStats
    needed: float | None
    got: float | None
    identical: tuple[int, int] | None
    draft_share: float | None
    forward_share: float | None
    verify_share: float | None
    cached_tokens: int


def cells(record: Record) -> list[Cell]:
    """In the order of the tasks and of the arms. The reference's cell of a task comes before the others'."""
    return [
        _cell(record, task, arm.name)
        for task in record.settings.tasks
        for arm in record.settings.arms
        if measured(record, task, arm.name)
    ]


def measured(record: Record, task: str, arm: str) -> list[Batch]:
    """The batches that count."""
    return [b for b in record.batches if b.task == task and b.arm == arm and not b.warmup]


def speed(batch: Batch) -> float | None:
    """Output tokens a second of one batch; None if a request of it failed, for then nothing was completed as asked."""
    if any(a.failed for a in batch.answers) or batch.wall_s <= 0:
        return None
    return sum(len(a.token_ids) for a in batch.answers) / batch.wall_s


def compare(reference: Sequence[Batch], candidate: Sequence[Batch]) -> Ratio | None:
    """The ratio of their speeds over the repetitions that both completed. None without one."""
    theirs = {b.repetition: s for b in reference if (s := speed(b)) is not None}
    ours = {b.repetition: s for b in candidate if (s := speed(b)) is not None}
    both = sorted(theirs.keys() & ours.keys())
    return paired_ratio([theirs[r] for r in both], [ours[r] for r in both])


def noise(record: Record, task: str) -> Ratio | None:
    """The baseline against itself, where that was measured: what an arm that changes nothing looks like."""
    control = record.settings.control
    if control is None:
        return None
    return compare(measured(record, task, record.settings.reference), measured(record, task, control))


def margin(record: Record, task: str) -> float:
    """How large a change must be to be one: the standing margin, or what the baseline differed from itself if that is more."""
    ratio = noise(record, task)
    return MARGIN if ratio is None else max(MARGIN, max(ratio.mean, 1 / ratio.mean) - 1)


def _cell(record: Record, task: str, arm: str) -> Cell:
    batches, settings = measured(record, task, arm), record.settings
    reference = measured(record, task, settings.reference)
    is_reference = arm == settings.reference
    answers = [a for b in batches for a in b.answers]
    good = [a for a in answers if not a.failed]
    counts = total(good)
    step = step_time(good)
    base = step_time([a for b in reference for a in b.answers if not a.failed])
    speedup = None if is_reference else compare(reference, batches)
    wall = sum(b.wall_s for b in batches)
    tokens = sum(len(a.token_ids) for a in good)
    spent = sum(b.times.draft_s + b.times.forward_s + b.times.verify_s + b.times.other_s for b in batches)
    drafting, forward, verifying = (
        sum(part) / spent if spent else None
        for part in (
            [b.times.draft_s for b in batches],
            [b.times.forward_s for b in batches],
            [b.times.verify_s for b in batches],
        )
    )
    least = margin(record, task) if arm != settings.control else MARGIN
    return Cell(
        task,
        arm,
        len(batches),
        len(answers),
        len(answers) - len(good),
        tokens,
        tokens / wall if wall > 0 and tokens else None,
        speedup,
        None if is_reference else verdict(speedup, least),
        step,
        median([a.ttft_s for a in good]),
        median([a.e2e_s for a in good]),
        counts,
        step / base if step and base and not is_reference else None,
        counts.acceptance_length,
        None if is_reference or not TASKS[task].greedy else identical(reference, batches),
        drafting,
        forward,
        verifying,
        sum(b.times.cached_tokens for b in batches),
    )


def total(answers: Sequence[Answer]) -> DraftStats:
    """The drafting counts of all of them together."""
    sum_ = DraftStats()
    for answer in answers:
        c = answer.counts
        sum_.add(DraftStats(c.steps, c.drafting_steps, c.drafted, c.accepted, list(c.drafted_at), list(c.accepted_at)))
    return sum_


def step_time(answers: Sequence[Answer]) -> float | None:
    """Seconds of a verify step as a request sees it: from its first token to its last, over the steps in between. The step
    that ends the prompt gives the first token and is not one of them. None without any."""
    steps = sum(a.counts.steps for a in answers)
    return sum(a.e2e_s - a.ttft_s for a in answers if a.counts.steps) / steps if steps else None


def identical(reference: Sequence[Batch], candidate: Sequence[Batch]) -> tuple[int, int]:
    """Of the answers to the same prompts that neither arm failed: how many have the same tokens, and how many there are."""
    theirs = {b.repetition: b for b in reference}
    same = compared = 0
    for batch in candidate:
        if batch.repetition not in theirs:
            continue
        for a, b in zip(batch.answers, theirs[batch.repetition].answers, strict=True):
            if not (a.failed or b.failed):
                compared += 1
                same += a.token_ids == b.token_ids
    return same, compared
