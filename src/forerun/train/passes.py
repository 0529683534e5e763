"""The forward passes of training, method by method, from a pack to what the vocabulary head is applied to. All methods are
trained at bases (packing.py): step i of base q predicts token q + 2 + i from the target's states up to q and the tokens up to
q + 1 + i, and the target's own distribution for it is that of place q + 1 + i.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.heads.chain import Chain
from forerun.kernels import Batch
from forerun.train.features import Seen
from forerun.train.operations import Behind, Causal, TrainingKernels
from forerun.train.packing import Corpus, Pack


class Part(NamedTuple):
    """What the vocabulary head is applied to, at C bases in W consecutive steps. x: [C*W,H], base by base; base: [C] int64,
    which of the pack's N bases; first: the first of these steps; width: W."""

    x: Tensor
    base: Tensor
    first: int
    width: int = 1


def no_pages(positions: Tensor) -> Batch:
    """A batch for kernels that read positions only."""
    return Batch(positions, positions, positions, positions, None)


def chain_parts(
    head: Chain, kernels: TrainingKernels, pack: Pack, corpus: Corpus, seen: Seen, steps: int
) -> Iterator[Part]:
    """A part of all bases for each step: what a module hands on, behind its norm.

    Each module makes a causal pass over all tokens first, as with committed tokens: step i < modules is at place q + i. Later
    steps are training-time test: the last module again, with its own output for a feature, at the place behind, which attends
    to the pass over all tokens up to place q + modules - 1 and to the later entries of the same base."""
    modules, none = len(head.weights.modules), pack.position
    feature, all_bases = head.with_kernels(kernels).encode(seen.states), torch.arange(len(pack.base), device=pack.base.device)
    everywhere = torch.arange(len(pack.at), device=pack.at.device)
    ids = pack.behind(corpus, everywhere, 1)
    output = first = None
    for module in range(min(modules, steps)):
        first = Causal(kernels.operations, pack.begin)
        run = head.with_kernels(kernels.attending(first))
        embedded = run.embed(ids, pack.position)
        output = run.hand_on(module, run.run(module, embedded, feature, no_pages(pack.position), none, none))
        x = output[(pack.base + module).clamp(max=len(pack.at) - 1)]
        yield Part(normed(head, kernels, module, x), all_bases, module)
        feature = torch.where((pack.position == 0)[:, None], 0, output.roll(1, 0))
    if steps <= modules:
        return
    assert first is not None and output is not None
    reach = pack.base + modules
    behind = Behind(
        kernels.operations, first, torch.where(pack.true, pack.begin[pack.base], len(pack.at)),
        torch.where(pack.true, torch.minimum(reach, pack.end[pack.base]), len(pack.at)),
    )  # fmt: skip
    run = head.with_kernels(kernels.attending(behind))
    x = output[(reach - 1).clamp(max=len(pack.at) - 1)]
    for i in range(modules, steps):
        positions = pack.position[pack.base] + i
        embedded = run.embed(pack.behind(corpus, pack.base, 1 + i), positions)
        x = run.hand_on(modules - 1, run.run(modules - 1, embedded, x, no_pages(positions), none, none))
        yield Part(normed(head, kernels, modules - 1, x), all_bases, i)


def normed(head: Chain, kernels: TrainingKernels, module: int, handed: Tensor) -> Tensor:
    """What the vocabulary head is applied to in Chain.logits."""
    norm = head.weights.modules[module].norm
    if norm is None or head.config.norm_output:
        return handed
    return kernels.rms_norm(handed, norm, head.config.decoder.eps)
