"""A head with measured confidence, and a look-up beside it, in the engine: answers are those of plain decoding, candidates are
those from scratch, both layouts choose alike, and passes that do not pay are not made."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter, Needs, Rows, Stateless
from forerun.drafters.measured import SURE, DeviceMeasured, Found, HostMeasured, Measured
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.cycle import PROMPT, UNIFORM, Key
from forerun.engine.engine import Engine
from forerun.engine.layouts import OBSERVES, PASSES, RESTS, Decoding
from forerun.engine.state import RowState
from forerun.engine.step import Committed, InFlight
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request
from forerun.verify.accept import accept_drawn, accept_ratio
from forerun.verify.sampling import SamplingState
from tests.statistical import PASS, REJECT, chi_square, tally
from tests.test_device import NoText, first_three, prompts
from tests.test_head_drafters import Helped, lived, request
from tests.test_ngram import naive
from tests.test_observe import SHAPE
from tests.tiny import tiny_model
from tests.tiny_heads import drafts_from_scratch, random_head

K = 4
LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
SMALL: dict[str, Any] = {"max_model_len": 120, "kv_cache_tokens": 104, "max_num_batched_tokens": 20}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(tiny_model(tmp_path_factory.mktemp("tiny"), **SHAPE), torch.float32)


def engine(
    target: Target, head: Chain | Block, padded: bool, look_up: tuple[int, int] | None = (1, 3), drawn: bool = False,
    k: int = K, rule: str = "standard", **settings: Any,
) -> Engine:
    method, (low, high) = head.config.method, look_up or (None, None)
    sample = "probabilistic" if drawn else "greedy"
    speculation = Speculation(
        method, k, low, high, model="given", draft_sample_method=sample, rejection_sample_method=rule
    )  # fmt: skip
    given: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 3, "kv_cache_tokens": 1024, "block_size": 8} | settings
    config = EngineConfig(speculation=speculation, **given)

    def make(state: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool) -> Drafter:
        return TABLE[method](speculation, DrafterContext(state, mirror, sampling, kv, config, padded, target.vocab, None, head))

    return Engine(target, config, make, NoText, padded)


def measured(it: Engine) -> DeviceMeasured | HostMeasured:
    assert isinstance(it.drafter, DeviceMeasured | HostMeasured)
    return it.drafter


def plain(target: Target, requests: list[Request], padded: bool) -> dict[str, list[int]]:
    return run(Engine(target, EngineConfig(max_model_len=200, kv_cache_tokens=1024), lambda *_: None, NoText, padded), requests)


def run(it: Engine, requests: list[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        it.add(one)
    while it.has_work:
        for event in it.step():
            found[event.request_id] += event.tokens
    return found


@LAYOUTS
@pytest.mark.parametrize("kind", ["eagle3", "mtp of 3", "dflash"])
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "full"])
def test_answers_are_those_of_plain_decoding(target: Target, kind: str, padded: bool, adaptive: bool) -> None:
    """Sampled ones too, since all drafts are point masses."""
    asked = [request(str(i), text, 40, temperature=i % 2, seed=i) for i, text in enumerate(prompts(6, 1, 260))]
    it = engine(target, random_head(target, kind), padded, adaptive_drafts=adaptive)
    it.warm_up()
    assert run(it, asked) == plain(target, asked, padded)
    assert it.stats.drafts.accepted > 0 or adaptive


def candidates(it: Engine, slot: int) -> tuple[list[int], list[int]]:
    """The head's tokens at hand and the look-up's."""
    drafter = measured(it)
    if isinstance(drafter, HostMeasured):
        row = drafter.calibration.kept[slot]
        return row.tokens, list(row.found)
    own, other = drafter.calibration.tokens[slot].tolist()
    typical, found = ((drafter.calibration.bins[slot, line] >= 0).sum() for line in (2, 3))
    return own[:typical], other[:found]


def wrong_candidates(it: Engine, target: Target, head: Chain | Block, helped: Helped, seen: Counter[str]) -> int:
    """Rows whose candidates are not those from scratch, or whose draft is neither."""
    wrong = 0
    for sequence in it.scheduler.running:
        slot, length = sequence.slot, int(it.state.length[sequence.slot])
        size = int(it.state.draft_size[slot])
        if not bool(it.state.active[slot]) or not size or length < 2:
            continue
        ids = it.state.tokens[slot, :length].tolist()
        own, found = candidates(it, slot)
        wrong += found != naive(ids, 1, 3, K)[0][: len(found)] or (not found and bool(naive(ids, 1, 3, K)[0]))
        if own and (length - 1 + K) // 8 < len(sequence.pages):
            wrong += own != drafts_from_scratch(target, head, ids, K)[: len(own)]
            seen["head"] += 1
        draft = helped.drafts[slot, :size].tolist()
        wrong += draft not in (own, found)
        seen["look-up chosen" if draft == found else "head chosen"] += 1
        seen["without passes"] += not own
    return wrong


@LAYOUTS
@pytest.mark.parametrize("kind", ["eagle3", "mtp of 3", "dflash"])
def test_candidates_are_those_from_scratch(target: Target, kind: str, padded: bool) -> None:
    """With preemption and prefix hits, 0 to K accepted tokens, and launches with and without passes in any order."""
    head, seen, rng = random_head(target, kind), Counter[str](), random.Random(4)
    it = engine(target, head, padded, **SMALL)
    any_cost(it, rng)
    assert lived(it, target, head, seen, wrong_candidates) == 0
    cases = ("head", "look-up chosen", "head chosen", "without passes", "preempted", "cached")
    assert all(seen[case] for case in cases), seen
    steps = [[seen[f"{accepted} of {drafted}"] for accepted in range(drafted + 1)] for drafted in range(1, K + 1)]
    assert any(one[-1] for one in steps) and any(sum(one[:-1]) for one in steps), seen


def any_cost(it: Engine, rng: random.Random) -> None:
    """Let steps and passes cost what the random numbers say, so that all kinds of launches are chosen."""
    runner = it._step.runner

    def cost(keys: Sequence[Key], context: float) -> list[float]:
        dear = rng.choice([1.0, 4.0])
        return [10.0 + dear * key.tokens / 10 + 5 * rng.random() * key.passes for key in keys]

    runner.cost = cost  # type: ignore[method-assign]
    runner.pass_cost = lambda rows: rng.choice([0.1, 1.0, 9.0])  # type: ignore[method-assign]


@pytest.mark.parametrize("look_up", [(1, 3), None])
@pytest.mark.parametrize("fault", ["", "pages are shared all the same", "it drafts all the same"])
def test_a_head_that_has_rested_drafts_for_no_row_that_it_missed(
    target: Target, look_up: tuple[int, int] | None, fault: str
) -> None:
    """Launches of all kinds in any order, with prefix hits."""
    head, seen, rng = random_head(target, "eagle3"), Counter[str](), random.Random(4)
    it = engine(target, head, True, look_up, **SMALL | {"kv_cache_tokens": 640})
    any_cost(it, rng)
    layout: Any = it._step.layout
    layout._kind = lambda *_: rng.choice([PASSES] * 3 + [OBSERVES] + [RESTS] * 4)
    miss = layout._miss

    def missed(d: Decoding) -> None:
        seen["rests"] += 1
        miss(d)
        if fault == "pages are shared all the same":
            for row in d.rows:
                row.sequence.observed = None
        elif fault:
            it.state.blind.fill_(False)

    layout._miss = missed
    wrong = lived(it, target, head, seen, wrong_candidates if look_up else wrong_drafts)
    assert all(seen[case] for case in ("rests", "head", "cached")), seen
    assert wrong > 0 if fault else wrong == 0


def wrong_drafts(it: Engine, target: Target, head: Chain | Block, helped: Helped, seen: Counter[str]) -> int:
    """Rows whose draft is not the head's from scratch, without a look-up."""
    wrong = 0
    for sequence in it.scheduler.running:
        slot, length = sequence.slot, int(it.state.length[sequence.slot])
        size = int(it.state.draft_size[slot])
        if bool(it.state.active[slot]) and size and length > 1 and (length - 1 + K) // 8 < len(sequence.pages):
            want = drafts_from_scratch(target, head, it.state.tokens[slot, :length].tolist(), K)
            wrong += helped.drafts[slot, :size].tolist() != want[:size]
            seen["head"] += 1
    return wrong


@LAYOUTS
def test_a_head_that_misses_states_is_noticed(target: Target, padded: bool) -> None:
    """Its observe does not go on in launches without passes."""
    head, seen = random_head(target, "eagle3"), Counter[str]()
    it = engine(target, head, padded, **SMALL)
    any_cost(it, random.Random(4))
    model, drafts = measured(it)._model, measured(it)
    observe, weighed, made = model.observe, drafts._weighed, [True]

    def spied(rows: Rows) -> Draft:
        draft = weighed(rows)
        made[0] = bool((torch.tensor([len(candidates(it, slot)[0]) for slot in rows.slot.tolist()]) > 0).any())
        return draft

    drafts._weighed = spied  # type: ignore[method-assign]
    model.observe = lambda seen: observe(seen) if made[0] else None  # type: ignore[method-assign]
    assert lived(it, target, head, seen, wrong_candidates) > 0


def test_both_layouts_choose_alike(target: Target) -> None:
    """One request, all drafts verified: what is drafted after each length is the same."""
    head = random_head(target, "eagle3")
    exact, other = (drafts_of_a_request(engine(target, head, padded, adaptive_drafts=False)) for padded in (False, True))
    shared = sorted(set(exact) & set(other))[: -K - 2]  # the exact layout drafts less near the end
    assert len(shared) > 20 and [exact[n][0] for n in shared] == [other[n][0] for n in shared]
    assert all(np.allclose(exact[n][1], other[n][1], atol=1e-4) for n in shared)


def drafts_of_a_request(it: Engine) -> dict[int, tuple[list[int], list[float]]]:
    """By the length of the text: the draft behind it with its survival probabilities."""
    drafts = dict[int, tuple[list[int], list[float]]]()
    propose = measured(it).propose

    def spied(rows: Rows) -> Draft:
        draft = propose(rows)
        assert draft.confidence is not None
        for slot, tokens, size, sure in zip(rows.slot, draft.tokens, draft.size.tolist(), draft.confidence, strict=True):
            if size:
                drafts[int(it.state.length[slot])] = tokens[:size].tolist(), sure[:size].tolist()
        return draft

    measured(it).propose = spied  # type: ignore[method-assign]
    run(it, [request("a", [5, 6, 7, 8] * 3, 60)])
    return drafts


def launches(it: Engine, prompt: list[int]) -> list[Key]:
    """The decode launches of one request."""
    ran, runner = list[Key](), it._step.runner
    real = runner.run

    def spied(key: Key, given: Any) -> Any:
        ran.append(key)
        return real(key, given)

    runner.run = spied  # type: ignore[method-assign]
    run(it, [request("a", prompt, 150)])
    runner.run = real  # type: ignore[method-assign]
    return [key for key in ran if key.layout != PROMPT]


def test_a_head_that_does_not_pay_rests_until_it_does(target: Target) -> None:
    """The launches of one request after the other. The head is never right. Then passes cost nothing; rows that the head has
    missed are not drafted for, so it goes on with the next request."""
    it, dear = engine(target, random_head(target, "eagle3"), True, look_up=None), 0.5
    costs = lambda keys, context: [1.0 + 0.01 * key.tokens + dear * key.passes for key in keys]  # noqa: E731
    it._step.runner.cost = costs  # type: ignore[method-assign]
    ran = [launches(it, list(range(40 + i, 60 + i))) for i in range(4)]
    rested = [sum(not key.observes for key in keys) / len(keys) for keys in ran]
    assert rested[0] == 0 and rested[-1] > 0.9, rested
    assert sum(key.passes for key in ran[-1]) < 5 and any(key.observes for key in ran[-1]), "it looks at each request"
    dear = 0.0
    launches(it, list(range(50, 70)))
    assert all(key.passes for key in launches(it, list(range(51, 71))))


@pytest.mark.parametrize("dear", [0.5, 0.0, None])
def test_the_policy_leaves_passes_out_where_they_do_not_pay(target: Target, dear: float | None) -> None:
    """The head's drafts are never right. With dear passes nearly all launches are without them; with free ones, or if nothing
    is known of costs, none is."""
    it = engine(target, random_head(target, "eagle3"), True, look_up=None)
    if dear is not None:
        costs = lambda keys, context: [1.0 + 0.01 * key.tokens + dear * key.passes for key in keys]  # noqa: E731
        it._step.runner.cost = costs  # type: ignore[method-assign]
    ran = Counter(key.passes for key in launches(it, list(range(40, 60))))
    assert ran[False] > 4 * ran[True] > 0 if dear else ran[False] < 4, ran


class EveryOther(Stateless):
    """Two of four rows draft the target's tokens and are sure of them; the other two are wrong. They change at every step."""

    needs = Needs(device=True, skips=True)

    def __init__(self, state: RowState, answers: dict[int, list[int]]) -> None:
        self._state, self._answers, self._slots = state, answers, dict[int, list[int]]()
        self.steps, self.confident = 0, True

    def admit(self, slot: int, request: Request) -> None:
        self._slots[slot] = self._answers[int(request.id)]

    def propose(self, rows: Rows) -> Draft:
        self.steps += 1
        tokens, sure = torch.zeros(len(rows.slot), K, dtype=torch.int64), torch.zeros(len(rows.slot), K)
        for i, (slot, size) in enumerate(zip(rows.slot.tolist(), rows.k.tolist(), strict=True)):
            length, right = int(self._state.length[slot]), (slot + self.steps) % 2 == 0
            behind = self._slots[slot][length : length + K] if size else []
            tokens[i, : len(behind)] = torch.tensor(behind, dtype=torch.int64) + (not right)
            sure[i] = (0.99 if right else 0.3) ** torch.arange(1, K + 1)
        return Draft(tokens % 260, rows.k.clone(), None, sure if self.confident else None)


@pytest.mark.parametrize("confident", [True, False])
def test_rows_that_share_their_drafts_verify_the_likeliest_at_hand(target: Target, confident: bool) -> None:
    """The host knows only drafts that were verified already, where the other two rows were sure."""
    asked = [request(str(i), text, 40) for i, text in enumerate(prompts(4, 1, 260))]
    right = {int(name): [*asked[int(name)].prompt_ids, *ids] for name, ids in plain(target, asked, True).items()}
    speculation = Speculation("eagle3", K, model="given")
    config = EngineConfig(max_model_len=200, max_num_seqs=4, kv_cache_tokens=1024, block_size=8, speculation=speculation)
    drafters = list[EveryOther]()

    def make(state: RowState, *_: Any) -> Drafter:
        drafters.append(EveryOther(state, right))
        drafters[0].confident = confident
        return drafters[0]

    it, drafted = Engine(target, config, make, NoText, padded=True), Counter[str]()
    costs = lambda keys, context: [1.0 + key.width * (key.layout == UNIFORM) for key in keys]  # noqa: E731
    it._step.runner.cost = costs  # type: ignore[method-assign]
    layout: Any = it._step.layout
    layout.shared = lambda rows: (2 * K,) if rows == 4 else ()
    read = it._step.read

    def spied(step: InFlight) -> Iterator[Committed]:
        for one in read(step):
            drafted.update(drafted=one.drafted, accepted=one.accepted)
            yield one

    it._step.read = spied  # type: ignore[method-assign]
    run(it, asked)
    assert drafted["drafted"] > 60
    assert (drafted["accepted"] > 0.8 * drafted["drafted"]) is confident, drafted


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("fault", ["", "the head's probabilities for the look-up's tokens"])
def test_drawn_drafts_beside_a_look_up_keep_the_targets_distribution(
    tmp_path_factory: pytest.TempPathFactory, rule: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token and the third, each alone and with the one before it, against exact probabilities."""
    folder = tiny_model(tmp_path_factory.mktemp("few"), vocab=24, **SHAPE)
    few, prompt, at_once, rounds = Target.load(folder, torch.float32), (5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 3), 64, 64
    right, seen, taken = first_three(few, prompt, 1.0), np.zeros((24, 24, 24)), Counter[bool]()
    it = engine(few, random_head(few, "eagle3"), True, (1, 2), True, 2, rule, max_num_seqs=at_once, max_model_len=32)
    by_rule = measured(it)._by_rule
    monkeypatch.setattr("forerun.drafters.measured.LIKELY", 0.02)

    def spied(draft: Draft, found: Any) -> Draft:
        made = by_rule(draft, found)
        for before, after, k in zip(draft.tokens, made.tokens, draft.size, strict=True):
            taken[bool(k) and not torch.equal(before, after)] += 1
        return made._replace(probs=draft.probs) if fault else made

    monkeypatch.setattr(measured(it), "_by_rule", spied)
    for i in range(rounds):
        asked = [request(str(s), list(prompt), 4, temperature=1.0, seed=s) for s in range(i * at_once, (i + 1) * at_once)]
        asked = [Request(one.id, one.prompt_ids, one.params, 4, int(one.id)) for one in asked]
        for ids in run(it, asked).values():
            seen[tuple(ids[:3])] += 1
    assert taken[True] > 500, taken
    fits = [chi_square(seen.sum(others), right.sum(others)) for others in ((0, 2), (0, 1), (2,), (0,))]
    assert min(fits) < REJECT if fault else min(fits) > PASS, fits


@pytest.mark.parametrize("sees_the_draw", [False, True])
def test_the_choice_may_not_depend_on_what_was_drawn(target: Target, sees_the_draw: bool) -> None:
    """One drafted token of four ids, the look-up's or the head's. Taking the look-up's where the head has drawn another one
    would give that token too often."""
    count, p, q = 20000, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    at = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q.repeat(count, 1), 1, generator=at)
    one = torch.ones(count, dtype=torch.int64)
    match = torch.where(drawn[:, 0] != 3, SURE, 1) if sees_the_draw else torch.randint(1, SURE + 1, (count,), generator=at)
    found = Found(torch.full_like(drawn, 3), one, match)
    draft = Draft(drawn, one, q.repeat(count, 1)[:, None])
    given = measured(engine(target, random_head(target, "eagle3"), False, drawn=True))._by_rule(draft, found)
    seeds, start = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    broken = torch.zeros(count, 2, dtype=torch.bool)
    first = accept_drawn(accept_ratio, p.repeat(count, 2, 1), broken, given, seeds, start).tokens[:, 0]
    fit = chi_square(tally(first.numpy(), 4), p.numpy())
    assert (fit < REJECT) if sees_the_draw else fit > PASS


def test_a_seed_repeats_its_tokens_with_drawn_drafts_whatever_ran_before(target: Target) -> None:
    asked = [request("a", [5, 6, 7, 8] * 3, 30, temperature=1.0, seed=3)]
    it = engine(target, random_head(target, "eagle3"), False, drawn=True)
    first = run(it, asked)
    run(it, [request(str(i), text, 20, temperature=1.0, seed=i) for i, text in enumerate(prompts(4, 3, 260))])
    assert run(it, asked) == first


def test_settings_switch_the_look_up_on(target: Target) -> None:
    head = random_head(target, "eagle3")
    assert measured(engine(target, head, True, look_up=None))._look_up is None
    one = Speculation("eagle3", 4, prompt_lookup_max=3, model="given")
    assert (one.prompt_lookup_min, one.prompt_lookup_max) == (3, 3)
    it = measured(engine(target, head, True, (2, 5)))
    assert it._look_up is not None and it._look_up[:2] == (2, 5) and it.needs.cheap and it.needs.skips
    assert isinstance(it, Measured)
