"""The trained drafters that come with Forerun: how they are found (with tiny random ones), and that the files which are here
draft for the default model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.bench import command
from forerun.bench.engines import arms
from forerun.bench.options import Options
from forerun.cli import app
from forerun.config import Speculation
from forerun.heads import loading as heads
from forerun.heads import saving
from forerun.heads.config import HeadConfig
from forerun.llm import LLM, LoadedModel
from forerun.models import gguf_writer, hub, shipped
from forerun.train.shape import Shape, drafter
from forerun.types import SamplingParams, SettingError
from tests.test_loading import write_gguf
from tests.tiny import tiny_model

SIZES = {"hidden": 128, "intermediate": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "layers": 6}
TARGET = shipped.TARGET
NEED = ("draft_model", "eagle3", "dflash")
SMALL = {"kv_cache_tokens": 1024, "max_model_len": 256, "adaptive_drafts": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model that has the default model's name."""
    folder = tmp_path_factory.mktemp("target") / "SmolLM2-135M-Instruct"
    return LLM.load(tiny_model(folder, **SIZES), "float32")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def drafters(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the place of trained/: random heads, and the target itself as its draft model."""
    root = tmp_path_factory.mktemp("trained")
    for method in ("eagle3", "mtp", "dflash"):
        shape = drafter(method, Shape(layers=1 if method == "dflash" else None), target.target.config, target.target.vocab, 3)
        assert isinstance(shape, HeadConfig)
        head = heads.random(shape, target.target)
        saving.save(root / TARGET / method, head.config, head.weights, TARGET)
    (root / TARGET / "draft").mkdir()
    vocabulary = write_gguf(root / "vocabulary.gguf", target.folder)
    gguf_writer.write(root / TARGET / "draft" / shipped.MODEL, target.folder, vocabulary)
    return root


@pytest.fixture
def here(drafters: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "ROOT", drafters)
    return drafters / TARGET


@pytest.fixture
def none_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ROOT", tmp_path)


@pytest.mark.parametrize("method", shipped.FOLDERS)
def test_a_method_finds_its_drafter(method: str, here: Path, target: LoadedModel) -> None:
    """Without a model on the target that it is for, and by its name; it drafts, and the answer stays the same."""
    params, prompt = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), "the thing in the an"
    plain = LLM(target, **SMALL).generate(prompt, params)[0].token_ids
    name = f"{TARGET}/{shipped.FOLDERS[method]}"
    for own in ({"method": method}, {"method": method, "model": name.upper()}):
        llm = LLM(target, speculative_config=own | {"num_speculative_tokens": 3}, **SMALL)
        assert llm.generate(prompt, params)[0].token_ids == plain and llm.stats.drafts.drafted > 0
        assert llm.settings()["speculative_config"]["model"] == (own.get("model") or name)
        assert method != "draft_model" or llm.stats.drafts.acceptance_length > 2, "it is the target in 8 bits"


@pytest.mark.parametrize("method", NEED)
def test_another_target_needs_a_drafter(method: str, here: Path, target: LoadedModel) -> None:
    names = ", ".join(f"{TARGET}/{name}" for name in ("draft", "eagle3", "mtp", "dflash"))
    said = f"^model=None: method {method} needs the drafter's path or id, since none comes with Forerun for the target other"
    with pytest.raises(SettingError, match=f"{said}; give {names}, a path or an id such as owner/name$"):
        LLM(target._replace(name="other"), speculative_config={"method": method, "num_speculative_tokens": 3}, **SMALL)


def test_names_that_do_not_exist(here: Path, target: LoadedModel) -> None:
    with pytest.raises(SettingError, match=f"no such drafter comes with Forerun; give {TARGET}/draft, {TARGET}/eagle3"):
        LLM(target, speculative_config={"method": "eagle3", "model": f"{TARGET}/eagle4"}, **SMALL)
    with pytest.raises(SettingError, match="model=None: method eagle needs the drafter's path or id"):
        Speculation.parse({"method": "eagle"})


@pytest.mark.parametrize("method", NEED)
def test_without_the_files(method: str, none_here: None, target: LoadedModel) -> None:
    with pytest.raises(SettingError, match=f"method {method} needs .* give a path or an id such as owner/name"):
        LLM(target, speculative_config={"method": method}, **SMALL)
    assert shipped.drafters() == [] and arms.default(TARGET) == ("ngram", "suffix")


@pytest.mark.parametrize(
    ("model", "served"),
    [
        (TARGET, True), ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("HuggingFaceTB/SmolLM2-135M-Instruct@main", True),
        ("/some/where/SmolLM2-135M-Instruct.Q4_1.gguf", True), ("HuggingFaceTB/SmolLM2-360M-Instruct", False),
        ("smollm2-135m-instruct/other", False), ("HuggingFaceTB/SmolLM2-135M", False), ("", False),
    ],
)  # fmt: skip
def test_which_models_they_are_for(model: str, served: bool, here: Path) -> None:
    assert shipped.serves(model) == served
    assert shipped.methods(model) == (("draft_model", "eagle3", "mtp", "dflash") if served else ())


def test_the_arms_of_a_comparison(here: Path) -> None:
    names = ["baseline", "ngram k=4", "suffix", "draft_model k=4", "eagle3 k=4", "mtp k=4", "dflash k=7"]
    assert command.arm_names(Options()) == names
    assert command.arm_names(Options(model="owner/other")) == names[:3]
    with pytest.raises(SettingError, match="none comes with Forerun for the target owner/other"):  # before it is fetched
        command.arm_names(Options(model="owner/other", arms=("eagle3",)))
    (both,) = arms.parse(("eagle3+ngram",))
    assert both.name == "eagle3+ngram k=4" and both.settings is not None
    assert [both.settings[f"prompt_lookup_{end}"] for end in ("min", "max")] == [2, 5]
    assert [arm.name for arm in arms.parse(("dflash+ngram:k=3,7",))] == ["dflash+ngram k=3", "dflash+ngram k=7"]
    for bad in ("suffix+ngram", "eagle3+suffix", "eagle3+", "+ngram"):
        with pytest.raises(SettingError, match=f"arms='{bad.replace('+', '[+]')}'"):
            arms.parse((bad,))
    for name in NEED:  # a server has no drafters of its own
        with pytest.raises(SettingError, match="needs the drafter's path or id"):
            command.served_arms((name,))


def test_a_comparison_has_all_of_them(here: Path, target: LoadedModel, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ["--tasks", "explain", "-r", "1", "-n", "6", "--warmups", "0", "--dtype", "float32", "-o", str(record)]
    done = CliRunner().invoke(app, ["bench", "-m", str(target.folder), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(record.read_text())
    drafting = {arm["name"]: arm["speculation"] for arm in found["settings"]["arms"] if arm["speculation"]}
    models = {name: of["model"] for name, of in drafting.items() if "model" in of}
    assert models == {
        "draft_model k=4": f"{TARGET}/draft", "eagle3 k=4": f"{TARGET}/eagle3", "mtp k=4": f"{TARGET}/mtp",
        "dflash k=7": f"{TARGET}/dflash",
    }  # fmt: skip
    assert {arm for arm in ("baseline", "suffix", *models)} <= {batch["arm"] for batch in found["batches"]}


def test_they_are_listed(here: Path) -> None:
    listed = {one["name"]: one for one in json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)}
    for method, name in shipped.FOLDERS.items():
        one = listed[f"{TARGET}/{name}"]
        assert one["method"] == method and one["folder"] == str(here / name)
        assert one["bytes"] == sum(file.stat().st_size for file in (here / name).iterdir())
    hub.resolve(f"{TARGET}/draft", lambda line: None)
    assert {one["name"] for one in json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)} == set(listed)
    table = CliRunner().invoke(app, ["models"], env={"COLUMNS": "80"}).stdout
    assert all(f"{TARGET}/{name} " in table for name in shipped.FOLDERS.values())


def test_all_files_are_here_and_in_the_wheel() -> None:
    """Four drafters with their cards in 70 MB; the patterns of package data match each file."""
    assert [one.method for one in shipped.drafters()] == list(shipped.FOLDERS)
    package = shipped.ROOT.parent
    settings = tomllib.loads((package.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["forerun"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    files = [file for file in shipped.ROOT.rglob("*") if file.is_file()]
    assert set(files) <= packed
    assert sum(file.stat().st_size for file in files) <= 70e6
    for one in shipped.drafters():
        card = (one.folder / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in ("# ", "Data", "seed", "Acceptance", "Apache-2.0", one.name))


@pytest.fixture(scope="module")
def default() -> Iterator[LoadedModel]:
    yield LLM.load()


ASKED = (
    "Explain in three short paragraphs how a bridge carries a load.",
    "Write a letter to the town council that asks for a bench in the park.",
    "Add type hints and a docstring to this function and return all of it:\n"
    "def area(width, height):\n    if width < 0:\n        raise ValueError('negative')\n    return width * height",
)
FLOORS = {"draft_model": (4, 1.7), "eagle3": (4, 2.2), "mtp": (4, 1.9), "dflash": (7, 1.9)}  # k, and tokens of a step


@pytest.mark.parametrize("method", FLOORS)
def test_the_trained_files_draft(method: str, default: LoadedModel) -> None:
    """Greedy, whole drafts: the acceptance length is above a floor. Random weights, and states in another order, give 1.0 to
    1.1; other sums by other kernels move it by 0.2."""
    k, floor = FLOORS[method]
    settings = {"method": method, "num_speculative_tokens": k}
    llm = LLM(default, speculative_config=settings, **SMALL)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=96)
    llm.chat([[{"role": "user", "content": text}] for text in ASKED], params)
    assert (llm.stats.drafts.acceptance_length or 0) >= floor
