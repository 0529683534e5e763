"""How many tokens' keys and values there is room for. Knows bytes; nothing of what takes them."""

from __future__ import annotations

import os

import torch

from forerun.types import require

SPARE = 0.97  # of what is free, at most: steps for rarer sampling settings are captured when they are first asked for
UNMEASURED = 0.85  # the same where steps are not captured, and prompts on their way take what nobody measured


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits_memory(tokens: int | None, each: int, device: torch.device) -> None:
    """Raise SettingError for more tokens of KV cache, `each` bytes a token, than the device's whole memory holds. None fits."""
    cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if cuda else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remedy = f"a token takes {each:,} bytes, and there are {total / 1e9:.1f} GB in all; give for instance {total // each // 4}"
    require(tokens is None or tokens * each <= total, "kv_cache_tokens", tokens, remedy)


def tokens_on_gpu(
    total: int, free: int, share: float, weights: int, other: int, each: int, longest: int, captured: bool
) -> int:
    """Tokens of KV cache, `each` bytes a token, for an engine that may have a share of a GPU's `total` bytes, counted as vLLM
    counts its gpu_memory_utilization: for weights, which are there already, for what else it takes (`other`: buffers and
    graphs), and for the cache. free: bytes that nobody had before `other` was taken; longest: tokens of a sequence, for
    which there must be room; captured: `other` is all there will be. Raises SettingError."""
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
