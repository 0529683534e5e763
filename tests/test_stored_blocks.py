"""Weights that stay in the blocks of a .gguf file, or are quantised while they load, through whole tiny models: the logits are
those of the same values in dense matrices. The kernels that multiply blocks have tests of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.kernels import cpu, reference
from forerun.llm import LLM
from forerun.models import hub, loading
from forerun.models.blocks import FORMATS, Blocks, dequantized, quantized
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.models.weights import Dense, Layer, Weights
from forerun.types import LoadError, SamplingParams, SettingError
from tests.test_loading import change, poison, write_gguf
from tests.test_weights import expanded, passes
from tests.tiny import tiny_model

CPU = torch.device("cpu")
SIZES = {"hidden": 256, "intermediate": 256, "head_dim": 64, "layers": 2}  # K-quants have blocks of 256
ATTENTION = "model.layers.0.self_attn."


def silent(line: str) -> None:
    """No progress."""


def gguf_folder(
    tmp_path: Path, format: str | Callable[[str], str], architecture: str = "llama", tied: bool = False, part_tensors: int = 0
) -> Path:
    """The folder of a tiny model whose .gguf has its matrices in this format, or in the one given for each name."""
    source = tiny_model(tmp_path / "hf", architecture, tied=tied, **SIZES)  # type: ignore[arg-type]
    pick = format if callable(format) else lambda name: str(format)
    written = write_gguf(tmp_path / "tiny.gguf", source, quantise=pick, part_tensors=part_tensors)
    return hub.resolve(written if written.exists() else next(tmp_path.glob("tiny-*.gguf")), silent)


def weights_of(folder: Path, matrices: str = "stored", dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Weights]:
    config = ModelConfig.read(folder)
    return config, loading.load(folder, config, dtype, CPU, matrices)


def formats_of(matrix: object) -> list[str]:
    assert isinstance(matrix, Blocks), "it is dense"
    return [part.format for part in matrix.parts]


def equal(first: Target, second: Target) -> None:
    for got, want in zip(passes(first), passes(second), strict=True):
        assert torch.equal(got, want) and got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_give_the_logits_of_their_values(
    architecture: str, format: str, dtype: torch.dtype, tmp_path: Path, own_cache: Path
) -> None:
    folder = gguf_folder(tmp_path, format, architecture)
    config, weights = weights_of(folder, dtype=dtype)
    assert {kind for matrix in weights.matrices() for kind in formats_of(matrix)} == {format}
    assert weights.interleaved == (architecture == "llama") and weights.dtype == dtype
    target = Target(config, weights, reference)
    equal(target, Target(config, expanded(weights), reference))
    target.keep_vocabulary(200)
    assert passes(target)[0].shape == (14, 200) and target.weights.bytes == target.bytes
    # the file expanded while it loads: the rows of a llama's q and k are in another order, so sums may be rounded otherwise
    dense = Target(config, weights_of(folder, "dense", dtype)[1], reference)
    assert not dense.weights.interleaved and dense.quantization is None
    got, want = passes(Target(config, weights, reference))[0], passes(dense)[0]
    assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 0.03) and want.std() > 0.1
    assert architecture == "llama" or torch.equal(got, want)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("part_tensors", [0, 8])
def test_blocks_lie_in_the_mapped_files(tied: bool, part_tensors: int, tmp_path: Path, own_cache: Path) -> None:
    folder = gguf_folder(tmp_path, "Q4_1", "qwen2", tied, part_tensors)
    _, weights = weights_of(folder)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    files = {line[-1] for line in maps}
    assert files == {str(path) for path in tmp_path.glob("*.gguf")} and len(files) == (4 if part_tensors else 1)
    assert all(line[1].startswith("r--") for line in maps)
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    sizes = 0
    for matrix in weights.matrices():
        for data in matrix.stored.values():
            assert any(low <= data.data_ptr() and data.data_ptr() + data.nbytes <= high for low, high in spans)
            sizes += data.nbytes
    assert (weights.head is weights.embedding) == tied
    vectors = sum(t.nbytes for layer in weights.layers for t in layer.vectors()) + weights.norm.nbytes
    assert weights.bytes == sizes + vectors
    assert sizes == sum(matrix.rows * matrix.columns for matrix in weights.matrices()) * 20 // 32


def test_formats_are_mixed_within_a_file(tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stacked matrix with a part in a format that kernels do not multiply is dense, and so is a whole matrix in one."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q6_K", "ffn_gate": "Q2_K", "ffn_up": "Q5_1", "attn_output": "F16"}

    def pick(name: str) -> str:
        return next((kind for stem, kind in kinds.items() if stem in name), "Q5_0")

    folder = gguf_folder(tmp_path, pick)
    caplog.set_level(logging.INFO, "forerun")
    config, weights = weights_of(folder)
    for layer in weights.layers:
        assert formats_of(layer.qkv) == ["Q4_K", "Q8_0", "Q6_K"] and formats_of(layer.down) == ["Q5_0"]
        assert isinstance(layer.gate_up, Dense) and isinstance(layer.out, Dense) and layer.out.dtype == torch.float32
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("Expanded to float32") and "2 in F16" in line and "2 in Q2_K" in line and "Q5_1" not in line
    target = Target(config, weights, reference)
    equal(target, Target(config, expanded(weights), reference))
    mix = dict(part.rsplit(" ", 2)[:2] for part in (target.quantization or "").split(", "))
    assert set(mix) == {"float32", "Q5_0", "Q4_K", "Q8_0", "Q6_K"} and 98 <= sum(map(int, mix.values())) <= 102
    assert list(mix) == sorted(mix, key=lambda kind: -int(mix[kind]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_are_expanded_alike_by_the_kernels_and_without_them(
    architecture: str, dtype: torch.dtype, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of q and k are reordered on the way in a llama."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q6_K", "ffn_gate": "Q2_K"}
    folder = gguf_folder(tmp_path, lambda name: next((k for stem, k in kinds.items() if stem in name), "Q5_1"), architecture)
    used: list[str] = []
    expand = cpu.expand
    monkeypatch.setattr(cpu, "expand", lambda rows, *rest: used.append(rows.format) or expand(rows, *rest))
    config, fast = weights_of(folder, "dense", dtype)
    assert set(used) == {"Q4_K", "Q8_0", "Q6_K", "Q5_1"}
    monkeypatch.setattr(cpu, "expand", lambda *_: False)
    _, slow = weights_of(folder, "dense", dtype)
    for (name, got), (_, want) in zip(loading.parts(config, fast), loading.parts(config, slow), strict=True):
        assert torch.equal(got, want), name


def test_what_a_target_does_with_a_gguf(tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = gguf_folder(tmp_path, "Q4_0")
    caplog.set_level(logging.INFO, "forerun")
    auto = Target.load(folder, kernels=reference)
    assert auto.quantization == "Q4_0 100 %" and auto.dtype == cpu.best_dtype()[0] and auto.shapes[0].interleaved
    assert ", weights in blocks (Q4_0 100 %), " in caplog.text
    for dtype in (torch.float32, torch.bfloat16):
        for given in (dtype, loading.named(dtype)):
            target = Target.load(folder, given, kernels=reference)
            assert target.quantization is None and target.dtype == dtype and not target.shapes[0].interleaved
    assert Target.load(folder, "float32").bytes > 6 * auto.bytes


def test_in_float32_nothing_is_rounded(tmp_path: Path, own_cache: Path) -> None:
    source = tiny_model(tmp_path / "hf", "qwen2")
    stored = load_file(source / "model.safetensors")
    folder = hub.resolve(write_gguf(tmp_path / "a.gguf", source), silent)
    target = Target.load(folder, kernels=reference)  # a file in float32 throughout is a checkpoint in float32
    assert target.dtype == torch.float32 and target.quantization is None
    for name, part in loading.parts(target.config, target.weights):
        assert torch.equal(part, stored[name])
    folder = hub.resolve(write_gguf(tmp_path / "b.gguf", source, quantise=True), silent)
    target = Target.load(folder, "float32", kernels=reference)
    for name, part in loading.parts(target.config, target.weights):
        exact = dequantized(quantized(stored[name], "Q8_0"), "Q8_0") if part.dim() == 2 else stored[name]
        assert torch.equal(part, exact)


@pytest.mark.parametrize("isa", cpu.isas())
def test_rows_in_the_order_of_the_file_give_the_same_logits(
    isa: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the C kernels, which rotate neighbours of a head then. The dense twin has its rows in halves."""
    monkeypatch.setenv(cpu.SETTING, isa)
    source = tiny_model(tmp_path / "hf", config={"attention_bias": True})
    folder = hub.resolve(write_gguf(tmp_path / "a.gguf", source), silent)
    config, weights = weights_of(folder)
    kernels = cpu.kernels(torch.float32)
    assert weights.interleaved and all(isinstance(matrix, Dense) for matrix in weights.matrices())
    halves = Target.load(source, "float32", kernels=kernels)
    assert not torch.equal(halves.weights.layers[0].qkv.dense(), weights.layers[0].qkv.dense())
    for got, want in zip(passes(Target(config, weights, kernels)), passes(halves), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# --- quantising while loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", loading.QUANTIZED)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [1000, loading.STAGE])
def test_a_checkpoint_is_quantised_while_it_loads(
    setting: str, tied: bool, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STAGE", stage)
    format = loading.QUANTIZED[setting]
    folder = tiny_model(tmp_path, "qwen2", tied=tied, dtype=torch.bfloat16)
    target = Target.load(folder, "float32", kernels=reference, quantization=setting)
    assert target.quantization == f"{format} 100 %" and target.dtype == torch.float32
    stored, wanted = load_file(folder / "model.safetensors"), loading.empty(target.config, torch.float32, "cpu")
    for name, out in loading.parts(target.config, wanted):
        values = stored[name].float()
        out.copy_(dequantized(quantized(values, format), format) if values.dim() == 2 else values)
    equal(target, Target(target.config, wanted, reference))
    assert target.weights.head is target.weights.embedding or not tied
    half = Target.load(folder, kernels=reference, quantization=setting)
    assert half.dtype == cpu.best_dtype()[0] and half.quantization == target.quantization


def test_a_gguf_in_16_bits_or_more_can_be_quantised(tmp_path: Path, own_cache: Path) -> None:
    folder = gguf_folder(tmp_path, lambda name: "F16" if "ffn" in name else "BF16")
    target = Target.load(folder, "float32", kernels=reference, quantization="int8")
    dense = Target.load(folder, "float32", kernels=reference)
    assert target.quantization == "Q8_0 100 %" and not target.weights.interleaved

    def requantised(matrix: object) -> Dense:
        assert isinstance(matrix, Dense)
        return Dense(dequantized(quantized(matrix.values, "Q8_0"), "Q8_0"))

    def layer(given: Layer) -> Layer:
        return given._replace(**{name: requantised(getattr(given, name)) for name in ("qkv", "out", "gate_up", "down")})

    weights = dense.weights
    twin = weights._replace(
        embedding=requantised(weights.embedding), head=requantised(weights.head), layers=tuple(map(layer, weights.layers))
    )
    equal(target, Target(target.config, twin, reference))


def test_what_cannot_be_quantised(tmp_path: Path, own_cache: Path) -> None:
    folder = gguf_folder(tmp_path, lambda name: "Q5_K" if "ffn_down" in name else "F16")
    with pytest.raises(SettingError, match=r"quantization='int8': the file holds blocks already .*down_proj.* is Q5_K"):
        Target.load(folder, quantization="int8", kernels=reference)
    odd = tiny_model(tmp_path / "odd", intermediate=72)
    with pytest.raises(SettingError, match=r"quantization='int4': tensor .*down_proj.* has 72 columns"):
        Target.load(odd, quantization="int4", kernels=reference)
    with pytest.raises(SettingError, match=r"quantization='int8': .*on a CPU only"):
        Target.load(odd, quantization="int8", device="cuda")
    broken = tiny_model(tmp_path / "broken")
    change(broken, poison(float("nan")))
    with pytest.raises(LoadError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight has values not finite"):
        Target.load(broken, quantization="int8", kernels=reference)


def test_a_matrix_in_blocks_that_is_not_finite(tmp_path: Path, own_cache: Path) -> None:
    """Its first row is looked at."""
    folder = gguf_folder(tmp_path, "Q8_0")
    (path,) = tmp_path.glob("*.gguf")
    start = loading.GgufCheckpoint(folder, ModelConfig.read(folder)).stored[ATTENTION + "k_proj.weight"].start
    data = bytearray(path.read_bytes())
    data[start : start + 2] = b"\x00\x7e"  # a NaN in float16
    path.write_bytes(data)
    folder = hub.resolve(path, silent)
    for matrices in ("stored", "dense"):
        with pytest.raises(LoadError, match=r"layers\.0\.self_attn\.k_proj\.weight has values not finite"):
            weights_of(folder, matrices)


def test_the_setting_through_the_whole_engine(tmp_path: Path, own_cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf", dtype=torch.bfloat16)
    plain = LLM(folder, quantization="int8", kv_cache_tokens=512)
    assert plain.settings()["quantization"] == "Q8_0 100 %" and plain.model.quantization == "int8"
    shared = LLM(plain.model, quantization="int8", kv_cache_tokens=512, speculative_config={
        "method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = [llm.generate(["the thing", "in the"], greedy) for llm in (plain, shared)]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert shared.stats.drafts.acceptance_rate == 1.0  # the drafter's weights are quantised alike
    assert LLM(folder, kv_cache_tokens=512).settings()["quantization"] is None
