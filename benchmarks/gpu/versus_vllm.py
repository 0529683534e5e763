"""Compares this engine with vLLM on one GPU: tokens/s of the same prompts, as the ratio of medians. All samples are kept.

    python3 benchmarks/gpu/versus_vllm.py --ours DIR/engine.json --vllm PLAIN.json NGRAM.json [--out FILE]

--ours: the record of benchmarks/gpu/engine.py, with the part `tokens` and, if it exists, `drafters`. --vllm: records of one
vLLM configuration each: {"spec": null or its speculative_config, "cells": [{"kind", "concurrency", "times", "tokens_per_s",
..}]}, with the times of closed batches in seconds. Only records of one session on one machine are comparable. This script does
not check that.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A case: the kind of prompt (repeat or random), the number of requests at once, and the arm ("plain", "ngram k=4")."""

    kind: str
    requests: int
    arm: str


def arm_of(spec: dict[str, Any] | None) -> str:
    return f"{spec['method']} k={spec['num_speculative_tokens']}" if spec else "plain"


def of_vllm(record: dict[str, Any]) -> dict[Cell, list[float]]:
    """Tokens/s of every timed batch. The number of tokens of a batch follows from the record's own median."""
    found = {}
    for cell in record["cells"]:
        times = [float(t) for t in cell["times"]]
        tokens = cell["tokens_per_s"] * statistics.median(times)
        found[Cell(cell["kind"], cell["concurrency"], arm_of(record["spec"]))] = [tokens / t for t in times]
    return found


def of_ours(record: dict[str, Any]) -> dict[Cell, list[float]]:
    """Tokens/s of every timed batch in engine.py's record. A part that failed there is a text without cells."""
    found: dict[Cell, list[float]] = {}
    for part in ("drafters", "tokens_per_s"):
        cells = record.get(part, [])
        for cell in cells if isinstance(cells, list) else []:
            if "tokens_per_s" in cell:
                found[Cell(cell["kind"], cell["requests"], cell["arm"])] = cell["tokens_per_s"]
    return found


def compare(ours: dict[Cell, list[float]], theirs: dict[Cell, list[float]]) -> list[dict[str, Any]]:
    """The cells that both have, with the ratio of their medians."""
    return [
        {
            **cell._asdict(),
            "ours": ours[cell],
            "vllm": theirs[cell],
            "ratio": statistics.median(ours[cell]) / statistics.median(theirs[cell]),
            "lowest_ratio": min(ours[cell]) / max(theirs[cell]),
        }
        for cell in sorted(set(ours) & set(theirs))
    ]


def table(cells: list[dict[str, Any]]) -> str:
    """A Markdown table: medians, their ratio, and the ratio of our slowest batch to their fastest."""
    lines = ["| kind | requests | arm | ours, tokens/s | vLLM | ours / vLLM | slowest / fastest |", "|---" * 7 + "|"]
    for cell in cells:
        ours, theirs = statistics.median(cell["ours"]), statistics.median(cell["vllm"])
        lines.append(
            f"| {cell['kind']} | {cell['requests']} | {cell['arm']} | {ours:,.0f} | {theirs:,.0f} "
            f"| {cell['ratio']:.2f} | {cell['lowest_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ours", type=Path, required=True)
    options.add_argument("--vllm", type=Path, nargs="+", required=True)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    theirs: dict[Cell, list[float]] = {}
    records = [json.loads(path.read_text()) for path in given.vllm]
    for record in records:
        theirs |= of_vllm(record)
    mine = json.loads(given.ours.read_text())
    ours = of_ours(mine)
    cells = compare(ours, theirs)
    if not cells:
        options.error(f"no cell is in both; ours has {sorted(ours)}, vLLM has {sorted(theirs)}")
    print(table(cells))
    missing = sorted(set(theirs) - set(ours))
    if missing:
        print("only vLLM ran: " + ", ".join(" ".join(map(str, cell)) for cell in missing))
    if given.out:
        start = {arm_of(record["spec"]): record.get("startup_s") for record in records}
        known = {key: mine.get(key) for key in ("date", "device", "torch", "weights")}
        given.out.write_text(json.dumps(known | {"vllm_startup_s": start, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
