"""Which tokens min_p, top_k and top_p keep: those whose logit is at least a threshold of the row. All three keep the likeliest
tokens, so one threshold is enough. Tokens equal to the last one kept are kept too, so the result does not depend on how ties
are sorted. Two forms that agree: tensors of fixed shape for any device, and one row on the host.

min_p keeps p(x) >= min_p * max p after the temperature; top_k the k largest (and ties with the k-th); top_p, of
what those two leave and renormalised, the smallest set of the likeliest tokens whose mass reaches top_p.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def thresholds(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    largest_k: int,
    any_top_p: bool,
    unbounded: bool,
) -> Tensor:
    """The smallest logit kept, [N,V] float32 -> [N,1].

    temperature (above 0), min_p (0: off), top_p (1: off): [N,1] float64; top_k: [N,1] int64 (0: off).
    largest_k: no top_k is larger, 0 if all are off; any_top_p: some top_p is on; unbounded: one is on without a top_k.
    """
    vocab = logits.shape[-1]
    top = logits.amax(-1, keepdim=True)
    floor = (top + temperature * min_p.log()).to(logits.dtype)  # [N,1]
    if not (largest_k or any_top_p):
        return floor
    ranked = logits.topk(vocab if unbounded else min(largest_k, vocab), -1).values  # [N,C], largest first
    if largest_k:
        kth = ranked.gather(1, (top_k - 1).clamp(0, ranked.shape[1] - 1))
        floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
    if any_top_p:
        scale = temperature.to(logits.dtype)
        total = torch.where(logits >= floor, ((logits - top) / scale).exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        mass = torch.where(ranked >= floor, ((ranked - top) / scale).exp(), 0.0).cumsum(-1, dtype=torch.float64)
        reached = mass >= top_p * total
        last = ranked.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))
        # not reached: ties with the k-th token lie past the C ranked ones, and all of them are kept
        cut = (top_p < 1) & reached.any(-1, keepdim=True)
        floor = torch.where(cut, torch.maximum(floor, last), floor)
    return floor


def threshold(row: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.float32:
    """The same for one row [V] float32 on the host. It sorts only the tokens that can matter."""
    top = row.max()
    if not np.isfinite(top):  # no token can be chosen
        return np.float32(-np.inf)
    floor = np.float32(float(top) + temperature * math.log(min_p) if min_p > 0 else -math.inf)
    if 0 < top_k < len(row):
        floor = max(floor, np.float32(torch.from_numpy(row).topk(top_k).values[-1].item()))
    if top_p < 1:
        kept = row[row >= floor]
        weight = np.exp((kept - top) / np.float32(temperature))
        total = weight.sum(dtype=np.float64)
        # all tokens lighter than this together weigh at most (1 - top_p)/2 of the total, so the set is full without them
        ranked = np.sort(kept[weight >= (1 - top_p) * total / (2 * len(kept))])[::-1]
        mass = np.exp((ranked - top) / np.float32(temperature)).cumsum(dtype=np.float64)
        floor = np.float32(ranked[min(int(np.searchsorted(mass, top_p * total)), len(ranked) - 1)])
    return floor
