"""Steps of fixed shape, for CUDA: every row computes k + 1 positions whatever it drafted, nothing waits for the host, and
the host reads a step's verdict after it has launched the next one. The same parts as step.py, in a different order,
since the draft of the next step is made at the end of this one: verify -> commit -> draft.

Here is the host's side: which shape a step has, who comes and goes, and what is read. What a step does is body.py's. Also
runs without CUDA, one operation after the other: the twin that the tests compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from forerun.device import mark, receive, send, send_integers
from forerun.drafters import Rows
from forerun.engine.body import GREEDY, Body, Key, PromptKey, PromptSizes, Report, shared_drafts, unknown_cost
from forerun.engine.policy import Chances, Policy, step_widths
from forerun.engine.scheduler import Plan, PlanRow, Sequence, new_pages
from forerun.engine.slots import Slots
from forerun.engine.step import Committed, Times
from forerun.types import Logprob, Request
from forerun.verify.sampling import Features


class Arrival(NamedTuple):
    """A request that takes a slot: with the committed tokens ids [n] int64, which may be more than its prompt."""

    ids: np.ndarray
    request: Request


class Decoding(NamedTuple):
    """The rows of a step that decode, as the body takes them, padded up to `lines`; shared: what so many may draft together."""

    rows: list[PlanRow]
    lines: int
    slot: list[int]
    k: list[int]
    chances: list[Chances]
    asked: tuple[Features, int]
    shared: tuple[int, ...]


class FixedFlight:
    """A step on its way: rows with their reports, which are in host memory once `arrived` returns, and the rows that were
    in the middle of a prompt. drafts: whether anything is ever drafted, so that there are chances to learn."""

    def __init__(
        self,
        parts: list[tuple[list[PlanRow], Report]],
        silent: list[PlanRow],
        arrived: Callable[[], None],
        times: Times,
        drafts: bool,
    ) -> None:
        self.times, self._drafts = times, drafts
        self._parts, self._silent, self._arrived = parts, silent, arrived

    def read(self) -> Iterator[Committed]:
        self._arrived()
        for row in self._silent:
            yield Committed(row, [], 0, 0, [])
        for rows, report in self._parts:
            columns = report.counts.t().tolist()
            for i, (row, tokens, count, drafted, accepted, broken, found) in enumerate(
                zip(rows, report.tokens.tolist(), *columns, strict=False)
            ):
                if self._drafts:
                    row.sequence.chances.learn(drafted, accepted, found)
                noted = self._logprobs(row, report, i, count) if report.noted is not None else []
                yield Committed(row, tokens[:count], drafted, accepted, noted, broken > 0)

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


class FixedStep:
    """Makes the body's steps, one ahead of what the host has read. A drafter on the host has to see a step before it can
    draft for the next: then every step is read at once, and `waits` counts that."""

    def __init__(
        self,
        body: Body,
        policy: Policy,
        width: int,
        mirror: Slots,
        sizes: tuple[int, ...],
        run: Callable[..., Report] | None = None,
        cost: Callable[[int, int, int | None], float | None] = unknown_cost,
        prompt_sizes: PromptSizes | None = None,
    ) -> None:
        """width: drafts of a row at most. mirror: slots on the host, for a drafter there. sizes: how many rows a decode step
        may have, ascending (what runs is padded up to one of them). run: makes a step or launches prompts, Graphs.run on CUDA;
        None runs the body as it is. cost(rows, width, drafts): milliseconds of such a step, None if not known. prompt_sizes:
        what prompts are padded to, None: not at all."""
        self.body, self.policy, self.width, self.mirror, self.sizes = body, policy, width, mirror, sizes
        self.widths = step_widths(width)
        self.prompt_sizes = prompt_sizes
        self._drafter = body.drafter if body.drafter is not None else body.host_drafter
        self.lag = 0 if body.host_drafter is not None else 1
        self.waits = 0
        self.device = body.slots.length.device
        self.nobody = len(body.slots.length) - 1  # the slot of the padding
        self._run, self._cost = run or self._eager, cost
        self._changes: dict[int, Arrival | None] = {}  # slots given (or left, None) since the last launch
        self._last: tuple[list[Sequence], tuple[Features, int]] = ([], (GREEDY, -1))
        self._decoding = Decoding([], 0, [], [], [], (GREEDY, -1), ())

    def admit(self, sequence: Sequence) -> None:
        """The sequence has a slot: written at the next launch, with all others."""
        slot, request = sequence.slot, sequence.request
        sequence.laid = 0
        self._changes[slot] = Arrival(np.array(sequence.ids, dtype=np.int64), request)
        if self.body.host_drafter is not None:
            self.mirror.set(slot, sequence.ids)
        if self._drafter is not None:
            self._drafter.admit(slot, request)

    def release(self, sequence: Sequence, slot: int, finished: bool) -> None:
        """It has left the slot, where nothing is to happen from the next launch on."""
        self._changes[slot] = None
        if self.body.host_drafter is not None:
            self.mirror.catch_up(slot, sequence.ids)
        if self._drafter is not None:
            self._drafter.release(slot, finished)

    def restart(self) -> None:
        """All slots are free, whatever state they are in."""
        self._changes = {}
        self._last = ([], (GREEDY, -1))
        self._decoding = Decoding([], 0, [], [], [], (GREEDY, -1), ())
        self.body.lives.alive.fill_(False)
        if self._drafter is not None:
            self._drafter.restart()

    def _settle(self) -> None:
        """Write who has come and gone since the last launch. Only the last change of a slot counts: nothing ran in between."""
        if not self._changes:
            return
        arrivals = {slot: one for slot, one in self._changes.items() if one is not None}
        gone = [slot for slot in self._changes if slot not in arrivals]
        self._changes = {}
        lives, slots = self.body.lives, self.body.slots
        width, most = slots.tokens.shape[1], lives.stop_ids.shape[1]
        ids = [one.ids for one in arrivals.values()]
        requests = [one.request for one in arrivals.values()]
        stops = [([*one.stop_ids] + [-1] * most)[:most] for one in requests]  # the host looks for any others
        parts = [
            np.array(gone, dtype=np.int64),
            np.array(list(arrivals), dtype=np.int64),
            np.array([len(one) for one in ids], dtype=np.int64),
            np.array([len(one.prompt_ids) + one.max_tokens for one in requests], dtype=np.int64),
            np.array(stops, dtype=np.int64).ravel(),
            *(slot * width + np.arange(len(one)) for slot, one in zip(arrivals, ids, strict=True)),
            *ids,
        ]
        total = sum(map(len, ids))
        sizes = [*(len(part) for part in parts[:5]), total, total]
        left, slot, length, limit, stop_ids, at, tokens = send(np.concatenate(parts), self.device).split(sizes)
        if gone:
            lives.alive.index_fill_(0, left, False)
        if arrivals:
            slots.give(slot, length, at, tokens)
            lives.give(slot, limit, stop_ids.view(-1, most))
            self.body.sampling.give(slot, arrivals, requests)

    def _draft_on_host(self, rows: list[PlanRow]) -> None:
        """Have the host's drafter draft for these rows, all of which have been read, and send the drafts."""
        assert self.body.host_drafter is not None
        for row in rows:
            self.mirror.catch_up(row.sequence.slot, row.sequence.ids)
        slot = [row.sequence.slot for row in rows]
        k = torch.tensor([row.k for row in rows])
        draft = self.body.host_drafter.propose(Rows(torch.tensor(slot), k, int(k.max())))
        at, lives = send_integers(slot, self.device), self.body.lives
        lives.draft[at, : draft.tokens.shape[1]] = send(draft.tokens.numpy(), self.device)
        lives.draft_size[at] = send(draft.size.numpy(), self.device)
        for row, size in zip(rows, draft.size.tolist(), strict=True):
            row.sequence.chances.found = size
        self.waits += 1

    @torch.inference_mode()
    def launch(self, plan: Plan) -> FixedFlight:
        start = time.perf_counter()
        self._settle()
        self.body.slots.lay(new_pages(plan.rows))
        decoding = [row for row in plan.rows if row.pending == 1 and row.samples]
        prompts = [row for row in plan.rows if row.pending != 1 or not row.samples] if len(decoding) < len(plan.rows) else []
        parts: list[tuple[list[PlanRow], Report]] = []
        if decoding and self.body.host_drafter is not None and any(row.k for row in decoding):
            self._draft_on_host(decoding)
        if decoding:
            if decoding != self._decoding.rows:
                self._decoding = self._line_up(decoding)
            _, lines, slot, k, chances, asked, shared = self._decoding
            # what is known of the rows is a step old
            most, cost = k[: len(decoding)], partial(self._cost, lines)
            width, drafts, shares = self.policy.shape(self.widths, shared, chances, most, cost)
            k = shares + k[len(decoding) :]
            parts.append((decoding, self._receive(self._run(Key(lines, width, *asked, drafts), slot, k))))
        if prompts:  # the last report is on its way down: graphs share their memory
            parts.append(self._prefill(prompts))
        silent = [row for row in prompts if not row.samples]
        resumed = [row.sequence.slot for row in silent if row.sequence.resumes(row)]
        if resumed and self.body.drafter is not None:
            self.body.draft(send_integers(resumed, self.device))
        times = Times(0.0, time.perf_counter() - start, 0.0)
        return FixedFlight(parts, silent, mark(self.device), times, self.width > 0)

    def _line_up(self, rows: list[PlanRow]) -> Decoding:
        """Done once as long as the same rows come again, as they do while nobody joins, ends or comes near its limit."""
        lines = next(n for n in self.sizes if n >= len(rows))
        padding = lines - len(rows)
        slot = [row.sequence.slot for row in rows] + [self.nobody] * padding
        k = [row.k for row in rows] + [0] * padding
        chances = [row.sequence.chances for row in rows]
        return Decoding(rows, lines, slot, k, chances, self._asked(rows), self.shared_drafts(lines))

    def shared_drafts(self, lines: int) -> tuple[int, ...]:
        """For steps of so many lines, what they may draft together where that is less than the width for each."""
        return shared_drafts(lines, self.width) if self.width and self.body.lives.draft_probs is None else ()

    def _eager(self, key: Key | PromptKey, *given: list[int]) -> Report:
        return self.body.launch(key, send_integers(list(given), self.device))

    def _prefill(self, rows: list[PlanRow]) -> tuple[list[PlanRow], Report]:
        """Chunks of prompts, and the first tokens of those that are through: these come first, as the report's reader
        wants them."""
        ended = [row for row in rows if row.samples]
        rows = ended + [row for row in rows if not row.samples]
        tokens, lines = sum(row.pending for row in rows), len(rows)
        if self.prompt_sizes is not None:
            tokens, lines = self.prompt_sizes.fit(tokens, lines)
        nothing = [0] * (lines - len(rows))
        slot = [row.sequence.slot for row in rows] + [self.nobody] * len(nothing)
        begin = [row.sequence.computed for row in rows] + nothing
        count = [row.pending for row in rows] + nothing
        through = [int(row.samples) for row in rows] + nothing
        key = PromptKey(tokens, lines, *self._asked(ended))
        return ended, self._receive(self._run(key, slot, begin, count, through))

    def _asked(self, rows: list[PlanRow]) -> tuple[Features, int]:
        """What these rows' requests ask for: the sampling features they use, and how many logprobs (a few sizes only).
        Remembered until other rows come: steps of the same rows follow each other."""
        sequences = [row.sequence for row in rows]
        if sequences != self._last[0]:
            wanted = [top for row in rows if (top := row.sequence.request.params.logprobs) is not None]
            top = next(n for n in (-1, 20, 100) if n >= max(wanted, default=-1))
            self._last = (sequences, (self.body.features([s.slot for s in sequences]), top))
        return self._last[1]

    @staticmethod
    def _receive(report: Report) -> Report:
        """The report on its way to the host."""
        noted = None if report.noted is None else tuple(receive(part) for part in report.noted)
        return Report(receive(report.tokens), receive(report.counts), noted)  # type: ignore[arg-type]
