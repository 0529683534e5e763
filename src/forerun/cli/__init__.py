"""The command line. A command is a module of this package with a function of the same name, and a name in COMMANDS. Commands
parse, call the package and print; they decide nothing. They import what is slow to import when they run, so that --help
answers at once.
"""

from __future__ import annotations

import io
import logging
import sys
from importlib import import_module
from typing import Annotated

import typer

from forerun import __version__
from forerun.cli.errors import BROKEN, INTERRUPTED, UNANSWERED, UNUSABLE, Notices
from forerun.cli.parameters import command

__all__ = ["BROKEN", "COMMANDS", "INTERRUPTED", "UNANSWERED", "UNUSABLE", "app", "main"]

COMMANDS = ("generate", "serve", "bench", "report", "train", "models")

app = typer.Typer(
    name="forerun",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding, and measurements of whether it pays.\n\n"
    "`forerun bench` answers the question on this machine within five minutes, and `forerun report` shows the answer again; "
    "`forerun generate` continues a text; `forerun serve` answers over HTTP; `forerun train` trains a drafter; "
    "`forerun models` lists the models on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # write an escape for a character that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    if version:
        print(f"forerun {__version__}")
        raise typer.Exit


for name in COMMANDS:
    app.command(name)(command(getattr(import_module(f"forerun.cli.{name}"), name)))


def main() -> None:
    """The entry point."""
    logging.getLogger("forerun").addHandler(Notices())
    logging.getLogger("forerun").setLevel(logging.INFO)
    app()
