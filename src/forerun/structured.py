"""What form an answer must have. verify/grammar.py makes a matcher of it. Imports neither torch nor the grammar library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from forerun.checks import Flag, SettingError, Text, Texts, alternatives, convert, require, setting, written

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]
EXAMPLE = {"type": "object", "properties": {"age": {"type": "integer"}}}


@dataclass(frozen=True)
class Schema:
    """A JSON schema, as a mapping or as JSON; the result is JSON. The order of properties is kept."""

    def __call__(self, name: str, value: Any) -> str:
        remedy = f"give a JSON schema as a mapping or as JSON, for instance {EXAMPLE}"
        try:
            found = json.loads(value) if isinstance(value, str) else value
            require(isinstance(found, Mapping), name, value, remedy)
            return written(name, json.dumps(found, ensure_ascii=False, allow_nan=False, default=dict), str(EXAMPLE))
        except SettingError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingError(name, value, f"it is no JSON ({error}); {remedy}") from None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer: exactly one of these is given.

    json_object: any JSON object. json_schema: JSON that the schema allows, with properties in the schema's order. regex: a text
    that the regular expression matches as a whole. grammar: a text of a Lark grammar, which begins with the rule `start`.
    choice: one of these texts. docs/structured.md says what schemas, expressions and grammars may hold. Raises SettingError.
    """

    json_object: bool = setting(False, Flag())
    json_schema: str | None = setting(None, Schema())
    regex: str | None = setting(None, Text("yes|no"))
    grammar: str | None = setting(None, Text('start: "yes" | "no"'))
    choice: tuple[str, ...] = setting((), Texts(("yes", "no")))

    def __post_init__(self) -> None:
        convert(self)
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        remedy = f"give exactly one of {alternatives(KINDS)}, for instance {{'choice': ['yes', 'no']}}"
        require(len(given) == 1, "structured", dict.fromkeys(given, "..."), remedy)

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def value(self) -> Any:
        """What is given under this kind."""
        return getattr(self, self.kind)


KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "grammar", "choice")


def structured(name: str, value: Any) -> StructuredOutput:
    """The value as StructuredOutput; a mapping holds its fields. Raises SettingError."""
    if isinstance(value, StructuredOutput):
        return value
    remedy = f"give a mapping with one of {alternatives(KINDS)}, for instance {{'choice': ['yes', 'no']}}"
    require(isinstance(value, Mapping), name, value, remedy)
    unknown = [key for key in value if key not in KINDS]
    require(not unknown, name, unknown[:3], f"it has no such key; {remedy}")
    return StructuredOutput(**value)
