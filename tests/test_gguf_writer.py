"""A model written as a .gguf file: what is read back is the model, in blocks of 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.llm import LLM
from forerun.models import gguf_writer, hub
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.models.gguf_file import read_header
from forerun.models.tokenizer import Tokenizer
from forerun.types import SamplingParams, SettingError
from tests.test_loading import write_gguf
from tests.test_weights import passes
from tests.tiny import tiny_model

SIZES = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 2}


def silent(line: str) -> None:
    """No progress."""


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    return tiny_model(tmp_path / "hf", "llama", **SIZES)  # type: ignore[arg-type]


@pytest.fixture
def vocabulary(tmp_path: Path, folder: Path) -> Path:
    return write_gguf(tmp_path / "target.gguf", folder)


@pytest.mark.parametrize(("tied", "embedding", "most"), [(True, "Q8_0", 0.05), (False, "Q8_0", 0.05), (True, "Q5_1", 0.15)])
def test_what_is_written_is_read_back(tied: bool, embedding: str, most: float, tmp_path: Path, own_cache: Path) -> None:
    source = tiny_model(tmp_path / "hf", "llama", tied=tied, **SIZES)  # type: ignore[arg-type]
    vocabulary = write_gguf(tmp_path / "target.gguf", source)
    written = tmp_path / "draft.gguf"
    gguf_writer.write(written, source, vocabulary, embedding, name="a draft model", license="apache-2.0")
    made = hub.resolve(written, silent)
    was, now = ModelConfig.read(source), ModelConfig.read(made)
    differing = {name for name in was.__dataclass_fields__ if getattr(was, name) != getattr(now, name)}
    assert differing <= {"dtype", "eos_ids", "eps"} and now.eps == pytest.approx(was.eps), differing
    text = "the thing 12 <|im_end|> and"
    assert Tokenizer(made).encode(text) == Tokenizer(source).encode(text)
    assert Tokenizer(made).inner.get_vocab() == Tokenizer(source).inner.get_vocab()
    want = passes(Target.load(source, "float32"))[0]
    for dtype, share in (("float32", 1.0), ("auto", 2.0)):  # auto: activations in 8 bits, other sums in bfloat16
        got = passes(Target.load(made, dtype))[0]
        assert (got - want).norm() / want.norm() < share * most and want.std() > 0.1
    stored = {t.name: t.tensor_type.name for t in read_header(written).tensors}
    assert stored["token_embd.weight"] == embedding and stored["blk.0.attn_q.weight"] == "Q8_0"


def test_the_bytes_are_those_of_an_independent_writer(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    """Names, order of the rows of q and k, formats and blocks of all tensors; values of the keys that both write."""
    gguf_writer.write(tmp_path / "draft.gguf", folder, vocabulary)
    files = tmp_path / "draft.gguf", write_gguf(tmp_path / "other.gguf", folder, quantise=True)
    ours, theirs = (read_header(path) for path in files)
    data = [
        {t.name: (t.shape, t.tensor_type, file.read_bytes()[t.data_offset : t.data_offset + t.n_bytes]) for t in header.tensors}
        for file, header in zip(files, (ours, theirs), strict=True)
    ]
    assert data[0] == data[1]
    both = ours.meta.keys() & theirs.meta.keys()
    assert {k: ours.meta[k] for k in both} == {k: theirs.meta[k] for k in both} and len(both) > 15


def test_it_drafts_for_its_target(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    gguf_writer.write(tmp_path / "draft.gguf", folder, vocabulary)
    settings = {"method": "draft_model", "model": str(tmp_path / "draft.gguf"), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(folder, kv_cache_tokens=512, dtype="float32").generate("the thing", params)[0]
    drafted = LLM(folder, speculative_config=settings, kv_cache_tokens=512, dtype="float32").generate("the thing", params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.completions[0].stats.acceptance_length > 3, "it is the target itself, in 8 bits"


def test_what_is_refused(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    other = tiny_model(tmp_path / "qwen", "qwen3", **SIZES)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="architecture='Qwen3ForCausalLM': only LlamaForCausalLM is written"):
        gguf_writer.write(file, other, vocabulary)
    with pytest.raises(SettingError, match=r"vocabulary='\d+ tokens for \d+ rows': give a .gguf of the model"):
        gguf_writer.write(file, folder, write_gguf(tmp_path / "longer.gguf", folder, padding=3))
    path = folder / "tokenizer.json"
    given = json.loads(path.read_text())
    vocab = given["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(given))
    with pytest.raises(SettingError, match="the token has another id there"):
        gguf_writer.write(file, folder, vocabulary)
    odd = tiny_model(tmp_path / "odd", "llama", **SIZES | {"intermediate": 40})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="give multiples of 32"):
        gguf_writer.write(file, odd, vocabulary)
    assert not file.exists()


def test_values_lose_half_a_step_at_most(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    """Q8_0: a block's largest value is 127 steps."""
    from safetensors.torch import load_file

    gguf_writer.write(tmp_path / "draft.gguf", folder, vocabulary)
    weights = Target.load(hub.resolve(tmp_path / "draft.gguf", silent), "float32").weights
    given = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float()
    blocks = given.view(len(given), -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    lost = (weights.layers[1].down.dense() - given).view(blocks.shape).abs()
    assert bool((lost <= 0.51 * step + 1e-3 * blocks.abs()).all()) and float(lost.max()) > 0
    assert weights.norm.dtype == torch.float32
