"""How many tokens the KV cache may hold, computed from bytes."""

from __future__ import annotations

import torch

from forerun.system import available_memory, total_memory
from forerun.types import SettingError, require

SPARE = 0.97  # share of the free memory to use, at most: launches for rare sampling settings are captured later
SHARE_ON_CPU = 4  # the KV cache gets one part in so many of what is free
GB = 1e9
UNMEASURED = 0.85  # the same without captures, where the temporary memory of prompts was not measured


def free_memory(device: torch.device) -> int:
    """Free bytes of the device; of a CPU the bytes that this process can still get."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def fits_memory(tokens: int | None, each: int, device: torch.device) -> None:
    """Raise SettingError if a KV cache of `tokens`, `each` bytes a token, exceeds the device's total memory. None: no check."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()
    remedy = f"a token takes {each:,} bytes, and there are {total / GB:.1f} GB in all; give for instance {total // each // 4}"
    require(tokens is None or tokens * each <= total, "kv_cache_tokens", tokens, remedy)


def tokens_on_cpu(free: int, each: int, block: int, seqs: int, longest: int, given: bool) -> tuple[int, int]:
    """Tokens of KV cache, and of the longest sequence, for an engine on a CPU. The cache holds `seqs` sequences of `longest`
    tokens, but takes at most a quarter of the `free` bytes, with `each` bytes a token, in pages of `block` tokens. A `longest`
    that was not given is lowered until one sequence fits. Raises SettingError if a given one, or a single page, does not."""
    most = (free // SHARE_ON_CPU // each // block - 2) * block  # one page is the dummy page, one is left for drafts
    room = f"a quarter of the free {free / GB:.1f} GB holds {max(most, 0)} tokens of keys and values, {each:,} bytes each"
    if most < block:
        raise SettingError("kv_cache_tokens", None, f"{room}; end what else runs, take a smaller model, or give it a value")
    require(longest <= most or not given, "max_model_len", longest, f"{room}; give {most} or less, or give kv_cache_tokens")
    longest = min(longest, most)
    return min(seqs * longest, most) + block, longest


def tokens_on_gpu(
    total: int, free: int, share: float, weights: int, other: int, each: int, longest: int, captured: bool
) -> int:
    """Tokens of KV cache, `each` bytes a token, for an engine that may use a share of a GPU's `total` bytes. As in vLLM's
    gpu_memory_utilization, the share covers weights, which are loaded already, `other` (buffers and graphs), and the cache.
    free: free bytes before `other` was allocated; longest: tokens of a sequence, which must fit; captured: `other` is complete.
    Raises SettingError if a sequence does not fit."""
    spare = SPARE if captured else UNMEASURED
    room = min(int(total * share) - weights - other, int((free - other) * spare))
    require(
        room // each >= longest,
        "gpu_memory_utilization",
        share,
        f"of {total / GB:.1f} GB the weights take {weights / GB:.1f}, buffers and graphs {other / GB:.1f}, one sequence of "
        f"{longest} tokens {longest * each / GB:.1f}, and {free / GB:.1f} were free; raise it, lower max_model_len or "
        "max_num_seqs, or end what else runs there",
    )
    return room // each
