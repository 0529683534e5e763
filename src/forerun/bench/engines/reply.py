"""What an OpenAI-compatible server answered, put together from the events of its stream. Knows the fields of the format and
what engines add to them; no HTTP and no clock.

Every field is read by the type and the range it must have. A value outside of them counts as missing and leaves a note; it
raises nothing but RequestFailed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from forerun.bench.engines.endpoint import Ask, Piece, RequestFailed, TokenLogprob
from forerun.bench.engines.sse import Event, EventReader
from forerun.bench.records.record import Counts

MOST = 1 << 40  # no count of tokens is larger
KEPT_DEPTH = 4  # of the usage, as it is kept in the record


class Notes:
    """What was odd in the answer, each thing once; and how to read a field so that it is noted."""

    def __init__(self) -> None:
        self.said: dict[str, None] = {}

    def add(self, text: str) -> None:
        self.said[text] = None

    def count(self, holder: Mapping[str, Any], key: str, where: str) -> int | None:
        """A whole number of at least 0."""
        value = holder.get(key)
        if value is None:
            return None
        if type(value) in (int, float) and 0 <= value <= MOST and value == int(value):
            return int(value)
        self.add(f"{where}.{key} is {shown(value)}, which is no count; it was ignored")
        return None

    def number(self, holder: Mapping[str, Any], key: str, where: str, least: float = -math.inf) -> float | None:
        """A finite number of at least `least`."""
        value = holder.get(key)
        if value is None:
            return None
        if type(value) in (int, float) and abs(value) <= MOST and value >= least:
            return float(value)
        self.add(f"{where}.{key} is {shown(value)}, which is no possible value; it was ignored")
        return None

    def text(self, holder: Mapping[str, Any], key: str, where: str) -> str:
        """A text; empty if it is missing."""
        value = holder.get(key)
        if type(value) is str:
            return value
        if value is not None:
            self.add(f"{where}.{key} is {shown(value)}, which is no text; it was ignored")
        return ""

    def object(self, holder: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
        """An object; empty if it is missing."""
        value = holder.get(key)
        if type(value) is dict:
            return value
        if value is not None:
            self.add(f"{where}.{key} is {shown(value)}, which is no object; it was ignored")
        return {}

    def objects(self, holder: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
        """A list of objects; empty if it is missing. What is not an object is left out."""
        value = holder.get(key)
        if value is None:
            return []
        if type(value) is not list:
            self.add(f"{where}.{key} is {shown(value)}, which is no list; it was ignored")
            return []
        found = [one for one in value if type(one) is dict]
        if len(found) < len(value):
            self.add(f"{where}.{key} holds something that is no object; it was ignored")
        return found

    def texts(self, holder: Mapping[str, Any], key: str, where: str) -> str:
        """A text, or a list of parts that hold text, as some servers send `content`."""
        value = holder.get(key)
        if type(value) is str:
            return value
        if type(value) is not list:
            return self.text(holder, key, where)
        found = []
        for part in value:
            inner = part if type(part) is str else None
            if type(part) is dict:
                inner = next((part[name] for name in ("text", "refusal") if type(part.get(name)) is str), None)
                if inner is None and "thinking" in part:
                    inner = self.texts(part, "thinking", f"{where}.{key}")
            if inner is None:
                self.add(f"{where}.{key} holds {shown(part)}, which is no text; it was ignored")
            found.append(inner or "")
        return "".join(found)

    def ids(self, holder: Mapping[str, Any], key: str, where: str) -> tuple[int, ...] | None:
        """A list of token ids; None if it is missing."""
        value = holder.get(key)
        if value is None:
            return None
        if type(value) is list and all(type(i) is int and 0 <= i < 1 << 31 for i in value):
            return tuple(value)
        self.add(f"{where}.{key} is {shown(value)}, which are no token ids; they were ignored")
        return None


class Reply:
    """The answer to one request. Feed it events with `read`; at the end of the stream `conclude` gives what only the whole
    stream tells."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self._chat = ask, ask.messages is not None
        self._notes = Notes()
        self._decoder = json.JSONDecoder(parse_constant=self._no_number)
        self.done = False
        self._finish: str | None = None
        self._content = self._reasoning = self._without_ids = self._content_after_usage = False
        self._ids = 0
        self._usage: dict[str, Any] | None = None
        self._timings: dict[str, Any] = {}
        self._speculation: dict[str, Any] = {}
        self._queued_s: float | None = None

    def read(self, event: Event, now: float) -> Piece | None:
        """What one event says; None if that is nothing to keep. Raises RequestFailed for an error event and for one that
        cannot be read at all."""
        if event.data == b"[DONE]":
            self.done = True
            return None
        if event.kind == "error":
            raise RequestFailed(f"an error under HTTP 200: {error_of(event.data)}")
        value = self._parsed(event.data)
        if value.get("error") or value.get("object") == "error":
            raise RequestFailed(f"an error under HTTP 200: {error_of(event.data)}")
        choices = self._notes.objects(value, "choices", "the event")
        if len(choices) > 1 or any(type(i := one.get("index")) is int and i > 0 for one in choices):
            raise RequestFailed("the server sent several answers (choices) where one was asked for")
        piece = self._choice(choices[0], now) if choices else None
        self._figures(value)
        return piece

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            self._notes.add("the stream holds bytes that are not UTF-8; they are � in the text")
        try:
            value = self._decoder.decode(text)
        except (ValueError, RecursionError):
            raise RequestFailed(f"an event that is not JSON: {readable(text, 100)}") from None
        if type(value) is not dict:
            raise RequestFailed(f"an event that is no object: {readable(text, 100)}")
        return value

    def _no_number(self, name: str) -> None:
        self._notes.add(f"the stream holds {name}, which is not JSON; it was ignored")

    def _choice(self, choice: dict[str, Any], now: float) -> Piece | None:
        notes = self._notes
        if self._chat:
            delta = notes.object(choice, "delta", "choices")
            thought = notes.texts(delta, "reasoning_content", "delta") or notes.texts(delta, "reasoning", "delta")
            self._reasoning = self._reasoning or bool(thought)
            said = notes.texts(delta, "content", "delta") + notes.texts(delta, "refusal", "delta")
            text = thought + said + self._calls(delta)
        else:
            text = notes.text(choice, "text", "choices")
        ids = notes.ids(choice, "token_ids", "choices")
        finish = notes.text(choice, "finish_reason", "choices") or None
        found = choice.get("logprobs")
        logprobs = self._logprobs(found) if found else ()
        self._finish = finish or self._finish
        if text or ids:
            self._content = self._content_after_usage = True
            self._without_ids = self._without_ids or (bool(text) and ids is None)
            self._ids += len(ids or ())
        if not (text or ids or finish):
            return None
        return Piece(now, text, ids, finish, logprobs=logprobs)

    def _calls(self, delta: dict[str, Any]) -> str:
        """What the model wrote into tool calls: names and arguments, without the ids that the server makes up."""
        if "tool_calls" not in delta and "function_call" not in delta:
            return ""
        notes, found = self._notes, []
        functions = [notes.object(call, "function", "tool_calls") for call in notes.objects(delta, "tool_calls", "delta")]
        for function in (*functions, notes.object(delta, "function_call", "delta")):
            given = function.get("arguments")
            arguments = json.dumps(given) if type(given) is dict else notes.text(function, "arguments", "function")
            found += [notes.text(function, "name", "function"), arguments]
        return "".join(found)

    def _logprobs(self, value: Any) -> tuple[TokenLogprob, ...]:
        try:
            return _logprobs(value, self._chat)
        except (KeyError, TypeError, ValueError, AttributeError):
            self._notes.add(f"logprobs are {shown(value)}, which cannot be read; they were ignored")
            return ()

    def _figures(self, value: dict[str, Any]) -> None:
        """What an event says beside its text. Of several usages the last one counts: some servers send a running count."""
        if value.get("usage") is not None:
            self._usage = self._notes.object(value, "usage", "the event")
            self._content_after_usage = False
        if "timings" in value:
            self._timings = self._notes.object(value, "timings", "the event")
        if "metrics" in value:
            own = self._notes.object(value, "metrics", "the event")
            self._speculation = self._notes.object(own, "speculative_decoding", "metrics") or self._speculation
            waited = self._notes.number(own, "queue_time_ms", "metrics", 0.0)
            self._queued_s = self._queued_s if waited is None else waited / 1000

    def conclude(self, reader: EventReader, now: float) -> Piece:
        """The counts and the notes, as a piece without text. Raises RequestFailed for whatever is missing from a complete
        answer."""
        if not self.done and reader.unfinished:
            self._last_words(reader.rest)
        if not (self._content or self._finish or self._usage is not None or self.done):
            raise RequestFailed("an empty stream")
        if self._finish is None:
            raise RequestFailed("the stream ended without a finish reason")
        if not self.done:
            raise RequestFailed("the stream ended without its end mark [DONE]")
        usage = self._usage or {}
        details = self._notes.object(usage, "completion_tokens_details", "usage")
        if not self._content:
            hidden = self._notes.count(details, "reasoning_tokens", "usage.completion_tokens_details")
            why = f", and {hidden} tokens of reasoning that the server keeps to itself" if hidden else ""
            raise RequestFailed(f"an answer with nothing in it (finish reason {readable(self._finish, 40)}){why}")
        tokens, rejected, accepted, reasoning = self._tokens(usage, details)
        hidden = 0
        if reasoning and not self._reasoning and (self._without_ids or self._ids < tokens):
            hidden = min(reasoning, tokens)
        counts = self._drafting(tokens, accepted, rejected)
        prompt_tokens = self._notes.count(usage, "prompt_tokens", "usage")
        kept = None if self._usage is None else kept_of(self._usage)
        notes = tuple(readable(note, 300) for note in self._notes.said)
        return Piece(
            now, usage=kept, counts=counts, prompt_tokens=prompt_tokens, queued_s=self._queued_s, output_tokens=tokens,
            hidden_tokens=hidden, notes=notes,
        )  # fmt: skip

    def _last_words(self, rest: bytes) -> None:
        """A stream may end without a blank line behind its last event. An end mark is taken as one, and so is an error."""
        if rest == b"[DONE]":
            self.done = True
            return
        try:
            value = self._parsed(rest)
        except RequestFailed:
            raise RequestFailed("the stream was cut off inside an event") from None
        if value.get("error") or value.get("object") == "error":
            raise RequestFailed(f"an error under HTTP 200: {error_of(rest)}")
        if "choices" in value and not self._content:
            raise RequestFailed("the server answered in one piece; without a stream there is nothing to time")
        raise RequestFailed("the stream was cut off inside an event")

    def _tokens(self, usage: dict[str, Any], details: dict[str, Any]) -> tuple[int, int, int, int]:
        """Output tokens, and of the usage: rejected and accepted prediction tokens, tokens of reasoning that are part of the
        output. The API counts rejected ones as output though nobody receives them. Raises RequestFailed if the tokens cannot
        be counted."""
        notes, where = self._notes, "usage.completion_tokens_details"
        said = notes.count(usage, "completion_tokens", "usage")
        rejected = notes.count(details, "rejected_prediction_tokens", where) or 0
        accepted = notes.count(details, "accepted_prediction_tokens", where) or 0
        reasoning = notes.count(details, "reasoning_tokens", where)
        if reasoning is None:
            reasoning = notes.count(usage, "reasoning_tokens", "usage") or 0
        prompt, total = notes.count(usage, "prompt_tokens", "usage"), notes.count(usage, "total_tokens", "usage")
        if said is not None and (reasoning > said or (prompt is not None and total == prompt + said + reasoning)):
            reasoning = 0  # counted beside the output and not as part of it
        reason = "the server sent no usage"
        if said is not None:
            tokens, most = said - rejected, self._ask.max_tokens + reasoning
            if self._content_after_usage:
                reason = f"usage.completion_tokens is {said} and more text came after it"
            elif accepted + rejected > said or (rejected and tokens < 1):
                reason = f"usage counts {said} tokens, with {accepted} accepted and {rejected} rejected ones of a prediction"
            elif tokens < 1:
                reason = "usage.completion_tokens is 0 though there was an answer"
            elif tokens > most:
                reason = f"usage.completion_tokens is {said}, more than the {self._ask.max_tokens} that were asked for"
            else:
                if not self._without_ids and self._ids and self._ids != tokens:
                    notes.add(f"usage counts {tokens} output tokens and the stream had {self._ids} token ids; usage was taken")
                return tokens, rejected, accepted, reasoning
        elif usage:
            reason = f"usage.completion_tokens is {shown(usage.get('completion_tokens'))}"
        if self._ids and not self._without_ids:
            notes.add(f"{reason}; the token ids were counted instead")
            return self._ids, 0, 0, min(reasoning, self._ids)
        predicted = notes.count(self._timings, "predicted_n", "timings")
        if predicted and predicted <= self._ask.max_tokens:
            notes.add(f"{reason}; timings.predicted_n was taken instead")
            return predicted, 0, 0, min(reasoning, predicted)
        raise RequestFailed(f"{reason}, so its tokens cannot be counted")

    def _drafting(self, tokens: int, accepted: int, rejected: int) -> Counts | None:
        """Drafting of this request: vLLM's `metrics`, llama.cpp's `timings`, or the prediction counts of the OpenAI API.

        vLLM counts the verify steps that had a draft, in a histogram of how many of its tokens were accepted, and includes
        tokens that were accepted behind the end of the answer.

        A verify step gives one token more than it accepts, and the step that ends the prompt gives the first token, so there
        were tokens - 1 - accepted verify steps.
        """
        if self._speculation:
            return self._vllm(self._speculation, tokens)
        timings, notes = self._timings, self._notes
        produced = notes.count(timings, "predicted_n", "timings")
        if produced is not None:
            drafted = notes.count(timings, "draft_n", "timings") or 0
            kept = notes.count(timings, "draft_n_accepted", "timings") or 0
            if kept <= drafted:
                return Counts(max(produced - 1 - kept, 0), 0, drafted, kept, (), ())
            notes.add(f"timings say that {kept} of {drafted} drafted tokens were accepted; they were ignored")
        if accepted or rejected:
            return Counts(max(tokens - 1 - accepted, 0), 0, accepted + rejected, accepted, (), ())
        return None

    def _vllm(self, own: dict[str, Any], tokens: int) -> Counts | None:
        notes, where = self._notes, "metrics.speculative_decoding"
        drafting = notes.count(own, "num_spec_steps", where)
        drafted = notes.count(own, "num_draft_tokens", where)
        accepted = notes.count(own, "num_accepted_draft_tokens", where)
        histogram = notes.ids(own, "acceptance_histogram", where)
        if drafting is None or drafted is None or accepted is None or histogram is None or accepted > drafted:
            notes.add(f"{where} is incomplete or contradicts itself; it was ignored")
            return None
        at = tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
        return Counts(max(tokens - 1 - accepted, drafting), drafting, drafted, accepted, (), at)


def _logprobs(value: Mapping[str, Any], chat: bool) -> tuple[TokenLogprob, ...]:
    """Raises KeyError, TypeError, ValueError or AttributeError if they are not of the API's form."""
    if chat or "content" in value:
        return tuple(
            TokenLogprob(
                _token(t["token"]),
                _logprob(t["logprob"]),
                tuple((_token(o["token"]), _logprob(o["logprob"])) for o in t.get("top_logprobs") or ()),
            )
            for t in value.get("content") or ()
        )
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        TokenLogprob(
            _token(token),
            _logprob(logprob),
            tuple(sorted(((_token(t), _logprob(v)) for t, v in (top or {}).items()), key=lambda item: -item[1])),
        )
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _token(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not -MOST <= value <= MOST:
        raise ValueError
    return float(value)


def error_of(data: bytes) -> str:
    """What an error says in words: of a JSON object in one of the common forms its message, else what is readable of it."""
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


def readable(text: str, most: int) -> str:
    """On one line, without what cannot be shown or written to a file, cut to so many characters."""
    text = whole(text[: 4 * most])
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:most]


def whole(text: str) -> str:
    """With the halves of a character (UTF-16 surrogates) joined, which some servers send in two pieces. A half alone becomes
    �."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shown(value: Any) -> str:
    """A value of the server's JSON in a note."""
    try:
        return readable(json.dumps(value, ensure_ascii=False), 40)
    except (ValueError, RecursionError):
        return "a value that cannot be shown"


def kept_of(value: Any, depth: int = KEPT_DEPTH) -> Any:
    """The server's usage as it can be written down: texts cut, numbers finite, not too deep."""
    if type(value) is dict and depth:
        return {readable(key, 80): kept_of(one, depth - 1) for key, one in list(value.items())[:50]}
    if type(value) is str:
        return readable(value, 80)
    number = type(value) in (int, float) and -MOST <= value <= MOST
    return value if number or type(value) is bool else None
