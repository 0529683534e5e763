"""The kernels in plain torch, for any device, dtype and kind of matrix. The other kernels are tested against them. Attention
gathers each row's pages and calls torch's scaled_dot_product_attention. Nothing here is tuned.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, Layers, RunLayers, one_by_one
from forerun.models.weights import Matrix


def multiplies(kind: str) -> bool:
    """Every kind: the products use its dense values, expanded at each call."""
    return True


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return norm * wide.to(x.dtype)


def embed(ids: Tensor, weight: Matrix) -> Tensor:
    return weight.embed(ids)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
    return F.linear(rms_norm(x, norm, eps), weight.dense(), bias)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.dense(), bias)


def join(parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float) -> Tensor:
    normed = [part if norm is None else rms_norm(part, norm, eps) for part, norm in zip(parts, norms, strict=True)]
    return torch.cat(normed, -1)


def linear_add(x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual + F.linear(x, weight.dense(), bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
    gate, up = F.linear(rms_norm(x, norm, eps), weight.dense()).chunk(2, -1)
    return F.silu(gate) * up


def norm_logits(x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
    return F.linear(rms_norm(x, norm, eps), weight.dense()).float()


def logits(x: Tensor, weight: Matrix) -> Tensor:
    return F.linear(x, weight.dense()).float()


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, ids = logits.max(-1)
    chance = 1 / torch.exp(logits - top[:, None]).sum(-1)
    whole = torch.isfinite(top)  # max gives a NaN if there is one
    return torch.where(whole, ids, 0), torch.where(whole, chance, 0.0)


def store(
    kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor, value_pages: Tensor,
    batch: Batch,
) -> None:
    count, block = int(batch.row_start[-1]), key_pages.shape[2]  # without padding
    k, v = kv[:count].unflatten(-1, (2, shape.kv_heads, shape.head_dim)).unbind(1)
    k = k if k_norm is None else rms_norm(k, k_norm, shape.eps)
    positions = batch.positions[:count]
    row = torch.searchsorted(batch.row_start[1:].contiguous(), torch.arange(count, device=kv.device), right=True)
    page = batch.block_table[row, positions // block].long()
    key_pages[page, :, positions % block] = rotate(k, cos[positions], sin[positions], shape.interleaved)
    value_pages[page, :, positions % block] = v


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of x [T,heads,D]; cos, sin: [T,D/2] float32, each token's own. interleaved: see AttentionShape."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)


def attend(
    qkv: Tensor,
    shape: AttentionShape,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: Batch,
) -> Tensor:
    heads, kv_heads, dim, window, eps, interleaved, both = shape
    total, block = qkv.shape[0], key_pages.shape[2]
    q, k, v = qkv.view(total, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q = rotate(q, cos[batch.positions], sin[batch.positions], interleaved)
    k = rotate(k, cos[batch.positions], sin[batch.positions], interleaved)

    out = torch.zeros(total, heads, dim, dtype=qkv.dtype, device=qkv.device)  # padding gets zeros
    starts = batch.row_start.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        positions = batch.positions[begin:end]
        page = batch.block_table[row, positions // block].long()
        key_pages[page, :, positions % block] = k[begin:end]
        value_pages[page, :, positions % block] = v[begin:end]
        seen = int(positions[-1]) + 1
        pages = batch.block_table[row, : (seen + block - 1) // block].long()
        keys = key_pages[pages].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :seen]  # [kv_heads,seen,D]
        values = value_pages[pages].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :seen]
        at = torch.arange(seen, device=qkv.device)
        last = positions[-1:].expand_as(positions) if both else positions
        mask = at[None] <= last[:, None]  # [t,seen]
        if window:
            mask &= at[None] > positions[:, None] - window
        out[begin:end] = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], keys[None], values[None], mask, enable_gqa=True
        )[0].transpose(0, 1)
    return out.view(total, heads * dim)


def bind(layers: Layers) -> RunLayers:
    this: Any = sys.modules[__name__]  # the module itself is the set of kernels
    return partial(one_by_one, this, layers)


def bounded(width: int, context: int, ragged: bool = False) -> Kernels:
    this: Any = sys.modules[__name__]
    return this
