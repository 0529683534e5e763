"""The drafters: what guesses the next tokens. One file for each kind; table.py is the only place that knows their names. A
drafter never decides what is emitted: a wrong draft costs time, never correctness.

A drafter drafts at the end of a step for the next one. One that works on tensors (`needs.device`) does so inside the cycle of
engine/cycle.py, after it has observed what the target computed; on CUDA that may be in a graph. One that works on the host does
so when the step was read, so that no step is launched before that.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.engine.state import RowState
from forerun.kernels import Batch
from forerun.types import Draft, Request
from forerun.verify.sampling import Features


class Needs(NamedTuple):
    """What a drafter asks of the engine. device: it works on tensors only, of fixed shape where the layout is padded; layers:
    the target's hidden states that it observes, 0 .. number of layers, each the input of that layer (the last: of the final
    norm); kv_bytes_per_token: of keys and values of its own under the target's page numbers; weight_bytes: of weights of its
    own; look_up: (min_n, max_n, vocab) of an n-gram look-up, which the launch that commits may do in its stead."""

    device: bool = False
    layers: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    look_up: tuple[int, int, int] | None = None


class Rows(NamedTuple):
    """Rows to draft for: slot [B] int64; k [B] int64, at most so many tokens each (0 is allowed); width, no k is larger;
    features: what sampling for these rows takes, for drafts that are drawn."""

    slot: Tensor
    k: Tensor
    width: int
    features: Features = Features(sampled=True)


class Observed(NamedTuple):
    """What a launch computed, after its tokens were committed. slot: [R] int64; batch: the forward pass, T tokens of R rows
    (its ids may be unset: the tokens are in the state); true: [R] int64, of each row how many of its tokens, from its first on,
    are committed, the others being rejected drafts; hidden: of the layers that the drafter needs, in its order, [T,H] in
    the target's dtype; prompts: whether rows may hold parts of prompts.

    Every committed position is observed once, in order, but for those of cached pages. After a prefix hit a drafter with
    `needs.layers` observes the last page of the hit again: the entry that it keeps for the position before that page was made
    with the same next token. The token behind the last committed position is in the state already."""

    slot: Tensor
    batch: Batch
    true: Tensor
    hidden: tuple[Tensor, ...]
    prompts: bool


class Drafter(Protocol):
    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """A sequence takes the slot; the state holds what is committed of it (more than the prompt if it resumes), on a
        device only when the next step is launched."""

    def release(self, slot: int, finished: bool) -> None:
        """It leaves the slot: for good (finished; the state on the host still holds its committed tokens) or until it
        resumes."""

    def restart(self) -> None:
        """All slots are free, whatever state the drafter is in: a step has failed in the middle. What it has learned may go."""

    def observe(self, seen: Observed) -> None:
        """What the target computed. Called in each cycle, for drafters that work on the device."""

    def propose(self, rows: Rows) -> Draft:
        """Guess what follows each row's committed tokens."""


class Stateless:
    """What a drafter need not do that keeps nothing of its own for a slot."""

    def admit(self, slot: int, request: Request) -> None:
        """Nothing to do: the state holds all there is."""

    def release(self, slot: int, finished: bool) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""

    def observe(self, seen: Observed) -> None:
        """Nothing to do: the tokens are in the state."""


__all__ = ["Draft", "Drafter", "Needs", "Observed", "Request", "RowState", "Rows", "Stateless"]
