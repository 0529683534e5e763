"""The body of a fixed-shape step with everything around the target's forward pass in a few Triton launches: the fast twin
of engine/body.py, for CUDA.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from forerun.drafters.ngram import DeviceNgram
from forerun.engine.body import GREEDY, NEXT_DRAFT, Body, Key, PromptKey
from forerun.kernels import Batch, cuda_sampling, cuda_step
from forerun.kernels.cuda import CudaKernels
from forerun.types import Draft, Verdict
from forerun.verify.sampling import Features

SAMPLED = Features(sampled=True, min_p=True, top_k=1, top_p=True, unbounded=True)
EVERYTHING = SAMPLED._replace(penalties=True, bias=True, banned=True, min_tokens=True)


class FusedBody(Body):
    classes = (GREEDY, SAMPLED)

    @cached_property
    def _kernels(self) -> CudaKernels:
        assert isinstance(self.target.kernels, CudaKernels)
        return self.target.kernels

    @cached_property
    def _pdl(self) -> int:
        return self._kernels.pdl

    @cached_property
    def _pool(self) -> cuda_step.Pool:
        slots, lives = self.slots, self.lives
        ends, drafts = (lives.limit, lives.alive, lives.stop_ids), (lives.draft, lives.draft_size)
        return cuda_step.Pool(slots.tokens, slots.length, *ends, slots.block_table, *drafts)

    @cached_property
    def _filters(self) -> cuda_sampling.Filters:
        sampling = self.sampling
        return cuda_sampling.Filters(sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)

    @cached_property
    def _look_up(self) -> cuda_step.LookUp | None:
        """What the launch that commits looks up; any other drafter proposes by itself."""
        drafter = self.drafter
        return cuda_step.LookUp(drafter.min_n, drafter.max_n, drafter.vocab) if isinstance(drafter, DeviceNgram) else None

    def _lay_out(self, key: Key, slot: Tensor, k: Tensor) -> tuple[Draft, Batch, Tensor | None]:
        embedding = self.target.weights.embedding
        x, positions, table, size = cuda_step.prepare(self._pool, slot, k, embedding, key.width, self._pdl)
        lives = self.lives
        probs = lives.draft_probs[slot, : key.width] if lives.draft_probs is not None else None
        tokens = lives.draft[slot, : key.width] if probs is not None else lives.draft[:0]  # choices are compared in the pool
        return Draft(tokens, size, probs), self._batch(key, positions, positions, table), x

    def _lay_shared(self, key: Key, slot: Tensor, k: Tensor) -> tuple[Draft, Batch, Tensor, Tensor | None]:
        assert key.drafts is not None
        embedding = self.target.weights.embedding
        laid = cuda_step.prepare_shared(self._pool, slot, k, embedding, key.width, key.drafts, self._pdl)
        batch = Batch(laid.positions, laid.positions, laid.row_start, laid.table, None)
        return Draft(self.lives.draft[:0], laid.size), batch, laid.owner, laid.x

    def served(self, features: Features) -> Features:
        """One of three: what a row has of filters, penalties and bans is found out row by row, so that few graphs serve all."""
        return EVERYTHING if features.shaped else SAMPLED if features.sampled else GREEDY

    def _shaped(self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        every = self._every(slot, positions)
        if not key.features.shaped:
            return logits, every
        sampling = self.sampling
        out = sampling.shape(logits, every, positions + 1, key.features._replace(penalties=False))
        if key.features.penalties:
            out = logits.clone() if out is logits else out
            by = (sampling.repetition, sampling.presence, sampling.frequency)
            cuda_sampling.penalise(out, slot, positions, sampling.tokens, sampling.prompt_len, *by)
        return out, every

    def _target(self, key: Key | PromptKey, slot: Tensor, every: Tensor, shaped: Tensor) -> Tensor:
        floor = cuda_sampling.slot_floors(shaped, slot, self._filters)[:, None] if key.features.filtered else None
        return self.sampling.probs(shaped, every, key.features, floor)

    def _choose(self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        features, sampling = key.features, self.sampling
        if features.shaped:
            logits, _ = self._shaped(key, slot, positions, logits)
        if not features.sampled:
            return self._kernels.argmax(logits)
        return cuda_sampling.choose(logits, slot, positions, sampling.seed, self._filters, features.filtered, self._pdl)

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        if verdict is not None:
            counts = cuda_step.commit_verdict(self._pool, slot, tokens, verdict.count, draft.size, self._pdl)
        elif self._look_up is not None:
            return cuda_step.commit_and_draft(self._pool, slot, tokens, draft.size, self._look_up, self._pdl)
        else:
            counts = cuda_step.commit(self._pool, slot, tokens, draft.size, self._pdl)
        if self.drafter is not None:
            counts[:, NEXT_DRAFT] = self._propose(slot)
        return counts
