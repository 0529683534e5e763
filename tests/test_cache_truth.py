"""The prefix cache holds only computed pages. The scheduler runs against a model of the device: its pages record for which text
each position was computed, by the target and by a drafter with keys and values of its own."""

from __future__ import annotations

import random

import pytest

from forerun.config import Speculation
from forerun.engine.pages import Pages
from forerun.engine.policy import Policy
from forerun.engine.scheduler import Plan, PlanRow, Scheduler, Sequence, new_pages
from forerun.types import Request, SamplingParams

STOP = 0
Text = tuple[int, ...]


def continued(ids: Text) -> int:
    """The only correct next token; sometimes the stop."""
    return hash(ids) % 23


class Device:
    """Steps run when they are launched. A position's keys and values are correct for one text, the tokens up to and with it."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, width: int) -> None:
        self.scheduler, self.rng, self.width = scheduler, rng, width
        self.size = scheduler.pages.block_size
        self.target: dict[tuple[int, int], Text] = {}  # (page, offset) -> the text computed there
        self.drafter: dict[tuple[int, int], Text] = {}
        self.text: dict[int, Text] = {}  # of each slot
        self.alive: dict[int, bool] = {}
        self.limit: dict[int, int] = {}
        self.draft: dict[int, Text] = {}

    def admit(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.text[slot], self.alive[slot], self.limit[slot] = tuple(sequence.ids), True, sequence.limit
        self.draft[slot] = ()

    def write(self, memory: dict[tuple[int, int], Text], pages: list[int], text: Text, begin: int) -> None:
        for at in range(max(begin, 0), len(text)):
            if at // self.size < len(pages):
                memory[pages[at // self.size], at % self.size] = text[: at + 1]

    def propose(self, slot: int, pages: list[int]) -> None:
        """Draft as a draft model does with the padded layout: it computes the last two committed tokens, then each draft token
        but the last."""
        text, right = self.text[slot], self.rng.randint(0, self.width)
        for i in range(self.width):
            text += (continued(text) + (i >= right) * 100,)
        self.draft[slot] = text[len(self.text[slot]) :]
        self.write(self.drafter, pages, text[:-1], len(self.text[slot]) - 2)

    def run(self, row: PlanRow) -> list[int]:
        """Run one row's part of a step. Return the tokens that it reports."""
        sequence = row.sequence
        slot, pages = sequence.slot, sequence.pages[: sequence.mapped]
        if not self.alive[slot]:
            return []
        text = self.text[slot]
        if row.pending > 1 or not row.commits:
            part = text[: sequence.computed + row.pending]
            for memory in (self.target, self.drafter):
                self.write(memory, pages, part, sequence.computed)
            if not row.commits:
                if sequence.resumes(row):
                    self.propose(slot, pages)
                return []
            drafts: Text = ()
        else:
            drafts = self.draft[slot][: min(row.k, self.limit[slot] - len(text) - 1)]
            self.write(self.target, pages, text + drafts, len(text) - 1)
        report: list[int] = []
        while True:
            token = continued(text)
            accepted = len(report) < len(drafts) and drafts[len(report)] == token
            report.append(token)
            text += (token,)
            if token == STOP or len(text) == self.limit[slot]:
                self.alive[slot] = False
            if not accepted or not self.alive[slot]:
                break
        self.text[slot] = text
        if self.alive[slot]:
            self.propose(slot, pages)
        return report

    def launch(self, plan: Plan) -> list[tuple[PlanRow, list[int]]]:
        for _, slot in plan.preempted:
            self.alive[slot] = False
        for sequence in plan.admitted:
            self.admit(sequence)
        new_pages(plan.rows)
        return [(row, self.run(row)) for row in plan.rows]

    def wrong(self, drafter: bool) -> int:
        """Entries of published pages that were computed for another text than the page's key says."""
        texts: dict[int, Text] = {0: ()}
        count = 0
        for (before, ids), (page, serial) in sorted(self.scheduler.pages._found.items(), key=lambda item: item[1][1]):
            if before not in texts:  # the page before it was reused, so this one cannot be found
                continue
            texts[serial] = texts[before] + ids
            for offset in range(self.size):
                want = texts[serial][: len(texts[before]) + offset + 1]
                count += self.target.get((page, offset)) != want
                count += drafter and self.drafter.get((page, offset)) != want
        return count


def play(seed: int, lag: int, missing: int, settle: bool = True) -> tuple[int, int, int]:
    """Play chats of several turns, with stops, limits, aborts and preemption, on small pages. Return the numbers of wrong
    entries in published pages, of prefix hits, and of preemptions. settle: publish what was read, not what was launched."""
    rng = random.Random(seed)
    width = rng.choice([0, 1, 4])
    speculation = Speculation("ngram", width) if width else None
    pages = Pages(rng.choice([14, 30]), rng.choice([2, 4]))
    it = Scheduler(pages, Policy(speculation), 4, rng.choice([8, 24]), width + 1 if missing else 0, None, missing)
    device = Device(it, rng, width)
    room = pages.count * pages.block_size
    flights: list[list[tuple[PlanRow, list[int]]]] = []
    wrong = hits = preempted = number = 0
    finished: list[Text] = []
    for step in range(300):
        if rng.random() < 0.4 and len(it.waiting) < 4 and step < 200:
            before = rng.choice(finished[-4:]) if finished and rng.random() < 0.8 else ()
            prompt = (*before, *(rng.randrange(1, 5) for _ in range(rng.randint(1, 6))))
            tokens = rng.randint(1, 12)
            if len(prompt) + tokens <= min(room, 40):
                it.add(Request(str(number), prompt, SamplingParams(max_tokens=tokens), tokens, 0, (STOP,)))
                number += 1
        running = [*it.running, *it.waiting]
        if running and rng.random() < 0.05:
            gone = rng.choice(running)
            slot = it.finish(gone)
            if slot >= 0:
                device.alive[slot] = False
        plan = it.plan()
        hits += sum(s.computed > 0 for s in plan.admitted)
        preempted += len(plan.preempted)
        if plan.rows or plan.preempted:
            flights.append(device.launch(plan))
            it.launch(plan.rows)
        if len(flights) > lag or (flights and not plan.rows):
            for row, tokens_ in flights.pop(0):
                sequence = row.sequence
                if row.stale:
                    continue
                ended = len(sequence.ids) + len(tokens_) >= sequence.limit or STOP in tokens_
                cut = rng.randint(1, len(tokens_)) if tokens_ and rng.random() < 0.05 else 0  # a stop string, on the host
                tokens_ = tokens_[:cut] if cut else tokens_
                if not settle:
                    sequence.settled = sequence.computed - row.pending
                it.commit(row, tokens_)
                if row.commits and (ended or cut):
                    finished.append(tuple(sequence.ids))
                    device.alive[it.finish(sequence)] = False
        wrong += device.wrong(drafter=missing > 0)
    return wrong, hits, preempted


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("missing", [0, 1], ids=["target", "target and drafter"])
def test_published_pages_were_computed(lag: int, missing: int) -> None:
    plays = [play(seed, lag, missing) for seed in range(40)]
    assert sum(wrong for wrong, _, _ in plays) == 0
    assert sum(hits for _, hits, _ in plays) > 200 and sum(preempted for _, _, preempted in plays) > 50


def test_the_model_of_the_device_notices_faults() -> None:
    """First fault: pages are published when their step is launched. Second: a drafter's pages as soon as the target's."""
    assert sum(play(seed, 1, 0, settle=False)[0] for seed in range(40)) > 0

    class Hasty(Scheduler):
        drafter_missing = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Scheduler", Hasty)
        assert sum(play(seed, 1, 1)[0] for seed in range(40)) > 0
