"""Speed of the CPU kernels at the shapes of SmolLM2-135M.

Gives the GB/s of weights read for 1 to 32 tokens, compared with torch's linear layer and with oneDNN's on packed weights, and
the time of a whole step. There are 30 layers with weights of their own, so that weights come from memory, as in a real model.

    python benchmarks/cpu/kernels.py [--quick]

Prints the memory's read bandwidth first, which is the limit, and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from machine import describe
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels
from forerun.kernels.cpu import CpuKernels, Stack, kernels
from forerun.models.weights import Dense, Matrix

HIDDEN, INNER, LAYERS, VOCAB = 576, 1536, 30, 49152
SHAPE = AttentionShape(9, 3, 64)
ROWS = (1, 2, 4, 5, 8, 9, 16, 32)
BLOCK, EPS = 16, 1e-5


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of one call, after two warm-up calls."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        work()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth() -> float:
    """The GB/s of all threads together in a sum over 256 MB."""
    words = torch.ones(1 << 25, dtype=torch.int64)
    return words.nbytes / seconds(words.sum, 10) / 1e9


def random(*shape: int) -> Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).bfloat16()


def matrix(rows: int, columns: int) -> Matrix:
    return Dense(random(rows, columns))


class Layer:
    """Random weights of one layer, with its KV pages."""

    def __init__(self, pages: int) -> None:
        self.qkv = matrix((SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim, HIDDEN)
        self.qkv_bias = self.q_norm = self.k_norm = self.out_bias = None
        self.out = matrix(HIDDEN, SHAPE.heads * SHAPE.head_dim)
        self.gate_up, self.down = matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)
        self.norm = self.attention_norm = self.mlp_norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
        self.keys, self.values = torch.randn(2, pages, SHAPE.kv_heads, BLOCK, SHAPE.head_dim).bfloat16()


def one_row(context: int, tokens: int) -> Batch:
    """A batch of one row with `tokens` tokens after `context` positions."""
    positions = torch.arange(context, context + tokens)
    table = torch.arange((context + tokens + BLOCK - 1) // BLOCK, dtype=torch.int32)[None]
    return Batch(positions, positions, torch.tensor([0, tokens], dtype=torch.int32), table, torch.arange(tokens))


def step(k: Kernels, layers: list[Layer], head: Matrix, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
    for layer in layers:
        qkv = k.norm_linear(x, layer.norm, EPS, layer.qkv, None)
        x = k.linear_add(k.attend(qkv, SHAPE, cos, sin, None, None, layer.keys, layer.values, batch), layer.out, None, x)
        x = k.linear_add(k.norm_gate_up(x, layer.norm, EPS, layer.gate_up), layer.down, None, x)
    return k.norm_logits(x, layers[0].norm, EPS, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, the C kernels only")
    quick = parser.parse_args().quick
    repeats = 7 if quick else 15
    limit = read_bandwidth()
    print(f"memory: {limit:.1f} GB/s read by {torch.get_num_threads()} threads")

    torch.manual_seed(0)
    k = kernels(torch.bfloat16)
    layers, head = [Layer(64) for _ in range(LAYERS)], matrix(VOCAB, HIDDEN)
    norm = layers[0].norm
    products: dict[str, tuple[list[Matrix], int, Callable[[Tensor, Matrix, Tensor], Tensor]]] = {
        "qkv": ([y.qkv for y in layers], HIDDEN, lambda x, w, r: k.norm_linear(x, norm, EPS, w, None)),
        "out": ([y.out for y in layers], HIDDEN, lambda x, w, r: k.linear_add(x, w, None, r)),
        "gate_up": ([y.gate_up for y in layers], HIDDEN, lambda x, w, r: k.norm_gate_up(x, norm, EPS, w)),
        "down": ([y.down for y in layers], INNER, lambda x, w, r: k.linear_add(x, w, None, r)),
        "logits": ([head], HIDDEN, lambda x, w, r: k.norm_logits(x, norm, EPS, w)),
    }
    result: dict[str, object] = {"memory_gb_s": limit, **describe()}
    print(f"{'GB/s':8} {'rows':>4} {'forerun':>8}" + ("" if quick else f" {'F.linear':>8} {'packed':>8}"))
    for name, (weights, width, call) in products.items():
        size = sum(w.values.nbytes for w in weights) / 1e9
        for rows in ROWS:
            x, residual = random(rows, width), random(rows, HIDDEN)
            ours = size / seconds(lambda: [call(x, w, residual) for w in weights], repeats)  # noqa: B023
            line = [ours]
            if not quick:
                onednn = torch.ops.mkldnn
                packed = [onednn._reorder_linear_weight(w.values, rows) for w in weights]
                line.append(size / seconds(lambda: [F.linear(x, w.values) for w in weights], repeats))  # noqa: B023
                call = lambda: [onednn._linear_pointwise(x, w, None, "none", [], "") for w in packed]  # noqa: B023, E731
                line.append(size / seconds(call, repeats))
            print(f"{name:8} {rows:4} " + " ".join(f"{v:8.1f}" for v in line), flush=True)
            result[f"{name}_{rows}"] = [round(v, 2) for v in line]

    angles = torch.arange(1024)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos, sin = angles.cos(), angles.sin()
    weights_gb = sum(w.values.nbytes for ws, _, _ in products.values() for w in ws) / 1e9
    stack = None
    if isinstance(k, CpuKernels):
        stack = Stack(k, layers, [SHAPE] * LAYERS, EPS, [y.keys for y in layers], [y.values for y in layers])
    for rows in (1, 2, 5, 9, 16, 32):
        batch, x = one_row(300, rows), random(rows, HIDDEN)
        took = [seconds(lambda: step(k, layers, head, x, cos, sin, batch), 2 * repeats)]  # noqa: B023
        if stack is not None:
            whole = stack
            took.append(seconds(lambda: k.norm_logits(whole(x, cos, sin, batch), norm, EPS, head), 2 * repeats))  # noqa: B023
        told = ", layers in one call: ".join(f"{t * 1e3:6.2f} ms ({weights_gb / t:.1f} GB/s)" for t in took)
        print(f"step of {rows:2} tokens, context 300: {told}")
        result[f"step_{rows}_ms"] = [round(t * 1e3, 3) for t in took]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
