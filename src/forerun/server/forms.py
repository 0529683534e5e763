"""The forms of the server's answers, as OpenAI has them. openapi.py describes them, and replies.py fills them in."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

Reason = Literal["stop", "length", "tool_calls", "abort"] | None


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: Error


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Metrics(TypedDict):
    """Forerun's own. steps: verify steps; drafting_steps: those with a draft; acceptance_length: tokens of a verify step, null
    without steps; accepted_lengths: how many drafting steps accepted 0, 1, .. draft tokens. The times are seconds."""

    drafted_tokens: int
    accepted_tokens: int
    steps: int
    drafting_steps: int
    acceptance_length: float | None
    accepted_lengths: list[int]
    queued_s: float
    prefill_s: float
    decode_s: float


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """content: null for an answer that has calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    accepted: NotRequired[list[bool]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    accepted: NotRequired[list[bool]]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    prompt: str


class Health(TypedDict):
    status: Literal["ok", "broken", "shutting down"]
    error: NotRequired[str]


class Version(TypedDict):
    version: str


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class LiveRequest(TypedDict):
    id: str
    prompt_tokens: int
    output_tokens: int
    seconds: float


class Live(TypedDict):
    time: float
    model: str
    running: int
    waiting: int
    kv_used: int
    kv_tokens: int
    output_tokens: int
    verify_steps: int
    drafting_steps: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    speedup: float | None
    requests: list[LiveRequest]
