"""An estimate, while the engine runs, of how much faster it decodes than an engine without a drafter would.

    speed-up = sum over the last steps of (tokens / rows * seconds of a plain step) / sum of their seconds

A step in which each row committed tokens / rows tokens replaces so many plain steps of the same rows. A plain step is taken to
last as long as the step did, without its drafting, and with the part of its forward pass and of its verification that plain
decoding needs:

    forward pass   cost(positions of a plain step) / cost(positions of this step), by the measured costs of the runner, of the
                   measured time (exact layout) or of that cost (padded layout, where a launch is one piece)
    verification   rows / positions

The estimate is not known without a drafter, before FEWEST steps that only decode, where the costs of steps are not measured
(adaptive_drafts off on a CPU), and where every launch makes a drafter's passes (draft_model on a GPU). It has no term for what
the drafter takes of the memory. Where the host is slower than the device, the plain step is estimated too short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import isnan
from typing import NamedTuple

from forerun.engine.cycle import EXACT, Key, Times
from forerun.engine.runner import Runner

WINDOW = 128  # steps at most
FEWEST = 8


class Decoded(NamedTuple):
    """A step in which all rows were decoded. seconds: all of it; times: its parts; tokens: committed; key: of its launch; rows:
    without padding; context: mean tokens of a row."""

    seconds: float
    times: Times
    tokens: int
    key: Key
    rows: int
    context: float


class Speedup:
    """plain: StepLayout.plain."""

    def __init__(self, runner: Runner, plain: Callable[[Key], Key | None]) -> None:
        self._runner, self._plain = runner, plain
        self._steps: deque[Decoded] = deque(maxlen=WINDOW)

    def record(self, step: Decoded) -> None:
        self._steps.append(step)

    def estimate(self) -> float | None:
        """The speed-up over the last steps; None if it is not known. Takes up to WINDOW look-ups of costs."""
        replaced = spent = 0.0
        if len(self._steps) < FEWEST:
            return None
        for step in self._steps:
            seconds = self._plain_seconds(step)
            if isnan(seconds):
                return None
            replaced += step.tokens / step.rows * seconds
            spent += step.seconds
        return replaced / spent

    def _plain_seconds(self, step: Decoded) -> float:
        key = step.key
        plain = self._plain(key)
        if plain is None:
            return float("nan")
        with_drafts, without = self._runner.cost([key.bare, plain], step.context)
        forward, verify = with_drafts, 0.0
        if key.layout == EXACT:
            forward, verify = step.times.forward, step.times.verify
        less = step.times.draft + forward * (1 - without / with_drafts) + verify * (1 - key.rows / key.tokens)
        return max(step.seconds - less, 0.0) if not isnan(less) else less
