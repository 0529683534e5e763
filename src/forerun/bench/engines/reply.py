"""The answer of an OpenAI-compatible server, from the events of its stream. Knows the fields of the API and those that engines
add; knows no HTTP and no clock. Whatever the events hold, only RequestFailed is raised.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from forerun.bench.engines.endpoint import Piece, Request, RequestFailed, TokenLogprob
from forerun.bench.engines.fields import MOST, Fields, kept_of, readable, shown
from forerun.bench.engines.sse import Event, EventReader
from forerun.bench.records.record import Counts


class Reply:
    """The answer to one request. `read` takes each event; `conclude`, at the end of the stream, gives what only the whole
    stream tells. done: the end mark has come."""

    def __init__(self, request: Request) -> None:
        self.done = False
        self._request, self._chat = request, request.messages is not None
        self._notes: dict[str, None] = {}
        self._decoder = json.JSONDecoder(parse_constant=self._not_a_number)
        self._finish: str | None = None
        self._has_content = self._has_reasoning = self._text_without_ids = self._content_after_usage = False
        self._ids = 0
        self._usage: Fields | None = None
        self._timings = self._speculation = Fields({}, self._notes)
        self._queued_s: float | None = None

    def read(self, event: Event, now: float) -> Piece | None:
        """The piece that an event holds, None if it holds none. Raises RequestFailed for an error and for an event that cannot
        be read."""
        if event.data == b"[DONE]":
            self.done = True
            return None
        if event.kind == "error":
            raise RequestFailed(f"an error under HTTP 200: {error_of(event.data)}")
        value = self._parsed(event.data)
        _refuse_error(value, event.data)
        choices = value.objects("choices")
        index = choices[0].values.get("index") if choices else None
        if len(choices) > 1 or (type(index) is int and index > 0):
            raise RequestFailed("the server sent several answers (choices) where one was asked for")
        piece = self._piece(choices[0], now) if choices else None
        self._read_figures(value)
        return piece

    def _parsed(self, data: bytes) -> Fields:
        """Raises RequestFailed for data that is not a JSON object."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            self._notes["the stream holds bytes that are not UTF-8; they are � in the text"] = None
        try:
            value = self._decoder.decode(text)
        except (ValueError, RecursionError):
            raise RequestFailed(f"an event that is not JSON: {readable(text, 100)}") from None
        if type(value) is not dict:
            raise RequestFailed(f"an event that is no object: {readable(text, 100)}")
        return Fields(value, self._notes)

    def _not_a_number(self, name: str) -> None:
        self._notes[f"the stream holds {name}, which is not JSON; it was ignored"] = None

    def _piece(self, choice: Fields, now: float) -> Piece | None:
        text = self._chat_text(choice.object("delta")) if self._chat else choice.text("text")
        ids, finish = choice.ids("token_ids"), choice.text("finish_reason") or None
        logprobs = self._logprobs(choice) if choice.values.get("logprobs") else ()
        self._finish = finish or self._finish
        if text or ids:
            self._has_content = self._content_after_usage = True
            self._text_without_ids = self._text_without_ids or (bool(text) and ids is None)
            self._ids += len(ids or ())
        return Piece(now, text, ids, finish, logprobs=logprobs) if text or ids or finish else None

    def _chat_text(self, delta: Fields) -> str:
        """Reasoning, content, refusals and tool calls: all that the model wrote. The ids of tool calls are made by the
        server."""
        reasoning = delta.texts("reasoning_content") or delta.texts("reasoning")
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        written = [reasoning, delta.texts("content"), delta.texts("refusal")]
        if "tool_calls" not in delta.values and "function_call" not in delta.values:
            return "".join(written)
        for function in (*(call.object("function") for call in delta.objects("tool_calls")), delta.object("function_call")):
            arguments = function.values.get("arguments")
            written.append(function.text("name"))
            written.append(json.dumps(arguments) if type(arguments) is dict else function.text("arguments"))
        return "".join(written)

    def _logprobs(self, choice: Fields) -> tuple[TokenLogprob, ...]:
        value = choice.values["logprobs"]
        try:
            return _chat_logprobs(value) if self._chat or "content" in value else _logprobs(value)
        except (KeyError, TypeError, ValueError, AttributeError):
            choice.note(f"logprobs are {shown(value)}, which cannot be read; they were ignored")
            return ()

    def _read_figures(self, value: Fields) -> None:
        """The counts and times in an event. Of several usages the last one counts, since some servers send a running count."""
        if value.values.get("usage") is not None:
            self._usage = value.object("usage")
            self._content_after_usage = False
        if "timings" in value.values:
            self._timings = value.object("timings")
        if "metrics" in value.values:
            metrics = value.object("metrics")
            speculation, queued = metrics.object("speculative_decoding"), metrics.number("queue_time_ms")
            self._speculation = speculation if speculation.values else self._speculation
            self._queued_s = self._queued_s if queued is None else queued / 1000

    def conclude(self, reader: EventReader, now: float) -> Piece:
        """The counts and the notes, as a piece without text. Raises RequestFailed if the answer is not complete."""
        if not self.done and reader.unfinished:
            self._read_unfinished(reader.rest)
        if not (self._has_content or self._finish or self._usage is not None or self.done):
            raise RequestFailed("an empty stream")
        if self._finish is None:
            raise RequestFailed("the stream ended without a finish reason")
        if not self.done:
            raise RequestFailed("the stream ended without its end mark [DONE]")
        usage = self._usage or Fields({}, self._notes)
        if not self._has_content:
            hidden = usage.object("completion_tokens_details").count("reasoning_tokens")
            why = f", and {hidden} tokens of reasoning that the server keeps to itself" if hidden else ""
            raise RequestFailed(f"an answer with nothing in it (finish reason {readable(self._finish, 40)}){why}")
        tokens = self._tokens(usage)
        shows_all = self._has_reasoning or (not self._text_without_ids and self._ids >= tokens.output)
        return Piece(
            now,
            usage=None if self._usage is None else kept_of(self._usage.values),
            counts=self._drafting(tokens),
            prompt_tokens=usage.count("prompt_tokens"),
            queued_s=self._queued_s,
            output_tokens=tokens.output,
            hidden_tokens=0 if shows_all else min(tokens.reasoning, tokens.output),
            notes=tuple(readable(note, 300) for note in self._notes),
        )

    def _read_unfinished(self, rest: bytes) -> None:
        """The last event without the blank line behind it. Only an end mark and an error are read from it."""
        if rest == b"[DONE]":
            self.done = True
            return
        try:
            value = self._parsed(rest)
        except RequestFailed:
            raise RequestFailed("the stream was cut off inside an event") from None
        _refuse_error(value, rest)
        if "choices" in value.values and not self._has_content:
            raise RequestFailed("the server answered in one piece; without a stream there is nothing to time")
        raise RequestFailed("the stream was cut off inside an event")

    def _tokens(self, usage: Fields) -> _Tokens:
        """From the usage, else from the token ids, else from llama.cpp's timings. Raises RequestFailed without any of them."""
        found, reason = self._tokens_of_usage(usage)
        if reason is None:
            if not self._text_without_ids and self._ids and self._ids != found.output:
                usage.note(
                    f"usage counts {found.output} output tokens and the stream had {self._ids} token ids; usage was taken"
                )
            return found
        if self._ids and not self._text_without_ids:
            usage.note(f"{reason}; the token ids were counted instead")
            return _Tokens(self._ids, found.reasoning)
        predicted = self._timings.count("predicted_n")
        if predicted and predicted <= self._request.max_tokens:
            usage.note(f"{reason}; timings.predicted_n was taken instead")
            return _Tokens(predicted, found.reasoning)
        raise RequestFailed(f"{reason}, so its tokens cannot be counted")

    def _tokens_of_usage(self, usage: Fields) -> tuple[_Tokens, str | None]:
        """The counts, and why they cannot be used, None if they can. The API counts the rejected tokens of a prediction as
        output though no client receives them."""
        details = usage.object("completion_tokens_details")
        said, prompt, total = (usage.count(f"{name}_tokens") for name in ("completion", "prompt", "total"))
        rejected, accepted = (details.count(f"{name}_prediction_tokens") or 0 for name in ("rejected", "accepted"))
        reasoning = details.count("reasoning_tokens")
        if reasoning is None:
            reasoning = usage.count("reasoning_tokens") or 0
        if said is None:
            value = usage.values.get("completion_tokens")
            why = f"usage.completion_tokens is {shown(value)}" if usage.values else "the server sent no usage"
            return _Tokens(0, reasoning), why
        if reasoning > said or (prompt is not None and total == prompt + said + reasoning):
            reasoning = 0  # this server counts it in addition to the output
        found = _Tokens(said - rejected, reasoning, rejected, accepted)
        reason: str | None = None
        if self._content_after_usage:
            reason = f"usage.completion_tokens is {said} and more text came after it"
        elif accepted + rejected > said or (rejected and found.output < 1):
            reason = f"usage counts {said} tokens, with {accepted} accepted and {rejected} rejected ones of a prediction"
        elif found.output < 1:
            reason = "usage.completion_tokens is 0 though there was an answer"
        elif found.output > self._request.max_tokens + reasoning:
            reason = f"usage.completion_tokens is {said}, more than the {self._request.max_tokens} that were asked for"
        return found, reason

    def _drafting(self, tokens: _Tokens) -> Counts | None:
        """The drafting counts of this request: from vLLM's `metrics`, llama.cpp's `timings`, or the prediction counts of the
        API.

        A verify step gives one token more than it accepts, and the step that ends the prompt gives the first token. So there
        were tokens - 1 - accepted verify steps.
        """
        if self._speculation.values:
            return self._vllm(self._speculation, tokens.output)
        timings = self._timings
        produced = timings.count("predicted_n")
        if produced is not None:
            drafted, kept = timings.count("draft_n") or 0, timings.count("draft_n_accepted") or 0
            if kept <= drafted:
                return Counts(max(produced - 1 - kept, 0), 0, drafted, kept, (), ())
            timings.note(f"timings say that {kept} of {drafted} drafted tokens were accepted; they were ignored")
        accepted, drafted = tokens.accepted, tokens.accepted + tokens.rejected
        return Counts(max(tokens.output - 1 - accepted, 0), 0, drafted, accepted, (), ()) if drafted else None

    def _vllm(self, own: Fields, tokens: int) -> Counts | None:
        """vLLM counts verify steps with a draft, and in a histogram how many draft tokens each accepted. It includes tokens
        that were accepted behind the end of the answer."""
        drafting, drafted = own.count("num_spec_steps"), own.count("num_draft_tokens")
        accepted, histogram = own.count("num_accepted_draft_tokens"), own.ids("acceptance_histogram")
        if drafting is None or drafted is None or accepted is None or histogram is None or accepted > drafted:
            own.note("metrics.speculative_decoding is incomplete or contradicts itself; it was ignored")
            return None
        at = tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
        return Counts(max(tokens - 1 - accepted, drafting), drafting, drafted, accepted, (), at)


class _Tokens(NamedTuple):
    """output: without rejected tokens. reasoning: the part of the output that is reasoning. rejected, accepted: tokens of a
    prediction."""

    output: int
    reasoning: int = 0
    rejected: int = 0
    accepted: int = 0


def _refuse_error(value: Fields, data: bytes) -> None:
    """Raises RequestFailed for an error object."""
    if value.values.get("error") or value.values.get("object") == "error":
        raise RequestFailed(f"an error under HTTP 200: {error_of(data)}")


def _chat_logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    """Raises KeyError, TypeError, ValueError or AttributeError for a value of another form."""
    return tuple(
        TokenLogprob(
            *_pair(one["token"], one["logprob"]), _pairs((o["token"], o["logprob"]) for o in one.get("top_logprobs") or ())
        )
        for one in value.get("content") or ()
    )


def _logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    """The same in the form of /v1/completions."""
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        TokenLogprob(*_pair(token, logprob), tuple(sorted(_pairs((top or {}).items()), key=lambda pair: -pair[1])))
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _pairs(values: Any) -> tuple[tuple[str, float], ...]:
    return tuple(_pair(token, logprob) for token, logprob in values)


def _pair(token: Any, logprob: Any) -> tuple[str, float]:
    if type(token) is not str or type(logprob) not in (int, float) or not -MOST <= logprob <= MOST:
        raise ValueError
    return token, float(logprob)


def error_of(data: bytes) -> str:
    """The message of a JSON error object in one of the common forms; of other data the readable text."""
    text = data.decode(errors="replace")
    try:
        said = json.loads(text)
        for key in ("error", "message", "detail"):
            if type(said) is dict and said.get(key):
                said = said[key]
        text = said if type(said) is str else json.dumps(said, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return readable(text, 300)
