"""The body of a fixed-shape step with everything around the target's forward pass in a few Triton launches: the fast twin
of engine/body.py, for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forerun.drafters import Drafter
from forerun.drafters.ngram import DeviceNgram
from forerun.engine.body import Body, Key, Lives, PromptKey
from forerun.engine.slots import Slots
from forerun.kernels import Batch, cuda_sampling, cuda_step
from forerun.kernels.cuda import CudaKernels
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Verdict
from forerun.verify.sampling import Features, SamplingState


class FusedBody(Body):
    def __init__(
        self,
        target: Target,
        kernels: CudaKernels,
        kv: KVCache,
        slots: Slots,
        sampling: SamplingState,
        lives: Lives,
        drafter: Drafter | None,
        block: bool,
    ) -> None:
        super().__init__(target, kv, slots, sampling, lives, drafter, block)
        self._kernels, self._pdl = kernels, kernels.pdl
        self._weighs = lives.draft_probs is not None
        ends, drafts = (lives.limit, lives.alive, lives.stop_ids), (lives.draft, lives.draft_size)
        self._pool = cuda_step.Pool(slots.tokens, slots.length, *ends, slots.block_table, *drafts)
        # the look-up goes into the launch that commits; any other drafter proposes by itself
        self._look_up = (
            cuda_step.LookUp(drafter.min_n, drafter.max_n, drafter.vocab) if isinstance(drafter, DeviceNgram) else None
        )

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

    def features(self, slots: Iterable[int]) -> Features:
        """Which filters are on, and how wide, is found out row by row: one graph for all of them."""
        found = super().features(slots)
        return found._replace(min_p=True, top_k=1, top_p=True, unbounded=True) if found.filtered and not self._weighs else found

    def _choose(self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        features, sampling = key.features, self.sampling
        if features.shaped:
            every = slot.repeat_interleave(len(positions) // max(len(slot), 1), output_size=len(positions))
            logits = sampling.shape(logits, every, positions + 1, features)
        if not features.sampled:
            return self._kernels.argmax(logits)
        by = cuda_sampling.Filters(sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)
        return cuda_sampling.choose(logits, slot, positions, sampling.seed, by, features.filtered, self._pdl)

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        if verdict is not None:
            counts = cuda_step.commit_verdict(self._pool, slot, tokens, verdict.count, draft.size, self._pdl)
        elif self._look_up is not None:
            return cuda_step.commit_and_draft(self._pool, slot, tokens, draft.size, self._look_up, self._pdl)
        else:
            counts = cuda_step.commit(self._pool, slot, tokens, draft.size, self._pdl)
        if self.drafter is not None:
            counts[:, 2] = self._propose(slot)
        return counts
