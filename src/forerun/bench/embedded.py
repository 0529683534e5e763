"""Runs the arms on the engine in this process and writes down what happened. Knows how to send a prompt to an engine and in
which order; draws no conclusions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from forerun.bench import machine
from forerun.bench.arms import BASELINE, CONTROL, Arm
from forerun.bench.record import Answer, ArmRecord, Batch, Chunk, Counts, Difference, Load, Record, Settings, Times
from forerun.bench.workloads import Prompt, Task, find
from forerun.engine.stats import DraftStats
from forerun.types import SamplingParams, require

if TYPE_CHECKING:
    from forerun.llm import LLM, LoadedModel, Output


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. tasks: by name. candidates: the arms compared with the baseline. repetitions: measured batches of each arm
    and task, after `warmups` unmeasured ones of at most warmup_tokens. control: measure the baseline a second time as an arm
    of its own. Raises SettingError."""

    tasks: tuple[str, ...]
    candidates: tuple[Arm, ...]
    repetitions: int = 8
    warmups: int = 1
    warmup_tokens: int = 32
    max_tokens: int = 128
    concurrency: int = 1
    control: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        find(self.tasks)
        require(bool(self.candidates), "arms", (), "give at least one arm, for instance ngram")
        require(self.repetitions >= 1, "repetitions", self.repetitions, "give 1 or more, for instance 8")
        require(self.warmups >= 0, "warmups", self.warmups, "give 0 or more, for instance 1")
        require(self.warmup_tokens >= 1, "warmup_tokens", self.warmup_tokens, "give 1 or more, for instance 32")
        require(self.max_tokens >= 2, "max_tokens", self.max_tokens, "give 2 or more, for instance 128")
        require(self.concurrency >= 1, "concurrency", self.concurrency, "give 1 or more")
        prompts = (self.repetitions + self.warmups) * self.concurrency
        known = min(task.variants for task in find(self.tasks))
        most = known // self.concurrency - self.warmups
        require(
            prompts <= known,
            "repetitions",
            self.repetitions,
            f"with these warm-ups and this concurrency that is {prompts} prompts of a task, and there are {known} "
            "different ones; " + (f"give at most {most}" if most >= 1 else "lower the concurrency"),
        )

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The baseline first."""
        again = (Arm(CONTROL, None),) if self.control else ()
        return (Arm(BASELINE, None), *self.candidates, *again)

    @property
    def load(self) -> Load:
        return Load("concurrency", self.concurrency, requests=self.concurrency)

    @property
    def batches(self) -> int:
        """How many will be sent, warm-ups included."""
        return len(self.tasks) * len(self.arms) * (self.warmups + self.repetitions)


class Watcher(Protocol):
    """Who follows a run as it goes."""

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        """A batch is about to be sent."""

    def ended(self, batch: Batch) -> None:
        """It came back."""


def order_of(arms: int, repetition: int) -> list[int]:
    """In which order the arms run: A B C, then C B A, so that a slow drift of the machine favours none of them."""
    forward = list(range(arms))
    return forward if repetition % 2 == 0 else forward[::-1]


def measure(
    plan: Plan, model: str, build: Callable[[Arm], LLM], watcher: Watcher, clock: Callable[[], float] = time.perf_counter
) -> Record:
    """Run the plan. build makes an arm's engine; it is called for each task anew, so that no drafter remembers another task's
    answers. An interrupt from the keyboard ends the run and what was measured until then is returned as unfinished."""
    started, begin, load = datetime.now(UTC).isoformat(timespec="seconds"), clock(), machine.load_average()
    batches: list[Batch] = []
    differences: list[Difference] = []
    engines: dict[str, dict[str, Any]] = {}
    finished = True
    try:
        llms: dict[str, LLM] = {}
        for task in find(plan.tasks):
            llms.clear()  # before others are built, which want the memory
            llms = {arm.name: build(arm) for arm in plan.arms if arm.name != CONTROL}
            if plan.control:
                llms[CONTROL] = llms[BASELINE]
            engines.update({name: llm.settings() for name, llm in llms.items()})
            _measure_task(plan, task, llms, watcher, clock, batches)
            if task.greedy:
                differences += _differences(plan, task, llms[BASELINE], [b for b in batches if b.task == task.name])
    except KeyboardInterrupt:
        finished = False
    arms = tuple(
        ArmRecord(arm.name, arm.speculation.effective() if arm.speculation else None, engines.get(arm.name, {}))
        for arm in plan.arms
    )
    settings = Settings(
        model,
        plan.tasks,
        BASELINE,
        arms,
        plan.repetitions,
        plan.warmups,
        plan.warmup_tokens,
        plan.max_tokens,
        plan.concurrency,
        CONTROL if plan.control else None,
        plan.seed,
        (plan.load,),
    )
    seconds, here = clock() - begin, machine.describe(load)
    return Record(started, seconds, finished, machine.versions(), here, settings, tuple(batches), tuple(differences))


def _measure_task(
    plan: Plan, task: Task, llms: dict[str, LLM], watcher: Watcher, clock: Callable[[], float], batches: list[Batch]
) -> None:
    arms = {arm.name: arm for arm in plan.arms}
    names = list(arms)
    for round_ in range(plan.warmups + plan.repetitions):
        warmup = round_ < plan.warmups
        repetition = round_ - plan.warmups
        first = round_ * plan.concurrency
        prompts = [task.prompt(variant) for variant in range(first, first + plan.concurrency)]
        tokens = min(plan.warmup_tokens, plan.max_tokens) if warmup else plan.max_tokens
        for arm in (names[i] for i in order_of(len(names), repetition)):
            watcher.began(task.name, arm, repetition, warmup)
            params = [_params(task, prompt, tokens, plan.seed, arms[arm]) for prompt in prompts]
            answers, times, wall = _send(llms[arm], prompts, params, clock)
            batch = Batch(
                task.name, arm, repetition, len(batches), warmup, wall, answers, times, plan.load, _total(answers)
            )
            batches.append(batch)
            watcher.ended(batch)


def _send(
    llm: LLM, prompts: Sequence[Prompt], params: list[SamplingParams], clock: Callable[[], float]
) -> tuple[tuple[Answer, ...], Times, float]:
    """One batch, with nothing of an earlier one left in the prefix cache."""
    llm.clear_prefix_cache()
    llm.reset_stats()
    begin = clock()
    outputs = _ask(llm, prompts, params)
    wall = clock() - begin
    stats = llm.stats
    times = Times(stats.steps, stats.draft_s, stats.forward_s, stats.verify_s, stats.other_s, stats.cached_tokens)
    return tuple(_answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)), times, wall


def _params(task: Task, prompt: Prompt, max_tokens: int, seed: int, arm: Arm) -> SamplingParams:
    """The same for every arm, but that the drafter `prediction` is given one."""
    predicts = arm.speculation is not None and arm.speculation.method == "prediction"
    return SamplingParams(
        temperature=task.temperature,
        max_tokens=max_tokens,
        ignore_eos=task.fixed_length,
        seed=seed + prompt.seed,
        prediction=prompt.prediction if predicts else None,
    )


def _ask(llm: LLM, prompts: Sequence[Prompt], params: list[SamplingParams]) -> list[Output]:
    """All prompts of a batch are of one task, so all are of one kind."""
    if prompts[0].messages is not None:
        return llm.chat([prompt.messages or () for prompt in prompts], params)
    if prompts[0].message is not None:
        return llm.chat([[{"role": "user", "content": prompt.message or ""}] for prompt in prompts], params)
    return llm.generate([prompt.text if prompt.text is not None else _random_ids(llm, prompt) for prompt in prompts], params)


def _random_ids(llm: LLM, prompt: Prompt) -> list[int]:
    """Ids drawn evenly from the vocabulary, but for those that stand for structure (end of text, roles)."""
    special = llm.tokenizer.special_ids
    ordinary = [i for i in range(llm.model.target.vocab) if i not in special]
    return random.Random(prompt.seed).choices(ordinary, k=prompt.random_ids)


def _answer(prompt: Prompt, output: Output) -> Answer:
    completion = output.completions[0]
    stats, timing = completion.stats, completion.timing
    counts = Counts(
        stats.steps, stats.drafting_steps, stats.drafted, stats.accepted, tuple(stats.drafted_at), tuple(stats.accepted_at)
    )
    return Answer(
        prompt.name,
        len(output.prompt_ids),
        tuple(completion.token_ids),
        str(completion.finish_reason),
        timing.queued_s,
        timing.ttft_s,
        timing.e2e_s,
        counts,
        completion.text,
        chunks=tuple(Chunk(*piece) for piece in completion.pieces),
    )


def _total(answers: Sequence[Answer]) -> Counts:
    sum_ = DraftStats()
    for c in (answer.counts for answer in answers):
        sum_.add(DraftStats(c.steps, c.drafting_steps, c.drafted, c.accepted, list(c.drafted_at), list(c.accepted_at)))
    return Counts(
        sum_.steps, sum_.drafting_steps, sum_.drafted, sum_.accepted, tuple(sum_.drafted_at), tuple(sum_.accepted_at)
    )


def _differences(plan: Plan, task: Task, baseline: LLM, batches: list[Batch]) -> list[Difference]:
    """Where greedy answers left the baseline's. The baseline answers those prompts once more, up to there, with logprobs, so
    that its margin at that position is known; the timed runs carry no logprobs."""
    reference = {b.repetition: b for b in batches if b.arm == BASELINE and not b.warmup}
    found = []
    for batch in batches:
        if batch.warmup or batch.arm == BASELINE or batch.repetition not in reference:
            continue
        for index, (ours, theirs) in enumerate(zip(batch.answers, reference[batch.repetition].answers, strict=True)):
            if ours.token_ids == theirs.token_ids:
                continue
            position = first_difference(ours.token_ids, theirs.token_ids)
            gap = None
            if position < min(len(ours.token_ids), len(theirs.token_ids)):
                prompt = task.prompt((plan.warmups + batch.repetition) * plan.concurrency + index)
                gap = _gap(baseline, task, prompt, position, theirs.token_ids)
            found.append(Difference(task.name, batch.arm, batch.repetition, index, position, gap, plan.load))
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first position at which they differ; the shorter one's length if it is a prefix of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gap(llm: LLM, task: Task, prompt: Prompt, position: int, expected: tuple[int, ...]) -> float | None:
    """By how much the model preferred its token at `position` to the next best. None if it answers differently this time."""
    params = replace(_params(task, prompt, position + 1, 0, Arm(BASELINE, None)), logprobs=2)
    completion = _ask(llm, [prompt], [params])[0].completions[0]
    if tuple(completion.token_ids) != expected[: position + 1] or not completion.logprobs:
        return None
    last = completion.logprobs[position]
    others = [value for token, value in last.top if token != last.token]
    return last.logprob - others[0] if others else None


def engines(loaded: LoadedModel, concurrency: int, dtype: str, device: str, arms: int) -> Callable[[Arm], LLM]:
    """What builds an arm's engine over weights that are loaded once. Every arm gets the same settings but for the drafter.
    arms: how many there will be at once, to share a GPU's memory."""
    from forerun.llm import LLM

    return lambda arm: LLM(
        loaded, speculative_config=arm.speculation, dtype=dtype, device=device, max_num_seqs=concurrency,
        gpu_memory_utilization=0.9 / arms,
    )
