"""What one step of fixed shape does to the rows of some slots, all on the device: the decode step (`Body.run`: lay out ->
target -> verify -> commit -> draft) and the launch of prompts (`Body.prefill`). Here as torch operations, the twin that runs
anywhere; fused.py has the fast one for CUDA, graphs.py captures either.

A row lives on the device until it meets a stop token, its limit, or the host's word; a row that is not alive computes into
page 0, which is nobody's, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import Drafter, Rows
from forerun.engine.slots import Slots
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Verdict
from forerun.verify.accept import accept_block, accept_drawn, accept_matching, accept_ratio
from forerun.verify.sampling import BROKEN, Features, SamplingState, logprobs

GREEDY = Features()
NEXT_DRAFT = 4  # the column of Report.counts that holds the size of the next draft


def sizes(most: int) -> tuple[int, ...]:
    """How many rows decode steps have, up to `most`: few sizes, but a batch that empties should pay for few lines of nobody."""
    usual = [n for n in (1, 2, *range(4, 32, 4), *range(32, most, 16)) if n < most]
    return (*usual, most)


def shared_drafts(rows: int, width: int) -> tuple[int, ...]:
    """How many drafts all rows together may have in steps that are smaller than rows * (width + 1) tokens: up to where one more
    token begins another tile of the products (kernels/cuda_cuts.py), and from the second tile on twice as many each time."""
    return tuple(tokens - rows for tokens in (16, 64, 128, 256, 512) if rows < tokens < rows * (width + 1))


def unknown_cost(rows: int, width: int, drafts: int | None) -> float | None:
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
    row; top: logprobs reported (-1: none, 0: the chosen token's only); drafts: of all rows together, where that is less than
    width for each (None)."""

    rows: int
    width: int
    features: Features = GREEDY
    top: int = -1
    drafts: int | None = None


class PromptKey(NamedTuple):
    """The same of a launch of prompts. tokens, rows: padding included."""

    tokens: int
    rows: int
    features: Features = GREEDY
    top: int = -1


class Report(NamedTuple):
    """What a step tells the host. tokens: [B,W+1]; counts: [B,5], committed, drafted, accepted, whether the logits behind the
    committed tokens are broken (1: the row has ended for that), and the size of the next draft; noted: the logprobs of tokens
    [B,W+1], ids and values of the likeliest [B,W+1,top]; None if nobody asked."""

    tokens: Tensor
    counts: Tensor
    noted: tuple[Tensor, Tensor, Tensor] | None


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
    """What one step does to the rows of some slots, all on the device. classes: the features of which steps are captured before
    the first request."""

    classes: tuple[Features, ...] = (GREEDY,)

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

    def features(self, slots: Iterable[int]) -> Features:
        """What sampling for these slots together takes, as far as steps differ by it."""
        return self.served(self.sampling.features(slots))

    def served(self, features: Features) -> Features:
        """The features of the steps that serve requests with these."""
        return features

    def launch(self, key: Key | PromptKey, given: Tensor) -> Report:
        """A decode step (given: [2,B] int64, slot and k as `run` takes them) or prompts (as `prefill` takes it)."""
        return self.run(key, *given) if isinstance(key, Key) else self.prefill(key, given)

    def run(self, key: Key, slot: Tensor, k: Tensor) -> Report:
        """A decode step. slot: [B], the padding's is nobody's; k: [B], what each row may draft at most."""
        if key.drafts is not None:
            return self._run_shared(key, slot, k)
        start = self.slots.length[slot] if self.lives.draft_probs is not None else None  # before the commit
        draft, batch, x = self._lay_out(key, slot, k)
        kernels = self.target.kernels.bounded(key.width + 1, self.slots.tokens.shape[1])
        logits = self.target.forward(batch, self.kv, kernels=kernels, x=x).logits  # [B(W+1),V]
        return self._verify(key, slot, batch.positions, logits, draft, start)

    def _run_shared(self, key: Key, slot: Tensor, k: Tensor) -> Report:
        """The same with key.drafts drafts for all rows together, handed out from the first row on: a row takes as many tokens
        as it has drafts, and one. For drafts without probabilities."""
        draft, batch, owner, x = self._lay_shared(key, slot, k)
        kernels = self.target.kernels.bounded(key.width + 1, self.slots.tokens.shape[1], ragged=True)
        logits = self.target.forward(batch, self.kv, kernels=kernels, x=x).logits  # [T,V]
        choice = self._choose(key, owner, batch.positions, logits)  # [T]
        at = batch.row_start[:-1, None] + torch.arange(key.width + 1, device=slot.device)  # [B,W+1]
        at = at.clamp(max=len(owner) - 1)
        tokens = choice[at]
        counts = self._commit(slot, draft, tokens, None)
        return Report(tokens, counts, self._note(key, logits[at.flatten()] if key.top >= 0 else logits, tokens))

    def _lay_shared(self, key: Key, slot: Tensor, k: Tensor) -> tuple[Draft, Batch, Tensor, Tensor | None]:
        """As _lay_out, for rows that share key.drafts drafts; and the slot of each token [T], some slot for padding."""
        assert key.drafts is not None
        length, alive = self.slots.length[slot], self.lives.alive[slot]
        draft = self._cut(key, slot, k, length)
        size = torch.where(alive, draft.size, 0)
        draft = draft._replace(size=size - (size.cumsum(0) - key.drafts).clamp(min=0).minimum(size))
        self.slots.write_drafts(slot, draft.tokens)
        shape = PromptKey(key.rows + key.drafts, key.rows)
        batch, row = self._lay_end_to_end(shape, slot, torch.where(alive, length - 1, 0), draft.size + 1)
        table = torch.where(alive[:, None], batch.block_table, 0)
        return draft, batch._replace(block_table=table, logits_at=None), slot[row], None

    def _cut(self, key: Key, slot: Tensor, k: Tensor, length: Tensor) -> Draft:
        """What was drafted at the end of the last step, cut to k and to what the row may still take. length: [B]."""
        lives = self.lives
        room = torch.minimum(k, lives.limit[slot] - length - 1)
        size = torch.minimum(lives.draft_size[slot], room).clamp(0, key.width)
        return Draft(lives.draft[slot, : key.width], size)

    def _lay_out(self, key: Key, slot: Tensor, k: Tensor) -> tuple[Draft, Batch, Tensor | None]:
        """What was drafted at the end of the last step, cut to what the row may still take and laid behind its tokens; and
        the forward pass over the last committed token and the drafts (with the tokens' embeddings, if they are there)."""
        lives, slots = self.lives, self.slots
        alive, length = lives.alive[slot], slots.length[slot]
        draft = self._cut(key, slot, k, length)
        if lives.draft_probs is not None:
            draft = draft._replace(probs=lives.draft_probs[slot, : key.width])
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
        shaped, every = self._shaped(key, slot, positions, logits)
        return self.sampling.choose(shaped, every, positions + 1, key.features)

    def _shaped(self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits under biases, bans and penalties, and the slot of each of their rows; positions: [N], of which each of
        the slots [B] has as many."""
        every = self._every(slot, positions)
        return self.sampling.shape(logits, every, positions + 1, key.features), every

    @staticmethod
    def _every(slot: Tensor, positions: Tensor) -> Tensor:
        """The slot of each position."""
        return slot.repeat_interleave(len(positions) // max(len(slot), 1), output_size=len(positions))

    def _target(self, key: Key | PromptKey, slot: Tensor, every: Tensor, shaped: Tensor) -> Tensor:
        """The target's distribution at each position, [B(W+1),V]. every: [B(W+1)], their slots."""
        return self.sampling.probs(shaped, every, key.features)

    def _verify(
        self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor, draft: Draft, start: Tensor | None
    ) -> Report:
        """What the target makes of the draft, committed. positions: [B(W+1)], of the tokens that were read; start: [B], the
        index of each block's first token if drafts have probabilities, else None."""
        if start is None:
            tokens, verdict = self._choose(key, slot, positions, logits).view(len(slot), -1), None
        else:
            verdict = self._weigh(key, slot, positions, logits, draft, start)
            tokens = verdict.tokens
        return Report(tokens, self._commit(slot, draft, tokens, verdict), self._note(key, logits, tokens))

    def _weigh(
        self, key: Key | PromptKey, slot: Tensor, positions: Tensor, logits: Tensor, draft: Draft, start: Tensor
    ) -> Verdict:
        """What the rule for drafts with probabilities makes of the draft."""
        shaped, every = self._shaped(key, slot, positions, logits)
        target = self._target(key, slot, every, shaped).view(len(slot), draft.tokens.shape[1] + 1, -1)
        broken = self.sampling.broken(shaped).view(len(slot), -1)
        return accept_drawn(self._accept, target, broken, draft, self.sampling.seed[slot], start)

    def _commit(self, slot: Tensor, draft: Draft, tokens: Tensor, verdict: Verdict | None) -> Tensor:
        """Cut the block at a stop, the limit or broken logits, append it, and draft what follows; [B,5] as in Report.
        tokens: [B,W+1], the target's choices, of which the draft is accepted while it equals them; or the verdict's, if there
        is one."""
        verdict = verdict or accept_matching(tokens, draft)
        lives, width = self.lives, tokens.shape[1]
        length, alive = self.slots.length[slot], lives.alive[slot]
        at = torch.arange(width, device=slot.device)
        ends = (tokens[:, :, None] == lives.stop_ids[slot][:, None, :]).any(-1) | (tokens == BROKEN)
        first = torch.where(ends & (at < verdict.count[:, None]), at, width).amin(1)  # [B] where it ends, or past all
        last = tokens.gather(1, first[:, None].clamp(max=width - 1))[:, 0]
        room = lives.limit[slot] - length
        broken = alive & (first < torch.clamp(room, max=width)) & (last == BROKEN)
        count = torch.minimum(torch.minimum(verdict.count, first + 1) - broken.long(), room)
        count = torch.where(alive, count, 0).clamp(min=0)
        ended = (first < width) | (length + count >= lives.limit[slot])
        self.slots.commit(slot, tokens, count)
        lives.alive[slot] = alive & ~ended
        drafted, accepted = torch.where(alive, draft.size, 0), torch.minimum(verdict.count - 1, count)
        return torch.stack((count, drafted, accepted, broken.long(), self._propose(slot)), 1)

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
        batch, _ = self._lay_end_to_end(key, slot, begin, count)
        logits = self.target.forward(batch, self.kv).logits  # [R,V]
        if self.drafter is not None:
            self.drafter.prefill(batch)
        slot = torch.where(through > 0, slot, len(self.slots.length) - 1)  # the others commit to the dummy slot
        probs = self.lives.draft_probs
        nothing = Draft(slot.new_empty(key.rows, 0), torch.zeros_like(slot), None if probs is None else probs[slot, :0])
        end = (begin + count).clamp(min=1)
        return self._verify(key, slot, end - 1, logits, nothing, None if probs is None else end)

    def draft(self, slot: Tensor) -> None:
        """Draft for the next step of these rows [B], which takes what a step drafts at its end: for rows that no step has ended
        with."""
        self._propose(slot)

    def _lay_end_to_end(self, key: PromptKey, slot: Tensor, begin: Tensor, count: Tensor) -> tuple[Batch, Tensor]:
        """The forward pass over these parts of the slots, with the logits of each row's last token (of some token if the row
        is empty), and the row of each token [T]. slot, begin, count: [R]."""
        end = count.cumsum(0)  # [R]
        at = torch.arange(key.tokens, device=slot.device)  # [T]
        row = torch.searchsorted(end, at, right=True).clamp(max=key.rows - 1)  # [T]
        there = at < end[-1]
        positions = torch.where(there, at + (begin - end + count)[row], 0)
        ids = torch.where(there, self.slots.tokens[slot[row], positions], 0)
        start = F.pad(end, (1, 0)).int()
        return Batch(ids, positions, start, self.slots.block_table[slot], (end - 1).clamp(min=0)), row
