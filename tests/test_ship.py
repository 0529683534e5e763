"""benchmarks/heads/ship.py: files that were cut are joined, and model cards say what the records say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HEADS = Path(__file__).parents[1] / "benchmarks" / "heads"


@pytest.fixture(scope="module")
def ship() -> ModuleType:
    sys.path.insert(0, str(HEADS))
    try:
        spec = importlib.util.spec_from_file_location("heads_ship", HEADS / "ship.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HEADS))
    return module


def test_parts_are_joined(ship: ModuleType, tmp_path: Path) -> None:
    given = {
        "config.json": b"{}", "model-00001-of-00002.safetensors": b"whole", "model-00002-of-00002.safetensors.00": b"be",
        "model-00002-of-00002.safetensors.01": b"gin", "model-00002-of-00002.safetensors.10": b"ning",
        "README.md": b"an old card",
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    for name, content in given.items():
        (tmp_path / "run" / name).write_bytes(content)
    ship.joined(tmp_path / "run", tmp_path / "whole")
    assert {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()} == {
        "config.json": b"{}", "model-00001-of-00002.safetensors": b"whole", "model-00002-of-00002.safetensors": b"beginning",
    }  # fmt: skip


def measured(arm: str, speed: float, requests: list[tuple[int, int]]) -> dict[str, Any]:
    tokens, steps = (sum(one[i] for one in requests) for i in (0, 1))
    length = (tokens - len(requests)) / steps
    return {
        "arm": arm, "task": "explain", "rows": 1, "tokens_per_s": speed, "requests": requests, "acceptance_length": length,
    }  # fmt: skip


def test_a_card(ship: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "mtp"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"intermediate_size": 1536}))
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    settings = {"rate": 0.002, "loss": "hard", "seed": 7, "noise": 0.1, "beta1": 0.9, "beta2": 0.5, "steps": 40, "tokens": 99}
    ends = {"accepted": [0.61, 0.335], "lengths": [1.61, 1.95], "accuracy": [0.7, 0.6], "samples": 312}
    record = {
        "date": "2026-12-01", "device": "a GPU", "torch": "2.11.0",
        "answers": {"prompts": 5000, "samples": 6100, "held_out": 312, "answered_tokens": 700_100, "answer_s": 95.2},
        "mtp": {
            "steps": 40, "tokens_per_step": 98.6, "parameters": 4_205_376, "train_s": 130.4, "steps_per_s": 31.42,
            "curve": [[20, 1.5, [0.3, 0.2]], ["held out", 20, {**ends, "samples": 1}], ["held out", 40, ends]],
            "settings": settings, "shape": {"modules": 1},
        },
        "measure": [
            measured("plain", 200.0, [(100, 99)] * 4), measured("mtp k=4", 500.0, [(100, 40), (101, 30), (61, 20), (50, 25)]),
            measured("mtp k=4, drawn, fixed", 400.0, [(100, 50)] * 3),
        ],
    }  # fmt: skip
    prompts = [{"task": "explain"}, {"task": "edit-code", "source": "numpy"}, {"task": "edit-code", "source": "python"}]
    card = ship.card("mtp", "mtp", folder, record, prompts)
    assert "MTP module for SmolLM2-135M-Instruct" in card and "2.0 MB" in card and '{"method": "mtp"' in card
    assert "- Prompts: 5,000" in card and "6,412 by the target" in card and "Held out: 312" in card
    assert "| BSD-3-Clause | 1 |" in card and "| PSF-2.0 | 1 |" in card and "scipy" not in card
    assert "edit-code 2, explain 1." in card
    rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in card.splitlines() if line.startswith("|")}
    told = {("steps", "40"), ("tokens of a step", "99"), ("rate", "0.002"), ("beta2", "0.5"), ("seed", "7"), ("modules", "1")}
    assert told <= rows and not {"noise", "beta1"} & {row[0] for row in rows}
    assert "one a GPU, torch 2.11.0, 2026-12-01. Training took 130 s, 31.4 steps/s" in card and "took 95 s" in card
    assert ("accepted up to this position, % of drafts", "61.0", "33.5") in rows and "On 312 held-out answers" in card
    (task,) = (row for row in rows if row[0] == "explain" and len(row) > 3)
    assert task[1] == "4" and task[3] == "2.50" and task[4] == "1.98 [1.98, 1.98]"
    length, low, high = (float(part.strip("[,]")) for part in task[2].split())
    assert "drawn drafts" in card and length == pytest.approx(308 / 115, abs=0.01) and 1.96 <= low < length < high <= 3.4
    assert "drawn drafts" not in ship.card("mtp", "mtp", folder, record | {"measure": record["measure"][:2]}, ())
