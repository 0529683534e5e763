"""Predicted output: copies are followed to the end, edits are survived, unrelated outputs are left alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.drafters import Rows
from forerun.drafters.prediction import FAR, LONGEST, NEAR, DevicePrediction, Follower, Prediction, locate
from forerun.engine.state import RowState
from forerun.types import Request, SamplingParams

PROMPT = (7, 8, 9)
KINDS = [Prediction, DevicePrediction]
Kind = type[Prediction] | type[DevicePrediction]


class Run(NamedTuple):
    steps: int
    drafted: int
    accepted: int


def decode(kind: Kind, prediction: list[int], output: list[int], k: int) -> Run:
    """Produce output step by step, accepting of each draft what agrees with it, one token more a step."""
    slots = RowState(2, len(PROMPT) + max(len(prediction), len(output)) + k + 1, 1, torch.device("cpu"))
    drafter = kind(slots, Speculation("prediction", k), 10**6)
    slots.set(1, PROMPT)
    drafter.admit(1, Request("r", PROMPT, SamplingParams(), len(output), 0, prediction=tuple(prediction)))
    slot, at = torch.tensor([1]), 0
    steps = drafted = accepted = 0
    while at < len(output):
        limit = min(k, len(output) - at - 1)
        draft = drafter.propose(Rows(slot, torch.tensor([limit]), k))
        assert draft.tokens.shape == (1, k) and int(draft.size[0]) <= limit
        tokens = draft.tokens[0, : int(draft.size[0])].tolist()
        right = next((n for n, t in enumerate(tokens) if t != output[at + n]), len(tokens))
        slots.commit(slot, torch.tensor([output[at : at + right + 1]]), torch.tensor([right + 1]))
        at += right + 1
        steps, drafted, accepted = steps + 1, drafted + len(tokens), accepted + right
    return Run(steps, drafted, accepted)


def fewest(size: int, k: int) -> int:
    return -(-size // (k + 1))


def edited(rng: np.random.Generator, text: list[int], kind: str, edits: int, vocab: int) -> list[int]:
    """Up to three tokens replaced, put in or dropped at places at least 20 tokens apart."""
    out = list(text)
    for place in sorted(rng.choice(len(text) // 20, edits, replace=False) * 20 + 5, reverse=True):
        old = 0 if kind == "insert" else int(rng.integers(1, 4))
        new = 0 if kind == "delete" else int(rng.integers(1, 4))
        out[place : place + old] = rng.integers(0, vocab, new).tolist()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("text", ["random", "period", "one token", "short"])
def test_a_copy_is_accepted_whole(kind: Kind, k: int, text: str) -> None:
    rng = np.random.default_rng(0)
    output = {
        "random": rng.integers(0, 1000, 157).tolist(),
        "period": [1, 2, 3, 1, 2, 4] * 20,
        "one token": [5] * 60,
        "short": [4],
    }[text]
    run = decode(kind, output, output, k)
    assert run.steps == fewest(len(output), k)
    assert run.accepted == run.drafted == len(output) - run.steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [30000, 60])
@pytest.mark.parametrize(("edit", "lost"), [("replace", 5.0), ("insert", 4.5), ("delete", 3.0)])
def test_edits_cost_a_few_steps_each(kind: Kind, vocab: int, edit: str, lost: float) -> None:
    """A replaced or added piece of two tokens has to be decoded plainly, and short drafts follow it; no more than that."""
    rng = np.random.default_rng(1)
    edits, trials, extra = 10, 5, 0.0
    for _ in range(trials):
        text = rng.integers(0, vocab, 400).tolist()
        output = edited(rng, text, edit, edits, vocab)
        run = decode(kind, text, output, 8)
        extra += run.steps - fewest(len(output), 8)
        assert run.accepted > 0.75 * len(output)
    assert extra / (edits * trials) < lost


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_piece_dropped_or_moved_is_found_again(kind: Kind) -> None:
    rng = np.random.default_rng(2)
    text = rng.integers(0, 5000, 600).tolist()
    for output in (text[:200] + text[400:], text[300:] + text[:300]):
        run = decode(kind, text, output, 8)
        assert run.steps <= fewest(len(output), 8) + 2 * (FAR + 3)


@pytest.mark.parametrize("kind", KINDS)
def test_repetitive_text_does_not_jump(kind: Kind) -> None:
    """Lines that differ in one token each, one of them edited: a jump to another line would lose the count."""
    lines = [[1, 2, 3, 100 + n, 4, 5] for n in range(40)]
    text = [token for line in lines for token in line]
    lines[20] = [1, 2, 3, 999, 4, 5]
    output = [token for line in lines for token in line]
    run = decode(kind, text, output, 5)
    assert run.steps <= fewest(len(output), 5) + 4
    assert run.drafted - run.accepted <= 12


def test_an_unrelated_output_is_soon_left_alone() -> None:
    rng = np.random.default_rng(3)
    prediction, output = ((rng.zipf(1.3, 600) % 40).tolist() for _ in range(2))
    run = decode(Prediction, prediction, output, 8)
    assert run.drafted < 60
    # and when it comes to agree after all, it is followed again
    run = decode(Prediction, prediction + list(range(100, 200)), output + list(range(100, 200)), 8)
    assert run.accepted > 75


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_prediction_nothing_is_drafted(kind: Kind) -> None:
    run = decode(kind, list(range(20)), list(range(40)), 4)
    assert run.accepted == 16 and run.drafted == 16
    assert decode(kind, [], list(range(10)), 4) == Run(10, 0, 0)


def test_following_does_not_depend_on_the_steps() -> None:
    rng = np.random.default_rng(4)
    text = rng.integers(0, 12, 200).tolist()
    output = edited(rng, text, "replace", 8, 12)
    one, cut = Follower(text), Follower(text)
    one.extend(output[:150])
    for at in range(0, 150, 3):
        cut.extend(output[at : at + 3])
        cut.propose(4)
    assert one.propose(8) == cut.propose(8)


def naive_locate(prediction: list[int], tail: list[int], anchor: int) -> tuple[int, int]:
    """The definition, place by place; smaller is better."""
    places = []
    for end in range(1, len(prediction) + 1):
        run = 0
        while run < min(len(tail), end) and prediction[end - 1 - run] == tail[-1 - run]:
            run += 1
        ahead = end - anchor
        near = 0 < ahead <= NEAR
        if run >= (1 if ahead == 1 else 2) if near else run >= FAR:
            places.append((0 if near else 1 if ahead > 0 else 2, -run, abs(ahead), end))
    return (min(places)[3], -min(places)[1]) if places else (anchor, 0)


small = st.lists(st.integers(0, 2), max_size=120)
row = st.tuples(small, st.lists(st.integers(0, 2), max_size=LONGEST), st.integers(0, 120))


@settings(max_examples=300, deadline=None)
@given(st.lists(row, min_size=1, max_size=3), st.integers(0, 2))
def test_locate_agrees_with_its_definition(rows: list[tuple[list[int], list[int], int]], stale: int) -> None:
    width = max(1, max(len(p) for p, _, _ in rows))
    prediction = torch.full((len(rows), width), stale)
    tail = torch.full((len(rows), LONGEST), stale)
    for i, (p, t, _) in enumerate(rows):
        prediction[i, : len(p)] = torch.tensor(p, dtype=torch.int64)
        tail[i, LONGEST - len(t) :] = torch.tensor(t, dtype=torch.int64)
    anchor = torch.tensor([min(a, len(p)) for p, _, a in rows])
    sizes = torch.tensor([len(p) for p, _, _ in rows]), torch.tensor([len(t) for _, t, _ in rows])
    end, matched = locate(prediction, sizes[0], tail, sizes[1], anchor)
    wanted = [naive_locate(p, t, min(a, len(p))) for p, t, a in rows]
    assert list(zip(end.tolist(), matched.tolist(), strict=True)) == wanted


def test_nearness_matters_to_locate() -> None:
    """The same stretch twice: the place ahead of the anchor is taken, not the first."""
    prediction = torch.tensor([[1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]])
    tail = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
    for anchor, end in ((0, 4), (3, 4), (4, 10), (9, 10)):
        found, _ = locate(prediction, torch.tensor([11]), tail, torch.tensor([4]), torch.tensor([anchor]))
        assert found.tolist() == [end]


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_kept_apart_and_can_resume(kind: Kind) -> None:
    slots = RowState(3, 32, 1, torch.device("cpu"))
    drafter = kind(slots, Speculation("prediction", 4), 1000)
    for slot, prediction in ((0, (1, 2, 3, 4, 5, 6)), (2, (11, 12, 1000, 14)), (1, ())):
        slots.set(slot, PROMPT)
        drafter.admit(slot, Request("r", PROMPT, SamplingParams(), 20, 0, prediction=prediction))
    rows = Rows(torch.tensor([2, 0, 1]), torch.tensor([4, 3, 4]), 4)
    draft = drafter.propose(rows)
    assert draft.size.tolist() == [2, 3, 0]  # 1000 is no token of this tokenizer
    assert draft.tokens[0, :2].tolist() == [11, 12] and draft.tokens[1, :3].tolist() == [1, 2, 3]
    assert drafter.propose(Rows(rows.slot, torch.tensor([0, 2, 0]), 2)).size.tolist() == [0, 2, 0]

    drafter.release(0, False)
    slots.set(0, (*PROMPT, 1, 2, 3, 4))  # the sequence resumes with output behind its prompt
    drafter.admit(0, Request("r", PROMPT, SamplingParams(), 20, 0, prediction=(1, 2, 3, 4, 5, 6)))
    draft = drafter.propose(Rows(torch.tensor([0]), torch.tensor([4]), 4))
    assert draft.tokens[0, : draft.size[0]].tolist() == [5, 6]
