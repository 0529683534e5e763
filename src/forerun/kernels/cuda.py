"""The kernels for CUDA. Knows which launch suits how many tokens: up to FEW_TOKENS the Triton products of a decode step
(cuda_products.py), above them the vendor's matrix product with small kernels between; attention is in cuda_attention.py.

Everything can be captured in a CUDA graph: nothing waits for the host and every shape is known to it. A decode step that
is captured says first what it is: `kernels.bounded(width, context)`. Launches on one stream at a time only, since the
attention of two would count their programs in one place.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Layers, RunLayers, one_by_one
from forerun.kernels import cuda_products as products
from forerun.kernels.cuda_attention import attend_decode, attend_ragged
from forerun.kernels.cuda_products import AFTER_WAIT, AT_ONCE, Tiles, launch, power_of_two
from forerun.types import require

FEW_TOKENS = 16


def few_tokens(hidden: int) -> int:
    """Up to how many tokens the Triton products beat the vendor's in a step of a model so wide. Seen on an H200, ms a step,
    Triton's / the vendor's: hidden 576, 32 tokens 0.79 / 1.11, 40 tokens 0.78 / 1.03, 160 tokens 0.98 / 1.20; 1024, 32
    tokens 2.01 / 2.17, 40 tokens 1.29 / 1.55, 160 tokens 2.72 / 2.34; 4096, 40 tokens 5.68 / 5.51."""
    return 320 if hidden <= 768 else 64 if hidden <= 1536 else FEW_TOKENS


# (outputs, k, gate): the fastest cut for up to 16 tokens, measured on an H200 by benchmarks/gpu/kernels.py, of shapes that were
TUNED: dict[tuple[int, int, bool], Tiles] = {
    # SmolLM2-135M: q k v, out, gate and up, down, head
    (960, 576, False): Tiles(16, 4, 0, 3),
    (576, 576, False): Tiles(8, 2, 0, 2),
    (1536, 576, True): Tiles(8, 4, 0, 2),
    (576, 1536, False): Tiles(8, 4, 0, 2),
    (49152, 576, False): Tiles(64, 8, 128, 4),
    # Qwen3-0.6B
    (4096, 1024, False): Tiles(8, 2, 0, 2, apart=True),
    (1024, 2048, False): Tiles(8, 4, 0, 2),
    (3072, 1024, True): Tiles(32, 4, 128, 5, apart=True),
    (1024, 3072, False): Tiles(8, 8, 0, 2),
    (151936, 1024, False): Tiles(64, 4, 128, 4, apart=True),
    # Llama-3.1-8B
    (6144, 4096, False): Tiles(16, 4, 512, 3, 4, apart=True),
    (4096, 4096, False): Tiles(8, 4, 512, 3, 4),
    (14336, 4096, True): Tiles(32, 4, 256, 3, apart=True),
    (4096, 14336, False): Tiles(8, 4, 512, 3, 4),
    (128256, 4096, False): Tiles(64, 4, 128, 4, apart=True),
}


# the same for more tokens, by the most that it is for, where not the usual cut was fastest
WIDE = Tiles(32, 4, 128, 4, apart=True, tokens=64)
MANY: dict[int, dict[tuple[int, int, bool], Tiles]] = {
    32: {(1536, 576, True): WIDE, (576, 1536, False): WIDE._replace(tokens=32), (960, 576, False): WIDE._replace(tokens=32)},
    64: {(3072, 1024, True): WIDE},
    128: {(1536, 576, True): WIDE},
    256: {(1536, 576, True): WIDE, (960, 576, False): Tiles(32, 4, 64, 5, apart=True, tokens=64)},
}


def choose(weight: Tensor, total: int, gate: bool = False) -> Tiles:
    """How to cut the product of `total` tokens with a weight [n,k] ([2n,k] with gate): as measured, or as shapes most like
    it were."""
    n, k = weight.shape[0] // 2 if gate else weight.shape[0], weight.shape[1]
    table = TUNED if total <= FEW_TOKENS else next((MANY[most] for most in MANY if total <= most), MANY[256])
    for (tuned_n, tuned_k, tuned_gate), tiles in table.items():
        if (tuned_k, tuned_gate) == (k, gate) and abs(tuned_n - n) * 100 <= tuned_n:  # a head cut to the tokenizer's ids
            return tiles
    if total > FEW_TOKENS:
        if n >= 32768:  # a head
            return Tiles(64, 4, 128, 3, apart=True, tokens=64) if total <= 32 else Tiles(128, 8, 64, 4, apart=True, tokens=64)
        return Tiles(16, 4, 128, 4, apart=True, tokens=64)
    apart = k >= 1024
    if n >= 32768:  # a head
        return Tiles(64, 4, 128, 4, apart=apart)
    if gate:
        return Tiles(32, 4, 256, 3, apart=True) if apart else Tiles(8, 4, 0, 2)
    if k <= 3072:
        return Tiles(8, 4 if k <= 2048 else 8, 0, 2, apart=apart)
    return Tiles(8 if n <= k else 16, 4, 512, 3, 4, apart=apart)


class CudaKernels:
    """The kernels for bfloat16 or float16 on a CUDA device. width: every row of a batch has so many tokens (None: any
    numbers, as in prefill); context: positions are below it. Up to 16 tokens, each output of a layer is summed alike
    however many there are."""

    def __init__(
        self,
        device: torch.device | str,
        width: int | None = None,
        context: int = 0,
        arrived: Tensor | None = None,
        few: int = FEW_TOKENS,
    ) -> None:
        self.width, self.context = width, context
        self.few = few  # up to so many tokens the products are Triton's
        self.device = torch.device(device)
        # counts the programs of an attention launch that are done, for each row and key head; every launch leaves it zero
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device=self.device) if arrived is None else arrived
        hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] >= 9
        self.pdl = AFTER_WAIT if hopper else 0  # see cuda_products.py

    def bounded(self, width: int, context: int) -> CudaKernels:
        """For batches whose rows have `width` tokens each, at positions below `context`: a decode step with k = width - 1.
        The bound sizes the launch; a short context in it is found out on the device and costs little."""
        require(1 <= width <= 128, "width", width, "give 1 to 128 tokens a row")
        require(context >= 1, "context", context, "give the longest context of the step, for instance 4096")
        return CudaKernels(self.device, width, context, self.arrived, self.few)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] > self.few:
            return F.linear(self.rms_norm(x, norm, eps), weight, bias)
        out = x.new_empty(x.shape[0], weight.shape[0])
        self._normed_product(choose(weight, x.shape[0]), x, norm, eps, weight, bias, out)
        return out

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        given = (qkv, shape, cos, sin, q_norm, k_norm, key_pages, value_pages, batch)
        if self.width is None:
            return attend_ragged(*given)
        return attend_decode(*given, self.width, self.context, self.arrived, self.pdl)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if x.shape[0] > self.few:
            return residual + F.linear(x, weight, bias)
        out = torch.empty_like(residual)
        launch(choose(weight, x.shape[0]), self.pdl, x, None, 0.0, weight, bias, residual, out)
        return out

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        total, inner = x.shape[0], weight.shape[0] // 2
        out = x.new_empty(total, inner)
        if total > self.few:
            both = F.linear(self.rms_norm(x, norm, eps), weight)
            products.silu_mul_kernel[(total, triton.cdiv(inner, 1024))](both, out, inner, 1024, False)
        else:
            self._normed_product(choose(weight, total, True), x, norm, eps, weight, None, out, gate=True)
        return out

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if x.shape[0] > self.few:
            normed = self.rms_norm(x, norm, eps)
            if self.device.type == "cuda":
                return torch.mm(normed, weight.T, out_dtype=torch.float32)
            return F.linear(normed.float(), weight.float())
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        self._normed_product(choose(weight, x.shape[0]), x, norm, eps, weight, None, out)
        return out

    def norm_argmax(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """The index of the largest logit, of equals the first, without storing the logits.  [N,H] -> [N] int64"""
        total = x.shape[0]
        if total > self.few:
            return self.argmax(self.norm_logits(x, norm, eps, weight))
        tiles = choose(weight, total)
        blocks = triton.cdiv(weight.shape[0], tiles.columns)
        tops = x.new_empty(total, blocks, dtype=torch.float32)
        firsts = x.new_empty(total, blocks, dtype=torch.int32)
        self._normed_product(tiles, x, norm, eps, weight, None, tops, firsts)
        return self._best(tops, firsts)

    def argmax(self, logits: Tensor) -> Tensor:
        """The index of each row's largest logit, of equals the first.  [N,V] -> [N] int64"""
        total, v = logits.shape
        blocks = triton.cdiv(v, 4096)
        tops = logits.new_empty(total, blocks, dtype=torch.float32)
        firsts = logits.new_empty(total, blocks, dtype=torch.int32)
        products.block_best_kernel[(total, blocks)](logits, tops, firsts, v, 4096, self.pdl, **self._launch())
        return self._best(tops, firsts)

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        k = x.shape[1]
        products.rms_norm_kernel[(x.shape[0],)](x, norm, out, eps, k, power_of_two(k), self.pdl, **self._launch())
        return out

    def bind(self, layers: Layers) -> RunLayers:
        return partial(self._run, self.chained(), layers)

    def chained(self) -> CudaKernels:
        """The same for launches whose chain of predecessors has waited for all that positions and block tables come from."""
        chained = copy.copy(self)
        chained.pdl = AT_ONCE if self.pdl else 0
        return chained

    def _run(self, chained: CudaKernels, layers: Layers, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        """The first layer's launches see to it that what stands before them is complete when the others' begin."""
        x = one_by_one(self, layers, x, batch, first, first + 1)
        return one_by_one(chained, layers, x, batch, first + 1, last)

    def _normed_product(
        self, tiles: Tiles, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out: Tensor,
        best: Tensor | None = None, gate: bool = False,
    ) -> None:
        if tiles.apart:
            launch(tiles, self.pdl, self.rms_norm(x, norm, eps), None, eps, weight, bias, None, out, best, gate)
        else:
            launch(tiles, self.pdl, x, norm, eps, weight, bias, None, out, best, gate)

    def _best(self, tops: Tensor, firsts: Tensor) -> Tensor:
        total, blocks = tops.shape
        out = firsts.new_empty(total, dtype=torch.int64)
        products.best_kernel[(total,)](tops, firsts, out, blocks, power_of_two(blocks), self.pdl, **self._launch())
        return out

    def _launch(self) -> dict[str, int | bool]:
        return {"num_warps": 4, "launch_pdl": True} if self.pdl else {"num_warps": 4}
