"""What the drafters on the host share: lists of token ids become a Draft. No way of drafting is here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.types import Draft


def pack(drafts: Sequence[Sequence[int]], width: int, vocab: int) -> Draft:
    """The drafts of B rows as point masses: tokens [B,width], size [B], on the CPU. Each draft holds at most width ids. It is
    cut before the first id that the tokenizer lacks (>= vocab)."""
    rows, sizes = [], []
    for draft in drafts:
        row = [int(t) for t in draft]
        if row and max(row) >= vocab:
            row = row[: next(i for i, t in enumerate(row) if t >= vocab)]
        sizes.append(len(row))
        rows.append(row + [0] * (width - len(row)))
    tokens = torch.tensor(rows, dtype=torch.int64).view(len(rows), width)  # [B,width]
    return Draft(tokens, torch.tensor(sizes, dtype=torch.int64))
