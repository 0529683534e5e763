"""The figures of a run, a cell for each task, load and arm, computed from its record alone. Knows the definitions of
docs/measuring.md; says nothing in words.
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
from forerun.bench.records.record import Answer, Batch, Load, Record, ServerCounters
from forerun.bench.records.statistics import MARGIN, Call, Ratio, Spread, paired_ratio, quantile, spread, verdict
from forerun.bench.workloads.tasks import TASKS
from forerun.engine.stats import DraftStats


@dataclass(frozen=True, slots=True)
class Split:
    """Mean seconds of a request: waiting for its first step, from there to its first token, from there to its end; None: not
    known. by_server: from the server's own histograms, which do not see the way to the client."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    by_server: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one task under one load. Speeds are in output tokens a second, times in seconds, shares from 0 to 1; None: not
    to be had.

    failures: of the requests; reasons: why they failed, each with how often. tokens_per_s: all output tokens over the wall time
    of the batches. speedup, verdict: against the reference, None for itself.
    step_s: mean time of a decode step of one request, from its first token on. counts: drafting over all measured requests,
    None where the engine does not say. needed: tokens a step must give to break even, the arm's step time over the reference's.
    got: tokens a step gave. identical: (greedy answers equal to the reference's, answers compared).
    ttft, tpot, e2e: over the requests that did not fail; gap: between chunks. ttft_ratio, tpot_ratio: to the reference's, below
    1 is sooner. late: by how much requests were sent after their scheduled time. draft_share ..: shares of the engine's
    time. cached_tokens: prompt tokens that were found in the prefix cache.
    """

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
    got: float | None
    identical: tuple[int, int] | None
    draft_share: float | None
    forward_share: float | None
    verify_share: float | None
    cached_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        return self.counts.acceptance_rate if self.counts else None

    @property
    def drafted_share(self) -> float | None:
        """Share of verify steps that had a draft; None where nothing was drafted, and where the engine does not count them."""
        if not self.counts or not self.counts.drafted or not self.counts.steps or not self.counts.drafting_steps:
            return None
        return self.counts.drafting_steps / self.counts.steps

    @property
    def joint(self) -> list[float]:
        """By position: share of all verify steps in which the draft was accepted up to there. Empty where it is not known."""
        return self.counts.joint if self.counts and self.counts.steps else []

    @property
    def reached(self) -> list[int]:
        """By position: how many drafts got there, their predecessors all accepted. Where an engine does not say how many tokens
        were drafted at each position, a draft that ended earlier counts as one that was rejected here."""
        c = self.counts
        if c is None or not c.accepted_at:
            return []
        before = [c.drafted_at[0] if c.drafted_at else c.drafting_steps, *c.accepted_at[:-1]]
        return [min(b, d) for b, d in zip(before, c.drafted_at or before, strict=True)]

    @property
    def conditional(self) -> list[float | None]:
        """By position: share accepted of those that got there; None where none did."""
        accepted = self.counts.accepted_at if self.counts else []
        return [a / r if r else None for a, r in zip(accepted, self.reached, strict=True)]

    @property
    def accepted_lengths(self) -> list[int]:
        """How many verify steps had exactly 0, 1, 2, ... drafted tokens accepted. Empty where nothing was drafted, and where
        the engine does not count by position."""
        if not self.counts or not self.counts.steps or not self.counts.drafted or not self.counts.accepted_at:
            return []
        at_least = [self.counts.steps, *self.counts.accepted_at, 0]
        return [a - b for a, b in itertools.pairwise(at_least)]


@dataclass(frozen=True, slots=True)
class Draw:
    """An arm's first tokens against the baseline's samples of the same prompts, or against its log-probabilities, which are
    those of temperature 1."""

    arm: str
    against: Literal["samples", "logprobs"]
    comparison: Comparison


def cells(record: Record) -> list[Cell]:
    """In the order of the tasks, loads and arms. The reference's cell comes before those it is compared with."""
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


@dataclass(frozen=True, slots=True)
class Unanswered:
    """An arm that answered none of its requests. reasons: each with how many failed for it."""

    arm: str
    requests: int
    reasons: list[tuple[str, int]]


def unanswered(record: Record) -> list[Unanswered]:
    """The arms that answered none of their requests, warm-ups included. Those that were asked nothing are none of them."""
    found = []
    for arm in record.settings.arms:
        answers = [a for b in record.batches if b.arm == arm.name for a in b.answers]
        if answers and all(a.failed for a in answers):
            found.append(Unanswered(arm.name, len(answers), reasons(answers)))
    return found


def reasons(answers: Sequence[Answer]) -> list[tuple[str, int]]:
    """Why those of them that failed did, by kind of reason, the most frequent first."""
    return counted(a.reason for a in answers if a.reason is not None)


def speed(batch: Batch) -> float | None:
    """What the speed-up compares, in output tokens a second; None if a request failed, for then nothing was completed as
    asked. Closed loop: of the whole batch, over its wall time. Open loop, where the arrivals decide how long a batch takes:
    as a request sees it, all tokens over all requests' times from their scheduled start to their end."""
    if not batch.answers or any(a.failed for a in batch.answers):
        return None
    seconds = batch.wall_s if batch.load.kind == "concurrency" else sum(a.e2e_s for a in batch.answers)
    return sum(a.tokens for a in batch.answers) / seconds if seconds > 0 else None


def middle(of: Callable[[Answer], float | None]) -> Callable[[Batch], float | None]:
    """What makes one figure of a batch: the median of a figure of its answers. None if one failed or there are none."""

    def figure(batch: Batch) -> float | None:
        values = [v for a in batch.answers if (v := of(a)) is not None and v > 0]
        return None if any(a.failed for a in batch.answers) else quantile(values, 0.5)

    return figure


def compare(
    reference: Sequence[Batch], candidate: Sequence[Batch], figure: Callable[[Batch], float | None] = speed
) -> Ratio | None:
    """The ratio of their figures over the repetitions that both completed. None without one."""
    theirs = {b.repetition: s for b in reference if (s := figure(b)) is not None}
    ours = {b.repetition: s for b in candidate if (s := figure(b)) is not None}
    both = sorted(theirs.keys() & ours.keys())
    return paired_ratio([theirs[r] for r in both], [ours[r] for r in both])


def noise(record: Record, task: str, load: Load) -> Ratio | None:
    """The baseline against itself, where that was measured: what an arm that changes nothing looks like."""
    control = record.settings.control
    if control is None:
        return None
    return compare(measured(record, task, load, record.settings.reference), measured(record, task, load, control))


def margin(record: Record, task: str, load: Load) -> float:
    """How large a change must be to be one: the standing margin, or what the baseline differed from itself if that is more."""
    ratio = noise(record, task, load)
    return MARGIN if ratio is None else max(MARGIN, max(ratio.mean, 1 / ratio.mean) - 1)


def greedy(record: Record, task: str) -> bool:
    """Whether its requests were sent at temperature 0, so that answers can be compared token by token. Older records do not
    say; there a task has its own temperature, which is 0 for the user's own tasks."""
    known = record.settings.temperatures
    return known[task] == 0.0 if task in known else task not in TASKS or TASKS[task].greedy


def _cell(record: Record, task: str, load: Load, arm: str) -> Cell:
    batches, settings = measured(record, task, load, arm), record.settings
    reference = measured(record, task, load, settings.reference)
    is_reference = arm == settings.reference
    answers = [a for b in batches for a in b.answers]
    good = [a for a in answers if not a.failed]
    counts = drafting(batches, _drafts(record, arm))
    step = step_time(good, counts)
    base = step_time([a for b in reference for a in b.answers if not a.failed], drafting(reference, False))
    speedup = None if is_reference else compare(reference, batches)
    wall = sum(b.wall_s for b in batches)
    tokens = sum(a.tokens for a in good)
    spent = sum(b.times.draft_s + b.times.forward_s + b.times.verify_s + b.times.other_s for b in batches)
    draft, forward, verify = (
        sum(part) / spent if spent else None
        for part in (
            [b.times.draft_s for b in batches],
            [b.times.forward_s for b in batches],
            [b.times.verify_s for b in batches],
        )
    )
    least = margin(record, task, load) if arm != settings.control else MARGIN
    return Cell(
        task,
        load,
        arm,
        len(batches),
        len(answers),
        len(answers) - len(good),
        reasons(answers),
        tokens,
        tokens / wall if wall > 0 and tokens else None,
        speedup,
        None if is_reference else verdict(speedup, least),
        step,
        spread([a.ttft_s for a in good]),
        spread([t for a in good if (t := tpot(a)) is not None]),
        spread([a.e2e_s for a in good]),
        spread([g for a in good for g in chunk_gaps(a)]),
        spread([a.sent_s for a in answers]),
        None if is_reference else compare(reference, batches, middle(lambda a: a.ttft_s)),
        None if is_reference else compare(reference, batches, middle(tpot)),
        split(batches, good),
        counts,
        step / base if step and base and not is_reference else None,
        counts.acceptance_length if counts else None,
        None if is_reference or not greedy(record, task) else identical(reference, batches),
        draft,
        forward,
        verify,
        sum(b.times.cached_tokens for b in batches) + int(_counted(batches, "cached_tokens") or 0),
    )


def _drafts(record: Record, arm: str) -> bool:
    """Whether that arm has a drafter."""
    return next(a.speculation for a in record.settings.arms if a.name == arm) is not None


def drafting(batches: Sequence[Batch], drafts: bool) -> DraftStats | None:
    """The drafting counts of all of them together. None if the engine gives none; for an arm without a drafter they are known
    without being asked for: every token after a request's first takes a step of its own.

    An engine that counts drafted and accepted tokens but no steps: a step gives one token and those accepted, so the steps
    are the tokens after the first less the accepted ones. A request that failed spoils that, and so does a count of
    accepted tokens that were not delivered; then steps stay 0, which stands for unknown.
    """
    sum_, whole = DraftStats(), True
    for batch in batches:
        failed = any(a.failed for a in batch.answers)
        single = [a.counts for a in batch.answers if not a.failed]
        of_batch = batch.drafting is not None and not any(c.steps for c in single)
        whole = whole and not (failed and of_batch)
        for c in [batch.drafting] if of_batch and batch.drafting is not None else single:
            sum_.add(DraftStats(c.steps, c.drafting_steps, c.drafted, c.accepted, list(c.drafted_at), list(c.accepted_at)))
    if drafts and not sum_.steps and not sum_.drafted and all(b.drafting is None for b in batches):
        return None
    if not whole:
        sum_.steps = 0
    elif not sum_.steps:
        answers = [a for b in batches for a in b.answers if not a.failed]
        sum_.steps = sum(max(0, a.tokens - first_tokens(a)) for a in answers) - sum_.accepted
        if sum_.steps < max(1, sum_.drafting_steps):
            sum_.steps = 0
    return sum_


def step_time(answers: Sequence[Answer], counts: DraftStats | None) -> float | None:
    """Seconds of a verify step as a request sees it: from its first token to its last, over the steps in between. The step
    that ends the prompt gives the first token and is not one of them. None without any, and where tokens were hidden: their
    steps were before the first text."""
    if counts is None or not counts.steps or any(a.hidden_tokens for a in answers):
        return None
    return sum(a.e2e_s - a.ttft_s for a in answers if a.tokens > first_tokens(a)) / counts.steps


def split(batches: Sequence[Batch], good: Sequence[Answer]) -> Split:
    """The server's histograms where it has them, else what the requests saw."""
    queue, prefill, decode = (_mean(batches, name) for name in ("queue", "prefill", "decode"))
    if (queue, prefill, decode) != (None, None, None):
        return Split(queue, prefill, decode, by_server=True)
    if not good:
        return Split(None, None, None, by_server=False)
    waits = [a.queued_s for a in good if a.queued_s is not None]
    queue = sum(waits) / len(waits) if len(waits) == len(good) else None
    first, end = sum(a.ttft_s for a in good) / len(good), sum(a.e2e_s for a in good) / len(good)
    return Split(queue, None if queue is None else first - queue, end - first, by_server=False)


def _counted(batches: Sequence[Batch], name: str) -> float | None:
    """By how much a counter of the server rose during these batches; None where it has none."""
    rises = [_value(b.after, name) - _value(b.before, name) for b in batches if _has(b.before, name) and _has(b.after, name)]
    return sum(rises) if rises else None


def _mean(batches: Sequence[Batch], name: str) -> float | None:
    seconds, count = _counted(batches, f"{name}_s"), _counted(batches, f"{name}_count")
    return seconds / count if seconds is not None and count else None


def _has(counters: ServerCounters | None, name: str) -> bool:
    return counters is not None and getattr(counters, name) is not None


def _value(counters: ServerCounters | None, name: str) -> float:
    return float(getattr(counters, name))


def identical(reference: Sequence[Batch], candidate: Sequence[Batch]) -> tuple[int, int]:
    """Of the answers to the same prompts that neither arm failed: how many have the same tokens (the same text where a server
    gives no ids), and how many there are."""
    theirs = {b.repetition: b for b in reference}
    same = compared = 0
    for batch in candidate:
        if batch.repetition not in theirs:
            continue
        for a, b in zip(batch.answers, theirs[batch.repetition].answers, strict=True):
            if not (a.failed or b.failed):
                compared += 1
                same += a.token_ids == b.token_ids if a.token_ids and b.token_ids else a.text == b.text
    return same, compared


def draws(record: Record) -> list[Draw]:
    """For each arm but the reference: whether its first tokens are drawn as the reference's are, over all prompts that were
    sampled in both. Empty where that was not measured."""
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
