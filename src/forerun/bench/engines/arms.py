"""What is compared: an arm is a name and a way of drafting, or no drafter at all. Knows settings, not engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.checks import require
from forerun.config import Speculation, known_method

BASELINE = "baseline"
CONTROL = "baseline again"
DEFAULT_ARMS = ("ngram", "suffix")
NGRAM_LOOKUP = (2, 5)  # the look-up lengths of the reference study; the engine's own default is 5 and 5


@dataclass(frozen=True, slots=True)
class Arm:
    """speculation None: an engine started with no drafter."""

    name: str
    speculation: Speculation | None


def parse(texts: tuple[str, ...]) -> tuple[Arm, ...]:
    """The candidates that these texts name. Each is a method (`ngram`, `suffix`), a method with one or more draft lengths
    (`ngram:k=2,4,8`, one arm each), or a speculative configuration as JSON. The word ngram means look-up lengths 2 to 5.

    Raises SettingError for anything else, and for two arms that are the same.
    """
    arms: list[Arm] = []
    for text in texts:
        arms.extend(_one(text.strip()))
    for arm in arms:
        twins = [a.name for a in arms if a.speculation == arm.speculation]
        require(len(twins) == 1, "arms", arm.name, "give each arm once")
    return tuple(_distinct(arms))


def _one(text: str) -> list[Arm]:
    if text.startswith("{"):
        speculation = Speculation.parse(text)
        assert speculation is not None
        return [Arm(_name(speculation), speculation)]
    method, colon, rest = text.partition(":")
    known_method("arms", method, ", one with draft lengths as in ngram:k=2,4,8, or JSON")
    if not colon:
        speculation = _of(method, None)
        return [Arm(_name(speculation), speculation)]
    key, _, numbers = rest.partition("=")
    lengths = [n.strip() for n in numbers.split(",")]
    fit = all(n.isascii() and n.isdigit() and len(n) < 10 for n in lengths)
    require(key == "k" and fit, "arms", text, "give draft lengths as in ngram:k=2,4,8")
    return [Arm(f"{method} k={k}", _of(method, k)) for k in (int(n) for n in lengths)]


def _of(method: str, k: int | None) -> Speculation:
    value: dict[str, Any] = {"method": method}
    if method in ("ngram", "ngram_gpu"):
        value["prompt_lookup_min"], value["prompt_lookup_max"] = NGRAM_LOOKUP
    if k is not None:
        value["num_speculative_tokens"] = k
    speculation = Speculation.parse(value)
    assert speculation is not None
    return speculation


def _name(speculation: Speculation) -> str:
    if speculation.method == "suffix":
        return "suffix"
    return f"{speculation.method} k={speculation.num_speculative_tokens}"


def _distinct(arms: list[Arm]) -> list[Arm]:
    """The same arms, those that share a name numbered."""
    named = []
    for index, arm in enumerate(arms):
        same = sum(a.name == arm.name for a in arms[: index + 1])
        alone = sum(a.name == arm.name for a in arms) == 1
        named.append(arm if alone else Arm(f"{arm.name} ({same})", arm.speculation))
    return named
