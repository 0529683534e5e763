"""Tests run on one thread: tiny models are slower on several threads, and much slower if other programs run."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["FORERUN_CPU_THREADS"] = "1"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for the test. huggingface_hub gets an empty one too."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"
