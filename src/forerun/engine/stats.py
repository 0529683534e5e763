"""Counts and times, of one request and of the engine. All are plain data without torch: they can be pickled, and
dataclasses.asdict makes them JSON.

drafted: draft tokens that the target verified; accepted: draft tokens that were committed; steps: verify steps (one row in one
step), drafted or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple


@dataclass(slots=True)
class DraftStats:
    """drafted_at[i], accepted_at[i]: the same counts for the i-th draft position. drafting_steps: steps that had a draft."""

    steps: int = 0
    drafting_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, rows: int = 1) -> None:
        """Count one row of one step, or several with the same numbers: `drafted` tokens verified, the first `accepted`
        committed."""
        self.steps += rows
        if drafted == 0:
            return
        self.drafting_steps += rows
        self.drafted += drafted * rows
        self.accepted += accepted * rows
        drafted_at, accepted_at = self.drafted_at, self.accepted_at
        while len(drafted_at) < drafted:
            drafted_at.append(0)
            accepted_at.append(0)
        for i in range(drafted):
            drafted_at[i] += rows
        for i in range(accepted):
            accepted_at[i] += rows

    def copy(self) -> DraftStats:
        """A copy of the counts."""
        return replace(self, drafted_at=list(self.drafted_at), accepted_at=list(self.accepted_at))

    def add(self, other: DraftStats) -> None:
        self.steps += other.steps
        self.drafting_steps += other.drafting_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        for mine, its in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(its) - len(mine)))
            for i, n in enumerate(its):
                mine[i] += n

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps: tokens of a verify step; None without steps."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def accepted_lengths(self) -> list[int]:
        """How many of the drafting steps accepted 0, 1, .. draft tokens. Their sum is drafting_steps."""
        reached = [self.drafting_steps, *self.accepted_at, 0]
        return [more - less for more, less in pairwise(reached)] if self.drafting_steps else []

    @property
    def joint(self) -> list[float]:
        """By position: the share of all verify steps whose draft was accepted up to and with it."""
        return [a / self.steps for a in self.accepted_at]

    @property
    def conditional(self) -> list[float | None]:
        """By position: the share accepted of the tokens drafted there whose predecessors were all accepted."""
        before = [self.drafted_at[0], *self.accepted_at] if self.drafted_at else []
        return [
            a / min(b, d) if min(b, d) else None for a, b, d in zip(self.accepted_at, before, self.drafted_at, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request, up to now or up to its end. prompt_tokens: of its prompt; cached_tokens: of these, found in the prefix cache
    when it was first admitted; output_tokens: committed as output; preemptions: how often it lost its slot.
    queued_s: seconds from its arrival to its first admission; prefill_s: from there to its first token; decode_s: from there
    on. A part that was not reached is 0, and the three add up to the request's time in the engine."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float
    drafts: DraftStats


@dataclass(slots=True)
class EngineStats:
    """Since the last reset. steps: steps read; *_s: host seconds of their parts (wait: until the device has done a step; other:
    planning, text, bookkeeping); prompt_tokens: computed for prompts; queried_tokens: of admitted sequences, looked up in the
    prefix cache; cached_tokens: of these, found; output_tokens: committed as output; finished: requests that ended, by finish
    reason; drafts: over all requests.

    With the padded layout a launch is one piece. Its drafting and its verification are not timed apart: draft_s is that of a
    drafter on the host only, verify_s is 0, forward_s is the time to start the launch, and wait_s what is left of its run."""

    steps: int = 0
    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0
    other_s: float = 0.0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    drafts: DraftStats = field(default_factory=DraftStats)

    def copy(self) -> EngineStats:
        """A copy that later steps do not change."""
        return replace(self, finished=dict(self.finished), drafts=self.drafts.copy())


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. running, waiting: requests with a slot and without; kv_tokens: tokens that the KV cache
    holds; kv_used: of these, in pages that running requests hold (cached pages without a holder are free).
    totals: see EngineStats. divided: whether its draft_s and verify_s are all of the drafting and verification.
    speedup: over plain decoding, estimated over the last steps, None: not known (see speedup.py)."""

    running: int
    waiting: int
    kv_tokens: int
    kv_used: int
    totals: EngineStats
    divided: bool
    speedup: float | None


class PredictionCounts(NamedTuple):
    """Tokens of a prediction that appeared in the completion, and the others."""

    accepted: int
    rejected: int


def prediction_counts(prediction: Sequence[int], output: Sequence[int]) -> PredictionCounts:
    """accepted_prediction_tokens and rejected_prediction_tokens as the OpenAI API defines them: how many tokens of the
    prediction appeared in the completion, in the same order, and how many did not. They do not depend on what was drafted.
    prediction, output: token ids.

    The number is the length of the longest common subsequence, computed with bits [Hyyrö, Bit-parallel LCS-length computation
    revisited, 2004]: as many operations on numbers of len(prediction) bits as there are output tokens."""
    places: dict[int, int] = {}
    for i, token in enumerate(prediction):
        places[token] = places.get(token, 0) | 1 << i
    full = (1 << len(prediction)) - 1
    missing = full  # a zero bit for each token of the prediction that is in the subsequence
    for token in output:
        if found := missing & places.get(token, 0):
            missing = (missing + found | missing - found) & full
    accepted = len(prediction) - missing.bit_count()
    return PredictionCounts(accepted, len(prediction) - accepted)
