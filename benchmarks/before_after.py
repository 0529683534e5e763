"""Whether a change made the engine slower: compares two source trees, cell by cell, in one run.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py --before ../before --after . [--device cuda] [--out FILE] [--rounds 5]

Each tree runs in a process of its own, which keeps its engines. Both answer the same requests in the order B A A B, after a
warm-up. Only one process works at a time. Each round has its own prompts, since a single answer may repeat itself by chance. On
a CPU the process that is started second is slower, whichever tree it runs. So all cells are measured twice: the processes are
ended and started again in the other order. A cell's figure is the median of the paired ratios of tokens/s, after over before,
of both orders. Its 95 % interval follows, then the median of each order, and the tokens a verify step. On the CPU the default
model answers texts. On CUDA random weights of real shapes compute, and a script says what they choose: rounding differs between
trees, and an answer must not. A script repeats itself with one token in 16 changed, or is random ("text").
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.stats

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

        loaded = self.models.setdefault(None, LLM.load(dtype="bfloat16"))
        llm = LLM(loaded, speculative_config=drafter, dtype="bfloat16", kv_cache_tokens=16384)
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
            target = Target.random(config, torch.bfloat16, self.device)
            self.models[cell["model"]] = target, follow_script(target)
        target, script = self.models[cell["model"]]
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
            said = torch.randint(0, target.vocab, (len(script),), generator=generator)
            if cell["kind"] != "text":
                changed = torch.rand(len(script), generator=generator) < 1 / 16
                said = torch.where(changed, said, said[:20].repeat(len(script) // 20 + 1)[: len(script)])
            script.copy_(said)
            params = SamplingParams(max_tokens=n, **({"temperature": 0.0} | cell["sampling"]))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(cell["requests"]):  # their first page differs, and where they are in the script
                first = torch.randint(0, target.vocab, (16,), generator=generator).tolist()
                ids = first + said[16 : (1500 if cell["kind"] == "long" else 200) + 7 * i].tolist()
                it.add(Request(str(i), tuple(ids), params, n, i))
            while it.has_work:
                it.step()
            rate = cell["requests"] * n / (time.perf_counter() - start)
            return rate, it.stats.drafts.acceptance_length or 1.0

        return run


def follow_script(target: Any) -> Any:
    """Make a target choose the token of a script at each position, after all of its computation. Returns the script, int64."""
    import torch

    script, forward = torch.zeros(4096, dtype=torch.int64, device=target.device), target.forward

    def following(batch: Any, *rest: Any, **more: Any) -> Any:
        found = forward(batch, *rest, **more)
        at = batch.positions if batch.logits_at is None else batch.positions[batch.logits_at]
        found.logits.scatter_(1, script[at + 1][:, None], 1e4)
        return found

    target.forward = following
    return script


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

    def end(self) -> None:
        self.child.communicate()


def measure(trees: dict[str, Tree], cell: Cell, rounds: int) -> dict[str, Any]:
    """The samples of a cell by tree. The first round is the warm-up."""
    found: dict[str, Any] = {key: {name: [] for name in trees} for key in ("tokens_per_s", "tokens_per_step")}
    for i in range(rounds + 1):
        for name in list(trees) if i % 2 else list(trees)[::-1]:
            rate, length = trees[name](cell | {"round": i})
            if i:
                found["tokens_per_s"][name].append(rate)
                found["tokens_per_step"][name].append(length)
    return found


def ratios(samples: dict[str, Any]) -> list[float]:
    return [a / b for a, b in zip(samples["tokens_per_s"]["after"], samples["tokens_per_s"]["before"], strict=True)]


def summary(name: str, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a cell and its samples. orders: the samples of each order of starting."""
    pooled = [ratio for samples in orders for ratio in ratios(samples)]
    interval = scipy.stats.quantile_test(pooled, p=0.5).confidence_interval()
    known = [None if math.isnan(end) else end for end in interval]  # too few samples have none
    return {"cell": name, "ratio": statistics.median(pooled), "interval": known, "orders": orders}


def line(found: dict[str, Any]) -> str:
    """A cell for the terminal."""

    def of(key: str, name: str) -> float:
        return statistics.median(value for samples in found["orders"] for value in samples[key][name])

    interval = " to ".join("?" if end is None else f"{end:.3f}" for end in found["interval"])
    each = " ".join(f"{statistics.median(ratios(samples)):.3f}" for samples in found["orders"])
    rates = " ".join(f"{of('tokens_per_s', name):9.1f}" for name in ("before", "after"))
    steps = " ".join(f"{of('tokens_per_step', name):.2f}" for name in ("before", "after"))
    return f"{found['cell']:<50} {rates}  {found['ratio']:.3f} ({interval}) [{each}] ({steps})"


def environment(device: str) -> dict[str, Any]:
    """Date, machine and versions, for the record."""
    from forerun.bench.records import machine

    versions = machine.versions() | ({"triton": importlib.metadata.version("triton")} if device == "cuda" else {})
    described = dataclasses.asdict(machine.describe(machine.load_average()))
    return {"date": time.strftime("%Y-%m-%d"), "machine": described, "versions": versions, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each order of starting")
    parser.add_argument("--only", default="", help="only cells whose name matches this regular expression")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.device)
        return
    if given.before is None:
        parser.error("--before: give the tree to compare with, for instance ../before")
    paths = {"before": given.before, "after": given.after}
    chosen = [cell for cell in cells(given.device) if re.search(given.only, cell["name"])]
    samples: dict[str, list[dict[str, Any]]] = {cell["name"]: [] for cell in chosen}
    for order in (list(paths), list(paths)[::-1]):
        trees = {name: Tree(paths[name], given.device) for name in order}
        for cell in chosen:
            samples[cell["name"]].append({"started_first": order[0]} | measure(trees, cell, given.rounds))
            found = [summary(name, orders) for name, orders in samples.items() if orders]
            print(line(summary(cell["name"], samples[cell["name"]])), flush=True)
            if given.out is not None:
                text = json.dumps(environment(given.device) | {"cells": found}, indent=1)
                given.out.write_text(text + "\n", encoding="utf-8")
        for tree in trees.values():
            tree.end()


if __name__ == "__main__":
    main()
