"""The drafters: what guesses the next tokens. One file for each kind; table.py is the only place
that knows their names. A drafter never decides what is emitted: a wrong one costs time, never correctness.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.engine.slots import Slots
from forerun.kernels import Batch
from forerun.types import Draft, Request


class Needs(NamedTuple):
    """What a drafter asks of the engine. device: it works on tensors of fixed shape only, so that a CUDA graph may
    hold it; layers: the target's hidden states it reads; kv_bytes_per_token: of keys and values of its own in the same
    page table; weight_bytes: of weights of its own."""

    device: bool = False
    layers: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0


class Rows(NamedTuple):
    """The rows of a step that may draft: slot [B] int64, k [B] int64 (at most so many tokens each; 0 is allowed) and
    width, the largest k as a plain int."""

    slot: Tensor
    k: Tensor
    width: int


class Drafter(Protocol):
    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """A sequence takes the slot; slots.tokens holds what is committed of it (more than the prompt if it resumes), on a
        device only when the next step is launched."""

    def release(self, slot: int, finished: bool) -> None:
        """It leaves the slot: for good (finished; slots still holds its committed tokens) or until it resumes."""

    def restart(self) -> None:
        """All slots are free, whatever state the drafter is in: a step has failed in the middle. What it has learned may go."""

    def propose(self, rows: Rows) -> Draft:
        """Guess what follows each row's committed tokens."""

    def prefill(self, batch: Batch) -> None:
        """These prompt tokens are on their way through the target."""


__all__ = ["Draft", "Drafter", "Needs", "Request", "Rows", "Slots"]
