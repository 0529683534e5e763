"""The settings of training."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.checks import Choice, Number, Seed, Whole, convert, setting
from forerun.types import require

LOSSES = ("kl", "lk", "nll", "hard")
OPTIMIZERS = ("adamw", "muon")
MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """How a head is trained.

    steps: of the optimiser. tokens: of a step, prompts included. rate: the highest learning rate, reached after `warm_up` of
    the steps and lowered by a cosine to `final` times itself. optimizer: muon: matrices of layers by Muon, scaled so that the
    rate means the same, all else by AdamW. betas, eps, weight_decay: of AdamW. clip: the largest norm of a
    gradient.
    unroll: steps of training-time test (EAGLE: 1 by default; DFlash: block_size - 1 always; a draft model: 1 always); fade: the
    weight of step i is fade^i. None: 5.
    loss: kl: the target's distribution over the draft vocabulary; lk: w KL + (1 - w) TV with w = exp(-lk_rate * acceptance)
    [2602.23881]; nll: -log of the acceptance; hard: cross-entropy of the target's likeliest token. loss_temperature: of
    distributions in the loss; below 1 likely tokens count more.
    pace: DFlash: D-PACE, weights of positions that follow how likely the block was right up to there, with this for a; None:
    fade. anchors: DFlash: blocks of a step; None: a quarter of the bases. noise: EAGLE: features get uniform noise up to this.
    seed: of initial values, order and noise.
    feature_memory: bytes that the target's states may take; what needs more is computed again in each step. None: on a GPU
    three quarters of what is free, on a CPU a quarter."""

    steps: int = setting(1000, Whole(1, MOST, 1000))
    tokens: int = setting(15360, Whole(64, MOST, 15360))
    optimizer: str = setting("muon", Choice(OPTIMIZERS))
    rate: float = setting(2e-3, Number(0, 1, 2e-3, above=True))
    warm_up: float = setting(0.03, Number(0, 1, 0.03))
    final: float = setting(0.0, Number(0, 1, 0.0))
    beta1: float = setting(0.9, Number(0, 1, 0.9))
    beta2: float = setting(0.95, Number(0, 1, 0.95))
    eps: float = setting(1e-8, Number(0, 1, 1e-8, above=True))
    weight_decay: float = setting(0.0, Number(0, 1, 0.0))
    clip: float = setting(0.5, Number(0, 1e9, 0.5, above=True))
    unroll: int | None = setting(None, Whole(1, 32, 5), none=True)
    fade: float = setting(0.8, Number(0, 1, 0.8, above=True))
    loss: str = setting("lk", Choice(LOSSES))
    loss_temperature: float = setting(1.0, Number(0.01, 100, 0.7))
    lk_rate: float = setting(3.0, Number(0, 100, 3.0))
    pace: float | None = setting(None, Number(0, 1, 0.5), none=True)
    anchors: int | None = setting(None, Whole(1, MOST, 1024), none=True)
    noise: float = setting(0.1, Number(0, 1e6, 0.1))
    seed: int = setting(0, Seed())
    feature_memory: int | None = setting(None, Whole(0, 1 << 50, 1 << 36), none=True)

    def __post_init__(self) -> None:
        convert(self)
        require(self.beta1 < 1 and self.beta2 < 1, "betas", (self.beta1, self.beta2), "give values below 1, for instance 0.95")
