"""From the host to the device without waiting for it. Knows nothing of what is sent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """The array on its way to the device, in order with what runs there. It goes through pinned memory, which torch keeps
    until it has arrived; a copy from other memory would wait for all that is under way."""
    own = torch.from_numpy(values)
    return own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own
