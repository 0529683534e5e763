"""Suffix decoding [Oliaro et al. 2411.04975]: draft what most often followed the last few tokens, in this request's prompt
and output and in the outputs of earlier requests.

Two suffix trees of depth D hold every stretch of up to D tokens and how often it occurred:

    OwnTree      one growing text (prompt + output); adding a token takes O(D)
    SharedTree   whole texts (outputs of finished requests), first in, first out; removing a text removes its counts

Both are path-compressed and have at most one node for each token held. A stretch that occurred once has no node but a leaf: the
position in the text at which it goes on.

For every suffix of the context that occurs in a tree (1 .. D-1 tokens) a walk starts where the suffix ends. It follows the most
frequent child, of equally frequent ones the latest, while the path probability stays at or above min_prob: the product
of the relative frequencies among the occurrences that went on. It takes at most factor * length of the suffix, and k, tokens.
The draft is the walk with the largest sum of path probabilities; of equal ones that of the longer suffix, then of the own tree.

The two trees are built in different ways, so they share the walk and not the insertion: the own tree counts suffixes whose
continuation is not known yet; the shared one takes a whole text and compares slices, and can remove it again.

Privacy: the shared tree carries text from one request to others. It cannot change their outputs (drafts are verified), but the
speed of a request can show its sender that an earlier output went the same way. So there is a shared tree for each cache salt:
requests with other salts, or without one, do not see it. suffix_decoding_max_cached_requests = 0 turns the shared trees off. A
request's output enters its tree when the request ends; prompts never do.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from forerun.config import Speculation
from forerun.drafters import Needs, Rows, RowState, Stateless
from forerun.drafters.host import pack
from forerun.types import Draft, Request

TEXT = 32  # a position is (number of the text << TEXT) + index in it; later texts have larger numbers
INDEX = (1 << TEXT) - 1


class Node:
    """A stretch that occurred `count` >= 2 times; `follow` of these went on into a child. The edge that leads here is the last
    `length` tokens of the stretch; `at` is where that edge begins in one of its occurrences."""

    __slots__ = ("at", "best", "children", "count", "follow", "length")

    def __init__(self, at: int, length: int, count: int) -> None:
        self.at, self.length, self.count = at, length, count
        self.follow = 0
        self.best: int | None = None  # the first token of the most frequent child, None: not known
        self.children: dict[int, Node | int] = {}  # first token -> node, or leaf: where its edge begins

    def favour(self, token: int, count: int) -> None:
        """The child with this first token has just occurred for the count-th time."""
        if self.best is not None and self.best != token and count >= count_of(self.children[self.best]):
            self.best = token

    def favourite(self) -> int:
        """The first token of the most frequent child, of equally frequent ones the latest. There must be a child."""
        if self.best is None:
            self.best = max(self.children, key=lambda token: rank(self.children[token]))
        return self.best


class Place(NamedTuple):
    """Where a match ends: `past` tokens into the edge of a node or leaf."""

    edge: Node | int
    past: int


def count_of(child: Node | int) -> int:
    return 1 if isinstance(child, int) else child.count


def rank(child: Node | int) -> tuple[int, int]:
    return (1, child) if isinstance(child, int) else (child.count, child.at)


def walk(texts: dict[int, array[int]], place: Place, limit: int, min_prob: float) -> tuple[list[int], float]:
    """Up to limit tokens behind place along the most frequent children, and the sum of their path probabilities."""
    edge, past = place
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(tokens) < limit:
        if isinstance(edge, int):
            at, room = edge + past, limit
        else:
            at, room = edge.at + past, edge.length - past
        begin = at & INDEX
        piece = texts[at >> TEXT][begin : begin + min(room, limit - len(tokens))]
        tokens.extend(piece)
        for _ in piece:
            score += prob
        if isinstance(edge, int) or not edge.children:
            break
        child = edge.children[edge.favourite()]
        prob *= count_of(child) / edge.follow
        if prob < min_prob:
            break
        edge, past = child, 0
    return tokens, score


class OwnTree:
    """The stretches of one text that grows at its end. A node's `at` is in the first occurrence of the stretch, behind which
    most text is known. An edge may reach past the end of the text; its length is then what is left to the depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.text: array[int] = array("i")
        self.texts = {0: self.text}
        self.root = Node(0, 0, 0)
        # where the text's suffixes of 0, 1, .. tokens end (node, tokens into its edge), up to the longest one that occurred
        # before; a suffix is counted in a node as soon as it enters the node's edge
        self.active: list[tuple[Node, int]] = [(self.root, 0)]

    def append(self, token: int) -> None:
        at = len(self.text)
        self.text.append(token)
        before, active = self.active[: self.depth], [(self.root, 0)]
        for length, (node, past) in enumerate(before):
            if past < node.length:
                if self.text[node.at + past] == token:
                    active.append((node, past + 1))
                else:
                    self._split(node, past, active, before, length)
                    node.children[token] = at
                    node.follow += 1
                    node.favour(token, 1)
                continue
            node.follow += 1
            child = node.children.get(token)
            if child is None:  # every longer suffix is new too
                node.children[token] = at
                node.favour(token, 1)
                continue
            if isinstance(child, int):
                child = node.children[token] = Node(child, self.depth - length, 1)
            child.count += 1
            node.favour(token, child.count)
            active.append((child, 1))
        self.active = active

    def _split(
        self, node: Node, past: int, active: list[tuple[Node, int]], before: list[tuple[Node, int]], length: int
    ) -> None:
        """End the node's edge after `past` tokens, where the suffix of this length leaves it, and put the rest into a child.
        Shorter suffixes (in active, with the new token) have not passed that place, longer ones (in before) have."""
        count = node.count - 1 - sum(edge is node for edge, _ in active)
        rest: Node | int = node.at + past
        first = self.text[node.at + past]
        if count > 1:
            rest = Node(node.at + past, node.length - past, count)
            rest.follow, rest.best, rest.children = node.follow, node.best, node.children
            for longer in range(length + 1, len(before)):
                if before[longer][0] is node:
                    before[longer] = (rest, before[longer][1] - past)
        node.length, node.follow, node.best, node.children = past, count, first, {first: rest}

    def matches(self) -> list[Place]:
        """Where the suffixes of 1, 2, .. tokens end that occurred before; nothing is known behind more than depth - 1."""
        return [Place(node, past) for node, past in self.active[1 : self.depth]]


class SharedTree:
    """The stretches of at most max_texts whole texts; adding one more removes the oldest. A node's `at` is in the latest
    occurrence of the stretch, which is removed last."""

    def __init__(self, depth: int, max_texts: int) -> None:
        self.depth, self.max_texts = depth, max_texts
        self.texts: dict[int, array[int]] = {}  # oldest first
        self.root = Node(0, 0, 0)
        self.added = 0

    def add(self, text: Sequence[int]) -> None:
        if not len(text) or not self.max_texts:
            return
        if len(self.texts) == self.max_texts:
            self.remove_oldest()
        self.texts[self.added] = array("i", text)
        for start in range(len(text)):
            self._insert(self.added, start)
        self.added += 1

    def matches(self, context: Sequence[int]) -> list[Place]:
        """Where the context's suffixes of 1, 2, .. tokens end that occur, up to depth - 1."""
        places: list[Place] = []
        for length in range(1, min(len(context), self.depth - 1) + 1):
            place = self._find(context[len(context) - length :])
            if place is None:  # then no longer one occurs
                break
            places.append(place)
        return places

    def _find(self, stretch: Sequence[int]) -> Place | None:
        edge: Node | int = self.root
        past = done = 0
        while done < len(stretch):
            if isinstance(edge, int):
                return None  # the leaf's text has ended
            child = edge.children.get(stretch[done])
            if child is None:
                return None
            at = child if isinstance(child, int) else child.at
            room = len(stretch) - done if isinstance(child, int) else child.length
            begin = at & INDEX
            past = min(room, len(stretch) - done)
            if self.texts[at >> TEXT][begin : begin + past] != stretch[done : done + past]:
                return None
            done += past
            edge = child
        return Place(edge, past)

    def _agree(self, at: int, room: int, other: int, other_room: int) -> int:
        """How many tokens from the two positions on are the same, at most the smaller room."""
        most = min(room, other_room)
        i, j = at & INDEX, other & INDEX
        a, b = self.texts[at >> TEXT][i : i + most], self.texts[other >> TEXT][j : j + most]
        if a == b:
            return most
        return next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)

    def _insert(self, number: int, start: int) -> None:
        """Count the stretch of depth tokens from start on, or of fewer at the text's end."""
        text = self.texts[number]
        at, end = (number << TEXT) + start, (number << TEXT) + min(start + self.depth, len(text))
        node, begin = self.root, at
        while at < end:
            node.follow += 1
            token = text[at & INDEX]
            child = node.children.get(token)
            if child is None:
                node.children[token] = at
                node.favour(token, 1)
                return
            if isinstance(child, int):
                other, count = child, 1
                room = min(self.depth - (at - begin), len(self.texts[child >> TEXT]) - (child & INDEX))
            else:
                other, count, room = child.at, child.count, child.length
            same = self._agree(at, end - at, other, room)
            if isinstance(child, int) or same < room:
                child = self._split(child, at, same, room, count)
                node.children[token] = child
            else:
                child.at = at
            child.count += 1
            node.favour(token, child.count)
            at += same
            node = child

    def _split(self, child: Node | int, at: int, same: int, room: int, count: int) -> Node:
        """A new node `same` tokens into the child's edge, which has room tokens. at: the occurrence that is being counted."""
        upper = Node(at, same, count)
        if same < room:
            rest = child + same if isinstance(child, int) else child.at + same
            if not isinstance(child, int):
                child.at, child.length = rest, room - same
            upper.follow = count
            upper.children[self.texts[rest >> TEXT][rest & INDEX]] = rest if isinstance(child, int) else child
        return upper

    def remove_oldest(self) -> None:
        """Occurrences are removed in the order in which they were added, so a node's latest one is still there."""
        number = next(iter(self.texts))
        for start in range(len(self.texts[number])):
            self._discount(number, start)
        del self.texts[number]

    def _discount(self, number: int, start: int) -> None:
        text = self.texts[number]
        at, end = start, min(start + self.depth, len(text))
        parent, node, key = self.root, self.root, 0
        while at < end:
            token = text[at]
            node.follow -= 1
            if node.best == token:
                node.best = None
            child = node.children[token]
            if isinstance(child, int):
                del node.children[token]
                break
            child.count -= 1
            if child.count == 1:
                node.children[token] = child.at
                return
            parent, node, key = node, child, token
            at += child.length
        if node is not self.root and node.follow == node.count and len(node.children) == 1:
            (child,) = node.children.values()
            assert not isinstance(child, int)  # it occurred as often as node: at least twice
            child.at -= node.length
            child.length += node.length
            parent.children[key] = child


class SharedTrees:
    """A shared tree for each cache salt. Together they hold at most max_texts texts; adding one more removes the oldest."""

    def __init__(self, depth: int, max_texts: int) -> None:
        self.depth, self.max_texts = depth, max_texts
        self._trees: dict[str | None, SharedTree] = {}
        self._salts: deque[str | None] = deque()  # of all texts, oldest first

    def tree(self, salt: str | None) -> SharedTree | None:
        """The tree of the texts with this salt; None if there are none."""
        return self._trees.get(salt)

    def add(self, text: Sequence[int], salt: str | None) -> None:
        if not len(text) or not self.max_texts:
            return
        if len(self._salts) == self.max_texts:
            oldest = self._salts.popleft()
            tree = self._trees[oldest]
            tree.remove_oldest()
            if not tree.texts:
                del self._trees[oldest]
        if salt not in self._trees:
            self._trees[salt] = SharedTree(self.depth, self.max_texts)
        self._trees[salt].add(text)
        self._salts.append(salt)


class Guess(NamedTuple):
    """A draft, the length of the match that it continues, and its score: the sum of its path probabilities."""

    tokens: list[int]
    match: int
    score: float


def speculate(own: OwnTree, shared: SharedTree | None, k: int, factor: float, min_prob: float) -> Guess:
    """The best draft of at most k tokens behind the own text, as defined above."""
    depth = own.depth
    sources = [(own.texts, own.matches())]
    if shared is not None:
        sources.append((shared.texts, shared.matches(own.text[1 - depth :])))
    best = Guess([], 0, 0.0)
    for length in range(max(len(places) for _, places in sources), 0, -1):
        limit = min(k, int(factor * length + 1e-6))
        if limit <= best.score:  # no probability exceeds 1, and shorter matches may draft no more than this
            break
        room = min(limit, depth - length)
        for texts, places in sources:
            if length <= len(places) and room > best.score:
                tokens, score = walk(texts, places[length - 1], room, min_prob)
                if score > best.score:
                    best = Guess(tokens, length, score)
    return best


class Suffix(Stateless):
    """Suffix decoding on the host. It adds what is new to a tree when a draft is asked for."""

    needs = Needs()

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        self.state, self.vocab = state, vocab
        self.depth = speculation.suffix_decoding_max_tree_depth
        self.factor = speculation.suffix_decoding_max_spec_factor
        self.min_prob = speculation.suffix_decoding_min_token_prob
        self.cached = speculation.suffix_decoding_max_cached_requests
        self.shared = SharedTrees(self.depth, self.cached)
        self.own: dict[int, OwnTree] = {}
        self.requests: dict[int, Request] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.own[slot] = OwnTree(self.depth)
        self.requests[slot] = request

    def release(self, slot: int, finished: bool) -> None:
        request = self.requests.pop(slot)
        del self.own[slot]
        if finished and self.cached:
            output = self.state.history(slot)[len(request.prompt_ids) :]
            self.shared.add(output.tolist(), request.params.cache_salt)

    def restart(self) -> None:
        """The shared trees may be half written, so new ones take their place."""
        self.shared = SharedTrees(self.depth, self.cached)
        self.own, self.requests = {}, {}

    def propose(self, rows: Rows) -> Draft:
        drafts = [self._draft(slot, k) if k else [] for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True)]
        return pack(drafts, rows.width, self.vocab)

    def _draft(self, slot: int, k: int) -> list[int]:
        """At most k tokens behind the slot's committed ones."""
        own, shared = self.own[slot], self.shared.tree(self.requests[slot].params.cache_salt)
        for token in self.state.history(slot)[len(own.text) :].tolist():
            own.append(token)
        return speculate(own, shared, k, self.factor, self.min_prob).tokens
