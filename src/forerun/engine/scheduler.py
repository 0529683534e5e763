"""Which sequences take part in the next step, with how many tokens each: admits, cuts prompts into chunks, hands out
pages, and sends sequences back to wait when pages run out. Knows no torch; what a step does is step.py's.

    ids of a sequence:  | computed: keys and values are in its pages | pending: committed, not computed yet |
    a prompt is pending until its chunks are done; a decoding sequence has one pending token, the last one committed.

The next step may be planned before the last one was read (on CUDA it is): a step is `launch`ed, which takes its pending
tokens as computed, and later `commit`ted. In between its rows are in flight: they will have committed 1 .. k + 1 tokens
that the host has not seen, and plans count with the most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.engine.pages import ROOT, Pages
from forerun.engine.policy import Chances, Policy
from forerun.engine.stats import DraftStats
from forerun.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way. prompt, limit: how long its prompt is, and what it may be at most; stops: the ids that end it;
    turn: how often it left a slot; flying: steps in flight that commit tokens for it; ahead: the most they commit. serial
    and published belong to the prefix cache: its last published page and how many; laid: how many of its pages stand in the
    slot's block table; row: its part in the last step in which it decoded; admitted_at: when it first got a slot
    (perf_counter seconds)."""

    request: Request
    ids: list[int]
    prompt: int = field(init=False)
    limit: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    computed: int = 0
    slot: int = -1
    turn: int = 0
    flying: int = 0
    ahead: int = 0
    pages: list[int] = field(default_factory=list)
    serial: int = ROOT
    published: int = 0
    laid: int = 0
    row: PlanRow | None = None
    admitted_at: float = 0.0
    stats: DraftStats = field(default_factory=DraftStats)
    chances: Chances = field(default_factory=Chances)

    def __post_init__(self) -> None:
        self.prompt = len(self.request.prompt_ids)
        self.limit = self.prompt + self.request.max_tokens
        self.stops = frozenset(self.request.stop_ids)

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def remaining(self) -> int:
        """How many tokens it may still produce."""
        return self.limit - len(self.ids)

    @property
    def pending(self) -> int:
        """Committed tokens to compute, those included that steps in flight leave behind (each at least its last)."""
        return len(self.ids) + self.flying - self.computed

    @property
    def longest(self) -> int:
        """How many tokens it may have by now."""
        return len(self.ids) + self.ahead


@dataclass(slots=True)
class PlanRow:
    """A sequence's part in a step: `pending` committed tokens are computed and up to k drafted ones verified.
    samples: the pending ones are all there are, so the step commits new tokens for it; turn: which of its turns in a
    slot this is. Never changed: a sequence that goes on as before has the same row in many steps."""

    sequence: Sequence
    pending: int
    k: int
    samples: bool
    turn: int

    @property
    def stale(self) -> bool:
        """The sequence left the slot while the step was in flight."""
        return self.turn != self.sequence.turn


class Plan(NamedTuple):
    """rows in the order of the step; admitted: those that came in with it; preempted: those that had to leave for it,
    with the slots they left."""

    rows: list[PlanRow]
    admitted: list[Sequence]
    preempted: list[tuple[Sequence, int]]


def new_pages(rows: list[PlanRow]) -> list[tuple[int, int, int]]:
    """Of these rows' sequences the pages that are not in their slots' block tables yet, and from now on count as laid there:
    (slot, index in its table, page) each."""
    new = []
    for row in rows:
        sequence = row.sequence
        if sequence.laid < len(sequence.pages):
            new += [(sequence.slot, at, sequence.pages[at]) for at in range(sequence.laid, len(sequence.pages))]
            sequence.laid = len(sequence.pages)
    return new


class Scheduler:
    def __init__(
        self, pages: Pages, policy: Policy, slots: int, budget: int, beyond: int = 0, widest: int | None = None
    ) -> None:
        """slots: sequences at once; budget: tokens of a step, drafts included (at least `slots`); beyond: tokens past a step's
        own for which its drafter wants pages, if there are any; widest: pages that a block table holds."""
        self.pages, self.policy, self.budget, self.beyond = pages, policy, budget, beyond
        self.widest = widest or pages.count
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = list(range(slots - 1, -1, -1))

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request, list(request.prompt_ids))
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> Plan:
        """The next step. Every decoding row gets its one token; then prompts get at least half of what is left of the
        budget, so that drafts cannot starve them; then drafts; what drafts leave goes to prompts too. Drafts never
        preempt: they take what pages are free."""
        size, beyond = self.pages.block_size, self.beyond
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        short: list[Sequence] = []  # of pages
        for s in self.running:
            known = len(s.ids) + s.flying
            if known - s.computed > 1:
                prefilling.append(s)
            elif known < s.limit:  # else it is sure to have ended
                decoding.append(s)
                if len(s.ids) + s.ahead > len(s.pages) * size:
                    short.append(s)
        preempted: list[tuple[Sequence, int]] = []
        for sequence in short:
            self._make_room(sequence, sequence.longest, preempted)
        if preempted:
            decoding = [s for s in decoding if s.slot >= 0]
            prefilling = [s for s in prefilling if s.slot >= 0]

        left = self.budget - len(decoding)
        prompts = sum(s.pending for s in prefilling) + (sum(s.pending for s in self.waiting) if self._slots else 0)
        for_drafts = left - min(prompts, (left + 1) // 2)

        rows: list[PlanRow] = []
        for sequence, k in zip(decoding, self._shares(decoding, self.budget - for_drafts), strict=True):
            k = k if k <= for_drafts else for_drafts
            if len(sequence.ids) + sequence.ahead + k + beyond > len(sequence.pages) * size:
                k = min(k, self._grow(sequence, sequence.longest, k + beyond))
            for_drafts -= k
            left -= k
            row = sequence.row
            if row is None or row.k != k or row.turn != sequence.turn:
                row = sequence.row = PlanRow(sequence, 1, k, True, sequence.turn)
            rows.append(row)

        for sequence in prefilling:
            if sequence.slot < 0 or left == 0:
                continue
            chunk = min(sequence.pending, left)
            self._make_room(sequence, sequence.computed + chunk, preempted)
            if sequence.slot < 0:
                continue
            left -= chunk
            self._grow(sequence, sequence.computed + chunk, self.beyond)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.turn))

        if preempted:  # a later row may have preempted an earlier one's sequence
            return Plan([row for row in rows if not row.stale], [], preempted)
        return Plan(rows, self._admit(left, rows), preempted)

    def _shares(self, decoding: list[Sequence], positions: int) -> list[int]:
        """How many tokens each of these rows is to draft, in a step of so many positions without any draft."""
        width = self.policy.width(len(self.running))
        if width == 0:
            return [0] * len(decoding)
        rooms = [s.limit - len(s.ids) - s.flying - 1 for s in decoding]  # a step commits a token behind the drafts
        most = [width if room > width else room for room in rooms]
        return self.policy.share_out(most, [s.chances for s in decoding], positions)

    def _admit(self, left: int, rows: list[PlanRow]) -> list[Sequence]:
        admitted = []
        while self.waiting and self._slots and left > 0:
            sequence = self.waiting[0]
            prefix = self.pages.match(sequence.ids)
            self.pages.hold(prefix.pages)  # before counting: idle pages that are held are no longer free
            wanted = self.pages.needed(len(sequence.ids)) - len(prefix.pages)
            if wanted > self.pages.free:
                self.pages.release(prefix.pages)
                break
            self.waiting.popleft()
            sequence.slot = self._slots.pop()
            sequence.pages = prefix.pages + self.pages.allocate(wanted)
            sequence.serial, sequence.published = prefix.serial, len(prefix.pages)
            sequence.computed = len(prefix.pages) * self.pages.block_size
            self.running.append(sequence)
            admitted.append(sequence)
            chunk = min(sequence.pending, left)
            left -= chunk
            self._grow(sequence, len(sequence.ids), self.beyond)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.turn))
        return admitted

    def _grow(self, sequence: Sequence, tokens: int, k: int) -> int:
        """Pages for up to k tokens more than `tokens`, without disturbing anyone; returns how many there is room for."""
        wanted = min(self.pages.needed(tokens + k), self.widest) - len(sequence.pages)
        if wanted > 0:
            sequence.pages += self.pages.allocate(min(wanted, self.pages.free))
        return min(k, len(sequence.pages) * self.pages.block_size - tokens)

    def _make_room(self, sequence: Sequence, tokens: int, preempted: list[tuple[Sequence, int]]) -> None:
        """Pages for so many tokens, sending the sequences that came last back to wait until there are enough."""
        while sequence.slot >= 0:
            wanted = self.pages.needed(tokens) - len(sequence.pages)
            if wanted <= self.pages.free:
                if wanted > 0:
                    sequence.pages += self.pages.allocate(wanted)
                return
            last = self.running[-1]
            preempted.append((last, last.slot))
            self._leave(last)
            last.computed, last.serial, last.published = 0, ROOT, 0
            last.flying = last.ahead = 0  # what is in flight is not read: the same tokens will come again
            self.waiting.appendleft(last)

    @staticmethod
    def launch(rows: list[PlanRow]) -> None:
        """The step of these rows is on its way."""
        for row in rows:
            sequence = row.sequence
            sequence.computed += row.pending
            if row.samples:
                sequence.flying += 1
                sequence.ahead += row.k + 1

    def commit(self, row: PlanRow, tokens: list[int]) -> None:
        """The row's step committed these tokens (none while its prompt is not through).
        Rejecting is not advancing: keys and values of rejected drafts lie past `computed` and get overwritten."""
        sequence = row.sequence
        if row.samples:
            sequence.flying -= 1
            sequence.ahead -= row.k + 1
            sequence.computed += len(tokens) - 1  # the accepted drafts
            sequence.ids += tokens
        size = self.pages.block_size
        while (end := (sequence.published + 1) * size) <= sequence.computed and end <= len(sequence.ids):
            begin = end - size
            page = sequence.pages[sequence.published]
            sequence.serial = self.pages.publish(page, sequence.serial, sequence.ids[begin:end])
            sequence.published += 1

    def finish(self, sequence: Sequence) -> int:
        """It ended or was aborted, wherever it is; returns the slot it leaves, -1 if it had none."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return -1
        slot = sequence.slot
        self._leave(sequence)
        return slot

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.row = -1, [], None
        sequence.turn += 1
