"""A program that imports forerun loads no HTTP, statistics or terminal library, and the command line loads torch only where a
model is run. Each case runs in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tiny import tiny_model

HTTP = {"aiohttp", "yarl", "requests", "urllib3", "httpx", "httpx2", "httpcore", "huggingface_hub", "uvicorn", "starlette"}
STATISTICS = {"scipy", "pandas", "matplotlib", "sklearn"}
TERMINAL = {"rich", "typer", "click", "pygments", "markdown_it"}
OTHERS = {"transformers", "gguf", "jinja2", "llguidance"}
SLOW = {"torch", "numpy", "tokenizers", "safetensors", "triton"}


def loaded(code: str, of: Iterable[str]) -> set[str]:
    """Which of these packages an interpreter has loaded after it ran the code."""
    code = f"import sys\n{code}\nprint('\\n' + '\\n'.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()) & set(of)


def test_the_package_is_imported_without_torch() -> None:
    assert not loaded("import forerun", HTTP | STATISTICS | TERMINAL | OTHERS | SLOW)


def test_the_engine_is_imported_without_these_libraries() -> None:
    code = "from forerun import LLM, SamplingParams, SettingError"
    assert loaded(code, HTTP | STATISTICS | TERMINAL | OTHERS | {"torch"}) == {"torch"}


@pytest.mark.parametrize("template", [False, True])
def test_a_model_in_a_folder_needs_no_other_library(tmp_path: Path, template: bool) -> None:
    """But jinja2 if it has a chat template."""
    folder = tiny_model(tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if not template:
        del settings["chat_template"]
    path.write_text(json.dumps(settings))
    code = f"""
from forerun import LLM, SamplingParams
for speculation in (None, "ngram", "suffix", {{"method": "draft_model", "model": {str(folder)!r}}}):
    llm = LLM({str(folder)!r}, speculative_config=speculation, kv_cache_tokens=512)
    assert llm.generate("the thing", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
"""
    assert loaded(code, HTTP | STATISTICS | TERMINAL | OTHERS) == ({"jinja2"} if template else set())


def test_the_http_process_of_a_server_computes_nothing() -> None:
    assert not loaded("import forerun.server.run", {"torch", "triton", "safetensors", "scipy", "aiohttp", "transformers"})


COMMANDS = [["--help"], *([name, "--help"] for name in ("bench", "generate", "train")), ["models", "--json"], []]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_help_and_models_load_no_slow_library(arguments: list[str]) -> None:
    """With no arguments: it is only imported."""
    code = f"""
import forerun.cli
try:
    {arguments} and forerun.cli.app({arguments})
except SystemExit as end:
    assert not end.code
"""
    unused = SLOW | STATISTICS | {"aiohttp", "transformers"}
    unused |= HTTP if arguments[:1] != ["models"] else set()  # huggingface_hub lists its cache
    assert not loaded(code, unused)
