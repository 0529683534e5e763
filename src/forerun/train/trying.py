"""Trying a drafter in the engine: greedy answers to held-out prompts, and how much of its drafts was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.llm import LLM, LoadedModel
from forerun.train.answers import Made
from forerun.types import SamplingParams

ROWS = {"cpu": 8, "cuda": 32}  # requests at once


@dataclass(frozen=True, slots=True)
class Tried:
    """On the prompts of a task. length: tokens of a verify step; accepted: by position, the share of verify steps whose draft
    was accepted up to and with it."""

    task: str
    prompts: int
    tokens: int
    steps: int
    length: float
    accepted: tuple[float, ...]


def speculation(method: str, folder: Path, k: int) -> dict[str, object]:
    """The engine's setting that uses a drafter."""
    return {"method": "draft_model" if method == "draft" else method, "model": str(folder), "num_speculative_tokens": k}


def held_prompts(held_out: Made, most: int) -> dict[str, list[list[int]]]:
    """The first prompts of each task, without repetition of a prompt."""
    ids, start, prompt = held_out.samples
    found: dict[str, list[list[int]]] = {}
    for i, task in enumerate(held_out.task):
        begin = int(start[i])
        one = np.asarray(ids[begin : begin + int(prompt[i])]).tolist()
        of_task = found.setdefault(task, [])
        if len(of_task) < most and one not in of_task:
            of_task.append(one)
    return found


def tried(
    loaded: LoadedModel, setting: Mapping[str, object], prompts: Mapping[str, Sequence[list[int]]], tokens: int
) -> list[Tried]:
    """Answers with the drafter that is in a folder. tokens: of an answer, at most. Every draft is verified to its end."""
    every = [one for of_task in prompts.values() for one in of_task]
    rows = ROWS[loaded.target.device.type]
    context = min(max(map(len, every)) + tokens + 1, loaded.target.max_positions)
    room = rows * (context + 64)
    llm = LLM(
        loaded, speculative_config=setting, max_num_seqs=rows, max_model_len=context, kv_cache_tokens=room,
        enable_prefix_caching=False, adaptive_drafts=False,
    )  # fmt: skip
    params, found = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False), []
    for task, of_task in prompts.items():
        fitting = [one for one in of_task if len(one) + tokens <= context]
        if not fitting:
            continue
        llm.reset_stats()
        outputs = llm.generate(fitting, params)
        drafts = llm.stats.drafts
        if drafts.steps:
            made = sum(len(output.token_ids) for output in outputs)
            length = drafts.acceptance_length or 1.0
            found.append(Tried(task, len(fitting), made, drafts.steps, length, tuple(drafts.joint)))
    return found


def whole(found: Sequence[Tried]) -> Tried | None:
    """All tasks together; None if nothing was tried."""
    if not found:
        return None
    steps = sum(one.steps for one in found)
    places = max(len(one.accepted) for one in found)
    accepted = [sum(one.steps * (*one.accepted, *[0.0] * places)[i] for one in found) / steps for i in range(places)]
    length = sum(one.steps * one.length for one in found) / steps
    return Tried("all", sum(one.prompts for one in found), sum(one.tokens for one in found), steps, length, tuple(accepted))
