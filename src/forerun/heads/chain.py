"""Heads that draft one token after the other: EAGLE, EAGLE-3 and MTP. Each entry of such a head belongs to a position p: it
joins the embedding of token p + 1 with the feature of position p, and predicts token p + 2. The feature is made from the
target's hidden states where these are known (`encode`), and is the head's own output behind that.

Sources: EAGLE 2401.15077, EAGLE-3 2503.01840, DeepSeek-V3 2412.19437 (section 2.2), MiMo 2505.07608. docs/heads.md has the
differences between the layouts in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.heads.config import HeadConfig
from forerun.heads.head import Head
from forerun.kernels import AttentionShape, Batch, Kernels
from forerun.models.weights import Layer, Matrix


class Module(NamedTuple):
    """One module. embedding_norm, feature_norm: [H], before the two are joined; None: taken as they are (EAGLE-1). fc: [H,2H],
    makes the layer's input from the joined ones (EAGLE-1, MTP); None: the layer's qkv takes 2H (EAGLE-3). layer: its
    attention_norm is used by MTP only, and empty otherwise. norm: [H], before the head; None: the head takes the output as it
    is (EAGLE-1)."""

    embedding_norm: Tensor | None
    feature_norm: Tensor | None
    fc: Matrix | None
    fc_bias: Tensor | None
    layer: Layer
    norm: Tensor | None


class ChainWeights(NamedTuple):
    """All weights of a chain head, those shared with the target included. fc: EAGLE-3: [H, states * target_hidden];
    state_norms: before it, as HeadConfig.state_norms says. target_norm: the target's final norm, if HeadConfig.normed. ids:
    [draft vocabulary] int64, the target's ids of the draft ids; None: they are the same."""

    dtype: torch.dtype
    embedding: Matrix
    modules: tuple[Module, ...]
    head: Matrix
    fc: Matrix | None = None
    state_norms: tuple[Tensor, ...] = ()
    target_norm: Tensor | None = None
    ids: Tensor | None = None

    def own(self, config: HeadConfig) -> Iterator[Tensor]:
        """The tensors that are not the target's."""
        if config.own_embedding:
            yield from self.embedding.stored.values()
        if config.own_head:
            yield from self.head.stored.values()
        if self.fc is not None:
            yield from self.fc.stored.values()
        yield from self.state_norms
        if self.ids is not None:
            yield self.ids
        for module in self.modules:
            for matrix in (*module.layer.matrices(), *((module.fc,) if module.fc is not None else ())):
                yield from matrix.stored.values()
            yield from module.layer.vectors()
            given = (module.embedding_norm, module.feature_norm, module.fc_bias, module.norm)
            yield from (vector for vector in given if vector is not None)


class Chain(Head[ChainWeights]):
    """The forward pass."""

    def __init__(self, config: HeadConfig, weights: ChainWeights, kernels: Kernels, cos: Tensor, sin: Tensor) -> None:
        super().__init__(config, weights, kernels, cos, sin)
        d = config.decoder
        self._shape = AttentionShape(d.heads, d.kv_heads, d.head_dim, d.windows[0], d.eps)

    def encode(self, states: tuple[Tensor, ...]) -> Tensor:
        """The features of positions, from the target's hidden states, one for each of config.states.
        [T,target_hidden] each -> [T,H]"""
        w, run, eps = self.weights, self.kernels, self.config.decoder.eps
        if w.fc is None:
            return states[0] if w.target_norm is None else run.rms_norm(states[0], w.target_norm, eps)
        return self._joined(states, w.state_norms, w.fc)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The embeddings of the tokens behind these positions. ids, positions: [T] -> [T,H]"""
        x = self.kernels.embed(ids, self.weights.embedding)
        return torch.where((positions == 0)[:, None], 0, x) if self.config.zero_first else x

    def run(self, index: int, embedded: Tensor, feature: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """The output of module `index` at the batch's positions. embedded, feature: [T,H]. keys, values: the module's pages,
        which get the entries of these positions.  -> [T,H]"""
        m, run, eps = self.weights.modules[index], self.kernels, self.config.decoder.eps
        layer = m.layer
        parts, norms = (embedded, feature), (m.embedding_norm, m.feature_norm)
        if not self.config.embedding_first:
            parts, norms = parts[::-1], norms[::-1]
        joined = run.join(parts, norms, eps)  # [T,2H]
        if m.fc is None:
            residual = feature
            if self.config.norm_before_residual:
                residual = joined[:, embedded.shape[1] :].contiguous()
            qkv = run.linear(joined, layer.qkv, layer.qkv_bias)
        else:
            residual = run.linear(joined, m.fc, m.fc_bias)
            if self.config.method == "mtp":
                qkv = run.norm_linear(residual, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
            else:
                qkv = run.linear(residual, layer.qkv, layer.qkv_bias)
        mixed = run.attend(qkv, self._shape, self._cos, self._sin, layer.q_norm, layer.k_norm, keys, values, batch)
        x = run.linear_add(mixed, layer.out, layer.out_bias, residual)
        gated = run.norm_gate_up(x, layer.mlp_norm, eps, layer.gate_up)
        return run.linear_add(gated, layer.down, None, x)

    def hand_on(self, index: int, x: Tensor) -> Tensor:
        """The feature for the next drafted token, from the output of module `index`.  [T,H] -> [T,H]"""
        norm = self.weights.modules[index].norm
        if not self.config.norm_output or norm is None:
            return x
        return self.kernels.rms_norm(x, norm, self.config.decoder.eps)

    def logits(self, index: int, feature: Tensor) -> Tensor:
        """The logits over the draft vocabulary, from what `hand_on` gave.  [N,H] -> [N,draft vocabulary] float32"""
        norm = self.weights.modules[index].norm
        if norm is None or self.config.norm_output:
            return self.kernels.logits(feature, self.weights.head)
        return self.kernels.norm_logits(feature, norm, self.config.decoder.eps, self.weights.head)
