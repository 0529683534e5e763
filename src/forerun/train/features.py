"""What a head sees of its target: hidden states of every token of the samples, and the token that the target holds likeliest
behind it. They are computed once and kept in memory where they fit. Otherwise each pack's are computed again, by the target
itself, when it is its turn. They are never written to a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.device import send
from forerun.kernels import Batch
from forerun.models.decoder import Target
from forerun.train.packing import Corpus, Pack, Packing

LOG = logging.getLogger("forerun")

PAGE = 16
TOKENS = 16384  # of a forward pass of the target, at most (one sample may have more)
LOGITS = 2048  # rows of logits at a time


class Seen(NamedTuple):
    """The states of places. states: one [T,H] for each that was asked for; last: [T,H], the last layer's output; best: [T]
    int32, the likeliest next token."""

    states: tuple[Tensor, ...]
    last: Tensor
    best: Tensor


class Features:
    """stored: whether the states of all tokens are kept."""

    def __init__(self, target: Target, corpus: Corpus, packing: Packing, states: Sequence[int], stored: bool) -> None:
        """states: those that the head reads, as Target.forward numbers them."""
        self._target, self._corpus, self._packing = target, corpus, packing
        self._numbers = tuple(sorted({*states, target.config.layers}))
        self._order = [self._numbers.index(i) for i in states]
        self.stored = stored
        count = len(corpus.ids) if stored else packing.sizes.tokens
        hidden = target.config.hidden_size
        self._states = [torch.zeros(count, hidden, dtype=target.dtype, device=target.device) for _ in self._numbers]
        self._best = torch.zeros(count, dtype=torch.int32, device=target.device)
        if stored:
            for part in self._parts(packing.usable):
                self._compute(part, None)

    @staticmethod
    def bytes(target: Target, states: Sequence[int], tokens: int) -> int:
        """The memory that the states of so many tokens take."""
        return tokens * (len({*states, target.config.layers}) * target.config.hidden_size * target.dtype.itemsize + 4)

    def prepare(self, samples: np.ndarray) -> None:
        """Before a pack of these samples is trained on, in their order in the pack."""
        if not self.stored:
            begin = 0
            for part in self._parts(samples):
                self._compute(part, begin)
                begin += int(self._packing.lengths[part].sum())

    def of(self, pack: Pack) -> Seen:
        """The states of a pack's places, with operations of fixed shape."""
        if self.stored:
            kept, best = [state[pack.at] for state in self._states], self._best[pack.at]
        else:
            kept, best = self._states, self._best
        return Seen(tuple(kept[i] for i in self._order), kept[-1], best)

    def _parts(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Consecutive samples, for one pass of the target each."""
        whole = self._packing.lengths[samples].cumsum()
        begin = 0
        while begin < len(samples):
            done = int(whole[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(whole, done + TOKENS, side="right")))
            yield samples[begin:end]
            begin = end

    @torch.no_grad()
    def _compute(self, samples: np.ndarray, begin: int | None) -> None:
        """The states of some samples, written where their tokens are among all; with begin, from there on."""
        target, device = self._target, self._target.device
        lengths = self._packing.lengths[samples]
        start = np.concatenate(([0], lengths.cumsum()))
        position = np.arange(start[-1]) - np.repeat(start[:-1], lengths)
        which = send(np.repeat(samples, lengths), device)
        positions = send(position, device)
        at = self._corpus.start[which] + positions
        pages = -(-lengths // PAGE)
        first = 1 + np.concatenate(([0], pages.cumsum()))
        pages_of = first[:-1, None] + np.arange(pages.max())
        table = send(np.where(pages_of < first[1:, None], pages_of, 0).astype(np.int32), device)
        row_start = send(start.astype(np.int32), device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        batch = Batch(self._corpus.ids[at].long(), positions, row_start, table, one)
        found = target.forward(batch, target.kv_cache(int(first[-1]), PAGE), self._numbers).hidden
        to = at if begin is None else torch.arange(begin, begin + len(at), device=device)
        for state, values in zip(self._states, found, strict=True):
            state[to] = values
        answered = send(np.flatnonzero(position >= np.repeat(self._prompt(samples) - 1, lengths)), device)
        weights, last = target.weights, found[-1]
        for some in answered.split(LOGITS):
            logits = target.kernels.norm_logits(last[some], weights.norm, target.config.eps, weights.head)
            self._best[to[some]] = logits.argmax(-1).int()

    def _prompt(self, samples: np.ndarray) -> np.ndarray:
        return self._packing.lengths[samples] - self._packing.bases[samples] - 1
