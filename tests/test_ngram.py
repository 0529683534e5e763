"""Prompt look-up against its definition, on the host and as tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.drafters import Rows
from forerun.drafters.ngram import DeviceNgram, Ngram, NgramIndex, match
from forerun.engine.state import RowState
from forerun.types import Request, SamplingParams


def naive(text: list[int], min_n: int, max_n: int, k: int, latest: bool = False) -> tuple[list[int], int]:
    """The definition: every n from long to short, every earlier start from the left (or, wrongly, from the right). The draft
    and the length of the match."""
    size = len(text)
    for n in range(max_n, min_n - 1, -1):
        starts = range(size - n)
        for start in reversed(starts) if latest else starts:
            if text[start : start + n] == text[size - n :]:
                return text[start + n : start + n + k], n
    return [], 0


def on_host(text: list[int], min_n: int, max_n: int, k: int, steps: list[int]) -> tuple[list[int], int]:
    """Index the text as it would arrive, a prompt and then a few tokens at a time."""
    index, at = NgramIndex(min_n, max_n), 0
    for step in steps:
        at = min(len(text), at + step)
        index.catch_up(np.array(text[:at], dtype=np.int64))
    return index.propose(np.array(text, dtype=np.int64), k)


def on_tensors(texts: list[list[int]], min_n: int, max_n: int, k: int, stale: int, width: int) -> list[tuple[list[int], int]]:
    tokens = torch.full((len(texts), width), stale)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
    drafts, size, longest = match(tokens, torch.tensor([len(t) for t in texts]), min_n, max_n, k)
    assert drafts.shape == (len(texts), k)
    return [(d[:n], m) for d, n, m in zip(drafts.tolist(), size.tolist(), longest.tolist(), strict=True)]


texts = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), max_size=60))
lengths = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


@settings(max_examples=400, deadline=None)
@given(texts, lengths, st.integers(1, 9), st.lists(st.integers(1, 20), max_size=8))
def test_host_agrees_with_the_definition(text: list[int], n: list[int], k: int, steps: list[int]) -> None:
    assert on_host(text, n[0], n[1], k, steps) == naive(text, n[0], n[1], k)


@settings(max_examples=400, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), lengths, st.integers(1, 9), st.integers(0, 4), st.integers(0, 10))
def test_tensors_agree_with_the_definition(batch: list[list[int]], n: list[int], k: int, stale: int, spare: int) -> None:
    width = max(1, max(map(len, batch)) + spare)
    assert on_tensors(batch, n[0], n[1], k, stale, width) == [naive(t, n[0], n[1], k) for t in batch]


@pytest.mark.parametrize(
    ("text", "n", "k", "draft"),
    [
        ([1, 2, 3, 4, 2, 3], (2, 3), 4, [4, 2, 3]),  # fewer than k where the context ends
        ([7, 7, 7, 7], (1, 2), 4, [7, 7]),  # the occurrence overlaps the suffix
        ([7, 7], (1, 2), 4, [7]),
        ([1, 2, 9, 1, 2, 8, 1, 2], (2, 2), 2, [9, 1]),  # the earliest of two
        ([5, 1, 2, 9, 1, 2, 8, 5, 1, 2], (1, 3), 2, [9, 1]),  # the longest comes first
        ([1, 2, 3], (1, 3), 4, []),
        ([1], (1, 1), 4, []),
        ([], (1, 1), 4, []),
        ([150000, 1, 150000], (1, 5), 1, [1]),
    ],
)
def test_worked_examples(text: list[int], n: tuple[int, int], k: int, draft: list[int]) -> None:
    assert naive(text, *n, k)[0] == draft
    assert on_host(text, *n, k, [3]) == naive(text, *n, k)
    assert on_tensors([text], *n, k, 0, len(text) + 1) == [naive(text, *n, k)]


def test_taking_the_latest_occurrence_would_be_noticed() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 3, 40).tolist() for _ in range(50)]
    wrong = sum(naive(t, 2, 3, 4, latest=True)[0] != on_host(t, 2, 3, 4, [])[0] for t in drawn)
    assert wrong > 25


def request(prompt: list[int]) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), 100, 0)


@pytest.mark.parametrize("kind", [Ngram, DeviceNgram])
def test_drafters_follow_the_slots_and_the_row_limits(kind: type[Ngram] | type[DeviceNgram]) -> None:
    slots = RowState(4, 64, 1, torch.device("cpu"))
    drafter = kind(slots, Speculation("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3), 100)
    rng = np.random.default_rng(1)
    text = {slot: rng.integers(0, 4, 10).tolist() for slot in (3, 0, 2)}
    for slot, ids in text.items():
        slots.set(slot, ids)
        drafter.admit(slot, request(ids))
    rows = Rows(torch.tensor([3, 0, 2]), torch.tensor([4, 0, 2]), 4)
    for _ in range(12):
        draft = drafter.propose(rows)
        assert draft.probs is None and draft.tokens.shape == (3, 4)
        for row, slot in enumerate((3, 0, 2)):
            k = int(rows.k[row])
            assert draft.tokens[row, : draft.size[row]].tolist() == (naive(text[slot], 1, 3, k)[0] if k else [])
        new = torch.from_numpy(rng.integers(0, 4, (3, 5)))
        count = torch.from_numpy(rng.integers(1, 5, 3))
        slots.commit(rows.slot, new, count)
        for row, slot in enumerate((3, 0, 2)):
            text[slot] += new[row, : count[row]].tolist()
    drafter.release(0, False)
    slots.set(0, [9, 8, 9])  # another sequence takes the slot
    drafter.admit(0, request([9, 8, 9]))
    draft = drafter.propose(Rows(torch.tensor([0]), torch.tensor([4]), 4))
    assert draft.tokens[0, : draft.size[0]].tolist() == [8, 9]


@pytest.mark.parametrize("kind", [Ngram, DeviceNgram])
def test_ids_past_the_tokenizer_are_never_drafted(kind: type[Ngram] | type[DeviceNgram]) -> None:
    slots = RowState(1, 16, 1, torch.device("cpu"))
    drafter = kind(slots, Speculation("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=1), 50)
    slots.set(0, [1, 2, 50, 3, 1])
    drafter.admit(0, request([1, 2, 50, 3, 1]))
    draft = drafter.propose(Rows(torch.tensor([0]), torch.tensor([4]), 4))
    assert draft.tokens[0, : draft.size[0]].tolist() == [2]
