"""Compares losses for learned drafters at equal cost on one GPU: the same samples, states, steps and shapes of steps, several
seeds. Gives acceptance lengths over held-out answers while it trains and at the end, and the seconds of the steps.

    PYTHONPATH=src python3 benchmarks/gpu/train_losses.py --model FOLDER_OR_GGUF --train DIR --held DIR --out DIR
        [--method eagle3] [--losses kl,lk] [--seeds 0,1] [--steps 3000] [--rate 0.001] [--unroll 5]

--train, --held: folders of samples, made by forerun train or benchmarks/gpu/train_heads.py. lk@2 is LK with lk_rate 2. Without
CUDA it runs on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from harness import CUDA, DEVICE, Record, head_shape, release, synchronize

from forerun.heads.config import HeadConfig
from forerun.llm import LLM
from forerun.models.decoder import Target
from forerun.train import data
from forerun.train.data import Samples
from forerun.train.heads import Trainer
from forerun.train.settings import Settings

KEPT = 7  # drafted tokens of an evaluation
EVALUATIONS = 4  # of a run


def run(
    target: Target, config: HeadConfig, samples: Samples, held: Samples, settings: Settings, like: Trainer | None
) -> tuple[dict[str, Any], Trainer]:
    it = Trainer(target, config, samples, held, settings, like=like)
    curve, spent = [], 0.0
    while not it.done:
        synchronize()
        start = time.perf_counter()
        for _ in range(-(-settings.steps // EVALUATIONS)):
            if not it.done:
                it.step()
        synchronize()
        spent += time.perf_counter() - start
        curve.append({"step": it.made, "seconds": spent, "held_out": it.evaluate(KEPT)._asdict()})
        print(settings.loss, settings.seed, it.made, [round(x, 3) for x in curve[-1]["held_out"]["lengths"]], flush=True)
    last = [m._asdict() for m in it.metrics()[-1:]]
    return {"seconds": spent, "steps_per_s": settings.steps / spent, "curve": curve, "last": last}, it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("train", "held", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--losses", default="kl,lk")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=15360)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    known = {k: str(v) for k, v in vars(given).items() if k not in ("train", "held", "out", "model")}
    record = Record(
        given.out / "train_losses.json", date=time.strftime("%Y-%m-%d"), device=machine, torch=torch.__version__, given=known
    )
    target = LLM.load(given.model, "bfloat16" if CUDA else "auto", DEVICE.type).target
    config, samples, held = head_shape(target, given.method), data.load(given.train), data.load(given.held)
    kept: list[Trainer] = []  # the first, whose states serve all

    def one(loss: str, seed: int) -> dict[str, Any]:
        name, _, rate = loss.partition("@")
        settings = Settings(
            steps=given.steps, rate=given.rate, loss=name, lk_rate=float(rate or 3), unroll=given.unroll, seed=seed,
            tokens=given.step_tokens,
        )  # fmt: skip
        found, it = run(target, config, samples, held, settings, kept[0] if kept else None)
        if not kept:
            kept.append(it)
        return found

    for seed in map(int, given.seeds.split(",")):
        for loss in given.losses.split(","):
            record.part(f"{loss}, seed {seed}", lambda loss=loss, seed=seed: one(loss, seed))
            release()


if __name__ == "__main__":
    main()
