"""Copies between the host and the device that do not wait. It does not know what the copied numbers mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """Start a copy of the array to the device, in order with the work there. It goes through pinned memory, which torch keeps
    until the copy is done. A copy from other memory would wait for all work under way."""
    own = torch.from_numpy(values)
    return own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own


def send_integers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`send` for lists of numbers, as int64."""
    return send(np.array(values, dtype=np.int64), device)


def receive(x: Tensor) -> Tensor:
    """Start a copy of the tensor to the host, in order with the work on its device. It may be read when a later mark is
    reached."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits until all work launched so far is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
