"""A view as Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.bench.pages.view import Table, View


def markdown(view: View) -> str:
    lines = [f"### {view.heading}", "", f"**{view.answer}.**", ""]
    lines += [f"- {arm}: {text}." if arm else text for arm, text in view.leads]
    lines += ["", view.context] if view.context else []
    for part in view.parts:
        lines += ["", f"**{part.name}**: {part.about}" if part.about else f"**{part.name}**"]
        for i, table in enumerate(part.tables):
            lines += ["", *_table(table)]
            if not i and part.sentences:
                lines += ["", *[f"- {text}" for text, _ in part.sentences]]
    for table in view.tables:
        lines += ["", *_table(table)]
    for text in view.legend:
        lines += ["", text]
    lines += ["", *[f"- {text}" for text in view.findings], *[f"- Note: {text}" for text in view.warnings]]
    for title, command in view.commands:
        lines += ["", f"{title}:", "", f"    {command}"]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    """Each group is a text in the first column."""
    grouped = bool(table.groups)
    heads = [*(["load"] if grouped else []), *[column.name for column in table.columns]]
    sides = [*(["---"] if grouped else []), *["---" if column.left else "---:" for column in table.columns]]
    rows = [[table.groups[i], *row] for i, row in enumerate(table.rows)] if grouped else table.rows
    return [_line(heads), _line(sides), *map(_line, rows)]


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
