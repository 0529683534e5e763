"""Steps as CUDA graphs, those of decoding and those of prompts: captured once for each key (what fixes their shape, and what
sampling does), replayed with the slots of the moment. Knows nothing of what a step does; engine/body.py does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.device import send_integers
from forerun.engine.body import Body, Key, PromptKey, Report
from forerun.models.decoder import Target

UNCAPTURED = 16  # times that a rare step is launched operation by operation before it is worth the time that capturing takes
TYPICAL = 512  # tokens of a sequence for which steps are timed


def captures(target: Target) -> bool:
    """Whether the target's kernels can be captured: on CUDA, in a dtype that they are written for."""
    return target.device.type == "cuda" and target.dtype in (torch.bfloat16, torch.float16)


def fused_body() -> type[Body]:
    """What makes the bodies that are captured. Imported here, since it needs triton, which torch for the CPU does not bring."""
    from forerun.engine.fused import FusedBody

    return FusedBody


class Graphs:
    """seconds and bytes: what capturing has cost so far; costs: milliseconds of a replay, by (rows, width, drafts), of greedy
    steps in the midst of answers."""

    def __init__(self, body: Body, nobody: int) -> None:
        self.body, self.nobody = body, nobody
        self.device = body.slots.length.device
        self.seconds, self.bytes = 0.0, 0
        self.costs: dict[tuple[int, int, int | None], float] = {}
        self._graphs: dict[Key | PromptKey, tuple[torch.cuda.CUDAGraph, Report]] = {}  # keys differ in their number of fields
        self._inputs: dict[tuple[int, int], Tensor] = {}  # (what is given of a row, rows) -> all of it, [2 or 4,B]
        self._now: dict[tuple[int, int], tuple[list[int], ...]] = {}  # what these hold
        self._shared: tuple[Any, torch.cuda.Stream] | None = None  # the graphs' memory pool, the stream they are recorded on
        self._grown = body.sampling.grown
        self._uses: dict[Key | PromptKey, int] = {}  # of steps that are not captured
        self.warm = False  # what is common is captured: from now on requests wait for a capture only if its step comes often

    def run(self, key: Key | PromptKey, *given: list[int]) -> Report:
        """Launch a step (given: the slots, and what each may draft at most) or prompts (given: as Body.prefill takes it). What
        it returns may be overwritten by the next launch of any graph: copy it before that."""
        if self._grown != self.body.sampling.grown:  # those that hold tables of bans and biases are stale
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key.features.shaped}
            self._grown = self.body.sampling.grown
        if key not in self._graphs:
            self._uses[key] = self._uses.get(key, 0) + 1
            if self.warm and self._uses[key] <= UNCAPTURED:
                return self.body.launch(key, send_integers(list(given), self.device))
            self.capture(key)
        shape = (len(given), key.rows)
        if self._now.get(shape) != given:
            self._now.pop(shape, None)
            self._inputs[shape].copy_(send_integers(list(given), self.device))
            self._now[shape] = given
        graph, report = self._graphs[key]
        graph.replay()
        return report

    @torch.inference_mode()
    def capture(self, key: Key | PromptKey) -> None:
        """Make the graph of a step or of a launch of prompts, of nobody's rows."""
        shape = (2 if isinstance(key, Key) else 4, key.rows)
        if shape not in self._inputs:
            self._inputs[shape] = torch.zeros(shape, dtype=torch.int64, device=self.device)
        inputs = self._inputs[shape]
        inputs.zero_()
        inputs[0].fill_(self.nobody)
        self._now.pop(shape, None)
        self._graphs[key] = self._record(lambda: self.body.launch(key, inputs))
        if isinstance(key, Key) and (key.rows, key.width, key.drafts) not in self.costs:
            start = time.perf_counter()
            self.costs[key.rows, key.width, key.drafts] = self._cost(self._graphs[key][0])
            self.seconds += time.perf_counter() - start

    def _record(self, work: Callable[[], Report]) -> tuple[torch.cuda.CUDAGraph, Report]:
        """Do the work once, for nobody, so that everything it needs is compiled and there, then record it."""
        start = time.perf_counter()
        if self._shared is None:  # one for all graphs: the vendor's products keep a workspace for each stream
            self._shared = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device))
        pool, stream = self._shared
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        torch.cuda.empty_cache()  # of what that took, so that what the graph takes can be seen
        free = torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            report = work()
        torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        return graph, report

    def cost(self, rows: int, width: int, drafts: int | None) -> float | None:
        return self.costs.get((rows, width, drafts))

    def _cost(self, graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds of a step's replay at TYPICAL tokens. Meanwhile nobody is a sequence so long, for all rows at once: it
        reads whatever pages there are, and writes behind them, into page 0 (a drafter with a cache of its own begins
        one position earlier)."""
        lives, slots, kv, nobody = self.body.lives, self.body.slots, self.body.kv, self.nobody
        longest = slots.tokens.shape[1]
        whole = min(TYPICAL, longest // 2) // kv.block_size  # pages
        some = torch.arange(max(whole - 1, 0), dtype=torch.int32, device=self.device) % max(kv.pages - 1, 1)
        slots.block_table[nobody, : len(some)] = 1 + some
        slots.length[nobody] = whole * kv.block_size + 1
        lives.limit[nobody] = longest - lives.draft.shape[1] - 1
        lives.alive[nobody] = True
        try:
            return self._time(graph)
        finally:
            lives.alive[nobody] = False
            lives.draft_size[nobody] = 0
            slots.length[nobody] = 1
            slots.block_table[nobody] = 0

    @staticmethod
    def _time(graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds of a replay, the best of a few."""
        best = float("inf")
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 3)
        return best
