"""Shared code of the GPU benchmarks: engines with real or random weights, runs of whole batches, replays of captured steps on a
fixed state, and a record that is written part by part, also after a failure. Without CUDA all of it runs on the CPU,
uncaptured, to try the scripts; the figures then mean nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.cycle import decode_key
from forerun.engine.engine import Engine, EngineStats
from forerun.engine.layouts import step_widths
from forerun.engine.text import NoText
from forerun.heads.config import HeadConfig
from forerun.models.config import ModelConfig, Rope
from forerun.models.decoder import Target
from forerun.types import Request, SamplingParams
from forerun.verify.sampling import Features

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = {
    "SmolLM2-135M": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, Rope(100000.0), tied=True),
    "Qwen3-0.6B": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 8192, 1e-6, Rope(1e6), qk_norm=True, tied=True),
    "Llama-3.1-8B": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, Rope(5e5)),
    "tiny": ModelConfig(500, 128, 256, 2, 2, 1, 64, 8192, 1e-5, Rope(10000.0)),
}
CONTEXT = 2048
NGRAM = Speculation("ngram", 4, 2, 5)
OWN = Speculation("draft_model", 4, model="the target itself")  # greedy drafts
DRAWN = Speculation("draft_model", 4, model="the target itself", draft_sample_method="probabilistic")
ARMS: dict[str, Speculation | None] = {
    "plain": None,
    "ngram k=4": NGRAM,
    "prediction k=4": Speculation("prediction", 4),
    # batches repeat their prompts, so the drafter must not remember earlier answers
    "suffix k=4": Speculation("suffix", 4, suffix_decoding_max_cached_requests=0),
    "draft_model k=4": OWN,
    "draft_model k=4, drawn": DRAWN,
}


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def release() -> None:
    """Free the memory of objects that nothing refers to."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def head_shape(target: Target, method: str) -> HeadConfig:
    """A head of the usual shape for this target: a layer as wide as the target's, a draft vocabulary of a third."""
    c = target.config
    own, layers = method == "eagle3", 3 if method == "dflash" else 1
    vocab = target.vocab // 3 if own else target.vocab
    decoder = replace(c, vocab_size=vocab, layers=layers, windows=(), qk_norm=method == "dflash")
    states = (min(2, c.layers), c.layers // 2, max(c.layers - 3, 0)) if method in ("eagle3", "dflash") else (c.layers,)
    return HeadConfig(
        method, decoder, c.hidden_size, target.vocab, c.layers, states, normed=method == "eagle",
        state_norms="each" if own else "none", own_head=own, norm_output=method == "mtp", embedding_first=method != "mtp",
        zero_first=method == "mtp", block_size=8 if layers == 3 else 0,
    )  # fmt: skip


def engine(
    target: Target, speculation: Speculation | None = None, rows: int = 32, kv_tokens: int | None = -1, make: Any = None,
    head: Any = None,
) -> Engine:
    """kv_tokens: None: all free memory; -1: enough for all rows at the longest context. make: a factory to use instead of the
    drafter table. head: of a learned drafter. draft_model drafts with the target itself."""
    kv_tokens = rows * CONTEXT if kv_tokens == -1 else kv_tokens
    config = EngineConfig(max_model_len=CONTEXT, max_num_seqs=rows, kv_cache_tokens=kv_tokens, speculation=speculation)

    def from_table(state: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
        if speculation is None:
            return None
        return TABLE[speculation.method](
            speculation, DrafterContext(state, mirror, sampling, kv, config, padded, target.vocab, target, head)
        )

    return Engine(target, config, make or from_table, NoText, padded=True)


class Ran(NamedTuple):
    """A batch: its seconds, its answers in the order of the prompts, the engine's counts, and its waits for the device."""

    seconds: float
    answers: list[list[int]]
    stats: EngineStats
    waits: int


def run(
    it: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float,
    guesses: Sequence[Sequence[int]] = (),
    seeds: Sequence[int] = (),
    fresh: bool = True,
    **more: Any,
) -> Ran:
    """Answer the prompts as one closed batch. guesses: expected outputs; seeds: 0, 1, .. by default; fresh: empty the prefix
    cache first; more: sampling parameters."""
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    if fresh:
        it.scheduler.pages.clear()
    it.stats, waits = EngineStats(), it._step.waits
    synchronize()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        seed = seeds[i] if seeds else i
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed, **more)
        guess = tuple(guesses[i]) if guesses else ()
        it.add(Request(str(i), tuple(prompt), params, tokens, seed, prediction=guess))
    while it.has_work:
        for event in it.step():
            answers[event.request_id] += event.tokens
    synchronize()
    seconds = time.perf_counter() - start
    return Ran(seconds, list(answers.values()), it.stats, it._step.waits - waits)


def capture(it: Engine, rows: int, features: Features | None = None) -> None:
    """Capture the steps of `rows` rows, with drafts and without."""
    cycle = it._step.cycle
    served = cycle.served(features or Features())
    it._step.runner.warm_up([decode_key(rows, width, None, served) for width in step_widths(cycle.width)], complete=False)


def median_ms(launch: Callable[[], Any], repeat: int, before: Callable[[], Any] = lambda: None) -> float:
    """Median milliseconds of a launch, by device events. `before` runs before each launch and is not timed. Slow launches are
    repeated fewer times, 10 at least."""
    first = []
    for _ in range(3):
        before()
        first.append(_timed(launch))
    repeat = min(repeat, max(10, int(500 / max(min(first), 1e-3))))
    if not CUDA:
        return statistics.median(_timed(launch) for _ in range(3))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in pairs:
        before()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _timed(launch: Callable[[], Any]) -> float:
    """The milliseconds of a launch by the wall clock."""
    synchronize()
    start = time.perf_counter()
    launch()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def fill(it: Engine, rows: int, context: int) -> Callable[[], None]:
    """Give the first slots sequences of random ids, each with its own pages, active and far from its limit. Returns a function
    that resets their lengths, so that every step has the same context."""
    state, block = it.state, it.config.block_size
    each = -(-(context + 100) // block)
    for slot in range(rows):
        state.tokens[slot, :context] = torch.randint(0, it._vocab, (context,)).to(DEVICE)
        state.length[slot] = context
        pages = torch.arange(1 + slot * each, 1 + (slot + 1) * each, dtype=torch.int32)
        state.block_table[slot, :each] = pages.to(DEVICE)
        state.active[slot], state.limit[slot], state.draft_size[slot] = True, CONTEXT - 50, 0
    saved = state.length.clone()

    def put_back() -> None:
        state.length.copy_(saved)

    return put_back


def step_ms(
    it: Engine, rows: int, width: int, context: int, repeat: int = 60, sampling: dict[str, Any] | None = None,
    drafts: int | None = None,
) -> float:
    """Milliseconds of a step (captured on CUDA) of `rows` rows at this context. It includes drafting if the engine has a
    drafter. sampling: the parameters of all rows, greedy by default. drafts: shared drafts of all rows; None: width for each
    row."""
    put_back = fill(it, rows, context)
    step, slot, k = it._step, list(range(rows)), [width] * rows
    params = SamplingParams(**({"temperature": 0} | (sampling or {})), max_tokens=8)
    for i in slot:
        it.sampling.admit({i: Request(str(i), (1, 2), params, 8, i)})
    key = decode_key(rows, width, drafts, step.cycle.features(slot))
    return median_ms(lambda: step.runner.run(key, [slot, k]), repeat, put_back)


class Record:
    """The results by part, written after each part. For a part that fails it holds the end of the traceback."""

    def __init__(self, path: Path, **known: Any) -> None:
        self.path, self.found, self.start = path, dict(known), time.perf_counter()

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work, record its result and return it; None if it failed."""
        begin, value = time.perf_counter(), None
        try:
            value = self.found[name] = work()
            said = json.dumps(value)
        except Exception:
            said = self.found[name] = "failed: " + " | ".join(traceback.format_exc().strip().splitlines()[-6:])
        now = time.perf_counter()
        self.found.setdefault("wall_s", {})[name] = now - begin
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"[{now - self.start:.0f} s] {name}: {now - begin:.1f} s: {said[:1500]}", flush=True)
        try:
            release()
        except RuntimeError as error:  # the device has failed; each of the other parts will record that
            print(error, flush=True)
        return value
