"""The header of GGUF files: equal to what the gguf package reads, and broken files are refused with a reason."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from forerun.models.gguf_file import read_header

VALUES: dict[str, Any] = {
    "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000, "int32": -2_000_000_000,
    "uint64": 2**63 + 5, "int64": -(2**62), "float32": 0.1, "float64": 0.1, "bool": True, "string": "naïve 🙂 \0 ▁",
}  # fmt: skip
ARRAYS: dict[str, Any] = {
    "texts": ["a", "", "b🙂"], "whole": [1, -2, 2**31 - 1], "real": [0.5, -1e9, 0.1], "flags": [True, False],
    "bytes": b"\0\xff",
}  # fmt: skip


def written(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(f"one.{kind}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"many.{name}", values)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    draw = np.random.default_rng(0)
    for name, shape in (("a.weight", (3, 64)), ("b", (5,)), ("c", (2, 3, 32))):
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        values = gguf.quants.quantize(draw.standard_normal((4, 64)).astype(np.float32), kind)
        writer.add_tensor(kind.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_a_header_is_what_the_package_reads(alignment: int | None, tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", alignment)
    theirs, ours = gguf.GGUFReader(path), read_header(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.meta == fields and len(fields) > 17
    assert [type(value) for value in ours.meta.values()] == [type(value) for value in fields.values()]
    assert ours.meta["one.float32"] == float(np.float32(0.1)) and ours.meta["many.bytes"] == [0, 255]
    for tensor, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.n_bytes) == (other.name, other.tensor_type, other.n_bytes)
        assert tensor.shape == tuple(other.shape) and tensor.data_offset == other.data_offset


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.gguf").read_bytes()
    read_header(tmp_path / "a.gguf")
    short = tmp_path / "short.gguf"
    header = read_header(tmp_path / "a.gguf").tensors[0].data_offset
    for size in (*range(0, header, 7), *range(header, len(whole), 101), len(whole) - 100):
        short.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"^it (is too short|ends within (its header|the tensor))"):
            read_header(short)


def test_a_file_with_bytes_turned_is_read_or_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.gguf").read_bytes()
    header = read_header(tmp_path / "a.gguf").tensors[0].data_offset
    draw, refused = random.Random(0), 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            data[draw.randrange(header)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        (tmp_path / "bad.gguf").write_bytes(data)
        try:
            read_header(tmp_path / "bad.gguf")
        except ValueError:  # among them UnicodeDecodeError
            refused += 1
    assert 300 < refused < 1500


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    whole = written(path).read_bytes()
    for data, said in (
        (b"not this, but long enough for it", "does not begin with GGUF"),
        (whole[:4] + (1).to_bytes(4, "little") + whole[8:], "version is 1, in little-endian order; supported are 2 and 3"),
        (whole[:4] + (3).to_bytes(4, "big") + whole[8:], "version is 50331648"),
        (whole.replace(b"one.uint8", b"one.int32", 1), "key one.int32 is there twice"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            read_header(path)
