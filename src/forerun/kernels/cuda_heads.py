"""The parts of a head's drafting around its products and attention, as a few Triton launches: the tokens ahead and their
embeddings, the choice of a drafted token, and keeping the drafts. The twins in torch are in drafters/chain.py,
drafters/choice.py and engine/cycle.py. Nothing waits for the host. Each launch waits for its predecessor before it reads.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cuda_products import best_of_blocks, block_best, launch_options, power_of_two, wait
from forerun.models.weights import Matrix


@triton.jit(do_not_specialize=["T", "R", "L", "V", "WIDTH", "STRIDE"])
def ahead_kernel(
    slots, positions, row_start, committed, tokens, embedding, x, last, T, R, L, V, WIDTH, STRIDE, LANES: tl.constexpr,
    EVEN: tl.constexpr, ZERO: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):
    """A program for each token copies the embedding of the token one position ahead; one for each row behind them finds where
    its committed tokens end."""
    at = tl.program_id(0)
    wait(PDL)
    if at >= T:
        row = at - T
        start = tl.load(row_start + row).to(tl.int64)
        tl.store(last + row, tl.maximum(start + tl.load(committed + row * STRIDE) - 1, 0))
    else:
        if EVEN:
            row = at // WIDTH
        else:
            r = tl.arange(0, LANES)
            row = tl.sum((tl.load(row_start + 1 + r, mask=r < R, other=2147483647) <= at).to(tl.int32), 0)
            row = tl.minimum(row, R - 1)
        slot = tl.load(slots + row)
        position = tl.load(positions + at)
        token = tl.load(tokens + slot * L + position + 1)
        h = tl.arange(0, HP)
        there = (h < H) & (token >= 0) & (token < V)  # a rejected draft may be anything
        if ZERO:
            there = there & (position > 0)
        tl.store(x + at.to(tl.int64) * H + h, tl.load(embedding + token * H + h, mask=there, other=0.0), mask=h < H)


def ahead(
    slot: Tensor, positions: Tensor, row_start: Tensor, committed: Tensor, tokens: Tensor, embedding: Matrix, width: int | None,
    zero_first: bool, pdl: int = 0,
) -> tuple[Tensor, Tensor]:
    """The embeddings of the tokens one position ahead, and the index of each row's last committed token among the T.

    slot: [R]; positions: [T]; row_start: [R+1] int32; committed: [R] int64, of each row from its first token on, may be
    strided; tokens: [S,L]; width: tokens of each row, None: they differ; zero_first: zeros at position 0.
    -> [T,H], [R] int64"""
    total, rows, table = len(positions), len(slot), embedding.values
    x, last = table.new_empty(total, table.shape[1]), torch.empty_like(slot)
    hidden = table.shape[1]
    ahead_kernel[(total + rows,)](
        slot, positions, row_start, committed, tokens, table, x, last, total, rows, tokens.shape[1], table.shape[0], width or 1,
        committed.stride(0), power_of_two(rows), width is not None, zero_first, hidden, power_of_two(hidden), pdl,
        **launch_options(4, pdl),
    )  # fmt: skip
    return x, last


@triton.jit
def keep_last_kernel(x, last, slots, table, out, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    wait(PDL)
    values = tl.load(x + tl.load(last + row) * H + h, mask=h < H)
    tl.store(out + row * H + h, values, mask=h < H)
    tl.store(table + tl.load(slots + row) * H + h, values, mask=h < H)


def keep_last(x: Tensor, last: Tensor, slot: Tensor, table: Tensor, pdl: int = 0) -> Tensor:
    """x[last], also written to table[slot].  [T,H], [R], [R], [S,H] -> [R,H]"""
    hidden = x.shape[1]
    out = x.new_empty(len(last), hidden)
    options = launch_options(4, pdl)
    keep_last_kernel[(len(last),)](x, last, slot, table, out, hidden, power_of_two(hidden), pdl, **options)
    return out


@triton.jit(do_not_specialize=["K", "V", "step", "blocks"])
def pick_kernel(
    tops, firsts, sums, ids, slots, length, tokens, chances, embedding, x, positions, K, V, step, blocks, BLOCKS: tl.constexpr,
    MAPPED: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):
    """A program for each row. `step`: the index of the drafted token."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    wait(PDL)
    token, finite, chance = best_of_blocks(tops, firsts, sums, row, blocks, BLOCKS, True)
    token = tl.where(finite, token, 0)
    if step > 0:
        chance *= tl.load(chances + row * K + step - 1)
    if MAPPED:
        token = tl.load(ids + token)
    tl.store(tokens + row * K + step, token)
    tl.store(chances + row * K + step, chance)
    tl.store(positions + row, tl.load(length + tl.load(slots + row)) - 1 + step)
    there = (h < H) & (token < V)
    tl.store(x + row * H + h, tl.load(embedding + token * H + h, mask=there, other=0.0), mask=h < H)


def pick(
    logits: Tensor, ids: Tensor | None, slot: Tensor, length: Tensor, embedding: Matrix, tokens: Tensor, chances: Tensor,
    step: int, pdl: int = 0,
) -> tuple[Tensor, Tensor]:
    """Take the likeliest token of each row as drafted token `step`. Its id is written to tokens[:, step], and the probability
    that it and all drafted tokens before it are right to chances[:, step]. Return its embedding, and the position of its entry
    in the head.

    logits: [B,draft vocabulary] float32; ids: the target's ids of the draft ids, None: they are the same; length: [S],
    committed tokens; tokens: [B,K] int64, chances: [B,K] float32, both contiguous.  -> [B,H], [B] int64"""
    table, hidden = embedding.values, embedding.columns
    tops, firsts, sums = block_best(logits, True, pdl)
    rows, blocks = tops.shape
    x, positions = table.new_empty(rows, hidden), torch.empty_like(slot)
    pick_kernel[(rows,)](
        tops, firsts, sums, slot if ids is None else ids, slot, length, tokens, chances, table, x, positions, tokens.shape[1],
        table.shape[0], step, blocks, power_of_two(blocks), ids is not None, hidden, power_of_two(hidden), pdl,
        **launch_options(4, pdl),
    )  # fmt: skip
    return x, positions


@triton.jit(do_not_specialize=["K", "S"])
def keep_kernel(
    slots, size, tokens, survival, draft, draft_size, chances, K, S, KP: tl.constexpr, SURE: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    wait(PDL)
    slot = tl.load(slots + row)
    tl.store(draft + slot * S + k, tl.load(tokens + row * K + k, mask=k < K, other=0), mask=k < K)
    if SURE:
        tl.store(chances + slot * S + k, tl.load(survival + row * K + k, mask=k < K, other=0.0), mask=k < K)
    tl.store(draft_size + slot, tl.load(size + row))


def keep(
    slot: Tensor, size: Tensor, tokens: Tensor, survival: Tensor | None, draft: Tensor, draft_size: Tensor, chances: Tensor,
    pdl: int = 0,
) -> None:
    """Keep drafts for the next step. slot, size: [B]; tokens: [B,K] int64; survival: [B,K] float32 or None; draft, chances:
    [S,>=K]; draft_size: [S]."""
    rows, width = tokens.shape
    sure = survival is not None
    slot, size, tokens = (one.contiguous() for one in (slot, size, tokens))  # a draft of the host comes as parts of one tensor
    given = (slot, size, tokens, survival.contiguous() if survival is not None else chances)
    tables = (draft, draft_size, chances, width, draft.shape[1], power_of_two(max(width, 1)), sure, pdl)
    keep_kernel[(rows,)](*given, *tables, **launch_options(1, pdl))
