"""The device's tables: one line (slot) for each running sequence, and a last one, the dummy slot, for padding rows. `apply`
writes all admissions and releases. cycle.py and scheduler.py decide what a step does with the tables.

    tokens[slot]:  | prompt ............ | output ....... x | drafts of this step | stale ... |
                   0                                 length-1  length                         L
    x, the last committed token, has no keys and values yet. A decode step computes them together with those of the drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.device import send
from forerun.kernels import Batch
from forerun.types import Request

STOP_IDS = 16  # stop tokens of a request that the device checks; the host checks any others


class Admission(NamedTuple):
    """A request that gets a slot. ids: its committed tokens: the prompt, and if it resumes what it has produced."""

    ids: list[int]
    request: Request


class RowState:
    """tokens: [S,L] int64; length: [S] int64, committed tokens; block_table: [S,P] int32; limit: [S] int64, the maximum length;
    stop_ids: [S,E] int64, padded with -1; active: [S] bool, whether a row commits; of the next draft: draft [S,K] int64,
    draft_size [S] int64, chances [S,K] float32, the survival of each of its tokens, 1 if the drafter gives none, draft_probs
    [S,K,V] float32 or None. blind: [S] bool, whether a model that drafts has missed a step of the row, so that it cannot draft
    for it. dummy: the dummy slot."""

    def __init__(
        self, slots: int, positions: int, pages: int, device: torch.device, width: int = 0, vocab: int | None = None
    ) -> None:
        """slots: S; positions: L; pages: P; width: K; vocab: V, if drafts come with the distributions they were drawn from."""
        whole = torch.int64
        self.tokens = torch.zeros(slots, positions, dtype=whole, device=device)
        self.length = torch.ones(slots, dtype=whole, device=device)  # never 0, so that each slot has a last token
        self.block_table = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self.limit = torch.zeros(slots, dtype=whole, device=device)
        self.stop_ids = torch.full((slots, STOP_IDS), -1, dtype=whole, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.draft = torch.zeros(slots, width, dtype=whole, device=device)
        self.draft_size = torch.zeros(slots, dtype=whole, device=device)
        self.chances = torch.ones(slots, width, device=device)
        self.blind = torch.zeros(slots, dtype=torch.bool, device=device)
        self.draft_probs = None if vocab is None else torch.zeros(slots, width, vocab, device=device)
        self.dummy = slots - 1

    def apply(self, changes: Mapping[int, Admission | None]) -> None:
        """Write admissions and releases (None), by slot, with one transfer. An admitted row has no pages and no draft."""
        admitted = {slot: one for slot, one in changes.items() if one is not None}
        released = [slot for slot in changes if slot not in admitted]
        requests = [one.request for one in admitted.values()]
        stops = [([*one.stop_ids] + [-1] * STOP_IDS)[:STOP_IDS] for one in requests]
        width = self.tokens.shape[1]
        parts = [
            np.array(released, dtype=np.int64),
            np.array(list(admitted), dtype=np.int64),
            np.array([len(one.ids) for one in admitted.values()], dtype=np.int64),
            np.array([len(one.prompt_ids) + one.max_tokens for one in requests], dtype=np.int64),
            np.array(stops, dtype=np.int64).ravel(),
            *(slot * width + np.arange(len(one.ids)) for slot, one in admitted.items()),
            *(np.array(one.ids, dtype=np.int64) for one in admitted.values()),
        ]
        total = sum(len(one.ids) for one in admitted.values())
        sizes = [*(len(part) for part in parts[:5]), total, total]
        left, slot, length, limit, stop_ids, at, ids = send(np.concatenate(parts), self.length.device).split(sizes)
        if released:
            self.active.index_fill_(0, left, False)
        if admitted:
            self.tokens.view(-1).index_copy_(0, at, ids)
            self.length.index_copy_(0, slot, length)
            self.block_table.index_fill_(0, slot, 0)
            self.limit.index_copy_(0, slot, limit)
            self.stop_ids.index_copy_(0, slot, stop_ids.view(-1, STOP_IDS))
            self.draft_size.index_fill_(0, slot, 0)
            self.active.index_fill_(0, slot, True)
            self.blind.index_fill_(0, slot, False)

    def set(self, slot: int, ids: tuple[int, ...] | list[int]) -> None:
        """Write a slot's committed tokens and their number."""
        self.tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.length[slot] = len(ids)

    def map_pages(self, new: list[tuple[int, int, int]]) -> None:
        """Write pages into block tables. new: (slot, index in its table, page) each."""
        if new:
            slot, at, page = send(np.array(new, dtype=np.int64).T.copy(), self.tokens.device)
            self.block_table[slot, at] = page.int()

    @contextmanager
    def dummy_sequence(self, length: int, pages: Tensor) -> Iterator[None]:
        """Meanwhile the dummy slot is a sequence of `length` tokens, far from its limit, so that steps can be timed. pages:
        int32, the first of its block table; the others are the dummy page."""
        dummy = self.dummy
        self.block_table[dummy, : len(pages)] = pages
        self.length[dummy] = length
        self.limit[dummy] = self.tokens.shape[1] - self.draft.shape[1] - 1
        self.active[dummy] = True
        try:
            yield
        finally:
            self.active[dummy] = False
            self.draft_size[dummy] = 0
            self.length[dummy] = 1
            self.block_table[dummy] = 0

    def catch_up(self, slot: int, ids: list[int]) -> None:
        """Append to a slot's committed tokens those of `ids` that it does not have yet. For a state on the CPU."""
        length = self.length.numpy()  # numpy writes a few numbers ten times as fast as torch
        known = length[slot]
        self.tokens.numpy()[slot, known : len(ids)] = ids[known:]
        length[slot] = len(ids)

    def history(self, slot: int) -> np.ndarray:
        """The committed tokens of a slot, [length] int64, without a copy. For a state on the CPU."""
        return self.tokens.numpy()[slot, : self.length.numpy()[slot]]

    def batch(self, slot: np.ndarray, begin: np.ndarray, count: np.ndarray, logits_at: np.ndarray) -> Batch:
        """A forward pass over the tokens begin .. begin + count - 1 of each slot, end to end without padding. slot, begin,
        count: [R] on the host; logits_at: [N], which of the T flat tokens get logits."""
        device = self.tokens.device
        row_start = np.concatenate(([0], np.cumsum(count)))
        row = np.repeat(np.arange(len(slot)), count)  # [T]
        position = np.arange(row_start[-1]) - row_start[row] + begin[row]  # [T]
        slots, positions = torch.from_numpy(slot).to(device), torch.from_numpy(position).to(device)
        return Batch(
            ids=self.tokens[torch.from_numpy(slot[row]).to(device), positions],
            positions=positions,
            row_start=torch.from_numpy(row_start.astype(np.int32)).to(device),
            block_table=self.block_table[slots],
            logits_at=torch.from_numpy(logits_at).to(device),
        )

    def write_drafts(self, slot: Tensor, drafts: Tensor) -> None:
        """Write drafts [B,K] after the committed tokens of the slots [B]."""
        at = self.length[slot][:, None] + torch.arange(drafts.shape[1], device=drafts.device)  # [B,K]
        self.tokens[slot[:, None], at] = drafts

    def commit(self, slot: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Append the first count [B] of each row's tokens [B,K+1]. Positions past them may hold stale ids, but never -1."""
        self.write_drafts(slot, tokens.clamp(min=0))
        self.length[slot] += count
