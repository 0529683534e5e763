"""From a record to tables and sentences: figures that follow from made-up records of known truth, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.bench import formats
from forerun.bench.pages import changes, markdown, words
from forerun.bench.records import compare, record, summary
from forerun.bench.records.record import Batch, Chunk, Counts, FirstTokens, Load, Record
from forerun.bench.records.summary import Cell
from forerun.cli import app
from forerun.types import SettingError
from tests.records import SWEEP, Way, as_markdown, as_text, fake, figures, rich, server, waiting

NGRAM = Way(12.5, 4, (4, 1, 0, 0))  # 9 tokens in 4 steps
ARMS = {"baseline": Way(10.0), "ngram": NGRAM}


def cell(made: Record, arm: str, task: str = "copy", load: Load | None = None) -> Cell:
    (found,) = [c for c in summary.cells(made) if (c.arm, c.task, c.load) == (arm, task, load or made.settings.loads[0])]
    return found


def compared(before: Record, after: Record) -> str:
    return markdown.markdown(changes.view(before, after))


def change(made: Record, **fields: object) -> Record:
    return dataclasses.replace(made, settings=dataclasses.replace(made.settings, **fields))  # type: ignore[arg-type]


# latency


def test_latency_figures_equal_the_script() -> None:
    """73 tokens in 32 steps of 12.5 ms behind a first one at 100 ms."""
    c = cell(fake(ARMS, chunks=True), "ngram")
    assert c.ttft and c.tpot and c.e2e and c.gap
    assert c.ttft.median == pytest.approx(0.1) and c.e2e.median == pytest.approx(0.5) and c.ttft.n == 5
    assert c.tpot.median == pytest.approx(0.4 / 72), "time for each token after the first"
    assert c.gap.median == pytest.approx(0.0125) and c.gap.n == 5 * 32, "time between pieces, whatever they hold"
    assert c.split == summary.Split(0.0, pytest.approx(0.1), pytest.approx(0.4), by_server=False)
    assert c.ttft_ratio and c.ttft_ratio.mean == pytest.approx(1.0)
    assert c.tpot_ratio and c.tpot_ratio.mean == pytest.approx((0.4 / 72) / 0.01)


def test_percentiles_need_as_many_requests() -> None:
    few, many = fake(ARMS, repetitions=19), fake(ARMS, loads=(Load(requests=20),), repetitions=5)
    assert cell(few, "ngram").ttft.p95 is None  # type: ignore[union-attr]
    assert cell(many, "ngram").ttft.p95 is not None and cell(many, "ngram").ttft.p99 is not None  # type: ignore[union-attr]
    assert formats.spread(cell(few, "ngram").ttft, 1000) == "100" and formats.spread(None, 1) == "–"
    assert formats.spread(cell(many, "ngram").ttft, 1000) == "100 100 100"


@pytest.mark.parametrize("value, said", [(0.1234, "0.123"), (1.236, "1.24"), (12.36, "12.4"), (123.6, "124"), (4321.0, "4321")])
def test_three_digits(value: float, said: str) -> None:
    assert formats.digits(value) == said


def test_open_loop_speed_is_what_a_request_sees() -> None:
    """Requests that arrive by the clock take as long as the clock says, however fast they are answered."""
    load = Load("poisson", rate=2.0, requests=8)
    made = fake(ARMS, loads=(load,))
    slow = dataclasses.replace(made, batches=tuple(dataclasses.replace(b, wall_s=100.0) for b in made.batches))
    c = cell(slow, "ngram")
    assert c.speedup and c.speedup.mean == pytest.approx(0.82 / 0.5) and c.verdict == "faster"
    assert "as a request sees it" in str(words.sentence(c, slow))
    together = tuple(dataclasses.replace(b, load=Load("concurrency", 8, requests=8)) for b in slow.batches)
    closed = change(dataclasses.replace(slow, batches=together), loads=(Load("concurrency", 8, requests=8),))
    assert cell(closed, "ngram").speedup.mean == pytest.approx(1.0)  # type: ignore[union-attr]


# drafting


def test_a_server_that_counts_no_steps_gives_the_same_figures() -> None:
    engine = fake(ARMS)
    told, own = cell(server(engine), "ngram"), cell(engine, "ngram")
    assert own.counts and told.counts == dataclasses.replace(own.counts, drafted_at=[])
    assert told.joint == own.joint and told.conditional == own.conditional == own.counts.conditional
    assert told.got == own.got == pytest.approx(72 / 32) and told.step_s == pytest.approx(0.0125)
    assert told.needed == pytest.approx(1.25), "the baseline counts nothing: each of its tokens is a step"
    assert told.split == summary.Split(pytest.approx(0.01), pytest.approx(0.2), pytest.approx(0.5), by_server=True)
    assert "(server)" in waiting(told)[-1] and told.parts is None


def test_steps_are_unknown_where_a_request_failed_or_the_counts_do_not_fit() -> None:
    made = server(fake(ARMS))

    def fails(b: Batch) -> Batch:
        broken = dataclasses.replace(b.answers[0], failure="the stream ended early")
        failed = dataclasses.replace(b, answers=(broken,), drafting=Counts(0, 0, 0, 0, (), ()))
        return failed if b.arm == "ngram" and b.repetition == 2 else b

    c = cell(dataclasses.replace(made, batches=tuple(map(fails, made.batches))), "ngram")
    assert c.failures == 1 and c.got is None and c.joint == [] and c.step_s is None and c.acceptance_rate is not None
    assert figures(c)[6] == "–" and figures(c)[0] == "ngram (1/5 failed)"
    beyond = Counts(0, 10, 400, 400, (100,) * 4, (100,) * 4)
    foreign = tuple(dataclasses.replace(b, drafting=beyond) if b.arm == "ngram" else b for b in made.batches)
    assert cell(dataclasses.replace(made, batches=foreign), "ngram").got is None, "more accepted than were delivered"


def test_an_engine_that_tells_nothing_of_drafts_is_not_said_to_have_none() -> None:
    made = server(fake(ARMS))
    silent = tuple(dataclasses.replace(b, drafting=None) for b in made.batches)
    c = cell(dataclasses.replace(made, batches=silent), "ngram")
    assert c.counts is None and c.acceptance_rate is None and c.got is None and c.speedup is not None
    assert cell(dataclasses.replace(made, batches=silent), "baseline").got == 1.0
    assert "draft" not in str(words.sentence(c, made))


def test_accepted_lengths_are_the_steps_by_what_they_accepted() -> None:
    c = cell(fake(ARMS), "ngram")
    assert c.accepted_lengths == [80, 40, 0, 0, 40], "of 160 steps half accept none, a quarter 1, a quarter 4"
    assert cell(fake(ARMS), "baseline").accepted_lengths == []


# loads


def test_each_load_is_a_cell_of_its_own() -> None:
    made = fake(ARMS, loads=SWEEP)
    assert [(c.load.label, c.arm) for c in summary.cells(made)] == [
        (load, arm) for load in ("c=1", "c=8", "2/s") for arm in ("baseline", "ngram")
    ]
    alone, busy = cell(made, "ngram", load=SWEEP[0]), cell(made, "ngram", load=SWEEP[1])
    assert alone.speedup and busy.speedup and busy.speedup.mean < alone.speedup.mean, "a busier step costs more with drafts"
    slowest_s = 0.5 * (1 + 0.02 * 7 * 5) + 0.02  # two rounds of eight, of which one waits 20 ms
    assert busy.tokens_per_s == pytest.approx(16 * 73 / (2 * slowest_s))
    assert alone.split == summary.Split(pytest.approx(0.0075), pytest.approx(0.1), pytest.approx(0.4), by_server=False)
    assert "4 requests at c=1, 16 requests at c=8, 24 requests at 2/s" in words.title(made)


@pytest.mark.parametrize(
    ("isa", "mix", "told"),
    [
        ("avx2", None, "tiny bfloat16 (avx2) on Imagined"),
        ("avx2", "Q4_1 100 %", "tiny bfloat16 (weights Q4_1 100 %; avx2) on Imagined"),
        (None, None, "tiny bfloat16 on Imagined"),
    ],
)
def test_the_title_says_by_which_instruction_set(isa: str | None, mix: str | None, told: str) -> None:
    made = fake(ARMS)
    engine = {"dtype": "bfloat16", "cpu_isa": isa, "quantization": mix}
    arms = tuple(dataclasses.replace(arm, engine=engine) for arm in made.settings.arms)
    assert words.title(change(made, arms=arms)).startswith(told)


def test_tables_fit_their_terminal_and_hold_every_figure() -> None:
    made = rich()
    for width in (80, 100, 120):
        said = as_text(made, width)
        assert max(len(line.rstrip()) for line in said.splitlines()) <= width
        for c in summary.cells(made):
            for figure in figures(c)[1:6]:
                assert set(figure.split()) <= set(said.split()), "no figure is cut off"
    assert all(label in as_text(made, 80) for label in ("c=1", "c=8", "2/s"))
    assert " ".join(waiting(cell(made, "suffix"))[1:]) in " ".join(as_text(made, 120).split())


def test_markdown_has_everything_once() -> None:
    made = rich()
    written = as_markdown(made)
    for c in summary.cells(made):
        for line in (figures(c), waiting(c)):
            assert written.count("| " + " | ".join([c.load.label, *line]) + " |") >= 1
    for warning in words.warnings(made):
        assert f"- Note: {warning}" in written
    assert "30,832 (-23 %)" in written and "    forerun bench --engine vllm" in written
    table = [line for line in written.splitlines() if line.startswith("|")]
    heads = [i for i, line in enumerate(table) if line.startswith("| ---")]
    assert all(table[i].count("|") == table[i - 1].count("|") for i in heads)


# words


def test_the_answer_on_top() -> None:
    slow, same = Way(14.0, 4, (0,)), Way(10.0)
    fast = fake({"baseline": Way(10.0), "a": NGRAM, "b": NGRAM}, ("copy", "explain"))
    assert words.headline(fast) == (
        "Yes, speculation pays here",
        [("a", "faster on copy (1.64×) and explain (1.64×)"), ("b", "faster on copy (1.64×) and explain (1.64×)")],
    )
    assert words.headline(fake({"baseline": same, "a": slow}))[0] == "No, speculation does not pay here"
    assert words.headline(fake({"baseline": same, "a": same}))[0] == "Speculation makes no difference here"
    assert words.headline(fake(ARMS, repetitions=2))[0] == "Not enough data to say"
    assert words.headline(rich())[0] == "Speculation pays in 6 of 9 cases"
    assert "slower on explain (" in dict(words.headline(rich())[1])["suffix"], "a task that is alike under all loads, once"
    mixed = fake(ARMS, ("copy", "explain"))
    slowed = tuple(
        dataclasses.replace(b, wall_s=2 * b.wall_s) if (b.task, b.arm) == ("explain", "ngram") else b for b in mixed.batches
    )
    answer, arms = words.headline(dataclasses.replace(mixed, batches=slowed))
    assert answer == "Speculation pays on copy" and arms == [("ngram", "faster on copy (1.64×); slower on explain (0.82×)")]


def test_scheduler_facts_in_which_the_arms_differ_are_said() -> None:
    said = words.warnings(rich())
    assert "ngram k=4 ran with async scheduling off, baseline with on; the comparison includes that." in said
    assert "ngram k=4: the engine says: Async scheduling not supported with ngram" in said
    assert not any("suffix ran with" in w for w in said), "of suffix nothing is known"
    alike = rich()
    facts = alike.settings.arms[0].facts
    assert facts is not None
    arms = tuple(dataclasses.replace(a, facts=facts) for a in alike.settings.arms)
    assert not any("ran with" in w for w in words.warnings(change(alike, arms=arms)))


def test_notes_of_batches_are_said_once() -> None:
    made = fake(ARMS)
    noted = tuple(dataclasses.replace(b, notes=("others used the server",)) if b.arm == "ngram" else b for b in made.batches)
    said = words.warnings(dataclasses.replace(made, batches=noted, notes=("the tokenizer is a guess.",)))
    assert "copy, ngram: others used the server (5 batches)" in said and "the tokenizer is a guess." in said


def test_a_load_generator_that_was_late_is_told_on() -> None:
    made = fake(ARMS, loads=(Load(requests=8),))
    late = tuple(
        dataclasses.replace(b, answers=tuple(dataclasses.replace(a, sent_s=0.02) for a in b.answers)) for b in made.batches
    )
    assert any("20 ms or more after its time" in w for w in words.warnings(dataclasses.replace(made, batches=late)))
    assert not any("after its time" in w for w in words.warnings(made))


def test_sampled_first_tokens_that_are_biased_are_told_on() -> None:
    draw = random.Random(1)

    def first(arm: str, weights: list[int]) -> FirstTokens:
        return FirstTokens(arm, "p", 0.7, tuple(draw.choices("abc", weights, k=600)))

    made = dataclasses.replace(
        fake({"baseline": Way(10.0), "good": NGRAM, "bad": NGRAM}),
        first_tokens=(first("baseline", [4, 3, 3]), first("good", [4, 3, 3]), first("bad", [6, 2, 2])),
    )
    assert [(d.arm, d.comparison.finding) for d in summary.draws(made)] == [("good", "same"), ("bad", "different")]
    assert [w.split(":")[0] for w in words.warnings(made) if "same distribution" in w] == ["bad"]
    assert "no sign of another distribution" in as_text(made, 100)


def test_log_probabilities_are_used_where_they_are_those_of_the_samples() -> None:
    draw, known = random.Random(2), {"a": -0.9163, "b": -1.204, "c": -1.204}  # 0.4, 0.3, 0.3
    tokens = tuple(draw.choices("abc", [4, 3, 3], k=600))
    for temperature, against in ((1.0, ["samples", "logprobs"]), (0.7, ["samples"])):
        arms = [FirstTokens(arm, "p", temperature, tokens, known) for arm in ("baseline", "ngram")]
        found = summary.draws(dataclasses.replace(fake(ARMS), first_tokens=tuple(arms)))
        assert [d.against for d in found] == against and all(d.comparison.finding == "same" for d in found)


def test_texts_are_compared_where_a_server_gives_no_ids() -> None:
    made = fake(ARMS)

    def without(b: Batch) -> Batch:
        text = "other" if b.arm == "ngram" and b.repetition == 3 else "text"
        answers = tuple(dataclasses.replace(a, token_ids=(), output_tokens=73, text=text) for a in b.answers)
        return dataclasses.replace(b, answers=answers)

    c = cell(dataclasses.replace(made, batches=tuple(map(without, made.batches))), "ngram")
    assert c.identical == (4, 5) and c.failures == 0 and c.tokens_per_s == pytest.approx(73 / 0.5)


def test_the_command_that_repeats_a_run() -> None:
    assert words.command(rich()) == "forerun bench --engine vllm -m tiny -a ngram:k=4 -a suffix"
    said = words.command(fake(ARMS))
    assert said.startswith("forerun bench -m tiny -a '{") and '"num_speculative_tokens": 4' in said


# comparing runs


def later(made: Record) -> Record:
    return dataclasses.replace(made, started="2026-11-08T12:00:00+00:00")


def test_the_same_run_again_is_no_change() -> None:
    made = fake(ARMS, ("copy", "explain"), noise=0.01)
    for c in compare.changes(made, later(made)):
        assert c.same_prompts and c.speed and c.speed.mean == pytest.approx(1.0) and c.speed_verdict == "no difference"
    said = compared(made, later(made))
    assert "**Speculation gains as much as before.**" in said and "not interleaved" in said and "not paired" in said


def test_a_faster_machine_changes_speeds_and_no_speedup() -> None:
    made = fake(ARMS, noise=0.01)
    twice = dataclasses.replace(
        later(fake(ARMS, noise=0.01, seed=5)),
        batches=tuple(dataclasses.replace(b, wall_s=b.wall_s / 2) for b in fake(ARMS, noise=0.01, seed=5).batches),
    )
    found = {c.after.arm: c for c in compare.changes(made, twice)}
    assert found["baseline"].speed_verdict == found["ngram"].speed_verdict == "faster"
    assert found["ngram"].speedup_verdict == "no difference" and found["baseline"].speedup_verdict is None
    assert found["ngram"].speed and found["ngram"].speed.mean == pytest.approx(2.0, rel=0.03)
    assert "\nThe baseline itself came out 1.98 times as fast as before.\n" in compared(made, twice)


def test_a_slower_drafter_is_found_and_said() -> None:
    before, after = fake(ARMS, noise=0.01), fake({**ARMS, "ngram": Way(14.0, 4, (4, 1, 0, 0))}, noise=0.01, seed=5)
    (c,) = [c for c in compare.changes(before, later(after)) if c.after.arm == "ngram"]
    assert c.speedup_verdict == "slower" and c.speedup and c.speedup.mean == pytest.approx(0.5 / 0.548, rel=0.03)
    assert changes.headline([c], after) == "Speculation gains less than before with ngram on copy"


def test_the_larger_margin_of_the_two_runs_counts() -> None:
    """Of runs whose baselines differ from themselves by nothing and by 8 %, in either order."""
    ways = {**ARMS, "again": Way(10.0)}
    steady, slower = fake(ways, control="again"), fake({**ways, "ngram": Way(13.0, 4, (4, 1, 0, 0))}, control="again")
    drifting = tuple(dataclasses.replace(b, wall_s=1.08 * b.wall_s) if b.arm == "again" else b for b in slower.batches)
    for unsteady, expected in ((slower, "slower"), (dataclasses.replace(slower, batches=drifting), "no difference")):
        (c,) = [c for c in compare.changes(steady, later(unsteady)) if c.after.arm == "ngram"]
        assert c.speedup_verdict == expected
        (back,) = [c for c in compare.changes(unsteady, later(steady)) if c.after.arm == "ngram"]
        assert back.speedup_verdict == {"slower": "faster"}.get(expected, expected)


def test_other_prompts_are_not_paired() -> None:
    before, after = fake(ARMS, noise=0.01), fake(ARMS, noise=0.01, repetitions=6)
    (c, _) = compare.changes(before, later(after))
    assert not c.same_prompts and c.speed and c.speed.pairs == 5
    assert "sent other prompts" in compared(before, later(after))


def test_what_the_runs_differ_in_is_said() -> None:
    before = fake({**ARMS, "old": NGRAM}, ("copy", "words"))
    after = later(fake({**ARMS, "new": Way(12.0, 2, (1,))}, ("copy",)))
    machine = dataclasses.replace(after.machine, cores=4)
    after = dataclasses.replace(after, versions={**after.versions, "torch": "2.14.0"}, machine=machine)
    said = compared(before, after)
    assert "torch: 2.13.0 before, 2.14.0 after" in said and "cores: 2 before, 4 after" in said
    assert "only the earlier run has words, c=1, ngram" in said and "only the later run has copy, c=1, new" in said
    redrawn = later(fake({**ARMS, "ngram": Way(12.0, 2, (1,))}))
    assert "ngram: the drafter's settings differ" in compared(before, redrawn)
    with pytest.raises(SettingError, match="in common"):
        changes.view(before, fake(ARMS, ("explain",)))


# the command


def test_report_shows_again_and_compares(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json.gz"
    record.save(fake(ARMS), one)
    record.save(later(fake(ARMS)), two)
    files = lambda name: ["--markdown", str(tmp_path / f"{name}.md"), "--html", str(tmp_path / f"{name}.html")]  # noqa: E731
    run = CliRunner().invoke(app, ["report", str(one), *files("one")])
    assert run.exit_code == 0 and "speculation pays" in run.output
    assert (tmp_path / "one.md").read_text(encoding="utf-8") == as_markdown(record.load(one))
    assert "<h1>Yes, speculation pays here.</h1>" in (tmp_path / "one.html").read_text(encoding="utf-8")
    both = CliRunner().invoke(app, ["report", str(one), str(two), *files("both")])
    assert both.exit_code == 0 and "before → after" in both.output
    assert "Speculation gains as much as before" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert (tmp_path / "both.md").read_text(encoding="utf-8").startswith("### tiny: 2026-11-01 12:00 against 2026-11-08")


def test_a_report_is_not_written_over_its_record(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for path in (one, two):
        record.save(fake(ARMS), path)
    before = one.read_bytes()
    for arguments in ([str(one), "--markdown", str(one)], [str(one), str(two), "--html", str(one)]):
        run = CliRunner().invoke(app, ["report", *arguments])
        assert run.exit_code == 2 and "another name" in run.output and one.read_bytes() == before
    fine = CliRunner().invoke(app, ["report", str(one), "--markdown", "/dev/null", "--html", "/dev/null"])
    assert fine.exit_code == 0, "what goes to a device is not written over"


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text(json.dumps({"schema": 99}), encoding="utf-8")
    for args in (["no.json"], ["missing.json"]):
        run = CliRunner().invoke(app, ["report", *[str(tmp_path / a) for a in args]])
        assert run.exit_code == 2 and "error:" in run.output


def test_chunks_come_back_from_a_file(tmp_path: Path) -> None:
    made = rich()
    record.save(made, tmp_path / "run.json.gz")
    back = record.load(tmp_path / "run.json.gz")
    assert back == made and back.batches[0].answers[0].chunks[0] == Chunk(0.1 * (back.batches[0].answers[0].ttft_s / 0.1), 1, 4)
    assert as_markdown(back) == as_markdown(made)
