"""`forerun models`: list the models on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def models(
    fetch: Annotated[str | None, typer.Option("--fetch", metavar="MODEL", help="Fetch this model first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List the models that are on this machine, by the names that --model takes.

    **Examples**

        forerun models

        forerun models --fetch smollm2-135m-instruct
    """
    from forerun.models import hub

    if fetch is not None:
        hub.resolve(fetch)
    known = hub.models()
    if as_json:
        print(json.dumps([{"name": m.name, "folder": str(m.folder) if m.folder else None, "bytes": m.bytes} for m in known]))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("model", "size", Column("folder", overflow="fold"))
    for m in known:
        if m.folder is None:
            table.add_row(m.name, "–", "not here yet; fetched on first use")
        else:
            table.add_row(m.name, f"{m.bytes / 1e6:,.0f} MB", str(m.folder))
    Console().print(table)
