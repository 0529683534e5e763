"""The cost of steps: measured within a time limit, kept in a file, and measured again if the file is not valid."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.engine import costs
from forerun.engine.engine import Engine
from forerun.kernels import reference
from forerun.models.decoder import Target
from forerun.models.loading import empty, random
from forerun.models.tokenizer import Detokenizer, Tokenizer
from tests.test_weights import Int8Blocks
from tests.tiny import tiny_model


class Machine:
    """A processor with a clock of its own, whose steps take a given time by their positions."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.ran: list[int] = []

    def run(self, positions: int, context: int = 0) -> None:
        self.ran.append(positions)
        self.now += self.seconds(positions) + 1e-5 * context

    @property
    def clocks(self) -> costs.Clocks:
        return costs.Clocks(lambda: self.now, self.own)

    def own(self) -> float:
        return self.now


def slow(n: int) -> float:
    return 0.01 + 0.002 * n


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return Target.load(tiny_model(tmp_path / "tiny"), "float32")


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("step-costs-*"))


def costs_of(target: Target, machine: Machine, most: int = 64) -> list[costs.Point]:
    return costs.step_costs(target, machine.run, most, 0, machine.clocks)


class Busy(Machine):
    """Another program has every second slice of the processor's time, `slice_ns` long, until it ends."""

    def __init__(self, seconds: Callable[[int], float], slice_ns: int, until_s: float = 1e6) -> None:
        super().__init__(seconds)
        self.slice, self.until = slice_ns, round(1e9 * until_s)
        self.ns = self.used = 0

    def own(self) -> float:
        return self.used / 1e9

    def run(self, positions: int, context: int = 0) -> None:
        self.ran.append(positions)
        left = round(1e9 * (self.seconds(positions) + 1e-5 * context))
        self.used += left
        while left and self.ns < self.until:
            turn, within = divmod(self.ns, self.slice)
            used = 0 if turn % 2 else min(left, self.slice - within)
            self.ns += used or self.slice - within
            left -= used
        self.ns += left
        self.now = self.ns / 1e9


def test_the_median_of_some_rounds_of_each_size() -> None:
    late = iter([0.5, slow(1), 0.1])  # the first step of all reads weights from the disk; a later one is interrupted
    machine = Machine(lambda n: next(late, slow(n)))
    points, sound = costs.measure(machine.run, 64, 100, machine.clocks)
    assert points[:7] == [(n, 0, pytest.approx(slow(n))) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert points[7:] == [(n, 100, pytest.approx(slow(n) + 1e-3)) for n in (1, 8)] and sound
    del machine.ran[0]
    assert all(machine.ran.count(n) == costs.ROUNDS * (1 + (n in (1, 8))) for n, _, _ in points)


@pytest.mark.parametrize("most", [2, 3, 7, 8, 9, 50, 64])
def test_positions_stay_within_what_the_context_allows(most: int) -> None:
    machine = Machine(slow)
    points, sound = costs.measure(machine.run, most, 0, machine.clocks)
    assert len(points) >= 2 and points == sorted(points) and sound
    assert points[0][0] == 1 and most / 2 < points[-1][0] <= most and max(machine.ran) <= most


@pytest.mark.parametrize("each", [0.001, 0.02, 0.1, 0.3, 0.5, 3.0, 40.0])
def test_measuring_ends_in_time(each: float) -> None:
    machine = Machine(lambda n: each * (1 + n / 16))
    points, sound = costs.measure(machine.run, 64, 0, machine.clocks)
    warm = each * (1 + 1 / 16)
    least = warm + each * (1 + 8 / 16)  # the steps that are always measured
    assert machine.now - warm <= max(least, costs.LIMIT_S + 1e-9)
    assert {1, 8} <= {point.positions for point in points}
    if each <= 0.02:
        assert [point.positions for point in points] == [1, 2, 4, 8, 16, 32, 64]
    assert sound == (each <= 0.3), "one sample of a step cannot be judged"


@pytest.mark.parametrize("slice_us", [1900, 4000, 7700, 12000, 17000, 23000])
def test_beside_a_busy_program_costs_have_the_right_ratio_and_are_not_kept(
    slice_us: int, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forerun")

    def short(n: int) -> float:
        return 0.004 + 0.001 * n

    it = costs.Costs(costs_of(target, Busy(short, slice_us * 1000)))
    assert not kept(tmp_path) and "not kept for the next start" in caplog.text
    assert 0.6 < it.bare(8) / it.bare(1) / (short(8) / short(1)) < 1.6
    alone = Machine(short)
    found = costs_of(target, alone)
    assert alone.ran and kept(tmp_path) and found == [(n, 0, pytest.approx(short(n))) for n in (1, 2, 4, 8, 16, 32, 64)]


def test_a_program_that_ends_while_costs_are_measured_does_not_spoil_them(target: Target, tmp_path: Path) -> None:
    machine = Busy(slow, 4 * 10**6, until_s=0.5)
    points, sound = costs.measure(machine.run, 64, 0, machine.clocks)
    assert sound and points == [(n, 0, pytest.approx(slow(n))) for n in (1, 2, 4, 8, 16, 32, 64)]


def test_samples_agree_only_if_larger_steps_do_not_take_less() -> None:
    steady = {(1, 0): [1.0, 1.1, 9.0], (8, 0): [1.0, 1.2], (1, 100): [1.5, 1.5]}
    assert costs.agree(steady)
    assert not costs.agree(steady | {(8, 0): [1.0, 1.3]})
    assert not costs.agree(steady | {(8, 0): [1.0]})
    assert not costs.agree(steady | {(8, 0): [0.8, 0.8]})


def test_costs_rise_with_positions_and_context() -> None:
    bare = [(1, 10.0), (4, 13.0), (8, 12.0), (16, 29.0)]
    it = costs.Costs([costs.Point(n, 0, s) for n, s in bare])
    assert it(np.array([1, 2, 4, 6, 8, 12, 32]), 1, 500).tolist() == pytest.approx([10, 11, 13, 13, 13, 21, 61])
    it = costs.Costs([costs.Point(1, 0, 10.0), costs.Point(8, 0, 10.0), costs.Point(1, 100, 11.0), costs.Point(8, 100, 18.0)])
    assert it(np.array([1, 8, 40]), 1, 200).tolist() == pytest.approx([12, 26, 26])
    assert it(np.array([3, 24]), 3, 200).tolist() == pytest.approx([16, 58]), "three rows read three contexts"
    less = costs.Costs([costs.Point(1, 0, 10.0), costs.Point(8, 0, 10.0), costs.Point(1, 100, 9.0)])
    assert less(np.array([1.0]), 1, 500) == 10, "noise"


def test_the_next_start_reads_the_file(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forerun")
    first, again = Machine(slow), Machine(slow)
    points = costs_of(target, first)
    assert "Measuring what steps of 1 to 64 positions cost" in caplog.text
    caplog.clear()
    assert costs_of(target, again) == points and not again.ran and not caplog.text
    assert [path.suffix for path in kept(tmp_path)] == [".json"]  # nothing half written is left


def test_a_fast_measurement_is_not_kept(target: Target, tmp_path: Path) -> None:
    costs_of(target, Machine(lambda n: 1e-5 * n))
    assert not kept(tmp_path)


def test_a_folder_that_cannot_be_written_is_logged_and_harmless(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forerun")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    machine = Machine(slow)
    assert len(costs_of(target, machine)) == 7 and "not kept" in caplog.text


def damaged(path: Path) -> dict[str, str]:
    """Contents of a file that is damaged, old or for another engine."""
    good = json.loads(path.read_text())

    def with_(**changes: object) -> str:
        return json.dumps(good | changes)

    return {
        "empty": "", "cut off": path.read_text()[:-40], "not JSON": "\x00\x01", "not an object": "[1, 2]", "a number": "5",
        "deep": "[" * 100_000,
        "no points": with_(points=[]), "one point": with_(points=[[1, 0, 0.1]]), "points of nothing": with_(points=None),
        "points that are words": with_(points=[["a", 0, "b"], ["c", 0, "d"]]),
        "four in a point": with_(points=[[1, 0, 2, 3]] * 2),
        "another context": with_(points=[[1, 0, 0.1], [2, 0, 0.1], [1, 7, 0.2]]),
        "NaN": with_(points=[[1, 0, 0.1], [2, 0, float("nan")]]), "infinite": with_(points=[[1, 0, 0.1], [2, 0, float("inf")]]),
        "no time": with_(points=[[1, 0, 0.0], [2, 0, 0.1]]), "out of order": with_(points=[[2, 0, 0.1], [1, 0, 0.1]]),
        "twice": with_(points=[[1, 0, 0.1], [1, 0, 0.1]]),
        "too many positions": with_(points=[[1, 0, 0.1], [128, 0, 0.1]]),
        "infinite positions": with_(points=[[1, 0, 0.1], [float("inf"), 0, 0.1]]),
        "no positions": with_(points=[[0, 0, 0.1], [1, 0, 0.1]]),
        "old": with_(measured_at=time.time() - costs.FRESH_S - 60), "from the future": with_(measured_at=time.time() + 3600),
        "no date": json.dumps({k: good[k] for k in ("key", "points")}), "a date in words": with_(measured_at="now"),
        "another key": with_(key=good["key"] | {"threads": 99}), "no key": with_(key=None),
    }  # fmt: skip


def test_a_broken_or_old_file_is_measured_again_and_replaced(target: Target, tmp_path: Path) -> None:
    points = costs_of(target, Machine(slow))
    (path,) = kept(tmp_path)
    for what, text in damaged(path).items():
        path.write_text(text)
        again = Machine(slow)
        assert costs_of(target, again) == points and again.ran, what
        third = Machine(slow)
        assert costs_of(target, third) == points and not third.ran, what
    path.write_bytes(b"\xff\xfe")
    again = Machine(slow)
    assert costs_of(target, again) == points and again.ran


def test_each_model_and_each_way_to_run_it_has_a_file_of_its_own(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(target.config, layers=target.config.layers + 1, windows=(0,) * (target.config.layers + 1))
    made = Target(other, random(other, torch.float32, torch.device("cpu")), target.kernels)
    half = Target.random(target.config, torch.bfloat16)
    plain = Target(target.config, target.weights, reference)
    blocks = Target(target.config, empty(target.config, torch.float32, "cpu", Int8Blocks), reference)
    ways = [(target, 64), (target, 32), (made, 64), (half, 64), (plain, 64), (blocks, 64)]
    for number, (model, most) in enumerate(ways, 1):
        costs_of(model, Machine(slow), most)
        assert len(kept(tmp_path)) == number
    monkeypatch.setattr(target.kernels, "threads", 99)
    costs_of(target, Machine(slow))
    monkeypatch.setattr("forerun.__version__", "99")
    costs_of(target, Machine(slow))
    monkeypatch.setattr("forerun.kernels.cpu.processor", lambda: "another")
    costs_of(target, Machine(slow))
    assert len(kept(tmp_path)) == len(ways) + 3


def test_starts_at_once_do_not_disturb_each_other(target: Target, tmp_path: Path) -> None:
    def start() -> None:
        for _ in range(20):
            points = costs_of(target, Machine(slow))
            found.append(len(points))
            for path in kept(tmp_path):
                os.utime(path)

    found: list[int] = []
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 80 and len([p for p in kept(tmp_path) if p.is_file()]) == 1


def test_an_engine_measures_once_for_all_starts(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    measure = costs.measure
    monkeypatch.setattr(costs, "measure", lambda run, *rest: measure(lambda n, behind: (ran.append(n), run(n, behind)), *rest))
    for name, value in (("WORTH_S", 0.0), ("OWN", 0.0), ("AGREEMENT", np.inf)):  # tests run on busy machines
        monkeypatch.setattr(costs, name, value)
    tokenizer = Tokenizer(tmp_path / "tiny")

    def start(**settings: object) -> Engine:
        given: dict = {"kv_cache_tokens": 512, "speculation": Speculation.parse("ngram")} | settings
        engine = Engine(target, EngineConfig(**given), lambda *_: None, lambda: Detokenizer(tokenizer), False)
        engine.warm_up()
        return engine

    assert start()._step.runner.costs is not None and ran  # type: ignore[attr-defined]
    ran.clear()
    assert start()._step.runner.costs is not None and not ran  # type: ignore[attr-defined]
    assert start(adaptive_drafts=False)._step.runner.costs is None and not ran  # type: ignore[attr-defined]


def test_the_cost_of_a_pass_by_rows() -> None:
    def timed(seconds: Callable[[int], float], most: int, passes: int) -> tuple[costs.PassCosts, list[int]]:
        now, ran = [0.0], list[int]()

        def run(rows: int) -> None:
            ran.append(rows)
            now[0] += seconds(rows)

        return costs.pass_costs(run, most, passes, lambda: now[0]), ran

    it, ran = timed(lambda n: 0.001 + 0.0005 * n, 32, 2)
    assert set(ran) == {1, 8, 32} and ran.count(1) == 1 + costs.ROUNDS
    assert [it(1), it(8), it(32)] == pytest.approx([0.00075, 0.0025, 0.0085])
    assert it(1) < it(4) < it(8) and it(64) == pytest.approx(2 * it(32)), "more rows than were timed"
    it, ran = timed(lambda n: 30.0, 8, 1)
    assert it(8) == 30.0 and len(ran) <= 4
