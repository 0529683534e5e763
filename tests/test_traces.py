"""The user's own files: prompts, logs with times, Spec-Bench's questions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from forerun.bench import command
from forerun.bench.engines.arms import Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.openai import Address
from forerun.bench.engines.sides import Running
from forerun.bench.engines.subject import Subject
from forerun.bench.load.plan import interleaved, scheduled_s
from forerun.bench.options import Options
from forerun.bench.pages import words
from forerun.bench.records.record import Load
from forerun.bench.workloads import traces
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


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path: Path) -> None:
    """JSON may hold these characters as they are, and other programs write them so. CR LF ends a line as well."""
    texts = [f"one{c}two" for c in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"] + ["\r\n", "plain"]
    raw = "\r\n".join(json.dumps({"prompt": t}, ensure_ascii=False) for t in texts)
    path = tmp_path / "mine.jsonl"
    path.write_bytes(raw.encode() + b"\n\r\n")
    (task,) = traces.prompts(path)
    assert [task.prompt(i).text for i in range(task.variants)] == texts


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert traces.prompts(path)[0].prompt(0).text == "a"


LINE = '{"prompt": "a", "timestamp": 1}\n'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LINE.encode("utf-16"), "UTF-16"),
        (LINE.encode("utf-16-le"), "line 1 has a zero byte"),
        (LINE.encode("utf-16-be"), "line 1 has a zero byte"),
        (LINE.encode("utf-32"), "UTF-32"),
        (gzip.compress(LINE.encode(), mtime=0), "packed"),
        (LINE.encode() + LINE.replace("a", "ä").encode("latin-1"), "line 2 has byte 0xe4 at column 13"),
        (LINE.encode() * 2 + b'{"prompt": "\xff"}', "line 3"),
        (LINE.encode() + b'{"prompt": "\\ud83d"}', "line 2.*half of a character"),
        (LINE.encode() + b'{"prompt": "a", "timestamp": NaN}', "line 2.*NaN"),
        (b'{"prompt": "a", "timestamp": Infinity}', "line 1.*Infinity"),
        (b'{"prompt": "a", "timestamp": -Infinity}', "line 1.*-Infinity"),
        (b'{"prompt": "a", "timestamp": 1e999}', "line 1.*too large"),
        (b'{"prompt": "a", "timestamp": ' + b"[" * 100_000, "line 1.*not JSON"),
        (b'{"prompt": "a", "timestamp": ' + b"9" * 5000 + b"}", "line 1.*not JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "line 1.*not JSON"),
        (b'[{"prompt": "a"}]', "line 1.*give an object"),
        (b"\n \r\n", "no lines"),
    ],
)
def test_files_that_are_something_else_are_refused_with_the_place(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    for read in (traces.prompts, traces.trace):
        with pytest.raises(SettingError, match=said):
            read(path)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingError, match="cannot be read"):
            traces.trace(folder)


@pytest.mark.parametrize("value", [None, True, False, 1.5, "a", "5", -1, 0, [], {}, [1], {"a": 1}, 10**30])
@pytest.mark.parametrize("key", ["prompt", "messages", "turns", "input_length", "max_tokens", "output_length", "prediction",
                                 "category", "timestamp", "timestamp_ms", "hash_ids"])
def test_any_value_in_any_field_is_taken_or_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    """Never another exception; and what is taken makes prompts with the types that they must have."""
    for base in ({"prompt": "a"}, {"turns": ["a"], "category": "math"}, {"input_length": 3}):
        path = write(tmp_path / "odd.jsonl", [{"timestamp": 1, **base}, {"timestamp": 2, **base, key: value}])
        for read in (traces.prompts, lambda p: [traces.trace(p)[0]]):
            try:
                tasks = read(path)
            except SettingError as error:
                assert "line 2" in str(error) or "odd.jsonl" in str(error) or key in str(error)
                continue
            for task in tasks:
                for i in range(task.variants):
                    got = task.prompt(i)
                    assert type(got.text) in (str, type(None)) and type(got.prediction) in (str, type(None))
                    assert got.max_tokens is None or (type(got.max_tokens) is int and got.max_tokens >= 1)


def test_a_trace_of_mooncake_is_in_milliseconds(tmp_path: Path) -> None:
    """Its first lines, as they are published."""
    path = write(tmp_path / "mooncake.jsonl", [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 60]},
    ])  # fmt: skip
    task, times = traces.trace(path)
    assert times == pytest.approx((0.0, 3.053)) and "milliseconds" in str(task.caution) and "hash_ids" in str(task.caution)


@pytest.mark.parametrize(("scale", "unit"), [(1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds"), (1, None)])
def test_times_of_day_are_told_by_their_size(tmp_path: Path, scale: float, unit: str | None) -> None:
    path = write(tmp_path / "log.jsonl", [{"timestamp": int((1.79e9 + s) * scale), "prompt": "a"} for s in (0.0, 2.5, 4.0)])
    task, times = traces.trace(path)
    assert times == pytest.approx((0.0, 2.5, 4.0) if unit else (0.0, 2.0, 4.0), abs=1e-3)
    assert (unit in str(task.caution)) if unit else task.caution is None


def test_times_in_two_units_are_refused(tmp_path: Path) -> None:
    for other in (5, "2026-11-29T18:00:00+00:00"):
        lines = [{"timestamp": 1_790_000_000_000, "prompt": "a"}, {"timestamp": other, "prompt": "b"}]
        path = write(tmp_path / "log.jsonl", lines)
        with pytest.raises(SettingError, match="timestamp"):
            traces.trace(path)


def test_a_run_that_will_take_hours_is_known_before_it_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"timestamp": 27482 * i, "prompt": f"p {i}"} for i in range(9)])
    options = Options(trace=path, requests=3, repetitions=2, concurrency=())
    plan = command.plan_of(options)
    least = scheduled_s(plan, 2, True)
    assert least == 2 * 3 * 2 * 27482
    said = words.long_wait(least, plan.loads)
    assert said is not None and "91.6 hours" in said and "--trace-speed" in said
    fast = command.plan_of(replace(options, trace_speed=1000.0))
    assert scheduled_s(fast, 2, True) == pytest.approx(least / 1000) and words.long_wait(330.0, fast.loads) is None
    closed = command.plan_of(Options(tasks=("explain",)))
    assert scheduled_s(closed, 2, True) == 0.0
    slow = command.plan_of(Options(tasks=("explain",), concurrency=(), rates=(0.001,), requests=4, repetitions=2))
    assert scheduled_s(slow, 2, False) > 3600 and "--rate" in str(words.long_wait(7200.0, slow.loads))


def test_it_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.jsonl", [{"timestamp": 9000 * i, "prompt": f"p {i}"} for i in range(9)])
    sides = tuple(Running(Arm(name, None), Address("http://h", "m", DIALECTS["vllm"])) for name in ("baseline", "b"))
    monkeypatch.setattr(command, "subject_of", lambda *_: Subject("m", "vllm", sides))

    def begin(*_: Any) -> None:
        raise SettingError("here", "x", "it would begin")

    monkeypatch.setattr(command, "measure", begin)
    asked = ["--trace", str(path), "--requests", "3", "-r", "2", "-e", "http://h", "-a", "b=http://h2"]
    shown = CliRunner().invoke(cli.app, ["bench", *asked, "-o", str(tmp_path / "o.json")])
    assert shown.exit_code == 2 and "hours or more" in shown.stderr and "it would begin" in shown.stderr


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
    assert plan.trace == tuple(float(i * i) for i in range(9)) and len(list(interleaved(plan, 2))) == 2 * 3
    with pytest.raises(SettingError, match="different ones"):
        command.plan_of(Options(trace=path, requests=4, repetitions=2, concurrency=()))
