"""The policy chooses which drafts at hand a step verifies. It maximises the expected tokens per measured second, by one rule
for all devices [goodput, Liu et al. 2406.14066]. It does not use torch.

    gain: the survival probability of each draft token, that is, of being accepted with all before it: the drafter's confidence
          if it gives one, else a power of the row's recent acceptance rate
    cost: the measured time of each shape that the step may have, by its positions, rows and context, and of the passes that
          the drafter makes in it for the next step

With the exact layout any number of positions is a shape, and the policy picks single draft tokens, the likeliest first. The
drafter decides before each pass whether it pays (drafters/measured.py). With the padded layout few shapes are captured, and the
policy picks one. It does not know the drafts that the launch will verify: the last report is of the launch before the last. So
it goes by what drafts were expected to bring lately (Usual), and where rows share drafts the device takes the likeliest ones.
It first decides whether the launch makes the drafter's passes, then takes the best of the launches that do as decided. A step
commits up to k + 1 tokens, so k stays below the number of tokens that the request may still produce.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import isfinite, isnan, nan
from typing import NamedTuple

import numpy as np

from forerun.config import Speculation

PRIOR = 0.5  # the acceptance rate of a new row
MEMORY = 0.5  # weight of the old rate when a draft has been verified
OPTIMISTIC = 0.8  # the rate assumed for a row that has been idle for `patience` steps, so that drafting is tried again
PATIENCE, LONGEST_PATIENCE = 32, 512  # the first and the longest patience: each trial without acceptance doubles it
RETURN = 0.02  # share of the way back to the prior in a step that did not verify the row's draft
RECENT = 12.0  # what drafts usually bring rests on so many drafts and those of the last launch
TRIED = 3.0  # the same while passes are only tried now and then
TOGETHER = 4  # drafts that are learned at once: an update takes the host as long for many as for one
LEVELS = 64  # of survival, by which rows that share drafts are compared


class AcceptanceHistory:
    """Acceptance of one row. at_hand: length of its next draft, None: unknown; confidence: that draft's survival probabilities,
    None: the drafter gives none; rate: recent acceptance rate; idle: steps since its last verified draft."""

    __slots__ = ("at_hand", "confidence", "idle", "patience", "rate")

    def __init__(self) -> None:
        self.rate, self.idle, self.patience = PRIOR, PATIENCE, PATIENCE
        self.forget_draft()

    def forget_draft(self) -> None:
        """The next draft is no longer known."""
        self.at_hand: int | None = None
        self.confidence: list[float] | None = None

    @property
    def optimistic_rate(self) -> float:
        return max(self.rate, OPTIMISTIC) if self.waited else self.rate

    @property
    def waited(self) -> bool:
        """Whether it is time to draft again, as no draft was verified for a while."""
        return self.idle >= self.patience

    def amend(self, forced: Sequence[bool]) -> None:
        """The next draft was changed on the host. forced: whether each of its tokens is all that may follow. Such a token is as
        likely as the one before it."""
        if self.confidence is not None or any(forced):
            known, chance, chances = self.confidence, 1.0, list[float]()
            for i, certain in enumerate(forced):
                if not certain:
                    chance = known[i] if known is not None and i < len(known) else chance * self.optimistic_rate
                chances.append(chance)
            self.confidence = chances
        self.at_hand = len(forced)

    def learn(self, drafted: int, accepted: int, at_hand: int | None, confidence: list[float] | None = None) -> None:
        """Record a step: draft tokens that it verified, how many of these it accepted, and of the next draft its length and its
        survival probabilities."""
        if drafted:
            self.rate = MEMORY * self.rate + (1 - MEMORY) * accepted / drafted
            if accepted:
                self.patience = PATIENCE
            elif self.idle >= self.patience:
                self.patience = min(2 * self.patience, LONGEST_PATIENCE)
            self.idle = 0
        else:
            if self.at_hand != 0:  # there was a draft, or possibly one
                self.rate += RETURN * (PRIOR - self.rate)
            self.idle += 1
            if self.waited and self.at_hand and self.confidence is not None:  # it was tried, and not worth verifying
                self.idle, self.patience = 0, min(2 * self.patience, LONGEST_PATIENCE)
        self.at_hand, self.confidence = at_hand, confidence


class Usual:
    """What drafts were expected to bring lately, over all rows: the mean survival by place, and how many drafted tokens of a
    row had each survival. It outlives requests, so a new one starts with what is known of others. Once something is known, up
    to TOGETHER drafts wait to be learned with the next."""

    def __init__(self) -> None:
        self.known = False
        self._waiting: list[np.ndarray] = []
        self._columns = np.zeros(1)  # [K+1], the sum of the first 0 .. K tokens' survival
        self._levels = np.zeros((2, LEVELS))  # tokens of a row, and the sum of their survival, by level
        self._likeliest = np.zeros((2, LEVELS + 1))  # the same summed from the highest level on

    def learn(self, drafts: np.ndarray, recent: float = RECENT) -> None:
        """drafts: [N,K], the survival of what N rows drafted, 0 behind its end; recent: drafts that the past counts for."""
        self._waiting.append(drafts)
        if self.known and recent == RECENT and sum(map(len, self._waiting)) < TOGETHER:
            return
        drafts, self._waiting = np.concatenate(self._waiting), []
        drafts = np.nan_to_num(drafts, nan=0.0, posinf=0.0, neginf=0.0)
        (count, width), there = drafts.shape, drafts.ravel()
        if not count or not width:
            return
        level = np.clip((there * LEVELS).astype(np.int64), 0, LEVELS - 1)[there > 0]
        there = there[there > 0]
        levels = np.stack((np.bincount(level, None, LEVELS), np.bincount(level, there, LEVELS))) / count
        columns = np.concatenate(([0.0], drafts.mean(0).cumsum()))
        if self.known:
            weight = count / (count + recent)
            columns = self._columns + weight * (columns - self._columns)
            levels = self._levels + weight * (levels - self._levels)
        self.known, self._columns, self._levels = True, columns, levels
        self._likeliest[:, 1:] = levels[:, ::-1].cumsum(1)

    def gains(self, width: Sequence[int], drafts: Sequence[int], rows: int) -> list[float]:
        """The expected accepted tokens of `rows` rows in each of these shapes, as in Offers."""
        last, columns = len(self._columns) - 1, self._columns.tolist()
        shared = np.interp([n / rows for n in drafts], *self._likeliest).tolist()
        return [
            rows * (columns[min(w, last)] if n < 0 else one) for w, n, one in zip(width, drafts, shared, strict=True)
        ]  # fmt: skip


class Offers(NamedTuple):
    """The shapes that a step may have, the first one without drafts. width: drafts of a row at most; drafts: of all rows
    together at most, -1: only the width limits them; seconds: of a step, NaN if unknown."""

    width: Sequence[int]
    drafts: Sequence[int]
    seconds: Sequence[float]


class Choice(NamedTuple):
    """offer: index of the chosen offer; drafts: how many each row verifies; rate: expected tokens a second, NaN: unknown."""

    offer: int
    drafts: list[int]
    rate: float = nan


class Policy:
    def __init__(self, speculation: Speculation | None, adaptive: bool = True) -> None:
        """adaptive: maximise expected tokens per second; otherwise verify all drafts at hand."""
        self.adaptive = adaptive
        self._k = speculation.num_speculative_tokens if speculation else 0
        self._schedule = speculation.num_speculative_tokens_per_batch_size if speculation else None

    def width(self, running: int) -> int:
        """Draft tokens of a row at most, while so many sequences run."""
        for low, high, k in self._schedule or ():
            if low <= running <= high:
                return k
        return self._k

    @staticmethod
    def survival(rows: Sequence[AcceptanceHistory], most: Sequence[int]) -> list[list[float]]:
        """Survival probabilities of each row's draft at hand, cut to `most` tokens."""
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
        """The offer with most expected tokens per second. Without adaptive drafts it is the widest one. It is that one too if
        the time of the first or of the widest offer is unknown, so that the widest is timed. Other untimed offers are skipped.

        survival: as above; most: drafts of each row at most."""
        widest = len(offers.drafts) - 1
        if offers.drafts[0] < 0:  # shapes with a width come first
            widest = max(i for i, drafts in enumerate(offers.drafts) if drafts < 0)
        if not self.adaptive:
            return Choice(widest, list(most))
        columns = [sum(column) for column in zip_longest(*survival, fillvalue=0.0)]  # by position, over all rows
        if not any(columns):  # no draft can be accepted
            return Choice(0, list(most) if offers.drafts[0] < 0 else [0] * len(most), len(most) / offers.seconds[0])
        if isnan(offers.seconds[0]) or isnan(offers.seconds[widest]):
            return Choice(widest, list(most))
        ranked: list[float] = []
        if offers.drafts[-1] >= 0:
            ranked = sorted((chance for row in survival for chance in row if chance > 0), reverse=True)
        upright, likeliest = list(accumulate(columns, initial=0.0)), list(accumulate(ranked, initial=0.0))
        expected = [
            upright[min(width, len(columns))] if drafts < 0 else likeliest[min(drafts, len(ranked))]
            for width, drafts in zip(offers.width, offers.drafts, strict=True)
        ]
        best, highest = self.best(expected, offers.seconds, len(most))
        if offers.drafts[best] < 0:
            return Choice(best, list(most), highest)
        return Choice(best, self._likeliest(survival, ranked[: offers.drafts[best]]), highest)

    @staticmethod
    def best(expected: Sequence[float], seconds: Sequence[float], rows: int) -> tuple[int, float]:
        """The shape with most expected tokens a second, and these. expected: accepted tokens of all rows; unknown seconds are
        passed over."""
        best, highest = 0, 0.0
        for i, (gain, spent) in enumerate(zip(expected, seconds, strict=True)):
            rate = (rows + gain) / spent
            if rate > highest:  # false for NaN
                best, highest = i, rate
        return best, highest

    @staticmethod
    def _likeliest(survival: Sequence[Sequence[float]], taken: Sequence[float]) -> list[int]:
        """How many drafts of each row are among the likeliest (taken, descending). Of equal ones the first rows' are taken."""
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
