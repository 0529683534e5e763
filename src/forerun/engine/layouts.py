"""A layout turns the rows of a plan into the launches of a step: it chooses their shapes and which drafts at hand they verify.

Exact layout: the host knows all lengths, and one launch holds prompts and decoding rows without padding. Padded layout: shapes
are captured, decoding rows and prompts have separate launches, and the host is one step behind the device. This module runs on
the host; cycle.py places the tokens on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from typing import NamedTuple, Protocol

from forerun.device import send_integers
from forerun.drafters import Needs, Worth
from forerun.engine.cycle import EXACT, GREEDY, NEXT_DRAFT, PROMPT, Cycle, Key, Report, decode_key
from forerun.engine.policy import PATIENCE, RECENT, TRIED, AcceptanceHistory, Choice, Offers, Policy, Usual
from forerun.engine.runner import Runner
from forerun.engine.scheduler import PlanRow
from forerun.engine.scheduler import Sequence as Live
from forerun.verify.sampling import Features

PASSES, OBSERVES, RESTS = range(3)  # kinds of launches, see Decoding.parts
TRIALS = 3  # of passes that do not pay, each after twice as many launches, before the drafter's model rests
SHORT_PATIENCE = 16  # launches without passes before it rests again
ENOUGH = 4  # rows: a launch of more tells no more
SLOW = 0.25  # weight of the last time that a drafter took in what it takes


class Launch(NamedTuple):
    """One run of the cycle. given: input as the key's layout wants it; rows: the rows of the report, in its order."""

    key: Key
    given: list[list[int]]
    rows: list[PlanRow]


class StepLayout(Protocol):
    def arrange(self, rows: list[PlanRow]) -> list[Launch]:
        """The launches of a step with these rows, at least one."""

    def keys(self, classes: Sequence[Features]) -> list[Key]:
        """Launches to make ready before the first request, for these classes of sampling features."""

    def largest(self) -> list[Key]:
        """The launches that take most memory."""

    def plain(self, key: Key) -> Key | None:
        """The launch of plain decoding for the rows of this decode launch, None: there is none without the drafter's passes."""

    def learn(self, report: Report, rows: int, passes: bool) -> None:
        """A report has been read. rows: of it, without padding; passes: whether the launch made the drafter's passes."""

    def restart(self) -> None:
        """Forget what is remembered of the last step's rows."""


class BaseLayout:
    """What both layouts share."""

    def __init__(self, cycle: Cycle, policy: Policy, runner: Runner) -> None:
        self.cycle, self.policy, self.runner = cycle, policy, runner
        self._choices = cycle.drafter is not None and cycle.drafter.needs.choices
        self._asked: tuple[list[Live], tuple[Features, int, bool]] = ([], (GREEDY, -1, False))

    def learn(self, report: Report, rows: int, passes: bool) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        self._asked = ([], (GREEDY, -1, False))

    def asked(self, rows: list[PlanRow]) -> tuple[Features, int, bool]:
        """What these rows' requests ask for: sampling features, the number of logprobs, rounded up to one of a few sizes, and
        whether one chose among the drafters. The answer is kept for the next steps with the same sequences."""
        sequences = [row.sequence for row in rows]
        if sequences != self._asked[0]:
            wanted = [top for s in sequences if (top := s.request.params.logprobs) is not None]
            top = next(n for n in (-1, 20, 100) if n >= max(wanted, default=-1))
            choosing = self._choices and any(s.request.params.drafters for s in sequences)
            self._asked = (sequences, (self.cycle.features([s.slot for s in sequences]), top, choosing))
        return self._asked[1]


def context_of(rows: list[PlanRow]) -> float:
    """Mean tokens of a row, as far as the host has read them."""
    return sum([len(row.sequence.ids) for row in rows]) / len(rows)


class ExactLayout(BaseLayout):
    """With a drafter that makes passes, the time that it takes for the next step counts as a part of each step, and the drafter
    is told what another pass is worth."""

    def __init__(self, cycle: Cycle, policy: Policy, runner: Runner) -> None:
        super().__init__(cycle, policy, runner)
        self._drafting = 0.0  # seconds that the drafter took lately
        self._passes = cycle.drafter is not None and cycle.drafter.needs.pass_tokens > 0

    def arrange(self, rows: list[PlanRow]) -> list[Launch]:
        commits = [row for row in rows if row.commits]
        rows = [*commits, *(row for row in rows if not row.commits)]
        slot = [row.sequence.slot for row in rows]
        pending = [row.pending for row in rows]
        total = sum(pending)
        if self._passes and self.policy.adaptive:
            self._drafting += SLOW * (self.cycle.times.draft - self._drafting)
        drafts = self._drafts(commits, slot, total)
        wanted = self._wanted(commits)
        rest = [0] * (len(rows) - len(commits))
        given = [
            slot, [row.sequence.computed for row in rows], pending, drafts + rest, [1] * len(commits) + rest, wanted + rest
        ]  # fmt: skip
        key = Key(EXACT, len(rows), total + sum(drafts), max(drafts, default=0), *self.asked(commits))
        return [Launch(key, given, commits)]

    def _drafts(self, rows: list[PlanRow], slot: list[int], positions: int) -> list[int]:
        """Drafts that each row verifies, of those at hand. positions: of the launch, without drafts."""
        size = self.cycle.state.draft_size.numpy()
        most = [row.k and min(row.k, int(size[at])) for row, at in zip(rows, slot, strict=False)]
        if self._passes and self.policy.adaptive and rows:
            choice = self._choose(rows, most, positions)
            self.cycle.worth = self._worth(rows, choice.rate)
            return choice.drafts
        return self._choose(rows, most, positions).drafts if any(most) else most

    def _worth(self, rows: list[PlanRow], rate: float) -> Worth | None:
        """What another pass of the drafter is worth; None if it is not known, or if it is time to try full drafts."""
        count = len(rows)
        one, more = self.runner.cost([Key(EXACT, count, n, 0) for n in (2 * count, 3 * count)], context_of(rows))
        if isnan(rate) or isnan(self.runner.pass_cost(count)) or any(row.sequence.history.waited for row in rows):
            return None
        return Worth(rate, max(more - one, 0.0) / count, self.runner.pass_cost)

    def _wanted(self, rows: list[PlanRow]) -> list[int]:
        """Tokens to draft for the next step, for a drafter in the cycle: as many as that step is expected to verify."""
        if self.cycle.drafter is None or not self.cycle.width:
            return [0] * len(rows)
        width = self.policy.width(len(rows))
        of = [row.sequence for row in rows]
        most = [max(min(width, s.remaining - 2, s.most_drafted), 0) for s in of]  # this step and the next commit one each
        if not any(most) or self._passes:
            return most
        for row in rows:
            row.sequence.history.forget_draft()
        return self._choose(rows, most, len(rows)).drafts

    def _choose(self, rows: list[PlanRow], most: list[int], positions: int) -> Choice:
        survival = Policy.survival([row.sequence.history for row in rows], most)
        number = range(sum(map(len, survival)) + 1)
        keys = [Key(EXACT, len(rows), positions + n, 0) for n in number]
        seconds = [self._drafting + cost for cost in self.runner.cost(keys, context_of(rows))]
        return self.policy.choose(Offers([max(most)] * len(keys), number, seconds), survival, most)

    def plain(self, key: Key) -> Key:
        return Key(EXACT, key.rows, key.rows, 0)

    def keys(self, classes: Sequence[Features]) -> list[Key]:
        return []

    def largest(self) -> list[Key]:
        return []


class PromptSizes(NamedTuple):
    """The captured shapes of prompt launches, both ascending."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    def fit(self, tokens: int, rows: int) -> tuple[int, int]:
        """The smallest shape that holds so many."""
        return next(n for n in self.tokens if n >= tokens), next(n for n in self.rows if n >= rows)


def prompt_sizes(budget: int, most: int) -> PromptSizes:
    """For launches of up to `budget` tokens of up to `most` prompts. Sizes are powers of two and one size between each two, so
    that padding is less than half of the tokens."""
    powers = [1 << i for i in range(5, max(budget, 1).bit_length())]
    usual = sorted([*powers, *(n * 3 // 2 for n in powers if n >= 128)])
    return PromptSizes((*(n for n in usual if n < budget), budget), tuple(sorted({min(8, most), most})))


def batch_sizes(most: int) -> tuple[int, ...]:
    """The captured batch sizes of decode launches, dense enough to limit padding."""
    usual = [n for n in (1, 2, *range(4, 32, 4), *range(32, most, 16)) if n < most]
    return (*usual, most)


def step_widths(k: int) -> tuple[int, ...]:
    """The captured numbers of drafts of a row: 0, k, and k halved down to 4."""
    found = [k]
    while found[-1] >= 8:
        found.append(found[-1] // 2)
    return (*((0,) if k else ()), *found[::-1])


def shared_drafts(rows: int, width: int) -> tuple[int, ...]:
    """The captured numbers of drafts of all rows together, for launches below rows * (width + 1) tokens. Tokens in
    all fill tiles of the matrix products (kernels/cuda_cuts.py): 16, 64, then twice as many each time."""
    return tuple(tokens - rows for tokens in (16, 64, 128, 256, 512) if rows < tokens < rows * (width + 1))


class Decoding(NamedTuple):
    """Decoding rows, padded to a captured batch size, with the possible shapes of their launch: as the policy is asked (offers,
    whose cost is that of greedy launches) and as they are run (launches). widths, drafts: as in policy.Offers. parts: where
    each kind of launch begins and ends: those with the drafter's passes, those without, and those that it does not even
    observe."""

    rows: list[PlanRow]
    slot: list[int]
    k: list[int]
    histories: list[AcceptanceHistory]
    launches: list[Key]
    offers: list[Key]
    widths: list[int]
    drafts: list[int]
    parts: list[tuple[int, int]]


class PaddedLayout(BaseLayout):
    """sizes: captured batch sizes; widths: captured drafts of a row; prompt_sizes: None: prompts are not padded."""

    def __init__(
        self, cycle: Cycle, policy: Policy, runner: Runner, most: int, longest: int, prompt_sizes: PromptSizes | None = None
    ) -> None:
        """most: rows of a step at most; longest: tokens of a sequence at most."""
        super().__init__(cycle, policy, runner)
        self.sizes, self.prompt_sizes, self._longest = batch_sizes(most), prompt_sizes, longest
        self.widths = step_widths(cycle.width)
        needs = cycle.drafter.needs if cycle.drafter is not None else Needs()
        self._skips = needs.skips and policy.adaptive and cycle.width > 0
        self._passes = needs.pass_tokens > 0
        self.cheap_widths = self.widths if needs.cheap else (0,)
        self._decoding: Decoding | None = None
        self._made, self._found = Usual(), Usual()  # of drafts with passes and without
        self._at_hand = True  # whether the drafts at hand took passes
        self._idle, self._paid = 0, 0  # launches without passes (of few rows) since the last with them, and the other way round
        self._trials = 0  # of passes, which did not pay
        self._rests = False  # whether the drafter's model does not even observe
        self._rested = 0  # launches that it has not observed

    def learn(self, report: Report, rows: int, passes: bool) -> None:
        if not self._skips or report.confidence is None:
            return
        counts = report.counts[:rows]
        live = ((counts[:, NEXT_DRAFT] > 0) if passes else (counts[:, 0] > 0)).numpy()
        if passes:
            self._made.learn(report.confidence.numpy()[:rows][live], TRIED if self._idle else RECENT)
        if report.cheap is not None:
            self._found.learn(report.cheap.numpy()[:rows][live])

    def restart(self) -> None:
        super().restart()
        self._decoding = None

    def arrange(self, rows: list[PlanRow]) -> list[Launch]:
        decoding = [row for row in rows if row.pending == 1 and row.commits]
        launches = [self._decode(decoding)] if decoding else []
        if len(decoding) < len(rows):
            launches.append(self._prompts([row for row in rows if row.pending != 1 or not row.commits]))
        return launches

    def _decode(self, rows: list[PlanRow]) -> Launch:
        d = self._decoding
        if d is None or rows != d.rows:
            d = self._decoding = self._pad(rows)
        offer, k = 0, d.k
        if self._skips and len(d.offers) > 1:
            offer = self._usual_best(d, self.runner.cost(d.offers, context_of(rows)))
            if not d.launches[offer].observes:
                self._miss(d)
        elif len(d.offers) > 1:
            most = d.k[: len(rows)]
            survival = Policy.survival(d.histories, most)  # the histories are one step old
            seconds = self.runner.cost(d.offers, context_of(rows))
            choice = self.policy.choose(Offers(d.widths, d.drafts, seconds), survival, most)
            offer, k = choice.offer, choice.drafts + d.k[len(rows) :]
        self._at_hand = d.launches[offer].passes
        return Launch(d.launches[offer], [d.slot, k], rows)

    def _usual_best(self, d: Decoding, seconds: list[float]) -> int:
        """The offer with most expected tokens a second, by what drafts usually bring: of the kind that is best in steps to come
        the one that is best for the drafts at hand, which took passes or not."""
        rows, made, found = len(d.rows), self._made, self._found
        widest = max(i for i in range(d.parts[PASSES][1]) if d.drafts[i] < 0)
        if not made.known or isnan(seconds[0]) or isnan(seconds[widest]):
            return widest
        with_passes, without = (usual.gains(d.widths, d.drafts, rows) for usual in (made, found))

        def best(gains: list[float], kind: int) -> tuple[int, float]:
            begin, end = d.parts[kind]
            offer, rate = self.policy.best(gains[begin:end], seconds[begin:end], rows)
            return begin + offer, rate

        kind = self._kind(d, best(with_passes, PASSES)[1], best(without, OBSERVES)[1], best(without, RESTS)[1])
        return best(with_passes if self._at_hand else without, kind)[0]

    def _kind(self, d: Decoding, with_passes: float, observes: float, rests: float) -> int:
        """The kind of the next launch: with passes if they pay, by these rates of tokens a second, and if not, now and then as
        a trial. After some trials that show nothing the model rests: it does not observe, so it cannot draft for these rows any
        more. Now and then it looks at new rows, with the draft that their prompt's launch made. It wakes up if passes pay."""
        blind = sum([row.sequence.observed is not None for row in d.rows])
        if with_passes >= (rests if self._rests else observes):
            self._idle, self._rests = 0, False
            if 2 * blind > len(d.rows):
                return OBSERVES
            self._paid += 1
            if self._paid >= PATIENCE:
                self._trials = 0
            return PASSES
        self._paid = 0
        if self._rests:
            self._rested += 1
            if blind == len(d.rows) or self._rested < PATIENCE:
                return RESTS
            self._rested = 0
            return OBSERVES
        self._idle += min(len(d.rows), ENOUGH)
        if self._idle <= (PATIENCE << self._trials if self._trials < TRIALS else SHORT_PATIENCE):
            return OBSERVES
        self._idle, self._rests = 1, self._trials == TRIALS
        self._trials = min(self._trials + 1, TRIALS)
        return OBSERVES if self._rests else PASSES

    def _miss(self, d: Decoding) -> None:
        """The drafter's model does not observe a launch of these rows."""
        missed = [row.sequence for row in d.rows if row.sequence.observed is None]
        if missed:
            for sequence in missed:
                sequence.observed = sequence.settled
            self.cycle.state.blind.index_fill_(0, send_integers([s.slot for s in missed], self.cycle.state.blind.device), True)

    def _pad(self, rows: list[PlanRow]) -> Decoding:
        """Pad decoding rows. The result is kept until a row is admitted, ends or comes near its limit."""
        padded = next(n for n in self.sizes if n >= len(rows))
        padding = padded - len(rows)
        slot = [row.sequence.slot for row in rows] + [self.cycle.state.dummy] * padding
        k = [row.k for row in rows] + [0] * padding
        enough = next(i for i, width in enumerate(self.widths) if width >= max(k))
        offers = [decode_key(padded, width) for width in self.widths[: enough + 1]]
        limits = [-1] * len(offers)
        if enough:
            limits += self.shared(padded)
            offers += [decode_key(padded, self.widths[-1], drafts) for drafts in self.shared(padded)]
        idle = self._skips and not any(row.sequence.most_drafted for row in rows)  # no request wants drafts
        if idle:
            offers = [decode_key(padded, 0, passes=False)]
        ends = [0, len(offers)]
        for observes in (True, False) if self._skips and not idle else ():
            cheap = [width for width in self.cheap_widths if width <= self.widths[enough]]
            offers += [decode_key(padded, width, passes=False, observes=observes) for width in cheap]
            limits += [-1] * len(cheap)
            ends.append(len(offers))
        widths = [key.width for key in offers]
        histories = [row.sequence.history for row in rows]
        features, top, choosing = self.asked(rows)
        launches = [key._replace(features=features, top=top, choosing=choosing) for key in offers]
        return Decoding(rows, slot, k, histories, launches, offers, widths, limits, list(pairwise(ends)))

    def shared(self, rows: int) -> tuple[int, ...]:
        """The captured numbers of shared drafts for so many rows; none if drafts have probabilities."""
        return () if self.cycle.drawn else shared_drafts(rows, self.cycle.width)

    def _prompts(self, rows: list[PlanRow]) -> Launch:
        """The launch of prompt chunks. Last chunks come first, since the report covers them alone."""
        ended = [row for row in rows if row.commits]
        rows = ended + [row for row in rows if not row.commits]
        tokens, padded = sum(row.pending for row in rows), len(rows)
        if self.prompt_sizes is not None:
            tokens, padded = self.prompt_sizes.fit(tokens, padded)
        nothing = [0] * (padded - len(rows))
        given = [
            [row.sequence.slot for row in rows] + [self.cycle.state.dummy] * len(nothing),
            [row.sequence.computed for row in rows] + nothing,
            [row.pending for row in rows] + nothing,
            [int(row.commits) for row in rows] + nothing,
        ]
        return Launch(Key(PROMPT, padded, tokens, 0, *self.asked(ended)), given, ended)

    def plain(self, key: Key) -> Key | None:
        given = not self._skips
        return decode_key(key.rows, 0, passes=given, observes=given) if self._skips or not self._passes else None

    def keys(self, classes: Sequence[Features]) -> list[Key]:
        """Prompt launches first, and the largest of each kind first: the others then reuse its memory."""
        found = []
        for features in classes:
            bare = self._prompt_keys()
            for rows in self.sizes[::-1]:
                bare += [decode_key(rows, width) for width in self.widths[::-1]]
                bare += [decode_key(rows, self.widths[-1], drafts) for drafts in self.shared(rows)]
                for observes in (True, False) if self._skips else ():
                    bare += [decode_key(rows, width, passes=False, observes=observes) for width in self.cheap_widths[::-1]]
            found += [key._replace(features=features) for key in bare]
        return found

    def largest(self) -> list[Key]:
        return [decode_key(self.sizes[-1], self.widths[-1]), *self._prompt_keys()[:1]]

    def _prompt_keys(self) -> list[Key]:
        given = self.prompt_sizes or PromptSizes((), ())
        return [
            Key(PROMPT, rows, tokens, 0)
            for rows in given.rows
            for before, tokens in zip((0, *given.tokens), given.tokens, strict=False)
            if before < rows * self._longest
        ][::-1]
