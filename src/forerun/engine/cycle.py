"""One cycle of the engine, on the device: lay out the rows with the drafts kept from the step before -> target -> verify ->
commit -> observe -> draft for the next step. One run of it is a launch. This form uses torch operations and runs anywhere;
fused.py has the fast form for CUDA. scheduler.py chooses the rows, layouts.py the shape, runner.py how a launch is run.

A row is active until it meets a stop token, its limit or broken logits, or until the host releases it. Inactive rows write to
the dummy page 0 and commit nothing. A rejected draft leaves stale tokens, keys and values past the committed length. The row's
next launch overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.device import send, send_integers
from forerun.drafters import Drafter, Observed, Rows, Worth
from forerun.engine.commit import commit, commit_on_host
from forerun.engine.policy import LEVELS
from forerun.engine.state import RowState
from forerun.kernels import Batch, Kernels
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Verdict
from forerun.verify.accept import accept_block, accept_drawn, accept_ratio
from forerun.verify.grammar import Block
from forerun.verify.sampling import Features, SamplingState, logprobs

GREEDY = Features()
NEXT_DRAFT = 4  # the column of Report.counts with the size of the next draft

# The layouts of a launch, with the input of each row, [n,R] int64:
EXACT = "exact"  # the host knows all lengths: slot, begin, pending, drafts, commits (1 or 0), drafts wanted for the next step
UNIFORM = "uniform"  # each row has its last token and `width` drafts: slot, drafts at most
SHARED = "shared"  # the rows share a number of drafts, the likeliest of those at hand: slot, drafts at most
PROMPT = "prompt"  # chunks of prompts: slot, begin, count, commits (1: this chunk is the last, and the row gets a token)

DRAWN = Features(sampled=True)  # features with which drafts are drawn where launches are captured


class Key(NamedTuple):
    """The shapes and the work of a launch. rows: padded batch size; tokens: positions computed, padding included; width: draft
    tokens of a row at most; top: logprobs reported for each token (-1: none, 0: the chosen token's only); choosing: whether a
    request chose among the drafters; passes: whether the drafter may make passes of its model; observes: whether a model in the
    drafter observes the step."""

    layout: str
    rows: int
    tokens: int
    width: int
    features: Features = GREEDY
    top: int = -1
    choosing: bool = False
    passes: bool = True
    observes: bool = True

    @property
    def bare(self) -> Key:
        """The same launch without what requests ask for: sampling, logprobs and a choice of drafters."""
        return self._replace(features=GREEDY, top=-1, choosing=False)


def decode_key(
    rows: int, width: int, drafts: int | None = None, features: Features = GREEDY, top: int = -1, passes: bool = True,
    observes: bool = True,
) -> Key:
    """The key of a decode launch. drafts: drafts of all rows together, None: `width` for each row."""
    if drafts is None:
        return Key(UNIFORM, rows, rows * (width + 1), width, features, top, passes=passes, observes=observes)
    return Key(SHARED, rows, rows + drafts, width, features, top, passes=passes, observes=observes)


class Report(NamedTuple):
    """What a launch tells the host. tokens: [B,W+1]; counts: [B,5], tokens committed, drafted, accepted, 1 if broken logits
    ended the row after them, and the size of the next draft; logprobs: of the tokens [B,W+1], with ids and values of the
    likeliest [B,W+1,top], None if no request wants them; confidence, cheap: [B,K] float32 each, survival probabilities of the
    next draft and of the one without passes (types.Draft), None if the drafter gives none."""

    tokens: Tensor
    counts: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None
    confidence: Tensor | None = None
    cheap: Tensor | None = None


def likeliest(chances: Tensor, size: Tensor, most: int) -> Tensor:
    """How many of its drafts each row keeps, [B] int64, so that all rows together keep `most`: the likeliest, by their survival
    in LEVELS steps. Of equal ones those of the first rows are kept. chances: [B,W], descending in each row; size: [B] int64."""
    level = (chances * LEVELS).long().clamp(0, LEVELS - 1)
    level = torch.where(torch.arange(chances.shape[1], device=size.device) < size[:, None], level, -2)  # -2: no draft
    steps = torch.arange(LEVELS, device=size.device)[:, None, None]
    last = ((level >= steps).sum((1, 2)) > most).sum()  # drafts of this level and above are all kept
    sure = (level >= last).sum(1)
    equal = (level == last - 1).sum(1)
    room = most - sure.sum() - (equal.cumsum(0) - equal)
    return sure + torch.minimum(equal, room.clamp(min=0))


class Layout(NamedTuple):
    """How the rows of a launch lie on the device: R rows with T tokens. The first B rows choose tokens, at N positions.

    batch: the forward pass, with logits for the N positions; slot: [B], the dummy slot for rows that commit nothing; owner:
    [N], the slot of each position, or [B], of each N/B positions; positions: [N], of the tokens with logits; block: [B,W+1],
    indices of a row's block among the N, None: N = B * (W+1), in order; draft: W wide; x: [T,H], the tokens' embeddings, None:
    the target looks them up; rows: [R], all slots; pending: [R], committed tokens of each row, None: one; wanted: [B] int64,
    tokens to draft for the next step, None: as many as possible."""

    batch: Batch
    slot: Tensor
    owner: Tensor
    positions: Tensor
    block: Tensor | None
    draft: Draft
    x: Tensor | None
    rows: Tensor
    pending: Tensor | None
    wanted: Tensor | None


class Times(NamedTuple):
    """Host seconds of one step's parts."""

    draft: float
    forward: float
    verify: float


class Cycle:
    """classes: the features whose launches are captured before the first request. times: host seconds of the last launch.
    worth: with the exact layout, what another pass of the drafter is worth in the next launch; None: drafts are as long as may
    be."""

    classes: tuple[Features, ...] = (GREEDY,)

    def __init__(
        self, target: Target, kv: KVCache, state: RowState, sampling: SamplingState, drafter: Drafter | None, block: bool
    ) -> None:
        """drafter: works on the device; None: `keep` writes the drafts. block: verify drafts that have probabilities with block
        verification."""
        self.target, self.kv, self.state, self.sampling, self.drafter = target, kv, state, sampling, drafter
        self.drawn = state.draft_probs is not None
        self.width = state.draft.shape[1]
        self.times = Times(0.0, 0.0, 0.0)
        self.worth: Worth | None = None
        self._accept = accept_block if block else accept_ratio
        self._layers = drafter.needs.layers if drafter is not None else ()
        self._starts: dict[tuple[int, int], Tensor] = {}  # (rows, width) -> [B+1] int32, where each row's tokens start

    def features(self, slots: Iterable[int]) -> Features:
        """The sampling features that a launch with these slots needs."""
        return self.served(self.sampling.features(slots))

    def served(self, features: Features) -> Features:
        """The features of the launches that serve requests with these features."""
        return features

    def run(self, key: Key, given: Tensor) -> Report:
        """One cycle. given: [n,R] int64, as the key's layout wants it (see above). Padding rows have the dummy slot."""
        start = time.perf_counter()
        layout: Layout = getattr(self, f"lay_{key.layout}")(key, given)
        kernels = self._kernels(key)
        seen = self.target.forward(layout.batch, self.kv, self._layers, kernels, layout.x)
        computed = time.perf_counter()
        tokens, verdict = self._verify(key, layout, seen.logits)
        block = (layout.slot, layout.draft, tokens, verdict)
        counts = commit_on_host(self.state, *block) if key.layout == EXACT else self._commit(*block)
        logprobs = self._logprobs(key, layout, seen.logits, tokens)
        verified = time.perf_counter()
        confidence = cheap = None
        if self.drafter is not None and not key.observes and not self.drafter.needs.cheap:
            self.state.draft_size.index_fill_(0, layout.slot, 0)
        elif self.drafter is not None:
            width = key.width + 1 if key.layout == UNIFORM else None
            committed, run = counts[:, 0], kernels or self.target.kernels
            step = (layout.rows, layout.batch, layout.pending, committed, seen.hidden, run, width)
            self.drafter.observe(Observed(*step, key.observes, key.features.grammar))
            confidence, cheap = self._draft(key, layout, counts)
        self.times = Times(time.perf_counter() - verified, computed - start, verified - computed)
        return Report(tokens, counts, logprobs, confidence, cheap)

    # Lay out

    def lay_exact(self, key: Key, given: Tensor) -> Layout:
        """The rows end to end, without padding. Each has its pending tokens, then its drafts. Rows that commit come first. For
        a state on the CPU."""
        slot, begin, pending, drafts, commits, _ = given.numpy()
        count, rows = pending + drafts, int(commits.sum())
        first = np.cumsum(drafts[:rows] + 1) - drafts[:rows] - 1  # [B] where each block begins among the N
        row = np.repeat(np.arange(rows), drafts[:rows] + 1)  # [N]
        offset = np.arange(len(row)) - first[row]  # [N] 0 .. drafts
        last = np.cumsum(count)[:rows] - drafts[:rows] - 1  # [B] the last pending token among all tokens
        owner = torch.from_numpy(slot[row])
        block_slot = given[0, :rows]
        draft = self._kept(block_slot, key.width)._replace(size=given[3, :rows])
        if key.width:
            self.state.write_drafts(block_slot, draft.tokens)
        batch = self.state.batch(slot, begin, count, last[row] + offset)
        positions = torch.from_numpy((begin + pending - 1)[row] + offset)
        block = None
        if key.width:
            block = torch.from_numpy(np.minimum(first[:, None] + np.arange(key.width + 1), len(row) - 1))
        return Layout(batch, block_slot, owner, positions, block, draft, None, given[0], given[2], given[5, :rows])

    def lay_uniform(self, key: Key, given: Tensor) -> Layout:
        """Each row has its last committed token and `width` drafts, kept from the step before."""
        slot, k = given
        state = self.state
        active, length = state.active[slot], state.length[slot]
        draft = self._cut(key, slot, k, length)
        state.write_drafts(slot, draft.tokens)
        positions = (length - 1)[:, None] + torch.arange(key.width + 1, device=slot.device)  # [B,W+1]
        ids = state.tokens[slot[:, None], positions]
        table = torch.where(active[:, None], state.block_table[slot], 0)
        return self._uniform(key, slot, draft, ids.flatten(), positions.flatten(), table, None)

    def _uniform(
        self, key: Key, slot: Tensor, draft: Draft, ids: Tensor, positions: Tensor, table: Tensor, x: Tensor | None
    ) -> Layout:
        shape = (key.rows, key.width)
        if shape not in self._starts:
            self._starts[shape] = torch.arange(0, key.tokens + 1, key.width + 1, dtype=torch.int32, device=slot.device)
        batch = Batch(ids, positions, self._starts[shape], table, None)
        return Layout(batch, slot, slot, positions, None, draft, x, slot, None, None)

    def lay_shared(self, key: Key, given: Tensor) -> Layout:
        """The rows share key.tokens - key.rows drafts. Each has its last committed token and its drafts, end to end. For drafts
        without probabilities."""
        slot, k = given
        state = self.state
        length, active = state.length[slot], state.active[slot]
        draft = self._cut(key, slot, k, length)
        size = likeliest(state.chances[slot, : key.width], torch.where(active, draft.size, 0), key.tokens - key.rows)
        draft = draft._replace(size=size)
        state.write_drafts(slot, draft.tokens)
        batch, row = self._end_to_end(key, slot, torch.where(active, length - 1, 0), size + 1)
        table = torch.where(active[:, None], batch.block_table, 0)
        batch = batch._replace(block_table=table, logits_at=None)
        return self._shared(key, slot, slot[row], draft, batch, None)

    @staticmethod
    def _shared(key: Key, slot: Tensor, owner: Tensor, draft: Draft, batch: Batch, x: Tensor | None) -> Layout:
        block = batch.row_start[:-1, None] + torch.arange(key.width + 1, device=slot.device)  # [B,W+1]
        block = block.clamp(max=key.tokens - 1)
        return Layout(batch, slot, owner, batch.positions, block, draft, x, slot, None, None)

    def lay_prompt(self, key: Key, given: Tensor) -> Layout:
        """Each row has `count` tokens from position `begin` on. They lie end to end, with padding after the last."""
        slot, begin, count, through = given
        batch, _ = self._end_to_end(key, slot, begin, count)
        commits = torch.where(through > 0, slot, self.state.dummy)
        last = (begin + count).clamp(min=1) - 1
        nothing = self._kept(commits, 0)._replace(size=torch.zeros_like(slot))
        return Layout(batch, commits, commits, last, None, nothing, None, slot, count, None)

    def _end_to_end(self, key: Key, slot: Tensor, begin: Tensor, count: Tensor) -> tuple[Batch, Tensor]:
        """The forward pass over `count` tokens of each slot from position `begin` on ([R] each), with logits at each row's last
        token (at any token if the row is empty), and the row of each token [T]."""
        end = count.cumsum(0)  # [R]
        at = torch.arange(key.tokens, device=slot.device)  # [T]
        row = torch.searchsorted(end, at, right=True).clamp(max=key.rows - 1)  # [T]
        there = at < end[-1]
        positions = torch.where(there, at + (begin - end + count)[row], 0)
        ids = torch.where(there, self.state.tokens[slot[row], positions], 0)
        start = F.pad(end, (1, 0)).int()
        return Batch(ids, positions, start, self.state.block_table[slot], (end - 1).clamp(min=0)), row

    def _cut(self, key: Key, slot: Tensor, k: Tensor, length: Tensor) -> Draft:
        """The kept drafts, cut to k and to the row's limit. slot, k, length: [B]."""
        kept = self._kept(slot, key.width)
        room = torch.minimum(k, self.state.limit[slot] - length - 1)
        return kept._replace(size=torch.minimum(kept.size, room).clamp(0, key.width))

    def _kept(self, slot: Tensor, width: int) -> Draft:
        """The drafts kept from the step before, at most `width` of each row."""
        state = self.state
        probs = None if state.draft_probs is None else state.draft_probs[slot, :width]
        return Draft(state.draft[slot, :width], state.draft_size[slot], probs)

    def _kernels(self, key: Key) -> Kernels | None:
        """Kernels bounded to the launch's shape; None: the target's own."""
        if key.layout in (EXACT, PROMPT):
            return None
        return self.target.kernels.bounded(key.width + 1, self.state.tokens.shape[1], ragged=key.layout == SHARED)

    # Verify

    def _verify(self, key: Key, layout: Layout, logits: Tensor) -> tuple[Tensor, Verdict | None]:
        """The block of each row [B,W+1]. For point masses these are the target's choices, and drafts are accepted while they
        equal them. For drafts with probabilities they are the verdict's tokens."""
        if not self.drawn:
            return self._block(layout, self._choose(key, layout, logits)), None
        shaped, owner = self._shaped(key, layout, logits)
        target = self._block(layout, self._distribution(key, layout, shaped, owner))
        broken = self._block(layout, self.sampling.broken(shaped))
        seed, start = self.sampling.seed[layout.slot], self.state.length[layout.slot]
        verdict = accept_drawn(self._accept, target, broken, layout.draft, seed, start)
        return verdict.tokens, verdict

    @staticmethod
    def _block(layout: Layout, values: Tensor) -> Tensor:
        """Values of the positions [N,..] as one block for each row [B,W+1,..]."""
        if layout.block is None:
            rows = len(layout.slot)
            return values.view(rows, len(values) // rows if rows else 1, *values.shape[1:])
        return values[layout.block]

    def _choose(self, key: Key, layout: Layout, logits: Tensor) -> Tensor:
        """The token that the target chooses after each position, [N]."""
        shaped, owner = self._shaped(key, layout, logits)
        return self.sampling.choose(shaped, owner, layout.positions + 1, key.features)

    def _shaped(self, key: Key, layout: Layout, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [N,V] after biases, bans and penalties, and the slot of each [N]."""
        owner, positions = layout.owner, layout.positions
        if len(owner) < len(positions):
            owner = owner.repeat_interleave(len(positions) // len(owner), output_size=len(positions))
        longest = int(positions.max()) + 1 if key.layout == EXACT and key.features.penalties else 0
        return self.sampling.shape(logits, owner, positions + 1, key.features, longest), owner

    def _distribution(self, key: Key, layout: Layout, shaped: Tensor, owner: Tensor) -> Tensor:
        """The target's distribution at each position, [N,V]."""
        return self.sampling.probs(shaped, owner, key.features)

    def _logprobs(self, key: Key, layout: Layout, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Report.logprobs for these tokens [B,W+1]."""
        if key.top < 0:
            return None
        chosen, ids, values = logprobs(self._block(layout, logits).flatten(0, 1), tokens.flatten(), key.top)
        return chosen.view_as(tokens), ids.view(*tokens.shape, -1), values.view(*tokens.shape, -1)

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        return commit(self.state, slot, draft, tokens, verdict)

    # Observe and draft

    def _draft(self, key: Key, layout: Layout, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Draft for the next step. Return Report.confidence and Report.cheap."""
        if self.drafter is None or self.width == 0 or not len(layout.slot):
            return None, None
        exact = key.layout == EXACT
        features, worth = key.features if exact else DRAWN, self.worth if exact else None
        draft = self.draft(layout.slot, layout.wanted, features, key.passes, worth, key.choosing)
        counts[:, NEXT_DRAFT] = self.state.draft_size[layout.slot]
        return draft.confidence, draft.cheap

    def draft(
        self, slot: Tensor, wanted: Tensor | None, features: Features, passes: bool = True, worth: Worth | None = None,
        choosing: bool = True,
    ) -> Draft:  # fmt: skip
        """Draft for these slots [B] and keep the drafts. wanted: as in Layout, on the CPU if given; passes, worth, choosing: as
        in Rows."""
        assert self.drafter is not None
        features = features._replace(grammar=False)  # its masks are for the block before, and the next draft is cut by them
        k = torch.where(self.state.active[slot], self.width if wanted is None else wanted, 0)
        width = self.width if wanted is None else int(k.max())
        draft = self.drafter.propose(Rows(slot, k, width, features, passes, worth, choosing=choosing))
        self._keep(slot, draft)
        return draft

    def _keep(self, slot: Tensor, draft: Draft) -> None:
        state, width = self.state, draft.tokens.shape[1]
        state.draft[slot, :width] = draft.tokens
        state.draft_size[slot] = draft.size
        if draft.confidence is not None:
            state.chances[slot, :width] = draft.confidence
        if state.draft_probs is not None and draft.probs is not None:
            state.draft_probs[slot, :width] = draft.probs

    def at_hand(self, slots: list[int]) -> list[list[int]]:
        """The drafts kept for the next step of these slots. Waits for the device."""
        at = send_integers(slots, self.state.length.device)
        kept = torch.cat((self.state.draft_size[at][:, None], self.state.draft[at]), 1).tolist()
        return [tokens[:size] for size, *tokens in kept]

    def amend(self, slots: list[int], blocks: list[Block], chances: list[list[float]] | None) -> None:
        """Keep the drafts of these blocks in place of those at hand. chances: the survival of each of their tokens, if it is
        known. Forced tokens get probability 1."""
        state, device = self.state, self.state.length.device
        pairs = list(zip(slots, blocks, strict=True))
        sent = send_integers([[s, len(b.tokens), *b.tokens, *[0] * (self.width - len(b.tokens))] for s, b in pairs], device)
        confidence = None
        if chances is not None:
            confidence = send(np.array([[*row, *[0.0] * (self.width - len(row))] for row in chances], np.float32), device)
        self._keep(sent[:, 0], Draft(sent[:, 2:], sent[:, 1], None, confidence))
        if state.draft_probs is None:
            return
        certain = [(s, i, b.tokens[i]) for s, b in pairs for i, forced in enumerate(b.forced) if forced]
        if certain:
            slot, place, token = send_integers(certain, device).T
            state.draft_probs[slot, place] = 0.0
            state.draft_probs[slot, place, token] = 1.0

    def keep(self, slots: list[int], draft: Draft) -> None:
        """Keep a draft that was made on the host for the next step of these slots."""
        sent = send(np.column_stack([slots, draft.size, draft.tokens]), self.state.length.device)  # [B,2+K], one transfer
        self._keep(sent[:, 0], Draft(sent[:, 2:], sent[:, 1]))
