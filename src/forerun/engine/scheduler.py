"""Which sequences take part in the next step, with how many tokens each: admits, cuts prompts into chunks, hands out
pages, and sends sequences back to wait when pages run out. Knows no torch; what a step does is step.py's.

    ids of a sequence:  | computed: keys and values are in its pages | pending: committed, not computed yet |
    a prompt is pending until its chunks are done; a decoding sequence has one pending token, the last one committed.

The next step may be planned before the last one was read (on CUDA it is): a step is `launch`ed, which takes its pending
tokens as computed, and later `commit`ted. In between its rows are in flight: they will have committed 1 .. k + 1 tokens
that the host has not seen, and plans count with the most. A step in flight may turn out to have done nothing for a row, since
the row had ended on the device. So the prefix cache gets only what steps that were read have computed (`settled`).

After a step that failed its sequences are `suspects`: until each of them has committed a token, steps hold one of them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.engine.pages import ROOT, Pages
from forerun.engine.policy import AcceptanceHistory, Policy
from forerun.engine.stats import DraftStats
from forerun.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way. prompt, limit: how long its prompt is, and what it may be at most; stops: the ids that end it;
    epoch: how often it left a slot; in_flight: steps in flight that commit tokens for it; max_in_flight: the most they commit.
    computed: positions whose keys and values are computed once all launched steps are through; settled: those computed by steps
    that were read. serial and published belong to the prefix cache: its last published page and how many; mapped: how many of
    its pages stand in the slot's block table; row: its part in the last step in which it decoded; admitted_at: when it first
    got a slot (perf_counter seconds)."""

    request: Request
    ids: list[int]
    prompt: int = field(init=False)
    limit: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    computed: int = 0
    settled: int = 0
    slot: int = -1
    epoch: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    pages: list[int] = field(default_factory=list)
    serial: int = ROOT
    published: int = 0
    mapped: int = 0
    row: PlanRow | None = None
    admitted_at: float = 0.0
    stats: DraftStats = field(default_factory=DraftStats)
    history: AcceptanceHistory = field(default_factory=AcceptanceHistory)

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
        return len(self.ids) + self.in_flight - self.computed

    @property
    def longest(self) -> int:
        """How many tokens it may have by now."""
        return min(len(self.ids) + self.max_in_flight, self.limit)

    @property
    def decodes(self) -> bool:
        """Whether its next step is a decode step, once nothing is in flight."""
        return bool(self.generated) and self.pending == 1

    def chunk(self, most: int) -> int:
        """How many pending tokens a step that takes at most so many computes. The last token of a sequence that has answered
        before (it was preempted) waits for a decode step of its own: it is then drafted for as if it had never left."""
        held = 1 if self.generated and self.pending > 1 else 0
        return min(self.pending - held, most)

    def resumes(self, row: PlanRow) -> bool:
        """Whether the step of this row, which is not launched yet, computes all but the last token of a sequence that has
        answered before."""
        return bool(self.generated) and self.computed + row.pending == len(self.ids) - 1

    def reset(self) -> None:
        """It has no slot, no pages and nothing in flight; what it computed is forgotten."""
        self.slot, self.pages, self.row = -1, [], None
        self.computed = self.settled = self.published = self.mapped = 0
        self.in_flight = self.max_in_flight = 0  # what is in flight is not read: the same tokens will come again
        self.history.forget_draft()
        self.serial = ROOT
        self.epoch += 1


@dataclass(slots=True)
class PlanRow:
    """A sequence's part in a step: `pending` committed tokens are computed and up to k drafted ones verified.
    samples: the pending ones are all there are, so the step commits new tokens for it; epoch: of the sequence when
    the row was planned. Never changed: a sequence that goes on as before has the same row in many steps."""

    sequence: Sequence
    pending: int
    k: int
    samples: bool
    epoch: int

    @property
    def stale(self) -> bool:
        """The sequence left the slot while the step was in flight."""
        return self.epoch != self.sequence.epoch


class Plan(NamedTuple):
    """rows in the order of the step; admitted: those that came in with it; preempted: those that had to leave for it,
    with the slots they left."""

    rows: list[PlanRow]
    admitted: list[Sequence]
    preempted: list[tuple[Sequence, int]]


def new_pages(rows: list[PlanRow]) -> list[tuple[int, int, int]]:
    """Of these rows' sequences the pages that are not in their slots' block tables yet, and from now on count as mapped there:
    (slot, index in its table, page) each."""
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
        behind: int = 0,
        whole: bool = False,
        again: int = 0,
    ) -> None:
        """slots: sequences at once; budget: tokens of a step, drafts included (at least `slots`, with `whole` at least what so
        many rows with full drafts take); lookahead: tokens past a step's own for which its drafter wants pages, if there are
        any; table_width: pages that a block table holds; behind: how many of a sequence's last computed positions its
        drafter may lack keys and values of, if that has any in the same pages; whole: the length of a draft depends on its
        request alone, so that drafts have pages made for them as committed tokens have; again: how many pages at the end of
        a prefix hit are computed again, for a drafter that observes the target."""
        self.pages, self.policy, self.budget, self.lookahead = pages, policy, budget, lookahead
        self.table_width = table_width or pages.count
        self.behind, self.whole, self.again = behind, whole, again
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.suspects: deque[Sequence] = deque()
        self._count = slots
        self._slots = list(range(slots - 1, -1, -1))

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request, list(request.prompt_ids))
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> Plan:
        """The next step. Every decoding row gets its one token; then prompts get at least half of what is left of the
        budget, so that drafts cannot starve them; then drafts; what drafts leave goes to prompts too. Drafts never
        preempt, unless they have to be whole: they take what pages are free."""
        size, lookahead = self.pages.block_size, self.lookahead
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        short: list[tuple[Sequence, int]] = []  # of pages
        preempted: list[tuple[Sequence, int]] = []
        if self.suspects:  # the first of them alone
            for s in [s for s in self.running if s is not self.suspects[0]]:
                self._preempt(s, preempted)
        for s in self.running:
            known = len(s.ids) + s.in_flight
            if known - s.computed > 1:
                prefilling.append(s)
            elif known < s.limit:  # else it is sure to have ended
                decoding.append(s)
                if len(s.ids) + s.max_in_flight > len(s.pages) * size:
                    short.append((s, 0))
        most = self._most(decoding)
        for s, k in zip(decoding, most, strict=True) if self.whole else short:
            self._make_room(s, min(s.longest + k + lookahead, s.limit) if self.whole else s.longest, preempted)
        if preempted:
            most = [k for s, k in zip(decoding, most, strict=True) if s.slot >= 0]
            decoding = [s for s in decoding if s.slot >= 0]
            prefilling = [s for s in prefilling if s.slot >= 0]

        left = self.budget - len(decoding)
        prompts = sum(s.pending for s in prefilling) + (sum(s.pending for s in self.waiting) if self._slots else 0)
        for_drafts = left if self.whole else left - min(prompts, (left + 1) // 2)

        rows: list[PlanRow] = []
        for sequence, k in zip(decoding, most, strict=True):
            k = k if k <= for_drafts else for_drafts
            if lookahead and not self.whole:  # a draft's keys and values needed pages when it was made, in the last step
                k = max(min(k, sequence.mapped * size - sequence.longest + 1), 0)
            if len(sequence.ids) + sequence.max_in_flight + k + lookahead > len(sequence.pages) * size:
                room = self._grow(sequence, sequence.longest, k + lookahead)
                k = k if self.whole else min(k, room)
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
            self._make_room(sequence, self._wanted(sequence, sequence.computed + chunk), preempted)
            if sequence.slot < 0:
                continue
            left -= chunk
            self._grow(sequence, sequence.computed + chunk, self.lookahead)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.epoch))

        if preempted:  # a later row may have preempted an earlier one's sequence
            return Plan([row for row in rows if not row.stale], [], preempted)
        return Plan(rows, self._admit(left, rows), preempted)

    def _most(self, decoding: list[Sequence]) -> list[int]:
        """How many tokens each of these rows may draft: none before its first token, and one less than it may still take,
        since a step commits a token behind the drafts."""
        width = self.policy.width(len(self.running))
        if width == 0:
            return [0] * len(decoding)
        rooms = [s.limit - len(s.ids) - s.in_flight - 1 if len(s.ids) + s.in_flight > s.prompt else 0 for s in decoding]
        return [width if room > width else room for room in rooms]

    def _admit(self, left: int, rows: list[PlanRow]) -> list[Sequence]:
        admitted = []
        while self.waiting and self._slots and left > 0:
            sequence = self.suspects[0] if self.suspects else self.waiting[0]
            if sequence.slot >= 0:
                break  # a suspect runs alone
            # one that has answered leaves two tokens to compute, see Sequence.chunk
            prefix = self.pages.match(sequence.ids[:-1] if sequence.generated else sequence.ids, self.again)
            self.pages.hold(prefix.pages)  # before counting: idle pages that are held are no longer free
            wanted = self.pages.needed(self._wanted(sequence, len(sequence.ids))) - len(prefix.pages)
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
            self._grow(sequence, len(sequence.ids), self.lookahead)
            rows.append(PlanRow(sequence, chunk, 0, chunk == sequence.pending, sequence.epoch))
        return admitted

    def _wanted(self, sequence: Sequence, tokens: int) -> int:
        """For how many tokens a sequence must have pages when so many of its prompt are computed."""
        return min(tokens + self.lookahead, sequence.limit) if self.whole else tokens

    def _grow(self, sequence: Sequence, tokens: int, k: int) -> int:
        """Pages for up to k tokens more than `tokens`, without disturbing anyone; returns how many there is room for."""
        wanted = min(self.pages.needed(tokens + k), self.table_width) - len(sequence.pages)
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
            self._preempt(self.running[-1], preempted)

    def _preempt(self, sequence: Sequence, preempted: list[tuple[Sequence, int]]) -> None:
        preempted.append((sequence, sequence.slot))
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    @staticmethod
    def launch(rows: list[PlanRow]) -> None:
        """The step of these rows is on its way."""
        for row in rows:
            sequence = row.sequence
            sequence.computed += row.pending
            if row.samples:
                sequence.in_flight += 1
                sequence.max_in_flight += row.k + 1

    def commit(self, row: PlanRow, tokens: list[int]) -> None:
        """The row's step committed these tokens (none while its prompt is not through).
        Rejecting is not advancing: keys and values of rejected drafts lie past `computed` and get overwritten."""
        sequence = row.sequence
        sequence.settled += row.pending
        if row.samples:
            sequence.in_flight -= 1
            sequence.max_in_flight -= row.k + 1
            sequence.computed += len(tokens) - 1  # the accepted drafts
            sequence.settled += len(tokens) - 1
            sequence.ids += tokens
            if self.suspects and self.suspects[0] is sequence:
                self.suspects.popleft()
        size, complete = self.pages.block_size, sequence.settled - self.behind
        while (end := (sequence.published + 1) * size) <= complete:
            begin = end - size
            page = sequence.pages[sequence.published]
            sequence.serial = self.pages.publish(page, sequence.serial, sequence.ids[begin:end])
            sequence.published += 1

    def finish(self, sequence: Sequence) -> int:
        """It ended or was aborted, wherever it is; returns the slot it leaves, -1 if it had none."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
        slot = sequence.slot
        if slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        return slot

    def restart(self, live: Iterable[Sequence], suspects: Iterable[Sequence]) -> None:
        """Forget all pages and slots, whatever state they are in: these sequences wait, in this order, the suspects among them
        in front."""
        self.pages.restart()
        self._slots = list(range(self._count - 1, -1, -1))
        self.running = []
        self.suspects = deque(suspects)
        rest = [s for s in live if s not in self.suspects]
        self.waiting = deque([*self.suspects, *rest])
        for sequence in self.waiting:
            sequence.reset()

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.reset()
