"""The kernels for CUDA. Batches of up to `few` tokens take the Triton products (cuda_products.py, with the tiles that
cuda_cuts.py chooses); larger ones take cuBLAS with small Triton kernels between the products. Attention is in
cuda_attention.py (decode) and cuda_prefill.py (prompts).

Everything can be captured in a CUDA graph: no launch waits for the host, and the host knows every shape. A captured decode
step uses `kernels.bounded(width, context)`. Launch on one stream at a time: concurrent attention launches would share one
counter of finished programs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime import driver

from forerun.kernels import AttentionShape, Batch, Layers, RunLayers, one_by_one
from forerun.kernels import cuda_products as products
from forerun.kernels.cuda_attention import attend_decode
from forerun.kernels.cuda_cuts import FEW_TOKENS, choose, fitting
from forerun.kernels.cuda_prefill import attend_ragged, store
from forerun.kernels.cuda_products import AFTER_WAIT, AT_ONCE, Tiles, launch, launch_options, power_of_two
from forerun.models.weights import Dense, Matrix
from forerun.types import require
from forerun.verify.sampling import BROKEN


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 1 << 18  # Triton's interpreter has no limit
    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]  # the limit that Triton checks at a launch


class CudaKernels:
    """The kernels for bfloat16 or float16 on a CUDA device. width: every row of a batch has this many tokens (None: any
    number, as in prefill); context: all positions are below it; ragged: rows have 1 to `width` tokens. few: batches of up to
    this many tokens take the Triton products. arrived: the counter of attention programs, shared by kernels made from each
    other. Batches of up to 16 tokens are batch-invariant: a token's result does not depend on the others, bit for bit."""

    def __init__(
        self,
        device: torch.device | str,
        width: int | None = None,
        context: int = 0,
        arrived: Tensor | None = None,
        few: int = FEW_TOKENS,
        ragged: bool = False,
    ) -> None:
        self.width, self.context, self.ragged = width, context, ragged
        self.few = few
        self.device = torch.device(device)
        self.shared = _shared_memory(self.device)
        # how many programs of an attention launch are done, for each row and key head; every launch resets it to zero
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device=self.device) if arrived is None else arrived
        hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] >= 9
        self.pdl = AFTER_WAIT if hopper else 0  # see cuda_products.py

    def bounded(self, width: int, context: int, ragged: bool = False) -> CudaKernels:
        """Kernels for decode steps with k = width - 1 (see Kernels.bounded). The bounds size the attention launch. The device
        reads the true lengths, so a short context in a launch for a long one costs little. Raises SettingError for a width
        above 128."""
        require(1 <= width <= 128, "width", width, "give 1 to 128 tokens a row")
        require(context >= 1, "context", context, "give the longest context of the step, for instance 4096")
        return CudaKernels(self.device, width, context, self.arrived, self.few, ragged)

    def multiplies(self, kind: str) -> bool:
        return kind == Dense.kind

    def embed(self, ids: Tensor, weight: Matrix) -> Tensor:
        return weight.embed(ids)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None) -> Tensor:
        if x.shape[0] > self.few:
            return F.linear(self.rms_norm(x, norm, eps), weight.values, bias)
        out = x.new_empty(x.shape[0], weight.rows)
        self._normed_product(self._cut(weight, x.shape[0]), x, norm, eps, weight, bias, out)
        return out

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        if x.shape[0] > self.few:
            return F.linear(x, weight.values, bias)
        out = x.new_empty(x.shape[0], weight.rows)
        launch(self._cut(weight, x.shape[0]), self.pdl, x, None, 0.0, weight.values, bias, None, out)
        return out

    def join(self, parts: Sequence[Tensor], norms: Sequence[Tensor | None], eps: float) -> Tensor:
        return products.join(parts, norms, eps, self.pdl)

    def attend(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        key_pages: Tensor, value_pages: Tensor, batch: Batch,
    ) -> Tensor:
        if shape.interleaved:
            raise TypeError("interleaved heads are not rotated on CUDA; put their rows into halves (loading.pair_halves)")
        given = (qkv, shape, cos, sin, q_norm, k_norm, key_pages, value_pages, batch)
        if self.width is None:
            return attend_ragged(*given)
        return attend_decode(*given, self.width, self.context, self.arrived, self.pdl, self.ragged)

    def linear_add(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor:
        if x.shape[0] > self.few:
            return residual + F.linear(x, weight.values, bias)
        out = torch.empty_like(residual)
        launch(self._cut(weight, x.shape[0]), self.pdl, x, None, 0.0, weight.values, bias, residual, out)
        return out

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        total, inner = x.shape[0], weight.rows // 2
        out = x.new_empty(total, inner)
        if total > self.few:
            both = F.linear(self.rms_norm(x, norm, eps), weight.values)
            products.silu_mul_kernel[(total, triton.cdiv(inner, 1024))](both, out, inner, 1024, False)
        else:
            self._normed_product(self._cut(weight, total, True), x, norm, eps, weight, None, out, gate=True)
        return out

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
        if x.shape[0] > self.few:
            return self.logits(self.rms_norm(x, norm, eps), weight)
        out = x.new_empty(x.shape[0], weight.rows, dtype=torch.float32)
        self._normed_product(self._cut(weight, x.shape[0]), x, norm, eps, weight, None, out)
        return out

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        if x.shape[0] > self.few:
            if self.device.type == "cuda":
                return torch.mm(x, weight.values.T, out_dtype=torch.float32)
            return F.linear(x.float(), weight.values.float())
        out = x.new_empty(x.shape[0], weight.rows, dtype=torch.float32)
        launch(self._cut(weight, x.shape[0]), self.pdl, x, None, 0.0, weight.values, None, None, out)
        return out

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return products.best(logits.contiguous(), 0, True, self.pdl)

    def store(
        self, kv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, k_norm: Tensor | None, key_pages: Tensor,
        value_pages: Tensor, batch: Batch,
    ) -> None:
        store(kv, shape, cos, sin, k_norm, key_pages, value_pages, batch)

    def argmax(self, logits: Tensor) -> Tensor:
        """The index of each row's largest logit, the first of equal ones; BROKEN where that logit is not finite.
        [N,V] -> [N] int64"""
        return products.best(logits, BROKEN, False, self.pdl)[0]

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        k = x.shape[1]
        products.rms_norm_kernel[(x.shape[0],)](x, norm, out, eps, k, power_of_two(k), self.pdl, **launch_options(4, self.pdl))
        return out

    def bind(self, layers: Layers) -> RunLayers:
        return partial(self._run, self.chained(), layers)

    def chained(self) -> CudaKernels:
        """The same kernels with PDL mode AT_ONCE, for launches behind one that has waited for all earlier work on the stream.
        See cuda_products.py."""
        chained = copy.copy(self)
        chained.pdl = AT_ONCE if self.pdl else 0
        return chained

    def _run(self, chained: CudaKernels, layers: Layers, x: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        """Layer 0 waits for all that was launched before the pass. So the later layers may start as early as they can."""
        if first == 0:
            x = one_by_one(self, layers, x, batch, 0, 1)
        return one_by_one(chained, layers, x, batch, max(first, 1), last)

    def _cut(self, weight: Matrix, total: int, gate: bool = False) -> Tiles:
        return fitting(choose(weight, total, gate), gate, self.shared)

    def _normed_product(
        self, tiles: Tiles, x: Tensor, norm: Tensor, eps: float, weight: Matrix, bias: Tensor | None, out: Tensor,
        gate: bool = False,
    ) -> None:
        if tiles.apart:
            launch(tiles, self.pdl, self.rms_norm(x, norm, eps), None, eps, weight.values, bias, None, out, gate)
        else:
            launch(tiles, self.pdl, x, norm, eps, weight.values, bias, None, out, gate)
