"""Sampling in a decode step as Triton launches: noise, penalties, filters and the draw. The inputs are logits and, for each
slot, a seed, a temperature and filters. The twins in torch are verify/noise.py, verify/filters.py and verify/sampling.py.

min_p, top_k and top_p are applied without sorting. Each keeps the likeliest tokens, so all of them together come to one
threshold logit for a row, which bisection finds.

Nothing waits for the host. With PDL a launch may start while its predecessor runs (cuda_products.py). The launches read seeds,
temperatures, filters and positions before they wait, so their direct predecessor must not write these.
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
from forerun.verify.noise import CHOOSE
from forerun.verify.sampling import BROKEN

DRAW_BLOCK = 2048  # logits that a program sums; it must not depend on the batch, since the rounding of a draw depends on it
FLOOR_BLOCK = 8192  # logits that a program of floor_kernel holds at a time; FLOOR_WARPS warps have just enough registers
FLOOR_WARPS = 16
HISTORY_BLOCK = 1024  # tokens of a history that a program counts


class Filters(NamedTuple):
    """The filters of each slot. temperature, min_p, top_p: [S] float64; top_k: [S] int64, 0 for none."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position, PURPOSE: tl.constexpr):
    """noise.uniform, bit for bit. seed, position: int64 -> float64"""
    keyed: tl.constexpr = PURPOSE * 0xD1342543DE82EF95 % (1 << 64)
    state = _mix(seed.to(tl.uint64, bitcast=True) + keyed)
    bits = _mix(state + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)
    return ((bits >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit(do_not_specialize=["N"])
def uniform_kernel(
    seeds, slots, positions, out, N, PURPOSE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr
):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait(PDL)
    seed = tl.load(seeds + tl.load(slots + i, mask=i < N, other=0), mask=i < N, other=0)
    tl.store(out + i, _uniform(seed, tl.load(positions + i, mask=i < N, other=0), PURPOSE), mask=i < N)


@triton.jit
def _temperature(temperatures, slots, row, PER, NOISE: tl.constexpr):
    """The temperature of a row of logits, and its slot. With NOISE, PER consecutive rows belong to a slot; without, each row
    has its own temperature."""
    slot = row
    if NOISE:
        slot = tl.load(slots + row // PER)
    return tl.load(temperatures + slot).to(tl.float32), slot


@triton.jit
def _mass(x, top, temperature):
    """exp((x - top) / temperature), at most 1; 0 where x is -inf, even if top is -inf too."""
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / temperature)


@triton.jit
def _row(pointers, there):
    """Load logits. A NaN becomes infinity, so that it counts as the largest, as in torch; -inf where not `there`."""
    x = tl.load(pointers, mask=there, other=float("-inf"))
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _key(x):
    """An int32 for each float32, in the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # the sum turns -0 into 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unkey(key):
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sums(row, V, least, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Three values of a row: the number (with MASS: the mass) of the tokens whose key is at least `least`, the smallest of
    their keys, and the largest key of the other tokens."""
    total = tl.zeros((BLOCK,), tl.float64)
    above = tl.full((BLOCK,), 2147483647, tl.int32)
    below = tl.full((BLOCK,), -2147483648, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = _row(row + v, v < V)
        key = _key(x)
        kept = (v < V) & (key >= least)
        if MASS:
            total += tl.where(kept, _mass(x, top, temperature).to(tl.float64), 0.0)
        else:
            total += tl.where(kept, 1.0, 0.0)
        above = tl.minimum(above, tl.where(kept, key, 2147483647))
        below = tl.maximum(below, tl.where((v < V) & (key < least), key, -2147483648))
    return tl.sum(total, 0), tl.min(above, 0).to(tl.int64), tl.max(below, 0).to(tl.int64)


@triton.jit
def _largest(row, V, low, high, goal, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in low .. high - 1 that occurs in the row and for which the tokens from it on reach the goal, in number
    or in mass; low if there is none. Found by bisection; each step moves to a key that occurs."""
    while high - low > 1:
        middle = low + (high - low) // 2
        total, above, below = _sums(row, V, middle, top, temperature, MASS, BLOCK)
        if total >= goal:
            low = above
        else:
            high = tl.minimum(high, below + 1)
    return low


@triton.jit(do_not_specialize=["PER"])
def floor_kernel(
    logits, temperatures, min_ps, top_ks, top_ps, slots, floors, V, PER, BLOCK: tl.constexpr, NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest logit of each row that min_p, top_k and top_p keep: filters.thresholds without sorting."""
    row = tl.program_id(0).to(tl.int64)
    temperature, slot = _temperature(temperatures, slots, row, PER, NOISE)
    min_p, top_k, top_p = tl.load(min_ps + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    wait(PDL)
    mine = logits + row * V
    floor = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((min_p > 0) | (top_k > 0) | (top_p < 1)):
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, _row(mine + v, v < V))
        top = tl.max(highest, 0)
        if (top > float("-inf")) & (top < float("inf")):
            high = _key(top).to(tl.int64) + 1
            low = _key(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
            if min_p > 0:
                low = _key((top.to(tl.float64) + tl.load(temperatures + slot) * tl.log(min_p)).to(tl.float32)).to(tl.int64)
            if (top_k > 0) & (top_k < V):
                kth = _largest(mine, V, low - 1, high, top_k.to(tl.float64), top, temperature, False, BLOCK)
                low = tl.maximum(low, kth)
            if top_p < 1:
                total, _, _ = _sums(mine, V, low, top, temperature, True, BLOCK)
                low = _largest(mine, V, low, high, top_p * total, top, temperature, True, BLOCK)
            floor = _unkey(low.to(tl.int32))
    tl.store(floors + row, floor)


@triton.jit(do_not_specialize=["PER"])
def block_mass_kernel(
    logits, temperatures, slots, floors, tops, firsts, masses, V, PER, BLOCK: tl.constexpr, NOISE: tl.constexpr,
    FLOOR: tl.constexpr, PDL: tl.constexpr
):
    """Three values of a block of a row's logits: the largest, its first index, and the sum of exp((x - largest) / temperature).
    FLOOR: only of logits at or above the row's floor."""
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = _temperature(temperatures, slots, row, PER, NOISE)
    v = b * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    x = _row(logits + row * V + v, v < V)
    if FLOOR:
        x = tl.where(x >= tl.load(floors + row), x, float("-inf"))
    top = tl.max(x, 0)
    to = row * tl.num_programs(1) + b
    tl.store(tops + to, top)
    tl.store(firsts + to, tl.min(tl.where(x == top, v, 2147483647), 0))
    if temperature > 0:
        tl.store(masses + to, tl.sum(_mass(x, top, temperature).to(tl.float64), 0))


@triton.jit(do_not_specialize=["PER"])
def draw_kernel(
    logits, temperatures, slots, seeds, positions, noise, floors, tops, firsts, masses, out, V, PER, BLOCKS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, BROKEN: tl.constexpr, NOISE: tl.constexpr, FLOOR: tl.constexpr,
    PURPOSE: tl.constexpr, PDL: tl.constexpr,
):
    """The token drawn for a row: find the block in which the cumulative sum passes u times the total, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    temperature, slot = _temperature(temperatures, slots, row, PER, NOISE)
    b = tl.arange(0, LANES)
    if NOISE:
        u = _uniform(tl.load(seeds + slot), tl.load(positions + row) + 1, PURPOSE)
    else:
        u = tl.load(noise + row)
    wait(PDL)
    top = tl.load(tops + row * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"))
    first = tl.load(firsts + row * BLOCKS + b, mask=b < BLOCKS, other=2147483647)
    highest = tl.max(top, 0)
    choice = tl.min(tl.where(top == highest, first, 2147483647), 0)
    if (highest == float("-inf")) | (highest == float("inf")):  # _row turned NaN into infinity
        choice = tl.full((), BROKEN, tl.int32)
    if (temperature > 0) & (highest > float("-inf")) & (highest < float("inf")):
        scale = tl.exp((top - highest) / temperature).to(tl.float64)
        mass = tl.load(masses + row * BLOCKS + b, mask=b < BLOCKS, other=0.0) * scale
        passed = tl.cumsum(mass, 0)
        target = u * tl.max(passed, 0)
        # the first past the target; if rounding leaves none there, the last with any mass
        last = tl.max(tl.where(mass > 0, b, 0), 0)
        mine = tl.minimum(tl.min(tl.where((mass > 0) & (passed > target), b, LANES), 0), last)
        own = b == mine
        before = tl.sum(tl.where(own, passed - mass, 0.0), 0)
        by = tl.sum(tl.where(own, scale, 0.0), 0)
        v = mine * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf"))
        if FLOOR:
            x = tl.where(x >= tl.load(floors + row), x, float("-inf"))
        part = _mass(x, tl.max(x, 0), temperature)
        passed = before + by * tl.cumsum(part.to(tl.float64), 0)
        last = tl.max(tl.where(part > 0, v, 0), 0)
        choice = tl.minimum(tl.min(tl.where((part > 0) & (passed > target), v, 2147483647), 0), last)
    tl.store(out + row, choice.to(tl.int64))


@triton.jit(do_not_specialize=["L", "PER"])
def count_kernel(
    slots, positions, tokens, prompt_lens, repetitions, presences, frequencies, counts, V, L, PER, BLOCK: tl.constexpr
):
    """Count the tokens of each position's history. Bit 0 of a token's count: whether it occurs at all; the bits above: how
    often it occurs in the output. One program for BLOCK tokens of the history; programs behind its end do nothing."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    slot = tl.load(slots + row // PER)
    end = tl.load(positions + row) + 1
    some = (tl.load(repetitions + slot) != 1) | (tl.load(presences + slot) != 0) | (tl.load(frequencies + slot) != 0)
    if some & (start < end):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(tokens + slot * L + at, mask=at < end, other=-1)
        there = (token >= 0) & (token < V)  # tokens past a draft's size are arbitrary
        output = there & (at >= tl.load(prompt_lens + slot))
        to = counts + row * V + token
        tl.atomic_or(to, tl.full((BLOCK,), 1, tl.int32), mask=there, sem="relaxed")
        tl.atomic_add(to, tl.full((BLOCK,), 2, tl.int32), mask=output, sem="relaxed")


@triton.jit(do_not_specialize=["PER"])
def penalise_kernel(slots, repetitions, presences, frequencies, counts, logits, V, PER, BLOCK: tl.constexpr):
    """Apply the penalties to BLOCK logits of a row, in place."""
    row, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row // PER)
    held = tl.load(counts + row * V + v, mask=v < V, other=0)
    if tl.max(held, 0) > 0:
        repetition, count = tl.load(repetitions + slot), (held >> 1).to(tl.float32)
        x = tl.load(logits + row * V + v, mask=v < V, other=0.0)
        value = tl.where(x > 0, x / repetition, x * repetition)
        value = value - tl.load(frequencies + slot) * count - tl.where(count > 0, tl.load(presences + slot), 0.0)
        tl.store(logits + row * V + v, value, mask=(v < V) & (held > 0))


def penalise(
    logits: Tensor, slot: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor, repetition: Tensor, presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply the penalties of verify/sampling.py to logits [B(W+1),V] float32, in place. slot: [B] int64; positions: [B(W+1)]
    int64, of the input tokens, which are the last ones of their histories; tokens: [S,L] int64, the slots' tokens;
    prompt_len: [S] int64; the penalties: [S] float32. Reads each row's history only, not all L tokens."""
    total, vocab = logits.shape
    counts = torch.zeros(total, vocab, dtype=torch.int32, device=logits.device)
    per, context = total // max(len(slot), 1), tokens.shape[1]
    by = (repetition, presence, frequency)
    count_kernel[(total, triton.cdiv(context, HISTORY_BLOCK))](
        slot, positions, tokens, prompt_len, *by, counts, vocab, context, per, HISTORY_BLOCK, num_warps=4
    )
    penalise_kernel[(total, triton.cdiv(vocab, DRAW_BLOCK))](slot, *by, counts, logits, vocab, per, DRAW_BLOCK, num_warps=4)


def uniform(seed: Tensor, slot: Tensor, position: Tensor, purpose: int, pdl: int = 0) -> Tensor:
    """noise.uniform by slot. seed: [S] int64; slot, position: [N] int64 -> [N] float64"""
    out = seed.new_empty(len(slot), dtype=torch.float64)
    options = launch_options(4, pdl)
    uniform_kernel[(triton.cdiv(len(slot), 128),)](seed, slot, position, out, len(slot), purpose, 128, pdl, **options)
    return out


def floors(logits: Tensor, by: Filters, pdl: int = 0) -> Tensor:
    """The smallest logit of each row that the filters keep; -inf where nothing is filtered or the temperature is 0.
    logits: [N,V] float32; by: a value for each row -> [N] float32"""
    return _floors(logits, by, None, 1, pdl)


def slot_floors(logits: Tensor, slot: Tensor, by: Filters, pdl: int = 0) -> Tensor:
    """`floors` for rows that belong to slots. logits: [B(W+1),V] float32; slot: [B] int64; by: a value for each slot
    -> [B(W+1)] float32"""
    return _floors(logits, by, slot, len(logits) // max(len(slot), 1), pdl)


def draw_tempered(logits: Tensor, temperature: Tensor, u: Tensor, pdl: int = 0) -> Tensor:
    """Draw a token of softmax(logits / temperature) by the inverse CDF; the argmax where the temperature is 0; BROKEN where the
    largest logit is not finite (a NaN counts as the largest). logits: [N,V] float32; temperature, u: [N] float64
    -> [N] int64

    The rule is that of noise.draw: the first token whose cumulative sum exceeds u times the total. The sums are taken by
    blocks, in float64, so a u on the very edge between two tokens may give the other one."""
    return _draw(logits, temperature, None, None, None, u, None, pdl)


def choose(
    logits: Tensor, slot: Tensor, positions: Tensor, seed: Tensor, by: Filters, filtered: bool = False, pdl: int = 0
) -> Tensor:
    """The target's choices, drawn with the noise of (seed, position, CHOOSE) at each slot's temperature, with `filtered` after
    min_p, top_k and top_p. logits: [B(W+1),V] float32; slot: [B] int64; positions: [B(W+1)] int64, of the input tokens, one
    before the chosen token's; seed: [S] int64; by: a value for each slot -> [B(W+1)] int64"""
    kept = slot_floors(logits, slot, by, pdl) if filtered else None
    return _draw(logits, by.temperature, slot, positions, seed, None, kept, pdl)


def _floors(logits: Tensor, by: Filters, slot: Tensor | None, per: int, pdl: int) -> Tensor:
    total, vocab = logits.shape
    out = logits.new_empty(total)
    floor_kernel[(total,)](
        logits, by.temperature, by.min_p, by.top_k, by.top_p, out if slot is None else slot, out, vocab, per,
        min(FLOOR_BLOCK, max(power_of_two(vocab), 128)), slot is not None, pdl, **launch_options(FLOOR_WARPS, pdl),
    )
    return out


def _draw(
    logits: Tensor, temperature: Tensor, slot: Tensor | None, positions: Tensor | None, seed: Tensor | None, u: Tensor | None,
    kept: Tensor | None, pdl: int,
) -> Tensor:
    total, vocab = logits.shape
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    tops = logits.new_empty(total, blocks)
    firsts = logits.new_empty(total, blocks, dtype=torch.int32)
    masses = logits.new_empty(total, blocks, dtype=torch.float64)
    out = logits.new_empty(total, dtype=torch.int64)
    per, noise, dummy = (1 if slot is None else total // max(len(slot), 1)), slot is not None, out
    slots, least = (dummy if slot is None else slot), (tops if kept is None else kept)
    block_mass_kernel[(total, blocks)](
        logits, temperature, slots, least, tops, firsts, masses, vocab, per, DRAW_BLOCK, noise, kept is not None, pdl,
        **launch_options(4, pdl),
    )
    draw_kernel[(total,)](
        logits, temperature, slots, dummy if seed is None else seed, dummy if positions is None else positions,
        dummy if u is None else u, least, tops, firsts, masses, out, vocab, per, blocks, power_of_two(blocks), DRAW_BLOCK,
        BROKEN, noise, kept is not None, CHOOSE, pdl, **launch_options(8, pdl),
    )
    return out
