"""From the options of `forerun bench` to the plan, the subject and the time limit of a run, and the run in an event loop. Finds
out what is wrong with the options before anything is measured. Prints nothing.
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

from forerun import textfile
from forerun.bench import run
from forerun.bench.engines import addresses, arms, launching
from forerun.bench.engines.arms import BASELINE, CONTROL, Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.openai import Address, check_body
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
from forerun.config import MOST_SEQUENCES, Speculation, needs_model
from forerun.models import shipped

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.models.tokenizer import Tokenizer

SERVED_ARMS = ("ngram",)
OPEN_LOOP_SLOTS = 32  # requests that a server runs at once, where the load does not bound their number
OPEN_LOOP_REQUESTS = 16  # requests of a batch, unless they are given
GIBIBYTE = 1 << 30


def loads_of(options: Options) -> tuple[Load, ...]:
    """The load of the trace, or one for each concurrency and each rate. Raises SettingError."""
    if options.requests is not None:
        Whole(1, LARGEST, 16)("requests", options.requests)
    if options.trace is not None:
        return (Load("trace", requests=options.requests or OPEN_LOOP_REQUESTS, speed=options.trace_speed),)
    closed = [Load("concurrency", c, requests=options.requests or c) for c in options.concurrency]
    return (*closed, *(Load("poisson", rate=r, requests=options.requests or OPEN_LOOP_REQUESTS) for r in options.rates))


def plan_of(options: Options) -> Plan:
    """Reads the files with prompts. Raises SettingError."""
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


def served_arms(texts: Sequence[str], model: str | None = None) -> tuple[Arm, ...]:
    """The candidates on servers that are started. A text is one of those of arms.parse, JSON with the engine's own keys, which
    only the engine can check, or `flags:` and the engine's own flags. model: of a server of Forerun, whose drafters come with
    it. Raises SettingError."""
    found: list[Arm] = []
    for text in texts:
        text = text.strip()
        if text.startswith("{"):
            found.append(_from_json(text))
        elif text.startswith("flags:"):
            flags = tuple(_split("arms", text.removeprefix("flags:")))
            require(bool(flags), "arms", text, "give flags, for instance flags:--spec-type ngram-mod")
            remember(*secrets_of(flags))
            found.append(Arm(" ".join(hide(flags)), None, flags))
        else:
            for one in arms.parse((text,)):
                arm = one if model is None else _with_drafter(one, model)
                settings = arm.settings or {}
                require("model" not in settings or settings["model"], "arms", text, f"{needs_model(arm.name)}; give JSON")
                found.append(dataclasses.replace(arm, settings=_essential(settings)))
    for one in found:
        require([a.name for a in found].count(one.name) == 1, "arms", one.name, "give each arm once")
    return tuple(found)


def _served(options: Options) -> tuple[Arm, ...]:
    """The arms of servers that are started. Raises SettingError."""
    ours = options.engine == "forerun-server"
    return served_arms(options.arms or SERVED_ARMS, (options.model or shipped.TARGET) if ours else None)


def _essential(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the default of every engine, which an older version may not know."""
    left_out = {"rejection_sample_method": "standard", "num_speculative_tokens_per_batch_size": None, "max_model_len": None}
    return {k: v for k, v in settings.items() if k not in left_out or v != left_out[k]}


def _from_json(text: str) -> Arm:
    value = textfile.json_object("arms", text, '{"method": "ngram"}', hide(text))
    require(bool(value.get("method")), "arms", hide(text), 'give "method", for instance "ngram"')
    name, k = value["method"], value.get("num_speculative_tokens")
    return Arm(name if k is None else f"{name} k={k}", value)


def subject_of(options: Options, plan: Plan) -> Subject:
    """What the plan measures. Loads the model of the engine in this process; starts no server. Raises SettingError."""
    make = _embedded if not options.remote else _running if options.running else _launched
    subject = make(options, plan)
    sides = (*subject.sides, subject.sides[0]) if plan.control else subject.sides
    return dataclasses.replace(subject, sides=sides)


def arm_names(options: Options) -> list[str]:
    """The names of the arms, in their order, before anything is loaded. Raises SettingError."""
    if options.engine == "forerun":
        candidates = [arm.name for arm in _candidates(options)]
    elif options.running:
        candidates = [text.partition("=")[0] for text in options.arms]
    else:
        candidates = [arm.name for arm in _served(options)]
    return [BASELINE, *candidates, *([CONTROL] if options.control else [])]


def described(subject: Subject, options: Options, plan: Plan) -> Subject:
    """The subject with its origin: the command that repeats the run, the options, and hashes of the files that must not change
    until the run is resumed."""
    contents = {"prompts": fingerprint(plan)}
    if options.template is not None:
        contents["template"] = hashlib.sha256(options.template.read_bytes()).hexdigest()[:16]
    command = tuple(words(dataclasses.replace(options, **subject.settled)))
    return dataclasses.replace(subject, origin=Origin(command, asked(options), contents))


def _arms(options: Options) -> tuple[str, ...]:
    """The texts of the arms of the engine in this process."""
    return options.arms or arms.default(options.model or shipped.TARGET)


def _candidates(options: Options) -> tuple[Arm, ...]:
    """The arms of the engine in this process, with the drafters that come with Forerun by their names. Raises SettingError for
    an arm that needs a drafter which is not given."""
    return tuple(_with_drafter(arm, options.model or shipped.TARGET) for arm in arms.parse(_arms(options)))


def _with_drafter(arm: Arm, model: str) -> Arm:
    speculation = shipped.chosen(Speculation.parse(arm.settings), model)
    return arm if speculation is None else dataclasses.replace(arm, settings=speculation.effective())


def _embedded(options: Options, plan: Plan) -> Subject:
    from forerun.llm import LLM
    from forerun.models import hub

    candidates = _candidates(options)
    slots, sides_ = slots_of(options, plan), 1 + len(candidates)
    name = "concurrency" if options.slots is None else "slots"
    remedy = f"the engine in this process takes {MOST_SEQUENCES} requests at once at most; give slots={MOST_SEQUENCES}"
    require(slots <= MOST_SEQUENCES, name, slots, remedy)
    loaded = LLM.load(options.model, options.dtype, options.device, options.quantization)
    gc.collect()
    gc.freeze()  # a garbage collection that walks over the model takes as long as several steps

    def side(arm: Arm) -> Embedded:
        def build() -> LLM:
            return LLM(
                loaded, speculative_config=arm.settings, dtype=options.dtype, quantization=options.quantization,
                device=options.device, max_num_seqs=slots, gpu_memory_utilization=0.9 / sides_,
            )  # fmt: skip

        return Embedded(arm, build)

    sides = [side(arm) for arm in (Arm(BASELINE), *candidates)]
    tokenizer, target = loaded.tokenizer, loaded.target
    ids = random_ids(target.vocab, frozenset(tokenizer.special_ids))
    notes = prompts_that_do_not_fit(plan, tokenizer, target.max_positions)
    settled = {
        "model": options.model or hub.DEFAULT,
        "arms": _arms(options),
        # with a dtype given, the blocks of a file would be expanded
        "dtype": options.dtype if target.quantization else str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
    }
    return Subject(loaded.name, "forerun", tuple(sides), ids, True, notes=notes, settled=settled)


def prompts_that_do_not_fit(plan: Plan, tokenizer: Tokenizer, context: int) -> tuple[str, ...]:
    """A note for each task that has prompts longer than the context: these requests will fail. Raises SettingError for a task
    without a prompt that fits, and for chats where the model has no chat template."""
    notes = []
    for task in plan.tasks:
        own = task.name in workloads.TASKS  # their prompts have similar lengths, so a few are enough
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
    """In tokens. Raises SettingError."""
    messages = prompt.conversation
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
    texts, candidates = options.arms or SERVED_ARMS, _served(options)
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
    served = [Server(launch, arm) for arm in (Arm(BASELINE), *candidates)]
    for server in served:
        server.command()  # raises SettingError for a setting that cannot be used
    sides = [Launched(server, body, options.timeouts) for server in served]
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
    sides: list[Side[Any]] = [Running(Arm(BASELINE), first)]
    known = {BASELINE: first}
    for text in options.arms:
        if text == "prediction":
            # the same server with other requests
            sides.append(Running(Arm("prediction", {"method": "prediction"}), first))
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
        sides.append(Running(Arm(name, {"method": name}), its))
    compared = len(sides) > 1 or plan.control
    require(compared, "arms", (), "give at least one as NAME=URL, or --control to see the server's own spread")
    ids = _ids(options.tokenizer or options.model, plan, first.dialect.name)
    elsewhere = not all(addresses.on_this_machine(one.root) for one in known.values())
    return Subject(first.model, first.dialect.name, tuple(sides), ids, True, body=body, elsewhere=elsewhere)


def slots_of(options: Options, plan: Plan) -> int:
    """Requests that an engine runs at once: as many as are in flight, so that none waits."""
    if options.slots is not None:
        return options.slots
    return max(load.concurrency if load.kind == "concurrency" else OPEN_LOOP_SLOTS for load in plan.loads)


def _together(alive: str, servers: int, model: str) -> bool:
    """Whether all servers are up at once. auto: yes if there is memory for three times the model's size and 3 GiB for each, and
    no with a GPU, because a server takes most of its memory. Raises SettingError."""
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
    """The model as the server is given it, and a folder or file with its tokenizer, if that is known. Raises SettingError."""
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
    """The function that draws random token ids for a server; None if no task has them. Raises SettingError if the vocabulary is
    not known, or if the server takes no token ids."""
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
    """The vocabulary's size in a model's config.json, None if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return whole(size)


def _split(name: str, text: str) -> list[str]:
    """The words of a text, as a shell splits it. Raises SettingError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(name, hide_command(text), f"cannot be split into words ({error}); close the quotes") from None


def _headers(options: Options) -> dict[str, str]:
    """Those of --header and --api-key-env, whose values are hidden from now on. Raises SettingError."""
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
    """Whether this can be a header's name (RFC 9110, section 5.6.2)."""
    return re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) is not None


def _body(options: Options) -> dict[str, Any]:
    """The fields of --body. Raises SettingError."""
    value = textfile.json_object("body", options.body, '{"top_k": 20}', hide(options.body))
    check_body(value, options.samples)
    return value


def resumable(record: Record, subject: Subject) -> None:
    """Raises SettingError if the subject, the machine or a file differs from the record's."""
    before, there, here = record.settings, record.machine, machine.describe(None)
    pairs = {
        "model": (before.model, subject.model),
        "engine": (before.engine, subject.engine),
        "processor": (there.cpu, here.cpu),
        "cores": (there.cores, here.cores),
        "accelerator": (there.accelerator, here.accelerator),
    }
    for name, value in subject.origin.contents.items():
        pairs[f"contents of the {name}"] = (before.contents.get(name), value)
    differing = [f"{name}: {was} in the record, {now} now" for name, (was, now) in pairs.items() if was != now]
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
    options: Options, limit: Limit, course: Course, tell: Callable[[str], None], plan: Plan, subject: Subject
) -> tuple[Plan, Subject]:
    """Measure the baseline's pace, fit the plan into the limit, and tell how long it will take. Returns the plan to run, and
    the subject with that plan as its origin. Raises SettingError if the baseline does not come up."""
    course.doing("starting the baseline")
    await subject.up(subject.sides[0])
    course.doing("measuring the pace of plain decoding")
    pace = await budget.pace_of(plan, subject, time.perf_counter)
    if isinstance(pace, budget.Failed):
        tell(f"How long this run takes is not known, for the first request failed: {hide(pace.reason)}")
        return plan, subject
    sides, together = len(subject.sides), subject.together
    smaller = plan if limit.seconds is None else budget.fitted(plan, pace, sides, together, limit.seconds, limit.may)
    tell(budget.said(plan, smaller, pace, sides, together, limit.seconds))
    course.seconds_of = budget.seconds_of(smaller, pace)
    tasks = options.tasks if smaller.tasks == plan.tasks else tuple(task.name for task in smaller.tasks)
    options = dataclasses.replace(options, repetitions=smaller.repetitions, max_tokens=smaller.max_tokens, tasks=tasks)
    return smaller, described(subject, options, smaller)


Prepare = Callable[[Plan, Subject], Awaitable[tuple[Plan, Subject]]]


def measure(
    plan: Plan,
    subject: Subject,
    watcher: Watcher,
    keep: Callable[[Record], None] | None = None,
    earlier: Record | None = None,
    prepared: Prepare | None = None,
) -> Record:
    """Run the plan in an event loop of its own. keep: is given the record after each batch. earlier: a record whose batches are
    not measured again. prepared: is called in the loop and returns the plan and the subject to run. An interrupt or a signal
    ends the run with the batches so far. Raises KeyboardInterrupt if that comes before the run has begun."""

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
