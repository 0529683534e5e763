"""Text to token ids and back: a thin wrapper over the tokenizers library, the chat template, and the incremental text of
a growing list of ids. Made for importing fast, so without transformers.
"""

from __future__ import annotations

import codecs
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from forerun.models.files import errors_of, flag, read_json
from forerun.types import LoadError, SettingError, require

LOG = logging.getLogger("forerun")

TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "special")
GIVEN_ELSEWHERE = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # arguments of their own
CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims the message


class Tokenizer:
    """Of a Hugging Face folder. size: ids 0 .. size-1 may have a token; a model's vocabulary can be padded past it.
    special_ids: the tokens that stand for structure and not for text. tokens: bos_token, eos_token and the like."""

    def __init__(self, folder: Path | str) -> None:
        """From tokenizer.json, with what tokenizer_config.json and special_tokens_map.json say beyond it: more added tokens,
        bos_token and the like, add_bos_token and add_eos_token, the chat template. Raises LoadError if the folder has no
        tokenizer.json or one of them cannot be read."""
        folder = Path(folder)
        path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not path.is_file():
            raise LoadError("tokenizer", str(folder), "no tokenizer.json in it; give a folder that has one")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and a panic of it is not even that
            raise LoadError("tokenizer", str(path), f"cannot be read ({error}); fetch it again") from None
        # padding and truncation stored in the file would change what a text's ids are
        self.inner.no_padding()
        self.inner.no_truncation()
        settings, older = read_json(config), folder / "special_tokens_map.json"
        with errors_of(older):
            self.tokens = _named_tokens(read_json(older))
        with errors_of(config):
            self.tokens |= _named_tokens(settings)
            _add_tokens(self.inner, settings, self.tokens)
            self._front, self._behind = _ends(self.inner, settings, self.tokens)
            self._templates = _templates(folder, settings)
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {token.content: i for i, token in added.items()}
        self.size = max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # the decoder's settings are only to be had as it pickles itself: JSON
        decoder = self.inner.decoder
        steps = json.loads(decoder.__getstate__()) if decoder else {}
        to_bytes, self._byte_level = _byte_reader(steps, path)
        self.bytes_of = TokenBytes(self.inner, to_bytes, _literal(self.inner) if self._byte_level else {})
        self._compiled: dict[str, Template] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens written out in it count as such. add_special_tokens: put in front and behind what
        tokenizer.json's post-processor says, corrected by add_bos_token and add_eos_token of tokenizer_config.json where that
        has them (often nothing); not for a rendered chat, which has them."""
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return [*self._front, *ids, *self._behind] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids without a token have none."""
        if not self._byte_level:
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.bytes_of[i] for i in ids if i not in skipped]).decode("utf-8", "replace")

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn: eos_token, and the added token that the chat template puts behind an assistant's
        message."""
        ends = [self.id_of(self.tokens[key]) for key in ("eos_token",) if key in self.tokens]
        if self._templates:
            answer = "0b7c41d5"  # found again in the text
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
            try:
                _, _, behind = self.render_chat(messages, add_generation_prompt=False).rpartition(answer)
            except SettingError:  # a template that takes no such messages
                behind = ""
            found = [token for token in self._added if token and behind.lstrip().startswith(token)]
            ends += [self._added[token] for token in sorted(found, key=len)[-1:]]
        return tuple(dict.fromkeys(token for token in ends if token is not None))

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
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation as the model was trained to see it. Encode it with add_special_tokens=False.
        variables: more of what the template reads, for instance enable_thinking or documents. continue_final_message: the text
        ends within the last message, for the model to go on with it; then add_generation_prompt does not count. Raises
        SettingError if there is no template, if it refuses the messages, or if it does not read what is given."""
        if not self._templates:
            why = "the model has no chat template; give a prompt, or a model made for chat"
            raise SettingError("messages", _short(messages), why)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        source = self._templates.get(name) or next(iter(self._templates.values()))
        if source not in self._compiled:
            self._compiled[source] = _compile(source, messages)
        template, reads = self._compiled[source]
        for key in variables or {}:
            require(key not in GIVEN_ELSEWHERE, "chat_template_kwargs", key, f"give {key} as an argument of its own")
            known = ", ".join(sorted(reads - {"messages", "raise_exception", "strftime_now"})) or "none"
            require(key in reads, "chat_template_kwargs", key, f"the model's chat template does not read it; it reads {known}")
        require(not tools or "tools" in reads, "tools", _short(tools), "the model's chat template does not read them")
        given = {
            "documents": None, **self.tokens, **(variables or {}), "tools": tools or None,
            "messages": _marked(messages) if continue_final_message else messages,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }  # fmt: skip
        try:
            text = template.render(given)
        except Exception as error:  # whatever a template may raise
            raise SettingError("messages", _short(messages), f"the model's chat template refuses them: {error}") from None
        if not continue_final_message:
            return str(text)
        text, mark, behind = text.rpartition(CONTINUE.strip())
        remedy = "the model's chat template does not show the last message's text; give another, or leave this out"
        require(bool(mark), "continue_final_message", True, remedy)
        return text if behind.startswith(" ") else text.rstrip()


class Template(NamedTuple):
    """A chat template that is ready to render, and the variables that it reads."""

    template: Any
    reads: frozenset[str]

    def render(self, given: Mapping[str, Any]) -> str:
        return str(self.template.render(given))


class TokenBytes(dict[int, bytes]):
    """What each token adds to a text, as UTF-8 that may begin or end within a character. Nothing for unknown ids. Filled as
    tokens are asked for."""

    def __init__(self, tokens: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], literal: Mapping[int, bytes]) -> None:
        """literal: the tokens whose text is what they add."""
        super().__init__(literal)
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
        self._text_of = tokenizer.inner.id_to_token
        self._marks: dict[int, str] = {}

    def mark(self, strings: Collection[str]) -> list[tuple[int, str, str]]:
        """The special tokens whose texts are in these strings, the longest first: the id of each, its text, and the character
        (a surrogate, which no text has) that `push` gives for it from now on."""
        texts = [(token, self._text_of(token) or "") for token in self._skipped]
        named = [(token, text) for token, text in texts if text and any(text in s for s in strings)]
        named.sort(key=lambda pair: (-len(pair[1]), pair))
        marks = [(token, text, chr(0xD800 + i)) for i, (token, text) in enumerate(named)]
        self._marks = {token: character for token, _, character in marks}
        return marks

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        if self._marks:
            return "".join(self._marks[i] if i in self._marks else self._push([i]) for i in ids)
        return self._push(ids)

    def _push(self, ids: Iterable[int]) -> str:
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


def _byte_reader(decoder: Mapping[str, Any], path: Path) -> tuple[Callable[[str], bytes], bool]:
    """How the tokens of this vocabulary are read as bytes, and whether it is byte-level: that, or SentencePiece's ▁ for a space
    with <0xNN> for the bytes of characters that have no token."""
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes:
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()

        return byte_level, True
    if kinds & {"Metaspace", "ByteFallback"}:

        def sentence_piece(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace("▁", " ").encode()

        return sentence_piece, False
    found = ", ".join(map(str, kinds))
    raise LoadError("tokenizer", str(path), f"its decoder is {found}; supported are ByteLevel, Metaspace and ByteFallback")


def _literal(inner: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The added tokens of a byte-level vocabulary with their texts, which are what they say: an added Ġ is no space. Not those
    that ordinary text is made into as well, such as the single bytes: a file that lists them as added means its own."""
    literal = {}
    for token, added in inner.get_added_tokens_decoder().items():
        made = inner.model.tokenize(added.content) if inner.model.token_to_id(added.content) is not None else []
        if [piece.id for piece in made] != [token]:
            literal[token] = added.content.encode()
    return literal


def _named_tokens(given: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, and a model's own such as image_token; each is a text, or an object with the text in it."""
    named = {}
    for key, value in given.items():
        if not key.endswith("_token") or key.startswith("add_") or value is None:
            continue
        text = value.get("content") if isinstance(value, Mapping) else value
        require(isinstance(text, str) or key not in TOKEN_KEYS, key, value, "must be a token's text")
        if isinstance(text, str) and text:
            named[key] = text
    return named


def _add_tokens(inner: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json has (added_tokens_decoder), and count those that it names as special,
    as transformers does. One whose id cannot be had is left out, with a warning."""
    given = settings.get("added_tokens_decoder") or {}
    remedy = "must be an object from ids to tokens with their content"
    require(isinstance(given, Mapping), "added_tokens_decoder", given, remedy)
    for key, entry in given.items():
        fits = key.isdecimal() and isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and entry["content"]
        require(bool(fits), "added_tokens_decoder", {key: entry}, remedy)
    more = [token for key in ("additional_special_tokens", "extra_special_tokens") for token in _texts(settings, key)]
    structural = set(named.values())
    known = inner.get_added_tokens_decoder()
    free = max(inner.get_vocab_size(with_added_tokens=False), max(known, default=-1) + 1)  # the id of the next new one
    add = []
    for token, entry in sorted((int(key), entry) for key, entry in given.items()):
        text = entry["content"]
        at = inner.token_to_id(text)
        if (free if at is None else at) != token:
            LOG.warning("tokenizer_config.json: token %r cannot have the id %d; it is left out", text, token)
            continue
        free += at is None
        flags = {name: flag(entry, name) for name in ADDED_FLAGS} | {"normalized": flag(entry, "normalized", True)}
        flags["special"] = flags["special"] or text in structural
        add.append(tokenizers.AddedToken(text, **flags))
    settled = {token.content for token in (*known.values(), *add)}
    add += [
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in sorted({*structural, *more} - settled) if inner.token_to_id(text) is not None
    ]  # fmt: skip
    inner.add_tokens(add)


def _texts(settings: Mapping[str, Any], key: str) -> list[str]:
    """A list of tokens; each is a text, or an object with the text in it."""
    found = settings.get(key) or []
    found = list(found.values()) if isinstance(found, Mapping) else found
    require(isinstance(found, list), key, found, "must be a list of tokens")
    texts = [token.get("content") if isinstance(token, Mapping) else token for token in found]
    require(all(isinstance(text, str) for text in texts), key, found, "must be a list of tokens")
    return [text for text in texts if text]


def _ends(
    inner: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """The ids in front of a text and behind it: those of tokenizer.json's post-processor, with or without bos_token and
    eos_token as add_bos_token and add_eos_token say, where tokenizer_config.json has them."""
    text = "a"
    plain, full = inner.encode(text, add_special_tokens=False).ids, inner.encode(text).ids
    at = next((i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain), 0)
    sides = [full[:at], full[at + len(plain) :]]
    for side, name in enumerate(("bos", "eos")):
        key = f"add_{name}_token"
        if settings.get(key) is None:
            continue
        token = inner.token_to_id(named.get(f"{name}_token", ""))
        wanted = flag(settings, key)
        require(token is not None or not wanted, key, wanted, f"the vocabulary has no {name}_token; name one that it has")
        if wanted and token is not None and token not in sides[side]:
            sides[side].insert(len(sides[side]) * side, token)  # the outermost
        elif not wanted:
            sides[side] = [i for i in sides[side] if i != token]
    return sides[0], sides[1]


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise LoadError("model", str(path), f"cannot be read ({error}); fetch it again") from None
    given = settings.get("chat_template") or {}
    found = {"default": given} if isinstance(given, str) else given
    if isinstance(given, list) and all(isinstance(entry, Mapping) for entry in given):
        found = {entry.get("name"): entry.get("template") for entry in given}
    fits = isinstance(found, Mapping) and all(isinstance(text, str) for pair in found.items() for text in pair)
    require(fits, "chat_template", _short(given), "must be a template, or a list of objects with name and template")
    return dict(found)


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark at the end of the last one's text."""
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CONTINUE
    else:
        blocks = [dict(block) for block in content] if isinstance(content, list | tuple) else []
        text = next((block for block in reversed(blocks) if isinstance(block.get("text"), str)), None)
        require(text is not None, "continue_final_message", True, "the last message has no text to continue")
        text["text"] += CONTINUE  # type: ignore[index]
        last["content"] = blocks
    return [*messages[:-1], last]


def _short(messages: object) -> str:
    text = repr(messages)
    return text if len(text) <= 80 else text[:77] + "..."


def _compile(source: str, messages: object) -> Template:
    import jinja2
    from jinja2 import meta

    environment = _environment()
    try:
        tree = environment.parse(source)
        return Template(environment.from_string(tree), frozenset(meta.find_undeclared_variables(tree)))
    except jinja2.TemplateError as error:
        raise SettingError("messages", _short(messages), f"the model's chat template is broken: {error}") from None


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
