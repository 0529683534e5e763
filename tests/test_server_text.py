"""The texts of the server's answers: parts add up to the whole however steps cut the tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.stats import DraftStats, RequestStats
from forerun.engine.text import TextStream
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.server import openapi
from forerun.server.forms import Metrics
from forerun.server.replies import ChatReply, CompletionReply, Piece, Reply
from forerun.server.schemas import ChatRequest, CompletionRequest
from forerun.server.settings import ServerSettings
from forerun.types import Event, Logprob, Request, SamplingParams
from tests.tiny import SPECIAL, tiny_tokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab the thing é漢😀\n�"), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return Tokenizer(folder)


def events(tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> list[Event]:
    """What an engine would tell of these tokens, cut into steps of these sizes."""
    stream, found, at, sizes = TextStream(Detokenizer(tokenizer), stop, False), [], 0, iter(cuts)
    stopped = False
    while not stopped:
        block = ids[at : at + next(sizes, 1)]
        at += len(block)
        text, kept = "", []
        for token in block:
            piece, stopped = stream.push(token, True)
            text, kept = text + piece, [*kept, token]
            if stopped:
                break
        reason = "stop" if stopped else "length" if at >= len(ids) else None
        if reason == "length":
            text, stopped = text + stream.finish(), True
        noted = tuple(Logprob(token, -1.0, ((token, -1.0),)) for token in kept)
        stats = RequestStats(1, 0, at, 0, 0.0, 0.0, 0.0, DraftStats()) if reason else None
        found.append(Event("0", tuple(kept), text, noted, reason, stats=stats))
    return found


def reply(tokenizer: Tokenizer, kind: type[Reply], **asked: Any) -> Reply:
    request = Request("0", (5,), SamplingParams(), 100, 0)
    if kind is ChatReply:
        given: Any = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **asked})
    else:
        given = CompletionRequest.model_validate({"prompt": "x", **asked})
    return kind(given, [[request]], "m", tokenizer)  # type: ignore[call-arg]


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(1, 7), max_size=12),
    gathered=st.lists(st.integers(1, 4), max_size=12),
    broken=st.lists(st.integers(0, 258), max_size=6),
    stop=st.lists(st.sampled_from(["th", "ing", "漢", "e t", "😀é"]), max_size=2),
)
@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_parts_add_up_to_the_whole(
    tokenizer: Tokenizer, kind: type[Reply], text: str, cuts: list[int], gathered: list[int], broken: list[int], stop: list[str]
) -> None:
    """gathered: how many steps' events come to one part. broken: tokens that may be no text."""
    ids = tokenizer.encode(text)[:20] + broken + tokenizer.encode(text)[20:]
    if not ids:
        return
    one_by_one = events(tokenizer, ids, [], tuple(stop))
    expected = "".join(event.text for event in one_by_one)
    arrived = events(tokenizer, ids, cuts, tuple(stop))
    tokens = [token for event in arrived for token in event.tokens]
    if not stop:
        assert expected == Detokenizer(tokenizer).push(ids) + _rest(tokenizer, ids)

    streamed, whole = reply(tokenizer, kind, return_token_ids=True, stream=True), reply(tokenizer, kind)
    pieces: dict[str, Piece] = {}
    got, got_ids, reasons, roles = "", [], [], 0
    sizes, at = iter(gathered), 0
    while at < len(arrived):
        part = arrived[at : at + next(sizes, 1)]
        at += len(part)
        for name, piece in whole.take(part).items():
            pieces.setdefault(name, Piece()).add(piece)
        for chunk in streamed.chunks(streamed.take(part)):
            (choice,) = chunk["choices"]
            got += choice["delta"].get("content", "") if kind is ChatReply else choice["text"]
            roles += "role" in choice.get("delta", {})
            got_ids += choice["token_ids"]
            reasons.append(choice["finish_reason"])
    (choice,) = whole.whole(pieces)["choices"]
    assert got == expected == (choice["message"]["content"] if kind is ChatReply else choice["text"])
    assert got_ids == tokens and roles == (1 if kind is ChatReply else 0)
    assert reasons[-1] == choice["finish_reason"] and not any(reasons[:-1])
    assert streamed.usage() == whole.usage() and whole.usage()["completion_tokens"] == len(tokens)


def _rest(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids)
    return detokenizer.finish()


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    ids = [5, 6, tokenizer.id_of(SPECIAL[1]) or 0, 7]
    found = events(tokenizer, ids, [2, 2], ())
    assert "".join(event.text for event in found) == tokenizer.decode([5, 6, 7])


def test_the_description_names_every_field_and_route() -> None:
    document = openapi.document(keys=True)
    schemas = document["components"]["schemas"]
    for model in (ChatRequest, CompletionRequest):
        described = schemas[model.__name__]
        assert set(described["properties"]) == set(model.model_fields) and described["additionalProperties"] is False
    sampled = schemas["ChatRequest"]["properties"]["n"]["anyOf"][0]
    assert sampled == {"type": "integer", "minimum": 1, "maximum": 1024}
    assert {"401", "429"} <= set(document["paths"]["/v1/chat/completions"]["post"]["responses"])


def test_the_page_names_every_field_option_and_route() -> None:
    page = (Path(__file__).parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *Metrics.__annotations__}
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServerSettings)}
    options -= {"--api-keys", "--served-model-names"}
    routes = {path.removesuffix("/{model}") for path in openapi.ROUTES}
    named = fields | options | {"--api-key-file", "--served-model-name"}
    assert not [name for name in named if f"`{name}`" not in page] and not [path for path in routes if path not in page]
