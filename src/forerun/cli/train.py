"""`forerun train`: train a drafter for a model, with the model's own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.checks import SettingError
from forerun.cli.errors import tell
from forerun.cli.parameters import given_names
from forerun.options import OUTPUT
from forerun.train.options import Options, combined
from forerun.train.shape import METHODS, check, known_method

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.train.run import Result, Run


def train(
    ctx: typer.Context,
    options: Options,
    method: Annotated[
        str | None, typer.Argument(show_default="that of --config", metavar="METHOD", help=f"{', '.join(METHODS)}.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", rich_help_panel=OUTPUT, help="Options in TOML; flags come first."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Say what data, memory and time the run needs, and end."),
    ] = False,
) -> None:
    """Train a drafter for a model: the model answers prompts, and the drafter learns to foresee its answers.

    The folder of --out gets the answers, a log, a page with the learning curve, and the drafter in head/, which forerun, vLLM
    and SGLang load. The same command again goes on where a run stopped.

    **Examples**

        forerun train eagle3 --data prompts.jsonl --out runs/eagle3 --dry-run

        forerun train eagle3 --data prompts.jsonl --out runs/eagle3 --steps 4000

        forerun train --config dflash.toml --rate 5e-4
    """
    options, of_file, names = combined(options, given_names(ctx), config)
    method = method or of_file
    if method is None:
        raise SettingError("method", None, f"give one of {', '.join(METHODS)}, for instance forerun train eagle3")
    method = known_method(method)
    for name, example in (("data", "prompts.jsonl"), ("out", "runs/eagle3")):
        if getattr(options, name) is None:
            raise SettingError(name, None, f"give --{name}, for instance --{name} {example}")
    from forerun.train.shape import Shape

    check(method, names, options.part(Shape))
    from rich.console import Console

    from forerun.bench.pages import progress
    from forerun.train.run import Run

    console = Console()
    with progress.following(console) as course:
        run = Run(method, options, course)
        if not dry_run:
            if run.begun:
                tell(f"Going on with the run in {run.folder}")
            result = run.make()
        else:
            estimate = run.estimate()
    if dry_run:
        from rich.table import Table

        table = Table("what", "how much", "known")
        for row in estimate.rows:
            table.add_row(*row)
        console.print(table)
        return
    _show(console, run, result)


def _show(console: Console, run: Run, result: Result) -> None:
    """Acceptance on held-out prompts, and how to use the drafter."""
    from forerun.train import curve, trying

    curve.show(run.folder, console)
    setting = json.dumps(trying.speculation(run.method, result.head, run.k))
    seconds = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items() if seconds >= 0.5)
    console.print(f"\n{seconds}" if seconds else "", highlight=False)
    console.print(f"The learning curve: {run.folder / curve.PAGE}", highlight=False, soft_wrap=True)
    target = run.loaded.name
    console.print("\nUse it:", style="bold")
    print(f"forerun generate --model {target} --speculative-config '{setting}'")
