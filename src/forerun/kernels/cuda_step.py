"""What stands around the target's forward pass in a decode step of fixed shape, as a few Triton launches: laying out the
step's tokens, sampling with a temperature, commit, and the n-gram look-up. Knows the tensors of the live sequences, one
line (slot) for each, by the names that engine/slots.py and engine/body.py give them; nothing of requests or models.

The twins in torch are engine/body.py, verify/accept.py, verify/noise.py and drafters/ngram.py. A row that is not
alive is laid out at position 0 on page 0 and leaves no trace: its tokens, length and limit stay as they are. A slot
may stand in a step more than once if it is not alive, as the padding's does.

Nothing waits for the host. With pdl a launch may start while its predecessor runs, see cuda_products.py: `prepare` waits
before it reads anything; the others read the state of the sequences, temperatures and noise before they wait, so none of
that may come from the launch directly before them.
"""

# Triton's functions have no types to give: a kernel's arguments are pointers, numbers and constants of its own
# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cuda_products import power_of_two, wait
from forerun.verify.noise import CHOOSE

TABLE_RUN = 1024  # entries of a block table that one program copies
SCAN = 1024  # positions that the look-up compares at a time
SCAN_WARPS = 8
UNROLLED = 8  # suffixes up to so long are compared without a loop
DRAW_BLOCK = 2048  # logits that a program adds up; a draw rounds alike in every batch only if this never changes


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
    LANES: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr, GIVEN: tl.constexpr, FIND: tl.constexpr,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, SCAN: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
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
    ends = tl.max((chosen[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    first = tl.min(tl.where(ends, i, LANES), 0)  # the first stop; past what is accepted it cuts nothing
    room = tl.where(live, most - n, 0)
    count = tl.maximum(tl.minimum(tl.minimum(accepted, first + 1).to(tl.int64), room), 0)
    n += count
    goes_on = live & (first >= count) & (n < most)
    tl.debug_barrier()  # every warp has read the row's state before one of them writes it
    tl.store(tokens + slot * L + n - count + i, chosen, mask=live & (i <= W) & (n - count + i < L))
    tl.store(length + slot, n, mask=live)
    tl.store(alive + slot, goes_on, mask=live)
    tl.store(counts + row * 3, count)
    tl.store(counts + row * 3 + 1, tl.where(live, cut, 0))
    if FIND:
        tl.debug_barrier()  # every thread's part of the block is stored before any of them reads the text
        own = (tokens + slot * L, tl.where(goes_on, n, 0).to(tl.int32), draft + slot * K, draft_size + slot)
        found = _look_up(own[0], own[1], own[2], own[3], K, VOCAB, KP, MIN_N, MAX_N, SCAN, UNROLLED)
        tl.store(counts + row * 3 + 2, found.to(tl.int64))
    else:
        tl.store(counts + row * 3 + 2, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["L", "K", "VOCAB"])
def ngram_kernel(
    slots, tokens, length, alive, draft, draft_size, counts, L, K, VOCAB, KP: tl.constexpr, MIN_N: tl.constexpr,
    MAX_N: tl.constexpr, SCAN: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wait(PDL)
    n = tl.where(tl.load(alive + slot), tl.load(length + slot), 0).to(tl.int32)
    found = _look_up(
        tokens + slot * L, n, draft + slot * K, draft_size + slot, K, VOCAB, KP, MIN_N, MAX_N, SCAN, UNROLLED
    )
    tl.store(counts + row * 3 + 2, found.to(tl.int64))


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
    """Of a row of logits, and its slot, which PER rows share. Without NOISE each row has a temperature of its own."""
    slot = row
    if NOISE:
        slot = tl.load(slots + row // PER)
    return tl.load(temperatures + slot).to(tl.float32), slot


@triton.jit
def _mass(x, top, temperature):
    """exp((x - top) / temperature), at most 1; 0 where x is -inf, also if all are."""
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / temperature)


@triton.jit(do_not_specialize=["PER"])
def block_mass_kernel(
    logits, temperatures, slots, tops, firsts, masses, V, PER, BLOCK: tl.constexpr, NOISE: tl.constexpr, PDL: tl.constexpr
):
    """Of a block of a row's logits: the largest, where it is first, and the sum of exp((x - largest) / temperature)."""
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = _temperature(temperatures, slots, row, PER, NOISE)
    v = b * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)  # a NaN is the largest, as in torch
    top = tl.max(x, 0)
    to = row * tl.num_programs(1) + b
    tl.store(tops + to, top)
    tl.store(firsts + to, tl.min(tl.where(x == top, v, 2147483647), 0))
    if temperature > 0:
        tl.store(masses + to, tl.sum(_mass(x, top, temperature).to(tl.float64), 0))


@triton.jit(do_not_specialize=["PER"])
def draw_kernel(
    logits, temperatures, slots, seeds, positions, noise, tops, firsts, masses, out, V, PER, BLOCKS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, NOISE: tl.constexpr, PURPOSE: tl.constexpr, PDL: tl.constexpr,
):
    """The token of a row: find the block in which the sums pass u times their total, then the token in it."""
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
    if (temperature > 0) & (highest > float("-inf")) & (highest < float("inf")):
        scale = tl.exp((top - highest) / temperature).to(tl.float64)
        mass = tl.load(masses + row * BLOCKS + b, mask=b < BLOCKS, other=0.0) * scale
        passed = tl.cumsum(mass, 0)
        target = u * tl.max(passed, 0)
        # the first past the target; should rounding leave none there, the last that holds any mass
        last = tl.max(tl.where(mass > 0, b, 0), 0)
        mine = tl.minimum(tl.min(tl.where((mass > 0) & (passed > target), b, LANES), 0), last)
        own = b == mine
        before = tl.sum(tl.where(own, passed - mass, 0.0), 0)
        by = tl.sum(tl.where(own, scale, 0.0), 0)
        v = mine * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf"))
        part = _mass(x, tl.max(x, 0), temperature)
        passed = before + by * tl.cumsum(part.to(tl.float64), 0)
        last = tl.max(tl.where(part > 0, v, 0), 0)
        choice = tl.minimum(tl.min(tl.where((part > 0) & (passed > target), v, 2147483647), 0), last)
    tl.store(out + row, choice.to(tl.int64))


def prepare(pool: Pool, slot: Tensor, k: Tensor, embedding: Tensor, width: int, pdl: int = 0) -> Prepared:
    """Lay the drafts behind the committed tokens, and give what the forward pass needs: of each row its last committed token
    and `width` drafts. slot: [B] int64; k: [B] int64, what each row may draft at most; embedding: [V,H].

    A draft is cut to k and to one token less than its limit leaves; what is cut is padding, with any token."""
    rows, (_, pages) = len(slot), pool.block_table.shape
    vocab, hidden = embedding.shape
    total = rows * (width + 1)
    out = Prepared(
        embedding.new_empty(total, hidden), slot.new_empty(total), pool.block_table.new_empty(rows, pages), slot.new_empty(rows)
    )
    run = min(TABLE_RUN, power_of_two(pages))
    prepare_kernel[(rows, width + 1 + triton.cdiv(pages, run))](
        slot, k, pool.tokens, pool.length, pool.limit, pool.alive, pool.block_table, pool.draft, pool.draft_size, embedding,
        *out, width, pool.tokens.shape[1], pages, pool.draft.shape[1], vocab, hidden, power_of_two(hidden), run, pdl,
        **_launch(4, pdl),
    )
    return out


def commit(pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """Accept the drafts that equal the target's choices, cut the block at a stop or the limit, append it. slot: [B];
    choice: [B,W+1] int64, the block's tokens too; size: [B] int64, from prepare -> counts [B,3] int64: committed, drafted
    and 0."""
    return _commit(pool, slot, choice, None, size, None, pdl)


def commit_verdict(pool: Pool, slot: Tensor, tokens: Tensor, count: Tensor, size: Tensor, pdl: int = 0) -> Tensor:
    """The same for a block of which the first `count` [B] int64 are known to be accepted. tokens: [B,W+1] int64."""
    return _commit(pool, slot, tokens, count, size, None, pdl)


def commit_and_draft(
    pool: Pool, slot: Tensor, choice: Tensor, size: Tensor, look_up: LookUp, pdl: int = 0
) -> Tensor:
    """`commit`, then the draft of the next step as `ngram` makes it, in one launch -> counts [B,3] int64: committed, drafted
    and the size of the next draft."""
    return _commit(pool, slot, choice, None, size, look_up, pdl)


def _commit(
    pool: Pool, slot: Tensor, block: Tensor, given: Tensor | None, size: Tensor, look_up: LookUp | None, pdl: int
) -> Tensor:
    rows, lanes = block.shape
    stops, width = pool.stop_ids.shape[1], pool.draft.shape[1]
    counts = slot.new_empty(rows, 3)
    find = look_up is not None and width > 0
    min_n, max_n, vocab = look_up if look_up is not None and find else LookUp(1, 1, 0)
    commit_kernel[(rows,)](
        block, size if given is None else given, size, slot, pool.tokens, pool.length, pool.limit, pool.alive, pool.stop_ids,
        pool.draft, pool.draft_size, counts, lanes - 1, pool.tokens.shape[1], width, vocab, power_of_two(lanes), stops,
        power_of_two(stops), power_of_two(max(width, 1)), given is not None, find, min_n, max_n, SCAN, UNROLLED, pdl,
        **_launch(SCAN_WARPS if find else 1, pdl),
    )
    return counts


def ngram(pool: Pool, slot: Tensor, look_up: LookUp, counts: Tensor, pdl: int = 0) -> None:
    """Draft for each row up to K tokens that followed the longest suffix the first time it occurred (drafters/ngram.py), none
    where it is not alive; the sizes also go to counts[:,2]. slot: [B] int64; counts: [B,3] int64."""
    width = pool.draft.shape[1]
    ngram_kernel[(len(slot),)](
        slot, pool.tokens, pool.length, pool.alive, pool.draft, pool.draft_size, counts, pool.tokens.shape[1], width,
        look_up.vocab, power_of_two(width), look_up.min_n, look_up.max_n, SCAN, UNROLLED, pdl,
        **_launch(SCAN_WARPS, pdl),
    )


def uniform(seed: Tensor, slot: Tensor, position: Tensor, purpose: int, pdl: int = 0) -> Tensor:
    """noise.uniform with the slots' seeds. seed: [S] int64; slot, position: [N] int64 -> [N] float64"""
    out = seed.new_empty(len(slot), dtype=torch.float64)
    uniform_kernel[(triton.cdiv(len(slot), 128),)](seed, slot, position, out, len(slot), purpose, 128, pdl, **_launch(4, pdl))
    return out


def draw_tempered(logits: Tensor, temperature: Tensor, u: Tensor, pdl: int = 0) -> Tensor:
    """A token of softmax(logits / temperature) by inverse CDF, the argmax where the temperature is 0 or the largest logit is
    not finite (a NaN counts as the largest). logits: [N,V] float32; temperature, u: [N] float64 -> [N] int64

    The rule is noise.draw's: the first token whose cumulative sum exceeds u times the total. The sums are of blocks first,
    in float64, so a u at the very edge between two tokens may fall the other way than there."""
    return _draw(logits, temperature, None, None, None, u, pdl)


def choose_tempered(
    logits: Tensor, slot: Tensor, positions: Tensor, seed: Tensor, temperature: Tensor, pdl: int = 0
) -> Tensor:
    """The target's choices for slots that use a temperature and nothing else: draw_tempered with the noise of
    (seed, position, CHOOSE). logits: [B(W+1),V] float32; slot: [B] int64; positions: [B(W+1)] int64, of the tokens that
    were read, so that the chosen one stands one further; seed, temperature: [S] int64, float64 -> [B(W+1)] int64"""
    return _draw(logits, temperature, slot, positions, seed, None, pdl)


def _draw(
    logits: Tensor, temperature: Tensor, slot: Tensor | None, positions: Tensor | None, seed: Tensor | None, u: Tensor | None,
    pdl: int,
) -> Tensor:
    total, vocab = logits.shape
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    tops = logits.new_empty(total, blocks)
    firsts = logits.new_empty(total, blocks, dtype=torch.int32)
    masses = logits.new_empty(total, blocks, dtype=torch.float64)
    out = logits.new_empty(total, dtype=torch.int64)
    per, noise, dummy = (1 if slot is None else total // max(len(slot), 1)), slot is not None, out
    slots = dummy if slot is None else slot
    block_mass_kernel[(total, blocks)](
        logits, temperature, slots, tops, firsts, masses, vocab, per, DRAW_BLOCK, noise, pdl, **_launch(4, pdl)
    )
    draw_kernel[(total,)](
        logits, temperature, slots, dummy if seed is None else seed, dummy if positions is None else positions,
        dummy if u is None else u, tops, firsts, masses, out, vocab, per, blocks, power_of_two(blocks), DRAW_BLOCK, noise,
        CHOOSE, pdl, **_launch(8, pdl),
    )
    return out


def _launch(warps: int, pdl: int) -> dict[str, Any]:
    return {"num_warps": warps, "launch_pdl": True} if pdl else {"num_warps": warps}
