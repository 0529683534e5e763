"""`forerun serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun import textfile
from forerun.checks import SettingError
from forerun.cli.errors import BROKEN, tell
from forerun.options import (
    ENGINE,
    LIMITS,
    SERVER,
    SPECULATION,
    device_option,
    dtype_option,
    option,
    quantization_option,
)

KEYS = "FORERUN_API_KEYS"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the panels MODEL, SPECULATION and ENGINE have the names of LLM's arguments, the others those of
    ServerSettings."""

    dtype: str = dtype_option()
    quantization: str = quantization_option()
    device: str = device_option()
    speculative_config: str | None = option(
        None, SPECULATION,
        "How to draft: ngram, suffix or prediction with its defaults, or JSON with vLLM's keys. Changes the speed, never the "
        "answer.",
        "-s", metavar="JSON|WORD", default_text="no drafts",
    )  # fmt: skip
    adaptive_drafts: bool = option(
        True, SPECULATION, "Verify the drafts that are expected to pay; off: always full drafts.",
        "--adaptive-drafts/--no-adaptive-drafts",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, ENGINE, "Context length: prompt and answer together.",
        default_text="the model's; on a CPU at most what a quarter of the free memory holds",
    )  # fmt: skip
    max_num_seqs: int = option(32, ENGINE, "Requests that decode at once.")
    max_num_batched_tokens: int | None = option(
        None, ENGINE, "Tokens of a step, drafts included.", default_text="2048 on a CPU, 8192 on a GPU"
    )
    kv_cache_tokens: int | None = option(
        None, ENGINE, "Tokens that the KV cache holds.",
        default_text="what max-num-seqs contexts need, within a quarter of the free memory; on a GPU what its share leaves",
    )  # fmt: skip
    block_size: int = option(16, ENGINE, "Tokens of a page of the KV cache.")
    enable_prefix_caching: bool = option(
        True, ENGINE, "Reuse the keys and values of equal beginnings of prompts.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    )  # fmt: skip
    gpu_memory_utilization: float = option(0.9, ENGINE, "The share of the GPU's memory that the engine may use.")
    seed: int = option(0, ENGINE, "For requests without a seed.")
    host: str = option("127.0.0.1", SERVER, "The address to listen at; 0.0.0.0 for all.")
    port: int = option(8000, SERVER, "The port to listen at; 0: a free one.")
    served_model_name: tuple[str, ...] = option(
        (), SERVER, "A name that requests may give for the model. May be repeated.", metavar="NAME",
        default_text="the model's",
    )  # fmt: skip
    api_key_file: Path | None = option(
        None, SERVER, f"Take only requests with a key of this file (one a line) or of the variable {KEYS} (with commas).",
        metavar="FILE", default_text="no key",
    )  # fmt: skip
    reasoning_parser: str = option(
        "none", SERVER, "think: the text between <think> and </think> becomes reasoning_content.", choices=("none", "think")
    )
    metrics_names: str = option(
        "forerun", SERVER, "The names on /metrics: forerun, or vllm for vLLM's names beside them.", choices=("forerun", "vllm")
    )
    grace: float = option(30.0, SERVER, "Seconds that requests under way have to end after a signal.")
    max_queue: int = option(256, LIMITS, "Requests that may wait, beside those that run; more get 429.")
    max_body_bytes: int = option(8 << 20, LIMITS, "Bytes of a request.")
    max_prompt_tokens: int | None = option(None, LIMITS, "Tokens of a prompt.", default_text="what the context allows")
    max_n: int = option(128, LIMITS, "Completions of one prompt.")
    body_timeout: float = option(30.0, LIMITS, "Seconds in which a request's body must come.")
    request_timeout: float = option(3600.0, LIMITS, "Seconds that an answer may take.")

    def keys(self) -> tuple[str, ...]:
        """Raises SettingError."""
        keys = os.environ.get(KEYS, "").split(",")
        if self.api_key_file is not None:
            keys = [*keys, *textfile.read("api_key_file", self.api_key_file).splitlines()]
        found = tuple(key.strip() for key in keys if key.strip())
        if self.api_key_file is not None and not found:
            raise SettingError("api_key_file", str(self.api_key_file), "it has no key; give one a line")
        return found


LLM_OPTIONS = (
    "dtype", "quantization", "device", "speculative_config", "adaptive_drafts", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_tokens", "block_size", "enable_prefix_caching", "gpu_memory_utilization", "seed",
)  # fmt: skip
SERVER_OPTIONS = (
    "host", "port", "grace", "max_queue", "max_body_bytes", "max_prompt_tokens", "max_n", "body_timeout", "request_timeout",
    "reasoning_parser", "metrics_names",
)  # fmt: skip


def serve(
    options: Options,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with safetensors, a .gguf file, or a Hugging Face id (owner/name or owner/name@revision).",
            show_default="SmolLM2-135M-Instruct, fetched on first use",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    **Examples**

        forerun serve

        forerun serve -s ngram --port 8080

        forerun serve Qwen/Qwen2.5-1.5B-Instruct --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}'
    """
    from forerun.config import Speculation
    from forerun.server.run import serve as run
    from forerun.server.settings import ServerSettings

    settings = ServerSettings(
        served_model_names=options.served_model_name,
        api_keys=options.keys(),
        **{name: getattr(options, name) for name in SERVER_OPTIONS},
    )
    llm = {name: getattr(options, name) for name in LLM_OPTIONS} | {"model": model}
    Speculation.parse(options.speculative_config)
    if run(settings, llm, tell) is not None:
        raise typer.Exit(BROKEN)
