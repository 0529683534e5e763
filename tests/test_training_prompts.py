"""The prompts that drafters are trained on: none shares a text or a subject with the benchmark."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from forerun.bench.workloads.tasks import TASKS
from forerun.bench.workloads.texts import texts
from forerun.train.questions import read

HEADS = Path(__file__).parents[1] / "benchmarks" / "heads"
COUNT = 600


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("heads_prompts", HEADS / "prompts.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["heads_prompts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lines(made: ModuleType) -> list[dict[str, object]]:
    return list(made.Maker(0, (), 20).prompts(COUNT))


def test_the_benchmark_is_recognised(made: ModuleType) -> None:
    """Its own prompts, and a text with a piece of one inside, share a text with it; every subject of it is known."""
    apart = made.Apart()
    for name in ("explain", "chat", "edit-code", "return-code", "quotes", "agent"):
        for variant in (0, 7, 100):
            prompt = TASKS[name].prompt(variant)
            for text in (prompt.message, prompt.prediction, *(str(m["content"]) for m in prompt.messages or ())):
                assert text is None or len(made.words_of(text)) < made.GRAM or apart.shares_text(text)
    source = texts("functions")["functions"][0]["source"]
    middle = " ".join(made.words_of(source)[10:18])
    assert apart.shares_text(f"Something else before {middle} and behind it")
    assert not apart.shares_text("Something else before " + " ".join(made.words_of(source)[10:17]))
    english = texts("english")
    for subject in (*english["topics"], *(talk["turns"][0] for talk in english["conversations"])):
        assert apart.shares_subject(subject), subject
    assert not apart.shares_subject("explain how a piano makes its sound to a starter")


def test_no_prompt_shares_a_text_or_a_subject(made: ModuleType, lines: list[dict[str, object]]) -> None:
    apart = made.Apart()
    spoken = {"explain", "ask", "chat", "list", "translate", "extract"}
    for line in lines:
        said = str(line.get("prompt") or "\n".join(line["turns"]))  # type: ignore[arg-type]
        assert not apart.shares_text(said)
        assert line["task"] not in spoken or not apart.shares_subject(said), said


def test_prompts_are_many_different_and_repeatable(made: ModuleType, lines: list[dict[str, object]], tmp_path: Path) -> None:
    tasks = Counter(str(line["task"]) for line in lines)
    assert set(tasks) == set(made.SHARES) and len(lines) == COUNT
    assert all(abs(tasks[name] / COUNT - share / 100) < 0.03 for name, share in made.SHARES.items())
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read("data", path)
    assert len(found.asked) == COUNT and found.doubles == 0
    assert list(made.Maker(0, (), 20).prompts(50)) == list(made.Maker(0, (), 20).prompts(50))
    assert list(made.Maker(0, (), 20).prompts(50)) != list(made.Maker(1, (), 20).prompts(50))


def test_too_many_prompts_are_refused(made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "SHARES", {"translate": 1})
    maker = made.Maker(0, (), 2)
    maker._known = maker._known | {"sentences": maker._known["sentences"][:3], "languages": ["French"]}
    with pytest.raises(ValueError, match="translate"):
        list(maker.prompts(200))
