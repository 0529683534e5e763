"""Whether a change made the engine slower: compares two source trees, cell by cell, in one run.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py --before ../before --after . [--device cuda] [--out FILE] [--rounds 5]

Each tree runs in a process of its own, which keeps its engines. Both answer the same requests in the order B A A B, after a
warm-up. Only one process works at a time. Each round has its own prompts, since a single answer may repeat itself by chance. A
cell's figure is the median of the paired ratios of tokens/s, after over before; the tokens a verify step follow in brackets. On
the CPU the default model answers texts. On CUDA random weights of real shapes answer random and repeating tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0}
OWN = {"method": "draft_model", "model": "smollm2-135m-instruct", "num_speculative_tokens": 3}
SHAPES: dict[str, tuple[Any, ...]] = {
    "SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, 8192, 1e-6),
}
Cell = dict[str, Any]  # name, model, drafter, kind of prompt, requests, tokens of each, sampling


def cells(device: str) -> list[Cell]:
    """The cells that are compared."""
    found = []
    for model in (None,) if device == "cpu" else SHAPES:
        drafters: dict[str, Any] = {"plain": None, "ngram": NGRAM, "suffix": SUFFIX, "own draft model": OWN}
        for name, drafter in drafters.items():
            for kind in ("copy", "text") if name in ("plain", "ngram") else ("copy",):
                for requests in ((1, 8) if name != "own draft model" else (1,)) if device == "cpu" else (1, 8, 32):
                    tokens = (32 if name == "own draft model" else 96) if device == "cpu" else 256
                    cell = {"model": model, "drafter": drafter, "kind": kind, "requests": requests, "tokens": tokens}
                    found.append({"name": f"{model or 'default model'}, {name}, {kind}, {requests}", **cell, "sampling": {}})
        cell = {"model": model, "drafter": NGRAM, "kind": "copy", "requests": 4, "tokens": 96}
        sampling = {"temperature": 0.8, "top_p": 0.9}
        found.append({"name": f"{model or 'default model'}, ngram, sampled, 4", **cell, "sampling": sampling})
        for name, drafter in (("plain", None), ("ngram", NGRAM)):
            cell = {"model": model, "drafter": drafter, "kind": "long", "requests": 1, "tokens": 48, "sampling": {}}
            found.append({"name": f"{model or 'default model'}, {name}, 1,500 tokens of prompt, 1", **cell})
    return found


class Served:
    """What a child process runs: engines of the source tree on its PYTHONPATH, each built once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.made: dict[str, Any] = {}
        self.models: dict[Any, Any] = {}

    def run(self, cell: Cell) -> tuple[float, float]:
        """Answers the cell's requests. Returns tokens/s and the tokens a verify step."""
        key = json.dumps([cell["model"], cell["drafter"]])
        if key not in self.made:
            self.made[key] = self._llm(cell["drafter"]) if cell["model"] is None else self._engine(cell)
        return self.made[key](cell)

    def _llm(self, drafter: Any) -> Callable[[Cell], tuple[float, float]]:
        from forerun.llm import LLM
        from forerun.types import SamplingParams

        loaded = self.models.setdefault(None, LLM.load())
        llm = LLM(loaded, speculative_config=drafter, kv_cache_tokens=16384)
        source = "def area(shapes):\n    total = 0\n    for shape in shapes:\n        total += shape.width * shape.height\n"
        texts = {
            "copy": f"Repeat this code exactly, three times.\n{source * 2}\nHere it is:\n{source}",
            "text": "Explain in a few sentences why bread rises, number",
            "long": source * 42,
        }

        def run(cell: Cell) -> tuple[float, float]:
            llm.clear_prefix_cache()
            llm.reset_stats()
            params = SamplingParams(max_tokens=cell["tokens"], ignore_eos=True, **({"temperature": 0.0} | cell["sampling"]))
            prompts = [f"{texts[cell['kind']]} {10 * cell['round'] + i}" for i in range(cell["requests"])]
            start = time.perf_counter()
            made = sum(len(one.token_ids) for one in llm.generate(prompts, params))
            return made / (time.perf_counter() - start), llm.stats.drafts.acceptance_length or 1.0

        return run

    def _engine(self, cell: Cell) -> Callable[[Cell], tuple[float, float]]:
        import torch

        import forerun.drafters.table as table
        from forerun.config import EngineConfig, Speculation
        from forerun.engine.engine import Engine, EngineStats
        from forerun.models.config import ModelConfig, Rope
        from forerun.models.decoder import Target
        from forerun.types import Request, SamplingParams

        if cell["model"] not in self.models:
            *shape, eps = SHAPES[cell["model"]]
            norms = cell["model"].startswith("Qwen3")
            config = ModelConfig(*shape, eps, Rope(1e5), qk_norm=norms, tied=True)
            self.models[cell["model"]] = Target.random(config, torch.bfloat16, self.device)
        target = self.models[cell["model"]]
        speculation = Speculation.parse(cell["drafter"])
        settings = EngineConfig(max_model_len=2048, max_num_seqs=32, kv_cache_tokens=32 * 2048, speculation=speculation)
        context: Any = getattr(table, "DrafterContext", None) or table.Surroundings  # type: ignore[attr-defined]

        def make(*given: Any) -> Any:
            *state, padded = given
            if speculation is None:
                return None
            return table.TABLE[speculation.method](speculation, context(*state, settings, padded, target.vocab, target))

        it = Engine(target, settings, make, NoText, True)
        it.warm_up()

        def run(cell: Cell) -> tuple[float, float]:
            it.scheduler.pages.clear()
            it.stats = EngineStats()
            generator = torch.Generator().manual_seed(cell["round"])
            n = cell["tokens"]
            params = SamplingParams(max_tokens=n, **({"temperature": 0.0} | cell["sampling"]))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(cell["requests"]):
                if cell["kind"] == "text":
                    ids = torch.randint(0, target.vocab, (200,), generator=generator).tolist()
                else:
                    length = 1500 if cell["kind"] == "long" else 200
                    ids = (torch.randint(0, target.vocab, (20,), generator=generator).tolist() * 75)[:length]
                it.add(Request(str(i), tuple(ids), params, n, i))
            while it.has_work:
                it.step()
            rate = cell["requests"] * n / (time.perf_counter() - start)
            return rate, it.stats.drafts.acceptance_length or 1.0

        return run


class NoText:
    """A detokenizer for random ids: it gives no text."""

    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def mark(self, strings: Any) -> tuple[()]:
        return ()


def serve(device: str) -> None:
    """The child process. Each line of standard input is a cell; its figures are a line of standard output."""
    served = Served(device)
    for line in sys.stdin:
        print(json.dumps(served.run(json.loads(line))), flush=True)


class Tree:
    """A source tree, run in a child process."""

    def __init__(self, path: Path, device: str) -> None:
        source = f"{path.resolve() / 'src'}{os.pathsep}{os.environ.get('BEFORE_AFTER_PATH', '')}"
        command = [sys.executable, __file__, "--serve", "--device", device]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": source}, stdin=pipe, stdout=pipe, text=True)

    def __call__(self, cell: Cell) -> tuple[float, float]:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps(cell) + "\n")
        self.child.stdin.flush()
        rate, length = json.loads(self.child.stdout.readline())
        return rate, length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.device)
        return
    if given.before is None:
        parser.error("--before: give the tree to compare with, for instance ../before")
    trees = {"before": Tree(given.before, given.device), "after": Tree(given.after, given.device)}
    found = []
    for cell in cells(given.device):
        if given.only not in cell["name"]:
            continue
        samples: dict[str, list[float]] = {name: [] for name in trees}
        lengths: dict[str, list[float]] = {name: [] for name in trees}
        for i in range(given.rounds + 1):
            for name in list(trees) if i % 2 else list(trees)[::-1]:
                rate, length = trees[name](cell | {"round": i})
                if i:
                    samples[name].append(rate)
                    lengths[name].append(length)
        ratio = statistics.median(a / b for a, b in zip(samples["after"], samples["before"], strict=True))
        found.append({"cell": cell["name"], "ratio": ratio, "tokens_per_s": samples, "tokens_per_step": lengths})
        rates = [statistics.median(samples[name]) for name in trees]
        steps = [statistics.mean(lengths[name]) for name in trees]
        print(f"{cell['name']:<55} {rates[0]:9.1f} {rates[1]:9.1f}  {ratio:.3f}  ({steps[0]:.2f} {steps[1]:.2f})", flush=True)
        if given.out is not None:
            known = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
            text = json.dumps({**known, "device": given.device, "cells": found}, indent=1)
            given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
