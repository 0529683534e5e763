"""Suffix decoding [Oliaro et al. 2411.04975]: propose what most often followed the last few tokens, in this request's
prompt and output and in earlier requests' outputs.

Two trees of depth D hold every stretch of up to D tokens with the number of times it occurred:

    OwnTree      one growing text (prompt + output); a token is added in O(D)
    SharedTree   whole texts (outputs of finished requests), first in, first out; a removed text leaves nothing behind

Both are path-compressed, with at most one node for each token held, and in both a stretch that occurred once is no node
but a leaf: the position in the text from where the text itself goes on.
For every suffix of the context that occurs (lengths 1 .. D-1, the whole context included) the walk goes on from its
place along the most frequent child, of equals the one seen last, while the product of relative frequencies (of those
occurrences that went on) stays at or above min_prob; at most factor * length and k tokens. The walk with the largest
sum of those products wins; of equals the longer match, then the request's own tree.

Privacy: the shared tree carries text from one request to others. It cannot change what they say (drafts are verified),
but how fast a request goes can tell its sender that somebody's output went the same way before.
suffix_decoding_max_cached_requests = 0 turns the shared tree off. A request's output enters it when the request ends;
prompts never do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forerun.config import Speculation
from forerun.drafters import Needs, Rows, RowState, Stateless
from forerun.drafters.host import pack
from forerun.types import Draft, Request

TEXT = 32  # a position is (number of the text << TEXT) + index in it; later texts have larger numbers
INDEX = (1 << TEXT) - 1


class Node:
    """A stretch that occurred `count` >= 2 times, of which `follow` went on into a child. The last `length` tokens of the
    stretch are the edge that leads here; `at` is where that edge begins in one of the stretch's occurrences."""

    __slots__ = ("at", "best", "children", "count", "follow", "length")

    def __init__(self, at: int, length: int, count: int) -> None:
        self.at, self.length, self.count = at, length, count
        self.follow = 0
        self.best: int | None = None  # first token of the most frequent child, None: not known
        self.children: dict[int, Node | int] = {}  # first token -> node, or leaf: where its edge begins

    def favour(self, token: int, count: int) -> None:
        """The child of this token has just occurred, for the count-th time."""
        if self.best is not None and self.best != token and count >= count_of(self.children[self.best]):
            self.best = token

    def favourite(self) -> int:
        """The token of the most frequent child, of equals the one that occurred last. There is a child."""
        if self.best is None:
            self.best = max(self.children, key=lambda token: rank(self.children[token]))
        return self.best


class Place(NamedTuple):
    """Where a match ends: `past` tokens into the edge of a node or of a leaf."""

    edge: Node | int
    past: int


def count_of(child: Node | int) -> int:
    return 1 if isinstance(child, int) else child.count


def rank(child: Node | int) -> tuple[int, int]:
    return (1, child) if isinstance(child, int) else (child.count, child.at)


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
    """The stretches of one text that grows at its end. A node's `at` is in the stretch's first occurrence, which is the
    one that has come furthest, so that an edge may reach past what is known yet; its length is then up to the depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.text: array[int] = array("i")
        self.texts = {0: self.text}
        self.root = Node(0, 0, 0)
        self.active: list[tuple[Node, int]] = [(self.root, 0)]  # where the text's suffixes of length 0, 1, .. end (node,
        # tokens into its edge), as far as they occurred before; a suffix counts in a node as soon as it enters its edge

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
            if child is None:  # and every longer suffix is new too
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
        """End node's edge after past tokens, where the suffix of this length leaves it, and put the rest into a child.
        Shorter suffixes (active, a token further on already) are not past that place, longer ones (before) are."""
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
        """Where the suffixes of length 1, 2, .. end that occurred before; those of depth tokens have nothing behind."""
        return [Place(node, past) for node, past in self.active[1 : self.depth]]


class SharedTree:
    """The stretches of at most max_texts whole texts; adding one more removes the oldest. A node's `at` is in the
    stretch's latest occurrence."""

    def __init__(self, depth: int, max_texts: int) -> None:
        self.depth, self.max_texts = depth, max_texts
        self.texts: dict[int, array[int]] = {}  # oldest first
        self.root = Node(0, 0, 0)
        self.added = 0

    def add(self, text: Sequence[int]) -> None:
        if not len(text) or not self.max_texts:
            return
        if len(self.texts) == self.max_texts:
            self._remove_oldest()
        self.texts[self.added] = array("i", text)
        for start in range(len(text)):
            self._insert(self.added, start)
        self.added += 1

    def matches(self, context: Sequence[int]) -> list[Place]:
        """Where the suffixes of context of length 1, 2, .. end that occur, up to depth - 1."""
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
        """Count the stretch of depth tokens from start on, or as many as there are."""
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
        """A node `same` tokens into the edge of child, which is room tokens long. at: the occurrence now being counted."""
        upper = Node(at, same, count)
        if same < room:
            rest = child + same if isinstance(child, int) else child.at + same
            if not isinstance(child, int):
                child.at, child.length = rest, room - same
            upper.follow = count
            upper.children[self.texts[rest >> TEXT][rest & INDEX]] = rest if isinstance(child, int) else child
        return upper

    def _remove_oldest(self) -> None:
        """As occurrences go in the order in which they came, the latest of a node's is always one still held."""
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


class Guess(NamedTuple):
    """A draft, the length of the match that it continues, and its score: the sum of its path probabilities."""

    tokens: list[int]
    match: int
    score: float


def speculate(own: OwnTree, shared: SharedTree | None, k: int, factor: float, min_prob: float) -> Guess:
    """The best draft of at most k tokens behind own's text; see above for what is best."""
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
    """Suffix decoding for slots on the CPU. Indexes lazily, in propose."""

    needs = Needs()

    def __init__(self, state: RowState, speculation: Speculation, vocab: int) -> None:
        self.state, self.vocab = state, vocab
        self.depth = speculation.suffix_decoding_max_tree_depth
        self.factor = speculation.suffix_decoding_max_spec_factor
        self.min_prob = speculation.suffix_decoding_min_token_prob
        self.cached = speculation.suffix_decoding_max_cached_requests
        self.shared = SharedTree(self.depth, self.cached) if self.cached else None
        self.own: dict[int, OwnTree] = {}
        self.prompt_size: dict[int, int] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.own[slot] = OwnTree(self.depth)
        self.prompt_size[slot] = len(request.prompt_ids)

    def release(self, slot: int, finished: bool) -> None:
        if finished and self.shared is not None:
            self.shared.add(self.state.history(slot)[self.prompt_size[slot] :].tolist())
        del self.own[slot], self.prompt_size[slot]

    def restart(self) -> None:
        """The shared tree may be half written: it begins anew."""
        self.shared = SharedTree(self.depth, self.cached) if self.cached else None
        self.own, self.prompt_size = {}, {}

    def propose(self, rows: Rows) -> Draft:
        return pack(list(self._drafts(rows)), rows.width, self.vocab)

    def _drafts(self, rows: Rows) -> Iterator[list[int]]:
        for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True):
            if not k:
                yield []
                continue
            own = self.own[slot]
            for token in self.state.history(slot)[len(own.text) :].tolist():
                own.append(token)
            yield speculate(own, self.shared, k, self.factor, self.min_prob).tokens
