"""A drafter with a model (a head, or a smaller model), and beside it an n-gram look-up if one is wanted. For each row and step
the one that is expected to bring more tokens drafts, by what became of such drafts lately (calibration.py). The confidence that
goes to the policy is measured too.

With the exact layout the look-up comes first, and a pass of the model is made only if it pays: its expected gain in tokens is
worth more than its time. So the model drafts nothing where the look-up is sure, stops where its tokens agree with a look-up
that is sure enough, and stops where its next token would hardly be accepted. With the padded layout a launch makes all passes
or none, as the policy decided when it was launched.

Drawn drafts are not weighed by what was learned: a seed repeats its tokens, whatever other requests did. There the look-up is
taken by a fixed rule, which looks at the match and at the model's distribution of the first token, and at no drawn token. So
given the choice, each draft is drawn from the probabilities that come with it; those of a look-up's tokens are 0 and 1.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import Drafter, Observed, Rows, RowState
from forerun.drafters.calibration import (
    AGREED,
    ALONE,
    APART,
    CHANCES,
    DEEP,
    EDGES,
    FOLLOWS,
    FOUND,
    MATCHES,
    PARTED,
    PLACES,
    SPLIT,
    TAIL,
    TYPICAL,
    Calibration,
    Candidates,
)
from forerun.drafters.host import pack
from forerun.drafters.ngram import NgramIndex, match
from forerun.types import Draft, Request

SURE = 4  # tokens of a match from which on the look-up is taken before drawn drafts
LIKELY, UNLIKELY = 0.5, 0.05  # the first token's probability that is enough for any match, and that rules the look-up out


class LookUp(NamedTuple):
    """As Needs.look_up."""

    min_n: int
    max_n: int
    vocab: int


class Found(NamedTuple):
    """What a look-up found: tokens [B,K] int64, size [B] int64, match [B] int64, the length of the match."""

    tokens: Tensor
    size: Tensor
    match: Tensor


class Measured:
    def __init__(self, model: Drafter, state: RowState, look_up: LookUp | None, drawn: bool, padded: bool) -> None:
        self.calibration = Calibration(state)
        self.needs = model.needs._replace(skips=not drawn, cheap=look_up is not None and not drawn)
        self._model, self._state, self._look_up, self._drawn, self._padded = model, state, look_up, drawn, padded
        self._index: dict[int, NgramIndex] = {}  # by slot, exact layout

    def admit(self, slot: int, request: Request) -> None:
        self._model.admit(slot, request)
        self.calibration.admit(slot)
        if self._look_up is not None and not self._padded:
            self._index[slot] = NgramIndex(self._look_up.min_n, self._look_up.max_n)

    def release(self, slot: int, finished: bool) -> None:
        self._model.release(slot, finished)
        self._index.pop(slot, None)

    def restart(self) -> None:
        self._model.restart()
        self.calibration.restart()
        self._index = {}

    def observe(self, seen: Observed) -> None:
        if not self._drawn:
            self.calibration.learn(seen.slot[: len(seen.committed)], seen.committed)
        self._model.observe(seen)

    def propose(self, rows: Rows) -> Draft:
        found = self._find(rows)
        stop = None
        if rows.worth is not None and not self._drawn:
            stop = Stop(self.calibration, rows, found, self.needs.pass_tokens)
            k = torch.where(stop.before(), rows.k, 0)
            draft = self._model.propose(rows._replace(k=k, width=int(k.max()) if len(k) else 0, going=stop.after))
        elif rows.passes:
            draft = self._model.propose(rows)
        else:
            draft = Draft(found.tokens, torch.zeros_like(rows.k), None, torch.zeros(found.tokens.shape, device=rows.k.device))
        if self._drawn:
            return self._by_rule(draft, found)
        assert draft.confidence is not None
        tokens, survival = draft.tokens, draft.confidence
        if narrow := found.tokens.shape[1] - tokens.shape[1]:
            tokens, survival = F.pad(tokens, (0, narrow)), F.pad(survival, (0, narrow))
        chosen = self.calibration.weigh(rows.slot, Candidates(tokens, draft.size, survival, *found))
        return Draft(chosen.tokens, chosen.size, None, chosen.survival, chosen.found)

    def _find(self, rows: Rows) -> Found:
        """What the look-up finds for these rows, K wide."""
        width, given = self._state.draft.shape[1], self._look_up
        if given is None or not width:
            return Found(rows.slot.new_zeros(len(rows.slot), width), *rows.slot.new_zeros(2, len(rows.slot)))
        if self._padded:
            tokens, size, length = match(self._state.tokens[rows.slot], self._state.length[rows.slot], *given[:2], width)
            known = (tokens < given.vocab).cumprod(1).sum(1)
            return Found(tokens, torch.minimum(torch.minimum(size, rows.k), known), length)
        drafts, lengths = [], []
        for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True):
            index = self._index.get(slot) if k else None  # none: the dummy slot, while passes are timed
            draft, longest = index.propose(self._state.history(slot), k) if index is not None else ([], 0)
            drafts.append(draft)
            lengths.append(longest)
        packed = pack(drafts, width, given.vocab)
        return Found(packed.tokens, packed.size, torch.tensor(lengths, dtype=torch.int64))

    def _by_rule(self, draft: Draft, found: Found) -> Draft:
        """Drawn drafts: the look-up's tokens with probability 1, or the model's."""
        if self._look_up is None or draft.probs is None or not draft.probs.shape[1]:
            return draft._replace(confidence=None)
        width = draft.probs.shape[1]
        tokens, size = found.tokens[:, :width], found.size.clamp(max=width)
        likely = draft.probs[:, 0].gather(1, tokens[:, :1])[:, 0]
        taken = (size > 0) & (likely >= torch.where(found.match >= SURE, UNLIKELY, LIKELY))
        sure = F.one_hot(tokens, draft.probs.shape[2]).to(draft.probs.dtype)
        return Draft(
            torch.where(taken[:, None], tokens, draft.tokens), torch.where(taken, size, draft.size),
            torch.where(taken[:, None, None], sure, draft.probs),
        )  # fmt: skip


class Stop:
    """Decides on the host, before each pass of a model, which rows are worth it. The gain of a row's next token is the chance
    that it and all before it are right; beside a look-up's token that is still in agreement it is the chance that the look-up
    is wrong there and the model right."""

    def __init__(self, calibration: Calibration, rows: Rows, found: Found, pass_tokens: int) -> None:
        assert rows.worth is not None
        self._worth, self._block, self._rows = rows.worth, pass_tokens > 1, rows
        self._rate = calibration.rate.tolist()
        odds = calibration.shift(rows.slot).exp().tolist()
        columns = zip(odds, found.tokens.tolist(), found.size.tolist(), found.match.tolist(), rows.k.tolist(), strict=True)
        self._on = [Row(self._rate, *one) for one in columns]

    def before(self) -> Tensor:
        return self._choose([row.gain_of_block() if self._block else row.gain() for row in self._on])

    def after(self, i: int, tokens: Tensor, chances: Tensor) -> Tensor:
        """As Rows.going."""
        for row, token, chance in zip(self._on, tokens[:, i - 1].tolist(), chances[:, i - 1].tolist(), strict=True):
            if row.at == i - 1 and row.on:
                row.take(token, chance)
        return self._choose([row.gain() for row in self._on])

    def _choose(self, gains: list[float]) -> Tensor:
        """Which rows go on. The pass is made if its gain in tokens is worth its time."""
        rate, position, passes = self._worth
        for row, gain in zip(self._on, gains, strict=True):
            row.on = row.on and gain > rate * position
        net = [gain - rate * position for row, gain in zip(self._on, gains, strict=True) if row.on]
        if net and sum(net) <= rate * passes(len(net)):
            for row in self._on:
                row.on = False
        return torch.tensor([row.on for row in self._on], dtype=torch.bool)


class Row:
    """One row while it drafts. at: drafted tokens; agrees: whether the look-up has these too; sure: the chance that all are
    right; found: what the look-up's draft is expected to bring; expected: the same of the tokens drafted."""

    def __init__(self, rate: list[float], odds: list[float], tokens: list[int], size: int, match: int, k: int) -> None:
        self._rate, (self._own, self._other) = rate, odds
        self._tokens, self._size, self._k = tokens, size, k
        self._length = bisect_right(MATCHES, match)
        self.at, self.sure, self.expected, self.found = 0, 1.0, 0.0, 0.0
        self.on, self.agrees, self.parted = k > 0, size > 0, False

    def _of(self, bin: int, own: bool) -> float:
        odds, rate = self._own if own else self._other, min(max(self._rate[bin], 0.005), 0.995)
        return rate * odds / (1 - rate + rate * odds)

    def take(self, token: int, chance: float) -> None:
        """The model has drafted a token."""
        i, sure = self.at, bisect_right(EDGES, chance)
        place = min(i, PLACES - 1)
        if self.agrees and i < self._size and token == self._tokens[i]:
            self.sure *= self._of(AGREED + self._length * CHANCES + sure, True)
        else:
            if self.agrees and i < self._size:
                kind, self.parted = PARTED, True
                found = self.sure * self._of(SPLIT + self._length * CHANCES + sure, False)
                self.found = self.expected + found
                for j in range(i + 1, self._size):
                    found *= self._of(TAIL + self._length * PLACES + min(j, PLACES - 1), False)
                    self.found += found
            else:
                kind = APART if self.parted else ALONE
            self.agrees = False
            self.sure *= self._of(kind + place * CHANCES + sure, True)
        self.expected += self.sure
        self.at += 1

    def _typical(self, i: int) -> float:
        return self._of(TYPICAL + min(i, DEEP - 1), True)

    def gain(self) -> float:
        """Of the next token."""
        if not self.on or self.at >= self._k:
            return 0.0
        gain = self.sure * self._typical(self.at)
        if self.agrees and self.at < self._size:
            kind = FOLLOWS if self.at else FOUND
            gain *= 1 - self._of(kind + self._length * PLACES + min(self.at, PLACES - 1), False)
        elif self.parted and self.expected + self._rest(self.at, self.sure) <= self.found:
            return 0.0  # the look-up's draft stays the better one
        return gain

    def _rest(self, i: int, sure: float) -> float:
        """What the model's tokens from i on are expected to bring."""
        total = 0.0
        for j in range(i, self._k):
            sure *= self._typical(j)
            total += sure
        return total

    def gain_of_block(self) -> float:
        """Of all tokens at once, beside what the look-up's are expected to bring."""
        if not self.on:
            return 0.0
        gain = self._rest(0, 1.0)
        if self._size:
            gain *= 1 - self._of(FOUND + self._length * PLACES, False)
        return gain
