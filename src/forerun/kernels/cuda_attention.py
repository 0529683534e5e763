"""Paged attention of a decode step as one Triton launch, with the q and k norms, the rotation and the cache write in it.
Prompts are in cuda_prefill.py.

All rows have the same number of tokens, or (ragged) up to that many. A program takes one row, one key head with all its query
heads, and one split: a range of the row's positions. The device works out the length of the splits, so a launch for a long
context costs a short one little. Before its wait, a program reads what earlier steps wrote to the pages. It takes the new
keys and values from qkv, not from the pages, so no program waits for a write. The program that ends last merges a row's
splits, in order.

Tiles and splits begin at fixed positions, and a position that a query may not attend to adds an exact zero to its sums. So a
token's attention is summed in the same order in a plain step and in a verify step of as many rows, and in every batch with
the same Cut. (An exception: a block of tokens may cross a position at which the splits double.)
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import AttentionShape, Batch
from forerun.kernels.cuda_products import begin, launch_options, power_of_two, prefetch, wait

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # the running maximum at first; with -inf, differences would be NaN


@triton.jit
def angles_at(cos, sin, position, there, h, D: tl.constexpr):
    """The cosines and sines that heads at these positions [ROWS] are rotated by, [ROWS,HP] each; h: 0 .. HP - 1."""
    at = position[:, None] * (D // 2) + h[None, :]
    good = there[:, None] & (h < D // 2)[None, :]
    return tl.load(cos + at, mask=good, other=0.0), tl.load(sin + at, mask=good, other=0.0)


@triton.jit
def head_norm(norm, h, D: tl.constexpr, NORM: tl.constexpr):
    """A norm's weights for the two halves of a head, [1,HP] each."""
    if NORM:
        half: tl.constexpr = D // 2
        a = tl.load(norm + h, mask=h < half, other=0.0).to(tl.float32)[None, :]
        b = tl.load(norm + half + h, mask=h < half, other=0.0).to(tl.float32)[None, :]
        return a, b
    else:
        return h, h


@triton.jit
def halves_of(base, there, h, D: tl.constexpr):
    """The first and the second halves of the heads that start at base [ROWS], [ROWS,HP] each."""
    good = there[:, None] & (h < D // 2)[None, :]
    at = base[:, None] + h[None, :]
    return tl.load(at, mask=good, other=0.0), tl.load(at + D // 2, mask=good, other=0.0)


@triton.jit
def rotated(halves, angles, by, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads normed and rotated, given and returned as two halves [ROWS,HP], in their dtype. angles: from angles_at; by: from
    head_norm."""
    dtype: tl.constexpr = halves[0].dtype
    a = halves[0].to(tl.float32)
    b = halves[1].to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / D + eps)
        a = ((a * scale).to(dtype).to(tl.float32) * by[0]).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * by[1]).to(dtype).to(tl.float32)
    return (a * angles[0] - b * angles[1]).to(dtype), (b * angles[0] + a * angles[1]).to(dtype)


@triton.jit
def places(table, p, ok, head, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """The offset in the pages of a head's key (and value) at position p. table: the row's block table. FAR: offsets need
    64 bits."""
    u = p.to(tl.uint32)
    page = tl.load(table + u // BLOCK, mask=ok, other=0)
    if FAR:
        page = page.to(tl.int64)
    return ((page * KV + head) * BLOCK + (u % BLOCK).to(tl.int32)) * D


@triton.jit
def _stored(
    key_pages, value_pages, table, p, there, head, h, d, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FAR: tl.constexpr,
):
    """Keys and values of the pages at positions p [BN], zero where not `there`: halves of keys [BN,HP] each, values [BN,DP]."""
    half: tl.constexpr = D // 2
    at_pages = places(table, p, there, head, KV, D, BLOCK, FAR)[:, None]
    ok = there[:, None] & (h < half)[None, :]
    keys_a = tl.load(key_pages + at_pages + h[None, :], mask=ok, other=0.0)
    keys_b = tl.load(key_pages + at_pages + half + h[None, :], mask=ok, other=0.0)
    return keys_a, keys_b, tl.load(value_pages + at_pages + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _with_new(
    scores, values, fresh, v_base, stride, p, first, count, d, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A tile's scores [BM,BN] and values [BN,DP], with those of the new tokens put in at their positions. So the order of the
    sums does not depend on which tokens are new. fresh: the new keys' scores [BM,TOKENS]; v_base: the first new value."""
    new = (p >= first) & (p < first + count)
    at = tl.where(new, p - first, 0)
    theirs = tl.gather(fresh, tl.broadcast_to(at[None, :], (BM, BN)), 1)
    v = tl.load((v_base + at * stride)[:, None] + d[None, :], mask=new[:, None] & (d < D)[None, :], other=0.0)
    return tl.where(new[None, :], theirs, scores), tl.where(new[:, None], v, values)


@triton.jit
def _seen(scores, p, low, own, last, WINDOW: tl.constexpr):
    """The scores [BM,BN], with -inf at positions that a query may not attend to. low: the first position of the row's window;
    own, last: each query's own position and the last one that it attends to, [BM,1]."""
    seen = (p >= low)[None, :] & (p[None, :] <= last)
    if WINDOW > 0:
        seen = seen & (p[None, :] > own - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def softmax_step(scores, values, top, total, mixed):
    """Add a tile of scores [...,BM,BN] (base-2 logarithms) and values [...,BN,DP] to the running softmax (online softmax,
    Milakov and Gimelshein 1805.02867). top: the maximum so far; total: the sum; mixed: the weighted values."""
    last: tl.constexpr = len(scores.shape) - 1
    higher = tl.maximum(top, tl.max(scores, last))
    share = tl.exp2(scores - tl.expand_dims(higher, last))
    fade = tl.exp2(top - higher)
    mixed = tl.dot(share.to(values.dtype), values, mixed * tl.expand_dims(fade, last))
    return higher, total * fade + tl.sum(share, last), mixed


@triton.jit
def _add_up(
    mixed, top, total, part, part_top, part_total, arrived, to, good, m, query_ok, d, mine, split, active, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Store the result of this split. The program that stores the last one merges all splits, in order, and stores at `to`."""
    slot = mine * SPLITS + split
    tl.store(part + (slot * BM + m)[:, None] * D + d[None, :], mixed, mask=good)
    tl.store(part_top + slot * BM + m, top, mask=query_ok)
    tl.store(part_total + slot * BM + m, total, mask=query_ok)
    tl.debug_barrier()  # every thread has stored its part before the counter says so
    before = tl.atomic_add(arrived + mine, 1, sem="acq_rel")
    if before == active - 1:
        # a short loop, AT_ONCE splits at a time: the latency of loads and of fetching instructions dominates here
        top = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        mixed = tl.zeros((BM, DP), tl.float32)
        for s0 in range(0, active, AT_ONCE):
            loaded = ()
            for i in tl.static_range(AT_ONCE):
                there = s0 + i < active
                index = (mine * SPLITS + s0 + i) * BM + m
                loaded += ((
                    tl.load(part_top + index, mask=query_ok & there, other=LOWEST, cache_modifier=".cg"),
                    tl.load(part_total + index, mask=query_ok & there, other=0.0, cache_modifier=".cg"),
                    tl.load(part + index[:, None] * D + d[None, :], mask=good & there, other=0.0, cache_modifier=".cg"),
                ),)
            for i in tl.static_range(AT_ONCE):
                higher = tl.maximum(top, loaded[i][0])
                fade = tl.exp2(top - higher)
                share = tl.exp2(loaded[i][0] - higher)
                total = total * fade + loaded[i][1] * share
                mixed = mixed * fade[:, None] + loaded[i][2] * share[:, None]
                top = higher
        tl.store(to, (mixed * (1.0 / total)[:, None]).to(to.dtype.element_ty), mask=good)
        tl.store(arrived + mine, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["TABLE"])
def decode_kernel(
    qkv, cos, sin, q_norm, k_norm, key_pages, value_pages, positions, row_start, table, out, part, part_top, part_total,
    arrived, TABLE, scale, eps, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr,
    BM: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, FAR: tl.constexpr, AT_ONCE: tl.constexpr,
    RAGGED: tl.constexpr, BOTH: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    """QUERIES: blocks of up to BM queries, for each row and key head. LEAST: the fewest tiles of BN positions in a split.
    RAGGED: rows have up to WIDTH tokens. BOTH: the tokens of a row attend to each other in both directions. EARLY: each
    tile is loaded into registers one iteration before its use, the first one before the wait; otherwise tiles are prefetched
    into the L2 cache before the wait."""
    begin(PDL)
    row, split = tl.program_id(0), tl.program_id(2)
    head, queries = tl.program_id(1) // QUERIES, tl.program_id(1) % QUERIES
    group: tl.constexpr = HEADS // KV
    stride: tl.constexpr = (HEADS + 2 * KV) * D
    table += row.to(tl.int64) * TABLE
    half: tl.constexpr = D // 2
    size: tl.constexpr = (WIDTH * group + QUERIES - 1) // QUERIES  # queries of a block
    d = tl.arange(0, DP)
    h = tl.arange(0, HP)

    if RAGGED:
        token0 = tl.load(row_start + row)
        count = tl.load(row_start + row + 1) - token0
    else:
        token0 = row * WIDTH
        count = WIDTH
    first = tl.load(positions + token0).to(tl.int32)  # the pages hold the positions below
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
    begins = low // BN  # the first tile; tiles are numbered from position 0
    tiles = tl.cdiv(first + count, BN) - begins
    each = tiles * 0 + LEAST  # tiles of a split; doubled until SPLITS are enough, so that it depends on the context only
    while each * SPLITS < tiles:
        each *= 2
    active = tl.cdiv(tiles, each)
    done = split >= active
    if RAGGED:
        done = done | (queries * size >= count * group)  # the row has fewer queries
    if done:
        return
    here = tl.minimum(each, tiles - split * each)
    start = (begins + split * each) * BN
    m = queries * size + tl.arange(0, BM)  # queries: query m is head m % group, of this key head's group, of token m // group
    token = m // group
    query_ok = m < tl.minimum(count * group, queries * size + size)
    own = (first + token)[:, None]  # a query's own position
    last = own  # the last one it attends to
    if BOTH:
        last = own * 0 + first + count - 1
    t = tl.arange(0, TOKENS)  # the new tokens
    is_new = t < count
    # what earlier steps wrote is complete, so it may be read before the wait
    q_angles = angles_at(cos, sin, first + token, query_ok, h, D)
    k_angles = angles_at(cos, sin, first + t, is_new, h, D)
    if EARLY:
        p = start + tl.arange(0, BN)
        there = (p >= low) & (p < first)
        keys_a, keys_b, values = _stored(key_pages, value_pages, table, p, there, head, h, d, KV, D, BLOCK, FAR)
    if PDL:
        lines: tl.constexpr = DP // 64 if DP >= 64 else 1
        i = tl.arange(0, BN * lines)
        for j in range(1 if EARLY else 0, here):
            ahead = start + j * BN + i // lines
            in_pages = (ahead >= low) & (ahead < first)
            at_pages = places(table, ahead, in_pages, head, KV, D, BLOCK, FAR) + i % lines * 64
            prefetch(key_pages + at_pages, PDL)
            prefetch(value_pages + at_pages, PDL)
    by = head_norm(q_norm, h, D, NORM), head_norm(k_norm, h, D, NORM)
    wait(PDL)

    # all loads are issued before any value is used
    q = halves_of(qkv + (token0 + token) * stride + (head * group + m % group) * D, query_ok, h, D)
    k_base = qkv + token0 * stride + (HEADS + head) * D
    k = halves_of(k_base + t * stride, is_new, h, D)
    v_base = k_base + KV * D
    v = tl.load((v_base + t * stride)[:, None] + d[None, :], mask=is_new[:, None] & (d < D)[None, :], other=0.0)
    q_a, q_b = rotated(q, q_angles, by[0], eps, D, NORM)
    end = start + here * BN
    fresh = tl.zeros((BM, TOKENS), tl.float32)  # the new keys' scores
    if end > first:  # write the new keys and values of this split into the pages
        k_a, k_b = rotated(k, k_angles, by[1], eps, D, NORM)
        # these are zero there already; the masks make the compiler convert the layout of the result, not of each load
        k_a = tl.where(is_new[:, None], k_a, 0.0)
        k_b = tl.where(is_new[:, None], k_b, 0.0)
        fresh = tl.dot(q_b, k_b.T, tl.dot(q_a, k_a.T))
        mine = is_new & (first + t >= start) & (first + t < end)
        to_pages = places(table, first + t, mine, head, KV, D, BLOCK, FAR)[:, None]
        ok = mine[:, None] & (h < half)[None, :]
        tl.store(key_pages + to_pages + h[None, :], k_a, mask=ok)
        tl.store(key_pages + to_pages + half + h[None, :], k_b, mask=ok)
        tl.store(value_pages + to_pages + d[None, :], v, mask=mine[:, None] & (d < D)[None, :])

    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DP), tl.float32)
    for j in range(here):
        p = start + j * BN + tl.arange(0, BN)
        if not EARLY:
            there = (p >= low) & (p < first)
            keys_a, keys_b, values = _stored(key_pages, value_pages, table, p, there, head, h, d, KV, D, BLOCK, FAR)
        scores = tl.dot(q_b, keys_b.T, tl.dot(q_a, keys_a.T))  # [BM,BN]
        if start + j * BN + BN > first:
            scores, values = _with_new(scores, values, fresh, v_base, stride, p, first, count, d, D, BM, BN, TOKENS)
        scores = _seen(scores * (scale * LOG2E), p, low, own, last, WINDOW)
        top, total, mixed = softmax_step(scores, values, top, total, mixed)
        if EARLY:
            p += BN
            there = (p >= low) & (p < first) & (j + 1 < here)
            keys_a, keys_b, values = _stored(key_pages, value_pages, table, p, there, head, h, d, KV, D, BLOCK, FAR)

    good = query_ok[:, None] & (d < D)[None, :]
    to = out + (((token0 + token) * HEADS + head * group + m % group) * D)[:, None] + d[None, :]
    if active > 1:
        _add_up(
            mixed, top, total, part, part_top, part_total, arrived, to, good, tl.arange(0, BM), query_ok, d,
            (row * KV + head) * QUERIES + queries, split, active, D, DP, BM, SPLITS, AT_ONCE,
        )
    else:
        tl.store(to, (mixed * (1.0 / total)[:, None]).to(out.dtype.element_ty), mask=good)


class Cut(NamedTuple):
    """The configuration of a decode launch. warps: warps of a program. positions: positions of a tile. least: the fewest tiles
    of a split. programs: a launch with this many fills the device and is not split. at_once: splits that the merge loads at
    a time. most: the most splits of a row. early: EARLY of decode_kernel, which needs so many registers that it pays for few
    programs only. registers: the most registers of a thread (0: the compiler's choice)."""

    warps: int
    positions: int
    least: int
    programs: int = 264
    at_once: int = 4
    most: int = 16
    early: bool = False
    registers: int = 0


FEW = Cut(8, 128, 1, at_once=8, early=True)
# (few rows, heads wider than 64) -> the fastest configuration, measured on an H200 by benchmarks/gpu/kernels.py
CUTS = {
    (True, False): FEW, (True, True): FEW,
    (False, False): Cut(4, 128, 1, registers=128), (False, True): Cut(4, 64, 1, most=8),
}  # fmt: skip


def cut_for(dim: int, programs: int) -> Cut:
    """The configuration for heads of this size. programs: rows times key heads. The number of tokens of a row has no say, so
    that a verify step sums as a plain step does."""
    wide = dim > 64
    cut = CUTS[programs <= (16 if wide else 48), wide]
    return cut if dim <= 128 else cut._replace(positions=64)  # so that a tile fits in registers


def attend_decode(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor, batch: Batch, width: int, context: int, arrived: Tensor, pdl: int,
    ragged: bool = False,
) -> Tensor:
    """Kernels.attend for rows of `width` tokens each (ragged: 1 to `width`) at positions below `context`. arrived: int32
    zeros, at least one for each row, key head and block of up to 16 queries; left zero."""
    heads, kv, dim, window, eps, _, both = shape
    rows = batch.block_table.shape[0]
    cut = cut_for(dim, rows * kv)
    bm = 16
    queries = triton.cdiv(width * (heads // kv), bm)
    padded = max(16, power_of_two(dim))
    most = triton.cdiv(context, cut.positions * cut.least)  # splits of the longest context
    splits = min(cut.most, power_of_two(most)) if rows * kv * queries < cut.programs else 1
    out = qkv.new_empty(qkv.shape[0], heads * dim)
    slots = rows * kv * queries * splits
    part = qkv.new_empty((slots, bm, dim) if splits > 1 else (1, 1, 1), dtype=torch.float32)
    sums = qkv.new_empty((2, slots, bm), dtype=torch.float32)
    decode_kernel[(rows, kv * queries, splits)](
        qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, key_pages, value_pages,
        batch.positions, batch.row_start, batch.block_table, out, part, sums[0], sums[1], arrived,
        batch.block_table.stride(0), dim**-0.5, eps, WIDTH=width, HEADS=heads, KV=kv, D=dim, DP=padded,
        HP=max(16, power_of_two(dim // 2)), BM=bm, QUERIES=queries, TOKENS=max(16, power_of_two(width)), BN=cut.positions,
        BLOCK=key_pages.shape[2], SPLITS=splits, LEAST=cut.least, WINDOW=window, NORM=q_norm is not None,
        FAR=key_pages.numel() >= 1 << 31, AT_ONCE=cut.at_once, RAGGED=ragged, BOTH=both,
        EARLY=cut.early, PDL=pdl, num_stages=1,
        **launch_options(cut.warps, pdl), **({"maxnreg": cut.registers} if cut.registers else {}),
    )
    return out
