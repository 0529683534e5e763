"""From the target's logits to its distribution: every sampling parameter, at every position of a block. The parameters of the
live sequences are tensors with a row for each slot; the history is read from the tokens in the state. No counts are kept, so a
rejected draft can never have been counted. Nothing here knows of drafts or acceptance.

Order, as in vLLM: logit_bias, banned sequences and min_tokens, penalties, the mask of a grammar (`shape`); temperature, min_p,
top_k, top_p (`probs`, `choose`). Ties with the last token kept by a filter are kept, see filters.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.device import send
from forerun.types import Request, SettingError, require
from forerun.verify import filters
from forerun.verify.noise import CHOOSE, draw, draw_row, signed, uniform

BAN = -100.0  # a logit_bias this low bans the token
ROOM = (64, 16, (16, 8))  # first sizes on a device, per slot: biases; stop tokens held off; banned sequences and their tokens
WORD = 32  # tokens of a word of a mask
BROKEN = -1  # in place of a token: the logits that it would be chosen from hold a NaN or an infinite largest value


class Features(NamedTuple):
    """Which sampling parameters some rows use; the work for the others is left out. All off is greedy decoding.

    bias: logit_bias or single banned tokens; banned: longer banned sequences. top_k: the largest, rounded up to a power of two
    (so that few values occur), 0 for none; unbounded: a top_p without a top_k, for which every token is ranked; grammar: masks.
    """

    sampled: bool = False
    penalties: bool = False
    bias: bool = False
    banned: bool = False
    min_tokens: bool = False
    min_p: bool = False
    top_k: int = 0
    top_p: bool = False
    unbounded: bool = False
    grammar: bool = False

    @property
    def shaped(self) -> bool:
        return self.penalties or self.bias or self.banned or self.min_tokens or self.grammar

    @property
    def filtered(self) -> bool:
        return self.min_p or self.top_k > 0 or self.top_p


def check_request(request: Request, vocab: int) -> None:
    """Raise SettingError for what could not be sampled: no prompt, ids outside the vocabulary, min_tokens above max_tokens, or
    bans that could leave no token (a banned sequence counts as a ban of its last id, min_tokens as one of the stop tokens)."""
    params, last = request.params, vocab - 1
    require(len(request.prompt_ids) > 0, "prompt_ids", request.prompt_ids, f"give one token id or more, for instance [{last}]")
    require(request.max_tokens >= 1, "max_tokens", request.max_tokens, "give 1 or more, for instance 256")
    require(
        params.min_tokens <= request.max_tokens,
        "min_tokens",
        params.min_tokens,
        f"at most {request.max_tokens} tokens are left to answer; give no more, for instance {request.max_tokens}",
    )
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
        *(("banned_token_ids", sequence) for sequence in request.banned),
    ):
        unknown = [token for token in ids if not 0 <= token < vocab]
        require(not unknown, name, unknown[:3], f"the model's token ids are 0 to {last}; give only these, for instance {last}")
    gone = {sequence[-1] for sequence in request.banned}
    gone |= {token for token, bias in (params.logit_bias or {}).items() if bias <= BAN}
    if params.min_tokens:
        gone |= {token for token in request.stop_ids if 0 <= token < vocab}
    if len(gone) >= vocab:
        words = bool(params.bad_words) and not params.banned_token_ids
        bans = "bad_words" if words else "banned_token_ids" if request.banned else None
        name = bans or ("logit_bias" if params.logit_bias else "min_tokens")
        raise SettingError(name, f"{len(gone)} tokens", f"the bans may leave no token to choose; ban at most {vocab - 1}")


def _held_off(request: Request, vocab: int) -> list[int]:
    """The stop tokens that may not come before min_tokens. Ids outside the vocabulary can never be chosen."""
    return [token for token in request.stop_ids if 0 <= token < vocab] if request.params.min_tokens else []


class SamplingState:
    """The sampling parameters of S slots. tokens [S,L], length [S]: of the state, read and never written.

    The tables of biases, stops and bans get wider when a request needs that. `version` counts these times, since a captured
    CUDA graph holds the tables that there were before. host: work row by row and do only what each row asks for, instead of all
    rows at once in fixed shapes; the default on the CPU. The two agree.
    """

    def __init__(self, tokens: Tensor, length: Tensor, vocab: int) -> None:
        count, device = tokens.shape[0], tokens.device
        self.tokens, self.length, self.vocab = tokens, length, vocab
        # one tensor for each dtype, so that one write fills all numbers of a slot; each name is a row of it, [S]
        self._whole = torch.zeros(4, count, dtype=torch.int64, device=device)
        self._double = torch.zeros(3, count, dtype=torch.float64, device=device)
        self._single = torch.zeros(3, count, dtype=torch.float32, device=device)
        self.seed, self.prompt_len, self.top_k, self.min_tokens = self._whole
        self.temperature, self.top_p, self.min_p = self._double
        self.repetition, self.presence, self.frequency = self._single
        self.top_p.fill_(1)
        self.repetition.fill_(1)
        self.host = device.type == "cpu"
        biases, stops, banned = (1, 1, (1, 2)) if self.host else ROOM
        self.bias_ids = torch.zeros(count, biases, dtype=torch.int64, device=device)  # [S,N], unused: token 0 with bias 0
        self.bias_values = torch.zeros(count, biases, device=device)  # [S,N]
        self.stop_ids = torch.full((count, stops), -1, dtype=torch.int64, device=device)  # [S,M], unused: -1
        self.banned = torch.full((count, *banned), -1, dtype=torch.int64, device=device)  # [S,W,Lw], right-aligned, unused: -1
        # [S,K+1,ceil(V/32)] int32, the tokens that a slot's grammar allows at each position of its block, a bit for each, the
        # lowest first; other slots allow all. It is made for the first request with a grammar
        self.masks = torch.empty(count, 0, 0, dtype=torch.int32, device=device)
        self._masked: set[int] = set()  # slots that have a mask
        self.version = 0
        self._features = [Features()] * count
        self._listed: set[int] = set()  # slots that have entries in these tables

    def admit(self, requests: Mapping[int, Request]) -> None:
        """These slots now belong to these requests. Nothing waits for the device. Raises SettingError as check_request does."""
        whole, fine = [], []
        for request in requests.values():
            check_request(request, self.vocab)
            params = request.params
            early = params.min_tokens if _held_off(request, self.vocab) else 0
            whole.append((signed(request.seed), len(request.prompt_ids), max(params.top_k, 0), early))
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            fine.append((params.temperature, params.top_p, params.min_p, *penalties))
        slots = np.array([list(requests)], dtype=np.int64)
        columns = np.array(whole, dtype=np.int64).T, np.array(fine, dtype=np.float64).T.copy().view(np.int64)
        sent = send(np.concatenate((slots, *columns)), self.seed.device)  # [11,A]
        at, (double, single) = sent[0], sent[5:].view(torch.float64).view(2, 3, -1)
        self._whole.index_copy_(1, at, sent[1:5])
        self._double.index_copy_(1, at, double)
        self._single.index_copy_(1, at, single.float())
        for slot, request in requests.items():
            self._list(slot, request)

    def _list(self, slot: int, request: Request) -> None:
        """Write the request's entries in the tables of biases, stops and bans, and note what it uses."""
        if slot in self._listed:
            self.bias_ids[slot], self.bias_values[slot] = 0, 0
            self.stop_ids[slot], self.banned[slot] = -1, -1
        self._listed.add(slot)  # first: should anything fail from here on, the entries are still found and cleared
        params = request.params
        bias = {token: -math.inf if value <= BAN else value for token, value in (params.logit_bias or {}).items()}
        bias |= {sequence[0]: -math.inf for sequence in request.banned if len(sequence) == 1}
        stops = _held_off(request, self.vocab)
        sequences = [sequence for sequence in request.banned if len(sequence) > 1]
        if bias:
            self.bias_ids = self._write(self.bias_ids, slot, np.array(list(bias), dtype=np.int64), 0)
            self.bias_values = self._write(self.bias_values, slot, np.array(list(bias.values()), dtype=np.float32), 0)
        if stops:
            self.stop_ids = self._write(self.stop_ids, slot, np.array(stops, dtype=np.int64), -1)
        if sequences:
            longest = max(map(len, sequences))
            rows = [[-1] * (longest - len(sequence)) + list(sequence) for sequence in sequences]
            self.banned = self._write(self.banned, slot, np.array(rows, dtype=np.int64), -1)
        if not (bias or stops or sequences):
            self._listed.remove(slot)
        sampled = params.temperature > 0
        top_p, top_k = sampled and params.top_p < 1, max(params.top_k, 0) if sampled else 0
        self._features[slot] = Features(
            sampled=sampled,
            penalties=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0),
            bias=bool(bias),
            banned=bool(sequences),
            min_tokens=bool(stops),
            min_p=sampled and params.min_p > 0,
            top_k=1 << (top_k - 1).bit_length() if top_k else 0,
            top_p=top_p,
            unbounded=top_p and top_k == 0,
            grammar=params.structured is not None,
        )
        if slot in self._masked:
            self.masks[slot] = -1
            self._masked.remove(slot)

    def _write(self, table: Tensor, slot: int, values: np.ndarray, fill: int) -> Tensor:
        """The table [S, ...] with these values among the slot's entries, of which the others are unused. A table that is too
        narrow is made wider, by powers of two so that this is rare. A single dimension is filled from the left; of two, the
        last one is filled from the right."""
        powers = [1 << (want - 1).bit_length() for want in values.shape]
        more = [max(want - have, 0) for want, have in zip(powers, table.shape[1:], strict=True)]
        if any(more):
            self.version += 1
            table = F.pad(table, [0, more[0]] if len(more) == 1 else [more[1], 0, 0, more[0]], value=fill)
        row = table[slot, : len(values)]
        (row if values.ndim == 1 else row[:, row.shape[1] - values.shape[1] :]).copy_(send(values, table.device))
        return table

    def mask(self, slots: Sequence[int], masks: Sequence[np.ndarray], width: int) -> None:
        """Write the masks of these slots for the next launch. masks: [n,words] int32 each, n at most width + 1; behind the n
        positions all tokens are allowed. width: drafts of a row at most, always the same."""
        if not self.masks.numel():
            self.version += 1
            shape = (len(self.masks), width + 1, -(-self.vocab // WORD))
            self.masks = torch.full(shape, -1, dtype=torch.int32, device=self.masks.device)
        packed = np.full((len(slots), *self.masks.shape[1:]), -1, np.int32)
        for row, one in zip(packed, masks, strict=True):
            row[: len(one)] = one
        self._masked.update(slots)
        at, device = np.array(slots, dtype=np.int64), self.masks.device
        self.masks.index_copy_(0, send(at, device), send(packed, device))

    def features(self, slots: Iterable[int]) -> Features:
        """What these slots use together, as the host knows it."""
        each = [self._features[slot] for slot in slots]
        return Features(*map(max, *each)) if len(each) > 1 else each[0] if each else Features()

    def uniform(self, slot: Tensor, position: Tensor, purpose: int) -> Tensor:
        """noise.uniform with the slots' seeds, [N], [N] -> [N] float64."""
        return uniform(self.seed[slot], position, purpose)

    def shape(self, logits: Tensor, slot: Tensor, position: Tensor, features: Features, longest: int = 0) -> Tensor:
        """The logits under bias, bans, min_tokens, penalties and grammars; [N,V] float32, [N], [N] -> [N,V]. The same tensor
        if none of them is on, else a new one.

        position: where the token that is chosen will stand in its slot. Its history is what lies before it, this step's drafts
        included. longest: no position is larger (0: unknown, whole slots are read). Banned sequences match across the end of
        the prompt. The repetition penalty divides positive logits of tokens in the history and multiplies negative ones; the
        frequency penalty (times the count) and the presence penalty are subtracted for tokens of the output. The tokens that a
        grammar refuses get -inf.
        """
        if not features.shaped:
            return logits
        out = logits.clone()
        if features.bias:
            out.scatter_add_(1, self.bias_ids[slot], self.bias_values[slot])
        if features.banned:
            self._ban_sequences(out, slot, position)
        if features.min_tokens:
            stops = self.stop_ids[slot]  # [N,M]
            early = (position - self.prompt_len[slot] < self.min_tokens[slot])[:, None] & (stops >= 0)
            out.scatter_add_(1, stops.clamp(min=0), _ban_where(early, out.dtype))
        if features.penalties:
            self._penalise(out, slot, position, longest or self.tokens.shape[1])
        if features.grammar and self.masks.numel():
            self._mask(out, slot, position)
        return out

    def _mask(self, out: Tensor, slot: Tensor, position: Tensor) -> None:
        at = (position - self.length[slot]).clamp(0, self.masks.shape[1] - 1)  # the place in the block
        if not self.host:
            bits = self.masks[slot, at][:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=out.device)
            out.masked_fill_((bits & 1 == 0).flatten(1)[:, : self.vocab], -math.inf)
            return
        rows, masks = out.numpy(), self.masks.numpy()
        for row, owner, place in zip(rows, slot.tolist(), at.tolist(), strict=True):
            if owner in self._masked:
                allowed = np.unpackbits(masks[owner, place].view(np.uint8), count=self.vocab, bitorder="little")
                row[allowed == 0] = -math.inf

    def _ban_sequences(self, out: Tensor, slot: Tensor, position: Tensor) -> None:
        banned = self.banned[slot]  # [N,W,Lw]
        before = position[:, None] - torch.arange(banned.shape[2] - 1, 0, -1, device=out.device)  # [N,Lw-1]
        history = torch.where(before >= 0, self.tokens[slot[:, None], before.clamp(min=0)], -2)
        head, last = banned[:, :, :-1], banned[:, :, -1]
        hit = ((head == history[:, None]) | (head < 0)).all(-1) & (last >= 0)  # [N,W]
        out.scatter_add_(1, last.clamp(min=0), _ban_where(hit, out.dtype))

    def _penalise(self, out: Tensor, slot: Tensor, position: Tensor, longest: int) -> None:
        at = torch.arange(longest, device=out.device)
        valid = at < position[:, None]  # [N,longest]
        history = self.tokens[slot, :longest]
        # in place of what is no history stands the first token: its value is written once more, and it is counted 0 times
        history = torch.where(valid, history, history[:, :1])
        output = valid & (at >= self.prompt_len[slot][:, None])
        count = torch.zeros_like(out).scatter_add_(1, history, output.to(out.dtype)).gather(1, history)
        repetition, frequency, presence = (x[slot][:, None] for x in (self.repetition, self.frequency, self.presence))
        value = out.gather(1, history)
        value = torch.where(value > 0, value / repetition, value * repetition)
        value = value - frequency * count - presence * (count > 0)
        out.scatter_(1, history, value)

    def probs(self, shaped: Tensor, slot: Tensor, features: Features, floor: Tensor | None = None) -> Tensor:
        """The target's distribution after temperature, min_p, top_k and top_p; [N,V], [N] -> [N,V] float32. Greedy rows are
        one-hot at the argmax, and so are rows whose logits are `broken`. floor: [N,1], the smallest logit of each row that the
        filters leave, if the caller has it."""
        best = torch.zeros_like(shaped).scatter_(1, shaped.argmax(-1, keepdim=True), 1.0)
        if not features.sampled:
            return best
        temperature = self.temperature[slot][:, None]  # [N,1]
        divisor = torch.where(temperature > 0, temperature, 1.0)
        top = shaped.amax(-1, keepdim=True)
        scaled = (shaped - top) / divisor.to(shaped.dtype)  # largest 0: no temperature overflows
        if features.filtered:
            floor = self._floor(shaped, slot, divisor, features) if floor is None else floor
            scaled = torch.where(shaped >= floor, scaled, -math.inf)
        return torch.where((temperature > 0) & top.isfinite(), scaled.softmax(-1), best)

    @staticmethod
    def broken(shaped: Tensor) -> Tensor:
        """Whether no token can be chosen from logits: they hold a NaN, or the largest is infinite; [N,V] -> [N] bool."""
        return ~shaped.amax(-1).isfinite()

    def _floor(self, shaped: Tensor, slot: Tensor, temperature: Tensor, features: Features) -> Tensor:
        """The smallest logit that the filters leave each row, [N,1]. temperature: [N,1], above 0."""
        min_p, top_k, top_p = (column[slot][:, None] for column in (self.min_p, self.top_k, self.top_p))
        if not self.host:
            use = (features.top_k, features.top_p, features.unbounded)
            return filters.thresholds(shaped, temperature, min_p, top_k, top_p, *use)
        settings = [column[:, 0].tolist() for column in (temperature, min_p, top_k, top_p)]
        floors = [filters.threshold(row, *setting) for row, *setting in zip(shaped.numpy(), *settings, strict=True)]
        return torch.from_numpy(np.array(floors, dtype=np.float32))[:, None]

    def choose(self, shaped: Tensor, slot: Tensor, position: Tensor, features: Features) -> Tensor:
        """The target's own token at each position; [N,V], [N], [N] -> [N] int64: the argmax for greedy rows, else drawn from
        `probs` with the noise (seed, position, CHOOSE); BROKEN where the logits are."""
        if self.host:
            return self._choose_on_host(shaped, slot, position, features)
        if features.sampled:
            choice = draw(self.probs(shaped, slot, features), self.uniform(slot, position, CHOOSE))
        else:
            choice = shaped.argmax(-1)
        return torch.where(self.broken(shaped), BROKEN, choice)

    def _choose_on_host(self, shaped: Tensor, slot: Tensor, position: Tensor, features: Features) -> Tensor:
        """The same row by row, doing only what each row asks for."""
        logits = shaped.numpy()
        choice = logits.argmax(-1)  # [N], of a NaN if there is one
        tops = np.take_along_axis(logits, choice[:, None], 1)[:, 0]
        choice[~np.isfinite(tops)] = BROKEN
        if not features.sampled:
            return torch.from_numpy(choice)
        u = self.uniform(slot, position, CHOOSE).tolist()
        settings = [column[slot].tolist() for column in (self.temperature, self.min_p, self.top_k, self.top_p)]
        for i, (temperature, min_p, top_k, top_p) in enumerate(zip(*settings, strict=True)):
            if temperature == 0 or choice[i] == BROKEN:
                continue
            row, top = logits[i], tops[i]
            kept = None
            if min_p > 0 or top_k > 0 or top_p < 1:
                kept = np.flatnonzero(row >= filters.threshold(row, temperature, min_p, top_k, top_p))
                row = row[kept]
            j = draw_row(np.exp((row - top) / np.float32(temperature)), u[i])
            choice[i] = j if kept is None else kept[j]
        return torch.from_numpy(choice)


def _ban_where(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where true and 0 elsewhere, to be added to logits: an entry that bans nothing may name any token."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model's own distribution (raw logits), [N,V], [N] -> of the tokens [N], and the ids and
    values [N, min(top,V)] of the likeliest, best first. Where a token is BROKEN they mean nothing."""
    scores = logits.float().log_softmax(-1)
    values, ids = scores.topk(min(top, scores.shape[-1]), -1)
    return scores.gather(1, tokens[:, None].clamp(min=0))[:, 0], ids, values
