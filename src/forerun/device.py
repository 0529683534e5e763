"""From the host to the device and back without waiting. Knows nothing of what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """The array on its way to the device, in order with what runs there. It goes through pinned memory, which torch keeps
    until it has arrived; a copy from other memory would wait for all that is under way."""
    own = torch.from_numpy(values)
    return own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own


def send_integers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The same for lists of numbers, as int64."""
    return send(np.array(values, dtype=np.int64), device)


def receive(x: Tensor) -> Tensor:
    """The tensor on its way to the host, in order with what runs on its device; to be read when a later mark is reached."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """What waits until all that has been launched by now is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
