"""Trains heads for the default model on one GPU, from prompts to folders, in phases that go on in a later call, and measures
them on the tasks of forerun bench. Needs no network.

    PYTHONPATH=src python3 benchmarks/gpu/train_heads.py --work DIR --gguf FILE --prompts FILE --tasks FILE --out DIR --phases
        answers,eagle3:9000,mtp:4000,dflash:6000,measure [--count 40000] [--rows 1,8,32]

--prompts: made by benchmarks/heads/prompts.py. --tasks: {task: [[ids]..]}, made by benchmarks/heads/task_ids.py. --work keeps
the samples and heads between calls. A phase METHOD:STEPS trains a head of that method. measure: tokens/s and acceptance of all
heads in --work, of n-gram and of plain decoding on each task, by rows. The record goes to --out, and heads in files of 15 MB
at most. METHOD:STEPS may be followed by settings of training: dflash:9000:loss=hard:pace=0.5.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from harness import CUDA, DEVICE, Record, head_shape, release, synchronize

from forerun.heads import saving
from forerun.heads.config import HeadConfig
from forerun.llm import LLM
from forerun.models.decoder import Target
from forerun.train import answers as making
from forerun.train import questions
from forerun.train.answers import Answerer, Answering, Shards
from forerun.train.heads import Trainer
from forerun.train.settings import Settings
from forerun.types import SamplingParams

SHARD, PART = 14_000_000, 15_000_000  # bytes of a shard, and of a file that comes back at most
DRAFTS = {"ngram": 4, "eagle3": 4, "mtp": 4, "eagle": 4, "dflash": 7}


def answer(model: Any, prompts: Path, work: Path, count: int, held_out: float) -> dict[str, Any]:
    start = time.perf_counter()
    asked = questions.read("prompts", prompts, count).asked
    settings = Answering(held_out=held_out)
    # logits of prompts are not kept, and no prefix is asked twice
    llm = LLM(model, max_num_seqs=384, max_model_len=2048, enable_prefix_caching=False)
    ready = time.perf_counter()
    shards, said = Shards(work / "answers", "target", settings), [0.0]

    def watch(done: int, total: int, tokens: int) -> None:
        if time.perf_counter() - said[0] > 20:
            said[0] = time.perf_counter()
            print(f"{said[0] - start:.0f} s: {done} of {total} prompts, {tokens} tokens", flush=True)

    answerer = Answerer(llm, shards, settings)
    answerer.run(asked, watch)
    answered = time.perf_counter()
    trained, held = making.gather(shards, asked, settings)
    making.save(work / "train", trained)
    making.save(work / "held", held)
    ids, prompt = trained.samples.ids, trained.samples.prompt
    return {
        "prompts": len(asked), "samples": len(prompt), "held_out": len(held.samples.prompt), "tokens": len(ids),
        "answered_tokens": int(len(ids) - prompt.sum()), "left_out": trained.left_out, "too_long": answerer.too_long,
        "failed": answerer.failed, "ready_s": ready - start, "answer_s": answered - ready,
        "gather_s": time.perf_counter() - answered,
    }  # fmt: skip


def shape_of(target: Target, method: str) -> HeadConfig:
    config = head_shape(target, method)
    if method == "dflash":
        spread = tuple(round(1 + i * (target.config.layers - 4) / 2) + 1 for i in range(3))
        config = replace(config, states=spread, mask_id=4)
    return config


def train(target: Target, method: str, chosen: dict[str, Any], work: Path, given: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    samples, held = making.load(work / "train").samples, making.load(work / "held").samples
    settings = Settings(**{"tokens": given.step_tokens} | chosen)
    steps = settings.steps
    it = Trainer(target, shape_of(target, method), samples, held, settings)
    synchronize()
    ready, curve = time.perf_counter(), []
    while not it.done:
        it.step()
        if it.made % 250 == 0 or it.done:
            last = it.metrics()[-1]
            curve.append((last.step, round(last.loss, 4), [round(x, 4) for x in last.accuracy]))
            if it.made % 1000 == 0 or it.done:
                print(f"{time.perf_counter() - start:.0f} s:", curve[-1], flush=True)
        if it.made % max(steps // 4, 1) == 0:
            curve.append(("held out", it.made, it.evaluate(7)._asdict()))
            print(curve[-1], flush=True)
    synchronize()
    trained = time.perf_counter()
    folder = work / method
    saving.save(folder, it.config, it.weights(), "smollm2-135m-instruct", SHARD)
    found = {
        "steps": steps, "steps_per_s": steps / (trained - ready), "tokens_per_step": it.tokens_per_step,
        "set_up_s": ready - start, "train_s": trained - ready, "parameters": it.parameters.count, "curve": curve,
        "settings": asdict(settings),
    }  # fmt: skip
    del it
    release()
    bring(folder, given.out / method)
    return found


def bring(folder: Path, to: Path) -> None:
    """Copy a head's files. A file that is too large to come back is cut into parts NAME.00, NAME.01, ..., to be joined by cat,
    since a tensor is never split over the shards of a folder."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        content = file.read_bytes()
        pieces = [content[i : i + PART] for i in range(0, len(content), PART)]
        for i, piece in enumerate(pieces):
            (to / (file.name if len(pieces) == 1 else f"{file.name}.{i:02}")).write_bytes(piece)


def measure(model: Any, work: Path, tasks: dict[str, list[list[int]]], rows: list[int], tokens: int) -> list[dict[str, Any]]:
    """Batches of as many requests as rows, prompts in turn; each arm in turn on each task, twice; the second counts."""
    arms: list[tuple[str, Any]] = [("plain", None)]
    arms.append(("ngram k=4", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}))
    for method in ("eagle3", "mtp", "dflash"):
        if (work / method).is_dir():
            own = {"method": method, "model": str(work / method), "num_speculative_tokens": DRAFTS[method]}
            arms.append((f"{method} k={DRAFTS[method]}", own))
            if method == "eagle3":
                arms.append(("eagle3 and ngram k=4", own | {"prompt_lookup_min": 2, "prompt_lookup_max": 5}))
                arms.append(("eagle3 k=4, fixed", own))
    found = []
    for name, config in arms:
        fixed = name.endswith("fixed")
        llm = LLM(
            model, speculative_config=config, max_num_seqs=max(rows), max_model_len=2048, kv_cache_tokens=max(rows) * 2048,
            adaptive_drafts=not fixed,
        )  # fmt: skip
        for task, prompts in tasks.items():
            for count in rows:
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=False)
                batches = [prompts[i : i + count] for i in range(0, len(prompts) - count + 1, count)][: 24 if count == 1 else 2]
                for part in (batches[:1], batches):  # the first is warm-up
                    llm.clear_prefix_cache()
                    llm.reset_stats()
                    spent, made, each = 0.0, 0, []
                    for batch in part:
                        synchronize()
                        start = time.perf_counter()
                        outputs = llm.generate(batch, params)
                        spent += time.perf_counter() - start
                        made += sum(len(o.token_ids) for o in outputs)
                        each += [(len(o.token_ids), o.completions[0].stats.steps) for o in outputs]
                drafts = llm.stats.drafts
                found.append({
                    "arm": name, "task": task, "rows": count, "tokens_per_s": made / spent, "tokens": made, "seconds": spent,
                    "requests": each, "steps": drafts.steps, "drafted": drafts.drafted, "accepted": drafts.accepted,
                    "acceptance_length": drafts.acceptance_length,
                })  # fmt: skip
                print(name, task, count, f"{made / spent:.0f} tokens/s", drafts.acceptance_length, flush=True)
        del llm
        release()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("work", "gguf", "prompts", "tasks", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--phases", default="answers,eagle3:9000,measure")
    parser.add_argument("--count", type=int, default=40000)
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=15360)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    known = {"date": time.strftime("%Y-%m-%d"), "device": machine, "torch": torch.__version__}
    record = Record(given.out / f"train_heads-{int(time.time())}.json", **known)
    model = LLM.load(given.gguf, "bfloat16" if CUDA else "auto", DEVICE.type)
    for phase in given.phases.split(","):
        method, *rest = phase.split(":")
        pairs = [("steps", rest[0]), *(one.split("=") for one in rest[1:])] if rest else []
        chosen = {name: json.loads(text) if text[0].isdigit() else text for name, text in pairs}
        if phase == "answers":
            record.part(phase, lambda: answer(model, given.prompts, given.work, given.count, given.held_out))
        elif phase == "measure":
            tasks, rows = json.loads(given.tasks.read_text()), [int(n) for n in given.rows.split(",")]
            record.part(phase, lambda: measure(model, given.work, tasks, rows, given.tokens))  # noqa: B023
        else:
            record.part(method, lambda: train(model.target, method, chosen, given.work, given))  # noqa: B023


if __name__ == "__main__":
    main()
