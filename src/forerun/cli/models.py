"""`forerun models`: list the models on this machine, and the drafters that come with Forerun."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def models(
    fetch: Annotated[str | None, typer.Option("--fetch", metavar="MODEL", help="Fetch this model first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List the models that are on this machine, by the names that --model takes, and the trained drafters that come with
    Forerun, by the names that "model" in --speculative-config takes. On their own target they need no name: -s eagle3.

    **Examples**

        forerun models

        forerun models --fetch smollm2-135m-instruct
    """
    from forerun.models import hub, shipped

    if fetch is not None:
        hub.resolve(fetch)
    known, drafters = hub.models(), shipped.drafters()
    if as_json:
        found = [{"name": m.name, "folder": str(m.folder) if m.folder else None, "bytes": m.bytes} for m in known]
        own = [{"name": d.name, "folder": str(d.folder), "bytes": d.bytes, "method": d.method} for d in drafters]
        print(json.dumps([*found, *own]))
        return
    from rich.console import Console
    from rich.table import Column, Table

    console, table = Console(), Table(Column("model", overflow="fold"), "size", Column("folder", overflow="fold"))
    for m in known:
        if m.folder is None:
            table.add_row(m.name, "–", "not here yet; fetched on first use")
        else:
            table.add_row(m.name, f"{m.bytes / 1e6:,.0f} MB", str(m.folder))
    console.print(table)
    if drafters:
        table = Table(Column("drafter", no_wrap=True), "method", "size", Column("folder", overflow="fold"))
        for d in drafters:
            table.add_row(d.name, d.method, f"{d.bytes / 1e6:,.0f} MB", str(d.folder))
        console.print(table)
