"""Compares the acceptance of a trained head in Forerun's engine with that of a real vLLM server that loaded the same folder:
the same prompts as token ids, greedy, the drafts always whole. vLLM's figures are its own counters on /metrics.

    vllm serve MODEL --port 8123 --dtype float32 --served-model-name target
        --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4}'
    python benchmarks/heads/vllm_acceptance.py --url http://127.0.0.1:8123 --head HEAD --tasks tasks.json --dtype float32
        --out record.json

tasks.json is made by benchmarks/heads/task_ids.py. In bfloat16 the two round differently, so most answers differ after some
tokens. Requests with equal answers are therefore also counted apart.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

from forerun.kernels import cpu
from forerun.llm import LLM
from forerun.types import SamplingParams

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counters(url: str) -> dict[str, float]:
    """vLLM's counters, and those of accepted tokens by position."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found: dict[str, float] = {}
    for name in COUNTERS:
        rows = re.findall(rf"^vllm:spec_decode_{name}_total(?:{{[^}}]*}})? (\S+)$", text, re.M)
        found[name] = sum(map(float, rows))
    by_position = r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{[^}]*position="(\d+)"[^}]*} (\S+)$'
    for position, value in re.findall(by_position, text, re.M):
        found[f"position {position}"] = found.get(f"position {position}", 0) + float(value)
    return found


def complete(url: str, ids: list[int], tokens: int) -> list[int]:
    asked = {"model": "target", "prompt": ids, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))["choices"][0].get("token_ids") or []


def lengths(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The acceptance lengths over these requests."""
    theirs, ours = ([row[side] for row in rows] for side in ("vllm", "forerun"))
    accepted, drafts = (sum(row[f"num_{key}"] for row in theirs) for key in ("accepted_tokens", "drafts"))
    steps = sum(row["steps"] for row in ours)
    own = 1 + sum(row["accepted"] for row in ours) / max(steps, 1)
    return {"requests": len(rows), "vllm": round(1 + accepted / max(drafts, 1), 4), "forerun": round(own, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tasks = {name: ids[: given.prompts] for name, ids in json.loads(given.tasks.read_text()).items()}
    config = {"method": given.method, "model": given.head, "num_speculative_tokens": given.k}
    small = {"max_model_len": 1024, "kv_cache_tokens": 8192, "adaptive_drafts": False}
    llm = LLM(None, dtype=given.dtype, speculative_config=config, **small)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=given.tokens)
    found: dict[str, Any] = {}
    for name, prompts in tasks.items():
        rows = []
        for ids in prompts:
            before = counters(given.url)
            theirs = complete(given.url, ids, given.tokens)
            after = counters(given.url)
            llm.reset_stats()
            ours = llm.generate([ids], params)[0].token_ids
            drafts = llm.stats.drafts
            rows.append({
                "vllm": {key: after[key] - before.get(key, 0) for key in after}, "same_answer": tuple(theirs) == ours,
                "forerun": {"steps": drafts.steps, "drafted": drafts.drafted, "accepted": drafts.accepted},
            })  # fmt: skip
        found[name] = {"requests": rows, "all": lengths(rows), "same_answers": lengths([r for r in rows if r["same_answer"]])}
        print(name, "all", found[name]["all"], "same answers", found[name]["same_answers"], flush=True)
    every = [row for task in found.values() for row in task["requests"]]
    found["all tasks"] = {"all": lengths(every), "same_answers": lengths([r for r in every if r["same_answer"]])}
    print("all tasks", found["all tasks"], flush=True)
    version = json.load(urllib.request.urlopen(f"{given.url}/version"))["version"]
    record = {"date": time.strftime("%Y-%m-%d"), "vllm": version, "isa": cpu.isa_of(llm.model.target.kernels), "k": given.k,
              "dtype": given.dtype, "method": given.method, "tokens": given.tokens, "tasks": found}  # fmt: skip
    given.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
