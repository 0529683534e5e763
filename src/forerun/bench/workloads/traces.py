"""Tasks from a user's files in JSON Lines: prompts, request logs with times, and Spec-Bench's questions.

Each line is an object with exactly one of `prompt` (a text to continue), `messages` (a conversation, as in the OpenAI API),
`turns` (a list of user messages as in Spec-Bench, of which the first is asked) and `input_length` (tokens; the text is made
up, of about that length). Optional: `max_tokens` or `output_length`, `prediction`, `category`. A trace also has `timestamp`
(seconds, or ISO 8601) or `timestamp_ms`. Timestamps are milliseconds if the lines have `hash_ids`, as Mooncake's traces do.
Timestamps that are too large for seconds are times since 1970 in a smaller unit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from forerun.bench.workloads.tasks import Prompt, Task
from forerun.bench.workloads.texts import words
from forerun.checks import SettingError, require
from forerun.textfile import json_lines

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MADE_UP = "the log has lengths only, so the prompts are made-up words: acceptance on them does not carry over"
MOONCAKE = (
    "the log has hash_ids, as Mooncake's traces have, so its timestamps were read as milliseconds; the prefixes that hash_ids "
    "says requests share are not made"
)
MOST_TIME = 1e20  # the largest timestamp, in any unit
LONGEST = 1 << 20  # the most tokens of one prompt or answer
EPOCHS = ((1e17, 1e9, "nanoseconds"), (1e14, 1e6, "microseconds"), (1e11, 1e3, "milliseconds"), (0.0, 1.0, "seconds"))
"""(least, divisor, unit): the unit of a timestamp that is at least this large. 1e11 seconds after 1970 is the year 5138."""

Line = tuple[int, Mapping[str, Any]]


def prompts(path: Path) -> list[Task]:
    """A task of the prompts in a file. Spec-Bench's question file becomes a task for each of its parts. Raises SettingError."""
    lines = json_lines("prompts", path)
    if not all("turns" in line and "category" in line for _, line in lines):
        return [_task(path.stem, "the prompts of a file", lines)]
    parts: dict[str, list[Line]] = {}
    for number, line in lines:
        category = str(line["category"])
        parts.setdefault("mt_bench" if category in MT_BENCH else category, []).append((number, line))
    return [_task(f"spec-bench {name}", "first turns of Spec-Bench's questions", of_part) for name, of_part in parts.items()]


def trace(path: Path) -> tuple[Task, tuple[float, ...]]:
    """The requests of a log in the order of their times, and those times in seconds after the first. The task's caution says
    which unit was assumed. Raises SettingError."""
    lines = json_lines("trace", path)
    iso = [type(line.get("timestamp")) is str for _, line in lines]
    require(all(iso) or not any(iso), "timestamp", path.name, "some are ISO 8601 and some are not; give all in one form")
    divisor, assumed = _unit(path, lines)
    timed = sorted(((_time(path, line, divisor), line) for line in lines), key=lambda one: one[0])
    task = _task(path.stem, "requests of a log, at their times", [line for _, line in timed], assumed)
    return task, tuple(at - timed[0][0] for at, _ in timed)


def _unit(path: Path, lines: Sequence[Line]) -> tuple[float, str | None]:
    """The divisor that makes `timestamp` seconds, and a caution about it, None for seconds."""
    found = [abs(value) for _, line in lines if (value := _number(line.get("timestamp"))) is not None]
    if not found:
        return 1.0, None
    if any("hash_ids" in line for _, line in lines):
        return 1000.0, MOONCAKE
    least, divisor, unit = next(epoch for epoch in EPOCHS if max(found) >= epoch[0])
    mixed = f"{min(found):.15g} and {max(found):.15g} cannot be of one unit; give all in seconds, or as timestamp_ms"
    require(min(found) >= least, "timestamp", path.name, mixed)
    return divisor, None if divisor == 1.0 else f"timestamps were read as {unit} since 1970, being too large for seconds"


def _task(name: str, about: str, lines: Sequence[Line], assumed: str | None = None) -> Task:
    made = [_prompt(f"{name} line {number}", number, line) for number, line in lines]
    lengths_only = any("input_length" in line for _, line in lines)
    caution = "; ".join(text for text in (MADE_UP if lengths_only else None, assumed) if text) or None
    return Task(name, about, made.__getitem__, fixed_length=lengths_only, caution=caution, variants=len(made))


def _prompt(where: str, number: int, line: Mapping[str, Any]) -> Prompt:
    given = [key for key in ("prompt", "messages", "turns", "input_length") if line.get(key)]
    require(len(given) == 1, "prompts", where, "give exactly one of prompt, messages, turns and input_length")
    kind, value, prediction = given[0], line[given[0]], line.get("prediction")
    limits = [_length(where, key, line[key]) for key in ("max_tokens", "output_length") if line.get(key) is not None]
    most = limits[0] if limits else None
    require(prediction is None or type(prediction) is str, "prediction", prediction, f"{where}: give a text")
    if kind == "prompt":
        require(type(value) is str, "prompts", where, "prompt is a text")
        return Prompt(where, text=value, prediction=prediction, max_tokens=most)
    if kind == "input_length":
        draw = random.Random(3000 + number)
        return Prompt(where, text=" ".join(draw.choices(words(), k=_length(where, kind, value))), max_tokens=most)
    if kind == "turns":
        texts = type(value) is list and all(type(turn) is str for turn in value)
        require(texts, "prompts", where, "turns is a list of texts")
        return Prompt(where, message=value[0], max_tokens=most)
    messages = type(value) is list and all(type(m) is dict and type(m.get("role")) is str and "content" in m for m in value)
    require(messages, "prompts", where, "messages is a list of objects with role and content")
    contents = all(type(m["content"]) in (str, list) for m in value)
    require(contents, "prompts", where, "the content of a message is a text, or a list of parts as in the OpenAI API")
    return Prompt(where, messages=tuple(value), prediction=prediction, max_tokens=most)


def _length(where: str, key: str, value: Any) -> int:
    """A number of tokens."""
    require(type(value) is int and 1 <= value <= LONGEST, key, value, f"{where}: give a whole number from 1 to {LONGEST}")
    return int(value)


def _time(path: Path, numbered: Line, divisor: float) -> float:
    """The time of a line, in seconds."""
    number, line = numbered
    if (milliseconds := _number(line.get("timestamp_ms"))) is not None:
        return milliseconds / 1000
    value = line.get("timestamp")
    if (seconds := _number(value)) is not None:
        return seconds / divisor
    if type(value) is str:
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            pass
    remedy = f"{path.name} line {number}: give timestamp in seconds or as ISO 8601, or timestamp_ms"
    raise SettingError("timestamp", value, remedy)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < MOST_TIME else None
