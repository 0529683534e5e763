"""Measures what learned drafters cost on one GPU: the time of captured decode steps with a head of random weights, by method,
drafts and rows, beside plain steps and steps with n-gram drafts of the same width. Acceptance means nothing here.

    PYTHONPATH=src python3 benchmarks/gpu/heads.py --out DIR [--shapes SmolLM2-135M,Qwen3-0.6B] [--rows 1,8,32]
        [--parts steps,kernels]

steps: milliseconds of a step at 512 tokens of context, medians over replays by device events. kernels: the launches of one step
at one row with EAGLE-3 and k = 4, with their microseconds, by the profiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from harness import CUDA, DEVICE, SHAPES, Record, engine, fill, head_shape, release, step_ms

from forerun.config import Speculation
from forerun.engine.cycle import decode_key
from forerun.heads import loading
from forerun.models.decoder import Target

ARMS = (("eagle3", 2), ("eagle3", 4), ("eagle3", 7), ("mtp", 4), ("eagle", 4), ("dflash", 4), ("dflash", 7))


@torch.inference_mode()
def steps(target: Target, rows: list[int], context: int = 512) -> list[dict[str, Any]]:
    cells = []
    for method, k in (("plain", 0), ("ngram", 2), ("ngram", 4), ("ngram", 7), *ARMS):
        head, speculation = None, None
        if method == "ngram":
            speculation = Speculation("ngram", k, 2, 5)
        elif method != "plain":
            head, speculation = loading.random(head_shape(target, method), target), Speculation(method, k, model="random")
        it = engine(target, speculation, max(rows), head=head)
        for count in rows:
            cells.append({"method": method, "k": k, "rows": count, "ms": step_ms(it, count, k, context)})
            print(cells[-1], flush=True)
        del it, head
        release()
    return cells


@torch.inference_mode()
def kernels(target: Target, context: int = 512) -> list[dict[str, Any]]:
    """The launches of a replay, in their order of time spent."""
    it = engine(target, Speculation("eagle3", 4, model="random"), 1, head=loading.random(head_shape(target, "eagle3"), target))
    step_ms(it, 1, 4, context)
    put_back, key = fill(it, 1, context), decode_key(1, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            put_back()
            it._step.runner.run(key, [[0], [4]])
        torch.cuda.synchronize()
    found = sorted((e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    spent, count = Counter[str](), Counter[str]()
    for event in found:
        spent[event.name] += event.time_range.elapsed_us()
        count[event.name] += 1
    last = [(e.name[:48], round(e.time_range.elapsed_us(), 2)) for e in found[-70:]]
    total = [{"name": n[:60], "us": round(us / 3, 1), "launches": count[n] / 3} for n, us in spent.most_common()]
    return [*total, {"end": last}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="SmolLM2-135M")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--parts", default="steps,kernels")
    given = parser.parse_args()
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    record = Record(given.out / "heads.json", date=time.strftime("%Y-%m-%d"), device=machine, torch=torch.__version__)
    rows = [int(n) for n in given.rows.split(",")]
    for name in given.shapes.split(","):
        target = Target.random(SHAPES[name], device=DEVICE)
        if "steps" in given.parts:
            record.part(f"steps {name}", lambda target=target: steps(target, rows))
        if "kernels" in given.parts and CUDA:
            record.part(f"kernels {name}", lambda target=target: kernels(target))
        del target
        release()
    print(json.dumps(record.found)[:4000])


if __name__ == "__main__":
    main()
