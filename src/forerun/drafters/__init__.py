"""The drafters guess the next tokens. There is one file for each kind; table.py alone knows their names. A drafter never
decides what is emitted: a wrong draft costs time, never correctness.

A drafter drafts at the end of a step for the next one. A drafter on tensors (`needs.device`) runs in the cycle of
engine/cycle.py, after it has observed what the target computed; on CUDA that may be in a graph. A drafter on the host runs when
the step was read, so the next step is launched only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.engine.state import RowState
from forerun.kernels import Batch, Kernels
from forerun.types import Draft, Request
from forerun.verify.sampling import Features


class Needs(NamedTuple):
    """What a drafter needs from the engine. device: it works on tensors only, of fixed shape with the padded layout; layers:
    the target's hidden states that it observes, 0 .. number of layers, each the input of that layer (the last: of the final
    norm); kv_bytes_per_token: of its own keys and values under the target's page numbers; weight_bytes: of its own weights;
    look_up: (min_n, max_n, vocab) of an n-gram look-up, which the commit kernel may do instead of `propose`; pass_tokens:
    drafted tokens of a row that one pass of a model makes, 0: drafting takes no pass; skips: a launch may leave the passes out;
    cheap: it then has other drafts; choices: a request may choose one of its parts."""

    device: bool = False
    layers: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    look_up: tuple[int, int, int] | None = None
    pass_tokens: int = 0
    skips: bool = False
    cheap: bool = False
    choices: bool = False


class Worth(NamedTuple):
    """What decides whether another pass of a drafter pays. rate: tokens a second; position: seconds of verifying one position
    more; passes: seconds of a pass over so many rows."""

    rate: float
    position: float
    passes: Callable[[int], float]


class Rows(NamedTuple):
    """Rows to draft for. slot: [B] int64; k: [B] int64, tokens to draft at most, 0 allowed; width: no k is larger; features:
    sampling features of these rows, for drafts that are drawn; passes: whether passes of a model may be made; worth: what they
    are worth, None: each draft is as long as may be; going: on the host, (i, tokens [B,K], chances [B,K] of each token) -> [B]
    bool, which rows draft on after i tokens, None: all; choosing: False: no row's request chose among the drafters.

    Each draft ends at k tokens."""

    slot: Tensor
    k: Tensor
    width: int
    features: Features = Features(sampled=True)
    passes: bool = True
    worth: Worth | None = None
    going: Callable[[int, Tensor, Tensor], Tensor] | None = None
    choosing: bool = True


class Observed(NamedTuple):
    """What a launch computed, after its tokens were committed. slot: [R] int64; batch: the forward pass, T tokens of R rows
    (its ids may be unset; the tokens are in the state); pending: [R] int64, committed tokens of each row before the step, None:
    one, as in decode launches; committed: [B] int64, tokens that the step committed to the first B rows; hidden: for each of
    needs.layers, [T,H] in the target's dtype; kernels: the target's, bounded to the batch's shape; width: tokens of each row,
    None: they differ; states: whether a model takes the states; if not, it never drafts for these rows again (RowState.blind);
    amended: whether the launch may hold drafts that the drafter did not propose, since a row has a grammar.

    Each committed position is observed once, in order, except those of cached pages. After a prefix hit a drafter with
    `needs.layers` observes the last page of the hit again, so its entry for the position before that page was made with the
    same next token. The token after the last observed position is in the state already."""

    slot: Tensor
    batch: Batch
    pending: Tensor | None
    committed: Tensor
    hidden: tuple[Tensor, ...]
    kernels: Kernels
    width: int | None = None
    states: bool = True
    amended: bool = False

    @property
    def prompts(self) -> bool:
        """Whether rows may hold prompt chunks."""
        return self.pending is not None

    @property
    def true(self) -> Tensor:
        """How many tokens of each row, from its first on, are committed, [R] int64. The others are rejected drafts."""
        if self.pending is None:
            return self.committed
        true = self.pending.clone()
        true[: len(self.committed)] += self.committed.clamp(min=1) - 1
        return true


class Drafter(Protocol):
    needs: Needs

    def admit(self, slot: int, request: Request) -> None:
        """A sequence got the slot. The state holds its committed tokens, more than the prompt if it resumes. A state on a
        device holds them only when the next step is launched."""

    def release(self, slot: int, finished: bool) -> None:
        """The sequence left the slot. finished: for good; a state on the host still holds its committed tokens. Otherwise it
        was preempted."""

    def restart(self) -> None:
        """All slots are free, since a step has failed. What the drafter has learned may be dropped."""

    def observe(self, seen: Observed) -> None:
        """Take what the target computed. Called in each cycle, for drafters on the device."""

    def propose(self, rows: Rows) -> Draft:
        """Draft the tokens after each row's committed tokens."""


class Stateless:
    """The methods of a drafter that keeps nothing for a slot."""

    def admit(self, slot: int, request: Request) -> None:
        """Nothing to do: the state holds the tokens."""

    def release(self, slot: int, finished: bool) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""

    def observe(self, seen: Observed) -> None:
        """Nothing to do: the state holds the tokens."""


__all__ = ["Draft", "Drafter", "Needs", "Observed", "Request", "RowState", "Rows", "Stateless", "Worth"]
