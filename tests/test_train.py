"""Training of heads on the CPU: its forward passes are the engine's, its losses see no future, it learns, and it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.heads import layouts, saving
from forerun.heads import loading as head_loading
from forerun.heads.block import Block, BlockWeights
from forerun.heads.chain import Chain, ChainWeights
from forerun.kernels import reference
from forerun.models import loading, rope
from forerun.models.decoder import KVCache, Target
from forerun.models.weights import Weights
from forerun.train import data
from forerun.train.data import Samples
from forerun.train.heads import Trainer, draft_ids, paced, walked
from forerun.train.packing import Packing
from forerun.train.parameters import muon, orthogonal
from forerun.train.settings import Settings
from forerun.types import LoadError, SettingError
from tests.tiny_heads import one_row
from tests.tiny_training import head_config, samples, tiny_target

LEARNED = (
    ("eagle3 mapped", "kl"), ("eagle3", "lk"), ("mtp", "lk"), ("mtp of 2", "kl"), ("eagle", "kl"), ("dflash", "hard"),
    ("draft", "hard"),
)  # fmt: skip
KINDS = ("eagle3", "eagle3 mapped", "mtp", "mtp of 2", "eagle", "dflash", "draft")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def few(target: Target) -> Samples:
    return samples(target, 6, most=24)


def trainer(target: Target, kind: str, given: Samples, **settings: object) -> Trainer:
    whole = {"tokens": 128, "unroll": 4, "optimizer": "adamw", "rate": 1e-3} | settings
    return Trainer(target, head_config(target, kind), given, given, Settings(**whole))


def tables(it: Trainer) -> tuple[Tensor, Tensor]:
    return rope.tables(it._decoder.rope, it._decoder.head_dim, 200)


def built(it: Trainer) -> Chain | Block | Target:
    """What was trained, for the engine."""
    weights = it.weights()
    if isinstance(weights, ChainWeights):
        return Chain(it.config, weights, reference, *tables(it))
    if isinstance(weights, BlockWeights):
        return Block(it.config, weights, reference, *tables(it))
    return Target(it.config, weights, reference)


def outputs(it: Trainer, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first pack in the samples' order: logits [N,steps,V], whether they have a target, and the places of the bases."""
    plan = it._data.packing.plan(None)
    it._data.features.prepare(plan.sample[0][plan.sample[0] >= 0])
    pack = it._data.pack(torch.from_numpy(plan.sample[0]), torch.from_numpy(plan.begin[0]))
    logits = torch.zeros(len(pack.base), steps, len(it._values))
    valid = torch.zeros(len(pack.base), steps, dtype=torch.bool)
    with torch.no_grad():
        for part in it._method.parts(it._kernels, pack, it._data.corpus, it._data.features.of(pack), steps, None):
            shape = (len(part.base), part.width)
            at = slice(part.first, part.first + part.width)
            logits[part.base, at] = (part.x @ it._values.T).view(*shape, -1)
            valid[part.base, at] = it._targets(part, pack)[0]
    return logits, valid, pack.base


@torch.inference_mode()
def on_pages(target: Target, head: Chain | Block | Target, ids: list[int], base: int, steps: int) -> Tensor:
    """The logits of `steps` drafted tokens behind base, as the engine computes them; the drafts are the true tokens."""
    pages, found = 12, []
    if isinstance(head, Target):
        batch = one_row(target, ids[: base + 1 + steps], 0, pages)
        return head.forward(batch, head.kv_cache(pages, 8)).logits[base + 1 :]
    states = target.forward(one_row(target, ids[: base + 1], 0, pages), target.kv_cache(pages, 8), head.config.states).hidden
    kv = KVCache(head.config.decoder, pages, 8, target.dtype)
    if isinstance(head, Block):
        head.context(states, one_row(target, ids[: base + 1], 0, pages), kv.keys, kv.values)
        batch = one_row(target, [ids[base + 1], *[head.config.mask_id] * 4], base + 1, pages)  # a block is always whole
        x = head.run(head.kernels.embed(batch.ids, head.weights.embedding), batch, kv.keys, kv.values)
        return head.logits(x)[1 : steps + 1]
    feature, last = head.encode(states), head.config.modules - 1
    for step in range(steps):
        module = min(step, last)
        if step <= last:
            batch = one_row(target, ids[1 : base + 2 + step], 0, pages)
        else:
            batch = one_row(target, [ids[base + 1 + step]], base + step, pages)
        embedded = head.embed(batch.ids, batch.positions)
        output = head.hand_on(module, head.run(module, embedded, feature, batch, kv.keys[module], kv.values[module]))
        found.append(head.logits(module, output[-1:]))
        feature = torch.cat((torch.zeros_like(output[:1]), output)) if step < last else output[-1:]
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_is_the_engines(target: Target, few: Samples, kind: str) -> None:
    """At every base and unrolled step the trainer's logits are those of the exported head on pages."""
    it = trainer(target, kind, few)
    head = built(it)
    logits, valid, _ = outputs(it, 4)
    row = checked = 0
    for i in range(3):
        ids = few.ids[few.start[i] : few.start[i + 1]].tolist()
        for base in range(int(few.prompt[i]) - 1, len(ids) - 2):
            count = int(valid[row].sum())
            assert count == min(4, len(ids) - 2 - base)
            want = on_pages(target, head, ids, base, count)
            torch.testing.assert_close(logits[row, :count], want, atol=2e-4, rtol=2e-4)
            row, checked = row + 1, checked + count
    assert checked > 50


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_sees_a_later_token(target: Target, few: Samples, kind: str) -> None:
    """Another token at place t of one sample changes steps that have it among their tokens, and nothing else."""
    it = trainer(target, kind, few)
    logits, valid, places = outputs(it, 4)
    plan = it._data.packing.plan(None)
    begin, end = int(plan.begin[0][1]), int(plan.begin[0][2])
    changed = begin + int(few.prompt[1]) + 4
    ids = np.array(few.ids)
    ids[few.start[1] + changed - begin] = (ids[few.start[1] + changed - begin] + 50) % 200 + 3
    other = trainer(target, kind, few._replace(ids=ids))
    if it.ids is not None:
        other._use_ids(it.ids)
        other.parameters.set_state(it.parameters.state())
    again, _, _ = outputs(other, 4)
    latest = places[:, None] + 1 + torch.arange(4) * (kind != "dflash")  # the last token that a step reads
    sees = (latest >= changed) & ((places >= begin) & (places < end))[:, None]
    same = (logits == again).all(-1)
    assert bool((same | sees)[valid].all())
    assert not bool(same[sees & valid].any())


@pytest.mark.parametrize(("kind", "loss"), LEARNED)
def test_it_learns_by_heart(target: Target, few: Samples, kind: str, loss: str) -> None:
    given = {"unroll": 3} if kind != "eagle" else {"unroll": None}
    it = trainer(target, kind, few, steps=60, rate=8e-3, loss=loss, clip=1.0, tokens=256, **given)
    assert (it.ids is not None) == (kind == "eagle3 mapped")
    while not it.done:
        it.step()
    first, *_, last = it.metrics()
    assert first.step == 1 and last.step == 60 and last.rate < 1e-5 and last.loss < 0.3 * first.loss
    found = it.evaluate(3)
    assert found.lengths[-1] > 3.4 and found.samples == 6 and min(found.accuracy[:1]) > 0.95, found


def test_muon(target: Target, few: Samples) -> None:
    """Its directions have singular values of about 1, a step without a finite gradient changes nothing, and it learns."""
    x = torch.randn(2, 30, 50) @ torch.diag(torch.logspace(0, -1, 50))
    for given in (x, x.mT):
        found = orthogonal(given, torch.float32)
        u, _, v = torch.linalg.svd(given, full_matrices=False)
        values = (u.mT @ found @ v.mT).diagonal(dim1=1, dim2=2)
        assert found.shape == given.shape and float(values.min()) > 0.6 and float(values.max()) < 1.3
    master, mean = [torch.randn(4, 6) for _ in range(2)], [torch.randn(4, 6) for _ in range(2)]
    before = [[x.clone() for x in master], [x.clone() for x in mean]]
    bad, values = [torch.full((4, 6), float("nan"))] * 2, [x.to(torch.bfloat16) for x in master]
    muon(master, values, bad, mean, torch.tensor([1e-2, 0.0, 3]), 0.1)
    torch.testing.assert_close([master, mean], before, atol=1e-6, rtol=1e-6)
    it = trainer(target, "eagle3 mapped", few, steps=60, rate=8e-3, clip=1.0, tokens=256, unroll=3, optimizer="muon")
    start = it.parameters.master.clone()
    it.step()
    assert bool((it.parameters.master != start).float().mean() > 0.5)
    while not it.done:
        it.step()
    first, *_, last = it.metrics()
    assert last.loss < 0.3 * first.loss and it.evaluate(3).lengths[-1] > 3.4


def test_weights_of_d_pace(target: Target, few: Samples) -> None:
    chance, valid = torch.tensor([[0.5, 0.2, 1.0]]), torch.tensor([[True, True, False]])
    torch.testing.assert_close(paced(chance, valid, 0.5), torch.tensor([[0.75 + 0.75 * 0.6, 0.75 * 0.6, 0.0]]))
    it = trainer(target, "dflash", few, steps=40, rate=5e-3, loss="hard", pace=0.5, anchors=40)
    while not it.done:
        it.step()
    assert it.metrics()[-1].accuracy[0] > 0.6


def test_a_draft_model_begins_where_another_ended(target: Target, few: Samples) -> None:
    first = trainer(target, "draft", few, steps=3)
    first.step()
    weights = first.weights()
    assert isinstance(weights, Weights)
    initial = dict(loading.parts(head_config(target, "draft"), weights))
    second = Trainer(target, head_config(target, "draft"), few, None, Settings(tokens=128, seed=5, optimizer="adamw"), initial)
    assert torch.equal(first.parameters.master, second.parameters.master)
    with pytest.raises(SettingError, match="give 280"):
        Trainer(target, replace(head_config(target, "draft"), vocab_size=50), few)


@pytest.mark.parametrize(("kind", "loss"), [("eagle3", "nll"), ("dflash", "lk")])
def test_other_losses_fall(target: Target, few: Samples, kind: str, loss: str) -> None:
    it = trainer(target, kind, few, steps=40, rate=6e-3, loss=loss, unroll=2)
    while not it.done:
        it.step()
    first, *_, last = it.metrics()
    assert last.loss < 0.6 * first.loss and last.accuracy[0] > first.accuracy[0] + 0.2


def test_it_resumes_where_it_stopped(target: Target, few: Samples) -> None:
    """Bit for bit, in the middle of an epoch, with several packs an epoch."""
    settings = {"steps": 12, "tokens": 64}
    whole, cut = (trainer(target, "eagle3 mapped", few, **settings) for _ in range(2))
    while not whole.done:
        whole.step()
    for _ in range(7):
        cut.step()
    assert 0 < cut._in_epoch < cut._packs
    resumed = trainer(target, "eagle3 mapped", few, **settings)
    resumed.load_state_dict(cut.state_dict())
    while not resumed.done:
        resumed.step()
    assert torch.equal(resumed.parameters.master, whole.parameters.master)
    assert [m.step for m in resumed.metrics()] == [8, 9, 10, 11, 12]
    with pytest.raises(SettingError, match="the checkpoint was made with 12"):
        trainer(target, "eagle3 mapped", few, steps=13, tokens=64).load_state_dict(cut.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_are_the_others(target: Target, few: Samples, tmp_path: Path) -> None:
    on_gpu = tiny_target(tmp_path, torch.bfloat16, "cuda")
    captured, other = (
        Trainer(on_gpu, head_config(on_gpu, "eagle3 mapped"), few, few, Settings(steps=12, tokens=64), graphs=graphs)
        for graphs in (True, False)
    )
    for it in (captured, other):
        while not it.done:
            it.step()
    torch.testing.assert_close(captured.parameters.master, other.parameters.master, atol=1e-5, rtol=1e-3)


def test_trainers_may_share_states(target: Target, few: Samples) -> None:
    first = trainer(target, "eagle3", few, steps=3, tokens=64, seed=1)
    second, alone = (
        Trainer(target, head_config(target, "eagle3"), few, few, Settings(steps=3, tokens=64, unroll=4, seed=2), like=like)
        for like in (first, None)
    )
    assert second._data is first._data
    for it in (first, second, alone):
        while not it.done:
            it.step()
    assert torch.equal(second.parameters.master, alone.parameters.master)
    assert not torch.equal(second.parameters.master, first.parameters.master)


def test_states_are_kept_or_computed_again(target: Target, few: Samples) -> None:
    kept, again = (trainer(target, "eagle3", few, steps=6, tokens=64, feature_memory=m) for m in (1 << 30, 0))
    assert kept._data.features.stored and not again._data.features.stored
    for it in (kept, again):
        while not it.done:
            it.step()
    torch.testing.assert_close(kept.parameters.master, again.parameters.master, atol=2e-4, rtol=1e-3)
    assert kept.evaluate(2) == again.evaluate(2)


def test_the_head_can_be_saved(target: Target, few: Samples, tmp_path: Path) -> None:
    it = trainer(target, "eagle3 mapped", few, steps=2)
    it.step()
    weights = it.weights()
    saving.save(tmp_path / "head", it.config, weights, "tiny target")
    config = layouts.read_config(tmp_path / "head", "eagle3", target.config)
    head = head_loading.load(tmp_path / "head", config, target)
    assert isinstance(head, Chain) and head.weights.ids is not None and it.ids is not None
    assert torch.equal(head.weights.ids, it.ids)
    assert torch.equal(head.weights.modules[0].layer.qkv.dense(), weights.modules[0].layer.qkv.dense())


def test_packs(target: Target) -> None:
    """Every sample with an answer is in one pack of an epoch; epochs differ; nothing is above its size."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 60, 40)
    lengths[5] = 3
    start = np.concatenate(([0], lengths.cumsum()))
    prompt = np.minimum(rng.integers(1, 20, 40), lengths - 1).astype(np.int32)
    prompt[5] = 2  # its answer of one token has no base
    packing = Packing(Samples(np.zeros(start[-1], np.int32), start, prompt), 100)
    sizes = packing.sizes
    assert sizes.tokens == 128 and 5 not in packing.usable
    for epoch in (0, 1):
        plan = packing.plan(epoch)
        assert sorted(plan.sample[plan.sample >= 0].tolist()) == packing.usable.tolist()
        assert plan.begin.max() <= sizes.tokens
        assert all(packing.bases[row[row >= 0]].sum() <= sizes.bases for row in plan.sample)
    assert not np.array_equal(packing.plan(0).sample, packing.plan(1).sample)
    with pytest.raises(SettingError, match="two tokens or more"):
        Packing(Samples(np.zeros(2, np.int32), np.array([0, 2]), np.array([1], np.int32)), 64)


def test_draft_vocabulary_by_frequency() -> None:
    given = Samples(np.array([9, 9, 9, 4, 4, 2, 7, 9, 2, 5], np.int32), np.array([0, 7, 10]), np.array([3, 1], np.int32))
    assert given.counts(12).tolist() == [0, 0, 2, 0, 2, 1, 0, 1, 0, 0, 0, 0]
    assert draft_ids(given, 12, 3).tolist() == [2, 4, 5]


def test_walk_over_answers() -> None:
    """Two answers of three and four bases; behind m accepted tokens comes one of the target's."""
    hits = np.array([[1, 1], [0, 0], [1, 0], [1, 0], [1, 1], [0, 1], [1, 0]], bool)
    found = walked(hits, np.array([3, 4]))
    # k 2: bases 0 (2 accepted, the answer ends), 3 (1), 5 (0), 6 (1);  k 1: 0 (1), 2 (1), 3 (1), 5 (0), 6 (1)
    assert found.lengths == (9 / 5, 8 / 4)
    assert found.accepted == (3 / 4, 1 / 4)


def test_samples_in_a_folder(tmp_path: Path) -> None:
    given = Samples(np.arange(9, dtype=np.int32), np.array([0, 4, 9]), np.array([2, 3], np.int32))
    data.save(tmp_path / "samples", given)
    found = data.load(tmp_path / "samples")
    assert all(np.array_equal(a, b) for a, b in zip(given, found, strict=True))
    data.save(tmp_path / "samples", given._replace(prompt=np.array([2, 9])))
    with pytest.raises(LoadError, match="do not fit together"):
        data.load(tmp_path / "samples")
    (tmp_path / "samples" / "prompt.npy").unlink()
    with pytest.raises(LoadError, match=r"prompt\.npy is missing"):
        data.load(tmp_path / "samples")
