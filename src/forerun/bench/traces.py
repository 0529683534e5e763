"""Tasks out of the user's own files: prompts, request logs with times, and Spec-Bench's questions. Knows those formats, JSON
Lines all of them; makes no prompt up but where a log has lengths only.

A line is an object with one of: `prompt` (text to continue), `messages` (a conversation, as in the OpenAI API), `turns` (a list
of user messages, Spec-Bench's; the first is asked), `input_length` (tokens; a made-up text of about that length). Optional:
`max_tokens` or `output_length`, `prediction`, `category`, and for a trace `timestamp` (seconds, or ISO 8601) or `timestamp_ms`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from forerun.bench.texts import WORDS
from forerun.bench.workloads import Prompt, Task
from forerun.types import SettingError, require

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MADE_UP = "the log has lengths only, so the prompts are made-up words: acceptance on them does not carry over"


def prompts(path: Path) -> list[Task]:
    """A task of the prompts in a file; of Spec-Bench's question file, one for each of its parts. Raises SettingError."""
    lines = _lines(path)
    if not all("turns" in line and "category" in line for _, line in lines):
        return [_task(path.stem, "the prompts of a file", lines)]
    parts: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, line in lines:
        category = str(line["category"])
        parts.setdefault("mt_bench" if category in MT_BENCH else category, []).append((number, line))
    return [_task(f"spec-bench {name}", "first turns of Spec-Bench's questions", of_part) for name, of_part in parts.items()]


def trace(path: Path) -> tuple[Task, tuple[float, ...]]:
    """The requests of a log in the order of their times, and those times in seconds from the first. Raises SettingError."""
    lines = [(_time(number, line), number, line) for number, line in _lines(path)]
    lines.sort(key=lambda one: one[0])
    first = lines[0][0]
    task = _task(path.stem, "requests of a log, at their times", [(number, line) for _, number, line in lines])
    return task, tuple(at - first for at, _, _ in lines)


def _lines(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError("prompts", str(path), f"cannot be read ({error.strerror})") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingError("prompts", f"{path.name} line {number}", f"not JSON ({error})") from None
        require(isinstance(value, dict), "prompts", f"{path.name} line {number}", 'give an object, such as {"prompt": "..."}')
        found.append((number, value))
    require(bool(found), "prompts", str(path), "it has no lines; give one JSON object a line")
    return found


def _task(name: str, about: str, lines: Sequence[tuple[int, Mapping[str, Any]]]) -> Task:
    made = [_prompt(name, number, line) for number, line in lines]
    lengths_only = any("input_length" in line for _, line in lines)
    ask: Callable[[int], Prompt] = made.__getitem__
    caution = MADE_UP if lengths_only else None
    return Task(name, about, ask, fixed_length=lengths_only, caution=caution, variants=len(made))


def _prompt(name: str, number: int, line: Mapping[str, Any]) -> Prompt:
    where = f"{name} line {number}"
    given = [key for key in ("prompt", "messages", "turns", "input_length") if line.get(key)]
    require(len(given) == 1, "prompts", where, "give exactly one of prompt, messages, turns and input_length")
    value = line[given[0]]
    most = line.get("max_tokens", line.get("output_length"))
    require(most is None or (isinstance(most, int) and most >= 1), "max_tokens", most, f"{where}: give 1 or more")
    prediction = line.get("prediction")
    if given[0] == "prompt":
        require(isinstance(value, str), "prompts", where, "prompt is a text")
        return Prompt(where, text=value, prediction=prediction, max_tokens=most)
    if given[0] == "input_length":
        require(isinstance(value, int) and value >= 1, "input_length", value, f"{where}: give 1 or more")
        draw = random.Random(3000 + number)
        return Prompt(where, text=" ".join(draw.choices(WORDS, k=value)), max_tokens=most)
    if given[0] == "turns":
        require(isinstance(value, list) and isinstance(value[0], str), "prompts", where, "turns is a list of texts")
        return Prompt(where, message=value[0], max_tokens=most)
    require(
        isinstance(value, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in value),
        "prompts",
        where,
        "messages is a list of objects with role and content",
    )
    return Prompt(where, messages=tuple(value), prediction=prediction, max_tokens=most)


def _time(number: int, line: Mapping[str, Any]) -> float:
    """In seconds from some moment."""
    if isinstance(line.get("timestamp_ms"), int | float):
        return float(line["timestamp_ms"]) / 1000
    value = line.get("timestamp")
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            pass
    raise SettingError("timestamp", value, f"line {number}: give timestamp in seconds or as ISO 8601, or timestamp_ms")
