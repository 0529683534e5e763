"""Heads that draft a whole block in one pass: DFlash (2602.06036). The context is not a sequence of tokens: each committed
position has a feature, made from the target's hidden states, of which every layer keeps keys and values. A block is the last
committed token (the anchor) and mask tokens. Its tokens attend to the context before the anchor and to each other, in both
directions. The output at a mask token predicts the token at its own position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.heads.config import HeadConfig
from forerun.heads.head import Head
from forerun.kernels import AttentionShape, Batch, Kernels, one_by_one
from forerun.kernels import Layers as DecoderLayers
from forerun.models.weights import Layer, Matrix


class BlockWeights(NamedTuple):
    """All weights of a block head, those shared with the target included. fc: [H, states * target_hidden]; feature_norm: [H],
    behind it; state_norms: before it, as HeadConfig.state_norms says. ids: as in ChainWeights."""

    dtype: torch.dtype
    embedding: Matrix
    fc: Matrix
    feature_norm: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Matrix
    state_norms: tuple[Tensor, ...] = ()
    ids: Tensor | None = None

    def own(self, config: HeadConfig) -> Iterator[Tensor]:
        """The tensors that are not the target's."""
        if config.own_embedding:
            yield from self.embedding.stored.values()
        if config.own_head:
            yield from self.head.stored.values()
        yield from self.fc.stored.values()
        yield from (self.feature_norm, self.norm, *self.state_norms)
        if self.ids is not None:
            yield self.ids
        for layer in self.layers:
            for matrix in layer.matrices():
                yield from matrix.stored.values()
            yield from layer.vectors()


class Block(Head[BlockWeights]):
    """The forward pass."""

    def __init__(self, config: HeadConfig, weights: BlockWeights, kernels: Kernels, cos: Tensor, sin: Tensor) -> None:
        super().__init__(config, weights, kernels, cos, sin)
        d = config.decoder
        self._shapes = [AttentionShape(d.heads, d.kv_heads, d.head_dim, w, d.eps, block=True) for w in d.windows]
        first, count = d.heads * d.head_dim, 2 * d.kv_heads * d.head_dim
        self._kv = [layer.qkv.narrow(first, count) for layer in weights.layers]

    def context(self, states: tuple[Tensor, ...], batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Store the keys and values of the batch's positions. states: one [T,target_hidden] for each of config.states; keys,
        values: the pages of each layer."""
        w, run, d = self.weights, self.kernels, self.config.decoder
        feature = run.rms_norm(self._joined(states, w.state_norms, w.fc), w.feature_norm, d.eps)  # [T,H]
        for layer, kv, shape, k, v in zip(w.layers, self._kv, self._shapes, keys, values, strict=True):
            bias = None if layer.qkv_bias is None else layer.qkv_bias[-kv.rows :]
            run.store(run.linear(feature, kv, bias), shape, self._cos, self._sin, layer.k_norm, k, v, batch)

    def run(self, x: Tensor, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The output for blocks. x: [T,H], the embeddings of the batch's tokens, a block in each row. The pages get entries
        behind the context, which the next `context` overwrites.  -> [T,H]"""
        eps = self.config.decoder.eps
        layers = DecoderLayers(self.weights.layers, self._shapes, eps, self._cos, self._sin, keys, values)
        return one_by_one(self.kernels, layers, x, batch, 0, len(self.weights.layers))

    def logits(self, x: Tensor) -> Tensor:
        """The logits over the draft vocabulary.  [N,H] -> [N,draft vocabulary] float32"""
        return self.kernels.norm_logits(x, self.weights.norm, self.config.decoder.eps, self.weights.head)
