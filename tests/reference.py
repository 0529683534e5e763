"""docs/cli.md, made by typer from the help texts. Renew it: python -m tests.reference"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from forerun.cli import app

FILE = Path(__file__).parents[1] / "docs" / "cli.md"
MADE_BY = f"typer {version('typer').rpartition('.')[0]}"  # other versions write other forms


def text() -> str:
    command = typer.main.get_command(app)
    made = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="forerun"), name="forerun")
    return f"<!-- Made by {MADE_BY} from the help texts. Renew it: python -m tests.reference -->\n\n{made.strip()}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
