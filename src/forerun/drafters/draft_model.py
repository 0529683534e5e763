"""Drafts from a smaller model with the target's vocabulary, greedy (point masses) or sampled (with probabilities).

It keeps keys and values of its own under the target's page numbers. They are computed when a draft is asked for, for
all that was committed since: after 0 .. k accepted tokens alike, and not at all while nothing is drafted. They are not
prefix-cached: a sequence that starts on cached pages has its prompt computed by the drafter anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.drafters import Needs, Rows
from forerun.engine.slots import Slots
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request
from forerun.verify import noise
from forerun.verify.sampling import SamplingState


class DraftModel:
    def __init__(
        self,
        model: Target,
        kv: KVCache,
        slots: Slots,
        sampling: SamplingState,
        vocab: int,
        limit: int,
        budget: int,
        sampled: bool,
    ) -> None:
        """kv: as many pages as the target's; vocab: ids from here on are never drafted; limit: the drafter's context;
        budget: tokens of one of its forward passes; sampled: draw the drafts and say from what."""
        self.needs = Needs(kv_layers=model.config.layers)
        self._model, self._kv, self._slots, self._sampling = model, kv, slots, sampling
        self._vocab, self._limit, self._budget, self._sampled = vocab, limit, budget, sampled
        self._computed = np.zeros(len(slots.length), np.int64)  # per slot: positions with valid keys and values

    def admit(self, slot: int, request: Request) -> None:
        self._computed[slot] = 0

    def release(self, slot: int, finished: bool) -> None:
        pass

    def observe(self, rows: Rows) -> None:
        pass

    def propose(self, rows: Rows) -> Draft:
        slot, length = rows.slot.cpu().numpy(), self._slots.length[rows.slot].cpu().numpy()
        size = np.clip(np.minimum(rows.k.cpu().numpy(), self._limit - length + 1), 0, None)  # [B]
        width = int(size.max(initial=0))
        tokens = rows.slot.new_zeros(len(slot), width)
        target_vocab = self._sampling.vocab
        probs = torch.zeros(len(slot), width, target_vocab, device=tokens.device) if self._sampled and width else None

        u = noise.block_noise(self._sampling.seed[rows.slot], self._slots.length[rows.slot], width, noise.DRAFT)  # [B,K]

        row = np.flatnonzero(size)  # the rows still drafting
        begin = np.minimum(self._computed[slot], length - 1)
        for i in range(width):
            last = length[row] + i  # where the next drafted token stands
            logits = self._forward(slot[row], begin[row], last - begin[row])
            at, on = torch.from_numpy(row).to(tokens.device), torch.from_numpy(slot[row]).to(tokens.device)
            tokens[at, i], q = self._choose(logits, on, torch.from_numpy(last).to(tokens.device), u[at, i])
            if probs is not None:
                probs[at, i] = q
            self._slots.tokens[on, torch.from_numpy(last).to(tokens.device)] = tokens[at, i]
            begin[row] = last
            row = row[size[row] > i + 1]
        self._computed[slot] = np.where(size > 0, begin, self._computed[slot])
        return Draft(tokens, torch.from_numpy(size).to(tokens.device), probs)

    def _forward(self, slot: np.ndarray, begin: np.ndarray, count: np.ndarray) -> Tensor:
        """Logits behind the last of each row's tokens, [B,V], computing the pending ones in passes within the budget."""
        share = max(self._budget // len(slot), 1)
        while (count > share).any():
            part = np.minimum(count - 1, share)
            some = part > 0
            self._model.forward(self._slots.batch(slot[some], begin[some], part[some], np.zeros(0, np.int64)), self._kv)
            begin, count = begin + part, count - part
        return self._model.forward(self._slots.batch(slot, begin, count, np.cumsum(count) - 1), self._kv).logits

    def _choose(self, logits: Tensor, slot: Tensor, position: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Drafted tokens [B] and the distributions [B,V] they come from, shaped by each request's own parameters."""
        known = torch.full((len(logits), self._sampling.vocab), -torch.inf, device=logits.device)
        known[:, : self._vocab] = logits[:, : self._vocab]
        features = self._sampling.features(set(slot.tolist()))
        shaped = self._sampling.shape(known, slot, position, features, int(position.max()))
        if not self._sampled:
            return shaped.argmax(-1), shaped
        q = self._sampling.probs(shaped, slot, features)
        return noise.draw(q, u), q
