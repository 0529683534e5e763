"""Shows the progress of a run: a bar on a terminal, otherwise plain lines on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from forerun.bench.formats import duration
from forerun.bench.load.plan import PlannedBatch
from forerun.bench.records.record import Batch

EVERY_S = 10.0  # the longest time between two plain lines


class Course:
    """The progress of a run, as a run.Watcher. show: called after each change. seconds_of: the expected time of a batch, None
    if not known. The time left is the expected time of the batches left, scaled by the times of the batches done."""

    def __init__(self, show: Callable[[Course], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self.seconds_of: Callable[[PlannedBatch], float] | None = None
        self._expected: list[float] = []
        self._past = self._spent = 0.0  # of the batches done: expected seconds, and seconds taken
        self._since = clock()
        self._speeds: dict[str, str] = {}
        self.done = 0
        self.doing_what = ""

    @property
    def total(self) -> int:
        """The number of batches, without those that were measured before a run was resumed."""
        return len(self._expected)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end; None if not known."""
        left = sum(self._expected) - self._past
        if not self._past:
            return left if self.seconds_of is not None and self._expected else None
        return left * self._spent / self._past

    def line(self) -> str:
        """The whole progress in a line."""
        if not self.doing_what:
            return f"{self.total} batches to measure"
        left = f", about {duration(self.left_s)} left" if self.left_s is not None and self.done < self.total else ""
        text = f"{self.done} of {self.total} batches{left}: {self.doing_what}" if self.total else self.doing_what
        speeds = ", ".join(f"{name} {speed}" for name, speed in self._speeds.items())
        return text + (f" (tokens/s: {speeds})" if speeds else "")

    def planned(self, batches: Sequence[PlannedBatch]) -> None:
        """As in run.Watcher."""
        self._expected = [1.0 if self.seconds_of is None else self.seconds_of(one) for one in batches]
        self._show(self)

    def doing(self, what: str) -> None:
        """As in run.Watcher."""
        self.doing_what = what
        self._show(self)

    def began(self, task: str, arm: str, repetition: int, warmup: bool) -> None:
        """As in run.Watcher."""
        if not self.done:
            self._since = self._clock()  # the time before, such as the start of servers, does not recur
        self.doing(f"{task}, {'warm-up' if warmup else f'repetition {repetition + 1}'}, {arm}")

    def ended(self, batch: Batch) -> None:
        """As in run.Watcher."""
        tokens = sum(a.tokens for a in batch.answers if not a.failed)
        if not batch.warmup and batch.wall_s > 0:
            self._speeds[batch.arm] = f"{tokens / batch.wall_s:.0f}" if tokens else "failed"
        if self.done < self.total:
            now = self._clock()
            self._past += self._expected[self.done]
            self._spent, self._since = self._spent + now - self._since, now
        self.done += 1
        self._show(self)

    def left_out(self, planned: PlannedBatch, why: str) -> None:
        """As in run.Watcher."""
        if self.done < self.total:
            del self._expected[self.done]
        self._show(self)


class Spoken(Protocol):
    def line(self) -> str:
        """The whole progress in a line."""


class Lines:
    """Says the progress as a line at most every EVERY_S seconds, from a thread if nothing changes meanwhile."""

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

    def show(self, course: Spoken) -> None:
        self._line = course.line()
        self.check()

    def check(self) -> None:
        """Say the progress if nothing was said for EVERY_S seconds."""
        with self._lock:
            if self._line and self._clock() - self._said_at >= EVERY_S:
                self._said_at = self._clock()
                self._say(self._line)

    def _tick(self) -> None:
        while not self._over.wait(1.0):
            self.check()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def watcher(console: Console) -> Iterator[Course]:
    """A bar if the console is a terminal, else plain lines on standard error."""
    if not console.is_terminal:
        with Lines(_say) as lines:
            yield Course(lines.show)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(course: Course) -> None:
            text = course.line().partition(": ")[2] if course.total else course.doing_what
            left = "" if course.left_s is None else f"about {duration(course.left_s)} left, "
            bar.update(task, description=left + text, total=course.total or None, completed=course.done)

        yield Course(show)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Says what is going on, of which no progress is known."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        _say(what)
        yield


class Following:
    """The progress of work in parts, each of so many pieces. show: called after each change. The time left in a part follows
    from the pace since it began."""

    def __init__(self, show: Callable[[Following], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self.what = self.detail = ""
        self.done = self.total = self._before = 0
        self._since = clock()

    def begin(self, what: str, done: int, total: int) -> None:
        """A part begins, of which `done` was done before. total: 0 if it is not known."""
        self.what, self.detail = what, ""
        self.done, self.total, self._before = done, total, done
        self._since = self._clock()
        self._show(self)

    def at(self, done: int, detail: str) -> None:
        self.done, self.detail = done, detail
        self._show(self)

    def line(self) -> str:
        """The whole progress in a line."""
        if not self.what:
            return ""
        how = f" ({self.detail})" if self.detail else ""
        if not self.total:
            return f"{self.what}{how}"
        return f"{self.done} of {self.total} {self.what}{self.left()}{how}"

    def left(self) -> str:
        made = self.done - self._before
        if made <= 0 or self.done >= self.total:
            return ""
        return f", about {duration((self._clock() - self._since) * (self.total - self.done) / made)} left"


@contextmanager
def following(console: Console) -> Iterator[Following]:
    """A bar if the console is a terminal, else plain lines on standard error."""
    if not console.is_terminal:
        with Lines(_say) as lines:
            yield Following(lines.show)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(course: Following) -> None:
            text = f"{course.what}{course.left()}" + (f" ({course.detail})" if course.detail else "")
            bar.update(task, description=text, total=course.total or None, completed=course.done)

        yield Following(show)
