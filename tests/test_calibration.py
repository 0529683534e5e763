"""What became of drafts lately: the tables against a slow twin in plain Python, synthetic drafters whose true chances are
known, and the choice between a head and a look-up."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.drafters import Worth, calibration
from forerun.drafters.calibration import Calibration, Candidates, Weighed
from forerun.drafters.calibration_host import HostCalibration, Row
from forerun.drafters.measured import Stop
from forerun.engine.state import RowState

K, SLOTS = 4, 6


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
    state, host = RowState(SLOTS, 4000, 1, torch.device("cpu"), K), HostCalibration()
    it, worst, seen = Calibration(state), 0.0, set[str]()
    for slot in range(SLOTS - 1):
        host.admit(slot)
    for _ in range(steps):
        slots = rng.sample(range(SLOTS - 1), rng.randint(1, SLOTS - 1))
        head = [[rng.randrange(2) for _ in range(rng.randint(0, K))] for _ in slots]
        found = [[rng.randrange(2) for _ in range(rng.randint(0, K))] for _ in slots]
        chances = [[rng.random() ** 0.3 for _ in row] for row in head]
        match = [rng.randint(1, 9) if row else 0 for row in found]
        got = it.weigh(torch.tensor(slots), made(head, chances, found, match))
        for i, slot in enumerate(slots):
            row = host.row(slot, K, found[i], match[i])
            for token, chance in zip(head[i], chances[i], strict=True):
                row.take(token, chance)
            row.end()
            tokens, survival, source = row.draft()
            size = int(got.size[i])
            assert abs(float(got.survival[i].sum()) - sum(survival)) < 1e-3
            cheap = row.cheap()
            worst = max([worst, *(abs(a - b) for a, b in zip(got.found[i].tolist(), cheap, strict=False))])
            if int(got.source[i]) != source:  # both bring the same
                seen.add("tie")
                continue
            assert got.tokens[i, :size].tolist() == tokens
            worst = max([worst, *(abs(a - b) for a, b in zip(got.survival[i].tolist(), survival, strict=False))])
            seen |= {("head", "look-up")[source], f"{len(head[i])} and {len(found[i])}"}
        others = rng.sample(slots, rng.randint(1, len(slots)))
        tokens = [[rng.randrange(2) for _ in range(rng.randint(0, K + 1))] for _ in others]
        it.learn(torch.tensor(others), commit(state, others, tokens))
        host.learn(dict(zip(others, tokens, strict=True)))
        it.bins[torch.tensor(others)] = -1
        worst = max(worst, float((it.rate - torch.tensor(host.rate)).abs().max()))
        luck = torch.tensor([host.luck[slot] for slot in range(SLOTS - 1)])
        worst = max(worst, float((it.luck[: SLOTS - 1] - luck).abs().max()))
    return worst, seen


def test_tensors_and_host_agree() -> None:
    worst, seen = lived(random.Random(1), 300)
    assert worst < 1e-3
    assert seen >= {"head", "look-up", *(f"{a} and {b}" for a in range(K + 1) for b in range(K + 1))}


@pytest.mark.parametrize("fault", ["coarse bins", "luck", "agreement", "split"])
def test_faults_of_one_form_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "coarse bins":
        monkeypatch.setattr(calibration, "LINES", (0, 1, 0, 0))
    elif fault == "luck":
        monkeypatch.setattr(HostCalibration, "odds", lambda self, slot: (1.0, 1.0))
    elif fault == "agreement":
        real = Row.take
        monkeypatch.setattr(Row, "take", lambda self, token, chance: real(self, token, chance * 0.9))
    else:
        monkeypatch.setattr(Row, "_behind", lambda self, i: self._by_length(calibration.TAIL, i))
    try:
        worst, _ = lived(random.Random(1), 100)
    except AssertionError:
        return
    assert worst > 1e-2


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
    it.bins[slot] = -1
    it.learn(slot, commit(state, [SLOTS - 1, 2], [[5, 5], [5]]))
    assert torch.equal(it.rate, before)
    it.weigh(slot, made([[5] * K] * 2, [[0.6] * K] * 2, [[5] * K] * 2, [3, 3]))
    it.learn(slot, commit(state, [SLOTS - 1, 2], [[5, 5], [5]]))
    assert not torch.equal(it.rate, before)


def stops(worth: Worth, found: list[int], head: list[int], chance: float, match: int = 3) -> int:
    """How many tokens a row drafts."""
    row = HostCalibration().row(0, K, found, match)
    stop = Stop([row], worth, 1)
    if not stop.before().item():
        return 0
    for i in range(1, K + 1):
        if not stop.after(i, torch.tensor([head]), torch.full((1, K), chance)).item():
            return i
    return K


def test_passes_are_made_while_they_pay() -> None:
    """A pass costs a tenth of a step that brings a token."""
    worth = Worth(1.0, 0.01, lambda rows: 0.1)
    assert stops(worth, [], [5] * K, 0.95) == K
    assert 0 < stops(worth, [], [5] * K, 0.3) < K
    assert stops(Worth(1.0, 0.01, lambda rows: 0.9), [], [5] * K, 0.95) == 0, "passes are too dear"
    assert stops(Worth(1.0, 0.7, lambda rows: 0.0), [], [5] * K, 0.95) == 0, "positions are too dear"
    assert stops(worth._replace(passes=lambda rows: 0.3), [5] * K, [5] * K, 0.95, match=9) == 0, "the look-up is sure enough"
    dearer = worth._replace(passes=lambda rows: 0.2)
    assert stops(dearer, [], [5] * K, 0.95) == K
    assert 0 < stops(dearer, [5] * K, [5] * K, 0.95, match=2) < K, "where they agree, the look-up goes on"
    assert stops(worth, [5, 5], [5] * K, 0.95, match=2) == K, "the look-up's draft is short"


def test_rows_share_the_cost_of_a_pass() -> None:
    alone, worth = HostCalibration(), Worth(2.0, 0.01, lambda rows: 0.4)
    rows = [alone.row(slot, K) for slot in range(3)]
    assert not Stop(rows[:1], worth, 1).before().any() and Stop(rows, worth, 1).before().all()
    rows[1].found = [5] * K
    rows[1]._long = calibration.LENGTHS - 1
    dearer = worth._replace(position=0.08)
    assert Stop(rows, dearer, 1).before().tolist() == [True, False, True], "each has to be worth its position"
