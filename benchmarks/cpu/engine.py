"""Measures the engine on the CPU against its bars, with the default model in bfloat16. A bar is a limit on a ratio of figures
of one run.

    python benchmarks/cpu/engine.py [--isa avx2] [--parts tasks,..] [--tasks copy,..] [--out FILE] [--quick]

Prints the machine's limit first: the read bandwidth of its memory, and the tokens/s that it allows for these weights. Then
prints each bar with the measured value. All raw samples go to the JSON file. --isa: the highest instruction set that both sides
may use. --parts: what is measured, of start, memory, transformers, steps, tasks, random and throughput. --tasks: tasks of
`bench`. The comparison needs transformers (in the `dev` extra). If other programs run, start this one through `chrt -f 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, limits

from forerun.bench.command import measure
from forerun.bench.engines.arms import BASELINE, Arm, parse
from forerun.bench.engines.sides import Embedded
from forerun.bench.engines.subject import Subject, random_ids
from forerun.bench.load.plan import Plan
from forerun.bench.pages.progress import Course
from forerun.bench.records.record import Batch
from forerun.bench.workloads.tasks import find
from forerun.llm import LLM, LoadedModel
from forerun.models import loading
from forerun.types import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
TASKS = ("copy", "return-code", "edit-code", "explain")
PARTS = ("start", "memory", "transformers", "steps", "tasks", "random", "throughput")
KV = 16384


def read_bandwidth() -> float:
    """The GB/s of a sum over memory far larger than the caches."""
    data = torch.ones(256 << 20, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def timed(run: Callable[[], int]) -> float:
    """The tokens/s of one run. run: returns the number of its tokens."""
    start = time.perf_counter()
    return run() / (time.perf_counter() - start)


def alternating(arms: dict[str, Callable[[], int]], repetitions: int) -> dict[str, list[float]]:
    """The tokens/s of each arm in each repetition, in the order A B B A, after a warm-up."""
    for run in arms.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(repetitions):
        for name in list(arms) if i % 2 == 0 else list(arms)[::-1]:
            samples[name].append(timed(arms[name]))
    return samples


def ratio(samples: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(samples[over], samples[under], strict=True))


def ids_of(loaded: LoadedModel, task: str, variant: int) -> list[int]:
    """The prompt ids of a task."""
    prompt = find((task,))[0].prompt(variant)
    if prompt.message is not None:
        text = loaded.tokenizer.render_chat([{"role": "user", "content": prompt.message}])
        return loaded.tokenizer.encode(text, add_special_tokens=False)
    assert prompt.text is not None
    return loaded.tokenizer.encode(prompt.text)


def against_transformers(loaded: LoadedModel, repetitions: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of one greedy request, plain and with prompt look-up, of this engine and of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(loaded.folder), dtype=torch.bfloat16).eval()
    weights = dict(loading.parts(loaded.target.config, loaded.target.weights))
    theirs.load_state_dict(weights, strict=False)  # a tied head is not listed
    prompt = torch.tensor([ids_of(loaded, "copy", 0)])
    settings = {
        "do_sample": False,
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "attention_mask": torch.ones_like(prompt),
    }
    plain, ngram = LLM(loaded, kv_cache_tokens=KV), LLM(loaded, speculative_config=NGRAM, kv_cache_tokens=KV)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def ours(llm: LLM) -> Callable[[], int]:
        def run() -> int:
            llm.clear_prefix_cache()
            return len(llm.generate(prompt[0].tolist(), params)[0].token_ids)

        return run

    @torch.inference_mode()
    def generate(**more: Any) -> int:
        return theirs.generate(prompt, **settings, **more).shape[1] - prompt.shape[1]

    arms = {
        "plain": ours(plain),
        "ngram": ours(ngram),
        "transformers": lambda: generate(),
        "transformers prompt look-up": lambda: generate(prompt_lookup_num_tokens=4),
    }
    return alternating(arms, repetitions)


def step_times(loaded: LoadedModel, repetitions: int) -> dict[str, list[float]]:
    """Seconds of a forward pass of 1, 5 and 9 positions of one sequence after a context of 300, interleaved."""
    llm = LLM(loaded, kv_cache_tokens=KV)
    engine = llm.engine
    slots, pages = engine.state, engine.scheduler.pages
    engine.state.set(0, [5] * 320)
    slots.block_table[0, :20] = torch.arange(1, 21, dtype=torch.int32)
    assert pages.count > 20
    samples: dict[str, list[float]] = {"1": [], "5": [], "9": []}
    at = np.array
    with torch.inference_mode():
        loaded.target.forward(slots.batch(at([0]), at([0]), at([300]), at([299])), engine.kv)
        for _ in range(repetitions * 12):
            for rows in (1, 5, 9, 9, 5, 1):
                start = time.perf_counter()
                loaded.target.forward(slots.batch(at([0]), at([300]), at([rows]), np.arange(rows)), engine.kv)
                samples[str(rows)].append(time.perf_counter() - start)
    return samples


def random_text(loaded: LoadedModel, repetitions: int, tokens: int) -> dict[str, list[float]]:
    """Tokens/s on 200 random ids at temperature 1, plain and with n-gram drafts, where nothing matches."""
    plain, ngram = LLM(loaded, kv_cache_tokens=KV), LLM(loaded, speculative_config=NGRAM, kv_cache_tokens=KV)
    rng = random.Random(0)
    prompt = [rng.randrange(100, 49000) for _ in range(200)]
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=1)

    def run(llm: LLM) -> Callable[[], int]:
        def once() -> int:
            llm.clear_prefix_cache()
            return len(llm.generate(prompt, params)[0].token_ids)

        return once

    return alternating({"plain": run(plain), "ngram": run(ngram)}, repetitions * 2)


def throughput(loaded: LoadedModel, repetitions: int, tokens: int) -> dict[str, list[float]]:
    """Tokens/s of one request and of eight at once, in plain decoding."""
    llm = LLM(loaded, kv_cache_tokens=KV)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def run(count: int) -> Callable[[], int]:
        def once() -> int:
            llm.clear_prefix_cache()
            prompts = [ids_of(loaded, "explain", i) for i in range(count)]
            return sum(len(o.token_ids) for o in llm.generate(prompts, params))

        return once

    return alternating({"1": run(1), "8": run(8)}, repetitions)


def decode_rate(batch: Batch) -> float:
    """Tokens/s after the first token. It leaves the prompt out, which speculation does not speed up."""
    return sum(len(a.token_ids) - 1 for a in batch.answers) / sum(a.e2e_s - a.ttft_s for a in batch.answers)


def tasks(loaded: LoadedModel, names: Sequence[str], repetitions: int) -> dict[str, Any]:
    """For each task: n-gram's speed-up over plain decoding, its tokens a step, and the share of a step outside the target."""

    (ngram,) = parse(("ngram",))
    sides = (
        Embedded(Arm(BASELINE), lambda: LLM(loaded, kv_cache_tokens=KV)),
        Embedded(
            ngram,
            lambda: LLM(loaded, speculative_config=ngram.settings, kv_cache_tokens=KV),
        ),
    )
    plan = Plan(find(tuple(names)), repetitions=repetitions)
    ids = random_ids(loaded.target.vocab, frozenset(loaded.tokenizer.special_ids))
    record = measure(plan, Subject(loaded.name, "forerun", sides, ids), Course(lambda _: None))
    found: dict[str, Any] = {}
    for task in names:
        arms: dict[str, list[Any]] = {}
        for batch in record.batches:
            if batch.task == task and not batch.warmup:
                arms.setdefault(batch.arm, []).append(batch)
        (name,) = (arm for arm in arms if arm != "baseline")
        rates = {arm: [decode_rate(b) for b in batches] for arm, batches in arms.items()}
        whole_rates = {
            arm: [sum(len(a.token_ids) for a in b.answers) / b.wall_s for b in batches] for arm, batches in arms.items()
        }
        times = [b.times for b in arms[name]]
        efficiency = [  # for each pair of runs on the same prompt
            fast / plain / (1 + b.answers[0].counts.accepted / b.answers[0].counts.steps)
            for fast, plain, b in zip(rates[name], rates["baseline"], arms[name], strict=True)
        ]
        whole = sum(t.draft_s + t.forward_s + t.verify_s + t.other_s for t in times)
        counts = [a.counts for b in arms[name] for a in b.answers]
        found[task] = {
            "decode_tokens_per_s": rates,
            "tokens_per_s": whole_rates,
            "speedup": ratio(rates, name, "baseline"),
            "per_tokens_of_a_step": statistics.median(efficiency),
            "tokens_per_step": 1 + sum(c.accepted for c in counts) / sum(c.steps for c in counts),
            "not_target": (whole - sum(t.forward_s for t in times)) / whole,
        }
    return found


def peak_memory() -> int:
    """Peak resident bytes of a new process that answers 16 prompts of 900 tokens with 100 tokens each."""
    code = (
        "from pathlib import Path; from forerun.llm import LLM; from forerun.types import SamplingParams\n"
        f"llm = LLM(dtype='bfloat16', kv_cache_tokens={KV}, speculative_config='ngram')\n"
        "llm.generate([[5] * 900] * 16, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))\n"
        "print(next(x.split()[1] for x in Path('/proc/self/status').read_text().splitlines() if x.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout) * 1024  # not ru_maxrss, which starts at the parent's value


def start_up() -> list[float]:
    """Seconds from the start of the command to its first token, with the model in the cache."""
    command = [sys.executable, "-m", "forerun", "generate", "Hello", "--max-tokens", "1"]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("bench-cpu.json"))
    options.add_argument("--quick", action="store_true", help="fewer repetitions")
    options.add_argument("--isa", default="auto", help="auto, or one of FORERUN_CPU_ISA")
    options.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    options.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    wanted = limits(given.isa)
    if given.isa != "auto" and any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # torch reads them at its import
    repetitions, tokens = (2, 64) if given.quick else (6, 128)

    loaded = LLM.load(dtype="bfloat16")
    limit = read_bandwidth()
    print(f"memory reads at {limit:.1f} GB/s: the weights allow {limit * 1e9 / loaded.target.bytes:.0f} tokens/s", flush=True)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), **describe(), "dtype": str(loaded.target.dtype), "read_GB_per_s": limit,
        "weights": loaded.target.bytes,
    }  # fmt: skip
    rows: list[tuple[str, float, str, bool]] = []

    def bar(name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
        met = value >= least if least is not None else value <= (most or 0)
        rows.append((name, value, wanted, met))
        print(f"{name:<58} {value:7.3f}  {wanted:<8} {'met' if met else 'NOT MET'}", flush=True)

    if "start" in given.parts:
        record["start_up_s"] = start_up()
        bar("seconds from command to first token", statistics.median(record["start_up_s"]), most=8)
    if "memory" in given.parts:
        record["peak_memory"] = peak_memory()
        allowed = 1.3 * (loaded.target.bytes + KV * loaded.target.kv_bytes_per_token) + 0.6e9
        bar("peak memory / (1.3 (weights + KV) + 0.6 GB)", record["peak_memory"] / allowed, most=1)
    if "transformers" in given.parts:
        samples = record["against_transformers"] = against_transformers(loaded, repetitions, tokens)
        print({k: round(statistics.median(v), 1) for k, v in samples.items()})
        bar("plain decoding / transformers", ratio(samples, "plain", "transformers"), least=3.5 if given.isa == "avx2" else 2.0)
        bar("n-gram / transformers' prompt look-up", ratio(samples, "ngram", "transformers prompt look-up"), least=1.0)
    if "steps" in given.parts:
        times = record["step_s"] = step_times(loaded, repetitions)
        bar(
            "step of 9 rows / step of 1 row",
            statistics.median(times["9"]) / statistics.median(times["1"]),
            most=1.5 if given.isa == "avx2" else 1.3,
        )
    if "tasks" in given.parts:
        record["tasks"] = tasks(loaded, given.tasks, repetitions - 1 if given.quick else 5)
    for task, one in record.get("tasks", {}).items():
        name = f"{task}: n-gram speed-up / tokens a step ({one['tokens_per_step']:.2f})"
        bar(name, one["per_tokens_of_a_step"], least=0.85)
        bar(f"{task}: drafting, verifying, bookkeeping / step", one["not_target"], most=0.10)
    if "random" in given.parts:
        samples = record["random_text"] = random_text(loaded, repetitions, tokens)
        bar("random text: n-gram / plain", ratio(samples, "ngram", "plain"), least=0.97)
    if "throughput" in given.parts:
        samples = record["throughput"] = throughput(loaded, repetitions // 2 + 1, tokens)
        bar("8 requests / 1 request, tokens/s", ratio(samples, "8", "1"), least=3.0)
    record["bars"] = [dict(zip(("name", "value", "bar", "met"), row, strict=True)) for row in rows]
    given.out.write_text(json.dumps(record))
    print(f"{sum(row[3] for row in rows)} of {len(rows)} bars met; raw samples in {given.out}")


if __name__ == "__main__":
    main()
