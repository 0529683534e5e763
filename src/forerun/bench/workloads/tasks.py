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

from forerun.bench.workloads.texts import FUNCTIONS, PROSE, READERS, TOPICS, WORDS
from forerun.bench.workloads.texts_chat import (
    AGENT_ASK,
    AGENT_CALL,
    AGENT_RESULT,
    AGENT_SYSTEM,
    CARRIERS,
    FOLLOW_UPS,
    FOLLOW_UPS_ZH,
    PROSE_ZH,
    READERS_ZH,
    STATUSES,
    TALKS,
    TALKS_ZH,
    TOPICS_ZH,
    Talk,
)
from forerun.types import require

VARIANTS = 512  # prompts of most tasks; a run of more requests than that would repeat itself


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


def _turned(text: str, by: int, end: str = ". ") -> str:
    """Its sentences, beginning with another one: what the 65th variant and those behind it differ in from the first 64."""
    sentences = text.rstrip().removesuffix(end.strip()).split(end)
    by %= len(sentences)
    return end.join(sentences[by:] + sentences[:by]) + end.rstrip() if by else text


def _copy(variant: int) -> Prompt:
    """The second copy is begun for the model: asked in a chat, small models summarise or go astray instead of copying, and
    what they then repeat is their own mistake."""
    prose, function = _mixed(variant)
    page = _turned(PROSE[prose], variant // 64)
    document = f"{page}\n\n{FUNCTIONS[function].source}"
    begun = " ".join(page.split()[:6])
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
    new = new if variant % 64 < 32 else f"the_{new}"
    new = new if variant < 64 else f"{new}_{variant // 64}"
    ask = f"Rename `{old}` to `{new}` in this Python code and return the whole code, with nothing else changed."
    return Prompt(f"return-code {variant}", message=f"{ask}\n\n```python\n{function.source}```", prediction=function.source)


def _edit_code(variant: int) -> Prompt:
    function = FUNCTIONS[variant % 8]
    turn = variant // 8
    edit, (old, new) = function.edits[turn % 3], function.renames[turn % 4]
    new = new if variant < 64 else f"{new}_{variant // 64}"
    ask = f"Change this Python code: {edit}, and rename `{old}` to `{new}`. Return the whole changed code."
    return Prompt(f"edit-code {variant}", message=f"{ask}\n\n```python\n{function.source}```", prediction=function.source)


def _explain(variant: int) -> Prompt:
    topic, reader = TOPICS[variant % 32], READERS[variant // 32]
    return Prompt(f"explain {variant}", message=f"In three short paragraphs, explain {topic} to {reader}.")


def _conversation(name: str, talks: tuple[Talk, ...], follow_ups: tuple[str, ...], variant: int) -> Prompt:
    lap, rest = divmod(variant, len(talks) * len(follow_ups))
    talk, follow_up = talks[rest % len(talks)], follow_ups[rest // len(talks)]
    turns = [turn.format(n=2 + variant + lap) for turn in talk.turns] + [follow_up]
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Prompt(f"{name} {variant}", messages=messages, prediction=turns[-2])


def _chat(variant: int) -> Prompt:
    return _conversation("chat", TALKS, FOLLOW_UPS, variant)


def _chat_zh(variant: int) -> Prompt:
    return _conversation("chat-zh", TALKS_ZH, FOLLOW_UPS_ZH, variant)


def _two_texts(texts: tuple[str, ...], variant: int, end: str) -> str:
    one, step = variant % 8, variant // 8 % 7
    lap = variant // 56
    return f"{_turned(texts[one], lap, end)}\n\n{texts[(one + 1 + step) % 8]}"


def _quotes(variant: int) -> Prompt:
    text = _two_texts(PROSE, variant, ". ")
    ask = (
        f"Text {variant + 1}. Summarise it in four sentences. Behind each, quote word for word, in quotation marks, the part "
        "of the text that it rests on."
    )
    return Prompt(f"quotes {variant}", message=f"{ask}\n\n{text}", prediction=text)


def _quotes_zh(variant: int) -> Prompt:
    text = _two_texts(PROSE_ZH, variant, "。")
    ask = f"文章{variant + 1}。用四句话概括这篇文章，每句话后面用引号一字不差地引用它所依据的原文。"
    return Prompt(f"quotes-zh {variant}", message=f"{ask}\n\n{text}", prediction=text)


def _agent(variant: int) -> Prompt:
    """Three calls have been made; the fourth of eight comes next, in the same form."""
    draw = random.Random(4000 + variant)
    orders = [f"{draw.choice('ABCDEFGH')}{draw.randrange(10**5, 10**6)}-{draw.randrange(10, 100)}" for _ in range(8)]
    messages = [
        {"role": "system", "content": AGENT_SYSTEM},
        {"role": "user", "content": AGENT_ASK.format(orders=", ".join(orders))},
    ]
    for order in orders[:3]:
        result = AGENT_RESULT.format(
            order=order, status=draw.choice(STATUSES), carrier=draw.choice(CARRIERS), month=draw.randrange(1, 13),
            day=draw.randrange(1, 29),
        )  # fmt: skip
        messages += [{"role": "assistant", "content": AGENT_CALL.format(order=order)}, {"role": "user", "content": result}]
    return Prompt(f"agent {variant}", messages=tuple(messages), prediction=AGENT_CALL.format(order=orders[3]))


def _explain_zh(variant: int) -> Prompt:
    topic, reader = TOPICS_ZH[variant % len(TOPICS_ZH)], READERS_ZH[variant // len(TOPICS_ZH)]
    return Prompt(f"explain-zh {variant}", message=f"用三个短段落向{reader}解释{topic}。")


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
        Task("chat", "the next turn of a conversation", _chat, fixed_length=False),
        Task("quotes", "summarise two pages with word-for-word quotes", _quotes, fixed_length=False, variants=224),
        Task("agent", "the next tool call of an agent, in the form of those before it", _agent, fixed_length=False),
        Task("chat-zh", "the next turn of a conversation in Chinese", _chat_zh, fixed_length=False, variants=256),
        Task("quotes-zh", "summarise two Chinese pages with quotes", _quotes_zh, fixed_length=False, variants=112),
        Task(
            "explain-zh", "three short paragraphs in Chinese", _explain_zh, fixed_length=False,
            variants=len(TOPICS_ZH) * len(READERS_ZH),
        ),
    )
}  # fmt: skip

DEFAULT_TASKS = ("copy", "return-code", "edit-code", "explain")


def coin_tosses() -> tuple[Prompt, ...]:
    """Two prompts whose next words are one of two, and which an n-gram drafter always has a draft for: what is sampled behind
    them shows within a few hundred draws whether a verify rule favours the draft."""
    draw = random.Random(5000)
    return tuple(
        Prompt(f"tosses of {a} and {b}", text=" ".join(draw.choices((a, b), k=60)))
        for a, b in (("heads", "tails"), ("left", "right"))
    )


def find(names: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks of these names. Raises SettingError for one that is unknown or named twice, and for none."""
    require(bool(names), "tasks", names, f"give at least one of {', '.join(TASKS)}")
    for name in names:
        require(name in TASKS, "tasks", name, f"give one or more of {', '.join(TASKS)}")
        require(names.count(name) == 1, "tasks", name, "name each task once")
    return tuple(TASKS[name] for name in names)
