"""Measures training steps of learned drafters on one GPU, with random weights and random tokens: steps and tokens a second, the
launches of a step with their microseconds, and the arithmetic and memory traffic that a step needs at least. Before that it
checks that the fast operations agree with those in plain torch, and captured steps with others. Acceptance means nothing here.

    PYTHONPATH=src python3 benchmarks/gpu/train_speed.py --out DIR [--shape SmolLM2-135M] [--losses lk,kl] [--unroll 5]
        [--methods eagle3,mtp,dflash,eagle,draft] [--tokens 15360] [--draft-vocab 16384] [--samples 2000] [--steps 200]

Without CUDA all of it runs on the CPU, to try the script: --shape tiny --tokens 512 --draft-vocab 250 --samples 20 --steps 3.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import CUDA, DEVICE, SHAPES, Record, head_shape, release, synchronize

from forerun.heads.config import HeadConfig
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.train import plain
from forerun.train.data import Samples
from forerun.train.heads import Trainer
from forerun.train.settings import Settings


def random_samples(count: int, vocab: int, seed: int = 0) -> Samples:
    """Prompts of 60 to 320 tokens with answers of 60 to 200, of random ids: about those of the quick trial in lengths."""
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(60, 320, count), rng.integers(60, 200, count)
    start = np.concatenate(([0], (prompt + answer).cumsum()))
    return Samples(rng.integers(3, vocab, start[-1], dtype=np.int32), start, prompt.astype(np.int32))


def shape_of(target: Target, method: str, draft_vocab: int) -> HeadConfig | ModelConfig:
    if method == "draft":
        c = target.config
        return ModelConfig(c.vocab_size, 256, 768, 4, 4, 2, 64, c.max_positions, c.eps, c.rope, tied=True)
    config = head_shape(target, method)
    if method != "eagle3":
        return config
    return replace(config, decoder=replace(config.decoder, vocab_size=draft_vocab))


def needed(it: Trainer) -> dict[str, float]:
    """The floating-point operations of a step's products, about, and the bytes of logits that it reads and writes at least: the
    teacher's once to write and once for each unrolled step, the drafter's twice to write and twice to read."""
    sizes, unroll, learned = it._data.packing.sizes, it._unrolled, it._master is not None
    vocab, hidden = it._values.shape
    inner = it.parameters.count - learned * vocab * hidden
    block = isinstance(it.config, HeadConfig) and it.config.method == "dflash"
    anchors = sizes.bases // 4
    places = sizes.tokens + (anchors * (unroll + 1) if block else (unroll - 1) * sizes.bases)
    scored = anchors * unroll if block else sizes.bases * unroll
    teacher = 0 if it.settings.loss == "hard" else sizes.bases
    products = 6 * places * inner + ((6 if learned else 4) * scored + 2 * teacher) * vocab * hidden
    logits = 2 * vocab * (scored * 4 + (teacher and teacher + scored))
    return {
        "parameters": it.parameters.count, "tokens": sizes.tokens, "bases": sizes.bases, "TFLOP": products / 1e12,
        "logits_GB": logits / 1e9,
    }  # fmt: skip


def speed(it: Trainer, steps: int) -> dict[str, Any]:
    """Steps a second over `steps` steps, three times."""
    for _ in range(6):
        it.step()
    it.metrics()
    synchronize()
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            it.step()
        host = time.perf_counter() - start
        synchronize()
        rates.append(steps / (time.perf_counter() - start))
    last = it.metrics()[-1]
    assert np.isfinite(last.loss), last
    return {
        "steps_per_s": rates, "host_ms_per_step": host / steps * 1e3, "tokens_per_s": max(rates) * it.tokens_per_step,
        "tokens_per_step": it.tokens_per_step, "memory_GB": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
        "last": last._asdict(), **needed(it),
    }  # fmt: skip


def measured(
    target: Target, config: HeadConfig | ModelConfig, samples: Samples, settings: Settings, steps: int
) -> dict[str, Any]:
    start = time.perf_counter()
    it = Trainer(target, config, samples, None, settings)
    synchronize()
    found = {"set_up_s": time.perf_counter() - start, "tokens_of_states": len(samples.ids)} | speed(it, steps)
    return found | {"launches": launches(it) if CUDA else None}


def launches(it: Trainer) -> list[dict[str, Any]]:
    """The launches of a step, in their order of time spent."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            it.step()
        synchronize()
    spent, count = Counter[str](), Counter[str]()
    for event in profile.events():
        if event.device_type.name == "CUDA":
            spent[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
    return [{"name": n[:90], "us": round(us / 3, 1), "launches": count[n] / 3} for n, us in spent.most_common(40)]


def agreement(target: Target, config: HeadConfig | ModelConfig, samples: Samples, settings: Settings) -> dict[str, Any]:
    """Relative differences: of the first gradient between the fast operations and plain torch in the same dtype, by parameter
    the largest; of the parameters after 8 steps between captured and other steps."""
    fast, slow = (Trainer(target, config, samples, None, settings, None, operations, False) for operations in (None, plain))
    fast.step()
    slow.step()
    parts = {
        " ".join(names): float((got - want).norm() / want.norm().clamp(min=1e-9))
        for names in fast.parameters.names
        for got, want in [(fast.parameters.gradient(names), slow.parameters.gradient(names))]
    }
    found: dict[str, Any] = {"gradient": parts, "losses": [fast.metrics()[-1].loss, slow.metrics()[-1].loss]}
    del slow
    release()
    if CUDA:
        captured = Trainer(target, config, samples, None, settings)
        for _ in range(8):
            captured.step()
        for _ in range(7):
            fast.step()
        a, b = captured.parameters.master, fast.parameters.master
        found["captured"] = float((a - b).norm() / b.norm())
        found["losses_captured"] = [captured.metrics()[-1].loss, fast.metrics()[-1].loss]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="SmolLM2-135M")
    parser.add_argument("--methods", default="eagle3")
    parser.add_argument("--losses", default="lk")
    parser.add_argument("--unroll", default="5")
    parser.add_argument("--tokens", type=int, default=15360)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    known = {"date": time.strftime("%Y-%m-%d"), "device": machine, "torch": torch.__version__, "shape": given.shape}
    record = Record(given.out / "train_speed.json", **known)
    target = Target.random(SHAPES[given.shape], torch.bfloat16 if CUDA else torch.float32, DEVICE)
    samples = random_samples(given.samples, target.vocab)
    for method in given.methods.split(","):
        config = shape_of(target, method, given.draft_vocab)
        few = Settings(steps=10**6, tokens=min(given.tokens, 2048), unroll=3, warm_up=0.0)
        record.part(f"{method} agreement", partial(agreement, target, config, random_samples(20, target.vocab), few))
        for loss in given.losses.split(","):
            for unroll in map(int, given.unroll.split(",")):
                settings = Settings(steps=10**6, tokens=given.tokens, unroll=unroll, loss=loss)
                work = partial(measured, target, config, samples, settings, given.steps)
                record.part(f"{method} {loss} {unroll}", work)
    print(json.dumps(record.found)[:6000])


if __name__ == "__main__":
    main()
