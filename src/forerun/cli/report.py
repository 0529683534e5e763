"""`forerun report`: show a record again, or compare records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.checks import require
from forerun.cli.outputs import Outputs, load_record


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Records that `forerun bench` wrote.")],
    outputs: Outputs,
) -> None:
    """Show a record again, or compare records: the first with each of the others.

    One record is shown as `bench` showed it, and can be written as Markdown or as a page, or held against thresholds. Of
    several, the cells of the same task, load and arm are compared: what became faster or slower, and what else differs
    between the runs.

    **Examples**

        forerun report bench-20261129-180000.json --html result.html

        forerun report last-week.json today.json --markdown change.md
    """
    from rich.console import Console

    from forerun.bench.pages import changes

    console = Console()
    first, *others = [load_record(path) for path in files]
    limits = outputs.ci or outputs.junit
    require(not others or not limits, "ci", limits, "a threshold speaks of one record; give one FILE")
    outputs.check_files(files)
    if not others:
        s = first.settings
        outputs.check_thresholds(s.tasks, [load.label for load in s.loads], [arm.name for arm in s.arms])
        if not outputs.write(first, console):
            raise typer.Exit(1)
        return
    outputs.show([changes.view(first, later) for later in others], console)
