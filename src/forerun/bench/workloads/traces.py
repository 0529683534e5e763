"""Tasks out of the user's own files: prompts, request logs with times, and Spec-Bench's questions. Knows those formats, JSON
Lines all of them; makes no prompt up but where a log has lengths only.

A line is an object with one of: `prompt` (text to continue), `messages` (a conversation, as in the OpenAI API), `turns` (a list
of user messages, Spec-Bench's; the first is asked), `input_length` (tokens; a made-up text of about that length). Optional:
`max_tokens` or `output_length`, `prediction`, `category`, and for a trace `timestamp` (seconds, or ISO 8601) or `timestamp_ms`.
Timestamps are milliseconds if the lines have `hash_ids`, as in Mooncake's traces, or if they are too large for seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from forerun.bench.workloads.tasks import Prompt, Task
from forerun.bench.workloads.texts import WORDS
from forerun.textfile import json_lines
from forerun.types import SettingError, require

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MADE_UP = "the log has lengths only, so the prompts are made-up words: acceptance on them does not carry over"
MOONCAKE = (
    "the log has hash_ids, as Mooncake's traces have, so its timestamps were read as milliseconds; the prefixes that hash_ids "
    "says requests share are not made"
)
MOST_TIME = 1e20  # of a timestamp, whatever its unit
LONGEST = 1 << 20  # tokens of one prompt or answer
EPOCHS = ((1e11, 1e3, "milliseconds"), (1e14, 1e6, "microseconds"), (1e17, 1e9, "nanoseconds"))
"""(least, divisor, unit): a timestamp of so much is a time of day since 1970 in that unit; in seconds it would be year 5138."""

Line = tuple[int, Mapping[str, Any]]


def prompts(path: Path) -> list[Task]:
    """A task of the prompts in a file; of Spec-Bench's question file, one for each of its parts. Raises SettingError."""
    lines = json_lines("prompts", path)
    if not all("turns" in line and "category" in line for _, line in lines):
        return [_task(path.stem, "the prompts of a file", lines)]
    parts: dict[str, list[Line]] = {}
    for number, line in lines:
        category = str(line["category"])
        parts.setdefault("mt_bench" if category in MT_BENCH else category, []).append((number, line))
    return [_task(f"spec-bench {name}", "first turns of Spec-Bench's questions", of_part) for name, of_part in parts.items()]


def trace(path: Path) -> tuple[Task, tuple[float, ...]]:
    """The requests of a log in the order of their times, and those times in seconds from the first. What was assumed of their
    unit is in the task's caution. Raises SettingError."""
    lines = json_lines("trace", path)
    words = [type(line.get("timestamp")) is str for _, line in lines]
    require(all(words) or not any(words), "timestamp", path.name, "some are ISO 8601 and some are not; give all in one form")
    divisor, assumed = _unit(path, lines)
    timed = [(_time(path, number, line, divisor), number, line) for number, line in lines]
    timed.sort(key=lambda one: one[0])
    first = timed[0][0]
    task = _task(path.stem, "requests of a log, at their times", [(number, line) for _, number, line in timed], assumed)
    return task, tuple(at - first for at, _, _ in timed)


def _unit(path: Path, lines: Sequence[Line]) -> tuple[float, str | None]:
    """By what `timestamp` is divided to be seconds, and what to say of it; None if they are seconds, as documented."""
    found = [abs(value) for _, line in lines if (value := _number(line.get("timestamp"))) is not None]
    if not found:
        return 1.0, None
    if any("hash_ids" in line for _, line in lines):
        return 1000.0, MOONCAKE
    least, divisor, unit = next((epoch for epoch in reversed(EPOCHS) if max(found) >= epoch[0]), (0.0, 1.0, "seconds"))
    mixed = f"{min(found):.15g} and {max(found):.15g} cannot be of one unit; give all in seconds, or as timestamp_ms"
    require(min(found) >= least, "timestamp", path.name, mixed)
    return divisor, None if divisor == 1.0 else f"timestamps were read as {unit} since 1970, being too large for seconds"


def _task(name: str, about: str, lines: Sequence[Line], assumed: str | None = None) -> Task:
    made = [_prompt(name, number, line) for number, line in lines]
    lengths_only = any("input_length" in line for _, line in lines)
    ask: Callable[[int], Prompt] = made.__getitem__
    cautions = [text for text in (MADE_UP if lengths_only else None, assumed) if text]
    return Task(name, about, ask, fixed_length=lengths_only, caution="; ".join(cautions) or None, variants=len(made))


def _prompt(name: str, number: int, line: Mapping[str, Any]) -> Prompt:
    where = f"{name} line {number}"
    given = [key for key in ("prompt", "messages", "turns", "input_length") if line.get(key)]
    require(len(given) == 1, "prompts", where, "give exactly one of prompt, messages, turns and input_length")
    value, most, prediction = line[given[0]], _most(where, line), line.get("prediction")
    require(prediction is None or type(prediction) is str, "prediction", prediction, f"{where}: give a text")
    if given[0] == "prompt":
        require(type(value) is str, "prompts", where, "prompt is a text")
        return Prompt(where, text=value, prediction=prediction, max_tokens=most)
    if given[0] == "input_length":
        fits = type(value) is int and 1 <= value <= LONGEST
        require(fits, "input_length", value, f"{where}: give a whole number from 1 to {LONGEST}")
        draw = random.Random(3000 + number)
        return Prompt(where, text=" ".join(draw.choices(WORDS, k=value)), max_tokens=most)
    if given[0] == "turns":
        texts = type(value) is list and all(type(turn) is str for turn in value)
        require(texts, "prompts", where, "turns is a list of texts")
        return Prompt(where, message=value[0], max_tokens=most)
    require(
        type(value) is list and all(type(m) is dict and type(m.get("role")) is str and "content" in m for m in value),
        "prompts",
        where,
        "messages is a list of objects with role and content",
    )
    parts = all(type(m["content"]) in (str, list) for m in value)
    require(parts, "prompts", where, "the content of a message is a text, or a list of parts as in the OpenAI API")
    return Prompt(where, messages=tuple(value), prediction=prediction, max_tokens=most)


def _most(where: str, line: Mapping[str, Any]) -> int | None:
    """The longest that the answer may be; None: the run's own limit holds."""
    for key in ("max_tokens", "output_length"):
        if (value := line.get(key)) is not None:
            fits = type(value) is int and 1 <= value <= LONGEST
            require(fits, key, value, f"{where}: give a whole number from 1 to {LONGEST}")
            return int(value)
    return None


def _time(path: Path, number: int, line: Mapping[str, Any], divisor: float) -> float:
    """In seconds from some moment."""
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
    raise SettingError(
        "timestamp", value, f"{path.name} line {number}: give timestamp in seconds or as ISO 8601, or timestamp_ms"
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < MOST_TIME else None
