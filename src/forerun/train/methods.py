"""What is trained, method by method: its parameters, and its forward pass from a pack to what the vocabulary head is applied
to. All methods are trained at bases (packing.py): step i of base q predicts token q + 2 + i from the target's states up to q
and tokens up to q + 1 + i (DFlash: up to q + 1). The target's own distribution for it is that of place q + 1 + i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.heads.block import Block, BlockWeights
from forerun.heads.chain import Chain, ChainWeights
from forerun.heads.config import HeadConfig
from forerun.heads.loading import assemble, wanted
from forerun.kernels import AttentionShape, Batch, Layers, one_by_one
from forerun.models import loading
from forerun.models.config import ModelConfig
from forerun.models.decoder import Target
from forerun.models.loading import Place
from forerun.models.weights import Matrix, Weights
from forerun.train.features import Seen
from forerun.train.operations import Behind, Blocks, Causal, TrainingKernels
from forerun.train.packing import Corpus, Pack
from forerun.verify import noise

ANCHORS, NOISE = 101, 102  # purposes of random numbers
AnyWeights = ChainWeights | BlockWeights | Weights


class Part(NamedTuple):
    """What the vocabulary head is applied to, at C bases in W consecutive steps. x: [C*W,H], base by base; base: [C] int64,
    which of the pack's N bases; first: the first of these steps; width: W. feature: EAGLE: what x should be, [C*W,H]."""

    x: Tensor
    base: Tensor
    first: int
    width: int = 1
    feature: Tensor | None = None


class Drawn(NamedTuple):
    """Randomness of a step. seed: int64, []; step: int64, [1]; both on the device."""

    seed: Tensor
    step: Tensor

    def uniform(self, count: int, purpose: int) -> Tensor:
        """[count] float64 in (0,1), others in each step"""
        index = torch.arange(count, device=self.step.device) + (self.step << 32)
        return noise.uniform(self.seed, index, purpose)


class Method(Protocol):
    """states: the target's hidden states that it reads; draft_vocab: the size of its vocabulary, if that is not the target's;
    unroll: the steps that it is trained on if the settings do not say."""

    states: tuple[int, ...]
    mapped: bool
    draft_vocab: int
    unroll: int | None

    def places(self) -> list[Place]:
        """What it learns."""

    def assemble(self, make: Callable[[Place], Any], ids: Tensor | None) -> AnyWeights:
        """Its weights, of which `make` gives each place."""

    def use(self, weights: Any, kernels: TrainingKernels, cos: Tensor, sin: Tensor) -> Matrix:
        """Take these weights for `parts`. Returns the vocabulary head."""

    def parts(
        self, kernels: TrainingKernels, pack: Pack, corpus: Corpus, seen: Seen, steps: int, drawn: Drawn | None
    ) -> Iterator[Part]:
        """The forward pass, in ascending steps. drawn: for training; None: for evaluation, at all bases and without noise."""


def no_pages(positions: Tensor) -> Batch:
    """A batch for kernels that read positions only."""
    return Batch(positions, positions, positions, positions, None)


class Head:
    """What the methods with a head share."""

    def __init__(self, config: HeadConfig, target: Target) -> None:
        self.config, self.target, self.states = config, target, config.states
        self.mapped, self.draft_vocab = config.mapped, config.draft_vocab
        self.unroll: int | None = None

    def places(self) -> list[Place]:
        return list(wanted(self.config))

    def assemble(self, make: Callable[[Place], Any], ids: Tensor | None) -> ChainWeights | BlockWeights:
        return assemble(self.config, self.target, make, ids)


class ChainMethod(Head):
    """EAGLE, EAGLE-3 and MTP. Each module makes a causal pass over all tokens first, as the engine does with committed tokens:
    step i < modules is at place q + i. Later steps are training-time test: the last module again, with its own output for a
    feature, at the place behind, which attends to the pass over all tokens up to place q + modules - 1 and to the later entries
    of the same base."""

    def __init__(self, config: HeadConfig, target: Target, noise: float, unroll: int | None) -> None:
        """noise: EAGLE: features get uniform noise of up to this. unroll: steps, None: the method's own."""
        super().__init__(config, target)
        self._noise = noise if config.method == "eagle" else 0.0
        self.unroll = unroll or (1 if config.method == "eagle" else None)

    def use(self, weights: ChainWeights, kernels: TrainingKernels, cos: Tensor, sin: Tensor) -> Matrix:
        self.head = Chain(self.config, weights, kernels, cos, sin)
        return weights.head

    def parts(
        self, kernels: TrainingKernels, pack: Pack, corpus: Corpus, seen: Seen, steps: int, drawn: Drawn | None
    ) -> Iterator[Part]:
        head, total = self.head, len(pack.at)
        modules, none = len(head.weights.modules), pack.position
        true = feature = head.encode(seen.states)
        if drawn is not None and self._noise:
            uniform = drawn.uniform(feature.numel(), NOISE).view_as(feature)
            feature = feature + ((2 * uniform - 1) * self._noise).to(feature.dtype)
        bases = torch.arange(len(pack.base), device=pack.base.device)

        def part(module: int, step: int, handed: Tensor) -> Part:
            norm = head.weights.modules[module].norm
            x = handed  # what Chain.logits applies the head to
            if norm is not None and not head.config.norm_output:
                x = kernels.rms_norm(handed, norm, head.config.decoder.eps)
            wanted = true[(pack.base + step + 1).clamp(max=total - 1)] if self.config.method == "eagle" else None
            return Part(x, bases, step, feature=wanted)

        ids = pack.behind(corpus, torch.arange(total, device=pack.at.device), 1)
        output = first = None
        for module in range(min(modules, steps)):
            first = Causal(kernels.operations, pack.begin)
            run = head.with_kernels(kernels.attending(first))
            embedded = run.embed(ids, pack.position)
            output = run.hand_on(module, run.run(module, embedded, feature, no_pages(pack.position), none, none))
            yield part(module, module, output.index_select(0, (pack.base + module).clamp(max=total - 1)))
            feature = torch.where((pack.position == 0)[:, None], 0, output.roll(1, 0))
        if steps <= modules:
            return
        assert first is not None and output is not None
        reach = pack.base + modules
        behind = Behind(
            kernels.operations, first, torch.where(pack.true, pack.begin[pack.base], total),
            torch.where(pack.true, torch.minimum(reach, pack.end[pack.base]), total),
        )  # fmt: skip
        run = head.with_kernels(kernels.attending(behind))
        x = output.index_select(0, (reach - 1).clamp(max=total - 1))
        for i in range(modules, steps):
            positions = pack.position[pack.base] + i
            embedded = run.embed(pack.behind(corpus, pack.base, 1 + i), positions)
            x = run.hand_on(modules - 1, run.run(modules - 1, embedded, x, no_pages(positions), none, none))
            yield part(modules - 1, i, x)


class BlockMethod(Head):
    """DFlash. In training a block begins at each of `anchors` bases that are drawn anew in each step; the block of base q has
    its anchor, a true token, at q + 1, and the context up to q."""

    def __init__(self, config: HeadConfig, target: Target, anchors: int | None) -> None:
        """anchors: of a step; None: a quarter of the bases."""
        super().__init__(config, target)
        self._anchors, self.unroll = anchors, config.block_size - 1

    def use(self, weights: BlockWeights, kernels: TrainingKernels, cos: Tensor, sin: Tensor) -> Matrix:
        self.head = Block(self.config, weights, kernels, cos, sin)
        return weights.head

    def parts(
        self, kernels: TrainingKernels, pack: Pack, corpus: Corpus, seen: Seen, steps: int, drawn: Drawn | None
    ) -> Iterator[Part]:
        total, all_bases, size = len(pack.at), len(pack.base), steps + 1
        device = pack.at.device
        base = torch.arange(all_bases, device=device)
        if drawn is not None:
            count = min(self._anchors or max(all_bases // 4, 1), all_bases)
            order = torch.where(pack.true, drawn.uniform(all_bases, ANCHORS), 2.0)
            base = order.topk(count, largest=False).indices.sort().values
        place, true = pack.base[base], pack.true[base]
        lo, hi = (torch.where(true, x, total).repeat_interleave(size) for x in (pack.begin[place], place + 1))
        run = self.head.with_kernels(kernels.attending(Blocks(kernels.operations, lo, hi, size)))
        none = [pack.at] * self.config.decoder.layers
        run.context(seen.states, no_pages(pack.position), none, none)
        ids = torch.full((len(base), size), self.config.mask_id, device=device)
        ids[:, 0] = pack.behind(corpus, place, 1)
        positions = (pack.position[place] + 1)[:, None] + torch.arange(size, device=device)
        embedded = kernels.embed(ids.flatten(), run.weights.embedding)
        x = run.run(embedded, no_pages(positions.flatten()), none, none)
        x = x.view(len(base), size, -1)[:, 1:].flatten(0, 1)
        yield Part(kernels.rms_norm(x, run.weights.norm, self.config.decoder.eps), base, 0, steps)


class DraftMethod:
    """A small decoder with the target's vocabulary, which drafts without the target's states. Its one step is what it says
    behind the token at q + 1; the step i of an evaluation is the same at q + 1 + i."""

    def __init__(self, config: ModelConfig, target: Target) -> None:
        self.config, self.target = config, target
        self.states: tuple[int, ...] = (target.config.layers,)
        self.mapped, self.draft_vocab = False, config.vocab_size
        self.unroll: int | None = 1
        self._shapes = [AttentionShape(config.heads, config.kv_heads, config.head_dim, w, config.eps) for w in config.windows]

    def places(self) -> list[Place]:
        found = list(loading.outside(self.config).values())
        return found + [place for i in range(self.config.layers) for place in loading.places(self.config, i).values()]

    def assemble(self, make: Callable[[Place], Any], ids: Tensor | None) -> Weights:
        return loading.assemble(self.config, self.target.dtype, make)

    def use(self, weights: Weights, kernels: TrainingKernels, cos: Tensor, sin: Tensor) -> Matrix:
        self._weights, self._tables = weights, (cos, sin)
        return weights.head.narrow(0, self.target.vocab)

    def parts(
        self, kernels: TrainingKernels, pack: Pack, corpus: Corpus, seen: Seen, steps: int, drawn: Drawn | None
    ) -> Iterator[Part]:
        w, c, total = self._weights, self.config, len(pack.at)
        x = kernels.embed(corpus.ids[pack.at].long(), w.embedding)
        none = [pack.at] * c.layers
        run = kernels.attending(Causal(kernels.operations, pack.begin))
        layers = Layers(w.layers, self._shapes, c.eps, *self._tables, none, none)
        x = one_by_one(run, layers, x, no_pages(pack.position), 0, c.layers)
        bases = torch.arange(len(pack.base), device=pack.at.device)
        for i in range(steps):
            at = (pack.base + 1 + i).clamp(max=total - 1)
            yield Part(kernels.rms_norm(x.index_select(0, at), w.norm, c.eps), bases, i)
