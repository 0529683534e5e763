"""The parts of a padded decode step around the target's forward pass, as a few Triton launches: laying out the step's tokens,
commit, and the n-gram look-up. Sampling is in cuda_sampling.py. The tensors are those of engine/, one row (slot) for each
sequence. The twins in torch are in engine/, verify/accept.py and drafters/ngram.py.

An inactive row is laid out at position 0 on the dummy page 0. It commits nothing: its tokens, length and limit do not change.
An inactive slot may be in a step more than once; padding rows all use the dummy slot.

Nothing waits for the host. With PDL a launch may start while its predecessor runs (cuda_products.py). `prepare` waits before
it reads anything. The others read the state of the sequences before they wait, so their direct predecessor must not write it.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cuda_products import launch_options, power_of_two, wait
from forerun.models.weights import Matrix
from forerun.verify.sampling import BROKEN

TABLE_RUN = 1024  # entries of a block table that one program copies
SCAN = 1024  # positions that the look-up compares at a time
SCAN_WARPS = 8
UNROLLED = 8  # suffixes of up to this many tokens are compared without a loop


class Pool(NamedTuple):
    """The state of S slots. tokens: [S,L] int64; length: [S] int64, committed tokens, at least 1; limit: [S] int64, the length
    at which a row ends; active: [S] bool, whether a row is active; stop_ids: [S,E] int64, padded with -1; block_table: [S,P]
    int32; draft: [S,K] int64, the draft for the next step; draft_size: [S] int64; chances: [S,K] float32, the survival of each
    of its tokens. All are contiguous and written in place."""

    tokens: Tensor
    length: Tensor
    limit: Tensor
    active: Tensor
    stop_ids: Tensor
    block_table: Tensor
    draft: Tensor
    draft_size: Tensor
    chances: Tensor


class Prepared(NamedTuple):
    """The inputs of a forward pass of B rows with W drafts each. x: [B(W+1),H], the embeddings; positions: [B(W+1)] int64;
    table: [B,P] int32, the block table; size: [B] int64, how many drafts each row has."""

    x: Tensor
    positions: Tensor
    table: Tensor
    size: Tensor


class Shared(NamedTuple):
    """The inputs of a forward pass of T tokens in all, where B rows share the drafts. As Prepared, and row_start: [B+1] int32,
    where each row's tokens start, and last where the padding does; owner: [T] int64, the slot of each token, any slot for
    padding."""

    x: Tensor
    positions: Tensor
    table: Tensor
    size: Tensor
    row_start: Tensor
    owner: Tensor


class LookUp(NamedTuple):
    """The settings of the n-gram look-up. Suffixes have min_n .. max_n tokens; a draft ends before an id of `vocab` or more."""

    min_n: int
    max_n: int
    vocab: int


@triton.jit(do_not_specialize=["W", "L", "P", "K", "V"])
def prepare_kernel(
    slots, k, tokens, length, limit, active, block_table, draft, draft_size, embedding, x, positions, table, size, W, L, P, K,
    V, H: tl.constexpr, HP: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):
    """One program for each token of a row, and one for each RUN pages of its block table."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    slot = tl.load(slots + row)
    is_active = tl.load(active + slot)
    if at <= W:
        end = tl.load(length + slot)
        last = tl.where(at > 0, at - 1, 0)  # the draft that this token is
        token = tl.load(tokens + slot * L + end - 1)
        if at > 0:
            token = tl.load(draft + slot * K + last)
            tl.store(tokens + slot * L + end + last, token, mask=is_active & (end + last < L))
        else:
            most = tl.minimum(tl.load(draft_size + slot), tl.load(k + row))
            most = tl.minimum(tl.minimum(most, tl.load(limit + slot) - end - 1), W)
            tl.store(size + row, tl.maximum(most, 0))
        to = row * (W + 1) + at
        tl.store(positions + to, tl.where(is_active, end - 1, 0) + at)
        h = tl.arange(0, HP)
        there = (h < H) & (token >= 0) & (token < V)  # tokens past a draft's size are arbitrary
        tl.store(x + to * H + h, tl.load(embedding + token * H + h, mask=there, other=0.0), mask=h < H)
    else:
        p = (at - W - 1) * RUN + tl.arange(0, RUN)
        tl.store(table + row * P + p, tl.load(block_table + slot * P + p, mask=(p < P) & is_active, other=0), mask=p < P)


@triton.jit
def _likeliest(level, most, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """As likeliest in engine/cycle.py. level: [rows,tokens] int32, -2 where there is no draft; LEVELS: a power of two, of STEPS
    binary digits."""
    last = tl.zeros((), tl.int32)
    for i in tl.static_range(STEPS):
        above = tl.sum(tl.sum((level >= last + (LEVELS >> i) - 1).to(tl.int32), 1), 0)
        last += tl.where(above > most, LEVELS >> i, 0)
    sure = tl.sum((level >= last).to(tl.int32), 1)
    equal = tl.sum((level == last - 1).to(tl.int32), 1)
    room = most - tl.sum(sure, 0) - (tl.cumsum(equal, 0) - equal)
    return sure + tl.minimum(equal, tl.maximum(room, 0))


@triton.jit(do_not_specialize=["W", "D", "T", "L", "P", "K", "V"])
def prepare_shared_kernel(
    slots, k, tokens, length, limit, active, block_table, draft, draft_size, chances, embedding, x, positions, table, size,
    row_start, owner, W, D, T, L, P, K, V, ROWS: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, LEVELS: tl.constexpr,
    STEPS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):
    """One program for each of T tokens and, in each row, for each RUN pages of its block table. Every program works out by
    itself how many drafts each row has."""
    at = tl.program_id(0)
    r = tl.arange(0, LANES)
    there = r < ROWS
    wait(PDL)
    slot = tl.load(slots + r, mask=there, other=0)
    is_active = tl.load(active + slot, mask=there, other=0) > 0
    end = tl.load(length + slot, mask=there, other=1)
    most = tl.minimum(tl.load(draft_size + slot, mask=there, other=0), tl.load(k + r, mask=there, other=0))
    most = tl.minimum(tl.minimum(most, tl.load(limit + slot, mask=there, other=0) - end - 1), W)
    most = tl.where(is_active, tl.maximum(most, 0), 0)
    i = tl.arange(0, KP)
    drafted = i[None, :] < most[:, None]
    chance = tl.load(chances + slot[:, None] * K + i[None, :], mask=drafted, other=0.0)
    level = tl.minimum(tl.maximum((chance * LEVELS).to(tl.int32), 0), LEVELS - 1)
    kept = _likeliest(tl.where(drafted, level, -2), D, LEVELS, STEPS).to(tl.int64)
    start = r + tl.cumsum(kept, 0) - kept
    if at < T:
        mine = there & (start <= at) & (at <= start + kept)
        ours = tl.sum(mine.to(tl.int32), 0) > 0
        own = tl.sum(tl.where(mine, slot, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0) - 1  # the last committed token
        alone = tl.sum(tl.where(mine & is_active, 1, 0), 0) > 0
        ahead = at - tl.sum(tl.where(mine, start, 0), 0)
        token = tl.load(tokens + own * L + last, mask=ours, other=-1)
        if ours & (ahead > 0):
            token = tl.load(draft + own * K + ahead - 1)
            tl.store(tokens + own * L + last + ahead, token, mask=alone & (last + ahead < L))
        tl.store(positions + at, tl.where(ours, tl.where(alone, last, 0) + ahead, 0).to(tl.int64))
        tl.store(owner + at, own)
        h = tl.arange(0, HP)
        known = (h < H) & (token >= 0) & (token < V)
        tl.store(x + at.to(tl.int64) * H + h, tl.load(embedding + token * H + h, mask=known, other=0.0), mask=h < H)
        if at == 0:
            tl.store(size + r, kept, mask=there)
            tl.store(row_start + r, start.to(tl.int32), mask=there)
            tl.store(row_start + ROWS, (ROWS + tl.sum(kept, 0)).to(tl.int32))
    else:
        row = (at - T) % ROWS
        p = (at - T) // ROWS * RUN + tl.arange(0, RUN)
        own = tl.sum(tl.where(r == row, slot, 0), 0)
        alone = tl.sum(tl.where((r == row) & is_active, 1, 0), 0) > 0
        tl.store(table + row * P + p, tl.load(block_table + own * P + p, mask=(p < P) & alone, other=0), mask=p < P)


@triton.jit
def _agreement(row, end, n, last, back, run, agree):
    """Compare one more token of the suffix, further back. run: how many tokens agree so far, for each end; agree: whether all
    do."""
    there = (end < n) & (end > back)
    agree = agree & there & (tl.load(row + end - 1 - back, mask=there, other=-1) == last)
    return run + agree.to(tl.int32), agree


@triton.jit
def _look_up(
    row, n, draft, draft_size, K, VOCAB, KP: tl.constexpr, MIN_N: tl.constexpr, MAX_N: tl.constexpr, SCAN: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """The n-gram look-up of a row of n tokens: find the first earlier occurrence of its longest suffix, write the tokens that
    followed it as the draft, return the draft's size and the length of the match. n 0: no look-up. row, draft and draft_size
    point to the slot's."""
    lane = tl.arange(0, SCAN)
    longest = tl.zeros((SCAN,), tl.int32)
    ends = tl.zeros((SCAN,), tl.int32)
    lasts = ()
    if MAX_N <= UNROLLED:
        for back in tl.static_range(MAX_N):
            lasts += (tl.load(row + n - 1 - back, mask=back < n, other=-2),)
    for start in range(0, n - 1, SCAN):
        end = start + 1 + lane  # where an earlier occurrence may end
        run = tl.zeros((SCAN,), tl.int32)
        agree = end < n
        if MAX_N <= UNROLLED:
            for back in tl.static_range(MAX_N):
                run, agree = _agreement(row, end, n, lasts[back], back, run, agree)
        else:
            for back in range(MAX_N):
                last = tl.load(row + n - 1 - back, mask=back < n, other=-2)
                run, agree = _agreement(row, end, n, last, back, run, agree)
        ends = tl.where(run > longest, end, ends)  # of equally long ones the earliest
        longest = tl.maximum(longest, run)
    best = tl.max(longest, 0)
    first = tl.min(tl.where(longest == best, ends, 2147483647), 0)
    size = tl.where(best >= MIN_N, tl.minimum(n - first, K), 0)
    i = tl.arange(0, KP)
    follows = tl.load(row + first + i, mask=i < size, other=VOCAB)
    size = tl.min(tl.where((i < size) & (follows < VOCAB), KP, i), 0)
    size = tl.minimum(size, K)
    tl.store(draft + i, tl.where(i < size, follows, 0), mask=i < K)
    tl.store(draft_size, size.to(tl.int64))
    return size, tl.where(best >= MIN_N, best, 0)


@triton.jit(do_not_specialize=["W", "L", "K", "VOCAB"])
def commit_kernel(
    block, given, size, slots, tokens, length, limit, active, stop_ids, draft, draft_size, counts, W, L, K, VOCAB,
    LANES: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr, BROKEN: tl.constexpr, GIVEN: tl.constexpr,
    FIND: tl.constexpr, MIN_N: tl.constexpr, MAX_N: tl.constexpr, SCAN: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
):
    """One row: accept, cut the block where the row ends, append. GIVEN: the number of accepted tokens is an input. FIND: draft
    for the next step by the n-gram look-up."""
    row = tl.program_id(0).to(tl.int64)
    i, e = tl.arange(0, LANES), tl.arange(0, EP)
    slot = tl.load(slots + row)
    is_active = tl.load(active + slot)
    n = tl.load(length + slot)
    most = tl.load(limit + slot)
    stops = tl.load(stop_ids + slot * E + e, mask=e < E, other=-1)
    drafted = tl.load(draft + slot * K + i, mask=i < tl.minimum(W, K), other=-1)
    wait(PDL)
    cut = tl.load(size + row)
    chosen = tl.load(block + row * (W + 1) + i, mask=i <= W, other=-2)
    if GIVEN:
        accepted = tl.load(given + row).to(tl.int32)
    else:
        accepted = tl.min(tl.where((chosen == drafted) & (i < cut), LANES, i), 0) + 1
    ends = (tl.max((chosen[:, None] == stops[None, :]).to(tl.int32), 1) > 0) | (chosen == BROKEN)
    first = tl.min(tl.where(ends & (i < accepted), i, LANES), 0)  # the accepted token that ends the row; LANES: none
    room = tl.where(is_active, most - n, 0)
    broken = tl.max(((i == first) & (chosen == BROKEN) & (first < room)).to(tl.int32), 0)
    count = tl.maximum(tl.minimum((tl.minimum(accepted, first + 1) - broken).to(tl.int64), room), 0)
    n += count
    goes_on = is_active & (first == LANES) & (n < most)
    tl.debug_barrier()  # every warp has read the row's state before any warp writes it
    tl.store(tokens + slot * L + n - count + i, tl.maximum(chosen, 0), mask=is_active & (i <= W) & (n - count + i < L))
    tl.store(length + slot, n, mask=is_active)
    tl.store(active + slot, goes_on, mask=is_active)
    tl.store(counts + row * 5, count)
    tl.store(counts + row * 5 + 1, tl.where(is_active, cut, 0))
    tl.store(counts + row * 5 + 2, tl.minimum((accepted - 1).to(tl.int64), count))
    tl.store(counts + row * 5 + 3, broken.to(tl.int64))
    if FIND:
        tl.debug_barrier()  # every thread has stored its part of the block before any thread reads the tokens
        own = (tokens + slot * L, tl.where(goes_on, n, 0).to(tl.int32), draft + slot * K, draft_size + slot)
        found, _ = _look_up(own[0], own[1], own[2], own[3], K, VOCAB, KP, MIN_N, MAX_N, SCAN, UNROLLED)
        tl.store(counts + row * 5 + 4, found.to(tl.int64))
    else:
        tl.store(counts + row * 5 + 4, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["L", "K", "VOCAB"])
def look_up_kernel(
    slots, tokens, length, active, found, size, match, L, K, VOCAB, KP: tl.constexpr, MIN_N: tl.constexpr,
    MAX_N: tl.constexpr, SCAN: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
):
    """The look-up of one row by itself."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    slot = tl.load(slots + row)
    n = tl.where(tl.load(active + slot), tl.load(length + slot), 0).to(tl.int32)
    to, to_size = found + row * K, size + row
    _, longest = _look_up(tokens + slot * L, n, to, to_size, K, VOCAB, KP, MIN_N, MAX_N, SCAN, UNROLLED)
    tl.store(match + row, longest.to(tl.int64))


def prepare(pool: Pool, slot: Tensor, k: Tensor, embedding: Matrix, width: int, pdl: int = 0) -> Prepared:
    """Write the drafts behind the committed tokens and make the inputs of the forward pass: for each row its last committed
    token and `width` drafts. slot: [B] int64; k: [B] int64, the most drafts of each row; embedding: dense, [V,H].

    A draft is cut to k tokens, and so that the row with one more token stays within its limit. The tokens that are cut are
    padding and have any id. Raises TypeError for an embedding that is not dense."""
    rows, (_, pages) = len(slot), pool.block_table.shape
    values = embedding.values
    vocab, hidden = values.shape
    total = rows * (width + 1)
    out = Prepared(
        values.new_empty(total, hidden), slot.new_empty(total), pool.block_table.new_empty(rows, pages), slot.new_empty(rows)
    )
    run = min(TABLE_RUN, power_of_two(pages))
    prepare_kernel[(rows, width + 1 + triton.cdiv(pages, run))](
        slot, k, pool.tokens, pool.length, pool.limit, pool.active, pool.block_table, pool.draft, pool.draft_size, values,
        *out, width, pool.tokens.shape[1], pages, pool.draft.shape[1], vocab, hidden, power_of_two(hidden), run, pdl,
        **launch_options(4, pdl),
    )
    return out


def prepare_shared(
    pool: Pool, slot: Tensor, k: Tensor, embedding: Matrix, width: int, drafts: int, levels: int, pdl: int = 0
) -> Shared:
    """`prepare` for rows that share `drafts` drafts, at most `width` to a row: the likeliest of those at hand, compared in
    `levels` steps, a power of two (engine/cycle.py). The rows' tokens lie one after the other, with padding behind them up to
    rows + drafts tokens."""
    rows, (_, pages) = len(slot), pool.block_table.shape
    values = embedding.values
    vocab, hidden = values.shape
    total = rows + drafts
    out = Shared(
        values.new_empty(total, hidden), slot.new_empty(total), pool.block_table.new_empty(rows, pages),
        slot.new_empty(rows), pool.block_table.new_empty(rows + 1), slot.new_empty(total),
    )
    run = min(TABLE_RUN, power_of_two(pages))
    prepare_shared_kernel[(total + rows * triton.cdiv(pages, run),)](
        slot, k, pool.tokens, pool.length, pool.limit, pool.active, pool.block_table, pool.draft, pool.draft_size, pool.chances,
        values, *out, width, drafts, total, pool.tokens.shape[1], pages, pool.draft.shape[1], vocab, rows, power_of_two(rows),
        power_of_two(width), levels, levels.bit_length(), hidden, power_of_two(hidden), run, pdl, **launch_options(4, pdl),
    )
    return out


def commit(pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """Accept the drafts that equal the target's choices, cut the block at a stop token, the limit or a BROKEN token, append it.
    slot: [B]; choice: [B,W+1] int64, which are also the tokens to append; size: [B] int64, from `prepare` -> counts [B,5]
    int64: committed, drafted, accepted, 1 where a BROKEN token ended the row, 0."""
    return _commit(pool, slot, choice, None, size, None, pdl)


def commit_verdict(pool: Pool, slot: Tensor, tokens: Tensor, count: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """`commit` with a verdict: the first `count` [B] int64 tokens of each row's block are accepted. tokens: [B,W+1] int64."""
    return _commit(pool, slot, tokens, count, size, None, pdl)


def commit_and_draft(
    pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, look_up: LookUp, pdl: int = 0
) -> Tensor:
    """`commit` and the draft for the next step in one launch: up to K tokens that followed the first occurrence of the longest
    suffix (drafters/ngram.py), none for a row that has ended -> counts [B,5] int64: those of `commit`, the last column being
    the size of the next draft."""
    return _commit(pool, slot, choice, None, size, look_up, pdl)


def look_up(
    tokens: Tensor, length: Tensor, active: Tensor, slot: Tensor, wanted: LookUp, width: int, pdl: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The look-up for the slots [B], nothing for inactive ones: up to `width` tokens that followed the first occurrence of the
    longest suffix, their number, and the length of the match. tokens, length, active: as in Pool.
    -> [B,width], [B], [B] int64"""
    rows = len(slot)
    found, (size, match) = slot.new_empty(rows, width), slot.new_empty(2, rows)
    look_up_kernel[(rows,)](
        slot, tokens, length, active, found, size, match, tokens.shape[1], width, wanted.vocab, power_of_two(width),
        wanted.min_n, wanted.max_n, SCAN, UNROLLED, pdl, **launch_options(SCAN_WARPS, pdl),
    )
    return found, size, match


def _commit(
    pool: Pool, slot: Tensor, block: Tensor, given: Tensor | None, size: Tensor, look_up: LookUp | None, pdl: int
) -> Tensor:
    rows, lanes = block.shape
    stops, width = pool.stop_ids.shape[1], pool.draft.shape[1]
    counts = slot.new_empty(rows, 5)
    find = look_up is not None and width > 0
    min_n, max_n, vocab = look_up if look_up is not None and find else LookUp(1, 1, 0)
    commit_kernel[(rows,)](
        block, size if given is None else given, size, slot, pool.tokens, pool.length, pool.limit, pool.active, pool.stop_ids,
        pool.draft, pool.draft_size, counts, lanes - 1, pool.tokens.shape[1], width, vocab, power_of_two(lanes), stops,
        power_of_two(stops), power_of_two(max(width, 1)), BROKEN, given is not None, find, min_n, max_n, SCAN, UNROLLED, pdl,
        **launch_options(SCAN_WARPS if find else 1, pdl),
    )
    return counts
