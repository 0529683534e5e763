"""What tokenizer_config.json says beyond tokenizer.json, against transformers; added tokens as literal text; stop strings that
name special tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from forerun.engine.text import TextStream
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.types import LoadError, SettingError
from tests.test_files import HOSTILE, works_or_names
from tests.tiny import SPECIAL, TEMPLATE, VOCAB, tiny_tokenizer

ASK = [{"role": "user", "content": "hi"}]


def folder_of(folder: Path, **settings: Any) -> Path:
    """The tiny tokenizer with other keys of tokenizer_config.json; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return folder


def added(*tokens: str, special: bool = False, first: int = VOCAB, **flags: Any) -> dict[str, Any]:
    """added_tokens_decoder with these tokens from this id on."""
    return {str(first + i): {"content": token, "special": special, **flags} for i, token in enumerate(tokens)}


def theirs(folder: Path, **given: Any) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder, **given)


# ---- added tokens

WORDS = ["<think>", "</think>", "<|tool|>", "Ġfoo", "café", "«end»", "two words", "naïve¬", "<x>", "▁y"]
FRAGMENTS = [*WORDS, *SPECIAL, " ", "  ", "\n", "the thing", "caf", "foo", "é", "阿", "🙂", "x", " Ġ", "¬", "<", "<thin"]


def test_added_tokens_as_transformers_has_them(tmp_path: Path) -> None:
    """Tokens in tokenizer.json, in tokenizer_config.json or in both, with any flags; also new flags for special ones."""
    draw = random.Random(0)
    for trial in range(25):
        folder = folder_of(tmp_path / str(trial))
        in_json, in_config = draw.sample(WORDS, 3), draw.sample(WORDS, 4)

        def flags() -> dict[str, bool]:
            return {name: draw.random() < 0.4 for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}

        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        inner.add_tokens([tokenizers.AddedToken(token, **flags()) for token in in_json])
        inner.save(str(folder / "tokenizer.json"))
        new = [token for token in in_config if token not in in_json]
        decoder = added(*in_json) if draw.random() < 0.5 else {}
        decoder |= added(*new, first=VOCAB + len(in_json)) | ({"2": {"content": SPECIAL[2]}} if draw.random() < 0.5 else {})
        decoder = {token: {"content": entry["content"]} | flags() for token, entry in decoder.items()}
        settings = {"eos_token": draw.choice(["<|im_end|>", "er", None]), "pad_token": draw.choice([in_json[0], None])}
        folder_of(folder / "config", added_tokens_decoder=decoder, extra_special_tokens=[in_json[1]], **settings)
        (folder / "tokenizer_config.json").write_text((folder / "config" / "tokenizer_config.json").read_text())
        ours, reference = Tokenizer(folder), theirs(folder)
        assert {i for i, t in reference.added_tokens_decoder.items() if t.special} == ours.special_ids
        assert ours.size == len(reference) and ours.inner.get_vocab() == reference.get_vocab()
        for _ in range(12):
            text = "".join(draw.choices(FRAGMENTS, k=8))
            assert ours.encode(text) == reference.encode(text, add_special_tokens=False), (text, decoder)


def test_a_token_that_only_tokenizer_config_has(tmp_path: Path) -> None:
    decoder = added("<think>") | added("<|end|>", first=VOCAB + 1, special=True)
    tokenizer = Tokenizer(folder_of(tmp_path, added_tokens_decoder=decoder))
    ids = tokenizer.encode("<think>the<|end|>")
    assert ids[0] == VOCAB and ids[-1] == VOCAB + 1 and tokenizer.size == VOCAB + 2
    assert tokenizer.decode(ids) == "<think>the" and tokenizer.decode(ids, skip_special_tokens=False) == "<think>the<|end|>"


def test_an_id_that_cannot_be_had_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder = added("<think>") | added("<far>", first=VOCAB + 9) | {"7": {"content": "<|im_end|>"}}
    tokenizer = Tokenizer(folder_of(tmp_path, added_tokens_decoder=decoder))
    assert tokenizer.id_of("<think>") == VOCAB and tokenizer.id_of("<far>") is None and tokenizer.id_of("<|im_end|>") == 2
    assert [r.args for r in caplog.records] == [("<|im_end|>", 7), ("<far>", VOCAB + 9)]


def test_added_tokens_are_literal_text(tmp_path: Path) -> None:
    """Whatever is encoded comes back, in one go and token by token, though the letters of the byte alphabet are in it."""
    tokenizer = Tokenizer(folder_of(tmp_path, added_tokens_decoder=added(*WORDS)))
    draw = random.Random(1)
    for _ in range(300):
        text = "".join(draw.choices(FRAGMENTS, k=6))
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for i, word in enumerate(WORDS):
        assert tokenizer.token_bytes(VOCAB + i) == word.encode() and tokenizer.token_text(VOCAB + i) == word


def test_the_bytes_stay_bytes_though_a_file_lists_them_as_added(tmp_path: Path) -> None:
    """An added "é" has the id of the byte 0xE9, which other characters need; so has " the" the id that text is made into."""
    both = {str(token): {"content": content} for content, token in (("é", 168), ("Ġthe", 268))}
    tokenizer, plain = Tokenizer(folder_of(tmp_path / "a", added_tokens_decoder=both)), Tokenizer(folder_of(tmp_path / "b"))
    assert plain.id_of("é") == 168 and plain.id_of("Ġthe") == 268
    for text in ("阿 the thing", " the", "x 鿿"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == plain.encode(text)


# ---- the ends of a text


@pytest.mark.parametrize("front", [None, True, False])
@pytest.mark.parametrize("behind", [None, True, False])
def test_add_bos_token_and_add_eos_token(front: bool | None, behind: bool | None, tmp_path: Path) -> None:
    """Over each post-processor that tokenizer.json may have. transformers takes the two settings as arguments."""
    for number, template in enumerate(("$A", "<|im_start|> $A", "$A <|im_end|>", "<|im_start|> $A <|im_end|>", None)):
        folder = folder_of(tmp_path / str(number), add_bos_token=front, add_eos_token=behind)
        if template is not None:
            inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            special = [(t, i) for i, t in enumerate(SPECIAL)]
            inner.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
            inner.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer(folder)
        for text in ("the thing", "", "<|im_start|>x<|im_end|>"):
            plain = tokenizer.inner.encode(text, add_special_tokens=False).ids
            first = "im_start" in (template or "") if front is None else front
            last = "im_end" in (template or "") if behind is None else behind
            assert tokenizer.encode(text) == [1] * first + plain + [2] * last
            assert tokenizer.encode(text, add_special_tokens=False) == plain
            given = {"add_bos_token": front, "add_eos_token": behind}
            if None not in given.values():
                assert tokenizer.encode(text) == theirs(folder, **given).encode(text)
    with pytest.raises(LoadError, match=r"no bos_token.*tokenizer_config\.json"):
        Tokenizer(folder_of(tmp_path / "none", bos_token=None, add_bos_token=True))


# ---- the end of a turn

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n\\n{% endif %}"
)
ENDS = {
    "chat": (TEMPLATE, "<|endoftext|>", {0, 2}),
    "eos alone": (None, "<|endoftext|>", {0}),
    "an added token": (LLAMA3, "<|endoftext|>", {0, VOCAB}),
    "the same twice": (TEMPLATE, "<|im_end|>", {2}),
    "no eos": (TEMPLATE, None, {2}),
    "neither": (None, None, set()),
    "not in the vocabulary": (None, "</s>", set()),
    "text behind the answer": ("{% for m in messages %}{{ m.content }}\nuser: {% endfor %}", "<|im_end|>", {2}),
    "nothing behind it": ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None, set()),
    "behind white space": ("{% for m in messages %}{{ m.content }} \n<|im_end|>\n{% endfor %}", None, {2}),
    "no answers": ("{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}<|im_end|>", None, set()),
    "broken": ("{% for %}", "<|im_end|>", {2}),
    "fails": ("{{ 1 / 0 }}", "<|im_end|>", {2}),
    "its own answer": ("{% for m in messages %}no{% endfor %}<|im_end|>", None, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_turn(name: str, tmp_path: Path) -> None:
    template, eos, expected = ENDS[name]
    folder = folder_of(tmp_path, chat_template=template, eos_token=eos, added_tokens_decoder=added("<|eot|>", special=True))
    assert set(Tokenizer(folder).end_ids) == expected


# ---- what templates read


def test_template_variables(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if not (enable_thinking is defined and enable_thinking) %}!{% endif %}"
        "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    )
    tokenizer = Tokenizer(folder_of(tmp_path, chat_template=template))
    assert tokenizer.render_chat(ASK) == "hi!"
    assert tokenizer.render_chat(ASK, variables={"enable_thinking": True}) == "hi"
    assert tokenizer.render_chat(ASK, variables={"documents": [{"title": "a"}]}) == "hi![a]"
    for variables, says in (
        ({"enable_thinkin": True}, "does not read it; it reads documents, enable_thinking"),
        ({"tools": []}, "an argument of its own"), ({"messages": []}, "an argument of its own"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=says):
            tokenizer.render_chat(ASK, variables=variables)
    with pytest.raises(SettingError, match="does not read them"):
        tokenizer.render_chat(ASK, tools=[{"name": "look_up"}])


CONTINUED = ["The", "The ", " The\n", "", "a<|im_end|>b", [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]]


@pytest.mark.parametrize("content", CONTINUED)
@pytest.mark.parametrize("trims", [False, True])
def test_going_on_with_the_last_message(content: Any, trims: bool, tmp_path: Path) -> None:
    """As transformers does it."""
    text = "(m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join)"
    template = TEMPLATE.replace("m['content']", f"({text} | trim)" if trims else text)
    folder = folder_of(tmp_path, chat_template=template)
    messages = [*ASK, {"role": "assistant", "content": content}]
    expected = theirs(folder).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert Tokenizer(folder).render_chat(messages, continue_final_message=True) == expected
    assert messages[1]["content"] == content and "CONTINUE" not in str(messages)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_nothing_to_go_on_with(messages: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no text to continue"):
        Tokenizer(folder_of(tmp_path)).render_chat(messages, continue_final_message=True)


# ---- wrong values


def test_any_value_of_tokenizer_config_json(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text())
    entries = [{"7": value} for value in HOSTILE] + [added("<a>", **{key: value}) for value in HOSTILE for key in ("content",)]
    entries += [added("<a>", **{key: value}) for value in HOSTILE for key in ("lstrip", "special", "normalized")]
    entries += [{"x": {"content": "a"}}, {"-1": {"content": "a"}}]
    cases = [{"added_tokens_decoder": value} for value in [*HOSTILE, *entries]]
    cases += [{key: value} for key in ("bos_token", "eos_token", "chat_template", "add_bos_token") for value in HOSTILE]
    cases += [{key: value} for key in ("additional_special_tokens", "image_token", "tokenizer_class") for value in HOSTILE]
    cases += [{"chat_template": [entry]} for entry in (*HOSTILE, {"name": "x"}, {"name": 1, "template": "a"})]
    worked = 0
    for case in cases:
        path.write_text(json.dumps(given | case))
        worked += works_or_names("tokenizer_config.json", lambda: Tokenizer(folder).end_ids)
    assert len(cases) / 5 < worked < len(cases) / 2


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a JSON value: the keys and indexes that lead to it; of long lists and objects the first few."""
    yield path
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, part in inside[:12] if len(inside) < 20 else inside[:2]:
        yield from places(part, (*path, key))


def test_any_value_of_tokenizer_json(tmp_path: Path) -> None:
    """Refused, or a tokenizer that works."""
    folder = folder_of(tmp_path)
    path = folder / "tokenizer.json"
    given = json.loads(path.read_text())

    def use() -> None:
        tokenizer = Tokenizer(folder)
        tokenizer.decode(tokenizer.encode("the thing é<|im_end|>"))

    worked, tried = 0, 0
    for *before, last in (place for place in places(given) if place):
        inside = given
        for key in before:
            inside = inside[key]
        kept = inside[last]
        for value in HOSTILE:
            inside[last] = value
            path.write_text(json.dumps(given))
            worked += works_or_names("tokenizer.json", use)
            tried += 1
        inside[last] = kept
    assert tried > 1000 and 50 < worked < tried / 2


# ---- stop strings that name special tokens

PIECES = ["a", "b", "<", "|", "im_end|>", "é", "\n", *SPECIAL]
STOPS = ["<|im_end|>", "a<|im_end|>", "<|im_end|>\n", "b<|im_end|><|im_start|>a", "ab", "<|im_start|><|im_start|>", "é", "<|im"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_may_name_special_tokens(include: bool, tmp_path: Path) -> None:
    """Against a search of the whole text, in which special tokens that a stop string names are shown and others are not. A
    special token that is spelled in ordinary tokens is text like any other."""
    tokenizer, draw = Tokenizer(folder_of(tmp_path)), random.Random(2)
    stopped_by_special = 0
    for _ in range(1500):
        ids = [i for piece in draw.choices(PIECES, k=draw.randrange(1, 9)) for i in tokenizer.encode(piece)]
        stops = tuple(draw.sample(STOPS, draw.randrange(1, 4)))
        stream, text, end = TextStream(Detokenizer(tokenizer), stops, include), "", len(ids)
        for i, token in enumerate(ids):
            piece, stopped = stream.push(token, True)
            text += piece
            if stopped:
                end = i + 1
                break
        else:
            text += stream.finish()
        assert (text, end) == searched(tokenizer, ids, stops, include), (ids, stops)
        stopped_by_special += end < len(ids) and ids[end - 1] < len(SPECIAL)
    assert stopped_by_special > 100


def test_the_stop_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    """The engine ends at the token already; its text is cut all the same, and shown if that is asked for."""
    tokenizer = Tokenizer(folder_of(tmp_path))
    for stop, include, expected in (
        ("b<|im_end|>", False, "a"), ("b<|im_end|>", True, "ab<|im_end|>"), ("<|im_end|>", True, "ab<|im_end|>"),
        ("<|im_end|>", False, "ab"), ("b<|im_start|>", False, "ab"), ("bc", True, "ab"),
    ):  # fmt: skip
        stream = TextStream(Detokenizer(tokenizer), (stop,), include)
        text = "".join(stream.push(i, True)[0] for i in tokenizer.encode("ab"))
        assert text + stream.finish(2) == expected


def searched(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], include: bool) -> tuple[str, int]:
    """The text and the number of tokens until the first stop string, the plain way: look at everything after each token."""
    named = [token for token, text in enumerate(SPECIAL) if any(text in stop for stop in stops)]
    for end in range(1, len(ids) + 1):
        shown: list[str] = []  # bytes, and each special token as one
        for token in ids[:end]:
            if token in named:
                shown.append(SPECIAL[token])
            elif token >= len(SPECIAL):
                shown += tokenizer.token_bytes(token).decode("latin-1")
        found = [
            (at, len(form))
            for stop in stops for form in forms(stop) for at in range(len(shown)) if shown[at : at + len(form)] == form
        ]  # fmt: skip
        if found:
            at, size = min(found)
            text = [c for c in shown[:at] if c not in SPECIAL] + (shown[at : at + size] if include else [])
            return "".join(text).encode("latin-1").decode("utf-8"), end
    return tokenizer.decode(ids), len(ids)


def forms(stop: str) -> list[list[str]]:
    """A stop string as bytes, with each special token as one, and with them spelled out."""
    latin = stop.encode().decode("latin-1")
    marked: list[str] = []
    rest = latin
    while rest:
        token = next((t for t in SPECIAL if rest.startswith(t)), rest[0])
        marked.append(token)
        rest = rest[len(token) :]
    return [marked, list(latin)]
