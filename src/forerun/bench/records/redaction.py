"""Hides secrets in all that is written: records, pages, terminals, logs, error messages and the command to repeat a run.

`hide` finds them by their form: credentials in URLs, values of options and fields with a secret's name, authorization headers,
tokens of well-known shapes. `remember` adds values that are known to be secret, whatever their form.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
SHORTEST = 4  # shorter values are not remembered: hiding every occurrence would damage other texts

_NAMES = (
    "key|keys|apikey|apikeys|token|authtoken|accesstoken|secret|secrets|password|passwords|passwd|passphrase|pwd|credential|credentials|"
    "auth|authorization|bearer|cookie|signature|sig"
)
_LAST = re.compile(rf"(?:^|[-_.\s])(?:{_NAMES})$|(?:api|access|secret|private|auth|client)(?:key|token|secret)$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAME = rf"(?:[\w.-]*?[-_.])?(?:{_NAMES})|[\w.-]*(?:api|access|secret|private|auth|client)[-_]?(?:key|token|secret)"
# a quoted text, also with escaped quotes or without its end
_QUOTED = r"\\+[\"'][^\"'\\\n]*(?:\\+[\"'])?|\"(?:[^\"\\\n]|\\.)*\"?|'(?:[^'\\\n]|\\.)*'?"

_SHAPES = re.compile(
    r"\b(?:sk|pk|rk|gsk|csk|xai|nvapi|glpat|tgp)[-_][A-Za-z0-9_-]{16,}"
    r"|\bhf_[A-Za-z0-9]{8,}|\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bxox[a-z]-[A-Za-z0-9-]{8,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_RULES = (
    # user:password@ of a URL
    (re.compile(r"([a-zA-Z][\w+.-]*://)[^/\s\"'<>?#]*@"), rf"\1{HIDDEN}@"),
    # ?api_key=... of a URL, and name=value in texts and environments
    (re.compile(rf"(?<![\w.-])((?:{_NAME})=)(?!=)(?!\*\*\*)(?:{_QUOTED}|[^\s&;,\"')\]}}]+)", re.IGNORECASE), rf"\1{HIDDEN}"),
    # "name": value of JSON and of Python
    (
        re.compile(
            rf"([\"'](?:{_NAME})\\*[\"']\s*:\s*)(?!None\b|null\b|true\b|false\b|True\b|False\b)(?:{_QUOTED}|\[[^\]\n]*\]|[^\s,}}\]\"']+)",
            re.IGNORECASE,
        ),
        rf'\1"{HIDDEN}"',
    ),
    # headers as lines, and as a word of a command
    (
        re.compile(
            r"\b((?:proxy-)?authorization|(?:set-)?cookie|[\w-]*api[-_ ]?key(?: provided)?|[\w-]*(?:auth|access)[-_ ]token)"
            r"(\s*:\s*)[^\s\"'][^\"'\n]*",
            re.IGNORECASE,
        ),
        rf"\1\2{HIDDEN}",
    ),
    # Bearer ..., anywhere
    (re.compile(r"\b(Bearer|Basic)(\s+)(?:[\w.~+/=-]{16,}|(?=\S*[\d=])[\w.~+/=-]{6,})"), rf"\1\2{HIDDEN}"),
    # --api-key value in running text
    (
        re.compile(rf"(?<![\w-])(--?(?:{_NAME}))(\s+)(?!-)(?:{_QUOTED}|[^\s\"']+)", re.IGNORECASE),
        rf"\1\2{HIDDEN}",
    ),
)

_known: set[str] = set()


def remember(*values: str) -> None:
    """From now on `hide` removes these values from every text, those of at least SHORTEST characters."""
    _known.update(value for value in values if len(value) >= SHORTEST and value != HIDDEN)


def forget() -> None:
    """Forget all remembered values."""
    _known.clear()


def remember_environment() -> None:
    """The values of environment variables with a secret's name, such as HF_TOKEN."""
    remember(*(value for name, value in os.environ.items() if is_secret(name) and len(value) >= 8))


def is_secret(name: str) -> bool:
    """Whether an option, field, header or variable of this name holds a secret. tokens, the plural, is a count."""
    return _LAST.search(_CAMEL.sub("-", name.strip().lstrip("-"))) is not None


def hide(value: Any) -> Any:
    """A text, command line or JSON value with HIDDEN in place of each secret. A sequence of texts is read as a command line:
    behind an option with a secret's name, every word up to the next option is secret."""
    if isinstance(value, str):
        return _hide_text(value)
    if isinstance(value, Mapping):
        return {key: _hide_field(str(key), inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        texts = all(isinstance(one, str) for one in value)
        return type(value)(_hide_words(value) if texts else map(hide, value))  # type: ignore[call-arg]
    return value


def hide_command(text: str) -> str:
    """A text that is a command line, such as a server's options. Without a secret it is returned unchanged."""
    try:
        words = shlex.split(text)
    except ValueError:
        return str(_hide_text(text))
    hidden = _hide_words(words)
    return text if hidden == words else shlex.join(hidden)


def secrets_of(words: Iterable[str]) -> list[str]:
    """The values behind options with a secret's name, for `remember`."""
    return [secret for _, secret in _split(words) if secret is not None]


def _split(words: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Each word of a command line as the part that may be shown and the part that is secret; None: no part is."""
    secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and is_secret(name):
            secret = not equals
            yield (name + "=", value) if equals else (word, None)
        elif word.startswith("-") and len(word) > 1:
            secret = False
            yield word, None
        else:
            yield ("", word) if secret else (word, None)


def _hide_field(name: str, value: Any) -> Any:
    if not is_secret(name) or value is None or isinstance(value, bool):
        return hide(value)
    counts = isinstance(value, int | float) and re.search(r"(token|key)s?$", name, re.IGNORECASE) is not None
    return value if counts else HIDDEN


def _hide_words(words: Sequence[str]) -> list[str]:
    return [_hide_text(shown) if secret is None else shown + HIDDEN for shown, secret in _split(words)]


def _hide_text(text: str) -> str:
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    for pattern, kept in _RULES:
        text = pattern.sub(kept, text)
    return text
