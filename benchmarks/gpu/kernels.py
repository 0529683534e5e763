"""The CUDA kernels alone. Checks them against their torch twins. Then times them in synthetic decode steps in CUDA graphs, with
the shapes of three models and random weights, different ones in each layer, and compares with the same steps on cuBLAS
products.

    PYTHONPATH=src python3 benchmarks/gpu/kernels.py [--sweep] [--out FOLDER]

--sweep first times every tile configuration ("cut") of every product and of attention, and runs the steps with the fastest. The
tables of kernels/cuda_cuts.py are its result. Needs one GPU of compute capability 9.0 or later. The records go to FOLDER.
"""

# ruff: noqa: B023  (the functions made in loops are captured and dropped before the loop goes on)
from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, cuda_attention, cuda_cuts, reference
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.cuda_cuts import few_tokens
from forerun.kernels.cuda_products import Tiles, parts
from forerun.models.weights import Dense, Matrix

EPS = 1e-5
BLOCK = 16
DEVICE = "cuda"


class Model(NamedTuple):
    name: str
    hidden: int
    attention: AttentionShape
    inner: int
    layers: int
    vocabulary: int
    norms: bool
    bar: float  # ms, for a plain step of one request at context 512

    def products(self) -> dict[str, tuple[int, int, bool]]:
        """(outputs, k, gate) of each product of a step. k: the length of the sums; gate: gate and up as one product."""
        heads, kv, dim = self.attention[:3]
        return {
            "qkv": ((heads + 2 * kv) * dim, self.hidden, False), "o": (self.hidden, heads * dim, False),
            "gate_up": (self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False), "head": (self.vocabulary, self.hidden, False),
        }

    def weight_bytes(self) -> int:
        each = {name: n * k * (4 if gate else 2) for name, (n, k, gate) in self.products().items()}
        return self.layers * sum(each[name] for name in ("qkv", "o", "gate_up", "down")) + each["head"]


MODELS = (
    Model("SmolLM2-135M", 576, AttentionShape(9, 3, 64, 0, EPS), 1536, 30, 49152, False, 0.55),
    Model("Qwen3-0.6B", 1024, AttentionShape(16, 8, 128, 0, EPS), 3072, 28, 151936, True, 0.85),
    Model("Llama-3.1-8B", 4096, AttentionShape(32, 8, 128, 0, EPS), 14336, 32, 128256, False, 4.2),
)


def randoms(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


def matrix(rows: int, columns: int) -> Matrix:
    return Dense(randoms(rows, columns, scale=columns**-0.5))


def graph_ms(work: Callable[[], Any], repeats: int = 5, least: int = 20, most: int = 400) -> tuple[float, float]:
    """Capture `work` in a CUDA graph and replay it in `repeats` runs. Returns the median ms of a replay over the runs, and
    their spread, (max - min) / median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    count = int(min(most, max(least, 15 / max(begin.elapsed_time(end), 1e-3))))  # runs of about 15 ms
    times = []
    for _ in range(repeats):
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference relative to the norm of `want`."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def hardware() -> dict[str, Any]:
    source, target = (torch.empty(1 << 31, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    source.normal_()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = statistics.median(times)
    moved = 2 * source.numel() * 2
    del source, target
    tiny = torch.zeros(1, device=DEVICE)

    def chain() -> None:
        for _ in range(100):
            tiny.add_(1)

    chained, _ = graph_ms(chain)
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.date.today().isoformat(), "copy_TB_s": round(moved / ms / 1e9, 3),
        "tiny_kernel_us": round(chained * 10, 2),
    }


# cuts -----------------------------------------------------------------------------------------------------------------


def cuts(n: int, k: int, gate: bool, normed: bool) -> list[Tiles]:
    """The cuts worth timing for a shape."""
    found = []
    rows = 2 if gate else 1
    if k <= 3072:
        for columns in (8, 16, 32):
            for warps in (2, 4, 8):
                for count in (2, 3, 4):
                    whole = sum(parts(k, count, 16 * warps))
                    held = columns * rows * whole / (warps * 32)  # weights that a thread holds
                    tokens = 16 * whole / (warps * 32)
                    if 16 <= held <= 192 and tokens <= 256 and 48 <= n // columns <= 800:
                        found.append(Tiles(columns, warps, 0, count))
    if n * rows >= 4000 or k >= 2000:
        for columns, warps, step, stages, split in (
            (8, 4, 512, 2, 4), (8, 4, 512, 3, 4), (8, 4, 256, 4, 4), (16, 2, 256, 4, 1), (16, 4, 512, 2, 4), (16, 4, 256, 3, 2),
            (16, 4, 512, 3, 4), (32, 4, 128, 5, 1), (32, 4, 256, 3, 1), (32, 4, 256, 4, 1),
            (64, 4, 64, 6, 1), (64, 4, 128, 4, 1), (64, 8, 128, 4, 1),
        ):
            size = columns * step * stages * 2 * rows + 32 * step * stages
            if size <= 200_000 and n // columns >= 60:
                for ahead in (512, 2048) if k >= 2048 else (512,):
                    found.append(Tiles(columns, warps, step, stages, split, ahead))
    if normed and k >= 1024:
        found = [tiles._replace(apart=True) for tiles in found]
    return found


def many_cuts(n: int, k: int, gate: bool, normed: bool, most: int) -> list[Tiles]:
    """The cuts worth timing for more than 16 tokens."""
    rows, loops = 2 if gate else 1, [(16, 4, 128, 4), (32, 4, 128, 4), (32, 4, 64, 5), (64, 4, 128, 3)]
    if most >= 64 or n >= 32768:
        loops += [(16, 4, 64, 5), (64, 8, 128, 3), (128, 8, 64, 4)]
    found = [Tiles(*loop, tokens=64) for loop in loops]
    if most == 32:
        found += [tiles._replace(tokens=32) for tiles in found]
    if most <= 64 and k <= 1536:  # several tiles of the cuts for up to 16 tokens
        found += [Tiles(16, 8, 0, 3), Tiles(16, 4, 0, 3), Tiles(8, 4, 0, 3), Tiles(16, 8, 0, 3, tokens=32)]
    if most == 256:
        found += [Tiles(*loop, tokens=128) for loop in ((32, 4, 64, 4), (64, 8, 64, 4), (128, 8, 64, 3))]
    found = [
        tiles for tiles in found if n // tiles.columns >= 8 and n // tiles.columns <= 4000
        and (tiles.columns * rows + tiles.tokens) * tiles.step * tiles.stages * 2 <= 210_000 and tiles.columns * rows <= 256
    ]
    apart = [tiles._replace(apart=True) for tiles in found]
    return found if not normed else apart + (found if k < 1024 and n < 32768 else [])


CLASSES = {  # the loads (rows, width, context) that time a class of tokens
    16: ((1, 1, 512), (1, 9, 512)),
    32: ((32, 1, 512),),
    64: ((8, 5, 512),),
    128: ((16, 5, 512), (128, 1, 512)),
    256: ((32, 5, 512),),
}


def cuts_for(most: int, kind: str, shape: tuple[int, int, bool]) -> list[Tiles]:
    normed = kind not in ("o", "down")
    return cuts(*shape, normed) if most == 16 else many_cuts(*shape, normed, most)


def table_for(most: int) -> dict[tuple[int, int, bool], Tiles]:
    return cuda_cuts.TUNED if most == 16 else cuda_cuts.MANY[most]


ATTENTION_CUTS = tuple(
    cuda_attention.Cut(warps, positions, 1, at_once=at_once, early=True)
    for warps, positions in ((4, 128), (8, 128), (8, 256)) for at_once in (4, 8)
)
ATTENTION_MANY = tuple(
    cuda_attention.Cut(warps, positions, 1, programs, 4, most, early, registers)
    for warps, positions, programs, most, early, registers in (
        (4, 128, 264, 16, False, 0), (4, 128, 264, 16, False, 128), (4, 128, 264, 8, False, 128), (4, 128, 1, 1, False, 128),
        (4, 64, 264, 16, False, 0), (4, 64, 264, 8, False, 0), (4, 64, 1, 1, False, 0), (8, 128, 264, 8, False, 128),
        (8, 128, 1, 1, False, 128), (8, 128, 264, 8, True, 128),
    )
)


def compile_product(job: tuple[int, str, int, int, bool, Tiles]) -> str:
    """Runs in a process of its own: compiles a kernel into Triton's cache and checks it. Returns the problem, or an empty
    text."""
    most, kind, n, k, gate, tiles = job
    try:
        weight = matrix(n * (2 if gate else 1), k)
        tokens = CLASSES[most][-1][0] * CLASSES[most][-1][1]
        norm, x, residual = randoms(k), randoms(tokens, k), randoms(tokens, n)
        table_for(most)[n, k, gate] = tiles
        run = CudaKernels(DEVICE, few=256)
        operation = {
            "qkv": lambda run, x, norm, residual, weight: run.norm_linear(x, norm, EPS, weight, None),
            "gate_up": lambda run, x, norm, residual, weight: run.norm_gate_up(x, norm, EPS, weight),
            "head": lambda run, x, norm, residual, weight: run.norm_logits(x, norm, EPS, weight),
        }.get(kind, lambda run, x, norm, residual, weight: run.linear_add(x, weight, None, residual))
        got = operation(run.chained(), x, norm, residual, weight)
        off = error(got, operation(reference, x.float(), norm.float(), residual.float(), Dense(weight.values.float())))
        return "" if off < 0.01 else f"differs by {off:.1e}"
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"


def compile_attention(job: tuple[Model, int, int, int, cuda_attention.Cut]) -> str:
    model, rows, width, context, cut = job
    try:
        use_attention(model, cut)
        step = Step(model._replace(layers=1, vocabulary=16, inner=16), 1200)
        batch = step.batch(rows, width, context)
        heads, kv, dim = model.attention[:3]
        qkv = randoms(rows * width, (heads + 2 * kv) * dim)
        CudaKernels(DEVICE).bounded(width, bound(context)).chained().attend(
            qkv, model.attention, step.cos, step.sin, step.head_norm, step.head_norm, step.layers[0].keys,
            step.layers[0].values, batch
        )
        torch.cuda.synchronize()
        return ""
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"


OWN_CUTS = dict(cuda_attention.CUTS)


def use_attention(model: Model, cut: cuda_attention.Cut | None) -> None:
    """Use this cut for heads of the model's width, with few rows and with many. None: the kernels' own cuts."""
    for few in (True, False):
        key = (few, model.attention.head_dim > 64)
        cuda_attention.CUTS[key] = cut or OWN_CUTS[key]


def bound(context: int) -> int:
    """The host's upper bound on the context, well above it, as in an engine."""
    return 8192 if context > 512 else 2048


# a whole step ---------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    keys: Tensor
    values: Tensor


class Step:
    """Decode steps of a model: `rows` requests with `width` tokens each, after `context` positions. cut: the cut of attention;
    None: the kernels' own."""

    def __init__(self, model: Model, pages: int) -> None:
        self.model = model
        self.cut: cuda_attention.Cut | None = None
        heads, kv, dim = model.attention[:3]
        hidden, inner = model.hidden, model.inner
        self.layers = [
            Layer(
                randoms(hidden), matrix((heads + 2 * kv) * dim, hidden), matrix(hidden, heads * dim),
                randoms(hidden), matrix(2 * inner, hidden), matrix(hidden, inner),
                randoms(pages, kv, BLOCK, dim), randoms(pages, kv, BLOCK, dim),
            )
            for _ in range(model.layers)
        ]
        self.norm, self.embedding = randoms(hidden), matrix(model.vocabulary, hidden)
        self.head_norm = randoms(dim) if model.norms else None
        angle = torch.outer(torch.arange(8192.0), 10000 ** -torch.linspace(0, 1, dim // 2)).to(DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()

    def batch(self, rows: int, width: int, context: int) -> Batch:
        positions = (context + torch.arange(width)).repeat(rows).to(DEVICE)
        per_row = -(-(context + width) // BLOCK)
        table = (1 + torch.randperm(rows * per_row)).view(rows, per_row).int().to(DEVICE)
        starts = (torch.arange(rows + 1) * width).int().to(DEVICE)
        ids = torch.randint(self.model.vocabulary, (rows * width,), device=DEVICE)
        return Batch(ids, positions, starts, table, torch.arange(rows * width, device=DEVICE))

    def forward(self, run: Any, batch: Batch, without: str = "", chained: bool = True) -> Tensor:
        """without: leave out one kind of launch, to measure its cost in the chain. chained: from the second layer on, each
        launch lets the next one begin at once, as in the model."""
        use_attention(self.model, self.cut)
        x = self.embedding.embed(batch.ids)
        heads, kv, dim = self.model.attention[:3]
        total = len(batch.ids)
        qkv = mixed = gated = x
        if without:
            qkv, mixed, gated = (x.new_zeros(total, size) for size in ((heads + 2 * kv) * dim, heads * dim, self.model.inner))
        first = run
        for i, layer in enumerate(self.layers):
            run = first if i == 0 or not chained else run.chained() if i == 1 else run
            if without != "qkv":
                qkv = run.norm_linear(x, layer.norm, EPS, layer.qkv, None)
            if without != "attention":
                mixed = run.attend(
                    qkv, self.model.attention, self.cos, self.sin, self.head_norm, self.head_norm, layer.keys, layer.values,
                    batch
                )
            if without != "o":
                x = run.linear_add(mixed, layer.out, None, x)
            if without != "gate_up":
                gated = run.norm_gate_up(x, layer.mlp_norm, EPS, layer.gate_up)
            if without != "down":
                x = run.linear_add(gated, layer.down, None, x)
        run = first
        if without == "head":
            return x
        return run.norm_logits(x, self.norm, EPS, self.embedding)


def check_step(step: Step, rows: int, width: int, context: int) -> float:
    """The largest error of a step's logits and keys against the torch twin in bfloat16. width 0: ragged rows, as in prefill.
    Only a few layers run, since layers of random weights magnify rounding."""
    kept, step.layers = step.layers, step.layers[:4]
    if width:
        batch, run = step.batch(rows, width, context), CudaKernels(DEVICE).bounded(width, context + width)
    else:
        counts = [context, 1, 37][:rows]
        whole = step.batch(rows, 1, context)
        positions = torch.cat([torch.arange(i * 20, i * 20 + count) for i, count in enumerate(counts)]).to(DEVICE)
        ids = torch.randint(step.model.vocabulary, (len(positions),), device=DEVICE)
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
        batch, run = whole._replace(ids=ids, positions=positions, row_start=starts), CudaKernels(DEVICE)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in step.layers]
    got = step.forward(run, batch)
    got_keys = [layer.keys.clone() for layer in step.layers]
    for layer, (key, value) in zip(step.layers, before, strict=True):
        layer.keys.copy_(key)
        layer.values.copy_(value)
    want = step.forward(reference, batch, chained=False)
    worst = max(error(a, layer.keys) for a, layer in zip(got_keys, step.layers, strict=True))
    step.layers = kept
    return max(error(got, want), worst)


def sweep(steps: list[Step], given: list[str], most: int) -> list[dict[str, Any]]:
    """Finds the fastest cut of each product and of attention for up to `most` tokens, one after the other, in the step itself.
    A launch's cost depends on its neighbours, since it overlaps their ends and beginnings. Sets TUNED or MANY, and steps'
    cuts."""
    jobs = [
        (most, kind, *shape, tiles) for step in steps for kind, shape in step.model.products().items() if kind in given
        for tiles in cuts_for(most, kind, shape)
    ]
    loads = CLASSES[most]
    attention_cuts = ATTENTION_CUTS if most == 16 else ATTENTION_MANY
    attention_jobs = [(step.model, *load, cut) for step in steps for load in loads for cut in attention_cuts]
    if "attention" not in given:
        attention_jobs = []
    began = time.time()
    with concurrent.futures.ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        problems: dict[Any, str] = dict(zip(jobs, pool.map(compile_product, jobs), strict=True))
        problems |= dict(zip(attention_jobs, pool.map(compile_attention, attention_jobs), strict=True))
    print(f"compiled {len(problems)} kernels in {time.time() - began:.0f} s", flush=True)
    for job, problem in problems.items():
        if problem:
            print("PROBLEM", job if isinstance(job[0], int) else (job[0].name, *job[1:]), problem)
    records = []
    for step in steps:
        batches = [step.batch(*load) for load in loads]
        shapes = step.model.products()

        def measure() -> list[float]:
            times = []
            for (_, width, context), batch in zip(loads, batches, strict=True):
                run = CudaKernels(DEVICE, few=256).bounded(width, bound(context)).chained()
                times.append(graph_ms(lambda: step.forward(run, batch), 3, 8, 40)[0])
            return times

        for kind in given:
            key: tuple[Any, ...]
            if kind == "attention":
                heads, kv, dim = step.model.attention[:3]
                key = (dim, heads // kv)
                candidates = [cut for cut in attention_cuts if not any(problems[step.model, *load, cut] for load in loads)]
                use = partial(setattr, step, "cut")
            else:
                key = shapes[kind]
                candidates = [tiles for tiles in cuts_for(most, kind, key) if not problems[most, kind, *key, tiles]]
                use = partial(table_for(most).__setitem__, key)
            timed = []
            for candidate in candidates:
                use(candidate)
                ms = measure()
                timed.append((sum(ms), candidate, ms))
                named = {"model": step.model.name, "kind": kind, "tokens": most}
                records.append({**named, "shape": key, "cut": candidate, "ms": ms})
            if not timed:
                continue
            timed.sort()
            use(timed[0][1])
            first = "  ".join(f"{tuple(map(int, cut))} " + "/".join(f"{t:.4f}" for t in ms) for _, cut, ms in timed[:4])
            print(most, step.model.name, kind, key, first, f"  worst {timed[-1][2][0]:.3f}", flush=True)
        for load, batch in zip(loads, batches, strict=True):
            run = CudaKernels(DEVICE, few=0).bounded(load[1], bound(load[2]))
            vendor, _ = graph_ms(lambda: step.forward(run, batch), 3, 8, 40)
            records.append({"model": step.model.name, "tokens": most, "load": load, "vendor_ms": vendor})
            print(most, step.model.name, load, f"vendor {vendor:.4f}", flush=True)
    return records


LOADS = ((1, 1, 512), (1, 9, 512), (1, 1, 4096), (1, 9, 4096), (8, 1, 512), (8, 5, 512), (32, 1, 512), (32, 5, 512))
PARTS = ("qkv", "attention", "o", "gate_up", "down", "head")


def time_steps(step: Step, brief: bool) -> list[dict[str, Any]]:
    records = []
    for rows, width, context in LOADS[: 2 if brief else len(LOADS)]:
        batch = step.batch(rows, width, context)
        run = CudaKernels(DEVICE, few=few_tokens(step.model.hidden)).bounded(width, bound(context))
        record: dict[str, Any] = {"model": step.model.name, "rows": rows, "width": width, "context": context}
        record["ms"], record["spread"] = graph_ms(lambda: step.forward(run, batch))
        if rows == 1 and context == 512:
            record["part_ms"] = {
                part: round(record["ms"] - graph_ms(lambda: step.forward(run, batch, without=part), 3)[0], 4) for part in PARTS
            }
        record["unchained_ms"], _ = graph_ms(lambda: step.forward(run, batch, chained=False))
        run.few = 0
        record["vendor_ms"], _ = graph_ms(lambda: step.forward(run, batch), 3)
        records.append(record)
    return records


def time_argmax() -> list[dict[str, Any]]:
    records = []
    run = CudaKernels(DEVICE)
    for tokens, vocabulary in ((1, 49152), (9, 151936), (160, 151936)):
        logits = torch.randn(tokens, vocabulary, device=DEVICE)
        assert torch.equal(run.argmax(logits), logits.argmax(-1))
        ours, _ = graph_ms(lambda: [run.argmax(logits) for _ in range(20)])
        torchs, _ = graph_ms(lambda: [logits.argmax(-1) for _ in range(20)])
        us, torch_us = round(ours * 50, 2), round(torchs * 50, 2)
        records.append({"tokens": tokens, "vocabulary": vocabulary, "us": us, "torch_us": torch_us})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", default="16", help="the classes of tokens for --sweep: 16, 32, 64, 128, 256")
    parser.add_argument("--models", default="0,1,2", help="the models, by number")
    parser.add_argument("--kinds", default="gate_up,down,qkv,o,attention,head", help="the launches for --sweep, in this order")
    parser.add_argument("--alone", action="store_true", help="only the sweep")
    parser.add_argument("--brief", action="store_true", help="only one request at context 512")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    torch.manual_seed(int(time.time()))
    result: dict[str, Any] = {"hardware": hardware()}
    print(result["hardware"], flush=True)
    models = [MODELS[int(i)] for i in given.models.split(",")]

    def save() -> None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu-kernels.json").write_text(json.dumps(result, indent=1, default=str))

    steps = [Step(model, 4400) for model in models]
    if given.sweep:
        result["sweep"] = []
        for most in given.tokens.split(","):
            result["sweep"] += sweep(steps, given.kinds.split(","), int(most))
            save()
    if given.alone:
        return
    result["checks"] = {}
    for step in steps:
        for rows, width, context in ((1, 1, 300), (1, 9, 700), (3, 5, 130), (8, 5, 600), (3, 0, 150)):
            worst = check_step(step, rows, width, context)
            result["checks"][f"{step.model.name} {rows} x {width} at {context}"] = worst
            print(f"{step.model.name} {rows} x {width} at {context}: differs from the twin by {worst:.1e}", flush=True)
    result["argmax"] = time_argmax()
    print(result["argmax"])
    result["steps"] = []
    for step in steps:
        result["steps"] += time_steps(step, given.brief)
        save()
    for r in result["steps"]:
        bar = next(m.bar for m in MODELS if m.name == r["model"])
        extra = f"  bar {bar}  {r['part_ms']}" if "part_ms" in r else ""
        ours = f"{r['ms']:.3f} ms (spread {r['spread']:.1%}), unchained {r['unchained_ms']:.3f}, vendor {r['vendor_ms']:.3f}"
        print(f"{r['model']:13} {r['rows']:2} x {r['width']} at {r['context']}: {ours}{extra}")


if __name__ == "__main__":
    main()
