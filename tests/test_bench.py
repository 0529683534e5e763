"""The instrument against an engine that follows a script: with known step times, drafts and answers every figure must equal
what the script says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forerun.bench.engines import arms
from forerun.bench.engines.arms import BASELINE, CONTROL
from forerun.bench.engines.endpoint import Request, RequestFailed
from forerun.bench.load import equality
from forerun.bench.load.plan import Plan, interleaved
from forerun.bench.pages import report, words
from forerun.bench.records import record, summary
from forerun.bench.records.record import Answer, Batch, Load, Record
from forerun.bench.workloads import tasks as workloads
from forerun.types import SettingError
from tests.records import as_markdown, as_text, figures
from tests.scripted import FAST, SPECIAL, Quiet, Script, Sent, scripted


class Run(NamedTuple):
    record: Record
    log: list[Sent]
    watcher: Quiet
    built: list[str]


def run(scripts: dict[str, Script], **plan: Any) -> Run:
    """A run of the scripts, by arm."""
    bench, watcher = scripted(scripts, **plan), Quiet()
    return Run(bench.measure(watcher), bench.log, watcher, bench.built)


def by_name(cell: summary.Cell) -> dict[str, str]:
    return dict(zip([column.name for column in report.FIGURES], figures(cell), strict=True))


def cell(made: Record, arm: str, task: str = "return-code") -> summary.Cell:
    (found,) = [c for c in summary.cells(made) if c.arm == arm and c.task == task]
    return found


# figures


def test_every_figure_equals_the_script() -> None:
    """73 tokens: the baseline takes .1 s and 72 steps of 10 ms, .82 s; the arm .1 s and 72 / 9 * 4 = 32 steps of 12.5 ms,
    .5 s."""
    made = run({"fast": FAST}).record
    base, fast = cell(made, BASELINE), cell(made, "fast")
    assert base.tokens_per_s == pytest.approx(73 / 0.82) and fast.tokens_per_s == pytest.approx(73 / 0.5)
    assert base.step_s == pytest.approx(0.010) and fast.step_s == pytest.approx(0.0125)
    assert base.ttft and base.ttft.median == pytest.approx(0.1) and fast.e2e and fast.e2e.median == pytest.approx(0.5)
    assert fast.speedup is not None and fast.speedup.mean == pytest.approx(0.82 / 0.5) and fast.speedup.pairs == 5
    assert fast.verdict == "faster" and base.verdict is None and base.speedup is None
    assert fast.needed == pytest.approx(1.25) and fast.got == pytest.approx(72 / 32) and base.got == 1.0
    # each four steps: 4, 4, 0, 2 drafted, 4, 1, 0, 0 accepted
    assert fast.counts.acceptance_rate == pytest.approx(5 / 10)
    assert fast.counts.joint == pytest.approx([2 / 4, 1 / 4, 1 / 4, 1 / 4])
    assert fast.counts.drafting_steps / fast.counts.steps == pytest.approx(3 / 4)
    assert fast.identical == (5, 5) and fast.failures == 0 and fast.requests == 5
    assert fast.parts == pytest.approx((0.1, 0.6, 0.2, 0.1))


def test_a_batch_of_several_requests_counts_their_tokens_over_its_own_time() -> None:
    made = run({"fast": FAST}, concurrency=4, repetitions=4).record
    fast = cell(made, "fast")
    assert fast.tokens_per_s == pytest.approx(4 * 73 / 0.5) and fast.requests == 16
    assert fast.step_s == pytest.approx(0.0125), "a step's time is what one request sees of it"
    assert fast.speedup is not None and fast.speedup.pairs == 4


def test_nothing_drafted_is_no_rate_rather_than_zero() -> None:
    made = run({"idle": Script()}).record
    idle = cell(made, "idle")
    assert idle.counts.acceptance_rate is None
    shown = by_name(idle)
    assert shown["accepted"] == "–" and shown["by position"] == "–" and shown["steps drafted"] == "–"
    assert shown["tokens/step"] == "1.00" and idle.verdict == "no difference"
    assert "never had a draft" in str(words.sentence(idle, made))


def test_drafted_and_never_accepted_is_a_rate_of_zero() -> None:
    wrong = cell(run({"wrong": Script(step_s=0.012, drafted=(4,), accepted=(0,))}).record, "wrong")
    assert wrong.counts.acceptance_rate == 0.0 and wrong.got == 1.0 and wrong.verdict == "slower"
    assert by_name(wrong)["accepted"] == "0%"


# verdicts


def test_slower_identical_and_short_runs() -> None:
    scripts = {BASELINE: Script(noise=0.02), "slow": Script(step_s=0.0106, noise=0.02), "same": Script(noise=0.02)}
    made = run(scripts, repetitions=10).record
    assert cell(made, "slow").verdict == "slower" and cell(made, "same").verdict == "no difference"
    short = run({"fast": FAST}, repetitions=3).record
    assert cell(short, "fast").verdict == "not enough data"
    said = str(words.sentence(cell(short, "fast"), short))
    assert "not enough data" in said and "--repetitions 4" in said


def test_a_difference_inside_that_of_the_baseline_from_itself_is_none() -> None:
    scripts = {BASELINE: Script(), "arm": Script(step_s=0.0098)}
    made = run(scripts, control=True).record
    assert cell(made, "arm").verdict == "faster" and summary.margin(made, "return-code", Load()) == 0.01

    def drifting(batch: Batch) -> Batch:
        return dataclasses.replace(batch, wall_s=batch.wall_s * 1.04) if batch.arm == CONTROL else batch

    unsteady = dataclasses.replace(made, batches=tuple(drifting(b) for b in made.batches))
    assert summary.margin(unsteady, "return-code", Load()) == pytest.approx(0.04)
    assert cell(unsteady, "arm").verdict == "no difference"
    assert any("baseline against itself" in w for w in words.warnings(unsteady))


# what is sent


def test_arms_alternate_and_share_their_prompts() -> None:
    made = run({"one": FAST, "two": FAST}, tasks=("copy", "explain"), repetitions=4)
    order = [arm for task, arm, repetition, _ in made.watcher.seen if task == "copy"]
    forward = [BASELINE, "one", "two"]
    assert order == [*forward[::-1], *forward, *forward[::-1], *forward, *forward[::-1]]
    assert [s[3] for s in made.watcher.seen[:6]] == [True] * 3 + [False] * 3, "the first round is the warm-up"
    assert len(made.watcher.batches) == len(made.watcher.seen) == len(made.record.batches) == 2 * 3 * 5
    sent = [[(one.prompt, one.ask.seed, one.ask.max_tokens) for one in made.log if one.arm == arm] for arm in forward]
    assert sorted(sent[0]) == sorted(sent[1]) == sorted(sent[2])
    prompts = [prompt for prompt, *_ in sent[0]]
    assert len(set(prompts)) == len(prompts) == 10, "no prompt is sent twice to an arm"
    assert made.built == [*forward, "one", "two"], "each task has drafters of its own, so that none remembers another task"


def test_warmups_are_short_and_not_counted() -> None:
    made = run({"fast": FAST}, warmups=2, repetitions=4)
    warm = [b for b in made.record.batches if b.warmup]
    assert len(warm) == 4 and all(len(a.token_ids) == 32 for b in warm for a in b.answers)
    assert cell(made.record, "fast").batches == 4
    huge = tuple(dataclasses.replace(b, wall_s=1e6) if b.warmup else b for b in made.record.batches)
    assert cell(dataclasses.replace(made.record, batches=huge), "fast") == cell(made.record, "fast")


def test_what_each_task_asks_for() -> None:
    made = run({"arm": FAST}, tasks=tuple(workloads.TASKS), repetitions=1)
    by_task: dict[str, list[Request]] = {}
    sent = iter([one.ask for one in made.log if not one.ask.logprobs])
    for task, *_ in made.watcher.seen:
        by_task.setdefault(task, []).append(next(sent))
    for task, asks in by_task.items():
        fixed = task in ("copy", "words", "random")
        assert {ask.ignore_eos for ask in asks} == {fixed}
        assert {ask.temperature for ask in asks} == {1.0 if task == "random" else 0.0}
    assert all(ask.ids and len(ask.ids) == 200 and not set(ask.ids) & SPECIAL for ask in by_task["random"])
    seeds = [ask.seed for ask in by_task["random"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3], "the same seed in every arm, another for each prompt"
    assert cell(made.record, "arm", "random").identical is None, "sampled answers are not compared"
    assert any("random ids" in w for w in words.warnings(made.record))


def test_the_prediction_drafter_is_given_what_a_user_would_expect() -> None:
    bench = scripted({"prediction": Script()}, tasks=("edit-code", "explain"), repetitions=1)
    bench.sides[1].arm = dataclasses.replace(bench.sides[1].arm, settings={"method": "prediction"})
    bench.measure()
    for one in bench.log:
        if one.arm == BASELINE or "three short paragraphs" in one.prompt:
            assert one.ask.prediction is None
        else:
            assert one.ask.prediction and one.ask.prediction in one.ask.messages[0]["content"]  # type: ignore[index]


PROMPTS = {
    "copy": "e2072a258421e4c7",
    "words": "96b6afe0a17888f8",
    "random": "90b39baab9523c5d",
    "return-code": "b3f59399b357d29f",
    "edit-code": "105215657af44412",
    "explain": "1b199d65235fc9b4",
    "chat": "a225b4fa6d90b2e8",
    "quotes": "ee941e1f2db99f68",
    "agent": "07164d8807576543",
    "chat-zh": "f3539fee7497ad0f",
    "quotes-zh": "523e71997c3e83ad",
    "explain-zh": "842d26eb145abe7a",
}
"""A hash of all prompts of each task. Records of earlier runs were measured on these."""


@pytest.mark.parametrize("name", workloads.TASKS)
def test_prompts_stay_the_same(name: str) -> None:
    task = workloads.TASKS[name]
    every = "".join(repr(task.prompt(v)) for v in range(task.variants))
    assert hashlib.sha256(every.encode()).hexdigest()[:16] == PROMPTS[name]


def test_variants_are_all_different() -> None:
    for task in workloads.TASKS.values():
        prompts = [task.prompt(v) for v in range(task.variants)]
        assert len({(p.message, p.text, p.seed, str(p.messages)) for p in prompts}) == task.variants, task.name
    assert workloads.TASKS["chat"].prompt(3).messages != workloads.TASKS["chat-zh"].prompt(3).messages
    agent = workloads.TASKS["agent"].prompt(5)
    calls = [str(m["content"]) for m in agent.messages or () if m["role"] == "assistant"]
    assert len(calls) == 3 and all(json.loads(call)["tool"] == "lookup_order" for call in [*calls, str(agent.prediction)])
    for name in ("return-code", "edit-code"):
        for v in range(workloads.VARIANTS):
            message = str(workloads.TASKS[name].prompt(v).message)
            old = message.split("rename `" if name == "edit-code" else "Rename `")[1].split("`")[0]
            assert message.count(old) >= 3, f"{old} is not in the code that it is to be renamed in"
    words = str(workloads.TASKS["words"].prompt(0).text).split()
    assert len(words) == 200 and len(set(words)) <= 30


# identity


def other_from(position: int) -> Callable[[list[int]], list[int]]:
    return lambda ids: [*ids[:position], *[i + 1000 for i in ids[position:]]]


def test_answers_that_differ_are_found_and_located() -> None:
    made = run({"off": Script(change=other_from(40)), "same": Script()}, repetitions=4)
    assert cell(made.record, "off").identical == (0, 4) and cell(made.record, "same").identical == (4, 4)
    assert [(d.arm, d.repetition, d.position, d.gap) for d in made.record.differences] == [
        ("off", r, 40, 0.25) for r in range(4)
    ]
    asked = [one.ask for one in made.log if one.ask.logprobs]
    assert len(asked) == 4 and all(ask.max_tokens == 41 for ask in asked), "the baseline is asked again, up to there"
    (warning,) = [w for w in words.warnings(made.record) if w.startswith("off")]
    assert "return-code 1 at token 41" in warning and "near-tie" in warning


def test_a_shorter_answer_is_another_answer() -> None:
    made = run({"short": Script(change=lambda ids: ids[:20])}, repetitions=4).record
    assert cell(made, "short").identical == (0, 4)
    assert {(d.position, d.gap) for d in made.differences} == {(20, None)}


def test_first_difference() -> None:
    assert equality.first_difference((1, 2, 3), (1, 9, 3)) == 1 and equality.first_difference((1, 2), (1, 2, 3)) == 2


# what went wrong


def test_a_failed_request_is_credited_nothing_and_shown() -> None:
    def fault(ask: Request) -> Exception | None:
        return RequestFailed(f"no {ask.name}") if ask.max_tokens > 32 else None

    made = run({"bad": FAST._replace(fault=fault)}).record
    bad = cell(made, "bad")
    assert bad.failures == bad.requests > 0 and bad.tokens_per_s is None and bad.output_tokens == 0
    assert bad.speedup is None and bad.verdict == "not enough data" and bad.identical == (0, 0)
    assert any("of 5 requests failed: no return-code 1" in w for w in words.warnings(made))
    assert "no pair" in str(words.sentence(bad, made))


def test_warnings_name_what_misleads() -> None:
    made = run({"warm": FAST._replace(cached=48)}, warmups=0, max_tokens=10).record
    said = "\n".join(words.warnings(made))
    for part in ("no warm-up", "240 prompt tokens came from the prefix cache", "shorter than 16 tokens"):
        assert part in said
    busy = dataclasses.replace(made, machine=dataclasses.replace(made.machine, load=9.0, cores=2))
    assert any("busy" in w for w in words.warnings(busy))
    idle = dataclasses.replace(made, machine=dataclasses.replace(made.machine, load=0.1, cores=2))
    assert not any("busy" in w for w in words.warnings(idle))
    one, two = made.settings.arms
    unequal = dataclasses.replace(
        made.settings, arms=(one, dataclasses.replace(two, engine={**two.engine, "max_model_len": 256}))
    )
    assert any("max_model_len=256" in w for w in words.warnings(dataclasses.replace(made, settings=unequal)))


# the record


def test_a_record_comes_back_equal_and_says_the_same(tmp_path: Path) -> None:
    made = run({"fast": FAST, "off": Script(change=other_from(3))}, tasks=("copy", "random"), control=True).record
    record.save(made, tmp_path / "run.json")
    back = record.load(tmp_path / "run.json")
    assert back == made and as_markdown(back) == as_markdown(made)
    assert isinstance(back.batches[0].answers[0], Answer) and isinstance(back.batches[0].answers[0].token_ids, tuple)
    raw = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (
        raw["schema"] == record.SCHEMA
        and {"cpu", "cores"} <= raw["machine"].keys()
        and {"torch", "python", "forerun"} <= raw["versions"].keys()
    )
    assert raw["settings"]["arms"][1]["speculation"]["prompt_lookup_max"] == 5
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"], "nothing of the way there is left"


def test_a_file_that_is_no_record_is_refused() -> None:
    text = run({"fast": FAST}, repetitions=1).record.to_json()
    value = json.loads(text)
    for broken in ("{", "[]", "{}", json.dumps({**value, "schema": 99}), json.dumps({**value, "sceds": 1})):
        with pytest.raises(SettingError):
            Record.from_json(broken)
    del value["machine"]["cpu"]
    with pytest.raises(SettingError, match="cpu"):
        Record.from_json(json.dumps(value))


def test_terminal_and_markdown_say_the_same() -> None:
    made = run({"fast": FAST, "slow": Script(step_s=0.02, drafted=(4,), accepted=(0,))}, tasks=("copy", "explain")).record
    shown, written = as_text(made, 200), as_markdown(made)
    for c in summary.cells(made):
        for figure in figures(c):
            assert figure in shown and figure in written
        assert " ".join(figures(c)) in " ".join(shown.split()), "the whole row, in order"
        said = words.sentence(c, made)
        assert said is None or (said in shown and f"- {said}" in written)
    assert "copy, fast: speculation pays, 1.64 times the baseline's speed (1.64 to 1.64)." in written
    assert "It needed 1.25 tokens a step to break even and got 2.25." in written
    assert "explain, slow: speculation does not pay" in written


# arms and plans


def test_arms() -> None:
    assert [a.name for a in arms.parse(("ngram", "suffix"))] == ["ngram k=4", "suffix"]
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 4}
    assert arms.parse(("ngram",))[0].settings.items() >= ngram.items()  # type: ignore[union-attr]
    assert [a.settings["num_speculative_tokens"] for a in arms.parse(("ngram:k=2,4,8",)) if a.settings] == [2, 4, 8]
    own = arms.parse(('{"method": "ngram", "num_speculative_tokens": 4}', "ngram"))
    assert [a.name for a in own] == ["ngram k=4 (1)", "ngram k=4 (2)"]


@pytest.mark.parametrize(
    "bad", ["eagle", "ngram:4", "ngram:k=x", "ngram:k=0", "ngram:n=4", '{"method": "ngram", "k": 4}', "{", ""]
)
def test_arms_that_cannot_be(bad: str) -> None:
    with pytest.raises(SettingError):
        arms.parse((bad,))


def test_the_same_arm_twice_is_refused() -> None:
    with pytest.raises(SettingError, match="once"):
        arms.parse(("ngram", "ngram:k=4"))


@pytest.mark.parametrize(
    "bad",
    [
        {"tasks": ()},
        {"loads": ()},
        {"loads": (Load(), Load())},
        {"loads": (Load(concurrency=0),)},
        {"loads": (Load(requests=64),)},
        {"loads": (Load("poisson", rate=0.0),)},
        {"loads": (Load("trace", speed=0.0),)},
        {"repetitions": 0},
        {"warmups": -1},
        {"max_tokens": 1},
        {"repetitions": 512},
        {"warmup_tokens": 0},
        {"samples": -1},
    ],
)
def test_plans_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Plan(**({"tasks": workloads.find(("copy",))} | bad))


def test_a_plan_says_how_many_batches_it_will_be() -> None:
    made = run({"one": FAST, "two": FAST}, tasks=("copy", "explain"), control=True, repetitions=2)
    plan = Plan(workloads.find(("copy", "explain")), repetitions=2, control=True)
    assert len(list(interleaved(plan, 4))) == len(made.watcher.total) == len(made.record.batches) == 2 * 4 * 3


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    made = run({"ngram k=4": FAST, "suffix": Script(step_s=0.1, drafted=(16, 0), accepted=(9, 0))}).record
    shown = as_text(made, 80)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    for c in summary.cells(made):
        assert " ".join(figures(c)[:-1]) in " ".join(shown.split()), "no figure is cut off or wrapped"
    perfect = run({"a drafter with a long name": Script(drafted=(16,), accepted=(16,), step_s=0.0001)}).record
    said = as_text(perfect, 80).split()
    for figure in figures(cell(perfect, "a drafter with a long name"))[1:-1]:
        assert set(figure.split()) <= set(said), "names and positions may wrap; figures are whole"


def test_a_hopeless_spread_is_not_answered_with_more_repetitions() -> None:
    scripts = {BASELINE: Script(noise=0.0), "arm": Script(step_s=0.0098)}
    made = run(scripts).record

    def uneven(batch: Batch) -> Batch:
        return (
            dataclasses.replace(batch, wall_s=batch.wall_s * (3.0 if batch.repetition % 2 else 0.3))
            if batch.arm == "arm"
            else batch
        )

    uneven_record = dataclasses.replace(made, batches=tuple(uneven(b) for b in made.batches))
    said = str(words.sentence(cell(uneven_record, "arm"), uneven_record))
    assert "not enough data" in said and "quieter" in said and "--repetitions" not in said
