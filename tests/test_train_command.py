"""`forerun train`: end to end on a tiny model, going on after an interrupt, options of a file, and bad settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from forerun.heads import layouts, loading
from forerun.llm import LLM
from forerun.models.config import ModelConfig
from forerun.train import log, options, run
from forerun.train.options import Checking, Options, combined
from forerun.train.questions import Answering
from forerun.train.settings import Settings
from forerun.train.shape import METHODS, READ, Shape, drafter
from forerun.types import LoadError, SamplingParams, SettingError
from tests.tiny import tiny_model

QUICK = (
    "--dtype", "float32", "--answer-tokens", "12", "--prompt-tokens", "64", "--held-out", "0.25", "--tokens", "192", "--unroll",
    "2", "--evaluations", "3", "--engine-evaluations", "1", "--engine-prompts", "3", "--rate", "5e-3", "--k", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("train") / "tiny", layers=4, positions=256)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"the thing {i}", "task": ("one", "two")[i % 2]} for i in range(32)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def call(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"}).invoke(cli.app, ["train", *arguments])


def arguments(method: str, target: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [method, "--target", str(target), "--data", str(prompts), "--out", str(out), *QUICK, *more]


class Silent:
    """A watcher that shows nothing."""

    def begin(self, what: str, done: int, total: int) -> None: ...

    def at(self, done: int, detail: str) -> None: ...


def made(method: str, target: Path, prompts: Path, out: Path, **more: Any) -> run.Run:
    given = dict(
        target=str(target), data=prompts, out=out, dtype="float32", answer_tokens=12, prompt_tokens=64, held_out=0.25,
        tokens=192, unroll=2, evaluations=2, engine_evaluations=0, rate=5e-3, k=2, steps=8,
    )  # fmt: skip
    return run.Run(method, Options(**given | more), Silent())


def test_a_head_from_prompts_to_the_engine(target: Path, prompts: Path, tmp_path: Path) -> None:
    """30 steps: the loss falls, the export loads, and the printed setting works. The same command again changes nothing."""
    out = tmp_path / "out"
    given = arguments("eagle3", target, prompts, out, "--steps", "30", "--draft-vocab", "200")
    found = call(*given)
    assert found.exit_code == 0, found.output
    lines = log.read(out / "log.jsonl")
    losses = [line["loss"] for line in log.of(lines, "step")]
    assert [line["step"] for line in log.of(lines, "step")] == list(range(1, 31))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert [line["step"] for line in log.of(lines, "offline")] == [10, 20, 30]
    (engine,) = log.of(lines, "engine")
    assert {task["task"] for task in engine["tasks"]} == {"one", "two"} and engine["step"] == 30
    assert {line["name"] for line in log.of(lines, "phase")} >= {"answers", "steps", "evaluation", "export", "engine"}
    head = out / "head"
    loaded = LLM.load(str(target), "float32")
    config = layouts.read_config(head, "eagle3", loaded.target.config)
    assert config.draft_vocab == 200 and loading.load(head, config, loaded.target)
    setting = found.stdout.rstrip().rpartition("--speculative-config ")[2].strip("'")
    assert json.loads(setting) == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    greedy, found = SamplingParams(temperature=0), []
    for speculation in (setting, None):
        found += LLM(loaded, speculative_config=speculation, kv_cache_tokens=512).generate("the thing", greedy)
    assert found[0].token_ids == found[1].token_ids
    assert "<svg" in (out / "training.html").read_text()
    before = (head / "model.safetensors").read_bytes()
    again = call(*given)
    assert again.exit_code == 0 and "Going on" in again.stderr
    assert (head / "model.safetensors").read_bytes() == before
    assert len(log.of(log.read(out / "log.jsonl"), "step")) == 30


def test_acceptance_in_the_engine_is_that_of_the_trainer(target: Path, prompts: Path, tmp_path: Path) -> None:
    """On greedy answers the engine accepts what the walk over them finds, but for the ends of answers."""
    it = made("eagle3", target, prompts, tmp_path / "out", greedy=1.0, steps=60, engine_evaluations=1, rate=8e-3, held_out=0.5)
    result = it.make()
    _, held_out = it.samples()
    assert len(held_out.task) > 8
    steps = sum(one.steps for one in result.tried)
    length = sum(one.steps * one.length for one in result.tried) / steps
    assert abs(length - result.evaluation.lengths[-1]) < 0.12 * length, (length, result.evaluation)


def test_an_interrupted_run_goes_on(target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it answers, then in the middle of the steps, then killed between checkpoint and log. The head is that
    of a run in one go."""
    whole = made("eagle3", target, prompts, tmp_path / "whole").make()
    out = tmp_path / "cut"

    class Interrupting(Silent):
        def __init__(self, what: str, at: int) -> None:
            self.what, self.on, self.last = what, at, ""

        def begin(self, what: str, done: int, total: int) -> None:
            self.last = what

        def at(self, done: int, detail: str) -> None:
            if self.last == self.what and done >= self.on:
                raise KeyboardInterrupt

    for what, at in (("answers", 10), ("steps", 4)):
        it = made("eagle3", target, prompts, out)
        monkeypatch.setattr(run, "AT_ONCE_S", 0.0)
        it._watch = Interrupting(what, at)
        with pytest.raises(KeyboardInterrupt):
            it.make()
    assert sorted(path.name for path in out.iterdir()) == ["answers", "checkpoint.pt", "log.jsonl", "run.json", "samples"]
    with (out / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 7, "loss": 0.0, "accur')  # cut off
    result = made("eagle3", target, prompts, out).make()
    assert (result.head / "model.safetensors").read_bytes() == (whole.head / "model.safetensors").read_bytes()
    steps = [line["step"] for line in log.of(log.read(out / "log.jsonl"), "step")]
    assert steps == sorted(set(steps)) and steps[-1] == 8


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash", "draft"])
def test_every_method_is_trained_and_tried(target: Path, prompts: Path, tmp_path: Path, method: str) -> None:
    more: dict[str, Any] = {"hidden": 64, "layers": 1} if method == "draft" else {}
    result = made(method, target, prompts, tmp_path / "out", steps=2, engine_evaluations=1, **more).make()
    assert [one.task for one in result.tried] and all(one.steps for one in result.tried)
    assert len(result.tried[0].accepted) == len(result.evaluation.accepted) == 2


def test_steps_of_several_calls(target: Path, prompts: Path, tmp_path: Path) -> None:
    """A call makes as many steps as it is asked for, and leaves a drafter."""
    out = tmp_path / "out"
    for _ in range(3):
        result = made("eagle3", target, prompts, out).make(steps=3)
    assert log.of(log.read(out / "log.jsonl"), "step")[-1]["step"] == 8
    once = made("eagle3", target, prompts, tmp_path / "once").make()
    assert (result.head / "model.safetensors").read_bytes() == (once.head / "model.safetensors").read_bytes()


def test_other_settings_in_the_same_folder_are_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made("eagle3", target, prompts, out).make(steps=1)
    made("eagle3", target, prompts, out, evaluations=1, batch=3, k=1)  # these may differ
    for name, value in (("rate", 1e-3), ("greedy", 0.1), ("steps", 9), ("draft_vocab", 50)):
        with pytest.raises(SettingError, match=f"{name}.*--out"):
            made("eagle3", target, prompts, out, **{name: value})
    with pytest.raises(SettingError, match="method"):
        made("mtp", target, prompts, out)
    other = tmp_path / "prompts.jsonl"
    other.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(SettingError, match="changed"):
        made("eagle3", target, other, out)
    (out / "checkpoint.pt").write_bytes(b"PK")
    with pytest.raises(LoadError, match=r"checkpoint\.pt.*delete"):
        made("eagle3", target, prompts, out).make()
    (out / "run.json").write_text("[")
    with pytest.raises(LoadError, match=r"run\.json"):
        made("eagle3", target, prompts, out)


def test_a_dry_run_says_what_is_needed(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = call(*arguments("eagle3", target, prompts, out, "--dry-run"))
    assert found.exit_code == 0, found.output
    for word in ("prompts", "32", "time for answers", "time for training", "measured", "computed", "memory"):
        assert word in found.stdout, word
    assert not out.exists()


def test_a_file_gives_options_and_flags_come_first(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'method = "dflash"\nout = "there"\n[training]\nsteps = 5\nrate = 1e-4\n[shape]\nstates = [1, 3]\nstate-norms = "all"\n'
    )
    given, method, names = combined(Options(steps=7, out=Path("here")), {"steps", "ctx"}, path)
    assert method == "dflash" and names == {"out", "steps", "rate", "states", "state_norms"}
    assert (given.steps, given.rate, given.out, given.states, given.state_norms) == (7, 1e-4, Path("there"), (1, 3), "all")
    assert given.part(Shape).states == (1, 3) and given.part(Settings).steps == 7


@pytest.mark.parametrize(("text", "message"), [
    ("steps = ", "not TOML"), ("step = 5", "did you mean steps"), ("steps = 5\n[x]\nsteps = 6", "twice"),
    ("rate = '1'", "number"),
    ("loss = 'mse'", "kl"), ("out = 5", "text"), ("states = 'x'", "states"), ("method = 5", "method"), ("loss = 5", "text"),
    ("steps = true", "number"),
])  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message):
        combined(Options(), set(), path)[0].part(Shape)


@pytest.mark.parametrize(("given", "message"), [
    ([], "method"), (["medusa"], "eagle3"), (["eagle3"], "--data"), (["eagle3", "--data", "p.txt"], "--out"),
    (["mtp", "--data", "p.txt", "--out", "x", "--draft-vocab", "9"], "does not read it"),
    (["eagle3", "--data", "nowhere.txt", "--out", "x"], "cannot be read"),
    (["eagle3", "--data", "p.txt", "--out", "x", "--steps", "0"], "steps"),
    (["eagle3", "--data", "p.txt", "--out", "x", "--held-out", "1"], "held_out"),
    (["--config", "nowhere.toml"], "nowhere.toml"),
])  # fmt: skip
def test_bad_settings_are_named_before_a_model_is_loaded(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("one\ntwo\n")
    monkeypatch.setattr(LLM, "load", lambda *_: pytest.fail("a model was loaded"))
    found = call(*given)
    assert found.exit_code == 2 and message in found.output


def test_options_have_the_names_and_defaults_of_the_settings() -> None:
    given = {field.name: field.default for field in dataclasses.fields(Options)}
    assert {name: given[name] for name in options.defaults()} == options.defaults()
    for kind in (Answering, Shape, Settings, Checking):
        Options().part(kind)
    assert set(READ) == set(METHODS)


CONFIG = ModelConfig(300, 64, 128, 6, 4, 2, 32, 256)


@pytest.mark.parametrize("method", METHODS)
def test_shapes_fit_small_targets(method: str) -> None:
    for layers in (1, 2, 4, 30):
        given = dataclasses.replace(CONFIG, layers=layers, windows=())
        shape = drafter(method, Shape(), given, 290, 3)
        if isinstance(shape, ModelConfig):
            assert shape.vocab_size == 300 and shape.layers == 4
            continue
        assert len(set(shape.states)) == len(shape.states) and all(0 <= state <= layers for state in shape.states)
        assert shape.draft_vocab == (64 if method == "eagle3" else 300)
    if method in ("eagle3", "dflash"):
        with pytest.raises(SettingError, match="states"):
            drafter(method, Shape(states=(9,)), CONFIG, 290, 3)


def test_published_states() -> None:
    given = dataclasses.replace(CONFIG, layers=36, windows=())
    found: Callable[[str], Any] = lambda method: drafter(method, Shape(), given, 300, 3)  # noqa: E731
    assert found("eagle3").states == (2, 18, 33)
    assert found("dflash").states == (2, 18, 34)  # outputs of layers 1, 17 and 33


@pytest.mark.parametrize(("name", "value"), [
    ("draft_vocab", 0), ("states", (1, 1)), ("states", ("x",)), ("states", (-1,)), ("state_norms", "some"), ("modules", 0),
    ("layers", 1.5), ("block", 1), ("hidden", True), ("heads", 0), ("intermediate", "x"),
])  # fmt: skip
def test_hostile_shapes(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        Shape(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("k", 0), ("evaluations", -1), ("engine_prompts", 0), ("checkpoint_minutes", 0)])
def test_hostile_evaluations(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        Checking(**{name: value})  # type: ignore[arg-type]


