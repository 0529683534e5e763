"""The few operations that a decoder is made of, each fused as far as a decode step wants it, in several forms that
agree: plain torch (reference.py, the slow twin of the others, for any device and dtype), C for bfloat16 and float32 on
the CPU (cpu.py, cpu.c), Triton for CUDA (cuda.py). Here is a decoder's layer, and how it is computed; what stands around the
layers is in models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from forerun.models.weights import Layer, Matrix


class Batch(NamedTuple):
    """The tokens of one forward pass: R rows (sequences), each a run of consecutive positions, laid end to end.

    ids, positions: [T] int64. row_start: [R+1] int32, row r is tokens row_start[r]:row_start[r+1] (a row may have none).
    block_table: [R,P] int32, the pages of each row in order. logits_at: [N] int64, the tokens whose logits are wanted, or
    None: all of them.
    The keys and values of a row's earlier positions are in its pages already; those of these tokens are written there.

    Tokens from row_start[R] on are padding, at position 0: they belong to no row, write to no page, and what is computed
    for them is nobody's and means nothing.
    """

    ids: Tensor
    positions: Tensor
    row_start: Tensor
    block_table: Tensor
    logits_at: Tensor | None


class AttentionShape(NamedTuple):
    """heads of queries, kv_heads of keys and values, head_dim wide; window: how many positions back a token may look,
    itself included (0: all of them); eps: of the optional q/k norms."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    eps: float = 1e-6


class Layers(NamedTuple):
    """All layers of a decoder with the pages they write to, and the tables that turn q and k; one of each for every layer."""

    weights: Sequence[Layer]
    shapes: Sequence[AttentionShape]
    eps: float
    cos: Tensor
    sin: Tensor
    key_pages: Sequence[Tensor]
    value_pages: Sequence[Tensor]


class Kernels(Protocol):
    """x is [T,H] in the model's dtype; weights are [out,in], row-major, as in the checkpoint. RMS norms round as
    transformers does: normalise in float32, round to the dtype, multiply by the norm's weight. Outputs are new
    tensors in x's dtype unless said otherwise; products accumulate in float32."""

    def multiplies(self, kind: str) -> bool:
        """Whether the products take matrices of this kind (Matrix.kind)."""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
        """rms_norm(x) @ weight.T + bias: the q, k and v of a layer, stacked in that order.  [T,H] -> [T,O]"""

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        """Norm each head's q and k (if the norms are given, [head_dim]), rotate them by their positions (cos and sin:
        [max_positions, head_dim/2] float32; halves are paired, as in transformers' rotate_half), write k and v into
        the pages ([pages, kv_heads, block_size, head_dim], in place), then attend, causally, over the row's pages.
        qkv: [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]"""

    def linear_add(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + (x @ weight.T + bias): the way out of attention and of the MLP.  [T,I], [T,H] -> [T,H]"""

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        """silu(g) * u of rms_norm(x) @ weight.T = [g, u]; weight stacks gate over up, [2I,H].  [T,H] -> [T,I]"""

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        """rms_norm(x) @ weight.T in float32: the logits.  [N,H] -> [N,V] float32"""

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """[T,H] -> [T,H]"""

    def bounded(self, width: int, context: int, ragged: bool = False) -> Kernels:
        """The same for batches whose rows have `width` tokens each (ragged: 1 to `width`, with padding behind the last), at
        positions below `context`, where that helps."""

    def bind(self, layers: Layers) -> RunLayers:
        """What runs some of these layers: `one_by_one`, or the same in fewer calls."""


class RunLayers(Protocol):
    def __call__(self, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        """x after the layers first .. last - 1, a new tensor. A pass calls it from layer 0 up, one part after the other, with
        no other launch between.  [T,H] -> [T,H]"""


def one_by_one(run: Kernels, layers: Layers, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
    """A decoder's layers.  [T,H] -> [T,H]"""
    _, shapes, eps, cos, sin, keys, values = layers
    for i in range(first, last):
        w = layers.weights[i]
        qkv = run.norm_linear(x, w.attention_norm, eps, w.qkv, w.qkv_bias)  # [T, (heads + 2 kv_heads) * D]
        mixed = run.attend(qkv, shapes[i], cos, sin, w.q_norm, w.k_norm, keys[i], values[i], batch)  # [T, heads * D]
        x = run.linear_add(mixed, w.out, w.out_bias, x)
        gated = run.norm_gate_up(x, w.mlp_norm, eps, w.gate_up)  # [T,I]
        x = run.linear_add(gated, w.down, None, x)
    return x
