"""No run is lost: after any fault or interrupt the measured batches are in the file, and the others can be measured later."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from forerun.bench import run
from forerun.bench.engines.arms import BASELINE
from forerun.bench.engines.endpoint import Request, RequestFailed
from forerun.bench.load.plan import PlannedBatch, batches_of, missing
from forerun.bench.pages import junit, words
from forerun.bench.records import record, redaction, summary, thresholds
from forerun.bench.records.keeping import Keeper
from forerun.bench.records.record import Batch, Record, RecordFile
from forerun.types import SettingError
from tests.records import Way, as_markdown, as_page, as_text, fake
from tests.scripted import FAST, Bench, Quiet, Script, ScriptedSide, refused, scripted
from tests.tiny import tiny_model

TASKS = ("return-code", "explain")


def small(scripts: dict[str, Script], together: bool = True, **plan: Any) -> Bench:
    return scripted(scripts, together, **({"tasks": TASKS, "repetitions": 3, "max_tokens": 20} | plan))


def what(batches: Any) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    """The answers of each measured batch, by task, arm and repetition."""
    found: dict[tuple[str, str, int], tuple[Any, ...]] = {}
    for b in batches:
        if not b.warmup:
            assert (b.task, b.arm, b.repetition) not in found, "a batch was measured twice"
            found[b.task, b.arm, b.repetition] = tuple((a.prompt, a.token_ids) for a in b.answers)
    return found


# interrupts


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_anywhere_is_resumed_to_the_same_record(
    together: bool, stop: type[BaseException] | None
) -> None:
    """The run ends before one of its batches, by an interrupt, by two interrupts or by a fault of the runner."""
    whole = small({"fast": FAST}, together, repetitions=2).measure()
    count = len(whole.batches)
    for at in range(count):
        first = small({"fast": FAST}, together, repetitions=2)
        if stop is None:
            part = first.measure(Quiet(at))
            assert part == first.kept[-1]
        else:
            with pytest.raises(stop):
                first.measure(Quiet(at, stop))
            if not first.kept:
                assert at == 0
                continue
            part = first.kept[-1]
        assert not part.finished and len(part.batches) == at and part.batches == whole.batches[:at]
        assert not any(side.is_up for side in first.sides)
        assert words.warnings(part) and as_markdown(part)
        rest = small({"fast": FAST}, together, repetitions=2)
        watcher = Quiet()
        made = rest.measure(watcher, part)
        assert made.finished and what(made.batches) == what(whole.batches)
        assert made.started == part.started and len(made.resumed) == 1 and made.seconds >= part.seconds
        assert len([s for s in watcher.total if not s.warmup]) == len(what(whole.batches)) - len(what(part.batches))
        assert [b.order for b in made.batches] == list(range(len(made.batches)))
        assert (summary.cells(made) == summary.cells(whole)) or not together or stop, "the clock of the script goes on"


def test_a_run_can_be_resumed_again_and_again() -> None:
    whole = small({"fast": FAST, "other": FAST}).measure()
    draw, part, rounds = random.Random(1), None, 0
    while part is None or not part.finished:
        part = small({"fast": FAST, "other": FAST}).measure(Quiet(draw.randrange(3, 9)), part)
        rounds += 1
    assert rounds > 3 and what(part.batches) == what(whole.batches) and len(part.resumed) == rounds - 1
    again = small({"fast": FAST, "other": FAST})
    assert again.measure(earlier=part).batches == part.batches and not again.log, "nothing is missing"


def test_only_what_is_missing_is_measured_behind_its_own_warmups() -> None:
    bench = small({"fast": FAST}, repetitions=4, warmups=2)
    for together in (True, False):
        steps = list(batches_of(bench.plan, 2, together))
        draw = random.Random(7)
        for _ in range(50):
            done = {(s.task.name, s.load, s.round_, s.side) for s in steps if not s.warmup and draw.random() < draw.random()}
            left = missing(steps, done)
            kept = {(s.task.name, s.load, s.round_, s.side) for s in left if not s.warmup}
            every = {(s.task.name, s.load, s.round_, s.side) for s in steps if not s.warmup}
            assert kept == every - done and not kept & done

            def group(step: PlannedBatch) -> tuple[Any, ...]:
                return step.visit, step.task.name, step.side

            warm = [group(s) for s in left if s.warmup]
            assert {g: warm.count(g) for g in warm} == {group(s): 2 for s in left if not s.warmup}
            assert left == [s for s in steps if s in left], "in the order of the whole run"


def test_a_resumed_run_says_so() -> None:
    part = small({"fast": FAST}).measure(Quiet(12))
    older = dataclasses.replace(part, versions={**part.versions, "torch": "1.0"})
    said = words.warnings(small({"fast": FAST}).measure(earlier=older))
    assert any("interrupted and resumed" in w for w in said)
    assert any("resumed within explain" in w and "began anew" in w for w in said)
    assert any("torch 1.0 to" in w for w in said)


# faults


def test_any_exception_of_a_request_is_a_failed_request() -> None:
    """A request that raises fails alone, whatever it raises; the other arm is not touched."""
    plain = small({"fast": FAST}).measure()
    for error in (RequestFailed("no"), KeyError("x"), RuntimeError("out of memory"), ValueError("\udc80"), OSError(5, "io")):

        def fault(ask: Request, error: Exception = error) -> Exception | None:
            return error if ask.name == "return-code 2" and not ask.logprobs else None

        made = small({"fast": FAST._replace(fault=fault)}).measure()
        failed = [a for b in made.batches for a in b.answers if a.failed]
        assert made.finished and len(made.batches) == len(plain.batches) and len(failed) == 1
        assert failed[0].failure and failed[0].tokens == 0
        assert [b.answers for b in made.batches if b.arm == BASELINE] == [b.answers for b in plain.batches if b.arm == BASELINE]


OPERATIONS = ("up", "fresh", "counters", "generate", "times", "renew", "down")


def breaking(bench: Bench, draw: random.Random) -> None:
    """From some call on, one operation of one side raises, once or always; the side may die."""
    side = draw.choice(bench.sides)
    name, at, times = draw.choice(OPERATIONS[:5]), draw.randrange(12), draw.choice((1, 1, 99))
    dies, calls, original = draw.random() < 0.5, 0, getattr(side, name)

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if at < calls <= at + times:
            side.alive = side.alive and not dies
            raise RuntimeError("broken")
        return original(*arguments)

    setattr(side, name, broken)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_breaks_the_rest_is_measured(seed: int) -> None:
    """Each batch that is not measured is either failed, with a reason, or given up, with a reason."""
    draw = random.Random(seed)
    together, concurrency = draw.random() < 0.7, draw.choice((1, 3))
    scripts = {"fast": FAST, "other": FAST}
    whole = small(scripts, together, concurrency=concurrency).measure()
    bench, watcher = small(scripts, together, concurrency=concurrency), Quiet()
    breaking(bench, draw)
    try:
        made = bench.measure(watcher)
    except RuntimeError:
        assert not bench.log, "a side that does not come up at the very start is all that ends a run"
        return
    assert made.finished and len(made.batches) + len(watcher.left) == len(whole.batches)
    expected, answered = what(whole.batches), 0
    for b in made.batches:
        for a in b.answers:
            assert (a.failure is not None) == a.failed
            assert a.failed or b.warmup or (a.prompt, a.token_ids) in expected[b.task, b.arm, b.repetition]
            answered += not a.failed
    assert answered and (made.given_up or not watcher.left)
    failed = [a for b in made.batches for a in b.answers if a.failed]
    assert all("broken" in str(a.failure) for a in failed) and all("broken" in said for said in made.given_up)
    assert not any(side.is_up for side in bench.sides) and Record.from_json(made.to_json()) == made
    assert as_markdown(made)


def test_a_side_that_dies_is_brought_up_again_a_few_times() -> None:
    def dying(times: int) -> tuple[Record, ScriptedSide]:
        bench = small({"fast": Script()}, repetitions=8, tasks=("explain",))
        side, deaths = bench.sides[1], 0

        def fault(ask: Request) -> Exception | None:
            nonlocal deaths
            if int(ask.name.split()[1]) % 2 and deaths < times:
                deaths += 1
                side.alive = False
                return RequestFailed("connection dropped")
            return None

        side.script = Script(fault=fault)
        return bench.measure(), side

    made, _ = dying(2)
    assert made.finished and not made.given_up and sum(a.failed for b in made.batches for a in b.answers) == 2
    assert len([n for n in made.notes if "fast died while it measured explain" in n]) == 1
    made, _ = dying(99)
    assert any("died 4 times" in said for said in made.given_up)
    good = [b for b in made.batches if b.arm == BASELINE]
    assert len(good) == 9 and not any(a.failed for b in good for a in b.answers)


def test_without_a_baseline_nothing_is_compared() -> None:
    bench = small({BASELINE: Script(fault=refused("HTTP 401: no key")), "fast": FAST})
    made, watcher = bench.measure(watcher := Quiet()), watcher
    assert watcher.left and any("HTTP 401" in why for _, why in watcher.left)
    assert words.headline(made)[0] == "Nothing was measured: no request to the baseline was answered"
    assert list(summary.unanswered(made)) == [BASELINE]


def test_a_side_that_does_not_come_up_at_the_start_ends_the_run_before_anything_is_measured() -> None:
    bench = small({"fast": FAST})
    bench.sides[1].fails_to_start = [SettingError("engine", "fast", "no memory")]
    with pytest.raises(SettingError, match="no memory"):
        bench.measure()
    assert not bench.log and not bench.kept
    later = small({"fast": FAST}, together=False)
    later.sides[1].fails_to_start = [SettingError("engine", "fast", "no memory")] * 9
    made = later.measure()
    assert [b.arm for b in made.batches] == [BASELINE] * 8 + [BASELINE] * 6 or {b.arm for b in made.batches} == {BASELINE}
    assert any("fast was given up" in said and "no memory" in said for said in made.given_up)


# reasons


def test_reasons_are_counted_by_kind_wherever_results_are_shown() -> None:
    def fault(ask: Request) -> Exception | None:
        number = int(ask.name.split()[1])
        return RequestFailed(f"HTTP 429: wait {number} s" if number % 3 else "HTTP 401: no such key") if number > 4 else None

    made = scripted({"bad": FAST._replace(fault=fault)}, repetitions=4, concurrency=4, tasks=("explain",)).measure()
    (cell,) = [c for c in summary.cells(made) if c.arm == "bad"]
    assert cell.failures > 4 and sum(n for _, n in cell.reasons) == cell.failures and len(cell.reasons) == 2
    for text in (as_markdown(made), as_page(made), "\n".join(words.warnings(made))):
        assert "requests failed: HTTP 429: wait 5 s (" in text and "HTTP 401: no such key (" in text


def test_an_arm_that_answers_nothing_is_said_on_top() -> None:
    bench = scripted({"bad": FAST._replace(fault=refused("HTTP 401: no such key"))}, tasks=("explain",))
    made = bench.measure()
    answer, arms = words.headline(made)
    assert answer == "Nothing was measured: bad answered no request"
    assert arms == [("bad", "3 of 3 requests failed: HTTP 401: no such key")]
    assert any("bad was given up on explain" in w for w in words.warnings(made))
    shown = "\n".join(line.rstrip() for line in as_text(made, 200).splitlines())
    assert "bad: 3 of 3 requests failed: HTTP 401: no such key.\n" in shown
    for text in ("failures == 0", "speedup[bad] >= 0", "verdict != slower"):
        checks = thresholds.check(thresholds.parse([text]), made)
        assert not all(c.passed for c in checks) and "HTTP 401" in junit.junit(checks, made)


# the file


def test_the_file_is_whole_after_each_batch(tmp_path: Path) -> None:
    for name in ("r.json", "r.json.gz"):
        file, seen = RecordFile(tmp_path / name), []
        bench = small({"fast": FAST})

        def keep(made: Record, file: RecordFile = file, seen: list[int] = seen) -> None:
            file.write(made)
            assert record.load(file.path) == made
            seen.append(len(made.batches))

        bench.kept = type("Keep", (list,), {"append": lambda self, made, keep=keep: keep(made)})()
        bench.measure()
        assert seen == [*range(1, 17), 16] and [p.name for p in tmp_path.iterdir() if name in p.name] == [name]


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake({"baseline": Way(), "fast": Way(12.5, 4, (4, 1, 0, 0))})
    file = RecordFile(tmp_path / "r.json")
    part = dataclasses.replace(made, batches=made.batches[:5], finished=False)
    file.write(part)

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as half:
            half.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            file.write(made)
        assert record.load(tmp_path / "r.json") == part
    file.write(made)
    assert record.load(tmp_path / "r.json") == made


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    made = fake({"baseline": Way(), "fast": Way(12.5, 4, (4,))}, repetitions=1)
    (tmp_path / "null").symlink_to("/dev/null")
    record.save(made, tmp_path / "null")
    assert (tmp_path / "null").is_symlink() and Keeper(Path("/dev/null")).trouble is None


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, keeper = small({"fast": FAST}), Keeper(tmp_path / "r.json")
    with monkeypatch.context() as patched:
        patched.setattr(RecordFile, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        bench.kept = type("Keep", (list,), {"append": lambda self, made: keeper.write(made)})()
        made = bench.measure()
    assert made.finished and keeper.trouble == "No space left on device"
    where = keeper.close()
    assert where != tmp_path / "r.json" and record.load(where) == made


def test_a_run_that_is_not_finished_is_not_overwritten(tmp_path: Path) -> None:
    made = fake({"baseline": Way(), "fast": Way(12.5, 4, (4, 1, 0, 0))})
    settings = dataclasses.replace(made.settings, options={"max_tokens": 8})
    record.save(dataclasses.replace(made, finished=False, settings=settings), tmp_path / "part.json")
    record.save(made, tmp_path / "whole.json")
    (tmp_path / "other.txt").write_text("something else")
    with pytest.raises(SettingError, match="--resume"):
        Keeper(tmp_path / "part.json")
    for name, replacing in (("part.json", True), ("whole.json", False), ("other.txt", False)):
        assert Keeper(tmp_path / name, replacing).trouble is None
    for bad in (tmp_path / "none" / "r.json", tmp_path):
        with pytest.raises(SettingError):
            Keeper(bad)


def test_what_servers_send_comes_back_from_the_file(tmp_path: Path) -> None:
    """A lone surrogate, line separators, control characters and a NUL in texts and reasons."""
    made = fake({"baseline": Way(), "fast": Way(12.5, 4, (4, 1, 0, 0))})
    odd = "a\ud800b\udc80 \u2028 \u2029 \x85 \x00 \x1b[31m \ufeff \U0001f600"
    batch = made.batches[3]
    answer = dataclasses.replace(batch.answers[0], text=odd, failure=odd, usage={odd: [odd]})
    made = dataclasses.replace(made, batches=(*made.batches[:3], dataclasses.replace(batch, answers=(answer,), notes=(odd,))))
    for name in ("r.json", "r.json.gz"):
        record.save(made, tmp_path / name)
        assert record.load(tmp_path / name) == made
    shown = CliRunner().invoke(cli.app, ["report", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md"), "--html",
                                         str(tmp_path / "r.html")])  # fmt: skip
    assert shown.exit_code == 0, shown.output


BROKEN: list[Callable[[dict[str, Any]], Any]] = [
    lambda v: {**v, "batches": None},
    lambda v: {**v, "batches": [1]},
    lambda v: {**v, "batches": [{**v["batches"][0], "answers": 3}]},
    lambda v: {**v, "batches": [{**v["batches"][0], "answers": [None]}]},
    lambda v: {**v, "settings": []},
    lambda v: {**v, "settings": {**v["settings"], "arms": {"a": 1}}},
    lambda v: {**v, "machine": "x"},
    lambda v: {**v, "schema": [3]},
    lambda v: {**v, "schema": "3"},
    lambda v: {k: x for k, x in v.items() if k != "settings"},
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_file_that_was_changed_is_one_line(tmp_path: Path, number: int) -> None:
    value = json.loads(fake({"baseline": Way(), "fast": Way(12.5, 4, (4,))}, repetitions=1).to_json())
    (tmp_path / "r.json").write_text(json.dumps(BROKEN[number](value)))
    for arguments in (["report", str(tmp_path / "r.json")], ["bench", "--resume", str(tmp_path / "r.json")]):
        shown = CliRunner().invoke(cli.app, arguments)
        assert shown.exit_code == 2 and shown.output.startswith("error: ") and shown.output.count("\n") == 1


# the whole program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("resume") / "tiny", positions=4096))


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    redaction.forget()


def bench(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(cli.app, ["bench", *arguments])


ASKED = ("--tasks", "copy,explain", "-a", "ngram", "-r", "2", "-n", "8")


def cut(path: Path, batches: int) -> Record:
    """As if the run had been interrupted."""
    whole = record.load(path)
    part = dataclasses.replace(whole, batches=whole.batches[:batches], finished=False, differences=())
    record.save(part, path)
    return whole


def test_resume_takes_the_options_of_the_record(model: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    shown = bench("-m", model, *ASKED, "-o", str(path))
    assert shown.exit_code == 0, shown.output
    assert f"forerun bench --resume {path}" in shown.stderr
    whole = cut(path, 7)
    again = bench("--resume", str(path), "--markdown", str(tmp_path / "r.md"))
    assert again.exit_code == 0, again.output
    made = record.load(path)
    assert made.finished and what(made.batches) == what(whole.batches) and made.batches[:7] == whole.batches[:7]
    assert made.settings.options == whole.settings.options and made.settings.command == whole.settings.command
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == as_markdown(made)
    same = bench("--resume", str(path), "-m", model, *ASKED)
    assert same.exit_code == 0 and record.load(path).batches == made.batches, "the same options may be given again"


@pytest.mark.parametrize(
    "changed, said",
    [
        (("-n", "9"), "max_tokens: 8 in the record, 9 now"),
        (("-r", "3"), "repetitions: 2 in the record, 3 now"),
        (("-a", "suffix"), "arm: ngram in the record, suffix now"),
        (("--tasks", "copy"), "tasks: copy,explain in the record, copy now"),
        (("--seed", "1"), "seed: 0 in the record, 1 now"),
        (("-c", "2"), "concurrency: 1 in the record, 2 now"),
        (("--control",), "control: False in the record, True now"),
        (("--dtype", "float32"), "dtype: auto in the record, float32 now"),
    ],
)
def test_another_plan_is_refused_with_what_differs(model: str, tmp_path: Path, changed: tuple[str, ...], said: str) -> None:
    path = tmp_path / "r.json"
    made = small({"ngram k=4": FAST}).measure(Quiet(5))
    options = {"model": model, "tasks": ["copy", "explain"], "arms": ["ngram"], "repetitions": 2, "max_tokens": 8}
    record.save(dataclasses.replace(made, settings=dataclasses.replace(made.settings, options=options)), path)
    before = path.read_bytes()
    shown = bench("--resume", str(path), *changed)
    assert shown.exit_code == 2 and said in shown.output and path.read_bytes() == before


def test_another_machine_and_other_prompts_are_refused(model: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "mine.jsonl", tmp_path / "r.json"
    prompts.write_text("\n".join(json.dumps({"prompt": f"the thing {i}"}) for i in range(9)), encoding="utf-8")
    asked = ("--tasks", "none", "--prompts", str(prompts), "-a", "ngram", "-r", "2", "-n", "4")
    shown = bench("-m", model, *asked, "-o", str(path))
    assert shown.exit_code == 0, shown.output
    whole = cut(path, 3)
    prompts.write_text(prompts.read_text(encoding="utf-8").replace("thing 1", "thing one"), encoding="utf-8")
    refused_ = bench("--resume", str(path))
    assert refused_.exit_code == 2 and "contents of the prompts" in refused_.output
    elsewhere = dataclasses.replace(record.load(path), machine=dataclasses.replace(whole.machine, cpu="Other CPU"))
    record.save(elsewhere, path)
    prompts.write_text(prompts.read_text(encoding="utf-8").replace("thing one", "thing 1"), encoding="utf-8")
    refused_ = bench("--resume", str(path))
    assert refused_.exit_code == 2 and "processor: Other CPU in the record" in refused_.output


@pytest.mark.parametrize("where", ["Engine.step", "Owner.advance"])
def test_an_exception_in_the_engine_is_a_failed_request(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After an exception that the engine's owner does not catch, the engine is built again."""
    from forerun.engine.engine import Engine
    from forerun.engine.owner import Owner

    kind, name = (Engine, "step") if where == "Engine.step" else (Owner, "advance")
    step, calls = getattr(kind, name), 0

    def sometimes(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (30, 31, 60):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(self)

    monkeypatch.setattr(kind, name, sometimes)
    path = tmp_path / "r.json"
    shown = bench("-m", model, "--tasks", "copy", "-a", "ngram", "-r", "6", "-n", "8", "-o", str(path))
    made = record.load(path)
    failed = [a for b in made.batches for a in b.answers if a.failed]
    assert shown.exit_code == 0 and made.finished and 2 <= len(failed) <= 3 and len(made.batches) == 14
    assert all("illegal memory access" in str(a.failure) for a in failed)
    assert any("was started again" in w for w in words.warnings(made)) == (kind is Owner)
    assert "illegal memory access" in shown.stdout


def test_an_engine_that_answers_nothing_is_an_exit_code_of_its_own(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.engine.engine import Engine

    def never(self: Engine) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(Engine, "step", never)
    shown = bench("-m", model, *ASKED, "-r", "4", "-o", str(tmp_path / "r.json"))
    assert shown.exit_code == cli.UNANSWERED and "RuntimeError: no" in shown.stdout and "Traceback" not in shown.stdout
    assert record.load(tmp_path / "r.json").given_up


def test_a_fault_of_our_own_loses_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any) -> Any:
        raise ZeroDivisionError("a fault")

    calls = 0
    restart = run._Run._restart_if_dead

    async def later(self: Any, step: PlannedBatch, batch: Batch) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ZeroDivisionError("a fault")
        await restart(self, step, batch)

    path = tmp_path / "r.json"
    with monkeypatch.context() as patched:
        patched.setattr(run._Run, "_restart_if_dead", later)
        shown = bench("-m", model, *ASKED, "-o", str(path))
    assert shown.exit_code == cli.BROKEN and "ZeroDivisionError: a fault" in shown.stderr and "Traceback" not in shown.output
    part = record.load(path)
    assert not part.finished and len(part.batches) == 5 and f"--resume {path}" in shown.stderr.splitlines()[-2]
    assert bench("--resume", str(path)).exit_code == 0 and record.load(path).finished
    with monkeypatch.context() as patched:
        patched.setattr(run, "judge", judge)
        shown = bench("-m", model, *ASKED, "-o", str(tmp_path / "s.json"))
    assert shown.exit_code == cli.UNANSWERED and "ZeroDivisionError: a fault" in shown.output
    calls = 0
    monkeypatch.setattr(run._Run, "_restart_if_dead", later)
    assert "Traceback" in bench("-m", model, *ASKED, "-o", str(tmp_path / "t.json"), "--debug").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_asked_to_end_leaves_its_record(model: str, tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes while batches are measured. The record is complete up to then, and the run can be resumed."""
    path = tmp_path / "r.json"
    asked = ["--tasks", "copy", "-a", "ngram", "-r", "60", "-n", "48", "-o", str(path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen([sys.executable, "-m", "forerun", "bench", "-m", model, *asked], **pipes)
    until = time.monotonic() + 60
    while not path.exists() and running.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == cli.INTERRUPTED, (out, err)
    made = record.load(path)
    assert not made.finished and 0 < len(made.batches) < 122 and f"--resume {path}" in err.splitlines()[-1]
    assert "interrupted" in out and "Traceback" not in err and os.listdir(tmp_path) == ["r.json"]


def test_an_interrupt_before_anything_is_measured(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.bench import command
    from forerun.bench.load import budget

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for place in ((command, "subject_of"), (budget, "pace_of"), (budget, "fitted")):
        with monkeypatch.context() as patched:
            patched.setattr(*place, interrupted)
            shown = bench("-m", model, "-a", "ngram", "-o", str(tmp_path / "r.json"))
        assert shown.exit_code == cli.INTERRUPTED and "Traceback" not in shown.output and not list(tmp_path.iterdir())


FAULTS: list[tuple[str, Exception, int, str]] = [
    ("forerun.bench.command.plan_of", PermissionError(13, "Permission denied", "x.jsonl"), 2, "x.jsonl: Permission denied"),
    ("forerun.bench.command.subject_of", OSError(28, "No space left on device"), 2, "No space left on device"),
    ("forerun.bench.command.subject_of", SettingError("dtype", "x", "give auto"), 2, "dtype='x': give auto"),
    ("forerun.bench.command.subject_of", RuntimeError("CUDA error"), 4, "RuntimeError: CUDA error"),
    ("forerun.bench.command.described", KeyError("a"), 4, "KeyError: 'a'"),
    ("forerun.bench.load.budget.pace_of", MemoryError(), 4, "MemoryError"),
    ("forerun.bench.load.budget.fitted", ZeroDivisionError("division by zero"), 4, "ZeroDivisionError: division by zero"),
    ("forerun.bench.run.measure", AssertionError(), 4, "AssertionError"),
    ("forerun.bench.pages.report.view", TypeError("no\nlines"), 4, "TypeError: no"),
    ("forerun.bench.pages.html.page", UnicodeEncodeError("utf-8", "x", 0, 1, "odd"), 4, "UnicodeEncodeError"),
]


@pytest.mark.parametrize("place, error, code, said", FAULTS, ids=[fault[0].rpartition(".")[2] for fault in FAULTS])
def test_no_error_is_a_traceback_and_none_loses_what_was_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, code: int, said: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    path = tmp_path / "r.json"
    asked = ("-m", model, "-a", "ngram", "-r", "1", "-n", "4", "--budget-minutes", "1")
    with monkeypatch.context() as patched:
        patched.setattr(place, fails)
        shown = bench(*asked, "-o", str(path), "--html", str(tmp_path / "r.html"))
        debug = bench(*asked, "-o", str(tmp_path / "s.json"), "--html", str(tmp_path / "r.html"), "--debug")
    last = [line for line in shown.stderr.splitlines() if line.startswith("error: ")]
    assert shown.exit_code == code and len(last) == 1 and said in last[0] and "Traceback" not in shown.output
    assert ("--debug" in shown.stderr) == (code == cli.BROKEN)
    assert debug.exit_code == code and "Traceback" in debug.stderr
    if place.startswith(("forerun.bench.pages.report", "forerun.bench.pages.html")):
        assert record.load(path).finished, "what fails is the showing"
