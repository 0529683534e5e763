"""How many tokens the KV cache may hold, computed from bytes."""

from __future__ import annotations

import os

import torch

from forerun.types import require

SPARE = 0.97  # share of the free memory to use, at most: launches for rare sampling settings are captured later
UNMEASURED = 0.85  # the same without captures, where the temporary memory of prompts was not measured


def free_memory(device: torch.device) -> int:
    """Free bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits_memory(tokens: int | None, each: int, device: torch.device) -> None:
    """Raise SettingError if a KV cache of `tokens`, `each` bytes a token, exceeds the device's total memory. None: no check."""
    cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if cuda else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remedy = f"a token takes {each:,} bytes, and there are {total / 1e9:.1f} GB in all; give for instance {total // each // 4}"
    require(tokens is None or tokens * each <= total, "kv_cache_tokens", tokens, remedy)


def tokens_on_gpu(
    total: int, free: int, share: float, weights: int, other: int, each: int, longest: int, captured: bool
) -> int:
    """Tokens of KV cache, `each` bytes a token, for an engine that may use a share of a GPU's `total` bytes. As in vLLM's
    gpu_memory_utilization, the share covers weights, which are loaded already, `other` (buffers and graphs), and the cache.
    free: free bytes before `other` was allocated; longest: tokens of a sequence, which must fit; captured: `other` is complete.
    Raises SettingError if a sequence does not fit."""
    spare = SPARE if captured else UNMEASURED
    room = min(int(total * share) - weights - other, int((free - other) * spare))
    gb = 1e9
    require(
        room // each >= longest,
        "gpu_memory_utilization",
        share,
        f"of {total / gb:.1f} GB the weights take {weights / gb:.1f}, buffers and graphs {other / gb:.1f}, one sequence of "
        f"{longest} tokens {longest * each / gb:.1f}, and {free / gb:.1f} were free; raise it, lower max_model_len or "
        "max_num_seqs, or end what else runs there",
    )
    return room // each
