"""The lossless acceptance rules: from a draft and the target's distributions at its k+1 positions to the committed tokens. They
are pure functions of tensors of fixed shape and read nothing back to the host, so a CUDA graph may hold them. They know nothing
of requests or sampling parameters.

In every rule a row drafts its first `size` tokens; the padding past them has no effect.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.types import Draft, Verdict
from forerun.verify.noise import ACCEPT, REDRAW, block_noise, draw
from forerun.verify.sampling import BROKEN


def accept_matching(choice: Tensor, draft: Draft) -> Verdict:
    """Point-mass drafts and no drafts: keep what the target chose itself. choice: [B,K+1], the token drawn from the
    target's distribution at each position (the argmax if greedy), independently of the draft.

    The first choice that differs from the draft replaces it; if none does, the last choice is the bonus token. So a drafted
    x is accepted with probability p(x); otherwise the token is drawn from p without x. That is the rule for point masses. The
    tokens are those that plain decoding with the same noise would have chosen.
    """
    width = draft.tokens.shape[1]
    kept = _run((choice[:, :width] == draft.tokens) & _drafted(draft))
    return Verdict(choice, kept + 1)


def accept_drawn(
    rule: Callable[[Tensor, Draft, Tensor, Tensor], Verdict], target: Tensor, broken: Tensor, draft: Draft, seed: Tensor,
    start: Tensor,
) -> Verdict:
    """Apply a rule for drafts with probabilities (accept_ratio, accept_block) with the noise of each row's own seed.

    target: [B,K+1,V]; broken: [B,K+1] bool, where the target's logits are not finite: nothing is accepted there, and the block
    ends with the token BROKEN; seed: [B]; start: [B], the index of the block's first token.

    The noise depends on where the block starts: a rejected position is drafted again, and its noise must not be used twice. A
    row without a draft is a block of one token, so its draw depends on its request alone.
    """
    width = draft.tokens.shape[1]
    u_accept = block_noise(seed, start, width, ACCEPT)
    u_redraw = block_noise(seed, start, width + 1, REDRAW)
    verdict = rule(torch.where(broken[..., None], 0.0, target), draft, u_accept, u_redraw)
    last = torch.arange(width + 1, device=target.device) == verdict.count[:, None] - 1
    return verdict._replace(tokens=torch.where(last & broken, BROKEN, verdict.tokens))


def accept_ratio(target: Tensor, draft: Draft, u_accept: Tensor, u_redraw: Tensor) -> Verdict:
    """Drafts drawn from draft.probs: accept x while u < p(x)/q(x), then draw from max(p - q, 0), or from p behind a
    draft accepted to its end. [Leviathan et al. 2211.17192; Chen et al. 2302.01318]

    target: [B,K+1,V], the target's distributions; u_accept: [B,K]; u_redraw: [B,K+1], independent of each other and
    of what drew the draft.
    """
    p, q = _at_draft(target, draft)  # [B,K]
    kept = _run((u_accept * q < p) & _drafted(draft))
    return _finish(target, draft, kept, torch.ones_like(u_redraw), u_redraw)


def accept_block(target: Tensor, draft: Draft, u_accept: Tensor, u_redraw: Tensor) -> Verdict:
    """Block verification of drafts drawn from draft.probs: the same output distribution as accept_ratio and never fewer tokens
    on average. Arguments as there; two blocks must not use the same noise, not even at the same position (noise.block_noise).
    [Sun et al. 2403.10444]

    With r_0 = 1 and r_i = min(1, r_{i-1} p_i(x_i)/q_i(x_i)), keep the last i with u_i <= h_i, where
    h_i = R_i/(R_i + 1 - r_i), R_i = sum_x max(r_i p_{i+1}(x) - q_{i+1}(x), 0), and h_i = r_i at the draft's end; then
    draw from max(r_i p_{i+1} - q_{i+1}, 0).
    """
    width = draft.tokens.shape[1]
    p, q = _at_draft(target, draft)
    # with L_i the sum of the first i log ratios, taking min(1, .) at each step gives log r_i = L_i - max(0, L_1, .., L_i)
    walk = (p.log() - q.clamp(min=torch.finfo(q.dtype).tiny).log()).cumsum(-1)
    r = (walk - _running_max(walk).clamp(min=0)).exp()  # [B,K], r_1 .. r_K
    reach = torch.cat((torch.ones_like(r[:, :1]), r), 1) if width else torch.ones_like(u_redraw)  # [B,K+1], r_0 .. r_K
    h = r
    if width > 1:
        assert draft.probs is not None
        left = (r[:, :-1, None] * target[:, 1:width] - draft.probs[:, 1:]).clamp(min=0).sum(-1)  # [B,K-1], R_1 .. R_{K-1}
        inner = torch.where(r[:, :-1] < 1, left / (left + 1 - r[:, :-1]), 1.0)
        last = draft.size[:, None] == torch.arange(1, width, device=r.device)
        h = torch.cat((torch.where(last, r[:, :-1], inner), r[:, -1:]), 1)
    index = torch.arange(1, width + 1, device=target.device)
    stops = torch.where((u_accept <= h) & _drafted(draft), index, 0)
    kept = stops.amax(-1) if width else draft.size * 0
    return _finish(target, draft, kept, reach, u_redraw)


def _drafted(draft: Draft) -> Tensor:
    """Which tokens are drafted and no padding, [B,K] bool."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.size[:, None]


def _run(ok: Tensor) -> Tensor:
    """How many are true before the first false one, [B,K] bool -> [B]."""
    return ok.long().cumprod(-1).sum(-1)


def _running_max(x: Tensor) -> Tensor:
    return x.cummax(-1).values if x.shape[1] else x


def _at_draft(target: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """p(x) and q(x) of the drafted tokens, [B,K] float64 each; padding reads token 0."""
    width = draft.tokens.shape[1]
    assert draft.probs is not None or width == 0, "drafts without probabilities are for accept_matching"
    if draft.probs is None:
        empty = target.new_zeros(target.shape[0], 0, dtype=torch.float64)
        return empty, empty
    token = torch.where(_drafted(draft), draft.tokens, 0)[..., None]
    return target[:, :width].gather(-1, token)[..., 0].double(), draft.probs.gather(-1, token)[..., 0].double()


def _finish(target: Tensor, draft: Draft, kept: Tensor, reach: Tensor, u_redraw: Tensor) -> Verdict:
    """The first `kept` [B] draft tokens and one token drawn behind them: from max(r p - q, 0), r = reach [B,K+1] at that
    position, if a draft token was rejected there, else from p."""
    batch, width = draft.tokens.shape
    vocab = target.shape[-1]
    at = kept[:, None]  # [B,1]
    p = target.gather(1, at[..., None].expand(-1, -1, vocab))[:, 0].double()  # [B,V]
    final = p
    if draft.probs is not None and width:
        q = draft.probs.gather(1, at.clamp(max=width - 1)[..., None].expand(-1, -1, vocab))[:, 0]  # [B,V]
        left = (reach.gather(1, at) * p - q).clamp(min=0)
        # if no mass is left, p = q up to rounding and a rejection has probability 0; p itself is right then
        rejected = (at < draft.size[:, None]) & (left.sum(-1, keepdim=True) > 0)
        final = torch.where(rejected, left, p)
    own = draw(final, u_redraw.gather(1, at)[:, 0])  # [B]
    tokens = torch.cat((draft.tokens, draft.tokens.new_zeros(batch, 1)), 1)
    column = torch.arange(width + 1, device=tokens.device)
    tokens = torch.where(column < at, tokens, torch.where(column == at, own[:, None], 0))
    return Verdict(tokens, kept + 1)
