"""The engine takes requests, makes steps and gives events. It decides where an answer ends and which request a failure ends."""

from __future__ import annotations

import gc
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from forerun.config import BUDGET, EngineConfig
from forerun.drafters import Drafter, Needs, Rows
from forerun.engine.costs import Costs, PassCosts, pass_costs, step_costs
from forerun.engine.cycle import Cycle
from forerun.engine.interrupts import Uninterrupted
from forerun.engine.layouts import ExactLayout, PaddedLayout, context_of, prompt_sizes
from forerun.engine.memory import free_memory, tokens_on_cpu, tokens_on_gpu
from forerun.engine.pages import Pages
from forerun.engine.policy import Policy
from forerun.engine.runner import Eager, Graphs, Runner
from forerun.engine.scheduler import Scheduler, Sequence
from forerun.engine.speedup import Decoded, Speedup
from forerun.engine.state import RowState
from forerun.engine.stats import EngineSnapshot, EngineStats, RequestStats
from forerun.engine.step import Committed, InFlight, Step, Times
from forerun.engine.text import Detokenizer, NoText, TextStream
from forerun.kernels import cpu
from forerun.kernels.cpu_threads import only_this_thread
from forerun.models.decoder import KVCache, Target
from forerun.types import Event, FinishReason, Request, SettingError, require
from forerun.verify.grammar import Grammars, Matcher
from forerun.verify.sampling import SamplingState, check_request

LOG = logging.getLogger("forerun")
TRIAL = 64  # tokens of a sequence in an engine that shows only what its drafter needs
MEASURED, CONTEXT = 64, 1024  # the cost of steps is measured up to so many positions and tokens of context
# (state, mirror, sampling, kv, padded) -> drafter, see drafters/table.py
MakeDrafter = Callable[[RowState, RowState, SamplingState, KVCache, bool], Drafter | None]


def measure_costs(cycle: Cycle, longest: int, kv_tokens: int, most_rows: int) -> tuple[Costs, PassCosts | None]:
    """Measure the cost of steps by positions and context, and of the drafter's passes by rows, if it makes any, with the dummy
    slot, while all pages are free. longest: tokens of a sequence at most."""
    target, kv, state, dummy = cycle.target, cycle.kv, cycle.state, np.array([cycle.state.dummy])
    most = min(MEASURED, longest)
    context = max(min(CONTEXT, longest - most, kv_tokens), 0) // kv.block_size * kv.block_size
    pages = torch.arange(1, context // kv.block_size + 1, dtype=torch.int32)

    @torch.inference_mode()
    def run(positions: int, behind: int) -> None:
        target.forward(state.batch(dummy, np.array([behind]), np.array([positions]), np.arange(positions)), kv)

    with state.dummy_sequence(context + 1, pages):
        costs = Costs(step_costs(target, run, most, context))
    drafter = cycle.drafter
    if drafter is None or not drafter.needs.pass_tokens or not cycle.width:
        return costs, None

    passes = max(min(3, cycle.width // drafter.needs.pass_tokens), 1)

    @torch.inference_mode()
    def draft(rows: int) -> None:
        k = torch.full((rows,), passes * drafter.needs.pass_tokens)
        drafter.propose(Rows(torch.full_like(k, state.dummy), k, int(k[0])))

    with state.dummy_sequence(min(context, kv.block_size) + 1, pages[:2]):
        found = pass_costs(draft, most_rows, passes)
    drafter.restart()
    return costs, found


def captures(target: Target) -> bool:
    """Whether the target's kernels can be captured: on CUDA, in a dtype that the kernels have."""
    return target.device.type == "cuda" and target.dtype in (torch.bfloat16, torch.float16)


def fused_cycle() -> type[Cycle]:
    """The cycle that is captured. It is imported here since it needs triton, which CPU builds of torch do not bring."""
    from forerun.engine.fused import FusedCycle

    return FusedCycle


class Engine:
    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        make_drafter: MakeDrafter,
        detokenizer: Callable[[], Detokenizer],
        padded: bool | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """make_drafter: builds the drafter on the engine's state; detokenizer: makes a new one for each request; padded: the
        padded layout, read one step late (None: on CUDA); grammars: compiles the grammars of requests, None: they are refused.
        Raises SettingError for settings that cannot work together."""
        speculation = config.speculation
        self.config, self._grammars = config, grammars
        self.max_model_len = config.max_model_len or target.max_positions
        limit = target.max_positions
        require(self.max_model_len <= limit, "max_model_len", self.max_model_len, f"the model takes at most {limit}")
        self._longer = "max_model_len"  # what to raise for a longer context
        device = target.device
        self.budget = config.max_num_batched_tokens or BUDGET[device.type]
        width = speculation.num_speculative_tokens if speculation else 0
        tokens = config.kv_cache_tokens or self._default_kv_tokens(target, make_drafter, detokenizer, padded)
        pages = Pages(tokens // config.block_size, config.block_size, config.enable_prefix_caching)

        drawn = speculation is not None and speculation.draft_sample_method == "probabilistic"
        most = config.max_num_seqs * (width + 1)
        require(
            not drawn or self.budget >= most,
            "max_num_batched_tokens",
            self.budget,
            f"with draft_sample_method probabilistic every row of a step has its full draft; give at least {most}",
        )
        slots, positions = config.max_num_seqs + 1, self.max_model_len + width + 1
        probs = target.vocab if drawn else None
        self.state = RowState(slots, positions, pages.needed(self.max_model_len + width), device, width, probs)
        self.sampling = SamplingState(self.state.tokens, self.state.length, target.vocab)
        self.kv = target.kv_cache(pages.count + 1, config.block_size)
        padded = device.type == "cuda" if padded is None else padded
        mirror = RowState(slots, positions, 1, torch.device("cpu")) if padded else self.state
        self.drafter = make_drafter(self.state, mirror, self.sampling, self.kv, padded)
        policy = Policy(speculation, config.adaptive_drafts and not drawn)
        needs = self.drafter_needs
        # A drafter in the cycle with keys and values of its own writes them past the step's tokens, into the lookahead pages.
        # With the padded layout it computes those of a fully accepted draft's last position with the next draft.
        lookahead, missing = (width + 1, int(padded)) if needs.device and needs.kv_bytes_per_token else (0, 0)
        table_width, recomputed = self.state.block_table.shape[1], int(bool(needs.layers))
        self.scheduler = Scheduler(
            pages, policy, config.max_num_seqs, self.budget, lookahead, table_width, missing, drawn, recomputed
        )  # fmt: skip
        block = speculation is not None and speculation.rejection_sample_method == "block"
        self._step = self._make_step(target, policy, mirror, padded, block)
        self._in_flight: deque[InFlight] = deque()
        self._events: list[Event] = []
        self._blamed: list[Sequence] = []  # the sequences that a failure now may belong to
        self._committing: Sequence | None = None
        self.stats = EngineStats()
        self._speedup = Speedup(self._step.runner, self._step.layout.plain) if width else None
        self._vocab = target.vocab
        self._quantization = target.quantization
        self._cpu_isa, self._threads = cpu.isa_of(target.kernels), cpu.threads_of(target.kernels)
        self._around_step = only_this_thread if self._cpu_isa else nullcontext  # plain torch needs its threads
        self._detokenizer = detokenizer
        self._live: dict[str, Sequence] = {}
        self._texts: dict[str, TextStream] = {}

    def _make_step(self, target: Target, policy: Policy, mirror: RowState, padded: bool, block: bool) -> Step:
        """The cycle, layout and runner for this device, with graphs if the target's kernels can be captured."""
        seqs, longest = self.config.max_num_seqs, self.max_model_len
        captured = padded and captures(target)
        kind: type[Cycle] = fused_cycle() if captured else Cycle
        inside = self.drafter if self.drafter is not None and self.drafter.needs.device else None
        cycle = kind(target, self.kv, self.state, self.sampling, inside, block)
        if not padded:
            adapts = self.config.speculation is not None and policy.adaptive
            exact = Eager(cycle, partial(measure_costs, cycle, longest, self.kv_tokens, seqs) if adapts else None)
            return Step(cycle, ExactLayout(cycle, policy, exact), exact, self.drafter, mirror, lag=0)
        runner: Runner = Graphs(cycle) if captured else Eager(cycle, None)
        prompts = prompt_sizes(min(self.budget, seqs * longest), seqs) if captured else None
        layout = PaddedLayout(cycle, policy, runner, seqs, longest, prompts)
        return Step(cycle, layout, runner, self.drafter, mirror, lag=1)

    def _default_kv_tokens(
        self, target: Target, make_drafter: MakeDrafter, detokenizer: Callable[[], Detokenizer], padded: bool | None
    ) -> int:
        """Tokens of the KV cache. A trial engine with the smallest cache shows what the drafter needs and, on a GPU, what else
        is used. On a GPU the cache is the rest of the memory share. On a CPU it is what all sequences can need, at most a
        quarter of the free memory; if one sequence of the model's context is more, max_model_len is lowered."""
        config, device = self.config, target.device

        def trial_of(**changed: Any) -> Engine:
            smallest = replace(config, kv_cache_tokens=config.block_size, **changed)
            return Engine(target, smallest, make_drafter, detokenizer, padded)

        if device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            trial = trial_of()
            trial._step.warm_up_largest()
            needs = trial.drafter_needs
            captured = trial._step.runner.capturing is not None
            each = target.kv_bytes_per_token + needs.kv_bytes_per_token
            torch.cuda.empty_cache()
            other = max(free - free_memory(device), 0)
            del trial
            gc.collect()
            torch.cuda.empty_cache()
            weights = target.bytes + needs.weight_bytes
            share = config.gpu_memory_utilization
            return tokens_on_gpu(total, free, share, weights, other, each, self.max_model_len, captured)
        each = target.kv_bytes_per_token
        if config.speculation is not None:
            each += trial_of(max_num_seqs=1, max_model_len=min(self.max_model_len, TRIAL)).drafter_needs.kv_bytes_per_token
        whole, given = self.max_model_len, config.max_model_len is not None
        free, block = free_memory(device), config.block_size
        tokens, self.max_model_len = tokens_on_cpu(free, each, block, config.max_num_seqs, whole, given)
        if self.max_model_len < whole:
            LOG.warning(
                "the context is %d tokens, not the model's %d: a quarter of the free memory holds no more; kv_cache_tokens "
                "overrides it", self.max_model_len, whole,
            )  # fmt: skip
            self._longer = "kv_cache_tokens (a quarter of the free memory holds no more)"
        return tokens

    def warm_up(self) -> None:
        """Before the first request: capture the launches of greedy and sampled decoding and of prompts. Without graphs, measure
        the cost of steps if drafts are adaptive."""
        with self._around_step():
            self._step.warm_up()

    @property
    def drafter_needs(self) -> Needs:
        """What the drafter needs; nothing without one."""
        return self.drafter.needs if self.drafter is not None else Needs()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.scheduler.pages.count * self.config.block_size

    def capacity(self) -> str:
        """KV capacity and the cost of graphs, in one line."""
        room, capturing = f"KV cache of {self.kv_tokens:,} tokens", self._step.runner.capturing
        if capturing is None:
            return room
        return f"{room}; CUDA graphs took {capturing[0]:.1f} s and {capturing[1] / 1e6:,.0f} MB"

    def settings(self) -> dict[str, Any]:
        """The settings in force, with all defaults; quantization: the formats of matrices in blocks with their shares, None if
        none is; cpu_isa: the instruction set of the CPU kernels; threads: how many compute the products on a CPU; graphs: the
        cost of capturing, None without graphs."""
        c, capturing = self.config, self._step.runner.capturing
        return {
            "dtype": str(self.kv.keys[0].dtype).removeprefix("torch."),
            "device": str(self.state.length.device),
            "quantization": self._quantization,
            "cpu_isa": self._cpu_isa,
            "max_model_len": self.max_model_len,
            "max_num_seqs": c.max_num_seqs,
            "max_num_batched_tokens": self.budget,
            "block_size": c.block_size,
            "kv_cache_tokens": self.kv_tokens,
            "enable_prefix_caching": c.enable_prefix_caching,
            "adaptive_drafts": c.adaptive_drafts,
            "gpu_memory_utilization": c.gpu_memory_utilization,
            "seed": c.seed,
            "threads": self._threads,
            "speculative_config": c.speculation.effective() if c.speculation else None,
            "graphs": {"seconds": capturing[0], "bytes": capturing[1]} if capturing is not None else None,
        }

    def snapshot(self) -> EngineSnapshot:
        """What operators watch, as plain data. To be called between two steps."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        return EngineSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens=self.kv_tokens,
            kv_used=(pages.count - pages.free) * pages.block_size,
            totals=self.stats.copy(),
            divided=isinstance(self._step.layout, ExactLayout),
            speedup=self._speedup.estimate() if self._speedup is not None else None,
        )

    def add(self, request: Request) -> Sequence:
        """Queue a request. Return its sequence, which may be read while it runs. Raises SettingError if it can never run."""
        require(isinstance(request, Request), "request", request, "give a forerun.types.Request, for instance LLM.prepare's")
        prompt, limit = len(request.prompt_ids), self.max_model_len
        require(request.id not in self._live, "request id", request.id, "it is in use; give another")
        require(
            prompt < limit,
            "prompt",
            f"{prompt} tokens",
            f"the context is {limit} tokens and one must be left to answer; shorten it or raise {self._longer}",
        )
        bad = [i for i in request.prompt_ids if not 0 <= i < self._vocab]
        require(not bad, "prompt", bad[:3], f"token ids run from 0 to {self._vocab - 1}")
        check_request(request, self._vocab)
        loaded = self.config.speculation.drafters if self.config.speculation is not None else ()
        unknown = [name for name in request.params.drafters if name not in loaded]
        remedy = f"this engine has loaded {' and '.join(loaded) or 'no drafter'}; give one of them, or leave it out for all"
        require(not unknown, "drafters", unknown, remedy)
        most = prompt + request.max_tokens
        require(
            most <= limit,
            "max_tokens",
            request.max_tokens,
            f"with the prompt's {prompt} tokens the context of {limit} leaves {limit - prompt}; give that or raise "
            f"{self._longer}",
        )
        require(
            most <= self.kv_tokens,
            "max_tokens",
            request.max_tokens,
            f"prompt and answer are {most} tokens and the KV cache holds {self.kv_tokens}; raise kv_cache_tokens",
        )
        params, matcher = request.params, self._matcher(request)
        detokenizer = self._detokenizer() if params.detokenize else NoText()
        text = TextStream(detokenizer, params.stop, params.include_stop_str_in_output)
        with Uninterrupted():
            sequence = self.scheduler.add(request)
            sequence.matcher = matcher
            self._live[request.id], self._texts[request.id] = sequence, text
        return sequence

    def prepare(self, request: Request) -> None:
        """Compile the request's grammar, if it has one, so that `add` need not. Any thread may call this at any time. Raises
        SettingError for a grammar that cannot be used."""
        if isinstance(request, Request) and request.params.structured is not None:
            self._matcher(request)

    def _matcher(self, request: Request) -> Matcher | None:
        if request.params.structured is None:
            return None
        if self._grammars is None:
            raise SettingError("structured", request.params.structured, "this engine was built without grammars; leave it out")
        return self._grammars.matcher(request)

    def abort(self, request_id: str) -> RequestStats | None:
        """End a request in any state and free its pages. Return its statistics; None if no request has that id."""
        with Uninterrupted():
            sequence = self._live.get(request_id)
            if sequence is None:
                return None
            stats = self._ended(sequence, "abort")
            self._forget(request_id)
            self._guard(lambda: self._leave(sequence))
            return stats

    @property
    def has_work(self) -> bool:
        """Whether a request is under way or an event was not returned yet."""
        return bool(self._live or self._events)

    def step(self) -> list[Event]:
        """Launch one step of all running requests and read the step that is due. Return an event for each request in it.

        An exception ends the request that it belongs to, with an event whose finish reason is "error". All others go on from
        their committed tokens. If the request is not known, each one in the step runs alone until it commits or fails."""
        with Uninterrupted(), self._around_step():
            self._guard(self._advance)
        events, self._events = self._events, []
        return events

    def _guard(self, work: Callable[[], None]) -> None:
        """Do the work. After a failure, all state but the committed tokens is made anew."""
        try:
            self._blamed, self._committing = [], None
            work()
        except Exception as error:
            self._recover(f"{type(error).__name__}: {error}")
        except BaseException:  # an interrupt outside Uninterrupted's reach
            self._recover(None)
            raise

    def _recover(self, error: str | None) -> None:
        """Start again from the committed tokens. error: the exception's text; it ends the request that it belongs to. None: an
        interrupt; it ends only a request in the middle of a commit, whose committed tokens are unknown."""
        for event in self._events:
            if event.finish_reason is not None:
                self._forget(event.request_id)
        blamed = self._blamed if self._committing is None else [self._committing]
        blamed = [s for s in blamed if s.request.id in self._live]
        ended = blamed if self._committing is not None or (error is not None and len(blamed) == 1) else []
        suspects = blamed if error is not None and not ended else []
        if error is not None:
            LOG.warning("a step failed%s: %s", "; its requests go on one by one" if suspects else "", error, exc_info=True)
        self._fail(ended, error or "interrupted while tokens were committed to it")
        self._in_flight.clear()
        try:
            self.scheduler.restart(self._live.values(), suspects)
            self._step.restart()
        except Exception as again:  # for instance, the device takes no more work
            LOG.error("the engine cannot go on", exc_info=True)
            self._fail(list(self._live.values()), f"{error or 'interrupted'}; then {type(again).__name__}: {again}")
            self.scheduler.restart([], [])

    def _fail(self, sequences: list[Sequence], error: str) -> None:
        for sequence in sequences:
            stats = self._ended(sequence, "error")
            self._events.append(Event(sequence.request.id, (), "", (), "error", error=error, stats=stats))
            self._forget(sequence.request.id)

    def _advance(self) -> None:
        start = time.perf_counter()
        self._blamed = list(self.scheduler.suspects)[:1] or list(self._live.values())
        plan = self.scheduler.plan()
        for sequence, slot in plan.preempted:
            self._step.release(sequence, slot, finished=False)
        for sequence in plan.admitted:
            self._blamed = [sequence]
            self._admit(sequence)
        if plan.rows:
            self._blamed = [row.sequence for row in plan.rows]
            self._in_flight.append(self._step.launch(plan))
            self.scheduler.launch(plan.rows)

        flying, stats = self._in_flight, self.stats
        due = len(flying) - self._step.lag if plan.rows and not flying[-1].masked else len(flying)
        read = [self._read(flying.popleft()) for _ in range(due)]
        rest = seconds = time.perf_counter() - start
        stats.preemptions += len(plan.preempted)
        for spent, wait, decoded in read:
            stats.draft_s += spent.draft
            stats.forward_s += spent.forward
            stats.verify_s += spent.verify
            stats.wait_s += wait
            rest -= sum(spent) + wait
            if decoded is not None and self._speedup is not None and len(read) == 1:
                self._speedup.record(decoded._replace(seconds=seconds, times=spent))
        stats.other_s += rest

    def _read(self, step: InFlight) -> tuple[Times, float, Decoded | None]:
        """Wait for a step, read and commit it. A drafter on the host then drafts for the rows that go on. Also returns the
        seconds that it waited, and the step if all its rows were decoded."""
        self._blamed = [row.sequence for row in step.rows if not row.stale]
        start = time.perf_counter()
        step.arrived()
        wait = time.perf_counter() - start
        verified: dict[tuple[int, int], int] = defaultdict(int)
        for one in self._step.read(step):
            self._commit(one, verified)
        for (drafted, accepted), count in verified.items():
            self.stats.drafts.count(drafted, accepted, count)
        self.stats.steps += 1
        decoded, rows = None, len(step.rows)
        if self._speedup is not None and len(step.parts) == 1 and sum(verified.values()) == rows:
            tokens = sum((accepted + 1) * count for (_, accepted), count in verified.items())
            decoded = Decoded(0.0, step.times, tokens, step.parts[0][2], rows, context_of(step.rows))
        if self._step.host_drafter is None:
            return step.times, wait, decoded
        self._blamed = [s for row in step.rows if (s := row.sequence).slot >= 0 and not row.stale and s.decodes]
        seconds = self._step.draft(self._blamed, self.scheduler.policy.width(len(self.scheduler.running)))
        return step.times._replace(draft=step.times.draft + seconds), wait, decoded

    def _admit(self, sequence: Sequence) -> None:
        if not sequence.admitted_at:
            sequence.admitted_at, sequence.cached = time.perf_counter(), sequence.computed
        if self.config.enable_prefix_caching:
            self.stats.queried_tokens += len(sequence.ids)
        self.stats.cached_tokens += sequence.computed
        self._step.admit(sequence)

    def _commit(self, one: Committed, verified: dict[tuple[int, int], int]) -> None:
        """Commit a row's tokens up to the request's end, count them, and make its event. verified: the number of the step's
        rows by (drafted, accepted)."""
        row, stats = one.row, self.stats
        sequence = row.sequence
        if row.stale:
            return
        self._committing = sequence  # from here on an exception belongs to its request
        if not row.commits:
            self.scheduler.commit(row, [])
            stats.prompt_tokens += row.pending
            self._committing = None
            return
        request, tokens, reason, error = sequence.request, one.tokens, None, None
        stream = self._texts[request.id]
        if stream.without and len(sequence.ids) + len(tokens) < sequence.limit and sequence.stops.isdisjoint(tokens):
            text = stream.pass_on(tokens)  # no token of the block ends the request
        else:
            tokens, text, reason = self._cut(sequence, stream, tokens)
        if one.broken and reason is None:
            reason, text = "error", text + stream.finish()
            at = len(sequence.ids) + len(tokens)
            error = f"the logits for the token at position {at} hold a NaN or are infinite: the weights or the dtype are broken"
            if sequence.matcher is not None:
                cause = sequence.matcher.error or "with the bans of the request it leaves none"
                error = f"the grammar allows no token at position {at}, or the logits are broken: {cause}"
        first = len(sequence.ids) == sequence.prompt
        self.scheduler.commit(row, tokens)
        if first:
            sequence.first_at = time.perf_counter()
        if first or row.pending > 1:
            stats.prompt_tokens += row.pending if first else row.pending - 1
        stats.output_tokens += len(tokens)
        counts = None
        if not first or one.drafted:  # the step that ends a prompt is no verify step
            counts = one.drafted, min(one.accepted, len(tokens))
            sequence.stats.count(*counts)
            verified[counts] += 1
        logprobs = tuple(one.logprobs[: len(tokens)]) if one.logprobs else ()
        ended = self._ended(sequence, reason) if reason is not None else None
        self._events.append(Event(request.id, tuple(tokens), text, logprobs, reason, counts, error, ended))
        self._committing = None
        if reason is not None:
            self._forget(request.id)
            self._leave(sequence)

    @staticmethod
    def _cut(sequence: Sequence, stream: TextStream, tokens: list[int]) -> tuple[list[int], str, FinishReason | None]:
        """The tokens up to the first that ends the request, the text that they complete, and the finish reason."""
        request, text, generated = sequence.request, "", sequence.generated
        for i, token in enumerate(tokens):
            generated += 1
            if token in sequence.stops:
                return tokens[: i + 1], text + stream.finish(token), "stop"
            piece, stopped = stream.push(token, generated >= request.params.min_tokens)
            text += piece
            if stopped:
                return tokens[: i + 1], text, "stop"
            if generated == request.max_tokens:
                return tokens[: i + 1], text + stream.finish(), "length"
        return tokens, text, None

    def _ended(self, sequence: Sequence, reason: FinishReason) -> RequestStats:
        """Count the end of a request. Return its statistics."""
        sequence.ended_at = time.perf_counter()
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        return sequence.report()

    def _forget(self, request_id: str) -> None:
        """Remove the request from those under way."""
        self._live.pop(request_id, None)
        self._texts.pop(request_id, None)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot and pages of an ended request."""
        slot = self.scheduler.finish(sequence)
        if slot >= 0:
            self._step.release(sequence, slot, finished=True)
