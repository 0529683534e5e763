"""Training data: the target's own answers to prompts, made with the engine in large batches.

    questions ──► Answerer ──► shard-00000.npz, shard-00001.npz, ... ──► gather ──► samples for training, samples held out

Each shard is written under another name and renamed when it is whole, so a run that is killed at any point leaves whole shards.
The next run answers what they lack. Which prompts are held out, and which are answered greedily, depends on the prompt and the
seed alone.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from forerun.engine.owner import Stream
from forerun.llm import LLM
from forerun.train import data
from forerun.train.data import Samples
from forerun.train.questions import Answering, Question, share
from forerun.types import LoadError, Request, SamplingParams, require

LOG = logging.getLogger("forerun")

MANIFEST, TASKS = "answers.json", "tasks.json"
SHARD = "shard-{:05}.npz"
SHARD_ANSWERS, SHARD_S = 2048, 20.0  # a shard is written at the latest after so many answers, or so many seconds
ENCODED = 512  # prompts that are turned into ids at once
WAITING = 2  # requests under way: so many times max_num_seqs
FIELDS = ("key", "turn", "prompt", "start", "ids")


class Watcher(Protocol):
    """Follows the progress of answering."""

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """done of total prompts are answered; tokens: produced in this run."""


class Answer(NamedTuple):
    """key: of its question. turn: which answer of the conversation it is, from 0. prompt, ids: the tokens before it, and its
    own with the stop token that ended it."""

    key: int
    turn: int
    prompt: Sequence[int]
    ids: Sequence[int]


class Made(NamedTuple):
    """Samples with the tasks of their questions: task[i] is the name of sample i's. left_out: answers that equal another one of
    the task, or that have fewer than two tokens."""

    samples: Samples
    task: tuple[str, ...]
    left_out: int


class Shards:
    """The answers in a folder. Raises LoadError for a damaged shard, SettingError if they were made with other settings."""

    def __init__(self, folder: Path, model: str, settings: Answering) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        own = {name: value for name, value in asdict(settings).items() if name != "held_out"}
        wanted = {"model": model, **own}
        path = folder / MANIFEST
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise LoadError("answers", str(path), f"is broken ({error}); give another folder") from None
            for name, value in wanted.items():
                there = found.get(name)
                remedy = f"the answers in {folder} were made with {there}; give that, or another folder"
                require(there == value, name, value, remedy)
        else:
            _replace(path, json.dumps(wanted, indent=2).encode() + b"\n")
        self.names = sorted(file.name for file in folder.glob("shard-*.npz"))

    def read(self) -> Iterator[Answer]:
        for name in self.names:
            path = self.folder / name
            try:
                with np.load(path) as found:
                    key, turn, prompt, start, ids = (found[field] for field in FIELDS)
            except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                raise LoadError("answers", str(path), f"cannot be read ({error}); delete it, and it is made again") from None
            for i, one in enumerate(key.tolist()):
                begin, end = int(start[i]), int(start[i + 1])
                middle = begin + int(prompt[i])
                yield Answer(one, int(turn[i]), ids[begin:middle], ids[middle:end])

    def add(self, answers: Sequence[Answer]) -> None:
        """Write a shard."""
        ids = [np.asarray((*one.prompt, *one.ids), np.int32) for one in answers]
        arrays = {
            "key": np.array([one.key for one in answers], np.int64),
            "turn": np.array([one.turn for one in answers], np.int32),
            "prompt": np.array([len(one.prompt) for one in answers], np.int32),
            "start": np.cumsum([0, *map(len, ids)], dtype=np.int64),
            "ids": np.concatenate(ids),
        }
        number = int(self.names[-1][6:11]) + 1 if self.names else 0
        name = SHARD.format(number)
        temporary = self.folder / f".{name}.{os.getpid()}"
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, self.folder / name)
        self.names.append(name)


class _Talk:
    """A conversation under way. answers: those that were given; prompt, ids: of the one that is being made."""

    def __init__(self, question: Question, answers: list[Answer]) -> None:
        self.question, self.answers = question, answers
        self.prompt: list[int] = []
        self.ids: list[int] = []

    @property
    def complete(self) -> bool:
        return len(self.answers) > len(self.question.later)


class Answerer:
    """Answers questions with an LLM, and writes the answers into shards. too_long: questions that were left out; failed: those
    whose request failed. An LLM without a prefix cache is faster here."""

    def __init__(self, llm: LLM, shards: Shards, settings: Answering, clock: Callable[[], float] = time.monotonic) -> None:
        self._llm, self._shards, self._settings, self._clock = llm, shards, settings, clock
        self._pending: list[Answer] = []
        self._written_at = clock()
        self.too_long = self.failed = 0

    def run(self, questions: Sequence[Question], watch: Watcher | None = None) -> None:
        """Answer what the shards lack. A failure or an interrupt keeps what was answered."""
        given: dict[int, list[Answer]] = {}
        for answer in self._shards.read():
            given.setdefault(answer.key, []).append(answer)
        every = (_Talk(one, sorted(given.get(one.key, []), key=lambda a: a.turn)) for one in questions)
        todo = deque(talk for talk in every if not talk.complete)
        given.clear()
        ready: deque[_Talk] = deque()
        live: dict[str, _Talk] = {}
        stream, begun, tokens = Stream(self._llm.owner), 0, 0
        room = WAITING * self._llm.engine.config.max_num_seqs
        # otherwise the collector walks over all prompts again and again
        gc.collect()
        gc.freeze()
        try:
            while todo or ready or live:
                fresh: list[Request] = []
                while len(live) < room and (ready or todo):
                    if not ready:
                        ready += self._prompted([todo.popleft() for _ in range(min(ENCODED, len(todo)))])
                        continue
                    talk, begun = ready.popleft(), begun + 1
                    fresh.append(self._request(str(begun), talk))
                    live[str(begun)] = talk
                if fresh:
                    stream.submit(fresh)
                again = []
                for _, event in next(stream, ()):
                    talk = live[event.request_id]
                    talk.ids += event.tokens
                    tokens += len(event.tokens)
                    if event.finish_reason is None:
                        continue
                    del live[event.request_id]
                    if event.finish_reason not in ("stop", "length"):
                        self.failed += 1
                        LOG.warning("a prompt was not answered: %s", event.error or event.finish_reason)
                        continue
                    talk.answers.append(Answer(talk.question.key, len(talk.answers), talk.prompt, talk.ids))
                    self._pending.append(talk.answers[-1])
                    if not talk.complete:
                        again.append(talk)
                ready.extendleft(self._prompted(again))
                if len(self._pending) >= SHARD_ANSWERS or self._clock() - self._written_at > SHARD_S:
                    self._write()
                if watch is not None:
                    watch(len(questions) - len(todo) - len(ready) - len(live), len(questions), tokens)
        finally:
            gc.unfreeze()
            stream.close()
            self._write()

    def _write(self) -> None:
        if self._pending:
            self._shards.add(self._pending)
        self._pending, self._written_at = [], self._clock()

    def _request(self, name: str, talk: _Talk) -> Request:
        s, key, turn = self._settings, talk.question.key, len(talk.answers)
        greedy = share(s.answer_seed, "greedy", key) < s.greedy
        seed = int(share(s.answer_seed, f"turn {turn}", key) * 2**48)
        temperature = 0.0 if greedy else s.temperature
        params = SamplingParams(temperature=temperature, max_tokens=s.answer_tokens, seed=seed, detokenize=False)
        return Request(name, tuple(talk.prompt), params, s.answer_tokens, seed, self._llm.prompts.limits.end_ids)

    def _prompted(self, talks: list[_Talk]) -> list[_Talk]:
        """The conversations with the ids of their next prompt, without those that are too long."""
        tokenizer, found = self._llm.tokenizer, []
        if not talks:
            return []
        for talk, ids in zip(talks, tokenizer.encode_rendered([self._text(talk) for talk in talks]), strict=True):
            talk.prompt, talk.ids = ids, []
            if 0 < len(ids) <= min(self._settings.prompt_tokens, self._llm.engine.max_model_len - self._settings.answer_tokens):
                found.append(talk)
            else:
                self.too_long += 1
        return found

    def _text(self, talk: _Talk) -> str:
        """The conversation up to the next answer, rendered by the chat template; without one, the user's only message."""
        tokenizer, question = self._llm.tokenizer, talk.question
        messages = list(question.messages)
        if not tokenizer.has_chat_template and len(messages) == 1 and not question.later:
            return str(messages[0]["content"])
        for answer, turn in zip(talk.answers, question.later, strict=False):
            messages.append({"role": "assistant", "content": tokenizer.decode(np.asarray(answer.ids).tolist())})
            messages.append({"role": "user", "content": turn})
        return tokenizer.render_chat(messages)


def gather(shards: Shards, questions: Sequence[Question], settings: Answering) -> tuple[Made, Made]:
    """The answers to these questions, in their order, for training and held out. Of equal answers of a task the first is kept.
    Raises SettingError if one of the two is empty."""
    place = {one.key: i for i, one in enumerate(questions)}
    answers = [one for one in shards.read() if one.key in place]
    answers.sort(key=lambda one: (place[one.key], one.turn))
    kept: tuple[list[Answer], list[Answer]] = ([], [])
    left_out, seen = [0, 0], set()
    for one in answers:
        side = share(settings.answer_seed, "held out", one.key) < settings.held_out
        content = (questions[place[one.key]].task, np.asarray(one.ids, np.int32).tobytes())
        if len(one.ids) < 2 or content in seen:
            left_out[side] += 1
            continue
        seen.add(content)
        kept[side].append(one)
    few = f"{len(answers)} answers are not enough for both; give more prompts, or another share than {settings.held_out}"
    require(all(kept), "held_out", settings.held_out, few)

    def made(side: int) -> Made:
        ids = [np.asarray((*one.prompt, *one.ids), np.int32) for one in kept[side]]
        start = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        prompt = np.array([len(one.prompt) for one in kept[side]], np.int32)
        tasks = tuple(questions[place[one.key]].task for one in kept[side])
        return Made(Samples(np.concatenate(ids), start, prompt), tasks, left_out[side])

    return made(0), made(1)


def save(folder: Path, made: Made) -> None:
    """Write samples and their tasks to a folder, which appears whole."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        data.save(temporary, made.samples)
        (temporary / TASKS).write_text(json.dumps({"task": made.task, "left_out": made.left_out}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path) -> Made:
    """What save wrote. Raises LoadError."""
    samples = data.load(folder)
    try:
        found = json.loads((folder / TASKS).read_text(encoding="utf-8"))
        task, left_out = tuple(map(str, found["task"])), int(found["left_out"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError("samples", str(folder / TASKS), f"cannot be read ({error}); make the folder again") from None
    if len(task) != len(samples.prompt):
        raise LoadError("samples", str(folder / TASKS), "does not fit the samples; make the folder again")
    return Made(samples, task, left_out)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
