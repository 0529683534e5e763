"""The command line on a tiny random model: what is printed where, exit codes, and errors without tracebacks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from forerun import __version__, cli
from forerun.bench.records import record
from forerun.cli import parameters
from forerun.llm import LLM
from forerun.options import OUTPUT, RUN, option
from tests import reference
from tests.records import as_markdown
from tests.tiny import tiny_model

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("cli") / "tiny", positions=4096))


def call(*arguments: str, **how: Any) -> Any:
    return CliRunner(env=WIDE).invoke(cli.app, list(arguments), **how)


def test_the_reference_is_that_of_the_help_texts() -> None:
    there = reference.FILE.read_text(encoding="utf-8")
    if reference.MADE_BY not in there:
        pytest.skip(f"docs/cli.md was not made by {reference.MADE_BY}")
    assert there == reference.text(), "docs/cli.md is stale; renew it: python -m tests.reference"


@dataclass(frozen=True)
class Sizes:
    """Options of every kind."""

    sizes: tuple[int, ...] = option((1,), RUN, "Several in one.", "-s", separated=True, default_text="one")
    names: tuple[str, ...] = option((), RUN, "One at a time.", "--name")
    kind: str = option("a", OUTPUT, "A choice.", choices=("a", "b"))
    scale: float | None = option(None, RUN, "A number.")
    quiet: bool = option(False, RUN, "A flag.")


@pytest.mark.parametrize(
    "given, made",
    [
        ([], Sizes()),
        (["-s", "1, 20,", "--name", "x,y", "--name", "z"], Sizes(sizes=(1, 20), names=("x,y", "z"))),
        (["--sizes", "", "--kind", "b", "--scale", "2", "--quiet"], Sizes((), kind="b", scale=2.0, quiet=True)),
        (["--sizes", "1,x"], "error: sizes='1,x': give numbers separated by commas, as in 1,8,32"),
        (["--kind", "c"], "Invalid value for '--kind'"),
        (["odd"], "error: ValueError: odd (a fault of forerun's own; --debug shows where)"),
        (["odd", "--debug"], "Traceback"),
    ],
)
def test_a_dataclass_of_options_is_what_a_command_takes(given: list[str], made: Sizes | str) -> None:
    found: list[Sizes] = []

    def example(options: Sizes, word: Annotated[str | None, typer.Argument(help="A word.")] = None) -> None:
        if word is not None:
            raise ValueError(word)
        found.append(options)

    app = typer.Typer()
    app.command()(parameters.command(example))
    shown = CliRunner(env=WIDE).invoke(app, given)
    assert (found == [made]) if isinstance(made, Sizes) else (not found and made in shown.stderr and shown.exit_code in (2, 4))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_help_has_examples(command: str) -> None:
    shown = call(command, "--help")
    assert shown.exit_code == 0 and f"forerun {command}" in shown.stdout and "Examples" in shown.stdout
    assert "rich" not in shown.stdout and "[bold]" not in shown.stdout


def test_version() -> None:
    assert call("--version").stdout.strip() == f"forerun {__version__}"


def test_generate_streams_the_answer_and_nothing_else(model: str) -> None:
    plain = call("generate", "the thing", "-m", model, "-n", "12", "--ignore-eos")
    assert plain.exit_code == 0 and plain.stderr == ""
    done = json.loads(call("generate", "the thing", "-m", model, "-n", "12", "--ignore-eos", "--json").stdout)
    assert plain.stdout == done["text"] + "\n"
    assert len(done["token_ids"]) == 12 and done["finish_reason"] == "length"
    assert done["drafts"]["drafted"] == 0 and done["drafts"]["acceptance_rate"] is None
    assert done["timing"]["e2e_s"] >= done["timing"]["ttft_s"] > 0


def test_variables_for_the_chat_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    path = folder / "tokenizer_config.json"
    template = "{{ messages[0].content }}{% if enable_thinking | default(true) %}<think>{% endif %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    ask = ("generate", "the", "-m", str(folder), "-n", "2", "--json")
    plain, thinks = (json.loads(call(*ask, *more).stdout) for more in ((), ("--chat",)))
    quiet = json.loads(call(*ask, "--chat-template-kwargs", '{"enable_thinking": false}').stdout)
    assert quiet["prompt_tokens"] == plain["prompt_tokens"] < thinks["prompt_tokens"]
    for given, says in (("{x", "not JSON"), ("[1]", "give a JSON object"), ('{"x": 1}', "it reads enable_thinking")):
        failed = call(*ask, "--chat-template-kwargs", given)
        assert failed.exit_code == 2 and "chat_template_kwargs" in failed.stderr and says in failed.stderr


@pytest.mark.parametrize(
    "config", ["ngram", "suffix", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}']
)
def test_generate_with_drafts_says_the_same(model: str, config: str) -> None:
    arguments = ("generate", "the in the in the in the", "-m", model, "-n", "40", "--ignore-eos", "--json")
    plain, drafted = json.loads(call(*arguments).stdout), json.loads(call(*arguments, "-s", config).stdout)
    assert plain["token_ids"] == drafted["token_ids"]
    assert drafted["settings"]["speculative_config"]["method"] in config


def test_stats_go_to_standard_error(model: str) -> None:
    shown = call("generate", "the in the in the in the", "-m", model, "-n", "40", "--ignore-eos", "-s", "ngram", "--stats")
    assert "40 tokens in" in shown.stderr and "drafted tokens accepted" in shown.stderr and "tokens in" not in shown.stdout


def test_the_prompt_comes_from_standard_input(model: str) -> None:
    arguments = ("-m", model, "-n", "5", "--ignore-eos", "--json")
    given = json.loads(call("generate", "the thing", *arguments).stdout)
    for how in (("generate", "-", *arguments), ("generate", *arguments)):
        assert json.loads(call(*how, input="the thing").stdout)["token_ids"] == given["token_ids"]


def test_chat_goes_through_the_template(model: str) -> None:
    sizes = [
        json.loads(call("generate", "the thing", "-m", model, "-n", "2", "--json", *more).stdout)["prompt_tokens"]
        for more in ((), ("--chat",), ("--system", "be brief"))
    ]
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_prediction_from_a_file_is_used(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LLM.__init__.__kwdefaults__, "adaptive_drafts", False)  # costs that are measured here may forbid drafts
    arguments = ("generate", "the thing", "-m", model, "-n", "30", "--ignore-eos", "--json")
    answer = json.loads(call(*arguments).stdout)
    (tmp_path / "expected.txt").write_text(answer["text"], encoding="utf-8")
    used = json.loads(call(*arguments, "-s", "prediction", "--prediction", f"@{tmp_path / 'expected.txt'}").stdout)
    assert used["token_ids"] == answer["token_ids"] and used["drafts"]["drafted"] > 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("generate", "x", "--top-p", "2"), ("top_p=2.0",)),
        (("generate", "x", "-s", "eagle"), ("model=None", "method eagle needs", "owner/name")),
        (("generate", "x", "-s", "medusa"), ("speculative_config", "ngram", "draft_model")),
        (("bench", "-a", "eagle:k=2"), ("method eagle needs", "owner/name")),
        (("bench", "-a", "ngram:k=²"), ("arms", "ngram:k=2,4,8")),
        (("generate", "half a pair: \ud800"), ("prompt", "surrogate")),
        (("generate", "x", "--stop", ""), ("stop=''",)),
        (("generate", "x", "-t", "nan"), ("temperature=nan", "0.7")),
        (("generate", "x", "-s", '{"method": "ngram", "prompt_lookup_mix": 2}'), ("prompt_lookup_mix", "prompt_lookup_min")),
        (("generate", "x", "-m", "/nowhere/at/all"), ("model", "/nowhere/at/all")),
        (("generate", "  "), ("prompt",)),
        (("generate", "x", "-s", "prediction", "--prediction", "@/nowhere/at/all"), ("prediction",)),
        (("bench", "--tasks", "copy,poem"), ("tasks", "poem", "return-code")),
        (("bench", "-a", "ngram:k=0"), ("num_speculative_tokens=0",)),
        (("bench", "-r", "0"), ("repetitions=0",)),
        (("bench", "-o", "/nowhere/at/all.json"), ("output", "folder")),
        (("models", "--fetch", "/nowhere/at/all"), ("model", "/nowhere/at/all")),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    failed = call(*arguments)
    assert failed.exit_code == 2 and failed.stdout == "" and failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1 and "Traceback" not in failed.stderr
    for word in words:
        assert word in failed.stderr


def test_a_prompt_that_does_not_fit_is_such_a_line_too(model: str) -> None:
    failed = call("generate", "the " * 50, "-m", model, "--max-model-len", "20")
    assert failed.exit_code == 2 and failed.stderr.startswith("error: ") and "max_model_len" in failed.stderr


@pytest.mark.parametrize("name", ["prompt", "prediction", "template", "file"])
def test_text_that_is_not_utf_8_is_such_a_line_with_the_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("plain\r\nna\u00efve".encode("latin1"))
    how: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "prompt": (("generate", "-"), {"input": path.read_bytes()}),
        "prediction": (("generate", "x", "-s", "prediction", "--prediction", f"@{path}"), {}),
        "template": (("bench", "-e", "vllm", "--template", str(path)), {}),
        "file": (("report", str(path)), {}),
    }
    arguments, more = how[name]
    failed = call(*arguments, **more)
    said = failed.stderr.splitlines()[-1]
    assert failed.exit_code == 2 and said.startswith("error: ") and "Traceback" not in failed.stderr
    assert "0xef" in said and ("line 2 has byte 0xef at column 3" in said or name == "file")


def test_a_byte_order_mark_is_no_part_of_a_text(model: str, tmp_path: Path) -> None:
    arguments = ("-m", model, "-n", "3", "--json")
    plain = json.loads(call("generate", "the thing", *arguments).stdout)
    marked = json.loads(call("generate", "-", *arguments, input=b"\xef\xbb\xbfthe thing").stdout)
    assert marked["prompt_tokens"] == plain["prompt_tokens"] and marked["text"] == plain["text"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [("generate", "x"), ("bench",)])
def test_a_device_that_is_not_there_is_such_a_line(model: str, command: tuple[str, ...]) -> None:
    failed = call(*command, "-m", model, "--device", "cuda")
    said = failed.stderr.splitlines()[-1]
    assert failed.exit_code == 2 and said.startswith("error: device='cuda'") and "give cpu" in said


def test_no_prompt_on_a_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(SystemExit) as stopped:
        cli.app(["generate"])
    assert stopped.value.code == 2 and "forerun generate" in capsys.readouterr().err


def test_models_lists_what_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    listed = json.loads(call("models", "--json").stdout)
    assert {"name": "smollm2-135m-instruct", "folder": None, "bytes": 0} in listed
    assert "not here yet" in call("models").stdout


def test_a_model_that_recommends_its_sampling_is_measured_as_any_other(tmp_path: Path) -> None:
    answers = []
    for name, recommended in (("plain", {}), ("sampled", {"temperature": 5.0, "repetition_penalty": 1.9})):
        folder, output = tiny_model(tmp_path / name, positions=4096), tmp_path / f"{name}.json"
        (folder / "generation_config.json").write_text(json.dumps(recommended))
        run = ("bench", "-m", str(folder), "--tasks", "copy,random", "-a", "ngram", "-r", "1", "--warmups", "0", "-n", "6")
        assert call(*run, "-o", str(output)).exit_code == 0
        answers.append([answer.token_ids for batch in record.load(output).batches for answer in batch.answers])
    assert len(answers[0]) == 4 and answers[0] == answers[1]


def test_bench_on_the_real_engine(model: str, tmp_path: Path) -> None:
    """All six tasks once: the record holds every batch, the screen and the Markdown file are made from it."""
    output, markdown = tmp_path / "run.json", tmp_path / "run.md"
    tasks = "copy,words,random,return-code,edit-code,explain"
    shown = call(
        "bench",
        "-m",
        model,
        "--tasks",
        tasks,
        "-a",
        "ngram",
        "-a",
        "suffix",
        "-r",
        "1",
        "--warmups",
        "1",
        "-n",
        "24",
        "--control",
        "-o",
        str(output),
        "--markdown",
        str(markdown),
    )
    assert shown.exit_code == 0, shown.output
    made = record.load(output)
    assert made.finished and len(made.batches) == 6 * 4 * 2 and made.settings.tasks == tuple(tasks.split(","))
    assert markdown.read_text(encoding="utf-8") == as_markdown(made)
    assert str(output) in shown.stdout and "not enough data" in shown.stdout
    for batch in made.batches:
        (answer,) = batch.answers
        fixed = batch.task in ("copy", "words", "random")
        assert len(answer.token_ids) == 24 if fixed else len(answer.token_ids) <= 24
        assert batch.wall_s >= answer.e2e_s >= answer.ttft_s > 0 and batch.times.cached_tokens == 0
        counts = answer.counts
        assert counts.steps + counts.accepted in (len(answer.token_ids) - 1, len(answer.token_ids)), (
            "a stop may cut the last block"
        )
        assert batch.arm not in ("baseline", "baseline again") or counts.drafted == 0
    assert any(a.counts.accepted for b in made.batches for a in b.answers), "nothing was ever accepted, so nothing was checked"
    by_key = {(b.task, b.arm, b.repetition): b.answers[0].token_ids for b in made.batches}
    for (task, arm, repetition), ids in by_key.items():
        if task != "random":
            assert ids == by_key[task, "baseline", repetition], (task, arm)


def test_bench_with_several_requests_at_once(model: str, tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    shown = call(
        "bench", "-m", model, "--tasks", "explain", "-a", "ngram:k=2,3", "-r", "1", "-c", "3", "-n", "8", "-o", str(output)
    )
    assert shown.exit_code == 0, shown.output
    made = record.load(output)
    assert [a.name for a in made.settings.arms] == ["baseline", "ngram k=2", "ngram k=3"]
    assert all(len(b.answers) == 3 for b in made.batches)


def test_the_program_reports_what_it_does_while_it_loads_once_each() -> None:
    code = (
        "import logging, sys, forerun.cli as cli\n"
        "cli.app = lambda: [logging.getLogger('forerun').info(line) for line in ('one', 'two', 'one')]\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "one\ntwo\n" and done.stdout == ""
