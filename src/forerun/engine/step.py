"""One step of the engine: draft -> target forward -> verify -> commit, for a batch of rows, each with its own k; plain
decoding is k = 0. Here a token is made. Which rows, and how many tokens each may draft, is the scheduler's; where a text
ends is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.drafters import Drafter, Rows
from forerun.engine.scheduler import Plan, PlanRow, Sequence, new_pages
from forerun.engine.slots import Slots
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Logprob, Verdict
from forerun.verify.accept import accept_block, accept_drawn, accept_matching, accept_ratio
from forerun.verify.sampling import BROKEN, SamplingState, logprobs


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


class Times(NamedTuple):
    """Host seconds of one step's parts."""

    draft: float
    forward: float
    verify: float


class Flight(Protocol):
    """A step on its way."""

    def read(self) -> Iterable[Committed]:
        """What it did to each row, once that is known. To be called once."""

    @property
    def times(self) -> Times: ...


class Done(NamedTuple):
    """A step that was read as it was made."""

    committed: list[Committed]
    times: Times

    def read(self) -> list[Committed]:
        return self.committed


class Layout(NamedTuple):
    """A step's rows as the flat tokens of a forward pass. batch: what the target computes; slot, position: [N], of each
    position that is verified, whose token is chosen and where that token will stand; cell: [N], its place in a padded
    [B,K+1] block of the rows that sample; longest: the longest history among them."""

    batch: Batch
    slot: Tensor
    position: Tensor
    cell: Tensor
    longest: int


class RaggedStep:
    """Steps whose rows are laid end to end, each as long as it is, and read at once: the host makes and sees every one."""

    lag = 0

    def __init__(
        self,
        target: Target,
        kv: KVCache,
        slots: Slots,
        sampling: SamplingState,
        drafter: Drafter | None,
        drawn: bool,
        block: bool,
    ) -> None:
        """drawn: drafts come with the probabilities that they were drawn from; block: block verification for them."""
        self.target, self.kv, self.slots, self.sampling, self.drafter = target, kv, slots, sampling, drafter
        self._drawn, self._accept = drawn, accept_block if block else accept_ratio

    def restart(self) -> None:
        """All slots are free, whatever state they are in."""
        if self.drafter is not None:
            self.drafter.restart()

    def admit(self, sequence: Sequence) -> None:
        self.slots.set(sequence.slot, sequence.ids)
        sequence.laid = 0
        self.sampling.set(sequence.slot, sequence.request)
        if self.drafter is not None:
            self.drafter.admit(sequence.slot, sequence.request)

    def release(self, sequence: Sequence, slot: int, finished: bool) -> None:
        self.slots.length[slot] = len(sequence.ids)  # what ran past a stop is not history
        if self.drafter is not None:
            self.drafter.release(slot, finished)

    @torch.inference_mode()
    def compute(self, positions: int) -> None:
        """A forward pass of the dummy slot over so many positions, to be timed."""
        dummy, first = np.array([len(self.slots.length) - 1]), np.array([0])
        self.target.forward(self.slots.batch(dummy, first, np.array([positions]), np.arange(positions)), self.kv)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Done:
        start = time.perf_counter()
        self.slots.lay(new_pages(plan.rows))
        sampling_rows = [row for row in plan.rows if row.samples]
        rows = self._rows(sampling_rows)
        draft = self._draft(rows)
        drafted = time.perf_counter()

        layout = self._layout(plan.rows, draft)
        logits = self.target.forward(layout.batch, self.kv).logits  # [N,V]
        computed = time.perf_counter()

        committed = [Committed(row, [], 0, 0, []) for row in plan.rows if not row.samples]
        if sampling_rows:
            verdict = self._verify(logits, layout, draft, rows)
            self.slots.commit(rows.slot, verdict.tokens, verdict.count)
            committed += self._read(sampling_rows, draft, verdict, logits)
        return Done(committed, Times(drafted - start, computed - drafted, time.perf_counter() - computed))

    def _rows(self, rows: list[PlanRow]) -> Rows:
        device = self.slots.length.device
        slot = torch.tensor([row.sequence.slot for row in rows], dtype=torch.int64, device=device)
        k = torch.tensor([row.k for row in rows], dtype=torch.int64, device=device)
        return Rows(slot, k, max((row.k for row in rows), default=0))

    def _draft(self, rows: Rows) -> Draft:
        """What the drafter proposes, laid behind the committed tokens of its rows."""
        if self.drafter is None or rows.width == 0:
            nothing = rows.slot.new_zeros(len(rows.slot), 0)
            return Draft(nothing, torch.zeros_like(rows.slot))
        draft = self.drafter.propose(rows)
        self.slots.write_drafts(rows.slot, draft.tokens)
        return draft

    def _layout(self, rows: list[PlanRow], draft: Draft) -> Layout:
        """Lay the rows end to end, without padding: each its pending tokens, then its drafts."""
        device, width = draft.tokens.device, draft.tokens.shape[1]
        slot = np.array([row.sequence.slot for row in rows])
        begin = np.array([row.sequence.computed for row in rows])
        pending = np.array([row.pending for row in rows])
        samples = np.array([row.samples for row in rows])
        size = np.zeros(len(rows), np.int64)
        size[samples] = draft.size.cpu().numpy()
        count = pending + size  # [R] tokens of each row

        verified = np.where(samples, size + 1, 0)  # [R] positions whose token is chosen: a row's last ones
        row = np.repeat(np.arange(len(rows)), verified)  # [N]
        offset = np.arange(len(row)) - (np.cumsum(verified) - verified)[row]  # [N] 0 .. size
        at = (np.cumsum(count) - count + pending - 1)[row] + offset  # [N] place in the flat tokens
        position = (begin + pending)[row] + offset  # [N] where the chosen token will stand
        cell = (np.cumsum(samples) - 1)[row] * (width + 1) + offset
        return Layout(
            self.slots.batch(slot, begin, count, at),
            torch.from_numpy(slot[row]).to(device),
            torch.from_numpy(position).to(device),
            torch.from_numpy(cell).to(device),
            int(position.max(initial=0)),
        )

    def _verify(self, logits: Tensor, layout: Layout, draft: Draft, on: Rows) -> Verdict:
        """The target's distribution at every position of the block, and what it makes of the draft."""
        rows, width = draft.tokens.shape
        features = self.sampling.features(set(layout.slot.tolist()))
        shaped = self.sampling.shape(logits, layout.slot, layout.position, features, layout.longest)
        if not self._drawn:
            choice = logits.new_zeros(rows * (width + 1), dtype=torch.int64)
            choice[layout.cell] = self.sampling.choose(shaped, layout.slot, layout.position, features)
            return accept_matching(choice.view(rows, width + 1), draft)
        target = logits.new_zeros(rows * (width + 1), logits.shape[1])
        target[layout.cell] = self.sampling.probs(shaped, layout.slot, features)
        broken = torch.zeros(rows * (width + 1), dtype=torch.bool, device=logits.device)
        broken[layout.cell] = self.sampling.broken(shaped)
        seed, start = self.sampling.seed[on.slot], self.slots.length[on.slot]
        return accept_drawn(self._accept, target.view(rows, width + 1, -1), broken.view(rows, -1), draft, seed, start)

    def _read(self, rows: list[PlanRow], draft: Draft, verdict: Verdict, logits: Tensor) -> list[Committed]:
        """The verdict on the host, with logprobs where they were asked for."""
        size, count = draft.size.tolist(), verdict.count.tolist()
        committed, at = [], 0
        for i, (row, tokens) in enumerate(zip(rows, verdict.tokens.tolist(), strict=True)):
            tokens = tokens[: count[i]]
            broken = tokens[-1] == BROKEN
            if broken:
                tokens.pop()
            top = row.sequence.request.params.logprobs
            noted: list[Logprob] = []
            if top is not None and tokens:
                chosen, ids, values = logprobs(logits[at : at + len(tokens)], verdict.tokens[i, : len(tokens)], top)
                noted = [
                    Logprob(token, value, tuple(zip(top_ids, top_values, strict=True)))
                    for token, value, top_ids, top_values in zip(
                        tokens, chosen.tolist(), ids.tolist(), values.tolist(), strict=True
                    )
                ]
            committed.append(Committed(row, tokens, size[i], count[i] - 1, noted, broken))
            row.sequence.chances.learn(size[i], count[i] - 1, None)
            at += size[i] + 1
        return committed
