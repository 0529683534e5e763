"""Predicted output: the caller gives the text that the output will probably be (an edited file, say), and the drafts follow it.

For each slot the drafter keeps a place in the prediction: the token that should come next. While the output agrees, the place
moves on with it. Where the output departs, the drafter looks for a new place:

    1. near: where the most of the output's last tokens end, at most NEAR tokens ahead of the departure; two have to agree
    2. far: the same anywhere else, ahead first, then behind; FAR have to agree
    3. where the last token alone stands a few tokens ahead: a piece was dropped there
    4. directly behind the departure: one token stands in place of another

Drafts are short at a new place and get longer as more tokens agree. Each place that is wrong at its first token makes places
1 and 2 need one token more, and after PATIENCE wrong ones in a row 3 and 4 are not tried; two tokens that agree reset this. So
an output that is unlike its prediction soon gets no drafts.

All of it is tensor operations. It knows neither the model nor the text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.config import Speculation
from forerun.device import send
from forerun.drafters import Needs, Rows, RowState, Stateless
from forerun.types import Draft, Request

NEAR = 64  # tokens ahead of the departure in which a match of two tokens is enough
FAR = 4  # tokens that have to agree anywhere else
LONGEST = 8  # at most so many tokens are compared
DROPPED = 8  # right after a departure the last token alone is looked for so many tokens ahead, later 2 tokens ahead
PATIENCE = 3  # wrong places in a row after which one token alone is no longer enough
TRIES = 16  # far places that are compared, the nearest ones
DRAFT_OF = (0, 2, 2, 4, 1 << 30)  # tokens drafted at most: without a place, and after 0, 1, 2 and more tokens that agree
WEIGHTS = tuple(pow(0x9E3779B1, i, 1 << 32) for i in range(FAR))  # of the FAR tokens that a hash is made of, the last one first
NONE = (0, -1, 0, 0, 0, 0, -1)  # a slot's state without a prediction


class Prediction(Stateless):
    """The drafter `prediction`. Of a request's prediction it takes as many tokens as a slot holds; a request without one gets
    no drafts."""

    needs = Needs(device=True)

    def __init__(self, state: RowState, speculation: Speculation, vocab: int, fixed: bool) -> None:
        """fixed: make the same operations in every step, as a CUDA graph needs it; otherwise a step in which no row needs a new
        place does not look for one, and no place behind the longest prediction at hand is looked at."""
        self.state, self.vocab, self._fixed, device = state, vocab, fixed, state.length.device
        count, self._most = state.tokens.shape
        # [S,C] int32: LONGEST columns of -1, the prediction, -1 to the end; -1 agrees with no token
        margin = LONGEST + NEAR + speculation.num_speculative_tokens
        self._prediction = torch.full((count, margin + self._most), -1, dtype=torch.int32, device=device)
        # [S,L+1] int32: of each place, a hash of the FAR tokens before it
        self._hashes = torch.zeros(count, self._most + 1, dtype=torch.int32, device=device)
        # [S,7] int64: the place; how many tokens agree before it (-1: there is no place) and how many of them came since it
        # was chosen; the departure; wrong places in a row; the length of the output that was read; that of the prompt (-1:
        # there is no prediction)
        self._follow = torch.tensor(NONE, device=device).repeat(count, 1)
        self._limits = torch.tensor(DRAFT_OF, device=device)
        self._weights = torch.tensor(WEIGHTS, device=device)
        self._back = torch.arange(max(LONGEST, speculation.num_speculative_tokens + 1), device=device)
        self._near = torch.arange(1, NEAR + 1, device=device)
        self._places = 4 * torch.arange(self._most + 1, dtype=torch.int32, device=device)
        self._sizes: dict[int, int] = {}  # tokens of the predictions at hand, for slots that have one

    def admit(self, slot: int, request: Request) -> None:
        device = self._follow.device
        ids = np.array(request.prediction[: self._most], dtype=np.int64)
        if len(ids):
            self._sizes[slot] = len(ids)
            row = np.full(self._prediction.shape[1] - LONGEST, -1, dtype=np.int32)
            row[: len(ids)] = np.where(ids < self.vocab, ids, -1)
            self._prediction[slot, LONGEST:] = send(row, device)
            hashes = np.zeros(len(ids) + 1, dtype=np.int64)
            for back, weight in enumerate(WEIGHTS):
                hashes[back + 1 :] += ids[: len(ids) - back] * weight
            self._hashes[slot, : len(hashes)] = send(hashes.astype(np.int32), device)
            begin = (0, len(DRAFT_OF), 0, 0, 0, 0, len(request.prompt_ids))  # the beginning is trusted
            self._follow[slot] = send(np.array(begin, dtype=np.int64), device)

    def release(self, slot: int, finished: bool) -> None:
        if self._sizes.pop(slot, 0):
            self._follow[slot] = send(np.array(NONE, dtype=np.int64), self._follow.device)

    def restart(self) -> None:
        for slot in list(self._sizes):
            self.release(slot, True)

    def propose(self, rows: Rows) -> Draft:
        slot, most = rows.slot, self._most
        follow = self._follow.index_select(0, slot)  # [B,7]; what is written into its columns is written into it
        at, agreed, since, _, _, read, prompt = follow.unbind(1)  # [B] each
        length = self.state.length.index_select(0, slot)
        output = length - prompt
        back = self._back[: max(LONGEST, rows.width + 1)]  # [M]
        index = (length[:, None] - 1 - back).clamp_(min=0) + (slot * self.state.tokens.shape[1])[:, None]
        last = self.state.tokens.take(index)
        last = last.masked_fill_(back >= output[:, None], -2)  # [B,M] the output's last tokens, the last one first

        # read the new tokens: how many agree before the first that does not
        new = output - read
        row = slot * self._prediction.shape[1] + LONGEST  # [B] where the slots' predictions begin in memory
        expected = self._prediction.take(((at + new - 1)[:, None] - back).clamp_(-LONGEST, most) + row[:, None])
        differs = (expected != last) & (back < new[:, None])
        same = new - (differs * (back + 1)).amax(1)
        placed = agreed >= 0
        stays = placed & (same == new) | (prompt < 0)
        moved = same * placed
        at.add_(moved).clamp_(max=most)
        agreed += moved
        since += moved
        if self._fixed or not stays.all():
            self._replace(slot, row, last, stays, placed & (same == new - 1), follow)
        read.copy_(output)
        self._follow[slot] = follow

        tokens = self._prediction.take((row + at)[:, None] + back[: rows.width])  # [B,K]
        known = (tokens >= 0).cumprod(1).sum(1)
        size = torch.minimum(self._limits.take((agreed + 1).clamp_(max=len(DRAFT_OF) - 1)), known)
        return Draft(tokens.long().clamp_(min=0), torch.minimum(size, rows.k))

    def _replace(self, slot: Tensor, row: Tensor, last: Tensor, stays: Tensor, late: Tensor, follow: Tensor) -> None:
        """Write new places into follow [B,7] for the rows that do not stay at theirs. late: [B], the last token is the first
        that does not agree."""
        at, agreed, since, anchor, wrong, read, _ = follow.unbind(1)
        departs = (agreed >= 0) & ~stays
        right = (since > 0) | (read == 0)  # the place was right until here
        anchor.copy_(torch.where(departs & right, at, anchor))
        wrong.mul_(since < 2).add_(departs & ~right)
        late = late & right
        reach = (2 + (DROPPED - 2) * late) * (wrong < PATIENCE)
        found, matched = self._search(slot, row, last, anchor, wrong, reach)
        missed = found < 0
        found = torch.where(missed, anchor + 1, found).clamp_(max=self._most)
        matched = torch.where(missed, (reach == DROPPED).long() - 1, matched)
        at.copy_(torch.where(stays, at, found))
        agreed.copy_(torch.where(stays, agreed, matched))
        since *= stays

    def _search(
        self, slot: Tensor, row: Tensor, last: Tensor, anchor: Tensor, wrong: Tensor, reach: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best place for the output's last tokens (-1: there is none) and how many of them agree there, [B] each. reach:
        how many tokens ahead the last token alone is enough."""
        width = self._most if self._fixed else max(self._sizes.values(), default=0)
        # 4 * place - (4 * anchor + 1) has another absolute value at every place, so the nearest are the same on every device
        distance = (self._places[: width + 1] - (4 * anchor + 1).int()[:, None]).abs_()  # [B,P]
        hashes = (last[:, :FAR] * self._weights).sum(1, keepdim=True).int()
        distance.masked_fill_(self._hashes[:, : width + 1].index_select(0, slot) != hashes, 1 << 30)
        far = distance.topk(min(TRIES, width + 1), 1, largest=False).indices - anchor[:, None]
        ahead = torch.cat((self._near.expand(len(slot), -1), far), 1)  # [B,N] the places that are compared, from the anchor

        first = (row + anchor - 1)[:, None] + ahead
        before = self._prediction.take(first[..., None] - self._back[:LONGEST])  # [B,N,LONGEST]
        run = (before == last[:, None, :LONGEST]).cumprod(2).sum(2)  # [B,N] how many agree
        front = ahead > 0
        near = front & (ahead <= NEAR)
        need = (2 + wrong).clamp_(max=LONGEST)[:, None]
        alone = front & (ahead <= reach[:, None]) & (run > 0)
        # the kind of place comes first, then the longer match, then the smaller distance
        kind = 2 * LONGEST * (1 + front.long() + near)
        score = torch.where(run >= torch.where(near, need, need.clamp(min=FAR)), kind + run, alone.long())
        best, index = (score * (4 * self._most) - ahead.abs()).max(1, keepdim=True)  # [B,1]
        matched = torch.where(best > 8 * self._most, run.gather(1, index), 1)
        end = torch.where(best > 0, ahead.gather(1, index) + anchor[:, None], -1)
        return end[:, 0], matched[:, 0]
