"""Commit the tokens of a launch: cut each row's block at a stop token, the limit or broken logits, and append it to the state.
Two forms agree: operations of fixed shape for any device, and a loop over the rows, which is faster on the host. A third form,
in Triton, is in kernels/cuda_step.py.

Both take slot [B] int64; draft, W wide; tokens [B,W+1] int64, the block of each row; and the verdict. If that is None, tokens
are the target's choices, and a draft is accepted while it equals them. Both return [B,5] int64: committed, drafted, accepted,
1 if broken logits ended the row after these tokens, and 0 for the size of the next draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.engine.state import RowState
from forerun.types import Draft, Verdict
from forerun.verify.accept import accept_matching
from forerun.verify.sampling import BROKEN


def commit(state: RowState, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
    verdict, width = verdict or accept_matching(tokens, draft), tokens.shape[1]
    length, active, limit = state.length[slot], state.active[slot], state.limit[slot]
    at = torch.arange(width, device=slot.device)
    ends = (tokens[:, :, None] == state.stop_ids[slot][:, None, :]).any(-1) | (tokens == BROKEN)
    first = torch.where(ends & (at < verdict.count[:, None]), at, width).amin(1)  # [B] the token that ends the row, or W+1
    last = tokens.gather(1, first[:, None].clamp(max=width - 1))[:, 0]
    room = limit - length
    broken = active & (first < torch.clamp(room, max=width)) & (last == BROKEN)
    count = torch.minimum(torch.minimum(verdict.count, first + 1) - broken.long(), room)
    count = torch.where(active, count, 0).clamp(min=0)
    ended = (first < width) | (length + count >= limit)
    state.commit(slot, tokens, count)
    state.active[slot] = active & ~ended
    drafted, accepted = torch.where(active, draft.size, 0), torch.minimum(verdict.count - 1, count)
    return torch.stack((count, drafted, accepted, broken.long(), torch.zeros_like(count)), 1)


def commit_on_host(state: RowState, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
    pool, length, limit, active = (table.numpy() for table in (state.tokens, state.length, state.limit, state.active))
    stop_ids, size, kept = state.stop_ids[slot].tolist(), draft.size.tolist(), draft.tokens.tolist()
    given = verdict.count.tolist() if verdict is not None else None
    counts = []
    for row, (at, block) in enumerate(zip(slot.tolist(), tokens.tolist(), strict=True)):
        if given is not None:
            accepted = given[row] - 1
        else:
            accepted = 0
            while accepted < size[row] and block[accepted] == kept[row][accepted]:
                accepted += 1
        begin, most = int(length[at]), int(limit[at])
        live, broken, count = bool(active[at]), 0, 0
        ends = not live
        while not ends and count <= accepted and begin + count < most:
            if block[count] == BROKEN:
                broken, ends = 1, True
            else:
                ends = block[count] in stop_ids[row]
                count += 1
        pool[at, begin : begin + count] = block[:count]
        length[at] = begin + count
        active[at] = not ends and begin + count < most
        counts.append((count, size[row] if live else 0, min(accepted, count), broken, 0))
    return torch.tensor(counts, dtype=torch.int64).view(len(counts), 5)
