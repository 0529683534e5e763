"""The samples that a drafter is trained on: conversations as token ids, of which the last part is the target's own answer.

A folder holds one .npy file for each field. They are mapped, so that a large set costs no memory until it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun.types import LoadError

FIELDS = ("ids", "start", "prompt")


class Samples(NamedTuple):
    """S samples. ids: [N] int32, all of them one after the other; start: [S+1] int64, where each begins, and N; prompt: [S]
    int32, the tokens before the answer, at least 1."""

    ids: np.ndarray
    start: np.ndarray
    prompt: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sample.  [S] int64"""
        return np.diff(self.start)

    def counts(self, vocab: int) -> np.ndarray:
        """How often each id is answered.  [vocab] int64"""
        place = np.arange(len(self.ids)) - np.repeat(self.start[:-1], self.lengths)
        return np.bincount(self.ids[place >= np.repeat(self.prompt, self.lengths)], minlength=vocab)


def save(folder: Path, samples: Samples) -> None:
    """Write the samples to a folder. It is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values, dtype in zip(FIELDS, samples, (np.int32, np.int64, np.int32), strict=True):
        np.save(folder / f"{name}.npy", np.asarray(values, dtype))


def load(folder: Path) -> Samples:
    """The samples of a folder, mapped. Raises LoadError for files that are missing or do not fit together."""
    for name in FIELDS:
        if not (folder / f"{name}.npy").is_file():
            raise LoadError("samples", str(folder), f"{name}.npy is missing; give a folder that forerun train has made")
    samples = Samples(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in FIELDS))
    ids, start, prompt = samples
    fits = len(start) == len(prompt) + 1 >= 2 and start[0] == 0 and start[-1] == len(ids)
    fits = fits and bool((prompt >= 1).all()) and bool((prompt <= samples.lengths).all())
    if not fits:
        raise LoadError("samples", str(folder), "its files do not fit together; make the folder again")
    return samples
