"""Measures trained heads on the CPU: acceptance length and tokens/s over plain decoding on the tasks of forerun bench, one
request at a time, greedy. All arms take each prompt in turn, so that a change of the machine's speed meets all of them.

    python benchmarks/heads/on_cpu.py --heads DIR --tasks tasks.json --out record.json [--prompts 6] [--tokens 128]
        [--dtype auto] [--only explain,chat]

--heads: a folder with a head in each of its folders eagle3, mtp, dflash. tasks.json: made by benchmarks/heads/task_ids.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from forerun.kernels import cpu
from forerun.llm import LLM
from forerun.types import SamplingParams

DRAFTS = {"eagle3": 4, "mtp": 4, "dflash": 7}


def arms(heads: Path) -> dict[str, tuple[dict[str, Any] | None, bool]]:
    look_up = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    found: dict[str, tuple[dict[str, Any] | None, bool]] = {
        "plain": (None, True), "ngram k=4": ({"method": "ngram", "num_speculative_tokens": 4, **look_up}, True),
    }  # fmt: skip
    for method, k in DRAFTS.items():
        if (heads / method).is_dir():
            own = {"method": method, "model": str(heads / method), "num_speculative_tokens": k}
            found |= {f"{method} k={k}, whole drafts": (own, False), f"{method} k={k}": (own, True)}
            if method == "eagle3":
                found["eagle3 and ngram k=4"] = (own | look_up, True)
    return found


def interval(pairs: list[tuple[float, float]]) -> list[float]:
    """The 95 % interval of a ratio of sums, over resampled requests."""
    rng = random.Random(0)
    drawn = []
    for _ in range(1000):
        some = rng.choices(pairs, k=len(pairs))
        drawn.append(sum(a for a, _ in some) / max(sum(b for _, b in some), 1e-9))
    drawn.sort()
    return [round(drawn[25], 3), round(drawn[974], 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tasks = {name: ids[: given.prompts] for name, ids in json.loads(given.tasks.read_text()).items()}
    if given.only:
        tasks = {name: tasks[name] for name in given.only.split(",")}
    model = LLM.load(None, given.dtype, "cpu")
    llms = {
        name: LLM(model, speculative_config=config, adaptive_drafts=adaptive, max_model_len=1024, kv_cache_tokens=4096)
        for name, (config, adaptive) in arms(given.heads).items()
    }
    params, warm = SamplingParams(temperature=0, max_tokens=given.tokens), SamplingParams(temperature=0, max_tokens=16)
    for llm in llms.values():
        llm.generate([next(iter(tasks.values()))[0]], warm)
    found: dict[str, Any] = {}
    for task, prompts in tasks.items():
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
        for ids in prompts:
            for name, llm in llms.items():
                llm.clear_prefix_cache()
                start = time.perf_counter()
                one = llm.generate([ids], params)[0].completions[0]
                seconds = time.perf_counter() - start - one.timing.ttft_s
                rows[name].append({"tokens": len(one.token_ids), "steps": one.stats.steps, "seconds": seconds})
        found[task] = {}
        for name, each in rows.items():
            speeds = [(r["tokens"] - 1) / r["seconds"] for r in each]
            over = [a / ((b["tokens"] - 1) / b["seconds"]) for a, b in zip(speeds, rows["plain"], strict=True)]
            pairs = [(r["tokens"] - 1, r["steps"]) for r in each]
            found[task][name] = {
                "acceptance_length": round(sum(a for a, _ in pairs) / sum(b for _, b in pairs), 3), "interval": interval(pairs),
                "over_plain": round(statistics.median(over), 3), "requests": each,
            }  # fmt: skip
            shown = {key: found[task][name][key] for key in ("acceptance_length", "interval", "over_plain")}
            print(task, name, shown, flush=True)
    record = {"date": time.strftime("%Y-%m-%d"), "isa": cpu.isa_of(model.target.kernels), "dtype": given.dtype,
              "quantization": model.target.quantization, "tokens": given.tokens, "tasks": found}  # fmt: skip
    given.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
