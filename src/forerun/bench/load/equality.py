"""Whether the arms give the same answers: greedy answers compared with the baseline's, and first tokens sampled at
temperature 1. Sends requests of its own where they are needed; draws no conclusion.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from forerun.bench.engines.arms import BASELINE
from forerun.bench.engines.endpoint import Request, TokenLogprob
from forerun.bench.engines.subject import Subject, names, request_of
from forerun.bench.load import sending as loads
from forerun.bench.load.plan import Plan
from forerun.bench.records.record import Answer, Batch, Difference, FirstTokens, Load
from forerun.bench.workloads.tasks import Prompt, Task, coin_tosses


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first position at which two sequences differ; the length of the shorter one if it is a prefix of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def differences(
    plan: Plan, subject: Subject, batches: Sequence[Batch], clock: Callable[[], float]
) -> AsyncIterator[Difference]:
    """The greedy answers that differ from the baseline's, compared by tokens where both have ids, else by characters. The
    baseline answers these prompts again with logprobs, which timed requests do not have, to learn its margin at the
    difference."""
    tasks = {task.name: task for task in plan.tasks}
    reference = {(b.task, b.load, b.repetition): b for b in batches if b.arm == BASELINE and not b.warmup}
    for batch in batches:
        theirs = reference.get((batch.task, batch.load, batch.repetition))
        if batch.warmup or batch.arm == BASELINE or theirs is None or subject.temperature(tasks[batch.task]) != 0.0:
            continue
        for index, (a, b) in enumerate(zip(batch.answers, theirs.answers, strict=True)):
            if a.failed or b.failed:
                continue
            by_token = bool(a.token_ids and b.token_ids)
            ours, other = (a.token_ids, b.token_ids) if by_token else (a.text, b.text)
            if ours == other:
                continue
            position = first_difference(ours, other)
            gap = None
            if position < min(len(ours), len(other)):
                variant = plan.first_variant(batch.load, batch.repetition + plan.warmups) + index
                prompt = tasks[batch.task].prompt(variant)
                gap = await _gap(plan, subject, tasks[batch.task], prompt, b, position, by_token, clock)
            unit: Literal["token", "character"] = "token" if by_token else "character"
            yield Difference(batch.task, batch.arm, batch.repetition, index, position, gap, batch.load, unit)


async def _gap(
    plan: Plan, subject: Subject, task: Task, prompt: Prompt, expected: Answer, position: int, by_token: bool,
    clock: Callable[[], float],
) -> float | None:  # fmt: skip
    """The baseline's margin at this position; None if it answers differently this time or gives no logprobs."""
    side = subject.sides[0]
    await subject.up(side)
    request = request_of(plan, subject, task, prompt, 0, False, "gap")
    request = replace(request, logprobs=2, max_tokens=position + 1 if by_token else request.max_tokens)
    now = clock()
    exchange = await loads.exchange(side.endpoint, request, now, clock)
    answer = loads.answer_of(request, exchange, now)
    got = [one for piece in exchange.pieces for one in piece.logprobs]
    if answer.failed or not got:
        return None
    if by_token:
        same = answer.token_ids == expected.token_ids[: position + 1] and len(got) > position
        return margin_at(got[position]) if same else None
    if answer.text[: position + 1] != expected.text[: position + 1]:
        return None
    at = 0
    for one in got:
        if at + len(one.token) > position:
            return margin_at(one)
        at += len(one.token)
    return None


async def draws(plan: Plan, subject: Subject, clock: Callable[[], float]) -> AsyncIterator[FirstTokens]:
    """The first two tokens of many samples of each arm, after the same prompts at temperature 1. The first token has no
    draft, the second is verified; the pair counts as one draw. The arms have different seeds, so that their draws are
    independent."""
    for index, side in enumerate(subject.sides if plan.samples else ()):
        await subject.up(side)
        for prompt in coin_tosses():
            first = plan.seed + 10_000 * (index + 1)
            requests = [
                Request(prompt.name, 3, text=prompt.text, temperature=1.0, seed=first + i, ignore_eos=True)
                for i in range(plan.samples)
            ]
            load = Load(concurrency=max(one.concurrency for one in plan.loads), requests=plan.samples)
            answers, _ = await loads.drive(side.endpoint, requests, load, None, clock)
            tokens = [" ".join(map(str, a.token_ids[:2])) or a.text for a in answers if not a.failed]
            yield FirstTokens(names(plan, subject)[index], prompt.name, 1.0, tuple(tokens))


def margin_at(one: TokenLogprob) -> float | None:
    """The log-probability of the chosen token minus that of the best other token; None if no other was reported."""
    others = [value for token, value in one.top if token != one.token]
    return one.logprob - max(others) if others else None
