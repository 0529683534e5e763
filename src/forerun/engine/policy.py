"""How many tokens to draft for a row. One rule for every device; knows no torch.

A draft may never run past what the request can still take: a step commits at most k + 1 tokens, so k is at most one
less than that. Under load a verify step stops being nearly free, which is what the schedule by batch size is for.
"""

from __future__ import annotations

from forerun.config import Speculation


class Policy:
    def __init__(self, speculation: Speculation | None) -> None:
        self._k = speculation.num_speculative_tokens if speculation else 0
        self._schedule = speculation.num_speculative_tokens_per_batch_size if speculation else None

    def width(self, running: int) -> int:
        """The most tokens that any row may draft while so many sequences run."""
        for low, high, k in self._schedule or ():
            if low <= running <= high:
                return k
        return self._k

    def k(self, running: int, remaining: int) -> int:
        """For a row that can still take `remaining` tokens (at least 1)."""
        return min(self.width(running), remaining - 1)

    def step_width(self, k: int, found: int) -> int:
        """How wide a fixed-shape step is to be in which rows may draft k tokens, if the longest draft that is known of has
        `found` tokens: a step without drafts costs less than one whose drafts are empty. What is known is a step old."""
        return k if found else 0
