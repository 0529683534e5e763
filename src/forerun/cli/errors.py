"""Errors and notes of the command line: one line on standard error, without secrets, and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from forerun.checks import SettingError

UNUSABLE, UNANSWERED, BROKEN, INTERRUPTED = 2, 3, 4, 130
"""Exit codes: a setting that cannot be used; an arm that answered nothing or was given up; a fault of forerun; an interrupt."""


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Turn an exception into one red line and an exit code. debug: print the traceback too, and debug messages."""
    if debug:
        logging.getLogger("forerun").setLevel(logging.DEBUG)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        known = _known(error)
        complain(known or f"{type(error).__name__}: {error} (a fault of forerun's own; --debug shows where)")
        raise typer.Exit(BROKEN if known is None else UNUSABLE) from None


def _known(error: Exception) -> str | None:
    """The message of an error that is not a fault of forerun."""
    if isinstance(error, SettingError):
        return str(error)
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror or error}"
    return None


def complain(what: str) -> None:
    """Print an error without its secrets, on one line at any width of the terminal."""
    from rich.console import Console

    from forerun.bench.records.redaction import hide

    Console(stderr=True, soft_wrap=True, highlight=False).print(hide(f"error: {what}"), style="red", markup=False)


def tell(line: str) -> None:
    """Print a note on standard error, since it is not part of the result."""
    print(line, file=sys.stderr, flush=True)


class Notices(logging.Handler):
    """Prints the package's log messages on standard error, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        debug = logging.getLogger("forerun").isEnabledFor(logging.DEBUG)
        line = self.format(record) if debug else record.getMessage()  # only the formatted line has a traceback
        if line not in self._shown:
            self._shown.add(line)
            tell(line)
