"""Every sampling parameter shapes the distribution of every position of a block as a plain reference says, with the
drafts before it as history; the fast paths agree with the slow ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.types import Draft, Request, SamplingParams, SettingError
from forerun.verify.accept import accept_matching
from forerun.verify.filters import threshold, thresholds
from forerun.verify.noise import CHOOSE, draw, uniform
from forerun.verify.sampling import BROKEN, Features, SamplingState, check_request, logprobs
from tests.statistical import PASS, REJECT, chi_square, tally

V = 8
PROMPT, OUTPUT, DRAFTS = (1, 2, 2), (3, 4), (3, 3, 5)
COUNT = 6_000


def request(
    seed: int = 0, prompt: tuple[int, ...] = PROMPT, stop_ids: tuple[int, ...] = (), banned: Any = (), **params: Any
) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=None, **params), 100, seed, stop_ids, banned)


def state_of(*requests: Request, pool: list[int] | None = None, width: int = 40, vocab: int = V) -> SamplingState:
    """One slot for each request, all with the same tokens in the pool and stale ones behind them."""
    tokens = torch.full((len(requests), width), 7)
    line = pool if pool is not None else [*PROMPT, *OUTPUT, *DRAFTS]
    tokens[:, : len(line)] = torch.tensor(line, dtype=torch.int64)
    state = SamplingState(tokens, torch.full((len(requests),), len(PROMPT) + len(OUTPUT)), vocab)
    for slot, one in enumerate(requests):
        state.admit({slot: one})
    return state


def shaped(
    state: SamplingState, logits: torch.Tensor, slot: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, Features]:
    features = state.features(slot.tolist())
    return state.shape(logits, slot, position, features), features


# --- the reference: float64, one token at a time, nothing shared with the code --------------------------------------


def reference(logits: list[float], history: list[int], req: Request) -> np.ndarray:
    p, prompt = req.params, len(req.prompt_ids)
    x = [float(v) for v in logits]
    output = history[prompt:]
    for t, bias in (p.logit_bias or {}).items():
        x[t] = -math.inf if bias == -100 else x[t] + bias
    for seq in req.banned:
        if len(seq) == 1 or tuple(history[-(len(seq) - 1) :]) == tuple(seq[:-1]):
            x[seq[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for t in req.stop_ids:
            x[t] = -math.inf
    for t in range(len(x)):
        if t in history:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= p.frequency_penalty * output.count(t) + (p.presence_penalty if t in output else 0.0)
    if p.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = [v / p.temperature for v in x]

    def softmax(values: list[float]) -> list[float]:
        weights = [math.exp(v - max(values)) for v in values]
        return [w / sum(weights) for w in weights]

    probs = softmax(x)
    x = [v if q >= p.min_p * max(probs) else -math.inf for v, q in zip(x, probs, strict=True)]
    if 0 < p.top_k < len(x):
        kth = sorted(x, reverse=True)[p.top_k - 1]
        x = [v if v >= kth else -math.inf for v in x]
    if p.top_p < 1:
        probs, mass = softmax(x), 0.0
        for q in sorted(probs, reverse=True):
            mass += q
            if mass >= p.top_p:
                break
        x = [v if r >= q else -math.inf for v, r in zip(x, probs, strict=True)]
    return np.array(softmax(x))


LOGITS = torch.tensor([
    [0.3, 1.2, -0.5, 2.0, 1.1, 0.9, -1.3, 0.1],
    [1.5, 0.2, 0.7, 1.6, -0.4, 0.5, 0.3, 1.0],
    [0.1, 0.4, 1.9, 2.2, 0.6, -0.7, 0.8, -0.2],
    [-0.6, 0.9, 1.3, 0.2, 1.4, 2.1, 0.5, 0.7],
])

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 500},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"presence_penalty": -0.7, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {3: -1.5, 0: 2.0}},
    "logit_bias ban": {"logit_bias": {3: -100, 5: 1.0}},
    "banned token": {"banned": ((3,), (5,))},
    "banned sequences": {"banned": ((4, 3), (3, 3, 3), (4, 3, 3, 2), (2, 3, 4, 4), (6, 6), (5,))},
    "min_tokens": {"min_tokens": 4, "stop_ids": (3, 2)},
    "top_k then top_p": {"top_k": 4, "top_p": 0.7},
    "temperature and filters": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.2, "repetition_penalty": 1.3, "top_p": 0.5},
    "all": {
        "temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.4, "logit_bias": {0: 0.5, 6: -0.9}, "banned": ((3, 5), (7,)), "min_tokens": 3, "stop_ids": (2,),
    },
}


def block(req: Request) -> tuple[SamplingState, torch.Tensor, torch.Tensor, np.ndarray]:
    """A slot with a block of three drafts: state, slot [4], position [4] and the reference distributions [4,V]."""
    line, start = [*PROMPT, *OUTPUT, *DRAFTS], len(PROMPT) + len(OUTPUT)
    want = np.array([reference(LOGITS[i].tolist(), line[: start + i], req) for i in range(4)])
    return state_of(req), torch.zeros(4, dtype=torch.int64), torch.arange(start, start + 4), want


@pytest.mark.parametrize("host", [True, False], ids=["rows", "tensors"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_distribution_of_every_position_of_a_block(params: dict[str, Any], host: bool) -> None:
    state, slot, position, want = block(request(**params))
    state.host = host
    before = LOGITS.clone()
    logits, features = shaped(state, LOGITS, slot, position)
    probs = state.probs(logits, slot, features).numpy()
    assert probs.dtype == np.float32
    assert ((probs > 0) == (want > 0)).all()
    np.testing.assert_allclose(probs, want, atol=2e-6)
    assert torch.equal(before, LOGITS)  # the raw logits are still wanted, for logprobs
    short = state.shape(LOGITS, slot, position, features, longest=int(position.max()))
    assert torch.equal(short, logits)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_draws_at_every_position_of_a_block(params: dict[str, Any]) -> None:
    """Through choose, the host's row by row path, over many seeds; equal to the draw from probs, token by token."""
    state, slot, position, want = block(request(**params))
    logits, features = shaped(state, LOGITS, slot, position)
    probs = state.probs(logits, slot, features)
    for i in range(4):
        tokens = draw(probs[i].expand(COUNT, -1), uniform(torch.arange(COUNT), position[i], CHOOSE))
        assert chi_square(tally(tokens.numpy(), V), want[i]) > PASS
        for seed in range(0, COUNT, 50):
            state.seed[0] = seed
            one = state.choose(logits[i : i + 1], slot[:1], position[i : i + 1], features)
            assert one.item() == tokens[seed].item()


def test_choose_itself_follows_the_distribution() -> None:
    req = request(temperature=0.8, top_k=6, top_p=0.95, frequency_penalty=0.5)
    state = state_of(*[request(s, temperature=0.8, top_k=6, top_p=0.95, frequency_penalty=0.5) for s in range(1500)])
    _, _, position, want = block(req)
    for i in range(4):
        slot, at = torch.arange(1500), position[i].expand(1500)
        logits, features = shaped(state, LOGITS[i].expand(1500, -1), slot, at)
        assert chi_square(tally(state.choose(logits, slot, at, features).numpy(), V), want[i]) > PASS


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("top_p before top_k", {"top_k": 4, "top_p": 0.65}),
        ("drafts are no history", {"frequency_penalty": 0.9}),
        ("a repeated draft counts once", {"frequency_penalty": 0.9}),
        ("the prompt is output", {"presence_penalty": 1.5}),
        ("temperature ignored", {"temperature": 0.7}),
    ],
)
def test_wrong_variants_are_rejected(name: str, wrong: dict[str, Any]) -> None:
    req = request(**wrong)
    state, slot, position, want = block(req)
    logits, features = shaped(state, LOGITS, slot, position)
    line, start, i = [*PROMPT, *OUTPUT, *DRAFTS], len(PROMPT) + len(OUTPUT), 2
    if name == "top_p before top_k":
        i = 0
        bad = reference(LOGITS[i].tolist(), line[:start], request(top_p=0.65))
        bad[np.argsort(bad)[:-4]] = 0
    elif name == "drafts are no history":
        bad = reference(LOGITS[i].tolist(), line[:start], req)
    elif name == "a repeated draft counts once":
        bad = reference(LOGITS[i].tolist(), line[: start + 1], req)
    elif name == "the prompt is output":
        bad = reference(LOGITS[i].tolist(), [0, *line[: start + i]], request(prompt=(0,), **wrong))
    else:
        bad = reference(LOGITS[i].tolist(), line[: start + i], request())
    probs = state.probs(logits, slot, features)[i].expand(COUNT, -1)
    counts = tally(draw(probs, uniform(torch.arange(COUNT), position[i], CHOOSE)).numpy(), V)
    assert chi_square(counts, want[i]) > PASS
    assert chi_square(counts, bad) < REJECT


# --- rows beside each other ---------------------------------------------------------------------------------------------


def test_greedy_beside_sampled_rows_equals_solo_without_nan() -> None:
    temperatures = (0.0, 1e-6, 1e-4, 0.7, 0.0, 100.0)
    generator = torch.Generator().manual_seed(1)
    top_k = (0, 3, 0, 2, 5, 0)
    state = state_of(*[request(i, temperature=temperatures[i], top_p=0.9, top_k=top_k[i]) for i in range(6)])
    slot, position = torch.arange(6), torch.full((6,), 5)
    for scale in (1e-3, 1.0, 30.0, 1e4, 1e30):
        logits = torch.randn(6, V, generator=generator) * scale
        features = state.features(range(6))
        probs = state.probs(logits, slot, features)
        assert torch.isfinite(probs).all() and torch.allclose(probs.sum(-1), torch.ones(6))
        together = state.choose(logits, slot, position, features)
        assert torch.equal(together, draw(probs, state.uniform(slot, position, CHOOSE)))
        for i in range(6):
            row = slice(i, i + 1)
            assert state.choose(logits[row], slot[row], position[row], state.features([i])) == together[i]
            assert torch.allclose(state.probs(logits[row], slot[row], state.features([i])), probs[row], atol=1e-7)
        if scale >= 1:
            assert torch.equal(together[[0, 1, 4]], logits.argmax(-1)[[0, 1, 4]])
        assert torch.equal(probs[[0, 4]], torch.eye(V)[logits.argmax(-1)[[0, 4]]])


def test_features_say_what_the_slots_use() -> None:
    greedy, hot = request(temperature=0, top_k=5, top_p=0.5, min_p=0.1), request(top_k=5, top_p=0.5)
    state = state_of(greedy, hot, request(top_p=0.5, min_p=0.1), request(temperature=0, banned=((1,), (2, 3)), min_tokens=2))
    assert state.features([0]) == Features() == state.features([])  # filters leave the argmax alone
    assert state.features([0, 1]) == Features(sampled=True, top_k=8, top_p=True)
    assert state.features([1, 2]) == Features(sampled=True, top_k=8, top_p=True, min_p=True, unbounded=True)
    assert state.features([3]) == Features(bias=True, banned=True)  # no stop ids for min_tokens to hold off
    assert state.shape(LOGITS, torch.zeros(4, dtype=torch.int64), torch.full((4,), 5), state.features([0])) is LOGITS
    state.admit({1: request(temperature=0)})
    assert state.features([0, 1]) == Features()


def test_a_slot_keeps_nothing_of_its_last_request_and_tables_grow() -> None:
    heavy = request(**PARAMS["all"], seed=3)
    state = state_of(request(), heavy, request(logit_bias={1: 1.0}))
    version = state.version
    sequences, bias = ((1, 2, 3, 4, 5), (3, 5), (6,), (7,)), {0: 1.0, 1: 2.0, 2: -3.0}
    state.admit({0: request(banned=sequences, logit_bias=bias, min_tokens=9, stop_ids=(1, 2, 3))})
    assert state.version > version
    slot, position = torch.ones(1, dtype=torch.int64), torch.tensor([7])
    fresh = state_of(request(), heavy)
    want = reference(LOGITS[3].tolist(), [*PROMPT, *OUTPUT, *DRAFTS[:2]], heavy)
    for other in (state, fresh):  # the tables around it grew, its own entries stayed
        logits, features = shaped(other, LOGITS[3:4], slot, position)
        np.testing.assert_allclose(other.probs(logits, slot, features).numpy()[0], want, atol=2e-6)
    state.admit({1: request(seed=3)})
    everything = state.features([0])._replace(penalties=True, sampled=True, top_k=8, top_p=True, unbounded=True, min_p=True)
    plain = state.shape(LOGITS[:1], slot, position, everything)
    assert torch.equal(plain, LOGITS[:1])  # work done for other rows changes nothing, to the bit
    assert torch.allclose(state.probs(plain, slot, everything), LOGITS[:1].softmax(-1))


def test_wide_and_negative_seeds_are_taken() -> None:
    state = state_of(request(-1), request(2**64 - 1), request(2**70 + 5), request(5))
    assert state.seed.tolist() == [-1, -1, 5, 5]


# --- bans and stops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [True, False], ids=["rows", "tensors"])
def test_ban_of_everything_but_one_and_of_rows_without_mass(host: bool) -> None:
    state = state_of(request(banned=tuple((t,) for t in range(7))), request(top_p=0.5, min_p=0.1, top_k=3))
    state.host = host
    slot, position = torch.tensor([0, 1]), torch.tensor([5, 5])
    logits = LOGITS[:2].clone()
    logits[1] = -math.inf
    out, features = shaped(state, logits, slot, position)
    probs = state.probs(out, slot, features)
    assert not probs.isnan().any() and probs[0, 7] == 1
    assert state.choose(out, slot, position, features).tolist() == [7, BROKEN]


def test_min_tokens_ends_exactly_and_counts_the_block() -> None:
    state = state_of(request(min_tokens=4, stop_ids=(3,), temperature=0))
    logits = torch.zeros(6, V)
    logits[:, 3] = 5
    slot, position = torch.zeros(6, dtype=torch.int64), torch.arange(3, 9)
    out, _ = shaped(state, logits, slot, position)
    assert (out[:, 3] == -math.inf).tolist() == [True] * 4 + [False] * 2


def test_a_banned_sequence_matches_across_the_prompt_and_not_before_it() -> None:
    state = state_of(request(banned=((2, 2, 3), (1, 2), (1, 1, 1, 1, 1, 4))))
    out, _ = shaped(state, torch.zeros(2, V), torch.zeros(2, dtype=torch.int64), torch.tensor([3, 1]))
    assert (out[0] == -math.inf).tolist() == [t == 3 for t in range(V)]
    assert (out[1] == -math.inf).tolist() == [t == 2 for t in range(V)]


ALL_BUT_2_AND_4 = {t: -100 for t in range(V) if t not in (2, 4)}


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (request(logit_bias={V: 1.0}), "logit_bias"),
        (request(banned=((V,),)), "banned_token_ids"),
        (request(stop_token_ids=(V + 1,)), "stop_token_ids"),
        (request(prompt=()), "prompt_ids"),
        (replace(request(), max_tokens=0), "max_tokens"),
        (replace(request(min_tokens=3), max_tokens=2), "min_tokens"),
        (request(banned=tuple((t,) for t in range(V))), "banned_token_ids"),
        (request(logit_bias={t: -100 for t in range(V)}), "logit_bias"),
        (request(banned=((1, 2),), logit_bias=ALL_BUT_2_AND_4, min_tokens=3, stop_ids=(4,)), "banned_token_ids"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused(bad: Request, name: str) -> None:
    with pytest.raises(SettingError) as error:
        check_request(bad, V)
    assert error.value.name == name
    with pytest.raises(SettingError):
        state_of(bad)


EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-46, 1e-6, 1e-5, 1e-4, 1.0, 100.0),
    "top_k": (0, 1, 2, V, 2**31 - 1),
    "top_p": (5e-324, 1e-46, 1e-8, 1 - 1e-16, 1.0),
    "min_p": (0, 5e-324, 1e-46, 1 - 1e-16, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-2.0, 0.0, 2.0),
    "frequency_penalty": (-2.0, 0.0, 2.0),
    "logit_bias": (None, {3: 100.0}, {3: -99.0}, {t: -100.0 for t in range(V - 1)}, {t: -100.0 for t in range(1, V)}),
}


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e4, 1e30])
def test_what_is_chosen_is_a_possible_token_at_every_extreme_that_is_accepted(scale: float, host: bool) -> None:
    """Two extremes of the settings at a time, the others off: never an id outside the vocabulary, never a banned one."""
    rng = np.random.default_rng(0)
    pairs = [(a, b) for i, a in enumerate(EXTREMES) for b in list(EXTREMES)[i + 1 :]]
    requests = [
        request(seed=i, **{"temperature": 0.9, a: x, b: y})
        for i, (a, b, x, y) in enumerate((a, b, x, y) for a, b in pairs for x in EXTREMES[a] for y in EXTREMES[b])
    ]
    state = state_of(*requests)
    state.host = host
    slot = torch.arange(len(requests))
    logits = torch.from_numpy(scale * rng.standard_normal((len(requests), V))).float()
    position = torch.full((len(requests),), len(PROMPT) + len(OUTPUT))
    out, features = shaped(state, logits, slot, position)
    assert not out.isnan().any() and not (out == math.inf).any()
    chosen = state.choose(out, slot, position, features)
    assert ((chosen >= 0) & (chosen < V)).all()
    assert (out.gather(1, chosen[:, None]) > -math.inf).all()
    probs = state.probs(out, slot, features)
    assert torch.allclose(probs.sum(-1), torch.ones(len(requests))) and (probs.gather(1, chosen[:, None]) > 0).all()
    greedy = torch.tensor([r.params.greedy for r in requests])
    assert (chosen[greedy] == out[greedy].argmax(-1)).all() and greedy.sum() > 50


# --- speculation changes nothing ------------------------------------------------------------------------------------------


def generate(req: Request, k: int, hits: str, length: int = 40) -> list[int]:
    """Decode a toy model whose logits depend on the last token, k drafts a step: right ones, wrong ones or a mixture."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(4)) * 2
    state = state_of(req, pool=list(req.prompt_ids), width=len(req.prompt_ids) + length + k + 2)
    plain = generate(req, 0, "right", length + k + 2) if k else []
    n, start, step = len(req.prompt_ids), len(req.prompt_ids), 0
    while n - start < length:
        step += 1
        right = {"right": k, "wrong": 0, "some": step % (k + 1)}[hits]
        ahead = plain[n - start : n - start + k]
        drafts = torch.tensor([[t if i < right else (t + 1) % V for i, t in enumerate(ahead)]], dtype=torch.int64).view(1, k)
        room = min(k, state.tokens.shape[1] - n)
        state.tokens[0, n : n + room] = drafts[0, :room]
        slot, position = torch.zeros(k + 1, dtype=torch.int64), torch.arange(n, n + k + 1)
        logits, features = shaped(state, table[state.tokens[0, n - 1 : n + k]], slot, position)
        verdict = accept_matching(state.choose(logits, slot, position, features)[None], Draft(drafts, torch.tensor([k])))
        count = int(verdict.count)
        assert count == right + 1
        state.tokens[0, n : n + count] = verdict.tokens[0, :count]
        n += count
    return state.tokens[0, start : start + length].tolist()


SPECULATED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "greedy presence": {"temperature": 0, "presence_penalty": 1.0},
    "greedy frequency": {"temperature": 0, "frequency_penalty": 0.4},
    "greedy bans": {"temperature": 0, "banned": ((3, 3), (5, 4), (2,)), "min_tokens": 20, "stop_ids": (1,)},
    "sampled": {"temperature": 1.1, "top_p": 0.9, "frequency_penalty": 0.3},
}


@pytest.mark.parametrize("params", SPECULATED.values(), ids=SPECULATED)
def test_tokens_are_those_of_plain_decoding(params: dict[str, Any]) -> None:
    req = request(11, **params)
    plain = generate(req, 0, "right")
    if "penalty" in str(params) or "banned" in params:
        assert plain != generate(request(11, temperature=params["temperature"]), 0, "right"), "the parameter must matter here"
    for k in (1, 2, 8, 48):
        for hits in ("right", "wrong", "some"):
            assert generate(req, k, hits) == plain


def test_a_token_drafted_again_and_again_is_counted_each_time() -> None:
    state = state_of(request(temperature=0, frequency_penalty=0.5), pool=[1, 6, 6, 6, 6])
    state.prompt_len[0] = 1
    out, _ = shaped(state, torch.zeros(5, V), torch.zeros(5, dtype=torch.int64), torch.arange(1, 6))
    assert out[:, 6].tolist() == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert (out[:, :6] == 0).all()


# --- the threshold, fast and slow -------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_threshold_of_one_row_equals_the_tensors(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 9, 400]))
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    row = (generator.standard_normal(vocab) * data.draw(st.sampled_from([0.0, 0.1, 3.0, 20.0]))).astype(np.float32)
    if data.draw(st.booleans()):
        row = np.round(row)  # ties
    if data.draw(st.booleans()) and vocab > 2:
        row[: vocab // 2] = -np.inf
    heat, min_p = data.draw(st.sampled_from([1e-6, 0.7, 1.0, 5.0])), data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    top_k, top_p = data.draw(st.sampled_from([0, 1, 2, 7, 1000])), data.draw(st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]))
    column = [torch.tensor([[x]], dtype=torch.float64) for x in (heat, min_p, top_p)]
    for widest, unbounded in ((top_k, top_p < 1 and not top_k), (1024, True)):
        nucleus = top_p < 1 or unbounded
        slow = thresholds(torch.tensor(row)[None], *column[:2], torch.tensor([[top_k]]), column[2], widest, nucleus, unbounded)
        kept = row >= threshold(row, heat, min_p, top_k, top_p)
        assert kept.tolist() == (row >= slow.numpy()[0, 0]).tolist()
        assert kept[row.argmax()]
        if 0 < top_k < vocab and min_p == 0 and top_p == 1 and len(np.unique(row)) == vocab:
            assert kept.sum() == top_k


def test_row_by_row_agrees_with_tensors_on_a_large_vocabulary() -> None:
    vocab, rows = 20_000, 12
    generator = torch.Generator().manual_seed(2)
    params: list[dict[str, Any]] = [
        {"temperature": 0.8}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.02}, {"temperature": 0},
        {"temperature": 1.7, "top_p": 0.5},
    ]
    state = state_of(*[request(seed, **params[seed % 6]) for seed in range(rows)], vocab=vocab)
    slot = torch.arange(rows)
    for scale in (0.05, 2.0, 8.0):
        logits = torch.randn(rows, vocab, generator=generator) * scale
        features = state.features(range(rows))
        position = torch.arange(rows) + 5
        fast, probs = state.choose(logits, slot, position, features), state.probs(logits, slot, features)
        state.host = False
        assert torch.equal(state.choose(logits, slot, position, features), fast)
        assert torch.equal(state.probs(logits, slot, features), probs)
        state.host = True


@pytest.mark.parametrize("host", [True, False], ids=["rows", "tensors"])
def test_ties_with_the_last_token_kept_are_kept(host: bool) -> None:
    state = state_of(request(top_k=2), request(top_p=0.5), request(top_k=2, top_p=0.6))
    state.host = host
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, 1.0, -1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -5.0]])
    slot = torch.tensor([0, 1])
    probs = state.probs(logits, slot, state.features([0, 1]))
    assert (probs > 0).tolist() == [[t in (0, 1, 2, 4) for t in range(V)], [t != 7 for t in range(V)]]
    # the ties with the second weigh in top_p's total: 0.6 is not reached by the first two
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0]])
    probs = state.probs(logits, torch.tensor([2]), state.features([2]))
    assert (probs > 0).tolist() == [[t < 5 for t in range(V)]]


# --- log-probabilities --------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    tokens = torch.tensor([3, 0, 7, 5])
    chosen, ids, values = logprobs(LOGITS, tokens, 3)
    want = LOGITS.double().numpy()
    want = want - np.log(np.exp(want).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen.numpy(), want[np.arange(4), tokens.numpy()], atol=1e-6)
    assert ids.tolist() == np.argsort(-want, -1)[:, :3].tolist()
    np.testing.assert_allclose(values.numpy(), -np.sort(-want, -1)[:, :3], atol=1e-6)
    assert logprobs(LOGITS, tokens, 0)[1].shape == (4, 0) and logprobs(LOGITS, tokens, 50)[1].shape == (4, V)


def test_cuda_gives_the_same_tokens_and_fits_a_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    state = state_of(request(3, **PARAMS["all"]), request(4, temperature=0), request(5, top_p=0.9))
    device = SamplingState(state.tokens.cuda(), state.length.cuda(), V)
    for seed, (slot, params) in enumerate(((0, PARAMS["all"]), (1, {"temperature": 0}), (2, {"top_p": 0.9})), 3):
        device.admit({slot: request(seed, **params)})
    slot, position = torch.tensor([0, 1, 2, 0]), torch.arange(5, 9)
    want = state.choose(*shaped(state, LOGITS, slot, position)[:1], slot, position, state.features(range(3)))
    logits, slot, position, features = LOGITS.cuda(), slot.cuda(), position.cuda(), device.features(range(3))
    device.choose(device.shape(logits, slot, position, features), slot, position, features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = device.choose(device.shape(logits, slot, position, features), slot, position, features)
    graph.replay()
    assert torch.equal(out.cpu(), want)
