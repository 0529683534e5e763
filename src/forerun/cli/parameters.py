"""Dataclasses of options (see forerun/options.py) as the parameters of a command: makes typer's parameters from the fields, and
instances from the values that typer has parsed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from forerun.checks import SettingError
from forerun.cli.errors import plain_errors
from forerun.options import OUTPUT, PANELS, Option, option_of

T = TypeVar("T")
Debug = Annotated[
    bool, typer.Option("--debug", rich_help_panel=OUTPUT, help="Show where an error comes from, and debug messages.")
]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make of a function what typer accepts as a command. A parameter that is a dataclass of options becomes an option for each
    field; the others are declared as typer documents. Every command gets --debug, and plain_errors reports its errors."""
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    groups = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}
    own = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name not in groups]
    every = [*own, *_by_panel(p for group in groups.values() for p in _parameters(group)), _parameter("debug", Debug, False)]

    def run(debug: bool, **given: Any) -> None:
        with plain_errors(debug):
            found = {name: _instance(group, given) for name, group in groups.items()}
            function(**found, **{p.name: given[p.name] for p in own})

    run.__doc__, run.__annotations__ = function.__doc__, {}
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    return run


def given_names(ctx: typer.Context) -> set[str]:
    """The fields of the options that are on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(group: type) -> Iterable[inspect.Parameter]:
    """A parameter for each field of a dataclass of options."""
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        option, kind = option_of(field), hints[field.name]
        default: Any = field.default
        if option.choices:
            kind = _words(field.name, option.choices)
            default = kind(default)
        elif option.separated:
            kind, default = str | None, None if option.default_text else ",".join(map(str, default)) or None
        elif isinstance(default, tuple):
            kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
        info = typer.Option(
            *option.flags,
            help=option.help,
            metavar=option.metavar,
            rich_help_panel=option.panel,
            show_default=option.default_text or True,
        )
        yield _parameter(field.name, Annotated[kind, info], default)


def _words(name: str, choices: tuple[str, ...]) -> Any:
    """An enumeration: typer's form of a choice of words."""
    members = {word: word for word in choices}
    return StrEnum(name, members)


def _by_panel(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return sorted(parameters, key=lambda p: PANELS.index(p.annotation.__metadata__[0].rich_help_panel))


def _instance(group: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass with the values that typer has parsed. Raises SettingError."""
    hints = get_type_hints(group)
    found = {}
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        value, option = given[field.name], option_of(field)
        if value is None:
            continue
        if option.separated:
            value = _separated(option, value, get_args(hints[field.name])[0])
        elif isinstance(field.default, tuple):
            value = tuple(value)
        found[field.name] = value.value if option.choices else value
    return group(**found)


def _separated(option: Option, text: str, kind: type) -> tuple[Any, ...]:
    """The values in a text that commas separate. Raises SettingError."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        name = option.flags[0].lstrip("-")
        raise SettingError(name, text, "give numbers separated by commas, as in 1,8,32") from None
