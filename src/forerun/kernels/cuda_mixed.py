"""Measured chances of drafted tokens, and the choice between two candidates, in two Triton launches. The twin in torch, which
defines what they compute, is drafters/calibration.py. Nothing waits for the host. Each launch waits for its predecessor before
it reads.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cuda_products import launch_options, power_of_two, wait

LANES = 512  # tokens that the one program of `learn` compares at a time


class Tables(NamedTuple):
    """The tensors of Calibration, of S slots, and sums [2, BINS] float32, zeros between launches."""

    rate: Tensor
    weight: Tensor
    luck: Tensor
    tokens: Tensor
    bins: Tensor
    told: Tensor
    sums: Tensor


class Kinds(NamedTuple):
    """Where each kind of bins begins, and how they are counted, as in Calibration."""

    ALONE: int
    PARTED: int
    APART: int
    AGREED: int
    SPLIT: int
    FOUND: int
    TAIL: int
    FOLLOWS: int
    TYPICAL: int
    PLACES: int
    DEEP: int
    CHANCES: int


class Limits(NamedTuple):
    """The numbers of Calibration."""

    precision: float
    most_shift: float
    least: float
    most: float
    least_survival: float


@triton.jit(do_not_specialize=["B", "L", "K", "DUMMY", "STRIDE"])
def learn_kernel(
    slots, count, text, length, tokens, bins, told, luck, rate, weight, sums, B, L, K, DUMMY, STRIDE, MEMORY, WINDOW,
    ROWS: tl.constexpr, KP: tl.constexpr, BINS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):
    """One program for all rows."""
    k = tl.arange(0, KP)[None, :]
    wait(PDL)
    for begin in range(0, B, ROWS):
        row = begin + tl.arange(0, ROWS)
        slot = tl.load(slots + row, mask=row < B, other=DUMMY)
        new = tl.load(count + row * STRIDE, mask=row < B, other=0)
        new = tl.where(slot == DUMMY, 0, new)
        start = tl.load(length + slot) - new
        known = (k < new[:, None]) & (k < K)
        committed = tl.load(text + slot[:, None] * L + start[:, None] + k, mask=known, other=-1)
        for who in tl.static_range(2):
            at = (slot[:, None] * 2 + who) * K + k
            wrong = (tl.load(tokens + at, mask=known, other=-2) != committed).to(tl.int32)
            tried = known & (tl.cumsum(wrong, 1) - wrong == 0)
            right = (tried & (wrong == 0)).to(tl.float32)
            for line in tl.static_range(who, 4, 2):
                bin = tl.load(bins + (slot[:, None] * 4 + line) * K + k, mask=tried, other=-1)
                counted = tried & (bin >= 0)
                tl.atomic_add(sums + bin, tl.full(right.shape, 1.0, tl.float32), mask=counted)
                tl.atomic_add(sums + BINS + bin, right, mask=counted)
                if line >= 2:
                    rates = tl.load(told + at, mask=counted, other=0.0)
                    off = tl.sum(tl.where(counted, right - rates, 0.0), 1)
                    spread = tl.sum(tl.where(counted, rates * (1 - rates), 0.0), 1)
                    some = tl.sum(counted.to(tl.int32), 1) > 0
                    own = luck + (slot * 2 + who) * 2
                    tl.store(own, MEMORY * tl.load(own, mask=some, other=0.0) + off, mask=some)
                    tl.store(own + 1, MEMORY * tl.load(own + 1, mask=some, other=0.0) + spread, mask=some)
    tl.debug_barrier()  # every thread has added what it found
    b = tl.arange(0, BP)
    there = b < BINS
    more = tl.load(sums + b, mask=there, other=0.0, cache_modifier=".cg")  # where atomics write, past the L1 cache
    agreed = tl.load(sums + BINS + b, mask=there, other=0.0, cache_modifier=".cg")
    old, old_weight = tl.load(rate + b, mask=there, other=0.0), tl.load(weight + b, mask=there, other=1.0)
    tl.store(rate + b, (old * old_weight + agreed) / (old_weight + more), mask=there)
    tl.store(weight + b, tl.minimum(old_weight + more, WINDOW), mask=there)
    tl.store(sums + b, tl.zeros((BP,), tl.float32), mask=there)
    tl.store(sums + BINS + b, tl.zeros((BP,), tl.float32), mask=there)


def learn(
    t: Tables, text: Tensor, length: Tensor, slot: Tensor, count: Tensor, dummy: int, memory: float, window: float, pdl: int = 0
) -> None:
    """Calibration.learn. text: [S,L], the committed tokens; length: [S]; slot: [B] int64; count: [B] int64, may be strided."""
    width, bins = t.tokens.shape[2], len(t.rate)
    columns = power_of_two(width)
    learn_kernel[(1,)](
        slot, count, text, length, t.tokens, t.bins, t.told, t.luck, t.rate, t.weight, t.sums, len(slot), text.shape[1], width,
        dummy, count.stride(0), memory, window, max(min(LANES // columns, power_of_two(len(slot))), 1), columns, bins,
        power_of_two(bins), pdl, **launch_options(4, pdl),
    )  # fmt: skip


@triton.jit
def _corrected(rate, odds, LEAST, MOST):
    rate = tl.minimum(tl.maximum(rate, LEAST), MOST)
    return tl.minimum(tl.maximum(rate * odds / (1 - rate + rate * odds), LEAST), MOST)


@triton.jit
def _odds(luck, PRECISION, MOST_SHIFT):
    shift = tl.load(luck) / (tl.load(luck + 1) + PRECISION)
    return tl.exp(tl.minimum(tl.maximum(shift, -MOST_SHIFT), MOST_SHIFT))


@triton.jit
def _product(a, b):
    return a * b


@triton.jit(do_not_specialize=["K", "MANY", "LONG"])
def weigh_kernel(
    slots, blind, head, head_size, given, look_up, look_up_size, match, edges, matches, rate, luck, tokens, bins, told, out,
    size, source, survival, cheap, K, MANY, LONG, PRECISION, MOST_SHIFT, LEAST, MOST, LEAST_SURVIVAL, ALONE: tl.constexpr,
    PARTED: tl.constexpr, APART: tl.constexpr, AGREED: tl.constexpr, SPLIT: tl.constexpr, FOUND: tl.constexpr,
    TAIL: tl.constexpr, FOLLOWS: tl.constexpr, TYPICAL: tl.constexpr, PLACES: tl.constexpr, DEEP: tl.constexpr,
    CHANCES: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    k, e = tl.arange(0, KP), tl.arange(0, EP)
    inside = k < K
    wait(PDL)
    slot = tl.load(slots + row)
    mine, others = tl.load(head_size + row).to(tl.int32), tl.load(look_up_size + row).to(tl.int32)
    mine = tl.where(tl.load(blind + slot), 0, mine)
    own = tl.load(head + row * K + k, mask=inside, other=0)
    other = tl.load(look_up + row * K + k, mask=inside, other=0)
    alive = tl.load(given + row * K + k, mask=inside, other=0.0)
    before = tl.load(given + row * K + k - 1, mask=inside & (k > 0), other=1.0)
    chance = alive / tl.maximum(before, LEAST_SURVIVAL)
    edge = tl.load(edges + e, mask=e < MANY, other=float("inf"))
    sure = tl.sum((chance[:, None] >= edge[None, :]).to(tl.int32), 1)
    least = tl.load(matches + e, mask=e < LONG, other=9223372036854775807)
    long = tl.sum((tl.load(match + row) >= least).to(tl.int32), 0)
    end = tl.minimum(mine, others)
    first = tl.min(tl.where((own == other) & (k < end), KP, k), 0)  # where they part or one ends; KP: nowhere
    agreed = k < first
    parts = first < end
    place, deep = tl.minimum(k, PLACES - 1), tl.minimum(k, DEEP - 1)
    kind = tl.where(parts & (k >= first), tl.where(k == first, PARTED, APART), ALONE)
    head_bin = tl.where(agreed, AGREED + long * CHANCES + sure, kind + place * CHANCES + sure)
    by_length = long * PLACES + place
    behind = tl.where(parts, TAIL, tl.where(mine == 0, FOUND, FOLLOWS)) + by_length
    look_bin = tl.where(parts & (k == first), SPLIT + long * CHANCES + sure, behind)
    is_mine, is_other = k < mine, k < others
    at = bins + slot * 4 * K + k
    tl.store(at, tl.where(is_mine, head_bin, -1).to(tl.int64), mask=inside)
    tl.store(at + K, tl.where(is_other & ~agreed & (mine > 0), look_bin, -1).to(tl.int64), mask=inside)
    tl.store(at + 2 * K, tl.where(is_mine, TYPICAL + deep, -1).to(tl.int64), mask=inside)
    tl.store(at + 3 * K, tl.where(is_other, FOUND + by_length, -1).to(tl.int64), mask=inside)
    mine_odds, other_odds = _odds(luck + slot * 4, PRECISION, MOST_SHIFT), _odds(luck + slot * 4 + 2, PRECISION, MOST_SHIFT)
    head_rate = tl.load(rate + head_bin, mask=is_mine, other=0.0)
    look_rate = tl.load(rate + tl.where(agreed, head_bin, look_bin), mask=is_other, other=0.0)
    coarse = tl.load(rate + FOUND + by_length, mask=is_other, other=0.0)
    tl.store(told + slot * 2 * K + k, head_rate, mask=inside)
    tl.store(told + slot * 2 * K + K + k, coarse, mask=inside)
    tl.store(tokens + slot * 2 * K + k, own, mask=inside)
    tl.store(tokens + slot * 2 * K + K + k, other, mask=inside)
    head_chance = tl.where(is_mine, _corrected(head_rate, mine_odds, LEAST, MOST), 0.0)
    look_chance = _corrected(look_rate, tl.where(agreed, mine_odds, other_odds), LEAST, MOST)
    head_alive = tl.associative_scan(head_chance, 0, _product)
    look_alive = tl.associative_scan(tl.where(is_other, look_chance, 0.0), 0, _product)
    free = tl.where(is_other, _corrected(coarse, other_odds, LEAST, MOST), 0.0)
    taken = tl.sum(look_alive, 0) > tl.sum(head_alive, 0)
    tl.store(out + row * K + k, tl.where(taken, other, own), mask=inside)
    tl.store(size + row, tl.where(taken, others, mine).to(tl.int64))
    tl.store(source + row, taken.to(tl.int64))
    tl.store(survival + row * K + k, tl.where(taken, look_alive, head_alive), mask=inside)
    tl.store(cheap + row * K + k, tl.associative_scan(free, 0, _product), mask=inside)


def weigh(
    t: Tables, slot: Tensor, blind: Tensor, candidates: tuple[Tensor, ...], edges: Tensor, matches: Tensor, limits: Limits,
    kinds: Kinds, pdl: int = 0,
) -> tuple[Tensor, ...]:
    """Calibration.weigh, as in Weighed. blind: [S] bool, as in RowState; candidates: as in Candidates, contiguous."""
    rows, width = candidates[0].shape
    tokens, (size, source) = slot.new_empty(rows, width), slot.new_empty(2, rows)
    survival, cheap = torch.empty(2, rows, width, device=slot.device)
    weigh_kernel[(rows,)](
        slot, blind, *candidates, edges, matches, t.rate, t.luck, t.tokens, t.bins, t.told, tokens, size, source, survival,
        cheap, width, len(edges), len(matches), *limits, *kinds, power_of_two(width),
        power_of_two(max(len(edges), len(matches))), pdl, **launch_options(1, pdl),
    )  # fmt: skip
    return tokens, size, survival, source, cheap
