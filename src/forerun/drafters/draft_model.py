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
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request
from forerun.verify import noise
from forerun.verify.sampling import Features, SamplingState


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
        self.needs = Needs(kv_bytes_per_token=model.kv_bytes_per_token, weight_bytes=model.bytes)
        self._model, self._kv, self._slots, self._sampling = model, kv, slots, sampling
        self._vocab, self._limit, self._budget, self._sampled = vocab, limit, budget, sampled
        self._computed = np.zeros(len(slots.length), np.int64)  # per slot: positions with valid keys and values

    def admit(self, slot: int, request: Request) -> None:
        self._computed[slot] = 0

    def release(self, slot: int, finished: bool) -> None:
        pass

    def prefill(self, batch: Batch) -> None:
        pass

    def restart(self) -> None:
        """Nothing to do: admission forgets what was computed."""

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


class DeviceDraftModel:
    """The same as tensor operations of fixed shape, for steps that draft at their end. Its keys and values keep pace with
    the target's: prompts go through it in the same chunks, and a draft begins by computing the last two committed
    tokens, since after a fully accepted draft both are new to it. So cached pages are good for both.

    A drafter with a shorter context than the target's is not made for this: it would have to stop on the device."""

    def __init__(
        self, model: Target, kv: KVCache, slots: Slots, sampling: SamplingState, vocab: int, sampled: bool
    ) -> None:
        """kv: as many pages as the target's; vocab: ids from here on are never drafted; sampled: draw the drafts."""
        self.needs = Needs(True, kv_bytes_per_token=model.kv_bytes_per_token, weight_bytes=model.bytes)
        self._model, self._kv, self._slots, self._sampling = model, kv, slots, sampling
        self._vocab, self._sampled = vocab, sampled

    def admit(self, slot: int, request: Request) -> None:
        """Nothing to do: the slots hold all there is."""

    def release(self, slot: int, finished: bool) -> None:
        """Nothing to do."""

    def prefill(self, batch: Batch) -> None:
        self._model.forward(batch._replace(logits_at=batch.ids.new_zeros(1)), self._kv)

    def restart(self) -> None:
        """Nothing to do."""

    def propose(self, rows: Rows) -> Draft:
        slot, width = rows.slot, rows.width
        length = self._slots.length[slot]  # [B]
        table = torch.where((rows.k > 0)[:, None], self._slots.block_table[slot], 0)  # dead rows write to nobody's page
        tokens = slot.new_zeros(len(slot), width)
        seed = self._sampling.seed[slot]
        u = noise.block_noise(seed, length, width, noise.DRAFT)  # [B,K]
        probs = []
        for i in range(width):
            first = i == 0
            at = (length + i - 1)[:, None] + torch.arange(-1 if first else 0, 1, device=slot.device)  # [B,2] or [B,1]
            at = at.clamp(min=0)
            logits = self._forward(slot, at, table)
            q = self._distribution(logits, slot, length + i) if self._sampled else None
            tokens[:, i] = logits[:, : self._vocab].argmax(-1) if q is None else noise.draw(q, u[:, i])
            self._slots.tokens[slot, length + i] = tokens[:, i]
            if q is not None:
                probs.append(q)
        return Draft(tokens, rows.k.clamp(max=width), torch.stack(probs, 1) if probs else None)

    def _forward(self, slot: Tensor, at: Tensor, table: Tensor) -> Tensor:
        """Logits behind the last of each row's positions, [B,n] -> [B,V]."""
        rows, count = at.shape
        start = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=at.device)
        ends = torch.arange(count - 1, rows * count, count, device=at.device)
        ids = self._slots.tokens[slot[:, None], at]
        kernels = self._model.kernels.bounded(count, self._slots.tokens.shape[1])
        return self._model.forward(Batch(ids.flatten(), at.flatten(), start, table, ends), self._kv, kernels=kernels).logits

    def _distribution(self, logits: Tensor, slot: Tensor, position: Tensor) -> Tensor:
        """What the drafts are drawn from, [B,V]: what the drafter says at each request's temperature. Filters are left to the
        verification: for them to cost nothing where nobody asks for them, the graph would have to know who does."""
        known = torch.full((len(logits), self._sampling.vocab), -torch.inf, device=logits.device)
        known[:, : self._vocab] = logits[:, : self._vocab]
        return self._sampling.probs(known, slot, Features(sampled=True))
