"""The figures of a run, one cell for each task, load and arm, derived from its record alone. docs/measuring.md defines them.
Writes no words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.bench.engines.failures import counted
from forerun.bench.load.latency import chunk_gaps, first_tokens, tpot
from forerun.bench.records.distribution import Comparison, one_sample, two_samples
from forerun.bench.records.record import Answer, Batch, Load, Record
from forerun.bench.records.statistics import MARGIN, Call, Ratio, Spread, paired_ratio, quantile, spread, verdict
from forerun.bench.workloads.tasks import TASKS
from forerun.engine.stats import DraftStats


@dataclass(frozen=True, slots=True)
class Split:
    """Mean seconds of a request: from its scheduled time to its first step, from there to its first token, from there to its
    end; None: not known. by_server: from the server's own histograms, which exclude the network."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    by_server: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one task under one load. Speeds are output tokens a second, times seconds, shares 0 to 1; None: not known.

    batches: those that count. failures: failed requests; reasons: why they failed, each with its number. tokens_per_s: output
    tokens over the wall time of the batches. speedup, verdict: against the reference, None for the reference itself. step_s:
    mean time of a decode step as a request sees it. ttft, tpot, e2e: over the requests that did not fail; gap: between chunks;
    late: from the scheduled time to the sending. ttft_ratio, tpot_ratio: to the reference's, below 1 is sooner. counts:
    drafting over all requests that count, None where the engine does not report it. needed: tokens a step has to give to break
    even: the arm's step time over the reference's. identical: (greedy answers equal to the reference's, answers compared).
    parts: shares of the engine's time, in the order of PARTS. cached_tokens: prompt tokens found in the prefix cache."""

    task: str
    load: Load
    arm: str
    batches: int
    requests: int
    failures: int
    reasons: list[tuple[str, int]]
    output_tokens: int
    tokens_per_s: float | None
    speedup: Ratio | None
    verdict: Call | None
    step_s: float | None
    ttft: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    gap: Spread | None
    late: Spread | None
    ttft_ratio: Ratio | None
    tpot_ratio: Ratio | None
    split: Split
    counts: DraftStats | None
    needed: float | None
    identical: tuple[int, int] | None
    parts: tuple[float, ...] | None
    cached_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        return self.counts.acceptance_rate if self.counts else None

    @property
    def got(self) -> float | None:
        """The acceptance length: mean tokens of a verify step."""
        return self.counts.acceptance_length if self.counts else None

    @property
    def identical_share(self) -> float | None:
        return self.identical[0] / self.identical[1] if self.identical and self.identical[1] else None

    @property
    def drafted_share(self) -> float | None:
        """Share of verify steps that had a draft; None where nothing was drafted or the engine does not count these steps."""
        c = self.counts
        return c.drafting_steps / c.steps if c and c.drafted and c.steps and c.drafting_steps else None

    @property
    def joint(self) -> list[float]:
        """By position: the share of all verify steps in which the draft was accepted up to there. Empty where not known."""
        return self.counts.joint if self.counts and self.counts.steps else []

    @property
    def reached(self) -> list[int]:
        """By position: the number of drafts whose earlier tokens were all accepted. Where an engine does not count drafted
        tokens by position, a draft that ended earlier counts as rejected there."""
        c = self.counts
        if c is None or not c.accepted_at:
            return []
        before = [c.drafted_at[0] if c.drafted_at else c.drafting_steps, *c.accepted_at[:-1]]
        return [min(b, d) for b, d in zip(before, c.drafted_at or before, strict=True)]

    @property
    def conditional(self) -> list[float | None]:
        """By position: the share accepted of the drafts that reached it; None where none did."""
        accepted = self.counts.accepted_at if self.counts else []
        return [a / r if r else None for a, r in zip(accepted, self.reached, strict=True)]

    @property
    def accepted_lengths(self) -> list[int]:
        """The number of verify steps with exactly 0, 1, 2, ... accepted tokens. Empty where nothing was drafted or the engine
        does not count by position."""
        c = self.counts
        if not c or not c.steps or not c.drafted or not c.accepted_at:
            return []
        return [a - b for a, b in itertools.pairwise([c.steps, *c.accepted_at, 0])]


PARTS = ("drafting", "model", "verifying", "rest")


@dataclass(frozen=True, slots=True)
class Draw:
    """The test of an arm's sampled first tokens against the reference's samples of the same prompts, or against the reference's
    log-probabilities, which are those of temperature 1."""

    arm: str
    against: Literal["samples", "logprobs"]
    comparison: Comparison


def cells(record: Record) -> list[Cell]:
    """In the order of the tasks, loads and arms, so the reference's cell comes before those compared with it."""
    return [
        _cell(record, task, load, arm.name)
        for task in record.settings.tasks
        for load in record.settings.loads
        for arm in record.settings.arms
        if measured(record, task, load, arm.name)
    ]


def measured(record: Record, task: str, load: Load, arm: str) -> list[Batch]:
    """The batches that count."""
    return [b for b in record.batches if b.task == task and b.load == load and b.arm == arm and not b.warmup]


def unanswered(record: Record) -> dict[str, list[Answer]]:
    """The arms that were sent requests and answered none of them, warm-ups included, with the failed answers."""
    of = {arm.name: [a for b in record.batches if b.arm == arm.name for a in b.answers] for arm in record.settings.arms}
    return {arm: answers for arm, answers in of.items() if answers and all(a.failed for a in answers)}


def reasons(answers: Sequence[Answer]) -> list[tuple[str, int]]:
    """Why requests failed, by kind of reason with its number, the most frequent first."""
    return counted(a.reason for a in answers if a.reason is not None)


def speed(batch: Batch) -> float | None:
    """The figure that the speed-up compares, in output tokens a second; None if a request failed, for then the batch was not
    completed. Closed loop: all tokens over the wall time. Open loop, where the arrivals decide the wall time: all tokens over
    the sum of the requests' times from scheduled to end."""
    if not batch.answers or any(a.failed for a in batch.answers):
        return None
    seconds = batch.wall_s if batch.load.kind == "concurrency" else sum(a.e2e_s for a in batch.answers)
    return sum(a.tokens for a in batch.answers) / seconds if seconds > 0 else None


def median_of(figure: Callable[[Answer], float | None]) -> Callable[[Batch], float | None]:
    """A figure of a batch: the median of a figure of its answers. None if a request failed or there are no values."""

    def of(batch: Batch) -> float | None:
        values = [v for a in batch.answers if (v := figure(a)) is not None and v > 0]
        return None if any(a.failed for a in batch.answers) else quantile(values, 0.5)

    return of


def ratio(
    reference: Sequence[Batch], candidate: Sequence[Batch], figure: Callable[[Batch], float | None] = speed
) -> Ratio | None:
    """Of the figures of two arms, over the repetitions that both completed. None without one."""
    theirs = {b.repetition: s for b in reference if (s := figure(b)) is not None}
    ours = {b.repetition: s for b in candidate if (s := figure(b)) is not None}
    both = sorted(theirs.keys() & ours.keys())
    return paired_ratio([theirs[r] for r in both], [ours[r] for r in both])


def noise(record: Record, task: str, load: Load) -> Ratio | None:
    """The reference against itself, if the run measured that: the result of an arm that changes nothing."""
    s = record.settings
    if s.control is None:
        return None
    return ratio(measured(record, task, load, s.reference), measured(record, task, load, s.control))


def margin(record: Record, task: str, load: Load) -> float:
    """The least change that counts as one: MARGIN, or the difference of the reference from itself if that is larger."""
    found = noise(record, task, load)
    return MARGIN if found is None else max(MARGIN, max(found.mean, 1 / found.mean) - 1)


def greedy(record: Record, task: str) -> bool:
    """Whether the task's requests were sent at temperature 0, so that answers can be compared token by token. Older records
    do not have the temperature; there it is the task's own, 0 for the user's own prompts."""
    known = record.settings.temperatures
    return known[task] == 0.0 if task in known else task not in TASKS or TASKS[task].greedy


def _cell(record: Record, task: str, load: Load, arm: str) -> Cell:
    s, batches = record.settings, measured(record, task, load, arm)
    reference = measured(record, task, load, s.reference)
    compared = arm != s.reference
    answers = [a for b in batches for a in b.answers]
    good = [a for a in answers if not a.failed]
    drafts = any(a.name == arm and a.speculation is not None for a in s.arms)
    counts = drafting(batches, drafts)
    step = step_time(good, counts)
    base = step_time([a for b in reference for a in b.answers if not a.failed], drafting(reference, False))
    speedup = ratio(reference, batches) if compared else None
    wall, tokens = sum(b.wall_s for b in batches), sum(a.tokens for a in good)
    return Cell(
        task=task,
        load=load,
        arm=arm,
        batches=len(batches),
        requests=len(answers),
        failures=len(answers) - len(good),
        reasons=reasons(answers),
        output_tokens=tokens,
        tokens_per_s=tokens / wall if wall > 0 and tokens else None,
        speedup=speedup,
        verdict=verdict(speedup, margin(record, task, load) if arm != s.control else MARGIN) if compared else None,
        step_s=step,
        ttft=spread([a.ttft_s for a in good]),
        tpot=spread([t for a in good if (t := tpot(a)) is not None]),
        e2e=spread([a.e2e_s for a in good]),
        gap=spread([g for a in good for g in chunk_gaps(a)]),
        late=spread([a.sent_s for a in answers]),
        ttft_ratio=ratio(reference, batches, median_of(lambda a: a.ttft_s)) if compared else None,
        tpot_ratio=ratio(reference, batches, median_of(tpot)) if compared else None,
        split=split(batches, good),
        counts=counts,
        needed=step / base if step and base and compared else None,
        identical=identical(reference, batches) if compared and greedy(record, task) else None,
        parts=_parts(batches),
        cached_tokens=sum(b.times.cached_tokens for b in batches) + int(_rise(batches, "cached_tokens") or 0),
    )


def _parts(batches: Sequence[Batch]) -> tuple[float, ...] | None:
    """Shares of the engine's time in the order of PARTS; None where the engine does not report them."""
    times = [(b.times.draft_s, b.times.forward_s, b.times.verify_s, b.times.other_s) for b in batches]
    sums = [sum(part) for part in zip(*times, strict=True)]
    return tuple(part / sum(sums) for part in sums) if sum(sums) else None


def drafting(batches: Sequence[Batch], drafts: bool) -> DraftStats | None:
    """The drafting counts of all batches together; None if the engine gives none. drafts: whether the arm has a drafter;
    without one the counts are known: every token after a request's first takes a step.

    Some engines count drafted and accepted tokens but no steps. A step gives one token and those accepted, so the steps are
    the tokens after the first less the accepted ones. That fails where a request failed, and where more tokens were accepted
    than delivered; steps then stay 0, which means unknown.
    """
    total, whole = DraftStats(), True
    for batch in batches:
        single = [a.counts for a in batch.answers if not a.failed]
        of_batch = batch.drafting is not None and not any(c.steps for c in single)
        whole = whole and not (of_batch and any(a.failed for a in batch.answers))
        for c in [batch.drafting] if of_batch and batch.drafting is not None else single:
            total.add(c.stats())
    if drafts and not total.steps and not total.drafted and all(b.drafting is None for b in batches):
        return None
    if not whole:
        total.steps = 0
    elif not total.steps:
        after_first = sum(max(0, a.tokens - first_tokens(a)) for b in batches for a in b.answers if not a.failed)
        total.steps = after_first - total.accepted
        if total.steps < max(1, total.drafting_steps):
            total.steps = 0
    return total


def step_time(answers: Sequence[Answer], counts: DraftStats | None) -> float | None:
    """Seconds of a verify step as a request sees it: from its first token to its last, over the steps in between. The step that
    ends the prompt gives the first token and is excluded. None without steps, and where tokens were hidden, whose steps
    came before the first text."""
    if counts is None or not counts.steps or any(a.hidden_tokens for a in answers):
        return None
    return sum(a.e2e_s - a.ttft_s for a in answers if a.tokens > first_tokens(a)) / counts.steps


def split(batches: Sequence[Batch], good: Sequence[Answer]) -> Split:
    """From the server's histograms where it has them, else from the requests that did not fail."""
    queue, prefill, decode = (_mean(batches, name) for name in ("queue", "prefill", "decode"))
    if (queue, prefill, decode) != (None, None, None):
        return Split(queue, prefill, decode, by_server=True)
    if not good:
        return Split(None, None, None, by_server=False)
    waits = [a.queued_s for a in good if a.queued_s is not None]
    queue = sum(waits) / len(waits) if len(waits) == len(good) else None
    first, end = sum(a.ttft_s for a in good) / len(good), sum(a.e2e_s for a in good) / len(good)
    return Split(queue, None if queue is None else first - queue, end - first, by_server=False)


def _rise(batches: Sequence[Batch], name: str) -> float | None:
    """The rise of a server's counter during the batches; None where it has none."""
    pairs = [(getattr(b.before, name, None), getattr(b.after, name, None)) for b in batches]
    rises = [float(after - before) for before, after in pairs if before is not None and after is not None]
    return sum(rises) if rises else None


def _mean(batches: Sequence[Batch], name: str) -> float | None:
    seconds, count = _rise(batches, f"{name}_s"), _rise(batches, f"{name}_count")
    return seconds / count if seconds is not None and count else None


def identical(reference: Sequence[Batch], candidate: Sequence[Batch]) -> tuple[int, int]:
    """Of the answers to the same prompts that failed in neither arm: how many have the same tokens (the same text where a
    server gives no token ids), and how many there are."""
    theirs = {b.repetition: b.answers for b in reference}
    pairs = [
        (a, b)
        for batch in candidate
        if batch.repetition in theirs
        for a, b in zip(batch.answers, theirs[batch.repetition], strict=True)
        if not (a.failed or b.failed)
    ]
    same = [a.token_ids == b.token_ids if a.token_ids and b.token_ids else a.text == b.text for a, b in pairs]
    return sum(same), len(same)


def draws(record: Record) -> list[Draw]:
    """For each arm but the reference: the tests of its sampled first tokens, over all prompts that both sampled."""
    theirs = {(f.prompt, f.temperature): f for f in record.first_tokens if f.arm == record.settings.reference}
    found = []
    for arm in record.settings.arms:
        ours = [f for f in record.first_tokens if f.arm == arm.name and (f.prompt, f.temperature) in theirs]
        if arm.name == record.settings.reference or not ours:
            continue
        pairs = [(theirs[f.prompt, f.temperature], f) for f in ours]
        found.append(Draw(arm.name, "samples", two_samples([(base.tokens, f.tokens) for base, f in pairs])))
        known = [
            ({token: math.exp(value) for token, value in base.logprobs.items()}, f.tokens)
            for base, f in pairs
            if base.logprobs and f.temperature == 1.0
        ]
        if known:
            found.append(Draw(arm.name, "logprobs", one_sample(known)))
    return found
