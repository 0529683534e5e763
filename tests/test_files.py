"""A model's files, broken in every way: each is an error that names the file, or what it says is done."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch

from forerun.models import gguf, hub, loading
from forerun.models.config import ModelConfig
from forerun.models.files import INDEX
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import Weights
from forerun.types import LoadError, SettingError
from tests.test_loading import Q, change, load, logits, shard, write_gguf
from tests.tiny import tiny_model

HOSTILE: list[Any] = [
    None, True, "x", "", "64", -1, 0, 1.5, 2**31, 2**70, 1e300, float("nan"), float("inf"), [], [1], [[]], {}, {"a": 1},
]  # fmt: skip
NOT_JSON = [b"", b"{", b'{"a": }', b"[1]", b"null", b"7", b'"x"', b'{"a": "\xff"}', b"[" * 100_000]
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
    "truncate": True, "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0, "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
KEYS = {
    "rope_scaling": YARN, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"], "attention_bias": False, "mlp_bias": False,
    "quantization_config": None, "dtype": "float32", "rope_parameters": None, "original_max_position_embeddings": None,
}  # fmt: skip


def silent(line: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, to be copied."""
    return tiny_model(tmp_path_factory.mktemp("made"), layers=2, hidden=32, intermediate=32, head_dim=16)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def works_or_names(name: str, use: Callable[[], object]) -> bool:
    """Whether it worked; if not, it was refused with an error that names this file."""
    try:
        use()
    except LoadError as error:
        assert name in str(error), str(error)
        return False
    return True


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_any_value_of_config_json(architecture: str, tmp_path: Path) -> None:
    types = {"layer_types": ["sliding_attention"] * 2} if architecture == "mistral" else {}
    folder = tiny_model(tmp_path, architecture, hidden=32, intermediate=32, head_dim=16, config=KEYS | types)
    path = folder / "config.json"
    given = json.loads(path.read_text())
    worked = 0
    for kind in ("yarn", "llama3", "linear"):
        scaling = YARN | {"rope_type": kind}
        cases = [given | {"rope_scaling": scaling | {key: value}} for key in YARN for value in HOSTILE]
        if kind == "yarn":
            cases += [given | {key: value} for key in given for value in HOSTILE]
        for case in cases:
            path.write_text(json.dumps(case))
            # a value may be fine and the tensors not those of such a model
            worked += works_or_names(str(folder), lambda: load(folder))
    assert worked > 100  # values of the right type are taken


@pytest.mark.parametrize("value", HOSTILE)
def test_any_stop_id_of_either_file(value: Any, folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        given = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(given | {"eos_token_id": value}))
        fine = value in (None, [], 0, 1, [1]) and not isinstance(value, bool)
        assert works_or_names(name, lambda: load(folder)) == fine
        (folder / name).write_text(json.dumps(given))


@pytest.mark.parametrize("text", NOT_JSON)
def test_what_is_not_json(text: bytes, folder: Path) -> None:
    def use() -> None:
        load(folder)
        Tokenizer(folder)

    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(text)
        assert not works_or_names(name, use)
        path.unlink()
        if before is not None:
            path.write_bytes(before)
    use()
    shard(folder)
    (folder / INDEX).write_bytes(text)
    assert not works_or_names(INDEX, use)


def test_any_index(folder: Path) -> None:
    good = json.loads((shard(folder) / INDEX).read_text())
    for value in HOSTILE:
        for case in ({"weight_map": value}, {"weight_map": good["weight_map"] | {Q: value}}, {"weight_map": {Q: value}}):
            (folder / INDEX).write_text(json.dumps(case))
            assert not works_or_names(INDEX, lambda: load(folder))
    (folder / INDEX).write_text("{}")
    assert not works_or_names(INDEX, lambda: load(folder))
    (folder / INDEX).write_text(json.dumps(good))
    load(folder)


def rewritten(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """The header of a safetensors file, changed."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_any_safetensors_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.read_bytes()
    for value in HOSTILE:
        for key in ("dtype", "shape", "data_offsets", None):
            def put(header: dict[str, Any], key: str | None = key, value: Any = value) -> None:
                header[Q] = value if key is None else header[Q] | {key: value}

            rewritten(path, put)
            assert not works_or_names(str(folder), lambda: load(folder))
            path.write_bytes(before)
    for value in ([-8, 0], [0, 2**70], [8, 4], [0.0, 8.0], [0, True]):
        rewritten(path, lambda header, value=value: header[Q].update(data_offsets=value))  # type: ignore[misc]
        assert not works_or_names("model.safetensors", lambda: load(folder))
        path.write_bytes(before)
    for text in NOT_JSON:
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        assert not works_or_names("model.safetensors", lambda: load(folder))


def test_shards_without_their_index(folder: Path) -> None:
    (shard(folder) / INDEX).unlink()
    with pytest.raises(LoadError, match=r"parts of a checkpoint, but not the model\.safetensors\.index\.json"):
        load(folder)


def test_an_untied_model_without_its_head(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        load(folder)


# ---- GGUF


def test_a_split_gguf_is_one_model(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    whole = hub.resolve(write_gguf(tmp_path / "whole.gguf", folder), silent)
    write_gguf(tmp_path / "tiny.gguf", folder, part_tensors=8)
    files = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [f.name for f in files] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    converted = {hub.resolve(file, silent) for file in files}
    assert len(converted) == 1  # whichever part is given
    ids = [5, 6, 7, 8]
    assert torch.equal(logits(load(converted.pop()), ids), logits(load(whole), ids))
    # the parts are looked at again: another one in its place is another model
    write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "other", layers=2, seed=1), part_tensors=8)
    assert not torch.equal(logits(load(hub.resolve(files[0], silent)), ids), logits(load(whole), ids))


def test_a_part_alone_is_no_model(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder, part_tensors=12)
    first, second = sorted(tmp_path.glob("tiny-*.gguf"))
    for part, number in ((first, 1), (second, 2)):
        alone = tmp_path / "alone.gguf"
        shutil.copy(part, alone)
        with pytest.raises(LoadError, match=f"part {number} of 2 .*-0000{number}-of-00002.gguf"):
            hub.resolve(alone, silent)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(LoadError, match=r"tiny-00001-of-00002\.gguf.*it is part 2 of 2"):
        hub.resolve(second, silent)
    first.write_bytes(kept)
    second.unlink()
    with pytest.raises(LoadError, match=r"tiny-00002-of-00002\.gguf is missing"):
        hub.resolve(first, silent)
    assert list(own_cache.glob("models/*")) == []


def test_a_part_of_another_model(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder, part_tensors=12)
    write_gguf(tmp_path / "more.gguf", tiny_model(tmp_path / "other", layers=1), part_tensors=8)
    shutil.copy(tmp_path / "more-00002-of-00002.gguf", tmp_path / "tiny-00002-of-00002.gguf")
    with pytest.raises(LoadError, match=r"tensors and its parts hold|in an earlier part too"):
        hub.resolve(tmp_path / "tiny-00001-of-00002.gguf", silent)


def value_of(value: Any) -> gguf_package.gguf_writer.GGUFValue | None:
    """As a GGUF file can hold it; None if it cannot."""
    kinds = {bool: "BOOL", str: "STRING", int: "INT64", float: "FLOAT64", list: "ARRAY"}
    if type(value) not in kinds or value in ([], [[]]) or (isinstance(value, int) and value >= 2**63):
        return None
    return gguf_package.gguf_writer.GGUFValue(value, gguf_package.GGUFValueType[kinds[type(value)]])


def test_any_metadata_of_a_gguf(folder: Path, tmp_path: Path) -> None:
    keys: list[str] = []
    write_gguf(tmp_path / "a.gguf", folder, edit=keys.extend)
    keys += [f"tokenizer.ggml.{name}" for name in ("eot_token_id", "add_eos_token", "padding_token_id")]
    keys += ["llama.rope.scaling.type", "llama.attention.sliding_window", "llama.expert_count", "split.no", "split.count"]
    assert len(keys) > 25
    worked = 0
    for key in keys:
        for value in (None, *(v for v in HOSTILE if value_of(v) is not None)):
            def put(fields: dict[str, Any], key: str = key, value: Any = value) -> None:
                fields.pop(key, None)
                if value is not None:
                    fields[key] = value_of(value)

            path = write_gguf(tmp_path / "a.gguf", folder, edit=put)
            out = tmp_path / "out"
            out.mkdir()

            def use(path: Path = path, out: Path = out) -> None:
                gguf.describe(path, out, silent)
                load(out)
                Tokenizer(out)

            worked += works_or_names(str(tmp_path), use)
            shutil.rmtree(out)
    assert worked > 20


def test_a_gguf_with_bytes_turned(folder: Path, tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "good.gguf", folder).read_bytes()
    draw = random.Random(0)
    for trial in range(60):
        data = bytearray(good[: draw.randrange(len(good))] if trial % 3 == 0 else good)
        for _ in range(0 if trial % 3 == 0 else draw.choice((1, 3))):
            data[draw.randrange(min(len(data), draw.choice((24, 2000, 9000))))] = draw.choice((0, 255, draw.randrange(256)))
        (tmp_path / "bad.gguf").write_bytes(data)
        out = tmp_path / str(trial)
        out.mkdir()
        worked = works_or_names("bad.gguf", lambda out=out: gguf.describe(tmp_path / "bad.gguf", out, silent))  # type: ignore[misc]
        assert worked or trial % 3 > 0 or not (out / "gguf.json").exists()


def test_the_ends_that_a_gguf_tells(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    """eos, eot and eom are all stop ids, with and without each other, beside <|endoftext|> and <|im_end|>; add_eos_token is
    done."""
    for ends in ({"eos": 2}, {"eos": 2, "eot": 0}, {"eot": 0}, {"eos": 2, "eot": 5, "eom": 1}, {}):
        def put(fields: dict[str, Any], ends: dict[str, int] = ends) -> None:
            del fields["tokenizer.ggml.eos_token_id"]
            fields |= {f"tokenizer.ggml.{name}_token_id": value_of(token) for name, token in ends.items()}

        converted = hub.resolve(write_gguf(tmp_path / "a.gguf", folder, edit=put), silent)
        assert set(load(converted).config.eos_ids) == {0, 2, *ends.values()}
    both = {"tokenizer.ggml.add_bos_token": value_of(True), "tokenizer.ggml.add_eos_token": value_of(True)}
    converted = hub.resolve(write_gguf(tmp_path / "a.gguf", folder, edit=lambda fields: fields.update(both)), silent)
    plain = Tokenizer(folder).encode("the thing")
    assert Tokenizer(converted).encode("the thing") == [1, *plain, 2]
    assert Tokenizer(converted).encode("the thing", add_special_tokens=False) == plain


# ---- the cache


def broken_in_every_way(converted: Path) -> list[tuple[str, bytes | None]]:
    """Files of a model's folder in the cache with what may become of them: gone, empty, cut short, of zeros."""
    cases: list[tuple[str, bytes | None]] = []
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "gguf.json"):
        data = (converted / name).read_bytes()
        cases += [(name, b""), (name, data[: len(data) // 2]), (name, bytes(len(data)))]
        cases += [] if name == "tokenizer_config.json" else [(name, None)]
    return cases


def test_a_broken_folder_in_the_cache_is_made_again(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", folder)
    converted = hub.resolve(path, silent)
    expected = logits(load(converted), [5, 6, 7])
    (name,) = (known.name for known in hub.models() if known.folder)
    for file, content in broken_in_every_way(converted):
        if content is None:
            (converted / file).unlink()
        else:
            (converted / file).write_bytes(content)
        with pytest.raises(SettingError):  # by its name alone it cannot be made again
            hub.resolve(name, silent)
        lines: list[str] = []
        assert hub.resolve(path, lines.append) == converted
        assert "broken" in lines[0] and "reading" in lines[1]
        assert torch.equal(logits(load(converted), [5, 6, 7]), expected)
        assert [f.name for f in (own_cache / "models").iterdir()] == [converted.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left"), SettingError("x", 1, "y")])
def test_an_interrupted_resolve_leaves_nothing(
    error: BaseException, folder: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", folder)

    def fail(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SettingError)):
        patch.setattr(gguf.manifest, "write", fail)  # which is written last
        hub.resolve(path, silent)
    assert list((own_cache / "models").iterdir()) == []
    load(hub.resolve(path, silent))


def test_every_model_that_is_listed_can_be_named(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    paths = [write_gguf(tmp_path / f"{name}.gguf", folder) for name in ("tiny", "With.Dots-Q8_0", "with space")]
    converted = [hub.resolve(path, silent) for path in paths]
    known = [known for known in hub.models() if known.folder]
    assert sorted(one.folder for one in known) == sorted(converted)  # type: ignore[type-var]
    for one in known:
        assert hub.resolve(one.name, silent) == one.folder and one.bytes > paths[0].stat().st_size
    paths[0].unlink()  # its folder in the cache is not enough, so it is listed no longer
    assert {one.folder for one in hub.models() if one.folder} == set(converted[1:])


def test_a_gguf_that_is_not_as_it_was(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    path, away = write_gguf(tmp_path / "tiny.gguf", folder), tmp_path / "away.gguf"
    made, (name,) = hub.resolve(path, silent), [known.name for known in hub.models() if known.folder]
    state = path.stat()

    def refused(why: str) -> None:
        for use in (lambda: load(made), lambda: hub.resolve(name, silent)):
            with pytest.raises(LoadError, match=rf"tiny\.gguf.*{why}"):
                use()

    path.rename(away)
    refused("is not there any more; put it back, or give its new path")
    assert torch.equal(logits(load(hub.resolve(away, silent)), [5, 6]), logits(load(hub.resolve(away, silent)), [5, 6]))
    away.rename(path)
    load(made)
    path.write_bytes(path.read_bytes()[:-32])
    refused("has changed since it was first read; give its path again")
    with pytest.raises(LoadError, match="not a whole GGUF file"):
        hub.resolve(path, silent)
    write_gguf(path, tiny_model(tmp_path / "other", seed=1, layers=2, hidden=32, intermediate=32, head_dim=16))
    assert path.stat().st_size == state.st_size  # only its time tells
    refused("has changed")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    load(made)


def test_any_manifest(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    made = hub.resolve(write_gguf(tmp_path / "tiny.gguf", folder, quantise=True), silent)
    path = made / "gguf.json"
    good = json.loads(path.read_text())
    file, at = good["files"][0], good["tensors"][Q]
    cases = []
    for value in HOSTILE:
        cases += [good | {key: value} for key in good]
        cases += [good | {"files": [file | {key: value}]} for key in file if (key, value) != ("mtime_ns", None)]
        cases += [good | {"tensors": good["tensors"] | {Q: [*at[:i], value, *at[i + 1 :]]}} for i in range(len(at))]
    others = (None, [], [*at, 1], [*at[:3], at[3] + 34, at[4]], [at[0], "Q4_0", *at[2:]], [at[0], "Q2_K", *at[2:]])
    cases += [good | {"tensors": good["tensors"] | {Q: other}} for other in others]
    for case in cases:
        if case != good:
            path.write_text(json.dumps(case))
            for kernels in ("stored", "dense"):
                worked = works_or_names(str(tmp_path), lambda kernels=kernels: loaded(made, kernels))  # type: ignore[misc]
                # rows may be said to lie in another order, and a tensor elsewhere in the file
                assert not worked or case["interleaved"] is not good["interleaved"] or case["tensors"][Q][3] != at[3]


def loaded(folder: Path, matrices: str) -> Weights:
    config = ModelConfig.read(folder)
    return loading.load(folder, config, torch.float32, torch.device("cpu"), matrices)


# ---- downloads

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "missing", [SHARDS[1:], SHARDS[:1], [INDEX], [INDEX, *SHARDS[1:]], ["tokenizer.json"], ["config.json"], SHARDS]
)
def test_an_interrupted_download_is_finished(
    missing: list[str], made: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub's cache holds some of the files; what is missing is fetched, or named where there is no network."""
    import huggingface_hub

    whole = shard(Path(shutil.copytree(made, tmp_path / "whole")))
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    shutil.copytree(whole, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    online = False

    def download(name: str, revision: object, allow_patterns: list[str], local_files_only: bool) -> str:
        if not local_files_only:
            if not online:
                raise ConnectionError("no route")
            shutil.copytree(whole, snapshot, dirs_exist_ok=True)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("owner/name", silent) == snapshot and "owner/name" in [k.name for k in hub.models()]
    for name in missing:
        (snapshot / name).unlink()
    assert "owner/name" not in [k.name for k in hub.models()]
    with pytest.raises(SettingError, match=r"no route.*an earlier download lacks") as error:
        hub.resolve("owner/name", silent)
    assert any(name in str(error.value) for name in [*missing, "model.safetensors"])
    online = True
    load(hub.resolve("owner/name", silent))


def test_a_download_whose_index_is_broken(made: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    whole = shard(Path(shutil.copytree(made, tmp_path / "whole")))
    (whole / INDEX).write_text("{")

    def download(name: str, revision: object, allow_patterns: list[str], local_files_only: bool) -> str:
        if not local_files_only:
            raise ConnectionError("no route")
        return str(whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SettingError, match=r"no route.*model\.safetensors\.index\.json.*not JSON"):
        hub.resolve("owner/name", silent)
