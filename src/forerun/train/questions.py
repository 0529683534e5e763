"""The prompts that a target answers to make training data, read from a file without doubles, and how they are answered.
Imports no torch.

A file in JSON Lines (.jsonl) has an object a line with exactly one of `prompt` (a user's message), `messages` (a conversation;
an answer at its end is left out) and `turns` (a user's messages, asked one after the other), and optionally `task`, under which
acceptance is reported. Every other file is text: each line that is not blank is a user's message.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun import textfile
from forerun.checks import Number, Seed, Whole, convert, require, setting

KINDS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Answering:
    """How prompts are answered. answer_tokens: of an answer, at most. prompt_tokens: longer prompts are left out. greedy: the
    share of prompts that are answered greedily; the others are sampled at `temperature`. held_out: the share of prompts whose
    answers are kept out of training. answer_seed: of these choices and of sampling. Raises SettingError."""

    answer_tokens: int = setting(200, Whole(2, 1 << 20, 200))
    prompt_tokens: int = setting(1024, Whole(1, 1 << 20, 1024))
    greedy: float = setting(0.5, Number(0, 1, 0.5))
    temperature: float = setting(0.7, Number(0, 100, 0.7, above=True))
    held_out: float = setting(0.02, Number(0, 0.9, 0.02))
    answer_seed: int = setting(0, Seed())

    def __post_init__(self) -> None:
        convert(self)


class Question(NamedTuple):
    """key: 63 bits that stand for its normalised texts. task: its kind, for reports. messages: the conversation up to the first
    answer. later: what the user says after each answer."""

    key: int
    task: str
    messages: tuple[Mapping[str, Any], ...]
    later: tuple[str, ...] = ()


class Questions(NamedTuple):
    """asked: in the order of the file, each once. doubles: how many lines were left out since they equal an earlier one."""

    asked: list[Question]
    doubles: int


def read(setting: str, path: Path, most: int | None = None) -> Questions:
    """The questions of a file; most: the first so many. Raises SettingError, which names the line."""
    if path.suffix in (".jsonl", ".json"):
        every = (_question(setting, f"{path.name} line {n}", line) for n, line in textfile.json_lines(setting, path))
    else:
        lines = (line.strip() for line in textfile.read(setting, path).split("\n"))
        every = (question([{"role": "user", "content": line}], task=path.stem) for line in lines if line)
    found = without_doubles(every, most)
    require(bool(found.asked), setting, str(path), "it has no prompts; give one a line")
    return found


def without_doubles(every: Iterable[Question], most: int | None = None) -> Questions:
    found: dict[int, Question] = {}
    doubles = 0
    for one in every:
        if one.key in found:
            doubles += 1
        elif most is not None and len(found) == most:
            break
        else:
            found[one.key] = one
    return Questions(list(found.values()), doubles)


def question(messages: Sequence[Mapping[str, Any]], later: Sequence[str] = (), task: str = "all") -> Question:
    texts = [[str(m.get("role")), _normal(m.get("content"))] for m in messages]
    text = json.dumps([texts, [_normal(turn) for turn in later]], ensure_ascii=True)
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    return Question(key, task, tuple(messages), tuple(later))


def share(seed: int, purpose: str, key: int) -> float:
    """A number from 0 to 1 (exclusive) that depends on these three alone."""
    digest = hashlib.sha256(f"{seed} {purpose} {key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _normal(content: Any) -> str:
    """The content's text with single spaces, in Unicode's composed form."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return " ".join(unicodedata.normalize("NFC", text).split())


def _question(setting: str, where: str, line: Mapping[str, Any]) -> Question:
    given = [key for key in KINDS if line.get(key)]
    require(len(given) == 1, setting, where, f"give exactly one of {', '.join(KINDS)}")
    kind, value, task = given[0], line[given[0]], line.get("task", "all")
    named = isinstance(task, str) and task.replace("-", "").replace("_", "").isalnum()
    require(named, setting, where, "task is a name of letters, digits, - and _, for instance edit-code")
    if kind == "prompt":
        require(isinstance(value, str), setting, where, "prompt is a text")
        return question([{"role": "user", "content": value}], task=task)
    if kind == "turns":
        texts = isinstance(value, list) and all(isinstance(turn, str) and turn.strip() for turn in value)
        require(texts, setting, where, "turns is a list of texts")
        return question([{"role": "user", "content": value[0]}], value[1:], task)
    remedy = "messages is a list of objects with role and content, the user's among them"
    objects = isinstance(value, list) and all(isinstance(m, dict) for m in value)
    require(objects and all(isinstance(m.get("role"), str) and "content" in m for m in value), setting, where, remedy)
    while value and value[-1]["role"] == "assistant":
        value = value[:-1]
    require(bool(value), setting, where, remedy)
    return question(value, task=task)
