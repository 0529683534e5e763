"""The tokenizer that a GGUF file carries, as the tokenizer.json and tokenizer_config.json of a Hugging Face folder. The keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
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

# the patterns that split a text before the merges, by the names that llama.cpp uses in tokenizer.ggml.pre
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How a vocabulary splits a text. patterns: applied one after the other, each to the pieces of the one before. whole: a
    piece that is a token is not merged. bos: a text starts with the beginning-of-sequence token unless the file says
    otherwise. nfc: normalise the text to NFC first."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


SPLITS = {
    "gpt-2": Split((GPT2,)),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": Split((r"\p{N}", GPT2)),
    "llama-bpe": Split((LLAMA3,), whole=True, bos=True),
    "qwen2": Split((LLAMA3.replace("{1,3}", ""),), nfc=True),
}


def tokenizer_files(meta: Mapping[str, Any]) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by the names of the files. Raises SettingError for a vocabulary
    that is broken or not supported."""
    kind = meta.get("tokenizer.ggml.model")
    require(kind == "gpt2", "tokenizer.ggml.model", kind, f"supported in a .gguf is gpt2 (byte-level BPE); {INSTEAD}")
    pre = meta.get("tokenizer.ggml.pre", "default")
    require(isinstance(pre, str) and pre in SPLITS, "tokenizer.ggml.pre", pre, f"supported are {', '.join(SPLITS)}; {INSTEAD}")
    split = SPLITS[pre]
    tokens: list[str] = _listed(meta, "tokenizer.ggml.tokens", str)
    key = "tokenizer.ggml.token_type"
    types: list[int] = _listed(meta, key, int) if key in meta else [TokenType.NORMAL] * len(tokens)
    require(len(types) == len(tokens), key, len(types), f"there are {len(tokens)} tokens")
    merges = [tuple(m.split(" ", 1)) for m in _listed(meta, "tokenizer.ggml.merges", str)]
    # unused entries are padding of the vocabulary, not tokens
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    try:
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole)
    except Exception as error:  # the library raises bare Exception
        why = f"they do not fit the tokens ({error}); fetch the file again"
        raise SettingError("tokenizer.ggml.merges", f"{len(merges)} of them", why) from None
    made = tokenizers.Tokenizer(model)
    if split.nfc:
        made.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in split.patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    for special, add in ((TokenType.CONTROL, made.add_special_tokens), (TokenType.USER_DEFINED, made.add_tokens)):
        add([tokenizers.AddedToken(t, normalized=False) for t, i in vocab.items() if types[i] == special])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = token_id(meta, name)
        if token is not None:
            there = token < len(tokens) and tokens[token] in vocab
            require(there, f"tokenizer.ggml.{name}_token_id", token, f"none of the {len(tokens)} tokens has that id")
            settings[key] = tokens[token]
    # the tokens that are added before and after a text
    front, behind = (
        settings.get(f"{name}_token") if flag(meta, f"tokenizer.ggml.add_{name}_token", default) else None
        for name, default in (("bos", split.bos), ("eos", False))
    )
    if front or behind:
        pieces = [piece for piece in (front, "$A", behind) if piece]
        made.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=[(token, vocab[token]) for token in pieces if token != "$A"]
        )
    templates = {"default": meta.get("tokenizer.chat_template")}
    more = _listed(meta, "tokenizer.chat_templates", str) if "tokenizer.chat_templates" in meta else []
    templates |= {name: meta.get(f"tokenizer.chat_template.{name}") for name in more}
    named = [{"name": name, "template": text} for name, text in templates.items() if text]
    if named:
        settings["chat_template"] = named if len(named) > 1 else named[0]["template"]
    config = json.dumps(settings, ensure_ascii=False, indent=2)
    return {"tokenizer.json": made.to_str(pretty=True), "tokenizer_config.json": config}


def token_id(meta: Mapping[str, Any], name: str) -> int | None:
    """The id of a named token, such as bos or eos; None if the file names none. Raises SettingError."""
    key = f"tokenizer.ggml.{name}_token_id"
    return None if meta.get(key) is None else whole(meta, key, least=0)


def end_ids(meta: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer. End of text (eos), of a turn (eot) and of a message (eom) are separate keys."""
    ends = [token for field in ("eos", "eot", "eom") if (token := token_id(meta, field)) is not None]
    return list(dict.fromkeys(ends))


def _listed(meta: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """A list in the file's metadata, whose items all have one type. Raises SettingError."""
    found = meta.get(key)
    require(isinstance(found, list) and all(isinstance(x, kind) for x in found), key, type(found).__name__, "must be a list")
    return list(found)  # type: ignore[arg-type]
