"""From what a user asked for on the command line to a plan and its sides. Knows the options' meaning; prints nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shlex
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench import arms, embedded, launching, run, traces, workloads
from forerun.bench.arms import BASELINE, CONTROL
from forerun.bench.launching import ServedArm
from forerun.bench.openai import DIALECTS, Address, Timeouts, check_body
from forerun.bench.record import Load, Record
from forerun.bench.run import Plan, Subject
from forerun.bench.servers import Launch, Server, available_memory
from forerun.bench.sides import Embedded, Launched, Running, Side
from forerun.checks import SettingError, require, whole

if TYPE_CHECKING:
    from forerun.bench.embedded import Watcher

OPEN_LOOP_SLOTS = 32  # requests that a server takes at once when their number is not bounded by the load
OPEN_LOOP_REQUESTS = 16
GIBIBYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """As on the command line, where each is explained."""

    model: str | None = None
    engine: str = "forerun"
    arms: tuple[str, ...] = ()
    tasks: tuple[str, ...] = workloads.DEFAULT_TASKS
    prompts: tuple[Path, ...] = ()
    trace: Path | None = None
    trace_speed: float = 1.0
    concurrency: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    requests: int | None = None
    repetitions: int = 8
    warmups: int = 1
    max_tokens: int = 128
    control: bool = False
    samples: int = 0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    template: Path | None = None
    program: str | None = None
    server_args: str = ""
    context: int = 4096
    slots: int | None = None
    alive: str = "auto"
    logs: Path | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    headers: tuple[str, ...] = ()
    body: str = "{}"
    timeouts: Timeouts = field(default_factory=Timeouts)
    tokenizer: str | None = None

    @property
    def remote(self) -> bool:
        return self.engine != "forerun"

    @property
    def plain(self) -> bool:
        """Whether this is one batch of requests at once to the engine in this process, on tasks that are built in."""
        one = len(self.concurrency) == 1 and self.requests in (None, self.concurrency[0]) and self.slots is None
        return not self.remote and one and not self.samples and not self.rates and not self.prompts and self.trace is None


    def check(self) -> None:
        """Raises SettingError for options that do not go together; nothing that was given is silently ignored."""
        running = self.engine.startswith(("http://", "https://"))
        own = {
            "program": self.program is not None,
            "template": self.template is not None,
            "server_args": bool(self.server_args),
            "logs": self.logs is not None,
            "alive": self.alive != "auto",
        }
        for name, given in own.items():
            fits = self.remote and not running
            require(fits or not given, name, getattr(self, name), "it is for servers that are started here; give --engine vllm")
        url = {
            "served_model": self.served_model is not None,
            "api_key_env": self.api_key_env is not None,
            "header": bool(self.headers),
        }
        for name, given in url.items():
            require(running or not given, name, "...", "it is for a server that runs already; give --engine URL")
        require(self.remote or self.body == "{}", "body", self.body, "it is for servers; give --engine")
        own_time = self.timeouts == Timeouts()
        require(self.remote or own_time, "timeout", self.timeouts, "time-outs are for servers; give --engine")
        require(self.context >= 2, "context", self.context, "give 2 or more, for instance 4096")
        require(self.logs is None or self.logs.is_dir(), "logs", str(self.logs), "no such folder; make it first")
        if self.trace is not None:
            alone = not self.rates and not self.concurrency
            require(alone, "trace", str(self.trace), "a trace is a load of its own; leave --concurrency and --rate out")
        else:
            require(bool(self.concurrency or self.rates), "concurrency", (), "give at least one number")


def loads_of(options: Options) -> tuple[Load, ...]:
    """A load for each concurrency and each rate, or the trace's alone. Raises SettingError."""
    require(options.requests is None or options.requests >= 1, "requests", options.requests, "give 1 or more")
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
            flags = tuple(shlex.split(text.removeprefix("flags:")))
            require(bool(flags), "arms", text, "give flags, for instance flags:--spec-type ngram-mod")
            found.append(ServedArm(" ".join(flags), None, flags))
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


def subject_of(options: Options, plan: Plan, command: Sequence[str]) -> Subject:
    """What is measured. Loads the model if it runs in this process; starts nothing. Raises SettingError."""
    if options.engine == "forerun":
        return _embedded(options, plan, command)
    if options.engine.startswith(("http://", "https://")):
        return _running(options, plan, command)
    return _launched(options, plan, command)


def _embedded(options: Options, plan: Plan, command: Sequence[str]) -> Subject:
    from forerun.llm import LLM

    loaded = LLM.load(options.model, options.dtype, options.device)
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection that walks over it takes as long as several steps
    slots = slots_of(options, plan)

    candidates = arms.parse(options.arms or arms.DEFAULT_ARMS)
    build = embedded.engines(loaded, slots, options.dtype, options.device, 1 + len(candidates))

    def side(arm: arms.Arm) -> Side:
        settings = arm.speculation.effective() if arm.speculation else None
        return Embedded(ServedArm(arm.name, settings), lambda: build(arm))

    sides = [side(arm) for arm in (arms.Arm(BASELINE, None), *candidates)]
    if plan.control:
        sides.append(sides[0])
    tokenizer = loaded.tokenizer
    ids = run.random_ids(loaded.target.vocab, frozenset(tokenizer.special_ids))
    return Subject(loaded.name, "forerun", tuple(sides), ids, True, tuple(command))


def _launched(options: Options, plan: Plan, command: Sequence[str]) -> Subject:
    from forerun.models import hub

    template = launching.load_template(options.engine, options.template)
    body = _body(options)
    model, tokenizer = _model_for(options, template.model_kind)
    launch = Launch(
        template, model, options.program, options.context, slots_of(options, plan), tuple(shlex.split(options.server_args)),
        options.logs,
    )  # fmt: skip
    candidates = served_arms(options.arms or ("ngram",))
    served = [Server(launch, arm) for arm in (ServedArm(BASELINE, None), *candidates)]
    for server in served:
        server.command()  # so that a setting which cannot be used is found before anything is started
    sides: list[Side] = [Launched(server, body, options.timeouts) for server in served]
    if plan.control:
        sides.append(sides[0])
    together = _together(options.alive, len(served), model)
    name = options.model or hub.DEFAULT
    return Subject(name, template.engine, tuple(sides), _ids(tokenizer, plan), together, tuple(command), body)


def _running(options: Options, plan: Plan, command: Sequence[str]) -> Subject:
    headers, body = _headers(options), _body(options)

    def address(url: str) -> Address:
        model, dialect = _look(url, headers, options.served_model)
        return Address(url, model, dialect, headers, body, options.timeouts)

    first = address(options.engine)
    sides: list[Side] = [Running(ServedArm(BASELINE, None), first)]
    for text in options.arms:
        name, equals, url = text.partition("=")
        if text == "prediction":
            # the same server: what differs is the request
            sides.append(Running(ServedArm("prediction", {"method": "prediction"}), first))
            continue
        require(
            bool(equals) and url.startswith(("http://", "https://")),
            "arms",
            text,
            "a running server cannot be given a drafter; give NAME=URL of one that was started with it, or prediction",
        )
        sides.append(Running(ServedArm(name, {"method": name}), address(url)))
    names = [side.arm.name for side in sides]
    for name in names:
        require(names.count(name) == 1, "arms", name, "give each arm a name of its own")
    if plan.control:
        sides.append(Running(ServedArm(CONTROL, None), first))
    require(len(sides) > 1, "arms", (), "give at least one as NAME=URL, or --control to see the server's own spread")
    tokenizer = options.tokenizer or options.model
    return Subject(first.model, first.dialect.name, tuple(sides), _ids(tokenizer, plan), True, tuple(command), body)


def _look(url: str, headers: Mapping[str, str], model: str | None) -> tuple[str, Any]:
    """What model a running server serves, and which engine it is, by its list of models. Raises SettingError."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        request = urllib.request.Request(f"{root}/v1/models", headers=dict(headers))
        with urllib.request.urlopen(request, timeout=30) as response:
            listed = json.loads(response.read())["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError("engine", url, f"no list of models at {root}/v1/models ({error}); is the server up?") from None
    found = next((one for one in listed if model is None or one.get("id") == model), None)
    if found is None:
        names = ", ".join(str(one.get("id")) for one in listed)
        raise SettingError("served_model", model, f"the server has {names or 'no models'}")
    owner = str(found.get("owned_by", "")).lower()
    known = {"vllm": "vllm", "llamacpp": "llamacpp", "llama.cpp": "llamacpp", "sglang": "sglang"}
    dialect = known.get(owner, "tensorrt-llm" if "tensorrt" in owner else "openai")
    return str(found["id"]), DIALECTS[dialect]


def slots_of(options: Options, plan: Plan) -> int:
    """Requests that an engine takes at once: as many as are in flight, so that they wait nowhere."""
    if options.slots is not None:
        require(options.slots >= 1, "slots", options.slots, "give 1 or more")
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


def _ids(tokenizer: str | None, plan: Plan) -> Any:
    if tokenizer is None or not any(task.prompt(0).random_ids for task in plan.tasks):
        return None
    from forerun.models import hub
    from forerun.models.tokenizer import Tokenizer

    folder = hub.resolve(tokenizer)
    known = Tokenizer(folder)
    return run.random_ids(min(known.size, _rows(folder) or known.size), frozenset(known.special_ids))


def _rows(folder: Path) -> int | None:
    """How many token ids the model in a folder has, None if its config.json does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return whole(size)


def _headers(options: Options) -> dict[str, str]:
    headers = {}
    for text in options.headers:
        name, colon, value = text.partition(":")
        require(bool(colon) and bool(name.strip()), "header", text, "give it as NAME: VALUE")
        headers[name.strip()] = value.strip()
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        require(bool(key), "api_key_env", options.api_key_env, "this environment variable is not set")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _body(options: Options) -> dict[str, Any]:
    try:
        value = json.loads(options.body)
    except json.JSONDecodeError as error:
        raise SettingError("body", options.body, f"not JSON ({error})") from None
    require(isinstance(value, dict), "body", options.body, 'give an object, for instance {"top_k": 20}')
    check_body(value, options.samples)
    return dict(value)


def measure(plan: Plan, subject: Subject, watcher: Watcher) -> Record:
    """In an event loop of its own. An interrupt, or a request to end, ends the run with what was measured."""

    async def interruptible() -> Record:
        task = asyncio.current_task()
        assert task is not None
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run.measure(plan, subject, watcher)

    return asyncio.run(interruptible())


def invocation() -> list[str]:
    """This program's command line, without what is secret in it."""
    words = ["forerun", *sys.argv[1:]]
    return ["***" if before == "--header" else word for before, word in zip(["", *words], words, strict=False)]


