"""Whole runs on other engines: a mock engine that is launched, and one that runs already. The records must hold what the mock
did."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import command, run
from forerun.bench.engines.arms import BASELINE, CONTROL, Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.openai import OWN_FIELDS, Address, Timeouts
from forerun.bench.engines.servers import Server
from forerun.bench.engines.sides import Running
from forerun.bench.engines.subject import Subject, random_ids
from forerun.bench.load import equality, latency
from forerun.bench.load.plan import Plan, in_turns, interleaved
from forerun.bench.options import Options
from forerun.bench.pages import words
from forerun.bench.records import record, summary
from forerun.bench.records.record import Answer, Counts, Load, Record, ServerCounters
from forerun.bench.workloads import tasks as workloads
from forerun.types import SettingError
from tests.mock_server import MockServer, Script, paced
from tests.scripted import Quiet
from tests.test_servers import MOCK


def plan(**changes: Any) -> Plan:
    given = {"tasks": workloads.find(("explain",)), "repetitions": 2, "max_tokens": 9, "warmup_tokens": 4} | changes
    return Plan(**given)


STEP = 0.004


def plain(body: dict[str, Any]) -> Script:
    return Script(paced(STEP, body["max_tokens"], 1, first_s=0.01))


def drafting(body: dict[str, Any]) -> Script:
    """Two tokens a step, of three drafted."""
    chunks = paced(STEP, body["max_tokens"], 2, first_s=0.01)
    steps = len(chunks) - 1
    return Script(chunks, counted=(steps, 3 * steps, body["max_tokens"] - 1 - steps, (body["max_tokens"] - 1 - steps,)))


def measured(
    what: Plan, base: MockServer, fast: MockServer, watcher: Quiet | None = None, engine: str = "vllm"
) -> Record:
    async def go() -> Record:
        async with base, fast:
            sides = [
                Running(Arm(BASELINE), Address(base.url, "target", DIALECTS[engine])),
                Running(Arm("fast", {"method": "ngram"}), Address(fast.url, "target", DIALECTS[engine])),
            ]
            if what.control:
                sides.append(sides[0])
            return await run.measure(what, Subject("m", engine, tuple(sides)), watcher or Quiet())

    return asyncio.run(go())


def test_a_record_holds_what_the_servers_did(tmp_path: Path) -> None:
    watcher = Quiet()
    made = measured(plan(), MockServer(plain), MockServer(drafting), watcher)
    order = [("fast", -1), (BASELINE, -1), (BASELINE, 0), ("fast", 0), ("fast", 1), (BASELINE, 1)]
    assert [(a, r) for _, a, r, _ in watcher.seen] == order
    good = [b for b in made.batches if not b.warmup]
    for batch in good:
        (answer,) = batch.answers
        per = 2 if batch.arm == "fast" else 1
        assert answer.tokens == 9 and len(answer.token_ids) == 9 and len(answer.chunks) == 1 + 8 // per
        assert latency.tpot(answer) == pytest.approx((answer.e2e_s - answer.ttft_s) / 8)
        assert answer.ttft_s >= 0.01 and answer.e2e_s >= 0.01 + STEP * 8 / per and batch.wall_s >= answer.e2e_s
        assert batch.notes == () and batch.before is not None and batch.after is not None
        if batch.arm == "fast":
            assert batch.drafting == Counts(4, 4, 12, 4, (), (4,))
        else:
            assert batch.drafting is None, "nothing drafts there"
    prompts = [b.answers[0].prompt for b in made.batches if b.arm == BASELINE]
    assert len(set(prompts)) == len(prompts) and prompts == [b.answers[0].prompt for b in sorted(
        (b for b in made.batches if b.arm == "fast"), key=lambda b: b.repetition)]
    facts = made.settings.arms[1].facts
    assert facts is not None and (facts.engine, facts.version, facts.kv_tokens) == ("vllm", "9.9", 4096)
    cell = next(c for c in summary.cells(made) if c.arm == "fast")
    assert cell.got == pytest.approx(2.0) and cell.identical == (2, 2) and cell.failures == 0
    record.save(made, tmp_path / "r.json.gz")
    assert record.load(tmp_path / "r.json.gz") == made


def test_every_prompt_of_a_run_is_another_and_caches_are_kept_apart() -> None:
    server = MockServer(plain)
    loads = (Load(concurrency=2, requests=2), Load("poisson", rate=200.0, requests=3))
    made = measured(plan(loads=loads, control=True), server, MockServer(drafting))
    assert {b.load for b in made.batches} == set(loads) and [a.name for a in made.settings.arms][-1] == CONTROL
    contents = [body["messages"][0]["content"] for body in server.seen]
    assert len(contents) == 2 * 3 * 5 and len(set(contents)) == 3 * 5, "baseline and control are asked the same"
    salts: dict[str, set[str]] = {}
    for body in server.seen:
        salts.setdefault(body["messages"][0]["content"], set()).add(body["cache_salt"])
    assert all(len(of_prompt) == 2 for of_prompt in salts.values()), "and share no prefix cache"


def test_one_prompt_too_many_is_refused_before_anything_runs() -> None:
    with pytest.raises(SettingError, match="different ones"):
        plan(repetitions=workloads.VARIANTS)
    for bad in ({"loads": ()}, {"loads": (Load(), Load())}, {"loads": (Load("poisson", rate=0.0),)}, {"tasks": ()}):
        with pytest.raises(SettingError):
            plan(**bad)


def test_differences_are_found_by_token_and_by_character() -> None:
    def other(body: dict[str, Any]) -> Script:
        return dataclasses.replace(drafting(body), first_id=100 if body["max_tokens"] < 9 else 101)

    made = measured(plan(), MockServer(plain), MockServer(other))
    assert [(d.position, d.unit, d.arm) for d in made.differences] == [(0, "token", "fast")] * 2

    def no_ids(script: Script) -> Script:
        return dataclasses.replace(script, ids=False)

    made = measured(plan(), MockServer(lambda b: no_ids(plain(b))), MockServer(lambda b: no_ids(other(b))))
    assert [(d.position, d.unit) for d in made.differences] == [(2, "character")] * 2, "100 and 101 part at the third character"


def test_failures_and_other_traffic_are_seen() -> None:
    seen = 0

    def sometimes(body: dict[str, Any]) -> Script:
        nonlocal seen
        seen += 1
        return dataclasses.replace(drafting(body), ending="drop" if seen == 3 else "done")

    made = measured(plan(), MockServer(plain, foreign_tokens=50), MockServer(sometimes))
    base, fast = ([b for b in made.batches if b.arm == arm and not b.warmup] for arm in (BASELINE, "fast"))
    assert all("other traffic" in b.notes[0] and "59" in b.notes[0] for b in base)
    assert [b.answers[0].failed for b in fast] == [False, True]
    assert fast[1].answers[0].tokens == 0 and "dropped" in str(fast[1].answers[0].failure)
    assert next(c for c in summary.cells(made) if c.arm == "fast").failures == 1


def answer(tokens: int, counts: Counts = record.NOT_COUNTED) -> Answer:
    return Answer("p", 3, (), "length", None, 0.1, 1.0, counts, "t", tokens)


def test_which_counts_are_believed() -> None:
    before = ServerCounters(10.0, 40.0, 20.0, (9.0,), generation_tokens=100.0)
    after = ServerCounters(14.0, 56.0, 26.0, (12.0, 3.0), generation_tokens=120.0)
    counts, notes = run.judge([answer(12), answer(8)], before, after, True)
    assert counts == Counts(12, 4, 16, 6, (), (3, 3)) and notes == (), "20 tokens, 2 first ones, 6 accepted: 12 steps"
    own = Counts(5, 5, 9, 2, (), ())
    assert run.judge([answer(12, own), answer(8, own)], before, after, True)[0] == Counts(10, 10, 18, 4, (), ())
    counts, notes = run.judge([answer(6)], before, after, True)
    assert counts is None and "other traffic" in notes[0]
    counts, notes = run.judge([answer(12), answer(8)], after, before, True)
    assert counts is None and "fell" in notes[0]
    assert run.judge([answer(12), answer(8)], before, after, False) == (None, ())
    short = dataclasses.replace(after, generation_tokens=110.0)
    assert "counted 10 tokens of the 20" in run.judge([answer(12), answer(8)], before, short, True)[1][0]


def test_what_a_task_of_the_users_own_must_not_be_taken_for_is_in_the_record() -> None:
    own = dataclasses.replace(workloads.find(("explain",))[0], name="log", caution="its prompts are made-up words")
    made = measured(plan(tasks=(own,), repetitions=1), MockServer(plain), MockServer(drafting))
    assert made.notes == ("log: its prompts are made-up words.",) and made.notes[0] in words.warnings(made)


def test_orders() -> None:
    what = plan(repetitions=3, tasks=workloads.find(("copy", "explain")))
    together = list(interleaved(what, 2))
    assert [s.side for s in together if s.task.name == "copy"] == [1, 0, 0, 1, 1, 0, 0, 1]
    turns = list(in_turns(what, 3))
    visits = [s.side for i, s in enumerate(turns) if i == 0 or turns[i - 1].side != s.side]
    assert visits == [0, 1, 2, 1, 0], "the side in the middle of the turn stays up"
    for steps in (together, turns):
        kept = [(s.task.name, s.side, s.round_) for s in steps if not s.warmup]
        assert len(kept) == len(set(kept)) == (2 if steps is together else 3) * 2 * 3
    assert turns[0].warmup and len(turns) == 3 * (3 + 2) * 2


def test_the_margin_at_a_token() -> None:
    from forerun.bench.engines.endpoint import TokenLogprob

    assert equality.margin_at(TokenLogprob("a", -0.5, (("a", -0.5), ("b", -0.75)))) == pytest.approx(0.25)
    assert equality.margin_at(TokenLogprob("a", -0.5, (("a", -0.5),))) is None


# launched servers, from the options to the record


def options(tmp_path: Path, **changes: Any) -> Options:
    if not (tmp_path / "mock.toml").exists():
        mock(tmp_path)
    given: dict[str, Any] = {
        "engine": "vllm", "template": tmp_path / "mock.toml", "program": sys.executable, "arms": ("ngram:k=3",),
        "model": "some/model", "tasks": ("explain",), "repetitions": 4, "max_tokens": 13,
    }  # fmt: skip
    return Options(**(given | changes))


def launched(what: Options) -> Record:
    what.check()
    made = command.plan_of(what)
    return command.measure(made, command.subject_of(what, made), Quiet())


def mock(folder: Path, text: str = MOCK) -> Path:
    """A template whose engines run under a path of this test's own, so that they can be told from those of others."""
    real, own = Path(__file__).parent / "mock_server.py", folder / "mock_server.py"
    own.symlink_to(real)
    (folder / "mock.toml").write_text(text.replace(str(real), str(own)))
    return folder / "mock.toml"


def processes(folder: Path) -> int:
    """How many engines of this test are alive."""
    listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(str(folder / "mock_server.py") in line for line in listed)


@pytest.mark.parametrize("alive", ["together", "in-turns"])
def test_servers_are_launched_measured_and_gone(tmp_path: Path, alive: str) -> None:
    made = launched(options(tmp_path, alive=alive, concurrency=(1, 2)))
    assert made.finished and processes(tmp_path) == 0
    assert [a.name for a in made.settings.arms] == [BASELINE, "ngram k=3"] and made.settings.engine == "vllm"
    base, arm = (a.facts for a in made.settings.arms)
    assert base is not None and arm is not None and (base.kv_tokens, arm.kv_tokens) == (16384, 12288)
    assert arm.scheduler["async scheduling"] == "off" and arm.startup_s is not None and "--speculative-config" in arm.command
    cells = {(c.arm, c.load.label): c for c in summary.cells(made)}
    for load in ("c=1", "c=2"):
        assert cells["ngram k=3", load].got == pytest.approx(3.0) and cells["ngram k=3", load].identical[0] > 0  # type: ignore[index]
    assert all(not a.failed for b in made.batches for a in b.answers)


def test_the_key_of_a_launched_server_is_sent_with_requests(tmp_path: Path) -> None:
    made = launched(options(tmp_path, alive="together", server_args="--api-key k-1234567", arms=("flags:--api-key=k-7654321",)))
    assert not any(a.failed for b in made.batches for a in b.answers)
    assert all(arm.facts is not None and arm.facts.version == "9.9" for arm in made.settings.arms)
    assert "k-1234567" not in made.to_json() and "k-7654321" not in made.to_json()


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    """At its fourth request: that one failed, the others were answered by it and by its successor."""
    made = launched(options(tmp_path, alive="together", arms=("ngram", "flags:--die-after 3"), repetitions=4))
    failed = [(b.arm, a.failure) for b in made.batches for a in b.answers if a.failed]
    assert made.finished and not made.given_up and len(made.batches) == 3 * 5 and processes(tmp_path) == 0
    assert [arm for arm, _ in failed] == ["--die-after 3"] and "connection" in str(failed[0][1])
    assert any("--die-after 3 died while it measured explain and was started again" in w for w in words.warnings(made))


def test_a_server_that_cannot_be_started_again_costs_its_arm_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = Server.start, 0

    async def once(self: Server) -> None:
        nonlocal starts
        starts += self.arm.name != BASELINE and not self.running
        if starts > 1:
            raise SettingError("engine", self.arm.name, "its server ended with code 1: no memory")
        await start(self)

    monkeypatch.setattr(Server, "start", once)
    made = launched(options(tmp_path, alive="together", arms=("flags:--die-after 2",), repetitions=4))
    assert made.finished and [b.arm for b in made.batches].count(BASELINE) == 5
    assert len([b for b in made.batches if b.arm != BASELINE]) == 3
    (said,) = made.given_up
    assert said.startswith("--die-after 2 was given up: it did not come up again") and "no memory" in said


def test_an_interrupt_leaves_a_record_and_no_server(tmp_path: Path) -> None:
    """The whole program, asked to end while it measures."""
    mock(tmp_path, MOCK.replace('"--port"', '"--step", "0.05", "--port"'))
    words = ["bench", "-e", "vllm", "--template", str(tmp_path / "mock.toml"), "--program", sys.executable]
    words += ["-m", "some/model", "-a", "ngram", "--tasks", "explain", "-n", "40", "--alive", "together"]
    words += ["-o", str(tmp_path / "out.json")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen([sys.executable, "-m", "forerun", *words], text=True, **pipes)  # type: ignore[call-overload]
    until = time.monotonic() + 60
    while processes(tmp_path) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, (out, err)
    assert processes(tmp_path) == 0
    made = record.load(tmp_path / "out.json")
    assert not made.finished and f"--resume {tmp_path / 'out.json'}" in err


def test_a_running_server_by_url(tmp_path: Path) -> None:
    """Asked for its models in a thread of its own, as the command does it before the event loop runs."""
    import threading

    ready, stop, urls = threading.Event(), threading.Event(), []

    def serve() -> None:
        async def both() -> None:
            async with MockServer(plain) as base, MockServer(drafting) as fast:
                urls.extend([base.url, fast.url])
                ready.set()
                while not stop.is_set():
                    await asyncio.sleep(0.02)

        asyncio.run(both())

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(10)
    try:
        what = Options(engine=urls[0], arms=(f"fast={urls[1]}/v1",), tasks=("explain",), repetitions=2, max_tokens=9)
        made = launched(what)
        assert [a.name for a in made.settings.arms] == [BASELINE, "fast"] and made.settings.model == "target"
        assert made.settings.engine == "vllm", "told by the owner of its model"
        for bad in (("ngram",), (), ("fast=ftp://x",), (f"fast={urls[1]}", f"fast={urls[1]}")):
            with pytest.raises(SettingError):
                command.subject_of(dataclasses.replace(what, arms=bad), command.plan_of(what))
        with pytest.raises(SettingError, match="target"):
            command.subject_of(dataclasses.replace(what, served_model="other"), command.plan_of(what))
    finally:
        stop.set()
        thread.join()
    with pytest.raises(SettingError, match="is the server up"):
        command.subject_of(Options(engine="http://127.0.0.1:9", arms=("a=http://127.0.0.1:9",)), command.plan_of(what))


def test_what_body_sets_is_what_the_record_and_the_report_say() -> None:
    """A temperature that --body sets holds for every request: no greedy answers then, and none compared."""

    async def go(body: dict[str, Any], task: str) -> tuple[Record, MockServer]:
        async with MockServer(plain) as base, MockServer(drafting) as fast:
            sides = tuple(
                Running(arm, Address(server.url, "target", DIALECTS["vllm"], {}, body))
                for arm, server in ((Arm(BASELINE), base), (Arm("fast", {"method": "ngram"}), fast))
            )
            what = plan(tasks=workloads.find((task,)), repetitions=1, warmups=0)
            subject = Subject("m", "vllm", sides, random_ids(50, frozenset()), body=body)
            return await run.measure(what, subject, Quiet()), base

    for body, task, sent, said in (
        ({"temperature": 1}, "explain", 1.0, "sampled, and none is compared"),
        ({"temperature": 0}, "random", 0.0, "so its answers are greedy"),
        ({"top_k": 4}, "explain", 0.0, None),
    ):
        made, server = asyncio.run(go(body, task))
        assert [b["temperature"] for b in server.seen] == [sent] and made.settings.temperatures == {task: sent}
        cell = next(c for c in summary.cells(made) if c.arm == "fast")
        assert cell.identical == ((1, 1) if sent == 0 else None)
        notes = [note for note in words.warnings(made) if "--body" in note]
        assert notes == [] if said is None else (len(notes) == 1 and said in notes[0])
        assert Record.from_json(made.to_json()) == made


@pytest.mark.parametrize("name", sorted(OWN_FIELDS))
def test_fields_that_would_change_what_is_measured_cannot_be_set(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        command._body(Options(engine="vllm", body=json.dumps({name: 1})))


@pytest.mark.parametrize("value", [-1, "1", None, True, [1], 1e9])
def test_temperatures_that_body_cannot_set(value: Any) -> None:
    with pytest.raises(SettingError, match="temperature"):
        command._body(Options(engine="vllm", body=json.dumps({"temperature": value})))


@pytest.mark.parametrize("body", ['{"top_p": NaN}', '{"a": {"b": [Infinity]}}', '{"a": 1e999}', "[1]", "{", "7"])
def test_a_body_that_is_not_json_is_refused_before_anything_is_sent(body: str) -> None:
    with pytest.raises(SettingError, match="body"):
        command._body(Options(engine="vllm", body=body))


@pytest.mark.parametrize("name", ["request_s", "connect_s", "idle_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(SettingError, match="timeout"):
        Timeouts(**{name: value})


def test_draws_need_their_own_temperature_and_seeds() -> None:
    for body in ('{"temperature": 1}', '{"seed": 1}'):
        with pytest.raises(SettingError, match="--samples"):
            command._body(Options(engine="vllm", body=body, samples=5))
        command._body(Options(engine="vllm", body=body))


def test_an_arm_that_does_not_answer_is_given_up_and_the_others_are_measured() -> None:
    """Its first batch is all that is lost on it; one whose every request is refused costs three."""
    for ending, batches, reason in (("hang", 1, "not finished after 0.2 s"), ("http-500", 3, "HTTP 500: out of paper")):

        async def go(ending: str = ending) -> Record:
            bad, soon = MockServer(lambda body: Script(ending=ending)), Timeouts(0.2 if ending == "hang" else 600.0)
            async with MockServer(plain) as base, bad:
                where = Address(base.url, "target", DIALECTS["vllm"])
                sides = (
                    Running(Arm(BASELINE), where),
                    Running(Arm("bad", {"method": "ngram"}), dataclasses.replace(where, url=bad.url, timeouts=soon)),
                )
                return await run.measure(plan(repetitions=4), Subject("m", "vllm", sides), Quiet())

        made = asyncio.run(go())
        assert [b.arm for b in made.batches].count("bad") == batches and made.finished
        good = [b for b in made.batches if b.arm == BASELINE]
        assert len(good) == 5 and not any(a.failed for b in good for a in b.answers)
        (note,) = made.given_up
        assert note.startswith("bad was given up on explain") and reason in note and note in words.warnings(made)


# options


@pytest.mark.parametrize(
    "bad",
    [
        {"engine": "forerun", "program": "x", "template": None},
        {"engine": "http://h", "program": "x", "template": None},
        {"served_model": "x"},
        {"headers": ("A: b",)},
        {"api_key_env": "X"},
        {"context": 1},
        {"logs": Path("/nowhere/at/all")},
        {"concurrency": ()},
        {"trace": Path("x"), "concurrency": (1,)},
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        options(tmp_path, **bad).check()


def test_arms_on_a_server() -> None:
    assert [a.name for a in command.served_arms(("ngram:k=2,4", "suffix"))] == ["ngram k=2", "ngram k=4", "suffix"]
    (ngram,) = command.served_arms(("ngram:k=2",))
    assert ngram.settings == {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    (own,) = command.served_arms(('{"method": "eagle3", "model": "h", "num_speculative_tokens": 3}',))
    assert own.name == "eagle3 k=3" and own.settings is not None and own.settings["model"] == "h"
    (flags,) = command.served_arms(("flags:--spec-type ngram-mod",))
    assert flags == Arm("--spec-type ngram-mod", None, ("--spec-type", "ngram-mod"))
    for bad in (("{",), ('{"k": 1}',), ("flags:",), ("ngram", "ngram:k=4"), ("eagle",)):
        with pytest.raises(SettingError):
            command.served_arms(bad)


def test_loads_and_slots() -> None:
    loads = command.loads_of(Options(concurrency=(1, 8), rates=(2.5,)))
    assert [load.label for load in loads] == ["c=1", "c=8", "2.5/s"] and [load.requests for load in loads] == [1, 8, 16]
    assert command.loads_of(Options(concurrency=(4,), requests=12))[0].requests == 12
    small = plan(loads=(Load(concurrency=2, requests=2),))
    assert command.slots_of(Options(), small) == 2 and command.slots_of(Options(slots=5), small) == 5
    assert command.slots_of(Options(), plan(loads=(Load("poisson", rate=1.0, requests=3),))) == 32


def test_headers_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    assert command._headers(Options(headers=("X-Team: a",), api_key_env="SOME_KEY")) == {
        "X-Team": "a", "Authorization": "Bearer abc"
    }  # fmt: skip
    for bad in (Options(headers=("none",)), Options(api_key_env="NOT_SET_ANYWHERE")):
        with pytest.raises(SettingError):
            command._headers(bad)
