"""One thread for the tests: tiny models are slower on several, and far slower beside other work."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and huggingface_hub's kept from looking at the real one."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"
