"""The matrix products of a decode step as Triton kernels. The RMS norm before a product and the bias, residual or gate after it
are in the same launch. cuda_cuts.py chooses the tiles for a shape.

A decode step is a chain of short kernels, so launch latency counts. With programmatic dependent launch (PDL) a kernel starts
while its predecessor still runs, fetches its weights, which no kernel writes, and only then waits for its input. PDL also
says when a kernel lets its successor start:
    AFTER_WAIT: after its own wait. Before its wait, the successor may read anything that its direct predecessor did not write.
    AT_ONCE: at its beginning, so that several successors can fetch their weights early. Before their waits they may read only
    what was complete when the chain began.

Up to 16 tokens share one tile, so each output is summed in the same order for 1 token as for 16: a verify step of one request
rounds as plain decoding does. More tokens take other tiles and round differently.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from forerun.types import require

AFTER_WAIT, AT_ONCE = 1, 2  # values of PDL; 0: no programmatic dependent launch
COMPARED = 4096  # logits that one program of block_best_kernel reads
RUN = tl.constexpr(256)  # weights of a row that one instruction prefetches


class Tiles(NamedTuple):
    """The tile configuration of a product. columns: outputs of a program. warps: warps of a program. step: how much of K a
    program multiplies at a time; 0: all of K at once, held in registers. stages: the pipeline's stages over K; with step 0
    the number of parts, each a power of two, that K is held in. split: warps that share a step of K.
    ahead: how many weights of each row are prefetched into the L2 cache before the wait, a power of two of at least 64, or 0.
    apart: the norm before the product is a launch of its own. This pays where K is long, since otherwise each program
    normalises all of K. tokens: tokens of a program, a power of two of at least 16."""

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
    """The first statement of a kernel: with AT_ONCE, let the next kernel start."""
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before this one. With AFTER_WAIT, let the next kernel start then."""
    if PDL:
        tl_cuda.gdc_wait()
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Prefetch the 128 bytes at each pointer into the L2 cache."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.uint64, bitcast=True)], dtype=tl.int32,
            is_pure=False, pack=1,
        )


@triton.jit
def prefetch_runs(pointers, COUNT: tl.constexpr, PDL: tl.constexpr):
    """Prefetch COUNT two-byte values from each pointer on into the L2 cache, by one instruction for each pointer."""
    if PDL:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [pointers.to(tl.uint64, bitcast=True), tl.full(pointers.shape, COUNT * 2, tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )


@triton.jit
def _along(start, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """WIDTH positions along K from start on, a consecutive part for each warp: [SPLIT,1,WIDTH/SPLIT]."""
    step: tl.constexpr = WIDTH // SPLIT
    return start + tl.arange(0, SPLIT)[:, None, None] * step + tl.arange(0, step)[None, None, :]


@triton.jit
def _rows(base, rows, there, k, K: tl.constexpr, EVEN: tl.constexpr):
    """[SPLIT,ROWS,STEP] of base [...,K]; rows that are not `there` are zero. EVEN: every k is below K."""
    pointers = base + rows[None, :, None] * K + k
    if EVEN:
        return tl.load(pointers, mask=there[None, :, None], other=0.0)
    else:
        return tl.load(pointers, mask=there[None, :, None] & (k < K), other=0.0)


@triton.jit
def _normed(x, scale, by):
    """x [SPLIT,BM,STEP] normalised. It is rounded before the norm's weight is applied and after. scale: [BM,1]; by: the
    norm's weight, [SPLIT,1,STEP]."""
    return ((x.to(tl.float32) * scale[None, :, :]).to(x.dtype).to(tl.float32) * by).to(x.dtype)


@triton.jit
def _across(sums):
    """The sum over the first of three dimensions, which is a power of two, by adding halves. Each thread adds its own values,
    so the data passes through shared memory once; tl.sum needs several passes."""
    count: tl.constexpr = sums.shape[0]
    if count == 1:
        return tl.reshape(sums, (sums.shape[1], sums.shape[2]))
    else:
        halves = tl.permute(tl.reshape(sums, (2, count // 2, sums.shape[1], sums.shape[2])), (1, 2, 3, 0))
        first, second = tl.split(halves)
        return _across(first + second)


@triton.jit
def _finish(sums, add, old, out, m, n, T, N: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):
    """Apply bias, gate and residual and store. Values are rounded where separate torch operations would round. sums: [BM,BN];
    with GATE [BM,2 BN], the gates first. add: the bias, [BN]; old: the residual, [BM,BN]."""
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
    """The bias for _finish. It is read before the wait, where the latency of the load is hidden."""
    if BIAS:
        return tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return n


@triton.jit
def _residual(residual, m, n, T, N: tl.constexpr, ADD: tl.constexpr):
    """The residual for _finish. It is complete only after the wait."""
    if ADD:
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        return tl.load(residual + at, mask=(m < T)[:, None] & (n < N)[None, :], other=0.0)
    else:
        return n


@triton.jit
def _weight_rows(block, N: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """The rows of weights of a block of outputs, relative to the block's first row, and whether each exists."""
    if GATE:  # gates and ups together, as one product
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
    """A product with all of K at once, in parts that start at STARTS and are WIDTHS wide. Each part has its own sums, so the
    parts' chains of products are independent. Matrix, norm and bias are in registers before the wait."""
    begin(PDL)
    block = tl.program_id(1)
    rows, there = _weight_rows(block, N, BN, GATE)
    mine = weight + block.to(tl.int64) * (BN * K)  # 64 bits here only: offsets inside a tile are small
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
    for part in tl.static_range(len(WIDTHS)):  # all loads are issued before the first value is used
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
        # a negated subtraction: the compiler would turn an addition into one chain of products
        sums -= -1.0 * tl.dot(tokens[part], tl.permute(weights[part], (0, 2, 1)))
    _finish(_across(sums), add, old, out, m, n, T, N, GATE, ADD, BIAS)


@triton.jit(do_not_specialize=["T"])
def loop_kernel(
    x, norm, weight, bias, residual, out, T, eps, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """A product with STEP of K at a time, in a pipeline. The first AHEAD weights of each row are prefetched before the wait."""
    begin(PDL)
    block = tl.program_id(1)
    rows, there = _weight_rows(block, N, BN, GATE)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    add = _bias(bias, n, N, BIAS)
    even: tl.constexpr = K % STEP == 0
    mine = weight + block.to(tl.int64) * (BN * K)  # 64 bits here only: offsets inside a tile are small
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
def block_best_kernel(logits, tops, firsts, sums, V, WIDTH: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr):
    """Of WIDTH logits of a row: the largest, its index (the first of equal ones), and with SUMS the sum of exponentials
    relative to it. A NaN counts as infinity."""
    row, block = tl.program_id(0), tl.program_id(1)
    v = block * WIDTH + tl.arange(0, WIDTH)
    wait(PDL)
    x = tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, 0)
    to = row * tl.num_programs(1) + block
    tl.store(tops + to, top)
    tl.store(firsts + to, tl.min(tl.where(x == top, v, 2147483647), 0))
    if SUMS:
        tl.store(sums + to, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0), 0))


@triton.jit
def best_of_blocks(tops, firsts, sums, row, blocks, WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """From what block_best_kernel stored of a row: the index of its largest logit, the first of equal ones; whether this logit
    is finite; and with SUMS its probability, 0 if it is not finite. WIDTH: at least `blocks`."""
    b = tl.arange(0, WIDTH)
    top = tl.load(tops + row * blocks + b, mask=b < blocks, other=float("-inf"))
    first = tl.load(firsts + row * blocks + b, mask=b < blocks, other=2147483647)
    highest = tl.max(top, 0)
    best = tl.min(tl.where(top == highest, first, 2147483647), 0).to(tl.int64)
    finite = (highest > float("-inf")) & (highest < float("inf"))
    chance = highest
    if SUMS:
        part = tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0)
        total = tl.sum(tl.where(b < blocks, tl.exp(top - highest) * part, 0.0), 0)
        chance = tl.where(finite, 1.0 / total, 0.0)
    return best, finite, chance


@triton.jit
def best_kernel(
    tops, firsts, sums, out, chances, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BROKEN: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The index of a row's largest logit, from its blocks, and with SUMS its probability; BROKEN if the logit is not finite."""
    row = tl.program_id(0)
    wait(PDL)
    best, finite, chance = best_of_blocks(tops, firsts, sums, row, BLOCKS, WIDTH, SUMS)
    tl.store(out + row, tl.where(finite, best, BROKEN))
    if SUMS:
        tl.store(chances + row, chance)


def block_best(logits: Tensor, sums: bool, pdl: int) -> tuple[Tensor, Tensor, Tensor]:
    """For best_of_blocks: tops, firsts and sums of each row's blocks, [N,blocks] each. logits: [N,V], contiguous. sums: whether
    they are wanted."""
    rows, v = logits.shape
    blocks = triton.cdiv(v, COMPARED)
    tops, totals = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
    firsts = logits.new_empty(rows, blocks, dtype=torch.int32)
    block_best_kernel[(rows, blocks)](logits, tops, firsts, totals, v, COMPARED, sums, pdl, **launch_options(4, pdl))
    return tops, firsts, totals


def best(logits: Tensor, broken: int, chances: bool, pdl: int) -> tuple[Tensor, Tensor]:
    """The index of each row's largest logit, the first of equal ones, and its probability (chances: whether it is wanted).
    `broken` and 0 where the logit is not finite.  [N,V] -> [N] int64, [N] float32"""
    tops, firsts, sums = block_best(logits, chances, pdl)
    rows, blocks = tops.shape
    ids, found = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
    given = (tops, firsts, sums, ids, found, blocks, power_of_two(blocks), broken, chances, pdl)
    best_kernel[(rows,)](*given, **launch_options(4, pdl))
    return ids, found


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


@triton.jit(do_not_specialize=["OUT"])
def join_kernel(
    a, b, c, d, e, a_norm, b_norm, c_norm, d_norm, e_norm, out, OUT, eps, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    NORMED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):
    """A program for each row and part: the part, normed if it has a norm, goes to its columns of out [T,OUT]."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = out + row * OUT
    if part == 0:
        _join(a, a_norm, to + STARTS[0], row, eps, WIDTHS[0], NORMED[0], WIDTH, PDL)
    elif part == 1:
        _join(b, b_norm, to + STARTS[1], row, eps, WIDTHS[1], NORMED[1], WIDTH, PDL)
    elif part == 2:
        _join(c, c_norm, to + STARTS[2], row, eps, WIDTHS[2], NORMED[2], WIDTH, PDL)
    elif part == 3:
        _join(d, d_norm, to + STARTS[3], row, eps, WIDTHS[3], NORMED[3], WIDTH, PDL)
    else:
        _join(e, e_norm, to + STARTS[4], row, eps, WIDTHS[4], NORMED[4], WIDTH, PDL)


@triton.jit
def _join(x, norm, to, row, eps, K: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, WIDTH)
    if NORM:
        by = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        wait(PDL)
        part = tl.load(x + row * K + k, mask=k < K, other=0.0)
        wide = part.to(tl.float32)
        scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)).to(part.dtype)
        tl.store(to + k, (scaled.to(tl.float32) * by).to(part.dtype), mask=k < K)
    else:
        wait(PDL)
        tl.store(to + k, tl.load(x + row * K + k, mask=k < K, other=0.0), mask=k < K)


def join(parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float, pdl: int) -> Tensor:
    """Kernels.join in one launch. Raises SettingError for more than five parts."""
    count, total, widths = len(parts), parts[0].shape[0], [part.shape[1] for part in parts]
    require(1 <= count <= 5 and count == len(norms), "parts", count, "give 1 to 5 parts, and a norm or None for each")
    out = parts[0].new_empty(total, sum(widths))
    none = [None] * (5 - count)  # no program takes these
    x = [out if part is None else part.contiguous() for part in (*parts, *none)]
    weights = [out if norm is None else norm for norm in (*norms, *none)]
    starts = tuple(sum(widths[:i]) for i in range(5))
    sizes = tuple(widths) + (1,) * (5 - count)
    normed = tuple(norm is not None for norm in (*norms, *none))
    given = (*x, *weights, out, out.shape[1], eps, starts, sizes, normed, power_of_two(max(widths)), pdl)
    join_kernel[(total, count)](*given, **launch_options(4, pdl))
    return out


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
    """The sizes of the parts that K is held in: powers of two of at least `least`, descending. There are `count` or
    count + 1 of them, and their sum exceeds K by as little as possible."""
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
    grid = (triton.cdiv(total, bm), triton.cdiv(n, tiles.columns))  # tokens vary fastest, so that L2 serves repeated weights
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
