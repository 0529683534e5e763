"""Suffix decoding against its definition: counts recomputed by scanning all texts."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.drafters import Rows
from forerun.drafters.suffix import TEXT, Node, OwnTree, SharedTree, Suffix, speculate
from forerun.engine.state import RowState
from forerun.types import Request, SamplingParams


def next_tokens(texts: list[list[int]], stretch: list[int]) -> dict[int, tuple[int, int]]:
    """What followed the stretch: token -> how often, and when last (a number that grows with text and position)."""
    found: dict[int, tuple[int, int]] = {}
    n = len(stretch)
    for number, text in enumerate(texts):
        for start in range(len(text) - n):
            if text[start : start + n] == stretch:
                token = text[start + n]
                found[token] = (found.get(token, (0, 0))[0] + 1, number * 10**6 + start)
    return found


def occurs(texts: list[list[int]], stretch: list[int]) -> bool:
    n = len(stretch)
    return any(text[i : i + n] == stretch for text in texts for i in range(len(text) - n + 1))


def naive_walk(texts: list[list[int]], stretch: list[int], limit: int, min_prob: float) -> tuple[list[int], float]:
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(tokens) < limit:
        found = next_tokens(texts, stretch + tokens)
        if not found:
            break
        token = max(found, key=lambda t: found[t])
        prob *= found[token][0] / sum(count for count, _ in found.values())
        if prob < min_prob:
            break
        tokens.append(token)
        score += prob
    return tokens, score


def naive(
    own: list[int], shared: list[list[int]], depth: int, k: int, factor: float, min_prob: float
) -> tuple[list[int], int, float]:
    best: tuple[list[int], int, float] = ([], 0, 0.0)
    for length in range(min(len(own), depth - 1), 0, -1):
        stretch = own[len(own) - length :]
        for texts in ([own], shared):
            if occurs(texts, stretch):
                limit = min(k, int(factor * length + 1e-6), depth - length)
                tokens, score = naive_walk(texts, stretch, limit, min_prob)
                if score > best[2]:
                    best = (tokens, length, score)
    return best


def tree_size(root: Node) -> tuple[int, int]:
    """How many nodes and leaves are below root."""
    nodes = leaves = 0
    stack = [root]
    while stack:
        for child in stack.pop().children.values():
            if isinstance(child, int):
                leaves += 1
            else:
                nodes += 1
                stack.append(child)
    return nodes, leaves


def own_tree(text: list[int], depth: int) -> OwnTree:
    tree = OwnTree(depth)
    for token in text:
        tree.append(token)
    return tree


texts = st.integers(0, 3).flatmap(lambda top: st.lists(st.integers(0, top), max_size=30))


@settings(max_examples=300, deadline=None)
@given(
    own=texts, outputs=st.lists(texts, max_size=8), kept=st.integers(1, 4), depth=st.integers(2, 9), k=st.integers(1, 10),
    factor=st.sampled_from([0.5, 1.0, 2.0]), min_prob=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_draft_agrees_with_the_definition_after_every_eviction(
    own: list[int], outputs: list[list[int]], kept: int, depth: int, k: int, factor: float, min_prob: float
) -> None:
    tree = own_tree(own, depth)
    shared, held = SharedTree(depth, kept), deque[list[int]](maxlen=kept)
    for output in [[], *outputs]:
        shared.add(output)
        if output:
            held.append(output)
        assert speculate(tree, shared, k, factor, min_prob) == naive(own, list(held), depth, k, factor, min_prob)
    assert speculate(tree, None, k, factor, min_prob) == naive(own, [], depth, k, factor, min_prob)


@settings(max_examples=150, deadline=None)
@given(text=texts, depth=st.integers(2, 9), k=st.integers(1, 10))
def test_own_tree_grows_token_by_token(text: list[int], depth: int, k: int) -> None:
    tree = OwnTree(depth)
    for size, token in enumerate(text, 1):
        tree.append(token)
        assert speculate(tree, None, k, 1.0, 0.1) == naive(text[:size], [], depth, k, 1.0, 0.1)


@pytest.mark.parametrize("kind", ["copy", "period", "binary", "one token"])
def test_own_tree_on_long_repetitive_texts(kind: str) -> None:
    rng = np.random.default_rng(3)
    piece = rng.integers(0, 9, 40).tolist()
    text = {
        "copy": [*piece, 99, *piece, 98, *piece[7:], *piece[:30]],
        "period": [1, 2, 3, 1, 2] * 20,
        "binary": rng.integers(0, 2, 90).tolist(),
        "one token": [4] * 60,
    }[kind]
    tree = OwnTree(24)
    for size, token in enumerate(text, 1):
        tree.append(token)
        if size % 3 == 0:
            assert speculate(tree, None, 24, 1.0, 0.1) == naive(text[:size], [], 24, 24, 1.0, 0.1)
    nodes, leaves = tree_size(tree.root)
    assert nodes <= len(text) and leaves <= len(text)


def counts(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often every stretch of up to depth tokens occurs."""
    return Counter(tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, min(i + depth, len(t)) + 1))


def tree_counts(tree: SharedTree) -> Counter[tuple[int, ...]]:
    """The same, read from the tree; every token along an edge is as frequent as the edge's first."""
    found: Counter[tuple[int, ...]] = Counter()

    def visit(node: Node, stretch: tuple[int, ...]) -> None:
        assert node.follow == sum(1 if isinstance(c, int) else c.count for c in node.children.values())
        for token, child in node.children.items():
            at = child if isinstance(child, int) else child.at
            length = tree.depth - len(stretch) if isinstance(child, int) else child.length
            begin = at & (1 << TEXT) - 1
            edge = tree.texts[at >> TEXT][begin : begin + length].tolist()
            assert edge[0] == token
            for n in range(1, len(edge) + 1):
                found[stretch + tuple(edge[:n])] += 1 if isinstance(child, int) else child.count
            if not isinstance(child, int):
                assert len(edge) == length and child.count >= 2
                assert len(child.children) != 1 or child.follow < child.count, "a node that should have been merged"
                visit(child, stretch + tuple(edge))

    visit(tree.root, ())
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, max_size=12), st.integers(1, 4), st.integers(2, 9))
def test_counts_are_exact_after_every_eviction(outputs: list[list[int]], kept: int, depth: int) -> None:
    tree, held = SharedTree(depth, kept), deque[list[int]](maxlen=kept)
    for output in outputs:
        tree.add(output)
        if output:
            held.append(output)
        assert tree_counts(tree) == counts(list(held), depth)


def test_a_wrong_count_would_be_noticed() -> None:
    tree = SharedTree(4, 5)
    tree.add([1, 2, 1, 2, 3])
    child = tree.root.children[1]
    assert isinstance(child, Node)
    child.count += 1
    with pytest.raises(AssertionError):
        assert tree_counts(tree) == counts([[1, 2, 1, 2, 3]], 4)


def test_memory_stays_bounded_and_eviction_frees_every_node() -> None:
    """A tree that has seen thousands of texts is as large as one built from the texts it still holds."""
    rng = np.random.default_rng(0)
    tree, held = SharedTree(8, 20), deque[list[int]](maxlen=20)
    largest = 0
    for _ in range(2000):
        output = rng.integers(0, 30, int(rng.integers(1, 16))).tolist()
        tree.add(output)
        held.append(output)
        largest = max(largest, sum(map(len, tree.texts.values())))
    fresh = SharedTree(8, 20)
    for output in held:
        fresh.add(output)
    assert len(tree.texts) == 20 and largest <= 20 * 15
    assert tree_size(tree.root) == tree_size(fresh.root)
    nodes, leaves = tree_size(tree.root)
    assert nodes + leaves <= 2 * sum(map(len, held))


def test_repeated_outputs_do_not_multiply_nodes() -> None:
    rng = np.random.default_rng(1)
    output = rng.permutation(1000)[:200].tolist()
    tree = SharedTree(24, 50)
    for _ in range(60):
        tree.add(output)
    nodes, leaves = tree_size(tree.root)
    assert (nodes, leaves) == (200, 0)
    assert tree_counts(tree)[tuple(output[:24])] == 50


def test_full_context_match_is_tried() -> None:
    shared = SharedTree(24, 10)
    shared.add([5, 6, 7, 8, 9])
    guess = speculate(own_tree([5, 6], 24), shared, 8, 1.0, 0.1)
    assert guess.tokens == [7, 8] and guess.match == 2 and guess.score == 2.0


def test_longer_match_wins_a_tie_and_own_text_wins_over_others() -> None:
    shared = SharedTree(8, 10)
    shared.add([1, 2, 7])
    guess = speculate(own_tree([9, 2, 5, 1, 2], 8), shared, 1, 1.0, 0.1)
    assert (guess.tokens, guess.match) == ([7], 2)  # 2 -> 5 in its own text scores 1 as well
    guess = speculate(own_tree([1, 2, 5, 1, 2], 8), shared, 1, 1.0, 0.1)
    assert (guess.tokens, guess.match) == ([5], 2)


def test_most_frequent_continuation_and_the_floor() -> None:
    text = [1, 2, 1, 3, 1, 3, 1]
    assert speculate(own_tree(text, 8), None, 4, 1.0, 0.1).tokens == [3, 1]
    assert speculate(own_tree([1, 2, 1, 3, 1, 4, 1], 8), None, 4, 1.0, 0.34).tokens == []
    assert speculate(own_tree([1, 2, 1, 3, 1, 4, 1], 8), None, 4, 1.0, 0.33).tokens == [4]


def test_equally_frequent_continuations_fall_to_the_latest() -> None:
    text = [1, 2, 1, 2, 1, 3, 1, 3, 1, 3, 1, 2, 9, 1]
    assert speculate(own_tree(text, 8), None, 4, 1.0, 0.1).tokens == [2]
    assert speculate(own_tree([1, 3, *text[2:10], 9, 1], 8), None, 4, 1.0, 0.1).tokens == [3]
    text = [1, 2, 7, 20, 1, 2, 8, 21, 1, 2, 8, 22, 1, 2, 7, 23, 1, 3, 24, 1, 2]  # 1 2 is parted by 1 3
    assert speculate(own_tree(text, 8), None, 4, 1.0, 0.1).tokens == [7, 23]
    shared = SharedTree(8, 3)
    for output in ([1, 2], [1, 2], [1, 3]):
        shared.add(output)
    assert speculate(own_tree([1], 8), shared, 1, 1.0, 0.1).tokens == [2]
    shared.add([5, 6])  # 2 now is as frequent as 3
    assert speculate(own_tree([1], 8), shared, 1, 1.0, 0.1).tokens == [3]


def drafter(slots: RowState, cached: int) -> Suffix:
    chosen = Speculation("suffix", 8, suffix_decoding_max_tree_depth=6, suffix_decoding_max_cached_requests=cached)
    return Suffix(slots, chosen, 100)


def begin(slots: RowState, suffix: Suffix, slot: int, prompt: list[int], output: list[int]) -> None:
    slots.set(slot, prompt + output)
    suffix.admit(slot, Request("r", tuple(prompt), SamplingParams(), 100, 0))


def draft_of(suffix: Suffix, slot: int, k: int = 8) -> list[int]:
    draft = suffix.propose(Rows(torch.tensor([slot]), torch.tensor([k]), 8))
    assert draft.tokens.shape == (1, 8) and draft.probs is None
    return draft.tokens[0, : int(draft.size[0])].tolist()


def test_outputs_are_shared_when_their_request_ends_and_prompts_never() -> None:
    slots = RowState(2, 64, 1, torch.device("cpu"))
    suffix = drafter(slots, 10)
    begin(slots, suffix, 0, [50, 51, 52], [10, 11, 12, 13])
    begin(slots, suffix, 1, [10, 11], [])
    assert draft_of(suffix, 1) == []  # it still runs
    suffix.release(0, False)
    assert draft_of(suffix, 1) == []  # it was only preempted
    begin(slots, suffix, 0, [50, 51, 52], [10, 11, 12, 13])
    suffix.release(0, True)
    assert draft_of(suffix, 1) == [12, 13]
    assert draft_of(suffix, 1, 1) == [12] and draft_of(suffix, 1, 0) == []
    begin(slots, suffix, 0, [50, 51], [])
    assert draft_of(suffix, 0) == []


def test_without_a_shared_tree_nothing_crosses_requests() -> None:
    slots = RowState(2, 64, 1, torch.device("cpu"))
    suffix = drafter(slots, 0)
    begin(slots, suffix, 0, [50], [10, 11, 12, 13])
    suffix.release(0, True)
    begin(slots, suffix, 1, [10, 11], [])
    assert draft_of(suffix, 1) == [] and suffix.shared.tree(None) is None


def test_drafter_follows_the_slots() -> None:
    rng = np.random.default_rng(2)
    slots = RowState(1, 64, 1, torch.device("cpu"))
    suffix = drafter(slots, 0)
    text = rng.integers(0, 3, 12).tolist()
    begin(slots, suffix, 0, text, [])
    for _ in range(10):
        assert draft_of(suffix, 0) == naive(text, [], 6, 8, 1.0, 0.1)[0]
        new = torch.from_numpy(rng.integers(0, 3, (1, 5)))
        count = torch.from_numpy(rng.integers(1, 5, 1))
        slots.commit(torch.tensor([0]), new, count)
        text += new[0, : count[0]].tolist()
