"""The numbers are uniform, independent and the same everywhere; the draw never leaves the distribution's support."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forerun.verify.noise import (
    ACCEPT,
    CHOOSE,
    DRAFT,
    REDRAW,
    block_noise,
    child_seed,
    draw,
    draw_row,
    request_seed,
    signed,
    uniform,
)
from tests.statistical import PASS, REJECT, chi_square, tally

COUNT = 20_000
PURPOSES = (CHOOSE, ACCEPT, REDRAW, DRAFT)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def run(seeds: torch.Tensor, positions: torch.Tensor, purpose: int = CHOOSE) -> np.ndarray:
    return uniform(seeds, positions, purpose).numpy()


def joint(a: np.ndarray, b: np.ndarray, cells: int = 8) -> float:
    """p-value of (a, b) being uniform on the unit square."""
    cell = (a * cells).astype(int) * cells + (b * cells).astype(int)
    return chi_square(tally(cell, cells * cells), np.full(cells * cells, cells**-2.0))


def by_ints(seed: int, position: int, purpose: int) -> float:
    """The definition in unbounded integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x &= mask
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = mix(seed + purpose * 0xD1342543DE82EF95)
    return ((mix(state + (position + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2**52


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from(PURPOSES))
def test_matches_its_definition_in_unbounded_integers(seed: int, position: int, purpose: int) -> None:
    assert uniform(ints(seed), ints(position), purpose).item() == by_ints(seed, position, purpose)


def test_strictly_inside_the_unit_interval() -> None:
    u = run(torch.arange(2000)[:, None] - 1000, torch.arange(500)[None])
    assert u.dtype == np.float64 and u.shape == (2000, 500)
    assert u.min() > 0 and u.max() < 1
    assert (2**52 - 1 + 0.5) * 2.0**-52 < 1  # the largest possible one


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniform_along_positions_and_along_seeds(purpose: int) -> None:
    many, one = torch.arange(COUNT), ints(7)
    for u in (run(one, many, purpose), run(many, one, purpose), run(many * 1_000_003, many % 5, purpose)):
        assert stats.kstest(u, "uniform").pvalue > PASS
        assert chi_square(tally((u * 256).astype(int), 256), np.full(256, 1 / 256)) > PASS
        low = (u * 2**52).astype(np.int64) & 255  # the low bits too
        assert chi_square(tally(low, 256), np.full(256, 1 / 256)) > PASS


def test_uniformity_test_rejects_a_slight_bend() -> None:
    u = run(ints(7), torch.arange(COUNT)) ** 1.1
    assert stats.kstest(u, "uniform").pvalue < REJECT
    assert chi_square(tally((u * 256).astype(int), 256), np.full(256, 1 / 256)) < REJECT


def test_neighbours_are_independent() -> None:
    many = torch.arange(COUNT)
    pairs = {
        "position": (run(ints(3), many), run(ints(3), many + 1)),
        "seed": (run(many, ints(3)), run(many + 1, ints(3))),
        "seed and position": (run(many, many), run(many + 1, many - 1)),
        "child": (run(many, ints(3)), run(torch.tensor([child_seed(s, 1) for s in range(COUNT)]), ints(3))),
    }
    for i, a in enumerate(PURPOSES):
        for b in PURPOSES[:i]:
            pairs[f"purposes {a} {b}"] = (run(many, ints(3), a), run(many, ints(3), b))
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / COUNT**0.5, name
        assert joint(a, b) > PASS, name


def test_independence_test_rejects_an_unmixed_sequence() -> None:
    u = (np.arange(COUNT) * 0.6180339887498949) % 1
    assert stats.kstest(u, "uniform").pvalue > PASS  # uniform as it is, neighbours tell
    assert joint(u[:-1], u[1:]) < REJECT
    shared = run(torch.arange(COUNT), ints(3))
    assert joint(shared, shared) < REJECT


def test_an_arithmetic_shift_would_be_seen() -> None:
    """Without the mask the negative half of the integers gives numbers below 0."""
    x = torch.arange(COUNT) * signed(0x9E3779B97F4A7C15)
    assert ((x >> 12) < 0).any()
    assert run(ints(0), torch.arange(COUNT)).min() > 0


def test_a_number_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(50) * 977 - 9, torch.arange(50) * 13
    together = uniform(seeds, positions, DRAFT)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1], DRAFT) for i in range(50)])
    assert torch.equal(together, alone)
    wide = block_noise(seeds, positions, 7, ACCEPT)
    assert torch.equal(wide[:, :3], block_noise(seeds, positions, 3, ACCEPT))
    assert torch.equal(wide[4:5], block_noise(seeds[4:5], positions[4:5], 7, ACCEPT))


def test_blocks_share_no_number_even_where_they_overlap() -> None:
    seed, start = torch.full((200,), 5), torch.arange(200)
    u = block_noise(seed, start, 16, ACCEPT)
    assert len(u.unique()) == u.numel()
    assert abs(np.corrcoef(u[:-1, 1].numpy(), u[1:, 0].numpy())[0, 1]) < 0.3


def test_cuda_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seeds, positions = torch.arange(-500, 500)[:, None] * 12345678912345, torch.arange(300)[None]
    for purpose in PURPOSES:
        assert torch.equal(uniform(seeds, positions, purpose), uniform(seeds.cuda(), positions.cuda(), purpose).cpu())


def test_children_have_seeds_of_their_own() -> None:
    assert child_seed(42, 0) == 42
    seeds = [child_seed(s, i) for s in range(-20, 20) for i in range(1, 50)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)


def test_no_two_sequences_of_any_engine_share_a_seed() -> None:
    """Over engine seeds, numbers of requests and the n sequences of each; and none is a small number, as users give."""
    places = itertools.product(range(-10, 40), range(60), range(8))
    seeds = [child_seed(request_seed(engine, number), i) for engine, number, i in places]
    assert len(set(seeds)) == len(seeds) and all(100 < s < 2**63 for s in seeds)


@given(st.integers(-(2**200), 2**200))
def test_signed_is_the_twos_complement(value: int) -> None:
    assert -(2**63) <= signed(value) < 2**63 and (signed(value) - value) % 2**64 == 0


def test_draw_at_the_boundaries() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, token in ((2.0**-53, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2.0**-53, 4)):
        assert draw(probs, torch.tensor([u], dtype=torch.float64)).item() == token
        assert draw(probs * 0.3, torch.tensor([u], dtype=torch.float64)).item() == token  # need not sum to one
        assert draw_row(probs[0].numpy(), u) == token


MASSES = st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(MASSES, min_size=1, max_size=9), st.sampled_from([2.0**-53, 1e-9, 0.5, 1 - 2.0**-53]))
def test_draw_stays_where_the_mass_is(row: list[float], u: float) -> None:
    token = draw(torch.tensor([row]), torch.tensor([u], dtype=torch.float64)).item()
    assert 0 <= token < len(row)
    assert row[token] > 0 or not any(row)
    assert not any(row) or draw_row(np.array(row, dtype=np.float32), u) == token


@pytest.mark.parametrize("length", [1, 255, 2048, 2049, 2304, 9999])
@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
def test_draw_of_one_row_is_the_same_draw(length: int, share: float) -> None:
    generator = np.random.default_rng(length)
    mass = (generator.random(length) * (generator.random(length) < share)).astype(np.float32)
    mass[generator.integers(length)] = 1
    us = [2.0**-53, 1 - 2.0**-53, *generator.random(300)]
    want = draw(torch.tensor(mass).expand(len(us), -1), torch.tensor(us, dtype=torch.float64)).tolist()
    assert [draw_row(mass, u) for u in us] == want
    assert mass[want].min() > 0


def test_draw_follows_the_distribution() -> None:
    p = np.array([0.3, 0.0, 0.05, 0.4, 0.001, 0.249])
    u = uniform(torch.arange(COUNT), ints(1), CHOOSE)
    counts = tally(draw(torch.tensor(p, dtype=torch.float32).expand(COUNT, -1), u).numpy(), 6)
    assert chi_square(counts, p) > PASS
    assert chi_square(counts, np.array([0.31, 0.0, 0.04, 0.4, 0.001, 0.249])) < REJECT
