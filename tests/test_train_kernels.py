"""The operations of training in Triton against those in plain torch, forward and backward: on the GPU where there is one, else
under Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions and ours are defined, at the imports below
pytest.importorskip("triton", reason="the CUDA kernels are written in Triton, which is not installed")

from forerun.models import rope
from forerun.models.config import Rope
from forerun.train import fused, plain
from forerun.train.heads import Trainer
from forerun.train.plain import Extra
from forerun.train.settings import Settings
from tests.test_cuda_kernels import DEVICE, DTYPE, interpreter_that_numpy_allows  # noqa: F401  (a fixture for all tests here)
from tests.tiny_training import head_config, samples, tiny_target

EPS = 1e-5
COARSE = {torch.bfloat16: 3}.get(DTYPE, 1)  # bfloat16, on a GPU, rounds to 8 bits; float16, in the interpreter, to 11


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DTYPE).to(DEVICE)


def both(function: str, *given, bound: float = 4e-3) -> None:
    """Compare outputs and gradients of an operation. Floating tensors get gradients, tuples are Extra; the plain one computes
    in float32."""
    found = []
    for module in (fused, plain):
        wide = module is plain

        def ready(x, wide=wide):
            if isinstance(x, tuple):
                return Extra(*(ready(part) for part in x))
            if isinstance(x, Tensor) and x.dtype == DTYPE:
                return (x.float() if wide else x.clone()).requires_grad_()
            return x

        args = [ready(x) for x in given]
        out = getattr(module, function)(*args)
        weight = random(*out.shape, seed=99)
        leaves = [leaf for x in args for leaf in (x if isinstance(x, tuple) else (x,))]
        leaves = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found.append((out, *torch.autograd.grad((out.float() * weight.float()).sum(), leaves)))
    for name, got, want in zip(("output", *(f"gradient {i}" for i in range(9))), *found, strict=False):
        assert got.shape == want.shape
        difference = float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
        assert difference < bound, f"{name} differs by {difference:.2e}"


@pytest.mark.parametrize("shape", [(5, 72), (3, 4, 32)])
def test_norm(shape: tuple[int, ...]) -> None:
    both("rms_norm", random(*shape), 1 + 0.2 * random(shape[-1], seed=1), EPS)


def test_gate() -> None:
    both("silu_mul", random(5, 2 * 72))


def test_rotation_of_a_part_of_each_row() -> None:
    cos, sin = rope.tables(Rope(), 32, 50, DEVICE)
    positions = torch.tensor([0, 1, 7, 49, 3], device=DEVICE)
    for first in (0, 3):
        x = random(5, 6, 32)[:, first : first + 3]
        want = plain.rotate(x.float(), positions, cos, sin)
        got = fused.rotate(x, positions, cos, sin)
        assert (got.float() - want).norm() < 2e-3 * want.norm()
    both("rotate", random(5, 3, 32), positions, cos, sin)


@pytest.mark.parametrize("extra", [0, 3])
def test_attention_to_ranges(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of several lengths, one without bases; queries at a part of the places; padding behind them; tiles that hold the
    ends of samples."""
    monkeypatch.setattr("forerun.train.fused_attention.TILE", 16)
    lengths, total = [21, 5, 17, 3], 64
    lo, hi = [], []
    for i, length in enumerate(lengths):
        begin = sum(lengths[:i])
        for at in range(length // 3, length if i != 1 else 0):
            lo.append(begin)
            hi.append(begin + at + 1)
    lo, hi = (torch.tensor(x + [total] * 4, device=DEVICE) for x in (lo, hi))
    heads = [random(len(lo), 4, 32), random(total, 2, 32, seed=1), random(total, 2, 32, seed=2)]
    own = tuple(random(len(lo), extra, 2, 32, seed=seed) for seed in (3, 4)) if extra else None
    both("attend", *heads, lo, hi, own)
    if not extra:
        assert not bool(fused.attend(*heads, lo, hi, None)[-4:].any())


MIXES = {
    "kl": (1, 0, 0, 0), "tv": (0, 1, 0, 0), "lk": (0.3, 0.7, 0, 0), "nll": (0, 0, 1, 0), "hard": (0, 0, 0, 1),
    "all": (0.5, 0.2, 0.3, 0.4),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("whole", [True, False])
def test_losses_and_their_gradient(mix: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient by hand is that of autograd; rows in one block and in several; rows without weight or label."""
    if not whole:
        monkeypatch.setattr(fused, "WHOLE", 10)
        monkeypatch.setattr(fused, "PIECE", 32)
    rows, vocab = torch.tensor([0, 2, 1, 3, 3, 4], device=DEVICE), 100
    given = torch.tensor([MIXES[mix], MIXES["hard" if mix == "hard" else "kl"]], dtype=torch.float32, device=DEVICE)
    logits, teacher = random(6, vocab, scale=2.0), random(5, vocab, seed=1, scale=2.0)
    label = torch.tensor([3, 99, -1, 0, 7, int(logits[5].argmax())], device=DEVICE)
    weight = torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0, 1.0], device=DEVICE)
    theirs = None if mix == "hard" else teacher
    leaf = logits.float().requires_grad_()
    want = plain.score(leaf, theirs, rows, label, given)
    gradient = torch.autograd.grad((want.loss * weight).sum(), leaf)[0]
    got = fused.gradient_in_place(mine := logits.clone(), theirs, rows, label, weight, given)
    assert (mine.double() - gradient.double()).norm() < 2e-3 * COARSE * gradient.double().norm()
    assert not bool(mine[3].any())
    on = weight > 0
    torch.testing.assert_close(got.loss, (want.loss * weight).detach(), atol=1e-5, rtol=1e-4)
    for name in ("acceptance", "hit", "chance"):
        torch.testing.assert_close(getattr(got, name)[on], getattr(want, name)[on], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_head_and_loss(learned: bool) -> None:
    """Through the product: gradients of its input, and of the vocabulary head if it learns."""
    mix = torch.tensor([MIXES["lk"]], device=DEVICE)
    rows, label = torch.tensor([1, 0, 2, 2], device=DEVICE), torch.tensor([5, 6, -1, 8], device=DEVICE)
    weight, found = torch.tensor([0.5, 1.0, 0.0, 2.0], device=DEVICE), []
    x, head, teacher = random(4, 32), random(90, 32, seed=1, scale=0.4), random(3, 90, seed=2, scale=2.0)
    for module, dtype in ((fused, DTYPE), (plain, torch.float32)):
        inner, master = x.to(dtype).clone().requires_grad_(), head.float().requires_grad_()
        given = (master if learned else None, head.to(dtype), teacher.to(dtype), rows, label, weight, mix)
        scored = module.head_loss(inner, *given)
        found.append((scored.loss.detach(), *torch.autograd.grad(scored.loss.sum(), [inner, master][: 1 + learned])))
    for got, want in zip(*found, strict=True):
        assert (got.double() - want.double()).norm() < 1e-2 * COARSE * want.double().norm()


def test_product_sums_its_gradient_in_float32() -> None:
    x, head = random(6, 32), random(40, 32, seed=1)
    master, inner = head.float().requires_grad_(), x.clone().requires_grad_()
    out = fused.product(inner, master, head)
    dx, dw = torch.autograd.grad(out.float().sum(), [inner, master])
    assert dw.dtype == torch.float32
    torch.testing.assert_close(dw, x.float().sum(0).expand(40, -1), atol=1e-4, rtol=1e-4)
    assert (dx.float() - head.float().sum(0)).norm() < 1e-2 * head.float().sum(0).norm() * 6**0.5


def test_optimiser() -> None:
    """Three steps, the third with a factor of 0, and torch's own for comparison."""
    start, grads = torch.randn(2000), torch.randn(3, 2000)
    reference = start.clone().requires_grad_()
    optimiser = torch.optim.AdamW([reference], 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1)
    for grad in grads[:2]:
        reference.grad = grad * 0.5
        optimiser.step()
    for module in (plain, fused):
        master, mean, square, gradient = (torch.zeros(2000, device=DEVICE) for _ in range(4))
        master.copy_(start)
        values = master.to(DTYPE)
        for step, grad in enumerate(grads, 1):
            gradient.copy_(grad)
            now = torch.tensor([1e-2, 0.5 * (step < 3), step], device=DEVICE)
            module.adamw(master, values, gradient, mean, square, now, (0.9, 0.95), 1e-8, 0.1)
        torch.testing.assert_close(master.cpu(), reference.detach(), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(values, master.to(DTYPE))


@pytest.mark.parametrize("kind", ["eagle3 mapped", "dflash", "mtp of 2", "eagle", "draft"])
def test_a_whole_step(kind: str, tmp_path: Path) -> None:
    """A step with these operations is that in plain torch, in float32."""
    if DEVICE == "cpu" and kind not in ("eagle3 mapped", "dflash"):
        pytest.skip("the interpreter takes seconds for each")
    target = tiny_target(tmp_path, torch.float32, DEVICE)
    given, found = samples(target, 2, most=10), []
    for module in (fused, plain):
        settings = Settings(steps=4, tokens=64, unroll=2, loss="lk", anchors=4, pace=0.5 if kind == "dflash" else None)
        it = Trainer(target, head_config(target, kind), given, given, settings, operations=module, graphs=False)
        it.step()
        found.append((it.parameters.grad, it.parameters.master, it.metrics()))
    (got, after, metrics), (want, want_after, want_metrics) = found
    assert (got - want).norm() < 1e-3 * want.norm()
    torch.testing.assert_close(after, want_after, atol=2e-5, rtol=1e-3)
    for a, b in zip(metrics, want_metrics, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4) and a.acceptance == pytest.approx(b.acceptance, rel=1e-4)
        assert a.accuracy == pytest.approx(b.accuracy, abs=1e-6) and a.norm == pytest.approx(b.norm, rel=1e-3)
