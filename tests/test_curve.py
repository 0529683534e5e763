"""The learning curve: the log that it is made of, the page, and the lines on a terminal. tests/test_html.py opens the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from forerun.bench.pages.view import Plot
from forerun.train import curve, log
from forerun.types import LoadError
from tests.training_logs import SETTINGS, rich


def plot(section: curve.Section | None, number: int = 0) -> Plot:
    assert section is not None
    found = section.charts[0].drawings[number]
    assert isinstance(found, Plot)
    return found


def test_lines_are_read_as_they_were_written_and_dropped_behind_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert log.read(path) == []
    first = log.Log(path)
    for step in (1, 2, 3):
        first.add("step", step=step, loss=0.5)
    first.add("engine", step=3, tasks=[])
    assert [line["step"] for line in log.of(log.read(path), "step")] == [1, 2, 3]
    log.Log(path, after=2)
    assert [line["step"] for line in log.read(path)] == [1, 2]
    path.write_text(path.read_text() + '{"kind": "st')
    assert len(log.read(path)) == 2
    path.write_text('{"kind": "step", "step": 1}\n{"step"\n{"kind": "step", "step": 2}\n')
    with pytest.raises(LoadError, match="line 2"):
        log.read(path)


def test_plots_have_the_means_of_what_shares_a_place() -> None:
    lines = rich()
    loss = plot(curve._losses(lines))
    (series,) = loss.series
    assert len(loss.places) == len(series.points) == curve.PLACES
    first = [line["loss"] for line in log.of(lines, "step")][:10]
    assert series.points[0][1] == pytest.approx(sum(first) / 10)
    assert [name for name in loss.places if name] == ["50", "450", "850", "1,250", "1,650"]
    lengths = plot(curve._lengths(lines))
    assert [len(s.points) for s in lengths.series] == [10, 10, 10, 2]  # k = 1, 2, 4, and the engine
    offline = log.of(lines, "offline")
    assert [value for _, value, _, _ in lengths.series[2].points] == [line["lengths"][-1] for line in offline]
    engine = log.of(lines, "engine")[-1]["tasks"]
    steps = sum(task["steps"] for task in engine)
    assert lengths.series[3].points[-1][:2] == (9, pytest.approx(sum(t["steps"] * t["length"] for t in engine) / steps))
    positions = plot(curve._positions(lines))
    assert [s.points[-1][1] for s in positions.series] == [pytest.approx(100 * x) for x in offline[-1]["accepted"]]


def test_the_page_says_what_the_log_says() -> None:
    page = curve.page(rich(), SETTINGS)
    assert "&lt;b&gt;a model&lt;/b&gt;" in page and "<b>a model</b>" not in page
    assert f"<h1>{curve.answer(rich())}.</h1>" in page and "2000 of 2000 steps" in page and "answers 110 s" in page
    for text in ("Acceptance by position", "edit-code", "k = 4, in the engine", "[2, 15, 27]"):
        assert text in page
    assert "<dt>pace</dt>" not in page


def test_a_run_that_has_just_begun_has_a_page() -> None:
    assert "Not evaluated yet" in curve.page([], {})
    some = [line for line in rich() if line["kind"] == "step"][:1]
    assert "The run has not ended" in curve.page(some, SETTINGS)
    offline = [line for line in rich() if line["kind"] == "offline"][:1]
    assert "on held-out answers" in curve.page(offline, SETTINGS)


def test_a_terminal_shows_the_curve(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rich()))
    (tmp_path / "run.json").write_text(json.dumps(SETTINGS))
    console = Console(width=100, record=True, file=(tmp_path / "out.txt").open("w"))
    curve.show(tmp_path, console)
    text = console.export_text()
    assert "tokens a verify step" in text and "edit-code" in text and "█" in text
    assert all(len(line) <= 100 for line in text.split("\n"))
    assert curve.write(tmp_path).read_text(encoding="utf-8") == curve.page(rich(), SETTINGS)


@pytest.mark.parametrize(("values", "made"), [
    ([], ""), ([1.0], "▄"), ([0.0, 1.0], "▁█"), ([3.0, 2.0, 1.0], "█▅▁"), (list(map(float, range(8))), "▁▂▃▄▅▆▇█"),
])  # fmt: skip
def test_sparks(values: list[float], made: str) -> None:
    assert curve.spark(values) == made
    assert len(curve.spark([float(i) for i in range(1000)])) == 40
