"""A record in sentences: what was run, whether speculation pays in a cell and on the whole, and what could mislead. Knows
figures and how to say them; nothing of terminals or pages.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from forerun.bench import options
from forerun.bench.engines.failures import counted
from forerun.bench.records.record import ArmRecord, Difference, Load, Machine, Record
from forerun.bench.records.statistics import Ratio, pairs_needed
from forerun.bench.records.summary import Cell, Draw, cells, draws, margin, noise, unanswered
from forerun.bench.workloads.tasks import TASKS, VARIANTS

NEAR_TIE = 0.5  # in log-probability: wider than rounding in bfloat16 moves two logits of one forward pass apart
BUSY = 0.5  # load average for each core from which other programs are likely to disturb
REPETITIONS = 64  # more than so many would take longer than a quieter machine is worth looking for
LONG_S = 3600.0  # a run that is known to take longer than that says so before it starts
REASONS = 3  # kinds of failure that a sentence names
LATE_S = 0.005  # requests sent later than that after their time: the load generator itself was short of processor time
CALLS = {
    "faster": "speculation pays",
    "slower": "speculation does not pay",
    "no difference": "speculation makes no difference",
    "not enough data": "not enough data to say whether it pays",
}


def title(record: Record) -> str:
    s, v = record.settings, record.versions
    dtype, isa = (s.arms[0].engine.get(name) or "" for name in ("dtype", "cpu_isa"))
    dtype += f" ({isa})" if isa else ""
    engine = versions_of(record)
    return (
        f"{model_of(record)} {dtype} on {hardware(record.machine)}. {s.repetitions} repetitions of {loads_of(record)}, "
        f"at most {s.max_tokens} output tokens. forerun {v.get('forerun', '?')}, {engine}"
        f"{record.started}, {record.seconds:.0f} s."
    ).replace("  ", " ")


def hardware(machine: Machine) -> str:
    """What the engine ran on, as far as it is known."""
    here = f"{machine.cpu}, {machine.cores} cores"
    return f"unknown hardware, asked from {here}" if machine.client_only else machine.accelerator or here


def model_of(record: Record) -> str:
    """The model as it was named; of a folder its own name, which is what another machine has in common with this one."""
    name = record.settings.model
    return PurePath(name).name if name.startswith(("/", "~")) else name


def loads_of(record: Record) -> str:
    """What each repetition sent: 8 requests; 8 requests at c=1, 64 at 2/s."""
    loads = record.settings.loads
    if len(loads) == 1 and loads[0].kind == "concurrency" and loads[0].concurrency == loads[0].requests:
        return _count(loads[0].requests, "request")
    return ", ".join(f"{_count(load.requests, 'request')} at {load.label}" for load in loads)


def load_of(load: Load) -> str:
    """A load in plain words."""
    if load.kind == "trace":
        return "at the times of the trace" + (f", {load.speed:g} times as fast" if load.speed != 1 else "")
    if load.kind == "poisson":
        return f"{load.rate:g} arriving each second"
    return "one at a time" if load.concurrency == 1 else f"{load.concurrency} at once"


def versions_of(record: Record) -> str:
    if record.settings.engine == "forerun":
        return f"torch {record.versions.get('torch', '?')}, "
    found = {f"{a.facts.engine} {a.facts.version or ''}".strip() for a in record.settings.arms if a.facts}
    return ", ".join(sorted(found or {record.settings.engine})) + ", "


def command(record: Record) -> str:
    """The command line that repeats the run; of older records as much as can be told from the settings."""
    s = record.settings
    if s.command:
        return shlex.join(s.command)
    engine = s.arms[0].engine
    again = options.Options(
        model=s.model,
        arms=tuple(
            json.dumps({key: value for key, value in arm.speculation.items() if value is not None})
            for arm in s.arms
            if arm.speculation is not None
        ),
        tasks=tuple(task for task in s.tasks if task in TASKS),
        concurrency=tuple(load.concurrency for load in s.loads if load.kind == "concurrency"),
        repetitions=s.repetitions,
        warmups=s.warmups,
        max_tokens=s.max_tokens,
        control=s.control is not None,
        seed=s.seed,
        dtype=engine.get("dtype", "auto"),
        device=str(engine.get("device", "auto")).partition(":")[0],
    )
    return shlex.join(options.words(again))


def about(task: str) -> str:
    """What a task stands for, in half a line."""
    return TASKS[task].about if task in TASKS else "the user's own prompts"


def place(task: str, load: Load, record: Record) -> str:
    """A cell's task, and its load where the run has several."""
    return task if len(record.settings.loads) == 1 else f"{task} at {load.label}"


def times(ratio: Ratio) -> str:
    """1.64 times the baseline's speed (1.60 to 1.68)."""
    said = f"{ratio.mean:.2f} times the baseline's speed"
    return said + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low is not None and ratio.high is not None else "")


def sentence(cell: Cell, record: Record) -> str | None:
    """Whether speculation pays in this cell, and why. None for the arms that do not speculate."""
    if cell.verdict is None or cell.arm == record.settings.control:
        return None
    said = f"{place(cell.task, cell.load, record)}, {cell.arm}: {CALLS[cell.verdict]}"
    if cell.verdict == "not enough data":
        return said + unsettled(cell, record)
    assert cell.speedup is not None
    seen = " as a request sees it" if cell.load.kind != "concurrency" else ""
    reason = why(cell) if len(record.settings.loads) == 1 else f" {needed(cell)}"
    return f"{said}, {times(cell.speedup)}{seen}.{reason}".rstrip()


def unsettled(cell: Cell, record: Record) -> str:
    """What there is of data, and what would settle it."""
    r = cell.speedup
    if r is None:
        return f"; no pair of batches was completed{_because(cell.reasons)}."
    more = pairs_needed(r, margin(record, cell.task, cell.load))
    most = min(VARIANTS // cell.load.requests - record.settings.warmups, REPETITIONS)
    if more is None:
        remedy = " Try --repetitions 8."
    elif more <= most:
        remedy = f" Try --repetitions {max(more, r.pairs + 1)}."
    else:
        remedy = " That is too uneven for more repetitions to settle: measure on a quieter machine."
    return f": {times(r)} over {_count(r.pairs, 'pair')}.{remedy}"


def failed(failures: int, requests: int, reasons: list[tuple[str, int]]) -> str:
    """12 of 12 requests failed: HTTP 401: no key. Of several reasons each with how often."""
    return f"{failures} of {_count(requests, 'request')} failed{_because(reasons)}"


def _because(reasons: list[tuple[str, int]]) -> str:
    if not reasons:
        return ""
    said = [reason.rstrip(".") + (f" ({n} times)" if len(reasons) > 1 else "") for reason, n in reasons[:REASONS]]
    more = sum(n for _, n in reasons[REASONS:])
    return ": " + "; ".join(said) + (f"; and {more} others" if more else "")


def why(cell: Cell) -> str:
    """Break-even: what a step cost and what it gave. Begins with a space."""
    if cell.counts is None or cell.needed is None or cell.got is None:
        return ""
    if not cell.counts.drafted:
        return " It never had a draft, so every step gave one token."
    return (
        f" A step took {cell.needed:.2f} times as long as a plain one, so it needed {cell.needed:.2f} tokens to break even; "
        f"it got {cell.got:.2f}."
    )


def needed(cell: Cell) -> str:
    """The same in short."""
    if cell.counts is None or cell.needed is None or cell.got is None:
        return ""
    if not cell.counts.drafted:
        return "It never had a draft."
    return f"Needed {cell.needed:.2f} tokens a step to break even, got {cell.got:.2f}."


def headline(record: Record) -> tuple[str, list[tuple[str, str]]]:
    """The answer in a few words, and for each candidate where it is faster, where slower, where neither. A place is
    a task under a load; it pays there if one of the candidates is faster."""
    judged = [c for c in cells(record) if c.verdict is not None and c.arm != record.settings.control]
    silent = {one.arm: failed(one.requests, one.requests, one.reasons) for one in unanswered(record)}
    calls = {c.verdict for c in judged}
    places = list(dict.fromkeys(place(c.task, c.load, record) for c in judged))
    pays = list(dict.fromkeys(place(c.task, c.load, record) for c in judged if c.verdict == "faster"))
    if pays and len(pays) == len(places):
        answer = "Yes, speculation pays here"
    elif pays:
        few = len(pays) <= 3
        answer = f"Speculation pays on {listed(pays)}" if few else f"Speculation pays in {len(pays)} of {len(places)} cases"
    elif record.settings.reference in silent:
        answer = "Nothing was measured: no request to the baseline was answered"
    elif calls <= {"not enough data"}:
        answer = f"Nothing was measured: {listed(silent)} answered no request" if silent else "Not enough data to say"
    elif calls == {"no difference"}:
        answer = "Speculation makes no difference here"
    else:
        answer = "Speculation is not seen to pay here" if "not enough data" in calls else "No, speculation does not pay here"
    arms = list(dict.fromkeys([*(c.arm for c in judged), *silent]))
    return answer, [(arm, silent.get(arm) or _places([c for c in judged if c.arm == arm], record)) for arm in arms]


def _places(of_arm: list[Cell], record: Record) -> str:
    """Where it is what. A task that comes out alike under every load is named once, with the range of its speed-ups."""
    calls = {task: {c.verdict for c in of_arm if c.task == task} for task in record.settings.tasks}
    said = []
    for call, words in (
        ("faster", "faster on"),
        ("no difference", "no difference on"),
        ("slower", "slower on"),
        ("not enough data", "undecided on"),
    ):
        names = []
        for task in record.settings.tasks:
            here = [c for c in of_arm if c.task == task and c.verdict == call]
            together = [here] if len(calls[task]) == 1 else [[c] for c in here]
            names += [_name(cells_, call, record, len(cells_) > 1) for cells_ in together if cells_]
        if names:
            said.append(f"{words} {listed(names)}")
    return "; ".join(said)


def _name(alike: list[Cell], call: str, record: Record, whole: bool) -> str:
    name = alike[0].task if whole else place(alike[0].task, alike[0].load, record)
    means = [f"{c.speedup.mean:.2f}" for c in sorted(alike, key=lambda c: c.speedup.mean if c.speedup else 0) if c.speedup]
    if call not in ("faster", "slower") or not means:
        return name
    return f"{name} ({means[0]}×)" if means[0] == means[-1] else f"{name} ({means[0]} to {means[-1]}×)"


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def drawn(draw: Draw) -> str:
    """What the test of sampled first tokens found."""
    c = draw.comparison
    against = "the baseline's" if draw.against == "samples" else "the baseline's log-probabilities"
    if c.p is None:
        return f"{draw.arm}: too few sampled first tokens to compare their distribution with {against}."
    head = f"{draw.arm}: {c.samples} sampled first tokens against {against}, p = {c.p:.2g}"
    if c.finding == "different":
        return f"{head}: they are not drawn from the same distribution. That is a fault to report, with the record attached."
    return f"{head}: no sign of another distribution (a shift of w = {c.visible:.2f} would have been seen)."


def warnings(record: Record) -> list[str]:
    """What could mislead a reader of the figures, each with what to do about it."""
    s, m = record.settings, record.machine
    every = cells(record)
    found = [*record.given_up, *record.notes]
    if not record.finished:
        found.append("the run was interrupted; the figures are of what was measured until then.")
    if record.resumed:
        found.append(f"the run was interrupted and resumed: {listed(record.resumed)}.")
    if m.client_only:
        found.append("the server runs on another machine, of which nothing is known; processor and load are the client's.")
    if m.load is not None and m.load > BUSY * m.cores:
        found.append(
            f"the machine was busy when the run began (load {m.load:.1f} on {m.cores} cores); close other programs and "
            "measure again."
        )
    if s.warmups == 0:
        found.append("there was no warm-up, so the first repetition pays for first-time costs; leave --warmups at 1 or more.")
    for cell in every:
        found += [f"{place(cell.task, cell.load, record)}, {cell.arm}: {said}" for said in _cell(cell)]
    found += _noted(record)
    found += _odd(record)
    found += [said for task in s.tasks if (said := _sampled(record, task)) is not None]
    for task in s.tasks:
        for load in s.loads:
            control = noise(record, task, load)
            if control is not None and margin(record, task, load) > 0.02:
                found.append(
                    f"{place(task, load, record)}: the baseline against itself came out at {control.mean:.3f}; nothing smaller "
                    "is called a difference. A quieter machine or more --repetitions narrow it."
                )
        caution = TASKS[task].caution if task in TASKS else None
        if caution and any(c.task == task for c in every):
            found.append(f"{task}: {caution}.")
    found += _unequal(record)
    found += [said for arm in s.arms for said in facts(arm, s.arms[0])]
    found += _departures(record)
    found += [drawn(d) for d in draws(record) if d.comparison.finding == "different"]
    return found


def _cell(cell: Cell) -> list[str]:
    found = []
    if cell.failures:
        said = failed(cell.failures, cell.requests, cell.reasons)
        found.append(f"{said}. They were left out, with the batch they were in.")
    if cell.cached_tokens:
        found.append(f"{cell.cached_tokens} prompt tokens came from the prefix cache, so time to first token is flattered.")
    if cell.requests > cell.failures and cell.output_tokens / (cell.requests - cell.failures) < 16:
        found.append("answers are shorter than 16 tokens on average, mostly prompt time; choose another task or model.")
    if cell.late is not None and (cell.late.p95 or 0.0) > LATE_S:
        found.append(
            f"one request in twenty was sent {1000 * (cell.late.p95 or 0.0):.0f} ms or more after its time, which counts as "
            "latency; the machine that sends was short of processor time."
        )
    return found


def _noted(record: Record) -> list[str]:
    """The notes of measured batches, each once with how many batches have it."""
    seen: dict[str, int] = {}
    for batch in record.batches:
        for note in batch.notes:
            said = f"{place(batch.task, batch.load, record)}, {batch.arm}: {note}"
            seen[said] = seen.get(said, 0) + (not batch.warmup)
    return [said + (f" ({n} batches)" if n > 1 else "") for said, n in seen.items() if n]


def long_wait(seconds: float, plan_loads: Sequence[Load]) -> str | None:
    """Before a run: that its requests' own times make it last for hours; None if they do not."""
    if seconds < LONG_S:
        return None
    option = "--trace-speed 100" if any(load.kind == "trace" for load in plan_loads) else "a higher --rate"
    return (
        f"the times at which requests are due make this run last {seconds / 3600:.1f} hours or more. {option} or fewer "
        "--requests or --repetitions shorten it; Ctrl-C ends it."
    )


def _odd(record: Record) -> list[str]:
    """What was odd in the answers of measured batches, each kind once with how many answers have it."""
    found = []
    for arm in record.settings.arms:
        answers = [a for b in record.batches if b.arm == arm.name and not b.warmup for a in b.answers]
        notes = counted(note for a in answers for note in a.notes)
        found += [f"{arm.name}: {note} ({_count(n, 'answer')} of {len(answers)})." for note, n in notes]
    return found


def _sampled(record: Record, task: str) -> str | None:
    """That a task was asked at another temperature than its own, and what that means."""
    own = TASKS[task].temperature if task in TASKS else 0.0
    sent = record.settings.temperatures.get(task, own)
    if sent == own:
        return None
    means = "its answers are greedy." if sent == 0 else "its answers are sampled, and none is compared word for word."
    return f"{task}: --body has every request sent at temperature {sent:g} in place of the task's {own:g}, so {means}"


def _unequal(record: Record) -> list[str]:
    """Engine settings in which an arm differs from the reference, but for the drafter."""
    first, *others = record.settings.arms
    return [
        f"{arm.name} ran with {key}={arm.engine.get(key)!r}, {first.name} with {first.engine.get(key)!r}; the "
        "comparison includes that."
        for arm in others
        for key in first.engine
        if key != "speculative_config" and arm.engine and arm.engine.get(key) != first.engine.get(key)
    ]


def facts(arm: ArmRecord, reference: ArmRecord) -> list[str]:
    """In which scheduler facts an arm differs from the reference, and what its engine's log says it did instead."""
    if arm.facts is None:
        return []
    found = [f"{arm.name}: the engine says: {line}" for line in (*arm.facts.fallbacks, *arm.facts.warnings)]
    if reference.facts is None or arm.name == reference.name:
        return found
    ours, theirs = arm.facts.scheduler, reference.facts.scheduler
    return found + [
        f"{arm.name} ran with {key} {ours.get(key, 'not reported')}, {reference.name} with {theirs.get(key, 'not reported')}; "
        "the comparison includes that."
        for key in dict.fromkeys([*theirs, *ours])
        if ours.get(key) != theirs.get(key)
    ]


def _departures(record: Record) -> list[str]:
    """Where greedy answers differed, and whether a near-tie explains it."""
    found = []
    for arm in record.settings.arms:
        of_arm = [d for d in record.differences if d.arm == arm.name]
        if not of_arm:
            continue
        near = [d for d in of_arm if d.gap is not None and d.gap <= NEAR_TIE]
        wide = [d for d in of_arm if d.gap is not None and d.gap > NEAR_TIE]
        places = ", ".join([_where(d, record) for d in of_arm[:4]] + ["…"] * (len(of_arm) > 4))
        said = f"{arm.name}: {_count(len(of_arm), 'greedy answer')} left the baseline's ({places})."
        if near:
            said += f" {len(near)} at a near-tie, where a verify step's different order of summing decides."
        if wide:
            said += f" {len(wide)} where the model was sure: that is a fault worth reporting, with the record attached."
        found.append(said)
    return found


def _where(d: Difference, record: Record) -> str:
    gap = "" if d.gap is None else f", margin {d.gap:.3f}"
    load = f" under {d.load.label}" if len(record.settings.loads) > 1 else ""
    return f"{d.task} {d.repetition + 1}{load} at {d.unit} {d.position + 1}{gap}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
