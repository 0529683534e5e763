"""A record in sentences: what was run, whether speculation pays, and what could mislead. Knows no output format."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from forerun.bench import options
from forerun.bench.engines.failures import counted
from forerun.bench.formats import between, count, listed
from forerun.bench.records.record import Difference, Load, Machine, Record
from forerun.bench.records.statistics import Call, Ratio, pairs_needed
from forerun.bench.records.summary import Cell, Draw, cells, draws, margin, noise, reasons, unanswered
from forerun.bench.workloads.tasks import TASKS, VARIANTS

NEAR_TIE = 0.5  # in log-probability: rounding in bfloat16 moves two logits of one forward pass by less
BUSY = 0.5  # load average per core above which other programs are likely to disturb
REPETITIONS = 64  # a measurement that needs more repetitions needs a quieter machine
LONG_S = 3600.0  # a run that takes longer is announced
REASONS = 3  # kinds of failure named in a sentence
LATE_S = 0.005  # the delay of sending above which the load generator lacked processor time
SHORT = 16  # output tokens below which an answer is mostly prompt time
UNSTEADY = 0.02  # the margin above which the baseline's difference from itself is mentioned
CALLS: dict[Call, str] = {
    "faster": "speculation pays",
    "slower": "speculation does not pay",
    "no difference": "speculation makes no difference",
    "not enough data": "not enough data to say whether it pays",
}
ON: dict[Call, str] = {
    "faster": "faster on",
    "no difference": "no difference on",
    "slower": "slower on",
    "not enough data": "undecided on",
}


# what was run


def title(record: Record) -> str:
    s, v = record.settings, record.versions
    dtype, isa, mix = (s.arms[0].engine.get(name) or "" for name in ("dtype", "cpu_isa", "quantization"))
    how = "; ".join(one for one in (f"weights {mix}" if mix else "", isa) if one)
    model = f"{model_of(record)} {dtype}" + (f" ({how})" if how else "")
    return (
        f"{model.strip()} on {hardware(record.machine)}. {s.repetitions} repetitions of {loads_of(record)} for every task and "
        f"arm, at most {s.max_tokens} output tokens. forerun {v.get('forerun', '?')}, {versions_of(record)}, "
        f"{record.started}, {record.seconds:.0f} s."
    )


def hardware(machine: Machine) -> str:
    """What the engine ran on, as far as it is known."""
    here = f"{machine.cpu}, {machine.cores} cores"
    return f"unknown hardware, asked from {here}" if machine.client_only else machine.accelerator or here


def model_of(record: Record) -> str:
    """The model's name, without the folders of a path."""
    name = record.settings.model
    return PurePath(name).name if name.startswith(("/", "~")) else name


def loads_of(record: Record) -> str:
    """What each repetition sent: 8 requests; or 8 requests at c=1, 64 requests at 2/s."""
    loads = record.settings.loads
    if len(loads) == 1 and loads[0].kind == "concurrency" and loads[0].concurrency == loads[0].requests:
        return count(loads[0].requests, "request")
    return ", ".join(f"{count(load.requests, 'request')} at {load.label}" for load in loads)


def load_of(load: Load) -> str:
    """A load in plain words."""
    if load.kind == "trace":
        return "at the times of the trace" + (f", {load.speed:g} times as fast" if load.speed != 1 else "")
    if load.kind == "poisson":
        return f"{load.rate:g} arriving each second"
    return "one at a time" if load.concurrency == 1 else f"{load.concurrency} at once"


def versions_of(record: Record) -> str:
    """Of the engine that was measured."""
    if record.settings.engine == "forerun":
        return f"torch {record.versions.get('torch', '?')}"
    found = {f"{a.facts.engine} {a.facts.version or ''}".strip() for a in record.settings.arms if a.facts}
    return ", ".join(sorted(found or {record.settings.engine}))


def command(record: Record) -> str:
    """The command line that repeats the run; for older records as much of it as the settings tell."""
    s = record.settings
    if s.command:
        return shlex.join(s.command)
    engine = s.arms[0].engine
    drafters = [arm.speculation for arm in s.arms if arm.speculation is not None]
    again = options.Options(
        model=s.model,
        arms=tuple(json.dumps({key: value for key, value in of.items() if value is not None}) for of in drafters),
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
    """A cell's task, with its load where the run has several."""
    return task if len(record.settings.loads) == 1 else f"{task} at {load.label}"


def label(cell: Cell, record: Record) -> str:
    """A cell's arm, with its load where the run has several."""
    return cell.arm if len(record.settings.loads) == 1 else f"{cell.arm}, {cell.load.label}"


def named(cell: Cell) -> str:
    """A cell's arm, with its failures."""
    return cell.arm if not cell.failures else f"{cell.arm} ({cell.failures}/{cell.requests} failed)"


def long_wait(seconds: float, plan_loads: Sequence[Load]) -> str | None:
    """A warning before a run that lasts for hours because of the times at which its requests are due."""
    if seconds < LONG_S:
        return None
    option = "--trace-speed 100" if any(load.kind == "trace" for load in plan_loads) else "a higher --rate"
    return (
        f"the times at which requests are due make this run last {seconds / 3600:.1f} hours or more. {option} or fewer "
        "--requests or --repetitions shorten it; Ctrl-C ends it."
    )


# whether speculation pays


def times(ratio: Ratio) -> str:
    """1.64 times the baseline's speed (1.60 to 1.68)."""
    return f"{ratio.mean:.2f} times the baseline's speed" + (f" ({between(ratio)})" if between(ratio) else "")


def sentence(cell: Cell, record: Record) -> str | None:
    """Whether speculation pays in this cell, and why. None for the arms that do not speculate."""
    if cell.verdict is None or cell.arm == record.settings.control:
        return None
    text, r = f"{place(cell.task, cell.load, record)}, {cell.arm}: {CALLS[cell.verdict]}", cell.speedup
    if r is None:
        return f"{text}. {reason(cell, record)}"
    if cell.verdict == "not enough data":
        text += f": {times(r)} over {count(r.pairs, 'pair')}."
    else:
        text += f", {times(r)}{' as a request sees it' if cell.load.kind != 'concurrency' else ''}."
    return f"{text} {reason(cell, record)}".rstrip()


def reason(cell: Cell, record: Record) -> str:
    """Below a verdict: what a step cost and gave, and what would settle an open verdict."""
    if cell.arm == record.settings.control:
        return ""
    if cell.speedup is None:
        return f"There is no pair of completed batches{_because(cell.reasons)}."
    return f"{_break_even(cell)} {_remedy(cell, cell.speedup, record)}".strip()


def _break_even(cell: Cell) -> str:
    if cell.counts is None or cell.needed is None or cell.got is None:
        return ""
    if not cell.counts.drafted:
        return "It never had a draft, so every step gave one token."
    return f"It needed {cell.needed:.2f} tokens a step to break even and got {cell.got:.2f}."


def _remedy(cell: Cell, ratio: Ratio, record: Record) -> str:
    """What would settle a verdict of not enough data."""
    if cell.verdict != "not enough data":
        return ""
    more = pairs_needed(ratio, margin(record, cell.task, cell.load))
    if more is None:
        return "Try --repetitions 8."
    if more <= min(VARIANTS // cell.load.requests - record.settings.warmups, REPETITIONS):
        return f"Try --repetitions {max(more, ratio.pairs + 1)}."
    return "The figures vary too much for more repetitions to settle it: measure on a quieter machine."


def failed(failures: int, requests: int, reasons: list[tuple[str, int]]) -> str:
    """12 of 12 requests failed: HTTP 401: no key. Each of several reasons with its number."""
    return f"{failures} of {count(requests, 'request')} failed{_because(reasons)}"


def _because(reasons: list[tuple[str, int]]) -> str:
    if not reasons:
        return ""
    text = [reason.rstrip(".") + (f" ({n} times)" if len(reasons) > 1 else "") for reason, n in reasons[:REASONS]]
    more = sum(n for _, n in reasons[REASONS:])
    return ": " + "; ".join(text) + (f"; and {more} others" if more else "")


def headline(record: Record) -> tuple[str, list[tuple[str, str]]]:
    """The answer in a few words, and for each candidate where it is faster, where slower, where neither. A place is a task
    under a load; speculation pays there if one of the candidates is faster."""
    judged = [c for c in cells(record) if c.verdict is not None and c.arm != record.settings.control]
    silent = {arm: failed(len(lost), len(lost), reasons(lost)) for arm, lost in unanswered(record).items()}
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
    """The places of each verdict. A task with the same verdict under every load is named once, with the range of its ratios."""
    text = []
    for call, words in ON.items():
        names = []
        for task in record.settings.tasks:
            of_task = [c for c in of_arm if c.task == task]
            here = [c for c in of_task if c.verdict == call]
            whole = len({c.verdict for c in of_task}) == 1
            names += [_name(alike, call, record) for alike in ([here] if whole else [[c] for c in here]) if alike]
        if names:
            text.append(f"{words} {listed(names)}")
    return "; ".join(text)


def _name(alike: list[Cell], call: Call, record: Record) -> str:
    name = alike[0].task if len(alike) > 1 else place(alike[0].task, alike[0].load, record)
    means = [f"{mean:.2f}" for mean in sorted(c.speedup.mean for c in alike if c.speedup)]
    if call not in ("faster", "slower") or not means:
        return name
    return f"{name} ({means[0]}×)" if means[0] == means[-1] else f"{name} ({means[0]} to {means[-1]}×)"


def drawn(draw: Draw) -> str:
    """The finding of the test of sampled first tokens."""
    c = draw.comparison
    against = "the baseline's" if draw.against == "samples" else "the baseline's log-probabilities"
    if c.p is None:
        return f"{draw.arm}: too few sampled first tokens to compare their distribution with {against}."
    head = f"{draw.arm}: {c.samples} sampled first tokens against {against}, p = {c.p:.2g}"
    if c.finding == "different":
        return f"{head}: they are not drawn from the same distribution. That is a fault to report, with the record attached."
    return f"{head}: no sign of another distribution (a shift of w = {c.visible:.2f} would have been seen)."


# what could mislead


def warnings(record: Record) -> list[str]:
    """What could mislead a reader of the figures, with a remedy where there is one."""
    s, every = record.settings, cells(record)
    found = [*record.given_up, *record.notes, *_of_run(record)]
    for cell in every:
        found += [f"{place(cell.task, cell.load, record)}, {cell.arm}: {text}" for text in _of_cell(cell)]
    found += _noted(record)
    for task in s.tasks:
        own = TASKS[task].temperature if task in TASKS else 0.0
        sent = s.temperatures.get(task, own)
        if sent != own:
            means = "greedy" if sent == 0 else "sampled, and none is compared word for word"
            found.append(
                f"{task}: --body has every request sent at temperature {sent:g} in place of the task's {own:g}, so its answers "
                f"are {means}."
            )
    for task in s.tasks:
        for load in s.loads:
            control = noise(record, task, load)
            if control is not None and margin(record, task, load) > UNSTEADY:
                found.append(
                    f"{place(task, load, record)}: the baseline against itself came out at {control.mean:.3f}; smaller "
                    "changes do not count. A quieter machine or more --repetitions narrow it."
                )
        caution = TASKS[task].caution if task in TASKS else None
        if caution and any(c.task == task for c in every):
            found.append(f"{task}: {caution}.")
    found += _unequal(record)
    found += [text for arm in s.arms if (text := _departures(record, arm.name)) is not None]
    return found + [drawn(d) for d in draws(record) if d.comparison.finding == "different"]


def _of_run(record: Record) -> list[str]:
    m, found = record.machine, []
    if not record.finished:
        found.append("the run was interrupted; the figures are of what was measured until then.")
    if record.resumed:
        found.append(f"the run was interrupted and resumed: {listed(record.resumed)}.")
    if m.client_only:
        found.append("the server runs on another machine, of which nothing is known; processor and load are the client's.")
    if m.load is not None and m.load > BUSY * m.cores:
        found.append(
            f"the machine was busy when the run began (load {m.load:.1f} on {m.cores} cores); close other programs and measure "
            "again."
        )
    if record.settings.warmups == 0:
        found.append("there was no warm-up, so the first repetition includes first-time costs; leave --warmups at 1 or more.")
    return found


def _of_cell(cell: Cell) -> list[str]:
    found = []
    if cell.failures:
        found.append(f"{failed(cell.failures, cell.requests, cell.reasons)}. Their batches are left out of the speed-up.")
    if cell.cached_tokens:
        found.append(f"{cell.cached_tokens} prompt tokens came from the prefix cache, which shortens the time to first token.")
    if cell.requests > cell.failures and cell.output_tokens / (cell.requests - cell.failures) < SHORT:
        found.append(f"answers are shorter than {SHORT} tokens on average, mostly prompt time; choose another task or model.")
    if cell.late is not None and (cell.late.p95 or 0.0) > LATE_S:
        found.append(
            f"one request in twenty was sent {1000 * (cell.late.p95 or 0.0):.0f} ms or more after its time, which counts as "
            "latency; the machine that sends was short of processor time."
        )
    return found


def _noted(record: Record) -> list[str]:
    """Each note of measured batches with its number of batches, and each kind of note of their answers with its number."""
    measured = [b for b in record.batches if not b.warmup]
    notes = Counter(f"{place(b.task, b.load, record)}, {b.arm}: {note}" for b in measured for note in b.notes)
    found = [text + (f" ({n} batches)" if n > 1 else "") for text, n in notes.items()]
    for arm in record.settings.arms:
        answers = [a for b in measured if b.arm == arm.name for a in b.answers]
        kinds = counted(note for a in answers for note in a.notes)
        found += [f"{arm.name}: {note} ({count(n, 'answer')} of {len(answers)})." for note, n in kinds]
    return found


def _unequal(record: Record) -> list[str]:
    """The settings of engines and schedulers in which an arm differs from the reference, and what its engine's log says."""
    first, found, facts = record.settings.arms[0], [], []

    def differs(arm: str, key: str, ours: object, theirs: object) -> str:
        return f"{arm} ran with {key}{ours}, {first.name} with {theirs}; the comparison includes that."

    for arm in record.settings.arms:
        for key, value in first.engine.items():
            if key != "speculative_config" and arm.engine and arm.engine.get(key) != value:
                found.append(differs(arm.name, f"{key}=", repr(arm.engine.get(key)), repr(value)))
        if arm.facts is None:
            continue
        facts += [f"{arm.name}: the engine says: {line}" for line in (*arm.facts.fallbacks, *arm.facts.warnings)]
        ours, theirs = arm.facts.scheduler, first.facts.scheduler if first.facts else {}
        for key in dict.fromkeys([*theirs, *ours]) if first.facts else ():
            if ours.get(key) != theirs.get(key):
                text = [of.get(key, "not reported") for of in (ours, theirs)]
                facts.append(differs(arm.name, f"{key} ", *text))
    return found + facts


def _departures(record: Record, arm: str) -> str | None:
    """Where greedy answers of an arm differ from the baseline's, and whether a near-tie explains it."""
    of_arm = [d for d in record.differences if d.arm == arm]
    if not of_arm:
        return None
    gaps = [d.gap for d in of_arm if d.gap is not None]
    near = sum(gap <= NEAR_TIE for gap in gaps)
    places = ", ".join([_where(d, record) for d in of_arm[:4]] + ["…"] * (len(of_arm) > 4))
    text = f"{arm}: {count(len(of_arm), 'greedy answer')} not equal to the baseline's ({places})."
    if near:
        text += f" {near} at a near-tie, which rounding decides: a verify step sums in another order."
    if len(gaps) > near:
        text += f" {len(gaps) - near} where the model was sure: that is a fault to report, with the record attached."
    return text


def _where(d: Difference, record: Record) -> str:
    gap = "" if d.gap is None else f", margin {d.gap:.3f}"
    load = f" under {d.load.label}" if len(record.settings.loads) > 1 else ""
    return f"{d.task} {d.repetition + 1}{load} at {d.unit} {d.position + 1}{gap}"
