"""Predicted output: the caller says what the output will probably be (an edited file, say); follow it while it agrees.

Two forms. Follower, on the host, reads the output token by token and is in one of two states: aligned (it knows which
token of the prediction comes next) or lost. What it does is a function of prediction and output alone, however the output
was cut into steps. When the output departs from the prediction it guesses a replaced, dropped or added token and looks
for the place where the last tokens of the output occur in the prediction: near, ahead of where it departed, two tokens
are enough; anywhere else it takes FAR. The less it has seen agree the shorter it drafts, and each place that
turns out wrong at once makes it ask for one more token next time, so that an output that has nothing to do with its
prediction is soon left alone.

`locate`, on tensors of fixed shape, looks afresh at every step for the place where the end of the output fits best;
DevicePrediction remembers no more than the last place. Neither form knows the model or the tokenizer's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.config import Speculation
from forerun.device import send
from forerun.drafters import Needs, Rows, RowState, Stateless
from forerun.drafters.host import pack
from forerun.types import Draft, Request

NEAR = 64  # tokens ahead of the last place that agreed: within them a match of two tokens is believed
FAR = 4  # tokens that have to agree elsewhere
LONGEST = 8  # no more than so many tokens are compared
DROPPED = 8  # a token found so far ahead is taken for the end of a piece that was dropped
PATIENCE = 3  # after so many wrong places in a row, one token alone is not believed any more
TRIES = 16  # places looked at, nearest first, for one longest match
DRAFT_OF = (2, 2, 4)  # most tokens drafted after 0, 1, 2 that agree; after more, all that are asked for


class Follower:
    """Where the output stands in one prediction. Reading a token is O(1) while aligned and O(TRIES * LONGEST) while lost."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = list(prediction)
        self.ends: dict[tuple[int, ...], list[int]] = {}  # two or FAR tokens -> where they end, ascending
        for n in (2, FAR):
            for end in range(n, len(self.prediction) + 1):
                self.ends.setdefault(tuple(self.prediction[end - n : end]), []).append(end)
        self.recent: list[int] = []  # the last LONGEST tokens of the output
        self.read = 0
        self.at: int | None = 0  # the token of the prediction that comes next, None: lost
        self.agreed = len(DRAFT_OF)  # tokens that agree here; the beginning is trusted
        self.since = 0  # of these, tokens that came after the place was chosen
        self.anchor = 0  # where the output last departed
        self.wrong = 0  # places that turned out wrong at their first token, in a row

    def extend(self, tokens: Sequence[int]) -> None:
        """Read what the output has got more."""
        for token in tokens:
            self.recent.append(token)
            del self.recent[:-LONGEST]
            self.read += 1
            if self.at is None:
                self._search(departed=False)
            elif self.at < len(self.prediction) and self.prediction[self.at] == token:
                self.at += 1
                self.agreed += 1
                self.since += 1
                if self.since == 2:
                    self.wrong = 0
            else:
                if self.since or self.read == 1:
                    self.anchor = self.at
                else:
                    self.wrong += 1
                self.at = None
                self._search(departed=self.since > 0 or self.read == 1)

    def propose(self, k: int) -> list[int]:
        """Up to k tokens of the prediction from the present place on; none while lost."""
        if self.at is None:
            return []
        limit = min(k, DRAFT_OF[self.agreed]) if self.agreed < len(DRAFT_OF) else k
        return self.prediction[self.at : self.at + limit]

    def _search(self, departed: bool) -> None:
        """Find a place for the last tokens of the output. departed: the last one is the first that does not agree."""
        need = min(2 + self.wrong, LONGEST)
        found = self._near(need) or self._far(max(FAR, need))
        if found:
            self._stand(found[0], found[1])
        elif self.wrong < PATIENCE:
            token, anchor = self.recent[-1], self.anchor
            ahead = self.prediction[anchor : anchor + (DROPPED if departed else 2)]
            if token in ahead:  # the pieces in between were dropped, or something was put in before the anchor
                self._stand(anchor + ahead.index(token) + 1, 1)
            elif departed:  # one token in place of another
                self._stand(anchor + 1, 0)

    def _stand(self, at: int, agreed: int) -> None:
        self.at, self.agreed, self.since = at, agreed, 0

    def _near(self, need: int) -> tuple[int, int] | None:
        """The end of the longest match of at least need tokens within NEAR tokens ahead, of equals the nearest."""
        ends = self.ends.get(tuple(self.recent[-2:]), [])
        first = bisect_left(ends, self.anchor + 1)
        near = [end for end in ends[first : first + TRIES] if end <= self.anchor + NEAR]
        return self._longest(near, need)

    def _far(self, need: int) -> tuple[int, int] | None:
        """The same further ahead; if there is none, before the anchor."""
        ends = self.ends.get(tuple(self.recent[-FAR:]), [])
        first = bisect_left(ends, self.anchor + 1)
        before = ends[max(0, first - TRIES) : first]
        return self._longest(ends[first : first + TRIES], need) or self._longest(before[::-1], need)

    def _longest(self, ends: list[int], need: int) -> tuple[int, int] | None:
        scored = [(self._match(end), end) for end in ends]
        length = max((length for length, _ in scored), default=0)
        return next((end, length) for n, end in scored if n == length) if length >= need else None

    def _match(self, end: int) -> int:
        """How many of the output's last tokens end at `end` in the prediction."""
        most = min(end, len(self.recent))
        return next((n for n in range(most) if self.prediction[end - 1 - n] != self.recent[-1 - n]), most)


class Prediction(Stateless):
    """Predicted output for slots on the CPU. Requests without a prediction get no drafts. Reads lazily, in propose."""

    needs = Needs()

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        self.state, self.vocab = state, vocab
        self.follower: dict[int, Follower] = {}
        self.prompt_size: dict[int, int] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.follower[slot] = Follower(request.prediction)
        self.prompt_size[slot] = len(request.prompt_ids)

    def release(self, slot: int, finished: bool) -> None:
        del self.follower[slot], self.prompt_size[slot]

    def restart(self) -> None:
        self.follower, self.prompt_size = {}, {}

    def propose(self, rows: Rows) -> Draft:
        drafts: list[list[int]] = []
        for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True):
            follower = self.follower[slot]
            if k and follower.prediction:
                follower.extend(self.state.history(slot)[self.prompt_size[slot] + follower.read :].tolist())
                drafts.append(follower.propose(k))
            else:
                drafts.append([])
        return pack(drafts, rows.width, self.vocab)


def locate(prediction: Tensor, size: Tensor, tail: Tensor, tail_size: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Where the end of the output fits the prediction best: end [B] (the next token expected) and how many tokens match.

    prediction [B,P], of which size [B] count; tail [B,M]: the output's last tokens, the last one at M-1, of which
    tail_size [B] count; anchor [B]: where the last place was. A place within NEAR tokens ahead of the anchor needs two
    tokens that match, or one right at the anchor; any other needs FAR. Near places come before those further ahead, and
    these before those behind; among them the longest match, and of equals the nearest. Without a place: anchor and 0.
    """
    batch, width = prediction.shape
    end = torch.arange(1, width + 1, device=prediction.device)[None]  # [1,P]
    alive = (end <= size[:, None]).expand(batch, width).clone()  # [B,P]
    run = torch.zeros_like(prediction)  # [B,P]
    for back in range(tail.shape[1]):
        alive &= (end > back) & (tail_size[:, None] > back)
        alive[:, back:] &= prediction[:, : max(0, width - back)] == tail[:, tail.shape[1] - 1 - back, None]
        run += alive
    ahead = end - anchor[:, None]  # [B,P]
    near = (ahead > 0) & (ahead <= NEAR)
    fits = torch.where(near, (run >= 2) | ((run == 1) & (ahead == 1)), run >= FAR)
    kind = torch.where(near, 2, (ahead > 0).long())
    key = torch.where(fits, ((kind * (tail.shape[1] + 1) + run) * (2 * width + 1)) + 2 * width - ahead.abs(), -1)  # [B,P]
    best, index = key.max(1)  # [B]
    found = best >= 0
    return torch.where(found, index + 1, anchor), torch.where(found, run.gather(1, index[:, None])[:, 0], 0)


class DevicePrediction(Stateless):
    """Predicted output as tensor operations of fixed shape on the slots' device. It has no memory of places that turned
    out wrong, as the host's form has, so that on an output unlike its prediction it drafts more in vain. Of a prediction
    it takes as many tokens as a slot is wide."""

    needs = Needs(device=True)

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        self.state, self.vocab = state, vocab
        self.prediction = torch.zeros_like(state.tokens)  # [S,L]
        self.size = torch.zeros_like(state.length)  # [S]
        self.prompt_size = torch.zeros_like(state.length)  # [S]
        self.anchor = torch.zeros_like(state.length)  # [S] the last place in the prediction
        self.read = torch.zeros_like(state.length)  # [S] the length of the output that it belongs to
        self._predicted: set[int] = set()  # slots whose size is not 0

    def admit(self, slot: int, request: Request) -> None:
        ids = request.prediction[: self.prediction.shape[1]]
        if ids:  # a slot without a prediction has size 0, and the rest of it means nothing
            self._predicted.add(slot)
            self.prediction[slot, : len(ids)] = send(np.array(ids, dtype=np.int64), self.size.device)
            self.size[slot], self.prompt_size[slot] = len(ids), len(request.prompt_ids)
            self.anchor[slot] = self.read[slot] = 0

    def release(self, slot: int, finished: bool) -> None:
        if slot in self._predicted:
            self._predicted.remove(slot)
            self.size[slot] = 0

    def restart(self) -> None:
        self.size.fill_(0)
        self._predicted = set()

    def propose(self, rows: Rows) -> Draft:
        slot = rows.slot
        prediction, size, anchor = self.prediction[slot], self.size[slot], self.anchor[slot]
        length = self.state.length[slot]  # [B]
        output = length - self.prompt_size[slot]  # [B]
        at = length[:, None] - LONGEST + torch.arange(LONGEST, device=length.device)  # [B,M]
        tail = self.state.tokens[slot].gather(1, at.clamp(min=0))

        # a draft that was followed to its end leads here; just short of it, it is the nearest place ahead
        last = prediction.shape[1] - 1
        followed = (anchor + output - self.read[slot] - 1).clamp(0, last)  # [B]
        agrees = prediction.gather(1, followed[:, None])[:, 0] == tail[:, -1]
        anchor = torch.where((output > 0) & agrees & (followed < size), followed, anchor)
        end, matched = locate(prediction, size, tail, output.clamp(max=LONGEST), anchor)
        self.anchor[slot], self.read[slot] = end, output

        bounds = torch.where(matched == 0, 0, torch.where(matched == 1, DRAFT_OF[1], DRAFT_OF[2]))  # [B]
        bounds = torch.where((matched > 2) | (output == 0), rows.width, bounds)
        ahead = end[:, None] + torch.arange(rows.width, device=end.device)  # [B,K]
        tokens = prediction.gather(1, ahead.clamp(max=last))
        fits = tokens < self.vocab  # [B,K]
        known = fits.cumprod(1).sum(1)  # [B]
        limit = torch.minimum(torch.minimum(bounds, rows.k), torch.minimum((size - end).clamp(min=0), known))
        return Draft(tokens.where(fits, 0), limit)  # a step of fixed shape looks tokens past the limit up too
