"""The decoder against transformers' models of the same weights, whatever way the tokens are fed in; the configuration
and the rotation tables against theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.kernels import Batch, reference
from forerun.models import rope
from forerun.models.config import FAMILIES, ModelConfig
from forerun.models.decoder import KVCache, Target, choose_dtype
from forerun.types import SettingError
from tests.tiny import NAMES, tiny_model

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
BLOCK = 8
Pair = tuple[Target, list[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "beta_fast": 16.0}
SLIDES = {"use_sliding_window": True, "sliding_window": 5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"config": {"attention_bias": True}}),
    "llama, tied, one kv head": ("llama", {"tied": True, "kv_heads": 1}),
    "llama 3": ("llama", {"config": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}}),
    "llama, linear": ("llama", {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}}),
    "llama, dynamic": ("llama", {"config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}),
    "llama, transformers 5": ("llama", {"config": {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}}),
    "mistral": ("mistral", {"config": {"sliding_window": None}}),
    "mistral, window": ("mistral", {"config": {"sliding_window": 7}}),
    "qwen2": ("qwen2", {"tied": True}),
    "qwen2, window in some layers": ("qwen2", {"layers": 3, "config": SLIDES | {"max_window_layers": 1}}),
    "qwen2, window by type": ("qwen2", {"config": SLIDES | {"layer_types": ["sliding_attention", "full_attention"]}}),
    "qwen2, yarn": ("qwen2", {"config": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, yarn": ("qwen3", {"config": {"rope_scaling": YARN | {"original_max_position_embeddings": 64}}}),
}


def batch(rows: list[tuple[list[int], int]], tables: torch.Tensor) -> Batch:
    """Of rows (ids, position of the first), with the logits of all tokens."""
    ids = torch.tensor([i for row, _ in rows for i in row])
    positions = torch.cat([torch.arange(first, first + len(row)) for row, first in rows])
    ends = torch.tensor([0] + [len(row) for row, _ in rows]).cumsum(0).int()
    return Batch(ids, positions, ends, tables, torch.arange(len(ids)))


def shuffled_pages(rows: int, pages: int) -> tuple[int, torch.Tensor]:
    """How many pages a cache needs, and a block table whose pages lie in any order.  [rows,pages]"""
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(5))
    return rows * pages, order.view(rows, pages).int()


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in (37, 5, 18)]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and transformers' logits and inputs of layer 1 for each prompt."""
    architecture, sizes = VARIANTS[request.param]
    folder = tiny_model(tmp_path_factory.mktemp("model"), architecture, **sizes)
    target = Target.load(folder, "float32", kernels=reference)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits, hidden = [], []
    for ids in prompts(target.config.vocab_size):
        with torch.inference_mode():
            out = theirs(torch.tensor([ids]), output_hidden_states=True)
        logits.append(out.logits[0])
        hidden.append(out.hidden_states[1][0])
    return target, logits, hidden


def same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.shape == theirs.shape
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_a_whole_prompt(pair: Pair) -> None:
    target, logits, hidden = pair
    ids = prompts(target.config.vocab_size)[0]
    count, tables = shuffled_pages(1, 5)
    out = target.forward(batch([(ids, 0)], tables), target.kv_cache(count, BLOCK), layers=(1,))
    same(out.logits, logits[0])
    same(out.hidden[0], hidden[0])
    assert logits[0].std() > 0.5  # flat logits would agree whatever was computed


@pytest.mark.parametrize("chunk", [1, 11])
def test_a_prompt_in_chunks(pair: Pair, chunk: int) -> None:
    target, logits, _ = pair
    ids = prompts(target.config.vocab_size)[0]
    count, tables = shuffled_pages(1, 5)
    kv = target.kv_cache(count, BLOCK)
    found = [target.forward(batch([(ids[at : at + chunk], at)], tables), kv).logits for at in range(0, len(ids), chunk)]
    same(torch.cat(found), logits[0])


def test_ragged_rows_together(pair: Pair) -> None:
    """Each row first a piece of its own length, then the rest: no row sees another's keys."""
    target, logits, _ = pair
    rows = prompts(target.config.vocab_size)
    count, tables = shuffled_pages(3, 5)
    kv = target.kv_cache(count, BLOCK)
    cut = (30, 2, 9)
    first = target.forward(batch([(row[:c], 0) for row, c in zip(rows, cut, strict=True)], tables), kv).logits.split(cut)
    rest = tuple(len(row) - c for row, c in zip(rows, cut, strict=True))
    second = target.forward(batch([(row[c:], c) for row, c in zip(rows, cut, strict=True)], tables), kv).logits.split(rest)
    for a, b, theirs in zip(first, second, logits, strict=True):
        same(torch.cat((a, b)), theirs)


def test_stale_keys_past_the_end_do_not_count(pair: Pair) -> None:
    """Rejected drafts stay in the pages and are written over."""
    target, logits, _ = pair
    ids = prompts(target.config.vocab_size)[0]
    count, tables = shuffled_pages(1, 5)
    kv = target.kv_cache(count, BLOCK)
    target.forward(batch([(ids[:20] + [9] * 17, 0)], tables), kv)
    same(target.forward(batch([(ids[20:25], 20)], tables), kv).logits, logits[0][20:25])


def test_only_the_logits_asked_for(tmp_path: Path) -> None:
    target = Target.load(tiny_model(tmp_path), kernels=reference)
    count, tables = shuffled_pages(1, 5)
    whole = batch([(prompts(200)[0], 0)], tables)
    every = target.forward(whole, target.kv_cache(count, BLOCK)).logits
    some = target.forward(whole._replace(logits_at=torch.tensor([36, 4])), target.kv_cache(count, BLOCK)).logits
    torch.testing.assert_close(some, every[[36, 4]])
    none = whole._replace(logits_at=torch.tensor([], dtype=torch.int64))
    assert target.forward(none, target.kv_cache(count, BLOCK)).logits.shape == (0, 269)


def test_hidden_states_in_the_order_asked(tmp_path: Path) -> None:
    target = Target.load(tiny_model(tmp_path, layers=3), kernels=reference)
    count, tables = shuffled_pages(1, 5)
    whole = batch([(prompts(200)[0], 0)], tables)
    out = target.forward(whole, target.kv_cache(count, BLOCK), layers=(3, 0, 2))
    assert len(out.hidden) == 3
    torch.testing.assert_close(out.hidden[1], target.weights.embedding.embed(whole.ids))
    final = reference.norm_logits(out.hidden[0], target.weights.norm, target.config.eps, target.weights.head)
    torch.testing.assert_close(final, out.logits)
    assert not torch.equal(out.hidden[2], out.hidden[0])


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_hidden_states_of_every_layer_are_those_of_transformers(architecture: str, kernels: str, tmp_path: Path) -> None:
    """Two rows, their prompts in chunks, then token by token. The last state of transformers is behind the final norm."""
    folder = tiny_model(tmp_path, architecture, layers=3)
    target = Target.load(folder, "float32", kernels=reference if kernels == "reference" else None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [prompts(269)[0], prompts(269)[2]]
    with torch.inference_mode():
        wanted = [torch.cat(theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states) for ids in rows]
    count, tables = shuffled_pages(2, 5)
    kv, found = target.kv_cache(count, BLOCK), [[], []]  # type: ignore[var-annotated]
    for first, last in ((0, 7), (7, 12), *((i, i + 1) for i in range(12, 18))):
        part = batch([(ids[first:last], first) for ids in rows], tables)._replace(logits_at=torch.tensor([1]))
        hidden = torch.stack(target.forward(part, kv, layers=(0, 1, 2, 3)).hidden)  # [4,T,H]
        normed = reference.rms_norm(hidden[3], target.weights.norm, target.config.eps)
        for row, states in enumerate(torch.cat((hidden[:3], normed[None])).chunk(2, 1)):
            found[row].append(states)
    for states, want in zip(found, wanted, strict=True):
        same(torch.cat(states, 1), want[:, :18])


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 9)])
def test_a_hidden_state_that_there_is_not(layers: tuple[int, ...], tmp_path: Path) -> None:
    target = Target.load(tiny_model(tmp_path, layers=3), "float32")
    count, tables = shuffled_pages(1, 5)
    with pytest.raises(ValueError, match="a model of 3 layers has the hidden states 0 to 3"):
        target.forward(batch([([5, 6], 0)], tables), target.kv_cache(count, BLOCK), layers=layers)


def test_a_cache_runs_the_layers_of_the_target_that_is_called(tmp_path: Path) -> None:
    first, second = (Target.load(tiny_model(tmp_path / str(i), seed=i), "float32", kernels=reference) for i in (0, 1))
    count, tables = shuffled_pages(1, 5)
    whole, kv = batch([([5, 6, 7], 0)], tables), first.kv_cache(count, BLOCK)
    wanted = [target.forward(whole, target.kv_cache(count, BLOCK)).logits for target in (first, second)]
    assert torch.equal(first.forward(whole, kv).logits, wanted[0])
    assert torch.equal(second.forward(whole, kv).logits, wanted[1]) and not torch.equal(*wanted)


@pytest.mark.parametrize("architecture", NAMES)
def test_the_chosen_kernels_agree_with_plain_torch(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, architecture)
    fast, slow = Target.load(folder, "bfloat16"), Target.load(folder, "float32", kernels=reference)
    count, tables = shuffled_pages(3, 5)
    whole = batch([(row, 0) for row in prompts(200)], tables)
    a = fast.forward(whole, fast.kv_cache(count, BLOCK)).logits
    b = slow.forward(whole, slow.kv_cache(count, BLOCK)).logits
    assert (a - b).norm() / b.norm() < 0.05  # bfloat16 keeps 8 bits


def test_sizes(tmp_path: Path) -> None:
    target = Target.load(tiny_model(tmp_path), "bfloat16")
    files = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert files / 2 - 4000 < target.bytes < files / 2
    kv = target.kv_cache(7, 16)
    cache = sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
    assert cache == target.kv_bytes_per_token * 7 * 16
    assert kv.keys[1].shape == (7, 2, 16, 32)


def test_random_weights_of_a_shape() -> None:
    config = ModelConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, layers=4, heads=4, kv_heads=2, head_dim=16, max_positions=64
    )
    target = Target.random(config, torch.float32, kernels=reference)
    count, tables = shuffled_pages(1, 5)
    logits = target.forward(batch([(prompts(300)[0], 0)], tables), KVCache(config, count, BLOCK, torch.float32)).logits
    assert bool(logits.isfinite().all())
    assert logits.std() > 0.1
    again = Target.random(config, torch.float32, kernels=reference)
    assert torch.equal(target.weights.layers[3].down.dense(), again.weights.layers[3].down.dense())


# ---- configuration


def parsed(**keys: object) -> ModelConfig:
    given = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
    }
    return ModelConfig.parse(given | keys)


def test_defaults_of_old_files() -> None:
    config = parsed()
    assert (config.kv_heads, config.head_dim, config.rope.theta, config.tied) == (4, 16, 10000.0, False)
    assert config.eos_ids == ()
    mistral = parsed(architectures=["MistralForCausalLM"], num_key_value_heads=2, max_position_embeddings=8192)
    assert mistral.windows == (4096, 4096)
    unreachable = parsed(architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=4096)
    assert unreachable.windows == (0, 0)


def test_yarn_reaches_past_the_old_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parsed(rope_scaling=scaling).max_positions == 16384


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    assert ModelConfig.read(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ModelConfig.read(folder).eos_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert ModelConfig.read(folder).eos_ids == (2,)


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="GemmaForCausalLM") as error:
        parsed(architectures=["GemmaForCausalLM"])
    assert all(name in str(error.value) for name in FAMILIES)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "num_key_value_heads"),
        ({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}, "head_dim"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        (MISTRAL | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_an_error(keys: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError) as error:
        parsed(**keys)
    assert error.value.name == named


@pytest.mark.parametrize("name", VARIANTS)
def test_rotation_tables(name: str, tmp_path: Path) -> None:
    """Over a long context, where the variants' frequencies part."""
    architecture, sizes = VARIANTS[name]
    folder = tiny_model(tmp_path, architecture, positions=512, **sizes)
    config = ModelConfig.read(folder)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    mine_cos, mine_sin = rope.tables(config.rope, config.head_dim, 512)
    half = config.head_dim // 2
    torch.testing.assert_close(mine_cos, cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(mine_sin, sin[0, :, :half], atol=2e-5, rtol=0)


def test_choosing_the_dtype() -> None:
    half, single, cpu = parsed(dtype="float16"), parsed(dtype="float32"), torch.device("cpu")
    assert choose_dtype("float32", half, cpu) == torch.float32
    assert choose_dtype("auto", single, cpu) == torch.float32
    assert choose_dtype("auto", half, cpu) in (torch.bfloat16, torch.float32)
    assert choose_dtype("auto", half, torch.device("cuda")) == torch.float16
    with pytest.raises(SettingError, match="int4"):
        choose_dtype("int4", half, cpu)
