"""Measured chances of drafted tokens: how often such tokens agreed with the target lately, among those whose predecessors did.

A learned drafter gives each token a probability, and a look-up has the length of its match. Neither is the chance that the
target agrees: a greedy target agrees more often than the probability says. So drafted tokens are sorted into bins, by what is
known of them when they are drafted, and each bin counts what became of its tokens. One table serves all rows. It forgets: a bin
counts no more than WINDOW tokens. Each row corrects the table by its own luck: a shift of the log odds, estimated from how much
its tokens differed from what the table said (one step of Newton's method, with a Gaussian prior of precision PRECISION).

A row has up to two candidates for the same step: the draft of a head (or of a smaller model), and the tokens that an n-gram
look-up found. The one that is expected to bring more tokens is its draft. The candidates share their first tokens as far as
they agree, and agreement is the best sign there is, so it has bins of its own.

Both candidates are compared with the tokens that were committed in their place, whichever of them was verified, and whether or
not any was. So what is learned does not depend on what the policy chose.

All of it is tensor operations of fixed shape, which wait for nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.engine.state import RowState

WINDOW = 256.0  # tokens that a bin counts at most
PRIOR_WEIGHT = 4.0  # tokens that a bin's first rate counts for
PRECISION = 1.0
MEMORY = 0.95  # weight of what a row's luck rests on, in each step that adds to it
MOST_SHIFT = 3.0  # of the log odds
LEAST, MOST = 0.005, 0.995  # chances
LEAST_SURVIVAL = 1e-30

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # between the bins of a head's probability
CHANCES = len(EDGES) + 1
MATCHES = (2, 3, 4, 5, 7)  # the least lengths of a match in the second bin and the next ones
LENGTHS = len(MATCHES) + 1
PLACES = 4  # a token's index in the draft, the last for all behind
DEEP = 16  # the same for TYPICAL

# Kinds of bins, and where each begins. Of a head's token, by index and probability: ALONE, without a look-up's token beside it;
# PARTED, where the two differ for the first time; APART, behind that. AGREED: both have this token and all before, by length of
# match and probability. Of a look-up's token, by length of match: FOUND, whatever the head drafts, by index; SPLIT, where the
# two differ for the first time, by the probability of the head's token; TAIL, behind that, by index; FOLLOWS, behind the end of
# the head's draft, all of which agreed, by index. TYPICAL: of a head's token, by index, before it is drafted.
ALONE, PARTED, APART = 0, PLACES * CHANCES, 2 * PLACES * CHANCES
AGREED = 3 * PLACES * CHANCES
SPLIT = AGREED + LENGTHS * CHANCES
FOUND = SPLIT + LENGTHS * CHANCES
TAIL = FOUND + LENGTHS * PLACES
FOLLOWS = TAIL + LENGTHS * PLACES
TYPICAL = FOLLOWS + LENGTHS * PLACES
BINS = TYPICAL + DEEP

HEAD, LOOK_UP = 0, 1  # the candidates
# Each candidate's tokens are counted in two bins: the one that their chance was taken from, and a coarse one.
LINES = (HEAD, LOOK_UP, HEAD, LOOK_UP)  # the candidate of each line of bins: fine, fine, TYPICAL, FOUND


def priors() -> Tensor:
    """The first rate of each bin, [BINS]."""
    edges = (0.0, *EDGES, 1.0)
    sure = [((low + high) / 2) ** 0.6 for low, high in pairwise(edges)]  # by a head's probability
    found = (0.3, 0.45, 0.55, 0.65, 0.75, 0.85)  # by length of match
    rates = sure * PLACES * 3
    rates += [1 - (1 - s) * 0.4 for _ in found for s in sure]
    rates += [(1 - s) * f for f in found for s in sure]
    rates += [f for f in found for _ in range(PLACES)]
    rates += [f for f in found for _ in range(PLACES)]
    rates += [0.5 + 0.5 * f for f in found for _ in range(PLACES)]
    rates += [0.6] * DEEP
    return torch.tensor(rates)


class Candidates(NamedTuple):
    """Two candidates for the drafts of B rows, each up to K tokens. head, look_up: [B,K] int64; sizes: [B] int64 each, 0: none;
    survival: [B,K], the head's own probability that each of its tokens and all before it are right; match: [B] int64, the
    length of the look-up's match."""

    head: Tensor
    head_size: Tensor
    survival: Tensor
    look_up: Tensor
    look_up_size: Tensor
    match: Tensor


class Weighed(NamedTuple):
    """tokens: [B,K]; size: [B]; survival: [B,K], of the chosen draft; source: [B] int64, HEAD or LOOK_UP; found: [B,K],
    survival of the look-up's tokens if the head had drafted nothing."""

    tokens: Tensor
    size: Tensor
    survival: Tensor
    source: Tensor
    found: Tensor


class Calibration:
    """rate, weight: [BINS] float32, the share of tokens that agreed and how many that rests on; luck: [S,2,2] float32, of each
    slot and candidate: the sum of differences from the table and of their variances. Of the candidates at hand, by slot: tokens
    [S,2,K] int64; bins [S,4,K] int64, -1 for none, as in LINES; told [S,2,K] float32, the rates when they were drafted."""

    def __init__(self, state: RowState) -> None:
        slots, width, device = *state.draft.shape, state.draft.device
        self._state = state
        self._first = priors().to(device)
        self.rate, self.weight = self._first.clone(), torch.full((BINS,), PRIOR_WEIGHT, device=device)
        self.luck = torch.zeros(slots, 2, 2, device=device)
        self.tokens = torch.zeros(slots, 2, width, dtype=torch.int64, device=device)
        self.bins = torch.full((slots, len(LINES), width), -1, device=device)
        self.told = torch.zeros(slots, 2, width, device=device)
        self._edges = torch.tensor(EDGES, device=device)
        self._matches = torch.tensor(MATCHES, device=device)
        self._at = torch.arange(width, device=device)
        self._place, self._deep = self._at.clamp(max=PLACES - 1), self._at.clamp(max=DEEP - 1)

    def admit(self, slot: int) -> None:
        """Another sequence got the slot."""
        self.luck[slot] = 0
        self.bins[slot] = -1

    def restart(self) -> None:
        """No slot has candidates."""
        self.luck.zero_()
        self.bins.fill_(-1)

    def learn(self, slot: Tensor, count: Tensor) -> None:
        """Compare the candidates of these slots [B] with the tokens that the step has committed, `count` [B] of each."""
        state, at = self._state, self._at
        begin = (state.length[slot] - count)[:, None]
        text = state.tokens[slot].gather(1, (begin + at).clamp(max=state.tokens.shape[1] - 1))  # [B,K]
        known = (at < count[:, None]) & (slot != state.dummy)[:, None]
        right = (self.tokens[slot] == text[:, None]) & known[:, None]  # [B,2,K]
        tried = torch.cat((known[:, None, :1].expand(-1, 2, -1), right[..., :-1].cummin(2).values & known[:, None, 1:]), 2)
        bins = self.bins[slot]
        counted = tried[:, LINES] & (bins >= 0)  # [B,4,K]
        right = right[:, LINES] & counted
        self._add(slot, counted[:, 2:], right[:, 2:])
        into = torch.where(counted, bins, BINS).flatten()
        sums = self.rate.new_zeros(2, BINS + 1)
        sums[0].index_add_(0, into, counted.flatten().float())
        sums[1].index_add_(0, into, right.flatten().float())
        more, agreed = sums[:, :BINS]
        self.rate.copy_((self.rate * self.weight + agreed) / (self.weight + more))
        self.weight.add_(more).clamp_(max=WINDOW)

    def _add(self, slot: Tensor, tried: Tensor, right: Tensor) -> None:
        """Add to the luck of the slots. tried, right: [B,2,K] bool."""
        told = self.told[slot]
        off = torch.where(tried, right.float() - told, 0.0).sum(2)
        spread = torch.where(tried, told * (1 - told), 0.0).sum(2)
        luck = self.luck[slot]
        luck = torch.where(tried.any(2)[..., None], MEMORY * luck + torch.stack((off, spread), 2), luck)
        self.luck[slot] = luck

    def shift(self, slot: Tensor) -> Tensor:
        """How the log odds of these slots' candidates differ from the table's, [B] -> [B,2]."""
        off, spread = self.luck[slot].unbind(2)
        return (off / (spread + PRECISION)).clamp(-MOST_SHIFT, MOST_SHIFT)

    def weigh(self, slot: Tensor, c: Candidates) -> Weighed:
        """Choose the draft of each slot [B], and keep the candidates until the step that verifies it."""
        at, place = self._at, self._place
        head_size = torch.where(self._state.blind[slot], 0, c.head_size)
        size = torch.stack((head_size, c.look_up_size), 1)  # [B,2]
        both = at < size.amin(1, keepdim=True)  # [B,K]
        agreed = ((c.head == c.look_up) & both).cummin(1).values if len(at) else both
        first = agreed.sum(1, keepdim=True)  # [B,1], where the candidates part or one ends
        parts = first < size.amin(1, keepdim=True)
        chances = torch.cat((c.survival[:, :1], c.survival[:, 1:] / c.survival[:, :-1].clamp(min=LEAST_SURVIVAL)), 1)
        sure = torch.bucketize(chances, self._edges, right=True)  # [B,K]
        length = torch.bucketize(c.match, self._matches, right=True)[:, None]  # [B,1]
        there = at < size[..., None]  # [B,2,K]
        kind = torch.where(parts & (at >= first), torch.where(at == first, PARTED, APART), ALONE)
        head = torch.where(agreed, AGREED + length * CHANCES + sure, kind + place * CHANCES + sure)
        by_length = length * PLACES + place
        found = FOUND + by_length
        none = size[:, :1] == 0  # the head has drafted nothing
        behind = torch.where(parts, TAIL, torch.where(none, FOUND, FOLLOWS)) + by_length
        look_up = torch.where(parts & (at == first), SPLIT + length * CHANCES + sure, behind)
        typical = (TYPICAL + self._deep).expand_as(found)
        bins = torch.where(there[:, LINES], torch.stack((head, look_up, typical, found), 1), -1)
        shift = self.shift(slot)[..., None].exp()  # [B,2,1]
        told = self.rate[torch.where(agreed[:, None], bins[:, :1], bins[:, :2]).clamp(min=0)]  # [B,2,K]
        coarse = self.rate[bins[:, 3].clamp(min=0)]
        odds = torch.where(agreed[:, None], shift[:, :1], shift)
        survival = torch.where(there, corrected(told, odds), 0.0).cumprod(2)
        source = (survival[:, 1].sum(1) > survival[:, 0].sum(1)).long()
        bins[:, 1] = torch.where(agreed | none, -1, bins[:, 1])  # what is counted in another line
        self.bins[slot], self.tokens[slot] = bins, torch.stack((c.head, c.look_up), 1)
        self.told[slot] = torch.stack((told[:, 0], coarse), 1)
        free = torch.where(there[:, 1], corrected(coarse, shift[:, 1]), 0.0).cumprod(1)
        chosen = source[:, None]
        tokens = torch.where(chosen == LOOK_UP, c.look_up, c.head)
        taken = survival.gather(1, source[:, None, None].expand(-1, -1, len(at)))[:, 0]
        return Weighed(tokens, size.gather(1, chosen)[:, 0], taken, source, free)


def corrected(rate: Tensor, odds: Tensor) -> Tensor:
    """Rates with their odds multiplied."""
    rate = rate.clamp(LEAST, MOST)
    return (rate * odds / (1 - rate + rate * odds)).clamp(LEAST, MOST)
