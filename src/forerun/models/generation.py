"""The sampling parameters that a model's authors recommend, from generation_config.json."""

from __future__ import annotations

from pathlib import Path

from forerun.models.files import errors_of, flag, read_json, real, whole
from forerun.types import SamplingParams


def default_sampling(folder: Path) -> SamplingParams:
    """The sampling parameters for a caller who gives none: temperature, top_k, top_p, min_p and repetition_penalty from
    generation_config.json; greedy if do_sample is false there. Values that it lacks, and max_tokens always, are the defaults
    of SamplingParams. Raises LoadError, naming the file, for a value that cannot be used."""
    path = folder / "generation_config.json"
    given, plain = read_json(path), SamplingParams()
    with errors_of(path):
        samples = flag(given, "do_sample", True)
        return SamplingParams(
            temperature=real(given, "temperature", plain.temperature) if samples else 0.0,
            top_k=whole(given, "top_k", plain.top_k, least=-1),
            top_p=real(given, "top_p", plain.top_p),
            min_p=real(given, "min_p", plain.min_p),
            repetition_penalty=real(given, "repetition_penalty", plain.repetition_penalty),
        )
