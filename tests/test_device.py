"""The padded layout on tiny random models, end to end: on a GPU if there is one (captured in bfloat16, operation by operation
in float32), and on the CPU, where the same launches run uncaptured. No step waits for the device, and answers equal those of
plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.config import HEADS, EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.cycle import decode_key
from forerun.engine.engine import Engine
from forerun.engine.layouts import step_widths
from forerun.engine.state import RowState
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Logprob, Request, SamplingParams
from forerun.verify.sampling import Features, SamplingState
from tests.statistical import PASS, REJECT, chi_square
from tests.tiny import tiny_model
from tests.tiny_heads import random_head

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPE: dict[str, Any] = {"hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 256}
K, ROWS = 4, 4
NEAR_TIE = 0.05  # of the two likeliest tokens' logprobs: sums in bfloat16 that are cut otherwise may choose either
METHODS: dict[str, Speculation | None] = {
    "none": None,
    "ngram": Speculation("ngram", K, 1, 3),
    "prediction": Speculation("prediction", K),
    "suffix": Speculation("suffix", K),
    "draft_model": Speculation("draft_model", K, model="given"),
    "probabilistic": Speculation("draft_model", K, model="given", draft_sample_method="probabilistic"),
    "eagle3": Speculation("eagle3", K, model="given"),
    "eagle3, drawn": Speculation("eagle3", K, model="given", draft_sample_method="probabilistic"),
    "dflash": Speculation("dflash", K, model="given"),
}
POINT_MASSES = ("ngram", "prediction", "suffix", "draft_model")


class NoText:
    """A detokenizer for ids without text."""

    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Models:
    """A target of 500 ids and a smaller drafter for it; a pair of 24 ids, for statistics. Loaded once for each dtype and
    device."""

    def __init__(self, folder: Path) -> None:
        bf16 = torch.bfloat16  # what is stored, so that float32 on the CPU has the very weights of the device
        small = SHAPE | {"layers": 1, "dtype": bf16}
        self.folders = {
            "target": tiny_model(folder / "target", vocab=500, **SHAPE, dtype=bf16),
            "drafter": tiny_model(folder / "drafter", vocab=500, seed=1, **small),
            "few ids": tiny_model(folder / "few", vocab=24, **SHAPE, dtype=bf16),
            "few ids' drafter": tiny_model(folder / "few drafter", vocab=24, seed=1, **small),
        }
        self.load = cache(self.fresh)

    def fresh(self, name: str, dtype: torch.dtype, device: str) -> Target:
        """One of its own, to be changed."""
        return Target.load(self.folders[name], dtype, device)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def synchronisation_is_allowed_again() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def engine(
    target: Target, speculation: Speculation | None = None, model: Target | None = None, padded: bool = True, **settings: Any
) -> Engine:
    given = {"max_num_seqs": ROWS, "kv_cache_tokens": 4096, "max_model_len": 400} | settings
    config = EngineConfig(speculation=speculation, **given)

    def make(slots: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool) -> Drafter | None:
        if speculation is None:
            return None
        head = random_head(target, speculation.method) if speculation.method in HEADS else None
        around = DrafterContext(slots, mirror, sampling, kv, config, padded, target.vocab, model, head)
        return TABLE[speculation.method](speculation, around)

    return Engine(target, config, make, NoText, padded)


def request(name: int, prompt: Sequence[int], stops: tuple[int, ...] = (), **params: Any) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "seed": name} | params)
    return Request(str(name), tuple(prompt), given, given.max_tokens or 0, name, stops)


def prompts(count: int, seed: int = 0, below: int = 500) -> list[list[int]]:
    """Prompts, of which some repeat themselves, so that a look-up finds drafts."""
    rng = random.Random(seed)
    return [[rng.randrange(below) for _ in range(rng.randint(3, 12))] * (1 + i % 3) for i in range(count)]


class Answer:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.reason: str | None = None


def run(it: Engine, requests: Sequence[Request], between: Callable[[int], None] = lambda step: None) -> dict[str, Answer]:
    """Serve all requests. between: called after each step, with the number of steps."""
    answers = {r.id: Answer() for r in requests}
    for one in requests:
        it.add(one)
    step = 0
    while it.has_work:
        for event in it.step():
            answer = answers[event.request_id]
            answer.ids += event.tokens
            answer.logprobs += event.logprobs
            answer.reason = event.finish_reason
        step += 1
        between(step)
    return answers


def agree(got: dict[str, Answer], plain: dict[str, Answer], dtype: torch.dtype, whole: bool = True) -> None:
    """The same tokens; in bfloat16 they may part where plain decoding's two likeliest tokens nearly tie. plain: with
    logprobs of two tokens. whole: the answers are of the same length."""
    for name, answer in got.items():
        wanted = plain[name]
        both = zip(answer.ids, wanted.ids, strict=False)
        at = next((i for i, (mine, its) in enumerate(both) if mine != its), None)
        if at is None:
            assert not whole or len(answer.ids) == len(wanted.ids), f"request {name}: {len(answer.ids)} tokens"
            continue
        (_, first), (_, second) = wanted.logprobs[at].top[:2]
        gap = first - second
        assert dtype == torch.bfloat16 and gap < NEAR_TIE, f"request {name}: token {at} differs, where the gap is {gap:.3f}"


def nearly_right(ids: Sequence[int]) -> list[int]:
    """An answer with one wrong token in the middle."""
    middle = len(ids) // 2
    return [*ids[:middle], (ids[middle] + 1) % 500, *ids[middle + 1 :]]


def steady(step: Callable[[], Any], count: int = 15) -> None:
    """Make steps with every synchronisation an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(count):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@DEVICES
@pytest.mark.parametrize("temperatures", [(0.0,) * ROWS, (0.0, 0.7, 1.0, 0.0)], ids=["greedy", "mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(models: Models, method: str, temperatures: tuple[float, ...], device: str) -> None:
    """15 steps in the steady state, all rows decoding. (The event that says a step has arrived is no synchronisation of
    the device. suffix waits for that event before it drafts, and for nothing else.) On the CPU: that the steps are steady."""
    dtype = torch.bfloat16
    target = models.load("target", dtype, device)
    asked = [request(i, p, temperature=temperatures[i], max_tokens=200) for i, p in enumerate(prompts(ROWS))]
    if method == "prediction":
        plain = run(engine(target), asked)
        asked = [replace(r, prediction=tuple(nearly_right(plain[r.id].ids))) for r in asked]
    # not adapted: on this model drafts of the suffix tree are seldom right, and with known costs none would be verified
    it = engine(target, METHODS[method], models.load("drafter", dtype, device), adaptive_drafts=False)
    features = it._step.cycle.served(Features(sampled=any(temperatures)))
    widths = step_widths(it._step.cycle.width)  # both, so that no step of the steady state has to be captured
    it._step.runner.warm_up([decode_key(ROWS, width, None, features) for width in widths], complete=False)
    for one in asked:
        it.add(one)
    tokens = 0

    def count() -> None:
        nonlocal tokens
        tokens += sum(len(event.tokens) for event in it.step())

    for _ in range(10):
        count()
    before = tokens
    if device == "cuda":
        steady(count)
    else:
        for _ in range(15):
            count()
    assert len(it.scheduler.running) == ROWS and tokens - before >= 14 * ROWS  # nothing but decoding all rows
    while it.has_work:
        count()
    assert tokens == 200 * ROWS
    assert (it.stats.drafts.drafted > 0) == (method != "none")


@NO_GPU
def test_a_step_that_waits_is_found(models: Models) -> None:
    """The negative control of the test above."""
    it = engine(models.load("target", torch.bfloat16, "cuda"))
    it.add(request(0, prompts(1)[0], max_tokens=100))
    for _ in range(5):
        it.step()
    with pytest.raises(RuntimeError, match="synchroniz"):
        steady(lambda: (it.step(), it.state.length[0].item()))
    while it.has_work:
        it.step()


@DEVICES
def test_a_drafter_on_the_host_costs_one_wait_a_step_that_drafts(models: Models, device: str) -> None:
    target = models.load("target", torch.float32, device)
    requests = [request(i, p, logprobs=2) for i, p in enumerate(prompts(ROWS))]
    plain = run(engine(target), requests)
    it = engine(target, METHODS["suffix"])
    assert it.drafter is not None
    propose, asked, seen = it.drafter.propose, 0, []

    def counting(rows: Any) -> Any:
        nonlocal asked
        asked += 1
        return propose(rows)

    it.drafter.propose = counting  # type: ignore[method-assign]
    agree(run(it, requests, lambda _: seen.append((asked, it._step.waits))), plain, torch.float32)
    assert all(made == waits for made, waits in seen) and 0 < asked < it.stats.steps  # the prompts' step drafts nothing
    assert all(b[1] - a[1] <= 1 for a, b in pairwise(seen))
    assert engine(target, METHODS["ngram"])._step.lag == 1 and it._step.lag == 0


@DEVICES
@DTYPES
@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
def test_greedy_answers_are_those_of_plain_decoding(models: Models, method: str, dtype: torch.dtype, device: str) -> None:
    """More requests than slots, so slots are reused. A drafter with its own weights is never right; the target always is."""
    target = models.load("target", dtype, device)
    requests = [request(i, p, logprobs=2) for i, p in enumerate(prompts(6))]
    plain = run(engine(target), requests)
    guided = [replace(r, prediction=tuple(nearly_right(plain[r.id].ids))) for r in requests]
    for model in (models.load("drafter", dtype, device), target) if "model" in method else (target,):
        it = engine(target, METHODS[method], model)
        agree(run(it, guided), plain, dtype)
        drafts = it.stats.drafts
        assert drafts.drafted > 0
        if method == "prediction" or (method == "draft_model" and model is target):
            assert (drafts.acceptance_length or 0) > 2


@DEVICES
def test_a_wrong_answer_does_not_agree(models: Models, device: str) -> None:
    """The negative control of `agree`."""
    target = models.load("target", torch.bfloat16, device)
    plain = run(engine(target), [request(0, prompts(1)[0], logprobs=2)])
    wrong = Answer()
    wide = next(i for i, noted in enumerate(plain["0"].logprobs) if noted.top[0][1] - noted.top[1][1] > NEAR_TIE)
    wrong.ids = [*plain["0"].ids[:wide], (plain["0"].ids[wide] + 1) % 500, *plain["0"].ids[wide + 1 :]]
    with pytest.raises(AssertionError, match="differs"):
        agree({"0": wrong}, plain, torch.bfloat16)
    wrong.ids = plain["0"].ids[:-1]
    with pytest.raises(AssertionError, match="39 tokens"):
        agree({"0": wrong}, plain, torch.bfloat16)


@DEVICES
@pytest.mark.parametrize("method", POINT_MASSES)
def test_point_masses_leave_seeded_samples_alone(models: Models, method: str, device: str) -> None:
    """All parameters are in one batch, and the CPU's exact layout is the twin. Noise, filters and penalties agree too."""
    target = models.load("target", torch.float32, device)
    shaped = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {5: 3.0}, "min_tokens": 4}
    repeats = {"temperature": 0.8, "logit_bias": {9: 12.0}}  # so that a look-up is right
    params: list[dict[str, Any]] = [{"temperature": 0.8}, {}, {"temperature": 1.1} | shaped, repeats]
    requests = [request(i, p, (7,), **params[i % 4]) for i, p in enumerate(prompts(6))]
    twin = run(engine(models.load("target", torch.float32, "cpu"), padded=False), requests)
    plain = run(engine(target), requests)
    guided = [replace(r, prediction=tuple(nearly_right(plain[r.id].ids))) for r in requests]
    it = engine(target, METHODS[method], target)
    drafted = run(it, guided)
    assert it.stats.drafts.accepted > 0
    assert {n: a.ids for n, a in drafted.items()} == {n: a.ids for n, a in plain.items()} == {n: a.ids for n, a in twin.items()}


def next_distribution(target: Target, texts: Tensor, temperature: float) -> np.ndarray:
    """What follows each text at this temperature: [R,n] -> [R,V] float64. A text has a page of its own, so n is at most 16."""
    rows, n = texts.shape
    batch = Batch(
        ids=texts.flatten(),
        positions=torch.arange(n).repeat(rows),
        row_start=torch.arange(0, rows * n + 1, n, dtype=torch.int32),
        block_table=torch.arange(1, rows + 1, dtype=torch.int32)[:, None],
        logits_at=torch.arange(n - 1, rows * n, n),
    )
    with torch.inference_mode():
        logits = target.forward(batch, target.kv_cache(rows + 1, 16)).logits
    return (logits.double() / temperature).softmax(-1).numpy()


def first_three(target: Target, prompt: Sequence[int], temperature: float) -> np.ndarray:
    """The exact joint distribution of an answer's first three tokens, [V,V,V]."""
    start, every = torch.tensor([list(prompt)]), torch.arange(target.vocab)[:, None]
    one = torch.cat((start.repeat(len(every), 1), every), 1)  # [V,n+1]
    two = torch.cat((one.repeat_interleave(len(every), 0), every.repeat(len(every), 1)), 1)  # [V*V,n+2]
    p, q, r = (next_distribution(target, texts, temperature) for texts in (start, one, two))
    return p[0][:, None, None] * q[:, :, None] * r.reshape(len(every), len(every), -1)


@DEVICES
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_targets_distribution(models: Models, rule: str, device: str) -> None:
    """The second token and the third (drafted), each alone and with the one before it, against exact probabilities; those of a
    temperature that is 20 % off must not fit."""
    temperature, prompt, at_once, rounds = 1.0, (5, 6, 7), 64, 64
    exact = models.load("few ids", torch.float32, "cpu")
    right, wrong = (first_three(exact, prompt, t) for t in (temperature, 1.2 * temperature))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target, drafter = (models.load(name, dtype, device) for name in ("few ids", "few ids' drafter"))
    drawn = Speculation("draft_model", 2, model="given", draft_sample_method="probabilistic", rejection_sample_method=rule)
    it = engine(target, drawn, drafter, max_num_seqs=at_once, max_model_len=32)
    seen = np.zeros_like(right)
    for i in range(rounds):
        seeds = range(i * at_once, (i + 1) * at_once)
        answers = run(it, [request(seed, prompt, temperature=temperature, max_tokens=4) for seed in seeds])
        for answer in answers.values():
            seen[tuple(answer.ids[:3])] += 1
    drafts = it.stats.drafts
    assert drafts.drafted > at_once * rounds and 0.05 < (drafts.acceptance_rate or 0) < 0.95
    for others in ((0, 2), (0, 1), (2,), (0,)):
        assert chi_square(seen.sum(others), right.sum(others)) > PASS
        assert chi_square(seen.sum(others), wrong.sum(others)) < REJECT


def reference(
    models: Models, requests: Sequence[Request], dtype: torch.dtype, device: str, vocab: int = 500
) -> dict[str, Answer]:
    """Plain decoding with enough pages: on the CPU's exact layout in float32, else on the device itself."""
    target = models.fresh("target", dtype, "cpu" if dtype == torch.float32 else device)
    target.keep_vocabulary(vocab)
    noted = [replace(r, params=replace(r.params, logprobs=2)) for r in requests]
    return run(engine(target, padded=dtype != torch.float32), noted)


UNDISTURBED = pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model"])


@DEVICES
@DTYPES
@UNDISTURBED
def test_preempted_requests_lose_nothing(models: Models, method: str, dtype: torch.dtype, device: str) -> None:
    requests = [request(i, p) for i, p in enumerate(prompts(6, 5))]
    plain = reference(models, requests, dtype, device)
    target = models.load("target", dtype, device)
    small: dict[str, Any] = {"kv_cache_tokens": 128, "block_size": 8, "enable_prefix_caching": False}
    it = engine(target, METHODS[method], models.load("drafter", dtype, device), **small)
    start = it.scheduler.pages.free
    agree(run(it, requests), plain, dtype)
    assert it.stats.preemptions > 0 and it.scheduler.pages.free == start


@DEVICES
@DTYPES
@UNDISTURBED
def test_aborts_leave_other_requests_alone(models: Models, method: str, dtype: torch.dtype, device: str) -> None:
    """One request is aborted while its prompt is computed, another in the middle of its answer. Others reuse their slots."""
    requests = [request(i, p) for i, p in enumerate(prompts(7, 2))]
    plain = reference(models, requests, dtype, device)
    it = engine(models.load("target", dtype, device), METHODS[method], models.load("drafter", dtype, device))
    start = it.scheduler.pages.free

    gone = {"1": 1, "2": 6}  # name -> after how many steps

    def end(step: int) -> None:
        for name, when in gone.items():
            if step == when:
                assert it.abort(name)

    answers = run(it, requests, end)
    agree({name: answer for name, answer in answers.items() if name not in gone}, plain, dtype)
    agree({name: answers[name] for name in gone}, plain, dtype, whole=False)
    assert len(answers["1"].ids) < 40 and 0 < len(answers["2"].ids) < 40 and it.scheduler.pages.free == start


@DEVICES
@DTYPES
@UNDISTURBED
def test_cached_pages_are_as_good_as_computed_ones(models: Models, method: str, dtype: torch.dtype, device: str) -> None:
    """The same prompt comes again, with its answer appended, and with another end. Its prefix is taken from the cache."""
    prompt = prompts(1, 9)[0] * 6
    first = [request(0, prompt)]
    plain = reference(models, first, dtype, device)
    again = [request(1, prompt), request(2, prompt + plain["0"].ids[:20]), request(3, [*prompt[:-2], 9, 8])]
    plain |= reference(models, again, dtype, device)
    it = engine(models.load("target", dtype, device), METHODS[method], models.load("drafter", dtype, device))
    agree(run(it, first) | run(it, again), plain, dtype)
    assert it.stats.cached_tokens >= 3 * (len(prompt) - 18)


@DEVICES
@DTYPES
@pytest.mark.parametrize("method", METHODS)
def test_ends_and_a_padded_vocabulary(models: Models, method: str, dtype: torch.dtype, device: str) -> None:
    """Only 300 of 500 ids have logits. Requests that end with a stop id inside a block, with one that only the host looks for
    (the 17th), after one token, after two."""
    few = 300
    target, model = (models.fresh(name, dtype, device) for name in ("target", "target"))
    target.keep_vocabulary(few)  # the drafter keeps its own
    asked = [request(i, p) for i, p in enumerate(prompts(5, 4, few))]
    assert any(token >= few for answer in reference(models, asked, dtype, device).values() for token in answer.ids)
    whole = reference(models, asked, dtype, device, few)
    at = {n: next(i for i in range(12, 40) if a.ids[i] not in a.ids[:i]) for n, a in whole.items()}  # where a new id comes
    unused = [i for i in range(few) if i not in {token for answer in whole.values() for token in answer.ids}]
    cut = {"0": at["0"] + 1, "1": at["1"] + 1, "2": 1, "3": 2, "4": 40}
    stops = {"0": (whole["0"].ids[at["0"]],), "1": (*unused[:16], whole["1"].ids[at["1"]])}
    requests = [
        replace(
            request(i, one.prompt_ids, stops.get(one.id, ()), max_tokens=40 if i < 2 else cut[one.id]),
            prediction=(*whole[one.id].ids[:38], few + 1, *whole[one.id].ids[38:]),
        )
        for i, one in enumerate(asked)
    ]
    expected = {name: Answer() for name in whole}
    for name, answer in expected.items():
        answer.ids, answer.logprobs = whole[name].ids[: cut[name]], whole[name].logprobs
    it = engine(target, METHODS[method], model)
    answers = run(it, requests)
    agree(answers, expected, dtype)
    for name, answer in answers.items():
        assert max(answer.ids) < few
        if answer.ids == expected[name].ids:
            assert answer.reason == ("stop" if name in stops else "length")
