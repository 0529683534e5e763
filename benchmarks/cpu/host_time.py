"""The host's time in one decode step: all that `Engine.step` does except the device's work. Runs on any machine.

    python benchmarks/cpu/host_time.py [--text] [--out FILE] [--profile ROWS]

The steps have the padded layout. A report that is ready at once replaces the device's part: random tokens, and with n-gram
drafts of 4 tokens the counts of rows that accept 2 of them. The costs of launching on a GPU (a graph, copies, an event) are not
included. Bar: below the device's time for the same step. --text: also run with the default model's detokenizer, which is
fetched if needed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters.ngram import DeviceNgram
from forerun.engine.cycle import PROMPT, Key, Report
from forerun.engine.engine import Engine
from forerun.engine.text import Detokenizer, NoText
from forerun.models import hub, tokenizer
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import Target
from forerun.types import Request, SamplingParams

ROWS = (1, 8, 32, 128)
NGRAM = Speculation("ngram", 4, 2, 5)
PROMPT_TOKENS, STEPS, REPETITIONS = 20, 100, 5
LONGEST = PROMPT_TOKENS + 1 + 5 * (STEPS * REPETITIONS + 20)
VOCAB = 49152


def engine(rows: int, speculation: Speculation | None, detokenizer: Callable[[], Detokenizer]) -> Engine:
    """An engine that never waits for its device, with `rows` requests past their prompts."""
    target = Target.random(ModelConfig(VOCAB, 16, 16, 1, 1, 1, 16, LONGEST, 1e-5, Rope(1e4)), torch.float32)
    config = EngineConfig(max_num_seqs=rows, kv_cache_tokens=rows * (LONGEST + 16), block_size=16, speculation=speculation)

    def make(slots: Any, *_: Any) -> DeviceNgram | None:
        return None if speculation is None else DeviceNgram(slots, speculation, VOCAB)

    it = Engine(target, config, make, detokenizer, padded=True)
    generator = torch.Generator().manual_seed(0)
    drafts = speculation.num_speculative_tokens if speculation else 0
    counts = torch.tensor([[3, drafts, 2, 0, drafts] if drafts else [1, 0, 0, 0, 0]] * rows)
    pool = [Report(torch.randint(2, VOCAB, (rows, drafts + 1), generator=generator), counts, None) for _ in range(16)]
    made = 0

    runner: Any = it._step.runner
    launch = runner.run

    def ready(key: Key, given: Sequence[list[int]]) -> Report:
        nonlocal made
        if key.layout == PROMPT:
            return launch(key, given)
        made += 1
        return pool[made % len(pool)]

    runner.run = ready
    runner.cost = lambda keys, context: [1.0 + 0.05 * key.width for key in keys]
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST - PROMPT_TOKENS)
    for i in range(rows):
        prompt = tuple(torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=generator).tolist())
        it.add(Request(str(i), prompt, params, LONGEST - PROMPT_TOKENS, i, stop_ids=(0, 1)))
    for _ in range(10):
        it.step()
    return it


def microseconds(it: Engine) -> list[float]:
    """The times of single steps, in microseconds."""
    samples = []
    for _ in range(STEPS):
        start = time.perf_counter()
        it.step()
        samples.append(1e6 * (time.perf_counter() - start))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=int, metavar="ROWS", help="print a profile of steps of so many rows instead")
    args = parser.parse_args()
    kinds: dict[str, Callable[[], Detokenizer]] = {"no text": NoText}
    if args.text:
        known = tokenizer.Tokenizer(hub.resolve())
        kinds["text"] = lambda: tokenizer.Detokenizer(known)
    cells = []
    for text, detokenizer in kinds.items():
        for name, speculation in (("plain", None), ("ngram", NGRAM)):
            for rows in ROWS if args.profile is None else (args.profile,):
                it = engine(rows, speculation, detokenizer)
                if args.profile is not None:
                    profile = cProfile.Profile()
                    profile.runcall(microseconds, it)
                    print(f"{name}, {text}, {rows} rows, {STEPS} steps")
                    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
                    continue
                before = gc.get_stats()[2]["collections"]
                medians = [statistics.median(microseconds(it)) for _ in range(REPETITIONS)]
                median, best = statistics.median(medians), min(medians)
                whole = gc.get_stats()[2]["collections"] - before
                cells.append({"drafts": name, "text": text, "rows": rows, "us": medians, "full_collections": whole})
                print(f"{name:6} {text:8} {rows:4} rows: {median:7.0f} us a step (best {best:.0f}), {median / rows:5.1f} a row")
    if args.out is not None:
        made_on = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.out.write_text(json.dumps({**made_on, "cells": cells}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
