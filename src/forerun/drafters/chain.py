"""Drafts from a head that makes one token after the other: EAGLE, EAGLE-3 and MTP (heads/chain.py), greedy (point masses) or
drawn (with probabilities).

The head's entry at position p joins the target's states at p with token p + 1. Both are known for all committed positions but
the last, so `observe` computes these entries from what the target computed, in prompts, decode and verify steps alike. They
overwrite entries that drafting made from the head's own output. The output at the second last committed position gives the
first drafted token; each further token takes a pass of one position for each row.

A head of several modules (MTP) uses one module for each drafted token, and the last one again behind that. Module i joins the
output of module i - 1 at position p - 1 with token p + 1. So all modules have entries for the same positions, and a drafted
token makes an entry in each module behind the first. The outputs of all modules but the last are kept under the target's page
numbers, since the next launch begins with the position behind them. Module i has no feature at the first i positions of a
sequence; it takes zeros there, where DeepSeek-V3's training has no entry at all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.drafters import Needs, Observed, Rows, RowState, Stateless
from forerun.drafters.choice import Choice
from forerun.heads.chain import Chain
from forerun.kernels import Batch
from forerun.models.decoder import KVCache
from forerun.types import Draft
from forerun.verify.sampling import SamplingState


class Window(NamedTuple):
    """The positions of a launch for which a head computes entries, as its own batch. batch: T tokens of R rows; the ids are
    those one position ahead; row: [T], the row of each token; last: [R], the index of each row's last committed position among
    the T (any, if it has none); taken: the indices of the T among the launch's tokens, None: they are all of them."""

    batch: Batch
    row: Tensor
    last: Tensor
    taken: Tensor | None


def window(seen: Observed, state: RowState, padded: bool) -> Window:
    """Of the exact layout the committed positions; of the padded layout all. Entries of rejected drafts are overwritten by the
    next launch."""
    batch, slot = seen.batch, seen.slot
    if padded:
        at, rows = torch.arange(len(batch.positions), device=slot.device), len(slot)
        if seen.width is not None:
            row = at // seen.width
        else:
            row = torch.searchsorted(batch.row_start[1:], at, right=True).clamp(max=rows - 1)
        ids = state.tokens[slot[row], batch.positions + 1]
        last = (batch.row_start[:-1] + seen.true - 1).clamp(min=0)
        return Window(batch._replace(ids=ids, logits_at=None), row, last, None)
    true, begin = seen.true.numpy(), batch.row_start.numpy()[:-1]
    end, rows_of = np.cumsum(true), np.repeat(np.arange(len(true)), true)
    taken = torch.from_numpy(np.arange(len(rows_of)) + (begin - end + true)[rows_of])
    row = torch.from_numpy(rows_of)
    positions = batch.positions[taken]
    start = torch.from_numpy(np.append(0, end).astype(np.int32))
    own = Batch(state.tokens[slot[row], positions + 1], positions, start, batch.block_table, None)
    return Window(own, row, torch.from_numpy((end - 1).clip(0)), taken)


class ChainDrafter(Stateless):
    def __init__(
        self, head: Chain, kv: KVCache, state: RowState, sampling: SamplingState, drawn: bool, padded: bool
    ) -> None:
        """kv: a layer for each module, with as many pages as the target's; drawn: draw the drafts and give their
        probabilities."""
        device, hidden = state.length.device, head.config.decoder.hidden_size
        self._head, self._kv, self._state, self._sampling = head, kv, state, sampling
        self._drawn, self._padded = drawn, padded
        count, dtype = len(head.weights.modules), head.weights.dtype
        # [modules,S,H]: what each module handed on at the second last committed position of each slot
        self._feature = torch.zeros(count, len(state.length), hidden, dtype=dtype, device=device)
        # the same of all positions, [pages, block_size, H], for all modules but the last
        shape, kept = (kv.pages, kv.block_size, hidden), (count - 1) * hidden * dtype.itemsize
        self._outputs = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count - 1)]
        self.needs = Needs(True, head.config.states, head.kv_bytes_per_token + kept, head.bytes, pass_tokens=1)

    def observe(self, seen: Observed) -> None:
        at = window(seen, self._state, self._padded)
        batch = at.batch
        if not len(batch.positions):
            return
        head = self._head.with_kernels(seen.kernels)
        states = seen.hidden if at.taken is None else tuple(state[at.taken] for state in seen.hidden)
        feature, embedded = head.encode(states), head.embed(batch.ids, batch.positions)  # [T,H]
        for i in range(len(self._feature)):
            feature = head.hand_on(i, head.run(i, embedded, feature, batch, self._kv.keys[i], self._kv.values[i]))
            self._feature[i, seen.slot] = feature[at.last]
            if i < len(self._outputs):
                feature = self._behind(self._outputs[i], feature, at)

    def _behind(self, outputs: Tensor, output: Tensor, at: Window) -> Tensor:
        """Keep a module's output [T,H], and give that of one position before each, zeros before position 0."""
        batch, size = at.batch, self._kv.block_size
        there = torch.arange(len(output), device=output.device) < batch.row_start[-1]  # no padding
        for positions, write in ((batch.positions, True), (batch.positions - 1, False)):
            at_page = (positions.clamp(min=0) // size)[:, None]
            page = torch.where(there, batch.block_table[at.row].gather(1, at_page)[:, 0], 0).long()
            if write:
                outputs[page, positions % size] = output
        return torch.where((positions < 0)[:, None], 0, outputs[page, positions % size])

    def propose(self, rows: Rows) -> Draft:
        head, length, size = self._head, self._state.length[rows.slot], rows.k.clamp(max=rows.width)
        chosen = Choice(rows, length, self._state, self._sampling, head.kernels, head.weights.ids, self._drawn)
        table = torch.where((rows.k > 0)[:, None], self._state.block_table[rows.slot], 0)  # rows without drafts: the dummy page
        on: Tensor | slice = slice(None)  # the rows that still draft
        outputs = self._feature[0, rows.slot][:, None]  # [B,c,H] of the last c positions, from the module of the last token
        for i in range(rows.width):
            if i and rows.going is not None:
                size = torch.where(rows.going(i, chosen.tokens, chosen.chances), size, size.clamp(max=i))
            if not self._padded and not bool((going := size[on] > i).all()):
                on = going.nonzero()[:, 0] if isinstance(on, slice) else on[going]
                outputs = outputs[going]
                if not len(on):
                    break
            module = min(i, len(self._feature) - 1)
            if i:
                outputs = self._pass(module, i, rows.slot[on], length[on], chosen.tokens[on, :i], outputs, table[on])
            chosen.take(i, head.logits(module, outputs[:, -1].contiguous()), on)
        return chosen.draft(size)

    def _pass(
        self, module: int, i: int, slot: Tensor, length: Tensor, tokens: Tensor, outputs: Tensor, table: Tensor
    ) -> Tensor:
        """The outputs [B,c,H] of a module at the last c positions before drafted token i. tokens: [B,i], drafted so far;
        outputs: those of the token before; table: [B,pages], the rows' pages."""
        state, head = self._state, self._head
        if i > module:  # the last module again, or the only one
            feature = outputs[:, -1:]
        else:
            feature = outputs if i == 1 else torch.cat((self._feature[module - 1, slot][:, None], outputs), 1)
        count = feature.shape[1]
        positions = ((length - 1 + i - count)[:, None] + torch.arange(count, device=slot.device)).flatten()  # [B*c]
        ids = tokens[:, i - count :].flatten()
        start = torch.arange(0, len(ids) + 1, count, dtype=torch.int32, device=slot.device)
        run = head.with_kernels(head.kernels.bounded(count, state.tokens.shape[1]))
        batch = Batch(ids, positions, start, table, None)
        keys, values = self._kv.keys[module], self._kv.values[module]
        output = run.run(module, run.embed(ids, positions), feature.flatten(0, 1), batch, keys, values)
        return run.hand_on(module, output).view_as(feature)
