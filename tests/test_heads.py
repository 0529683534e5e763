"""The layouts of learned drafters. For each layout the test writes a folder as its publisher does, and computes the head by a
reference of its own in plain torch, over whole sequences with explicit masks, from the published descriptions. It shares no
code with forerun.heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.heads import layouts, loading
from forerun.heads.chain import Chain
from forerun.kernels import Batch, Kernels, reference
from forerun.models.decoder import KVCache, Target
from tests.tiny import VOCAB, tiny_model

H, HEADS, KV, D, INNER, LAYERS, DRAFT = 64, 4, 2, 32, 96, 6, 100
EPS, THETA = 1e-5, 5000.0
PAGE = 16
STATES = (2, 3, 3)  # the default of EAGLE-3 for 6 layers: 2, L // 2, L - 3

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("target") / "model", hidden=H, heads=HEADS, kv_heads=KV, head_dim=D, layers=LAYERS
    )


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target.load(target_folder, torch.float32, kernels=reference)


class Drawn:
    """Draws tensors: matrices of rows that keep the scale, norms around 1, biases."""

    def __init__(self, seed: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale * columns**-0.5

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def bias(self, size: int) -> Tensor:
        return 0.2 * torch.randn(size, generator=self.generator)

    def layer(self, inputs: int = H, bias: bool = False, qk_norm: bool = False) -> Tensors:
        """A layer's tensors by their last names, without the first norm."""
        found = {
            "self_attn.q_proj.weight": self.matrix(HEADS * D, inputs), "self_attn.k_proj.weight": self.matrix(KV * D, inputs),
            "self_attn.v_proj.weight": self.matrix(KV * D, inputs), "self_attn.o_proj.weight": self.matrix(H, HEADS * D),
            "mlp.gate_proj.weight": self.matrix(INNER, H), "mlp.up_proj.weight": self.matrix(INNER, H),
            "mlp.down_proj.weight": self.matrix(H, INNER), "post_attention_layernorm.weight": self.norm(H),
        }  # fmt: skip
        if bias:
            for name, size in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
                found[f"self_attn.{name}_proj.bias"] = self.bias(size)
        if qk_norm:
            found |= {"self_attn.q_norm.weight": self.norm(D), "self_attn.k_norm.weight": self.norm(D)}
        return found


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


# ---- the reference


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [T,heads,D]"""
    angles = positions[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def projected(w: Tensors, name: str, x: Tensor, positions: Tensor | None, heads: int) -> Tensor:
    y = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
    y = y.view(len(x), heads, D)
    if f"self_attn.{name}_norm.weight" in w:
        y = rms(y, w[f"self_attn.{name}_norm.weight"])
    return y if positions is None else rotated(y, positions)


def attended(w: Tensors, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """q: [T,heads,D]; k, v: [S,kv_heads,D]; allowed: [T,S]"""
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(D)
    mixed = torch.einsum("hts,shd->thd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)
    return mixed.reshape(len(q), -1) @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)


def fed(w: Tensors, x: Tensor) -> Tensor:
    n = rms(x, w["post_attention_layernorm.weight"])
    gate = n @ w["mlp.gate_proj.weight"].T
    return x + (gate * gate.sigmoid() * (n @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def causal_layer(w: Tensors, x: Tensor, residual: Tensor) -> Tensor:
    """A decoder layer over a whole sequence. x: what q, k and v are computed from, [T,.]"""
    at = torch.arange(len(x)).float()
    q, k = (projected(w, name, x, at, heads) for name, heads in (("q", HEADS), ("k", KV)))
    v = projected(w, "v", x, None, KV)
    return fed(w, residual + attended(w, q, k, v, torch.ones(len(x), len(x)).tril().bool()))


@dataclass
class Published:
    """A head as its description defines it. feature: of the target's states; step: the outputs of a whole sequence of
    (embeddings, features); handed: what the next step gets; logits: of what was handed on; ids: of the draft vocabulary."""

    feature: Callable[[list[Tensor]], Tensor]
    step: Callable[[Tensor, Tensor], Tensor]
    handed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    embedding: Tensor
    zero_first: bool = False
    ids: Tensor = field(default_factory=lambda: torch.arange(VOCAB))


def drafted(head: Published, states: list[Tensor], tokens: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
    """The logits behind each position of the prompt and of `steps` drafted tokens, and these tokens. tokens: one more than
    states have positions."""
    features = head.feature(states)
    embedded = head.embedding[tokens[1:]]
    if head.zero_first:
        embedded = torch.cat([torch.zeros(1, H), embedded[1:]])
    logits, out = [], []
    for step in range(steps + 1):
        handed = head.handed(head.step(embedded, features))
        logits.append(head.logits(handed if step == 0 else handed[-1:]))
        token = head.ids[logits[-1][-1].argmax()]
        out.append(token)
        features, embedded = torch.cat([features, handed[-1:]]), torch.cat([embedded, head.embedding[token][None]])
    return logits, torch.stack(out)


# ---- the head on pages


def on_pages(head: Chain, states: list[list[Tensor]], tokens: list[Tensor], steps: int, cuts: tuple[int, ...] = ()) -> Any:
    """The same for several rows at once, through encode, embed, run, hand_on and logits on pages. cuts: the prompts come in
    parts that end there."""
    dtype = head.weights.dtype
    kv = KVCache(head.config.decoder, 64, PAGE, dtype)
    tables = (1 + torch.randperm(60, generator=torch.Generator().manual_seed(5))[: len(tokens) * 4]).view(len(tokens), 4).int()
    logits: list[list[Tensor]] = [[] for _ in tokens]
    ends = [len(t) - 1 for t in tokens]
    last: list[Tensor] = [torch.empty(0)] * len(tokens)

    def run(rows: list[tuple[int, int, int]], features: Tensor, ids: Tensor) -> Tensor:
        """rows: (row, first position, positions)"""
        counts = torch.tensor([0, *(n for _, _, n in rows)])
        positions = torch.cat([torch.arange(first, first + n) for _, first, n in rows])
        batch = Batch(ids, positions, counts.cumsum(0).int(), tables[[r for r, _, _ in rows]], None)
        x = head.run(0, head.embed(ids, positions), features, batch, kv.keys[0], kv.values[0])
        return head.hand_on(0, x)

    for begin, end in zip((0, *cuts), (*cuts, 10**6), strict=True):
        rows = [(r, begin, min(end, ends[r]) - begin) for r in range(len(tokens)) if begin < ends[r]]
        given = [torch.cat([states[r][i][b : b + n] for r, b, n in rows]).to(dtype) for i in range(len(states[0]))]
        ids = torch.cat([tokens[r][b + 1 : b + n + 1] for r, b, n in rows])
        handed = run(rows, head.encode(tuple(given)), ids)
        for (r, _, _), part in zip(rows, handed.split([n for _, _, n in rows]), strict=True):
            logits[r].append(head.logits(0, part))
            last[r] = part[-1:]
    out = []
    for step in range(steps):
        draft = torch.cat([found[-1][-1:] for found in logits]).argmax(-1)
        ids = draft if head.weights.ids is None else head.weights.ids[draft]
        out.append(ids)
        rows = [(r, ends[r] + step, 1) for r in range(len(tokens))]
        handed = run(rows, torch.cat(last), ids)
        for r in range(len(tokens)):
            logits[r].append(head.logits(0, handed[r : r + 1]))
            last[r] = handed[r : r + 1]
    return [torch.cat(found) for found in logits], torch.stack(out, 1)


def prompts(states: int, lengths: tuple[int, ...] = (21, 9), seed: int = 3) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For each row the target's states and one token more."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in lengths]
    return [[torch.randn(n, H, generator=generator) for _ in range(states)] for n in lengths], tokens


def worst(head: Chain, published: Published, states: int, steps: int = 3, kernels: Kernels | None = None) -> float:
    """The largest difference of logits, relative to their spread; infinite if the drafted tokens differ."""
    head = head if kernels is None else head.with_kernels(kernels)
    given, tokens = prompts(states)
    got, drafts = on_pages(head, given, tokens, steps, (7,))
    found = 0.0
    for r in range(len(tokens)):
        logits, want = drafted(published, given[r], tokens[r], steps)
        expected = torch.cat(logits)
        found = max(found, float((got[r] - expected).abs().max() / expected.std()))
        if head.weights.dtype == torch.float32 and not torch.equal(drafts[r], want[:steps]):
            return math.inf
    return found


# ---- the layouts


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": H, "intermediate_size": INNER, "max_position_embeddings": 256,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "num_hidden_layers": 1, "rms_norm_eps": EPS,
    "rope_theta": THETA, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": VOCAB, "bos_token_id": 1,
    "eos_token_id": 2, "attention_bias": False,
}  # fmt: skip


@dataclass
class Eagle3:
    """An EAGLE-3 head and its variants."""

    norms: str = "none"
    before_residual: bool = False
    output: bool = False
    qk_norm: bool = False
    states: int = 3
    hidden: int = H
    draft: int = DRAFT
    own_embedding: bool = True

    def tensors(self, seed: int = 1) -> Tensors:
        draw, n = Drawn(seed), self.states
        found = {
            "fc.weight": draw.matrix(H, n * H),
            "norm.weight": draw.norm(H),
            "lm_head.weight": draw.matrix(self.draft, H, 3),
        }
        found |= under("midlayer.", draw.layer(2 * H, qk_norm=self.qk_norm))
        found |= {f"midlayer.{name}.weight": draw.norm(H) for name in ("input_layernorm", "hidden_norm")}
        if self.own_embedding:
            found["embed_tokens.weight"] = draw.matrix(VOCAB, H, 8)
        if self.norms == "each":
            found |= {f"fc_norm.{i}.weight": draw.norm(H) for i in range(n)}
        if self.norms == "all":
            found["input_norm.weight"] = draw.norm(n * H)
        if self.draft != VOCAB:
            ids = torch.randperm(VOCAB, generator=draw.generator)[: self.draft].sort().values
            found |= {"d2t": ids - torch.arange(self.draft), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
            found["t2d"][ids] = True
        return found

    def published(self, t: Tensors, target: Target) -> Published:
        layer = {name.removeprefix("midlayer."): tensor for name, tensor in t.items() if name.startswith("midlayer.")}

        def feature(states: list[Tensor]) -> Tensor:
            if self.norms == "each":
                states = [rms(s, t[f"fc_norm.{i}.weight"]) for i, s in enumerate(states)]
            joined = torch.cat(states, -1)
            return (rms(joined, t["input_norm.weight"]) if self.norms == "all" else joined) @ t["fc.weight"].T

        def step(embedded: Tensor, features: Tensor) -> Tensor:
            normed = rms(features, layer["hidden_norm.weight"])
            x = torch.cat([rms(embedded, layer["input_layernorm.weight"]), normed], -1)
            return causal_layer(layer, x, normed if self.before_residual else features)

        def normed(x: Tensor) -> Tensor:
            return rms(x, t["norm.weight"])

        head = t.get("lm_head.weight", target.weights.head.dense().float())
        return Published(
            feature, step,
            normed if self.output else lambda x: x,
            lambda x: (x if self.output else normed(x)) @ head.T,
            t.get("embed_tokens.weight", target.weights.embedding.dense().float()),
            ids=t["d2t"] + torch.arange(self.draft) if "d2t" in t else torch.arange(VOCAB),
        )  # fmt: skip


def eagle3_folder(folder: Path, t: Tensors, head: Eagle3 | None = None, **settings: Any) -> Path:
    """As SafeAILab and SpecForge publish it."""
    head = head or Eagle3()
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft}
    return write(folder, LLAMA | own | settings, t)


def loaded(folder: Path, method: str, target: Target) -> Chain:
    config = layouts.read_config(folder, method, target.config)
    head = loading.load(folder, config, target)
    assert isinstance(head, Chain)
    return head


TIGHT = 2e-4  # of the spread of the logits, in float32


def test_eagle3_of_safeailab(tmp_path: Path, target: Target) -> None:
    variant = Eagle3()
    t = variant.tensors()
    head = loaded(eagle3_folder(tmp_path, t), "eagle3", target)
    assert head.config.states == STATES
    assert worst(head, variant.published(t, target), 3) < TIGHT
    assert head.bytes == sum(x.nbytes for name, x in t.items() if name != "t2d")
