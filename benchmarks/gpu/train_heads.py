"""Trains heads for the default model on one GPU, from prompts to folders, in phases that go on in a later call, and measures
them on the tasks of forerun bench. Needs no network.

    PYTHONPATH=src python3 benchmarks/gpu/train_heads.py --work DIR --gguf FILE --prompts FILE --tasks FILE --out DIR --phases
        answers,eagle3:9000,mtp:4000,dflash:6000,measure [--count 40000] [--rows 1,8,32]

--prompts: made by benchmarks/heads/prompts.py. --tasks: {task: [[ids]..]}, made by benchmarks/heads/task_ids.py. --work keeps
the samples and heads between calls. A phase METHOD:STEPS trains a head of that method. measure: tokens/s and acceptance of all
heads in --work, of n-gram and of plain decoding on each task, by rows. The record goes to --out, and heads in files of 15 MB
at most. METHOD:STEPS may be followed by settings of shape and training, a name, and try=1, which keeps no head:
dflash:9000:loss=hard:pace=0.5:layers=4:name=paced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import CUDA, DEVICE, Record, release, synchronize
from safetensors.torch import load_file, save_file

from forerun.llm import LLM
from forerun.train import answers as making
from forerun.train import export, questions
from forerun.train.answers import Answerer, Answering, Shards
from forerun.train.heads import Trainer
from forerun.train.settings import Settings
from forerun.train.shape import Shape, drafter
from forerun.types import SamplingParams

SHARD, PART = 14_000_000, 15_000_000  # bytes of a shard, and of a file that comes back at most
DRAFTS = {"ngram": 4, "eagle3": 4, "mtp": 4, "draft_model": 4, "dflash": 7}
TOGETHER = 320  # requests of an answering process
KEPT = 7  # drafted tokens of an evaluation


def answer_part(gguf: Path, prompts: Path, folder: Path, count: int, held_out: float, part: int, parts: int) -> None:
    """Answers every parts-th prompt, in a process of its own: an engine is bound by its host at hundreds of requests."""
    settings, start = Answering(held_out=held_out), time.perf_counter()
    asked = questions.read("prompts", prompts, count).asked[part::parts]
    # logits of prompts are not kept, and no prefix is asked twice
    llm = LLM(
        LLM.load(gguf, "bfloat16" if CUDA else "auto", DEVICE.type), max_num_seqs=TOGETHER, max_model_len=2048,
        enable_prefix_caching=False, kv_cache_tokens=TOGETHER * 700,
    )  # fmt: skip
    answerer, said = Answerer(llm, Shards(folder, "target", settings), settings), [time.perf_counter()]
    print(f"part {part}: ready after {said[0] - start:.0f} s", flush=True)

    def watch(done: int, total: int, tokens: int) -> None:
        if time.perf_counter() - said[0] > 20:
            said[0] = time.perf_counter()
            print(f"part {part}: {said[0] - start:.0f} s: {done} of {total} prompts, {tokens} tokens", flush=True)

    answerer.run(asked, watch)
    (folder / "left_out.json").write_text(json.dumps([answerer.too_long, answerer.failed]))


class Together:
    """The answers of several folders, to be gathered."""

    def __init__(self, folders: list[Path], settings: Answering) -> None:
        self._shards = [Shards(folder, "target", settings) for folder in folders]

    def read(self) -> Iterator[making.Answer]:
        return itertools.chain.from_iterable(shards.read() for shards in self._shards)


def answer(given: argparse.Namespace) -> dict[str, Any]:
    start, settings = time.perf_counter(), Answering(held_out=given.held_out)
    folders = [given.work / f"answers-{i}" for i in range(given.answerers)]
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(
            target=answer_part, args=(given.gguf, given.prompts, folder, given.count, given.held_out, i, len(folders))
        )
        for i, folder in enumerate(folders)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        raise RuntimeError("a process that answers prompts failed")
    answered = time.perf_counter()
    asked = questions.read("prompts", given.prompts, given.count).asked
    trained, held = making.gather(Together(folders, settings), asked, settings)  # type: ignore[arg-type]
    making.save(given.work / "train", trained)
    making.save(given.work / "held", held)
    ids, prompt = trained.samples.ids, trained.samples.prompt
    left_out = [json.loads((folder / "left_out.json").read_text()) for folder in folders]
    return {
        "prompts": len(asked), "samples": len(prompt), "held_out": len(held.samples.prompt), "tokens": len(ids),
        "answered_tokens": int(len(ids) - prompt.sum()), "left_out": trained.left_out, "processes": len(folders),
        "too_long": sum(one for one, _ in left_out), "failed": sum(one for _, one in left_out),
        "answer_s": answered - start, "gather_s": time.perf_counter() - answered,
    }  # fmt: skip


def train(model: Any, phase: str, given: argparse.Namespace, kept: dict[Any, Trainer]) -> dict[str, Any]:
    """Trains as a phase says, METHOD:STEPS:SETTING=VALUE:...; settings are those of Shape and Settings, `name`, of the head's
    folder, and `try`: nothing is kept of it. kept: the last trainer, whose states serve the next if it reads the same ones."""
    start, target = time.perf_counter(), model.target
    method, steps, *rest = phase.split(":")
    pairs = [("steps", steps), *(one.split("=") for one in rest)]
    chosen: dict[str, Any] = {name: json.loads(text) if text.replace(".", "").isdigit() else text for name, text in pairs}
    name, trial = chosen.pop("name", method), bool(chosen.pop("try", False))
    known = {one: chosen.pop(one) for one in list(chosen) if one in Shape.__dataclass_fields__}
    if "states" in known:
        known["states"] = tuple(map(int, known["states"].split("+")))
    shape = drafter(method, Shape(**known), target.config, target.vocab, mask_id=4)
    samples, held = making.load(given.work / "train").samples, making.load(given.work / "held").samples
    settings = Settings(**{"tokens": given.step_tokens} | chosen)
    states = getattr(shape, "states", (target.config.layers,))
    like = kept.get(states)
    if like is None:
        kept.clear()
        release()
    it = Trainer(target, shape, samples, held, settings, like=like)
    kept[states] = it
    synchronize()
    ready, curve, spent = time.perf_counter(), [], 0.0
    while not it.done:
        it.step()
        if it.made % 500 == 0 or it.done:
            last = it.metrics()[-1]
            curve.append((last.step, round(last.loss, 4), [round(x, 4) for x in last.accuracy]))
            if it.made % 2000 == 0 or it.done:
                print(f"{time.perf_counter() - start:.0f} s:", curve[-1], flush=True)
        if it.made % max(settings.steps // (1 if trial else 4), 1) == 0:
            synchronize()
            begun = time.perf_counter()
            curve.append(("held out", it.made, it.evaluate(KEPT)._asdict()))
            spent += time.perf_counter() - begun
            print(name, it.made, [round(x, 3) for x in curve[-1][2]["lengths"]], flush=True)
    synchronize()
    trained = time.perf_counter()
    if not trial:
        folder = given.work / name
        export.save(folder, shape, it.weights(), "smollm2-135m-instruct", model.folder, SHARD)
        bring(folder, given.out / name)
    seconds = trained - ready - spent
    return {
        "steps": settings.steps, "steps_per_s": settings.steps / seconds, "tokens_per_step": it.tokens_per_step,
        "set_up_s": ready - start, "train_s": seconds, "evaluations_s": spent, "parameters": it.parameters.count,
        "curve": curve, "shape": known, "settings": asdict(settings),
    }  # fmt: skip


def bring(folder: Path, to: Path) -> None:
    """Copy a head's files. A file that is too large to come back is cut into parts NAME.00, NAME.01, ..., to be joined by cat,
    since a tensor is never split over the shards of a folder."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        content = file.read_bytes()
        pieces = [content[i : i + PART] for i in range(0, len(content), PART)]
        for i, piece in enumerate(pieces):
            (to / (file.name if len(pieces) == 1 else f"{file.name}.{i:02}")).write_bytes(piece)


class Arm(NamedTuple):
    """What is measured: a speculative config, always whole drafts or those that pay, a temperature."""

    name: str
    config: dict[str, Any] | None = None
    whole: bool = False
    temperature: float = 0.0


def arms(work: Path) -> list[Arm]:
    """Plain decoding, n-gram, the heads in a folder, each with whole drafts and with drawn ones too, EAGLE-3 with more tokens
    and beside n-gram, and an EAGLE-3 head that is never right."""
    ngram = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    found = [Arm("plain"), Arm("plain, T=0.7", None, False, 0.7)]
    found.append(Arm("ngram k=4", {"method": "ngram", "num_speculative_tokens": 4} | ngram))
    for method in ("eagle3", "mtp", "dflash", "draft_model"):
        if not (work / method).is_dir():
            continue
        own, k = {"method": method, "model": str(work / method)}, DRAFTS[method]
        first = own | {"num_speculative_tokens": k}
        found += [Arm(f"{method} k={k}", first), Arm(f"{method} k={k}, fixed", first, True)]
        found += [Arm(f"{method} k={k}, T=0.7", first, False, 0.7)]
        found += [Arm(f"{method} k={k}, drawn, fixed", first | {"draft_sample_method": "probabilistic"}, True, 0.7)]
        if method == "eagle3":
            more = own | {"num_speculative_tokens": 7}
            found += [Arm("eagle3 and ngram k=4", first | ngram), Arm("eagle3 k=7", more)]
            found += [Arm("eagle3 and ngram k=7", more | ngram), Arm("wrong k=4", first | {"model": str(wrong(work))})]
    return found


def wrong(work: Path) -> Path:
    """A folder with the EAGLE-3 head whose layer is random, so that its drafts are hardly ever accepted."""
    folder, draw = work / "wrong", torch.Generator().manual_seed(0)
    shutil.copytree(work / "eagle3", folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and not name.startswith("lm_head"):
                tensors[name] = (torch.randn(tensor.shape, generator=draw) * float(tensor.float().std())).to(tensor.dtype)
        save_file(tensors, file, {"format": "pt"})
    return folder


def measure(
    model: Any, work: Path, tasks: dict[str, list[list[int]]], rows: list[int], tokens: int, only: list[str]
) -> list[dict[str, Any]]:
    """Batches of as many requests as rows, prompts in turn; each arm in turn on each task, twice; the second counts."""
    found = []
    for arm in [one for one in arms(work) if not only or one.name in only]:
        llm = LLM(
            model, speculative_config=arm.config, max_num_seqs=max(rows), max_model_len=2048, kv_cache_tokens=max(rows) * 2048,
            adaptive_drafts=not arm.whole,
        )  # fmt: skip
        params = SamplingParams(temperature=arm.temperature, max_tokens=tokens, seed=0, ignore_eos=False)
        for task, prompts in tasks.items():
            for count in rows:
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
                    "arm": arm.name, "task": task, "rows": count, "tokens_per_s": made / spent, "tokens": made,
                    "seconds": spent, "requests": each, "steps": drafts.steps, "drafted": drafts.drafted,
                    "accepted": drafts.accepted, "acceptance_length": drafts.acceptance_length,
                })  # fmt: skip
                print(arm.name, task, count, f"{made / spent:.0f} tokens/s", round(drafts.acceptance_length, 3), flush=True)
        del llm
        release()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("work", "gguf", "prompts", "tasks", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--phases", default="answers,eagle3:9000,measure")
    parser.add_argument("--count", type=int, default=40000)
    parser.add_argument("--answerers", type=int, default=5, help="processes that answer prompts")
    parser.add_argument("--held-out", type=float, default=0.01)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--arms", default="", help="names of arms to measure, with ; in between; all by default")
    parser.add_argument("--step-tokens", type=int, default=15360)
    given = parser.parse_args()
    for folder in (given.work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    known = {"date": time.strftime("%Y-%m-%d"), "device": machine, "torch": torch.__version__}
    record = Record(given.out / f"train_heads-{int(time.time())}.json", **known)
    model, kept = None, {}  # answering processes want the memory first
    for phase in given.phases.split(","):
        name = phase.split("name=")[1].split(":")[0] if "name=" in phase else phase.split(":")[0]
        if phase == "answers":
            record.part(phase, lambda: answer(given))
            continue
        model = model or LLM.load(given.gguf, "bfloat16" if CUDA else "auto", DEVICE.type)
        if phase == "measure":
            tasks, rows = json.loads(given.tasks.read_text()), [int(n) for n in given.rows.split(",")]
            only = [name for name in given.arms.split(";") if name]
            kept.clear()
            release()
            record.part(phase, lambda: measure(model, given.work, tasks, rows, given.tokens, only))  # noqa: B023
        else:
            record.part(name, lambda: train(model, phase, given, kept))  # noqa: B023


if __name__ == "__main__":
    main()
