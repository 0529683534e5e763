"""Seconds of a step of the default model on the CPU, by its number of positions, and seconds of a prompt. Compares several
sides: dtypes, instruction sets (FORERUN_CPU_ISA), and another source tree.

    python benchmarks/cpu/steps.py [--isa avx2] [--dtype bfloat16] [--before SRC [--before-cc CC]] [--out FILE]

Each side is a process of its own. Their steps are interleaved one by one, so that the state of the machine is the same for all.
A source tree older than FORERUN_CPU_ISA compiles with -march=native; --before-cc gives it a compiler for a lower instruction
set. Prints medians; all samples go to the JSON file. If other programs run, start this one through `chrt -f 1`. Otherwise
threads that wait for each other are slow now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe, limits

HERE = Path(__file__).resolve().parents[2] / "src"
CONTEXT, PROMPT = 300, 500
POSITIONS = (1, 2, 4, 8, 9, 16, 32, 64)

WORKER = """
import json, sys, time
import torch
from forerun.kernels import Batch
from forerun.models import hub
from forerun.models.decoder import Target

target = Target.load(hub.resolve(None), sys.argv[1])
kv, table = target.kv_cache(70, 16), torch.arange(1, 65, dtype=torch.int32)[None]
ids = torch.randint(100, 40000, (1024,), generator=torch.Generator().manual_seed(0))

@torch.inference_mode()
def run(begin, end, all):
    at = torch.arange(begin, end)
    wanted = torch.arange(end - begin) if all else torch.tensor([end - begin - 1])
    target.forward(Batch(ids[at], at, torch.tensor([0, end - begin], dtype=torch.int32), table, wanted), kv)

for line in sys.stdin:
    begin, end, all = json.loads(line)
    start = time.perf_counter()
    run(begin, end, all)
    print(time.perf_counter() - start, flush=True)
"""


class Side:
    """A process that makes one step for each line on its standard input."""

    def __init__(self, source: Path, dtype: str, env: dict[str, str]) -> None:
        env = {**os.environ, "PYTHONPATH": str(source), "GOMP_SPINCOUNT": "1000", **env}
        command = [sys.executable, "-c", WORKER, dtype]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, begin: int, end: int, all: bool) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([begin, end, all]) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def sides_of(given: argparse.Namespace) -> dict[str, Side]:
    isas, dtypes = given.isa.split(","), given.dtype.split(",")
    sides = {f"{dtype}, {isa}": Side(HERE, dtype, limits(isa)) for isa in isas for dtype in dtypes}
    if given.before:
        env = limits(isas[0]) | ({"CC": given.before_cc} if given.before_cc else {})
        sides |= {f"{dtype}, before": Side(given.before.resolve(), dtype, env) for dtype in dtypes}
    return sides


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--isa", default="auto", help="instruction sets, separated by commas")
    options.add_argument("--dtype", default="bfloat16,float32", help="dtypes, separated by commas")
    options.add_argument("--before", type=Path, help="the src folder of another source tree")
    options.add_argument("--before-cc", help="the C compiler for that tree")
    options.add_argument("--before-version", help="a description of that tree, for the record")
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--out", type=Path, default=Path("steps-cpu.json"))
    given = options.parse_args()

    sides = sides_of(given)
    for side in sides.values():
        side.seconds(0, CONTEXT, False)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for i in range(given.rounds):
        for n in (*POSITIONS, PROMPT):
            if n > POSITIONS[-2] and i % 5:
                continue  # these take long
            for name in list(sides) if i % 2 else list(sides)[::-1]:
                begin = 0 if n == PROMPT else CONTEXT
                samples[name].setdefault(str(n), []).append(sides[name].seconds(begin, begin + n, n != PROMPT))
    print(f"{'ms, medians':24}" + "".join(f"{n:>8}" for n in (*POSITIONS, f"{PROMPT}, a prompt")))
    medians = {name: {n: statistics.median(s) for n, s in found.items()} for name, found in samples.items()}
    for name, found in medians.items():
        print(f"{name:24}" + "".join(f"{1e3 * s:8.1f}" for s in found.values()))

    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), **describe(), "isa": given.isa, "before": given.before_version, "context": CONTEXT,
        "prompt": PROMPT, "median_s": medians, "samples_s": samples,
    }  # fmt: skip
    given.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
