"""The matrix products of a decode step as Triton kernels, each with what stands before it (the RMS norm) and after it
(bias, residual, gate) in the same launch. Knows tiles and launches; which tiles suit which shape is `choose`.

A decode step is a chain of short kernels, so what counts is how soon each can start. With programmatic dependent launch
a kernel starts while the one before it still runs, fetches its weights, which depend on nothing, and only then waits for
its input. When it lets the next one start is its PDL:
    AFTER_WAIT: what the next one reads before its own wait is complete if anything but its direct predecessor wrote it.
    AT_ONCE: kernels further on may fetch their weights too, as far as they find room, while the ones before them run. What
    they read before their waits has to be complete when the chain begins.

Up to 16 tokens share one tile, so that each output is summed in the same order for 1 token as for 16: a verify step of one
request rounds as plain decoding does. More tokens are cut in other ways, and round in others.
"""

# Triton's functions have no types to give: a kernel's arguments are pointers, numbers and constants of its own
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

AFTER_WAIT, AT_ONCE = 1, 2  # and 0: no programmatic dependent launch
RUN = tl.constexpr(256)  # weights of a row that one instruction calls into the cache


class Tiles(NamedTuple):
    """How a product is cut. columns: outputs of a program. warps. step: the part of K that a program takes at a time
    (0: all of K at once, held in registers). stages: of the pipeline over K (with step 0: the parts, each a power of two, that
    K is held in). split: warps that share a step of K.
    ahead: how much of each row of weights is called into the L2 cache before the wait, a power of two from 64 on, or 0.
    apart: a norm before the product is a launch of its own, which pays where K is so long that each program's normalising
    of all of it costs more than the launch. tokens: of a program, a power of two from 16 on."""

    columns: int
    warps: int
    step: int = 0
    stages: int = 3
    split: int = 1
    ahead: int = 512
    apart: bool = False
    tokens: int = 16


@triton.jit
def begin(PDL: tl.constexpr):
    """What a kernel does first: let the next one start, if it may so soon."""
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before this one; then let the next one start, if it has not."""
    if PDL:
        tl_cuda.gdc_wait()
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask for the 128 bytes at each pointer to be brought into the L2 cache."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.uint64, bitcast=True)], dtype=tl.int32,
            is_pure=False, pack=1,
        )


@triton.jit
def prefetch_runs(pointers, COUNT: tl.constexpr, PDL: tl.constexpr):
    """Ask for the COUNT two-byte values from each pointer on to be brought into the L2 cache, in one instruction each."""
    if PDL:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [pointers.to(tl.uint64, bitcast=True), tl.full(pointers.shape, COUNT * 2, tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )


@triton.jit
def _along(start, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Positions along K from start on, folded so that each warp takes its own stretch: [SPLIT,1,WIDTH/SPLIT]."""
    step: tl.constexpr = WIDTH // SPLIT
    return start + tl.arange(0, SPLIT)[:, None, None] * step + tl.arange(0, step)[None, None, :]


@triton.jit
def _rows(base, rows, there, k, K: tl.constexpr, EVEN: tl.constexpr):
    """[SPLIT,ROWS,STEP] of base [...,K], zero for rows that are not there; EVEN: k is below K everywhere."""
    pointers = base + rows[None, :, None] * K + k
    if EVEN:
        return tl.load(pointers, mask=there[None, :, None], other=0.0)
    else:
        return tl.load(pointers, mask=there[None, :, None] & (k < K), other=0.0)


@triton.jit
def _normed(x, scale, by):
    """x [SPLIT,BM,STEP] normalised: rounded before the norm's weight is applied, and after. scale: [BM,1]; by: the weight,
    [SPLIT,1,STEP]."""
    return ((x.to(tl.float32) * scale[None, :, :]).to(x.dtype).to(tl.float32) * by).to(x.dtype)


@triton.jit
def _across(sums):
    """The sum over the first of three dimensions, a power of two: halves onto halves, each thread by itself, which takes one
    way through shared memory where tl.sum takes several."""
    count: tl.constexpr = sums.shape[0]
    if count == 1:
        return tl.reshape(sums, (sums.shape[1], sums.shape[2]))
    else:
        halves = tl.permute(tl.reshape(sums, (2, count // 2, sums.shape[1], sums.shape[2])), (1, 2, 3, 0))
        first, second = tl.split(halves)
        return _across(first + second)


@triton.jit
def _finish(sums, add, old, out, m, n, T, N: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):
    """Round where torch's separate operations would, and store. sums: [BM,BN], with GATE [BM,2 BN], the gates first; add:
    [BN], the bias; old: [BM,BN], the residual."""
    if GATE:
        sums, more = tl.split(tl.permute(tl.reshape(sums, (sums.shape[0], 2, n.shape[0])), (0, 2, 1)))
    ok = (m < T)[:, None] & (n < N)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    if BIAS:
        sums += add[None, :]
    if GATE:
        dtype: tl.constexpr = out.dtype.element_ty
        gate = sums.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(out + at, (silu * more.to(dtype).to(tl.float32)).to(dtype), mask=ok)
    elif ADD:
        tl.store(out + at, (old.to(tl.float32) + sums.to(old.dtype).to(tl.float32)).to(old.dtype), mask=ok)
    else:
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _bias(bias, n, N: tl.constexpr, BIAS: tl.constexpr):
    """What _finish adds, read early, since every later read is waited for."""
    if BIAS:
        return tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return n


@triton.jit
def _residual(residual, m, n, T, N: tl.constexpr, ADD: tl.constexpr):
    """The same of the residual, which is there once the wait is over."""
    if ADD:
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        return tl.load(residual + at, mask=(m < T)[:, None] & (n < N)[None, :], other=0.0)
    else:
        return n


@triton.jit
def _weight_rows(block, N: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """The rows of weights of a block of columns, from the block's first on, and whether each is there."""
    if GATE:  # gates and their ups together, so that they are one product
        r = tl.arange(0, 2 * BN)
        return tl.where(r < BN, r, r - BN + N), block * BN + r % BN < N
    else:
        r = tl.arange(0, BN)
        return r, block * BN + r < N


@triton.jit(do_not_specialize=["T"])
def whole_kernel(
    x, norm, weight, bias, residual, out, T, eps, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, WIDTHS: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """All of K at once, in parts that start at STARTS and are WIDTHS wide, each with sums of its own, so that the chains of
    products do not wait for each other. Weights, the norm's and the bias are in registers before the wait."""
    begin(PDL)
    block = tl.program_id(1)
    rows, there = _weight_rows(block, N, BN, GATE)
    mine = weight + block.to(tl.int64) * (BN * K)  # 64-bit once, offsets inside a tile are small
    weights = ()
    norms = ()
    for part in tl.static_range(len(WIDTHS)):
        k = _along(STARTS[part], WIDTHS[part], SPLIT)
        weights += (_rows(mine, rows, there, k, K, STARTS[part] + WIDTHS[part] <= K),)
        if NORM:
            norms += (tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32),)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    add = _bias(bias, n, N, BIAS)
    wait(PDL)
    tokens = ()
    for part in tl.static_range(len(WIDTHS)):  # all of them asked for before the first is used
        k = _along(STARTS[part], WIDTHS[part], SPLIT)
        tokens += (_rows(x, m, m < T, k, K, STARTS[part] + WIDTHS[part] <= K),)
    old = _residual(residual, m, n, T, N, ADD)
    if NORM:
        squares = tl.zeros((SPLIT, BM, WIDTHS[0] // SPLIT), tl.float32)
        sums = tl.zeros((SPLIT, BM, 1), tl.float32)
        for part in tl.static_range(len(WIDTHS)):
            wide = tokens[part].to(tl.float32)
            if WIDTHS[part] == WIDTHS[0]:
                squares += wide * wide
            else:
                sums += tl.sum(wide * wide, 2, keep_dims=True)
        sums += tl.sum(squares, 2, keep_dims=True)
        scale = tl.rsqrt(_across(sums) / K + eps)  # [BM,1]
        normed = ()
        for part in tl.static_range(len(WIDTHS)):
            normed += (_normed(tokens[part], scale, norms[part]),)
        tokens = normed
    sums = tl.zeros((SPLIT, BM, rows.shape[0]), tl.float32)
    for part in tl.static_range(len(WIDTHS)):
        # taken away negated, since the compiler would make an addition one chain of products again
        sums -= -1.0 * tl.dot(tokens[part], tl.permute(weights[part], (0, 2, 1)))
    _finish(_across(sums), add, old, out, m, n, T, N, GATE, ADD, BIAS)


@triton.jit(do_not_specialize=["T"])
def loop_kernel(
    x, norm, weight, bias, residual, out, T, eps, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """STEP of K at a time, in a pipeline; the first AHEAD of each row of weights are called into L2 before the wait."""
    begin(PDL)
    block = tl.program_id(1)
    rows, there = _weight_rows(block, N, BN, GATE)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    add = _bias(bias, n, N, BIAS)
    even: tl.constexpr = K % STEP == 0
    mine = weight + block.to(tl.int64) * (BN * K)  # 64-bit once, offsets inside a tile are small
    if PDL and AHEAD > 0:
        run: tl.constexpr = min(AHEAD, RUN)
        prefetch_runs(mine + tl.where(there, rows, 0)[:, None] * K + tl.arange(0, AHEAD // run)[None, :] * run, run, PDL)
    wait(PDL)
    old = _residual(residual, m, n, T, N, ADD)
    scale = tl.zeros((BM, 1), tl.float32)
    if NORM:
        chunk: tl.constexpr = 16384 // BM
        squares = tl.zeros((BM, chunk), tl.float32)
        for k0 in range(0, K, chunk):
            k = k0 + tl.arange(0, chunk)
            wide = tl.load(x + m[:, None] * K + k[None, :], mask=(m < T)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + eps)
    if SPLIT == 1:
        sums = tl.zeros((BM, rows.shape[0]), tl.float32)
        for k0 in range(0, K, STEP):
            k = k0 + tl.arange(0, STEP)
            part = tl.load(x + m[:, None] * K + k[None, :], mask=(m < T)[:, None] & (even | (k < K)[None, :]), other=0.0)
            if NORM:
                by = tl.load(norm + k, mask=even | (k < K), other=0.0).to(tl.float32)
                part = ((part.to(tl.float32) * scale).to(part.dtype).to(tl.float32) * by[None, :]).to(part.dtype)
            right = tl.load(mine + rows[:, None] * K + k[None, :], mask=there[:, None] & (even | (k < K)[None, :]), other=0.0)
            sums = tl.dot(part, right.T, sums)
    else:
        folded = tl.zeros((SPLIT, BM, rows.shape[0]), tl.float32)
        for k0 in range(0, K, STEP):
            k = _along(k0, STEP, SPLIT)
            part = _rows(x, m, m < T, k, K, even)
            if NORM:
                part = _normed(part, scale, tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32))
            folded = tl.dot(part, tl.permute(_rows(mine, rows, there, k, K, even), (0, 2, 1)), folded)
        sums = _across(folded)
    _finish(sums, add, old, out, m, n, T, N, GATE, ADD, BIAS)


@triton.jit
def best_kernel(
    tops, firsts, out, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BROKEN: tl.constexpr, PDL: tl.constexpr
):
    """The largest of a row's block maxima, and of equals the first; BROKEN if it is not finite."""
    row = tl.program_id(0)
    b = tl.arange(0, WIDTH)
    wait(PDL)
    top = tl.load(tops + row * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"))
    first = tl.load(firsts + row * BLOCKS + b, mask=b < BLOCKS, other=2147483647)
    highest = tl.max(top, 0)
    best = tl.min(tl.where(top == highest, first, 2147483647), 0)
    finite = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(out + row, tl.where(finite, best, BROKEN).to(tl.int64))


@triton.jit
def block_best_kernel(logits, tops, firsts, V, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """The largest of WIDTH logits of a row, a NaN as an infinite one, and of equals the first."""
    row, block = tl.program_id(0), tl.program_id(1)
    v = block * WIDTH + tl.arange(0, WIDTH)
    wait(PDL)
    x = tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, 0)
    tl.store(tops + row * tl.num_programs(1) + block, top)
    tl.store(firsts + row * tl.num_programs(1) + block, tl.min(tl.where(x == top, v, 2147483647), 0))


@triton.jit
def rms_norm_kernel(x, norm, out, eps, K: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    by = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    wait(PDL)
    part = tl.load(x + row * K + k, mask=k < K, other=0.0)
    wide = part.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)).to(part.dtype)
    tl.store(out + row * K + k, (scaled.to(tl.float32) * by).to(part.dtype), mask=k < K)


@triton.jit
def silu_mul_kernel(both, out, INNER: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """both [T,2I] -> silu(first half) * second half"""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wait(PDL)
    gate = tl.load(both + row * 2 * INNER + i, mask=i < INNER, other=0.0)
    up = tl.load(both + row * (2 * INNER) + INNER + i, mask=i < INNER, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * INNER + i, (silu * up.to(tl.float32)).to(gate.dtype), mask=i < INNER)


def power_of_two(n: int) -> int:
    return triton.next_power_of_2(n)


def parts(k: int, count: int, least: int) -> tuple[int, ...]:
    """The powers of two, of at least `least`, that K is held in, descending: `count` of them, or one more, which make it up
    with as little to spare as they can."""
    found: list[int] = []
    while (left := k - sum(found)) > 0:
        below = power_of_two(left + 1) // 2
        found.append(max(least, below if len(found) < max(count - 1, 1) else power_of_two(left)))
    while len(found) < count and found[0] >= 2 * least:
        found = sorted([found[0] // 2, found[0] // 2, *found[1:]], reverse=True)
    return tuple(found)


def launch_options(warps: int, pdl: int) -> dict[str, Any]:
    """Triton's own arguments of a launch."""
    return {"num_warps": warps, "launch_pdl": True} if pdl else {"num_warps": warps}


def launch(
    tiles: Tiles, pdl: int, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor, gate: bool = False,
) -> None:
    """One product: out [T,N] of x [T,K] and weight [N,K] ([2N,K] with gate)."""
    total, k = x.shape
    n = weight.shape[0] // 2 if gate else weight.shape[0]
    bm = tiles.tokens
    grid = (triton.cdiv(total, bm), triton.cdiv(n, tiles.columns))  # blocks of tokens side by side, to read the weights once
    dummy = x
    args = (
        x, dummy if norm is None else norm, weight, dummy if bias is None else bias, dummy if residual is None else residual,
        out, total, eps, n, k, bm, tiles.columns,
    )
    flags: dict[str, Any] = {
        "NORM": norm is not None, "GATE": gate, "ADD": residual is not None, "BIAS": bias is not None,
        "PDL": pdl, **launch_options(tiles.warps, pdl),
    }
    if tiles.step == 0:
        widths = parts(k, tiles.stages, 16 * tiles.warps)
        starts = tuple(sum(widths[:i]) for i in range(len(widths)))
        whole_kernel[grid](*args, starts, widths, tiles.warps, **flags, num_stages=1)
    else:
        ahead = min(tiles.ahead, power_of_two(k + 1) // 2)
        loop_kernel[grid](*args, tiles.step, tiles.split, ahead, **flags, num_stages=tiles.stages)
