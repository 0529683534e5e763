"""The operations of training in plain torch, with gradients by autograd, for any device and dtype. fused.py has the same in
Triton; it is tested against these. Nothing here is tuned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import reference

QUERIES = 128  # queries that attend at a time
KL, TV, NLL, HARD = range(4)  # the places in a mix of losses, see `score`


class Extra(NamedTuple):
    """Keys and values that a query has for itself.  Both [N,E,kv_heads,D]"""

    keys: Tensor
    values: Tensor


class Scored(NamedTuple):
    """Of each row: loss (with gradient), acceptance: sum over v of min(p_v,q_v), 0 without a teacher; hit: 1 where the label is
    the likeliest; chance: the probability of the label.  All [N] float32"""

    loss: Tensor
    acceptance: Tensor
    hit: Tensor
    chance: Tensor


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return reference.rms_norm(x, norm.to(x.dtype), eps)


def silu_mul(both: Tensor) -> Tensor:
    """silu(g) * u of [g,u].  [N,2I] -> [N,I]"""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N,heads,D]; cos, sin: the tables [P,D/2] float32."""
    return reference.rotate(x, cos[positions], sin[positions])


def product(x: Tensor, master: Tensor, values: Tensor) -> Tensor:
    """x @ values.T, where values are the master's in the compute dtype; the master gets the gradient.  [N,I] -> [N,O]"""
    return F.linear(x, master.to(values.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, extra: Extra | None) -> Tensor:
    """Attention of queries to ranges of keys. Query n sees the keys lo[n] .. hi[n] - 1 and its own extra keys; without any it
    gives zeros. Both lo and hi ascend.
    q: [N,heads,D]; k, v: [T,kv_heads,D]; lo, hi: [N] int64 -> [N,heads,D]"""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    out = []
    for at in range(0, len(q), QUERIES):
        query, first, last = q[at : at + QUERIES], lo[at : at + QUERIES], hi[at : at + QUERIES]
        some = last > first
        begin, end = (int(first[some].min()), int(last[some].max())) if bool(some.any()) else (0, 0)
        keys, values = (t[begin:end].repeat_interleave(group, 1) for t in (k, v))
        place = torch.arange(begin, end, device=q.device)
        seen = (place >= first[:, None]) & (place < last[:, None])  # [n,t]
        scores = (torch.einsum("nhd,thd->nht", query, keys).float() * scale).masked_fill(~seen[:, None], -torch.inf)
        if extra is not None:
            own, theirs = (t[at : at + QUERIES].repeat_interleave(group, 2) for t in extra)
            scores = torch.cat((scores, torch.einsum("nhd,nehd->nhe", query, own).float() * scale), -1)
        elif not bool(some.all()):
            scores = torch.where(some[:, None, None], scores, 0.0)
        share = scores.softmax(-1)
        if extra is None:
            share = share * some[:, None, None]
        share = share.to(q.dtype)
        mixed = torch.einsum("nht,thd->nhd", share[..., : end - begin], values)
        if extra is not None:
            mixed = mixed + torch.einsum("nhe,nehd->nhd", share[..., end - begin :], theirs)
        out.append(mixed)
    return torch.cat(out)


def score(logits: Tensor, teacher: Tensor | None, rows: Tensor, label: Tensor, mix: Tensor) -> Scored:
    """The losses of rows of logits. p: softmax of a row of the teacher, q: softmax of the logits.
    logits: [N,V]; teacher: [M,V]; rows: [N] int64, the teacher's row of each; label: [N] int64, -1: none
    mix: [W,4] float32, how much of each loss, row n takes n % W: KL (soft cross-entropy has the same gradient); TV:
    1 - acceptance; NLL: -log of the acceptance; HARD: cross-entropy of the label"""
    shares = mix.repeat(len(logits) // len(mix), 1).T
    log_q = logits.float().log_softmax(-1)
    known = label.clamp(min=0)[:, None]
    of_label = log_q.gather(1, known)[:, 0]
    hit = (of_label >= log_q.amax(-1)) & (label >= 0)
    loss, acceptance = -shares[HARD] * of_label * (label >= 0), torch.zeros_like(of_label)
    if teacher is not None:
        log_p = teacher[rows].float().log_softmax(-1)
        p = log_p.exp()
        acceptance = torch.minimum(p, log_q.exp()).sum(-1)
        kl = (p * (log_p - log_q)).sum(-1)
        loss = loss + shares[KL] * kl + shares[TV] * (1 - acceptance) - shares[NLL] * acceptance.log()
    return Scored(loss, acceptance.detach(), hit.float(), (of_label.exp() * (label >= 0)).detach())


def head_loss(
    x: Tensor, master: Tensor | None, values: Tensor, teacher: Tensor | None, rows: Tensor, label: Tensor, weight: Tensor,
    mix: Tensor,
) -> Scored:
    """`score` of the logits x @ values.T, the loss times weight [N]. master: of values, None: they do not learn. With a master,
    the gradient of the loss must be the same for all rows.  x: [N,H]; values: [V,H]"""
    logits = F.linear(x, values if master is None else master.to(values.dtype))
    scored = score(logits, teacher, rows, label, mix)
    return scored._replace(loss=torch.where(weight > 0, scored.loss * weight, 0.0))


def adamw(
    master: Tensor, values: Tensor, grad: Tensor, mean: Tensor, square: Tensor, now: Tensor, betas: tuple[float, float],
    eps: float, decay: float,
) -> None:
    """One step of AdamW [Loshchilov, Hutter 1711.05101] in place. master, mean, square: [P] float32; values: [P] gets the
    master in its own dtype (it may be the master itself). now: [3] float32: learning rate; factor of the gradient; steps made,
    this one included. A factor of 0 leaves everything as it is."""
    rate, factor, step = now.unbind()
    on = factor > 0
    clipped = torch.where(on, grad * factor, 0.0)
    first, second = (torch.where(on, 1 - beta, 0.0) for beta in betas)
    mean += (clipped - mean) * first
    square += (clipped * clipped - square) * second
    ahead = mean / (1 - betas[0] ** step) / ((square / (1 - betas[1] ** step)).sqrt() + eps) + decay * master
    master -= torch.where(on, rate, 0.0) * ahead
    if values is not master:
        values.copy_(master)
