"""Steps of fixed shape, for CUDA: every row computes k + 1 positions whatever it drafted, nothing waits for the host, and
the host reads a step's verdict after it has launched the next one. The same parts as step.py, in a different order,
since the draft of the next step is made at the end of this one: verify -> commit -> draft.

Also runs without CUDA, one operation after the other: the twin that the tests compare. What a graph holds is `Body.run`
or, of a chunk of prompts, `Body.prefill`; graphs.py captures them. A row lives on the device until it meets a stop token,
its limit, or the host's word; a row that is not alive computes into page 0, which is nobody's, and commits nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.device import send
from forerun.drafters import Drafter, Rows
from forerun.engine.policy import Chances, Policy, step_widths
from forerun.engine.scheduler import Plan, PlanRow, Sequence
from forerun.engine.slots import Slots
from forerun.engine.step import Committed, Times
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Logprob, Request, Verdict
from forerun.verify import noise
from forerun.verify.accept import accept_block, accept_matching, accept_ratio
from forerun.verify.sampling import Features, SamplingState, logprobs

GREEDY = Features()


def sizes(most: int) -> tuple[int, ...]:
    """How many rows decode steps have, up to `most`: few sizes, but a batch that empties should pay for few lines of nobody."""
    usual = [n for n in (1, 2, *range(4, 32, 4), *range(32, most, 16)) if n < most]
    return (*usual, most)


def unknown_cost(rows: int, width: int) -> float | None:
    """Of steps that nobody has timed."""
    return None


class PromptSizes(NamedTuple):
    """The shapes that launches of prompts are padded to, both ascending."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    def fit(self, tokens: int, rows: int) -> tuple[int, int]:
        """The smallest that has room for so many."""
        return next(n for n in self.tokens if n >= tokens), next(n for n in self.rows if n >= rows)


def prompt_sizes(budget: int, most: int) -> PromptSizes:
    """For launches of up to `budget` tokens of up to `most` prompts. What is computed for padding is lost, which the steps
    bound: powers of two with one size between each two of them."""
    powers = [1 << i for i in range(5, max(budget, 1).bit_length())]
    usual = sorted([*powers, *(n * 3 // 2 for n in powers if n >= 128)])
    return PromptSizes((*(n for n in usual if n < budget), budget), tuple(sorted({min(8, most), most})))


class Key(NamedTuple):
    """What fixes the shapes and the work of a step. rows: how many lines it has, padding included; width: drafts of a
    row; top: logprobs reported (-1: none, 0: the chosen token's only)."""

    rows: int
    width: int
    features: Features = GREEDY
    top: int = -1


class PromptKey(NamedTuple):
    """The same of a launch of prompts. tokens, rows: padding included."""

    tokens: int
    rows: int
    features: Features = GREEDY
    top: int = -1


class Report(NamedTuple):
    """What a step tells the host. tokens: [B,W+1]; counts: [B,3], committed, drafted and the size of the next draft;
    noted: the logprobs of tokens [B,W+1], ids and values of the likeliest [B,W+1,top]; None if nobody asked."""

    tokens: Tensor
    counts: Tensor
    noted: tuple[Tensor, Tensor, Tensor] | None


class Arrival(NamedTuple):
    """A request that takes a slot: with the committed tokens ids [n] int64, which may be more than its prompt."""

    ids: np.ndarray
    request: Request


class Lives:
    """Per slot, beside Slots: what ends it (stop ids [S,E], padded -1; limit, the length it may reach; alive) and its next
    draft (tokens [S,K], size [S], probs [S,K,V] if drafts have them)."""

    def __init__(self, slots: Slots, width: int, vocab: int, probs: bool) -> None:
        count, device = len(slots.length), slots.length.device
        self.stop_ids = torch.full((count, 16), -1, dtype=torch.int64, device=device)
        self.limit = torch.zeros(count, dtype=torch.int64, device=device)
        self.alive = torch.zeros(count, dtype=torch.bool, device=device)
        self.draft = torch.zeros(count, width, dtype=torch.int64, device=device)
        self.draft_size = torch.zeros(count, dtype=torch.int64, device=device)
        self.draft_probs = torch.zeros(count, width, vocab, device=device) if probs else None

    def give(self, slot: Tensor, limit: Tensor, stop_ids: Tensor) -> None:
        """Slots [A], all different, come alive, without a draft. limit: [A]; stop_ids: [A,E]."""
        self.limit.index_copy_(0, slot, limit)
        self.stop_ids.index_copy_(0, slot, stop_ids)
        self.draft_size.index_fill_(0, slot, 0)
        self.alive.index_fill_(0, slot, True)


class Body:
    """What one step does to the rows of some slots, all on the device."""

    def __init__(
        self,
        target: Target,
        kv: KVCache,
        slots: Slots,
        sampling: SamplingState,
        lives: Lives,
        drafter: Drafter | None,
        block: bool,
    ) -> None:
        """drafter: one that works on the device drafts at the end of each step; what another one drafts is written into
        `lives` from outside."""
        self.target, self.kv, self.slots, self.sampling, self.lives = target, kv, slots, sampling, lives
        self.drafter = drafter if drafter is not None and drafter.needs.device else None
        self.host_drafter = drafter if self.drafter is None else None
        self._accept = accept_block if block else accept_ratio
        self._starts: dict[tuple[int, int], Tensor] = {}  # (rows, width) -> [B+1] int32, where each row's tokens start

    def run(self, key: Key, slot: Tensor, k: Tensor) -> Report:
        """A decode step. slot: [B], the padding's is nobody's; k: [B], what each row may draft at most."""
        length = self.slots.length[slot] if self.lives.draft_probs is not None else None
        draft, batch, x = self._lay_out(key, slot, k)
        kernels = self.target.kernels.bounded(key.width + 1, self.slots.tokens.shape[1])
        logits = self.target.forward(batch, self.kv, kernels=kernels, x=x).logits  # [B(W+1),V]
        if draft.probs is None or length is None:
            verdict = None
            tokens = self._choose(key, slot, batch.positions, logits).view(len(slot), -1)
        else:
            verdict = self._weigh(key, slot, batch.positions, logits, draft, length)
            tokens = verdict.tokens
        counts = self._commit(slot, draft, tokens, verdict)
        return Report(tokens, counts, self._note(key, logits, tokens))

    def _lay_out(self, key: Key, slot: Tensor, k: Tensor) -> tuple[Draft, Batch, Tensor | None]:
        """What was drafted at the end of the last step, cut to what the row may still take and laid behind its tokens; and
        the forward pass over the last committed token and the drafts (with the tokens' embeddings, if they are there)."""
        lives, slots = self.lives, self.slots
        alive, length = lives.alive[slot], slots.length[slot]
        room = torch.minimum(k, lives.limit[slot] - length - 1)
        size = torch.minimum(lives.draft_size[slot], room).clamp(0, key.width)
        probs = lives.draft_probs[slot, : key.width] if lives.draft_probs is not None else None
        draft = Draft(lives.draft[slot, : key.width], size, probs)
        slots.write_drafts(slot, draft.tokens)
        positions = (length - 1)[:, None] + torch.arange(key.width + 1, device=slot.device)  # [B,W+1]
        ids = slots.tokens[slot[:, None], positions]
        table = torch.where(alive[:, None], slots.block_table[slot], 0)
        return draft, self._batch(key, ids.flatten(), positions.flatten(), table), None

    def _batch(self, key: Key, ids: Tensor, positions: Tensor, table: Tensor) -> Batch:
        shape = (key.rows, key.width)
        if shape not in self._starts:
            last = len(positions) + 1
            self._starts[shape] = torch.arange(0, last, key.width + 1, dtype=torch.int32, device=positions.device)
        return Batch(ids, positions, self._starts[shape], table, None)

    def _choose(self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """The target's own token behind each position, [B(W+1)]."""
        every = slot.repeat_interleave(len(positions) // max(len(slot), 1), output_size=len(positions))
        shaped = self.sampling.shape(logits, every, positions + 1, key.features)
        return self.sampling.choose(shaped, every, positions + 1, key.features)

    def _weigh(self, key: Key, slot: Tensor, positions: Tensor, logits: Tensor, draft: Draft, length: Tensor) -> Verdict:
        """What the rule for drafts with probabilities makes of the draft. length: [B], before the step."""
        every = slot.repeat_interleave(key.width + 1, output_size=len(positions))
        shaped = self.sampling.shape(logits, every, positions + 1, key.features)
        target = self.sampling.probs(shaped, every, key.features).view(len(slot), key.width + 1, -1)
        seed = self.sampling.seed[slot]
        accept = noise.block_noise(seed, length, key.width, noise.ACCEPT)
        return self._accept(target, draft, accept, noise.block_noise(seed, length, key.width + 1, noise.REDRAW))

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        """Cut the block at a stop or the limit, append it, and draft what follows; [B,3] as in Report. tokens: [B,W+1], the
        target's choices, of which the draft is accepted while it equals them; or the verdict's, if there is one."""
        verdict = verdict or accept_matching(tokens, draft)
        lives, width = self.lives, tokens.shape[1]
        length, alive = self.slots.length[slot], lives.alive[slot]
        at = torch.arange(width, device=slot.device)
        stops = (tokens[:, :, None] == lives.stop_ids[slot][:, None, :]).any(-1) & (at < verdict.count[:, None])
        first = torch.where(stops, at, width).amin(1)  # [B] of the first stop, or past all
        count = torch.minimum(torch.minimum(verdict.count, first + 1), lives.limit[slot] - length)
        count = torch.where(alive, count, 0).clamp(min=0)
        ended = (first < count) | (length + count >= lives.limit[slot])
        self.slots.commit(slot, tokens, count)
        lives.alive[slot] = alive & ~ended
        drafted = torch.where(alive, draft.size, 0)
        return torch.stack((count, drafted, self._propose(slot)), 1)

    def _propose(self, slot: Tensor) -> Tensor:
        """Draft for the next step; [B], how much was found."""
        lives, width = self.lives, self.lives.draft.shape[1]
        if self.drafter is None or width == 0:
            return torch.zeros_like(slot)
        k = torch.where(lives.alive[slot], width, 0)
        draft = self.drafter.propose(Rows(slot, k, width))
        lives.draft[slot] = draft.tokens
        lives.draft_size[slot] = draft.size
        if lives.draft_probs is not None and draft.probs is not None:
            lives.draft_probs[slot] = draft.probs
        return draft.size

    @staticmethod
    def _note(key: Key | PromptKey, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        if key.top < 0:
            return None
        chosen, ids, values = logprobs(logits, tokens.flatten(), key.top)
        return chosen.view_as(tokens), ids.view(*tokens.shape, -1), values.view(*tokens.shape, -1)

    def prefill(self, key: PromptKey, given: Tensor) -> Report:
        """A launch of prompts: of each row of a slot the tokens from `begin` on, `count` of them; of those with through = 1
        they are the last, so that they get their first token. given: [4,R] int64, slot, begin, count and through; the
        padding's are nobody's and 0. What the report says of the rows that are not through means nothing."""
        slot, begin, count, through = given
        batch = self._lay_end_to_end(key, slot, begin, count)
        logits = self.target.forward(batch, self.kv).logits  # [R,V]
        if self.drafter is not None:
            self.drafter.prefill(batch)
        slot = torch.where(through > 0, slot, len(self.slots.length) - 1)  # the others commit as nobody
        choice = self._choose(key, slot, (begin + count - 1).clamp(min=0), logits)[:, None]
        nothing = Draft(choice[:, :0], torch.zeros_like(slot))
        counts = self._commit(slot, nothing, choice, None)
        return Report(choice, counts, self._note(key, logits, choice))

    def _lay_end_to_end(self, key: PromptKey, slot: Tensor, begin: Tensor, count: Tensor) -> Batch:
        """The forward pass over these parts of the slots, with the logits of each row's last token (of some token if the row
        is empty). slot, begin, count: [R]."""
        end = count.cumsum(0)  # [R]
        at = torch.arange(key.tokens, device=slot.device)  # [T]
        row = torch.searchsorted(end, at, right=True).clamp(max=key.rows - 1)  # [T]
        there = at < end[-1]
        positions = torch.where(there, at + (begin - end + count)[row], 0)
        ids = torch.where(there, self.slots.tokens[slot[row], positions], 0)
        start = F.pad(end, (1, 0)).int()
        return Batch(ids, positions, start, self.slots.block_table[slot], (end - 1).clamp(min=0))


class Decoding(NamedTuple):
    """The rows of a step that decode, as the body takes them, padded up to `lines`."""

    rows: list[PlanRow]
    lines: int
    slot: list[int]
    k: list[int]
    chances: list[Chances]
    asked: tuple[Features, int]


class FixedFlight:
    """A step on its way: rows with their reports, which are in host memory once `arrived` returns, and the rows that were
    in the middle of a prompt. drafts: whether anything is ever drafted, so that there are chances to learn."""

    def __init__(
        self,
        parts: list[tuple[list[PlanRow], Report]],
        silent: list[PlanRow],
        arrived: Callable[[], None],
        times: Times,
        drafts: bool,
    ) -> None:
        self.times, self._drafts = times, drafts
        self._parts, self._silent, self._arrived = parts, silent, arrived

    def read(self) -> Iterator[Committed]:
        self._arrived()
        for row in self._silent:
            yield Committed(row, [], 0, [])
        for rows, report in self._parts:
            columns = report.counts.t().tolist()
            for i, (row, tokens, count, drafted, found) in enumerate(zip(rows, report.tokens.tolist(), *columns, strict=False)):
                if self._drafts:
                    row.sequence.chances.learn(drafted, count - 1, found)
                noted = self._logprobs(row, report, i, count) if report.noted is not None else []
                yield Committed(row, tokens[:count], drafted, noted)

    @staticmethod
    def _logprobs(row: PlanRow, report: Report, i: int, count: int) -> list[Logprob]:
        top = row.sequence.request.params.logprobs
        if top is None or report.noted is None:
            return []
        chosen, ids, values = (part[i, :count].tolist() for part in report.noted)
        tokens = report.tokens[i, :count].tolist()
        return [
            Logprob(token, value, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
            for token, value, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
        ]


class FixedStep:
    """Makes the body's steps, one ahead of what the host has read. A drafter on the host has to see a step before it can
    draft for the next: then every step is read at once, and `waits` counts that."""

    def __init__(
        self,
        body: Body,
        policy: Policy,
        width: int,
        mirror: Slots,
        sizes: tuple[int, ...],
        run: Callable[[Key, list[int], list[int]], Report] | None = None,
        cost: Callable[[int, int], float | None] = unknown_cost,
        prompt_sizes: PromptSizes | None = None,
        run_prompts: Callable[[PromptKey, list[list[int]]], Report] | None = None,
    ) -> None:
        """width: drafts of a row at most. mirror: slots on the host, for a drafter there. sizes: how many rows a decode step
        may have, ascending (what runs is padded up to one of them). run: makes a decode step, graphs.Graphs.run on CUDA;
        None runs the body as it is. cost(rows, width): milliseconds of such a step, None if not known. prompt_sizes: what
        prompts are padded to, None: not at all; run_prompts: launches them, as run does steps."""
        self.body, self.policy, self.width, self.mirror, self.sizes = body, policy, width, mirror, sizes
        self.widths = step_widths(width)
        self.prompt_sizes, self._run_prompts = prompt_sizes, run_prompts or self._eager_prompts
        self._drafter = body.drafter if body.drafter is not None else body.host_drafter
        self.lag = 0 if body.host_drafter is not None else 1
        self.waits = 0
        self.device = body.slots.length.device
        self.cuda = self.device.type == "cuda"
        self.nobody = len(body.slots.length) - 1  # the slot of the padding
        self._run, self._cost = run or self._eager, cost
        self._changes: dict[int, Arrival | None] = {}  # slots given (or left, None) since the last launch
        self._last: tuple[list[Sequence], tuple[Features, int]] = ([], (GREEDY, -1))
        self._decoding = Decoding([], 0, [], [], [], (GREEDY, -1))

    def admit(self, sequence: Sequence) -> None:
        """The sequence has a slot: written at the next launch, with all others."""
        slot, request = sequence.slot, sequence.request
        sequence.laid = 0
        self._changes[slot] = Arrival(np.array(sequence.ids, dtype=np.int64), request)
        if self.body.host_drafter is not None:
            self.mirror.set(slot, sequence.ids)
        if self._drafter is not None:
            self._drafter.admit(slot, request)

    def release(self, sequence: Sequence, slot: int, finished: bool) -> None:
        """It has left the slot, where nothing is to happen from the next launch on."""
        self._changes[slot] = None
        if self.body.host_drafter is not None:
            self.mirror.catch_up(slot, sequence.ids)
        if self._drafter is not None:
            self._drafter.release(slot, finished)

    def _settle(self) -> None:
        """Write who has come and gone since the last launch. Only the last change of a slot counts: nothing ran in between."""
        if not self._changes:
            return
        arrivals = {slot: one for slot, one in self._changes.items() if one is not None}
        gone = [slot for slot in self._changes if slot not in arrivals]
        self._changes = {}
        lives, slots = self.body.lives, self.body.slots
        width, most = slots.tokens.shape[1], lives.stop_ids.shape[1]
        ids = [one.ids for one in arrivals.values()]
        requests = [one.request for one in arrivals.values()]
        stops = [([*one.stop_ids] + [-1] * most)[:most] for one in requests]  # the host looks for any others
        parts = [
            np.array(gone, dtype=np.int64),
            np.array(list(arrivals), dtype=np.int64),
            np.array([len(one) for one in ids], dtype=np.int64),
            np.array([len(one.prompt_ids) + one.max_tokens for one in requests], dtype=np.int64),
            np.array(stops, dtype=np.int64).ravel(),
            *(slot * width + np.arange(len(one)) for slot, one in zip(arrivals, ids, strict=True)),
            *ids,
        ]
        total = sum(map(len, ids))
        sizes = [*(len(part) for part in parts[:5]), total, total]
        left, slot, length, limit, stop_ids, at, tokens = send(np.concatenate(parts), self.device).split(sizes)
        if gone:
            lives.alive.index_fill_(0, left, False)
        if arrivals:
            slots.give(slot, length, at, tokens)
            lives.give(slot, limit, stop_ids.view(-1, most))
            self.body.sampling.give(slot, arrivals, requests)

    def _draft_on_host(self, rows: list[PlanRow]) -> None:
        """Have the host's drafter draft for these rows, all of which have been read, and send the drafts."""
        assert self.body.host_drafter is not None
        for row in rows:
            self.mirror.catch_up(row.sequence.slot, row.sequence.ids)
        slot = [row.sequence.slot for row in rows]
        k = torch.tensor([row.k for row in rows])
        draft = self.body.host_drafter.propose(Rows(torch.tensor(slot), k, int(k.max())))
        at, lives = self._up(slot), self.body.lives
        lives.draft[at, : draft.tokens.shape[1]] = self._up(draft.tokens.tolist())
        lives.draft_size[at] = self._up(draft.size.tolist())
        for row, size in zip(rows, draft.size.tolist(), strict=True):
            row.sequence.chances.found = size
        self.waits += 1

    @torch.inference_mode()
    def launch(self, plan: Plan) -> FixedFlight:
        start = time.perf_counter()
        self._settle()
        self._lay_pages(plan.rows)
        decoding = [row for row in plan.rows if row.pending == 1 and row.samples]
        prompts = [row for row in plan.rows if row.pending != 1 or not row.samples] if len(decoding) < len(plan.rows) else []
        parts: list[tuple[list[PlanRow], Report]] = []
        if decoding and self.body.host_drafter is not None and any(row.k for row in decoding):
            self._draft_on_host(decoding)
        if decoding:
            if decoding != self._decoding.rows:
                self._decoding = self._line_up(decoding)
            _, lines, slot, k, chances, asked = self._decoding
            width = self._width(lines, max(k), chances)
            parts.append((decoding, self._down(self._run(Key(lines, width, *asked), slot, k))))
        if prompts:  # the last report is on its way down: graphs share their memory
            parts.append(self._prefill(prompts))
        silent = [row for row in prompts if not row.samples]
        times = Times(0.0, time.perf_counter() - start, 0.0)
        return FixedFlight(parts, silent, self._mark(), times, self.width > 0)

    def _line_up(self, rows: list[PlanRow]) -> Decoding:
        """Done once as long as the same rows come again, as they do while nobody joins, ends or comes near its limit."""
        lines = next(n for n in self.sizes if n >= len(rows))
        padding = lines - len(rows)
        slot = [row.sequence.slot for row in rows] + [self.nobody] * padding
        k = [row.k for row in rows] + [0] * padding
        return Decoding(rows, lines, slot, k, [row.sequence.chances for row in rows], self._asked(rows))

    def _width(self, lines: int, most: int, chances: list[Chances]) -> int:
        """How many drafts a step of so many lines is to verify for each row, if no row may have more than `most`. What is
        known of the rows is a step old."""
        if most == 0:
            return 0
        enough = next(i for i, width in enumerate(self.widths) if width >= most)
        return self.policy.step_width(self.widths[: enough + 1], chances, lambda width: self._cost(lines, width))

    def _eager(self, key: Key, slot: list[int], k: list[int]) -> Report:
        return self.body.run(key, self._up(slot), self._up(k))

    def _eager_prompts(self, key: PromptKey, given: list[list[int]]) -> Report:
        return self.body.prefill(key, self._up(given))

    def _prefill(self, rows: list[PlanRow]) -> tuple[list[PlanRow], Report]:
        """Chunks of prompts, and the first tokens of those that are through: these come first, as the report's reader
        wants them."""
        ended = [row for row in rows if row.samples]
        rows = ended + [row for row in rows if not row.samples]
        tokens, lines = sum(row.pending for row in rows), len(rows)
        if self.prompt_sizes is not None:
            tokens, lines = self.prompt_sizes.fit(tokens, lines)
        nothing = [0] * (lines - len(rows))
        given = [
            [row.sequence.slot for row in rows] + [self.nobody] * len(nothing),
            [row.sequence.computed for row in rows] + nothing,
            [row.pending for row in rows] + nothing,
            [int(row.samples) for row in rows] + nothing,
        ]
        return ended, self._down(self._run_prompts(PromptKey(tokens, lines, *self._asked(ended)), given))

    def _asked(self, rows: list[PlanRow]) -> tuple[Features, int]:
        """What these rows' requests ask for: the sampling features they use, and how many logprobs (a few sizes only).
        Remembered until other rows come: steps of the same rows follow each other."""
        sequences = [row.sequence for row in rows]
        if sequences != self._last[0]:
            wanted = [top for row in rows if (top := row.sequence.request.params.logprobs) is not None]
            top = next(n for n in (-1, 0, 5, 20, 100) if n >= max(wanted, default=-1))
            self._last = (sequences, (self.body.sampling.features([s.slot for s in sequences]), top))
        return self._last[1]

    def _lay_pages(self, rows: list[PlanRow]) -> None:
        """Write the pages that sequences got since last time into their block tables."""
        grown = [s for row in rows if (s := row.sequence).laid < len(s.pages)]
        if grown:
            new = [(s.slot, at, s.pages[at]) for s in grown for at in range(s.laid, len(s.pages))]
            slot, at, page = self._up([list(column) for column in zip(*new, strict=True)])
            self.body.slots.block_table[slot, at] = page.int()
            for s in grown:
                s.laid = len(s.pages)

    def _up(self, values: list) -> Tensor:
        """Integers for the device, without waiting."""
        if not self.cuda:
            return torch.tensor(values, dtype=torch.int64)
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(self.device, non_blocking=True)

    def _down(self, report: Report) -> Report:
        """The report on its way to the host."""
        if not self.cuda:
            return report

        def copy(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

        noted = None if report.noted is None else tuple(copy(part) for part in report.noted)
        return Report(copy(report.tokens), copy(report.counts), noted)  # type: ignore[arg-type]

    def _mark(self) -> Callable[[], None]:
        if not self.cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize
