"""The tokenizer that a GGUF file carries, as the tokenizer.json and tokenizer_config.json of a Hugging Face folder. The keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Two kinds of vocabularies are read. Byte-level BPE ("gpt2") has its merges in the file; tokenizer.ggml.pre names the patterns
that split a text before them. SentencePiece BPE ("llama") has a score for each piece, from which its merges are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from gguf import TokenType
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from forerun.models.files import flag, whole
from forerun.types import SettingError, require

INSTEAD = "give the model's Hugging Face folder"

# Special tokens that end an answer, whatever the keys of the file say. llama.cpp knows them by these texts too.
ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
WITHIN = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})  # beside either of these, <|end|> ends a part of an answer

# The patterns that split a text before the merges. They are those of the models' published tokenizer.json.
DIGITS = r"\p{N}"  # each digit alone
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACE}"
SEED = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACE}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}"
)
DEEPSEEK = (  # V3 and later
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACE,
)  # fmt: skip
ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
CASED = (  # letters that have a case
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", ASIAN, DIGITS)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGITS)


class Split(NamedTuple):
    """How a byte-level vocabulary splits a text. patterns: applied one after the other, each to the pieces of the one before.
    whole: a piece that is a token is not merged. bos: a text starts with the beginning-of-sequence token unless the file says
    otherwise. nfc: normalise the text to NFC first."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


# By the names in tokenizer.ggml.pre. Several names may share a pattern.
SPLITS = {
    name: split
    for names, split in (
        ("default", Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
        ("gpt-2 phi-2 mellum trillion a.x-4.0", Split((GPT2,))),
        ("smollm starcoder refact codeshell minerva-7b mellum2", Split((DIGITS, GPT2))),
        ("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0", Split((LLAMA3,), whole=True, bos=True)),
        ("smaug-bpe dbrx", Split((LLAMA3,))),
        ("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", Split((QWEN2,), nfc=True)),
        ("qwen35", Split((QWEN35,), nfc=True)),
        ("seed-coder", Split((SEED,))),
        ("tekken", Split((TEKKEN,), whole=True, bos=True)),
        ("gpt-4o llama4 kanana2", Split((GPT4O,))),
        ("deepseek-llm", Split(DEEPSEEK_LLM)),
        ("deepseek-coder", Split(DEEPSEEK_CODER)),
        ("deepseek-v3 hunyuan-dense joyai-llm", Split(DEEPSEEK)),
        ("minicpm5", Split((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), whole=True)),
    )
    for name in names.split()
}


class Vocabulary(NamedTuple):
    """The tokens of a file. texts: by id. types: by id, TokenType. ids: by text, without unused ones, which pad the vocabulary
    and are not tokens."""

    texts: list[str]
    types: list[int]
    ids: dict[str, int]

    def of_type(self, *types: TokenType) -> list[str]:
        return [text for text, i in self.ids.items() if self.types[i] in types]


def tokenizer_files(meta: Mapping[str, Any]) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by the names of the files. Raises SettingError for a vocabulary
    that is broken or not supported."""
    key = "tokenizer.ggml.model"
    kind = meta.get(key)
    known = kind in ("gpt2", "llama")
    require(known, key, kind, f"supported in a .gguf are gpt2 (byte-level BPE) and llama (SentencePiece BPE); {INSTEAD}")
    vocabulary = _vocabulary(meta)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = token_id(meta, name)
        if token is not None:
            there = token < len(vocabulary.texts) and vocabulary.texts[token] in vocabulary.ids
            why = f"none of the {len(vocabulary.texts)} tokens has that id"
            require(there, f"tokenizer.ggml.{name}_token_id", token, why)
            settings[key] = vocabulary.texts[token]
    templates = _templates(meta)
    if kind == "llama":
        bos = True
        made = _sentence_piece(meta, vocabulary, settings.get("unk_token"), templates)
    else:
        split = _split(meta)
        bos = split.bos
        made = _byte_level(meta, vocabulary, split)
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in vocabulary.of_type(TokenType.USER_DEFINED)])
    # the tokens that are added before and after a text
    front, behind = _added(meta, settings, "bos", bos), _added(meta, settings, "eos", False)
    if front or behind:
        pieces = [piece for piece in (front, "$A", behind) if piece]
        made.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=[(token, vocabulary.ids[token]) for token in pieces if token != "$A"]
        )
    if templates:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        settings["chat_template"] = templates["default"] if [*templates] == ["default"] else named
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2)}


def token_id(meta: Mapping[str, Any], name: str) -> int | None:
    """The id of a named token, such as bos or eos; None if the file names none. Raises SettingError."""
    key = f"tokenizer.ggml.{name}_token_id"
    return None if meta.get(key) is None else whole(meta, key, least=0)


def end_ids(meta: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, eos first: those that the file names as the end of a text (eos), of a turn (eot) and of a
    message (eom), and the special tokens of ENDS. Raises SettingError."""
    vocabulary = _vocabulary(meta)
    named = [token for name in ("eos", "eot", "eom") if (token := token_id(meta, name)) is not None]
    special = vocabulary.of_type(TokenType.CONTROL)
    found = {text: vocabulary.ids[text] for text in special if text in ENDS}
    if any(both <= found.keys() for both in WITHIN):
        found.pop("<|end|>", None)
    return list(dict.fromkeys([*named, *found.values()]))


def _vocabulary(meta: Mapping[str, Any]) -> Vocabulary:
    texts: list[str] = _listed(meta, "tokenizer.ggml.tokens", str)
    key = "tokenizer.ggml.token_type"
    types: list[int] = _listed(meta, key, int) if key in meta else [TokenType.NORMAL] * len(texts)
    require(len(types) == len(texts), key, len(types), f"there are {len(texts)} tokens")
    ids: dict[str, int] = {}
    for i, text in enumerate(texts):
        # Some converters do not mark them. But a normal </s> is a piece of text: Qwen's vocabulary has it.
        marked = types[i] == TokenType.USER_DEFINED or text.startswith(("<|", "<｜"))
        if text in ENDS and types[i] != TokenType.UNUSED and marked:
            types[i] = TokenType.CONTROL
        if types[i] != TokenType.UNUSED and text:
            why = f"it is the text of the tokens {ids.get(text)} and {i}; fetch the file again"
            require(text not in ids, "tokenizer.ggml.tokens", text, why)
            ids[text] = i
    return Vocabulary(texts, types, ids)


def _split(meta: Mapping[str, Any]) -> Split:
    key = "tokenizer.ggml.pre"
    pre = meta.get(key, "default")
    require(isinstance(pre, str) and pre in SPLITS, key, pre, f"supported are {', '.join(SPLITS)}; {INSTEAD}")
    return SPLITS[pre]


def _byte_level(meta: Mapping[str, Any], vocabulary: Vocabulary, split: Split) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(_bpe(vocabulary, _merges(meta), ignore_merges=split.whole))
    if split.nfc:
        made.normalizer = normalizers.NFC()
    steps = [
        pre_tokenizers.Digits(True) if pattern == DIGITS else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in split.patterns
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(
    meta: Mapping[str, Any], vocabulary: Vocabulary, unknown: str | None, templates: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """As the tokenizer.json of Llama 2 (a space comes before a text and before each part behind a special token), or that of
    Mistral (a space comes before a text only). The file does not say which of the two its chat template was written for. The
    latter is taken if [INST] is a special token, or if the template writes a space before it itself."""
    squeezed = flag(meta, key := "tokenizer.ggml.remove_extra_whitespaces", False)
    require(not squeezed, key, squeezed, f"supported is false: spaces are kept; {INSTEAD}")
    unknown = unknown or next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    in_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    why = "there is none, nor a token for each byte, so some characters have no token; fetch the file again"
    require(in_bytes or unknown is not None, "tokenizer.ggml.unknown_token_id", None, why)
    merges = _merges(meta) if "tokenizer.ggml.merges" in meta else _merges_of(vocabulary, _scores(meta, vocabulary))
    made = tokenizers.Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes))
    space = flag(meta, "tokenizer.ggml.add_space_prefix", True)
    inst = "[INST]" in vocabulary.of_type(TokenType.CONTROL) or any(
        f"{quote} [INST]" in template for quote in "\"'" for template in templates.values()
    )
    if space and inst:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    else:
        made.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * space, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * space])
    return made


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> tokenizers.models.BPE:
    try:
        return tokenizers.models.BPE(vocab=vocabulary.ids, merges=merges, **settings)
    except Exception as error:  # the library raises bare Exception
        why = f"they do not fit the tokens ({error}); fetch the file again"
        raise SettingError("tokenizer.ggml.merges", f"{len(merges)} of them", why) from None


def _merges(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    found = [(left, right) for left, _, right in (m.partition(" ") for m in _listed(meta, key, str))]
    odd = next((pair for pair in found if not all(pair)), None)
    require(odd is None, key, odd, "a merge is two texts with a space between them; fetch the file again")
    return found


def _scores(meta: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, float]:
    """The score of each normal piece. Raises SettingError if they do not order the pieces."""
    key = "tokenizer.ggml.scores"
    scores: list[float] = _listed(meta, key, float)
    require(len(scores) == len(vocabulary.texts), key, len(scores), f"there are {len(vocabulary.texts)} tokens")
    found = {text: scores[vocabulary.ids[text]] for text in vocabulary.of_type(TokenType.NORMAL)}
    merged = [score for text, score in found.items() if len(text) > 1]
    ordered = len(merged) < 2 or len(set(merged)) > 1
    require(ordered, key, "all equal", f"they say in which order pieces are merged; {INSTEAD}")
    return found


def _merges_of(vocabulary: Vocabulary, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary. SentencePiece joins the two neighbours whose joint piece has the highest score,
    whatever the two are. So each way to cut a piece into two pieces is a merge, and a higher score comes first; of one piece's
    the longest left part. Pieces with equal scores, which SentencePiece takes from left to right, are taken by their ids."""
    found = []
    for piece, score in scores.items():
        at = vocabulary.ids[piece]
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, at, -cut, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _added(meta: Mapping[str, Any], settings: Mapping[str, Any], name: str, default: bool) -> str | None:
    """The token that is added to each text at one end: bos before it, eos behind it; None if there is none."""
    key = f"tokenizer.ggml.add_{name}_token"
    wanted, token = flag(meta, key, default), settings.get(f"{name}_token")
    asked = wanted and meta.get(key) is not None
    require(token is not None or not asked, key, True, f"the file has no tokenizer.ggml.{name}_token_id; fetch it again")
    return token if wanted else None


def _templates(meta: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: default, and those that tokenizer.chat_templates lists or that have a key of their own."""
    start, listed = "tokenizer.chat_template.", "tokenizer.chat_templates"
    names = [*_listed(meta, listed, str)] if listed in meta else []
    names += [key.removeprefix(start) for key in meta if key.startswith(start)]
    found = {"default": meta.get(start[:-1])} | {name: meta.get(start + name) for name in names}
    for name, text in found.items():
        key = start[:-1] if name == "default" else start + name
        require(text is None or isinstance(text, str), key, text, "must be a template, a text in Jinja")
    return {name: text for name, text in found.items() if text}


def _listed(meta: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """A list in the file's metadata, whose items all have one type. Raises SettingError."""
    found = meta.get(key)
    require(isinstance(found, list) and all(isinstance(x, kind) for x in found), key, type(found).__name__, "must be a list")
    return list(found)  # type: ignore[arg-type]
