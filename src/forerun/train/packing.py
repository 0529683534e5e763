"""Packs: the samples of a training step, one after the other, in a fixed number of tokens. All shapes of a step are fixed, so
that it can be captured in a CUDA graph; what differs between packs is which samples they hold.

The losses of a pack are at its bases. Base q of a sample is the position of an entry (heads/chain.py) that joins the target's
states at q with token q + 1, from which drafting begins. It lies in the answer, or at the last token of the prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.train.data import Samples
from forerun.types import require

ROOM = 1.08  # a step has room for this many times the mean number of bases
MULTIPLE = 64  # of the numbers of tokens and bases of a pack


class Sizes(NamedTuple):
    """Of every pack. tokens, bases, samples: how many at most."""

    tokens: int
    bases: int
    samples: int


class Plan(NamedTuple):
    """The packs of an epoch. sample: [packs, Sizes.samples] int64, -1: none; begin: [packs, Sizes.samples + 1] int64, where
    each begins in its pack; behind the last sample, the end of it."""

    sample: np.ndarray
    begin: np.ndarray


class Packing:
    """Which samples go into one pack. usable: the samples that have a base; lengths: of all, cut to `tokens`."""

    def __init__(self, samples: Samples, tokens: int) -> None:
        """tokens: of a pack. Raises SettingError if no sample has two answered tokens."""
        tokens = -(-tokens // MULTIPLE) * MULTIPLE
        self.lengths = np.minimum(samples.lengths, tokens)
        self.bases = np.maximum(self.lengths - samples.prompt - 1, 0)
        self.usable = np.flatnonzero(self.bases)
        require(len(self.usable) > 0, "samples", len(self.lengths), "give samples with answers of two tokens or more")
        lengths, bases = self.lengths[self.usable], self.bases[self.usable]
        most = max(ROOM * tokens * bases.sum() / lengths.sum(), bases.max())
        count = min(len(lengths), int(2 * tokens / lengths.mean()) + 1)
        self.sizes = Sizes(tokens, min(tokens, -(-int(most) // MULTIPLE) * MULTIPLE), count)

    def plan(self, epoch: int | None, seed: int = 0) -> Plan:
        """The packs of an epoch, in an order drawn from the seed and the epoch; None: in the order of the samples."""
        order = self.usable if epoch is None else np.random.default_rng((seed % 2**64, epoch)).permutation(self.usable)
        packs: list[list[int]] = []
        tokens = bases = 0
        for i in order.tolist():
            length, count = int(self.lengths[i]), int(self.bases[i])
            full = not packs or len(packs[-1]) == self.sizes.samples
            if full or tokens + length > self.sizes.tokens or bases + count > self.sizes.bases:
                packs.append([])
                tokens = bases = 0
            packs[-1].append(i)
            tokens, bases = tokens + length, bases + count
        sample = np.full((len(packs), self.sizes.samples), -1, np.int64)
        for row, pack in zip(sample, packs, strict=True):
            row[: len(pack)] = pack
        lengths = np.where(sample >= 0, self.lengths[sample], 0)
        return Plan(sample, np.concatenate((np.zeros((len(packs), 1), np.int64), lengths.cumsum(1)), 1))


class Corpus(NamedTuple):
    """Samples on the device. ids: [N] int32; start: [S] int64; lengths, prompt: [S] int64."""

    ids: Tensor
    start: Tensor
    lengths: Tensor
    prompt: Tensor

    @classmethod
    def send(cls, samples: Samples, packing: Packing, device: torch.device) -> Corpus:
        def sent(values: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(np.array(values, dtype)).to(device)

        return cls(
            sent(samples.ids, np.int32), sent(samples.start[:-1], np.int64), sent(packing.lengths, np.int64),
            sent(samples.prompt, np.int64),
        )  # fmt: skip


class Pack(NamedTuple):
    """T tokens of a pack, padding behind them, and N bases. A place is an index among the T.

    at: [T] int64, where each token is in Corpus.ids; position: [T] int64, in its sample; begin, end: [T] int64, the places
    where its sample begins and ends (padding: T and T, a sample without tokens).
    base: [N] int64, places of the bases in ascending order; true: [N] bool, the others fill up."""

    at: Tensor
    position: Tensor
    begin: Tensor
    end: Tensor
    base: Tensor
    true: Tensor

    def behind(self, corpus: Corpus, places: Tensor, steps: int) -> Tensor:
        """The ids of the tokens `steps` behind these places; past the end of the sample, its last one.  [K] -> [K] int64"""
        last = (self.end[places] - 1).clamp(min=0, max=len(self.at) - 1)
        return corpus.ids[self.at[torch.minimum(places + steps, last)]].long()


def lay_out(sample: Tensor, begin: Tensor, corpus: Corpus, sizes: Sizes) -> Pack:
    """A pack from a row of a plan, with operations of fixed shape."""
    device, total = begin.device, sizes.tokens
    place = torch.arange(total, device=device)
    row = torch.searchsorted(begin[1:].contiguous(), place, right=True)
    real = row < sizes.samples
    row = row.clamp(max=sizes.samples - 1)
    which, first = sample[row].clamp(min=0), begin[row]
    position = torch.where(real, place - first, 0)
    at = torch.where(real, corpus.start[which] + position, 0)
    marked = real & (position >= corpus.prompt[which] - 1) & (position <= corpus.lengths[which] - 3)
    order = torch.where(marked, marked.cumsum(0) - 1, sizes.bases).clamp(max=sizes.bases)
    base = torch.full((sizes.bases + 1,), total - 1, device=device).scatter_(0, order, place)[:-1]
    return Pack(
        at, position, torch.where(real, first, total), torch.where(real, begin[row + 1], total), base,
        torch.arange(sizes.bases, device=device) < marked.sum(),
    )  # fmt: skip
