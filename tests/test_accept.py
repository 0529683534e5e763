"""The acceptance rules keep the target's distribution at every position, and the same test rejects the known wrong ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.types import Draft, Verdict
from forerun.verify.accept import accept_block, accept_matching, accept_ratio
from forerun.verify.noise import ACCEPT, CHOOSE, DRAFT, REDRAW, block_noise, draw, uniform
from tests.statistical import PASS, REJECT, chi_square, tally

COUNT = 16_000
SEEDS = torch.arange(COUNT)
RULES = {"ratio": accept_ratio, "block": accept_block}
P, Q = [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]


def noise(purpose: int, width: int, start: int = 10) -> torch.Tensor:
    return block_noise(SEEDS, torch.full((COUNT,), start), width, purpose)


def rows(*dists: list[float]) -> torch.Tensor:
    """The same distributions for every row: [COUNT,len(dists),V]."""
    return torch.tensor(dists, dtype=torch.float32).expand(COUNT, -1, -1)


def full(width: int) -> torch.Tensor:
    return torch.full((COUNT,), width)


# --- the table of right and wrong rules ---------------------------------------------------------------------------


def first_token(variant: str) -> tuple[np.ndarray, float]:
    """Counts of the first token and the acceptance rate under a rule for one drafted token."""
    u, v, w = noise(ACCEPT, 1), noise(REDRAW, 2), noise(DRAFT, 1)
    target, q = rows(P, P), rows(Q)
    sampled = draw(q[:, 0], w[:, 0])[:, None]
    greedy = q.argmax(-1)
    if variant == "right: sampled":
        verdict = accept_ratio(target, Draft(sampled, full(1), q), u, v)
    elif variant == "right: block":
        verdict = accept_block(target, Draft(sampled, full(1), q), u, v)
    elif variant == "wrong: greedy draft, softmax q":
        verdict = accept_ratio(target, Draft(greedy, full(1), q), u, v)
    elif variant in ("wrong: softmax of the residual", "wrong: redraw from p"):
        p, q0 = torch.tensor(P), torch.tensor(Q)
        left = (p - q0).clamp(min=0).softmax(-1) if "softmax" in variant else p
        ok = u[:, 0] < (p / q0)[sampled[:, 0]]
        own = draw(left.expand(COUNT, -1), v[:, 0])
        verdict = Verdict(torch.where(ok, sampled[:, 0], own)[:, None], 1 + ok.long())
    elif variant == "right: greedy draft as a point mass":
        verdict = accept_matching(draw(rows(P)[:, 0], u[:, 0])[:, None].expand(-1, 2), Draft(greedy, full(1)))
    elif variant == "right: sampled draft as a point mass":
        verdict = accept_matching(draw(rows(P)[:, 0], u[:, 0])[:, None].expand(-1, 2), Draft(sampled, full(1)))
    elif variant == "right: point mass with its one-hot probabilities":
        verdict = accept_ratio(target, Draft(greedy, full(1), rows([0.0, 1.0, 0.0])), u, v)
    else:
        raise AssertionError(variant)
    return tally(verdict.tokens[:, 0].numpy(), 3), float((verdict.count - 1).double().mean())


@pytest.mark.parametrize(
    ("variant", "marginal", "acceptance"),
    [
        ("right: sampled", [0.6, 0.3, 0.1], 0.7),
        ("right: block", [0.6, 0.3, 0.1], 0.7),
        ("right: greedy draft as a point mass", [0.6, 0.3, 0.1], 0.3),
        ("right: point mass with its one-hot probabilities", [0.6, 0.3, 0.1], 0.3),
        ("right: sampled draft as a point mass", [0.6, 0.3, 0.1], 0.37),
        ("wrong: greedy draft, softmax q", [0.5, 0.5, 0.0], 0.5),
        ("wrong: softmax of the residual", [0.42304, 0.38848, 0.18848], 0.7),
        ("wrong: redraw from p", [0.48, 0.39, 0.13], 0.7),
    ],
)
def test_table_of_rules(variant: str, marginal: list[float], acceptance: float) -> None:
    counts, rate = first_token(variant)
    assert chi_square(counts, np.array(marginal)) > PASS
    assert abs(rate - acceptance) < 4 * (acceptance * (1 - acceptance) / COUNT) ** 0.5
    if variant.startswith("wrong"):
        assert chi_square(counts, np.array(P)) < REJECT


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_shared_acceptance_noise_biases(rule) -> None:
    p, q = [0.4, 0.4, 0.2], [0.1, 0.1, 0.8]
    tokens = draw(rows(q)[:, 0], noise(DRAFT, 1)[:, 0])[:, None]
    draft, u = Draft(tokens, full(1), rows(q)), noise(ACCEPT, 1)
    wrong = rule(rows(p, p), draft, u, u.expand(-1, 2))
    right = rule(rows(p, p), draft, u, noise(REDRAW, 2))
    assert torch.equal(wrong.count, right.count)  # the rate does not tell
    counts = tally(wrong.tokens[:, 0].numpy(), 3)
    assert chi_square(counts, np.array([0.3, 0.5, 0.2])) > PASS
    assert chi_square(counts, np.array(p)) < REJECT
    assert chi_square(tally(right.tokens[:, 0].numpy(), 3), np.array(p)) > PASS


def test_shared_gumbel_noise_biases() -> None:
    p, q = torch.tensor([0.45, 0.35, 0.2]), torch.tensor([0.3, 0.05, 0.65])
    gumbel = -(-torch.stack([uniform(SEEDS, torch.tensor(i), DRAFT) for i in range(3)], -1).log()).log()
    tokens = (q.log() + gumbel).argmax(-1)
    ok = noise(ACCEPT, 1)[:, 0] < (p / q)[tokens]
    own = ((p - q).clamp(min=0).log() + gumbel).argmax(-1)
    counts = tally(torch.where(ok, tokens, own).numpy(), 3)
    assert chi_square(counts, np.array([0.4, 0.4, 0.2])) > PASS
    assert chi_square(counts, p.numpy()) < REJECT


def test_shared_draft_and_redraw_noise_biases() -> None:
    p, q = [0.4, 0.4, 0.2], [0.1, 0.1, 0.8]
    w = noise(DRAFT, 1)
    draft = Draft(draw(rows(q)[:, 0], w[:, 0])[:, None], full(1), rows(q))
    wrong = accept_ratio(rows(p, p), draft, noise(ACCEPT, 1), w.expand(-1, 2))
    assert chi_square(tally(wrong.tokens[:, 0].numpy(), 3), np.array(p)) < REJECT


def test_a_rejected_point_mass_is_struck_out() -> None:
    choice = draw(rows(P)[:, 0], noise(CHOOSE, 1)[:, 0])[:, None].expand(-1, 2)
    verdict = accept_matching(choice, Draft(torch.zeros(COUNT, 1, dtype=torch.int64), full(1)))
    rejected = verdict.tokens[verdict.count == 1][:, 0].numpy()
    assert chi_square(tally(rejected, 3), np.array([0, 0.75, 0.25])) > PASS


# --- every position of a block, and of many blocks ------------------------------------------------------------------

CHAIN_P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.1, 0.8]])
CHAIN_Q = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.1]])


def chain(rule: str, length: int, widths: tuple[int, ...] = (3,), keyed: str = "block") -> tuple[np.ndarray, float]:
    """Generate `length` tokens of the Markov chain CHAIN_P from token 0 for every seed, drafting with CHAIN_Q; the number of
    drafted tokens goes round in widths. Returns the tokens [COUNT,length] and the mean tokens of a step."""
    done, out = torch.zeros(COUNT, dtype=torch.int64), torch.zeros(COUNT, 1 + length + max(widths) + 1, dtype=torch.int64)
    steps = given = 0
    line = torch.arange(COUNT)
    for turn in itertools.count():
        live = done < length
        if not live.any():
            return out[:, 1 : length + 1].numpy(), given / steps
        k = widths[turn % len(widths)]

        def u(purpose: int, width: int, start: torch.Tensor = done) -> torch.Tensor:
            if keyed == "block":
                return block_noise(SEEDS, start, width, purpose)
            return uniform(SEEDS[:, None], start[:, None] + torch.arange(width), purpose)

        last, drafts, q = out[line, done], [], []
        w = u(DRAFT, k)
        for i in range(k):
            q.append(CHAIN_Q[last])
            last = draw(q[-1], w[:, i])
            drafts.append(last)
        tokens = torch.stack([out[line, done], *drafts], 1)  # [COUNT,k+1]
        target = CHAIN_P[tokens]  # [COUNT,k+1,4]
        draft = Draft(tokens[:, 1:], full(k), torch.stack(q, 1) if k else None)
        if rule == "matching":
            c = uniform(SEEDS[:, None], done[:, None] + torch.arange(k + 1), CHOOSE)
            verdict = accept_matching(draw(target.flatten(0, 1), c.flatten()).view(COUNT, k + 1), draft._replace(probs=None))
        else:
            verdict = RULES[rule](target, draft, u(ACCEPT, k), u(REDRAW, k + 1))
        column = torch.arange(k + 1)
        use = live[:, None] & (column < verdict.count[:, None])
        at = 1 + done[:, None] + column
        out[line[:, None].expand(-1, k + 1)[use], at[use]] = verdict.tokens[use]
        steps, given = steps + int(live.sum()), given + int(verdict.count[live].sum())
        done = torch.where(live, done + verdict.count, done)


def exact(length: int) -> np.ndarray:
    """The probability of each sequence of the chain, [4]*length."""
    p = CHAIN_P.double().numpy()
    joint = p[0]
    for _ in range(length - 1):
        joint = joint[..., None] * p
    return joint


def sequence_test(tokens: np.ndarray) -> float:
    length = tokens.shape[1]
    return chi_square(tally(np.ravel_multi_index(tuple(tokens.T), (4,) * length), 4**length), exact(length))


@pytest.mark.parametrize("rule", ["ratio", "block", "matching"])
@pytest.mark.parametrize("widths", [(3,), (2, 0, 4, 1)], ids=str)
def test_sequences_over_many_blocks_have_the_targets_distribution(rule: str, widths: tuple[int, ...]) -> None:
    tokens, _ = chain(rule, 4, widths)
    for position in range(4):
        marginal = exact(4).sum(tuple(i for i in range(4) if i != position))
        assert chi_square(tally(tokens[:, position], 4), marginal) > PASS
    assert sequence_test(tokens) > PASS


def test_block_verification_must_not_meet_the_same_noise_again() -> None:
    """Noise keyed by position alone comes back when a rejected position is drafted anew; under block verification it
    had a say in the rejection. The rule of one token at a time never looks past its first rejection."""
    assert sequence_test(chain("block", 4, (6,), keyed="position")[0]) < REJECT
    assert sequence_test(chain("ratio", 4, (6,), keyed="position")[0]) > PASS


def test_matching_gives_the_tokens_of_plain_decoding() -> None:
    plain, _ = chain("matching", 6, (0,))
    for widths in ((1,), (4,), (2, 0, 3)):
        assert np.array_equal(chain("matching", 6, widths)[0], plain)


def test_block_is_never_shorter_and_here_longer() -> None:
    assert chain("block", 4)[1] > chain("ratio", 4)[1] + 0.02
    for seed in range(20):
        generator = np.random.default_rng(seed)
        target, q = generator.dirichlet(np.ones(3), 4), generator.dirichlet(np.ones(3), 3)
        assert expected_length(target, q, "block") >= expected_length(target, q, "ratio") - 1e-12


def test_block_on_the_example_with_known_lengths() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted one at a time, 11/9 as a block."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    for name, want in (("ratio", 10 / 9), ("block", 11 / 9)):
        assert abs(expected_length(np.array([p] * 3), np.array([q] * 2), name) - want) < 1e-12
        tokens = torch.stack([draw(rows(q)[:, 0], noise(DRAFT, 2)[:, i]) for i in range(2)], 1)
        verdict = RULES[name](rows(p, p, p), Draft(tokens, full(2), rows(q, q)), noise(ACCEPT, 2), noise(REDRAW, 3))
        assert abs((verdict.count - 1).double().mean() - want) < 4 * 0.9 / COUNT**0.5


# --- against the definition, one row and one token at a time --------------------------------------------------------


def stop_chances(p: np.ndarray, q: np.ndarray, x: list[int], rule: str) -> list[float]:
    """h_1 .. h_k of block verification, or the acceptance probability of each token."""
    if rule == "ratio":
        return [min(1.0, p[i][t] / q[i][t]) for i, t in enumerate(x)]
    h, r = [], 1.0
    for i, t in enumerate(x):
        r = min(1.0, r * p[i][t] / q[i][t])
        if i == len(x) - 1:
            h.append(r)
        else:
            left = sum(max(r * a - b, 0.0) for a, b in zip(p[i + 1], q[i + 1], strict=True))
            h.append(1.0 if r == 1.0 else left / (left + 1 - r))
    return h


def by_definition(p: np.ndarray, q: np.ndarray, x: list[int], u: np.ndarray, v: np.ndarray, rule: str) -> list[int]:
    h, kept = stop_chances(p, q, x, rule), 0
    if rule == "ratio":
        while kept < len(x) and u[kept] < h[kept]:
            kept += 1
    else:
        kept = max([i + 1 for i in range(len(x)) if u[i] <= h[i]], default=0)
    r = 1.0
    for i in range(kept if rule == "block" else 0):
        r = min(1.0, r * p[i][x[i]] / q[i][x[i]])
    final = p[kept] if kept == len(x) else np.maximum(r * p[kept] - q[kept], 0)
    if final.sum() <= 0:
        final = p[kept]
    total = np.cumsum(final)
    return [*x[:kept], int(np.argmax(total > v[kept] * total[-1]))]


def expected_length(p: np.ndarray, q: np.ndarray, rule: str) -> float:
    """The exact mean number of accepted tokens, over all drafts."""
    mean = 0.0
    for x in itertools.product(range(p.shape[1]), repeat=len(q)):
        h = stop_chances(p, q, list(x), rule)
        if rule == "ratio":
            length = sum(np.prod(h[: i + 1]) for i in range(len(h)))
        else:
            length = sum((i + 1) * h[i] * np.prod([1 - b for b in h[i + 1 :]]) for i in range(len(h)))
        mean += length * np.prod([q[i][t] for i, t in enumerate(x)])
    return float(mean)


Case = tuple[torch.Tensor, Draft, torch.Tensor, torch.Tensor]


def random_case(seed: int, batch: int = 40, width: int = 4, vocab: int = 6) -> Case:
    g = np.random.default_rng(seed)
    p = g.dirichlet(np.full(vocab, 0.6), (batch, width + 1))
    p[::5] = np.eye(vocab)[p[::5].argmax(-1)]  # greedy rows among the others
    q = g.dirichlet(np.full(vocab, 0.6), (batch, width))
    q[1::5] = p[1::5, :width]  # the target as its own drafter
    size = g.integers(0, width + 1, batch)
    tokens = np.array([[g.choice(vocab, p=q[b, i] / q[b, i].sum()) for i in range(width)] for b in range(batch)])
    past = np.arange(width) >= size[:, None]
    tokens[past], q[past] = 10**6, (np.nan, 0.0, 1 / vocab)[seed % 3]  # padding that would show
    u, v = torch.tensor(g.random((batch, width))), torch.tensor(g.random((batch, width + 1)))
    return torch.tensor(p).float(), Draft(torch.tensor(tokens), torch.tensor(size), torch.tensor(q).float()), u, v


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_against_the_definition_row_by_row(rule: str, seed: int) -> None:
    p, draft, u, v = random_case(seed)
    verdict = RULES[rule](p, draft, u, v)
    for b in range(len(p)):
        size = int(draft.size[b])
        q, x = draft.probs[b, :size].double().numpy(), draft.tokens[b, :size].tolist()
        want = by_definition(p[b].double().numpy(), q, x, u[b].numpy(), v[b].numpy(), rule)
        assert verdict.tokens[b, : int(verdict.count[b])].tolist() == want


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_the_batch_or_its_padding(rule: str) -> None:
    p, draft, u, v = random_case(99)
    together = RULES[rule](p, draft, u, v)
    for b in range(len(p)):
        k = int(draft.size[b])
        own = slice(b, b + 1)
        mine = Draft(draft.tokens[own, :k], draft.size[own], draft.probs[own, :k])
        alone = RULES[rule](p[own, : k + 1], mine, u[own, :k], v[own, : k + 1])
        count = int(together.count[b])
        assert int(alone.count) == count and torch.equal(alone.tokens[0, :count], together.tokens[b, :count])


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_keep_the_argmax_and_nothing_else(rule: str) -> None:
    p, draft, u, v = random_case(5, batch=200)
    verdict = RULES[rule](p, draft, u, v)
    best = p.argmax(-1)
    matching = accept_matching(best, draft._replace(probs=None))
    for b in range(0, 200, 5):
        count = int(matching.count[b])
        assert int(verdict.count[b]) == count
        assert torch.equal(verdict.tokens[b, :count], matching.tokens[b, :count])


@pytest.mark.parametrize("rule", RULES)
def test_the_target_as_its_own_drafter_is_accepted_whole(rule: str) -> None:
    p, draft, u, v = random_case(7, batch=300)
    mine = torch.arange(300) % 5 == 1
    assert torch.equal(RULES[rule](p, draft, u, v).count[mine], draft.size[mine] + 1)


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_is_one_token_of_the_target(rule: str) -> None:
    empty = torch.zeros(COUNT, 0, dtype=torch.int64)
    for probs in (None, torch.zeros(COUNT, 0, 3)):
        verdict = RULES[rule](rows(P), Draft(empty, full(0), probs), noise(ACCEPT, 0), noise(REDRAW, 1))
        assert verdict.tokens.shape == (COUNT, 1) and (verdict.count == 1).all()
        assert torch.equal(verdict.tokens[:, 0], draw(rows(P)[:, 0], noise(REDRAW, 1)[:, 0]))
    choice = torch.full((COUNT, 1), 2)
    assert torch.equal(accept_matching(choice, Draft(empty, full(0))).tokens, choice)


def test_ratio_refuses_drafts_without_probabilities() -> None:
    with pytest.raises(AssertionError):
        accept_ratio(rows(P, P), Draft(torch.zeros(COUNT, 1, dtype=torch.int64), full(1)), noise(ACCEPT, 1), noise(REDRAW, 2))


def test_zero_probability_is_never_accepted_nor_drawn() -> None:
    p, q = [0.5, 0.5, 0.0, 0.0], [0.1, 0.1, 0.4, 0.4]
    tokens = torch.stack([draw(rows(q)[:, 0], noise(DRAFT, 2)[:, i]) for i in range(2)], 1)
    for rule in RULES.values():
        verdict = rule(rows(p, p, p), Draft(tokens, full(2), rows(q, q)), noise(ACCEPT, 2), noise(REDRAW, 3))
        emitted = verdict.tokens[torch.arange(3) < verdict.count[:, None]]
        assert emitted.max() < 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_never_past_the_size_and_never_the_padding(data: st.DataObject) -> None:
    batch, width, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    p, draft, u, v = random_case(data.draw(st.integers(0, 10**6)), batch, width, vocab)
    matching = accept_matching(p.argmax(-1), draft._replace(probs=None))
    for verdict in (accept_ratio(p, draft, u, v), accept_block(p, draft, u, v), matching):
        assert verdict.tokens.shape == (batch, width + 1) and verdict.count.shape == (batch,)
        assert ((verdict.count >= 1) & (verdict.count <= draft.size + 1)).all()
        valid = torch.arange(width + 1) < verdict.count[:, None]
        assert verdict.tokens[valid].max() < vocab and verdict.tokens.min() >= 0
        kept = torch.arange(width) < (verdict.count - 1)[:, None]
        assert torch.equal(verdict.tokens[:, :width][kept], draft.tokens[kept])


def test_cuda_graph_holds_every_rule() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    p, draft, u, v = random_case(11)
    want = {name: rule(p, draft, u, v) for name, rule in RULES.items()}
    p, u, v, draft = p.cuda(), u.cuda(), v.cuda(), Draft(*(x.cuda() for x in draft))
    for name, rule in RULES.items():
        rule(p, draft, u, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verdict = rule(p, draft, u, v)
        graph.replay()
        assert torch.equal(verdict.count.cpu(), want[name].count)
        valid = torch.arange(verdict.tokens.shape[1]) < want[name].count[:, None]
        assert torch.equal(verdict.tokens.cpu()[valid], want[name].tokens[valid])
