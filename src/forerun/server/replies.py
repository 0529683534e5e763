"""The answers of the server in OpenAI's forms: from the events of some requests to one object, or to the events of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from forerun.engine.stats import DraftStats, RequestStats, prediction_counts
from forerun.models.tokenizer import Tokenizer
from forerun.server.forms import Metrics, Usage
from forerun.server.schemas import ChatRequest, CompletionRequest, Sampling
from forerun.server.tools import THINK, Reader, joined_calls
from forerun.types import Event, FinishReason, Logprob, Request

LOWEST = -9999.0  # in place of -inf, which JSON lacks


class Piece:
    """What some events add to a choice. calls: tool calls and their continuations, in OpenAI's form of a stream. accepted: for
    each token whether it was drafted and accepted."""

    __slots__ = ("accepted", "calls", "logprobs", "reason", "reasoning", "text", "tokens")

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.tokens: tuple[int, ...] = ()
        self.accepted: list[bool] = []
        self.logprobs: tuple[Logprob, ...] = ()
        self.reason: FinishReason | Literal["tool_calls"] | None = None

    def take(self, event: Event) -> None:
        self.text += event.text
        self.tokens += event.tokens
        accepted = event.counts[1] if event.counts else 0  # the first tokens of a step
        self.accepted += [i < accepted for i in range(len(event.tokens))]
        self.logprobs += event.logprobs
        self.reason = event.finish_reason

    def add(self, other: Piece) -> None:
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.tokens += other.tokens
        self.accepted += other.accepted
        self.logprobs += other.logprobs
        self.reason = other.reason


class Choice:
    """A continuation of a prompt, and what is known of it so far."""

    def __init__(self, index: int, request: Request, counts_prompt: bool) -> None:
        """counts_prompt: whether usage counts its prompt; of n choices the first one does."""
        self.index, self.request, self.counts_prompt = index, request, counts_prompt
        self.produced = 0
        self.tokens: list[int] = []  # kept for requests with a prediction
        self.stats: RequestStats | None = None
        self.begun = self.called = False
        self.reader: Reader | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of its tokens so far

    def note(self, event: Event) -> None:
        self.produced += len(event.tokens)
        if self.request.prediction:
            self.tokens += event.tokens
        self.stats = event.stats

    def offsets(self, data: Sequence[bytes]) -> list[int]:
        """Where the texts of these tokens begin, in characters."""
        found = []
        for one in data:
            found.append(self._offset)
            self._offset += len(self._decoder.decode(one))
        return found


class RequestError(Exception):
    """A request failed in the engine."""


class Reply:
    """kind: the object's name; chunk_kind: that of an event of a stream."""

    kind = chunk_kind = prefix = ""

    def __init__(self, asked: Sampling, groups: Sequence[Sequence[Request]], model: str, tokenizer: Tokenizer) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self.tokenizer = model, tokenizer
        self.ids, self.marks = bool(asked.return_token_ids), bool(asked.return_accepted)
        requests = [(request, i == 0) for group in groups for i, request in enumerate(group)]
        self.choices = {request.id: Choice(i, request, first) for i, (request, first) in enumerate(requests)}

    def take(self, arrived: Sequence[Event]) -> dict[str, Piece]:
        """What these events add to each choice. Raises RequestError for a request that failed."""
        pieces: dict[str, Piece] = {}
        for event in arrived:
            if event.finish_reason == "error":
                raise RequestError(event.error)
            self.choices[event.request_id].note(event)
            pieces.setdefault(event.request_id, Piece()).take(event)
        for name, piece in pieces.items():
            self._read(self.choices[name], piece)
        return pieces

    def whole(self, pieces: dict[str, Piece]) -> dict[str, Any]:
        """The answer without streaming. pieces: of the whole answers."""
        choices = [self._choice(choice, pieces.get(name, Piece())) for name, choice in self.choices.items()]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def chunks(self, pieces: dict[str, Piece]) -> list[dict[str, Any]]:
        """The events of a stream for these pieces. Tokens without text so far have no event."""
        found = []
        for name, piece in pieces.items():
            news = piece.text or piece.reasoning or piece.calls or piece.reason or piece.logprobs
            if news or ((self.ids or self.marks) and piece.tokens):
                choice = self.choices[name]
                found.append({**self._head(self.chunk_kind), "choices": [self._delta(choice, piece)]})
                choice.begun = True
        return found

    def last(self) -> dict[str, Any]:
        """The event with the usage."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage(), "metrics": self.metrics()}

    def usage(self) -> Usage:
        """accepted and rejected prediction tokens: those of the prediction that are in the answer, in order, and the others."""
        prompt = completion = cached = accepted = predicted = 0
        for choice in self.choices.values():
            completion += choice.produced
            if choice.counts_prompt:
                prompt += len(choice.request.prompt_ids)
                cached += choice.stats.cached_tokens if choice.stats else 0
            if choice.request.prediction and choice.stats:
                predicted += len(choice.request.prediction)
                accepted += prediction_counts(choice.request.prediction, choice.tokens).accepted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": predicted - accepted,
            },
        }

    def metrics(self) -> Metrics:
        """Of all choices together, once they have ended; the times are the longest."""
        found = [choice.stats for choice in self.choices.values() if choice.stats]
        drafts = DraftStats()
        for one in found:
            drafts.add(one.drafts)
        return {
            "drafted_tokens": drafts.drafted,
            "accepted_tokens": drafts.accepted,
            "steps": drafts.steps,
            "drafting_steps": drafts.drafting_steps,
            "acceptance_length": drafts.acceptance_length,
            "accepted_lengths": drafts.accepted_lengths,
            "queued_s": max((one.queued_s for one in found), default=0.0),
            "prefill_s": max((one.prefill_s for one in found), default=0.0),
            "decode_s": max((one.decode_s for one in found), default=0.0),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _read(self, choice: Choice, piece: Piece) -> None:
        """Take from the text of a piece what is no content."""

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _token_ids(self, choice: Choice, piece: Piece, whole: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.marks:
            found["accepted"] = piece.accepted
        if self.ids:
            found["token_ids"] = piece.tokens
            if whole or not choice.begun:
                found["prompt_token_ids"] = choice.request.prompt_ids
        return found


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, asked: ChatRequest, groups: Sequence[Sequence[Request]], model: str, tokenizer: Tokenizer,
        reasoning: bool = False,
    ) -> None:  # fmt: skip
        """reasoning: whether it is told apart from the content. Not in an answer that must be calls."""
        super().__init__(asked, groups, model, tokenizer)
        self._noted = bool(asked.logprobs)
        calls, reasoning = bool(asked.shown), reasoning and not asked.forced
        if calls or reasoning:
            parallel = asked.parallel_tool_calls is not False
            for choice in self.choices.values():
                end = tokenizer.decode(choice.request.prompt_ids[-len(THINK) :], False) if reasoning else ""
                choice.reader = Reader(calls, parallel, reasoning, end.rstrip().endswith(THINK))

    def _read(self, choice: Choice, piece: Piece) -> None:
        if choice.reader is None:
            return
        parts = choice.reader.feed(piece.text, piece.reason is not None)
        piece.text, piece.reasoning, piece.calls = parts.content, parts.reasoning, parts.calls
        choice.called = choice.called or bool(parts.calls)
        if choice.called and piece.reason == "stop":
            piece.reason = "tool_calls"

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": joined_calls(piece.calls)}
        return self._with(choice, piece, "message", message, True)

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = piece.calls
        if piece.text or not (choice.begun or piece.reasoning or piece.calls):
            delta["content"] = piece.text
        return self._with(choice, piece, "delta", delta, False)

    def _with(self, choice: Choice, piece: Piece, name: str, value: dict[str, Any], whole: bool) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(one) for one in piece.logprobs], "refusal": None} if self._noted else None
        found = {"index": choice.index, name: value, "logprobs": logprobs, "finish_reason": piece.reason}
        return found | self._token_ids(choice, piece, whole)

    def _logprob(self, one: Logprob) -> dict[str, Any]:
        return {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*each) for each in one.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, asked: CompletionRequest, groups: Sequence[Sequence[Request]], model: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(asked, groups, model, tokenizer)
        self._noted = asked.logprobs is not None
        self._echoed: list[str] = []
        if asked.echo:
            texts = [one if isinstance(one, str) else tokenizer.decode(one, False) for one in asked.prompts]
            self._echoed = [text for text, group in zip(texts, groups, strict=True) for _ in group]

    def _choice(self, choice: Choice, piece: Piece, whole: bool = True) -> dict[str, Any]:
        before = self._echoed[choice.index] if self._echoed and not choice.begun else ""
        found = {
            "index": choice.index,
            "text": before + piece.text,
            "logprobs": self._logprobs(choice, piece.logprobs) if self._noted else None,
            "finish_reason": piece.reason,
        }
        return found | self._token_ids(choice, piece, whole)

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return self._choice(choice, piece, False)

    def _logprobs(self, choice: Choice, noted: Sequence[Logprob]) -> dict[str, Any]:
        text = self.tokenizer.token_text
        return {
            "tokens": [text(one.token) for one in noted],
            "token_logprobs": [max(one.logprob, LOWEST) for one in noted],
            "top_logprobs": [
                {text(token): max(value, LOWEST) for token, value in (*one.top, (one.token, one.logprob))} for one in noted
            ],
            "text_offset": choice.offsets([self.tokenizer.token_bytes(one.token) for one in noted]),
        }
