"""How many tokens to draft for a row. One rule for every device; knows no torch.

A draft may never run past what the request can still take: a step commits at most k + 1 tokens, so k is at most one
less than that. Under load a verify step stops being nearly free, which is what the schedule by batch size is for.

Where all rows of a step have the same width (on CUDA), the width is what pays: the tokens that the drafts are expected to
bring, against what the wider step costs. Both are measured, the costs when the steps are captured, a row's chances from
what became of its drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.config import Speculation

PRIOR = 0.5  # a row's acceptance rate before anything is known of it
MEMORY = 0.7  # how much of it stays when a draft has been verified
RETURN = 0.02  # how far it goes back to the prior in a step that left its draft alone


class Chances:
    """What is known of one row: found, how long its next draft is; rate, of its drafted tokens accepted lately."""

    __slots__ = ("found", "rate")

    def __init__(self) -> None:
        self.found: int | None = None  # None: not known yet
        self.rate = PRIOR

    def learn(self, drafted: int, accepted: int, found: int) -> None:
        """A step verified so many of its draft tokens and accepted the first of them; `found` wait for the next."""
        if drafted:
            self.rate = MEMORY * self.rate + (1 - MEMORY) * accepted / drafted
        elif self.found:
            self.rate += RETURN * (PRIOR - self.rate)
        self.found = found

    def expected(self, k: int) -> float:
        """Accepted tokens of a draft of at most k, each accepted with the rate if those before it were."""
        n = k if self.found is None else min(self.found, k)
        return float(n) if self.rate >= 1 else self.rate * (1 - self.rate**n) / (1 - self.rate)


class Policy:
    def __init__(self, speculation: Speculation | None) -> None:
        self._k = speculation.num_speculative_tokens if speculation else 0
        self._schedule = speculation.num_speculative_tokens_per_batch_size if speculation else None

    def width(self, running: int) -> int:
        """The most tokens that any row may draft while so many sequences run."""
        for low, high, k in self._schedule or ():
            if low <= running <= high:
                return k
        return self._k

    def k(self, running: int, remaining: int) -> int:
        """For a row that can still take `remaining` tokens (at least 1)."""
        return min(self.width(running), remaining - 1)

    @staticmethod
    def step_width(k: int, rows: Sequence[Chances], cost: Callable[[int], float | None]) -> int:
        """The width of a step in which every row has the same, 0 or k. cost(width): milliseconds of a step, None if not
        known yet; then any draft is worth it."""
        expected = sum(row.expected(k) for row in rows)
        plain, wide = cost(0), cost(k)
        if plain is None or wide is None:
            return k if expected else 0
        return k if (len(rows) + expected) / wide > len(rows) / plain else 0
