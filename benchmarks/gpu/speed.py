"""Times of steps and of whole batches on the GPU: the machine's limits, captured steps by rows and drafts, the cost of drafting
in a step, the host's work, the tokens/s of each drafter, and an engine's start-up time and memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import (
    ARMS,
    CUDA,
    DEVICE,
    NGRAM,
    capture,
    engine,
    fill,
    median_ms,
    release,
    run,
    step_ms,
    synchronize,
)
from torch import Tensor

from forerun.config import Speculation
from forerun.drafters import Needs, Rows, Stateless
from forerun.engine.cycle import Cycle, Key, Layout, decode_key
from forerun.engine.engine import Engine
from forerun.engine.layouts import shared_drafts
from forerun.models.decoder import Target
from forerun.types import Draft, Request, SamplingParams

Prompts = Sequence[Sequence[int]]
Wide = dict[str, Speculation | None]
TOKENS_PER_S: Wide = {"plain": None, "ngram k=4": NGRAM, "ngram k=8": Speculation("ngram", 8, 2, 5)}


def limit() -> dict[str, float]:
    """The copy bandwidth, and the time of a tiny kernel in a graph."""
    a, b = (torch.empty(1 << (30 if CUDA else 20), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    found = {"copy_TB_per_s": 2 * a.numel() / median_ms(lambda: b.copy_(a), 20) / 1e9}
    if CUDA:
        x = torch.zeros(32, device=DEVICE)
        found["tiny_kernel_us"] = _chain_us(lambda: x.add_(1), 100)
    return found


def _chain_us(launch: Callable[[], Any], count: int, before: Callable[[], Any] = lambda: None, repeat: int = 50) -> float:
    """The microseconds of a launch, from a graph of `count` launches in a row."""
    before()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compile and load it before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    return median_ms(graph.replay, repeat, before) * 1e3 / count


@torch.inference_mode()
def replay(target: Target, widths: Sequence[int], rows: Sequence[int], context: int = 512) -> list[dict[str, Any]]:
    """Milliseconds of a step by drafts a row and by rows. Steps with drafts include n-gram drafting."""
    cells = []
    for width in widths:
        it = engine(target, Speculation("ngram", width, 2, 5) if width else None, max(rows))
        for count in rows:
            start = time.perf_counter()
            cell: dict[str, Any] = {"rows": count, "k": width, "context": context}
            try:
                cell["ms"] = step_ms(it, count, width, context)
            except RuntimeError as error:  # for instance out of memory
                cell["problem"] = str(error)[:200]
            cells.append(cell)
            print(cell, f"{time.perf_counter() - start:.1f} s", flush=True)
        graphs = it.settings()["graphs"]
        print(f"graphs: {graphs}", flush=True)
        del it
        release()
    return cells


@torch.inference_mode()
def shared(target: Target, rows: Sequence[int] = (2, 4, 8, 12, 16, 24, 32), width: int = 4, context: int = 512) -> list[dict]:
    """Milliseconds of a step by rows: plain, with shared drafts, and with `width` drafts for each row."""
    cells, it = [], engine(target, Speculation("ngram", width, 2, 5), max(rows))
    for count in rows:
        for drafts in (0, *shared_drafts(count, width), None):
            wide = 0 if drafts == 0 else width
            ms = step_ms(it, count, wide, context, 40, drafts=drafts or None)
            cells.append({"rows": count, "k": wide, "shared_drafts": drafts or None, "ms": ms})
            print(cells[-1], flush=True)
    return cells


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}


@torch.inference_mode()
def sampled(target: Target, rows: Sequence[int], widths: Sequence[int] = (0, 4), context: int = 512) -> list[dict[str, Any]]:
    """Milliseconds of a step by sampling parameters. Also milliseconds of choosing alone, in the cycle's form and by torch's
    operations, which sort; on logits of the step's shape, captured too."""
    cells = []
    for width in widths:
        it = engine(target, Speculation("ngram", width, 2, 5) if width else None, max(rows))
        for count in rows:
            for name, params in SAMPLED.items():
                cell = {"rows": count, "k": width, "sampling": name, "ms": step_ms(it, count, width, context, 40, params)}
                cell |= _choosing(it, count, width)
                cells.append(cell)
                print(cell, flush=True)
        del it
        release()
    return cells


def _choosing(it: Engine, rows: int, width: int) -> dict[str, float]:
    """Milliseconds of choosing with the parameters of the first slots, in the cycle's own form and in torch's."""
    if not CUDA:
        return {}
    cycle, total = it._step.cycle, rows * (width + 1)
    slot = torch.arange(rows, device=DEVICE)
    logits = torch.randn(total, it.sampling.vocab, device=DEVICE) * 3
    positions = torch.arange(total, device=DEVICE) % 500
    found = (cycle.features(range(rows)), it.sampling.features(range(rows)))
    own, exact = (decode_key(rows, width, None, features) for features in found)
    empty: Any = None  # choosing does not read the other fields of a layout
    layout = Layout(empty, slot, slot, positions, None, empty, None, slot, None, None)
    return {
        "choosing_ms": _chain_us(lambda: cycle._choose(own, layout, logits), 5) / 1e3,
        "torch_choosing_ms": _chain_us(lambda: Cycle._choose(cycle, exact, layout, logits), 5) / 1e3,
    }


class Unasked(Stateless):
    """A drafter that is never called. The steps of its engine have space for drafts but no look-up."""

    needs = Needs()

    def propose(self, rows: Rows) -> Draft:
        raise NotImplementedError


@torch.inference_mode()
def share(target: Target, rows: Sequence[int] = (1, 8, 32), width: int = 4, context: int = 512) -> list[dict[str, Any]]:
    """The share of n-gram look-up, acceptance and commit in a step of k = 4. Times the launch that does all three, in a graph
    of such launches; that is an upper bound, since each waits for the end of the one before it, which it need not do in a step.
    Also times the launch without the look-up, and the whole step with and without it."""
    from forerun.kernels import cuda_step

    look_up = cuda_step.LookUp(2, 5, target.vocab)
    with_look_up = engine(target, Speculation("ngram", width, 2, 5), max(rows))
    without = engine(target, Speculation("ngram", width, 2, 5), max(rows), make=lambda *_: Unasked())
    found = []
    for count in rows:
        cell: dict[str, Any] = {"rows": count, "k": width, "context": context}
        cell["whole_us"] = step_ms(with_look_up, count, width, context) * 1e3
        cell["whole_without_look_up_us"] = step_ms(without, count, width, context) * 1e3
        it, s = with_look_up, with_look_up.state
        parts = (s.tokens, s.length, s.limit, s.active, s.stop_ids, s.block_table, s.draft, s.draft_size, s.chances)
        pool = cuda_step.Pool(*parts)
        slot = torch.arange(count, device=DEVICE)
        size = torch.full((count,), width, device=DEVICE)
        choice = torch.randint(0, target.vocab, (count, width + 1), device=DEVICE)
        put_back = fill(it, count, context)
        launches: dict[str, Callable[[], Tensor]] = {
            "commit_and_draft_us": lambda: cuda_step.commit_and_draft(pool, slot, choice, size, look_up),  # noqa: B023
            "commit_us": lambda: cuda_step.commit(pool, slot, choice, size),  # noqa: B023
        }
        for name, launch in launches.items():
            cell[name] = _chain_us(launch, 20, put_back)
        cell["share"] = cell["commit_and_draft_us"] / cell["whole_us"]
        cell["share_by_difference"] = 1 - cell["whole_without_look_up_us"] / cell["whole_us"]
        found.append(cell)
        print(cell, flush=True)
    return found


def host_time(target: Target, prompts: Prompts, rows: Sequence[int] = (1, 8, 32, 128)) -> list[dict[str, Any]]:
    """Microseconds of the host's work in a step, without the wait for the device, and of the whole step."""
    cells = []
    for count in rows:
        for name in ("plain", "ngram k=4"):
            it = engine(target, ARMS[name], count)
            capture(it, count)
            for i in range(count):
                params = SamplingParams(temperature=0, max_tokens=600)
                it.add(Request(str(i), tuple(prompts[i % len(prompts)]), params, 600, i))
            for _ in range(30):
                it.step()
            host, whole = [], []
            for _ in range(25):
                synchronize()
                start = time.perf_counter()
                it.step()
                host.append(time.perf_counter() - start)
                synchronize()
                whole.append(time.perf_counter() - start)
            cell = {
                "rows": count, "arm": name, "decoding": sum(s.pending == 1 for s in it.scheduler.running),
                "host_us": statistics.median(host) * 1e6, "whole_us": statistics.median(whole) * 1e6,
            }  # fmt: skip
            cells.append(cell)
            for i in range(count):
                it.abort(str(i))
            it.step()
            del it
            release()
    return cells


def batches(
    target: Target,
    arms: Wide,
    prompts: Prompts,
    kind: str,
    temperature: float,
    counts: Sequence[int] = (1, 8, 32),
    tokens: int = 256,
    repeat: int = 3,
    rows: int | None = None,
) -> list[dict[str, Any]]:
    """Tokens/s of closed batches. The arms are interleaved, forwards and backwards. identical: answers that equal those of
    plain decoding; for plain, those of its own run before. An arm that fails is recorded with the reason and not run again.
    `prediction` gets the answers of plain decoding. rows: requests that run at once, the others wait; None: all run."""
    engines: dict[str, Engine] = {}
    cells = []
    for count in counts:
        samples: dict[str, list[float]] = {}
        last: dict[str, dict[str, Any]] = {}
        plain: list[list[int]] = []
        dropped: dict[str, str] = {}
        for i in range(repeat + 1):
            for name in list(arms) if i % 2 == 0 else list(arms)[::-1]:
                if name in dropped:
                    continue
                try:
                    if name not in engines:
                        engines[name] = engine(target, arms[name], rows or max(counts))
                        engines[name].warm_up()
                    ran = run(engines[name], prompts[:count], tokens, temperature, plain if "prediction" in name else ())
                except Exception as error:
                    dropped[name] = f"{type(error).__name__}: {error}"[:300]
                    engines.pop(name, None)
                    continue
                if i:
                    samples.setdefault(name, []).append(count * tokens / ran.seconds)
                drafts = ran.stats.drafts
                last[name] = {
                    "acceptance_length": drafts.acceptance_length or 1.0, "acceptance_rate": drafts.acceptance_rate,
                    "identical": sum(a == b for a, b in zip(ran.answers, plain, strict=True)) if plain else None,
                    "steps": ran.stats.steps, "waits": ran.waits,
                }  # fmt: skip
                plain = ran.answers if name == "plain" else plain
        for name, rates in samples.items():
            cell = {"kind": kind, "requests": count, "at_once": min(count, rows or count), "arm": name, "tokens_per_s": rates}
            cell["median"] = statistics.median(rates)
            pairs = zip(rates, samples.get("plain", []), strict=False)
            cell["over_plain"] = statistics.median([a / b for a, b in pairs] or [0.0])
            cells.append(cell | last[name])
            print({k: v for k, v in cells[-1].items() if k != "tokens_per_s"}, flush=True)
        cells += [{"kind": kind, "requests": count, "arm": name, "problem": why} for name, why in dropped.items()]
        arms = {name: arm for name, arm in arms.items() if name not in dropped}
    return cells


def timeline(target: Target, prompts: Prompts, rows: int = 32, tokens: int = 256) -> list[dict[str, Any]]:
    """The time of a closed batch by the shapes of its steps. For each shape: the number of steps, the milliseconds from one
    launch's end to the next one's by device events (waits for the host included), and the cost that the policy assumed."""
    cells: list[dict[str, Any]] = []
    for name, arm in TOKENS_PER_S.items() if CUDA else ():
        it = engine(target, arm, rows)
        it.warm_up()
        run(it, prompts[:rows], tokens, 0.0)
        graphs: Any = it._step.runner
        marks: list[tuple[Key, torch.cuda.Event]] = []

        def marked(key: Key, given: Any, launch: Any = graphs.run, marks: list[Any] = marks) -> Any:
            report = launch(key, given)
            marks.append((Key(*key[:4]), torch.cuda.Event(enable_timing=True)))
            marks[-1][1].record()
            return report

        graphs.run = marked
        before = torch.cuda.Event(enable_timing=True)
        before.record()
        ran = run(it, prompts[:rows], tokens, 0.0)
        found: dict[Key, list[float]] = {}
        for shape, end in marks:
            found.setdefault(shape, []).append(before.elapsed_time(end))
            before = end
        cells.append({
            "arm": name, "seconds": ran.seconds,
            "shapes": [
                {
                    "shape": shape[:4], "steps": len(ms), "total_ms": sum(ms), "median_ms": statistics.median(ms),
                    "cost_s": graphs.costs.get(shape, [None])[0],
                }
                for shape, ms in found.items()
            ],
        })  # fmt: skip
        print(json.dumps(cells[-1]), flush=True)
        del it, graphs, marked
        release()
    return cells


def memory(target: Target, repeat: int = 3) -> dict[str, Any]:
    """The capacity of the KV cache that an engine chooses, in tokens, and the seconds until it is ready, plain and with n-gram
    drafts interleaved. The first of each compiles kernels and does not count. Only the weights share the device with an
    engine."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "ngram k=4": []}
    for i in range(repeat + 1):
        for name, starts in found.items():
            synchronize()
            start = time.perf_counter()
            it = engine(target, ARMS[name], kv_tokens=None)
            built = time.perf_counter()
            it.warm_up()
            synchronize()
            end = time.perf_counter()
            one = {"kv_tokens": it.kv_tokens, "seconds": end - start, "warm_up_s": end - built, "compiles": i == 0}
            starts.append(one | {"graphs": it.settings()["graphs"]})
            del it
            release()
            if CUDA:
                starts[-1]["left_bytes"] = torch.cuda.memory_allocated()
            print(name, starts[-1], flush=True)
    median = {
        name: {key: statistics.median(one[key] for one in starts[1:]) for key in ("kv_tokens", "seconds")}
        for name, starts in found.items()
    }
    return {
        "starts": found,
        "median": median,
        "kv_tokens_ngram_over_plain": median["ngram k=4"]["kv_tokens"] / median["plain"]["kv_tokens"],
        "seconds_ngram_minus_plain": median["ngram k=4"]["seconds"] - median["plain"]["seconds"],
    }


START = """
import json, sys
from forerun.llm import LLM
llm = LLM(sys.argv[1], speculative_config=json.loads(sys.argv[2]), device=sys.argv[3])
settings = llm.settings()
print(json.dumps({"kv_tokens": settings["kv_cache_tokens"], "graphs": settings["graphs"]}))
"""


def starts(folder: Any, repeat: int = 2) -> dict[str, Any]:
    """Seconds from the start of a process until an LLM with all defaults is ready, and its KV cache, plain and with n-gram
    drafts interleaved. The first of each compiles kernels and does not count."""
    ngram = json.dumps(NGRAM.effective())
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "ngram k=4": []}
    for i in range(repeat + 1):
        for name, given in (("plain", "null"), ("ngram k=4", ngram)):
            start = time.perf_counter()
            command = [sys.executable, "-c", START, str(folder), given, DEVICE.type]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise RuntimeError(done.stderr[-600:])
            one = json.loads(done.stdout.splitlines()[-1])
            found[name].append({"seconds": time.perf_counter() - start, "compiles": i == 0, **one})
            print(name, found[name][-1], flush=True)
    seconds = {name: statistics.median(one["seconds"] for one in all_[1:]) for name, all_ in found.items()}
    kv = {name: statistics.median(one["kv_tokens"] for one in all_[1:]) for name, all_ in found.items()}
    return {
        "starts": found, "seconds": seconds, "kv_tokens": kv,
        "seconds_ngram_over_plain": seconds["ngram k=4"] / seconds["plain"],
        "kv_tokens_ngram_over_plain": kv["ngram k=4"] / kv["plain"],
    }  # fmt: skip
