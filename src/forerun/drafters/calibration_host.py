"""calibration.py on the host, row by row: the same tables as lists, which are faster there than small tensors (docs/log.md). A
row can be followed while its model drafts, so that passes that do not pay are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from math import exp

from forerun.drafters import calibration as c

CURIOUS = 1.2  # a pass beside a look-up's draft is worth so much more, since it also shows whether the two agree


class HostCalibration:
    """As Calibration. kept: by slot, the rows whose candidates are at hand."""

    def __init__(self) -> None:
        self.rate, self.weight = c.priors().tolist(), [c.PRIOR_WEIGHT] * c.BINS
        self.luck: dict[int, list[list[float]]] = {}
        self.kept: dict[int, Row] = {}

    def admit(self, slot: int) -> None:
        """Another sequence got the slot."""
        self.luck[slot] = [[0.0, 0.0], [0.0, 0.0]]
        self.kept.pop(slot, None)

    def restart(self) -> None:
        """No slot has candidates."""
        self.luck, self.kept = {}, {}

    def odds(self, slot: int) -> tuple[float, float]:
        """What multiplies the odds of this slot's candidates."""
        found = []
        for off, spread in self.luck.get(slot, ((0.0, 0.0), (0.0, 0.0))):
            found.append(exp(min(max(off / (spread + c.PRECISION), -c.MOST_SHIFT), c.MOST_SHIFT)))
        return found[c.HEAD], found[c.LOOK_UP]

    def row(self, slot: int, k: int, found: Sequence[int] = (), match: int = 0) -> Row:
        """A row that may draft k tokens. found: the look-up's tokens, after a match of this length. The row's candidates are at
        hand until the next step is learned."""
        self.kept[slot] = made = Row(self.rate, self.odds(slot), k, found, match)
        return made

    def learn(self, committed: dict[int, Sequence[int]]) -> None:
        """Compare the candidates with the tokens that the step has committed, by slot."""
        counted: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for slot, tokens in committed.items():
            row = self.kept.pop(slot, None)
            if row is None or slot not in self.luck:
                continue
            for who, (draft, lines, told) in enumerate(row.candidates()):
                off = spread = 0.0
                tried = min(len(draft), len(tokens))
                for i in range(tried):
                    right = draft[i] == tokens[i]
                    off, spread = off + right - told[i], spread + told[i] * (1 - told[i])
                    for line in lines:
                        if line[i] >= 0:
                            sums = counted[line[i]]
                            sums[0] += 1
                            sums[1] += right
                    if not right:
                        break
                if tried:
                    old = self.luck[slot][who]
                    self.luck[slot][who] = [c.MEMORY * old[0] + off, c.MEMORY * old[1] + spread]
        for bin, (more, agreed) in counted.items():
            weight = self.weight[bin]
            self.rate[bin] = (self.rate[bin] * weight + agreed) / (weight + more)
            self.weight[bin] = min(weight + more, c.WINDOW)


class Row:
    """One row while it drafts. tokens, survival: the model's tokens so far, with the chances that each and all before it are
    right; same: how many of them the look-up has too, from the first on; parted: whether the two differ then."""

    def __init__(self, rate: list[float], odds: tuple[float, float], k: int, found: Sequence[int], match: int) -> None:
        self._rate, (self._own, self._other) = rate, odds
        self.k, self.found, self._long = k, found, bisect_right(c.MATCHES, match)
        self.tokens, self.survival = list[int](), list[float]()
        self.same, self.parted = 0, False
        self._fine, self._told, self._rates = list[int](), list[float](), list[float]()
        self._look_up: list[float] | None = None  # survival of the look-up's tokens, once it no longer changes
        self._split = 0

    def _chance(self, bin: int, odds: float) -> float:
        rate = min(max(self._rate[bin], c.LEAST), c.MOST)
        return min(max(rate * odds / (1 - rate + rate * odds), c.LEAST), c.MOST)

    def take(self, token: int, chance: float) -> None:
        """The model has drafted a token, which it gives this probability."""
        i, sure = len(self.tokens), bisect_right(c.EDGES, chance)
        if i == self.same and i < len(self.found) and token == self.found[i]:
            bin = c.AGREED + self._long * c.CHANCES + sure
            self.same += 1
        else:
            kind = c.APART if self.parted else c.ALONE
            if i == self.same and i < len(self.found):
                self.parted, self._split, kind = True, c.SPLIT + self._long * c.CHANCES + sure, c.PARTED
            bin = kind + min(i, c.PLACES - 1) * c.CHANCES + sure
        self.tokens.append(token)
        self._fine.append(bin)
        self._told.append(self._rate[bin])
        self.survival.append((self.survival[-1] if self.survival else 1.0) * self._chance(bin, self._own))

    def _by_length(self, kind: int, i: int) -> int:
        return kind + self._long * c.PLACES + min(i, c.PLACES - 1)

    def _behind(self, i: int) -> int:
        """The bin of the look-up's token i, behind those that the model has too."""
        if self.parted:
            return self._split if i == self.same else self._by_length(c.TAIL, i)
        return self._by_length(c.FOLLOWS if self.tokens else c.FOUND, i)

    def look_up(self) -> list[float]:
        """Survival of the look-up's tokens."""
        if self._look_up is not None:
            return self._look_up
        found = self.survival[: self.same]
        alive = found[-1] if found else 1.0
        for i in range(self.same, len(self.found)):
            alive *= self._chance(self._behind(i), self._other)
            found.append(alive)
        if self.parted:
            self._look_up = found
        return found

    def cheap(self) -> list[float]:
        """Survival of the look-up's tokens by themselves."""
        found, alive = list[float](), 1.0
        for i in range(len(self.found)):
            alive *= self._chance(self._by_length(c.FOUND, i), self._other)
            found.append(alive)
        return found

    def draft(self) -> tuple[Sequence[int], list[float], int]:
        """The better candidate: its tokens, their survival, and which one it is."""
        look_up = self.look_up()
        if sum(look_up) > sum(self.survival):
            return self.found, look_up, c.LOOK_UP
        return self.tokens, self.survival, c.HEAD

    def candidates(self) -> tuple[tuple[Sequence[int], list[list[int]], list[float]], ...]:
        """Of either candidate its tokens, the bins that count each, -1 for none, and the table's rates."""
        typical = [c.TYPICAL + min(i, c.DEEP - 1) for i in range(len(self.tokens))]
        fine = [self._behind(i) if self.tokens and i >= self.same else -1 for i in range(len(self.found))]
        coarse = [self._by_length(c.FOUND, i) for i in range(len(self.found))]
        own = (self.tokens, [self._fine, typical], self._told)
        return own, (self.found, [fine, coarse], self._rates)

    def end(self) -> None:
        """The draft is made. The table's rates for the look-up's tokens are those of now."""
        self._rates = [self._rate[self._by_length(c.FOUND, i)] for i in range(len(self.found))]

    # Whether another pass pays

    def _typical(self, i: int) -> float:
        return self._chance(c.TYPICAL + min(i, c.DEEP - 1), self._own)

    def _rest(self) -> float:
        """What the model's next tokens are expected to bring."""
        total, alive = 0.0, self.survival[-1] if self.survival else 1.0
        for i in range(len(self.tokens), self.k):
            alive *= self._typical(i)
            total += alive
        return total

    def gain(self, price: float) -> float:
        """What the model's next token is expected to bring: the chance that it and all before it are right. Beside a look-up's
        token that still agrees, that one has to be wrong; then the tokens behind are worth something too, less their price, the
        tokens that a pass and a position have to bring."""
        i = len(self.tokens)
        if i >= self.k:
            return 0.0
        if self.parted and sum(self.survival) + self._rest() <= sum(self.look_up()):
            return 0.0  # the look-up's draft stays the better one
        gain = (self.survival[-1] if self.survival else 1.0) * self._typical(i)
        if i == self.same and i < len(self.found):
            behind = best = 0.0
            alive = 1.0
            for j in range(i + 1, self.k):
                alive *= self._typical(j)
                behind += alive - price
                best = max(best, behind)
            gain *= (1 - self._chance(self._behind(i), self._other)) * (1 + best) * CURIOUS
        return gain

    def gain_of_block(self) -> float:
        """The same of all tokens at once."""
        return self._rest() * (1 - self._chance(self._behind(0), self._other) if self.found else 1.0)
