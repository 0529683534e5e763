"""The state of the live sequences as tensors of fixed shape, one line (slot) for each: their tokens, lengths and pages.
What each number means is decided elsewhere (scheduler.py, step.py); this is where they lie.

    tokens[slot]:  | prompt ............ | output ....... x | drafts of this step | stale ... |
                   0                                 length-1  length                         L
    x, the last committed token, has no keys and values yet: a decode step computes them with those of the drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.device import send
from forerun.kernels import Batch


class Slots:
    """tokens: [S,L] int64; length: [S] int64, committed tokens; block_table: [S,P] int32."""

    def __init__(self, count: int, width: int, pages: int, device: torch.device) -> None:
        self.tokens = torch.zeros(count, width, dtype=torch.int64, device=device)
        self.length = torch.ones(count, dtype=torch.int64, device=device)  # never 0: a slot's last token can be read
        self.block_table = torch.zeros(count, pages, dtype=torch.int32, device=device)

    def set(self, slot: int, ids: tuple[int, ...] | list[int]) -> None:
        """Give the slot to a sequence with these committed tokens."""
        self.tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.length[slot] = len(ids)

    def give(self, slot: Tensor, length: Tensor, at: Tensor, ids: Tensor) -> None:
        """Give slots [A], all different, to sequences of these lengths [A], with the committed tokens ids [N]; at: [N], where
        each goes, slot * L + position. They have no pages yet."""
        self.tokens.view(-1).index_copy_(0, at, ids)
        self.length.index_copy_(0, slot, length)
        self.block_table.index_fill_(0, slot, 0)

    def lay(self, new: list[tuple[int, int, int]]) -> None:
        """Write pages into block tables: (slot, index in its table, page) each."""
        if new:
            slot, at, page = send(np.array(new, dtype=np.int64).T.copy(), self.tokens.device)
            self.block_table[slot, at] = page.int()

    def catch_up(self, slot: int, ids: list[int]) -> None:
        """Append what these committed tokens, of the sequence that has the slot, have more than the slot. Slots on the CPU."""
        known = int(self.length[slot])
        self.tokens[slot, known : len(ids)] = torch.tensor(ids[known:], dtype=torch.int64)
        self.length[slot] = len(ids)

    def history(self, slot: int) -> np.ndarray:
        """The committed tokens of a slot, [length] int64, without a copy. Slots on the CPU only."""
        return self.tokens.numpy()[slot, : int(self.length[slot])]

    def batch(self, slot: np.ndarray, begin: np.ndarray, count: np.ndarray, logits_at: np.ndarray) -> Batch:
        """A forward pass over the tokens begin .. begin + count - 1 of each of these slots ([R] each, on the host), laid
        end to end without padding, with logits wanted at these [N] of the flat tokens."""
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
        """Lay drafts [B,K] behind the committed tokens of the slots [B]."""
        at = self.length[slot][:, None] + torch.arange(drafts.shape[1], device=drafts.device)  # [B,K]
        self.tokens[slot[:, None], at] = drafts

    def commit(self, slot: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Append tokens [B,K+1], of each row the first count [B]; what lies past them is stale, but an id (BROKEN is none)."""
        self.write_drafts(slot, tokens.clamp(min=0))
        self.length[slot] += count
