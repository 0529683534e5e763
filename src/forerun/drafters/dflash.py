"""Drafts from a head that makes a whole block in one pass: DFlash (heads/block.py), greedy (point masses) or drawn.

`observe` stores the keys and values of all committed positions but the last, made from the target's states. A draft is one pass
over the last committed token and num_speculative_tokens mask tokens, also for rows that want fewer, since the tokens of a block
attend to each other. The output at a mask token gives the token at its place. Its distribution does not depend on the other
drafted tokens, so each is drawn from its own, and these are the probabilities of the draft.
"""

from __future__ import annotations

import torch

from forerun.drafters import Needs, Observed, Rows, RowState, Stateless
from forerun.drafters.chain import window
from forerun.drafters.choice import Choice
from forerun.heads.block import Block
from forerun.kernels import Batch
from forerun.models.decoder import KVCache
from forerun.types import Draft
from forerun.verify.sampling import SamplingState


class DFlash(Stateless):
    def __init__(
        self, head: Block, kv: KVCache, state: RowState, sampling: SamplingState, drawn: bool, padded: bool
    ) -> None:
        """kv: a layer for each of the head's, with as many pages as the target's; drawn: draw the drafts and give their
        probabilities."""
        width = state.draft.shape[1]
        self.needs = Needs(True, head.config.states, head.kv_bytes_per_token, head.bytes, pass_tokens=width)
        self._head, self._kv, self._state, self._padded = head, kv, state, padded
        self._sampling, self._drawn = sampling, drawn

    def observe(self, seen: Observed) -> None:
        at = window(seen, self._state, self._padded)
        if len(at.batch.positions):
            states = seen.hidden if at.taken is None else tuple(state[at.taken] for state in seen.hidden)
            self._head.with_kernels(seen.kernels).context(states, at.batch, self._kv.keys, self._kv.values)

    def propose(self, rows: Rows) -> Draft:
        state, head, width = self._state, self._head, self._state.draft.shape[1]
        length, size = state.length[rows.slot], rows.k.clamp(max=width)
        chosen = Choice(rows._replace(width=width), length, state, self._sampling, head.kernels, head.weights.ids, self._drawn)
        if not rows.width or (not self._padded and not bool(size.any())):
            return chosen.draft(size)
        count, block = len(length), width + 1
        positions = (length - 1)[:, None] + torch.arange(block, device=length.device)  # [B,K+1]
        ids = torch.full_like(positions, head.config.mask_id)
        ids[:, 0] = state.tokens[rows.slot, length - 1]
        start = torch.arange(0, count * block + 1, block, dtype=torch.int32, device=length.device)
        table = torch.where((rows.k > 0)[:, None], state.block_table[rows.slot], 0)  # rows without drafts: the dummy page
        batch = Batch(ids.flatten(), positions.flatten(), start, table, None)
        run = head.with_kernels(head.kernels.bounded(block, state.tokens.shape[1]))
        x = run.run(run.kernels.embed(batch.ids, run.weights.embedding), batch, self._kv.keys, self._kv.values)
        logits = run.logits(x.view(count, block, -1)[:, 1:].flatten(0, 1).contiguous())
        chosen.take_all(logits.view(count, width, -1))
        return chosen.draft(size)
