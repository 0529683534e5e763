"""What drafters with logits share: a token of each row is chosen from the logits over a draft vocabulary, greedily or drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.drafters import Rows, RowState
from forerun.kernels import Kernels
from forerun.types import Draft
from forerun.verify import noise
from forerun.verify.sampling import SamplingState


class Choice:
    """Drafts of rows, filled token by token. drawn: draw tokens and keep their distributions; otherwise the likeliest are
    taken. ids: [draft vocabulary] int64, the target's ids of the draft ids; None: they are the same.

    tokens: [B,K] int64; chances: [B,K], of each token, if those before it are accepted; probs: [B,K,V] or None."""

    def __init__(
        self, rows: Rows, length: Tensor, state: RowState, sampling: SamplingState, kernels: Kernels, ids: Tensor | None,
        drawn: bool,
    ) -> None:
        """length: [B], committed tokens of each row."""
        count, width, device = len(rows.slot), rows.width, length.device
        self._rows, self._length, self._state, self._sampling = rows, length, state, sampling
        self._kernels, self._ids, self._drawn = kernels, ids, drawn
        self.tokens = rows.slot.new_zeros(count, width)
        self.chances = torch.zeros(count, width, device=device)
        self.probs = torch.zeros(count, width, sampling.vocab, device=device) if drawn and width else None
        self._noise = noise.block_noise(sampling.seed[rows.slot], length, width, noise.DRAFT) if drawn else None  # [B,K]

    def take(self, i: int, logits: Tensor, on: Tensor | slice = slice(None)) -> None:
        """Choose token i of the rows `on` from logits [B,draft vocabulary]."""
        rows, sampling = self._rows, self._sampling
        if not self._drawn and not rows.features.shaped:
            best, self.chances[on, i] = self._kernels.best(logits)
            self.tokens[on, i] = best if self._ids is None else self._ids[best]
            return
        slot, position = rows.slot[on], self._length[on] + i
        shaped = sampling.shape(self._whole(logits), slot, position, rows.features)
        if self.probs is not None and self._noise is not None:
            self.probs[on, i] = q = sampling.probs(shaped, slot, rows.features)
            token = noise.draw(q, self._noise[on, i])
        else:
            q = shaped.softmax(-1)
            token = q.argmax(-1)
        self.tokens[on, i], self.chances[on, i] = token, q.gather(1, token[:, None])[:, 0]
        self._state.tokens[slot, position] = token  # history for penalties of the next ones

    def take_all(self, logits: Tensor) -> None:
        """Choose all tokens from logits [B,K,draft vocabulary]."""
        if self._drawn or self._rows.features.shaped:
            for i in range(logits.shape[1]):
                self.take(i, logits[:, i])
        else:
            best, chances = self._kernels.best(logits.flatten(0, 1))
            best = best if self._ids is None else self._ids[best]
            self.tokens, self.chances = best.view_as(self.tokens), chances.view_as(self.chances)

    def draft(self, size: Tensor) -> Draft:
        return Draft(self.tokens, size, self.probs, self.chances.cumprod(1))

    def _whole(self, logits: Tensor) -> Tensor:
        """Logits over the draft vocabulary as logits over the target's, [N,V]."""
        whole = logits.new_full((len(logits), self._sampling.vocab), -torch.inf)
        if self._ids is None:
            whole[:, : logits.shape[1]] = logits
        else:
            whole[:, self._ids] = logits
        return whole
