"""What became of drafts lately: the tables against a slow twin in plain Python, synthetic drafters whose true chances are
known, and the choice between a head and a look-up."""

from __future__ import annotations

import random
from math import exp
from typing import NamedTuple

import pytest
import torch

from forerun.drafters import Rows, Worth, calibration
from forerun.drafters.calibration import BINS, HEAD, LOOK_UP, Calibration, Candidates, Weighed, priors
from forerun.drafters.measured import Found, Stop
from forerun.engine.state import RowState

K, SLOTS = 4, 6


class Kept(NamedTuple):
    """A drafted token of a slot: its candidate, index and id, the bins that count it, and the table's rates then."""

    candidate: int
    index: int
    token: int
    bins: tuple[int, ...]
    told: float


class Twin:
    """Token by token, with dictionaries."""

    def __init__(self) -> None:
        self.rate, self.weight = priors().tolist(), [calibration.PRIOR_WEIGHT] * BINS
        self.luck = {(slot, who): [0.0, 0.0] for slot in range(SLOTS) for who in (HEAD, LOOK_UP)}
        self.kept: dict[int, list[Kept]] = {}

    def odds(self, slot: int, who: int) -> float:
        off, spread = self.luck[slot, who]
        most = calibration.MOST_SHIFT
        return exp(min(max(off / (spread + calibration.PRECISION), -most), most))

    def corrected(self, rate: float, odds: float) -> float:
        rate = min(max(rate, calibration.LEAST), calibration.MOST)
        found = rate * odds / (1 - rate + rate * odds)
        return min(max(found, calibration.LEAST), calibration.MOST)

    def weigh(
        self, slot: int, head: list[int], chances: list[float], found: list[int], match: int
    ) -> tuple[list[int], list[float], int]:
        """The draft, its survival probabilities, and the candidate that it is."""
        sure = [sum(chance >= edge for edge in calibration.EDGES) for chance in chances]
        long = sum(match >= least for least in calibration.MATCHES)
        many, places = calibration.CHANCES, calibration.PLACES
        same = 0
        while same < min(len(head), len(found)) and head[same] == found[same]:
            same += 1
        parts = same < min(len(head), len(found))
        kept, survival = [], {HEAD: list[float](), LOOK_UP: list[float]()}
        for who, tokens in ((HEAD, head), (LOOK_UP, found)):
            alive = 1.0
            for i, token in enumerate(tokens):
                place = min(i, places - 1)
                by_length = long * places + place
                own = who == HEAD
                if i < same:
                    fine, own = calibration.AGREED + long * many + sure[i], True
                elif who == HEAD:
                    kind = calibration.ALONE if not parts else calibration.PARTED if i == same else calibration.APART
                    fine = kind + place * many + sure[i]
                elif parts:
                    fine = calibration.SPLIT + long * many + sure[i] if i == same else calibration.TAIL + by_length
                else:
                    fine = (calibration.FOLLOWS if head else calibration.FOUND) + by_length
                coarse = calibration.TYPICAL + min(i, calibration.DEEP - 1) if who == HEAD else calibration.FOUND + by_length
                counted = who == HEAD or (i >= same and bool(head))
                told = self.rate[fine if who == HEAD else coarse]
                kept.append(Kept(who, i, token, (fine, coarse) if counted else (coarse,), told))
                alive *= self.corrected(self.rate[fine], self.odds(slot, HEAD if own else LOOK_UP))
                survival[who].append(alive)
        self.kept[slot] = kept
        who = LOOK_UP if sum(survival[LOOK_UP]) > sum(survival[HEAD]) else HEAD
        return (head, found)[who], survival[who], who

    def learn(self, committed: dict[int, list[int]]) -> None:
        counted: dict[int, list[int]] = {}
        for slot, tokens in committed.items():
            for who in (HEAD, LOOK_UP):
                off = spread = 0.0
                any_tried, alive = False, True
                for one in self.kept.get(slot, []):
                    if one.candidate != who or not alive or one.index >= len(tokens):
                        continue
                    right = one.token == tokens[one.index]
                    off, spread, any_tried = off + right - one.told, spread + one.told * (1 - one.told), True
                    for at in one.bins:
                        counted.setdefault(at, []).append(right)
                    alive = right
                if any_tried:
                    old = self.luck[slot, who]
                    self.luck[slot, who] = [calibration.MEMORY * a + b for a, b in zip(old, (off, spread), strict=True)]
        for at, rights in counted.items():
            weight = self.weight[at] + len(rights)
            self.rate[at] = (self.rate[at] * self.weight[at] + sum(rights)) / weight
            self.weight[at] = min(weight, calibration.WINDOW)


def padded(rows: list[list[float]] | list[list[int]]) -> torch.Tensor:
    return torch.tensor([[*row, *[9] * (K - len(row))] for row in rows])


def made(head: list[list[int]], chances: list[list[float]], found: list[list[int]], match: list[int]) -> Candidates:
    sizes = [torch.tensor([len(row) for row in rows]) for rows in (head, found)]
    return Candidates(padded(head), sizes[0], padded(chances).float().cumprod(1), padded(found), sizes[1], torch.tensor(match))


def commit(state: RowState, slots: list[int], tokens: list[list[int]]) -> torch.Tensor:
    """Append tokens to slots. Returns how many each got."""
    for slot, ids in zip(slots, tokens, strict=True):
        state.catch_up(slot, [*state.history(slot).tolist(), *ids])
    return torch.tensor([len(ids) for ids in tokens])


def lived(rng: random.Random, steps: int) -> tuple[float, set[str]]:
    """Both forms through the same steps. The largest difference of probabilities, and what has occurred."""
    state, twin = RowState(SLOTS, 4000, 1, torch.device("cpu"), K), Twin()
    it, worst, seen = Calibration(state), 0.0, set[str]()
    for _ in range(steps):
        slots = rng.sample(range(SLOTS - 1), rng.randint(1, SLOTS - 1))
        head = [[rng.randrange(2) for _ in range(rng.randint(0, K))] for _ in slots]
        found = [[rng.randrange(2) for _ in range(rng.randint(0, K))] for _ in slots]
        chances = [[rng.random() ** 0.3 for _ in row] for row in head]
        match = [rng.randint(1, 9) if row else 0 for row in found]
        got = it.weigh(torch.tensor(slots), made(head, chances, found, match))
        for row, slot in enumerate(slots):
            tokens, survival, source = twin.weigh(slot, head[row], chances[row], found[row], match[row])
            totals = [float(x.sum()) for x in got.survival]
            assert abs(totals[row] - sum(survival)) < 1e-4
            if int(got.source[row]) != source:  # only where both bring the same
                seen.add("tie")
                continue
            size = int(got.size[row])
            assert got.tokens[row, :size].tolist() == tokens
            worst = max([worst, *(abs(a - b) for a, b in zip(got.survival[row].tolist(), survival, strict=False))])
            seen.add(("head", "look-up")[source])
            seen.add(f"{len(head[row])} and {len(found[row])}")
        others = rng.sample(slots, rng.randint(1, len(slots)))
        tokens = [[rng.randrange(2) for _ in range(rng.randint(0, K + 1))] for _ in others]
        it.learn(torch.tensor(others), commit(state, others, tokens))
        twin.learn(dict(zip(others, tokens, strict=True)))
        it.forget(torch.tensor(others))
        for slot in others:
            twin.kept.pop(slot)
        worst = max(worst, float((it.rate - torch.tensor(twin.rate)).abs().max()))
        worst = max([worst, *(abs(float(it.luck[s, w, i]) - twin.luck[s, w][i]) for s, w in twin.luck for i in (0, 1))])
    return worst, seen


def test_the_tables_are_those_of_the_slow_twin() -> None:
    worst, seen = lived(random.Random(1), 300)
    assert worst < 1e-3
    assert seen >= {"head", "look-up", *(f"{a} and {b}" for a in range(K + 1) for b in range(K + 1))}


@pytest.mark.parametrize("fault", ["LINES", "MEMORY", "WINDOW", "MATCHES"])
def test_the_twin_notices_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"LINES": (0, 1, 0, 0), "MEMORY": 0.8, "WINDOW": 64.0, "MATCHES": (2, 3, 5, 6, 7)}[fault]
    twin_of, real = Twin.weigh, getattr(calibration, fault)

    def weigh(self: Twin, *given: object) -> object:
        monkeypatch.setattr(calibration, fault, real)  # the twin is right
        try:
            return twin_of(self, *given)  # type: ignore[arg-type]
        finally:
            monkeypatch.setattr(calibration, fault, wrong)

    learn_of = Twin.learn

    def learn(self: Twin, committed: dict[int, list[int]]) -> None:
        monkeypatch.setattr(calibration, fault, real)
        learn_of(self, committed)
        monkeypatch.setattr(calibration, fault, wrong)

    monkeypatch.setattr(Twin, "weigh", weigh)
    monkeypatch.setattr(Twin, "learn", learn)
    monkeypatch.setattr(calibration, fault, wrong)
    try:
        worst, _ = lived(random.Random(1), 300)
    except AssertionError:
        return
    assert worst > 1e-2


def test_the_host_expects_the_same_while_it_drafts() -> None:
    """Stop follows a row token by token; after the last one it knows what `weigh` says of both candidates."""
    rng, state = random.Random(2), RowState(SLOTS, 400, 1, torch.device("cpu"), K)
    it = Calibration(state)
    it.rate.copy_(torch.rand(BINS, generator=torch.Generator().manual_seed(0)))
    it.luck.copy_(torch.rand(it.luck.shape, generator=torch.Generator().manual_seed(1)))
    parted = 0
    for _ in range(200):
        head, found = ([rng.randrange(2) for _ in range(K)] for _ in range(2))
        found = found[: rng.randint(0, K)]
        chances, match = [rng.random() for _ in range(K)], rng.randint(1, 9)
        c = made([head], [chances], [found], [match])
        rows = Rows(torch.tensor([2]), torch.tensor([K]), K, worth=Worth(0.0, 0.0, lambda rows: 0.0))
        stop = Stop(it, rows, Found(c.look_up, c.look_up_size, c.match), 1)
        assert stop.before().tolist() == [True]
        for i in range(1, K):
            stop.after(i, c.head, torch.tensor([chances]))
            stop._on[0].on = True
        row = stop._on[0]
        row.take(head[-1], chances[-1])
        got = it.weigh(rows.slot, c)
        if row.parted:
            parted += 1
            assert float(got.survival.sum()) == pytest.approx(max(row.expected, row.found), rel=1e-3)
        elif len(found) < K:
            assert float(got.survival.sum()) == pytest.approx(row.expected, rel=1e-3)
    assert parted > 50


def drafts_of(rng: random.Random, truth: dict[float, float], text: int) -> tuple[list[int], list[float]]:
    """K tokens of a head whose probability p is right with chance truth[p]. text: the token that is right."""
    tokens, chances = [], []
    for _ in range(K):
        p = rng.choice(list(truth))
        chances.append(p)
        tokens.append(text if rng.random() < truth[p] else text + 1)
    return tokens, chances


def error(it: Calibration, state: RowState, rng: random.Random, truth: dict[float, float], steps: int, raw: bool) -> float:
    """Run steps of two rows. The mean difference of a token's survival probability from the truth, over the last 200 steps."""
    total = count = 0.0
    for step in range(steps):
        drafts = [drafts_of(rng, truth, 5) for _ in range(2)]
        head, chances = [d[0] for d in drafts], [d[1] for d in drafts]
        got = it.weigh(torch.tensor([0, 3]), made(head, chances, [[], []], [0, 0]))
        if step >= steps - 200:
            for row, ps in enumerate(chances):
                true = told = 1.0
                for i, p in enumerate(ps):
                    true, told = true * truth[p], told * p
                    total += abs((told if raw else float(got.survival[row, i])) - true)
                    count += 1
        right = [next((i for i, t in enumerate(row) if t != 5), K) for row in head]
        it.learn(torch.tensor([0, 3]), commit(state, [0, 3], [[5] * (n + 1) for n in right]))
    return total / count


GREEDY = {0.15: 0.3, 0.4: 0.6, 0.6: 0.8, 0.85: 0.95, 0.98: 0.99}  # a greedy target agrees more often than the probability says
WORSE = {0.15: 0.05, 0.4: 0.15, 0.6: 0.3, 0.85: 0.5, 0.98: 0.8}


def test_chances_are_measured_and_follow_a_change() -> None:
    state, rng = RowState(SLOTS, 30000, 1, torch.device("cpu"), K), random.Random(0)
    it = Calibration(state)
    assert error(it, state, rng, GREEDY, 500, False) < 0.05
    assert error(it, state, rng, WORSE, 700, False) < 0.06
    assert error(it, state, rng, GREEDY, 300, True) > 0.12, "the head's own probabilities are off by more"


def test_a_row_has_luck_of_its_own() -> None:
    """Two rows with the same probabilities, of which one is always right and one is right in half of the cases."""
    state, rng = RowState(SLOTS, 30000, 1, torch.device("cpu"), K), random.Random(0)
    it, slots = Calibration(state), torch.tensor([0, 3])
    for _ in range(200):
        head = [[5] * K, [5 if rng.random() < 0.5 else 6 for _ in range(K)]]
        got = it.weigh(slots, made(head, [[0.6] * K] * 2, [[], []], [0, 0]))
        right = [next((i for i, t in enumerate(row) if t != 5), K) for row in head]
        it.learn(slots, commit(state, [0, 3], [[5] * (n + 1) for n in right]))
    first, second = got.survival[:, 0].tolist()
    assert first > 0.85 and second < 0.7
    it.admit(0)
    again = it.weigh(slots, made(head, [[0.6] * K] * 2, [[], []], [0, 0]))
    assert float(again.survival[0, 0]) < first - 0.03, "the next sequence in the slot starts anew"


def better(own: float, short: float, long: float, steps: int = 1000) -> tuple[float, float, float]:
    """Accepted tokens a step of the head alone, the look-up alone, and the choice. own, short, long: how often a token is right
    of the head, which says 0.6, and of the look-up with a match of 2 and of 5 tokens."""
    state, rng = RowState(SLOTS, 30000, 1, torch.device("cpu"), K), random.Random(0)
    it, slot, brought = Calibration(state), torch.tensor([1]), [0, 0, 0]
    for _ in range(steps):
        match = rng.choice([2, 5])
        both = ((own, 6), (short if match == 2 else long, 7))
        texts = [[5 if rng.random() < chance else wrong for _ in range(K)] for chance, wrong in both]
        got: Weighed = it.weigh(slot, made([texts[0]], [[0.6] * K], [texts[1]], [match]))
        right = [next((i for i, t in enumerate(row) if t != 5), K) for row in (*texts, got.tokens[0, : int(got.size)].tolist())]
        brought = [a + b for a, b in zip(brought, right, strict=True)]
        it.learn(slot, commit(state, [1], [[5] * (right[2] + 1)]))
    return brought[0] / steps, brought[1] / steps, brought[2] / steps


@pytest.mark.parametrize(
    ("own", "short", "long", "gain"),
    [(0.8, 0.4, 0.4, -0.05), (0.3, 0.9, 0.9, -0.05), (0.7, 0.7, 0.7, -0.15), (0.7, 0.2, 0.95, 0.5)],
)
def test_the_better_candidate_is_taken(own: float, short: float, long: float, gain: float) -> None:
    """gain: what the choice brings over the better of the two alone, at least."""
    head, look_up, chosen = better(own, short, long)
    assert chosen > max(head, look_up) + gain


def test_slots_without_drafts_and_the_dummy_slot_teach_nothing() -> None:
    state = RowState(SLOTS, 400, 1, torch.device("cpu"), K)
    it = Calibration(state)
    before = it.rate.clone()
    it.learn(torch.tensor([0, 1]), commit(state, [0, 1], [[5, 5], [5]]))
    slot = torch.tensor([SLOTS - 1, 2])
    it.weigh(slot, made([[5] * K] * 2, [[0.6] * K] * 2, [[5] * K] * 2, [3, 3]))
    it.learn(slot, commit(state, [SLOTS - 1, 2], [[5, 5], []]))
    assert torch.equal(it.rate, before) and not it.luck.any()
    it.forget(slot)
    it.learn(slot, commit(state, [SLOTS - 1, 2], [[5, 5], [5]]))
    assert torch.equal(it.rate, before)
    it.weigh(slot, made([[5] * K] * 2, [[0.6] * K] * 2, [[5] * K] * 2, [3, 3]))
    it.learn(slot, commit(state, [SLOTS - 1, 2], [[5, 5], [5]]))
    assert not torch.equal(it.rate, before)
