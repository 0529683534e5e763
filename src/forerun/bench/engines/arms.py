"""The arms of a comparison: each is a name and a way of drafting, or none. Knows settings, not engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.checks import require
from forerun.config import HEADS, Speculation, known_method
from forerun.models import shipped

BASELINE = "baseline"
CONTROL = "baseline again"
LOOK_UPS = ("ngram", "suffix")
LEARNED = {"draft_model": "draft_model", "eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash:k=7"}
NGRAM_LOOKUP = (2, 5)  # the look-up lengths of the reference study; the engine's own defaults are 5 and 5


@dataclass(frozen=True, slots=True)
class Arm:
    """settings: of the drafter, with vLLM's keys; None: no drafter. flags: words that are added to the command of a server."""

    name: str
    settings: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()


def default(model: str) -> tuple[str, ...]:
    """The arms that are measured if none is given: the look-ups, and the drafters that come with Forerun for this model."""
    here = shipped.methods(model)
    return (*LOOK_UPS, *(text for method, text in LEARNED.items() if method in here))


def parse(texts: Sequence[str]) -> tuple[Arm, ...]:
    """The arms that these texts name. Each text is a method (`ngram`, `suffix`, `eagle3`), a head with a look-up beside it
    (`eagle3+ngram`), either with draft lengths (`ngram:k=2,4,8`, one arm for each), or a speculative configuration as JSON. The
    word ngram means look-up lengths 2 to 5.

    Raises SettingError for any other text, and for two equal arms.
    """
    arms = [arm for text in texts for arm in _parsed(text.strip())]
    for arm in arms:
        require([one.settings for one in arms].count(arm.settings) == 1, "arms", arm.name, "give each arm once")
    names = [arm.name for arm in arms]
    return tuple(
        arm if names.count(arm.name) == 1 else dataclasses.replace(arm, name=f"{arm.name} ({names[: i + 1].count(arm.name)})")
        for i, arm in enumerate(arms)
    )


def _parsed(text: str) -> list[Arm]:
    if text.startswith("{"):
        return [_arm(text)]
    method, colon, rest = text.partition(":")
    head, beside = method.removesuffix("+ngram"), method.endswith("+ngram")
    if not beside or head not in HEADS:
        known_method("arms", method, ", a head with a look-up as in eagle3+ngram, draft lengths as in ngram:k=2,4,8, or JSON")
    settings: dict[str, Any] = {"method": head}
    if beside or method in ("ngram", "ngram_gpu"):
        settings["prompt_lookup_min"], settings["prompt_lookup_max"] = NGRAM_LOOKUP
    if not colon:
        return [_arm(settings)]
    key, _, numbers = rest.partition("=")
    lengths = [n.strip() for n in numbers.split(",")]
    valid = all(n.isascii() and n.isdigit() and len(n) < 10 for n in lengths)
    require(key == "k" and valid, "arms", text, "give draft lengths as in ngram:k=2,4,8")
    return [_arm({**settings, "num_speculative_tokens": int(n)}, f"{method} k={int(n)}") for n in lengths]


def _arm(value: Mapping[str, Any] | str, name: str | None = None) -> Arm:
    speculation = Speculation.parse(value)
    assert speculation is not None
    method = speculation.method
    if method in HEADS and speculation.prompt_lookup_min is not None:
        method = f"{method}+ngram"
    known = "suffix" if method == "suffix" else f"{method} k={speculation.num_speculative_tokens}"
    return Arm(name or known, speculation.effective())
