"""Thresholds: what can be written, what each comes to on records of known truth, the JUnit file and the exit codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from forerun.bench.pages.junit import junit
from forerun.bench.records import record, thresholds
from forerun.bench.records.record import Record
from forerun.bench.records.thresholds import Check, check, exist, parse
from forerun.cli import app
from forerun.types import SettingError
from tests.records import SWEEP, Way, as_markdown, as_page, fake, rich
from tests.tiny import tiny_model

FAST, IDLE = Way(12.5, 4, (4, 1, 0, 0)), Way(10.0)


def made() -> Record:
    """fast: 1.64 times as fast, 2.25 tokens a step, 5 of 16 drafted tokens accepted."""
    return fake({"baseline": IDLE, "fast": FAST, "again": IDLE}, ("copy", "explain"), control="again")


def results(text: str, on: Record) -> list[bool]:
    return [c.passed for c in check(parse([text]), on)]


@pytest.mark.parametrize(
    "text, metric, task, load, arm, sign, value",
    [
        ("speedup.copy >= 1.3", "speedup", "copy", None, None, ">=", 1.3),
        ("speedup>1", "speedup", None, None, None, ">", 1.0),
        ("speedup_low.return-code@c=8[ngram k=4] > 1.05", "speedup_low", "return-code", "c=8", "ngram k=4", ">", 1.05),
        ("ttft_p95_ms@2.5/s<=300", "ttft_p95_ms", None, "2.5/s", None, "<=", 300.0),
        ("e2e_ms.copy[a.b (1)] < 2", "e2e_ms", "copy", None, "a.b (1)", "<", 2.0),
        ("tpot_ms@c=8 == 3", "tpot_ms", None, "c=8", None, "==", 3.0),
        ("identical == all", "identical", None, None, None, "==", 1.0),
        ("identical >= 95%", "identical", None, None, None, ">=", 0.95),
        ("verdict.own prompts != not enough data", "verdict", "own prompts", None, None, "!=", "not enough data"),
        ("kv_tokens[x] >= 35000", "kv_tokens", None, None, "x", ">=", 35000.0),
        ("distribution == same", "distribution", None, None, None, "==", "same"),
    ],
)
def test_what_can_be_written(
    text: str, metric: str, task: str | None, load: str | None, arm: str | None, sign: str, value: float | str
) -> None:
    (t,) = parse([text])
    assert (t.metric, t.task, t.load, t.arm, t.sign, t.value) == (metric, task, load, arm, sign, value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("speed.copy >= 1.3", "there are speedup"),
        ("speedup", "speedup.copy >= 1.3"),
        ("speedup => 1", "speedup.copy >= 1.3"),
        ("speedup >= fast", "no number"),
        ("speedup >= all", "no number"),
        ("identical >= 12", "share"),
        ("acceptance_rate >= 60", "60%"),
        ("verdict == quick", "faster, slower"),
        ("verdict >= faster", "== or !="),
        ("kv_tokens.copy > 3", "kv_tokens[ARM]"),
        ("distribution == even", "same, different"),
        ("", "speedup.copy >= 1.3"),
    ],
)
def test_what_cannot_be_written_is_refused_with_what_can(text: str, said: str) -> None:
    with pytest.raises(SettingError) as error:
        parse([text])
    assert said in str(error.value)


@pytest.mark.parametrize(
    "text, said", [("speedup.poem > 1", "copy, explain"), ("speedup@c=9 > 1", "c=1"), ("speedup[x] > 1", "fast")]
)
def test_what_is_not_in_the_run_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check(parse([text]), made())
    with pytest.raises(SettingError, match=said):
        exist(parse([text]), ("copy", "explain"), ("c=1",), ("baseline", "fast"))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("speedup >= 1.6", [True, True]),
        ("speedup.copy >= 1.65", [False]),
        ("speedup.copy[again] < 1.01", [True]),
        ("speedup_low.copy > 1.63", [True]),
        ("verdict == faster", [True, True]),
        ("verdict.copy != faster", [False]),
        ("identical == all", [True, True]),
        ("failures == 0", [True] * 6),
        ("failures.copy > 0", [False] * 3),
        ("tokens_per_s.copy >= 145.9", [True]),
        ("tokens_per_s.copy >= 146.1", [False]),
        ("ms_per_step.copy <= 12.51", [True]),
        ("acceptance_rate.copy >= 31%", [True]),
        ("acceptance_rate.copy >= 32%", [False]),
        ("acceptance_length.copy >= 2.25", [True]),
        ("acceptance_rate.copy[baseline] >= 0", [False]),
        ("ttft_ms.copy < 100.1", [True]),
        ("tpot_ms.copy < 5.5", [False]),
        ("e2e_ms.copy <= 500.1", [True]),
        ("e2e_p99_ms.copy <= 10000", [False]),
        ("ttft_ratio.copy <= 1.01", [True]),
        ("tpot_ratio.copy <= 0.5", [False]),
        ("kv_tokens > 1", [False]),
        ("distribution == same", [False]),
    ],
)
def test_what_each_comes_to(text: str, expected: list[bool]) -> None:
    assert results(text, made()) == expected


def test_one_different_answer_is_not_all() -> None:
    run = made()
    at = next(i for i, b in enumerate(run.batches) if b.arm == "fast" and not b.warmup and b.task == "copy")
    off = dataclasses.replace(run.batches[at].answers[0], token_ids=(1, *run.batches[at].answers[0].token_ids[1:]))
    batches = (*run.batches[:at], dataclasses.replace(run.batches[at], answers=(off,)), *run.batches[at + 1 :])
    changed = dataclasses.replace(run, batches=batches)
    (copy, explain) = check(parse(["identical == all"]), changed)
    assert not copy.passed and copy.detail == "4 of 5" and explain.passed
    assert results("identical.copy >= 80%", changed) == [True] and results("identical.copy > 80%", changed) == [False]


def test_a_sampled_task_has_no_identical_answers_and_asking_for_them_alone_fails() -> None:
    run = fake({"baseline": IDLE, "fast": FAST}, ("copy", "random"))
    assert results("identical == all", run) == [True]
    assert results("identical.random == all", run) == [False]


def test_costs_and_distribution_of_arms() -> None:
    (ngram, suffix) = check(parse(["kv_tokens >= 30000"]), rich())
    assert (ngram.where, ngram.passed, ngram.detail) == ("ngram k=4", True, "30832") and not suffix.passed
    assert results("startup_s[ngram k=4] < 60", rich()) == [False]
    assert results("distribution == same", rich()) == [True, True]
    few = dataclasses.replace(rich(), first_tokens=tuple(dataclasses.replace(f, tokens=("a",)) for f in rich().first_tokens))
    assert results("distribution != different", few) == [False, False], "too little to tell is no pass"
    assert results("speedup.copy@c=8 >= 1.2", rich()) == [True, False]


def test_an_interrupted_run_passes_nothing() -> None:
    run = dataclasses.replace(made(), finished=False)
    found = check(parse(["failures == 0"]), run)
    assert [c.where for c in found if not c.passed] == ["the run"]


def test_the_junit_file() -> None:
    found = check(parse(["speedup.copy >= 9 ", "failures == 0"]), made())
    root = ElementTree.fromstring(junit(found, made()))
    (suite,) = root
    cases = suite.findall("testcase")
    assert root.get("tests") == suite.get("tests") == "7" == str(len(cases)) and suite.get("failures") == "1"
    failed = [c for c in cases if c.find("failure") is not None]
    assert [(c.get("classname"), c.get("name")) for c in failed] == [("speedup.copy >= 9", "copy, fast")]
    assert "1.64 [1.64,1.64]" in str(failed[0].find("failure").get("message"))  # type: ignore[union-attr]
    assert "Yes, speculation pays here" in str(suite.findtext("system-out"))
    odd = dataclasses.replace(found[0], detail='<&">')
    assert ElementTree.fromstring(junit([odd], made())).find(".//failure").get("message").endswith('<&">')  # type: ignore[union-attr]


def test_lines() -> None:
    (t,) = parse(["speedup > 2"])
    assert thresholds.line(Check(t, "copy, fast", False, "1.64")) == "FAIL  speedup > 2: copy, fast: 1.64"


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *args])
    return result.exit_code, result.output


def test_exit_codes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record.save(made(), path)
    code, said = run(str(path), "--ci", "speedup.copy >= 1.3", "--ci", "failures == 0", "--junit", str(tmp_path / "x.xml"))
    assert code == 0 and "pass  speedup.copy >= 1.3: copy, fast: 1.64 [1.64,1.64]" in said
    assert ElementTree.parse(tmp_path / "x.xml").getroot().get("failures") == "0"
    code, said = run(str(path), "--ci", "speedup.copy >= 2", "--junit", str(tmp_path / "x.xml"))
    assert code == 1 and "FAIL" in said and ElementTree.parse(tmp_path / "x.xml").getroot().get("failures") == "1"
    for args in (["--ci", "speedup.poem > 1"], ["--ci", "speed > 1"], ["--junit", str(tmp_path / "x.xml")]):
        code, said = run(str(path), *args)
        assert code == 2 and "error:" in said
    assert run(str(path), str(path), "--ci", "failures == 0")[0] == 2, "a threshold speaks of one record"


def test_bench_refuses_a_threshold_before_it_measures() -> None:
    result = CliRunner().invoke(app, ["bench", "-m", "no-such-model", "--ci", "speedup.poem > 1"])
    assert result.exit_code == 2 and "there is no task 'poem'" in result.output


def test_bench_measures_holds_against_thresholds_and_writes_all_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "html", "xml", "md")}
    args = ["bench", "-m", str(folder), "--tasks", "explain", "-a", "ngram", "-r", "2", "--warmups", "0", "-n", "8"]
    kinds = [("-o", "json"), ("--html", "html"), ("--junit", "xml"), ("--markdown", "md")]
    outputs = [part for option, kind in kinds for part in (option, str(files[kind]))]
    result = CliRunner().invoke(app, [*args, *outputs, "--ci", "failures == 0", "--ci", "speedup_low > 1000"])
    assert result.exit_code == 1, result.output
    assert "pass  failures == 0: explain, ngram k=4: 0 of 2" in result.output and "FAIL  speedup_low > 1000" in result.output
    assert ElementTree.parse(files["xml"]).getroot().get("failures") == "1"
    made_ = record.load(files["json"])
    assert files["html"].read_text(encoding="utf-8") == as_page(made_)
    assert files["md"].read_text(encoding="utf-8") == as_markdown(made_)


def test_every_load_and_arm_is_asked_unless_one_is_named() -> None:
    ways = {"baseline": IDLE, "a": FAST, "b": FAST}
    sweep = fake(ways, ("copy", "explain"), SWEEP)
    assert len(results("speedup > 1", sweep)) == 2 * 3 * 2
    assert len(results("speedup.copy > 1", sweep)) == 3 * 2 and len(results("speedup.copy@c=8 > 1", sweep)) == 2
    assert len(results("speedup.copy@c=8[b] > 1", sweep)) == 1 and len(results("failures == 0", sweep)) == 2 * 3 * 3
