"""Training of a head: `Trainer`. A step takes a pack of samples, runs the head's own forward pass (heads/) with gradients,
compares its distributions with the target's, and updates the parameters. On CUDA the whole step is one captured graph, which
reads its pack from a plan on the device, so the host does nothing but start it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.memory import free_memory
from forerun.heads.config import HeadConfig
from forerun.models import rope
from forerun.models.config import ModelConfig
from forerun.models.decoder import PADDING, Target
from forerun.models.loading import Place
from forerun.train import plain
from forerun.train.data import Samples
from forerun.train.features import Features, Seen
from forerun.train.methods import AnyWeights, BlockMethod, ChainMethod, DraftMethod, Drawn, Method, Part
from forerun.train.operations import Learned, TrainingKernels
from forerun.train.packing import Corpus, Pack, Packing, lay_out
from forerun.train.parameters import Parameters
from forerun.train.settings import Settings
from forerun.types import require
from forerun.verify import noise

KEPT = 1024  # steps whose metrics wait on the device, at most
WARM_UP = 3  # steps before the capture
RUNNING = 0.05  # the weight of a step in the running acceptance
UNROLL = 5
FEATURE_SHARE, TOKEN_SHARE = 1.0, 0.1  # EAGLE: of the loss on features, and of that on distributions
SCALARS = 3  # of a row of metrics, before those of unrolled steps: loss, norm of the gradient, learning rate


class Metrics(NamedTuple):
    """Of one step of the optimiser. norm: of the gradient, before it is clipped; accuracy: for each unrolled step, the share of
    positions at which the drafter's likeliest token is the target's; acceptance: the mean of sum min(p, q)."""

    step: int
    loss: float
    norm: float
    rate: float
    accuracy: tuple[float, ...]
    acceptance: tuple[float, ...]


class Evaluation(NamedTuple):
    """Greedy drafts of k tokens over held-out answers, as the engine would walk over them: behind m accepted tokens comes one
    of the target's, and the next draft begins there. lengths: m + 1 on average, for k = 1, 2, ...; accepted: for the longest k,
    the share of drafts whose first i tokens are all accepted; accuracy: at every base, the share of right tokens in each
    unrolled step given true tokens before; samples: how many."""

    lengths: tuple[float, ...]
    accepted: tuple[float, ...]
    accuracy: tuple[float, ...]
    samples: int


def draft_ids(samples: Samples, target_vocab: int, size: int) -> Tensor:
    """The ids that are answered most often, ascending; of equally frequent ones the smaller.  [size] int64"""
    counts = samples.counts(target_vocab)[:target_vocab]
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


class Held:
    """A set of samples that is ready to be packed, with the target's states."""

    def __init__(self, target: Target, samples: Samples, states: Sequence[int], tokens: int, room: int) -> None:
        """room: bytes that the states may take."""
        self.packing = Packing(samples, tokens)
        self.corpus = Corpus.send(samples, self.packing, target.device)
        stored = Features.bytes(target, states, len(samples.ids)) <= room
        self.features = Features(target, self.corpus, self.packing, states, stored)

    def pack(self, sample: Tensor, begin: Tensor) -> Pack:
        return lay_out(sample, begin, self.corpus, self.packing.sizes)


class Trainer:
    """Trains a head of the shape `config` for a target, or a draft model (a ModelConfig), on the target's device and in its
    dtype. `step` until `done`; `metrics` in between; `weights` at the end."""

    def __init__(
        self, target: Target, config: HeadConfig | ModelConfig, samples: Samples, held_out: Samples | None = None,
        settings: Settings | None = None, initial: Mapping[str, Tensor] | None = None, operations: ModuleType | None = None,
        graphs: bool | None = None, like: Trainer | None = None,
    ) -> None:
        """held_out: for `evaluate`. initial: values to begin with, by the names of heads/saving.py (tensors) or
        models/loading.py (parts); places that are not there begin at random. operations: the module plain or fused; None: fused
        on CUDA in 16 bits. graphs: capture the step; None: with fused on CUDA. like: a
        trainer for the same samples, target, states and tokens, whose states are taken. Raises SettingError for a shape that
        cannot be trained, and for samples without answers."""
        self.settings = settings or Settings()
        self.target, self.config, self.device = target, config, target.device
        self._decoder = decoder = config.decoder if isinstance(config, HeadConfig) else config
        _check(target, config)
        self.operations = operations or self._operations()
        dim = decoder.head_dim
        fits = self.operations is plain or (dim >= 16 and dim & (dim - 1) == 0)
        require(fits, "head_dim", dim, "the kernels for CUDA take powers of two, 16 or more; give for instance 64")
        self._graphed = self.device.type == "cuda" and self.operations is not plain if graphs is None else graphs
        self._kernels = TrainingKernels(self.operations)
        self._method = self._chosen()
        self._unrolled = self._method.unroll or self.settings.unroll or UNROLL
        self._set_up_parameters(samples, initial or {})
        self._data: Held
        self._held: Held | None
        self._data, self._held = self._seen(samples, held_out) if like is None else (like._data, like._held)
        self._set_up_loop()

    def _seen(self, samples: Samples, held_out: Samples | None) -> tuple[Held, Held | None]:
        """The samples with the target's states."""
        target, states, room = self.target, self._method.states, self.settings.feature_memory
        if room is None:
            room = int(free_memory(self.device) * (0.75 if self.device.type == "cuda" else 0.25))
        data = Held(target, samples, states, self.settings.tokens, room)
        if held_out is None:
            return data, None
        room -= Features.bytes(target, states, len(samples.ids)) if data.features.stored else 0
        return data, Held(target, held_out, states, self.settings.tokens, room)

    def _operations(self) -> ModuleType:
        if self.device.type == "cuda" and self.target.dtype != torch.float32:
            from forerun.train import fused  # needs triton

            return fused
        return plain

    def _chosen(self) -> Method:
        config, s = self.config, self.settings
        if isinstance(config, ModelConfig):
            return DraftMethod(config, self.target)
        if config.method == "dflash":
            return BlockMethod(config, self.target, s.anchors)
        return ChainMethod(config, self.target, s.noise, s.unroll)

    def _set_up_parameters(self, samples: Samples, initial: Mapping[str, Tensor]) -> None:
        method, target = self._method, self.target
        self.parameters = Parameters(method.places(), target.dtype, self.device, self.settings.optimizer == "muon")
        self._use_ids(draft_ids(samples, target.vocab, method.draft_vocab).to(self.device) if method.mapped else None)
        generator = torch.Generator().manual_seed(self.settings.seed)
        for place in method.places():
            values = self._initial(place, generator)
            if all(name in initial for name in place.names):
                values = torch.cat([initial[name].float() for name in place.names])
            self.parameters.fill(place, values.to(self.device))

    def _use_ids(self, ids: Tensor | None) -> None:
        """Take this draft vocabulary, [draft vocabulary] int64; None: the target's."""
        target = self.target
        self.ids = ids
        whole = target.weights.head.dense()
        self._teacher = whole if ids is None else whole[ids]  # [draft vocabulary,H]
        self._draft_of = torch.full((target.config.vocab_size,), -1, device=self.device)
        known = torch.arange(len(self._teacher), device=self.device)
        self._draft_of[known if ids is None else ids] = known
        positions = self.settings.tokens + self._unrolled + PADDING
        tables = rope.tables(self._decoder.rope, self._decoder.head_dim, positions, self.device)
        self._vocabulary_head = self._method.use(self._method.assemble(self.parameters.learned, ids), self._kernels, *tables)
        shared = not isinstance(self._vocabulary_head, Learned)
        self._values = self._teacher if shared else self._vocabulary_head.values  # [draft vocabulary,H]

    @property
    def _master(self) -> Tensor | None:
        """The float32 values of the vocabulary head, if it learns."""
        return self._vocabulary_head.master if isinstance(self._vocabulary_head, Learned) else None

    def _initial(self, place: Place, generator: torch.Generator) -> Tensor:
        """Initial values: norms 1, biases 0, matrices as torch's Linear, smaller where they add to the residual. The vocabulary
        head begins as the target's, and so do the embedding and the norm before the head."""
        name, rows, target = place.names[0], sum(place.rows), self.target
        hidden = target.config.hidden_size
        if place.columns is None:
            if name.endswith("bias"):
                return torch.zeros(rows)
            last = name in ("norm.weight", "model.norm.weight") or name.endswith("final_layernorm.weight")
            return target.weights.norm.float() if last and rows == hidden else torch.ones(rows)
        if name == "lm_head.weight" and place.columns == hidden:
            return F.pad(self._teacher.float(), (0, 0, 0, rows - len(self._teacher)))
        if name.endswith("embed_tokens.weight"):
            own = target.weights.embedding.dense().float()
            return own if own.shape == (rows, place.columns) else torch.randn(rows, place.columns, generator=generator) * 0.02
        bound = place.columns**-0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            bound *= 0.5
        return torch.empty(rows, place.columns).uniform_(-bound, bound, generator=generator)

    def _set_up_loop(self) -> None:
        device, unroll = self.device, self._unrolled
        self.made = 0  # steps
        self._read = 0  # steps whose metrics were read from the device
        self._waiting: list[Metrics] = []
        self._epoch, self._in_epoch = -1, 0
        self._packs = self._plan_packs = 0
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # steps made
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # the pack's place in the plan
        self._running = torch.zeros(unroll, device=device)  # acceptance of each unrolled step
        self._rows = torch.zeros(KEPT, SCALARS + 2 * unroll, device=device)
        self._fade = torch.tensor([self.settings.fade**i for i in range(unroll)], device=device)
        fixed = {"kl": (1, 0, 0, 0), "lk": (0, 1, 0, 0), "nll": (0, 0, 1, 0), "hard": (0, 0, 0, 1)}[self.settings.loss]
        moving = (1, -1, 0, 0) if self.settings.loss == "lk" else (0, 0, 0, 0)
        scale = TOKEN_SHARE if isinstance(self.config, HeadConfig) and self.config.method == "eagle" else 1.0
        self._fixed, self._moving = (torch.tensor(x, dtype=torch.float32, device=device) * scale for x in (fixed, moving))
        self._seed = torch.tensor(noise.signed(self.settings.seed), device=device)
        self._graph: Any = None

    # ---- steps

    @property
    def done(self) -> bool:
        return self.made >= self.settings.steps

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens in a step of this epoch, padding not counted."""
        return float(self._data.packing.lengths[self._data.packing.usable].sum() / max(self._packs, 1))

    def step(self) -> None:
        """One step of the optimiser. On CUDA it is started and not waited for."""
        if self.made - self._read == KEPT:
            self._drain()
        if self._epoch < 0 or self._in_epoch == self._packs:
            self._begin_epoch(self._epoch + 1, 0)
        if not self._data.features.stored:
            sample = self._plan.sample[self._in_epoch]
            self._data.features.prepare(sample[sample >= 0])
        self._launch()
        self.made += 1
        self._in_epoch += 1

    def _launch(self) -> None:
        if not self._graphed:
            self._step()
            return
        if self._graph is None and self.made < WARM_UP:
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            return
        if self._graph is None:
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._graph.replay()

    def _begin_epoch(self, epoch: int, done: int) -> None:
        """Send an epoch's plan to the device, of which the first packs were trained on."""
        self._plan = self._data.packing.plan(epoch, self.settings.seed)
        self._epoch, self._in_epoch, self._packs = epoch, done, len(self._plan.sample)
        if not self._plan_packs:
            self._plan_packs = int(self._packs * 1.2) + 8  # room for the other epochs' packs
            shape = (self._plan_packs, self._data.packing.sizes.samples)
            self._sample = torch.full(shape, -1, device=self.device)
            self._begin = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64, device=self.device)
        self._packs = min(self._packs, self._plan_packs)
        self._sample[: self._packs] = torch.from_numpy(self._plan.sample[: self._packs]).to(self.device)
        self._begin[: self._packs] = torch.from_numpy(self._plan.begin[: self._packs]).to(self.device)
        self._at.fill_(done)

    def _step(self) -> None:
        """The operations of a step, all of fixed shape, none of which waits for the device."""
        pack = self._data.pack(self._sample.index_select(0, self._at)[0], self._begin.index_select(0, self._at)[0])
        loss, hit, acceptance = self._losses(pack, self._data.features.of(pack), self._data.corpus)
        grads = torch.autograd.grad(loss, self.parameters.masters, allow_unused=True)
        with torch.no_grad():
            self.parameters.collect(grads)
            norm = torch.linalg.vector_norm(self.parameters.grad)
            factor = torch.where(torch.isfinite(norm), (self.settings.clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
            self._count += 1
            rate = self._rate()
            s = self.settings
            now = torch.stack((rate, factor, self._count[0].float()))
            self.parameters.update(self.operations, now, (s.beta1, s.beta2), s.eps, s.weight_decay)
            self._running += (acceptance - self._running) * RUNNING * torch.isfinite(norm)
            row = torch.cat((torch.stack((loss.detach().float(), norm, rate)), hit, acceptance))
            self._rows.index_copy_(0, (self._count - 1) % KEPT, row[None])
            self._at += 1

    def _rate(self) -> Tensor:
        """The learning rate of the step that `_count` says, on the device."""
        s, step = self.settings, self._count[0].float()
        warm = max(round(s.warm_up * s.steps), 1)
        over = ((step - warm) / max(s.steps - warm, 1)).clamp(0, 1)
        lowered = s.final + (1 - s.final) * 0.5 * (1 + torch.cos(math.pi * over))
        return s.rate * torch.minimum(step / warm, lowered)

    def _losses(self, pack: Pack, seen: Seen, corpus: Corpus) -> tuple[Tensor, Tensor, Tensor]:
        """The loss with gradient; the share of hits and the mean acceptance of each unrolled step, [unroll]."""
        place = (pack.base + 1).clamp(max=len(pack.at) - 1)  # where the target's distribution for step 0 is
        teacher = self._teacher_logits(seen, place)
        loss, hits, acceptances = torch.zeros((), device=self.device), [], []
        drawn = Drawn(self._seed, self._count)
        for part in self._method.parts(self._kernels, pack, corpus, seen, self._unrolled, drawn):
            steps = slice(part.first, part.first + part.width)
            valid, row = self._targets(part, pack)
            label = self._draft_of[seen.best[place[row]].long()].view(valid.shape)
            there, valid = valid, valid & (label >= 0)
            share = valid / valid.sum(0).clamp(min=1)  # [C,W]
            weight = share if self.settings.pace is not None else share * self._fade[steps]
            mix = self._fixed + torch.exp(-self.settings.lk_rate * self._running[steps])[:, None] * self._moving
            x = part.x if self.settings.loss_temperature == 1 else part.x / self.settings.loss_temperature
            scored = self.operations.head_loss(
                x, self._master, self._values, teacher, row, label.flatten(), weight.flatten(), mix
            )
            if self.settings.pace is None:
                loss = loss + scored.loss.sum()
            else:
                pace = paced(scored.chance.view(valid.shape), valid, self.settings.pace)
                loss = loss + (scored.loss.view(valid.shape) * pace).sum()
            if part.feature is not None:
                loss = loss + FEATURE_SHARE * feature_loss(part, there)
            hits.append((scored.hit.view(valid.shape) * share).sum(0))
            acceptances.append((scored.acceptance.view(valid.shape) * share).sum(0))
        return loss, torch.cat(hits), torch.cat(acceptances)

    def _teacher_logits(self, seen: Seen, place: Tensor) -> Tensor | None:
        if self.settings.loss == "hard":
            return None
        with torch.no_grad():
            last = self._kernels.rms_norm(seen.last[place], self.target.weights.norm, self.target.config.eps)
            return F.linear(last / self.settings.loss_temperature, self._teacher)  # [N,draft vocabulary]

    @staticmethod
    def _targets(part: Part, pack: Pack) -> tuple[Tensor, Tensor]:
        """Where a part has a target, [C,W] bool, and the base in whose row step 0 has this target, [C*W]."""
        step = part.first + torch.arange(part.width, device=part.base.device)
        place = pack.base[part.base]
        valid = pack.true[part.base][:, None] & (place[:, None] + step <= pack.end[place][:, None] - 3)
        return valid, (part.base[:, None] + step).clamp(max=len(pack.base) - 1).flatten()

    # ---- what it has learned

    def metrics(self) -> list[Metrics]:
        """Those of the steps since the last call, in order. It waits for the device."""
        self._drain()
        found, self._waiting = self._waiting, []
        return found

    def _drain(self) -> None:
        rows = self._rows[torch.arange(self._read, self.made, device=self.device) % KEPT].tolist()
        for step, row in enumerate(rows, self._read + 1):
            loss, norm, rate, *rest = row
            accuracy, acceptance = tuple(rest[: self._unrolled]), tuple(rest[self._unrolled :])
            self._waiting.append(Metrics(step, loss, norm, rate, accuracy, acceptance))
        self._read = self.made

    @torch.no_grad()
    def evaluate(self, k: int = 4) -> Evaluation:
        """Greedy drafts of up to k tokens over the held-out samples. Raises SettingError without any."""
        require(self._held is not None, "held_out", None, "give held-out samples to the trainer")
        assert self._held is not None
        plan, found = self._held.packing.plan(None), []
        for sample, begin in zip(plan.sample, plan.begin, strict=True):
            given = (torch.from_numpy(x).to(self.device) for x in (sample, begin))
            self._held.features.prepare(sample[sample >= 0])
            pack = self._held.pack(*given)
            found.append(self._hits(pack, self._held.features.of(pack), self._held.corpus, k)[pack.true].cpu().numpy())
        hits = np.concatenate(found)  # [bases,k], in the order of the samples
        each = self._held.packing.bases[self._held.packing.usable]
        return walked(hits, each)

    def _hits(self, pack: Pack, seen: Seen, corpus: Corpus, k: int) -> Tensor:
        """Whether the likeliest draft of each step is the true token; false past the end.  [N,k] bool"""
        hits = torch.zeros(len(pack.base), k, dtype=torch.bool, device=self.device)
        for part in self._method.parts(self._kernels, pack, corpus, seen, k, None):
            valid, _ = self._targets(part, pack)
            best = F.linear(part.x, self._values).argmax(-1)
            best = best if self.ids is None else self.ids[best]
            for i in range(part.width):
                true = pack.behind(corpus, pack.base[part.base], part.first + i + 2)
                hits[part.base, part.first + i] = (best.view(valid.shape)[:, i] == true) & valid[:, i]
        return hits

    def weights(self) -> AnyWeights:
        """The drafter as it is now, for the engine and for heads/saving.py: a copy in the target's dtype. ChainWeights of
        EAGLE, EAGLE-3 and MTP, BlockWeights of DFlash, Weights of a draft model."""
        return self._method.assemble(self.parameters.finished, self.ids)

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on, on the CPU: with it, further steps are the same as without the interruption."""
        made, epoch, done = self.made, self._epoch, self._in_epoch
        tensors = {name: tensor.cpu().clone() for name, tensor in self.parameters.state().items()}
        ids = None if self.ids is None else self.ids.cpu()
        return {
            "parameters": tensors, "running": self._running.cpu().clone(), "ids": ids, "made": made, "epoch": epoch,
            "in_epoch": done, "settings": asdict(self.settings),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises SettingError for a state of other settings."""
        for name, value in state["settings"].items():
            mine = getattr(self.settings, name)
            same = name == "feature_memory" or value == mine
            require(same, name, mine, f"the checkpoint was made with {value}; give that")
        require(
            state["parameters"]["master"].shape == self.parameters.master.shape, "checkpoint", len(self.parameters.master),
            "it is of a drafter of another shape; give the config that it was made with",
        )  # fmt: skip
        if state["ids"] is not None:
            ids = state["ids"].to(self.device)
            assert self.ids is not None
            if not torch.equal(ids, self.ids):
                self._graph = None
                self._use_ids(ids)
        self.parameters.set_state(state["parameters"])
        self._running.copy_(state["running"])
        self.made = self._read = state["made"]
        self._count.fill_(self.made)
        self._waiting = []
        if state["epoch"] >= 0:
            self._begin_epoch(state["epoch"], state["in_epoch"])


def paced(chance: Tensor, valid: Tensor, a: float) -> Tensor:
    """D-PACE: the weights of a block's positions. That of position i is the sum, over j >= i, of the product over m <= j of
    (1 - a) q_m + a, where q_m is the probability of the right token; positions without a target add nothing. chance: q, [C,W];
    valid: [C,W] bool -> [C,W], without gradient"""
    ahead = ((1 - a) * chance.detach() + a).cumprod(1) * valid
    return ahead.flip(1).cumsum(1).flip(1)


def feature_loss(part: Part, valid: Tensor) -> Tensor:
    """EAGLE's smooth L1 between a part's output and the target's features, averaged over the valid places."""
    assert part.feature is not None
    each = F.smooth_l1_loss(part.x.float(), part.feature.float(), reduction="none").mean(-1)
    return (each * valid.flatten()).sum() / valid.sum().clamp(min=1)


def _check(target: Target, config: HeadConfig | ModelConfig) -> None:
    """Raise SettingError for a shape that cannot be trained for this target."""
    decoder = config.decoder if isinstance(config, HeadConfig) else config
    require(not any(decoder.windows), "windows", decoder.windows, "train a drafter without sliding windows")
    if isinstance(config, ModelConfig):
        size = target.config.vocab_size
        require(config.vocab_size == size, "vocab_size", config.vocab_size, f"a draft model has the target's; give {size}")
        return
    given, has = (config.target_hidden, config.target_layers), (target.config.hidden_size, target.config.layers)
    require(given == has, "config", given, f"the target has hidden size and layers {has}; give a head for its shape")
    apart = config.own_embedding and config.own_head
    fits = apart or decoder.hidden_size == config.target_hidden
    require(fits, "hidden_size", decoder.hidden_size, f"it shares the target's embedding; give {config.target_hidden}")


def walked(hits: np.ndarray, each: np.ndarray) -> Evaluation:
    """Walks over answers. hits: [bases,k] bool; each: how many bases the samples have, one after the other."""
    k = hits.shape[1]
    run = np.cumprod(hits, 1).sum(1)  # accepted tokens of a draft that begins there
    lengths, accepted = [], np.zeros(k)
    for width in range(1, k + 1):
        steps, tokens = 0, 0
        counts = np.zeros(k + 1, np.int64)
        end = 0
        for count in each.tolist():
            at, end = end, end + count
            while at < end:
                m = min(int(run[at]), width)
                counts[m] += 1
                steps, tokens, at = steps + 1, tokens + m + 1, at + m + 1
        lengths.append(tokens / max(steps, 1))
        if width == k:
            accepted = counts[::-1].cumsum()[::-1][1:] / max(steps, 1)
    right = hits.mean(0) if len(hits) else np.zeros(k)
    return Evaluation(tuple(lengths), tuple(accepted.tolist()), tuple(right.tolist()), len(each))
