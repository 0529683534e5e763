"""Text to token ids and back: a thin wrapper over the tokenizers library, the chat template, and the incremental text of
a growing list of ids. Made for importing fast, so without transformers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from forerun.types import SettingError, require

TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Of a Hugging Face folder. size: ids 0 .. size-1 may have a token; a model's vocabulary can be padded past it.
    special_ids: the tokens that stand for structure and not for text. tokens: bos_token, eos_token and the like."""

    def __init__(self, folder: Path | str) -> None:
        """Raises SettingError if the folder has no tokenizer.json or it cannot be read."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        require(path.is_file(), "tokenizer", str(folder), "no tokenizer.json in it; give a folder that has one")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise SettingError("tokenizer", str(path), f"cannot be read ({error}); fetch it again") from None
        # padding and truncation stored in the file would change what a text's ids are
        self.inner.no_padding()
        self.inner.no_truncation()
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.size = max(self.inner.get_vocab(with_added_tokens=True).values()) + 1
        # the decoder's settings are only to be had as it pickles itself: JSON
        decoder = self.inner.decoder
        to_bytes = _byte_reader(json.loads(decoder.__getstate__()) if decoder else {}, path)
        self.bytes_of = TokenBytes(self.inner, to_bytes)
        settings = _read(folder / "tokenizer_config.json")
        named = _read(folder / "special_tokens_map.json") | settings
        self.tokens = {key: _content(named[key]) for key in TOKEN_KEYS if named.get(key)}
        self._templates = _templates(folder, settings)
        self._compiled: dict[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens written out in it count as such. add_special_tokens: put those in front and
        behind that tokenizer.json's post-processor says (often none); not for a rendered chat, which has them."""
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids without a token have none."""
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        return self.inner.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """See TokenBytes."""
        return self.bytes_of[token]

    def token_text(self, token: int) -> str:
        """The token's bytes as text, for logprobs; incomplete characters show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation as the model was trained to see it. Encode it with add_special_tokens=False.
        variables: more of what the template reads, for instance enable_thinking. Raises SettingError if there is no
        template, or if it refuses the messages."""
        import jinja2

        if not self._templates:
            why = "the model has no chat template; give a prompt, or a model made for chat"
            raise SettingError("messages", _short(messages), why)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        source = self._templates.get(name) or next(iter(self._templates.values()))
        given = {**self.tokens, **(variables or {})}
        try:
            if source not in self._compiled:
                self._compiled[source] = _environment().from_string(source)
            given |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
            return self._compiled[source].render(given)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise SettingError("messages", _short(messages), f"the model's chat template refuses them: {error}") from None


class TokenBytes(dict[int, bytes]):
    """What each token adds to a text, as UTF-8 that may begin or end within a character. Nothing for unknown ids. Filled as
    tokens are asked for."""

    def __init__(self, tokens: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokens, self._to_bytes = tokens, to_bytes

    def __missing__(self, token: int) -> bytes:
        written = self._tokens.id_to_token(token)
        known = self[token] = b"" if written is None else self._to_bytes(written)
        return known


class Detokenizer:
    """The text of a list of ids that grows, piece by piece; what was given out never changes. A character whose bytes are
    not all there is held back. The ids continue a text: a leading space of the first is kept. Constant work a token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._open = b""  # of a character that is not finished

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        bytes_of, skipped = self._bytes_of, self._skipped
        data = self._open + b"".join([bytes_of[i] for i in ids if i not in skipped])
        text, read = codecs.utf_8_decode(data, "replace", False)
        self._open = data[read:]
        return text

    def finish(self) -> str:
        """What was still held back, as U+FFFD. The next push starts afresh."""
        rest, self._open = self._open.decode("utf-8", "replace"), b""
        return rest


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for: printable Latin-1 for itself, the other bytes in
    order for the characters from U+0100 (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _byte_reader(decoder: Mapping[str, Any], path: Path) -> Callable[[str], bytes]:
    """How the tokens of this vocabulary are read as bytes: byte-level, or SentencePiece's ▁ for a space with <0xNN> for
    the bytes of characters that have no token."""
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes:
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()

        return byte_level
    if kinds & {"Metaspace", "ByteFallback"}:

        def sentence_piece(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace("▁", " ").encode()

        return sentence_piece
    found = ", ".join(map(str, kinds))
    raise SettingError("tokenizer", str(path), f"its decoder is {found}; supported are ByteLevel, Metaspace and ByteFallback")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise SettingError("tokenizer", str(path), f"not JSON ({error}); fetch it again") from None


def _content(token: Any) -> str:
    """A token is written as its text or as an object with the text in it."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    given = settings.get("chat_template") or {}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {"default": str(given)} if given else {}


def _short(messages: object) -> str:
    text = repr(messages)
    return text if len(text) <= 80 else text[:77] + "..."


def _environment() -> Any:
    """What Hugging Face's chat templates are written for. Templates come with checkpoints, so they run in a sandbox."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's part for training; the text is the same."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
