"""The comparison of two runs in words and tables: terminal and Markdown, the same rows. Its figures are compare.py's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from forerun.bench.pages.report import STYLE, interval, lined, listing, number, percent
from forerun.bench.pages.words import listed, model_of, place
from forerun.bench.records.compare import Change, changes, differences, drift, unmatched
from forerun.bench.records.record import Record
from forerun.types import SettingError

HEADER = ("arm", "tokens/s", "change [95 %]", "", "speed-up", "change [95 %]", "", "accepted")
UNPAIRED = (
    "the runs were not interleaved and so are not paired: whatever changed of the machine between them is part of every change "
    "of tokens/s. A change of the speed-up is not, for each run measured a baseline of its own."
)
NOTICED = 0.03  # a baseline that moved by more than that is said to have moved


def title(before: Record, after: Record) -> str:
    return f"{model_of(after)}: {before.started[:16]} against {after.started[:16]}".replace("T", " ")


def headline(made: Sequence[Change], record: Record) -> str:
    """Where the speed-up changed, in a sentence."""
    judged = [c for c in made if c.speedup_verdict is not None and c.after.arm != record.settings.control]
    if not judged:
        return "The runs have no candidate in common"
    said = []
    for call, words in (("slower", "less"), ("faster", "more")):
        arms: dict[str, list[str]] = {}
        for c in judged:
            if c.speedup_verdict == call:
                arms.setdefault(c.after.arm, []).append(place(c.after.task, c.after.load, record))
        if arms:
            here = [f"{arm} on {listed(places)}" for arm, places in arms.items()]
            said.append(f"speculation gains {words} than before with {', with '.join(here)}")
    if said:
        whole = "; ".join(said)
        return whole[0].upper() + whole[1:]
    if all(c.speedup_verdict == "no difference" for c in judged):
        return "Speculation gains as much as before"
    return "No certain change of the speed-up"


def moved(made: Sequence[Change], record: Record) -> str | None:
    """What became of the baseline itself, if it is worth a word."""
    ratio = drift(made, record.settings.reference)
    if ratio is None or abs(ratio - 1) <= NOTICED:
        return None
    return f"the baseline itself came out {ratio:.2f} times as fast as before."


def row(change: Change) -> list[str]:
    """In the order of HEADER."""
    b, a = change.before, change.after
    return [
        a.arm,
        f"{number(b.tokens_per_s, 1)} → {number(a.tokens_per_s, 1)}",
        interval(change.speed),
        change.speed_verdict,
        f"{b.speedup.mean:.2f} → {a.speedup.mean:.2f}" if b.speedup and a.speedup else "–",
        interval(change.speedup),
        change.speedup_verdict or "–",
        f"{percent(b.acceptance_rate)} → {percent(a.acceptance_rate)}" if b.acceptance_rate is not None else "–",
    ]


def notes(before: Record, after: Record, made: Sequence[Change]) -> list[str]:
    """What to beware of beside a baseline that moved, first that the runs were not interleaved."""
    found = [UNPAIRED]
    if any(not c.same_prompts for c in made):
        found.append("the runs sent other prompts, so intervals of tokens/s hold what differs between prompts, too.")
    return found + differences(before, after) + unmatched(before, after)


def compare(before: Record, after: Record) -> list[Change]:
    """Raises SettingError if the runs have no cell in common."""
    made = changes(before, after)
    if not made:
        raise SettingError(
            "report", f"{before.started} and {after.started}", "the runs have no task, load and arm in common; give records "
            "of the same tasks",
        )  # fmt: skip
    return made


def by_place(made: Sequence[Change], record: Record) -> list[tuple[str, list[Change]]]:
    names = list(dict.fromkeys(place(c.after.task, c.after.load, record) for c in made))
    return [(name, [c for c in made if place(c.after.task, c.after.load, record) == name]) for name in names]


def terminal(before: Record, after: Record) -> Iterator[RenderableType]:
    made = compare(before, after)
    yield Text(title(before, after))
    yield Text(headline(made, after) + ".", style="bold")
    if (said := moved(made, after)) is not None:
        yield Text(said.capitalize())
    for name, here in by_place(made, after):
        yield Text()
        yield Text(name, style="bold")
        for caption, columns in (("tokens/s", [0, 1, 2, 3]), ("speed-up", [0, 4, 5, 6, 7])):
            rows = [[r[i] for i in columns] for c in here if (r := row(c))[columns[1]] != "–"]
            if rows:
                yield listing(rows, (caption, "before → after", "change [95 %]", "", "accepted")[: len(columns)], STYLE)
    yield Text()
    for note in notes(before, after, made):
        yield Text(f"Note: {note}", style="yellow")


def show(before: Record, after: Record, console: Console) -> None:
    for part in terminal(before, after):
        console.print(part)


def markdown(before: Record, after: Record) -> str:
    made = compare(before, after)
    lines = [f"### {title(before, after)}", "", f"**{headline(made, after)}.**", ""]
    if (said := moved(made, after)) is not None:
        lines += [said.capitalize(), ""]
    for name, here in by_place(made, after):
        lines += [f"**{name}**", "", *lined([row(c) for c in here], HEADER), ""]
    return "\n".join([*lines, *[f"- Note: {note}" for note in notes(before, after, made)]]).rstrip() + "\n"
