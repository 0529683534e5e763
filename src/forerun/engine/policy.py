"""Which of the drafts at hand a step verifies: those with which it is expected to commit most tokens a second. One rule for
every device; knows no torch.

    gain: of each draft token the probability that it is accepted with all before it (its survival probability): the drafter's
          confidence where it has one, else a power of the row's recent acceptance rate
    cost: the measured time of each shape that the step may have, by its positions, rows and context

Where any number of positions is a shape (the exact layout), this picks single draft tokens, the likeliest first; where few
shapes are captured (the padded layout), it picks a shape. [the goodput rule of Liu et al. 2406.14066] A draft never runs
past what the request can still take: a step commits at most k + 1 tokens, so k is at most one less than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import isfinite, isnan
from typing import NamedTuple

from forerun.config import Speculation

PRIOR = 0.5  # a row's acceptance rate before anything is known of it
MEMORY = 0.5  # how much of it stays when a draft has been verified
OPTIMISTIC = 0.8  # the rate that is assumed of a row without a verified draft for a while, so that it is tried now and then
PATIENCE, LONGEST_PATIENCE = 32, 512  # steps of such a while: doubled by each trial of which nothing was accepted
RETURN = 0.02  # how far the rate returns to the prior in a step that left the row's draft out


class AcceptanceHistory:
    """What is known of one row. at_hand: how long its next draft is, None: not known; confidence: the survival probabilities of
    that draft, None: the drafter gives none; rate: of its draft tokens accepted lately; idle: steps since its last draft."""

    __slots__ = ("at_hand", "confidence", "idle", "patience", "rate")

    def __init__(self) -> None:
        self.rate, self.idle, self.patience = PRIOR, PATIENCE, PATIENCE
        self.forget_draft()

    def forget_draft(self) -> None:
        """There may be another next draft now."""
        self.at_hand: int | None = None
        self.confidence: list[float] | None = None

    @property
    def optimistic_rate(self) -> float:
        return max(self.rate, OPTIMISTIC) if self.idle >= self.patience else self.rate

    def learn(self, drafted: int, accepted: int, at_hand: int | None) -> None:
        """A step verified so many of the row's draft tokens and accepted the first of them; `at_hand` wait for the next."""
        if drafted:
            self.rate = MEMORY * self.rate + (1 - MEMORY) * accepted / drafted
            if accepted:
                self.patience = PATIENCE
            elif self.idle >= self.patience:
                self.patience = min(2 * self.patience, LONGEST_PATIENCE)
            self.idle = 0
        else:
            if self.at_hand != 0:  # there was a draft, or may have been
                self.rate += RETURN * (PRIOR - self.rate)
            self.idle += 1
        self.at_hand, self.confidence = at_hand, None


class Offers(NamedTuple):
    """The shapes that a step may have, from no drafts at all upwards. width: drafts of a row at most; drafts: of all rows
    together at most, -1 where only the width limits them; seconds: of a step, NaN where not known."""

    width: Sequence[int]
    drafts: Sequence[int]
    seconds: Sequence[float]


class Choice(NamedTuple):
    """The offer taken, and how many drafts of each row are to be verified."""

    offer: int
    drafts: list[int]


class Policy:
    def __init__(self, speculation: Speculation | None, adaptive: bool = True) -> None:
        """adaptive: verify no more than pays; else always all drafts at hand."""
        self.adaptive = adaptive
        self._k = speculation.num_speculative_tokens if speculation else 0
        self._schedule = speculation.num_speculative_tokens_per_batch_size if speculation else None

    def width(self, running: int) -> int:
        """The most tokens that any row may draft while so many sequences run."""
        for low, high, k in self._schedule or ():
            if low <= running <= high:
                return k
        return self._k

    @staticmethod
    def survival(rows: Sequence[AcceptanceHistory], most: Sequence[int]) -> list[list[float]]:
        """Of each row the survival probabilities of its draft at hand, of at most so many tokens."""
        found = []
        for row, n in zip(rows, most, strict=True):
            at_hand, confidence = row.at_hand, row.confidence
            n = n if at_hand is None or at_hand > n else at_hand
            if confidence is not None:
                found.append([chance if isfinite(chance) else 0.0 for chance in confidence[:n]])
            else:
                rate = row.optimistic_rate
                found.append([rate**i for i in range(1, n + 1)])
        return found

    def choose(self, offers: Offers, survival: Sequence[Sequence[float]], most: Sequence[int]) -> Choice:
        """The offer with most expected tokens a second. Where the time of a step without drafts or of the widest one is not
        known, or drafts are not adapted, it is the widest, which is timed by that; other unknown ones are passed over.

        survival: as above; most: drafts of each row at most."""
        widest = len(offers.drafts) - 1
        if offers.drafts[0] < 0:  # shapes with a width come first
            widest = max(i for i, drafts in enumerate(offers.drafts) if drafts < 0)
        if not self.adaptive:
            return Choice(widest, list(most))
        columns = [sum(column) for column in zip_longest(*survival, fillvalue=0.0)]  # of the first, second .. draft of all rows
        if not any(columns):  # whatever the costs are said to be
            return Choice(0, list(most) if offers.drafts[0] < 0 else [0] * len(most))
        if isnan(offers.seconds[0]) or isnan(offers.seconds[widest]):
            return Choice(widest, list(most))
        ranked: list[float] = []
        if offers.drafts[-1] >= 0:
            ranked = sorted((chance for row in survival for chance in row if chance > 0), reverse=True)
        upright, likeliest = list(accumulate(columns, initial=0.0)), list(accumulate(ranked, initial=0.0))
        best, highest = 0, 0.0
        for i, (width, drafts, seconds) in enumerate(zip(*offers, strict=True)):
            expected = upright[min(width, len(columns))] if drafts < 0 else likeliest[min(drafts, len(ranked))]
            rate = (len(most) + expected) / seconds
            if rate > highest:  # no comparison with NaN is true
                best, highest = i, rate
        if offers.drafts[best] < 0:
            return Choice(best, list(most))
        return Choice(best, self._likeliest(survival, ranked[: offers.drafts[best]]))

    @staticmethod
    def _likeliest(survival: Sequence[Sequence[float]], taken: Sequence[float]) -> list[int]:
        """How many drafts of each row are among those taken, the likeliest of all; of equal ones those of the first rows."""
        if not taken:
            return [0] * len(survival)
        least = taken[-1]
        above = [sum([chance > least for chance in row]) for row in survival]
        equal = len(taken) - sum(above)
        for row, chances in enumerate(survival):
            here = min(equal, sum([chance == least for chance in chances]))
            above[row] += here
            equal -= here
        return above
