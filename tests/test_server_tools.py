"""Tools in the server: what the model is told of them, how calls are read from its text, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.checks import SettingError
from forerun.llm import LLM
from forerun.models.tokenizer import Tokenizer
from forerun.server import tools
from forerun.server.schemas import ChatRequest
from forerun.server.tools import CLOSE, OPEN, THINK, THOUGHT, Reader, joined_calls
from forerun.types import SamplingParams
from tests.serving import Inside
from tests.tiny import tiny_model, tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place: 天気 😀",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Köln"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "the thing in the thing"}]
QWEN_LIKE = (  # reads what Qwen's template reads, in fewer words
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}<tools>"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n' }}</tools>\n<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read(pieces: list[str], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """The content, the reasoning, and the calls of an answer that comes in these pieces. The deltas have OpenAI's form."""
    reader, content, reasoning, deltas = Reader(**{"calls": True, **options}), "", "", []
    for number, piece in enumerate(pieces):
        parts = reader.feed(piece, number == len(pieces) - 1)
        content, reasoning = content + parts.content, reasoning + parts.reasoning
        deltas += parts.calls
    begun: list[str] = []
    for delta in deltas:
        if "id" in delta:
            assert delta["index"] == len(begun) and delta["id"] not in begun and delta["type"] == "function"
            begun.append(delta["id"])
        assert delta["index"] == len(begun) - 1 and ("name" in delta["function"]) == ("id" in delta)
    calls = joined_calls(deltas)
    assert [call["id"] for call in calls] == begun
    return content, reasoning, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)] or [""]


CUTS = st.lists(st.integers(0, 1000), max_size=30)
JSON_TEXT = st.text(alphabet=st.sampled_from('ab {}[]",:\\\n<>/é漢😀'), max_size=8) | st.sampled_from([OPEN, CLOSE, THOUGHT])
VALUES = st.recursive(
    JSON_TEXT | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(st.sampled_from(["f", "get_weather", "数"]), st.dictionaries(JSON_TEXT, VALUES, max_size=3))
# A "<" that begins no marker, and no white space at the ends, which would be left out beside a marker.
PROSE = st.text(alphabet=st.sampled_from("a é漢😀<\n{}[]"), max_size=8).map(str.strip)


def written(calls: list[tuple[str, dict[str, Any]]], form: str, indent: int | None, unicode: bool) -> str:
    def dump(value: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=not unicode)

    given = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if form == "list":
        return f"{OPEN}{dump(given)}{CLOSE}"
    return "\n".join(f"{OPEN}\n{dump(call)}\n{CLOSE}" for call in given)


@settings(max_examples=200, deadline=None)
@given(
    before=PROSE, after=PROSE, calls=st.lists(CALLS, min_size=1, max_size=3), form=st.sampled_from(["list", "objects"]),
    indent=st.sampled_from([None, 2]), unicode=st.booleans(), places=CUTS, thought=st.none() | PROSE, thinks=st.booleans(),
)  # fmt: skip
def test_calls_are_read_however_the_text_is_cut(
    before: str, after: str, calls: list[tuple[str, dict[str, Any]]], form: str, indent: int | None, unicode: bool,
    places: list[int], thought: str | None, thinks: bool,
) -> None:  # fmt: skip
    """What was written is what is read: name and arguments of each call, the text around them, and the reasoning."""
    body = f"{before}\n{written(calls, form, indent, unicode)}\n{after}"
    if thinks or thought is not None:
        body = f"{'' if thinks else THINK}\n{thought or ''}\n{THOUGHT}\n\n{body}"
    reasoning = thinks or thought is not None
    content, thoughts, found = read(cut(body, places), reasoning=reasoning, thinks=thinks)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == before + after and thoughts == (thought or "")


PARTS = [OPEN, CLOSE, THINK, THOUGHT, '{"name": "f", "arguments": {', '"a": 1', "}", "[", "]", '"', ",", " ", "\n", "x", "<"]
PARTS += ["\\", '{"arguments": {}, "name": "g"}', '{"name": "h"}', "<tool", "_call>", "é", '{"name": "f"']


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), places=CUTS, reasoning=st.booleans(), thinks=st.booleans())
@example(parts=[OPEN, '{"name": "', CLOSE, '", "arguments": {'], places=list(range(60)), reasoning=False, thinks=False)
@example(parts=[OPEN, "[", '{"name": "h"}', "]", CLOSE], places=list(range(60)), reasoning=False, thinks=False)
def test_any_text_reads_the_same_however_it_is_cut(parts: list[str], places: list[int], reasoning: bool, thinks: bool) -> None:
    text = "".join(parts)
    options = {"reasoning": reasoning, "thinks": thinks and reasoning}
    whole = read([text], **options)
    assert read(cut(text, places), **options) == whole == read(list(text) or [""], **options)
    if not reasoning and OPEN not in text:
        assert whole == (text, "", [])


BROKEN = [
    "{'name': 'f', 'arguments': {}}", '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', '{"arguments": {}}',
    '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}', '{"name": "f", "argu', "f(x)", "", "{}", "[{]",
    '[{"name": "f"}, 5]', '{"name": "\\ud83d", "arguments": {}}', "[" * 100_000, "<function=f></function>",
]  # fmt: skip


@pytest.mark.parametrize("inner", BROKEN)
def test_what_is_no_call_is_text(inner: str) -> None:
    text = f"See: {OPEN}{inner}{CLOSE} \n"
    assert read([text]) == (text, "", [])
    for cut_off in (f"See {OPEN}{inner}", f"See {OPEN}"):
        assert read([cut_off]) == (cut_off, "", [])
    good = OPEN + '{"name": "g", "arguments": {"a": "b"}}' + CLOSE
    assert read([text + good + " end"]) == (text.rstrip() + "end", "", [("g", '{"a": "b"}')]), "a call behind it is read"


CALL = '{"name": "f", "arguments": {"a": "x"}}'
ODD = {  # text: content, calls
    f"{OPEN}{CALL}": ("", [("f", '{"a": "x"}')]),  # the end of the text is the end of the call
    f"{OPEN}{CALL}</tool_c": ("", [("f", '{"a": "x"}')]),
    f"{OPEN}{CALL[:-3]}": ("", [("f", '{"a": "x')]),  # cut by max_tokens
    f"{OPEN}{CALL[:-1]}{CLOSE}then": ("then", [("f", '{"a": "x"}')]),
    f"{OPEN}{CALL}{OPEN}{CALL}{CLOSE}": ("", [("f", '{"a": "x"}')] * 2),
    f"{OPEN}{CALL}\n{CALL}{CLOSE}": ("", [("f", '{"a": "x"}')] * 2),
    f"{OPEN}[]{CLOSE}": ("", []),  # the default model's way to say that no call is needed
    OPEN + '{"name": "f", "arguments": {"a": "two\nlines"}}' + CLOSE: ("", [("f", '{"a": "two\\nlines"}')]),
    OPEN + '{"name": "f"}' + CLOSE: ("", [("f", "{}")]),
    f"a {CLOSE} b <": (f"a {CLOSE} b <", []),
    f"{THINK}a{THOUGHT}": (f"{THINK}a{THOUGHT}", []),
}


@pytest.mark.parametrize(("text", "expected"), ODD.items())
def test_odd_answers(text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    content, _, calls = read(list(text))
    assert (content, calls) == expected


def test_what_is_sure_comes_at_once() -> None:
    """Nothing is held back longer than it must be: arguments and text come as the model writes them."""
    reader, head = Reader(True), OPEN + '{"name": "f", "arguments": {'
    assert reader.feed("Yes <").content == "Yes" and reader.feed("b> ").content == " <b>"
    assert reader.feed(head[:-1]).calls == []
    (begun,) = reader.feed(head[-1]).calls
    assert begun["function"] == {"name": "f", "arguments": "{"}
    assert reader.feed('"a": ').calls == [{"index": 0, "function": {"arguments": '"a": '}}]
    assert reader.feed("1}}").calls == [{"index": 0, "function": {"arguments": "1}"}}]


def test_one_call_at_most() -> None:
    for text in (f"{OPEN}[{CALL}, {CALL}]{CLOSE}", f"{OPEN}{CALL}{CLOSE}{OPEN}{CALL}{CLOSE}x"):
        assert len(read([text])[2]) == 2
        content, _, calls = read(list(text), parallel=False)
        assert calls == [("f", '{"a": "x"}')] and content == ("x" if "x" in text[-1:] else "")


HISTORY = [
    {"role": "system", "content": "Be kind."},
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "no JSON"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "22 °C"}]},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
]


def rendered(tokenizer: Tokenizer, **asked: Any) -> str:
    request = ChatRequest.model_validate(asked)
    messages, described = tools.conversation(
        tokenizer, [message.plain() for message in request.messages], [tool.plain() for tool in request.shown]
    )
    return tokenizer.render_chat(messages, True, described)


def with_template(folder: Path, template: str | None) -> Tokenizer:
    tiny_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def test_a_template_that_reads_tools_has_them(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, QWEN_LIKE)
    assert tools.form(tokenizer) == "objects"
    text = rendered(tokenizer, messages=HISTORY, tools=[WEATHER, NOW])
    lines = [line for line in text.splitlines() if line.startswith('{"type"')]
    assert [json.loads(line) for line in lines] == [WEATHER, NOW] and list(json.loads(lines[0])) == list(WEATHER)
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in text and '"arguments": "no JSON"' in text
    assert "<tool_response>\n22 °C\n</tool_response>" in text and "noon" in text
    assert "<tools>" not in rendered(tokenizer, messages=HISTORY, tools=[WEATHER], tool_choice="none")


def test_a_template_without_tools_has_them_as_text(tmp_path: Path) -> None:
    """The default model's template reads role and content only."""
    tokenizer = with_template(tmp_path, None)
    assert tools.form(tokenizer) == "list"
    text = rendered(tokenizer, messages=HISTORY, tools=[WEATHER, NOW])
    described = text.partition("<tools>")[2].partition("</tools>")[0]
    assert json.loads(described) == [WEATHER, NOW] and text.startswith("<|im_start|>system\nBe kind.\n")
    calls = [{"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "now", "arguments": "no JSON"}]
    assert f"<|im_start|>assistant\n{OPEN}{json.dumps(calls, ensure_ascii=False)}{CLOSE}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n22 °C\n</tool_response><|im_end|>" in text
    assert rendered(tokenizer, messages=ASKED, tools=[NOW]).startswith("<|im_start|>system\nYou can call functions.")
    plain = rendered(tokenizer, messages=ASKED)
    assert plain == rendered(tokenizer, messages=ASKED, tools=[]) == tokenizer.render_chat(ASKED)


@pytest.mark.parametrize("template", ["{{ tools }}", "{{ tools }}<tool_call>\n<function=name>"])
def test_another_form_of_calls_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(SettingError, match="another form"):
        tools.form(with_template(tmp_path, template))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = tiny_model(tmp_path_factory.mktemp("tools"), positions=2048)
    server = Inside(LLM(folder, speculative_config="ngram", max_num_seqs=4, kv_cache_tokens=8192), reasoning_parser="think")
    yield server
    server.close()


@pytest.fixture
def client(served: Inside) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **asked: Any) -> dict[str, Any]:
    """The message and the finish reason of a stream, put together as openai's documentation tells."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "pieces": 0, "reason": None}
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        assert found["reason"] is None
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                assert delta.index == len(found["calls"])
                found["calls"].append([delta.function.name, ""])
            found["calls"][delta.index][1] += delta.function.arguments
            found["pieces"] += 1
        found["reason"] = choice.finish_reason
    return found


SCRIPTS = {
    f'Let me see.\n{OPEN}[{{"name": "get_weather", "arguments": {{"city": "Köln", "days": 2}}}}, '
    f'{{"name": "now", "arguments": {{}}}}]{CLOSE}': "tool_calls",
    f'{THINK}\nhm 😀\n{THOUGHT}\n\n{OPEN}\n{{"name": "now", "arguments": {{"zone": "日本"}}}}\n{CLOSE}': "tool_calls",
    f"{THINK}on and on{THOUGHT}It is {OPEN}warm{CLOSE} today.": "stop",
    "No call is needed: 3 < 4": "stop",
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), SCRIPTS.items())
def test_the_openai_client_gets_calls(client: openai.OpenAI, text: str, reason: str) -> None:
    """The answer is a script: its form allows one text only."""
    content, reasoning, calls = read([text], reasoning=True)
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER, NOW], "temperature": 0, "max_tokens": 300}
    asked |= {"model": client.models.list().data[0].id, "extra_body": {"structured": {"choice": [text]}}}
    (choice,) = client.chat.completions.create(**asked).choices
    message = choice.message
    assert (message.content or "") == content and getattr(message, "reasoning_content", "") == reasoning
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == calls
    assert choice.finish_reason == reason and (message.content is None) == (bool(calls) and not content)
    found = streamed(client, **asked)
    assert (found["content"], found["reasoning"], found["reason"]) == (content, reasoning, reason)
    assert [tuple(call) for call in found["calls"]] == calls and (not calls or found["pieces"] > len(calls))

    first = streamed(client, **asked, parallel_tool_calls=False)
    assert [tuple(call) for call in first["calls"]] == calls[:1]
    off = streamed(client, **asked, tool_choice="none")
    assert off["content"] == read([text], calls=False, reasoning=True)[0] and off["calls"] == []
    if calls:  # what was answered may be sent back
        results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
        asked["messages"] = [*ASKED, message.model_dump(), *results]
        assert client.chat.completions.create(**asked).choices[0].finish_reason == reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_follows_its_schema(client: openai.OpenAI, choice: Any) -> None:
    """The model has random weights and would not call anything by itself."""
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    asked["model"] = client.models.list().data[0].id
    for temperature in (0.0, 1.0):
        (answer,) = client.chat.completions.create(**asked, temperature=temperature, seed=1, max_tokens=200).choices
        (call,) = answer.message.tool_calls
        assert answer.message.content is None and answer.finish_reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" and arguments["city"] in ("Paris", "Köln") and 1 <= arguments["days"] <= 9
        assert streamed(client, **asked, temperature=temperature, seed=1, max_tokens=200)["calls"] == [
            [call.function.name, call.function.arguments]
        ]


@pytest.mark.parametrize("form", ["list", "objects"])
def test_the_grammar_of_forced_calls(tmp_path: Path, form: Any) -> None:
    llm = LLM(tiny_model(tmp_path, positions=512), speculative_config="ngram")
    functions = [(tool["function"]["name"], tool["function"].get("parameters")) for tool in (WEATHER, NOW)]
    ended = 0
    for several in (False, True):
        wanted = {"grammar": tools.grammar(functions, form, several)}
        params = SamplingParams(temperature=1.0, max_tokens=200, n=8, seed=2, structured=wanted)
        (output,) = llm.generate("the thing", params)
        for completion in output.completions:
            content, _, calls = read([completion.text])
            assert calls
            if completion.finish_reason == "stop":
                assert not content and (several or len(calls) == 1)
                ended += all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert ended


ODD_SCHEMA = {"type": "function", "function": {"name": "a", "parameters": {"type": "odd"}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "more": 1}}]}, "tools"),
    ({"tools": [NOW] * 129}, "tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]}, "messages"),
    ({"tools": [ODD_SCHEMA], "tool_choice": "required"}, "tools"),
    ({"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
]


@pytest.mark.parametrize(("asked", "field"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tools_are_refused_by_name(served: Inside, asked: dict[str, Any], field: str, stream: bool) -> None:
    body = {"messages": ASKED, "max_tokens": 4, "stream": stream, **asked}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field and field in answer.json()["error"]["message"]
    assert served.held == 0
