"""The operations of a decoder layer, fused for decode steps. Three sets of kernels compute them and agree up to rounding:
plain torch for any device and dtype (reference.py, what the others are tested against), C for bfloat16 and float32 on the CPU
(cpu.py, cpu.c), and Triton for CUDA (cuda.py). The interface, Kernels, and the order of operations in a layer are here; the
embedding and the head are in models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from forerun.models.weights import Layer, Matrix


class Batch(NamedTuple):
    """The tokens of one forward pass: R rows (sequences) one after the other, each with consecutive positions.

    ids, positions: [T] int64. row_start: [R+1] int32; row r has the tokens row_start[r]:row_start[r+1], possibly none.
    block_table: [R,P] int32, the pages of each row in order. logits_at: [N] int64, the tokens whose logits are wanted;
    None: all tokens.
    A row's pages hold the keys and values of its earlier positions. The pass writes those of the batch's tokens there.

    Tokens from row_start[R] on are padding, at position 0. They belong to no row and write to no page; their results are
    meaningless.
    """

    ids: Tensor
    positions: Tensor
    row_start: Tensor
    block_table: Tensor
    logits_at: Tensor | None


class AttentionShape(NamedTuple):
    """heads: query heads; kv_heads: key and value heads; head_dim: the size of each. window: how many positions a token
    attends to, its own included (0: all). eps: of the optional q and k norms. interleaved: the two numbers of a head of q or k
    that are rotated together are neighbours (2i, 2i + 1), as llama.cpp stores a llama; otherwise they are i and
    i + head_dim / 2, as in transformers' rotate_half. CUDA kernels take only the latter. block: the tokens of a row attend to
    each other in both directions: each sees all positions up to the row's last token in the batch."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    eps: float = 1e-6
    interleaved: bool = False
    block: bool = False


class Layers(NamedTuple):
    """All layers of a decoder with their KV pages. weights, shapes, key_pages, value_pages: one of each for every layer;
    cos, sin: the rotation tables, [max_positions, head_dim/2] float32."""

    weights: Sequence[Layer]
    shapes: Sequence[AttentionShape]
    eps: float
    cos: Tensor
    sin: Tensor
    key_pages: Sequence[Tensor]
    value_pages: Sequence[Tensor]


class Kernels(Protocol):
    """A set of kernels. x is [T,H] in the model's dtype; matrices are [out,in], as in the checkpoint. RMS norms round as
    transformers does: normalise in float32, round to the dtype, multiply by the norm's weight. Products accumulate in
    float32. Outputs are new tensors in x's dtype unless said otherwise."""

    def multiplies(self, kind: str) -> bool:
        """Whether the products take matrices of this kind (Matrix.kind). Target refuses a set of kernels that does not; a
        product with such a matrix raises TypeError."""

    def embed(self, ids: Tensor, weight: Matrix) -> Tensor:
        """The rows of these ids. It does not wait for the device.  [T] int64 -> [T,H] in weight.dtype"""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
        """rms_norm(x) @ weight.T + bias: the q, k and v of a layer, stacked in that order.  [T,H] -> [T,O]"""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias.  [T,I] -> [T,O]"""

    def join(self, parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float) -> Tensor:
        """The parts one after the other, each behind its RMS norm, or as it is where the norm is None.
        1 to 5 of [T,I], [I] -> [T, sum of I]"""

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        """Causal attention over each row's pages, in four steps: norm every head of q and k, if norms [head_dim] are given;
        rotate them by their positions (shape.interleaved says which numbers are paired); write k and v into the pages
        [pages, kv_heads, block_size, head_dim], in place; attend.
        qkv: [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]"""

    def linear_add(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + (x @ weight.T + bias): the output projection of attention and of the MLP.  [T,I], [T,H] -> [T,H]"""

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        """silu(g) * u, where [g, u] = rms_norm(x) @ weight.T; weight stacks gate over up, [2I,H].  [T,H] -> [T,I]"""

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        """rms_norm(x) @ weight.T in float32: the logits.  [N,H] -> [N,V] float32"""

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        """x @ weight.T in float32.  [N,H] -> [N,V] float32"""

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest id of each row, the first of equal ones, and its probability (softmax at temperature 1). A row whose
        largest logit is not finite (a NaN counts as the largest) gives id 0 with probability 0.
        [N,V] float32 -> [N] int64, [N] float32"""

    def store(
        self, kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor,
        value_pages: Tensor, batch: Batch,
    ) -> None:
        """Norm every head of k (if k_norm is given), rotate it by its position, and write k and v into the pages of the batch's
        tokens. kv: [T, 2 * kv_heads * head_dim], k before v; its rows may be strided."""

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """[T,H] -> [T,H]"""

    def bounded(self, width: int, context: int, ragged: bool = False) -> Kernels:
        """Kernels for batches whose rows have `width` tokens each (ragged: 1 to `width`, with padding behind the last row), at
        positions below `context`. Faster where a set of kernels uses the bounds, else the same kernels."""

    def bind(self, layers: Layers) -> RunLayers:
        """A function that runs some of these layers: `one_by_one`, or the same in fewer calls. It may keep the addresses of
        weights and pages, which must not move."""


class RunLayers(Protocol):
    def __call__(self, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        """x after the layers first .. last - 1, a new tensor. A forward pass calls it for consecutive parts of the layers,
        from layer 0 on, and launches nothing else between them.  [T,H] -> [T,H]"""


def one_by_one(run: Kernels, layers: Layers, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
    """The layers first .. last - 1, operation by operation.  [T,H] -> [T,H]"""
    _, shapes, eps, cos, sin, keys, values = layers
    for i in range(first, last):
        w = layers.weights[i]
        qkv = run.norm_linear(x, w.attention_norm, eps, w.qkv, w.qkv_bias)  # [T, (heads + 2 kv_heads) * D]
        mixed = run.attend(qkv, shapes[i], cos, sin, w.q_norm, w.k_norm, keys[i], values[i], batch)  # [T, heads * D]
        x = run.linear_add(mixed, w.out, w.out_bias, x)
        gated = run.norm_gate_up(x, w.mlp_norm, eps, w.gate_up)  # [T,I]
        x = run.linear_add(gated, w.down, None, x)
    return x
