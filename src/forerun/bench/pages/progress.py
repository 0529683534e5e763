"""How a run is followed while it goes: a bar on a terminal, plain lines on standard error otherwise. Knows batches and a
console, computes nothing that is kept.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from forerun.bench.formats import duration
from forerun.bench.load.plan import Step
from forerun.bench.records.record import Batch

EVERY_S = 10.0  # a reader of plain lines hears something at least that often


class Course:
    """How far a run has come, as a run.Watcher. show: called with this after each change. seconds_of: how long a batch is
    expected to take, None if that is not known; the time that is left follows from how long those took that are done."""

    def __init__(self, show: Callable[[Course], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self.seconds_of: Callable[[Step], float] | None = None
        self._expected: list[float] = []
        self._past = self._spent = 0.0  # expected seconds of the batches that are done, and those they took
        self._since = clock()
        self._last: dict[str, str] = {}
        self.done = 0
        self.doing_what = ""

    @property
    def total(self) -> int:
        """Batches, those that were done before a run was resumed not counted."""
        return len(self._expected)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end; None if nothing is known yet."""
        left = sum(self._expected) - self._past
        if not self._past:
            return left if self.seconds_of is not None and self._expected else None
        return left * self._spent / self._past

    def line(self) -> str:
        """All of it."""
        speeds = ", ".join(f"{name} {speed}" for name, speed in self._last.items())
        left = f", about {duration(self.left_s)} left" if self.left_s is not None and self.done < self.total else ""
        if not self.doing_what:
            return f"{self.total} batches to measure"
        said = f"{self.done} of {self.total} batches{left}: {self.doing_what}" if self.total else self.doing_what
        return said + (f" (tokens/s: {speeds})" if speeds else "")

    def planned(self, steps: Sequence[Step]) -> None:
        """As in run.Watcher."""
        self._expected = [1.0 if self.seconds_of is None else self.seconds_of(step) for step in steps]
        self._show(self)

    def doing(self, what: str) -> None:
        """As in run.Watcher."""
        self.doing_what = what
        self._show(self)

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        """As in run.Watcher."""
        if not self.done:
            self._since = self._clock()  # what came before, such as starting servers, does not come again
        self.doing(f"{task}, {'warm-up' if warmup else f'repetition {repetition + 1}'}, {arm}")

    def ended(self, batch: Batch) -> None:
        """As in run.Watcher."""
        tokens = sum(a.tokens for a in batch.answers if not a.failed)
        if not batch.warmup and batch.wall_s > 0:
            self._last[batch.arm] = f"{tokens / batch.wall_s:.0f}" if tokens else "failed"
        if self.done < self.total:
            now = self._clock()
            self._past += self._expected[self.done]
            self._spent, self._since = self._spent + now - self._since, now
        self.done += 1
        self._show(self)

    def left_out(self, step: Step, why: str) -> None:
        """As in run.Watcher."""
        if self.done < self.total:
            del self._expected[self.done]
        self._show(self)


class Lines:
    """A line when something new begins, and otherwise one every EVERY_S seconds, whatever is going on meanwhile."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said_at, self._line = -EVERY_S, ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def show(self, course: Course) -> None:
        """Said at once if nothing was for a while."""
        self._line = course.line()
        self.check()

    def check(self) -> None:
        """Say where the run is, if nothing was said for EVERY_S seconds."""
        with self._lock:
            if self._line and self._clock() - self._said_at >= EVERY_S:
                self._said_at = self._clock()
                self._say(self._line)

    def _tick(self) -> None:
        while not self._over.wait(1.0):
            self.check()


@contextmanager
def watcher(console: Console) -> Iterator[Course]:
    """A bar if the console is a terminal, else plain lines on standard error."""
    if not console.is_terminal:
        with Lines(lambda line: print(line, file=sys.stderr, flush=True)) as lines:
            yield Course(lines.show)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(course: Course) -> None:
            said = course.line().partition(": ")[2] if course.total else course.doing_what
            left = "" if course.left_s is None else f"about {duration(course.left_s)} left, "
            bar.update(task, description=left + said, total=course.total or None, completed=course.done)

        yield Course(show)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """While something takes a while that cannot be counted."""
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
        yield
        return
    with console.status(what):
        yield
