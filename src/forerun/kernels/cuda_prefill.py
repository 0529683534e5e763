"""Paged attention for prompts, whose rows have any lengths, as two Triton launches. The first norms and rotates q and k and
writes keys and values into the pages; the second attends. cuda_attention.py has what is shared with decode steps.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import AttentionShape, Batch
from forerun.kernels.cuda_attention import LOG2E, LOWEST, angles_at, halves_of, head_norm, places, rotated, softmax_step
from forerun.kernels.cuda_products import power_of_two


@triton.jit
def _row_of(token, row_start, R, RP: tl.constexpr):
    """The row of each token."""
    r = tl.arange(0, RP)
    starts = tl.load(row_start + r, mask=r < R, other=2147483647)
    return tl.sum((starts[None, :] <= token[:, None]).to(tl.int32), 1) - 1


@triton.jit(do_not_specialize=["T", "R", "TABLE", "STRIDE"])
def rotate_kernel(
    qkv, cos, sin, q_norm, k_norm, key_pages, value_pages, positions, row_start, table, q_out, out, T, R, TABLE, STRIDE,
    eps, HEADS: tl.constexpr,
    KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr, RP: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
    FAR: tl.constexpr,
):
    """Norm and rotate q into q_out [T,HEADS,D]; norm and rotate k; write k and v into the pages. Padding tokens write to no
    page. No tile of prefill_kernel covers them, so their outputs are set to zero here; otherwise a NaN could spread. STRIDE:
    from a token of qkv to the next. HEADS may be 0."""
    head = tl.program_id(1)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    total = tl.load(row_start + R)
    ok = t < total
    h = tl.arange(0, HP)
    good = ok[:, None] & (d < D)[None, :]
    good_half = ok[:, None] & (h < D // 2)[None, :]
    position = tl.load(positions + t, mask=ok, other=0).to(tl.int32)
    base = qkv + t.to(tl.int64) * STRIDE + head * D
    if head < HEADS:
        by = head_norm(q_norm, h, D, NORM)
        q_a, q_b = rotated(halves_of(base, ok, h, D), angles_at(cos, sin, position, ok, h, D), by, eps, D, NORM)
        q_to = q_out + (t.to(tl.int64) * HEADS + head)[:, None] * D + h[None, :]
        tl.store(q_to, q_a, mask=good_half)
        tl.store(q_to + D // 2, q_b, mask=good_half)
        nothing = out + (t.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        tl.store(nothing, tl.zeros((BM, DP), tl.float32), mask=((t >= total) & (t < T))[:, None] & (d < D)[None, :])
    else:
        row = _row_of(t, row_start, R, RP)
        own_table = table + row.to(tl.int64) * TABLE
        if head < HEADS + KV:
            k_to = places(own_table, position, ok, head - HEADS, KV, D, BLOCK, FAR)[:, None] + h[None, :]
            by = head_norm(k_norm, h, D, NORM)
            k_a, k_b = rotated(halves_of(base, ok, h, D), angles_at(cos, sin, position, ok, h, D), by, eps, D, NORM)
            tl.store(key_pages + k_to, k_a, mask=good_half)
            tl.store(key_pages + k_to + D // 2, k_b, mask=good_half)
        else:
            to = places(own_table, position, ok, head - HEADS - KV, KV, D, BLOCK, FAR)
            v = tl.load(base[:, None] + d[None, :], mask=good, other=0.0)
            tl.store(value_pages + to[:, None] + d[None, :], v, mask=good)


@triton.jit(do_not_specialize=["R", "TABLE"])
def prefill_kernel(
    q, key_pages, value_pages, positions, row_start, table, out, R, TABLE, scale, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    FAR: tl.constexpr, BOTH: tl.constexpr,
):
    """Attention of ragged rows, whose keys and values are in the pages. A program takes BM tokens of a row and one head. The
    tiles of all rows are numbered consecutively; empty rows have none. Only the device knows the rows' lengths, so the grid
    has the most tiles that there can be, and surplus programs return."""
    tile, head = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, RP)
    starts = tl.load(row_start + r, mask=r < R, other=0)
    ends = tl.load(row_start + r + 1, mask=r < R, other=0)
    tiles = tl.where(r < R, (ends - starts + BM - 1) // BM, 0)
    after = tl.cumsum(tiles, 0)
    row = tl.sum((after <= tile).to(tl.int32), 0)
    if row >= R:
        return
    within = tile - tl.sum(tl.where(r == row, after - tiles, 0), 0)
    start = tl.load(row_start + row)
    t = start + within * BM + tl.arange(0, BM)
    ok = t < tl.load(row_start + row + 1)
    d = tl.arange(0, DP)
    good = ok[:, None] & (d < D)[None, :]
    at = tl.load(positions + start).to(tl.int32) + within * BM + tl.arange(0, BM)
    where = (t.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(q + where, mask=good, other=0.0)
    end = tl.max(tl.where(ok, at, 0), 0) + 1
    last = at  # the last position that a query attends to
    if BOTH:
        end = tl.load(positions + tl.load(row_start + row + 1) - 1).to(tl.int32) + 1
        last = at * 0 + end - 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN
    table += row.to(tl.int64) * TABLE
    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DP), tl.float32)
    for p0 in range(low, end, BN):
        p = p0 + tl.arange(0, BN)
        there = (p < end)[:, None] & (d < D)[None, :]
        at_pages = places(table, p, p < end, head // (HEADS // KV), KV, D, BLOCK, FAR)[:, None] + d[None, :]
        keys = tl.load(key_pages + at_pages, mask=there, other=0.0)
        scores = tl.dot(queries, keys.T) * (scale * LOG2E)
        seen = p[None, :] <= last[:, None]
        if WINDOW > 0:
            seen = seen & (p[None, :] > at[:, None] - WINDOW)
        values = tl.load(value_pages + at_pages, mask=there, other=0.0)
        top, total, mixed = softmax_step(tl.where(seen, scores, float("-inf")), values, top, total, mixed)
    tl.store(out + where, (mixed * (1.0 / total)[:, None]).to(out.dtype.element_ty), mask=good)


def store(
    kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor, value_pages: Tensor,
    batch: Batch,
) -> None:
    """Kernels.store, for rows of any lengths, with padding behind the last row."""
    total, rows, dim = kv.shape[0], batch.block_table.shape[0], shape.head_dim
    norm = kv if k_norm is None else k_norm
    rotate_kernel[(triton.cdiv(total, 16), 2 * shape.kv_heads)](
        kv, cos, sin, norm, norm, key_pages, value_pages, batch.positions, batch.row_start, batch.block_table, kv, kv, total,
        rows, batch.block_table.stride(0), kv.stride(0), shape.eps, HEADS=0, KV=shape.kv_heads, D=dim,
        DP=max(16, power_of_two(dim)), HP=max(16, power_of_two(dim // 2)), BM=16, RP=power_of_two(rows),
        BLOCK=key_pages.shape[2], NORM=k_norm is not None, FAR=key_pages.numel() >= 1 << 31, num_warps=4,
    )  # fmt: skip


def attend_ragged(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor, batch: Batch,
) -> Tensor:
    """Kernels.attend for rows of any lengths, 0 included, with padding behind the last row."""
    heads, kv, dim, window, eps, *_ = shape
    total, rows = qkv.shape[0], batch.block_table.shape[0]
    padded, rows_padded, block = max(16, power_of_two(dim)), power_of_two(rows), key_pages.shape[2]
    q = qkv.new_empty(total, heads, dim)
    out = qkv.new_empty(total, heads * dim)
    table = batch.block_table.stride(0)
    rotate_kernel[(triton.cdiv(total, 16), heads + 2 * kv)](
        qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, key_pages, value_pages,
        batch.positions, batch.row_start, batch.block_table, q, out, total, rows, table, qkv.stride(0), eps, HEADS=heads,
        KV=kv, D=dim, DP=padded,
        HP=max(16, power_of_two(dim // 2)), BM=16, RP=rows_padded,
        BLOCK=block, NORM=q_norm is not None, FAR=key_pages.numel() >= 1 << 31, num_warps=4,
    )
    bm = 64 if total > 16 * rows else 16
    prefill_kernel[(triton.cdiv(total, bm) + rows - 1, heads)](
        q, key_pages, value_pages, batch.positions, batch.row_start, batch.block_table, out, rows, table, dim**-0.5,
        HEADS=heads, KV=kv,
        D=dim, DP=padded, BM=bm, BN=64, RP=rows_padded, BLOCK=block, WINDOW=window,
        FAR=key_pages.numel() >= 1 << 31, BOTH=shape.block, num_warps=4, num_stages=2,
    )
    return out
