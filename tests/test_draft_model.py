"""Drafts from a smaller model: its own keys and values, greedy and sampled, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.config import Speculation
from forerun.drafters import Rows
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.models.decoder import Target
from forerun.types import SamplingParams, SettingError, Verdict
from forerun.verify.accept import accept_block
from tests.test_engine import engine, prompts, request, run
from tests.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a drafter with other weights and a smaller shape."""
    here = tmp_path_factory.mktemp("pair")
    small = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1}
    return tiny_model(here / "target"), tiny_model(here / "drafter", "qwen2", seed=1, **small)


def with_drafter(
    folders: tuple[Path, Path], drafter: Target, k: int = 4, sampled: bool = False, limit: int = 512, **settings: object
) -> Engine:
    target = Target.load(folders[0], "float32")
    method = "probabilistic" if sampled else "greedy"

    def make(slots, mirror, sampling, kv, padded):  # type: ignore[no-untyped-def]
        own = drafter.kv_cache(kv.pages, kv.block_size)
        return DraftModel(drafter, own, slots, sampling, VOCAB, sampled, padded, limit, 64)

    return engine(
        folders[0], target, make, speculation=Speculation("draft_model", k, model="x", draft_sample_method=method), **settings
    )


LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])


@LAYOUTS
def test_the_target_as_its_own_drafter_is_always_right(folders: tuple[Path, Path], padded: bool) -> None:
    it = with_drafter(folders, Target.load(folders[0], "float32"), padded=padded)
    requests = [request(str(i), p, stop_ids=(), max_tokens=41) for i, p in enumerate(prompts(5))]
    run(it, requests)
    assert it.stats.drafts.acceptance_rate == 1.0 and it.stats.drafts.acceptance_length == 5.0


@LAYOUTS
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_any_drafter_gives_the_targets_greedy_tokens(
    folders: tuple[Path, Path], sampled: bool, temperature: float, padded: bool
) -> None:
    """Point masses also leave seeded sampling as it is; drafts with probabilities keep only its distribution."""
    drafter = Target.load(folders[1], "float32")
    requests = [request(str(i), p, temperature=temperature, seed=i) for i, p in enumerate(prompts(5))]
    plain = run(engine(folders[0], Target.load(folders[0], "float32")), requests)
    small = {"kv_cache_tokens": 192, "block_size": 8, "padded": padded}  # preemption too
    answers = run(with_drafter(folders, drafter, sampled=sampled, **small), requests)
    if temperature == 0 or not sampled:
        assert {n: a.ids for n, a in answers.items()} == {n: a.ids for n, a in plain.items()}
    else:
        assert any(answers[n].ids != plain[n].ids for n in plain)  # else the test above would prove nothing


def test_incremental_drafts_equal_drafts_from_scratch(folders: tuple[Path, Path]) -> None:
    """No key or value is stale, approximate or missing after 0 .. k accepted tokens."""
    drafter = Target.load(folders[1], "float32")
    it = with_drafter(folders, drafter)
    assert isinstance(it.drafter, DraftModel)
    it.add(request("a", prompts(1, 4)[0] * 2, stop_ids=(), max_tokens=60))
    accepted = set()
    script = np.random.default_rng(0)

    def verify(key, layout, logits):  # type: ignore[no-untyped-def]
        draft = layout.draft
        count = torch.from_numpy(script.integers(1, int(draft.size[0]) + 2, 1))  # commit any number, right or wrong
        tokens = torch.cat((draft.tokens, draft.tokens.new_full((1, 1), 9)), 1)
        tokens[0, int(count) - 1] = 9
        accepted.add(int(count) - 1)
        return tokens, Verdict(tokens, count)

    it._step.cycle._verify = verify  # type: ignore[method-assign]
    while it.has_work:
        it.step()
        if not it.has_work:
            break
        sequence = it.scheduler.running[0]
        rows = Rows(torch.tensor([sequence.slot]), torch.tensor([3]), 3)
        if len(sequence.pages) * 16 < len(sequence.ids) + 3:
            continue
        computed = it.drafter._computed.copy()
        with torch.inference_mode():
            going_on = it.drafter.propose(rows)
            it.drafter._computed[:] = 0
            afresh = it.drafter.propose(rows)
        it.drafter._computed[:] = computed
        assert going_on.tokens.tolist() == afresh.tokens.tolist() and going_on.size.tolist() == [3]
    assert accepted >= {0, 1, 2, 3, 4}


@LAYOUTS
def test_sampled_drafts_keep_the_targets_distribution(folders: tuple[Path, Path], padded: bool) -> None:
    """The second and third token, drafted, against the target's exact marginals; a drafter's own tokens must fail."""
    drafter, target = Target.load(folders[1], "float32"), Target.load(folders[0], "float32")
    prompt, bias = (5, 6, 7), {i: -100.0 for i in range(VOCAB) if i >= 12}
    params = {"temperature": 1.5, "logit_bias": bias, "max_tokens": 3, "stop_ids": ()}

    def seen(it: Engine, count: int = 1500) -> np.ndarray:
        answers = run(it, [request(str(i), prompt, seed=i, **params) for i in range(count)])
        return np.array([a.ids for a in answers.values()])

    plain = seen(engine(folders[0], target, max_num_seqs=32))
    for method in ("standard", "block"):
        it = with_drafter(folders, drafter, k=2, sampled=True, max_num_seqs=32, padded=padded)
        part = it._step.cycle
        if method == "block":
            part._accept = accept_block
        drafted = seen(it)
        assert 0.02 < (it.stats.drafts.acceptance_rate or 0) < 0.98
        for position in (1, 2):
            table = np.stack([np.bincount(x[:, position], minlength=VOCAB) for x in (plain, drafted)])
            table = table[:, table.sum(0) >= 10]
            assert stats.chi2_contingency(table).pvalue > 1e-3

    it = with_drafter(folders, drafter, k=2, sampled=True, max_num_seqs=32, padded=padded)

    def take_all(target, draft, u_accept, u_redraw):  # type: ignore[no-untyped-def]
        bonus = target.argmax(-1)[:, -1:]
        tokens = torch.cat((draft.tokens, bonus), 1)
        tokens[torch.arange(len(tokens)), draft.size] = target.argmax(-1)[torch.arange(len(tokens)), draft.size]
        return Verdict(tokens, draft.size + 1)

    it._step.cycle._accept = take_all
    wrong = seen(it)
    table = np.stack([np.bincount(x[:, 1], minlength=VOCAB) for x in (plain, wrong)])
    assert stats.chi2_contingency(table[:, table.sum(0) >= 10]).pvalue < 1e-6


def test_past_the_drafters_context_nothing_is_drafted(folders: tuple[Path, Path]) -> None:
    drafter = Target.load(folders[1], "float32")
    requests = [request("a", [5] * 20, stop_ids=(), max_tokens=60)]
    plain = run(engine(folders[0], Target.load(folders[0], "float32")), requests)
    it = with_drafter(folders, drafter, limit=40)
    assert run(it, requests)["a"].ids == plain["a"].ids
    drafts = it.stats.drafts
    assert 0 < drafts.drafting_steps < drafts.steps


def test_another_vocabulary_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(SettingError, match="its vocabulary is not the target's"):
        LLM(folders[0], speculative_config={"method": "draft_model", "model": str(other)}, kv_cache_tokens=1024)


def test_through_the_python_door(folders: tuple[Path, Path]) -> None:
    config = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 3}
    llm = LLM(folders[0], speculative_config=config, kv_cache_tokens=1024)
    plain = LLM(folders[0], kv_cache_tokens=1024)
    params = SamplingParams(temperature=0, max_tokens=20)
    assert llm.generate("the thing", params)[0].token_ids == plain.generate("the thing", params)[0].token_ids
    assert llm.settings()["speculative_config"]["draft_sample_method"] == "greedy"
