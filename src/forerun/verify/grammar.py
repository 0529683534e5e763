"""Structured output: which tokens may follow the tokens of an answer, at every position of a block. The grammars are those of
llguidance, which is imported with the first request that needs it. Works on the host; torch is not used.

A matcher follows one answer. Between steps it stands behind the committed tokens. `Matcher.block` walks along a draft, and goes
back again. So a rejected draft leaves nothing behind, and preemption does not concern it.

What a draft may become without a change of the distribution:

- Of point masses any part may be left out or replaced, since the tokens are those that the target itself chooses.
- A drawn token may be left out only for what stood before it. A refused token is therefore kept: the target gives it
  probability 0, so it is rejected, and its place is drawn again as after any rejection. Only what follows it is cut.
- Forced tokens depend on the tokens before them alone, so they may stand in place of any draft, as point masses.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.checks import SHOWN, SettingError, require
from forerun.models.tokenizer import Tokenizer
from forerun.structured import Kind, StructuredOutput
from forerun.types import Request
from forerun.verify.sampling import WORD

MOST_ITEMS = 10_000  # rules that may be open at a place of the text; 2000 is too few for a schema of 500 properties
CACHED = 128  # compiled grammars that are kept
# A small model can go on with white space for ever where JSON allows any amount. So there is a limit between two tokens.
JSON_DEFAULTS: dict[str, Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"}


def words(vocab: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab // WORD)


class Block(NamedTuple):
    """A row's draft under its grammar. tokens: the draft; forced: which of them the grammar alone proposed; masks: [n,words]
    int32 with n at most len(tokens) + 1, the tokens that are allowed at each position, a bit for each, the lowest first. Behind
    the n positions no token is chosen."""

    tokens: list[int]
    forced: list[bool]
    masks: np.ndarray


class Matcher:
    """Follows one answer. error: why no further token can be allowed, None while all is well."""

    def __init__(self, inner: Any, stops: Collection[int], ends: Collection[int], vocab: int) -> None:
        """inner: a llguidance.LLMatcher at its start; stops: the tokens that end the request; ends: the model's end-of-sequence
        tokens, which are no text; vocab: token ids of the target."""
        self.error: str | None = None
        self._inner, self._vocab, self._consumed = inner, vocab, 0
        self._stops = frozenset(token for token in stops if 0 <= token < vocab)
        usual = [token for token in stops if token in self._stops]
        self._stop = next((token for token in usual if token in ends), usual[0])
        self._open, self._closed = (np.zeros(words(vocab), np.uint32) for _ in range(2))
        for token in self._stops:
            self._open[token // WORD] |= np.uint32(1 << token % WORD)
        self._closed[:] = ~self._open
        for token in ends:
            self._closed[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
        if vocab % WORD:
            self._closed[-1] &= np.uint32((1 << vocab % WORD) - 1)

    def follow(self, ids: Sequence[int], prompt: int = 0) -> None:
        """Stand behind these committed tokens, of which the first `prompt` are no part of the answer. Those of the last call
        are their beginning."""
        new = list(ids[prompt + self._consumed :])
        if new and self.error is None and not self._inner.consume_tokens(new):
            self._fail()
        self._consumed = len(ids) - prompt

    def block(self, draft: Sequence[int], most: int, drawn: bool) -> Block:
        """The draft, cut before the first token that the grammar refuses (behind it, if the tokens were drawn), with forced
        tokens in place of others and behind them, at most `most` tokens, and the masks of its positions. The matcher stands
        where it stood."""
        draft, walked = list(draft[:most]), 0
        tokens: list[int] = []
        forced: list[bool] = []
        masks: list[np.ndarray] = []
        coming: list[int] = []  # forced tokens that were found ahead
        while self.error is None:
            mask = self._mask()
            if mask is None:
                break
            masks.append(mask)
            at = len(tokens)
            if at == most:
                break
            coming = coming or self._forced(mask)
            token = coming.pop(0) if coming else draft[at] if at < len(draft) else -1
            if token < 0:
                break
            guessed = at < len(draft) and draft[at] == token
            if not guessed:
                draft = draft[:at]  # what follows was drafted behind another token
            allowed = bool(mask[token // WORD] >> np.uint32(token % WORD) & 1)
            if allowed or (drawn and guessed):
                tokens.append(token)
                forced.append(not guessed)
            if not allowed or token in self._stops:
                break
            if not self._inner.consume_token(token):
                self._fail()
                break
            walked += 1
        if walked and self.error is None and not self._inner.rollback(walked):
            self._fail()
        if self.error is not None:  # no token is allowed, and the request ends
            return Block([], [], np.zeros((1, len(self._open)), np.int32))
        return Block(tokens, forced, np.array(masks).view(np.int32))

    def _mask(self) -> np.ndarray | None:
        """The tokens allowed next, [words] uint32; None after an error. Stop tokens are allowed where the grammar may end."""
        inner, mask = self._inner, np.zeros_like(self._open)
        accepts = inner.is_accepting()
        if not inner.is_stopped():
            inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if inner.is_error():
            self._fail()
            return None
        mask &= self._closed
        if accepts:
            mask |= self._open
        return mask

    def _forced(self, mask: np.ndarray) -> list[int]:
        """The tokens that must follow, as the tokenizer would write them; none if there is a choice."""
        if self._inner.is_stopped():
            return [self._stop]
        found = [int(token) for token in self._inner.compute_ff_tokens()]
        return found if not self._stops.intersection(found) and not self._inner.is_error() else []

    def _fail(self) -> None:
        self.error = _cause(self._inner.get_error()) or "the grammar refuses a token that it allowed"


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, and the tokens of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(i) if i < tokenizer.size else b"" for i in range(vocab)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        written = text.decode(errors="ignore") if isinstance(text, bytes) else text
        return self._encode(written, add_special_tokens=False, continues=True)


class Grammars:
    """Compiles the grammars of requests for one model, and keeps them by their text. Any threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        """vocab: token ids of the target; end_ids: its end-of-sequence tokens."""
        self._tokenizer, self._vocab = tokenizer, vocab
        self._ends = tuple(token for token in end_ids if 0 <= token < vocab)
        self._lock = threading.Lock()
        self._library: Any = None
        self._tokens: Any = None  # the vocabulary as llguidance keeps it
        self._compiled: OrderedDict[tuple[Kind, Any], Any] = OrderedDict()

    def compile(self, wanted: StructuredOutput) -> Any:
        """The llguidance.LLMatcher of this form at its start. It may take seconds the first time. Raises SettingError."""
        key = (wanted.kind, wanted.value)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if self._tokens is None:
                require(bool(self._ends), wanted.kind, wanted.value, "the model has no end-of-sequence token; leave it out")
                import llguidance

                vocabulary: Any = _Vocabulary(self._tokenizer, self._vocab, self._ends[0])
                self._library, self._tokens = llguidance, llguidance.LLTokenizer(vocabulary, eos_token=list(self._ends))
        limits = self._library.LLParserLimits(max_items_in_row=MOST_ITEMS, verbose_errors=False)
        found = self._library.LLMatcher(self._tokens, self._source(wanted), log_level=0, limits=limits)
        if found.is_error():
            remedy = f"{_cause(found.get_error())}; docs/structured.md says what it may be"
            raise SettingError(wanted.kind, wanted.value, remedy)
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return found

    def _source(self, wanted: StructuredOutput) -> str:
        """The grammar in the form that llguidance compiles."""
        make = self._library.LLMatcher
        try:
            if wanted.json_object:
                return make.grammar_from_json_schema('{"type": "object"}', JSON_DEFAULTS)
            if wanted.json_schema is not None:
                own = "x-guidance" in json.loads(wanted.json_schema)
                return make.grammar_from_json_schema(wanted.json_schema, {} if own else JSON_DEFAULTS)
        except ValueError as error:
            raise SettingError(wanted.kind, wanted.value, _cause(str(error))) from None
        if wanted.regex is not None:
            return make.grammar_from_regex(wanted.regex)
        if wanted.grammar is not None:
            return make.grammar_from_lark(wanted.grammar)
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(wanted.choice))
        return make.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # a terminal: a rule holds some thousand texts

    def matcher(self, request: Request) -> Matcher:
        """A matcher for this request, whose params.structured is set. Raises SettingError."""
        wanted = request.params.structured
        assert wanted is not None
        able = any(0 <= token < self._vocab for token in request.stop_ids)
        remedy = "with a structured output a stop token must end the answer; give False, or stop_token_ids"
        require(able, "ignore_eos", request.params.ignore_eos, remedy)
        return Matcher(self.compile(wanted).deep_copy(), request.stop_ids, self._ends, self._vocab)


def _cause(message: str) -> str:
    """The library's message on one line."""
    return " ".join(message.split())[:SHOWN]
