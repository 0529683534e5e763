"""Training data: prompts from files, answers of the target, shards that survive a kill, and what is held out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forerun.llm import LLM
from forerun.train import answers
from forerun.train.answers import Answerer, Shards, gather
from forerun.train.questions import Answering, read, share
from forerun.types import LoadError, SamplingParams, SettingError
from tests.tiny import tiny_model

SETTINGS = Answering(answer_tokens=12, held_out=0.3)
COUNT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), max_num_seqs=8, kv_cache_tokens=4096, enable_prefix_caching=False)


def written(folder: Path, lines: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def many(folder: Path) -> Path:
    return written(folder, [{"prompt": f"the thing {i}", "task": ("one", "two")[i % 2]} for i in range(COUNT)])


def answered(llm: LLM, path: Path, folder: Path, settings: Answering = SETTINGS) -> tuple[answers.Made, answers.Made]:
    shards = Shards(folder, "tiny", settings)
    asked = read("data", path).asked
    Answerer(llm, shards, settings).run(asked)
    return gather(shards, asked, settings)


def rows(made: answers.Made) -> list[tuple[list[int], int, str]]:
    ids, start, prompt = made.samples
    return [(ids[a:b].tolist(), int(p), t) for a, b, p, t in zip(start[:-1], start[1:], prompt, made.task, strict=True)]


def test_questions_of_all_kinds_without_doubles(tmp_path: Path) -> None:
    path = written(tmp_path, [
        {"prompt": "one  two"},
        {"messages": [{"role": "user", "content": " one two\n"}, {"role": "assistant", "content": "left out"}]},
        {"turns": ["one two", "three"], "task": "talk"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "one two"}]},
        {"prompt": "caf\u00e9"}, {"prompt": "cafe\u0301"},
    ])  # fmt: skip
    found = read("data", path)
    assert found.doubles == 2
    assert [(len(q.messages), q.later, q.task) for q in found.asked] == [
        (1, (), "all"), (1, ("three",), "talk"), (2, (), "all"), (1, (), "all")
    ]  # fmt: skip
    assert len(read("data", path, most=2).asked) == 2
    lines = tmp_path / "plain.txt"
    lines.write_text("first\n\n second \nfirst\n")
    plain = read("data", lines)
    assert [q.messages[0]["content"] for q in plain.asked] == ["first", "second"]
    assert plain.doubles == 1 and plain.asked[0].task == "plain"


@pytest.mark.parametrize("line", [
    {}, {"prompt": "x", "turns": ["y"]}, {"prompt": 5}, {"turns": "x"}, {"turns": [""]}, {"messages": ["x"]},
    {"messages": [{"role": "assistant", "content": "x"}]}, {"messages": [{"content": "x"}]}, {"prompt": "x", "task": "a b"},
    {"prompt": "x", "task": 5},
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object]) -> None:
    path = written(tmp_path, [{"prompt": "good"}, line])
    with pytest.raises(SettingError, match="line 2"):
        read("data", path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("\n \n")
    with pytest.raises(SettingError, match="no prompts"):
        read("data", path)


def test_answers_are_those_of_generate(llm: LLM, tmp_path: Path) -> None:
    """Each answer equals generate's with the same parameters, and the share that is greedy and that is held out is as asked."""
    path = many(tmp_path)
    train, held = answered(llm, path, tmp_path / "answers")
    asked = read("data", path).asked
    by_prompt = {tuple(llm.chat_ids(q.messages)): q for q in asked}
    greedy = 0
    for made, side in ((train, False), (held, True)):
        for ids, prompt, task in rows(made):
            question = by_prompt.pop(tuple(ids[:prompt]))
            assert task == question.task
            assert (share(0, "held out", question.key) < SETTINGS.held_out) is side
            plain = share(0, "greedy", question.key) < SETTINGS.greedy
            greedy += plain
            seed = int(share(0, "turn 0", question.key) * 2**48)
            params = SamplingParams(temperature=0.0 if plain else 0.7, max_tokens=12, seed=seed)
            assert list(llm.generate([ids[:prompt]], params)[0].token_ids) == ids[prompt:]
    assert len(by_prompt) == train.left_out + held.left_out
    assert 0.25 < greedy / COUNT < 0.75 and 5 < len(held.task) < 35


def test_turns_are_answered_one_after_the_other(llm: LLM, tmp_path: Path) -> None:
    lines = [{"turns": [f"the thing {i}", "again", "and again"]} for i in range(6)]
    train, held = answered(llm, written(tmp_path, lines), tmp_path / "answers", Answering(answer_tokens=6, held_out=0.4))
    found = sorted(rows(train) + rows(held), key=lambda row: row[1])
    assert len(found) + train.left_out + held.left_out == 18
    text = llm.tokenizer.decode
    for ids, prompt, _ in found:
        before = text(ids[:prompt], skip_special_tokens=False)
        turns = before.count("<|im_start|>user")
        assert turns - 1 == before.count("<|im_start|>assistant") - 1
        if turns > 1:
            first = next(r for r in found if r[1] < prompt and ids[: r[1]] == r[0][: r[1]])
            assert text(first[0][first[1] :]) in before


def test_a_second_run_answers_what_is_new_alone(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "answers"
    first = written(tmp_path / "first", [{"prompt": f"the thing {i}"} for i in range(20)])
    answered(llm, first, folder)
    asked: list[str] = []
    original = Answerer._request

    def noted(self: Answerer, name: str, talk: answers._Talk) -> object:
        asked.append(str(talk.question.messages[0]["content"]))
        return original(self, name, talk)

    monkeypatch.setattr(Answerer, "_request", noted)
    more = written(tmp_path / "more", [{"prompt": f"the thing {i}"} for i in range(15, 30)])
    train, held = answered(llm, more, folder)
    assert sorted(asked) == [f"the thing {i}" for i in range(20, 30)]
    assert len(train.task) + len(held.task) + train.left_out + held.left_out == 15


def test_equal_and_empty_answers_are_left_out(tmp_path: Path) -> None:
    path = many(tmp_path)
    asked = read("data", path).asked
    shards = Shards(tmp_path / "answers", "tiny", SETTINGS)
    shards.add([answers.Answer(q.key, 0, [5, 6], [7] if i < 10 else [7, 8 + i // 4]) for i, q in enumerate(asked)])
    train, held = gather(shards, asked, SETTINGS)
    kept = [(tuple(ids[prompt:]), task) for made in (train, held) for ids, prompt, task in rows(made)]
    assert len(kept) == len(set(kept)) and all(len(ids) == 2 for ids, _ in kept)
    assert train.left_out + held.left_out == COUNT - len(kept)


def test_too_long_prompts_are_left_out(llm: LLM, tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "the thing"}, {"prompt": "long " * 100}])
    answerer = Answerer(llm, Shards(tmp_path / "answers", "tiny", SETTINGS), Answering(prompt_tokens=60))
    answerer.run(read("data", path).asked)
    assert answerer.too_long == 1


def test_a_killed_run_goes_on_without_loss_or_doubles(model: Path, llm: LLM, tmp_path: Path) -> None:
    """Killed in the middle with shards on the disk, and while a shard is written. The result is that of a run in one go."""
    path, folder = many(tmp_path), tmp_path / "answers"
    code = f"""
import sys
from pathlib import Path
import numpy as np
from forerun.llm import LLM
from forerun.train import answers
from forerun.train.questions import read
answers.SHARD_ANSWERS = 8
kill_at = int(sys.argv[1])
save = np.savez
def stop(file, **arrays):
    save(file, **arrays)
    if len(list(Path({str(folder)!r}).glob("shard-*"))) == kill_at:
        print("here", flush=True)
        sys.stdin.read()
np.savez = stop
settings = answers.Answering(answer_tokens=12, held_out=0.3)
llm = LLM({str(model)!r}, max_num_seqs=4, kv_cache_tokens=1024, enable_prefix_caching=False)
shards = answers.Shards(Path({str(folder)!r}), "tiny", settings)
answers.Answerer(llm, shards, settings).run(read("data", Path({str(path)!r})).asked)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    shards = sorted(file.name for file in folder.glob("shard-*"))
    assert len(shards) == 3 and list(folder.glob(".shard-*"))  # whole ones, and the one that was being written
    resumed = answered(llm, path, folder)
    assert [rows(made) for made in resumed] == [rows(made) for made in answered(llm, path, tmp_path / "at once")]
    keys = [one.key for one in Shards(folder, "tiny", SETTINGS).read()]
    assert len(keys) == len(set(keys)) == COUNT


def test_other_settings_and_damaged_shards_are_refused(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    answered(llm, many(tmp_path), folder)
    Shards(folder, "tiny", Answering(answer_tokens=12, held_out=0.1))  # held_out does not change answers
    for model, settings, name in (
        ("other", SETTINGS, "model"), ("tiny", Answering(answer_tokens=13), "answer_tokens"),
        ("tiny", Answering(answer_tokens=12, temperature=1.0), "temperature"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=name):
            Shards(folder, model, settings)
    shard = folder / Shards(folder, "tiny", SETTINGS).names[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(LoadError, match="delete it"):
        list(Shards(folder, "tiny", SETTINGS).read())
    (folder / answers.MANIFEST).write_text("{")
    with pytest.raises(LoadError, match="broken"):
        Shards(folder, "tiny", SETTINGS)


def test_samples_of_a_folder_are_those_that_were_written(tmp_path: Path) -> None:
    samples = answers.Samples(np.arange(9, dtype=np.int32), np.array([0, 4, 9]), np.array([2, 3], np.int32))
    made = answers.Made(samples, ("one", "two"), 3)
    for _ in range(2):  # the second time in place of the first
        answers.save(tmp_path / "made", made)
    assert rows(answers.load(tmp_path / "made")) == rows(made)
    (tmp_path / "made" / answers.TASKS).write_text('{"task": ["one"], "left_out": 0}')
    with pytest.raises(LoadError, match="does not fit"):
        answers.load(tmp_path / "made")


@pytest.mark.parametrize(("name", "value"), [
    ("answer_tokens", 1), ("answer_tokens", "x"), ("prompt_tokens", 0), ("greedy", 1.5), ("greedy", float("nan")),
    ("temperature", 0), ("held_out", 1.0), ("held_out", True), ("answer_seed", 0.5),
])  # fmt: skip
def test_hostile_settings(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        Answering(**{name: value})  # type: ignore[arg-type]


def test_the_share_held_out_must_leave_something_on_both_sides(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="held_out"):
        answered(llm, many(tmp_path), tmp_path / "answers", Answering(answer_tokens=4, held_out=0.0))


def test_answers_without_text_are_the_same_tokens(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=8, detokenize=on) for on in (True, False)]
    with_text, without = llm.generate(["the thing", "the thing"], params)
    assert with_text.token_ids == without.token_ids and with_text.text and not without.text
    with pytest.raises(SettingError, match="detokenize"):
        SamplingParams(detokenize=False, stop=("x",))


def test_the_default_model_answers(tmp_path: Path) -> None:
    llm = LLM(max_num_seqs=4, kv_cache_tokens=2048, max_model_len=512, enable_prefix_caching=False)
    path = written(tmp_path, [{"prompt": f"What is {i} plus one?"} for i in range(4)])
    train, held = answered(llm, path, tmp_path / "answers", Answering(answer_tokens=8, held_out=0.5))
    for ids, prompt, _ in rows(train) + rows(held):
        assert llm.tokenizer.decode(ids[:prompt]).rstrip().endswith("assistant") and 2 <= len(ids) - prompt <= 8
