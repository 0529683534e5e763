"""The fast form of cycle.py for CUDA: all operations around the target's forward pass are in a few Triton kernels."""

from __future__ import annotations

from functools import cached_property
from typing import cast

from torch import Tensor

from forerun.engine.cycle import GREEDY, Cycle, Key, Layout
from forerun.engine.policy import LEVELS
from forerun.kernels import Batch, cuda_heads, cuda_sampling, cuda_step
from forerun.kernels.cuda import CudaKernels
from forerun.types import Draft, Verdict
from forerun.verify.sampling import Features

SAMPLED = Features(sampled=True, min_p=True, top_k=1, top_p=True, unbounded=True)
EVERYTHING = SAMPLED._replace(penalties=True, bias=True, banned=True, min_tokens=True)


class FusedCycle(Cycle):
    classes = (GREEDY, SAMPLED)

    @property
    def _triton(self) -> CudaKernels:
        return cast(CudaKernels, self.target.kernels)

    @cached_property
    def _pool(self) -> cuda_step.Pool:
        s = self.state
        drafts = (s.draft, s.draft_size, s.chances)
        return cuda_step.Pool(s.tokens, s.length, s.limit, s.active, s.stop_ids, s.block_table, *drafts)

    @cached_property
    def _filters(self) -> cuda_sampling.Filters:
        sampling = self.sampling
        return cuda_sampling.Filters(sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)

    @cached_property
    def _look_up(self) -> cuda_step.LookUp | None:
        """The n-gram look-up that the commit kernel does; None: the drafter proposes by itself."""
        wanted = self.drafter.needs.look_up if self.drafter is not None else None
        return cuda_step.LookUp(*wanted) if wanted is not None else None

    def lay_uniform(self, key: Key, given: Tensor) -> Layout:
        slot, k = given
        embedding = self.target.weights.embedding
        x, positions, table, size = cuda_step.prepare(self._pool, slot, k, embedding, key.width, self._triton.pdl)
        # without probabilities the commit kernel compares the target's choices with the drafts in the pool
        draft = self._kept(slot, key.width) if self.drawn else Draft(self.state.draft[:0], size)
        return self._uniform(key, slot, draft._replace(size=size), positions, positions, table, x)

    def lay_shared(self, key: Key, given: Tensor) -> Layout:
        slot, k = given
        embedding, drafts = self.target.weights.embedding, key.tokens - key.rows
        laid = cuda_step.prepare_shared(self._pool, slot, k, embedding, key.width, drafts, LEVELS, self._triton.pdl)
        batch = Batch(laid.positions, laid.positions, laid.row_start, laid.table, None)
        return self._shared(key, slot, laid.owner, Draft(self.state.draft[:0], laid.size), batch, laid.x)

    def served(self, features: Features) -> Features:
        """One of four classes, so that few graphs serve all requests. Kernels read each row's filters, penalties and bans."""
        if features.shaped:
            return EVERYTHING._replace(grammar=features.grammar)
        return SAMPLED if features.sampled else GREEDY

    def _shaped(self, key: Key, layout: Layout, logits: Tensor) -> tuple[Tensor, Tensor]:
        features, sampling = key.features, self.sampling
        shaped, owner = super()._shaped(key._replace(features=features._replace(penalties=False)), layout, logits)
        if features.penalties:
            shaped = logits.clone() if shaped is logits else shaped
            by = (sampling.repetition, sampling.presence, sampling.frequency)
            cuda_sampling.penalise(shaped, layout.owner, layout.positions, sampling.tokens, sampling.prompt_len, *by)
        return shaped, owner

    def _distribution(self, key: Key, layout: Layout, shaped: Tensor, owner: Tensor) -> Tensor:
        floor = cuda_sampling.slot_floors(shaped, layout.owner, self._filters)[:, None] if key.features.filtered else None
        return self.sampling.probs(shaped, owner, key.features, floor)

    def _choose(self, key: Key, layout: Layout, logits: Tensor) -> Tensor:
        features, sampling = key.features, self.sampling
        if features.shaped:
            logits, _ = self._shaped(key, layout, logits)
        if not features.sampled:
            return self._triton.argmax(logits)
        given = (layout.owner, layout.positions, sampling.seed, self._filters, features.filtered, self._triton.pdl)
        return cuda_sampling.choose(logits, *given)

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        pdl = self._triton.pdl
        if verdict is not None:
            return cuda_step.commit_verdict(self._pool, slot, tokens, verdict.count, draft.size, pdl)
        if self._look_up is not None:
            return cuda_step.commit_and_draft(self._pool, slot, tokens, draft.size, self._look_up, pdl)
        return cuda_step.commit(self._pool, slot, tokens, draft.size, pdl)

    def _draft(self, key: Key, layout: Layout, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._look_up is not None:
            return None, None  # the commit kernel has drafted
        return super()._draft(key, layout, counts)

    def _keep(self, slot: Tensor, draft: Draft) -> None:
        if draft.probs is not None:
            super()._keep(slot, draft)
        else:
            s, new = self.state, (slot, draft.size, draft.tokens, draft.confidence)
            cuda_heads.keep(*new, s.draft, s.draft_size, s.chances, self._triton.pdl)
