"""The outputs that `bench` and `report` make of a record: tables on the terminal, files, and the results of thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.checks import SettingError, require
from forerun.options import OUTPUT, option

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.pages.view import View
    from forerun.bench.records.record import Record


@dataclass(frozen=True, slots=True)
class Outputs:
    """The options for what is written."""

    markdown: Path | None = option(None, OUTPUT, "Write the tables and sentences as Markdown.", metavar="FILE")
    html: Path | None = option(
        None, OUTPUT, "Write one page with verdict, charts and tables; it needs no network.", metavar="FILE"
    )
    ci: tuple[str, ...] = option(
        (), OUTPUT,
        "Exit with 1 unless this holds, for instance 'speedup.copy >= 1.3', 'identical == all', 'failures == 0'. May be "
        "repeated.",
        metavar="THRESHOLD",
    )  # fmt: skip
    junit: Path | None = option(None, OUTPUT, "Write the result of each --ci as a JUnit XML file.", metavar="FILE")

    def check_files(self, records: Sequence[Path]) -> None:
        """Raises SettingError for a file that cannot be written, that is named twice or that is one of these records, and for a
        threshold that cannot be read."""
        from forerun.bench.records import thresholds
        from forerun.bench.records.keeping import writable

        for name, path in (("markdown", self.markdown), ("html", self.html), ("junit", self.junit)):
            if path is not None:
                writable(name, path)
                every = (*records, self.markdown, self.html, self.junit)
                same = [other for other in every if other is not None and _same(other, path)]
                require(len(same) <= 1, name, str(path), "another file would be written over; give another name")
        unused = self.junit is not None and not self.ci
        require(not unused, "junit", str(self.junit), "there is no threshold; add --ci 'failures == 0'")
        thresholds.parse(self.ci)

    def check_thresholds(self, tasks: Sequence[str], loads: Sequence[str], arms: Sequence[str]) -> None:
        """Raises SettingError for a threshold on a task, a load or an arm that is not measured."""
        from forerun.bench.records import thresholds

        thresholds.exist(thresholds.parse(self.ci), tasks, loads, arms)

    def show(self, views: Sequence[View], console: Console) -> None:
        """Show what was made of records on the terminal, and write it as Markdown and as one page where asked for."""
        from forerun.bench.pages import html, markdown, terminal

        for view in views:
            terminal.show(view, console)
        if self.markdown is not None:
            write(self.markdown, "\n".join(map(markdown.markdown, views)))
        if self.html is not None:
            write(self.html, html.page(*views))

    def write(self, record: Record, console: Console) -> bool:
        """Show the record and write the files. Returns whether every threshold holds."""
        from forerun.bench.pages import junit, report
        from forerun.bench.records import thresholds

        self.show([report.view(record)], console)
        checks = thresholds.check(thresholds.parse(self.ci), record)
        if checks:
            console.print()
        for check in checks:
            style = "green" if check.passed else "red"
            console.print(thresholds.line(check), style=style, markup=False, highlight=False, soft_wrap=True)
        if self.junit is not None:
            write(self.junit, junit.junit(checks, record))
        return all(check.passed for check in checks)


def write(path: Path, text: str) -> None:
    """Write a text file. A lone surrogate, which a server may send, is written as its escape."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def load_record(path: Path) -> Record:
    """Raises SettingError."""
    from forerun.bench.records import record

    try:
        return record.load(path)
    except OSError as error:
        raise SettingError("file", str(path), f"cannot be read ({error.strerror}); give a file that bench wrote") from None


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file. A device may be written to more than once."""
    return one.resolve() == other.resolve() and (one.is_file() or not one.exists())
