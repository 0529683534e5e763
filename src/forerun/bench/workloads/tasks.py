"""The tasks: each makes many different prompts of one kind. Knows no engine and no clock.

No two variants of a task are the same prompt, so that a repetition never finds its own answer in a prefix cache or in a
drafter's memory of earlier requests. docs/measuring.md says what each task stands for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.bench.workloads.texts import filled, texts, words
from forerun.checks import require

VARIANTS = 512  # prompts of most tasks


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of: message (one user message, for the chat template), messages (a conversation), text (to be continued),
    random_ids (the number of random token ids, drawn from the engine's vocabulary). name: the task and the variant.
    prediction: the expected output that a user could give with this prompt, for the drafter `prediction`. max_tokens: the
    prompt's own limit of output tokens, None: the plan's."""

    name: str
    message: str | None = None
    text: str | None = None
    random_ids: int = 0
    seed: int = 0
    prediction: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...] | None:
        """Its messages, None if it is not for the chat template."""
        return self.messages if self.message is None else ({"role": "user", "content": self.message},)


@dataclass(frozen=True, slots=True)
class Task:
    """A workload. about: a short description. prompt: makes the prompt of a variant, 0 to variants - 1; the prompts differ from
    each other. fixed_length: answers continue past the end-of-text token to the maximal length. temperature: 0 is greedy.
    caution: a warning about its figures, shown with every result."""

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


def _rotated(text: str, by: int, end: str) -> str:
    """The text with its first `by` sentences moved to its end. end: what ends a sentence."""
    sentences = text.rstrip().removesuffix(end.strip()).split(end)
    by %= len(sentences)
    return end.join(sentences[by:] + sentences[:by]) + end.rstrip() if by else text


def _copy(variant: int) -> Prompt:
    """A document and the first words of its copy. Small models that are asked in a chat to copy a text summarise it or lose
    their place. Each of the 64 pairs of page and function comes once in 64 variants."""
    english, functions = texts("english"), texts("functions")["functions"]
    page = _rotated(english["pages"][variant % 8], variant // 64, english["sentence_end"])
    document = f"{page}\n\n{functions[(variant + variant // 8) % 8]['source']}"
    begun = " ".join(page.split()[:6])
    text = f"Document {variant + 1}\n\n{document}\nThe same document, word for word\n\n{begun}"
    return Prompt(f"copy {variant}", text=text, prediction=document.removeprefix(begun))


def _words(variant: int) -> Prompt:
    draw = random.Random(1000 + variant)
    few = draw.sample(words(), 30)
    return Prompt(f"words {variant}", text=" ".join(draw.choice(few) for _ in range(200)))


def _random(variant: int) -> Prompt:
    return Prompt(f"random {variant}", random_ids=200, seed=2000 + variant)


def _return_code(variant: int) -> Prompt:
    function = texts("functions")["functions"][variant % 8]
    old, new = function["renames"][variant // 8 % 4]
    new = _numbered(new if variant % 64 < 32 else f"the_{new}", variant)
    ask = f"Rename `{old}` to `{new}` in this Python code and return the whole code, with nothing else changed."
    return _code(f"return-code {variant}", ask, function["source"])


def _edit_code(variant: int) -> Prompt:
    function, at = texts("functions")["functions"][variant % 8], variant // 8
    edit, (old, new) = function["edits"][at % 3], function["renames"][at % 4]
    ask = f"Change this Python code: {edit}, and rename `{old}` to `{_numbered(new, variant)}`. Return the whole changed code."
    return _code(f"edit-code {variant}", ask, function["source"])


def _numbered(name: str, variant: int) -> str:
    return name if variant < 64 else f"{name}_{variant // 64}"


def _code(name: str, ask: str, source: str) -> Prompt:
    return Prompt(name, message=f"{ask}\n\n```python\n{source}```", prediction=source)


def _explain(name: str, language: str, variant: int) -> Prompt:
    known = texts(language)
    topics, readers = known["topics"], known["readers"]
    reader, topic = divmod(variant, len(topics))
    return Prompt(f"{name} {variant}", message=filled(known["explain"], topic=topics[topic], reader=readers[reader]))


def _chat(name: str, language: str, variant: int) -> Prompt:
    known = texts(language)
    conversations, follow_ups = known["conversations"], known["follow_ups"]
    lap, rest = divmod(variant, len(conversations) * len(follow_ups))
    follow_up, conversation = divmod(rest, len(conversations))
    turns = [filled(turn, n=2 + variant + lap) for turn in conversations[conversation]["turns"]] + [follow_ups[follow_up]]
    messages = tuple({"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Prompt(f"{name} {variant}", messages=messages, prediction=turns[-2])


def _quotes(name: str, language: str, variant: int) -> Prompt:
    """Two of eight different pages: 56 pairs, then the same ones with the sentences of the first page rotated."""
    known = texts(language)
    pages, first = known["pages"], variant % 8
    second = pages[(first + 1 + variant // 8 % 7) % 8]
    text = f"{_rotated(pages[first], variant // 56, known['sentence_end'])}\n\n{second}"
    return Prompt(f"{name} {variant}", message=f"{filled(known['quotes'], number=variant + 1)}\n\n{text}", prediction=text)


def _agent(variant: int) -> Prompt:
    """Three of eight tool calls have been made. The fourth is asked for, in the same form."""
    draw, known = random.Random(4000 + variant), texts("agent")
    orders = [f"{draw.choice('ABCDEFGH')}{draw.randrange(10**5, 10**6)}-{draw.randrange(10, 100)}" for _ in range(8)]
    messages = [
        {"role": "system", "content": known["system"]},
        {"role": "user", "content": filled(known["ask"], orders=", ".join(orders))},
    ]
    for order in orders[:3]:
        result = filled(
            known["result"],
            order=order,
            status=draw.choice(known["statuses"]),
            carrier=draw.choice(known["carriers"]),
            month=f"{draw.randrange(1, 13):02d}",
            day=f"{draw.randrange(1, 29):02d}",
        )
        messages += [{"role": "assistant", "content": filled(known["call"], order=order)}, {"role": "user", "content": result}]
    return Prompt(f"agent {variant}", messages=tuple(messages), prediction=filled(known["call"], order=orders[3]))


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
        Task(
            "explain", "three short paragraphs on an everyday question", partial(_explain, "explain", "english"),
            fixed_length=False,
        ),
        Task("chat", "the next turn of a conversation", partial(_chat, "chat", "english"), fixed_length=False),
        Task(
            "quotes", "summarise two pages with word-for-word quotes", partial(_quotes, "quotes", "english"),
            fixed_length=False, variants=224,
        ),
        Task("agent", "the next tool call of an agent, in the form of those before it", _agent, fixed_length=False),
        Task(
            "chat-zh", "the next turn of a conversation in Chinese", partial(_chat, "chat-zh", "chinese"), fixed_length=False,
            variants=256,
        ),
        Task(
            "quotes-zh", "summarise two Chinese pages with quotes", partial(_quotes, "quotes-zh", "chinese"),
            fixed_length=False, variants=112,
        ),
        Task(
            "explain-zh", "three short paragraphs in Chinese", partial(_explain, "explain-zh", "chinese"), fixed_length=False,
            variants=192,
        ),
    )
}  # fmt: skip

DEFAULT_TASKS = ("copy", "return-code", "edit-code", "explain")


def coin_tosses() -> tuple[Prompt, ...]:
    """Two prompts, each a random sequence of two words, for which an n-gram drafter always has a draft. A few hundred draws of
    the next words show whether a verify rule favours the draft."""
    draw = random.Random(5000)
    return tuple(
        Prompt(f"tosses of {a} and {b}", text=" ".join(draw.choices((a, b), k=60)))
        for a, b in (("heads", "tails"), ("left", "right"))
    )


def find(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks of these names. Raises SettingError for an unknown name, for one given twice, and for an empty list."""
    require(bool(names), "tasks", names, f"give at least one of {', '.join(TASKS)}")
    for name in names:
        require(name in TASKS, "tasks", name, f"give one or more of {', '.join(TASKS)}")
        require(names.count(name) == 1, "tasks", name, "name each task once")
    return tuple(TASKS[name] for name in names)
