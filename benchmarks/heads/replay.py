"""Replays recorded drafts of a head through the real engine with the padded layout, and counts the time that the policy would
have taken on one H200. Answers and drafts come from the recording, the time of each launch from a table of measured steps, and
all else is the engine's own: scheduler, policy, layouts, learned chances, look-up. A replay takes seconds and no GPU.

    python benchmarks/heads/replay.py record --head DIR --tasks tasks.json --out drafts.pt [--k 4] [--prompts 64] [--tokens 200]
    python benchmarks/heads/replay.py replay --drafts drafts.pt --out record.json [--rows 1,8,32] [--prompts 64]

record: lets the default model answer on the CPU, one token a step, and keeps what the head drafts after each token. It takes
some minutes. tasks.json: made by benchmarks/heads/task_ids.py. replay: tokens a second of decode launches, for plain decoding,
the look-up alone, whole drafts, adaptive drafts, both with a look-up beside the head, and a head that is never right. chances:
for each place in a draft and tenth of the expected chance: tokens drafted, their mean chance, and the share that was right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter, Needs, Rows, RowState, Stateless
from forerun.drafters.measured import DeviceMeasured, LookUp
from forerun.drafters.ngram import DeviceNgram
from forerun.engine.cycle import PROMPT, Key
from forerun.engine.engine import Engine
from forerun.engine.text import NoText
from forerun.llm import LLM, load_head
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import Forward, Target
from forerun.types import Draft, Request, SamplingParams

VOCAB = 49152
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}

# Milliseconds of a captured step of the default model on one H200 at 512 tokens of context (docs/log.md)
POSITIONS = ((1, 0.43), (5, 0.437), (8, 0.445), (16, 0.473), (17, 0.74), (64, 0.75), (128, 0.817), (160, 0.873), (256, 1.22))
EACH_ROW = 0.004  # for each row behind the fourth: attention
ENTRIES = ((1, 0.033), (8, 0.043), (32, 0.045))  # of a head, by rows
RESTS = 0.004  # of a step that the head does not observe: two small launches
PASSES = ((1, 0.107), (8, 0.1), (32, 0.19))  # four of them, by rows


def h200_ms(key: Key, head: bool) -> float:
    """Milliseconds of a decode launch. head: its drafter is a head."""
    total = float(np.interp(key.tokens, *zip(*POSITIONS, strict=True))) + EACH_ROW * max(key.rows - 4, 0)
    if head and not key.observes:
        total += RESTS
    elif head:
        total += float(np.interp(key.rows, *zip(*ENTRIES, strict=True)))
        if key.passes:
            total += float(np.interp(key.rows, *zip(*PASSES, strict=True)))
    return total


# Record


def record(head: Path, tasks: dict[str, list[list[int]]], k: int, tokens: int) -> dict[str, Any]:
    """By task the answers, and for each the drafts [n,K] and their survival [n,K] after each of its tokens."""
    llm = LLM(None, dtype="bfloat16", device="cpu", max_model_len=64, kv_cache_tokens=64)
    method = head.name
    speculation = Speculation.parse({"method": method, "model": str(head), "num_speculative_tokens": k})
    assert speculation is not None
    weights, target = load_head(speculation, llm.model), llm.model.target
    config = EngineConfig(
        max_model_len=512, kv_cache_tokens=32 * 512, max_num_seqs=32, enable_prefix_caching=False, speculation=speculation
    )  # fmt: skip

    def make(state: RowState, mirror: RowState, sampling: Any, kv: Any, padded: bool) -> Drafter:
        from forerun.drafters.table import TABLE, DrafterContext

        return TABLE[method](speculation, DrafterContext(state, mirror, sampling, kv, config, padded, VOCAB, None, weights))

    it = Engine(target, config, make, NoText, padded=True)
    runner: Any = it._step.runner
    runner.cost = lambda keys, context: [1.0 if key.passes and not key.width else 9e9 for key in keys]  # drafts are made only
    drafter: Any = it.drafter
    real, kept = drafter._model.propose, defaultdict[int, dict[int, tuple[Tensor, Tensor]]](dict)

    def spied(rows: Rows) -> Draft:
        draft = real(rows)
        for i, slot in enumerate(rows.slot.tolist()):
            if rows.k[i]:
                kept[slot][int(it.state.length[slot])] = draft.tokens[i].clone(), draft.confidence[i].clone()
        return draft

    drafter._model.propose = spied
    found: dict[str, Any] = {}
    for task, prompts in tasks.items():
        began, answers, drafts = time.perf_counter(), dict[str, list[int]](), dict[str, dict[int, Any]]()
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        for i, ids in enumerate(prompts):
            it.add(Request(str(i), tuple(ids), params, tokens, 0, llm.end_ids))
            answers[str(i)] = []
        slots = dict[str, int]()
        while it.has_work:
            for s in it.scheduler.running:
                if slots.get(s.request.id) != s.slot:
                    slots[s.request.id] = s.slot
                    kept[s.slot] = {}
            for event in it.step():
                answers[event.request_id] += event.tokens
                if event.finish_reason:
                    drafts[event.request_id] = dict(kept[slots[event.request_id]])
        requests = []
        for i, ids in enumerate(prompts):
            own, answer = drafts[str(i)], answers[str(i)]
            at = [own.get(len(ids) + n, (torch.zeros(k, dtype=torch.int64), torch.zeros(k))) for n in range(1, len(answer))]
            both = [torch.stack(parts) for parts in zip(*at, strict=True)] if at else [torch.zeros(0, k)] * 2
            requests.append({"prompt": ids, "answer": answer, "drafts": both[0].int(), "survival": both[1]})
        found[task] = requests
        tokens_made = sum(map(len, answers.values()))
        print(f"{task}: {len(prompts)} requests, {tokens_made} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    return found


# Replay


class Script:
    """What the requests answer and what is drafted, by slot and length. truth: [S,L] int64; drafts: [S,L,K] int64; survival:
    [S,L,K]."""

    def __init__(self, requests: Sequence[dict[str, Any]], slots: int, length: int, k: int) -> None:
        self.requests = requests
        self.truth = torch.zeros(slots, length, dtype=torch.int64)
        self.drafts, self.survival = torch.zeros(slots, length, k, dtype=torch.int64), torch.zeros(slots, length, k)

    def admit(self, slot: int, number: int) -> None:
        one = self.requests[number]
        text = torch.tensor([*one["prompt"], *one["answer"]])
        self.truth[slot, : len(text)] = text
        begin, many = len(one["prompt"]) + 1, len(one["drafts"])
        self.drafts[slot, begin : begin + many] = one["drafts"].long()
        self.survival[slot, begin : begin + many] = one["survival"]


class Replayed(Stateless):
    """The recorded head. never: all its drafts are wrong, and it is as sure of them as the head was."""

    needs = Needs(device=True, pass_tokens=1)

    def __init__(self, state: RowState, script: Script, never: bool) -> None:
        self._state, self._script, self._never = state, script, never

    def admit(self, slot: int, request: Request) -> None:
        self._script.admit(slot, int(request.id))

    def propose(self, rows: Rows) -> Draft:
        at, script = self._state.length[rows.slot].clamp(max=self._script.truth.shape[1] - 1), self._script
        tokens = script.drafts[rows.slot, at]
        if self._never:
            behind = (at[:, None] + torch.arange(tokens.shape[1])).clamp(max=script.truth.shape[1] - 1)
            tokens = torch.where(tokens == script.truth[rows.slot[:, None], behind], tokens + 1, tokens)
        return Draft(tokens % VOCAB, rows.k.clone(), None, script.survival[rows.slot, at])


class ScriptedNgram(DeviceNgram):
    script: Script

    def admit(self, slot: int, request: Request) -> None:
        super().admit(slot, request)
        self.script.admit(slot, int(request.id))


class Admits(Stateless):
    """No drafts."""

    needs = Needs(device=True)

    def __init__(self, script: Script) -> None:
        self._script = script

    def admit(self, slot: int, request: Request) -> None:
        self._script.admit(slot, int(request.id))

    def propose(self, rows: Rows) -> Draft:
        return Draft(rows.slot.new_zeros(len(rows.slot), 0), torch.zeros_like(rows.slot))


def tiny() -> Target:
    shape = ModelConfig(VOCAB, 8, 8, 1, 1, 1, 8, 1024, 1e-5, Rope(1e4), tied=True)
    return Target.random(shape, torch.float32, "cpu", seed=3)


ARMS: dict[str, tuple[str, bool, bool]] = {  # kind, adaptive, look-up beside a head
    "plain": ("plain", True, False),
    "ngram": ("ngram", True, False),
    "whole": ("head", False, False),
    "adaptive": ("head", True, False),
    "whole both": ("head", False, True),
    "both": ("head", True, True),
    "never": ("never", True, False),
}


class Tally:
    """What a replay did. ms: of all decode launches; launches: by kind, how often; chances: by place and expected chance, in
    tenths: drafted tokens whose predecessors were right, the sum of their expected chances, and how many were right."""

    def __init__(self) -> None:
        self.ms, self.tokens, self.rows, self.drafted, self.accepted = 0.0, 0, 0, 0, 0
        self.launches = defaultdict[str, int](int)
        self.chances = defaultdict[tuple[int, int], list[float]](lambda: [0, 0.0, 0])

    def add(self, key: Key, ms: float, counts: Tensor) -> None:
        self.ms += ms
        self.tokens += int(counts[:, 0].sum())
        self.rows += int((counts[:, 0] > 0).sum())
        self.drafted += int(counts[:, 1].sum())
        self.accepted += int(counts[:, 2].sum())
        kind = "" if key.passes else ", no passes" if key.observes else ", rests"
        self.launches[f"{key.layout} {key.tokens - key.rows}{kind}"] += 1

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.tokens / self.ms * 1000), "ms": round(self.ms, 2), "tokens": self.tokens,
            "acceptance_length": round(self.tokens / max(self.rows, 1), 3), "drafted": self.drafted, "accepted": self.accepted,
            "launches": dict(sorted(self.launches.items())),
        }  # fmt: skip

    def table(self) -> list[list[float]]:
        cells = sorted(self.chances.items())
        return [[place, n, round(expected / n, 3), round(right / n, 3)] for (place, _), (n, expected, right) in cells if n > 20]


@torch.inference_mode()
def replay(requests: Sequence[dict[str, Any]], k: int, arm: str, rows: int) -> Tally:
    kind, adaptive, look_up = ARMS[arm]
    speculation = None
    if kind == "ngram":
        speculation = Speculation("ngram", k, *LOOK_UP.values())
    elif kind != "plain":
        speculation = Speculation("eagle3", k, *(LOOK_UP.values() if look_up else (None, None)), model="recorded")
    config = EngineConfig(
        max_model_len=512, kv_cache_tokens=(rows + 1) * 512, max_num_seqs=rows, enable_prefix_caching=False,
        speculation=speculation, adaptive_drafts=adaptive,
    )  # fmt: skip
    script = Script(requests, rows + 1, 512 + k + 2, k)

    def make(state: RowState, mirror: RowState, sampling: Any, kv: Any, padded: bool) -> Drafter:
        if kind == "plain":
            return Admits(script)
        if kind == "ngram":
            assert speculation is not None
            made = ScriptedNgram(state, speculation, VOCAB)
            made.script = script
            return made
        wanted = LookUp(*LOOK_UP.values(), VOCAB) if look_up else None
        return DeviceMeasured(Replayed(state, script, kind == "never"), state, wanted, False)

    target = tiny()
    it = Engine(target, config, make, NoText, padded=True)
    hidden, tally = torch.zeros(1, 8), Tally()
    target.forward = lambda batch, *_: Forward(hidden, ())  # type: ignore[method-assign, assignment]
    cycle: Any = it._step.cycle

    def choose(key: Key, layout: Any, logits: Tensor) -> Tensor:
        owner, positions = layout.owner, layout.positions
        if len(owner) < len(positions):
            owner = owner.repeat_interleave(len(positions) // len(owner))
        return script.truth[owner, positions + 1]

    cycle._choose = choose
    runner: Any = it._step.runner
    head = kind in ("head", "never")
    runner.cost = lambda keys, context: [h200_ms(key, head) / 1000 for key in keys]
    run = runner.run

    def timed(key: Key, given: Any) -> Any:
        """Run a launch, and count a decode launch."""
        slots = torch.tensor(given[0])
        begin = it.state.length[slots].tolist()
        report = run(key, given)
        if key.layout != PROMPT:
            tally.add(key, h200_ms(key, head), report.counts[slots != it.state.dummy])
        if head and key.layout != PROMPT:
            compare(begin, given[0], tally, script, drafted)
        if head and report.confidence is not None:
            sizes, chances = it.state.draft_size[slots].tolist(), report.confidence.tolist()
            for slot, size, sure in zip(given[0], sizes, chances, strict=False):
                drafted[slot] = int(it.state.length[slot]), it.state.draft[slot, :size].tolist(), sure[:size]
        return report

    drafted: dict[int, tuple[int, list[int], list[float]]] = {}
    runner.run = timed
    for i, one in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=len(one["answer"]))
        it.add(Request(str(i), tuple(one["prompt"]), params, len(one["answer"]), 0, ()))
    answers = defaultdict[str, list[int]](list)
    while it.has_work:
        for event in it.step():
            answers[event.request_id] += event.tokens
    assert all(answers[str(i)] == one["answer"] for i, one in enumerate(requests)), "not the recorded answers"
    return tally


def compare(begin: Sequence[int], slots: Sequence[int], tally: Tally, script: Script, drafted: dict[int, Any]) -> None:
    """Count what was right of the drafts that the launch before made, verified or not."""
    for slot, at in zip(slots, begin, strict=True):
        length, tokens, chances = drafted.get(slot, (-1, [], []))
        if length != at:
            continue
        truth, last = script.truth[slot, at : at + len(tokens)].tolist(), 1.0
        for place, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            own = chance / max(last, 1e-9)
            counted = tally.chances[place, min(int(own * 10), 9)]
            counted[0], counted[1], counted[2] = counted[0] + 1, counted[1] + own, counted[2] + (token == truth[place])
            if token != truth[place]:
                break
            last = chance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("--head", type=Path)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--drafts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    if given.what == "record":
        tasks = {name: ids[: given.prompts] for name, ids in json.loads(given.tasks.read_text()).items()}
        torch.save({"k": given.k, "tasks": record(given.head, tasks, given.k, given.tokens)}, given.out)
        return
    kept = torch.load(given.drafts)
    found: list[dict[str, Any]] = []
    kept["tasks"]["mixed"] = [one for each in zip(*kept["tasks"].values(), strict=True) for one in each]
    for task, requests in kept["tasks"].items():
        if task not in given.only.split(",") and (given.only or task == "mixed"):
            continue
        for rows in map(int, given.rows.split(",")):
            for arm in given.arms.split(","):
                tally = replay(requests[: given.prompts * (4 if task == "mixed" else 1)], kept["k"], arm, rows)
                found.append({"task": task, "rows": rows, "arm": arm, **tally.summary(), "chances": tally.table()})
                shown = {name: value for name, value in found[-1].items() if name != "chances"}
                print(json.dumps(shown), flush=True)
    given.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "k": kept["k"], "cells": found}))


if __name__ == "__main__":
    main()
