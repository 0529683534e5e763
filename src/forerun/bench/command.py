"""From a user's options to a plan and to what is measured. Knows the options' meaning and finds out what can be known before
anything is measured; prints nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench import run
from forerun.bench.engines import addresses, arms, launching
from forerun.bench.engines.arms import BASELINE, CONTROL
from forerun.bench.engines.launching import ServedArm
from forerun.bench.engines.openai import DIALECTS, Address, check_body
from forerun.bench.engines.servers import Launch, Server, available_memory, memory_share
from forerun.bench.engines.sides import Embedded, Launched, Running, Side
from forerun.bench.engines.subject import Origin, Subject, random_ids
from forerun.bench.load import budget
from forerun.bench.load.plan import Plan, fingerprint
from forerun.bench.options import Options, asked, words
from forerun.bench.pages.progress import Course
from forerun.bench.records import machine
from forerun.bench.records.record import Load, Record
from forerun.bench.records.redaction import hide, hide_command, remember, secrets_of
from forerun.bench.run import Watcher
from forerun.bench.workloads import tasks as workloads
from forerun.bench.workloads import traces
from forerun.bench.workloads.tasks import Prompt, Task
from forerun.checks import LARGEST, SettingError, Whole, require, whole
from forerun.config import MOST_SEQUENCES

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.models.tokenizer import Tokenizer

SERVED_ARMS = ("ngram",)
OPEN_LOOP_SLOTS = 32  # requests that a server takes at once when their number is not bounded by the load
OPEN_LOOP_REQUESTS = 16
GIBIBYTE = 1 << 30


def loads_of(options: Options) -> tuple[Load, ...]:
    """A load for each concurrency and each rate, or the trace's alone. Raises SettingError."""
    if options.requests is not None:
        Whole(1, LARGEST, 16)("requests", options.requests)
    for concurrency in options.concurrency:
        Whole(1, LARGEST, 8)("concurrency", concurrency)
    if options.trace is not None:
        return (Load("trace", requests=options.requests or OPEN_LOOP_REQUESTS, speed=options.trace_speed),)
    closed = [Load("concurrency", c, requests=options.requests or c) for c in options.concurrency]
    return (*closed, *(Load("poisson", rate=r, requests=options.requests or OPEN_LOOP_REQUESTS) for r in options.rates))


def plan_of(options: Options) -> Plan:
    """Raises SettingError."""
    trace: tuple[float, ...] = ()
    if options.trace is not None:
        task, trace = traces.trace(options.trace)
        tasks = [task]
    else:
        tasks = list(workloads.find(options.tasks)) if options.tasks else []
        for path in options.prompts:
            tasks += traces.prompts(path)
    return Plan(
        tuple(tasks),
        loads_of(options),
        repetitions=options.repetitions,
        warmups=options.warmups,
        max_tokens=options.max_tokens,
        control=options.control,
        seed=options.seed,
        trace=trace,
        samples=options.samples,
    )


def served_arms(texts: Sequence[str]) -> tuple[ServedArm, ...]:
    """The candidates on a server: the words of arms.parse, JSON in the engine's own keys (which only the engine can check), or
    `flags:` and the engine's own flags. Raises SettingError."""
    found: list[ServedArm] = []
    for text in texts:
        text = text.strip()
        if text.startswith("{"):
            found.append(_from_json(text))
        elif text.startswith("flags:"):
            flags = tuple(_split("arms", text.removeprefix("flags:")))
            require(bool(flags), "arms", text, "give flags, for instance flags:--spec-type ngram-mod")
            remember(*secrets_of(flags))
            found.append(ServedArm(" ".join(hide(flags)), None, flags))
        else:
            for arm in arms.parse((text,)):
                assert arm.speculation is not None
                found.append(ServedArm(arm.name, _essential(arm.speculation.effective())))
    for one in found:
        require([a.name for a in found].count(one.name) == 1, "arms", one.name, "give each arm once")
    return tuple(found)


def _essential(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is every engine's default, so that older versions understand it too."""
    left_out = {"rejection_sample_method": "standard", "num_speculative_tokens_per_batch_size": None, "max_model_len": None}
    return {k: v for k, v in settings.items() if k not in left_out or v != left_out[k]}


def _from_json(text: str) -> ServedArm:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError("arms", text, f"not JSON ({error})") from None
    require(isinstance(value, dict) and bool(value.get("method")), "arms", text, 'give "method", for instance "ngram"')
    name, k = value["method"], value.get("num_speculative_tokens")
    return ServedArm(name if k is None else f"{name} k={k}", value)


def subject_of(options: Options, plan: Plan) -> Subject:
    """What is measured. Loads the model if it runs in this process; starts nothing. Raises SettingError."""
    if options.engine == "forerun":
        return _embedded(options, plan)
    return _running(options, plan) if options.running else _launched(options, plan)


def arm_names(options: Options) -> list[str]:
    """Of the arms, in their order, before anything is loaded. Raises SettingError for arms that cannot be."""
    if options.engine == "forerun":
        candidates = [arm.name for arm in arms.parse(options.arms or arms.DEFAULT_ARMS)]
    elif options.running:
        candidates = [text.partition("=")[0] for text in options.arms]
    else:
        candidates = [arm.name for arm in served_arms(options.arms or SERVED_ARMS)]
    return [BASELINE, *candidates, *([CONTROL] if options.control else [])]


def described(subject: Subject, options: Options, plan: Plan) -> Subject:
    """With what the record says of it: the command that repeats the run, and what a resumed run must have in common with it."""
    contents = {"prompts": fingerprint(plan)}
    if options.template is not None:
        contents["template"] = hashlib.sha256(options.template.read_bytes()).hexdigest()[:16]
    command = tuple(words(dataclasses.replace(options, **subject.settled)))
    return dataclasses.replace(subject, origin=Origin(command, asked(options), contents))


def _embedded(options: Options, plan: Plan) -> Subject:
    from forerun.llm import LLM
    from forerun.models import hub

    candidates = arms.parse(options.arms or arms.DEFAULT_ARMS)
    slots, sides_ = slots_of(options, plan), 1 + len(candidates)
    name = "concurrency" if options.slots is None else "slots"
    remedy = f"the engine in this process takes {MOST_SEQUENCES} requests at once at most; give slots={MOST_SEQUENCES}"
    require(slots <= MOST_SEQUENCES, name, slots, remedy)
    loaded = LLM.load(options.model, options.dtype, options.device)
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection that walks over it takes as long as several steps

    def side(arm: arms.Arm) -> Side:
        def build() -> LLM:
            return LLM(
                loaded, speculative_config=arm.speculation, dtype=options.dtype, device=options.device, max_num_seqs=slots,
                gpu_memory_utilization=0.9 / sides_,
            )  # fmt: skip

        return Embedded(ServedArm(arm.name, arm.speculation.effective() if arm.speculation else None), build)

    sides = [side(arm) for arm in (arms.Arm(BASELINE, None), *candidates)]
    if plan.control:
        sides.append(sides[0])
    tokenizer, target = loaded.tokenizer, loaded.target
    ids = random_ids(target.vocab, frozenset(tokenizer.special_ids))
    notes = prompts_that_do_not_fit(plan, tokenizer, target.max_positions)
    settled = {
        "model": options.model or hub.DEFAULT,
        "arms": options.arms or arms.DEFAULT_ARMS,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
    }
    return Subject(loaded.name, "forerun", tuple(sides), ids, True, notes=notes, settled=settled)


def prompts_that_do_not_fit(plan: Plan, tokenizer: Tokenizer, context: int) -> tuple[str, ...]:
    """A note for each task of which some prompts are longer than the context: these requests will fail. Raises SettingError for
    a task of which none fits, and for one that needs a chat template where there is none."""
    notes = []
    for task in plan.tasks:
        own = task.name in workloads.TASKS  # whose prompts are all about as long
        prompts = [task.prompt(v) for v in range(min(plan.prompts_needed, 8 if own else plan.prompts_needed))]
        long = [(p, n) for p in prompts if (n := _length(p, task, tokenizer)) >= context]
        if not long:
            continue
        first, tokens = long[0]
        which = f"{len(long)} of {len(prompts)} prompts of {task.name} are too long ({first.name} has {tokens} tokens)"
        require(len(long) < len(prompts), "tasks", task.name, f"{which}: the context has {context}; leave this task out")
        notes.append(f"{which}: the context has {context}. Those requests fail.")
    return tuple(notes)


def _length(prompt: Prompt, task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of a prompt."""
    messages = prompt.messages if prompt.message is None else ({"role": "user", "content": prompt.message},)
    if messages is None:
        return len(tokenizer.encode(prompt.text)) if prompt.text is not None else prompt.random_ids
    try:
        return len(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))
    except SettingError as error:
        raise SettingError(
            "tasks", task.name, f"its prompts are chats ({error}); leave this task out, or measure a model made for chat"
        ) from None


def _launched(options: Options, plan: Plan) -> Subject:
    from forerun.models import hub

    template = launching.load_template(options.engine, options.template)
    body = _body(options)
    given = tuple(_split("server_args", options.server_args))
    remember(*secrets_of((*template.command, *given)))
    model, tokenizer = _model_for(options, template.model_kind)
    texts = options.arms or SERVED_ARMS
    candidates = served_arms(texts)
    together = _together(options.alive, 1 + len(candidates), model)
    launch = Launch(
        template,
        model,
        options.program,
        options.context,
        slots_of(options, plan),
        given,
        options.logs,
        memory_share(1 + len(candidates) if together else 1),
    )
    served = [Server(launch, arm) for arm in (ServedArm(BASELINE, None), *candidates)]
    for server in served:
        server.command()  # so that a setting which cannot be used is found before anything is started
    sides: list[Side] = [Launched(server, body, options.timeouts) for server in served]
    if plan.control:
        sides.append(sides[0])
    name = options.model or hub.DEFAULT
    ids = _ids(tokenizer, plan, template.engine)
    settled = {"model": name, "arms": texts}
    return Subject(name, template.engine, tuple(sides), ids, together, body=body, settled=settled)


def _running(options: Options, plan: Plan) -> Subject:
    headers, body = _headers(options), _body(options)

    def address(setting: str, url: str) -> Address:
        place = addresses.read(setting, url)
        all_headers = {**place.headers, **headers}
        model, dialect = addresses.look(setting, place.url, all_headers, options.served_model)
        return Address(place.url, model, dialect, all_headers, body, options.timeouts)

    first = address("engine", options.engine)
    sides: list[Side] = [Running(ServedArm(BASELINE, None), first)]
    known = {BASELINE: first}
    for text in options.arms:
        if text == "prediction":
            # the same server: what differs is the request
            sides.append(Running(ServedArm("prediction", {"method": "prediction"}), first))
            continue
        name, equals, url = text.partition("=")
        require(
            bool(equals) and url.lower().startswith(("http://", "https://")),
            "arms",
            hide(text),
            "a running server cannot be given a drafter; give NAME=URL of one that was started with it, or prediction",
        )
        require(name not in known and name != CONTROL, "arms", name, "give each arm a name of its own")
        its = address("arms", url)
        twin = next((other for other, there in known.items() if addresses.same(there, its)), None)
        require(
            twin is None,
            "arms",
            f"{name}={its.root}",
            f"that is the server, model and request of {twin}, so there is nothing to compare; give the URL of another server, "
            "or --control to see how a server differs from itself",
        )
        known[name] = its
        sides.append(Running(ServedArm(name, {"method": name}), its))
    if plan.control:
        sides.append(Running(ServedArm(CONTROL, None), first))
    require(len(sides) > 1, "arms", (), "give at least one as NAME=URL, or --control to see the server's own spread")
    ids = _ids(options.tokenizer or options.model, plan, first.dialect.name)
    elsewhere = not all(addresses.on_this_machine(one.root) for one in known.values())
    return Subject(first.model, first.dialect.name, tuple(sides), ids, True, body=body, elsewhere=elsewhere)


def slots_of(options: Options, plan: Plan) -> int:
    """Requests that an engine takes at once: as many as are in flight, so that they wait nowhere."""
    if options.slots is not None:
        return options.slots
    return max(load.concurrency if load.kind == "concurrency" else OPEN_LOOP_SLOTS for load in plan.loads)


def _together(alive: str, servers: int, model: str) -> bool:
    """Whether all servers are up at once. auto: if each can have three times its model's size, and 3 GiB, of the memory; one
    that finds a GPU takes most of it, so then they take turns."""
    require(alive in ("auto", "together", "in-turns"), "alive", alive, "give auto, together or in-turns")
    if alive != "auto":
        return alive == "together"
    import torch

    free = available_memory()
    if torch.cuda.is_available() or free is None:
        return False
    path = Path(model)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return servers * (3 * sum(f.stat().st_size for f in files) + 3 * GIBIBYTE) <= free


def _model_for(options: Options, kind: str) -> tuple[str, str | None]:
    """What the server is given as its model, and where a tokenizer may be found."""
    from forerun.models import hub

    if kind == "gguf":
        require(
            options.model is not None and options.model.endswith(".gguf"),
            "model",
            options.model,
            f"{options.engine} needs a GGUF file; give one with --model",
        )
        assert options.model is not None
        return options.model, options.tokenizer or options.model
    known = options.model is None or Path(options.model).exists() or options.model in [m.name for m in hub.models()]
    if known:
        folder = str(hub.resolve(options.model))
        return folder, options.tokenizer or folder
    assert options.model is not None
    return options.model, options.tokenizer


def _ids(tokenizer: str | None, plan: Plan, engine: str) -> Callable[[Prompt], tuple[int, ...]] | None:
    """What a server's prompts of random token ids are made of; None if no task has such. Raises SettingError if that is not
    known, or if the server takes none."""
    named = next((task.name for task in plan.tasks if task.prompt(0).random_ids), None)
    if named is None:
        return None
    require(DIALECTS[engine].ids, "tasks", named, "this server takes no token ids as a prompt; leave this task out")
    require(tokenizer is not None, "tasks", named, "random token ids need the vocabulary; give --tokenizer")
    from forerun.models import hub
    from forerun.models.tokenizer import Tokenizer

    folder = hub.resolve(tokenizer)
    known = Tokenizer(folder)
    return random_ids(min(known.size, _rows(folder) or known.size), frozenset(known.special_ids))


def _rows(folder: Path) -> int | None:
    """How many token ids the model in a folder has, None if its config.json does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return whole(size)


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(name, hide_command(text), f"cannot be split into words ({error}); close the quotes") from None


def _headers(options: Options) -> dict[str, str]:
    headers = {}
    for text in options.headers:
        name, colon, value = text.partition(":")
        known = bool(colon) and http_token(name.strip()) and value.isprintable()
        require(known, "header", f"{name.strip()[:20]}...", "give it as NAME: VALUE, in one line")
        headers[name.strip()] = value.strip()
        remember(value.strip(), value.strip().partition(" ")[2])
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        require(bool(key), "api_key_env", options.api_key_env, "this environment variable is not set")
        assert key is not None
        remember(key)
        headers["Authorization"] = f"Bearer {key}"
    return headers


def http_token(name: str) -> bool:
    """Whether this can be a header's name."""
    return re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) is not None


def _body(options: Options) -> dict[str, Any]:
    try:
        value = json.loads(options.body)
    except ValueError as error:
        raise SettingError("body", hide(options.body), f"not JSON ({error})") from None
    require(isinstance(value, dict), "body", hide(options.body), 'give an object, for instance {"top_k": 20}')
    check_body(value, options.samples)
    return dict(value)


def resumable(record: Record, subject: Subject) -> None:
    """Raises SettingError if what is measured now is not what the record's run measured."""
    before, now = record.settings, subject
    here = machine.describe(None)
    differing = [
        f"{name}: {was} in the record, {is_} now"
        for name, was, is_ in (
            ("model", before.model, now.model),
            ("engine", before.engine, now.engine),
            ("processor", record.machine.cpu, here.cpu),
            ("cores", record.machine.cores, here.cores),
            ("accelerator", record.machine.accelerator, here.accelerator),
            *((f"contents of the {name}", before.contents.get(name), value) for name, value in now.origin.contents.items()),
        )
        if was != is_
    ]
    require(not differing, "resume", "; ".join(differing), "another run is no part of this one; measure it on its own")


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a run may take. seconds: None means no limit. may: those of repetitions, max_tokens and tasks that may be
    reduced to keep the limit."""

    seconds: float | None = None
    may: frozenset[str] = frozenset()


def limit_of(minutes: float | None, given: Collection[str]) -> Limit:
    """The limit of a run. minutes: as asked for; None means the default, 0 no limit. given: the options that the user chose,
    which are not reduced. Raises SettingError."""
    chosen = minutes is not None
    if minutes is None:
        size = ("repetitions", "max_tokens", "tasks", "prompts", "trace", "rates", "concurrency", "requests", "samples")
        minutes = 0.0 if any(name in given for name in size) else budget.DEFAULT_MINUTES
    example = f"give 0 (no limit) or more, for instance {budget.DEFAULT_MINUTES:g}"
    require(0 <= minutes < 1e6, "budget_minutes", minutes, example)
    may = frozenset({"repetitions", "max_tokens", "tasks"}.difference(given))
    all_given = chosen and bool(minutes) and not may
    require(not all_given, "budget_minutes", minutes, "-r, -n and --tasks leave nothing to shorten; leave one of them out")
    return Limit(60 * minutes or None, may)


async def prepare(
    options: Options, plan: Plan, subject: Subject, limit: Limit, course: Course, tell: Callable[[str], None]
) -> tuple[Plan, Subject]:
    """Measure the baseline's pace, fit the plan into the limit, and say how long it will take. The subject tells the record
    what it came to."""
    course.doing("starting the baseline")
    await subject.up(subject.sides[0])
    course.doing("measuring the pace of plain decoding")
    pace = await budget.pace_of(plan, subject, time.perf_counter)
    if isinstance(pace, budget.Failed):
        tell(f"How long this run takes is not known, for the first request failed: {hide(pace.reason)}")
        return plan, described(subject, options, plan)
    sides, together = len(subject.sides), subject.together
    smaller = plan if limit.seconds is None else budget.fitted(plan, pace, sides, together, limit.seconds, limit.may)
    tell(budget.said(plan, smaller, pace, sides, together, limit.seconds))
    course.seconds_of = budget.seconds_of(smaller, pace)
    asked = dataclasses.replace(
        options,
        repetitions=smaller.repetitions,
        max_tokens=smaller.max_tokens,
        tasks=tuple(task.name for task in smaller.tasks) if smaller.tasks != plan.tasks else options.tasks,
    )
    return smaller, described(subject, asked, smaller)


Prepare = Callable[[Plan, Subject], Awaitable[tuple[Plan, Subject]]]


def measure(
    plan: Plan,
    subject: Subject,
    watcher: Watcher,
    keep: Callable[[Record], None] | None = None,
    earlier: Record | None = None,
    prepared: Prepare | None = None,
) -> Record:
    """In an event loop of its own. prepared: makes of the plan the one that is run, within the loop. An interrupt, or a request
    to end, ends the run with what was measured. Raises KeyboardInterrupt if that comes before the run has begun."""

    async def interruptible() -> Record:
        task = asyncio.current_task()
        assert task is not None
        if sys.platform != "win32":
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        final, described_ = plan, subject
        if prepared is not None:
            try:
                final, described_ = await prepared(plan, subject)
            except BaseException:
                await subject.down()
                raise
        return await run.measure(final, described_, watcher, keep or run.nothing, earlier)

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
