"""How a run is followed while it goes: a bar on a terminal, plain lines on standard error otherwise. Knows batches and a
console, computes nothing that is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.bench.record import Batch


class Lines:
    """A line for each task as it begins."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self._total, self._done = say, total, 0
        self._task = ""

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        if task != self._task:
            self._task = task
            self._say(f"{task}: measuring ({self._done} of {self._total} batches done)")

    def ended(self, batch: Batch) -> None:
        self._done += 1


class Bar:
    """What is running, and what the last batch of each arm gave. tell(description) changes the text, done() moves the bar."""

    def __init__(self, tell: Callable[[str], None], done: Callable[[], None]) -> None:
        self._tell, self._done = tell, done
        self._last: dict[str, str] = {}

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        what = "warm-up" if warmup else f"repetition {repetition + 1}"
        last = ", ".join(f"{name} {speed}" for name, speed in self._last.items())
        self._tell(f"{task}, {what}, {arm}" + (f" (tokens/s: {last})" if last else ""))

    def ended(self, batch: Batch) -> None:
        if not batch.warmup and batch.wall_s > 0:
            self._last[batch.arm] = f"{sum(len(a.token_ids) for a in batch.answers) / batch.wall_s:.0f}"
        self._done()


@contextmanager
def watcher(console: Console, total: int) -> Iterator[Lines | Bar]:
    """For a run of `total` batches."""
    if not console.is_terminal:
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True), total)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield Bar(lambda text: progress.update(bar, description=text), lambda: progress.advance(bar))


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """While something takes a while that cannot be counted."""
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
        yield
        return
    with console.status(what):
        yield
