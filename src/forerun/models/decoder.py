"""The target model: a decoder of the Llama family, from token ids to logits. The embedding, the order of the layers and the
head are here. A layer itself is computed in kernels/ (`one_by_one` in kernels/__init__.py), its shapes come from config.py.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels import AttentionShape, Batch, Kernels, Layers, RunLayers, reference
from forerun.models import loading, rope
from forerun.models.blocks import Blocks, formats
from forerun.models.config import ModelConfig
from forerun.models.weights import Weights
from forerun.types import require

LOG = logging.getLogger("forerun")

PADDING = 65  # a padded step computes at most this many positions past a sequence's end


class Forward(NamedTuple):
    """The result of a forward pass. logits: [N,V] float32, of the tokens that batch.logits_at names. hidden: the hidden
    states of the layers asked for, in the order asked, each [T,H] in the model's dtype."""

    logits: Tensor
    hidden: tuple[Tensor, ...]


class KVCache:
    """The keys and values of all layers, in pages. keys[i], values[i]: [pages, kv_heads, block_size, head_dim].

    A page is a number; the cache does not know which sequence has it. Several models can therefore share one allocation of
    pages: each has a KVCache of its own with the same number of pages and the same block size, and is given the same block
    tables. A drafter with keys and values of its own does so, and needs no allocator. Page 0 is the dummy page: inactive
    rows write there, and no sequence has it. Padding tokens write to no page.
    """

    def __init__(
        self, config: ModelConfig, pages: int, block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (config.layers, pages, config.kv_heads, block_size, config.head_dim)
        self.block_size = block_size
        self.pages = pages
        # zeroed: attention multiplies positions past a sequence's end by 0, and 0 times NaN is NaN
        self.keys = torch.zeros(shape, dtype=dtype, device=device).unbind()
        self.values = torch.zeros(shape, dtype=dtype, device=device).unbind()
        self.bound: tuple[Target, Kernels, RunLayers] | None = None  # what Target.forward last ran on this cache


class Target:
    """A model that is ready to run. dtype: the compute dtype; bytes: the memory that its weights take, of a mapped file that of
    the tensors; quantization: the formats of its matrices with their share of all values ("Q4_1 97 %, Q8_0 3 %"), None if none
    is in blocks; vocab: it gives logits for ids 0 .. vocab - 1."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, max_positions: int | None = None) -> None:
        """max_positions: the longest context to be ready for; None: the model's own. Raises SettingError for kernels that do
        not multiply a kind of matrix that the weights have."""
        kinds = {matrix.kind for layer in weights.layers for matrix in layer.matrices()} | {weights.head.kind}
        unread = ", ".join(sorted(kind for kind in kinds if not kernels.multiplies(kind)))
        name = getattr(kernels, "__name__", type(kernels).__name__)
        require(not unread, "kernels", name, f"they do not multiply matrices of kind {unread}; give forerun.kernels.reference")
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype = weights.dtype
        self.device = weights.norm.device
        self.bytes = weights.bytes
        self.quantization = formats(weights)
        self.vocab = config.vocab_size
        self.max_positions = min(max_positions or config.max_positions, config.max_positions)
        self.cos, self.sin = rope.tables(config.rope, config.head_dim, self.max_positions + PADDING, self.device)
        heads = (config.heads, config.kv_heads, config.head_dim)
        self.shapes = tuple(AttentionShape(*heads, window, config.eps, weights.interleaved) for window in config.windows)

    @classmethod
    def load(
        cls, folder: Path | str, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu",
        kernels: Kernels | None = None, max_positions: int | None = None, quantization: str = "auto",
    ) -> Target:
        """From a folder that hub.resolve gives. dtype "auto": choose_dtype decides, and the matrices of a .gguf stay in blocks
        if the kernels multiply them; otherwise they are expanded to this dtype. kernels None: choose_kernels decides.
        quantization: see EngineConfig. Raises SettingError for a checkpoint that cannot be used."""
        config = ModelConfig.read(Path(folder))
        device = torch.device(device)
        asked = quantization != "auto"
        remedy = "quantised weights are multiplied on a CPU only; leave it out, or give device cpu"
        require(not asked or device.type == "cpu", "quantization", quantization, remedy)
        chosen = choose_dtype(dtype, config, device) if isinstance(dtype, str) else dtype
        run = kernels or choose_kernels(chosen, device, config.hidden_size)
        # plain torch, if it was not asked for, would expand blocks at every call
        stored = dtype == "auto" and run.multiplies(Blocks.kind) and (kernels is not None or run is not reference)
        weights = loading.load(Path(folder), config, chosen, device, quantization if asked else "stored" if stored else "dense")
        target = cls(config, weights, run, max_positions)
        if device.type == "cpu":
            _report(target, "auto" if dtype == "auto" else "as asked for")
        return target

    @classmethod
    def random(
        cls, config: ModelConfig, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
        kernels: Kernels | None = None, seed: int = 0,
    ) -> Target:
        """A model of this shape with random weights."""
        device = torch.device(device)
        kernels = kernels or choose_kernels(dtype, device, config.hidden_size)
        return cls(config, loading.random(config, dtype, device, seed), kernels)

    def keep_vocabulary(self, size: int) -> None:
        """Compute no logits for ids from `size` on. Checkpoints often pad their vocabulary past the tokenizer's; ids without
        logits can be neither emitted nor drafted. The embedding and the memory of the head stay whole."""
        self.vocab = min(size, self.config.vocab_size)
        self.weights = self.weights._replace(head=self.weights.head.narrow(0, self.vocab))

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_values_per_token * self.dtype.itemsize

    def kv_cache(self, pages: int, block_size: int) -> KVCache:
        """An empty KV cache of this model's shape, dtype and device."""
        return KVCache(self.config, pages, block_size, self.dtype, self.device)

    def _bind(self, kernels: Kernels, kv: KVCache) -> RunLayers:
        """The layers on the pages of this cache. A cache remembers the last one, which serves as long as the same target runs
        on it with the same kernels."""
        if kv.bound is None or kv.bound[0] is not self or kv.bound[1] is not kernels:
            layers = Layers(self.weights.layers, self.shapes, self.config.eps, self.cos, self.sin, kv.keys, kv.values)
            kv.bound = (self, kernels, kernels.bind(layers))
        return kv.bound[2]

    def forward(
        self,
        batch: Batch,
        kv: KVCache,
        layers: tuple[int, ...] = (),
        kernels: Kernels | None = None,
        x: Tensor | None = None,
    ) -> Forward:
        """Run the batch's tokens, write their keys and values into the pages, and give the logits where asked.

        layers: the hidden states to return. State i is the input of layer i, for i from 0 (the embeddings) to the number of
        layers (the last layer's output, before the final norm): transformers' hidden_states[i], but its last one is normed.
        They are the tensors that the pass itself goes on with: nothing is copied and nothing waits for the device, so the
        pass can be captured with them. The states of padding tokens are meaningless.
        kernels: for this pass instead of the target's own. x: the embeddings [T,H], if the caller has them; batch.ids is not
        read then. Raises ValueError for a state that the model does not have."""
        weights, run, count = self.weights, kernels or self.kernels, len(self.weights.layers)
        if not all(0 <= i <= count for i in layers):
            raise ValueError(f"layers {layers}: a model of {count} layers has the hidden states 0 to {count}")
        run_layers = self._bind(run, kv)
        kept: dict[int, Tensor] = {}
        x = run.embed(batch.ids, weights.embedding) if x is None else x  # [T,H]
        for first, last in pairwise(sorted({0, *layers, count})):
            kept[first] = x
            x = run_layers(x, batch, first, last)
        kept[count] = x
        x = x if batch.logits_at is None else x[batch.logits_at]  # [N,H]
        logits = run.norm_logits(x, weights.norm, self.config.eps, weights.head)  # [N,V]
        return Forward(logits, tuple(kept[i] for i in layers))


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that a setting means. auto: the checkpoint's own; on a CPU a checkpoint of 16 bits takes the faster of bfloat16
    and float32. Raises SettingError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    require(name == "auto" or name in known, "dtype", name, f"give auto or one of {', '.join(known)}")
    if name != "auto":
        return known[name]
    if device.type == "cpu" and config.dtype != "float32":
        from forerun.kernels import cpu  # needed on a CPU only

        return cpu.best_dtype()[0]
    return known[config.dtype]


def _report(target: Target, setting: str) -> None:
    """Log the dtype, the formats and the kernels of a model on a CPU, and the reason, in one line."""
    from forerun.kernels import cpu

    isa, stored = cpu.isa_of(target.kernels), target.config.dtype
    why = setting
    if setting == "auto":
        reasons = [] if target.quantization and stored != "float32" else [f"the checkpoint is {stored}"]
        reasons += [cpu.best_dtype()[1]] if stored != "float32" else []
        why = f"auto: {'; '.join(reasons)}"
    blocks = f", weights in blocks ({target.quantization})" if target.quantization else ""
    LOG.info("CPU: %s (%s)%s, %s", loading.named(target.dtype), why, blocks, f"kernels for {isa}" if isa else "plain PyTorch")


def choose_kernels(dtype: torch.dtype, device: torch.device, hidden: int) -> Kernels:
    """The fastest kernels for this dtype and device. hidden: the model's hidden size."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from forerun.kernels.cuda import CudaKernels  # needs triton, which comes with torch for CUDA
        from forerun.kernels.cuda_cuts import few_tokens

        return CudaKernels(device, few=few_tokens(hidden))
    if device.type != "cpu":
        return reference
    from forerun.kernels import cpu  # needed on a CPU only

    return cpu.kernels(dtype)
