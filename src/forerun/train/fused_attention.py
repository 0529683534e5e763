"""Attention to ranges of keys (plain.attend) in Triton. A tile of queries goes over the keys that any of them sees, with a
running softmax, and then over each query's own extra keys. Backward, a tile of keys goes over the queries that see any of them:
since the ranges ascend, these are consecutive. So nothing is added atomically, and results are the same in each run. head_dim
must be a power of two of at least 16; a tensor has fewer than 2^31 numbers.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated,override"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from forerun.train.plain import Extra

TILE = 64  # queries, or keys, of a program


@triton.jit
def _span(first, last):
    """The keys that any query of a tile sees."""
    some = last > first
    return tl.min(tl.where(some, first, 1 << 30)), tl.max(tl.where(some, last, 0))


@triton.jit
def forward_kernel(
    q, k, v, extra_k, extra_v, lo, hi, out, lse, n, k_stride, v_stride, scale, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    rows, head, d = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1), tl.arange(0, D)
    kv, inside = head // (HEADS // KV), rows < n
    first = tl.load(lo + rows, mask=inside, other=0).to(tl.int32)
    last = tl.load(hi + rows, mask=inside, other=0).to(tl.int32)
    begin, end = _span(first, last)
    here = rows[:, None] * (HEADS * D) + head * D + d[None]
    query = tl.load(q + here, mask=inside[:, None], other=0.0)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    for c in range(begin, end, N):
        place = c + tl.arange(0, N)
        there = place < end
        key = tl.load(k + place[None] * k_stride + kv * D + d[:, None], mask=there[None], other=0.0)
        value = tl.load(v + place[:, None] * v_stride + kv * D + d[None], mask=there[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        seen = (place[None] >= first[:, None]) & (place[None] < last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new > -float("inf"), new, 0.0)
        share = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(share, 1)
        mixed = mixed * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        top = new
    for e in tl.range(E):
        own = (rows[:, None] * E + e) * (KV * D) + kv * D + d[None]
        key = tl.load(extra_k + own, mask=inside[:, None], other=0.0).to(tl.float32)
        value = tl.load(extra_v + own, mask=inside[:, None], other=0.0).to(tl.float32)
        score = tl.sum(query.to(tl.float32) * key, 1) * scale
        new = tl.maximum(top, score)
        share1 = tl.exp(score - new)
        fade = tl.exp(top - new)
        total = total * fade + share1
        mixed = mixed * fade[:, None] + share1[:, None] * value
        top = new
    whole = tl.where(total > 0, total, 1.0)
    tl.store(out + here, (mixed / whole[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + rows * HEADS + head, tl.where(total > 0, top + tl.log(whole), 0.0), mask=inside)


@triton.jit
def query_gradient_kernel(
    q, k, v, extra_k, extra_v, lo, hi, grad, lse, delta, dq, d_extra_k, d_extra_v, n, k_stride, v_stride, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries in one head, and of their extra keys and values ([N,E,HEADS,D], one for each query
    head)."""
    rows, head, d = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1), tl.arange(0, D)
    kv, inside = head // (HEADS // KV), rows < n
    first = tl.load(lo + rows, mask=inside, other=0).to(tl.int32)
    last = tl.load(hi + rows, mask=inside, other=0).to(tl.int32)
    begin, end = _span(first, last)
    here = rows[:, None] * (HEADS * D) + head * D + d[None]
    query = tl.load(q + here, mask=inside[:, None], other=0.0)
    g = tl.load(grad + here, mask=inside[:, None], other=0.0)
    norm = tl.load(lse + rows * HEADS + head, mask=inside, other=0.0)
    mean = tl.load(delta + rows * HEADS + head, mask=inside, other=0.0)
    slope = tl.zeros([M, D], tl.float32)
    for c in range(begin, end, N):
        place = c + tl.arange(0, N)
        there = place < end
        key = tl.load(k + place[:, None] * k_stride + kv * D + d[None], mask=there[:, None], other=0.0)
        value = tl.load(v + place[None] * v_stride + kv * D + d[:, None], mask=there[None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (place[None] >= first[:, None]) & (place[None] < last[:, None])
        share = tl.where(seen, tl.exp(scores - norm[:, None]), 0.0)
        ds = share * (tl.dot(g, value, input_precision="ieee") - mean[:, None]) * scale
        slope += tl.dot(ds.to(key.dtype), key, input_precision="ieee")
    for e in tl.range(E):
        own = (rows[:, None] * E + e) * (KV * D) + kv * D + d[None]
        key = tl.load(extra_k + own, mask=inside[:, None], other=0.0).to(tl.float32)
        value = tl.load(extra_v + own, mask=inside[:, None], other=0.0).to(tl.float32)
        share1 = tl.exp(tl.sum(query.to(tl.float32) * key, 1) * scale - norm)
        ds1 = share1 * (tl.sum(g.to(tl.float32) * value, 1) - mean) * scale
        slope += ds1[:, None] * key
        to = (rows[:, None] * E + e) * (HEADS * D) + head * D + d[None]
        kind = d_extra_k.dtype.element_ty
        tl.store(d_extra_k + to, (ds1[:, None] * query.to(tl.float32)).to(kind), mask=inside[:, None])
        tl.store(d_extra_v + to, (share1[:, None] * g.to(tl.float32)).to(kind), mask=inside[:, None])
    tl.store(dq + here, slope.to(dq.dtype.element_ty), mask=inside[:, None])


@triton.jit
def key_gradient_kernel(
    q, k, v, lo, hi, begin, end, grad, lse, delta, dk, dv, t, k_stride, v_stride, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values in one head. begin, end: [tiles], the queries that see any of them."""
    tile, kv, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    place = tile * N + tl.arange(0, N)
    there = place < t
    key = tl.load(k + place[:, None] * k_stride + kv * D + d[None], mask=there[:, None], other=0.0)
    value = tl.load(v + place[:, None] * v_stride + kv * D + d[None], mask=there[:, None], other=0.0)
    of_key, of_value = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    start, stop = tl.load(begin + tile).to(tl.int32), tl.load(end + tile).to(tl.int32)
    for head in range(kv * (HEADS // KV), (kv + 1) * (HEADS // KV)):
        for r in range(start, stop, M):
            rows = r + tl.arange(0, M)
            inside = rows < stop
            first = tl.load(lo + rows, mask=inside, other=0).to(tl.int32)
            last = tl.load(hi + rows, mask=inside, other=0).to(tl.int32)
            here = rows[:, None] * (HEADS * D) + head * D + d[None]
            query = tl.load(q + here, mask=inside[:, None], other=0.0)
            g = tl.load(grad + here, mask=inside[:, None], other=0.0)
            norm = tl.load(lse + rows * HEADS + head, mask=inside, other=0.0)
            mean = tl.load(delta + rows * HEADS + head, mask=inside, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            seen = (place[None] >= first[:, None]) & (place[None] < last[:, None])
            share = tl.where(seen, tl.exp(scores - norm[:, None]), 0.0)
            of_value += tl.dot(tl.trans(share.to(g.dtype)), g, input_precision="ieee")
            ds = share * (tl.dot(g, tl.trans(value), input_precision="ieee") - mean[:, None]) * scale
            of_key += tl.dot(tl.trans(ds.to(query.dtype)), query, input_precision="ieee")
    to = place[:, None] * (KV * D) + kv * D + d[None]
    tl.store(dk + to, of_key.to(dk.dtype.element_ty), mask=there[:, None])
    tl.store(dv + to, of_value.to(dv.dtype.element_ty), mask=there[:, None])


def _rows(x: Tensor) -> Tensor:
    """[T,kv_heads,D] with whole rows; the rows may be apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, extra_k: Tensor | None, extra_v: Tensor | None
    ) -> Tensor:
        q, k, v = q.contiguous(), _rows(k), _rows(v)
        extra = None if extra_k is None or extra_v is None else (extra_k.contiguous(), extra_v.contiguous())
        n, heads, dim = q.shape
        out, lse = torch.empty_like(q), torch.empty(n, heads, dtype=torch.float32, device=q.device)
        count = 0 if extra is None else extra[0].shape[1]
        forward_kernel[(triton.cdiv(n, TILE), heads)](
            q, k, v, *(extra or (k, v)), lo, hi, out, lse, n, k.stride(0), v.stride(0), dim**-0.5, heads, k.shape[1], dim,
            count, TILE, TILE, num_warps=8 if count else 4,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, lo, hi, out, lse, *(extra or ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lo, hi, out, lse, *extra = ctx.saved_tensors
        (n, heads, dim), (t, kv, _) = q.shape, k.shape
        grad = grad.contiguous()
        delta = torch.linalg.vecdot(grad.float(), out.float())
        count = extra[0].shape[1] if extra else 0
        dq, dk, dv = torch.empty_like(q), k.new_empty(t, kv, dim), v.new_empty(t, kv, dim)
        own = [q.new_empty(n, count, heads, dim) for _ in range(2)]
        given, shape = (k.stride(0), v.stride(0), dim**-0.5), (heads, kv, dim)
        query_gradient_kernel[(triton.cdiv(n, TILE), heads)](
            q, k, v, *(extra or (k, v)), lo, hi, grad, lse, delta, dq, *own, n, *given, *shape, count, TILE, TILE,
            num_warps=8 if count else 4,
        )  # fmt: skip
        tiles = torch.arange(0, t, TILE, device=q.device)
        begin, end = torch.searchsorted(hi, tiles, right=True), torch.searchsorted(lo, tiles + TILE)
        key_gradient_kernel[(len(tiles), kv)](
            q, k, v, lo, hi, begin, end, grad, lse, delta, dk, dv, t, *given, *shape, TILE, TILE, num_warps=4
        )
        summed = [x.unflatten(2, (kv, -1)).sum(3) for x in own] if extra else [None, None]
        return dq, dk, dv, None, None, *summed


def attend(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, extra: Extra | None) -> Tensor:
    return _Attend.apply(q, k, v, lo, hi, *(extra or (None, None)))
