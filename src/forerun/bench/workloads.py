"""What is asked: the tasks by name, each with many variants of its prompt. Knows no engine, arm or clock; what a model makes of
a prompt and how long it takes is measured elsewhere.

No two variants of a task are the same prompt, so that a repetition never finds its own answer in a prefix cache or in a
drafter's memory of earlier requests. Definitions: docs/measuring.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.bench.texts import FUNCTIONS, PROSE, READERS, TOPICS, WORDS
from forerun.types import require

VARIANTS = 64  # prompts of each task; a run of more requests than that would repeat itself


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of: message (a user's turn, for the chat template), messages (a whole conversation), text (continued as it stands),
    random_ids (so many random token ids: the engine's vocabulary decides which). name says task and variant. prediction: what a
    user who asks this could offer as the expected output, for the drafter `prediction`. max_tokens: the prompt's own limit."""

    name: str
    message: str | None = None
    text: str | None = None
    random_ids: int = 0
    seed: int = 0
    prediction: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """about: what it stands for, in half a line. fixed_length: the end-of-sequence token is ignored, so that every answer is
    as long as asked for. temperature 0 is greedy. caution: what its figures must not be taken for. variants: how
    many different prompts it has."""

    name: str
    about: str
    prompt: Callable[[int], Prompt]
    fixed_length: bool
    temperature: float = 0.0
    caution: str | None = None
    variants: int = VARIANTS

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _mixed(variant: int) -> tuple[int, int]:
    """Two indices below 8 that meet once in 64 variants, and differ from those of the variants nearby."""
    return variant % 8, (variant + variant // 8) % 8


def _copy(variant: int) -> Prompt:
    """The second copy is begun for the model: asked in a chat, small models summarise or go astray instead of copying, and
    what they then repeat is their own mistake."""
    prose, function = _mixed(variant)
    document = f"{PROSE[prose]}\n\n{FUNCTIONS[function].source}"
    begun = " ".join(PROSE[prose].split()[:6])
    text = f"Document {variant + 1}\n\n{document}\nThe same document, word for word\n\n{begun}"
    return Prompt(f"copy {variant}", text=text, prediction=document.removeprefix(begun))


def _words(variant: int) -> Prompt:
    draw = random.Random(1000 + variant)
    few = draw.sample(WORDS, 30)
    return Prompt(f"words {variant}", text=" ".join(draw.choice(few) for _ in range(200)))


def _random(variant: int) -> Prompt:
    return Prompt(f"random {variant}", random_ids=200, seed=2000 + variant)


def _return_code(variant: int) -> Prompt:
    function = FUNCTIONS[variant % 8]
    old, new = function.renames[variant // 8 % 4]
    new = new if variant < 32 else f"the_{new}"
    ask = f"Rename `{old}` to `{new}` in this Python code and return the whole code, with nothing else changed."
    return Prompt(f"return-code {variant}", message=f"{ask}\n\n```python\n{function.source}```", prediction=function.source)


def _edit_code(variant: int) -> Prompt:
    function = FUNCTIONS[variant % 8]
    turn = variant // 8
    edit, (old, new) = function.edits[turn % 3], function.renames[turn % 4]
    ask = f"Change this Python code: {edit}, and rename `{old}` to `{new}`. Return the whole changed code."
    return Prompt(f"edit-code {variant}", message=f"{ask}\n\n```python\n{function.source}```", prediction=function.source)


def _explain(variant: int) -> Prompt:
    topic, reader = TOPICS[variant % 32], READERS[variant // 32]
    return Prompt(f"explain {variant}", message=f"In three short paragraphs, explain {topic} to {reader}.")


TASKS = {
    task.name: task
    for task in (
        Task("copy", "repeat a page of prose and code word for word", _copy, fixed_length=True),
        Task("words", "continue 200 words drawn from 30", _words, fixed_length=True),
        Task(
            "random", "continue 200 random token ids, sampled at temperature 1", _random, fixed_length=True, temperature=1.0,
            caution="random ids resemble no real request: acceptance and speed on them do not carry over",
        ),
        Task("return-code", "rename a variable and return the whole code", _return_code, fixed_length=False),
        Task("edit-code", "change a few lines and return the whole code", _edit_code, fixed_length=False),
        Task("explain", "three short paragraphs on an everyday question", _explain, fixed_length=False),
    )
}  # fmt: skip

DEFAULT_TASKS = ("copy", "return-code", "edit-code", "explain")


def find(names: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks of these names. Raises SettingError for one that is unknown or named twice, and for none."""
    require(bool(names), "tasks", names, f"give at least one of {', '.join(TASKS)}")
    for name in names:
        require(name in TASKS, "tasks", name, f"give one or more of {', '.join(TASKS)}")
        require(names.count(name) == 1, "tasks", name, "name each task once")
    return tuple(TASKS[name] for name in names)
