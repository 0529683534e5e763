"""Secrets in every form in which users and servers write them are hidden, and what only looks like one stays readable."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.bench.records import redaction

S = "Zq7-planted_secret.42"


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    redaction.forget()
    yield
    redaction.forget()


TEXTS = [
    # URLs
    f"http://user:{S}@10.0.0.1:8000/v1",
    f"https://{S}@example.com",
    f"connection to https://me:{S}@example.com/v1/models failed",
    f"http://h/v1?api_key={S}",
    f"http://h/v1?a=1&api-key={S}&b=2",
    f"http://h/?key={S}#top",
    f"http://h/?access_token={S}",
    f"http://h/?sig={S}&sv=2024",
    f"HTTP 401: GET http://h/v1?apikey={S} was refused",
    # headers
    f"Authorization: Bearer {S}",
    f"authorization:{S}",
    f"Authorization: Basic {S}=",
    f"Proxy-Authorization: Digest username=x {S}",
    f"x-api-key: {S}",
    f"api-key: {S}",
    f"X-Goog-Api-Key: {S}",
    f"X-Auth-Token: {S}",
    f"Cookie: session={S}; other=1",
    f"the server said: invalid token Bearer {S}",
    f"Incorrect API key provided: {S}.",
    f"Invalid API key: {S}",
    # options in running text
    f"vllm serve m --api-key {S} --port 8000",
    f"vllm serve m --api-key={S} --port 8000",
    f"vllm serve m --api-key '{S}'",
    f"--hf-token {S}",
    f"--hf_token {S}",
    f"--ssl-key-password {S}",
    f"-token {S}",
    # environments
    f"HF_TOKEN={S} vllm serve m",
    f"OPENAI_API_KEY='{S}' forerun bench",
    f"AWS_SECRET_ACCESS_KEY={S}",
    f"PASSWORD={S}",
    f"export DB_PASSWD={S};",
    # JSON and Python
    json.dumps({"api_key": S}),
    json.dumps({"apiKey": S, "top_k": 1}),
    json.dumps({"a": {"token": S}}),
    json.dumps(json.dumps({"api_key": S})),
    '{"api_key": "' + S,
    f"{{'api_key': ['{S}', 'b'], 'port': 1}}",
    f"non-default args: {{'model': 'm', 'api_key': ['{S}']}}",
    f"Namespace(host='x', api_key='{S}', port=1)",
    f"ServerArgs(model='m', api_key='{S}', admin_api_key=None)",
    f'password: "x", "password": "{S}"',
    f'"client_secret" : "{S}"',
]

SHAPES = [
    "sk-proj-abcDEF0123456789abcdef",
    "sk-ant-api03-ABCDEFGHijklmnop",
    "hf_abcdefghijKLMNOP",
    "ghp_0123456789abcdefABCDEF",
    "github_pat_11ABCDEFG0_abcdefghij",
    "xoxb-123456789-abcdefgh",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "gsk_0123456789abcdefghij",
    "nvapi-0123456789abcdefghij",
    "glpat-0123456789abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----",
]

HARMLESS = [
    "forerun bench --max-tokens 128 --max-num-batched-tokens 2048 --seed 1",
    "--tokenizer gpt2 --tokenizer-mode auto --api-key-env MY_KEY",
    "http://127.0.0.1:8000/v1?model=target",
    "mail to a@b.example",
    "max_tokens=7.5: give 1 or more",
    '{"max_tokens": 5, "stop_token_ids": [1, 2], "min_tokens": 3, "token_ids": [5], "logprobs": 2}',
    "GPU KV cache size: 40,208 tokens",
    "HTTP 500: out of paper",
    "ValueError: 3.4 GiB of memory are not there",
    "kv_cache_tokens=16384, block_size=16",
    "Basic settings and bearer tokens",
    '{"method": "ngram", "num_speculative_tokens": 4}',
    "key: value pairs, a monkey, a token",
    "the tokenizer has no chat template; use generate with a text prompt",
    "spec-bench mt_bench, task-key-value-store-lookup",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_hidden(text: str) -> None:
    hidden = redaction.hide(text)
    assert S not in hidden and redaction.HIDDEN in hidden
    assert redaction.hide(hidden) == hidden, "hiding twice changes nothing more"


@pytest.mark.parametrize("secret", SHAPES)
def test_well_known_shapes_are_hidden_wherever_they_stand(secret: str) -> None:
    for text in (secret, f"it was {secret}, they say", f'"{secret}"'):
        assert secret not in redaction.hide(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redaction.hide(text) == text
    assert redaction.hide_command(text) == text


COMMANDS = [
    ["vllm", "--api-key", S],
    ["vllm", "--api-key", S, "a second key", "--port", "1"],
    ["vllm", f"--api-key={S}"],
    ["vllm", "--api_key", S],
    ["x", "--hf-token", S],
    ["x", "--password", S],
    ["x", "--header", f"Authorization: {S}"],
    ["x", f"--header=Authorization: {S}"],
    ["x", "-H", f"X-Api-Key: {S}"],
    ["x", "--body", json.dumps({"api_key": S})],
    ["x", "--server-args", f"--api-key {S} --port 1"],
    ["x", f"--server-args=--api-key={S}"],
    ["x", "-a", f"fast=http://u:{S}@h:1"],
    ["x", "-a", f"flags:--api-key {S}"],
    ["x", "-e", f"https://h/?token={S}"],
    ["env", f"HF_TOKEN={S}", "vllm"],
]


@pytest.mark.parametrize("words", COMMANDS)
def test_secrets_in_command_lines(words: list[str]) -> None:
    for hidden in (redaction.hide(words), shlex.split(redaction.hide_command(shlex.join(words)))):
        assert S not in " ".join(hidden) and words[0] == hidden[0]
        assert "a second key" not in hidden
        assert redaction.HIDDEN in " ".join(hidden)
    assert redaction.hide(redaction.hide(words)) == redaction.hide(words)


VALUES: list[Any] = [
    {"api_key": S},
    {"apiKey": S},
    {"auth": {"user": "x", "value": S}},
    {"headers": {"Authorization": S}},
    {"a": [{"password": S}]},
    {"credentials": [S]},
    {"extra_args": ["--api-key", S]},
    {"url": f"http://u:{S}@h"},
    [f"Bearer {S}"],
    {"password": 12345678, "x": S[:0]},
]


@pytest.mark.parametrize("value", VALUES)
def test_secrets_in_json(value: Any) -> None:
    hidden = json.dumps(redaction.hide(value))
    assert S not in hidden and "12345678" not in hidden and redaction.HIDDEN in hidden


def test_json_without_secrets_comes_back_equal() -> None:
    value = {"max_tokens": 5, "token": 7, "key": 1, "stop": ["a", "b"], "x": None, "secret": None, "auth": True, "ids": (1, 2)}
    assert redaction.hide(value) == value


def test_what_is_remembered_is_hidden_whatever_it_looks_like(monkeypatch: pytest.MonkeyPatch) -> None:
    redaction.remember("open sesame", "ab")
    assert redaction.hide("I say open sesame, ab") == "I say ***, ab", "two letters would be hidden in every text"
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "plain words 99")
    monkeypatch.setenv("SOME_SERVICE_TOKENS", "not a secret")
    redaction.remember_environment()
    assert redaction.hide({"said": "plain words 99; not a secret"}) == {"said": "***; not a secret"}
    redaction.remember(*redaction.secrets_of(["vllm", "--api-key", "one two", "three", "--port", "8000", "--hf-token=four"]))
    assert redaction.hide("one two, three, four, 8000") == "***, ***, ***, 8000"
