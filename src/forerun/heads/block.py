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
from forerun.kernels import AttentionShape, Batch, Kernels, one_by_one
from forerun.kernels import Layers as DecoderLayers
from forerun.models.weights import Layer, Matrix, stored_bytes


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


class Block:
    """The forward pass. It holds no state: keys and values are in the pages that are given."""

    def __init__(self, config: HeadConfig, weights: BlockWeights, kernels: Kernels, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: the rotation tables of config.decoder.rope, up to the longest position."""
        self.config, self.weights, self.kernels = config, weights, kernels
        self._cos, self._sin = cos, sin
        d = config.decoder
        self._shapes = [AttentionShape(d.heads, d.kv_heads, d.head_dim, w, d.eps, block=True) for w in d.windows]
        first, count = d.heads * d.head_dim, 2 * d.kv_heads * d.head_dim
        self._kv = [layer.qkv.narrow(first, count) for layer in weights.layers]

    @property
    def bytes(self) -> int:
        """The memory of the weights that are not the target's."""
        return stored_bytes(self.weights.own(self.config))

    @property
    def kv_bytes_per_token(self) -> int:
        """The memory of one position's keys and values, in all layers."""
        return self.config.decoder.kv_values_per_token * self.weights.dtype.itemsize

    def with_kernels(self, kernels: Kernels) -> Block:
        """The same head, computed with other kernels."""
        return Block(self.config, self.weights, kernels, self._cos, self._sin)

    def context(self, states: tuple[Tensor, ...], batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Store the keys and values of the batch's positions. states: one [T,target_hidden] for each of config.states; keys,
        values: the pages of each layer."""
        w, run, d = self.weights, self.kernels, self.config.decoder
        joined = run.join(states, w.state_norms or (None,) * len(states), d.eps)
        feature = run.rms_norm(run.linear(joined, w.fc, None), w.feature_norm, d.eps)  # [T,H]
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
