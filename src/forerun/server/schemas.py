"""The requests that the server takes. A field that is not here, or a value that does not fit, is refused by name. The limits of
sampling parameters are those that SamplingParams declares."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from forerun.checks import whole
from forerun.structured import KINDS
from forerun.types import SamplingParams

CHECKS = {field.name: field.metadata["check"] for field in fields(SamplingParams)}
MOST_LOGPROBS = 20
MOST_PROMPTS = 128  # of one request


def _whole(value: Any) -> Any:
    """7.0 is a whole number, as in JSON Schema; True is none."""
    found = whole(value)
    return value if found is None else found


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Phrase = Annotated[str, Field(min_length=1, max_length=1024)]


def like(name: str) -> Any:
    """The limits of the sampling parameter of that name."""
    check = CHECKS[name]
    above = getattr(check, "above", False)
    return Field(ge=None if above else check.low, gt=check.low if above else None, le=check.high)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Usage in every event, as in vLLM.")


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


def joined(content: Content) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Predicted(Strict):
    type: Literal["content"]
    content: Content


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Left out: any object.")
    strict: bool | None = Field(None, description="Has no effect: answers always follow the schema.")


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structured(Strict):
    """Exactly one of these; see docs/structured.md."""

    json_object: Literal[True] | None = None
    json_schema: dict[str, Any] | Phrase | None = None
    regex: Phrase | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    choice: Annotated[list[Phrase], Field(min_length=1, max_length=1024)] | None = None


class Sampling(Strict):
    """What both kinds of requests have. null is the same as leaving a field out. Fields that are left out have the values that
    the model's generation_config.json recommends, else OpenAI's defaults."""

    model: str | None = Field(None, description="One of /v1/models; left out: the one that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, like("n"), WHOLE] | None = None
    max_tokens: Annotated[int, like("max_tokens"), WHOLE] | None = None
    temperature: Annotated[float, like("temperature")] | None = None
    top_p: Annotated[float, like("top_p")] | None = None
    top_k: Annotated[int, like("top_k"), WHOLE] | None = None
    min_p: Annotated[float, like("min_p")] | None = None
    presence_penalty: Annotated[float, like("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, like("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, like("repetition_penalty")] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=4096, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    bad_words: Annotated[list[Phrase], Field(max_length=256)] | None = None
    banned_token_ids: (
        Annotated[list[Annotated[list[TokenId], Field(min_length=1, max_length=64)]], Field(max_length=1024)] | None
    ) = None
    min_tokens: Annotated[int, like("min_tokens"), WHOLE] | None = None
    stop: Phrase | Annotated[list[Phrase], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    prediction: Predicted | None = Field(None, description="The text that is expected, for the drafter `prediction`.")
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    structured: Structured | None = Field(None, description="The form of the answer; not with response_format.")
    return_token_ids: bool | None = Field(None, description="Also return the token ids of prompt and answer.")
    return_accepted: bool | None = Field(None, description="Also return which tokens were drafted and accepted.")
    cache_salt: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The prefix cache and the shared suffix tree are shared with requests of the same salt only."
    )
    priority: Annotated[int, like("priority"), WHOLE] | None = Field(None, description="Lower ones are admitted first.")
    num_speculative_tokens: Annotated[int, like("num_speculative_tokens"), WHOLE] | None = Field(
        None, description="Drafted tokens of a step at most; 0: no drafts."
    )
    drafters: Annotated[list[Phrase], Field(max_length=16)] | None = Field(
        None, description="Those of the loaded drafters that may draft; left out: all."
    )
    user: str | None = Field(None, description="Has no effect.")

    @model_validator(mode="after")
    def _stream_options_go_with_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: give it only with stream true")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Sampling:
        if self.structured is not None and self.response_format is not None:
            raise ValueError("structured: response_format is given as well; give one of the two")
        return self

    @property
    def form(self) -> dict[str, Any] | None:
        """structured of SamplingParams."""
        if self.structured is not None:
            return self.structured.model_dump(exclude_none=True)
        if isinstance(self.response_format, SchemaFormat) and self.response_format.json_schema.schema_ is not None:
            return {"json_schema": self.response_format.json_schema.schema_}
        return {"json_object": True} if isinstance(self.response_format, ObjectFormat | SchemaFormat) else None

    def field_of(self, name: str) -> str:
        """The field that a setting of that name comes from."""
        if name in (*KINDS, "structured"):
            return "structured" if self.response_format is None else "response_format"
        return name

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """Raises SettingError. default: the model's recommendation."""
        given = {name: value for name in CHECKS if (value := getattr(self, name, None)) is not None}
        given |= {"max_tokens": self.most_tokens, "logprobs": self.most_likely, "structured": self.form}
        if self.prediction is not None:
            given["prediction"] = joined(self.prediction.content)
        return replace(default, **given)

    @property
    def most_tokens(self) -> int | None:
        """max_tokens of SamplingParams."""
        raise NotImplementedError

    @property
    def most_likely(self) -> int | None:
        """logprobs of SamplingParams."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream is to be usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    echo: bool | None = Field(None, description="Put the prompt before the answer's text. Not with logprobs.")
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None

    @model_validator(mode="after")
    def _echo_has_no_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: the log-probabilities of a prompt are not computed; leave echo or logprobs out")
        return self

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def most_likely(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [tuple(self.prompt)]
        return [one if isinstance(one, str) else tuple(one) for one in self.prompt]


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; left out: any object.")
    strict: bool | None = Field(None, description="Has no effect: calls that tool_choice forces always follow the schema.")


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """What a chat template reads."""
        function = self.function.model_dump(exclude={"strict"}, exclude_unset=True)
        return {"type": self.type, "function": function}


class FunctionChoice(Strict):
    name: FunctionName


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, WHOLE] | None = Field(None, description="Has no effect.")

    def plain(self) -> dict[str, Any]:
        """What a chat template reads: the arguments as an object, or as text if they are none."""
        arguments: Any = self.function.arguments
        try:
            found = json.loads(arguments)
            arguments = found if isinstance(found, dict) else arguments
        except (ValueError, RecursionError):
            pass
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """A message of a conversation. The fields after reasoning_content come back from clients that send an answer of the server
    as it was; they have no effect, and those for audio and functions must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """What a chat template reads."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = "" if self.content is None else joined(self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found


Tools = Annotated[list[Tool], Field(max_length=128)]


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, like("max_tokens"), WHOLE] | None = Field(None, description="Newer: max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="none: the tools are not shown to the model. Left out: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="Off: at most one call in an answer. Left out: on.")

    @model_validator(mode="after")
    def _a_forced_tool_is_there(self) -> ChatRequest:
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required needs tools; give some")
        if isinstance(self.tool_choice, ToolChoice) and not self.forced:
            known = ", ".join(tool.function.name for tool in self.tools or ()) or "none"
            raise ValueError(f"tool_choice: {self.tool_choice.function.name!r} is not among the tools; they are: {known}")
        if self.forced and self.form is not None:
            raise ValueError("tool_choice: a forced call has a form of its own; leave out structured and response_format")
        return self

    @property
    def shown(self) -> list[Tool]:
        """The tools that the model is told of, and whose calls are read from its answer."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def forced(self) -> list[Function]:
        """The functions of which the answer must call one; [] if it need not."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return [tool.function for tool in self.shown if tool.function.name == choice.function.name]
        return [tool.function for tool in self.shown] if choice == "required" else []

    def field_of(self, name: str) -> str:
        return "tools" if self.forced and name in KINDS else super().field_of(name)

    @model_validator(mode="after")
    def _top_logprobs_go_with_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: give it only with logprobs true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Strict):
    """The ids of a text or of a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt; left out: true.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    @property
    def shown(self) -> list[Tool]:
        return list(self.tools or ())

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]


def refusal(error: ValidationError) -> tuple[str, str | None]:
    """A message of the first few faults, and the name of the field that is wrong."""
    found, seen = [], set()
    for one in error.errors(include_url=False, include_context=False):
        where = [str(part) for part in one["loc"]]
        field = where[0] if where else None
        message = one["msg"].removeprefix("Value error, ")
        if field is None and ": " in message:
            field, message = message.split(": ", 1)
        if field in seen:  # the other forms that the field may have
            continue
        seen.add(field)
        what = "unknown field; leave it out" if one["type"] == "extra_forbidden" else message
        path = ".".join(part for part in where if not part.startswith(("list[", "constrained", "function-")))
        given = "" if one["type"] in ("missing", "extra_forbidden") or not where else f" (given: {_short(one['input'])})"
        found.append((field, f"{path or field or 'body'}: {what}{given}"))
    return "; ".join(text for _, text in found[:5]), found[0][0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ..."
