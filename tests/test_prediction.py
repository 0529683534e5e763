"""Predicted output: copies are followed to the end, edits are survived, unrelated outputs are left alone; and the tensors do
what a plain reader of one token after the other does, however the output is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.drafters import Rows
from forerun.drafters.prediction import DROPPED, FAR, LONGEST, NEAR, PATIENCE, TRIES, Prediction
from forerun.engine.state import RowState
from forerun.types import Request, SamplingParams

PROMPT = (7, 8, 9)


class Run(NamedTuple):
    steps: int
    drafted: int
    accepted: int


def started(prediction: list[int], longest: int, k: int, fixed: bool = False) -> tuple[RowState, Prediction]:
    """A drafter whose slot 1 holds the prompt, of a request with this prediction."""
    slots = RowState(2, len(PROMPT) + max(len(prediction), longest) + k + 1, 1, torch.device("cpu"))
    drafter = Prediction(slots, Speculation("prediction", k), 10**6, fixed)
    slots.set(1, PROMPT)
    drafter.admit(1, Request("r", PROMPT, SamplingParams(), longest, 0, prediction=tuple(prediction)))
    return slots, drafter


def decode(
    prediction: list[int],
    output: list[int],
    k: int,
    drafted_at: Callable[[int, list[int]], None] = lambda at, tokens: None,
    used: Callable[[int], int] = lambda most: most,
    fixed: bool = False,
) -> Run:
    """Produce output step by step, accepting of each draft what agrees with it, one token more a step. drafted_at is told each
    draft and where it begins; used: how much of a draft of this size is given to the target."""
    slots, drafter = started(prediction, len(output), k, fixed)
    slot, at = torch.tensor([1]), 0
    steps = drafted = accepted = 0
    while at < len(output):
        limit = min(k, len(output) - at - 1)
        draft = drafter.propose(Rows(slot, torch.tensor([limit]), k))
        assert draft.tokens.shape == (1, k) and int(draft.size[0]) <= limit
        tokens = draft.tokens[0, : int(draft.size[0])].tolist()
        drafted_at(at, tokens)
        tokens = tokens[: used(len(tokens))]
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


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("text", ["random", "period", "one token", "short"])
def test_a_copy_is_accepted_whole(k: int, text: str) -> None:
    rng = np.random.default_rng(0)
    output = {
        "random": rng.integers(0, 1000, 157).tolist(),
        "period": [1, 2, 3, 1, 2, 4] * 20,
        "one token": [5] * 60,
        "short": [4],
    }[text]
    run = decode(output, output, k)
    assert run.steps == fewest(len(output), k)
    assert run.accepted == run.drafted == len(output) - run.steps


@pytest.mark.parametrize("vocab", [30000, 60])
@pytest.mark.parametrize(("edit", "lost"), [("replace", 5.0), ("insert", 4.5), ("delete", 3.0)])
def test_edits_cost_a_few_steps_each(vocab: int, edit: str, lost: float) -> None:
    """A replaced or added piece of two tokens has to be decoded plainly, and short drafts follow it; no more than that."""
    rng = np.random.default_rng(1)
    edits, trials, extra = 10, 5, 0.0
    for _ in range(trials):
        text = rng.integers(0, vocab, 400).tolist()
        output = edited(rng, text, edit, edits, vocab)
        run = decode(text, output, 8)
        extra += run.steps - fewest(len(output), 8)
        assert run.accepted > 0.75 * len(output)
    assert extra / (edits * trials) < lost


def test_a_long_piece_dropped_or_moved_is_found_again() -> None:
    rng = np.random.default_rng(2)
    text = rng.integers(0, 5000, 600).tolist()
    for output in (text[:200] + text[400:], text[300:] + text[:300]):
        run = decode(text, output, 8)
        assert run.steps <= fewest(len(output), 8) + 2 * (FAR + 3)


def test_repetitive_text_does_not_jump() -> None:
    """Lines that differ in one token each, one of them edited: a jump to another line would lose the count."""
    lines = [[1, 2, 3, 100 + n, 4, 5] for n in range(40)]
    text = [token for line in lines for token in line]
    lines[20] = [1, 2, 3, 999, 4, 5]
    output = [token for line in lines for token in line]
    run = decode(text, output, 5)
    assert run.steps <= fewest(len(output), 5) + 4
    assert run.drafted - run.accepted <= 12


def test_an_unrelated_output_is_soon_left_alone() -> None:
    rng = np.random.default_rng(3)
    prediction, output = ((rng.zipf(1.3, 600) % 40).tolist() for _ in range(2))
    run = decode(prediction, output, 8)
    assert run.drafted < 60
    # and when it comes to agree after all, it is followed again
    run = decode(prediction + list(range(100, 200)), output + list(range(100, 200)), 8)
    assert run.accepted > 75


def test_after_the_prediction_nothing_is_drafted() -> None:
    run = decode(list(range(20)), list(range(40)), 4)
    assert run.accepted == 16 and run.drafted == 16
    assert decode([], list(range(10)), 4) == Run(10, 0, 0)


class Reader:
    """The definition: one output, read token by token. What it does is a function of prediction and output alone."""

    def __init__(self, prediction: list[int]) -> None:
        self.prediction, self.output = prediction, list[int]()
        self.at: int | None = 0
        self.agreed, self.since, self.anchor, self.wrong = 3, 0, 0, 0

    def read(self, token: int) -> None:
        self.output.append(token)
        reach = 2
        if self.at is not None:
            if self.prediction[self.at : self.at + 1] == [token]:
                self.at, self.agreed, self.since = self.at + 1, self.agreed + 1, self.since + 1
                return
            self.wrong = 0 if self.since >= 2 else self.wrong
            if self.since or len(self.output) == 1:
                self.anchor, reach = self.at, DROPPED
            else:
                self.wrong += 1
        self.at = None
        if found := self.place(reach if self.wrong < PATIENCE else 0):
            self.at, self.agreed, self.since = *found, 0

    def place(self, reach: int) -> tuple[int, int] | None:
        """Where the output may go on and how many tokens agree before it."""
        need, span = min(2 + self.wrong, LONGEST), range(len(self.prediction) + 1)
        ahead = [end for end in span if 0 < end - self.anchor <= NEAR]
        far = [end for end in span if end >= FAR and self.prediction[end - FAR : end] == self.output[-FAR:]]
        far = sorted(far, key=lambda end: (abs(end - self.anchor), end > self.anchor))[:TRIES]
        kinds = (
            (need, ahead),
            (max(need, FAR), [end for end in far if end > self.anchor + NEAR]),
            (max(need, FAR), [end for end in far if end <= self.anchor]),
        )
        for least, ends in kinds:
            if good := [end for end in ends if self.run(end) >= least]:
                best = max(good, key=lambda end: (self.run(end), -abs(end - self.anchor)))
                return best, self.run(best)
        if alone := [end for end in ahead if end - self.anchor <= reach and self.run(end)]:
            return alone[0], 1
        return (self.anchor + 1, 0) if reach == DROPPED else None

    def run(self, end: int) -> int:
        most = min(end, len(self.output), LONGEST)
        return next((n for n in range(most) if self.prediction[end - 1 - n] != self.output[-1 - n]), most)

    def propose(self, k: int) -> list[int]:
        if self.at is None:
            return []
        return self.prediction[self.at : self.at + min(k, (2, 2, 4, k)[min(self.agreed, 3)])]


def outputs(top: int) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """A prediction and an output that takes pieces of it from here and there, with other tokens between them."""
    text = st.lists(st.integers(0, top), max_size=90)
    pieces = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40), st.lists(st.integers(0, top), max_size=3)), max_size=8)
    return st.tuples(text, pieces).map(lambda x: (x[0], [t for a, n, more in x[1] for t in (*x[0][a : a + n], *more)]))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 3, 12, 1000]).flatmap(outputs), st.integers(1, 10), st.randoms(use_true_random=False), st.booleans()
)
def test_drafts_are_those_of_the_definition_however_the_output_is_cut(
    texts: tuple[list[int], list[int]], k: int, random: Random, fixed: bool
) -> None:
    prediction, output = texts
    reader, read = Reader(prediction), 0

    def drafted(at: int, tokens: list[int]) -> None:
        nonlocal read
        for token in output[read:at]:
            reader.read(token)
        read = at
        assert tokens == reader.propose(min(k, len(output) - at - 1))

    decode(prediction, output, k, drafted, lambda most: random.randint(0, most), fixed)


def test_what_was_read_at_once_is_found_as_well() -> None:
    """A sequence that resumes brings output that no step of the drafter has read."""
    rng = np.random.default_rng(4)
    for vocab in (12, 5000):
        text = rng.integers(0, vocab, 300).tolist()
        output = edited(rng, text, "replace", 8, vocab)
        reader = Reader(text)
        for token in output[:-20]:
            reader.read(token)
        slots, drafter = started(text, len(output), 8)
        slots.set(1, (*PROMPT, *output[:-20]))
        draft = drafter.propose(Rows(torch.tensor([1]), torch.tensor([8]), 8))
        assert draft.tokens[0, : draft.size[0]].tolist() == reader.propose(8) != []


def test_nearness_matters() -> None:
    """The same stretch twice: the place ahead of the departure is taken, not the first, and not the farther one."""
    text = [1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6, 6]
    for begin, follows in (([9], [0, 0]), ([1, 2, 3, 4, 9], [5, 6])):
        slots, drafter = started(text, 30, 2)
        for token in (*begin, 1, 2, 3, 4):
            slots.commit(torch.tensor([1]), torch.tensor([[token]]), torch.tensor([1]))
            draft = drafter.propose(Rows(torch.tensor([1]), torch.tensor([2]), 2))
        assert draft.tokens[0, : draft.size[0]].tolist() == follows


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_do_not_mix_and_a_slot_without_a_prediction_drafts_nothing(fixed: bool) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 20, n).tolist() for n in (150, 40, 150)]
    out = [edited(rng, texts[0], "insert", 5, 20), rng.integers(0, 20, 150).tolist(), texts[2]]
    slots = RowState(4, 200, 1, torch.device("cpu"))
    drafter = Prediction(slots, Speculation("prediction", 4), 1000, fixed)
    readers = [Reader(text) for text in texts]
    for slot in range(4):
        slots.set(slot, PROMPT)
        drafter.admit(slot, Request("r", PROMPT, SamplingParams(), 200, 0, prediction=tuple([*texts, []][slot])))
    rows = Rows(torch.tensor([2, 3, 0, 1]), torch.full((4,), 4), 4)
    for step in range(120):
        draft = drafter.propose(rows)
        for row, slot in enumerate(rows.slot.tolist()):
            assert draft.tokens[row, : draft.size[row]].tolist() == (readers[slot].propose(4) if slot < 3 else [])
        new = [out[slot % 3][step] for slot in rows.slot.tolist()]
        slots.commit(rows.slot, torch.tensor(new)[:, None], torch.ones(4, dtype=torch.int64))
        for slot, token in zip(rows.slot.tolist(), new, strict=True):
            if slot < 3:
                readers[slot].read(token)


@pytest.mark.parametrize("fixed", [False, True])
def test_slots_are_kept_apart_and_can_resume(fixed: bool) -> None:
    slots = RowState(3, 32, 1, torch.device("cpu"))
    drafter = Prediction(slots, Speculation("prediction", 4), 1000, fixed)
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
