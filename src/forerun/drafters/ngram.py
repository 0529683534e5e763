"""Prompt look-up: propose what followed the last few tokens the first time they occurred in prompt + output.

The rule is that of vLLM's `ngram`: take the longest suffix of min_n .. max_n tokens that occurred before, and its earliest
occurrence; draft up to k tokens behind it, fewer where the context ends. The earlier occurrence may overlap the suffix.

Two forms that agree: NgramIndex on the host, and `match` on tensors of fixed shape. One does not serve: the index takes a time
that does not depend on the context, and `match` needs no host (docs/log.md has figures). Neither knows the model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.config import Speculation
from forerun.drafters import Needs, Rows, RowState, Stateless
from forerun.drafters.host import pack
from forerun.types import Draft, Request

WORD = 4  # bytes of a token id in the index's keys


class NgramIndex:
    """Where each n-gram of a growing text first ended. Adding a token costs max_n - min_n + 1 dictionary entries."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.lengths = range(min_n, max_n + 1)
        self.first: dict[int, dict[bytes, int]] = {n: {} for n in self.lengths}  # n-gram's bytes -> where it first ended
        self.size = 0

    def catch_up(self, text: np.ndarray) -> None:
        """Index the new tokens of text, [N] integers; those indexed before must be the same."""
        if len(text) <= self.size:
            return
        base = max(0, self.size - self.lengths.stop + 2)  # max_n - 1 tokens back: the longest n-gram with a new end
        chunk = text[base:].astype("<i4").tobytes()
        for n, first in self.first.items():
            ends = range(max(n, self.size + 1), len(text) + 1)
            keys = [chunk[(end - n - base) * WORD : (end - base) * WORD] for end in ends]
            if first:
                for key, end in zip(keys, ends, strict=True):
                    first.setdefault(key, end)
            else:  # the prompt at once, backwards, so that the earliest end is the last one written
                first.update(zip(reversed(keys), reversed(ends), strict=True))
        self.size = len(text)

    def find(self, text: np.ndarray) -> tuple[int, int]:
        """Where the earliest occurrence of the longest suffix ends, and the suffix's length; 0, 0 if none occurred before.
        text: what was indexed."""
        for n in reversed(self.lengths):
            if n < len(text):
                end = self.first[n][text[-n:].astype("<i4").tobytes()]  # the suffix itself is indexed, so it is there
                if end < len(text):
                    return end, n
        return 0, 0

    def propose(self, text: np.ndarray, k: int) -> tuple[list[int], int]:
        """Index what is new of text, [N] integers, and draft up to k tokens behind it. Also the length of the match, 0 if there
        is none."""
        self.catch_up(text)
        end, n = self.find(text)
        return (text[end : end + k].tolist() if n else []), n


def match(tokens: Tensor, length: Tensor, min_n: int, max_n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same look-up without waiting for the device: tokens [B,L], length [B] -> drafts [B,k], size [B], and the length of
    the match [B], 0 if there is none.

    For every position it counts how many tokens before it agree with the suffix, from the last one backwards: max_n comparisons
    of [B,L]. Tokens past a row's length have no effect; drafts past a row's size are undefined.
    """
    width = tokens.shape[1]
    length = length[:, None]  # [B,1]
    end = torch.arange(1, width + 1, device=tokens.device)[None]  # [1,L], an occurrence's end, as a length
    alive = end < length  # [B,L]
    run = torch.zeros_like(tokens)  # [B,L]
    for back in range(min(max_n, width)):
        last = tokens.gather(1, (length - 1 - back).clamp(min=0))  # [B,1]
        alive = alive & (end > back)
        alive[:, back:] &= tokens[:, : width - back] == last
        run += alive
    # the longest run first, then the earliest end, in one number: the index of a maximum among equals is undefined
    key = torch.where(run >= min_n, run * (width + 1) + (width - end), -1)  # [B,L]
    best, index = key.max(1, keepdim=True)  # [B,1]
    at = index + 1 + torch.arange(k, device=tokens.device)  # [B,k]
    size = torch.where(best >= 0, (length - index - 1).clamp(max=k), 0)[:, 0]
    return tokens.gather(1, at.clamp(max=width - 1)), size, torch.where(best >= 0, best // (width + 1), 0)[:, 0]


class Ngram(Stateless):
    """The look-up on the host. It indexes what is new when a draft is asked for."""

    needs = Needs()

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        assert speculation.prompt_lookup_min is not None and speculation.prompt_lookup_max is not None
        self.state, self.vocab = state, vocab
        self.min_n, self.max_n = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        self.index: dict[int, NgramIndex] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.index[slot] = NgramIndex(self.min_n, self.max_n)

    def release(self, slot: int, finished: bool) -> None:
        del self.index[slot]

    def restart(self) -> None:
        self.index = {}

    def propose(self, rows: Rows) -> Draft:
        drafts: list[list[int]] = []
        for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True):
            drafts.append(self.index[slot].propose(self.state.history(slot), k)[0] if k else [])
        return pack(drafts, rows.width, self.vocab)


class DeviceNgram(Stateless):
    """The look-up as tensor operations of fixed shape, on any device."""

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        assert speculation.prompt_lookup_min is not None and speculation.prompt_lookup_max is not None
        self.state, self.vocab = state, vocab
        self.min_n, self.max_n = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        self.needs = Needs(device=True, look_up=(self.min_n, self.max_n, vocab))

    def propose(self, rows: Rows) -> Draft:
        given = (self.state.tokens[rows.slot], self.state.length[rows.slot], self.min_n, self.max_n, rows.width)
        tokens, size, _ = match(*given)
        known = (tokens < self.vocab).cumprod(1).sum(1)  # [B]
        return Draft(tokens, torch.minimum(torch.minimum(size, rows.k), known))
