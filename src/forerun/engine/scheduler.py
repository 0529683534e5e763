"""The scheduler plans the next step: which sequences take part, with how many tokens each. It admits requests, cuts prompts
into chunks, allocates pages, and preempts sequences when pages run out. It does not use torch. step.py runs the plan.

    ids of a sequence:  | computed: keys and values are in its pages | pending: committed, not computed yet |
    A prompt is pending until its chunks are computed. A decoding sequence has one pending token, the last one committed.

The next step may be planned before the last one was read; on CUDA it is. `launch` counts a step's pending tokens as computed,
and `commit` follows when the step is read. In between the step's rows are in flight: each of them commits 1 .. k + 1 tokens,
and plans assume k + 1. A row that had already ended on the device commits nothing. So the prefix cache gets only positions
that were computed by steps that have been read (`settled`).

Sequences wait in the order of (priority, arrival). Of the running ones the last in this order is preempted. So the first of a
priority is never preempted for another one of it, and it ends.

The sequences of a failed step are `suspects`. Each of them runs alone until it has committed a token.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forerun.config import MOST_DRAFTED
from forerun.engine.pages import ROOT, Before, Pages
from forerun.engine.policy import AcceptanceHistory, Policy
from forerun.engine.stats import DraftStats, RequestStats
from forerun.types import Request

if TYPE_CHECKING:
    from forerun.verify.grammar import Matcher


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way. number: of its arrival; prompt: tokens of its prompt; limit: its maximum length; stops: the ids
    that end it; most_drafted: draft tokens of a step at most; epoch: how often it left a slot; in_flight: steps in flight that
    commit tokens for it; max_in_flight: the most tokens they commit;
    computed: positions with keys and values once all launched steps are done; settled: those computed by steps that were read;
    observed: positions that the drafter's model observed before it missed one, None: all; serial, published: its last page in
    the prefix cache, and how many it has there; mapped: how many of its pages are in the slot's block table; row: its part in
    its last decode step; cached: tokens found in the prefix cache at its first admission; arrived_at, admitted_at, first_at,
    ended_at: when it came, first got a slot, had its first token and ended (perf_counter seconds, 0: not yet);
    matcher: of its grammar, if it has one."""

    request: Request
    ids: list[int]
    number: int = 0
    prompt: int = field(init=False)
    limit: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    most_drafted: int = field(init=False)
    computed: int = 0
    settled: int = 0
    observed: int | None = None
    slot: int = -1
    epoch: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    pages: list[int] = field(default_factory=list)
    serial: Before = ROOT
    published: int = 0
    mapped: int = 0
    row: PlanRow | None = None
    cached: int = 0
    preemptions: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    first_at: float = 0.0
    ended_at: float = 0.0
    stats: DraftStats = field(default_factory=DraftStats)
    history: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.request.prompt_ids)
        self.limit = self.prompt + self.request.max_tokens
        self.stops = frozenset(self.request.stop_ids)
        k = self.request.params.num_speculative_tokens
        self.most_drafted = MOST_DRAFTED if k is None else min(k, MOST_DRAFTED)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all sequences: the lowest is admitted first and preempted last."""
        return self.request.params.priority, self.number

    def report(self) -> RequestStats:
        """Its counts and times up to now, or up to its end. A copy."""
        end = self.ended_at or time.perf_counter()
        admitted = self.admitted_at or end
        first = self.first_at or end
        times = (admitted - self.arrived_at, first - admitted, end - first)
        return RequestStats(self.prompt, self.cached, self.generated, self.preemptions, *times, self.stats.copy())

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def remaining(self) -> int:
        """Tokens that it may still produce."""
        return self.limit - len(self.ids)

    @property
    def pending(self) -> int:
        """Committed tokens that no launched step computes. Each step in flight adds one, the last token that it commits."""
        return len(self.ids) + self.in_flight - self.computed

    @property
    def max_length(self) -> int:
        """Its length if steps in flight commit as many tokens as they can."""
        return min(len(self.ids) + self.max_in_flight, self.limit)

    @property
    def decodes(self) -> bool:
        """Whether its next step is a decode step, once nothing is in flight."""
        return bool(self.generated) and self.pending == 1

    def chunk(self, most: int) -> int:
        """Pending tokens that the next step computes, at most `most`. If the sequence was preempted after its first token, its
        last token waits for a decode step, which verifies the same draft as without the preemption."""
        held = 1 if self.generated and self.pending > 1 else 0
        return min(self.pending - held, most)

    def resumes(self, row: PlanRow) -> bool:
        """Whether this row, not launched yet, ends the recomputation of a sequence that was preempted while decoding."""
        return bool(self.generated) and self.computed + row.pending == len(self.ids) - 1

    def reset(self) -> None:
        """Forget its slot, its pages, its steps in flight and what was computed."""
        self.slot, self.pages, self.row, self.observed = -1, [], None, None
        self.computed = self.settled = self.published = self.mapped = 0
        self.in_flight = self.max_in_flight = 0  # their reports are not read: later steps make the same tokens
        self.history.forget_draft()
        self.serial = ROOT
        self.epoch += 1


@dataclass(slots=True)
class PlanRow:
    """A sequence's part in a step. pending: committed tokens to compute; k: drafted tokens to verify, at most; commits: whether
    the step commits tokens for it, as it computes all pending ones; epoch: the sequence's when the row was planned. A row is
    never changed: consecutive decode steps of a sequence share one."""

    sequence: Sequence
    pending: int
    k: int
    commits: bool
    epoch: int

    @property
    def stale(self) -> bool:
        """The sequence left the slot while the step was in flight."""
        return self.epoch != self.sequence.epoch


class Plan(NamedTuple):
    """rows: in the order of the step; admitted: sequences that got a slot; preempted: sequences that lost theirs, each with
    that slot."""

    rows: list[PlanRow]
    admitted: list[Sequence]
    preempted: list[tuple[Sequence, int]]


def new_pages(rows: list[PlanRow]) -> list[tuple[int, int, int]]:
    """Pages of these rows' sequences that are not in their slots' block tables yet, as (slot, index in its table, page). They
    count as mapped from now on."""
    new = []
    for row in rows:
        sequence = row.sequence
        if sequence.mapped < len(sequence.pages):
            new += [(sequence.slot, at, sequence.pages[at]) for at in range(sequence.mapped, len(sequence.pages))]
            sequence.mapped = len(sequence.pages)
    return new


class Scheduler:
    def __init__(
        self,
        pages: Pages,
        policy: Policy,
        slots: int,
        budget: int,
        lookahead: int = 0,
        table_width: int | None = None,
        drafter_missing: int = 0,
        full_drafts: bool = False,
        recomputed: int = 0,
    ) -> None:
        """slots: running sequences at most; budget: tokens of a step at most, drafts included, at least one for each slot, or
        a full draft and one; lookahead: tokens past a step's own for which the drafter uses pages, where there are free ones;
        table_width: pages that a block table holds; drafter_missing: positions at a sequence's computed end for which the
        drafter may have no keys and values yet, if it keeps some in the same pages; full_drafts: never shorten a draft, but
        preempt for its pages, since the output depends on draft lengths; recomputed: pages at the end of a prefix hit that are
        computed again, for a drafter that observes the target."""
        self.pages, self.policy, self.budget, self.lookahead = pages, policy, budget, lookahead
        self.table_width = table_width or pages.count
        self.drafter_missing, self.full_drafts, self.recomputed = drafter_missing, full_drafts, recomputed
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self.suspects: deque[Sequence] = deque()
        self._count, self._arrived = slots, 0
        self._slots = list(range(slots - 1, -1, -1))

    def add(self, request: Request) -> Sequence:
        self._arrived += 1
        sequence = Sequence(request, list(request.prompt_ids), self._arrived)
        self._wait(sequence)
        return sequence

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda one: one.rank)

    def plan(self) -> Plan:
        """The next step. Each decoding row gets one token of the budget. At least half of the rest is reserved for prompts, so
        that drafts cannot starve them. Drafts come next, and prompts get what they leave. Drafts take free pages and never
        preempt, except with `full_drafts`."""
        size, lookahead = self.pages.block_size, self.lookahead
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        short: list[tuple[Sequence, int]] = []  # of pages for tokens to be committed; with 0, their drafts
        preempted: list[tuple[Sequence, int]] = []
        if self.suspects:  # the first one runs alone
            for s in [s for s in self.running if s is not self.suspects[0]]:
                self._preempt(s, preempted)
        for s in self.running:
            known = len(s.ids) + s.in_flight
            if known - s.computed > 1:
                prefilling.append(s)
            elif known < s.limit:  # else it has ended for certain
                decoding.append(s)
                if len(s.ids) + s.max_in_flight > len(s.pages) * size:
                    short.append((s, 0))
        most = self._most(decoding)
        for s, k in zip(decoding, most, strict=True) if self.full_drafts else short:
            self._allocate_or_preempt(s, self._required(s, s.max_length + k), preempted)
        if preempted:
            most = [k for s, k in zip(decoding, most, strict=True) if s.slot >= 0]
            decoding = [s for s in decoding if s.slot >= 0]
            prefilling = [s for s in prefilling if s.slot >= 0]

        left = self.budget - len(decoding)
        prompts = sum(s.pending for s in prefilling) + (sum(s.pending for s in self.waiting) if self._slots else 0)
        for_drafts = left if self.full_drafts else left - min(prompts, (left + 1) // 2)

        rows: list[PlanRow] = []
        for sequence, k in zip(decoding, most, strict=True):
            k = k if k <= for_drafts else for_drafts
            if lookahead or len(sequence.ids) + sequence.max_in_flight + k > len(sequence.pages) * size:
                k = self._fit_draft(sequence, k)
            for_drafts -= k
            left -= k
            row = sequence.row
            if row is None or row.k != k or row.epoch != sequence.epoch:
                row = sequence.row = PlanRow(sequence, 1, k, True, sequence.epoch)
            rows.append(row)

        for sequence in prefilling:
            if sequence.slot < 0 or left == 0:
                continue
            chunk = sequence.chunk(left)
            self._allocate_or_preempt(sequence, self._required(sequence, sequence.computed + chunk), preempted)
            if sequence.slot < 0:
                continue
            left -= chunk
            self._allocate_free(sequence, sequence.computed + chunk, lookahead)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.epoch))

        if preempted:  # a later row may have preempted an earlier one's sequence
            return Plan([row for row in rows if not row.stale], [], preempted)
        return Plan(rows, self._admit(left, rows), preempted)

    def _most(self, decoding: list[Sequence]) -> list[int]:
        """Draft tokens of each of these rows, at most: none before its first token, later one less than it may still produce,
        since a step commits one token more than it accepts; never more than its request allows."""
        width = self.policy.width(len(self.running))
        if width == 0:
            return [0] * len(decoding)
        rooms = [s.limit - len(s.ids) - s.in_flight - 1 if len(s.ids) + s.in_flight > s.prompt else 0 for s in decoding]
        return [min(width, room, s.most_drafted) for room, s in zip(rooms, decoding, strict=True)]

    def _admit(self, left: int, rows: list[PlanRow]) -> list[Sequence]:
        admitted = []
        while self.waiting and self._slots and left > 0:
            sequence = self.suspects[0] if self.suspects else self.waiting[0]
            if sequence.slot >= 0:
                break  # a suspect runs alone
            # a preempted sequence that has decoded leaves two tokens to compute, see Sequence.chunk
            ids, salt = sequence.ids[:-1] if sequence.generated else sequence.ids, sequence.request.params.cache_salt
            prefix = self.pages.match(ids, self.recomputed, salt)
            self.pages.hold(prefix.pages)  # before counting, since idle pages that are held are not free
            wanted = self.pages.needed(self._required(sequence, len(sequence.ids))) - len(prefix.pages)
            if wanted > self.pages.free:
                self.pages.release(prefix.pages)
                break
            self.waiting.remove(sequence)
            sequence.slot = self._slots.pop()
            sequence.pages = prefix.pages + self.pages.allocate(wanted)
            sequence.serial, sequence.published = prefix.serial, len(prefix.pages)
            sequence.computed = sequence.settled = len(prefix.pages) * self.pages.block_size
            self.running.append(sequence)
            admitted.append(sequence)
            chunk = sequence.chunk(left)
            left -= chunk
            self._allocate_free(sequence, len(sequence.ids), self.lookahead)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.epoch))
        return admitted

    def _required(self, sequence: Sequence, tokens: int) -> int:
        """Tokens that must have pages, by preemption if need be, for a step up to this length."""
        return min(tokens + self.lookahead, sequence.limit) if self.full_drafts else tokens

    def _fit_draft(self, sequence: Sequence, k: int) -> int:
        """Allocate free pages for a draft of at most k tokens, and lookahead pages. Return the draft length that fits."""
        if self.lookahead and not self.full_drafts:  # the drafter needed the draft's pages in the last step
            k = max(min(k, sequence.mapped * self.pages.block_size - sequence.max_length + 1), 0)
        room = self._allocate_free(sequence, sequence.max_length, k + self.lookahead)
        return k if self.full_drafts else min(k, room)

    def _allocate_free(self, sequence: Sequence, tokens: int, k: int) -> int:
        """Allocate pages for up to k tokens past `tokens` without preempting. Return how many of the k fit."""
        wanted = min(self.pages.needed(tokens + k), self.table_width) - len(sequence.pages)
        if wanted > 0:
            sequence.pages += self.pages.allocate(min(wanted, self.pages.free))
        return min(k, len(sequence.pages) * self.pages.block_size - tokens)

    def _allocate_or_preempt(self, sequence: Sequence, tokens: int, preempted: list[tuple[Sequence, int]]) -> None:
        """Allocate pages for so many tokens. While there are too few, preempt the running sequence of the last rank."""
        while sequence.slot >= 0:
            wanted = self.pages.needed(tokens) - len(sequence.pages)
            if wanted <= self.pages.free:
                if wanted > 0:
                    sequence.pages += self.pages.allocate(wanted)
                return
            self._preempt(max(self.running, key=lambda one: one.rank), preempted)

    def _preempt(self, sequence: Sequence, preempted: list[tuple[Sequence, int]]) -> None:
        preempted.append((sequence, sequence.slot))
        sequence.preemptions += 1
        self._leave(sequence)
        self._wait(sequence)

    @staticmethod
    def launch(rows: list[PlanRow]) -> None:
        """Count the step of these rows as in flight."""
        for row in rows:
            sequence = row.sequence
            sequence.computed += row.pending
            if row.commits:
                sequence.in_flight += 1
                sequence.max_in_flight += row.k + 1

    def commit(self, row: PlanRow, tokens: list[int]) -> None:
        """Record the tokens that the row's step committed, none for an unfinished prompt, and publish the pages they complete.
        A rejected draft needs no work: its keys and values lie past `computed`, and later steps overwrite them."""
        sequence = row.sequence
        sequence.settled += row.pending
        if row.commits:
            sequence.in_flight -= 1
            sequence.max_in_flight -= row.k + 1
            sequence.computed += len(tokens) - 1  # the accepted drafts
            sequence.settled += len(tokens) - 1
            sequence.ids += tokens
            if self.suspects and self.suspects[0] is sequence:
                self.suspects.popleft()
        known = sequence.settled if sequence.observed is None else sequence.observed
        size, complete = self.pages.block_size, known - self.drafter_missing
        while (end := (sequence.published + 1) * size) <= complete:
            begin = end - size
            page = sequence.pages[sequence.published]
            sequence.serial = self.pages.publish(page, sequence.serial, sequence.ids[begin:end])
            sequence.published += 1

    def finish(self, sequence: Sequence) -> int:
        """Remove a sequence that has ended or was aborted. Return the slot that it leaves, -1 if it had none."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
        slot = sequence.slot
        if slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        return slot

    def restart(self, live: Iterable[Sequence], suspects: Iterable[Sequence]) -> None:
        """Start again after a failure: all pages and slots are free, and these sequences wait. The suspects are admitted
        first."""
        self.pages.restart()
        self._slots = list(range(self._count - 1, -1, -1))
        self.running = []
        self.suspects = deque(suspects)
        self.waiting = sorted(live, key=lambda one: one.rank)
        for sequence in self.waiting:
            sequence.reset()

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.reset()
