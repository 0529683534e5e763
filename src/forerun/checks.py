"""Converts settings and requests to plain Python values of the right type and range, or refuses them with SettingError. All
input passes through here, so other files need not check types. Imports neither torch nor numpy: their scalars are recognised by
their attributes.

The same rules hold for every setting:

- A whole number is an int, a float without a fraction (7.0 becomes 7), or a scalar of numpy or torch that holds one of these.
- A number is a whole number or a float. NaN and infinity are refused.
- True and False are not numbers. A flag is True, False or a scalar of numpy or torch that holds one; 0 and 1 are converted.
- A text is a str that UTF-8 can encode. Bytes are refused, and a text of digits is not a number.
- Several values may come in any collection: a list, a tuple, a set, a generator, an array.
- None means that the setting is not given and has its default, unless None has a meaning of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1  # the largest whole number of a setting without another limit; it fits every tensor and kernel
SHOWN = 200  # characters of a value in a message


class SettingError(ValueError):
    """A setting that cannot be used. The message names the setting, its value and one that works."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        super().__init__(f"{name}={shown(value)}: {remedy}")
        self.name, self.value, self.remedy = name, value, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which would otherwise call the class with the message alone."""
        return type(self), (self.name, self.value, self.remedy)


class LoadError(SettingError):
    """A file of a model that cannot be used. The message names the file and the fault."""


def shown(value: object) -> str:
    """repr of the value, on one line and at most about SHOWN characters long."""
    try:
        text = " ".join(repr(value).split()) if not isinstance(value, str) else repr(value)
    except Exception:  # an int of thousands of digits, or a class of the caller
        text = f"({type(value).__name__} that cannot be written)"
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 4 :]}"


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Raise SettingError(name, value, remedy) unless ok."""
    if not ok:
        raise SettingError(name, value, remedy)


def plain(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch; any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def whole(value: Any) -> int | None:
    """The value as an int, or None if it is not a whole number."""
    value = plain(value)
    if isinstance(value, int):
        return None if isinstance(value, bool) else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def finite(value: Any) -> float | None:
    """The value as a float, or None if it is not a finite number."""
    value = plain(value)
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        return None
    try:
        found = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


@dataclass(frozen=True)
class Whole:
    """A whole number from low to high. also: an addition to the message, with its own comma or semicolon."""

    low: int
    high: int
    example: int
    also: str = ""

    def __call__(self, name: str, value: Any) -> int:
        found = whole(value)
        remedy = f"give a whole number from {self.low} to {self.high}{self.also}, for instance {self.example}"
        require(found is not None and self.low <= found <= self.high, name, value, remedy)
        assert found is not None
        return found


@dataclass(frozen=True)
class Number:
    """A finite number from low to high. above: low itself is refused. also: as in Whole."""

    low: float
    high: float
    example: float
    above: bool = False
    also: str = ""

    def __call__(self, name: str, value: Any) -> float:
        start = f"above {self.low:g} and at most" if self.above else f"from {self.low:g} to"
        remedy = f"give a number {start} {self.high:g}{self.also}, for instance {self.example}"
        found = finite(value)
        ok = found is not None and self.low <= found <= self.high and not (self.above and found == self.low)
        require(ok, name, value, remedy)
        assert found is not None
        return found


@dataclass(frozen=True)
class Seed:
    """Any whole number. Only the lowest 64 bits of a larger one are used."""

    example: int = 0

    def __call__(self, name: str, value: Any) -> int:
        found = whole(value)
        require(found is not None, name, value, f"give a whole number, for instance {self.example}")
        assert found is not None
        return found if -(2**63) <= found < 2**64 else found % 2**64


@dataclass(frozen=True)
class Flag:
    """True or False."""

    example: bool = True

    def __call__(self, name: str, value: Any) -> bool:
        found = plain(value)
        known = isinstance(found, bool) or (isinstance(found, int) and found in (0, 1))
        require(known, name, value, "give True or False")
        return bool(found)


@dataclass(frozen=True)
class Text:
    """A text. empty: it may be empty."""

    example: str
    empty: bool = False

    def __call__(self, name: str, value: Any) -> str:
        remedy = f"give a text{'' if self.empty else ' that is not empty'}, for instance {self.example!r}"
        require(isinstance(value, str) and (self.empty or bool(value)), name, value, remedy)
        return written(name, str(value), self.example)


def written(name: str, text: str, example: str) -> str:
    """Returns the text. Raises SettingError if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start]
        remedy = f"character {error.start} is half of a surrogate pair ({bad!r}); leave it out, for instance {example!r}"
        raise SettingError(name, text, remedy) from None
    return text


@dataclass(frozen=True)
class Texts:
    """Texts that are not empty, as a tuple. A single text counts as a tuple of one."""

    example: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = (value,)
        check = Text(self.example[0])
        return tuple(check(name, one) for one in several(name, value, f"give texts, for instance {list(self.example)}"))


@dataclass(frozen=True)
class Choice:
    """One of these words. A torch dtype or device is converted to its name."""

    words: tuple[str, ...]
    also: str = ""

    @property
    def example(self) -> str:
        return self.words[0]

    def __call__(self, name: str, value: Any) -> str:
        word = str(value).removeprefix("torch.")
        require(word in self.words, name, value, f"give {alternatives(self.words)}{self.also}")
        return self.words[self.words.index(word)]


def alternatives(words: Iterable[str]) -> str:
    """The words as `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def several(name: str, value: Any, remedy: str) -> list[Any]:
    """The items of a collection. Raises SettingError for anything else; a text, bytes or a mapping is not a collection."""
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping), name, value, remedy)
    return list(value)


def _ids(name: str, items: list[Any], remedy: str) -> tuple[int, ...]:
    """The items as token ids. Raises SettingError for the first that is not one."""
    if all(type(i) is int and 0 <= i <= LARGEST for i in items):
        return tuple(items)
    found = []
    for item in items:
        number = whole(item)
        ok = number is not None and 0 <= number <= LARGEST
        require(ok, name, item, f"a token id is a whole number from 0 to {LARGEST}; {remedy}")
        assert number is not None
        found.append(number)
    return tuple(found)


@dataclass(frozen=True)
class TokenIds:
    """Token ids, as a tuple. ordered: a set is refused. Engine.add checks that the model has these ids."""

    example: tuple[int, ...]
    ordered: bool = False

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        remedy = f"give a list of token ids, for instance {list(self.example)}"
        require(not (self.ordered and isinstance(value, Set)), name, value, remedy)
        return _ids(name, several(name, value, remedy), remedy)


@dataclass(frozen=True)
class TokenSequences:
    """Sequences of one token id or more, as a tuple of tuples."""

    example: tuple[tuple[int, ...], ...]

    def __call__(self, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
        remedy = f"give lists of one token id or more, for instance {[list(ids) for ids in self.example]}"
        found = []
        for one in several(name, value, remedy):
            require(not isinstance(one, Set), name, value, remedy)
            ids = _ids(name, several(name, one, remedy), remedy)
            require(bool(ids), name, value, remedy)
            found.append(ids)
        return tuple(found)


@dataclass(frozen=True)
class Biases:
    """A mapping of token ids to numbers from -100 to 100, as a new dict. Keys of digits are converted, since keys in JSON are
    texts."""

    example: Mapping[int, float]

    def __call__(self, name: str, value: Any) -> dict[int, float]:
        remedy = f"give a mapping of token ids to numbers from -100 (banned) to 100, for instance {dict(self.example)}"
        require(isinstance(value, Mapping), name, value, remedy)
        found: dict[int, float] = {}
        for key, one in value.items():
            (token,) = _ids(name, [int(key) if _decimal(key) else key], remedy)
            require(token not in found, name, value, f"token {token} is in it twice; {remedy}")
            bias = finite(one)
            require(bias is not None and -100 <= bias <= 100, name, one, remedy)
            assert bias is not None
            found[token] = bias
        return found


def _decimal(key: Any) -> bool:
    """Whether a key of JSON consists of digits."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


PROMPT = "give a text or a list of token ids, for instance 'Once upon a time'"
MESSAGES = "give a list of messages, for instance [{'role': 'user', 'content': 'Hello'}]"


def prompt(name: str, value: Any) -> str | tuple[int, ...]:
    """One prompt, which is a text or token ids. Raises SettingError."""
    if isinstance(value, str):
        return written(name, str(value), "Once upon a time")
    require(not isinstance(value, Set), name, value, PROMPT)
    return _ids(name, several(name, value, PROMPT), PROMPT)


def prompts(name: str, value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or several. A list that begins with a text or a list holds several prompts. Raises SettingError."""
    if isinstance(value, str):
        return [prompt(name, value)]
    require(not isinstance(value, Set), name, value, PROMPT)
    items = [plain(item) for item in several(name, value, PROMPT)]
    if items and not isinstance(items[0], Iterable):
        return [prompt(name, items)]
    return [prompt(name, item) for item in items]


def messages(name: str, value: Any) -> list[Mapping[str, Any]]:
    """The messages of one conversation. Raises SettingError."""
    found = several(name, value, MESSAGES)
    require(bool(found), name, value, MESSAGES)
    for one in found:
        require(isinstance(one, Mapping) and isinstance(one.get("role"), str), name, one, MESSAGES)
    return found


def conversations(name: str, value: Any) -> list[list[Mapping[str, Any]]]:
    """One conversation or several, each a list of messages. Raises SettingError."""
    items = several(name, value, MESSAGES)
    if items and isinstance(items[0], Mapping):
        return [messages(name, items)]
    return [messages(name, item) for item in items]


def tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    """The descriptions of functions for a chat template. Raises SettingError."""
    remedy = "give a list of mappings, for instance [{'type': 'function', 'function': {'name': 'time'}}]"
    found = several(name, value, remedy)
    require(all(isinstance(one, Mapping) for one in found), name, value, remedy)
    return found


def variables(name: str, value: Any) -> Mapping[str, Any]:
    """The variables of a chat template, by name. Raises SettingError."""
    known = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    require(known, name, value, "give a mapping of names to values, for instance {'enable_thinking': False}")
    return dict(value)


Check = Callable[[str, Any], Any]


def setting(default: Any, check: Check, none: bool = False) -> Any:
    """A field of a frozen dataclass whose __post_init__ calls `convert`. none: keep None as a value of its own; otherwise None
    becomes the default."""
    return dataclasses.field(default=default, metadata={"check": check, "none": none})


def required(check: Check) -> Any:
    """`setting` without a default."""
    return dataclasses.field(metadata={"check": check, "none": False})


def convert(settings: Any) -> None:
    """Check and convert, in place, every field of a dataclass that is declared with `setting` or `required`. Raises
    SettingError."""
    for field in dataclasses.fields(settings):
        if not field.metadata:
            continue
        value = getattr(settings, field.name)
        if value is None and not field.metadata["none"] and field.default is not dataclasses.MISSING:
            value = field.default
        if value is not None or field.default is dataclasses.MISSING:
            value = field.metadata["check"](field.name, value)
        object.__setattr__(settings, field.name, value)
