"""A view on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from forerun.bench.pages.view import Table, View

STYLE = {"faster": "green", "slower": "red", "no difference": "cyan", "not enough data": "yellow"}
LEAST = 9  # the width that a column of broken texts keeps


def show(view: View, console: Console) -> None:
    for part in terminal(view, console.width):
        console.print(part)


def terminal(view: View, width: int) -> Iterator[RenderableType]:
    """What is printed on a terminal of that many columns, from top to bottom."""
    yield Text(view.heading)
    yield Text(f"{view.answer}.", style="bold")
    for arm, text in view.leads:
        yield Text(f"{arm}: {text}." if arm else text)
    if view.context:
        yield Text(view.context)
    for part in view.parts:
        yield Text()
        yield Text(f"{part.name}: {part.about}" if part.about else part.name, style="bold")
        for i, table in enumerate(part.tables):
            if i:
                yield Text()
            yield drawn(table, width)
            if not i:
                yield from (Text(text, style=STYLE[call] if call else "") for text, call in part.sentences)
    for table in view.tables:
        yield Text()
        yield drawn(table, width)
    yield Text()
    yield from (Text(text) for text in view.findings)
    yield from (Text(text, style="dim") for text in view.legend)
    yield from (Text(f"Note: {text}", style="yellow") for text in view.warnings)


def drawn(table: Table, width: int) -> RichTable:
    """Columns whose texts do not wrap keep their width, so that no figure is cut off. Each group has a line of its own."""
    least = [
        max(LEAST if column.wraps else len(text) for text in (*(column.narrow or column.name).split("\n"), *texts))
        for column, *texts in zip(table.columns, *table.rows, strict=True)
    ]
    room = width >= sum(least) + len(least) - 1
    columns = [column for column in table.columns if room or not column.optional]
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, collapse_padding=True)
    for column in columns:
        made.add_column(
            Text(column.narrow or column.name),
            justify="left" if column.left else "right",
            no_wrap=not column.wraps,
            min_width=LEAST if column.wraps else None,
        )
    group = ""
    for i, row in enumerate(table.rows):
        if table.groups and table.groups[i] != group:
            group = table.groups[i]
            made.add_row(Text(group, style="bold"))
        made.add_row(*[Text(text, style=STYLE.get(text, "")) for text in row[: len(columns)]])
    return made
