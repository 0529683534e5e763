"""The engine in this process as an endpoint of the instrument: its answers equal those of LLM at every concurrency."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import command
from forerun.bench.engines.endpoint import Request
from forerun.bench.engines.inprocess import InProcess
from forerun.bench.load import latency
from forerun.bench.load import sending as load
from forerun.bench.options import Options
from forerun.bench.records import record, summary
from forerun.bench.records.record import Answer, Load
from forerun.llm import LLM, LoadedModel
from forerun.types import SamplingParams
from tests.scripted import Quiet
from tests.tiny import tiny_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TEXTS = ["the thing in the thing in the thing", "on and on and on", "one", "in the in the in the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), positions=4096)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return LLM.load(folder)


def engine(loaded: LoadedModel, **settings: Any) -> LLM:
    return LLM(loaded, speculative_config=NGRAM, **({"kv_cache_tokens": 4096, "max_num_seqs": 4} | settings))


def drive(llm: LLM, asks: list[Request], shape: Load) -> tuple[Answer, ...]:
    async def go() -> tuple[Answer, ...]:
        return (await load.drive(InProcess(llm), asks, shape, load.arrivals(shape, 0)))[0]

    return asyncio.run(go())


@pytest.mark.parametrize(
    "shape", [Load(requests=4), Load(concurrency=3, requests=4), Load("poisson", rate=300.0, requests=4)], ids=lambda s: s.label
)
def test_the_same_answers_under_every_load(loaded: LoadedModel, shape: Load) -> None:
    expected = engine(loaded).generate(TEXTS, SamplingParams(temperature=0, max_tokens=24))
    answers = drive(engine(loaded), [Request(t, 24, text=t) for t in TEXTS], shape)
    for got, output in zip(answers, expected, strict=True):
        done = output.completions[0]
        assert got.token_ids == done.token_ids and got.text == done.text and got.finish_reason == done.finish_reason
        # the number of drafts depends on the measured costs of steps, the answers do not
        c = got.counts
        assert c.steps + c.accepted in (got.tokens - 1, got.tokens) and c.drafted == sum(c.drafted_at)
        assert c.drafting_steps <= c.steps and c.accepted == sum(c.accepted_at) <= c.drafted
        assert got.prompt_tokens == len(output.prompt_ids) and got.tokens == len(done.token_ids) and not got.failed
        assert len(got.chunks) <= 1 + c.steps and sum(c.tokens or 0 for c in got.chunks) <= got.tokens
        assert 0 < got.ttft_s <= got.e2e_s and got.queued_s is not None and got.queued_s <= got.ttft_s
        assert latency.tpot(got) is not None


def test_what_the_engine_refuses_is_a_failed_request(loaded: LoadedModel) -> None:
    (got,) = drive(engine(loaded, max_model_len=128), [Request("long", 8, ids=tuple([5] * 140))], Load())
    assert got.failed and got.failure and got.tokens == 0


def test_a_request_that_is_left_is_aborted(loaded: LoadedModel) -> None:
    llm = engine(loaded)

    async def go() -> None:
        async def ask() -> None:
            async for _ in InProcess(llm).generate(Request("x", 500, text="the thing", ignore_eos=True)):
                pass

        task = asyncio.create_task(ask())
        while not llm.engine.has_work:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(go())
    assert not llm.engine.has_work


def test_loads_on_the_engine_here_from_the_options(folder: Path, tmp_path: Path) -> None:
    options = Options(
        model=str(folder), arms=("ngram:k=2",), tasks=("explain", "random", "chat"), concurrency=(1, 2), rates=(200.0,),
        requests=2, repetitions=2, max_tokens=8, control=True, samples=60,
    )  # fmt: skip
    options.check()
    plan = command.plan_of(options)
    made = command.measure(plan, command.subject_of(options, plan), Quiet())
    assert made.finished and [a.name for a in made.settings.arms] == ["baseline", "ngram k=2", "baseline again"]
    assert len(made.batches) == 3 * 3 * 3 * 3 and not any(a.failed for b in made.batches for a in b.answers)
    assert all(b.times.steps for b in made.batches), "the engine's own clock"
    assert not any(b.times.cached_tokens for b in made.batches if b.task == "random"), "prompts that share nothing find nothing"
    assert {c.load.label for c in summary.cells(made)} == {"c=1", "c=2", "200/s"}
    cells = [c for c in summary.cells(made) if c.arm == "ngram k=2" and c.task != "random"]
    assert all(c.identical == (4, 4) for c in cells)
    assert made.settings.arms[1].facts is not None and made.settings.arms[1].facts.kv_tokens
    assert [(f.arm, len(f.tokens)) for f in made.first_tokens] == [(a.name, 60) for a in made.settings.arms for _ in range(2)]
    assert made.first_tokens[0].tokens != made.first_tokens[2].tokens, "draws of two arms are independent"
    assert len(summary.draws(made)) == 2
    record.save(made, tmp_path / "r.json")
    assert record.load(tmp_path / "r.json") == made
