"""The user's own files: prompts, logs with times, Spec-Bench's questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import command, run, traces
from forerun.bench.command import Options
from forerun.bench.record import Load
from forerun.types import SettingError


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    return path


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "你好"}]
    path = write(tmp_path / "mine.jsonl", [
        {"prompt": "Once", "max_tokens": 7, "prediction": "upon"}, {"messages": turns}, {"turns": ["one", "two"]},
    ])  # fmt: skip
    (task,) = traces.prompts(path)
    assert task.name == "mine" and task.variants == 3 and task.greedy and not task.fixed_length
    assert (task.prompt(0).text, task.prompt(0).max_tokens, task.prompt(0).prediction) == ("Once", 7, "upon")
    assert task.prompt(1).messages == tuple(turns) and task.prompt(2).message == "one"
    assert task.prompt(1).name == "mine line 2"


def test_the_parts_of_spec_bench(tmp_path: Path) -> None:
    categories = ["writing", "math", "translation", "rag"]
    lines = [{"question_id": i, "category": c, "turns": [f"q {i}"]} for i, c in enumerate(categories)]
    tasks = traces.prompts(write(tmp_path / "question.jsonl", lines))
    assert [(t.name, t.variants) for t in tasks] == [
        ("spec-bench mt_bench", 2), ("spec-bench translation", 1), ("spec-bench rag", 1)
    ]  # fmt: skip


def test_a_trace_is_in_order_and_counts_from_its_first_request(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [
        {"timestamp": 12.5, "prompt": "b"}, {"timestamp_ms": 10_000, "prompt": "a"}, {"timestamp": 13, "prompt": "c"},
    ])  # fmt: skip
    task, times = traces.trace(path)
    assert times == (0.0, 2.5, 3.0) and [task.prompt(i).text for i in range(3)] == ["a", "b", "c"]
    stamped = write(tmp_path / "iso.jsonl", [
        {"timestamp": "2026-11-29T18:00:01+00:00", "prompt": "b"},
        {"timestamp": "2026-11-29T18:00:00.250+00:00", "prompt": "a"},
    ])  # fmt: skip
    assert traces.trace(stamped)[1] == pytest.approx((0.0, 0.75))
    lengths = write(tmp_path / "lengths.jsonl", [{"timestamp": 0, "input_length": 40, "output_length": 9}])
    task, _ = traces.trace(lengths)
    assert task.fixed_length and task.caution and task.prompt(0).max_tokens == 9 and len(str(task.prompt(0).text).split()) == 40


@pytest.mark.parametrize(
    "lines",
    [
        [], [[1]], [{"prompt": ""}], [{"prompt": "a", "turns": ["b"]}], [{"prompt": 3}], [{"messages": ["a"]}],
        [{"turns": [3]}], [{"input_length": -1}], [{"prompt": "a", "max_tokens": 0}],
    ],
)  # fmt: skip
def test_files_that_cannot_be(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(SettingError):
        traces.prompts(write(tmp_path / "bad.jsonl", lines))


def test_times_that_cannot_be(tmp_path: Path) -> None:
    for bad in ({"prompt": "a"}, {"prompt": "a", "timestamp": "noon"}):
        with pytest.raises(SettingError, match="timestamp"):
            traces.trace(write(tmp_path / "bad.jsonl", [bad]))
    (tmp_path / "broken.jsonl").write_text("{")
    for bad_path in (tmp_path / "broken.jsonl", tmp_path / "none.jsonl"):
        with pytest.raises(SettingError):
            traces.prompts(bad_path)


def test_each_repetition_replays_the_next_part_of_the_log(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"timestamp": i * i, "prompt": f"p {i}"} for i in range(9)])
    plan = command.plan_of(Options(trace=path, trace_speed=2.0, requests=3, repetitions=2, concurrency=(), tasks=("copy",)))
    assert plan.loads == (Load("trace", requests=3, speed=2.0),) and [t.name for t in plan.tasks] == ["log"]
    assert [plan.first_variant(plan.loads[0], r) for r in range(plan.rounds)] == [0, 3, 6]
    assert plan.trace == tuple(float(i * i) for i in range(9)) and run.batches_of(plan, 2, True) == 6
    with pytest.raises(SettingError, match="different ones"):
        command.plan_of(Options(trace=path, requests=4, repetitions=2, concurrency=()))
