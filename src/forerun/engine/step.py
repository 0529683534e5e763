"""One step of the engine, on the host: admissions and releases are applied, the rows of a plan become launches of the cycle,
and what these did is read. With the exact layout a step is read at once (lag 0). With the padded one it is read after the
next one was launched (lag 1), unless a drafter on the host has to see it before it can draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forerun.device import mark, receive, send_integers
from forerun.drafters import Drafter, Rows
from forerun.engine.cycle import DRAWN, EXACT, Cycle, Report, Times
from forerun.engine.layouts import Arrange
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Plan, PlanRow, Sequence, new_pages
from forerun.engine.state import Admission, RowState
from forerun.types import Logprob


@dataclass(slots=True)
class Committed:
    """What a step did to one row: tokens committed (none in the middle of a prompt), how many were drafted for it and how many
    of these accepted, and the tokens' logprobs if the request asked for them. broken: behind these tokens no token can be
    chosen, since the logits are not finite."""

    row: PlanRow
    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: list[Logprob]
    broken: bool = False


class InFlight(NamedTuple):
    """A step that was launched and not read. parts: rows with their reports, which are on the host once `arrived` returns;
    silent: rows in the middle of a prompt."""

    rows: list[PlanRow]
    parts: list[tuple[list[PlanRow], Report]]
    silent: list[PlanRow]
    arrived: Callable[[], None]
    times: Times


class Step:
    """mirror: tables on the host, for a drafter there (host_drafter; None: drafts are made in the cycle). waits: drafts for
    which a step on a device was waited for."""

    def __init__(
        self, cycle: Cycle, layout: Arrange, runner: Runner, drafter: Drafter | None, mirror: RowState, lag: int
    ) -> None:
        self.cycle, self.layout, self.runner, self.drafter, self.mirror = cycle, layout, runner, drafter, mirror
        self.host_drafter = drafter if cycle.drafter is None else None
        self.lag = 0 if self.host_drafter is not None else lag
        self.waits = 0
        self.state, self.device = cycle.state, cycle.state.length.device
        self._changes: dict[int, Admission | None] = {}  # admissions and releases since the last launch, by slot

    def warm_up(self) -> None:
        """Before the first request: make the common launches ready, and time them."""
        self.runner.warm_up(self.layout.keys(self.cycle.classes))

    def warm_up_largest(self) -> None:
        """Make the launches ready that take most memory, in which all others fit."""
        self.runner.warm_up(self.layout.largest(), whole=False)

    def admit(self, sequence: Sequence) -> None:
        """The sequence has a slot; the state is written at the next launch."""
        slot, request = sequence.slot, sequence.request
        sequence.mapped = 0
        self._changes[slot] = Admission(list(sequence.ids), request)
        if self.host_drafter is not None:
            self.mirror.set(slot, sequence.ids)
        if self.drafter is not None:
            self.drafter.admit(slot, request)

    def release(self, sequence: Sequence, slot: int, finished: bool) -> None:
        """It has left the slot, in which nothing happens from the next launch on."""
        self._changes[slot] = None
        if self.host_drafter is not None:
            self.mirror.catch_up(slot, sequence.ids)
        if self.drafter is not None:
            self.drafter.release(slot, finished)

    def restart(self) -> None:
        """All slots are free, whatever state they are in."""
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
        parts = []
        exact = False
        for key, given, rows in self.layout.arrange(plan.rows):
            report = self.runner.run(key, given)
            parts.append((rows, self._receive(report)))  # at once: graphs share their memory
            exact = key.layout == EXACT
        silent = [row for row in plan.rows if not row.commits]
        resumed = [row.sequence.slot for row in silent if row.sequence.resumes(row)]
        if resumed and self.cycle.drafter is not None:
            at = send_integers(resumed, self.device)
            wanted = torch.full_like(at, self.cycle.width) if exact else None
            self.cycle.draft(at, wanted, self.cycle.features(resumed) if exact else DRAWN)
        spent = time.perf_counter() - start
        draft, _, verify = self.cycle.times if exact else (0.0, 0.0, 0.0)
        return InFlight(plan.rows, parts, silent, mark(self.device), Times(draft, spent - draft - verify, verify))

    @staticmethod
    def _receive(report: Report) -> Report:
        """The report on its way to the host."""
        noted = None if report.noted is None else tuple(receive(part) for part in report.noted)
        confidence = None if report.confidence is None else receive(report.confidence)
        return Report(receive(report.tokens), receive(report.counts), noted, confidence)  # type: ignore[arg-type]

    def read(self, step: InFlight) -> Iterator[Committed]:
        """What a step did to each row, waiting for it if need be. To be called once."""
        step.arrived()
        for row in step.silent:
            yield Committed(row, [], 0, 0, [])
        for rows, report in step.parts:
            tokens, columns = report.tokens.tolist(), report.counts.t().tolist()
            confidence = report.confidence.tolist() if report.confidence is not None else None
            for i, (row, block, count, drafted, accepted, broken, found) in enumerate(
                zip(rows, tokens, *columns, strict=False)
            ):
                if self.cycle.width:
                    history = row.sequence.history
                    history.learn(drafted, accepted, found)
                    history.confidence = confidence and confidence[i]
                noted = self._logprobs(row, report, i, count) if report.noted is not None else []
                yield Committed(row, block[:count], drafted, accepted, noted, broken > 0)

    @staticmethod
    def _logprobs(row: PlanRow, report: Report, i: int, count: int) -> list[Logprob]:
        top = row.sequence.request.params.logprobs
        if top is None or report.noted is None:
            return []
        chosen, ids, values = (part[i, :count].tolist() for part in report.noted)
        tokens = report.tokens[i, :count].tolist()
        return [
            Logprob(token, value, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
            for token, value, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
        ]

    def draft(self, sequences: list[Sequence], width: int) -> float:
        """Have a drafter on the host draft at most `width` tokens for these sequences, of which every step was read. Returns
        the seconds that it took."""
        if self.host_drafter is None or not sequences:
            return 0.0
        start = time.perf_counter()
        slots = [s.slot for s in sequences]
        for s in sequences:
            self.mirror.catch_up(s.slot, s.ids)
        k = torch.tensor([max(min(width, s.remaining - 1), 0) for s in sequences])
        with torch.inference_mode():
            draft = self.host_drafter.propose(Rows(torch.tensor(slots), k, int(k.max())))
            self.cycle.keep(slots, draft)
        confidence = draft.confidence.tolist() if draft.confidence is not None else [None] * len(slots)
        for s, size, chances in zip(sequences, draft.size.tolist(), confidence, strict=True):
            s.history.at_hand, s.history.confidence = size, chances
        self.waits += bool(width)
        return time.perf_counter() - start
