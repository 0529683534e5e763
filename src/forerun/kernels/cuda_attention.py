"""Attention over pages as Triton kernels: one launch for a decode step (norms, rotation, cache write and all), two for
prefill. Knows pages, splits and launches; nothing of models or scheduling.

Decode: the rows have the same number of tokens each. A program takes one row, one key head with all its query heads, and
one stretch of the pages; how long the stretches are is worked out on the device, so that a launch for a long context costs
a short one little. The row's new tokens are kept apart: their keys and values come from qkv, not from the pages, so no
program waits for another's write. Of several stretches, the program that ends last adds them up, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import AttentionShape, Batch
from forerun.kernels.cuda_products import power_of_two, wait

TILE = 64  # positions that a program reads at a time
SHORTEST = 128  # positions of a stretch: below so many, cutting costs more than it saves
PROGRAMS = 264  # of a decode launch, two for each multiprocessor of an H100 or H200

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # in place of -inf where nothing has been seen, so that differences stay numbers


@triton.jit
def _rotated(base, ok, position, norm, cos, sin, d, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at base [ROWS,1] (pointers to their first value), normed and rotated: [ROWS,DP] in their dtype."""
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)
    good = ok[:, None] & (d < D)[None, :]
    x = tl.load(base + d[None, :], mask=good, other=0.0)
    y = tl.load(base + other[None, :], mask=good, other=0.0)  # the half that x is paired with
    angle = position[:, None] * half + (d % half)[None, :]
    c = tl.load(cos + angle, mask=good, other=0.0)
    s = tl.load(sin + angle, mask=good, other=0.0)
    a = x.to(tl.float32)
    b = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        by = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        by_other = tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
        a = ((a * scale).to(x.dtype).to(tl.float32) * by).to(x.dtype).to(tl.float32)
        b = ((b * scale).to(x.dtype).to(tl.float32) * by_other).to(x.dtype).to(tl.float32)
    return (a * c + tl.where(d < half, -b, b) * s).to(x.dtype)


@triton.jit
def _from_pages(pages, table, p, end, head, d, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """What the pages hold at positions p [BN] below end: [BN,DP]. table: the row's."""
    page = tl.load(table + p // BLOCK, mask=p < end, other=0).to(tl.int64)
    at = ((page * KV + head) * BLOCK + p % BLOCK) * D
    return tl.load(pages + at[:, None] + d[None, :], mask=(p < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _step(scores, values, top, total, mixed):
    """One more tile of scores [BM,BN] (base-2 logarithms) and values [BN,DP] into the running softmax."""
    higher = tl.maximum(top, tl.max(scores, 1))
    share = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    mixed = tl.dot(share.to(values.dtype), values, mixed * fade[:, None])
    return higher, total * fade + tl.sum(share, 1), mixed


@triton.jit
def _add_up(
    mixed, top, total, part, part_top, part_total, arrived, to, good, m, query_ok, d, mine, split, active, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Store this stretch's part; the program that stores the last one adds them all up, in order, and stores at `to`."""
    slot = mine * SPLITS + split
    tl.store(part + (slot.to(tl.int64) * BM + m)[:, None] * D + d[None, :], mixed, mask=good)
    tl.store(part_top + slot * BM + m, top, mask=query_ok)
    tl.store(part_total + slot * BM + m, total, mask=query_ok)
    tl.debug_barrier()  # every thread's part is stored before one of them says so
    before = tl.atomic_add(arrived + mine, 1, sem="acq_rel")
    if before == active - 1:
        top = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        mixed = tl.zeros((BM, DP), tl.float32)
        for s0 in range(0, active, AT_ONCE):
            s = s0 + tl.arange(0, AT_ONCE)
            index = (mine * SPLITS + s)[:, None] * BM + m[None, :]  # [AT_ONCE,BM]
            there = (s < active)[:, None] & query_ok[None, :]
            tops = tl.load(part_top + index, mask=there, other=LOWEST, cache_modifier=".cg")
            totals = tl.load(part_total + index, mask=there, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                part + index.to(tl.int64)[:, :, None] * D + d[None, None, :], mask=there[:, :, None] & (d < D)[None, None, :], other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(top, tl.max(tops, 0))
            fade = tl.exp2(top - higher)
            share = tl.exp2(tops - higher[None, :])
            total = total * fade + tl.sum(totals * share, 0)
            mixed = mixed * fade[:, None] + tl.sum(parts * share[:, :, None], 0)
            top = higher
        tl.store(to, (mixed / total[:, None]).to(to.dtype.element_ty), mask=good)
        tl.store(arrived + mine, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["TABLE"])
def decode_kernel(
    qkv, cos, sin, q_norm, k_norm, key_pages, value_pages, positions, table, out, part, part_top, part_total, arrived, TABLE, scale,
    eps, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SHORTEST: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV
    stride: tl.constexpr = (HEADS + 2 * KV) * D
    d = tl.arange(0, DP)
    table += row.to(tl.int64) * TABLE

    first = tl.load(positions + row * WIDTH).to(tl.int32)  # the pages are read below this position
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BN * BN
    length = tl.maximum(SHORTEST, tl.cdiv(tl.cdiv(first - low, SPLITS), BN) * BN)
    active = tl.maximum(tl.cdiv(first - low, length), 1)
    if split >= active:
        return
    begin = low + split * length
    end = tl.minimum(begin + length, first)
    p = begin + tl.arange(0, BN)
    keys = _from_pages(key_pages, table, p, end, head, d, KV, D, BLOCK)
    values = _from_pages(value_pages, table, p, end, head, d, KV, D, BLOCK)
    wait(PDL)

    m = tl.arange(0, BM)  # a query: token m // group, head m % group of this key head's
    token = m // group
    at = first + token
    query_ok = m < WIDTH * group
    q_base = qkv + (row * WIDTH + token) * stride + (head * group + m % group) * D
    q = _rotated(q_base[:, None], query_ok, at, q_norm, cos, sin, d, eps, D, NORM)

    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DP), tl.float32)
    if split == 0:  # the new tokens: rotate, write, and attend to them
        j = tl.arange(0, BT)
        new_ok = j < WIDTH
        k_base = qkv + (row * WIDTH + j) * stride + (HEADS + head) * D
        k_new = _rotated(k_base[:, None], new_ok, first + j, k_norm, cos, sin, d, eps, D, NORM)
        ok = new_ok[:, None] & (d < D)[None, :]
        v_new = tl.load(k_base[:, None] + KV * D + d[None, :], mask=ok, other=0.0)
        page = tl.load(table + (first + j) // BLOCK, mask=new_ok, other=0).to(tl.int64)
        to = ((((page * KV + head) * BLOCK) + (first + j) % BLOCK) * D)[:, None] + d[None, :]
        tl.store(key_pages + to, k_new, mask=ok)
        tl.store(value_pages + to, v_new, mask=ok)
        scores = tl.dot(q, k_new.T) * (scale * LOG2E)
        seen = (j[None, :] <= token[:, None]) & new_ok[None, :]
        if WINDOW > 0:
            seen &= j[None, :] > token[:, None] - WINDOW
        top, total, mixed = _step(tl.where(seen, scores, float("-inf")), v_new, top, total, mixed)

    for start in range(begin, end, BN):
        p = start + tl.arange(0, BN)
        scores = tl.dot(q, keys.T) * (scale * LOG2E)
        seen = (p < end)[None, :]
        if WINDOW > 0:
            seen = seen & (p[None, :] > at[:, None] - WINDOW)
        old = values
        keys = _from_pages(key_pages, table, p + BN, end, head, d, KV, D, BLOCK)
        values = _from_pages(value_pages, table, p + BN, end, head, d, KV, D, BLOCK)
        top, total, mixed = _step(tl.where(seen, scores, float("-inf")), old, top, total, mixed)

    good = query_ok[:, None] & (d < D)[None, :]
    to = out + (((row * WIDTH + token) * HEADS + head * group + m % group) * D)[:, None] + d[None, :]
    if active > 1:
        _add_up(
            mixed, top, total, part, part_top, part_total, arrived, to, good, m, query_ok, d, row * KV + head, split, active, D, DP, BM,
            SPLITS, AT_ONCE,
        )
    else:
        tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=good)


@triton.jit
def _row_of(token, row_start, R, RP: tl.constexpr):
    """The row that each token belongs to."""
    r = tl.arange(0, RP)
    starts = tl.load(row_start + r, mask=r < R, other=2147483647)
    return tl.sum((starts[None, :] <= token[:, None]).to(tl.int32), 1) - 1


@triton.jit(do_not_specialize=["T", "R", "TABLE"])
def rotate_kernel(
    qkv, cos, sin, q_norm, k_norm, key_pages, value_pages, positions, row_start, table, q_out, T, R, TABLE, eps, HEADS: tl.constexpr,
    KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):
    """Norm and rotate q into q_out [T,HEADS,D]; norm, rotate and write k, and write v, into the pages."""
    head = tl.program_id(1)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    ok = t < T
    good = ok[:, None] & (d < D)[None, :]
    position = tl.load(positions + t, mask=ok, other=0).to(tl.int32)
    base = (qkv + t.to(tl.int64) * ((HEADS + 2 * KV) * D) + head * D)[:, None]
    if head < HEADS:
        q = _rotated(base, ok, position, q_norm, cos, sin, d, eps, D, NORM)
        tl.store(q_out + (t.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :], q, mask=good)
    else:
        row = _row_of(t, row_start, R, RP)
        page = tl.load(table + row.to(tl.int64) * TABLE + position // BLOCK, mask=ok, other=0).to(tl.int64)
        if head < HEADS + KV:
            to = ((page * KV + head - HEADS) * BLOCK + position % BLOCK) * D
            tl.store(key_pages + to[:, None] + d[None, :], _rotated(base, ok, position, k_norm, cos, sin, d, eps, D, NORM), mask=good)
        else:
            to = ((page * KV + head - HEADS - KV) * BLOCK + position % BLOCK) * D
            tl.store(value_pages + to[:, None] + d[None, :], tl.load(base + d[None, :], mask=good, other=0.0), mask=good)


@triton.jit(do_not_specialize=["R", "TABLE"])
def prefill_kernel(
    q, key_pages, value_pages, positions, row_start, table, out, R, TABLE, scale, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):
    """Attention of ragged rows, whose keys and values are in the pages already. A program: BM tokens of a row, one head.
    The tiles of all rows are numbered through; there are more programs than tiles, since only the device knows the rows."""
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
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN
    table += row.to(tl.int64) * TABLE
    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DP), tl.float32)
    for p0 in range(low, end, BN):
        p = p0 + tl.arange(0, BN)
        keys = _from_pages(key_pages, table, p, end, head // (HEADS // KV), d, KV, D, BLOCK)
        scores = tl.dot(queries, keys.T) * (scale * LOG2E)
        seen = p[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (p[None, :] > at[:, None] - WINDOW)
        values = _from_pages(value_pages, table, p, end, head // (HEADS // KV), d, KV, D, BLOCK)
        top, total, mixed = _step(tl.where(seen, scores, float("-inf")), values, top, total, mixed)
    tl.store(out + where, (mixed / total[:, None]).to(out.dtype.element_ty), mask=good)


def splits_for(rows: int, kv_heads: int, context: int) -> int:
    """Into how many stretches a decode launch may cut a context of at most so many positions: enough programs for the
    device, none shorter than SHORTEST."""
    return max(1, min(triton.cdiv(PROGRAMS, rows * kv_heads), triton.cdiv(context, SHORTEST), 64))


def attend_decode(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, key_pages: Tensor,
    value_pages: Tensor, batch: Batch, width: int, context: int, arrived: Tensor, pdl: bool,
) -> Tensor:
    """Every row has `width` tokens; no position is `context` or more. arrived: int32 zeros, a row and key head each."""
    heads, kv, dim, window, eps = shape
    rows = batch.block_table.shape[0]
    bm = max(16, power_of_two(width * (heads // kv)))
    padded = max(16, power_of_two(dim))
    splits = splits_for(rows, kv, context)
    out = qkv.new_empty(qkv.shape[0], heads * dim)
    part = qkv.new_empty((rows * kv * splits, bm, dim) if splits > 1 else (1, 1, 1), dtype=torch.float32)
    sums = qkv.new_empty((2, rows * kv * splits, bm), dtype=torch.float32)
    decode_kernel[(rows, kv, splits)](
        qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, key_pages, value_pages, batch.positions,
        batch.block_table, out, part, sums[0], sums[1], arrived, batch.block_table.stride(0), dim**-0.5, eps, WIDTH=width, HEADS=heads,
        KV=kv, D=dim, DP=padded, BM=bm, BT=max(16, power_of_two(width)), BN=TILE, BLOCK=key_pages.shape[2], SPLITS=splits,
        SHORTEST=SHORTEST, WINDOW=window, NORM=q_norm is not None, AT_ONCE=max(1, min(power_of_two(splits), 16384 // (bm * padded))),
        PDL=pdl, num_warps=4 if bm <= 32 else 8, num_stages=1, **({"launch_pdl": True} if pdl else {}),
    )
    return out


def attend_ragged(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, key_pages: Tensor,
    value_pages: Tensor, batch: Batch,
) -> Tensor:
    """Rows of any lengths: prefill."""
    heads, kv, dim, window, eps = shape
    total, rows = qkv.shape[0], batch.block_table.shape[0]
    padded, rows_padded, block = max(16, power_of_two(dim)), power_of_two(rows), key_pages.shape[2]
    q = qkv.new_empty(total, heads, dim)
    out = qkv.new_empty(total, heads * dim)
    table = batch.block_table.stride(0)
    rotate_kernel[(triton.cdiv(total, 16), heads + 2 * kv)](
        qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, key_pages, value_pages, batch.positions,
        batch.row_start, batch.block_table, q, total, rows, table, eps, HEADS=heads, KV=kv, D=dim, DP=padded, BM=16, RP=rows_padded,
        BLOCK=block, NORM=q_norm is not None, num_warps=4,
    )
    bm = 64 if total > 16 * rows else 16
    prefill_kernel[(triton.cdiv(total, bm) + rows - 1, heads)](
        q, key_pages, value_pages, batch.positions, batch.row_start, batch.block_table, out, rows, table, dim**-0.5, HEADS=heads, KV=kv,
        D=dim, DP=padded, BM=bm, BN=64, RP=rows_padded, BLOCK=block, WINDOW=window, num_warps=4, num_stages=2,
    )
    return out
