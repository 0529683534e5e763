"""The operations of plain.py in Triton, for CUDA: each norm, gate, rotation, attention, loss and step of the optimiser is one
launch forward and one or two backward. They write no float32 copies of activations. A loss reads a row's logits and the
teacher's from memory once and writes the gradient over the logits. Weights are multiplied in the compute dtype; their gradients
are summed in float32. All of it can be captured in a CUDA graph.
"""

# Triton's functions are untyped: the arguments of a kernel are pointers, numbers and compile-time constants
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated,override"
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from forerun.kernels.cuda_products import power_of_two
from forerun.train.fused_attention import attend as attend
from forerun.train.plain import Scored

ROWS = 1024  # programs that share the rows of a norm's gradient
WHOLE = 16384  # a row of logits up to this long is held in registers
PIECE = 4096  # of a longer one
LEAST = tl.constexpr(-1e30)  # below all logits, and finite


@triton.jit
def norm_kernel(x, norm, out, eps, K, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < K
    value = tl.load(x + row * K + at, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value) / K + eps)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(out.dtype.element_ty)
    tl.store(out + row * K + at, weight * normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_kernel(x, norm, grad, dx, partial, eps, n, K, BLOCK: tl.constexpr):
    """Program i takes the rows i, i + programs, ... and sums their part of the weight's gradient."""
    first, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < K
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(first, n, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * K + at
        value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / K + eps)
        normed = value * scale
        total += g * normed
        weighted = g * weight
        slope = scale * (weighted - normed * (tl.sum(weighted * normed) / K))
        tl.store(dx + here, slope.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + first.to(tl.int64) * K + at, total, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        flat = x.contiguous()
        out, k = torch.empty_like(flat), x.shape[-1]
        norm_kernel[(flat.numel() // k,)](flat, norm, out, eps, k, power_of_two(k), num_warps=4)
        ctx.save_for_backward(flat, norm)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, norm = ctx.saved_tensors
        k = x.shape[-1]
        n, dx = x.numel() // k, torch.empty_like(x)
        partial = torch.empty(min(ROWS, n), k, dtype=torch.float32, device=x.device)
        grid = (len(partial),)
        norm_gradient_kernel[grid](x, norm, grad.contiguous(), dx, partial, ctx.eps, n, k, power_of_two(k), num_warps=4)
        return dx, partial.sum(0).to(norm.dtype), None


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, norm, eps)


@triton.jit
def gate_kernel(both, out, K, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    gate = tl.load(both + row * 2 * K + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * K + K + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * K + at, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_gradient_kernel(both, grad, out, K, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    here = row * 2 * K + at
    gate = tl.load(both + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + here + K, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * K + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = g * up * share * (1 + gate * (1 - share))
    tl.store(out + here, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + here + K, (g * gate * share).to(out.dtype.element_ty), mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        n, k = both.shape[0], both.shape[1] // 2
        out = both.new_empty(n, k)
        gate_kernel[(n, triton.cdiv(k, 1024))](both, out, k, 1024)
        ctx.save_for_backward(both)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        n, k = grad.shape
        out = torch.empty_like(both)
        gate_gradient_kernel[(n, triton.cdiv(k, 1024))](both, grad.contiguous(), out, k, 1024)
        return out


def silu_mul(both: Tensor) -> Tensor:
    return _Gate.apply(both)


@triton.jit
def rotate_kernel(x, positions, cos, sin, out, stride, HEADS, D, SIGN, BLOCK: tl.constexpr):
    """A row of x [N,HEADS,D], whose rows are `stride` apart; SIGN -1 rotates back."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    half = D // 2
    inside = at < HEADS * half
    place = at // half * D + at % half
    table = tl.load(positions + row) * half + at % half
    c = tl.load(cos + table, mask=inside, other=0.0)
    s = tl.load(sin + table, mask=inside, other=0.0) * SIGN
    a = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride + place + half, mask=inside, other=0.0).to(tl.float32)
    to = out + row * HEADS * D + place
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    n, heads, dim = x.shape
    x = x if x.stride()[1:] == (dim, 1) else x.contiguous()
    out = x.new_empty(n, heads, dim)
    rotate_kernel[(n,)](x, positions, cos, sin, out, x.stride(0), heads, dim, sign, power_of_two(heads * dim // 2))
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(positions, cos, sin)
        return _rotated(x, positions, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        positions, cos, sin = ctx.saved_tensors
        return _rotated(grad, positions, cos, sin, -1.0), None, None, None


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotate.apply(x, positions, cos, sin)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(x, values)
        return F.linear(x, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, values = ctx.saved_tensors
        return grad @ values if ctx.needs_input_grad[0] else None, _wide_product(grad.T, x), None


def product(x: Tensor, master: Tensor, values: Tensor) -> Tensor:
    return _Product.apply(x, master, values)


@triton.jit
def _mass(values, top, total):
    """For each place of a block the largest value so far, and the sum of exponentials relative to it."""
    new = tl.maximum(top, values)
    return new, total * tl.exp(top - new) + tl.exp(values - new)


@triton.jit
def _log_sum(top, total):
    """Of all places."""
    most = tl.max(top)
    return most, most + tl.log(tl.sum(total * tl.exp(top - most)))


@triton.jit
def _compared(log_q, log_p):
    """The parts of KL, of the acceptance, and of q where it lies below p."""
    q, p = tl.exp(log_q), tl.exp(log_p)
    return tl.where(p > 0, p * (log_p - log_q), 0.0), tl.minimum(p, q), tl.where(q < p, q, 0.0)


@triton.jit
def loss_kernel(
    logits, teacher, rows, label, weight, mix, loss, acceptance, hit, chance, V, W,
    SOFT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and the gradient over its logits. W: rows of mix. SOFT: there is a teacher. ONE: a block holds the
    whole row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w, own = tl.load(weight + row), tl.load(label + row)
    mine = logits + row * V
    if w <= 0:
        for c in range(0, V, BLOCK):
            tl.store(mine + c + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=c + at < V)
        tl.store(loss + row, 0.0)
        tl.store(acceptance + row, 0.0)
        tl.store(hit + row, 0.0)
        tl.store(chance + row, 0.0)
    else:
        theirs = teacher + tl.load(rows + row).to(tl.int64) * V
        shares = mix + row % W * 4
        kl, tv, nll, hard = tl.load(shares), tl.load(shares + 1), tl.load(shares + 2), tl.load(shares + 3)
        of_label = tl.load(mine + tl.maximum(own, 0)).to(tl.float32)
        away, taken, below = 0.0, 0.0, 0.0
        if ONE:
            s = tl.load(mine + at, mask=at < V, other=-float("inf")).to(tl.float32)
            top = tl.max(s)
            norm = top + tl.log(tl.sum(tl.exp(s - top)))
            if SOFT:
                t = tl.load(theirs + at, mask=at < V, other=-float("inf")).to(tl.float32)
                best = tl.max(t)
                mass = best + tl.log(tl.sum(tl.exp(t - best)))
                away_, taken_, below_ = _compared(s - norm, t - mass)
                away, taken, below = tl.sum(away_), tl.sum(taken_), tl.sum(below_)
        else:
            tops, totals = tl.full([BLOCK], LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
            bests, masses = tl.full([BLOCK], LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
            for c in range(0, V, BLOCK):
                s = tl.load(mine + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
                tops, totals = _mass(s, tops, totals)
                if SOFT:
                    t = tl.load(theirs + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
                    bests, masses = _mass(t, bests, masses)
            top, norm = _log_sum(tops, totals)
            if SOFT:
                best, mass = _log_sum(bests, masses)
                away_, taken_ = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
                below_ = tl.zeros([BLOCK], tl.float32)
                for c in range(0, V, BLOCK):
                    s = tl.load(mine + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
                    t = tl.load(theirs + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
                    away1, taken1, below1 = _compared(s - norm, t - mass)
                    away_, taken_, below_ = away_ + away1, taken_ + taken1, below_ + below1
                away, taken, below = tl.sum(away_), tl.sum(taken_), tl.sum(below_)
        named = (own >= 0).to(tl.float32)
        value = -hard * named * (of_label - norm)
        pull = tv
        if SOFT:
            value += kl * away + tv * (1 - taken) - nll * tl.log(taken)
            pull += nll / taken
        tl.store(loss + row, value * w)
        tl.store(acceptance + row, taken)
        tl.store(hit + row, tl.where((of_label >= top) & (own >= 0), 1.0, 0.0))
        tl.store(chance + row, named * tl.exp(of_label - norm))
        for c in range(0, V, BLOCK):
            if not ONE:
                s = tl.load(mine + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
            q = tl.exp(s - norm)
            g = hard * named * (q - tl.where(c + at == own, 1.0, 0.0))
            if SOFT:
                if not ONE:
                    t = tl.load(theirs + c + at, mask=c + at < V, other=-float("inf")).to(tl.float32)
                p = tl.exp(t - mass)
                g += kl * (q - p) - pull * q * (tl.where(q < p, 1.0, 0.0) - below)
            tl.store(mine + c + at, (g * w).to(logits.dtype.element_ty), mask=c + at < V)


def gradient_in_place(
    logits: Tensor, teacher: Tensor | None, rows: Tensor, label: Tensor, weight: Tensor, mix: Tensor
) -> Scored:
    """The scores of the logits (see plain.head_loss), which become the gradient of the sum of the losses."""
    n, v = logits.shape
    out = Scored(*(torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(4)))
    one = v <= WHOLE
    block, warps = (power_of_two(v), 16 if v > 4096 else 4) if one else (PIECE, 16)
    theirs = logits if teacher is None else teacher
    loss_kernel[(n,)](
        logits, theirs, rows, label, weight, mix, *out, v, len(mix), teacher is not None, one, block, num_warps=warps
    )  # fmt: skip
    return out


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor | None, values: Tensor, teacher: Tensor | None, rows: Tensor, label: Tensor,
        weight: Tensor, mix: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        logits = F.linear(x, values)
        scored = gradient_in_place(logits, teacher, rows, label, weight, mix)
        needed = x.requires_grad or master is not None
        if needed:
            ctx.save_for_backward(logits @ values, None if master is None else _wide_product(logits.T, x))
        ctx.mark_non_differentiable(*scored[1:])
        return tuple(scored)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return (dx * grad[:, None]).to(dx.dtype), None if dw is None else dw * grad[0], *[None] * 6


def head_loss(
    x: Tensor, master: Tensor | None, values: Tensor, teacher: Tensor | None, rows: Tensor, label: Tensor, weight: Tensor,
    mix: Tensor,
) -> Scored:
    return Scored(*_HeadLoss.apply(x, master, values, teacher, rows, label, weight, mix))


@triton.jit
def adamw_kernel(
    master, values, grad, mean, square, now, beta1, beta2, eps, decay, n, COPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    rate, factor, step = tl.load(now), tl.load(now + 1), tl.load(now + 2)
    if factor > 0:
        p = tl.load(master + at, mask=inside)
        g = tl.load(grad + at, mask=inside) * factor
        m = tl.load(mean + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        m += (g - m) * (1 - beta1)
        v += (g * g - v) * (1 - beta2)
        ahead = m / (1 - tl.exp(step * tl.log(beta1))) / (tl.sqrt(v / (1 - tl.exp(step * tl.log(beta2)))) + eps)
        p -= rate * (ahead + decay * p)
        tl.store(master + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        if COPY:
            tl.store(values + at, p.to(values.dtype.element_ty), mask=inside)


def adamw(
    master: Tensor, values: Tensor, grad: Tensor, mean: Tensor, square: Tensor, now: Tensor, betas: tuple[float, float],
    eps: float, decay: float,
) -> None:
    grid = (triton.cdiv(len(master), 1024),)
    copy = values is not master
    adamw_kernel[grid](master, values, grad, mean, square, now, *betas, eps, decay, len(master), copy, 1024, num_warps=4)
