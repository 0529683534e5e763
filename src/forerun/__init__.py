"""Forerun: lossless speculative decoding, and the measurements that say whether it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.types import SamplingParams, SettingError

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SettingError", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM, SamplingParams and SettingError, imported when they are first asked for: LLM brings torch along."""
    if name == "LLM":
        from forerun.llm import LLM

        return LLM
    if name in ("SamplingParams", "SettingError"):
        from forerun import types

        return getattr(types, name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
