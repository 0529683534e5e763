"""Tokens of the KV cache on a GPU, by the numbers."""

from __future__ import annotations

import pytest

from forerun.engine.memory import tokens_on_gpu
from forerun.types import SettingError

GB = 10**9


def tokens(**changed: float) -> int:
    given = {"total": 100 * GB, "free": 80 * GB, "share": 0.9, "weights": 16 * GB, "other": 2 * GB, "each": 1000}
    given |= {"longest": 8000, "captured": True} | changed
    return tokens_on_gpu(**given)  # type: ignore[arg-type]


def test_the_cache_gets_the_rest_of_the_share() -> None:
    assert tokens() == 72_000_000
    assert tokens(share=0.3) == 12_000_000, "engines side by side each get what they were given"
    assert tokens(share=0.3, free=50 * GB) == 12_000_000, "another engine was started first"
    assert tokens(each=3000) == 24_000_000, "a drafter has keys and values of its own"
    assert tokens(other=3 * GB) == 71_000_000


def test_never_more_than_is_free() -> None:
    assert tokens(free=32 * GB) == 29_100_000  # 97 % of the free memory
    assert tokens(free=32 * GB, captured=False) == 25_500_000


def test_the_error_names_all_figures_if_no_sequence_fits() -> None:
    said = r"gpu_memory_utilization=0.18.*weights take 16.0.*graphs 2.0.*8000 tokens 0.0"
    with pytest.raises(SettingError, match=said):
        tokens(share=0.18)
    with pytest.raises(SettingError, match=r"80.0 were free.*lower max_model_len"):
        tokens(longest=10**9)
