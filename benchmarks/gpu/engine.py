"""The engine on one GPU: correctness first, then what the issue's bars ask for; every record is written as it is made.

    PYTHONPATH=src python3 benchmarks/gpu/engine.py --out DIR [--gguf FILE] [--prompts FILE] [--parts limit,check,replay,tokens]

--gguf: the default model's GGUF file, for real weights; without it random ones of its shape (then acceptance means nothing).
--prompts: {"repeat": [[ids]...], "random": [[ids]...]}. Qwen3-0.6B and Llama-3.1-8B are shapes with random weights: they
tell step times, never acceptance. Times are medians over replays of captured steps, by device events; tokens/s are wall
clock over whole batches, prompts included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters.table import TABLE, Surroundings
from forerun.engine.engine import Engine
from forerun.engine.fixed import FixedStep, Key
from forerun.models import hub
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import Target
from forerun.types import Request, SamplingParams

DEVICE = torch.device("cuda")
SHAPES = {
    "SmolLM2-135M": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, Rope(100000.0), tied=True),
    "Qwen3-0.6B": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 8192, 1e-6, Rope(1e6), qk_norm=True, tied=True),
    "Llama-3.1-8B": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, Rope(5e5)),
}
NGRAM = Speculation("ngram", 4, 2, 5)


class NoText:
    """A detokenizer for ids that mean nothing."""

    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def engine(target: Target, speculation: Speculation | None = None, rows: int = 32, drafter: Target | None = None) -> Engine:
    config = EngineConfig(max_model_len=2048, max_num_seqs=rows, kv_cache_tokens=rows * 2048, speculation=speculation)

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, fixed: bool) -> Any:
        if speculation is None:
            return None
        vocab = target.config.vocab_size
        return TABLE[speculation.method](speculation, Surroundings(slots, mirror, sampling, kv, config, fixed, vocab, drafter))

    return Engine(target, config, make, NoText)


def run(it: Engine, prompts: list[list[int]], tokens: int, temperature: float, **more: Any) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers."""
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    it.scheduler.pages.clear()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=i, **more)
        it.add(Request(str(i), tuple(prompt), params, tokens, i))
    while it.has_work:
        for event in it.step():
            answers[event.request_id] += event.tokens
    torch.cuda.synchronize()
    return time.perf_counter() - start, list(answers.values())


def limit() -> dict[str, float]:
    """Copy bandwidth, and what replaying a graph costs."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copy = device_ms(lambda: b.copy_(a), 20)
    x = torch.zeros(32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            x.add_(1)
    return {"copy_TB_per_s": 2 * a.numel() / copy / 1e9, "tiny_kernel_us": device_ms(graph.replay, 50) * 10}


def device_ms(launch: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds of a launch, by events."""
    for _ in range(3):
        launch()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def fill(it: Engine, rows: int, context: int) -> None:
    """Give the first slots sequences of random ids with pages of their own, alive and far from their limit."""
    assert isinstance(it._step, FixedStep)
    lives, slots, block = it._step.body.lives, it.slots, it.config.block_size
    each = -(-(context + 600) // block)
    for slot in range(rows):
        ids = torch.randint(0, it._vocab, (context,))
        slots.tokens[slot, :context] = ids.to(DEVICE)
        slots.length[slot] = context
        slots.block_table[slot, :each] = torch.arange(1 + slot * each, 1 + (slot + 1) * each, dtype=torch.int32, device=DEVICE)
        lives.alive[slot], lives.limit[slot], lives.draft_size[slot] = True, 2000, 0


@torch.inference_mode()
def replay_times(
    target: Target, widths: tuple[int, ...], rows: tuple[int, ...], contexts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Milliseconds of a captured step, drafting included where there are drafts."""
    cells = []
    most = max(rows)
    for width in widths:
        it = engine(target, Speculation("ngram", width, 2, 5) if width else None, most)
        assert it.graphs is not None
        for count in rows:
            for context in contexts:
                fill(it, count, context)
                slot, k = list(range(count)), [width] * count
                it.graphs.run(Key(count, width), slot, k)
                ms = device_ms(lambda: it.graphs.run(Key(count, width), slot, k), 60)  # noqa: B023
                cells.append({"rows": count, "k": width, "context": context, "ms": ms})
                print(cells[-1], flush=True)
        print(f"graphs: {it.graphs.seconds:.2f} s, {it.graphs.bytes / 1e6:.0f} MB", flush=True)
        torch.cuda.empty_cache()
    return cells


def no_waiting(target: Target, prompts: list[list[int]]) -> dict[str, Any]:
    """Decode in the steady state with every synchronisation an error; the step's own event wait is the only wait."""
    it = engine(target, NGRAM, 8)
    for i, prompt in enumerate(prompts[:8]):
        it.add(Request(str(i), tuple(prompt), SamplingParams(temperature=0, max_tokens=200), 200, i))
    for _ in range(8):
        it.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(15):
            it.step()
        problem = None
    except RuntimeError as error:
        problem = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while it.has_work:
        it.step()
    return {"steps": 15, "problem": problem}


def host_time(target: Target, rows: int, speculation: Speculation | None, prompts: list[list[int]]) -> dict[str, float]:
    """Microseconds of host work a step, without waiting for the device, beside the device's milliseconds."""
    it = engine(target, speculation, rows)
    many = (prompts * rows)[:rows]
    for i, prompt in enumerate(many):
        it.add(Request(str(i), tuple(prompt), SamplingParams(temperature=0, max_tokens=300), 300, i))
    for _ in range(10):
        it.step()
    host, whole = [], []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        it.step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    while it.has_work:
        it.step()
    return {"rows": rows, "host_us": statistics.median(host) * 1e6, "whole_us": statistics.median(whole) * 1e6}


def check(target: Target, folder: Path | None, prompts: list[list[int]], twenty: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens in float32 against the CPU engine's; n-gram against plain; sampled first tokens by chi-square."""
    found: dict[str, Any] = {}
    plain, ngram = engine(target), engine(target, NGRAM)
    for count in (1, 8, 32):
        _, a = run(plain, prompts[:count], 128, 0.0)
        _, b = run(ngram, prompts[:count], 128, 0.0)
        drafts = ngram.stats.drafts
        found[f"bf16 n-gram identical to plain, {count} requests"] = sum(x == y for x, y in zip(a, b, strict=True))
        print(f"{count} requests, acceptance {drafts.acceptance_rate}: {found}", flush=True)
    _, seeded = run(plain, prompts[:8], 64, 0.8)
    _, drafted = run(ngram, prompts[:8], 64, 0.8)
    found["bf16 seeded samples identical, 8 requests"] = sum(x == y for x, y in zip(seeded, drafted, strict=True))
    everything = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2, "min_tokens": 4}
    _, a = run(plain, prompts[:4], 48, 0.9, **everything)
    _, b = run(ngram, prompts[:4], 48, 0.9, **everything)
    found["bf16 every parameter identical, 4 requests"] = sum(x == y for x, y in zip(a, b, strict=True))

    if folder is not None:
        on_gpu, on_cpu = (Target.load(folder, torch.float32, device) for device in ("cuda", "cpu"))
        _, gpu = run(engine(on_gpu, None, 20), twenty, 128, 0.0)
        config = EngineConfig(max_model_len=2048, max_num_seqs=20, kv_cache_tokens=20 * 512)
        cpu_engine = Engine(on_cpu, config, lambda *_: None, NoText)
        answers: dict[str, list[int]] = {str(i): [] for i in range(len(twenty))}
        tops: dict[str, list[Any]] = {str(i): [] for i in range(len(twenty))}
        for i, prompt in enumerate(twenty):
            params = SamplingParams(temperature=0, max_tokens=128, logprobs=2)
            cpu_engine.add(Request(str(i), tuple(prompt), params, 128, i))
        while cpu_engine.has_work:
            for event in cpu_engine.step():
                answers[event.request_id] += event.tokens
                tops[event.request_id] += event.logprobs
        differences = []
        for i, ids in enumerate(gpu):
            at = next((j for j, (x, y) in enumerate(zip(ids, answers[str(i)], strict=True)) if x != y), None)
            if at is not None:
                top = tops[str(i)][at].top
                differences.append({"prompt": i, "at": at, "top2_gap": top[0][1] - top[1][1]})
        found["float32 greedy, 20 prompts of 128 tokens, against the CPU engine"] = {
            "identical": len(gpu) - len(differences),
            "differences": differences,
        }
    found["no host synchronisation"] = no_waiting(target, prompts)
    return found


def tokens_per_second(target: Target, prompts: dict[str, list[list[int]]], repeat: int = 4) -> list[dict[str, Any]]:
    cells = []
    arms = {"plain": None, "ngram k=4": NGRAM, "ngram k=8": Speculation("ngram", 8, 2, 5)}
    engines = {name: engine(target, speculation, 32) for name, speculation in arms.items()}
    for kind, temperature in (("repeat", 0.0), ("random", 1.0)):
        for count in (1, 8, 32):
            samples: dict[str, list[float]] = {name: [] for name in engines}
            length: dict[str, float] = {}
            for i in range(repeat + 1):
                for name in list(engines) if i % 2 == 0 else list(engines)[::-1]:
                    it = engines[name]
                    it.stats = type(it.stats)()
                    seconds, _ = run(it, prompts[kind][:count], 256, temperature)
                    if i:
                        samples[name].append(count * 256 / seconds)
                    length[name] = it.stats.drafts.acceptance_length or 1.0
            for name, rates in samples.items():
                cell = {"kind": kind, "requests": count, "arm": name, "tokens_per_s": rates, "acceptance_length": length[name]}
                cell["median"] = statistics.median(rates)
                cell["over_plain"] = statistics.median(a / b for a, b in zip(rates, samples["plain"], strict=True))
                cells.append(cell)
                print({k: v for k, v in cell.items() if k != "tokens_per_s"}, flush=True)
    return cells


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--gguf")
    options.add_argument("--prompts", type=Path)
    options.add_argument("--parts", default="limit,check,replay,tokens")
    options.add_argument("--shapes", default="SmolLM2-135M,Qwen3-0.6B,Llama-3.1-8B")
    options.add_argument("--rows", default="1,8,32,128")
    options.add_argument("--widths", default="0,2,4,8,16")
    options.add_argument("--few", type=int, help="Triton's products up to so many tokens (default: the kernels' own)")
    given = options.parse_args()
    parts = given.parts.split(",")
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "weights": "real" if given.gguf else "random",
    }  # fmt: skip

    def save(name: str, value: Any) -> None:
        record[name] = value
        (given.out / "engine.json").write_text(json.dumps(record, indent=1))
        print(f"[{time.perf_counter() - begin:.0f} s] {name} done", flush=True)

    begin = time.perf_counter()
    if "limit" in parts:
        save("limit", limit())
        print(record["limit"])
    rng = random.Random(0)
    prompts = {
        kind: [[rng.randrange(100, 40000) for _ in range(n)] for _ in range(32)]
        for kind, n in (("repeat", 300), ("random", 200))
    }
    if given.prompts:
        prompts = json.loads(given.prompts.read_text())
    folder = hub.resolve(given.gguf) if given.gguf else None
    for name in given.shapes.split(","):
        small = name == "SmolLM2-135M"
        real = small and folder is not None
        target = Target.load(folder, torch.bfloat16, DEVICE) if real and folder else Target.random(SHAPES[name], device=DEVICE)
        if given.few:
            target.kernels.few = given.few
        if small and "check" in parts:
            twenty = [p[: 40 + 7 * i] for i, p in enumerate(prompts["repeat"][:20])]
            save("check", check(target, folder, prompts["repeat"], twenty))
            print(json.dumps(record["check"], indent=1))
        if "replay" in parts:
            widths = tuple(int(n) for n in given.widths.split(","))
            rows = tuple(int(n) for n in given.rows.split(","))
            save(f"replay {name}", replay_times(target, widths, rows, (512,)))
        if small and "tokens" in parts:
            save("host", [host_time(target, n, s, prompts["repeat"]) for n in (1, 8, 32) for s in (None, NGRAM)])
            print(record["host"])
            save("tokens_per_s", tokens_per_second(target, prompts))
        del target
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
