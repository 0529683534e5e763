"""A runner runs launches of the cycle: operation by operation (Eager), or as CUDA graphs (Graphs), which are captured once for
each key and replayed with new input. What a launch computes is in cycle.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.device import send_integers
from forerun.engine.costs import Costs, PassCosts
from forerun.engine.cycle import PROMPT, Cycle, Key, Report

UNCAPTURED = 16  # runs of a rare launch, operation by operation, before it is captured
CONTEXTS = (512, 4096)  # tokens of a row for which decode launches are timed


class Runner(Protocol):
    """capturing: seconds and bytes that captures have taken, None for a runner that does not capture."""

    @property
    def capturing(self) -> tuple[float, int] | None: ...

    def run(self, key: Key, given: Sequence[list[int]]) -> Report:
        """Run a launch. given: input as the key's layout wants it. The next launch may overwrite the report: copy it first."""

    def cost(self, keys: Sequence[Key], context: float) -> list[float]:
        """Seconds of each launch, NaN if unknown. keys: without sampling; context: mean tokens of a row."""

    def pass_cost(self, rows: int) -> float:
        """Seconds of a pass of the drafter over so many rows by itself, NaN if unknown."""

    def warm_up(self, keys: Iterable[Key], complete: bool = True) -> None:
        """Before the first request: make these launches ready and time them. complete: these are all common launches."""


class Eager:
    """measure: measures the cost of steps, and of the drafter's passes if it makes any; None: nothing is measured."""

    capturing = None

    def __init__(self, cycle: Cycle, measure: Callable[[], tuple[Costs, PassCosts | None]] | None) -> None:
        self.cycle = cycle
        self.costs: Costs | None = None
        self.passes: PassCosts | None = None
        self._measure, self._device = measure, cycle.state.length.device

    def run(self, key: Key, given: Sequence[list[int]]) -> Report:
        return self.cycle.run(key, send_integers(given, self._device))

    def cost(self, keys: Sequence[Key], context: float) -> list[float]:
        if self.costs is None:
            return [nan] * len(keys)
        return self.costs(np.array([key.tokens for key in keys]), keys[0].rows, context).tolist()

    def pass_cost(self, rows: int) -> float:
        return nan if self.passes is None else self.passes(rows)

    def warm_up(self, keys: Iterable[Key], complete: bool = True) -> None:
        if complete and self._measure is not None:
            self.costs, self.passes = self._measure()


class Graphs:
    """costs: by the key without sampling: seconds of a greedy replay, the context for which it was timed, and seconds for each
    further token of context. seconds, bytes: taken by captures."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.device = cycle.state.length.device
        self.seconds, self.bytes = 0.0, 0
        self.costs: dict[Key, tuple[float, int, float]] = {}
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Report]] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}  # by its shape: the input that graphs read, [2 or 4,B]
        self._now: dict[tuple[int, int], Sequence[list[int]]] = {}  # by the same shape: its values
        self._shared: tuple[Any, torch.cuda.Stream] | None = None  # memory pool and stream of all graphs
        self._tables = cycle.sampling.version
        self._uses: dict[Key, int] = {}  # runs of launches that are not captured
        self._warm = False  # whether all common launches are captured: others are captured only if they are frequent

    @property
    def capturing(self) -> tuple[float, int]:
        return self.seconds, self.bytes

    def run(self, key: Key, given: Sequence[list[int]]) -> Report:
        if self._tables != self.cycle.sampling.version:  # graphs with older tables of bans and biases are stale
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key.features.shaped}
            self._tables = self.cycle.sampling.version
        if key not in self._graphs:
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._warm and self._uses[key] <= UNCAPTURED:
                return self.cycle.run(key, send_integers(given, self.device))
            self.capture(key)
        shape = (len(given), key.rows)
        if self._now.get(shape) != given:
            self._now.pop(shape, None)
            self._inputs[shape].copy_(send_integers(given, self.device))
            self._now[shape] = given
        graph, report = self._graphs[key]
        graph.replay()
        return report

    def warm_up(self, keys: Iterable[Key], complete: bool = True) -> None:
        for key in keys:
            self.capture(key)
        self._warm = complete

    @torch.inference_mode()
    def capture(self, key: Key) -> None:
        """Capture a launch, with padding rows only."""
        shape = (4 if key.layout == PROMPT else 2, key.rows)
        if shape not in self._inputs:
            self._inputs[shape] = torch.zeros(shape, dtype=torch.int64, device=self.device)
        inputs = self._inputs[shape]
        inputs.zero_()
        inputs[0].fill_(self.cycle.state.dummy)
        self._now.pop(shape, None)
        self._graphs[key] = self._record(lambda: self.cycle.run(key, inputs))
        bare = key.bare
        if key.layout != PROMPT and bare not in self.costs:
            start = time.perf_counter()
            self.costs[bare] = self._cost(self._graphs[key][0])
            self.seconds += time.perf_counter() - start

    def _record(self, work: Callable[[], Report]) -> tuple[torch.cuda.CUDAGraph, Report]:
        """Do the work once, so that all kernels are compiled and all buffers exist, then record it."""
        start = time.perf_counter()
        if self._shared is None:  # one stream, since cuBLAS keeps a workspace for each
            self._shared = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device))
        pool, stream = self._shared
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        torch.cuda.empty_cache()  # so that the memory of the graph can be measured
        free = torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            report = work()
        torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        return graph, report

    def cost(self, keys: Sequence[Key], context: float) -> list[float]:
        found = []
        for key in keys:
            seconds, at, slope = self.costs.get(key, (nan, 0, 0.0))
            found.append(seconds + slope * (context - at))
        return found

    def pass_cost(self, rows: int) -> float:
        return nan  # a launch makes all passes or none, and both are timed

    def _cost(self, graph: torch.cuda.CUDAGraph) -> tuple[float, int, float]:
        """Seconds of a replay at the first of CONTEXTS, that context, and seconds for each further token of context."""
        longest = self.cycle.state.tokens.shape[1] // 2
        near, far = (min(context, longest) for context in CONTEXTS)
        seconds = self._at_context(graph, near)
        return seconds, near, max(self._at_context(graph, far) - seconds, 0.0) / (far - near) if far > near else 0.0

    def _at_context(self, graph: torch.cuda.CUDAGraph, context: int) -> float:
        """Time replays in which all rows are a sequence of this length in the dummy slot. It reads any pages there are and
        writes into page 0. (A drafter with a cache of its own starts one position earlier, so the last page is 0 too.)"""
        kv = self.cycle.kv
        whole = context // kv.block_size  # pages
        pages = 1 + torch.arange(max(whole - 1, 0), dtype=torch.int32, device=self.device) % max(kv.pages - 1, 1)
        with self.cycle.state.dummy_sequence(whole * kv.block_size + 1, pages):
            return self._time(graph)

    @staticmethod
    def _time(graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of a replay, the minimum of a few."""
        best = float("inf")
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 3000)
        return best
