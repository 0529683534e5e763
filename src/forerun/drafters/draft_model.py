"""Drafts from a smaller model with the target's vocabulary, greedy (point masses) or drawn (with probabilities).

The drafter keeps its own keys and values under the target's page numbers. With the exact layout it computes them when it
drafts, for all tokens that were committed since its last draft. They are not prefix-cached. With the padded layout they keep
pace with the target's: the drafter computes the same prompt chunks, so cached pages hold both. A draft begins with the last two
committed tokens: after a fully accepted draft the drafter has computed neither.

Its drafts have no confidence. The probability of its likeliest token says how often a sampled token agrees; a greedy target
agrees more often, and the policy would verify too little.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import Needs, Observed, Rows, RowState, Stateless
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request
from forerun.verify import noise
from forerun.verify.sampling import SamplingState


class DraftModel(Stateless):
    def __init__(
        self, model: Target, kv: KVCache, state: RowState, sampling: SamplingState, vocab: int, drawn: bool,
        padded: bool, limit: int, budget: int,
    ) -> None:
        """kv: with as many pages as the target's; vocab: only ids below it are drafted; drawn: draw the drafts and give their
        probabilities; limit: the drafter's context; budget: tokens of a forward pass at most. With the padded layout the limit
        is at least the engine's max_model_len, since the device does not check it."""
        self.needs = Needs(True, kv_bytes_per_token=model.kv_bytes_per_token, weight_bytes=model.bytes, pass_tokens=1)
        self._model, self._kv, self._state, self._sampling = model, kv, state, sampling
        self._vocab, self._drawn, self._padded = vocab, drawn, padded
        self._limit, self._budget = limit, budget
        # exact layout, by slot: positions with keys and values; the last draft, and where it began
        self._computed, self._begin = np.zeros((2, len(state.length)), np.int64)
        self._made = np.zeros(state.draft.shape, np.int64)

    def admit(self, slot: int, request: Request) -> None:
        self._computed[slot] = self._begin[slot] = 0

    def observe(self, seen: Observed) -> None:
        batch = seen.batch
        if not self._padded or not (seen.prompts or seen.amended):
            return
        if not seen.prompts:  # other drafts than its own may have been accepted
            at, rows = torch.arange(len(batch.positions), device=seen.slot.device), len(seen.slot)
            row = torch.searchsorted(batch.row_start[1:].long(), at, right=True).clamp(max=rows - 1)
            batch = batch._replace(ids=self._state.tokens[seen.slot[row], batch.positions])
        self._model.forward(batch._replace(logits_at=batch.ids.new_zeros(1)), self._kv)

    def propose(self, rows: Rows) -> Draft:
        state, slot, width = self._state, rows.slot, rows.width
        length = state.length[slot]  # [B]
        size = rows.k.clamp(max=width)
        if not self._padded:
            size = torch.minimum(size, (self._limit - length + 1).clamp(min=0))
            width = int(size.max()) if len(size) else 0
            self._forget_wrong(slot.numpy())
        tokens = slot.new_zeros(len(slot), width)
        probs = torch.zeros(len(slot), width, self._sampling.vocab, device=slot.device) if self._drawn and width else None
        u = noise.block_noise(self._sampling.seed[slot], length, width, noise.DRAFT)  # [B,K]
        for i in range(width):
            on = slice(None) if self._padded else (size > i).nonzero()[:, 0]  # rows that still draft
            logits = self._logits(slot[on], length[on] + i, rows.k[on], i == 0)
            known = logits[:, : self._vocab]
            if self._drawn or rows.features.shaped:
                known = F.pad(known, (0, self._sampling.vocab - self._vocab), value=-torch.inf)
            shaped = self._sampling.shape(known, slot[on], length[on] + i, rows.features)
            if probs is None:
                tokens[on, i] = shaped.argmax(-1)
            else:
                probs[on, i] = q = self._sampling.probs(shaped, slot[on], rows.features)
                tokens[on, i] = noise.draw(q, u[on, i])
            state.tokens[slot[on], length[on] + i] = tokens[on, i]
        if not self._padded:
            at, drafted = slot.numpy(), size.numpy()
            self._computed[at] = np.where(drafted > 0, length.numpy() + drafted - 1, self._computed[at])
            self._begin[at], self._made[at, :width] = length.numpy(), tokens.numpy()
        return Draft(tokens, size, probs)

    def _forget_wrong(self, slot: np.ndarray) -> None:
        """Count keys and values only up to the first token that differs from the last draft: a grammar may have put others in
        its place."""
        begin = self._begin[slot]
        there = self._state.tokens.numpy()[slot[:, None], begin[:, None] + np.arange(self._made.shape[1])]
        right = (there == self._made[slot]).cumprod(1).sum(1)
        self._computed[slot] = np.minimum(self._computed[slot], begin + right)

    def _logits(self, slot: Tensor, length: Tensor, k: Tensor, first: bool) -> Tensor:
        """Logits [B,V] after each row's last token. length: [B], tokens with drafts; first: they are for the first token of a
        draft, so committed tokens are computed too."""
        if not self._padded:
            at, ends = slot.numpy(), length.numpy()
            return self._catch_up(at, np.minimum(self._computed[at], ends - 2).clip(0) if first else ends - 1, ends)
        state, count = self._state, 2 if first else 1
        positions = ((length - count)[:, None] + torch.arange(count, device=slot.device)).clamp(min=0)  # [B,1 or 2]
        start = torch.arange(0, positions.numel() + 1, count, dtype=torch.int32, device=slot.device)
        last = torch.arange(count - 1, positions.numel(), count, device=slot.device)
        ids = state.tokens[slot[:, None], positions]
        table = torch.where((k > 0)[:, None], state.block_table[slot], 0)  # inactive rows write to the dummy page
        kernels = self._model.kernels.bounded(count, state.tokens.shape[1])
        batch = Batch(ids.flatten(), positions.flatten(), start, table, last)
        return self._model.forward(batch, self._kv, kernels=kernels).logits

    def _catch_up(self, slot: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Tensor:
        """Compute the tokens begin .. end - 1 of these slots, on the CPU, in passes within the budget; logits as above."""
        count, share = end - begin, max(self._budget // len(slot), 1)
        while (count > share).any():
            part = np.minimum(count - 1, share)
            some = part > 0
            self._model.forward(self._state.batch(slot[some], begin[some], part[some], np.zeros(0, np.int64)), self._kv)
            begin, count = begin + part, count - part
        return self._model.forward(self._state.batch(slot, begin, count, np.cumsum(count) - 1), self._kv).logits
