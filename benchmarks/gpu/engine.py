"""Measures the engine on one GPU, part by part. The record is written after each part. If a part fails, the record says so and
the next part follows.

    PYTHONPATH=src python3 benchmarks/gpu/engine.py --out DIR [--gguf FILE] [--prompts FILE] [--parts check,sync,..]

--gguf: the default model's GGUF file or folder, for real weights. Without it the weights are random, and acceptance means
nothing.
--prompts: {"repeat": [[ids]...], "random": [[ids]...]}. Qwen3-0.6B and Llama-3.1-8B are shapes with random weights; they give
step times only. Times are medians over replays of captured steps at one context, by device events. Tokens/s are those of whole
batches by the wall clock, prompts included.

Parts, all by default: limit; check (logits, greedy, like-plain, distribution); sync; drafters; memory; starts; host; tokens;
queue (128 requests, 32 at once); mixed (half of them copying); timeline (where a batch's time goes); sampled; share; replay;
shared.
To try the script without CUDA: --small tiny --shapes tiny --share tiny --rows 1,2 --widths 0,4 --samples 64 --tokens 32.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import correctness
import speed
import torch
from harness import ARMS, CUDA, DEVICE, SHAPES, Record, release

from forerun.models import hub
from forerun.models.decoder import Target

CHECK = ("logits", "greedy", "like-plain", "distribution")
PARTS = ("limit", *CHECK, "sync", "drafters", "memory", "starts", "host", "tokens", "queue", "mixed", "timeline", "sampled")
BY_SHAPE = ("share", "replay", "shared")


def small_parts(record: Record, parts: list[str], given: argparse.Namespace, prompts: dict[str, Any]) -> None:
    """The parts for the small model, with real weights if they were given."""
    folder = hub.resolve(given.gguf) if given.gguf else None
    name = given.small
    target = Target.load(folder, torch.bfloat16, DEVICE) if folder else Target.random(SHAPES[name], device=DEVICE)
    repeat = prompts["repeat"]
    mixed = [ids for pair in zip(repeat, prompts["random"], strict=False) for ids in pair]
    work = {
        "limit": speed.limit,
        "logits": lambda: correctness.against_transformers(folder, repeat[:4]) if folder else "needs --gguf",
        "greedy": lambda: (
            correctness.like_the_cpu(folder, [p[: 40 + 7 * i] for i, p in enumerate(repeat[:20])], given.tokens // 2)
            if folder
            else "needs --gguf"
        ),
        "like-plain": lambda: correctness.like_plain(target, repeat),
        "distribution": lambda: correctness.distribution(target, folder, prompts, given.samples),
        "sync": lambda: correctness.no_waiting(target, repeat),
        "drafters": lambda: speed.batches(target, ARMS, repeat, "repeat", 0.0, tokens=given.tokens),
        "memory": lambda: speed.memory(target, 1),
        "starts": lambda: speed.starts(folder) if folder else "needs --gguf",
        "host": lambda: speed.host_time(target, repeat, [n for n in given.rows if n <= 128]),
        "tokens": lambda: [
            cell
            for kind, temperature in (("repeat", 0.0), ("random", 1.0))
            for cell in speed.batches(target, speed.TOKENS_PER_S, prompts[kind], kind, temperature, (1, 8, 32), given.tokens, 4)
        ],
        "queue": lambda: speed.batches(target, speed.TOKENS_PER_S, repeat * 4, "repeat", 0.0, (128,), given.tokens, 3, rows=32),
        "mixed": lambda: speed.batches(target, speed.TOKENS_PER_S, mixed, "mixed", 0.0, (8, 32), given.tokens, 4),
        "timeline": lambda: speed.timeline(target, repeat, 32, given.tokens),
        "sampled": lambda: speed.sampled(target, [n for n in given.rows if n <= 32]),
    }
    for part in PARTS:
        if part in parts:
            record.part({"tokens": "tokens_per_s"}.get(part, part), work[part])


def shape_parts(record: Record, parts: list[str], given: argparse.Namespace, name: str) -> None:
    """The parts for a shape, with random weights."""
    target = Target.random(SHAPES[name], device=DEVICE)
    if given.few:
        target.kernels.few = given.few  # type: ignore[attr-defined]
    if "share" in parts and name in given.share:
        record.part(f"share {name}", lambda: speed.share(target, [n for n in given.rows if n <= 32]))
    if "shared" in parts:
        record.part(f"shared {name}", lambda: speed.shared(target))
    if "replay" in parts:
        record.part(f"replay {name}", lambda: speed.replay(target, given.widths, given.rows))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, numbers = lambda text: text.split(","), lambda text: [int(n) for n in text.split(",")]
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--gguf")
    options.add_argument("--prompts", type=Path)
    options.add_argument("--parts", type=names, default=[*PARTS, *BY_SHAPE])
    options.add_argument("--small", default="SmolLM2-135M", help="the shape of the small model without --gguf")
    options.add_argument("--shapes", type=names, default=["SmolLM2-135M", "Qwen3-0.6B", "Llama-3.1-8B"])
    options.add_argument("--share", type=names, default=["Qwen3-0.6B"], help="the shapes for the part `share`")
    options.add_argument("--rows", type=numbers, default=[1, 8, 32, 128])
    options.add_argument("--widths", type=numbers, default=[0, 2, 4, 8, 16])
    options.add_argument("--samples", type=int, default=4000)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--few", type=int, help="Triton's products up to so many tokens (default: the kernels' own)")
    given = options.parse_args()
    parts = [part for name in given.parts for part in (CHECK if name == "check" else (name,))]
    unknown = set(parts) - {*PARTS, *BY_SHAPE}
    if unknown:
        options.error(f"unknown parts: {', '.join(sorted(unknown))}; known: check, {', '.join((*PARTS, *BY_SHAPE))}")

    given.out.mkdir(parents=True, exist_ok=True)
    record = Record(
        given.out / "engine.json",
        date=time.strftime("%Y-%m-%d"),
        device=torch.cuda.get_device_name() if CUDA else "the CPU: to try the script, figures mean nothing",
        torch=torch.__version__,
        weights="real" if given.gguf else "random",
    )
    rng = random.Random(0)
    given_vocab = Target.load(hub.resolve(given.gguf), torch.bfloat16).vocab if given.gguf else SHAPES[given.small].vocab_size
    most = min(given_vocab, 40000)
    prompts = {
        kind: [[rng.randrange(3, most) for _ in range(n)] for _ in range(32)] for kind, n in (("repeat", 300), ("random", 200))
    }
    if given.prompts:
        prompts = json.loads(given.prompts.read_text())
    gc.collect()
    gc.freeze()  # all objects so far stay, so the collector need not visit them between steps
    if set(parts) & set(PARTS):
        small_parts(record, parts, given, prompts)
        release()
    if set(parts) & set(BY_SHAPE):
        for name in given.shapes:
            record.part(f"shape {name}", partial(shape_parts, record, parts, given, name))


if __name__ == "__main__":
    main()
