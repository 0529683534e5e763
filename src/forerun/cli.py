"""The command line: parses, builds, calls and prints; decides nothing. What takes long to import is imported inside the
commands, so that --help answers at once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import __version__, textfile
from forerun.checks import SettingError, require, written

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from rich.console import Console

    from forerun.bench.command import Limit
    from forerun.bench.engines.subject import Subject
    from forerun.bench.load.plan import Plan
    from forerun.bench.options import Options
    from forerun.bench.records.record import Record
    from forerun.engine.stats import DraftStats
    from forerun.llm import Output

app = typer.Typer(
    name="forerun",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding, and the measurements that say whether it pays.\n\n"
    "`forerun bench` answers the question on this machine within five minutes, `forerun report` shows the answer again; "
    "`forerun generate` continues a text; `forerun models` lists what is here.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL, SAMPLING, SPECULATION, ENGINE, OUTPUT, RUN = "Model", "Sampling", "Speculation", "Engine", "Output", "Run"
LOAD, SERVERS = "Load and prompts", "Servers"


class DType(StrEnum):
    """As in EngineConfig."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    """As in EngineConfig."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        rich_help_panel=MODEL,
        show_default="SmolLM2-135M-Instruct, fetched on first use",
        help="A folder with safetensors, a .gguf file, or a Hugging Face id (owner/name or owner/name@revision).",
    ),
]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", rich_help_panel=MODEL, help="Number format of weights and KV cache; auto: the checkpoint's.")
]
DeviceOption = Annotated[
    Device, typer.Option("--device", rich_help_panel=MODEL, help="Where it runs; auto: a GPU if there is one.")
]

MarkdownOption = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", rich_help_panel=OUTPUT, help="The tables and sentences as Markdown."),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", rich_help_panel=OUTPUT, help="One page with verdict, charts and tables; it needs no network."
    ),
]
CiOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ci",
        metavar="THRESHOLD",
        rich_help_panel=OUTPUT,
        help="Exit with 1 unless this holds, for instance 'speedup.copy >= 1.3', 'identical == all', 'failures == 0'. May be "
        "repeated.",
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", rich_help_panel=OUTPUT, help="What each --ci came to, as a JUnit XML file."),
]


DebugOption = Annotated[
    bool, typer.Option("--debug", rich_help_panel=OUTPUT, help="Show where an error comes from, and more of what goes on.")
]

UNUSABLE, UNANSWERED, BROKEN, INTERRUPTED = 2, 3, 4, 130
"""Exit codes: what was asked for cannot be had; an arm answered nothing or was given up; an error of our own; interrupted."""


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """What goes wrong is one red line on standard error, without secrets, and an exit code. debug: and the traceback."""
    if debug:
        logging.getLogger("forerun").setLevel(logging.DEBUG)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        known = _known(error)
        said = known or f"{type(error).__name__}: {error} (a fault of forerun's own; --debug shows where)"
        _complain(f"error: {said}")
        raise typer.Exit(BROKEN if known is None else UNUSABLE) from None


def _known(error: Exception) -> str | None:
    """What to say of an error that is none of our own."""
    if isinstance(error, SettingError):
        return str(error)
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror or error}"
    return None


def _complain(line: str) -> None:
    from rich.console import Console

    from forerun.bench.records.redaction import hide

    # soft_wrap: one line, whatever the terminal's width, so that it can be searched for
    Console(stderr=True, soft_wrap=True, highlight=False).print(hide(line), style="red", markup=False)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        # what the terminal has no character for is written as its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if version:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            show_default="standard input",
            help="The text to continue (with --chat: the user's message). - reads standard input.",
        ),
    ] = None,
    model: ModelOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", rich_help_panel=MODEL, help="Put the prompt through the model's chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", rich_help_panel=MODEL, help="A system message; implies --chat.")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            metavar="JSON",
            rich_help_panel=MODEL,
            help="Variables for the chat template, for instance '{\"enable_thinking\": false}'; implies --chat.",
        ),
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = Device.auto,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", rich_help_panel=SAMPLING, help="At most so many output tokens.")
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", rich_help_panel=SAMPLING, help="0 takes the most likely token each time (greedy)."),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", rich_help_panel=SAMPLING, help="Sample from the k most likely tokens; 0: no limit.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", rich_help_panel=SAMPLING, help="Sample from the most likely tokens that make up this probability."
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", rich_help_panel=SAMPLING, help="Drop tokens less likely than this share of the most likely one."
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", rich_help_panel=SAMPLING, help="Above 1: tokens of prompt and output count for less."
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", rich_help_panel=SAMPLING, help="Taken off once for a token of the output.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", rich_help_panel=SAMPLING, help="Taken off for each time it is in the output."),
    ] = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", rich_help_panel=SAMPLING, help="End before this text. May be repeated."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", rich_help_panel=SAMPLING, help="Go on past the model's end of text, up to --max-tokens."),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option("--seed", rich_help_panel=SAMPLING, show_default="0", help="The same seed gives the same sampled answer."),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            "-s",
            metavar="JSON|WORD",
            rich_help_panel=SPECULATION,
            show_default="no drafts",
            help="How to draft: ngram, suffix or prediction with its defaults, or JSON with vLLM's keys. Changes the speed, "
            "never the answer.",
        ),
    ] = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            "--prediction",
            metavar="TEXT|@FILE",
            rich_help_panel=SPECULATION,
            help="The expected answer, for method prediction; @FILE reads it from a file.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            rich_help_panel=ENGINE,
            show_default="the model's",
            help="Context length: prompt and answer together.",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", rich_help_panel=OUTPUT, help="Afterwards, speed and drafting on standard error.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel=OUTPUT, help="One JSON object instead of text: text, ids, reason, drafting, times."
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Continue a text, or answer a message with --chat. The answer streams to standard output.

    **Examples**

        forerun generate "The three primary colours are"

        forerun generate --chat "Rename x to width: def area(x, y): return x * y" -s ngram --stats

        forerun generate -s '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2}' - < page.txt

        forerun generate --chat "Add type hints to this file" -s prediction --prediction @old.py
    """
    with plain_errors(debug):
        text = _prompt(prompt)
        from forerun.config import Speculation
        from forerun.types import SamplingParams

        speculation = Speculation.parse(speculative_config)
        variables = _variables(chat_template_kwargs)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
            seed=seed,
            prediction=_prediction(prediction),
        )
        from forerun.llm import LLM

        llm = LLM(
            model,
            speculative_config=speculation,
            dtype=dtype.value,
            device=device.value,
            max_num_seqs=1,
            max_model_len=max_model_len,
        )
        system_turn = [{"role": "system", "content": system}] if system else []
        given: str | list[int] = text
        if chat or system or variables is not None:
            turns = [*system_turn, {"role": "user", "content": text}]
            given = llm.chat_ids(turns, chat_template_kwargs=variables)
        if as_json:
            (output,) = llm.generate([given], params)
            print(json.dumps(_as_json(output, llm.settings()), ensure_ascii=False))
            if stats:
                done = output.completions[0]
                _print_stats(done.stats, len(done.token_ids), done.timing.ttft_s, done.timing.e2e_s)
            return
        begin = time.perf_counter()
        first, count, drafts = 0.0, 0, None
        for chunk in llm.stream(given, params):
            first = first or time.perf_counter() - begin
            count += len(chunk.token_ids)
            drafts = chunk.stats
            print(chunk.text, end="", flush=True)
        end = time.perf_counter() - begin
        print(flush=True)
        if stats and drafts is not None:
            _print_stats(drafts, count, first, end)


@app.command()
def bench(
    ctx: typer.Context,
    model: ModelOption = None,
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = Device.auto,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="NAMES",
            rich_help_panel=RUN,
            help="What is asked, separated by commas: copy, words, random, return-code, edit-code, explain, chat, quotes, "
            "agent, chat-zh, quotes-zh, explain-zh.",
        ),
    ] = "copy,return-code,edit-code,explain",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            "-a",
            metavar="ARM",
            rich_help_panel=RUN,
            show_default="ngram and suffix; ngram on a server",
            help="A way of drafting to compare with plain decoding: ngram, suffix, ngram:k=2,4,8 (one arm for each) or JSON "
            "with vLLM's keys; on a server also flags:... with its own flags. May be repeated.",
        ),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions",
            "-r",
            rich_help_panel=RUN,
            help="Measured batches for each arm and task; below 4 there is no verdict.",
        ),
    ] = 8,
    warmups: Annotated[
        int, typer.Option("--warmups", rich_help_panel=RUN, help="Batches before those, short and not counted.")
    ] = 1,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", rich_help_panel=RUN, help="Output tokens of a request, at most.")
    ] = 128,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="N,...",
            rich_help_panel=LOAD,
            show_default="1; none with --rate or --trace",
            help="Requests in flight at once; several numbers, as in 1,8,32, measure each.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="R,...",
            rich_help_panel=LOAD,
            help="Open loop: so many requests a second on average, at random (Poisson) times, whether or not earlier ones "
            "have ended. Instead of --concurrency, or beside it if both are given.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            rich_help_panel=LOAD,
            show_default="the concurrency; 16 with --rate or --trace",
            help="Requests of a batch.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=LOAD,
            help="Your own prompts as JSON Lines (prompt, messages, or Spec-Bench's turns), a task beside --tasks; with "
            "--tasks none, alone. May be repeated.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            rich_help_panel=LOAD,
            help="Replay a request log: JSON Lines with timestamp and prompt, messages or input_length. Instead of --tasks; "
            "each repetition takes the next --requests of it.",
        ),
    ] = None,
    trace_speed: Annotated[
        float, typer.Option("--trace-speed", rich_help_panel=LOAD, help="Replay the trace so many times as fast.")
    ] = 1.0,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            "-e",
            metavar="ENGINE|URL",
            rich_help_panel=SERVERS,
            help="forerun: the engine in this process. vllm, llamacpp, xllamacpp, sglang, tensorrt-llm: a server for each arm "
            "is started here. A URL: a server that runs already, without speculation; the arms are then NAME=URL.",
        ),
    ] = "forerun",
    program: Annotated[
        str | None,
        typer.Option(
            "--program", metavar="PATH", rich_help_panel=SERVERS, help="The server's program, in place of the template's."
        ),
    ] = None,
    server_args: Annotated[
        str,
        typer.Option(
            "--server-args", metavar="TEXT", rich_help_panel=SERVERS, help="More of the server's own flags, for every arm."
        ),
    ] = "",
    template: Annotated[
        Path | None,
        typer.Option(
            "--template", metavar="FILE", rich_help_panel=SERVERS, help="How to start it, as --print-template prints it."
        ),
    ] = None,
    print_template: Annotated[
        bool, typer.Option("--print-template", rich_help_panel=SERVERS, help="Print the engine's template and exit.")
    ] = False,
    context: Annotated[
        int, typer.Option("--context", rich_help_panel=SERVERS, help="Tokens of a sequence that a started server allows.")
    ] = 4096,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            rich_help_panel=SERVERS,
            show_default="the highest concurrency; 32 with --rate or --trace",
            help="Requests that an engine takes at once.",
        ),
    ] = None,
    alive: Annotated[
        str,
        typer.Option(
            "--alive",
            metavar="together|in-turns|auto",
            rich_help_panel=SERVERS,
            help="Whether all servers are up at once, or one after the other, twice; auto: together if memory allows. Only one "
            "ever has work.",
        ),
    ] = "auto",
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="FOLDER", rich_help_panel=SERVERS, help="Leave the servers' logs there."),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--served-model",
            metavar="NAME",
            rich_help_panel=SERVERS,
            show_default="the first that the server lists",
            help="With a URL: the model's name there.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="MODEL", rich_help_panel=SERVERS, help="Whose vocabulary the task random draws from."
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env", metavar="NAME", rich_help_panel=SERVERS, help="With a URL: the environment variable with its key."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", metavar="'NAME: VALUE'", rich_help_panel=SERVERS, help="With a URL: sent with each request."
        ),
    ] = None,
    body: Annotated[
        str,
        typer.Option("--body", metavar="JSON", rich_help_panel=SERVERS, help="Fields to add to each request to a server."),
    ] = "{}",
    timeout: Annotated[
        float, typer.Option("--timeout", rich_help_panel=SERVERS, help="Seconds after which a request to a server has failed.")
    ] = 600.0,
    connect_timeout: Annotated[
        float, typer.Option("--connect-timeout", rich_help_panel=SERVERS, help="The same, without a connection.")
    ] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option("--idle-timeout", rich_help_panel=SERVERS, help="The same, in which nothing came.")
    ] = 300.0,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            rich_help_panel=RUN,
            help="Measure the baseline twice: how much it differs from itself becomes the least difference that counts.",
        ),
    ] = False,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            rich_help_panel=RUN,
            help="Also draw the first tokens behind two prompts so often from every arm, and test that all draw alike.",
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option("--seed", rich_help_panel=RUN, help="Of the sampled task, random; the same in every arm.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="bench-DATE-TIME.json",
            help="The record: every raw sample, settings, versions, machine. It is written after each batch.",
        ),
    ] = None,
    budget_minutes: Annotated[
        float | None,
        typer.Option(
            "--budget-minutes",
            metavar="MINUTES",
            rich_help_panel=RUN,
            show_default="4 where none of -r, -n, --tasks and the options of the load are given; otherwise no limit",
            help="Take no longer than that: with fewer repetitions, shorter answers and fewer tasks, as far as they are not "
            "given. 0: no limit.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RECORD",
            rich_help_panel=RUN,
            help="Go on with a run that was interrupted: what its record is missing is measured, with the options that it "
            "was begun with. Secrets, which no record holds, are given again.",
        ),
    ] = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    ci: CiOption = None,
    junit: JunitOption = None,
    debug: DebugOption = False,
) -> None:
    """Does speculation pay here? Measures it against plain decoding on this machine, with the same prompts, and says so.

    Each task is run with no drafter (the baseline) and with each arm, in the order A B C, C B A, on prompts that differ
    between repetitions and are the same for every arm. For each there is a speed-up with its 95 % interval, where it comes
    from, whether the greedy answers stayed the same, and a verdict: faster, slower, no difference or not enough data. How
    long it takes is said before it begins; without options it is fitted to four minutes.

    **Examples**

        forerun bench

        forerun bench -m HuggingFaceTB/SmolLM2-360M-Instruct --tasks copy,explain -a ngram:k=2,4,8 -a suffix

        forerun bench -a '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}' -r 10 --control --markdown result.md

        forerun bench -e vllm --program venv/bin/vllm -a ngram:k=2,4,8 --tasks copy,explain -c 1,8,32

        forerun bench -e http://127.0.0.1:8000 -a ngram=http://127.0.0.1:8001 --rate 2 --requests 64

        forerun bench --html result.html --ci 'speedup.copy >= 1.3' --ci 'identical == all' --junit result.xml
    """
    with plain_errors(debug):
        from rich.console import Console

        from forerun.bench.engines import launching
        from forerun.bench.options import Options, resumed

        if print_template:
            print(launching.text_of(engine), end="")
            return
        names = tuple(name.strip() for name in tasks.split(",") if name.strip())
        options = Options(
            model=model,
            engine=engine,
            arms=tuple(arm or ()),
            tasks=() if names == ("none",) else names,
            prompts=tuple(prompts or ()),
            trace=trace,
            trace_speed=trace_speed,
            concurrency=_numbers("concurrency", concurrency or ("" if rate or trace else "1"), int),
            rates=_numbers("rate", rate or "", float),
            requests=requests,
            repetitions=repetitions,
            warmups=warmups,
            max_tokens=max_tokens,
            control=control,
            samples=samples,
            seed=seed,
            dtype=dtype.value,
            device=device.value,
            template=template,
            program=program,
            server_args=server_args,
            context=context,
            slots=slots,
            alive=alive,
            logs=logs,
            served_model=served_model,
            api_key_env=api_key_env,
            headers=tuple(header or ()),
            body=body,
            timeout_s=timeout,
            connect_timeout_s=connect_timeout,
            idle_timeout_s=idle_timeout,
            tokenizer=tokenizer,
        )
        given, earlier = _given(ctx, options), None
        limit = _limit(budget_minutes, given | ({"tasks": tasks} if ci else {}))  # a threshold may name a task
        if resume is not None:
            require(budget_minutes is None, "budget_minutes", budget_minutes, "a run is resumed as it was begun; leave it out")
            earlier, limit = _record(resume), _limit(0.0, given)
            known = bool(earlier.settings.options)
            require(known, "resume", str(resume), "it is of a version that could not resume; measure anew")
            options = resumed(earlier.settings.options, given)
        options.check()
        wanted = _Outputs(markdown, html, tuple(ci or ()), junit)
        path = output or resume or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.json")
        _execute(options, earlier, limit, path, wanted, Console())


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Records that `forerun bench` wrote.")],
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    ci: CiOption = None,
    junit: JunitOption = None,
    debug: DebugOption = False,
) -> None:
    """Show a record again, or compare records: the first with each of the others.

    One record is shown as `bench` showed it, and can be written as Markdown or as a page, or held against thresholds. Of
    several, the cells of the same task, load and arm are compared: what became faster, what slower, and what the runs
    differ in beside the time.

    **Examples**

        forerun report bench-20261129-180000.json --html result.html

        forerun report last-week.json today.json --markdown change.md
    """
    with plain_errors(debug):
        from rich.console import Console

        from forerun.bench.pages import changes
        from forerun.bench.pages import html as pages

        console = Console()
        wanted = _Outputs(markdown, html, tuple(ci or ()), junit)
        records = [_record(path) for path in files]
        first, *others = records
        if not others:
            s = first.settings
            wanted.possible(files)
            wanted.meaningful(s.tasks, [load.label for load in s.loads], [arm.name for arm in s.arms])
            if not wanted.write(first, console):
                raise typer.Exit(1)
            return
        require(not ci and not junit, "ci", ci or junit, "a threshold speaks of one record; give one FILE")
        wanted.possible(files)
        for later in others:
            changes.show(first, later, console)
        if markdown is not None:
            _write(markdown, "\n".join(changes.markdown(first, later) for later in others))
        if html is not None:
            _write(html, pages.changes_page(first, others))


@app.command()
def models(
    fetch: Annotated[
        str | None, typer.Option("--fetch", metavar="MODEL", help="First fetch this model, if it is not here yet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the models that are on this machine, ready to be named with --model.

    **Examples**

        forerun models

        forerun models --fetch smollm2-135m-instruct
    """
    with plain_errors(debug):
        from forerun.models import hub

        if fetch is not None:
            hub.resolve(fetch)
        known = hub.models()
        if as_json:
            print(
                json.dumps([{"name": m.name, "folder": str(m.folder) if m.folder else None, "bytes": m.bytes} for m in known])
            )
            return
        from rich.console import Console
        from rich.table import Column, Table

        table = Table("model", "size", Column("folder", overflow="fold"))
        for m in known:
            here = m.folder is not None
            table.add_row(
                m.name,
                f"{m.bytes / 1e6:,.0f} MB" if here else "–",
                str(m.folder) if here else "not here yet; fetched on first use",
            )
        Console().print(table)


def _given(ctx: typer.Context, options: Options) -> dict[str, Any]:
    """What stands on the command line, by the options' fields."""
    fields = {"arm": "arms", "rate": "rates", "header": "headers"} | {
        name: f"{name}_s" for name in ("timeout", "connect_timeout", "idle_timeout")
    }
    sources = {p: ctx.get_parameter_source(p) for p in ctx.params}
    names = [p for p, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return {name: getattr(options, name) for p in names if hasattr(options, name := fields.get(p, p))}


def _limit(minutes: float | None, given: Mapping[str, Any]) -> Limit:
    """What a run may take, and what may be made smaller for that: what the user has not chosen."""
    from forerun.bench.command import Limit
    from forerun.bench.load.budget import DEFAULT_MINUTES

    chosen = minutes is not None
    if minutes is None:
        own = ("repetitions", "max_tokens", "tasks", "prompts", "trace", "rates", "concurrency", "requests", "samples")
        minutes = 0.0 if given.keys() & own else DEFAULT_MINUTES
    require(0 <= minutes < 1e6, "budget_minutes", minutes, f"give 0 (no limit) or more, for instance {DEFAULT_MINUTES:g}")
    may = frozenset({"repetitions", "max_tokens", "tasks"} - given.keys())
    all_given = chosen and bool(minutes) and not may
    require(not all_given, "budget_minutes", minutes, "-r, -n and --tasks leave nothing to shorten; leave one of them out")
    return Limit(60 * minutes or None, may)


def _execute(
    options: Options, earlier: Record | None, limit: Limit, path: Path, wanted: _Outputs, console: Console
) -> None:
    """Measure what the options ask for, or what an earlier part of that left over; write the record and what else is wanted."""
    from forerun.bench import command
    from forerun.bench.load.plan import scheduled_s
    from forerun.bench.pages import progress, words
    from forerun.bench.records.keeping import Keeper
    from forerun.bench.records.summary import unanswered

    keeper = Keeper(path, replacing=earlier is not None)
    plan = command.plan_of(options)
    wanted.possible([path])
    wanted.meaningful([task.name for task in plan.tasks], [load.label for load in plan.loads], command.arm_names(options))
    with progress.waiting(console, "Preparing" if options.remote else "Loading the model"):
        subject = command.subject_of(options, plan)
    subject = command.described(subject, options, plan)
    if earlier is not None:
        command.resumable(earlier, subject)
    least = scheduled_s(plan, len(subject.sides), subject.together)
    if (long := words.long_wait(least, plan.loads)) is not None:
        _tell(f"Note: {long}")
    _tell(f"Record: {path}, written after each batch. If the run is interrupted, go on with: {keeper.resume}")
    try:
        with progress.watcher(console) as course:

            def prepare(plan: Plan, subject: Subject) -> Coroutine[Any, Any, tuple[Plan, Subject]]:
                return command.prepare(options, plan, subject, limit, course, _tell)

            measured = command.measure(plan, subject, course, keeper.write, earlier, prepare)
    except BaseException:
        if keeper.saved:
            _tell(f"What was measured until then is in {keeper.close()}. Go on with: {keeper.resume}")
        raise
    if (where := keeper.close()) != path:
        _complain(f"error: {path} cannot be written ({keeper.trouble}); the record is in {where}")
    passed = wanted.write(measured, console)
    console.print(f"\nAll samples, settings and versions: {where}", highlight=False, soft_wrap=True)
    if not measured.finished:
        _tell(f"Interrupted. Go on with: {keeper.resume}")
        raise typer.Exit(INTERRUPTED)
    if measured.given_up or unanswered(measured):
        raise typer.Exit(UNANSWERED)
    if not passed:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    """What belongs to the run and not to its result."""
    print(line, file=sys.stderr, flush=True)


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Of an option that takes several, separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SettingError(name, text, "give numbers separated by commas, as in 1,8,32") from None


def _prompt(given: str | None) -> str:
    """The prompt's text, from the argument or from standard input."""
    if given is None and sys.stdin.isatty():
        raise SettingError(
            "prompt", None, 'give a text, for instance forerun generate "Once upon a time", or - to read standard input'
        )
    text = textfile.decoded("prompt", "-", sys.stdin.buffer.read()) if given in (None, "-") else str(given)
    require(bool(text.strip()), "prompt", text, "it is empty; give a text, for instance 'Once upon a time'")
    return written("prompt", text, "Once upon a time")


def _prediction(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    return textfile.read("prediction", Path(given[1:]))


@dataclass(frozen=True)
class _Outputs:
    """What to make of a record beside showing it."""

    markdown: Path | None
    html: Path | None
    ci: tuple[str, ...]
    junit: Path | None

    def possible(self, records: Sequence[Path]) -> None:
        """Raises SettingError for a file that cannot be written, for one that would be written over another or over one of
        these records, and for a threshold that cannot be read."""
        from forerun.bench.records import thresholds
        from forerun.bench.records.keeping import writable

        for name, path in (("markdown", self.markdown), ("html", self.html), ("junit", self.junit)):
            if path is not None:
                writable(name, path)
                every = (*records, self.markdown, self.html, self.junit)
                taken = [other for other in every if other is not None and _same(other, path)]
                require(len(taken) <= 1, name, str(path), "another file would be written over; give another name")
        require(
            self.junit is None or bool(self.ci), "junit", str(self.junit), "there is no threshold; add --ci 'failures == 0'"
        )
        thresholds.parse(self.ci)

    def meaningful(self, tasks: Sequence[str], loads: Sequence[str], arms: Sequence[str]) -> None:
        """Raises SettingError for a threshold on what is not measured."""
        from forerun.bench.records import thresholds

        thresholds.exist(thresholds.parse(self.ci), tasks, loads, arms)

    def write(self, record: Record, console: Console) -> bool:
        """Show it, write the files. Whether every threshold holds."""
        from forerun.bench.pages import html, report
        from forerun.bench.records import thresholds

        report.show(record, console)
        if self.markdown is not None:
            _write(self.markdown, report.markdown(record))
        if self.html is not None:
            _write(self.html, html.page(record))
        checks = thresholds.check(thresholds.parse(self.ci), record)
        if checks:
            console.print()
        for check in checks:
            console.print(
                thresholds.line(check), style="green" if check.passed else "red", markup=False, highlight=False, soft_wrap=True
            )
        if self.junit is not None:
            _write(self.junit, thresholds.junit(checks, record))
        return all(check.passed for check in checks)


def _variables(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingError("chat_template_kwargs", text, f'not JSON ({error}); give {{"enable_thinking": false}}') from None
    require(isinstance(value, dict), "chat_template_kwargs", text, 'give a JSON object such as {"enable_thinking": false}')
    return dict(value)


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file. A device may be written to more than once."""
    return one.resolve() == other.resolve() and (one.is_file() or not one.exists())


def _write(path: Path, text: str) -> None:
    """A lone surrogate, which a server may send, is written as its escape."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _record(path: Path) -> Record:
    from forerun.bench.records import record

    try:
        return record.load(path)
    except OSError as error:
        raise SettingError("file", str(path), f"cannot be read ({error.strerror}); give a file that bench wrote") from None


def _as_json(output: Output, settings: dict[str, Any]) -> dict[str, Any]:
    done = output.completions[0]
    drafts = {
        **asdict(done.stats),
        "acceptance_rate": done.stats.acceptance_rate,
        "acceptance_length": done.stats.acceptance_length,
    }
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "prompt_tokens": len(output.prompt_ids),
        "timing": done.timing._asdict(),
        "drafts": drafts,
        "settings": settings,
    }


def _print_stats(drafts: DraftStats, tokens: int, first_s: float, end_s: float) -> None:
    rate = "–" if drafts.acceptance_rate is None else f"{drafts.acceptance_rate:.0%} ({drafts.accepted} of {drafts.drafted})"
    length = "–" if drafts.acceptance_length is None else f"{drafts.acceptance_length:.2f}"
    share = "–" if not drafts.steps else f"{drafts.drafting_steps / drafts.steps:.0%}"
    joint = " ".join(f"{100 * j:.0f}" for j in drafts.joint) or "–"
    decode = f"{(tokens - 1) / (end_s - first_s):.1f}" if tokens > 1 and end_s > first_s else "–"
    for line in (
        f"{tokens} tokens in {end_s:.2f} s; first after {first_s:.2f} s, then {decode} tokens/s",
        f"steps {drafts.steps}, with a draft {share}, tokens a step {length}",
        f"drafted tokens accepted {rate}; share of steps accepted up to each position, in %: {joint}",
    ):
        print(line, file=sys.stderr)


def share_cores() -> None:
    """Let threads that wait for one another spin briefly, then sleep, unless the user has set this already.
    GNU OpenMP spins for milliseconds: beside any other busy program, waiting for a thread that is not running then takes the
    cores away from it, and a step was measured at 20 to 40 times its time. Works before torch is imported only."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class Notices(logging.Handler):
    """What the package reports while it works, on standard error, each line once."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        debug = logging.getLogger("forerun").isEnabledFor(logging.DEBUG)
        line = self.format(record) if debug else record.getMessage()  # a traceback only where it is asked for
        if line not in self._shown:
            self._shown.add(line)
            print(line, file=sys.stderr)


def main() -> None:
    """The entry point."""
    share_cores()
    logging.getLogger("forerun").addHandler(Notices())
    logging.getLogger("forerun").setLevel(logging.INFO)
    app()


if __name__ == "__main__":
    main()
