"""Forerun: lossless speculative decoding, and measurements of whether it pays. `import forerun` loads no other library; torch
and the engine are imported when LLM is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.types import SamplingParams, SettingError

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SettingError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import LLM, SamplingParams or SettingError at its first use, because the import of torch takes a second."""
    if name == "LLM":
        from forerun.llm import LLM

        return LLM
    if name in ("SamplingParams", "SettingError"):
        from forerun import types

        return getattr(types, name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
