"""`forerun serve` driven by the official openai client and by plain HTTP: its answers are those of LLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from forerun.llm import LLM
from forerun.types import SamplingParams
from tests.serving import Served
from tests.tiny import tiny_model

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
MESSAGES = [{"role": "user", "content": "the thing in the thing in the thing"}]
SETTINGS = {"max_num_seqs": 4, "kv_cache_tokens": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), positions=1024)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, speculative_config=NGRAM, **SETTINGS)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    server = Served(folder, "-s", NGRAM, *options)
    yield server
    assert server.end() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_chat_answer_is_that_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=40))[0]
    got = client.chat.completions.create(model=llm.model.name, messages=MESSAGES, temperature=0, max_completion_tokens=40)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == expected.completions[0].finish_reason
    assert got.usage.prompt_tokens == len(expected.prompt_ids)
    assert got.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_adds_up_to_the_answer_without_streaming(client: openai.OpenAI, llm: LLM, temperature: float) -> None:
    asked = dict(model=llm.model.name, messages=MESSAGES, temperature=temperature, seed=3, max_tokens=60, n=2)
    whole = client.chat.completions.create(**asked)
    text, reasons, last = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert last is None, "usage is the last event"
        for choice in chunk.choices:
            assert not reasons[choice.index], "nothing follows the finish reason"
            text[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
        if not chunk.choices:
            last = chunk.usage
        else:
            assert chunk.usage is None
    assert text == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert last.completion_tokens == whole.usage.completion_tokens and last.prompt_tokens == whole.usage.prompt_tokens


def test_logprobs_ids_echo_and_usage(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    done = llm.chat(MESSAGES, params)[0]
    asked = dict(model=llm.model.name, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
    got = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert got.token_ids == list(done.token_ids) and got.prompt_token_ids == list(done.prompt_ids)
    for mine, its in zip(got.logprobs.content, done.completions[0].logprobs, strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-4) and len(mine.top_logprobs) == 2
        assert bytes(mine.bytes) == llm.tokenizer.token_bytes(its.token)
    streamed = [
        one
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for one in choice.logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in got.logprobs.content]

    prompts = ["the thing", "on and on"]
    asked = dict(model=llm.model.name, prompt=prompts, temperature=0, max_tokens=6)
    plain = client.completions.create(**asked)
    expected = [output.text for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))]
    assert [choice.text for choice in plain.choices] == expected
    echoed = client.completions.create(**asked, echo=True)
    assert [choice.text for choice in echoed.choices] == [p + t for p, t in zip(prompts, expected, strict=True)]
    noted = client.completions.create(**asked, logprobs=1).choices[0].logprobs
    assert noted.text_offset[0] == 0 and len(noted.tokens) == len(noted.token_logprobs) == len(noted.top_logprobs)
    long = "the thing in the " * 8
    for cached in (0, 32):
        usage = client.completions.create(model=llm.model.name, prompt=long, max_tokens=1).usage
        assert (usage.prompt_tokens_details.cached_tokens >= 32) == bool(cached)


def test_other_routes(client: openai.OpenAI, served: Served, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == [llm.model.name]
    assert client.models.retrieve(llm.model.name).id == llm.model.name
    text = "the thing: déjà vu 😀"
    got = httpx.post(f"{served.url}/tokenize", json={"prompt": text}).json()
    assert got["tokens"] == llm.tokenizer.encode(text) and got["count"] == len(got["tokens"])
    assert httpx.post(f"{served.url}/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    got = httpx.post(f"{served.url}/tokenize", json={"messages": MESSAGES}).json()
    assert got["tokens"] == llm.prompts.chat_ids(MESSAGES)
    assert httpx.get(f"{served.url}/version").json()["version"]


def test_errors_reach_the_client_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="gpt-9", prompt="a", temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_a_given_form(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [1, 22]}}, "required": ["age"], "additionalProperties": False}
    forms: dict[str, Any] = {
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "choice": {"extra_body": {"structured": {"choice": ["the thing", "in the thing"]}}},
        "regex": {"extra_body": {"structured": {"regex": "[ab]{3}"}}},
        "text": {"response_format": {"type": "text"}},
    }
    found = {}
    for name, form in forms.items():
        asked = dict(model=llm.model.name, messages=MESSAGES, temperature=1, seed=1, max_tokens=40, stream=stream, **form)
        got = client.chat.completions.create(**asked)
        if stream:
            found[name] = "".join(choice.delta.content or "" for chunk in got for choice in chunk.choices)
        else:
            found[name] = got.choices[0].message.content
    assert json.loads(found["schema"])["age"] in (1, 22)
    assert found["choice"] in ("the thing", "in the thing") and re.fullmatch("[ab]{3}", found["regex"])
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}
    for form, field in (
        ({"response_format": wrong}, "response_format"),
        ({"extra_body": {"structured": {"regex": "("}}}, "structured"),
        ({"extra_body": {"structured": {}}}, "structured"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=llm.model.name, messages=MESSAGES, stream=stream, **form)
        assert error.value.param == field


def test_a_request_limits_its_drafts(client: openai.OpenAI, llm: LLM) -> None:
    """The answer stays the same; the metrics show what was drafted."""
    asked = dict(model=llm.model.name, messages=MESSAGES, temperature=0, max_tokens=40)
    whole = client.chat.completions.create(**asked)
    for extra, most in (({"num_speculative_tokens": 0}, 0), ({"num_speculative_tokens": 1}, 1), ({"drafters": ["ngram"]}, 3)):
        got = client.chat.completions.create(**asked, extra_body=extra)
        assert got.choices[0].message.content == whole.choices[0].message.content
        assert got.metrics["drafted_tokens"] <= most * got.metrics["steps"]
    with pytest.raises(openai.BadRequestError, match=r"drafters.*loaded ngram"):
        client.chat.completions.create(**asked, extra_body={"drafters": ["suffix"]})
