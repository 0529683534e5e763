"""One step of the engine, on the host. Admissions and releases are applied, the rows of a plan become launches of the cycle,
and their reports are read. With the exact layout a step is read at once (lag 0). With the padded layout it is read after the
next one was launched (lag 1), except that a drafter on the host forces lag 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forerun.device import mark, receive, send_integers
from forerun.drafters import Drafter, Rows
from forerun.engine.cycle import DRAWN, EXACT, Cycle, Key, Report, Times
from forerun.engine.layouts import StepLayout
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Plan, PlanRow, Sequence, new_pages
from forerun.engine.state import Admission, RowState
from forerun.types import Logprob


@dataclass(slots=True)
class Committed:
    """What a step did to one row. tokens: committed, none for an unfinished prompt; drafted, accepted: numbers of draft tokens;
    logprobs: of the tokens, if the request wants them; broken: the logits after these tokens are not finite, so no token can be
    chosen."""

    row: PlanRow
    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: list[Logprob]
    broken: bool = False


class InFlight(NamedTuple):
    """A step that was launched and not read. parts: rows with their reports and the key of their launch; arrived: waits until
    these are on the host; unfinished: rows with an unfinished prompt, which commit nothing; times: host seconds of the
    launch."""

    rows: list[PlanRow]
    parts: list[tuple[list[PlanRow], Report, Key]]
    unfinished: list[PlanRow]
    arrived: Callable[[], None]
    times: Times

    @property
    def masked(self) -> bool:
        """Whether a row that commits has a grammar. Then nothing may be launched before the step is read."""
        return any([key.features.grammar for _, _, key in self.parts])


class Step:
    """host_drafter: a drafter on the host; None: drafts are made in the cycle. mirror: tables on the host for that drafter.
    lag: how many steps may be in flight when the next one is launched. waits: how often the host drafter was asked to draft."""

    def __init__(
        self, cycle: Cycle, layout: StepLayout, runner: Runner, drafter: Drafter | None, mirror: RowState, lag: int
    ) -> None:
        self.cycle, self.layout, self.runner, self.drafter, self.mirror = cycle, layout, runner, drafter, mirror
        self.host_drafter = drafter if cycle.drafter is None else None
        self.lag = 0 if self.host_drafter is not None else lag
        self.waits = 0
        self.state, self.device = cycle.state, cycle.state.length.device
        self._changes: dict[int, Admission | None] = {}  # admissions and releases since the last launch, by slot

    def warm_up(self) -> None:
        """Before the first request: make the common launches ready and time them."""
        self.runner.warm_up(self.layout.keys(self.cycle.classes))

    def warm_up_largest(self) -> None:
        """Make the launches ready that take most memory. All others fit into it."""
        self.runner.warm_up(self.layout.largest(), complete=False)

    def admit(self, sequence: Sequence) -> None:
        """The sequence got a slot. The next launch writes it to the state."""
        slot, request = sequence.slot, sequence.request
        sequence.mapped = 0
        self._changes[slot] = Admission(list(sequence.ids), request)
        if self.host_drafter is not None:
            self.mirror.set(slot, sequence.ids)
        if self.drafter is not None:
            self.drafter.admit(slot, request)

    def release(self, sequence: Sequence, slot: int, finished: bool) -> None:
        """The sequence left the slot. The next launch makes the row inactive."""
        self._changes[slot] = None
        if self.host_drafter is not None:
            self.mirror.catch_up(slot, sequence.ids)
        if self.drafter is not None:
            self.drafter.release(slot, finished)

    def restart(self) -> None:
        """Make all slots free after a failure."""
        self._changes = {}
        self.layout.restart()
        self.state.active.fill_(False)
        if self.drafter is not None:
            self.drafter.restart()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        start = time.perf_counter()
        if self._changes:
            changes, self._changes = self._changes, {}
            self.state.apply(changes)
            admitted = {slot: one.request for slot, one in changes.items() if one is not None}
            if admitted:
                self.cycle.sampling.admit(admitted)
        self.state.map_pages(new_pages(plan.rows))
        bound = [row for row in plan.rows if row.sequence.matcher is not None and row.commits]
        if bound:
            self._bind(bound)
        parts = []
        exact = False
        for key, given, rows in self.layout.arrange(plan.rows):
            report = self.runner.run(key, given)
            parts.append((rows, self._receive(report), key))  # before the next launch, since graphs share their memory
            exact = key.layout == EXACT
        unfinished = [row for row in plan.rows if not row.commits]
        resumed = [row.sequence for row in unfinished if row.sequence.resumes(row)]
        if resumed and self.cycle.drafter is not None:
            slots = [s.slot for s in resumed]
            wanted = torch.tensor([min(self.cycle.width, s.most_drafted) for s in resumed]) if exact else None
            self.cycle.draft(send_integers(slots, self.device), wanted, self.cycle.features(slots) if exact else DRAWN)
        spent = time.perf_counter() - start
        draft, _, verify = self.cycle.times if exact else (0.0, 0.0, 0.0)
        return InFlight(plan.rows, parts, unfinished, mark(self.device), Times(draft, spent - draft - verify, verify))

    def _bind(self, rows: list[PlanRow]) -> None:
        """Put the drafts at hand of these rows under their grammars, and write the masks of the next launch. All their steps
        have been read."""
        cycle, sequences = self.cycle, [row.sequence for row in rows]
        slots, blocks = [s.slot for s in sequences], []
        weighed = any([s.history.confidence is not None for s in sequences])  # else the drafter gives no chances
        for row, s, draft in zip(rows, sequences, cycle.at_hand(slots), strict=True):
            assert s.matcher is not None
            s.matcher.follow(s.ids, s.prompt)
            block = s.matcher.block(draft, row.k, cycle.drawn)
            blocks.append(block)
            s.history.amend(block.forced)
        if cycle.width:
            chances = [s.history.confidence or [1.0] * len(b.tokens) for s, b in zip(sequences, blocks, strict=True)]
            cycle.amend(slots, blocks, chances if weighed else None)
        cycle.sampling.mask(slots, [block.masks for block in blocks], cycle.width)

    @staticmethod
    def _receive(report: Report) -> Report:
        """Start the copy of a report to the host."""
        logprobs = None if report.logprobs is None else tuple(receive(part) for part in report.logprobs)
        chances = (None if one is None else receive(one) for one in (report.confidence, report.cheap))
        return Report(receive(report.tokens), receive(report.counts), logprobs, *chances)  # type: ignore[arg-type]

    def read(self, step: InFlight) -> Iterator[Committed]:
        """Yield what a step that has arrived did to each row, and update the acceptance histories. To be called once."""
        for row in step.unfinished:
            yield Committed(row, [], 0, 0, [])
        for rows, report, key in step.parts:
            tokens, columns = report.tokens.tolist(), report.counts.t().tolist()
            confidence = report.confidence.tolist() if report.confidence is not None else None
            self.layout.learn(report, len(rows), key.passes)
            for i, (row, block, count, drafted, accepted, broken, found) in enumerate(
                zip(rows, tokens, *columns, strict=False)
            ):
                if self.cycle.width:
                    history = row.sequence.history
                    history.learn(drafted, accepted, found, confidence and confidence[i])
                logprobs = self._logprobs(row, report, i, count) if report.logprobs is not None else []
                yield Committed(row, block[:count], drafted, accepted, logprobs, broken > 0)

    @staticmethod
    def _logprobs(row: PlanRow, report: Report, i: int, count: int) -> list[Logprob]:
        top = row.sequence.request.params.logprobs
        if top is None or report.logprobs is None:
            return []
        chosen, ids, values = (part[i, :count].tolist() for part in report.logprobs)
        tokens = report.tokens[i, :count].tolist()
        return [
            Logprob(token, value, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
            for token, value, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
        ]

    def draft(self, sequences: list[Sequence], width: int) -> float:
        """Have the host drafter draft at most `width` tokens for these sequences. All their steps have been read. Returns the
        seconds that it took."""
        if self.host_drafter is None or not sequences:
            return 0.0
        start = time.perf_counter()
        slots = [s.slot for s in sequences]
        for s in sequences:
            self.mirror.catch_up(s.slot, s.ids)
        k = torch.tensor([max(min(width, s.remaining - 1, s.most_drafted), 0) for s in sequences])
        with torch.inference_mode():
            draft = self.host_drafter.propose(Rows(torch.tensor(slots), k, int(k.max())))
            self.cycle.keep(slots, draft)
        confidence = draft.confidence.tolist() if draft.confidence is not None else [None] * len(slots)
        for s, size, chances in zip(sequences, draft.size.tolist(), confidence, strict=True):
            s.history.at_hand, s.history.confidence = size, chances
        self.waits += bool(width)
        return time.perf_counter() - start
