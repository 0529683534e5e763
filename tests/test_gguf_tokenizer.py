"""Tokenizers of GGUF files: their ids are those of the published pre-tokenizers and of SentencePiece. Real vocabularies were
compared by hand; the vocabularies here are trained in the test, and written and read as GGUF files."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from forerun.llm import LLM
from forerun.models.gguf_tokenizer import SPLITS, end_ids, tokenizer_files
from forerun.models.tokenizer import Detokenizer, Tokenizer
from forerun.types import SamplingParams, SettingError
from tests.tiny import tiny_model

N, C, U, X, B, UNK = (
    TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE, TokenType.UNKNOWN,
)  # fmt: skip

# What texts are made of. Each line shows something that at least one of the vocabularies treats in its own way.
PARTS = r"""
the The THE don't I'LL we've naïve café São Straße αβγ ПрИвЕт שלום مرحبا नमस्ते ไทย 你好 世界 カタカナ ひらがな 한국어
ǅ ƻ ǀ ªº Ꭰ ꭰ ﬁ K Ω 𝒳 𐐀 𞤀 ᾼι ΐ fooBar FooBAR HTTPServer foo_bar x1y2 ▁ Ġ
! # $ ( ) * + , - . / : ; < = > ? @ [ \ ] ^ _ ` { | } ~ ... — “ ” ‘ ’ … 。 ！ ？ （ ） · € ° × → ∑ ~~~ *** // /* 's 'S
0 1 12 123 1234 12345 1234567890 3.14 1,000 ½ ² ٣ ५ Ⅷ ① １２３ 𝟘
😀 👍🏽 👨‍👩‍👧‍👦 🇺🇸 ❤️ नी ก็ é
"""
ODD = ("\0", "\x1b", "\ud7ff", "\ue000", "\U0010ffff", "\u0301", "\u0903", "\u0800", "\u4e00", "\u9fa6", "\U00011de0", "\u212a")
SPACES = (" ", "  ", "   ", " " * 8, "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\xa0", "\u3000", "\u200b", "\x0b")
POOLS = [*(line.split() for line in PARTS.strip().split("\n")), ODD, SPACES, SPACES]


def texts(count: int, seed: int = 0, share: float = 0.1) -> list[str]:
    """Random texts of up to 40 parts. share: how many of them are of characters from all over Unicode instead."""
    draw = random.Random(seed)
    found = ["", " ", "  ", "a", " a", "a ", "\n", " " * 40 + "a"]
    for _ in range(count):
        length = draw.choice((1, 2, 3, 5, 8, 13, 40))
        anywhere = [draw.choice((draw.randrange(32, 0xD800), draw.randrange(0x10000, 0x20000))) for _ in range(length)]
        parts = [draw.choice(draw.choice(POOLS)) for _ in range(length)]
        found.append("".join(parts if draw.random() >= share else map(chr, anywhere)))
    return found


def written(
    tmp_path: Path, kind: str, tokens: list[str], types: Sequence[int] | None = None, *, pre: str | None = None,
    merges: list[str] | None = None, scores: list[float] | None = None, ids: dict[str, int] | None = None,
    put: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> dict[str, Any]:
    """The metadata of a vocabulary, through a file. ids: of named tokens (bos, eos ..); put: adds more."""
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, token in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    put(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "vocabulary.gguf").fields.items()}


def made(meta: dict[str, Any], folder: Path) -> Tokenizer:
    for name, contents in tokenizer_files(meta).items():
        (folder / name).write_text(contents, encoding="utf-8")
    return Tokenizer(folder)


def steps_of(tokenizer: Tokenizer) -> dict[str, Any]:
    return dict(json.loads(tokenizer.inner.to_str()))


# ---- byte-level vocabularies

# pre_tokenizer of the models' tokenizer.json, without the last step (ByteLevel). A text is the regex of a Split.
LETTERS_WITH_CASE = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ\u10a0-\u10c5Ꭰ-Ᏽᏸ-ᏽ\u1c90-\u1cba\u1cbd-\u1cbfᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUBLISHED: dict[str, list[Any]] = {
    "openai-community/gpt2": [GPT2],
    "HuggingFaceTB/SmolLM2-135M": [pre_tokenizers.Digits(True), GPT2],
    "meta-llama/Meta-Llama-3-8B": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "Qwen/Qwen3-8B": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "Qwen/Qwen3.5-4B": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ],
    "ByteDance-Seed/Seed-Coder-8B-Base": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "mistralai/Mistral-Nemo-Base-2407": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}"
        r"\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "openai/gpt-oss-20b": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}"
        r"\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}"
        r"\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-ai/deepseek-llm-7b-base": [
        "[\r\n]", LETTERS_WITH_CASE, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥\u0800-一가-\ud7ff]+",
        pre_tokenizers.Digits(True),
    ],
    "deepseek-ai/deepseek-coder-6.7b-base": [
        "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", pre_tokenizers.Digits(True),
    ],
    "deepseek-ai/DeepSeek-V3": [
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+"
        "[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
    "openbmb/MiniCPM5-1B": [
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}  # fmt: skip
MODELS = {
    "gpt-2": "openai-community/gpt2", "smollm": "HuggingFaceTB/SmolLM2-135M", "llama-bpe": "meta-llama/Meta-Llama-3-8B",
    "dbrx": "meta-llama/Meta-Llama-3-8B", "qwen2": "Qwen/Qwen3-8B", "qwen35": "Qwen/Qwen3.5-4B",
    "seed-coder": "ByteDance-Seed/Seed-Coder-8B-Base", "tekken": "mistralai/Mistral-Nemo-Base-2407",
    "gpt-4o": "openai/gpt-oss-20b", "deepseek-llm": "deepseek-ai/deepseek-llm-7b-base",
    "deepseek-coder": "deepseek-ai/deepseek-coder-6.7b-base", "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "minicpm5": "openbmb/MiniCPM5-1B",
}  # fmt: skip
WHOLE = {"llama-bpe", "tekken", "minicpm5"}  # ignore_merges is true in tokenizer.json
NFC = {"qwen2", "qwen35"}
WITH_BOS = {"llama-bpe", "tekken"}


def published(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer with the model's own steps, trained on texts like those that are compared."""
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in WHOLE))
    inner.normalizer = normalizers.NFC() if pre in NFC else None
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(step), "isolated") if isinstance(step, str) else step
        for step in PUBLISHED[MODELS[pre]]
    ]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False, initial_alphabet=alphabet, special_tokens=special)
    inner.train_from_iterator(texts(1500, seed=1), trainer)
    return inner


@pytest.mark.parametrize("pre", MODELS)
def test_ids_are_those_of_the_published_tokenizer(pre: str, tmp_path: Path) -> None:
    theirs = published(pre)
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [C if token in ("<s>", "</s>") else N for token in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    ours = made(written(tmp_path, "gpt2", tokens, types, pre=pre, merges=merges, ids={"bos": 0, "eos": 1}), tmp_path)
    longer = 0
    for text in texts(2000):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        longer += any(len(tokens[i]) > 2 for i in ids)
        if pre not in NFC:
            assert ours.decode(ids) == text
    assert longer > 1000
    assert ours.encode("x")[:-1] == ([0] if pre in WITH_BOS else [])
    assert ours.encode("a</s>b", False) == [*ours.encode("a", False), 1, *ours.encode("b", False)]


def test_names_that_share_a_pattern() -> None:
    def names(pre: str) -> set[str]:
        return {name for name, split in SPLITS.items() if split == SPLITS[pre]}

    assert set(SPLITS) == {"default"}.union(*(names(pre) for pre in MODELS))
    assert names("llama-bpe") == {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"}
    assert {"qwen2", "deepseek-r1-qwen"} <= names("qwen2")
    assert {"smollm", "starcoder", "refact"} <= names("smollm")


def test_how_a_file_without_a_pattern_splits(tmp_path: Path) -> None:
    """llama.cpp's own way, for files that were made before there were names of patterns."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    ours = made(written(tmp_path, "gpt2", [*sorted(letters), "ab"], merges=["a b"]), tmp_path)
    pieces = [piece for piece, _ in ours.inner.pre_tokenizer.pre_tokenize_str("I'M don't 12345\n\n\n x")]
    assert " ".join(pieces) == "I ' M Ġdon ' t Ġ 123 45 ĊĊĊ Ġx"


# ---- SentencePiece vocabularies

Piece = tuple[str, int, float]  # text, type, score


def trained(**settings: Any) -> Any:
    """A SentencePiece model of 1000 pieces that keeps all spaces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    lines = [line for text in texts(1500, seed=1, share=0) for line in text.replace("\0", "").split("\n") if line]
    given = {
        "vocab_size": 1000, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "character_coverage": 0.995, "allow_whitespace_only_pieces": True, "minloglevel": 2,
        "hard_vocab_limit": False, "num_threads": 1,
    } | settings  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **given)
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def pieces_of(model: Any) -> list[Piece]:
    def kind(i: int) -> int:
        for asked, is_so in ((UNK, model.is_unknown), (C, model.is_control), (X, model.is_unused), (B, model.is_byte)):
            if is_so(i):
                return asked
        return N

    return [(model.id_to_piece(i), kind(i), model.get_score(i)) for i in range(model.get_piece_size())]


def sentence_piece(tmp_path: Path, pieces: list[Piece], **given: Any) -> dict[str, Any]:
    texts, types, scores = (list(column) for column in zip(*pieces, strict=True))
    return written(tmp_path, "llama", texts, types, scores=scores, **{"ids": {"bos": 1, "eos": 2, "unknown": 0}} | given)


@pytest.mark.parametrize(
    ("settings", "space"),
    [
        ({}, None),
        ({"split_digits": True, "seed_sentencepiece_size": 1000}, True),
        ({"add_dummy_prefix": False}, False),
        ({"byte_fallback": False}, None),
        ({"character_coverage": 0.98, "split_by_whitespace": False}, None),
    ],
)
def test_ids_are_those_of_sentencepiece(settings: dict[str, Any], space: bool | None, tmp_path: Path) -> None:
    theirs = trained(**settings)
    put = (lambda writer: None) if space is None else (lambda writer: writer.add_add_space_prefix(space))
    ours = made(sentence_piece(tmp_path, pieces_of(theirs), put=put), tmp_path)
    assert ours.encode("x")[0] == 1
    longer = 0
    for text in texts(3000):
        if any(name in text for name in ("<s>", "</s>", "<unk>")):
            continue
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        longer += any(len(theirs.id_to_piece(i)) > 1 and not theirs.is_byte(i) for i in ids)
        if 0 not in ids and "▁" not in text:
            assert ours.decode(ids) == text
            stream = Detokenizer(ours)
            assert "".join(stream.push([i]) for i in ids) + stream.finish() == " " * (space is not False and text != "") + text
    assert longer > 1500


def byte_pieces() -> list[Piece]:
    return [("<unk>", UNK, 0.0), ("<s>", C, 0.0), ("</s>", C, 0.0), *((f"<0x{b:02X}>", B, 0.0) for b in range(256))]


def small(tmp_path: Path, *more: Piece, **given: Any) -> dict[str, Any]:
    """A vocabulary of bytes, special tokens, a few letters and these pieces."""
    letters: list[Piece] = [(letter, N, -1e9) for letter in "▁abc"]
    return sentence_piece(tmp_path, [*byte_pieces(), *letters, *more], **given)


def shown(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer.inner.id_to_token(i)) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_the_highest_score_is_merged_first_and_pieces_that_overlap_from_the_left(tmp_path: Path) -> None:
    ours = made(small(tmp_path, ("ab", N, -2.0), ("bc", N, -1.0), ("▁a", N, -3.0), ("aa", N, -4.0), ("aaa", N, -5.0)), tmp_path)
    assert shown(ours, "abc") == ["▁a", "bc"]
    assert shown(ours, "abab") == ["▁", "ab", "ab"]
    assert shown(ours, "baaaaaa") == ["▁", "b", "aa", "aa", "aa"]
    assert shown(ours, "baaa") == ["▁", "b", "aaa"]
    assert shown(ours, "aé") == ["▁a", "<0xC3>", "<0xA9>"]


def test_special_tokens_in_a_text(tmp_path: Path) -> None:
    """As Llama 2: the text behind a special token starts with a space too. An added token may have spaces in its text."""
    ours = made(small(tmp_path, ("<|im_end|>", U, -1000.0), ("  x", U, -1000.0)), tmp_path)
    assert shown(ours, "a<s>b</s> c") == ["▁", "a", "<s>", "▁", "b", "</s>", "▁", "▁", "c"]
    assert shown(ours, "a<|im_end|>b  xc") == ["▁", "a", "<|im_end|>", "▁", "b", "  x", "▁", "c"]
    assert ours.decode(ours.encode("a  xb")) == "a  x b"
    assert ours.special_ids == {0, 1, 2, ours.id_of("<|im_end|>")}


SPACE_OF_ITS_OWN = "{{ bos_token }}{% for m in messages %}{{ ' [INST] ' + m.content }}{% endfor %}"
NO_SPACE = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endfor %}"


@pytest.mark.parametrize(("template", "control", "first"), [
    (NO_SPACE, False, False), (SPACE_OF_ITS_OWN, False, True), (SPACE_OF_ITS_OWN.replace("'", '"'), False, True),
    (NO_SPACE, True, True), (None, True, True), (None, False, False),
])  # fmt: skip
def test_where_a_space_is_added(template: str | None, control: bool, first: bool, tmp_path: Path) -> None:
    """Mistral's [INST] gets one space before it, from the template or from the tokenizer; where it is a token, none."""
    inst = ("[INST]", C if control else N, 0.0)
    put = (lambda writer: None) if template is None else (lambda writer: writer.add_chat_template(template))
    ours = made(small(tmp_path, inst, put=put), tmp_path)
    assert shown(ours, "a<s> b") == ["▁", "a", "<s>", *["▁"] * (not first), "▁", "b"]
    assert shown(ours, "b") == ["▁", "b"]
    if template and not control:
        text = ours.render_chat([{"role": "user", "content": "b"}])
        assert shown(ours, text)[:3] == ["<s>", "▁", "<0x5B>"]


@pytest.mark.parametrize(("first", "space"), [(True, True), (False, True), (False, False)])
def test_a_text_that_continues_another(first: bool, space: bool, tmp_path: Path) -> None:
    """It gets no space before it. So a bad word is known behind a space and without one."""
    folder = tiny_model(tmp_path, vocab=300)
    pieces = [("ab", N, -2.0), ("▁ab", N, -3.0), ("[INST]", C if first else N, 0.0)]
    ours = made(small(tmp_path, *pieces, put=lambda writer: writer.add_add_space_prefix(space)), tmp_path)
    ab, spaced, lone = (ours.id_of(text) for text in ("ab", "▁ab", "▁"))
    assert ours.encode("ab", False) == [spaced if space else ab]
    assert ours.encode("ab", False, continues=True) == [ab]
    assert ours.encode(" ab", False, continues=True) == [spaced]
    assert ours.encode("  ab<s>ab", False, continues=True) == [lone, spaced, 1, ab]
    request = LLM(folder, kv_cache_tokens=64).prepare("a", SamplingParams(bad_words=("ab",)))
    assert set(request.banned) == {(ab,), (spaced,)}


def test_merges_of_the_file_take_precedence(tmp_path: Path) -> None:
    """Conversions from a tokenizer.json have merges, and no scores that mean anything."""
    pieces = [("ab", N, -1000.0), ("bc", N, -1000.0), ("abc", N, -1000.0)]
    equal = [(text, kind, -1000.0) for text, kind, _ in [*byte_pieces(), *((letter, N, 0) for letter in "▁abc")]]
    meta = sentence_piece(tmp_path, [*equal, *pieces], merges=["b c", "a bc"])
    assert shown(made(meta, tmp_path), "abc") == ["▁", "abc"]
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(SettingError, match=r"tokenizer.ggml.scores='all equal'"):
        tokenizer_files(meta)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"model='t5': supported in a .gguf are gpt2 .* and llama"),
        ({"tokenizer.ggml.model": None}, "model=None: supported"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces=True: supported is false"),
        ({"tokenizer.ggml.scores": None}, "scores='NoneType': must be a list"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores=1: there are 263 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type=1: there are 263 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 263}, "tokens='a': it is the text of the tokens 0 and 1"),
        ({"tokenizer.ggml.merges": ["ab", "a b"]}, "merges=.* a merge is two texts"),
        ({"tokenizer.ggml.merges": ["a b"]}, "merges='1 of them': they do not fit the tokens"),
        ({"tokenizer.ggml.unknown_token_id": 999}, "unknown_token_id=999: none of the 263 tokens"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "add_bos_token=True: the file has no"),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True}, "add_eos_token=True: the file has no"),
        ({"tokenizer.ggml.add_space_prefix": 1}, "add_space_prefix=1: must be true or false"),
        ({"tokenizer.chat_template": 5}, "chat_template=5: must be a template"),
        ({"tokenizer.chat_template.rag": 5}, "chat_template.rag=5: must be a template"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    meta = small(tmp_path)
    tokenizer_files(meta)
    meta = {key: value for key, value in (meta | change).items() if value is not None}
    with pytest.raises(SettingError, match=said):
        tokenizer_files(meta)


def test_characters_without_a_token_are_refused(tmp_path: Path) -> None:
    pieces: list[Piece] = [("▁", N, -1.0), ("a", N, -2.0), ("b", N, -3.0)]
    with pytest.raises(SettingError, match=r"unknown_token_id=None.*nor a token for each byte"):
        tokenizer_files(sentence_piece(tmp_path, pieces, ids={}))
    ours = made(sentence_piece(tmp_path, [("<unk>", UNK, 0.0), *pieces], ids={}), tmp_path)
    assert shown(ours, "aéèb") == ["▁", "a", "<unk>", "b"]


def test_an_unknown_pattern_is_named(tmp_path: Path) -> None:
    meta = written(tmp_path, "gpt2", ["a", "b"], pre="kimi-k2", merges=["a b"])
    with pytest.raises(SettingError, match=r"pre='kimi-k2': supported are default, gpt-2, .*tekken"):
        tokenizer_files(meta)


# ---- ends, templates, tokens around a text


def ends(tmp_path: Path, tokens: dict[str, int], **ids: int) -> list[str]:
    meta = written(tmp_path, "gpt2", [*tokens], [*tokens.values()], pre="qwen2", merges=["a b"], ids=ids)
    return [[*tokens][i] for i in end_ids(meta)]


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    text = {"a": N, "b": N, "ab": N}
    llama3 = {"<|begin_of_text|>": C, "<|end_of_text|>": C, "<|eot_id|>": C, "<|eom_id|>": C, "<|start_header_id|>": C}
    assert ends(tmp_path, text | llama3, eos=4) == ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
    assert ends(tmp_path, text | llama3, eos=5, eot=3) == ["<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>"]
    qwen = {"</s>": N, "<|endoftext|>": C, "<|im_start|>": C, "<|im_end|>": C}
    assert ends(tmp_path, text | qwen, eos=6) == ["<|im_end|>", "<|endoftext|>"], "a piece of text ends nothing"
    unmarked = {"<|im_end|>": N, "<|end|>": U, "<end_of_turn>": U}
    assert ends(tmp_path, text | unmarked) == [*unmarked]
    harmony = {"<|end|>": C, "<|return|>": C, "<|call|>": C}
    assert ends(tmp_path, text | harmony, eos=4) == ["<|return|>", "<|call|>"], "a channel's end is not the answer's"
    assert ends(tmp_path, text | {"<|im_end|>": X}) == []


def test_an_end_that_is_not_marked_is_special_all_the_same(tmp_path: Path) -> None:
    tokens = {"a": N, "b": N, "ab": N, "<|im_end|>": N, "</s>": N}
    meta = written(tmp_path, "gpt2", [*tokens], [*tokens.values()], pre="qwen2", merges=["a b"])
    ours = made(meta, tmp_path)
    assert ours.encode("ab<|im_end|>") == [2, 3] and ours.special_ids == {3}
    assert ours.decode([2, 3, 4]) == "ab</s>"


def test_templates_by_name(tmp_path: Path) -> None:
    tokens, messages = ["a", "b", "ab"], [{"role": "user", "content": "x"}]

    def tokenizer(put: Callable[[gguf.GGUFWriter], object]) -> Tokenizer:
        return made(written(tmp_path, "gpt2", tokens, merges=["a b"], put=put), tmp_path)

    assert not tokenizer(lambda writer: None).has_chat_template
    assert tokenizer(lambda writer: writer.add_chat_template("plain")).render_chat(messages) == "plain"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    listed = tokenizer(lambda writer: writer.add_chat_template(several))
    key = "tokenizer.chat_template"
    unlisted = tokenizer(lambda w: [w.add_string(key, "plain"), w.add_string(f"{key}.tool_use", "{{ tools[0].name }}")])
    for found in (listed, unlisted):
        assert found.render_chat(messages) == "plain"
        assert found.render_chat(messages, tools=[{"name": "look_up"}]) == "look_up"
    alone = tokenizer(lambda writer: writer.add_string(f"{key}.tool_use", "alone"))
    assert alone.render_chat(messages) == "alone"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("bos", "eos"), [(None, None), (False, None), (True, True), (False, True)])
def test_tokens_around_a_text(kind: str, bos: bool | None, eos: bool | None, tmp_path: Path) -> None:
    def put(writer: gguf.GGUFWriter) -> None:
        for given, add in ((bos, writer.add_add_bos_token), (eos, writer.add_add_eos_token)):
            if given is not None:
                add(given)

    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"]
    meta = written(tmp_path, kind, tokens, [UNK, C, C, N, N, N], pre="default", merges=["▁ a"], put=put,
                   ids={"bos": 1, "eos": 2, "unknown": 0})  # fmt: skip
    front = [1] if (kind == "llama" if bos is None else bos) else []
    assert made(meta, tmp_path).encode("a") == [*front, 5 if kind == "llama" else 4, *[2] * bool(eos)]


def test_unused_tokens_are_none(tmp_path: Path) -> None:
    """They pad the vocabulary, and several may have the same text. A token without a text is none either."""
    meta = small(tmp_path, ("[PAD]", X, -1.0), ("[PAD]", X, -1.0), ("", N, -7.0), ("", N, -8.0), ("ab", N, -2.0))
    ours = made(meta, tmp_path)
    assert shown(ours, "ab") == ["▁", "ab"] and ours.size == 268
    assert ours.id_of("[PAD]") is None and ours.decode([263, 264, 265]) == ""
