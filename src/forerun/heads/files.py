"""The files of a head: safetensors, or the pytorch_model.bin in which SafeAILab published its heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.files import INDEX, SINGLE, Stored
from forerun.models.loading import STORED, Checkpoint, Source, unusable

PICKLED = "pytorch_model.bin"
FORMATS = {dtype: name for name, dtype in STORED.items()}


def open_checkpoint(folder: Path) -> Source:
    """The tensors of a folder; none is read yet. Raises LoadError for files that are missing or broken."""
    in_safetensors = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    if not in_safetensors and (folder / PICKLED).is_file():
        return Pickled(folder)
    return Checkpoint(folder)


class Pickled:
    """A pytorch_model.bin, of which nothing but tensors is read (torch.load with weights_only)."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / PICKLED
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a file that is broken, or holds more than tensors
            why = f"{PICKLED} is not a file of tensors ({type(error).__name__}); convert it to safetensors, or fetch it again"
            raise unusable(folder, why) from None
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            raise unusable(folder, f"{PICKLED} does not hold tensors by name; convert it to safetensors")
        unknown = next((name for name, t in found.items() if t.dtype not in FORMATS), None)
        if unknown is not None:
            raise unusable(folder, f"tensor {unknown} is stored as {found[unknown].dtype}; give one of {', '.join(STORED)}")
        self._tensors = found
        self.stored = {name: Stored(path, FORMATS[t.dtype], tuple(t.shape), 0, t.nbytes) for name, t in found.items()}

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name])

    def check(self, config: ModelConfig) -> None:
        raise unusable(self.folder, f"a target is not read from {PICKLED}; convert it to safetensors")

    def same(self, name: str, other: str) -> bool:
        return torch.equal(self._tensors[name], self._tensors[other])

    def pieces(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name].reshape(-1)
