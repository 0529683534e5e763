"""How the server listens and what it bears."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.checks import LARGEST, Choice, Number, Text, Texts, Whole, convert, setting

SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """host, port: where it listens; port 0: a free one. served_model_names: the names that requests may give; none: the
    model's. api_keys: a request must have one of them; none: no key is needed.
    max_queue: requests that may wait for the engine, beside the max_num_seqs that run; each of n counts. max_body_bytes: of a
    request. max_prompt_tokens: None: what the context allows. max_n: completions of one prompt.
    body_timeout: seconds in which a request's body must come; request_timeout: seconds that its answer may take; grace: seconds
    that requests under way have to end when the server shuts down.
    reasoning_parser: think: the text between <think> and </think> at the start of an answer is its reasoning_content.
    metrics_names: forerun, or vllm for vLLM's names beside ours on /metrics.
    checks.py says how values are converted. Raises SettingError."""

    host: str = setting("127.0.0.1", Text("127.0.0.1"))
    port: int = setting(8000, Whole(0, 65535, 8000))
    served_model_names: tuple[str, ...] = setting((), Texts(("my-model",)))
    api_keys: tuple[str, ...] = setting((), Texts(("a-secret",)))
    max_queue: int = setting(256, Whole(0, LARGEST, 256))
    max_body_bytes: int = setting(8 << 20, Whole(1024, LARGEST, 8 << 20))
    max_prompt_tokens: int | None = setting(None, Whole(1, LARGEST, 4096, ", or None for what the context allows"))
    max_n: int = setting(128, Whole(1, 1024, 16))
    body_timeout: float = setting(30.0, Number(0, SECONDS, 30, above=True))
    request_timeout: float = setting(3600.0, Number(0, SECONDS, 600, above=True))
    grace: float = setting(30.0, Number(0, SECONDS, 30))
    reasoning_parser: str = setting("none", Choice(("none", "think")))
    metrics_names: str = setting("forerun", Choice(("forerun", "vllm")))

    def __post_init__(self) -> None:
        convert(self)
