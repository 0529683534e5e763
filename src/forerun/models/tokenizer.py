"""Text to token ids and back, chat templates, and incremental detokenization. A wrapper of the tokenizers library; transformers
is not used, since importing it takes seconds.
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
GIVEN_ELSEWHERE = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # these have arguments of their own
CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # the final space shows whether the template strips the message


class Tokenizer:
    """The tokenizer of a Hugging Face folder. size: tokens have ids 0 .. size-1; a model's vocabulary may be padded past it.
    special_ids: the special tokens, which stand for structure, not for text. tokens: bos_token, eos_token and other named
    tokens, by name."""

    def __init__(self, folder: Path | str) -> None:
        """From tokenizer.json and, for what that lacks, tokenizer_config.json and special_tokens_map.json: more added tokens,
        named tokens such as bos_token, add_bos_token and add_eos_token, the chat template. Raises LoadError if there is no
        tokenizer.json or a file cannot be read."""
        folder = Path(folder)
        path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not path.is_file():
            raise LoadError("tokenizer", str(folder), "it has no tokenizer.json; give a folder that has one")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception, and for a Rust panic a bare BaseException
            raise LoadError("tokenizer", str(path), f"cannot be read ({error}); fetch it again") from None
        # padding and truncation stored in the file would change the ids of a text
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
        # the library shows the decoder's settings only as its pickled state, which is JSON
        decoder = self.inner.decoder
        steps = json.loads(decoder.__getstate__()) if decoder else {}
        to_bytes, self._byte_level = _byte_reader(steps, path)
        self.bytes_of = TokenBytes(self.inner, to_bytes, _literal(self.inner) if self._byte_level else {})
        self._compiled: dict[str, Template] = {}

    def encode(self, text: str, add_special_tokens: bool = True, continues: bool = False) -> list[int]:
        """The ids of a text. The names of special tokens in it become those tokens. add_special_tokens: add the tokens of
        tokenizer.json's post-processor before and after the text, as changed by add_bos_token and add_eos_token of
        tokenizer_config.json (often none); a rendered chat has them already, so give False for it. continues: the text goes on
        where another ends, so that a SentencePiece vocabulary puts no space before it."""
        inner = self._continuing if continues else self.inner
        ids = inner.encode(text, add_special_tokens=False).ids
        return [*self._front, *ids, *self._behind] if add_special_tokens else ids

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered chats, on all cores."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    @functools.cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but that it puts no space before a text."""
        if self._byte_level:
            return self.inner
        spec = json.loads(self.inner.to_str())
        spec |= {part: _without_space(spec[part]) for part in ("normalizer", "pre_tokenizer")}
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids without a token are left out."""
        if not self._byte_level:
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.bytes_of[i] for i in ids if i not in skipped]).decode("utf-8", "replace")

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's message: eos_token, and the added token that the chat template puts behind such a
        message."""
        ends = [self.id_of(self.tokens[key]) for key in ("eos_token",) if key in self.tokens]
        if self._templates:
            answer = "0b7c41d5"  # a text that no template contains
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
            try:
                _, _, behind = self.render_chat(messages, add_generation_prompt=False).rpartition(answer)
            except SettingError:  # the template refuses these messages
                behind = ""
            found = [token for token in self._added if token and behind.lstrip().startswith(token)]
            ends += [self._added[token] for token in sorted(found, key=len)[-1:]]
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    def id_of(self, token: str) -> int | None:
        return self.inner.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; see TokenBytes."""
        return self.bytes_of[token]

    def token_text(self, token: int) -> str:
        """The token's bytes as text, for logprobs. Incomplete characters become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def tool_template(self) -> str | None:
        """The chat template of conversations with tools; None if it does not read them. Raises SettingError if it is broken."""
        if not self._templates or "tools" not in self._template(True, "").reads:
            return None
        return self._source(True)

    def _source(self, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates.get(name) or next(iter(self._templates.values()))

    def _template(self, tools: bool, messages: object) -> Template:
        source = self._source(tools)
        if source not in self._compiled:
            self._compiled[source] = _compile(source, messages)
        return self._compiled[source]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, by the model's chat template. Encode it with add_special_tokens=False. variables: more
        variables of the template, for instance enable_thinking or documents. continue_final_message: the text ends within the
        last message, so that the model continues it; add_generation_prompt is ignored then. Raises SettingError if there is
        no template, if it refuses the messages, or if it does not read a variable that is given."""
        if not self._templates:
            why = "the model has no chat template; give a prompt, or a model made for chat"
            raise SettingError("messages", _short(messages), why)
        template, reads = self._template(bool(tools), messages)
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
        except Exception as error:  # a template may raise anything
            raise SettingError("messages", _short(messages), f"the model's chat template refuses them: {error}") from None
        if not continue_final_message:
            return str(text)
        text, mark, behind = text.rpartition(CONTINUE.strip())
        remedy = "the model's chat template leaves out the last message's text; give another message, or leave this out"
        require(bool(mark), "continue_final_message", True, remedy)
        return text if behind.startswith(" ") else text.rstrip()


class Template(NamedTuple):
    """A compiled chat template and the variables that it reads."""

    template: Any
    reads: frozenset[str]

    def render(self, given: Mapping[str, Any]) -> str:
        return str(self.template.render(given))


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds to a text: UTF-8, which may begin or end within a character; none for unknown ids. Entries
    are made when they are first read."""

    def __init__(self, tokens: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], literal: Mapping[int, bytes]) -> None:
        """literal: the tokens that add their own text, encoded."""
        super().__init__(literal)
        self._tokens, self._to_bytes = tokens, to_bytes

    def __missing__(self, token: int) -> bytes:
        written = self._tokens.id_to_token(token)
        known = self[token] = b"" if written is None else self._to_bytes(written)
        return known


class Detokenizer:
    """Incremental detokenization: the text of a growing list of ids, in pieces that never change afterwards. A character is
    held back until all its bytes are there. The ids continue a text, so a leading space of the first is kept. The work for a
    token is constant."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._open = b""  # the bytes of an unfinished character
        self._text_of = tokenizer.inner.id_to_token
        self._marks: dict[int, str] = {}

    def mark(self, strings: Collection[str]) -> list[tuple[int, str, str]]:
        """Mark the special tokens whose texts occur in these strings. From now on `push` gives one character for each, a
        surrogate, which no text contains. Returns id, text and character of each, the longest text first."""
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
        """The bytes still held back, as U+FFFD. They are dropped then."""
        rest, self._open = self._open.decode("utf-8", "replace"), b""
        return rest


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2): printable Latin-1 characters stand for themselves, those
    from U+0100 on for the other bytes, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _byte_reader(decoder: Mapping[str, Any], path: Path) -> tuple[Callable[[str], bytes], bool]:
    """A function from a token's text to its bytes, and whether the vocabulary is byte-level. The other kind is SentencePiece's:
    ▁ for a space, <0xNN> for the bytes of characters without a token. Raises LoadError for any other decoder."""
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


def _without_space(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without what puts a space before a text. None: nothing is left of it."""
    if step is None or step["type"] == "Prepend":
        return None
    lists = {key: value for key, value in step.items() if key in ("normalizers", "pretokenizers")}
    kept = {key: [inner for each in value if (inner := _without_space(each)) is not None] for key, value in lists.items()}
    return {**step, **kept, **({"prepend_scheme": "never"} if step["type"] == "Metaspace" else {})}


def _literal(inner: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The added tokens of a byte-level vocabulary whose text is literal: an added Ġ is the character Ġ, not a space. Left out
    are tokens that ordinary text is encoded to as well, such as single bytes, even if the file lists them as added."""
    literal = {}
    for token, added in inner.get_added_tokens_decoder().items():
        made = inner.model.tokenize(added.content) if inner.model.token_to_id(added.content) is not None else []
        if [piece.id for piece in made] != [token]:
            literal[token] = added.content.encode()
    return literal


def _named_tokens(given: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens, such as bos_token or a model's image_token. In the file each is a text, or an object with the text."""
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
    """Add the tokens that only tokenizer_config.json has (added_tokens_decoder), and make those that it names special, as
    transformers does. A token that cannot have its id is left out, with a warning."""
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
    """The texts of a list of tokens. In the file each is a text, or an object with the text."""
    found = settings.get(key) or []
    found = list(found.values()) if isinstance(found, Mapping) else found
    require(isinstance(found, list), key, found, "must be a list of tokens")
    texts = [token.get("content") if isinstance(token, Mapping) else token for token in found]
    require(all(isinstance(text, str) for text in texts), key, found, "must be a list of tokens")
    return [text for text in texts if text]


def _ends(
    inner: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """The ids added before and after a text: those of tokenizer.json's post-processor; where tokenizer_config.json has
    add_bos_token or add_eos_token, these say whether bos_token or eos_token is among them."""
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
            sides[side].insert(len(sides[side]) * side, token)  # outside the others
        elif not wanted:
            sides[side] = [i for i in sides[side] if i != token]
    return sides[0], sides[1]


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name. The file chat_template.jinja takes precedence over tokenizer_config.json."""
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
    """The messages, with CONTINUE at the end of the last one's text."""
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
    """The Jinja environment that Hugging Face's chat templates expect. Templates come from checkpoints, so it is a sandbox."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; it does not change the text."""

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
