"""The fast form of chain.py for CUDA: in decode launches with greedy drafts, all operations around the head's products and
attention are in a few Triton kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from forerun.drafters import Observed, Rows
from forerun.drafters.chain import ChainDrafter
from forerun.kernels import Batch, cuda_heads
from forerun.kernels.cuda import CudaKernels
from forerun.types import Draft


class FusedChain(ChainDrafter):
    """For a head of one module. Prompts, drawn drafts and drafts for rows that were not just observed take the other form."""

    _observed: tuple[Tensor, Tensor, Tensor] | None = None  # of the last decode launch: slots [R], features [R,H], block table

    def observe(self, seen: Observed) -> None:
        self._observed = None
        if seen.prompts or self._drawn:
            super().observe(seen)
            return
        head, batch = self._head.with_kernels(seen.kernels), seen.batch
        w, pdl = head.weights, self._pdl
        tokens, zero = self._state.tokens, head.config.zero_first
        given = (seen.slot, batch.positions, batch.row_start, seen.committed, tokens, w.embedding, seen.width, zero)
        embedded, last = cuda_heads.ahead(*given, pdl)
        batch = batch._replace(logits_at=None)
        output = head.run(0, embedded, head.encode(seen.hidden), batch, self._kv.keys[0], self._kv.values[0])
        feature = cuda_heads.keep_last(head.hand_on(0, output), last, seen.slot, self._feature[0], pdl)
        self._observed = (seen.slot, feature, batch.block_table)

    def propose(self, rows: Rows) -> Draft:
        if self._observed is None or self._observed[0] is not rows.slot or not rows.width or rows.features.shaped:
            return super().propose(rows)
        slot, feature, table = self._observed
        head = self._head.with_kernels(self._head.kernels.bounded(1, self._state.tokens.shape[1]))
        w = head.weights
        tokens = slot.new_empty(len(slot), rows.width)
        chances = torch.empty(tokens.shape, device=slot.device)
        start = torch.arange(len(slot) + 1, dtype=torch.int32, device=slot.device)
        length, pdl = self._state.length, self._pdl
        embedded, at = cuda_heads.pick(head.logits(0, feature), w.ids, slot, length, w.embedding, tokens, chances, 0, pdl)
        for i in range(1, rows.width):
            batch = Batch(at, at, start, table, None)
            feature = head.hand_on(0, head.run(0, embedded, feature, batch, self._kv.keys[0], self._kv.values[0]))
            logits = head.logits(0, feature)
            embedded, at = cuda_heads.pick(logits, w.ids, slot, length, w.embedding, tokens, chances, i, pdl)
        return Draft(tokens, rows.k, None, chances)

    @property
    def _pdl(self) -> int:
        return cast(CudaKernels, self._head.kernels).pdl
