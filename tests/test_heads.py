"""The layouts of learned drafters. For each layout the test writes a folder as its publisher does, and computes the head by a
reference of its own in plain torch, over whole sequences with explicit masks, from the published descriptions. It shares no
code with forerun.heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.heads import layouts, loading, saving
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.heads.config import METHODS, HeadConfig
from forerun.kernels import Batch, Kernels, cpu, reference
from forerun.models import rope
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import KVCache, Target
from forerun.models.weights import Dense
from forerun.types import LoadError, SettingError
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
    return [torch.cat(found) for found in logits], torch.stack(out, 1) if out else None


def prompts(states: int, lengths: tuple[int, ...] = (21, 9), seed: int = 3) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For each row the target's states and one token more."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in lengths]
    return [[torch.randn(n, H, generator=generator) for _ in range(states)] for n in lengths], tokens


def worst(
    head: Chain, published: Published, states: int, steps: int = 3, kernels: Kernels | None = None, late: int = 0
) -> float:
    """The largest difference of logits, relative to their spread; infinite if the drafted tokens differ. late: the head gets
    the states of so many positions earlier."""
    head = head if kernels is None else head.with_kernels(kernels)
    given, tokens = prompts(states)
    got, drafts = on_pages(head, [[s.roll(late, 0) for s in of] for of in given], tokens, steps, (7,))
    found = 0.0
    for r in range(len(tokens)):
        logits, want = drafted(published, given[r], tokens[r], steps)
        expected = torch.cat(logits)
        found = max(found, float((got[r] - expected).abs().max() / expected.std()))
        if steps and not torch.equal(drafts[r], want[:steps]):
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


# ---- EAGLE-3


def speculators_folder(folder: Path, t: Tensors, head: Eagle3, **settings: Any) -> Path:
    own = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": head.draft,
        "norm_before_residual": head.before_residual, "norm_before_fc": head.norms == "all", "fc_norm": head.norms == "each",
        "norm_output": head.output, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "torch_dtype": "float32",
    }  # fmt: skip
    layer = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    layer["model_type"] = "qwen3" if head.qk_norm else "llama"
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in t.items()}
    return write(folder, own | {"transformer_layer_config": layer} | settings, named)


EAGLE3: dict[str, tuple[Eagle3, Callable[..., Path], dict[str, Any]]] = {
    "SafeAILab": (Eagle3(), eagle3_folder, {"architectures": ["LlamaForCausalLM"]}),
    "SafeAILab, no embedding": (Eagle3(own_embedding=False), eagle3_folder, {}),
    "whole vocabulary": (Eagle3(draft=VOCAB), eagle3_folder, {}),
    "SpecForge, 3.1": (Eagle3(norms="each", output=True), eagle3_folder, {"fc_norm": True, "norm_output": True}),
    "four states": (Eagle3(states=4), eagle3_folder, {"eagle_aux_hidden_state_layer_ids": [0, 6, 1, 4]}),
    "norm before the residual": (Eagle3(before_residual=True), eagle3_folder, {"norm_before_residual": True}),
    "nested": (
        Eagle3(norms="all", states=2), eagle3_folder,
        {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 5], "use_aux_hidden_state": True}},
    ),
    "speculators": (Eagle3(before_residual=True, qk_norm=True), speculators_folder, {}),
    "speculators, all norms": (
        Eagle3(norms="all", output=True, states=2), speculators_folder, {"eagle_aux_hidden_state_layer_ids": [1, 5]},
    ),
}  # fmt: skip


def with_kernels_of(name: str, dtype: torch.dtype) -> Kernels:
    return reference if name == "reference" else cpu.kernels(dtype)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(tmp_path: Path, target: Target, name: str, kernels: str) -> None:
    variant, publish, settings = EAGLE3[name]
    t = variant.tensors()
    head = loaded(publish(tmp_path, t, variant, **settings), "eagle3", target)
    assert worst(head, variant.published(t, target), variant.states, kernels=with_kernels_of(kernels, torch.float32)) < TIGHT
    assert head.bytes == sum(x.nbytes for name, x in t.items() if name != "t2d")
    assert head.kv_bytes_per_token == 2 * KV * D * 4


def test_eagle3_reads_the_states_that_its_folder_names(tmp_path: Path, target: Target) -> None:
    expected = {"SafeAILab": (2, 3, 3), "four states": (0, 6, 1, 4), "nested": (1, 6), "speculators": (2, 3, 3)}
    for name, states in expected.items():
        variant, publish, settings = EAGLE3[name]
        folder = publish(tmp_path / name, variant.tensors(), variant, **settings)
        assert layouts.read_config(folder, "eagle3", target.config).states == states


def test_eagle3_wrapped_by_vllm(tmp_path: Path, target: Target) -> None:
    """Its settings are under "model", and names may begin with "model."."""
    variant = Eagle3()
    t = variant.tensors()
    outside = ("lm_head.weight", "d2t", "t2d")
    renamed = {name if name in outside else f"model.{name.replace('midlayer', 'layers.0')}": x for name, x in t.items()}
    inner = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 77}
    config = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "eagle", "model": inner, "draft_vocab_size": DRAFT}
    head = loaded(write(tmp_path, config, renamed), "eagle3", target)
    assert worst(head, variant.published(t, target), 3) < TIGHT


def test_pickled(tmp_path: Path, target: Target) -> None:
    variant = Eagle3()
    t = variant.tensors()
    eagle3_folder(tmp_path, t)
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: x.bfloat16() if x.is_floating_point() else x for name, x in t.items()}, tmp_path / "pytorch_model.bin")
    head = loaded(tmp_path, "eagle3", target)
    rounded = {name: x.bfloat16().float() if x.is_floating_point() else x for name, x in t.items()}
    assert worst(head, variant.published(rounded, target), 3) < TIGHT


# ---- EAGLE-1


@dataclass
class Eagle1:
    bias: bool = True
    own_embedding: bool = True
    own_head: bool = False

    def tensors(self) -> Tensors:
        draw = Drawn(2)
        found = {"fc.weight": draw.matrix(H, 2 * H)} | under("layers.0.", draw.layer())
        if self.bias:
            found["fc.bias"] = draw.bias(H)
        if self.own_embedding:
            found["embed_tokens.weight"] = draw.matrix(VOCAB, H, 8)
        if self.own_head:
            found["lm_head.weight"] = draw.matrix(VOCAB, H, 3)
        return found

    def published(self, t: Tensors, target: Target) -> Published:
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in t.items()}

        def step(embedded: Tensor, features: Tensor) -> Tensor:
            x = torch.cat([embedded, features], -1) @ t["fc.weight"].T + t.get("fc.bias", 0)
            return causal_layer(layer, x, x)

        head = t.get("lm_head.weight", target.weights.head.dense().float())
        embedding = t.get("embed_tokens.weight", target.weights.embedding.dense().float())
        norm = target.weights.norm.float()
        return Published(lambda states: rms(states[0], norm), step, lambda x: x, lambda x: x @ head.T, embedding)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("own", [True, False])
def test_eagle(tmp_path: Path, target: Target, own: bool, kernels: str) -> None:
    variant = Eagle1(bias=own, own_embedding=own)
    t = variant.tensors()
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]} | ({} if own else {"bias": False})
    head = loaded(write(tmp_path, config, t), "eagle", target)
    assert head.config.states == (LAYERS,)
    assert worst(head, variant.published(t, target), 1, kernels=with_kernels_of(kernels, torch.float32)) < TIGHT
    assert head.bytes == sum(x.nbytes for x in t.values())


def test_eagle_converted_by_vllm(tmp_path: Path, target: Target) -> None:
    variant = Eagle1(bias=False, own_head=True)
    t = variant.tensors()
    renamed = {f"model.{name}" if name.startswith(("layers", "embed")) else name: x for name, x in t.items()}
    inner = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle", "model": inner, "truncated_vocab_size": VOCAB}
    head = loaded(write(tmp_path, config, renamed), "eagle", target)
    assert worst(head, variant.published(t, target), 1) < TIGHT


# ---- MTP


@dataclass
class Mtp:
    """Names of a family's module; order and the zero at position 0 as the family has them."""

    family: str
    embedding_first: bool
    zero_first: bool
    bias: bool = False
    qk_norm: bool = False

    def tensors(self, copies: Tensors | None = None) -> Tensors:
        draw = Drawn(4)
        layer = draw.layer(bias=self.bias, qk_norm=self.qk_norm) | {"input_layernorm.weight": draw.norm(H)}
        norms = [draw.norm(H) for _ in range(3)]
        joined = draw.matrix(H, 2 * H)
        if self.family == "mimo":
            own = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
            at = "model.mtp_layers.0."
        elif self.family == "deepseek":
            own = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
            at = f"model.layers.{LAYERS}."
        else:
            own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
            at = "mtp."
        found = {f"{at}{name}.weight": x for name, x in zip(own, [*norms, joined], strict=True)}
        found |= under("mtp.layers.0." if self.family == "qwen" else at, layer)
        return found | (under(at, copies) if copies else {})

    def published(self, t: Tensors, target: Target, embedding: Tensor | None = None, head: Tensor | None = None) -> Published:
        at = {"mimo": "model.mtp_layers.0.", "deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.layers.0."}[self.family]
        w = {name.removeprefix(at): x for name, x in t.items()}
        e, h, f, p = {
            "mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
            "deepseek": ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
            "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc"),
        }[self.family]
        plus = 1 if self.family == "qwen" else 0  # Qwen3-Next stores norms minus 1
        w = {name: x + plus if "norm" in name else x for name, x in w.items()}

        def step(embedded: Tensor, features: Tensor) -> Tensor:
            parts = [rms(embedded, w[f"{e}.weight"]), rms(features, w[f"{h}.weight"])]
            x = torch.cat(parts if self.embedding_first else parts[::-1], -1) @ w[f"{p}.weight"].T
            return causal_layer(w, rms(x, w["input_layernorm.weight"]), x)

        final = target.weights.norm.float()
        out = target.weights.head.dense().float() if head is None else head
        return Published(
            lambda states: states[0] if self.family == "mimo" else rms(states[0], final), step,
            lambda x: rms(x, w[f"{f}.weight"]), lambda x: x @ out.T,
            target.weights.embedding.dense().float() if embedding is None else embedding, self.zero_first,
        )  # fmt: skip


MTP = {
    "MiMo": Mtp("mimo", embedding_first=False, zero_first=True, bias=True),
    "DeepSeek-V3": Mtp("deepseek", embedding_first=True, zero_first=True),
    "Qwen3-Next": Mtp("qwen", embedding_first=True, zero_first=False, qk_norm=True),
}


def mtp_folder(folder: Path, t: Tensors, **settings: Any) -> Path:
    config = LLAMA | {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    return write(folder, config | settings, t)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", MTP)
def test_mtp(tmp_path: Path, target: Target, name: str, kernels: str) -> None:
    variant = MTP[name]
    t = variant.tensors()
    beside = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "lm_head.weight": torch.ones(3, 2)}  # the target's own
    head = loaded(mtp_folder(tmp_path, t | beside), "mtp", target)
    assert worst(head, variant.published(t, target), 1, kernels=with_kernels_of(kernels, torch.float32)) < TIGHT
    assert head.bytes == sum(x.nbytes for x in t.values())


@pytest.mark.parametrize("same", [True, False])
def test_mtp_with_copies_of_embedding_and_head(tmp_path: Path, target: Target, same: bool) -> None:
    """DeepSeek's modules have copies. The target's are used where they are the same."""
    embedding, head = target.weights.embedding.dense(), target.weights.head.dense()
    if not same:
        embedding, head = embedding + 1, head * 2
    variant = MTP["DeepSeek-V3"]
    t = variant.tensors({"embed_tokens.weight": embedding.clone(), "shared_head.head.weight": head.clone()})
    chain = loaded(mtp_folder(tmp_path, t), "mtp", target)
    assert (chain.weights.embedding is target.weights.embedding) is same
    assert (chain.config.own_embedding, chain.config.own_head) == (not same, not same)
    assert worst(chain, variant.published(t, target, embedding.float(), head.float()), 1) < TIGHT


def test_mtp_of_several_modules(tmp_path: Path, target: Target) -> None:
    """Each module has its own weights, under its own names."""
    for name in ("MiMo", "DeepSeek-V3"):
        first = MTP[name].tensors()
        number = (".0.", ".1.") if name == "MiMo" else (f".{LAYERS}.", f".{LAYERS + 1}.")
        second = {k.replace(*number, 1): x * 1.5 for k, x in first.items()}
        head = loaded(mtp_folder(tmp_path / name, first | second, num_nextn_predict_layers=2), "mtp", target)
        assert head.config.modules == head.config.decoder.layers == len(head.weights.modules) == 2
        a, b = (m.layer.down.dense() for m in head.weights.modules)
        assert torch.equal(a * 1.5, b)


def test_modules_share_one_embedding_and_one_head(tmp_path: Path, target: Target) -> None:
    """Each module of DeepSeek's has copies; they must be the same."""
    draw = Drawn(8)
    copies = {f"{name}.weight": draw.matrix(VOCAB, H) for name in ("embed_tokens", "shared_head.head")}
    first = MTP["DeepSeek-V3"].tensors(copies)
    both = first | {name.replace(f".{LAYERS}.", f".{LAYERS + 1}.", 1): x.clone() for name, x in first.items()}
    head = loaded(mtp_folder(tmp_path / "same", both, num_nextn_predict_layers=2), "mtp", target)
    assert torch.equal(head.weights.head.dense(), copies["shared_head.head.weight"])
    name = f"model.layers.{LAYERS + 1}.shared_head.head.weight"
    both[name][3, 3] += 1
    with pytest.raises(LoadError, match=rf"tensor {name} differs from model.layers.{LAYERS}.shared_head.head.weight"):
        loaded(mtp_folder(tmp_path / "other", both, num_nextn_predict_layers=2), "mtp", target)


def test_mtp_in_the_targets_own_folder(tmp_path: Path) -> None:
    """A MiMo is a Qwen2 with modules: the target leaves their tensors alone, and the head reads no others. A tensor that is
    neither is surplus still."""
    kinds = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "rope_theta": THETA}
    sizes: dict[str, Any] = {"hidden": H, "heads": HEADS, "kv_heads": KV, "head_dim": D, "intermediate": INNER}
    sizes["layers"] = LAYERS
    folder = tiny_model(tmp_path / "mimo", "qwen2", **sizes, config=kinds)
    plain = Target.load(tiny_model(tmp_path / "qwen2", "qwen2", **sizes, config={"rope_theta": THETA}), torch.float32)
    variant = MTP["MiMo"]
    t = variant.tensors()
    save_file(load_file(folder / "model.safetensors") | t, folder / "model.safetensors")
    mimo = Target.load(folder, torch.float32)
    ids = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.arange(20), torch.tensor([0, 20]).int(), torch.tensor([[1, 2]]).int(), None)
    assert torch.equal(*(of.forward(batch, of.kv_cache(3, PAGE)).logits for of in (mimo, plain)))
    head = loaded(folder, "mtp", mimo)
    assert head.bytes == sum(x.nbytes for x in t.values())
    assert worst(head, variant.published(t, mimo), 1) < TIGHT
    save_file(load_file(folder / "model.safetensors") | {"model.mtp.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"tensor model\.mtp\.weight is not part of MiMoForCausalLM"):
        Target.load(folder)


# ---- DFlash


@dataclass
class DFlash:
    states: tuple[int, ...] = (2, 5)
    layers: int = 2
    block: int = 5
    mask: int = 7
    draft: int = VOCAB
    bias: bool = False

    def tensors(self) -> Tensors:
        draw = Drawn(6)
        found = {"fc.weight": draw.matrix(H, len(self.states) * H)}
        found |= {"hidden_norm.weight": draw.norm(H), "norm.weight": draw.norm(H)}
        for i in range(self.layers):
            found |= under(f"layers.{i}.", draw.layer(qk_norm=True, bias=self.bias) | {"input_layernorm.weight": draw.norm(H)})
            if self.bias:
                found[f"layers.{i}.self_attn.o_proj.bias"] = draw.bias(H)
        if self.draft != VOCAB:
            ids = torch.randperm(VOCAB, generator=draw.generator)[: self.draft].sort().values
            found |= {"d2t": ids - torch.arange(self.draft), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
            found["t2d"][ids] = True
            found["lm_head.weight"] = draw.matrix(self.draft, H, 3)
        return found

    def logits(self, t: Tensors, target: Target, states: list[Tensor], anchor: int) -> Tensor:
        """Of a block behind these states, from the description: the keys and values of a layer are those of the context
        features and of the block, and each token of the block sees all of them."""
        context = rms(torch.cat(states, -1) @ t["fc.weight"].T, t["hidden_norm.weight"])
        ids = torch.tensor([anchor, *[self.mask] * (self.block - 1)])
        x = target.weights.embedding.dense().float()[ids]
        past = torch.arange(len(context)).float()
        at = len(context) + torch.arange(self.block).float()
        for i in range(self.layers):
            w = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in t.items()}
            n = rms(x, w["input_layernorm.weight"])
            q = projected(w, "q", n, at, HEADS)
            k = torch.cat([projected(w, "k", context, past, KV), projected(w, "k", n, at, KV)])
            v = torch.cat([projected(w, "v", context, None, KV), projected(w, "v", n, None, KV)])
            x = fed(w, x + attended(w, q, k, v, torch.ones(len(q), len(k)).bool()))
        head = t.get("lm_head.weight", target.weights.head.dense().float())
        return rms(x, t["norm.weight"]) @ head.T


QWEN3 = LLAMA | {"model_type": "qwen3"}


def dflash_folder(folder: Path, t: Tensors, head: DFlash, **settings: Any) -> Path:
    """As z-lab publishes it: target_layer_ids are outputs of layers."""
    own: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "num_hidden_layers": head.layers, "block_size": head.block,
        "dflash_config": {"mask_token_id": head.mask, "target_layer_ids": [i - 1 for i in head.states]},
        "num_target_layers": LAYERS, "layer_types": ["full_attention"] * head.layers, "attention_bias": head.bias,
    }  # fmt: skip
    return write(folder, QWEN3 | own | settings, t)


def dflash_of_speculators(folder: Path, t: Tensors, head: DFlash) -> Path:
    """aux_hidden_state_layer_ids are inputs of layers."""
    own = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": head.draft,
        "block_size": head.block, "aux_hidden_state_layer_ids": list(head.states), "mask_token_id": head.mask,
        "sliding_window_non_causal": False, "sample_from_anchor": False, "target_hidden_size": None,
        "transformer_layer_config": QWEN3 | {"num_hidden_layers": head.layers, "attention_bias": head.bias},
    }  # fmt: skip
    return write(folder, own, t)


def blocks(head: Block, states: list[list[Tensor]], anchors: list[int]) -> list[Tensor]:
    """The logits of a block for each row, on pages: the contexts come in two parts."""
    dtype, size = head.weights.dtype, head.config.block_size
    kv = KVCache(head.config.decoder, 64, PAGE, dtype)
    tables = (1 + torch.randperm(60, generator=torch.Generator().manual_seed(5))[: len(states) * 4]).view(-1, 4).int()
    counts = [len(of[0]) for of in states]

    def batch(rows: list[tuple[int, int]]) -> Batch:
        positions = torch.cat([torch.arange(first, end) for first, end in rows])
        start = torch.tensor([0, *(end - first for first, end in rows)]).cumsum(0).int()
        return Batch(torch.zeros_like(positions), positions, start, tables, None)

    for cut in range(2):
        rows = [(0, 4) if cut == 0 else (4, n) for n in counts]
        given = tuple(
            torch.cat([of[i][a:b] for of, (a, b) in zip(states, rows, strict=True)]).to(dtype) for i in range(len(states[0]))
        )
        head.context(given, batch(rows), kv.keys, kv.values)
    ids = torch.full((len(states), size), head.config.mask_id)
    ids[:, 0] = torch.tensor(anchors)
    x = head.weights.embedding.embed(ids.flatten())
    out = head.run(x, batch([(n, n + size) for n in counts]), kv.keys, kv.values)
    return list(head.logits(out).split(size))


def block_gap(head: Block, variant: DFlash, t: Tensors, target: Target) -> float:
    states, tokens = prompts(len(variant.states))
    anchors = [int(of[-1]) for of in tokens]
    found = 0.0
    for got, given, anchor in zip(blocks(head, states, anchors), states, anchors, strict=True):
        want = variant.logits(t, target, given, anchor)
        found = max(found, float((got - want).abs().max() / want.std()))
    return found


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("variant", [DFlash(), DFlash((1, 3, 6), 3, 8, 200, DRAFT, bias=True)])
@pytest.mark.parametrize("publish", [dflash_folder, dflash_of_speculators])
def test_dflash(tmp_path: Path, target: Target, publish: Callable[..., Path], variant: DFlash, kernels: str) -> None:
    t = variant.tensors()
    if publish is dflash_folder:
        folder = dflash_folder(tmp_path, t, variant, draft_vocab_size=variant.draft)
    else:
        folder = publish(tmp_path, t, variant)
    config = layouts.read_config(folder, "dflash", target.config)
    assert (config.states, config.block_size, config.mask_id) == (variant.states, variant.block, variant.mask)
    head = loading.load(folder, config, target)
    assert isinstance(head, Block)
    assert block_gap(head.with_kernels(with_kernels_of(kernels, torch.float32)), variant, t, target) < TIGHT
    assert (head.weights.ids is None) == (variant.draft == VOCAB)


def test_dflash_spreads_its_layers_if_not_told(tmp_path: Path, target: Target) -> None:
    """Published heads: layers 1, 9, 17, 25, 33 of 36, and 1, 6, 11, 16, 21 of 24."""
    assert layouts.spread(36, 5) == [1, 9, 17, 25, 33]
    assert layouts.spread(24, 5) == [1, 6, 11, 16, 21]
    assert layouts.spread(36, 1) == [18]
    variant = DFlash((2, 4))
    folder = dflash_folder(tmp_path, variant.tensors(), variant, dflash_config={"mask_token_id": 7})
    assert layouts.read_config(folder, "dflash", target.config).states == (2, 4)


# ---- in bfloat16, and in blocks


LOOSE = 0.15  # of the spread of the logits


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_in_bfloat16(tmp_path: Path, target_folder: Path, kernels: str) -> None:
    target = Target.load(target_folder, torch.bfloat16, kernels=reference)
    run = with_kernels_of(kernels, torch.bfloat16)
    variant, flash = Eagle3(norms="each"), DFlash()
    t = variant.tensors()
    rounded = {name: x.bfloat16().float() if x.is_floating_point() else x for name, x in t.items()}
    head = loaded(eagle3_folder(tmp_path / "e", t, variant, fc_norm=True), "eagle3", target)
    assert head.weights.dtype == torch.bfloat16
    assert worst(head, variant.published(rounded, target), 3, steps=0, kernels=run) < LOOSE
    t = flash.tensors()
    folder = dflash_folder(tmp_path / "d", t, flash)
    block = loading.load(folder, layouts.read_config(folder, "dflash", target.config), target)
    assert isinstance(block, Block)
    assert block_gap(block.with_kernels(run), flash, t, target) < LOOSE


# ---- written and read again


def shape(method: str, **changes: Any) -> HeadConfig:
    layers = {"dflash": 3, "mtp": changes.get("modules", 1)}.get(method, 1)
    vocab = changes.pop("draft", DRAFT if method == "eagle3" else VOCAB)
    mtp, flash, eagle3 = (method == m for m in ("mtp", "dflash", "eagle3"))
    decoder = ModelConfig(vocab, H, INNER, layers, HEADS, KV, D, 256, EPS, Rope(THETA), qk_norm=flash, dtype="float32")
    decoder = replace(decoder, **changes.pop("decoder", {}))
    states = (1, 3, 6) if eagle3 or flash else (LAYERS,)
    own: dict[str, Any] = {
        "normed": method == "eagle", "own_head": vocab != VOCAB, "norm_output": mtp, "zero_first": mtp,
        "embedding_first": not mtp, "block_size": 8 * flash, "mask_id": 5 * flash, "states": states,
    }  # fmt: skip
    return HeadConfig(method, decoder, H, VOCAB, LAYERS, **own | changes)


YARN = Rope(1e6, "yarn", 4.0, 64, beta_fast=30.0, beta_slow=2.0, truncate=False, attention_factor=1.25)
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"fc_bias": True, "own_embedding": True, "own_head": True}),
    ("eagle3", {}),
    ("eagle3", {"own_embedding": True, "state_norms": "each", "norm_output": True, "norm_before_residual": True}),
    ("eagle3", {"state_norms": "all", "draft": VOCAB, "states": (0, 4), "decoder": {"rope": YARN, "qk_norm": True}}),
    ("eagle3", {"decoder": {"windows": (40,), "rope": Rope(1e5, "llama3", 8.0, 64, 1.0, 4.0)}}),
    ("eagle3", {"decoder": {"qkv_bias": True, "out_bias": True, "rope": Rope(1e5, "linear", 2.0)}}),
    ("mtp", {}),
    ("mtp", {"modules": 3, "decoder": {"qkv_bias": True, "qk_norm": True}}),
    ("dflash", {}),
    ("dflash", {"draft": DRAFT, "own_embedding": True, "state_norms": "each", "decoder": {"qkv_bias": True, "out_bias": True}}),
]  # fmt: skip


@pytest.mark.parametrize("shard_bytes", [None, 30_000])
@pytest.mark.parametrize(("method", "changes"), SHAPES)
def test_what_is_saved_is_read_again(
    tmp_path: Path, target: Target, method: str, changes: dict[str, Any], shard_bytes: int | None
) -> None:
    config = shape(method, **changes)
    for seed in range(2):  # a second save into the same folder replaces the first
        head = loading.random(config, target, seed)
        saving.save(tmp_path / "head", config, head.weights, "tiny/target", shard_bytes)
    names = sorted(file.name for file in (tmp_path / "head").iterdir())
    assert (len(names) > 3) == (shard_bytes is not None)
    assert [file.name for file in tmp_path.iterdir()] == ["head"]
    assert layouts.read_config(tmp_path / "head", method, target.config) == config
    again = loading.load(tmp_path / "head", config, target)
    first, second = (dict(saving.tensors(config, of.weights)) for of in (head, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert type(again) is type(head)
    assert again.bytes == head.bytes


def test_a_head_that_its_layout_cannot_say_is_not_saved(tmp_path: Path, target: Target) -> None:
    for method, changes, name in (
        ("mtp", {"embedding_first": True}, "embedding_first"),
        ("eagle3", {"decoder": {"qkv_bias": True}}, "decoder.out_bias"),
        ("dflash", {"decoder": {"windows": (8, 8, 8)}}, "decoder.windows"),
    ):
        config = shape(method, **changes)
        with pytest.raises(SettingError) as error:
            saving.save(tmp_path / "head", config, loading.random(config, target).weights, "tiny")
        assert error.value.name == name
        assert list(tmp_path.iterdir()) == []


# ---- the comparisons notice what they are for


NOTICED = 50 * TIGHT


def test_a_difference_of_the_settings_is_noticed(tmp_path: Path, target: Target) -> None:
    """Each of these fields, changed in the head alone, changes what it computes."""
    eagle3, eagle = Eagle3(norms="each"), Eagle1()
    of_three = eagle3_folder(tmp_path / "3", eagle3.tensors(), eagle3, fc_norm=True)
    cases: list[tuple[str, Any, Path, int, dict[str, Any]]] = [
        ("eagle3", eagle3, of_three, 3, {"embedding_first": False}),
        ("eagle3", eagle3, of_three, 3, {"norm_before_residual": True}),
        ("eagle3", eagle3, of_three, 3, {"norm_output": True}),
        ("eagle", eagle, write(tmp_path / "1", LLAMA, eagle.tensors()), 1, {"embedding_first": False}),
    ]
    for name, variant in MTP.items():
        folder = mtp_folder(tmp_path / name, variant.tensors())
        for changes in ({"embedding_first": not variant.embedding_first}, {"zero_first": not variant.zero_first}):
            cases.append(("mtp", variant, folder, 1, changes))
        cases.append(("mtp", variant, folder, 1, {"norm_output": False}))
        cases.append(("mtp", variant, folder, 1, {"normed": name == "MiMo"}))
    for method, variant, folder, states, changes in cases:
        t, head = variant.tensors(), loaded(folder, method, target)
        published = variant.published(t, target)
        assert worst(head, published, states) < TIGHT
        cos, sin = rope.tables(head.config.decoder.rope, D, 128)
        norm = target.weights.norm if changes.get("normed", head.config.normed) else None
        weights = head.weights._replace(target_norm=norm)
        other = Chain(replace(head.config, **changes), weights, head.kernels, cos, sin)
        assert worst(other, published, states) > NOTICED, (method, changes)
        assert worst(head, published, states, late=1) > NOTICED, method


def test_a_shifted_draft_vocabulary_is_noticed(tmp_path: Path, target: Target) -> None:
    variant = Eagle3()
    t = variant.tensors()
    ids = (t["d2t"] + torch.arange(DRAFT)).roll(1)
    head = loaded(eagle3_folder(tmp_path, t | {"d2t": ids - torch.arange(DRAFT)}), "eagle3", target)
    assert worst(head, variant.published(t, target), 3) == math.inf


def test_a_wrong_block_is_noticed(tmp_path: Path, target: Target) -> None:
    variant = DFlash()
    t = variant.tensors()
    folder = dflash_folder(tmp_path, t, variant)
    config = layouts.read_config(folder, "dflash", target.config)
    head = loading.load(folder, config, target)
    assert isinstance(head, Block)
    assert block_gap(head, variant, t, target) < TIGHT
    cos, sin = rope.tables(config.decoder.rope, D, 128)
    masked = Block(replace(config, mask_id=8), head.weights, reference, cos, sin)
    causal = Block(config, head.weights, reference, cos, sin)
    causal._shapes = [of._replace(block=False) for of in causal._shapes]
    swapped = Block(config, head.weights._replace(fc=Dense(t["fc.weight"].roll(H, 1))), reference, cos, sin)
    for other in (masked, causal, swapped):
        assert block_gap(other, variant, t, target) > NOTICED


# ---- what is refused


def structured_target(folder: Path, seed: int = 0) -> Target:
    """A target whose vocabulary head and embedding have tokens that are alike, as a trained one has."""
    tiny_model(folder, hidden=H, heads=HEADS, kv_heads=KV, head_dim=D, layers=LAYERS)
    t = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 20, (VOCAB,), generator=generator)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        t[name] = 0.5 * torch.randn(20, H, generator=generator)[group] + 0.3 * torch.randn(VOCAB, H, generator=generator)
    save_file(t, folder / "model.safetensors")
    return Target.load(folder, torch.float32, kernels=reference)


def test_a_random_vocabulary_head_is_told_from_a_trained_one(tmp_path: Path) -> None:
    """The trained one starts from random rows and learns the target's distributions from features in another basis. It passes,
    and random ones of several kinds do not."""
    target = structured_target(tmp_path / "target")
    variant = Eagle3(own_embedding=False)
    t = variant.tensors()
    ids = t["d2t"] + torch.arange(DRAFT)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2000, H, generator=generator)
    wanted = (states @ target.weights.head.dense()[ids].T).softmax(-1)
    features = states @ torch.linalg.qr(torch.randn(H, H, generator=generator))[0]
    head = torch.nn.Parameter(torch.randn(DRAFT, H, generator=generator) * H**-0.5)
    optimiser = torch.optim.AdamW([head], lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(features @ head.T, wanted).backward()
        optimiser.step()
    assert loaded(eagle3_folder(tmp_path / "a", t | {"lm_head.weight": head.detach()}), "eagle3", target).config.own_head
    noise = torch.randn(VOCAB, H, generator=generator)
    for i, rows in enumerate((noise[:DRAFT], torch.rand(DRAFT, H, generator=generator) - 0.5, torch.ones(DRAFT, H))):
        with pytest.raises(LoadError, match=r"tensor lm_head\.weight looks random"):
            loaded(eagle3_folder(tmp_path / f"random{i}", t | {"lm_head.weight": rows}), "eagle3", target)
    with pytest.raises(LoadError, match=r"tensor lm_head\.weight is zero in 100 of 100 rows"):
        loaded(eagle3_folder(tmp_path / "zero", t | {"lm_head.weight": torch.zeros(DRAFT, H)}), "eagle3", target)
    with pytest.raises(LoadError, match=r"tensor embed_tokens\.weight looks random"):
        both = t | {"lm_head.weight": head.detach(), "embed_tokens.weight": noise}
        loaded(eagle3_folder(tmp_path / "embedding", both), "eagle3", target)


def test_a_random_head_of_ours_is_taken_for_a_trained_one(tmp_path: Path) -> None:
    target = structured_target(tmp_path / "target")
    config = shape("eagle3", own_embedding=True)
    saving.save(tmp_path / "head", config, loading.random(config, target).weights, "tiny")
    assert loading.load(tmp_path / "head", config, target).config == config


Change = Callable[[dict[str, Any], Tensors], Any]


def setting(**changes: Any) -> Change:
    return lambda config, _: config.update(changes)


def without(name: str) -> Change:
    return lambda _, t: t.pop(name)


def renamed(old: str, new: str) -> Change:
    return lambda _, t: t.update({new: t.pop(old)})


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, t: t.update({name: change(t[name])})


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2] = math.nan
    return x


MIMO = "model.mtp_layers.0."
UP = "midlayer.mlp.up_proj.weight"
REFUSED: dict[str, list[tuple[Change, str]]] = {
    "eagle3": [
        (setting(hidden_size=128), r"^hidden_size=128: the target has 64; give a head that was trained for this target"),
        (setting(target_hidden_size=32), r"^target_hidden_size=32: the target has 64"),
        (setting(vocab_size=300), r"^vocab_size=300: the target has 269"),
        (setting(draft_vocab_size=300), r"^draft_vocab_size=300: give at most vocab_size \(269\)"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, 3, 7]), r"^eagle_aux_hidden_state_layer_ids=.*of 6 layers has 0 to 6"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, 3, -1]), r"^eagle_aux_hidden_state_layer_ids="),
        (setting(eagle_aux_hidden_state_layer_ids=[2, "3"]), r"^eagle_aux_hidden_state_layer_ids=.*whole numbers"),
        (setting(eagle_aux_hidden_state_layer_ids=[2] * 6), r"^eagle_aux_hidden_state_layer_ids=.*at most 5"),
        (setting(eagle_config={"eagle_aux_hidden_state_layer_ids": [6]}), r"has -1 to 5"),
        (setting(eagle_config={"use_aux_hidden_state": False}), r"^use_aux_hidden_state=False"),
        (setting(eagle_config=3), r"^eagle_config=3: must be an object"),
        (setting(num_hidden_layers=2), r"^num_hidden_layers=2: eagle3 heads of one layer"),
        (setting(hidden_act="gelu"), r"^hidden_act='gelu'"),
        (setting(quantization_config={"bits": 4}), r"^quantization_config="),
        (setting(norm_before_fc=True, fc_norm=True), r"^fc_norm=True: norm_before_fc is true as well"),
        (setting(norm_output="yes"), r"^norm_output='yes': must be true or false"),
        (setting(fc_norm=True), r"tensors fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight are missing"),
        (setting(model="x"), r"^model='x': must be an object"),
        (renamed(UP, "midlayer.mlp.up.weight"),
         r"tensor midlayer.mlp.up_proj.weight is missing; tensor midlayer.mlp.up.weight is not part of the head"),
        (without("fc.weight"), r"tensor fc.weight is missing; fetch the whole checkpoint"),
        (without("lm_head.weight"), r"tensor lm_head.weight is missing, and the target's, \[269, 64\], cannot stand in for"),
        (setting(hidden_size=32, target_hidden_size=H),
         r"tensor embed_tokens.weight has shape \[269, 64\], expected \[269, 32\]"),
        (lambda c, t: (c.update(hidden_size=32, target_hidden_size=H), t.pop("embed_tokens.weight")),
         r"tensor embed_tokens.weight is missing, and the target's, of hidden size 64, cannot stand in for it"),
        (without("d2t"), r"tensor d2t is missing, and a draft vocabulary of 100 out of 269 needs it"),
        (lambda _, t: t.update(extra=torch.ones(2)), r"tensor extra is not part of a head of method eagle3"),
        (lambda _, t: t.update(mask_hidden=torch.ones(2)), r"tensor mask_hidden is not part"),
        (changed("norm.weight", lambda x: x[1:]), r"tensor norm.weight has shape \[63\], expected \[64\]"),
        (changed("fc.weight", lambda x: x.T), r"tensor fc.weight has shape \[192, 64\], expected \[64, 192\]"),
        (changed("fc.weight", with_nan), r"tensor fc.weight has values not finite in float32"),
        (changed("fc.weight", lambda x: x.long()), r"tensor fc.weight is stored as I64; give bfloat16"),
        (changed("d2t", lambda x: x + 200), r"tensor d2t gives draft id \d+ the target's id \d+, which is not below 269"),
        (changed("d2t", lambda x: x - 200), r"tensor d2t gives draft id 0 the target's id -\d+, which is not"),
        (changed("d2t", lambda x: -torch.arange(DRAFT)), r"tensor d2t gives two draft ids the same id"),
        (changed("d2t", lambda x: x * 0), r"tensors d2t and t2d disagree about the draft vocabulary"),
        (changed("t2d", lambda x: ~x), r"tensors d2t and t2d disagree"),
        (changed("t2d", lambda x: x[1:]), r"tensor t2d has shape \[268\], expected \[269\]"),
    ],
    "eagle": [
        (setting(num_hidden_layers=3), r"^num_hidden_layers=3: eagle heads of one layer"),
        (setting(truncated_vocab_size=50), r"^truncated_vocab_size=50"),
        (setting(bias=True), r"tensor fc.bias is missing"),
        (setting(model={"hidden_size": 32}, hidden_size=None), r"^hidden_size="),
        (lambda _, t: t.update({"layers.0.input_layernorm.weight": torch.ones(H)}),
         r"tensor layers.0.input_layernorm.weight is not part"),
    ],
    "mtp": [
        (setting(num_hidden_layers=4), r"^num_hidden_layers=4: the target has 6"),
        (setting(num_nextn_predict_layers=2), r"tensors model.mtp_layers.1.\S+, .* are missing"),
        (setting(rope_interleave=True), r"^rope_interleave=True"),
        (setting(partial_rotary_factor=0.25), r"^partial_rotary_factor=0.25"),
        (renamed(f"{MIMO}mlp.up_proj.weight", f"{MIMO}mlp.experts.0.up_proj.weight"),
         rf"tensor {MIMO}mlp.experts.0.up_proj.weight: a mixture of experts in a module of MTP is not supported yet"),
        (renamed(f"{MIMO}self_attn.q_proj.weight", f"{MIMO}self_attn.q_a_proj.weight"),
         rf"tensor {MIMO}self_attn.q_a_proj.weight: multi-head latent attention in a module"),
        (changed(f"{MIMO}self_attn.q_proj.weight", lambda x: torch.cat([x, x])),
         rf"tensor {MIMO}self_attn.q_proj.weight has 256 rows: gated attention in a module of MTP is not supported yet"),
        (without(f"{MIMO}input_proj.weight"), rf"tensor {MIMO}input_proj.weight is missing"),
    ],
    "dflash": [
        (setting(dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 6]}), r"^target_layer_ids=\[1, 6\].*has -1 to 5"),
        (setting(dflash_config={"target_layer_ids": [1, 2]}), r"^mask_token_id=None"),
        (setting(dflash_config={"mask_token_id": 269, "target_layer_ids": [1, 4]}),
         r"^mask_token_id=269: give an id of the target"),
        (setting(block_size=1), r"^block_size=1: must be a whole number from 2 to 64"),
        (setting(num_target_layers=36), r"^num_target_layers=36: the target has 6"),
        (setting(layer_types=["full_attention", "sliding_attention"]), r"^layer_types=.*sliding windows in DFlash heads"),
        (setting(sample_from_anchor=True), r"^sample_from_anchor=True"),
        (setting(dflash_config={"mask_token_id": 7, "use_swa": True}), r"^use_swa=True"),
        (without("layers.1.self_attn.k_norm.weight"), r"tensor layers.1.self_attn.k_norm.weight is missing"),
    ],
}  # fmt: skip


def published_folder(method: str, folder: Path, change: Change = lambda _, __: None) -> Path:
    """A folder of each method, changed."""
    if method == "eagle3":
        t = Eagle3().tensors()
        eagle3_folder(folder, t)
    elif method == "eagle":
        t = Eagle1(bias=False).tensors()
        write(folder, LLAMA | {"architectures": ["LlamaForCausalLM"]}, t)
    elif method == "mtp":
        t = MTP["MiMo"].tensors()
        mtp_folder(folder, t)
    else:
        t = DFlash().tensors()
        dflash_folder(folder, t, DFlash())
    config = json.loads((folder / "config.json").read_text())
    change(config, t)
    return write(folder, config, t)


@pytest.mark.parametrize(("method", "change", "message"), [(m, c, text) for m, of in REFUSED.items() for c, text in of])
def test_refused(tmp_path: Path, target: Target, method: str, change: Change, message: str) -> None:
    folder = published_folder(method, tmp_path, change)
    with pytest.raises(LoadError, match=message):
        loading.load(folder, layouts.read_config(folder, method, target.config), target)


def test_a_folder_of_another_method_is_refused(tmp_path: Path, target: Target) -> None:
    for holds in METHODS:
        folder = published_folder(holds, tmp_path / holds)
        layouts.read_config(folder, holds, target.config)
        for method in METHODS:
            if method != holds:
                told = rf"^method='{method}': the folder holds a head of kind {holds} \(.*give method {holds}"
                with pytest.raises(LoadError, match=told):
                    layouts.read_config(folder, method, target.config)
    with pytest.raises(SettingError, match=r"^method='medusa': give one of eagle, eagle3, mtp, dflash"):
        layouts.read_config(tmp_path / "eagle", "medusa", target.config)
    variant = Eagle3()
    folder = speculators_folder(tmp_path / "peagle", variant.tensors(), variant, speculators_model_type="peagle")
    with pytest.raises(LoadError, match=r"^method='eagle3': the folder holds a head of kind peagle"):
        layouts.read_config(folder, "eagle3", target.config)


def test_a_folder_without_a_head_is_refused(tmp_path: Path, target: Target, target_folder: Path) -> None:
    for method in METHODS:
        with pytest.raises(LoadError):
            loading.load(target_folder, layouts.read_config(target_folder, method, target.config), target)
    with pytest.raises(LoadError, match=r"has no config\.json"):
        layouts.read_config(tmp_path, "eagle", target.config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        layouts.read_config(tmp_path, "eagle", target.config)
    for broken in (b"no", b"\x80\x02cos\nsystem\n."):
        (tmp_path / "pytorch_model.bin").write_bytes(broken)
        with pytest.raises(LoadError, match=r"pytorch_model\.bin is not a file of tensors"):
            layouts.read_config(tmp_path, "eagle", target.config)
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"does not hold tensors by name"):
        layouts.read_config(tmp_path, "eagle", target.config)
    flash = dflash_folder(tmp_path / "flash", DFlash().tensors(), DFlash())
    (flash / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(LoadError, match=r"mask_embedding\.pt"):
        layouts.read_config(flash, "dflash", target.config)


def test_a_copy_of_the_targets_matrices_is_not_kept(tmp_path: Path, target: Target) -> None:
    variant = Eagle3(draft=VOCAB)
    t = variant.tensors()
    t |= {"embed_tokens.weight": target.weights.embedding.dense(), "lm_head.weight": target.weights.head.dense()}
    t |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    head = loaded(eagle3_folder(tmp_path, t, variant), "eagle3", target)
    assert head.weights.embedding is target.weights.embedding
    assert head.weights.head is target.weights.head
    shared = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    assert head.bytes == sum(t[name].nbytes for name in t if name not in shared)
    assert worst(head, variant.published(t, target), 3) < TIGHT


def test_ids_past_the_tokenizer_are_not_drafted(tmp_path: Path, target_folder: Path) -> None:
    """Of a vocabulary that is padded past the tokenizer the target keeps a part, and a head of its own keeps the same part."""
    target = Target.load(target_folder, torch.float32, kernels=reference)
    target.keep_vocabulary(250)
    variant = Eagle3(draft=VOCAB)
    head = loaded(eagle3_folder(tmp_path / "whole", variant.tensors(), variant), "eagle3", target)
    assert head.logits(0, torch.zeros(1, H)).shape == (1, 250)
    with pytest.raises(LoadError, match=r"tensor d2t gives draft id \d+ the target's id \d+, which is not below 250"):
        loaded(eagle3_folder(tmp_path / "part", Eagle3().tensors()), "eagle3", target)


def test_in_blocks_beside_a_target_in_blocks(tmp_path: Path, target_folder: Path) -> None:
    """The head's matrices become Q8_0, its vocabulary head Q4_1, and it computes about the same."""
    target = Target.load(target_folder, torch.float32, quantization="int8")
    variant = Eagle3()
    t = variant.tensors()
    head = loaded(eagle3_folder(tmp_path, t), "eagle3", target)
    assert all(matrix.kind == "blocks" for m in head.weights.modules for matrix in m.layer.matrices())
    assert head.weights.head.kind == head.weights.embedding.kind == "blocks"
    matrices = sum(x.numel() for name, x in t.items() if x.dim() == 2)
    vocabulary = t["lm_head.weight"].numel()
    vectors = sum(x.nbytes for name, x in t.items() if x.dim() == 1 and name != "t2d")
    assert head.bytes == (matrices - vocabulary) // 32 * 34 + vocabulary // 32 * 20 + vectors
    rounded = t | {"lm_head.weight": head.weights.head.dense()}  # in 4 bits, which have a test of their own
    assert worst(head, variant.published(rounded, target), 3, steps=0) < LOOSE
