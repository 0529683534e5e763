"""Tools: how a conversation tells the model of functions, and how its calls are read from the text of an answer.

Two forms of calls are read, both JSON between <tool_call> and </tool_call>: one object for each pair of markers (Hermes and
Qwen), or a list of objects (SmolLM2). Each object has a name and arguments. Reasoning is the text between <think> and </think>
at the start of an answer (Qwen3, DeepSeek-R1).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from forerun.checks import SettingError
from forerun.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"

# The text after OPEN may become calls; a beginning of such a text fits as well.
POSSIBLE = re.compile(r'\s*(?:\[\s*)?(?:$|\]|\{\s*(?:$|"))')
# A call up to its arguments. A name with a "<" is left to the slower way, so that no marker is read over.
HEAD = re.compile(r'\s*(\[?)\s*\{\s*"name"\s*:\s*("(?:[^"\\<\x00-\x1f]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)')
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no answer can hold
BETWEEN = re.compile(r"[\s}\],]*")  # what stands between the arguments of a call and the next call or marker

Form = Literal["objects", "list"]
Mappings = Sequence[Mapping[str, Any]]

# White space as json.dumps has it: there is less to choose, and a small model cannot go on with it for ever.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIST_FORM = (
    "You can call functions. This list describes them:\n<tools>%s</tools>\n"
    "To call some of them, answer with a list of calls in this form and nothing else:\n"
    '<tool_call>[{"name": "name of the function", "arguments": {"name of an argument": "its value"}}]</tool_call>\n'
    "If no function is of use, answer in words."
)


class Parts:
    """What some text adds to an answer. calls: tool calls and their continuations, in OpenAI's form of a stream."""

    __slots__ = ("calls", "content", "reasoning")

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []


class Reader:
    """Reads an answer's text in pieces of any size. How it is cut does not change what the parts add up to.

    A text between markers that is no call is content, with its markers. A call is told as soon as its name and the first brace
    of its arguments are there, if they come in this order, and then its arguments bit by bit, as the model wrote them; control
    characters in strings, which JSON forbids, are escaped. So arguments may be no JSON, or a part of it if the answer was cut.
    White space beside a marker is left out. A marker's beginning is held back until the next text tells what it is.
    """

    def __init__(self, calls: bool, parallel: bool = True, reasoning: bool = False, thinks: bool = False) -> None:
        """calls, reasoning: whether they are read. parallel: off: only the first call is told. thinks: the prompt ended with
        <think>, so that the answer begins with reasoning."""
        self._calls, self._parallel, self._thinks = calls, parallel, thinks
        self._read: Callable[[], bool] = self._begin if reasoning else self._content
        self._text = ""  # not yet read
        self._parts = Parts()
        self._last = False  # whether the answer has ended
        self._beside = reasoning  # nothing but white space since the last marker
        self._count = 0  # calls so far
        self._block = False  # after OPEN, so that CLOSE is a marker
        self._list = False  # in a list of calls
        self._depth, self._string, self._escaped = 0, False, False  # in the arguments of a call

    def feed(self, text: str, last: bool = False) -> Parts:
        """last: no more text comes."""
        self._text += text
        self._last = last
        parts = self._parts = Parts()
        while self._read():
            pass
        return parts

    # Each of these reads one thing, sets what is to be read next, and returns whether there may be more to read now.

    def _begin(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._read = text[len(THINK) :], self._reasoning
            return True
        if THINK.startswith(text) and not self._last:
            return False
        self._read = self._reasoning if self._thinks else self._content
        self._beside = self._thinks
        return True

    def _reasoning(self) -> bool:
        text, marker = self._before((THOUGHT,))
        text = self._unless_beside(text)
        self._parts.reasoning += text
        if marker:
            self._pass(marker)
            self._read = self._content
        return bool(marker)

    def _content(self) -> bool:
        markers = (OPEN, CLOSE) if self._block else (OPEN,)
        text, marker = self._before(markers if self._calls else ())
        if self._last and self._block and self._beside and CLOSE.startswith(text.lstrip()):
            text = ""  # a marker that was cut
        self._parts.content += self._unless_beside(text)
        if marker == CLOSE:
            self._pass(marker)
            self._block = False
        elif marker == OPEN:
            self._read, self._block = self._head, False
        return bool(marker)

    def _head(self) -> bool:
        """From OPEN, or within a list of calls, up to the arguments of a call."""
        skip = self._text.find(OPEN) + len(OPEN) if not self._list else 0
        text = self._text[skip:]
        found = HEAD.match(text)
        if found and (name := name_in(found[2])):
            self._list = self._list or bool(found[1])
            self._tell(name)
            self._text, self._read = text[found.end() :], self._arguments
            return True
        end = text.find(CLOSE)
        if not found and POSSIBLE.match(text) and end < 0 and not self._last:
            return False
        inner = text if end < 0 else text[:end]
        calls = None if found else whole_calls("[" + inner if self._list else inner)
        if calls is None:  # no calls: all of it is text, in which other calls may follow
            before, self._text = self._text[: max(skip, 1)], self._text[max(skip, 1) :]
            self._parts.content += self._unless_beside(before)
            self._read, self._list = self._content, False
            return True
        for name, arguments in calls:
            self._tell(name)
            self._argue(arguments)
        self._text = "" if end < 0 else text[end:]
        self._between_calls()
        return True

    def _arguments(self) -> bool:
        told, done = [], False
        for at, char in enumerate(self._text, 1):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._string, self._escaped = char != '"', char == "\\"
                if char < " ":
                    char = json.dumps(char)[1:-1]
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                done = not self._depth
            told.append(char)
            if done:
                self._text = self._text[at:]
                self._between_calls()
                break
        else:
            self._text = ""
        self._argue("".join(told))
        return done

    def _between_calls(self) -> None:
        self._block = self._beside = True
        self._read = self._between

    def _between(self) -> bool:
        found = BETWEEN.match(self._text)
        assert found is not None
        self._text = self._text[found.end() :]
        if not self._text:
            return False
        self._list = self._text[0] == "{"
        self._read = self._head if self._list else self._content
        return True

    def _before(self, markers: Sequence[str]) -> tuple[str, str]:
        """Take the text before the first of these markers, and tell which one it is; "" if there is none. White space before
        the marker, and all that may become it, are left unread, as is the marker itself."""
        found = min(((at, marker) for marker in markers if (at := self._text.find(marker)) >= 0), default=None)
        if found is None and (self._last or not markers):
            text, self._text = self._text, ""
            return text, ""
        at, marker = found or (len(self._text) - held(self._text, markers), "")
        at = len(self._text[:at].rstrip())
        text, self._text = self._text[:at], self._text[at:]
        return text, marker

    def _pass(self, marker: str) -> None:
        self._text = self._text[self._text.find(marker) + len(marker) :]
        self._beside = True

    def _unless_beside(self, text: str) -> str:
        """The text, without white space that follows a marker."""
        text = text.lstrip() if self._beside else text
        self._beside = self._beside and not text
        return text

    def _tell(self, name: str) -> None:
        self._depth, self._string, self._escaped = 0, False, False
        self._count += 1
        if self._parallel or self._count == 1:
            function = {"name": name, "arguments": ""}
            call = {"index": self._count - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            self._parts.calls.append(call)

    def _argue(self, text: str) -> None:
        if not text or not (self._parallel or self._count == 1):
            return
        calls = self._parts.calls
        if not calls or calls[-1]["index"] != self._count - 1:
            calls.append({"index": self._count - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text


def held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    for size in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def usable(name: str) -> bool:
    """Whether a function may have this name."""
    return bool(name) and not SURROGATE.search(name)


def name_in(text: str) -> str:
    """The name in a JSON string; "" if there is none."""
    try:
        name: str = json.loads(text)
    except ValueError:
        return ""
    return name if usable(name) else ""


def whole_calls(text: str) -> list[tuple[str, str]] | None:
    """The names and arguments of the calls in JSON, an object or a list; None if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in found if isinstance(found, list) else [found]:
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not usable(name) or not isinstance(arguments, dict):
            return None
        calls.append((name, json.dumps(arguments)))
    return calls


def joined_calls(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls of an answer without streaming."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if "id" in delta:
            calls[delta["index"]] = {"id": delta["id"], "type": "function", "function": dict(delta["function"])}
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())


def form(tokenizer: Tokenizer) -> Form:
    """How the model is to write calls: "objects" if its chat template reads tools, else "list", the form of the default model,
    whose template does not. Raises SettingError if the template asks for another form, which would not be read."""
    source = tokenizer.tool_template()
    if source is None:
        return "list"
    if OPEN not in source or "<function=" in source:
        remedy = f"the model's chat template asks for calls in another form than JSON after {OPEN}; leave them out"
        raise SettingError("tools", "...", remedy)
    return "objects"


def conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """The messages and tools that the chat template is to have. If it does not read tools, they are described in the system
    message, and calls and their results are written as text."""
    if tokenizer.tool_template() is not None:
        return list(messages), tools or None
    found = [as_text(message) for message in messages]
    if tools:
        described = LIST_FORM % json.dumps(tools, ensure_ascii=False)
        if found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{found[0]['content']}\n\n{described}"}
        else:
            found.insert(0, {"role": "system", "content": described})
    return found, None


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with calls and results as text in its content."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        given = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
        text = f"{OPEN}{json.dumps(given, ensure_ascii=False)}{CLOSE}"
        return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], text)))}
    return message


def grammar(functions: Sequence[tuple[str, Mapping[str, Any] | None]], form: Form, several: bool) -> str:
    """A Lark grammar of calls of these functions, each with the JSON schema of its arguments: one call, or one or more."""
    rules = []
    for number, (name, schema) in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        form_of_arguments = {"x-guidance": AS_WRITTEN, "type": "object"} | dict(schema or {})
        rules.append(f"arguments_{number}: %json {json.dumps(form_of_arguments)}")
    before, between, after = ("[", ", ", "]") if form == "list" else ("\n", f"\n{CLOSE}\n{OPEN}\n", "\n")
    more = f" ({json.dumps(between)} call)*" if several else ""
    start = f"start: {json.dumps(OPEN + before)} call{more} {json.dumps(after + CLOSE)}"
    return "\n".join([start, "call: " + " | ".join(f"call_{number}" for number in range(len(functions))), *rules])
