"""What stands around the target's forward pass in a decode step of fixed shape, as a few Triton launches: laying out the
step's tokens, commit, and the n-gram look-up (sampling is in cuda_sampling.py). Knows the tensors of the live sequences, one
line (slot) for each, by the names that engine/slots.py and engine/body.py give them; nothing of requests or models.

The twins in torch are engine/body.py, verify/accept.py and drafters/ngram.py. A row that is not
alive is laid out at position 0 on page 0 and leaves no trace: its tokens, length and limit stay as they are. A slot
may stand in a step more than once if it is not alive, as the padding's does.

Nothing waits for the host. With pdl a launch may start while its predecessor runs, see cuda_products.py: `prepare` waits
before it reads anything; the others read the state of the sequences before they wait, so none of that may come from the
launch directly before them.
"""

# Triton's functions have no types to give: a kernel's arguments are pointers, numbers and constants of its own
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
UNROLLED = 8  # suffixes up to so long are compared without a loop


class Pool(NamedTuple):
    """The state of S slots. tokens: [S,L] int64; length: [S] int64, committed, at least 1; limit: [S] int64, what the length
    may reach; alive: [S] bool; stop_ids: [S,E] int64, padded with -1; block_table: [S,P] int32; draft: [S,K] int64, of the
    next step; draft_size: [S] int64. All contiguous, all written in place."""

    tokens: Tensor
    length: Tensor
    limit: Tensor
    alive: Tensor
    stop_ids: Tensor
    block_table: Tensor
    draft: Tensor
    draft_size: Tensor


class Prepared(NamedTuple):
    """What a forward pass starts from. x: [B(W+1),H], the tokens' embeddings; positions: [B(W+1)] int64; table: [B,P] int32;
    size: [B] int64, how many drafts each row has."""

    x: Tensor
    positions: Tensor
    table: Tensor
    size: Tensor


class Shared(NamedTuple):
    """The same where rows share their drafts, T tokens in all. row_start: [B+1] int32, where each row's tokens start, and the
    padding; owner: [T] int64, the slot of each token, any slot for padding."""

    x: Tensor
    positions: Tensor
    table: Tensor
    size: Tensor
    row_start: Tensor
    owner: Tensor


class LookUp(NamedTuple):
    """The n-gram look-up: suffixes of min_n .. max_n tokens; a draft ends before a token that is `vocab` or more."""

    min_n: int
    max_n: int
    vocab: int


@triton.jit(do_not_specialize=["W", "L", "P", "K", "V"])
def prepare_kernel(
    slots, k, tokens, length, limit, alive, block_table, draft, draft_size, embedding, x, positions, table, size, W, L, P, K, V,
    H: tl.constexpr, HP: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):
    """A program for each token of a row, and one for each RUN pages of its block table."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    slot = tl.load(slots + row)
    live = tl.load(alive + slot)
    if at <= W:
        end = tl.load(length + slot)
        last = tl.where(at > 0, at - 1, 0)  # of the drafts
        token = tl.load(tokens + slot * L + end - 1)
        if at > 0:
            token = tl.load(draft + slot * K + last)
            tl.store(tokens + slot * L + end + last, token, mask=live & (end + last < L))
        else:
            most = tl.minimum(tl.load(draft_size + slot), tl.load(k + row))
            most = tl.minimum(tl.minimum(most, tl.load(limit + slot) - end - 1), W)
            tl.store(size + row, tl.maximum(most, 0))
        to = row * (W + 1) + at
        tl.store(positions + to, tl.where(live, end - 1, 0) + at)
        h = tl.arange(0, HP)
        there = (h < H) & (token >= 0) & (token < V)  # past a draft's size there may be anything
        tl.store(x + to * H + h, tl.load(embedding + token * H + h, mask=there, other=0.0), mask=h < H)
    else:
        p = (at - W - 1) * RUN + tl.arange(0, RUN)
        tl.store(table + row * P + p, tl.load(block_table + slot * P + p, mask=(p < P) & live, other=0), mask=p < P)


@triton.jit(do_not_specialize=["W", "D", "T", "L", "P", "K", "V"])
def prepare_shared_kernel(
    slots, k, tokens, length, limit, alive, block_table, draft, draft_size, embedding, x, positions, table, size, row_start,
    owner, W, D, T, L, P, K, V, ROWS: tl.constexpr, LANES: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each of T tokens, and of each row one for each RUN pages of its block table; each works out for itself
    which row has how many drafts."""
    at = tl.program_id(0)
    r = tl.arange(0, LANES)
    there = r < ROWS
    wait(PDL)
    slot = tl.load(slots + r, mask=there, other=0)
    live = tl.load(alive + slot, mask=there, other=0) > 0
    end = tl.load(length + slot, mask=there, other=1)
    most = tl.minimum(tl.load(draft_size + slot, mask=there, other=0), tl.load(k + r, mask=there, other=0))
    most = tl.minimum(tl.minimum(most, tl.load(limit + slot, mask=there, other=0) - end - 1), W)
    most = tl.where(live, tl.maximum(most, 0), 0)
    kept = most - tl.minimum(tl.maximum(tl.cumsum(most, 0) - D, 0), most)
    start = r + tl.cumsum(kept, 0) - kept
    if at < T:
        mine = there & (start <= at) & (at <= start + kept)
        ours = tl.sum(mine.to(tl.int32), 0) > 0
        own = tl.sum(tl.where(mine, slot, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0) - 1  # the last committed token
        alone = tl.sum(tl.where(mine & live, 1, 0), 0) > 0
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
        alone = tl.sum(tl.where((r == row) & live, 1, 0), 0) > 0
        tl.store(table + row * P + p, tl.load(block_table + own * P + p, mask=(p < P) & alone, other=0), mask=p < P)


@triton.jit
def _agreement(row, end, n, last, back, run, agree):
    """One token further back: `run` counts those that agree with the suffix's, `agree` is where all have so far."""
    there = (end < n) & (end > back)
    agree = agree & there & (tl.load(row + end - 1 - back, mask=there, other=-1) == last)
    return run + agree.to(tl.int32), agree


@triton.jit
def _look_up(
    row, n, draft, draft_size, K, VOCAB, KP: tl.constexpr, MIN_N: tl.constexpr, MAX_N: tl.constexpr, SCAN: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """What followed the longest suffix of a row's n tokens the first time it occurred: writes the draft, gives its size.
    n 0: nothing is looked for. row, draft, draft_size point to the slot's."""
    lane = tl.arange(0, SCAN)
    longest = tl.zeros((SCAN,), tl.int32)
    ends = tl.zeros((SCAN,), tl.int32)
    lasts = ()
    if MAX_N <= UNROLLED:
        for back in tl.static_range(MAX_N):
            lasts += (tl.load(row + n - 1 - back, mask=back < n, other=-2),)
    for start in range(0, n - 1, SCAN):
        end = start + 1 + lane  # of an earlier occurrence
        run = tl.zeros((SCAN,), tl.int32)
        agree = end < n
        if MAX_N <= UNROLLED:
            for back in tl.static_range(MAX_N):
                run, agree = _agreement(row, end, n, lasts[back], back, run, agree)
        else:
            for back in range(MAX_N):
                last = tl.load(row + n - 1 - back, mask=back < n, other=-2)
                run, agree = _agreement(row, end, n, last, back, run, agree)
        ends = tl.where(run > longest, end, ends)  # of equals the earliest, which came first
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
    return size


@triton.jit(do_not_specialize=["W", "L", "K", "VOCAB"])
def commit_kernel(
    block, given, size, slots, tokens, length, limit, alive, stop_ids, draft, draft_size, counts, W, L, K, VOCAB,
    LANES: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr, BROKEN: tl.constexpr, GIVEN: tl.constexpr,
    FIND: tl.constexpr, MIN_N: tl.constexpr, MAX_N: tl.constexpr, SCAN: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
):
    """One row: accept (GIVEN: how many are accepted is known), cut, append; with FIND draft what follows."""
    row = tl.program_id(0).to(tl.int64)
    i, e = tl.arange(0, LANES), tl.arange(0, EP)
    slot = tl.load(slots + row)
    live = tl.load(alive + slot)
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
    first = tl.min(tl.where(ends & (i < accepted), i, LANES), 0)  # where it ends within what is accepted
    room = tl.where(live, most - n, 0)
    broken = tl.max(((i == first) & (chosen == BROKEN) & (first < room)).to(tl.int32), 0)
    count = tl.maximum(tl.minimum((tl.minimum(accepted, first + 1) - broken).to(tl.int64), room), 0)
    n += count
    goes_on = live & (first == LANES) & (n < most)
    tl.debug_barrier()  # every warp has read the row's state before one of them writes it
    tl.store(tokens + slot * L + n - count + i, tl.maximum(chosen, 0), mask=live & (i <= W) & (n - count + i < L))
    tl.store(length + slot, n, mask=live)
    tl.store(alive + slot, goes_on, mask=live)
    tl.store(counts + row * 5, count)
    tl.store(counts + row * 5 + 1, tl.where(live, cut, 0))
    tl.store(counts + row * 5 + 2, tl.minimum((accepted - 1).to(tl.int64), count))
    tl.store(counts + row * 5 + 3, broken.to(tl.int64))
    if FIND:
        tl.debug_barrier()  # every thread's part of the block is stored before any of them reads the text
        own = (tokens + slot * L, tl.where(goes_on, n, 0).to(tl.int32), draft + slot * K, draft_size + slot)
        found = _look_up(own[0], own[1], own[2], own[3], K, VOCAB, KP, MIN_N, MAX_N, SCAN, UNROLLED)
        tl.store(counts + row * 5 + 4, found.to(tl.int64))
    else:
        tl.store(counts + row * 5 + 4, tl.zeros((), tl.int64))


def prepare(pool: Pool, slot: Tensor, k: Tensor, embedding: Matrix, width: int, pdl: int = 0) -> Prepared:
    """Lay the drafts behind the committed tokens, and give what the forward pass needs: of each row its last committed token
    and `width` drafts. slot: [B] int64; k: [B] int64, what each row may draft at most; embedding: [V,H].

    A draft is cut to k and to one token less than its limit leaves; what is cut is padding, with any token."""
    rows, (_, pages) = len(slot), pool.block_table.shape
    values = embedding.values
    vocab, hidden = values.shape
    total = rows * (width + 1)
    out = Prepared(
        values.new_empty(total, hidden), slot.new_empty(total), pool.block_table.new_empty(rows, pages), slot.new_empty(rows)
    )
    run = min(TABLE_RUN, power_of_two(pages))
    prepare_kernel[(rows, width + 1 + triton.cdiv(pages, run))](
        slot, k, pool.tokens, pool.length, pool.limit, pool.alive, pool.block_table, pool.draft, pool.draft_size, values,
        *out, width, pool.tokens.shape[1], pages, pool.draft.shape[1], vocab, hidden, power_of_two(hidden), run, pdl,
        **launch_options(4, pdl),
    )
    return out


def prepare_shared(
    pool: Pool, slot: Tensor, k: Tensor, embedding: Matrix, width: int, drafts: int, pdl: int = 0
) -> Shared:
    """The same where all rows share `drafts` drafts, handed out from the first row on, and the tokens of the rows lie end to
    end, with padding behind them up to rows + drafts tokens. At most `width` drafts for a row."""
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
        slot, k, pool.tokens, pool.length, pool.limit, pool.alive, pool.block_table, pool.draft, pool.draft_size, values,
        *out, width, drafts, total, pool.tokens.shape[1], pages, pool.draft.shape[1], vocab, rows, power_of_two(rows), hidden,
        power_of_two(hidden), run, pdl, **launch_options(4, pdl),
    )
    return out


def commit(pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """Accept the drafts that equal the target's choices, cut the block at a stop, the limit or a BROKEN token, append it.
    slot: [B]; choice: [B,W+1] int64, the block's tokens too; size: [B] int64, from prepare -> counts [B,5] int64: committed,
    drafted, accepted, 1 where a BROKEN token has ended the row, and 0."""
    return _commit(pool, slot, choice, None, size, None, pdl)


def commit_verdict(pool: Pool, slot: Tensor, tokens: Tensor, count: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """The same for a block of which the first `count` [B] int64 are known to be accepted. tokens: [B,W+1] int64."""
    return _commit(pool, slot, tokens, count, size, None, pdl)


def commit_and_draft(
    pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, look_up: LookUp, pdl: int = 0
) -> Tensor:
    """`commit`, then the draft of the next step in one launch: up to K tokens that followed the longest suffix the first time
    it occurred (drafters/ngram.py), none where the row is not alive -> counts [B,5] int64: the same, and last the size of the
    next draft."""
    return _commit(pool, slot, choice, None, size, look_up, pdl)


def _commit(
    pool: Pool, slot: Tensor, block: Tensor, given: Tensor | None, size: Tensor, look_up: LookUp | None, pdl: int
) -> Tensor:
    rows, lanes = block.shape
    stops, width = pool.stop_ids.shape[1], pool.draft.shape[1]
    counts = slot.new_empty(rows, 5)
    find = look_up is not None and width > 0
    min_n, max_n, vocab = look_up if look_up is not None and find else LookUp(1, 1, 0)
    commit_kernel[(rows,)](
        block, size if given is None else given, size, slot, pool.tokens, pool.length, pool.limit, pool.alive, pool.stop_ids,
        pool.draft, pool.draft_size, counts, lanes - 1, pool.tokens.shape[1], width, vocab, power_of_two(lanes), stops,
        power_of_two(stops), power_of_two(max(width, 1)), BROKEN, given is not None, find, min_n, max_n, SCAN, UNROLLED, pdl,
        **launch_options(SCAN_WARPS if find else 1, pdl),
    )
    return counts
