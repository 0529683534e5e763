"""How many tokens to draft for a row. One rule for every device; knows no torch.

A draft may never run past what the request can still take: a step commits at most k + 1 tokens, so k is at most one
less than that. Under load a verify step stops being nearly free, which is what the schedule by batch size is for.

And no more than pays: a step's tokens are expected to rise by what the drafts' chances say, its time by what was measured for
so many positions when the engine started; drafted is what makes most tokens a second of both. A row's chances come from what
became of its drafts. Where all rows of a step have the same width (on CUDA) that is a choice between widths, elsewhere
between single drafts, the likeliest first (the goodput rule of Liu et al. 2406.14066).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from forerun.config import Speculation

PRIOR = 0.5  # a row's acceptance rate before anything is known of it
MEMORY = 0.5  # how much of it stays when a draft has been verified
HOPE = 0.8  # what a row is taken for that has not drafted for PATIENCE steps, so that it is tried now and then
PATIENCE = 32
RETURN = 0.02  # how far it goes back to the prior in a step that left its draft alone


class Chances:
    """What is known of one row: found, how long its next draft is; rate, of its drafted tokens accepted lately; idle, steps
    since it last had a draft."""

    __slots__ = ("found", "idle", "rate")

    def __init__(self) -> None:
        self.found: int | None = None  # None: not known yet
        self.rate = PRIOR
        self.idle = PATIENCE

    @property
    def hoped(self) -> float:
        """The rate, with the benefit of the doubt."""
        return max(self.rate, HOPE) if self.idle >= PATIENCE else self.rate

    def learn(self, drafted: int, accepted: int, found: int | None) -> None:
        """A step verified so many of its draft tokens and accepted the first of them; `found` wait for the next."""
        if drafted:
            self.rate = MEMORY * self.rate + (1 - MEMORY) * accepted / drafted
        elif self.found != 0:  # there was a draft, or may have been
            self.rate += RETURN * (PRIOR - self.rate)
        self.idle = 0 if drafted else self.idle + 1
        self.found = found

    def expected(self, k: int) -> float:
        """Accepted tokens of a draft of at most k, each accepted with the rate if those before it were."""
        found, rate = self.found, self.rate
        n = k if found is None or found > k else found
        if n == 0:
            return 0.0
        return float(n) if rate >= 1 else rate * (1 - rate**n) / (1 - rate)


class Costs:
    """Seconds of a step by its positions, from a few measured points; straight lines between and behind them."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """points: (positions, seconds), at least two, by positions."""
        self._at = [float(n) for n, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # noise must not make more positions look cheaper
            self._seconds.append(max([seconds, *self._seconds[-1:]]))

    def __call__(self, positions: int) -> float:
        i = min(max(bisect_left(self._at, positions), 1), len(self._at) - 1)
        (a, b), (low, high) = self._at[i - 1 : i + 1], self._seconds[i - 1 : i + 1]
        return low + (high - low) * (positions - a) / (b - a)


def step_widths(k: int) -> tuple[int, ...]:
    """The widths that steps of one width for all rows may have: none, k, and halves of it down to 4."""
    found = [k]
    while found[-1] >= 8:
        found.append(found[-1] // 2)
    return (*((0,) if k else ()), *found[::-1])


class Policy:
    def __init__(self, speculation: Speculation | None, adaptive: bool = True) -> None:
        """adaptive: draft no more than pays; else always as much as may be drafted."""
        self.adaptive = adaptive
        self.costs: Costs | None = None  # set once they are measured; until then drafts are as long as they may be
        self._k = speculation.num_speculative_tokens if speculation else 0
        self._schedule = speculation.num_speculative_tokens_per_batch_size if speculation else None

    def width(self, running: int) -> int:
        """The most tokens that any row may draft while so many sequences run."""
        for low, high, k in self._schedule or ():
            if low <= running <= high:
                return k
        return self._k

    def share_out(self, most: Sequence[int], chances: Sequence[Chances], positions: int) -> list[int]:
        """How many tokens to draft for each row, at most so many, in a step of so many positions without any draft."""
        if self.costs is None or not any(most):
            return list(most)
        likely = self._likeliest([row.hoped for row in chances], most)
        rows, expected = len(most), 0.0
        best, take = rows / self.costs(positions), 0
        for n, (chance, _) in enumerate(likely, 1):
            expected += chance
            rate = (rows + expected) / self.costs(positions + n)
            if rate > best:
                best, take = rate, n
        return self._counted(likely[:take], rows)

    @staticmethod
    def _likeliest(rates: Sequence[float], most: Sequence[int]) -> list[tuple[float, int]]:
        """The drafts of rows with these acceptance rates, at most so many each: the chance that each is accepted, with those
        before it, and its row; the likeliest first."""
        found = []
        for row, (rate, n) in enumerate(zip(rates, most, strict=True)):
            chance = 1.0
            for _ in range(n):
                chance *= rate
                found.append((chance, row))
        return sorted(found, reverse=True)

    @staticmethod
    def _counted(drafts: Sequence[tuple[float, int]], rows: int) -> list[int]:
        """How many of these each row has."""
        shares = [0] * rows
        for _, row in drafts:
            shares[row] += 1
        return shares

    def shape(
        self, widths: Sequence[int], shared: Sequence[int], rows: Sequence[Chances], most: Sequence[int],
        cost: Callable[[int, int | None], float | None],
    ) -> tuple[int, int | None, list[int]]:
        """As step_shape where drafts are no longer than pays; else the smallest width that leaves nothing out."""
        if self.adaptive:
            return self.step_shape(widths, shared, rows, most, cost)
        return next(width for width in widths if width >= max(most)), None, list(most)

    @classmethod
    def step_shape(
        cls, widths: Sequence[int], shared: Sequence[int], rows: Sequence[Chances], most: Sequence[int],
        cost: Callable[[int, int | None], float | None],
    ) -> tuple[int, int | None, list[int]]:
        """The shape of a step whose rows all have the same width, one of `widths` (ascending from 0), or share so many drafts,
        the likeliest ones, at most the last of the widths each: the one with most tokens a second. Its width, its shared
        drafts (None: as many for each), and how many drafts each row may have, of at most so many. cost(width, drafts):
        milliseconds of a step, None if not known. Of unknown widths the widest counts as free, so that it comes to be known,
        and all others are passed over."""
        if max(most) == 0:
            return 0, None, list(most)
        enough = next(i for i, width in enumerate(widths) if width >= max(most))
        width, rate = cls._fastest(widths[: enough + 1], rows, lambda width: cost(width, None))
        costs = [(drafts, ms) for drafts in shared if (ms := cost(widths[-1], drafts)) is not None]
        if rate is None or not costs:
            return width, None, list(most)
        there = [n if row.found is None else min(n, row.found) for row, n in zip(rows, most, strict=True)]
        likely = cls._likeliest([row.rate for row in rows], there)
        expected = list(accumulate((chance for chance, _ in likely), initial=0.0))
        best = None
        for drafts, ms in costs:
            faster = (len(rows) + expected[min(drafts, len(likely))]) / ms
            if expected[-1] > 0 and faster > rate:
                best, rate = drafts, faster
        if best is None:
            return width, None, list(most)
        return widths[-1], best, cls._counted(likely[:best], len(rows))

    @staticmethod
    def _fastest(
        widths: Sequence[int], rows: Sequence[Chances], cost: Callable[[int], float | None]
    ) -> tuple[int, float | None]:
        """The width with most tokens a second, and its tokens a millisecond (None: not known)."""
        known = [(width, ms) for width in widths if (ms := cost(width)) is not None]
        if len(widths) > 1 and (not known or known[0][0] != 0 or known[-1][0] != widths[-1]):
            return widths[-1] if any(row.expected(widths[-1]) for row in rows) else 0, None
        best, most = 0, 0.0
        for width, ms in known:
            expected = sum([row.expected(width) for row in rows])
            rate = (len(rows) + expected) / ms
            if rate > most and (expected > 0 or width == 0):
                best, most = width, rate
        return best, most or None
