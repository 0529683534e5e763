"""A drafter with a model (a head, or a smaller model), and beside it an n-gram look-up if one is wanted. For each row and step
the one that is expected to bring more tokens drafts, by what became of such drafts lately (calibration.py). The confidence that
goes to the policy is measured too.

With the exact layout the look-up comes first, and a pass of the model is made only if it pays: its expected gain in tokens is
worth more than its time. So the model drafts nothing where the look-up is sure, stops where its tokens agree with a look-up
that is sure enough, and stops where its next token would hardly be accepted. With the padded layout a launch makes all passes
or none, as the policy decided when it was launched.

Drawn drafts are not weighed by what was learned: a seed repeats its tokens, whatever other requests did. There the look-up is
taken by a fixed rule, which looks at the match and at the model's distribution of the first token, and at no drawn token. So
given the choice, each draft is drawn from the probabilities that come with it; those of a look-up's tokens are 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.device import send
from forerun.drafters import Drafter, Observed, Rows, RowState, Worth
from forerun.drafters.calibration import LEAST_SURVIVAL, Calibration, Candidates
from forerun.drafters.calibration_host import HostCalibration, Row
from forerun.drafters.host import pack
from forerun.drafters.ngram import NgramIndex, match
from forerun.types import Draft, Request

LOOK_UP = "ngram"  # the name of the look-up among the drafters
SURE = 4  # tokens of a match from which on the look-up is taken before drawn drafts
LIKELY, UNLIKELY = 0.5, 0.05  # the first token's probability that is enough for any match, and that rules the look-up out


class LookUp(NamedTuple):
    """As Needs.look_up."""

    min_n: int
    max_n: int
    vocab: int


class Found(NamedTuple):
    """What a look-up found: tokens [B,K] int64, size [B] int64, match [B] int64, the length of the match."""

    tokens: Tensor
    size: Tensor
    match: Tensor


class Allowed(NamedTuple):
    """Whether a request lets the model and the look-up draft."""

    model: bool = True
    look_up: bool = True

    @classmethod
    def of(cls, request: Request) -> Allowed:
        """By the names of the drafters that it chose: ngram is the look-up, any other one the model."""
        names = request.params.drafters
        return cls(any(name != LOOK_UP for name in names), LOOK_UP in names) if names else cls()


class Tables(Protocol):
    """Calibration or HostCalibration."""

    def admit(self, slot: int) -> None: ...

    def restart(self) -> None: ...


class Measured:
    """What both layouts share."""

    def __init__(self, model: Drafter, state: RowState, look_up: LookUp | None, drawn: bool, tables: Tables) -> None:
        self.needs = model.needs._replace(skips=not drawn, cheap=look_up is not None and not drawn, choices=look_up is not None)
        self._model, self._state, self._look_up, self._drawn, self._tables = model, state, look_up, drawn, tables

    def admit(self, slot: int, request: Request) -> None:
        self._model.admit(slot, request)
        self._tables.admit(slot)
        if self._look_up is not None:
            self._allow(slot, Allowed.of(request))

    def release(self, slot: int, finished: bool) -> None:
        self._model.release(slot, finished)

    def _allow(self, slot: int, allowed: Allowed) -> None:
        """Note what the slot's request lets draft."""
        raise NotImplementedError

    def restart(self) -> None:
        self._model.restart()
        self._tables.restart()

    def observe(self, seen: Observed) -> None:
        if not self._drawn:
            self._learn(seen)
        if seen.states:
            self._model.observe(seen)

    def propose(self, rows: Rows) -> Draft:
        return self._by_rule(self._own(rows), self._found(rows)) if self._drawn else self._weighed(rows)

    def _learn(self, seen: Observed) -> None:
        raise NotImplementedError

    def _weighed(self, rows: Rows) -> Draft:
        """The better of the candidates of each row."""
        raise NotImplementedError

    def _own(self, rows: Rows) -> Draft:
        """The model's drafts, nothing for rows whose requests do not let it draft."""
        draft, allowed = self._model.propose(rows), self._allowed_of(rows)
        if allowed is None:
            return draft
        sure = None if draft.confidence is None else draft.confidence.masked_fill(~allowed[:, :1], 0.0)
        return draft._replace(size=torch.where(allowed[:, 0], draft.size, 0), confidence=sure)

    def _found(self, rows: Rows) -> Found:
        """What the look-up finds, nothing for rows whose requests do not let it draft."""
        found, allowed = self._find(rows), self._allowed_of(rows)
        if allowed is None:
            return found
        return Found(found.tokens, *(torch.where(allowed[:, 1], part, 0) for part in (found.size, found.match)))

    def _allowed_of(self, rows: Rows) -> Tensor | None:
        """Allowed of these rows, [B,2] bool; None: all may draft."""
        raise NotImplementedError

    def _find(self, rows: Rows) -> Found:
        """What the look-up finds for these rows, K wide."""
        raise NotImplementedError

    def _by_rule(self, draft: Draft, found: Found) -> Draft:
        """Drawn drafts: the look-up's tokens with probability 1, or the model's."""
        if self._look_up is None or draft.probs is None or not draft.probs.shape[1]:
            return draft._replace(confidence=None)
        width = draft.probs.shape[1]
        tokens, size = found.tokens[:, :width], found.size.clamp(max=width)
        likely = draft.probs[:, 0].gather(1, tokens[:, :1])[:, 0]
        taken = (size > 0) & (likely >= torch.where(found.match >= SURE, UNLIKELY, LIKELY))
        sure = F.one_hot(tokens, draft.probs.shape[2]).to(draft.probs.dtype)
        return Draft(
            torch.where(taken[:, None], tokens, draft.tokens), torch.where(taken, size, draft.size),
            torch.where(taken[:, None, None], sure, draft.probs),
        )  # fmt: skip


class DeviceMeasured(Measured):
    """With the padded layout, on tensors. fused_measured.py has the fast form for CUDA."""

    def __init__(
        self, model: Drafter, state: RowState, look_up: LookUp | None, drawn: bool, calibration: Calibration | None = None
    ) -> None:
        self.calibration = calibration or Calibration(state)
        super().__init__(model, state, look_up, drawn, self.calibration)
        slots, device = len(state.length), state.length.device
        self._kept = [Allowed()] * slots
        self._allowed = torch.ones(slots, len(Allowed()), dtype=torch.bool, device=device)  # the same as _kept

    def _allow(self, slot: int, allowed: Allowed) -> None:
        if self._kept[slot] != allowed:
            self._kept[slot] = allowed
            self._allowed[slot] = send(np.array(allowed), self._allowed.device)

    def _allowed_of(self, rows: Rows) -> Tensor | None:
        return self._allowed[rows.slot] if rows.choosing and self._look_up is not None else None

    def _learn(self, seen: Observed) -> None:
        self.calibration.learn(seen.slot[: len(seen.committed)], seen.committed)

    def _weighed(self, rows: Rows) -> Draft:
        found = self._found(rows)
        if rows.passes:
            draft = self._own(rows)
        else:
            draft = Draft(found.tokens, torch.zeros_like(rows.k), None, torch.zeros(found.tokens.shape, device=rows.k.device))
        assert draft.confidence is not None
        tokens, survival = draft.tokens, draft.confidence
        if narrow := found.tokens.shape[1] - tokens.shape[1]:
            tokens, survival = F.pad(tokens, (0, narrow)), F.pad(survival, (0, narrow))
        chosen = self.calibration.weigh(rows.slot, Candidates(tokens, draft.size, survival, *found))
        return Draft(chosen.tokens, chosen.size, None, chosen.survival, chosen.found)

    def _find(self, rows: Rows) -> Found:
        width, given = self._state.draft.shape[1], self._look_up
        if given is None or not width:
            return Found(rows.slot.new_zeros(len(rows.slot), width), *rows.slot.new_zeros(2, len(rows.slot)))
        tokens, size, length = match(self._state.tokens[rows.slot], self._state.length[rows.slot], *given[:2], width)
        known = (tokens < given.vocab).cumprod(1).sum(1)
        return Found(tokens, torch.minimum(torch.minimum(size, rows.k), known), length)


class HostMeasured(Measured):
    """With the exact layout, on the host."""

    def __init__(self, model: Drafter, state: RowState, look_up: LookUp | None, drawn: bool) -> None:
        self.calibration = HostCalibration()
        super().__init__(model, state, look_up, drawn, self.calibration)
        self._index: dict[int, NgramIndex] = {}
        self._allowed: dict[int, Allowed] = {}

    def _allow(self, slot: int, allowed: Allowed) -> None:
        self._allowed[slot] = allowed

    def _allowed_of(self, rows: Rows) -> Tensor | None:
        allowed = [self._allowed.get(slot, Allowed()) for slot in rows.slot.tolist()]
        return None if all(map(all, allowed)) else torch.tensor(allowed).view(-1, len(Allowed()))

    def admit(self, slot: int, request: Request) -> None:
        super().admit(slot, request)
        if self._look_up is not None:
            self._index[slot] = NgramIndex(self._look_up.min_n, self._look_up.max_n)

    def release(self, slot: int, finished: bool) -> None:
        super().release(slot, finished)
        self._index.pop(slot, None)

    def restart(self) -> None:
        super().restart()
        self._index = {}

    def _learn(self, seen: Observed) -> None:
        history, committed = self._state.history, dict[int, Sequence[int]]()
        for slot, count in zip(seen.slot.tolist(), seen.committed.tolist(), strict=False):
            text = history(slot)
            committed[slot] = text[len(text) - count :].tolist()
        self.calibration.learn(committed)

    def _search(self, slot: int, k: int) -> tuple[list[int], int]:
        """What the look-up finds for a slot: at most k tokens, and the length of the match."""
        index = self._index.get(slot) if k else None  # none: the dummy slot, while passes are timed
        if index is None or self._look_up is None or not self._allowed[slot].look_up:
            return [], 0
        found, match = index.propose(self._state.history(slot), k)
        known = next((i for i, token in enumerate(found) if token >= self._look_up.vocab), len(found))
        return found[:known], match

    def _find(self, rows: Rows) -> Found:
        found = [self._search(slot, k) for slot, k in zip(rows.slot.tolist(), rows.k.tolist(), strict=True)]
        vocab = self._look_up.vocab if self._look_up is not None else 0
        packed = pack([tokens for tokens, _ in found], self._state.draft.shape[1], vocab)
        return Found(packed.tokens, packed.size, torch.tensor([match for _, match in found], dtype=torch.int64))

    def _weighed(self, rows: Rows) -> Draft:
        pairs = list(zip(rows.slot.tolist(), rows.k.tolist(), strict=True))
        made = [self.calibration.row(slot, k, *self._search(slot, k)) for slot, k in pairs]
        given, allowed = rows, self._allowed_of(rows)
        if rows.worth is not None:
            stop = Stop(made, rows.worth, self.needs.pass_tokens, allowed)
            k = torch.where(stop.before(), rows.k, 0)
            given = rows._replace(k=k, width=int(k.max()) if len(k) else 0, going=stop.after)
        elif allowed is not None:
            k = torch.where(allowed[:, 0], rows.k, 0)
            given = rows._replace(k=k, width=int(k.max()))
        draft = self._model.propose(given)
        assert draft.confidence is not None
        columns = zip(made, draft.tokens.tolist(), draft.confidence.tolist(), draft.size.tolist(), strict=True)
        for row, tokens, survival, size in columns:
            for i in range(len(row.tokens), size):
                row.take(tokens[i], survival[i] / max(survival[i - 1], LEAST_SURVIVAL) if i else survival[0])
            row.end()
        width, chosen = self._state.draft.shape[1], [row.draft() for row in made]
        ids = [[*tokens, *[0] * (width - len(tokens))] for tokens, _, _ in chosen]
        chances = [[*survival, *[0.0] * (width - len(survival))] for _, survival, _ in chosen]
        size = torch.tensor([len(tokens) for tokens, _, _ in chosen], dtype=torch.int64)
        shape = (len(made), width)
        return Draft(
            torch.tensor(ids, dtype=torch.int64).view(shape), size, None, torch.tensor(chances, dtype=torch.float32).view(shape)
        )  # fmt: skip


class Stop:
    """Decides before each pass of a model which rows are worth it, and keeps the rows informed of what it drafts."""

    def __init__(self, rows: list[Row], worth: Worth, pass_tokens: int, allowed: Tensor | None = None) -> None:
        """allowed: as Measured._allowed_of gives it."""
        self._rows, self._worth, self._block = rows, worth, pass_tokens > 1
        self._on = [True] * len(rows) if allowed is None else allowed[:, 0].tolist()
        self._price = worth.rate * (worth.position + worth.passes(len(rows)) / max(len(rows), 1))

    def before(self) -> Tensor:
        return self._choose([row.gain_of_block() if self._block else row.gain(self._price) for row in self._rows])

    def after(self, i: int, tokens: Tensor, chances: Tensor) -> Tensor:
        """As Rows.going."""
        columns = zip(self._rows, self._on, tokens[:, i - 1].tolist(), chances[:, i - 1].tolist(), strict=True)
        for row, on, token, chance in columns:
            if on:
                row.take(token, chance)
        return self._choose([row.gain(self._price) for row in self._rows])

    def _choose(self, gains: list[float]) -> Tensor:
        """Which rows go on. The pass is made if its gain in tokens is worth its time."""
        rate, position, passes = self._worth
        net = [gain - rate * position for gain in gains]
        self._on = [on and gain > 0 and one > 0 for on, gain, one in zip(self._on, gains, net, strict=True)]
        total = sum([one for on, one in zip(self._on, net, strict=True) if on])
        if total <= rate * passes(sum(self._on)):
            self._on = [False] * len(gains)
        return torch.tensor(self._on, dtype=torch.bool)
