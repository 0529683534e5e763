"""`forerun generate`: continue one prompt with the engine in this process."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import textfile
from forerun.checks import SettingError, require, written
from forerun.cli.errors import tell
from forerun.options import (
    ENGINE,
    MODEL,
    OUTPUT,
    SAMPLING,
    SPECULATION,
    device_option,
    dtype_option,
    model_option,
    option,
    quantization_option,
)

if TYPE_CHECKING:
    from forerun.engine.stats import DraftStats
    from forerun.llm import Output
    from forerun.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the panel SAMPLING have the names of SamplingParams."""

    model: str | None = model_option()
    chat: bool = option(False, MODEL, "Put the prompt through the model's chat template.")
    system: str | None = option(None, MODEL, "A system message; implies --chat.", metavar="TEXT")
    chat_template_kwargs: str | None = option(
        None,
        MODEL,
        "Variables for the chat template, for instance '{\"enable_thinking\": false}'; implies --chat.",
        metavar="JSON",
    )
    dtype: str = dtype_option()
    quantization: str = quantization_option()
    device: str = device_option()
    max_tokens: int = option(256, SAMPLING, "The most output tokens.", "-n")
    temperature: float = option(0.0, SAMPLING, "0 takes the most likely token each time (greedy).", "-t")
    top_k: int = option(0, SAMPLING, "Sample from the k most likely tokens; 0: no limit.")
    top_p: float = option(1.0, SAMPLING, "Sample from the most likely tokens that make up this probability.")
    min_p: float = option(0.0, SAMPLING, "Drop tokens less likely than this share of the most likely one.")
    repetition_penalty: float = option(1.0, SAMPLING, "Above 1: tokens of the prompt and of the output become less likely.")
    presence_penalty: float = option(0.0, SAMPLING, "Subtracted once from the logit of a token of the output.")
    frequency_penalty: float = option(0.0, SAMPLING, "Subtracted for each time that the token is in the output.")
    stop: tuple[str, ...] = option((), SAMPLING, "End before this text. May be repeated.", metavar="TEXT")
    ignore_eos: bool = option(False, SAMPLING, "Go on past the model's end of text, up to --max-tokens.")
    structured: str | None = option(
        None, SAMPLING, "The form of the answer, for instance '{\"choice\": [\"yes\", \"no\"]}'; see docs/structured.md.",
        metavar="JSON",
    )  # fmt: skip
    seed: int | None = option(None, SAMPLING, "The same seed gives the same sampled answer.", default_text="0")
    speculative_config: str | None = option(
        None, SPECULATION,
        "How to draft: ngram, suffix, prediction or eagle3 with its defaults, or JSON with vLLM's keys. Changes the speed, "
        "never the answer.",
        "-s", metavar="JSON|WORD", default_text="no drafts",
    )  # fmt: skip
    prediction: str | None = option(
        None, SPECULATION, "The expected answer, for method prediction; @FILE reads it from a file.", metavar="TEXT|@FILE"
    )
    max_model_len: int | None = option(
        None, ENGINE, "Context length: prompt and answer together.",
        default_text="the model's; on a CPU at most what a quarter of the free memory holds",
    )  # fmt: skip
    stats: bool = option(False, OUTPUT, "Print speed and drafting on standard error at the end.")
    as_json: bool = option(False, OUTPUT, "One JSON object instead of text: text, ids, reason, drafting, times.", "--json")

    def sampling(self) -> SamplingParams:
        """Raises SettingError."""
        from forerun.types import SamplingParams

        shared = {field.name for field in fields(SamplingParams)} & {field.name for field in fields(self)}
        given = {name: getattr(self, name) for name in shared} | {"prediction": _prediction(self.prediction)}
        if self.structured is not None:
            given["structured"] = textfile.json_object("structured", self.structured, '{"choice": ["yes", "no"]}')
        return SamplingParams(**given)


def generate(
    options: Options,
    prompt: Annotated[
        str | None,
        typer.Argument(
            show_default="standard input",
            help="The text to continue (with --chat: the user's message). - reads standard input.",
        ),
    ] = None,
) -> None:
    """Continue a text, or answer a message with --chat. The answer streams to standard output.

    **Examples**

        forerun generate "The three primary colours are"

        forerun generate --chat "Rename x to width: def area(x, y): return x * y" -s ngram --stats

        forerun generate -s '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2}' - < page.txt

        forerun generate --chat "Add type hints to this file" -s prediction --prediction @old.py
    """
    from forerun.config import Speculation

    text = _prompt(prompt)
    speculation = Speculation.parse(options.speculative_config)
    variables = None
    if options.chat_template_kwargs is not None:
        example = '{"enable_thinking": false}'
        variables = textfile.json_object("chat_template_kwargs", options.chat_template_kwargs, example)
    params = options.sampling()
    from forerun.llm import LLM  # imports torch, which takes a second: bad options are refused before

    llm = LLM(
        options.model,
        speculative_config=speculation,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        max_num_seqs=1,
        max_model_len=options.max_model_len,
    )
    given: str | list[int] = text
    if options.chat or options.system or variables is not None:
        system = [{"role": "system", "content": options.system}] if options.system else []
        given = llm.chat_ids([*system, {"role": "user", "content": text}], chat_template_kwargs=variables)
    if options.as_json:
        (output,) = llm.generate([given], params)
        print(json.dumps(_as_json(output, llm.settings()), ensure_ascii=False))
        if options.stats:
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
    if options.stats and drafts is not None:
        _print_stats(drafts, count, first, end)


def _prompt(given: str | None) -> str:
    """The prompt, from the argument or from standard input. Raises SettingError."""
    if given is None and sys.stdin.isatty():
        remedy = 'give a text, for instance forerun generate "Once upon a time", or - to read standard input'
        raise SettingError("prompt", None, remedy)
    text = textfile.decoded("prompt", "-", sys.stdin.buffer.read()) if given in (None, "-") else str(given)
    require(bool(text.strip()), "prompt", text, "it is empty; give a text, for instance 'Once upon a time'")
    return written("prompt", text, "Once upon a time")


def _prediction(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    return textfile.read("prediction", Path(given[1:]))


def _as_json(output: Output, settings: dict[str, Any]) -> dict[str, Any]:
    done = output.completions[0]
    stats = done.stats
    rates = {"acceptance_rate": stats.acceptance_rate, "acceptance_length": stats.acceptance_length}
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "prompt_tokens": len(output.prompt_ids),
        "timing": done.timing._asdict(),
        "drafts": asdict(stats) | rates,
        "settings": settings,
    }


def _print_stats(drafts: DraftStats, tokens: int, first_s: float, end_s: float) -> None:
    rate = "–" if drafts.acceptance_rate is None else f"{drafts.acceptance_rate:.0%} ({drafts.accepted} of {drafts.drafted})"
    length = "–" if drafts.acceptance_length is None else f"{drafts.acceptance_length:.2f}"
    share = "–" if not drafts.steps else f"{drafts.drafting_steps / drafts.steps:.0%}"
    joint = " ".join(f"{100 * j:.0f}" for j in drafts.joint) or "–"
    decode = f"{(tokens - 1) / (end_s - first_s):.1f}" if tokens > 1 and end_s > first_s else "–"
    tell(f"{tokens} tokens in {end_s:.2f} s; first after {first_s:.2f} s, then {decode} tokens/s")
    tell(f"steps {drafts.steps}, with a draft {share}, tokens a step {length}")
    tell(f"drafted tokens accepted {rate}; share of steps accepted up to each position, in %: {joint}")
