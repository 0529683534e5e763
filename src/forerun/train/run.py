"""A run of `forerun train`: answers, training with evaluations and checkpoints, export. Its folder has all that is needed to go
on.

    run.json       the settings          answers/     the target's answers      samples/      training and held out
    log.jsonl      losses, acceptance    checkpoint.pt                          head/         the drafter
    training.html  the learning curve
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from forerun.engine.memory import free_memory
from forerun.heads.config import HeadConfig
from forerun.llm import LLM, LoadedModel
from forerun.models.config import ModelConfig
from forerun.train import answers, curve, export, trying
from forerun.train.answers import Answerer, Made, Shards
from forerun.train.features import Features
from forerun.train.heads import Evaluation, Trainer
from forerun.train.log import Log
from forerun.train.options import Checking, Options
from forerun.train.questions import Answering, Question, Questions, read
from forerun.train.settings import Settings
from forerun.train.shape import Shape, drafter
from forerun.train.trying import Tried
from forerun.types import LoadError, require

LOG = logging.getLogger("forerun")
BATCH = {"cpu": 16, "cuda": 256}
LINES = 400  # lines of the log with losses, at most
AT_ONCE_S = 1.0  # between two looks at the metrics, which wait for the device
FREE = frozenset({*Checking.__dataclass_fields__, "batch", "feature_memory", "shard_bytes", "out", "device"})
"""Options that may differ when a run goes on."""
TRIAL_ANSWERS, TRIAL_STEPS, TRIAL_TOKENS = 2, 3, 2048  # of a dry run: batches of answers, steps, and their tokens on a CPU


class Watcher(Protocol):
    """Follows the progress of a run."""

    def begin(self, what: str, done: int, total: int) -> None:
        """A part of the run has begun, of which `done` was done before."""

    def at(self, done: int, detail: str) -> None:
        """Of the part that has begun."""


class Result(NamedTuple):
    """tried: with the engine, by task; evaluation: over the held-out answers; seconds: of each part of this run."""

    head: Path
    tried: list[Tried]
    evaluation: Evaluation
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take. Each value with how it is known: measured, computed or assumed."""

    rows: tuple[tuple[str, str, str], ...]


class Run:
    """A run in a folder, begun or gone on with."""

    def __init__(self, method: str, options: Options, watch: Watcher, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the prompts and loads the target. Raises SettingError, also for a setting with which the run in the folder was
        not begun."""
        assert options.out is not None and options.data is not None
        self.method, self.options, self._watch, self._clock = method, options, watch, clock
        self.answering, self.shape = options.part(Answering), options.part(Shape)
        self.training, self.checking = options.part(Settings), options.part(Checking)
        self.folder = options.out
        self.head = self.folder / "head"
        self.questions: Questions = read("data", options.data, options.most)
        key = hashlib.sha256(",".join(str(one.key) for one in self.questions.asked).encode()).hexdigest()[:16]
        self._settings = {"method": method, "prompts": key, **_plain(asdict(options))}
        self._check_begun()
        self.loaded: LoadedModel = LLM.load(options.target, options.dtype, options.device)
        target, tokenizer = self.loaded.target, self.loaded.tokenizer
        spare = sorted(tokenizer.special_ids - set(tokenizer.end_ids) - set(target.config.eos_ids))
        self.config: HeadConfig | ModelConfig = drafter(
            method, self.shape, target.config, target.vocab, spare[-1] if spare else target.vocab - 1
        )
        block = self.config.block_size if isinstance(self.config, HeadConfig) else 0
        self.k = min(self.checking.k, block - 1) if block else self.checking.k
        self.seconds: dict[str, float] = {}

    # ---- the folder

    @property
    def begun(self) -> bool:
        return (self.folder / "run.json").is_file()

    def _check_begun(self) -> None:
        """Raise SettingError if the folder has a run with other settings."""
        path = self.folder / "run.json"
        if not path.is_file():
            require(not self.folder.is_file(), "out", str(self.folder), "it is a file; give a folder")
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LoadError("out", str(path), f"is broken ({error}); give another folder") from None
        for name, value in self._settings.items():
            before = there.get(name)
            if name == "prompts":
                same = before == value
                require(same, "data", str(self.options.data), f"its prompts have changed since the run in {self.folder} began; "
                        "give the old file, or another folder with --out")  # fmt: skip
            elif name not in FREE and name != "data":
                remedy = f"the run in {self.folder} has {before}; give that, or another folder with --out"
                require(before == value, name, value, remedy)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        answers._replace(self.folder / "run.json", json.dumps(self._settings, indent=2).encode() + b"\n")

    # ---- parts

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - begin

    def make(self, steps: int | None = None) -> Result:
        """Do what is missing, and export the drafter. steps: stop after so many steps of this call; the result is then of the
        drafter as it is. An interrupt leaves a checkpoint."""
        self._begin()
        train, held_out = self.samples()
        with self._part("preparing"):
            trainer = self._trainer(train, held_out)
        log = Log(self.folder / "log.jsonl", after=trainer.made)
        try:
            self._train(trainer, held_out, log, steps)
        finally:
            with self._part("checkpoints"):
                self._save(trainer)
        with self._part("evaluation"):
            evaluation = trainer.evaluate(self.k)
            self._note(log, trainer.made, evaluation)
        self._export(trainer)
        found: list[Tried] = []
        if self.checking.engine_evaluations:
            found = self._try(held_out, log, trainer.made)
        for name, seconds in self.seconds.items():
            log.add("phase", name=name, seconds=round(seconds, 2), step=trainer.made)
        curve.write(self.folder)
        return Result(self.head, found, evaluation, dict(self.seconds))

    def samples(self) -> tuple[Made, Made]:
        """The answers, for training and held out; made if they are not there."""
        folders = self.folder / "samples" / "train", self.folder / "samples" / "held_out"
        if not all((folder / answers.TASKS).is_file() for folder in folders):
            with self._part("answers"):
                shards = self._answered(self.questions.asked, self.folder / "answers")
            with self._part("gathering"):
                folders[0].parent.mkdir(exist_ok=True)
                for folder, made in zip(folders, answers.gather(shards, self.questions.asked, self.answering), strict=True):
                    answers.save(folder, made)
        return answers.load(folders[0]), answers.load(folders[1])

    def _answered(self, asked: list[Question], folder: Path) -> Shards:
        name = self.loaded.name
        shards = Shards(folder, name, self.answering)
        llm = self._llm()
        answerer = Answerer(llm, shards, self.answering)
        begin, first = self._clock(), True

        def watch(done: int, total: int, tokens: int) -> None:
            nonlocal first
            if first:
                self._watch.begin("answers", done, total)
                first = False
            self._watch.at(done, f"{tokens / max(self._clock() - begin, 1e-6):,.0f} tokens/s")

        answerer.run(asked, watch)
        if answerer.too_long:
            LOG.info("%d prompts are longer than %d tokens and were left out", answerer.too_long, self.answering.prompt_tokens)
        del llm, answerer
        self._release()
        return shards

    def _llm(self) -> LLM:
        target = self.loaded.target
        context = min(self.answering.prompt_tokens + self.answering.answer_tokens, target.max_positions)
        rows = self.options.batch or BATCH[target.device.type]
        return LLM(
            self.loaded, max_num_seqs=rows, max_model_len=context, kv_cache_tokens=rows * (context + 16),
            enable_prefix_caching=False,
        )  # fmt: skip

    def _release(self) -> None:
        gc.collect()
        if self.loaded.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trainer(self, train: Made, held_out: Made) -> Trainer:
        self._watch.begin("the target's states", 0, 0)
        trainer = Trainer(self.loaded.target, self.config, train.samples, held_out.samples, self.training)
        path = self.folder / "checkpoint.pt"
        if path.is_file():
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a cut file raises many kinds
                why = f"cannot be read ({type(error).__name__}); delete it to begin training anew"
                raise LoadError("checkpoint", str(path), why) from None
            trainer.load_state_dict(state)
        return trainer

    def _save(self, trainer: Trainer) -> None:
        path = self.folder / "checkpoint.pt"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        torch.save(trainer.state_dict(), temporary)
        os.replace(temporary, path)

    def _train(self, trainer: Trainer, held_out: Made, log: Log, steps: int | None) -> None:
        total, every = self.training.steps, max(self.training.steps // LINES, 1)
        stop = total if steps is None else min(total, trainer.made + steps)
        offline = _spread(total, self.checking.evaluations)
        engine = _spread(total, self.checking.engine_evaluations)
        self._watch.begin("steps", trainer.made, total)
        looked = saved = begin = self._clock()
        first, window = trainer.made, []
        while trainer.made < stop:
            with self._part("steps"):
                trainer.step()
                due = trainer.made in offline or trainer.made in engine or trainer.made == stop
                if due or self._clock() - looked > AT_ONCE_S:
                    for one in trainer.metrics():
                        window.append(one)
                        if one.step % every == 0 or one.step == stop:
                            self._log_steps(log, window)
                            window = []
                    looked = self._clock()
                    speed = (trainer.made - first) / max(looked - begin, 1e-6)
                    self._watch.at(trainer.made, f"{_pace(speed)}{_loss(window)}")
            if trainer.made in offline and trainer.made < total:
                with self._part("evaluation"):
                    self._note(log, trainer.made, trainer.evaluate(self.k))
            if trainer.made in engine and trainer.made < total:
                self._export(trainer)
                self._try(held_out, log, trainer.made)
                self._watch.begin("steps", trainer.made, total)
            if self._clock() - saved > 60 * self.checking.checkpoint_minutes:
                with self._part("checkpoints"):
                    self._save(trainer)
                saved = self._clock()

    @staticmethod
    def _log_steps(log: Log, window: list[Any]) -> None:
        count, last = len(window), window[-1]
        means = {
            name: [round(sum(getattr(one, name)[i] for one in window) / count, 5) for i in range(len(last.accuracy))]
            for name in ("accuracy", "acceptance")
        }
        loss = sum(one.loss for one in window) / count
        log.add("step", step=last.step, loss=round(loss, 5), norm=round(last.norm, 5), rate=last.rate, **means)

    def _note(self, log: Log, step: int, evaluation: Evaluation) -> None:
        log.add(
            "offline", step=step, lengths=list(evaluation.lengths), accepted=list(evaluation.accepted),
            accuracy=list(evaluation.accuracy), samples=evaluation.samples,
        )  # fmt: skip
        curve.write(self.folder)

    def _export(self, trainer: Trainer) -> None:
        with self._part("export"):
            name, folder = self.loaded.name, self.loaded.folder
            export.save(self.head, self.config, trainer.weights(), name, folder, self.options.shard_bytes)

    def _try(self, held_out: Made, log: Log, step: int) -> list[Tried]:
        self._watch.begin("the drafter in the engine", 0, 0)
        with self._part("engine"):
            setting = trying.speculation(self.method, self.head, self.k)
            prompts = trying.held_prompts(held_out, self.checking.engine_prompts)
            found = trying.tried(self.loaded, setting, prompts, self.answering.answer_tokens)
            self._release()
        log.add("engine", step=step, k=self.k, tasks=[asdict(one) for one in found])
        return found

    # ---- before

    def estimate(self) -> Estimate:
        """Answers some prompts and makes a few steps, in a folder that is deleted, and says what the run will take."""
        import tempfile

        asked, target = self.questions.asked, self.loaded.target
        rows = self.options.batch or BATCH[target.device.type]
        with tempfile.TemporaryDirectory() as name:
            some = asked[: TRIAL_ANSWERS * rows]
            begin = self._clock()
            shards = self._answered(some, Path(name))
            seconds = self._clock() - begin
            given = list(shards.read())
        require(bool(given), "data", str(self.options.data), "none of the first prompts could be answered; see --prompt-tokens")
        answered, total = sum(len(one.ids) for one in given), sum(len(one.ids) + len(one.prompt) for one in given)
        turns = sum(1 + len(one.later) for one in asked)
        tokens = total / len(given) * turns
        count = "computed from the first answers"
        facts = [
            ("prompts", f"{len(asked):,}, and {self.questions.doubles:,} doubles left out", "counted"),
            ("answers", f"{turns:,} of {answered / len(given):.0f} tokens; with prompts {tokens / 1e6:.2f} M tokens", count),
            ("time for answers", _seconds(seconds * turns / len(given)), f"measured on {len(given)}, start-up included"),
        ]
        return Estimate((*facts, *self._training_estimate(given, tokens)))

    def _training_estimate(self, given: list[answers.Answer], tokens: float) -> list[tuple[str, str, str]]:
        import numpy as np

        target, s = self.loaded.target, self.training
        ids = [np.asarray((*one.prompt, *one.ids), np.int32) for one in given if len(one.ids) > 1]
        require(bool(ids), "data", str(self.options.data), "the first answers have fewer than two tokens; give other prompts")
        of_step = s.tokens if target.device.type == "cuda" else min(s.tokens, TRIAL_TOKENS)
        ids *= -(-2 * of_step // sum(map(len, ids)))
        prompts = [len(one.prompt) for one in given if len(one.ids) > 1]
        start = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        prompt = np.array((prompts * len(ids))[: len(ids)], np.int32)
        samples = answers.Samples(np.concatenate(ids), start, prompt)
        settings = Settings(**asdict(s) | {"tokens": of_step, "steps": 1000})
        self._watch.begin("steps to measure", 0, 2 + TRIAL_STEPS)
        trainer = Trainer(target, self.config, samples, None, settings)
        for _ in range(2 + TRIAL_STEPS):
            if trainer.made == 2:
                trainer.metrics()  # the first steps prepare
                begin = self._clock()
            trainer.step()
            self._watch.at(trainer.made, "")
        trainer.metrics()
        each = (self._clock() - begin) / TRIAL_STEPS * s.tokens / of_step
        count = trainer.parameters.count
        wide = 4 if target.dtype == torch.float32 else 6
        read = self.config.states if isinstance(self.config, HeadConfig) else ()
        states = Features.bytes(target, read, int(tokens))
        room = s.feature_memory
        if room is None:
            room = int(free_memory(target.device) * (0.75 if target.device.type == "cuda" else 0.25))
        kept = states if states <= room else 0
        activations = torch.cuda.max_memory_allocated() if target.device.type == "cuda" else 0
        how = "measured" if of_step == s.tokens else f"measured with {of_step} tokens a step"
        rows = [
            ("time for training", f"{_seconds(each * s.steps)}, {_pace(1 / each)}", how),
            ("epochs", f"{s.steps * s.tokens / tokens:.1f}", "computed"),
            ("parameters", f"{count / 1e6:.1f} M", "counted"),
            ("memory: target", f"{target.bytes / 1e9:.2f} GB", "counted"),
            ("memory: parameters, gradients, optimiser", f"{count * (wide + 12) / 1e9:.2f} GB", "computed"),
            ("memory: states", f"{kept / 1e9:.2f} GB" + ("" if kept else f"; {states / 1e9:.2f} GB do not fit"), "computed"),
            ("disk", f"{(count * 12 + count * 2 + 4 * tokens * 2) / 1e9:.2f} GB", "computed"),
        ]  # fmt: skip
        if activations:
            rows.insert(5, ("memory: peak of a few steps", f"{activations / 1e9:.2f} GB", "measured"))
        del trainer
        self._release()
        return rows


def _pace(steps: float) -> str:
    """Steps in a second."""
    return f"{steps:.1f} steps/s" if steps >= 1 or not steps else f"{1 / steps:.1f} s a step"


def _loss(window: list[Any]) -> str:
    return f", loss {window[-1].loss:.3f}" if window else ""


def _seconds(seconds: float) -> str:
    from forerun.bench.formats import duration

    return f"about {duration(seconds)}"


def _spread(total: int, count: int) -> frozenset[int]:
    """count of the steps 1 .. total, evenly spread, the last among them."""
    return frozenset(round(total * (i + 1) / count) for i in range(count)) - {0}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


