"""The default model end to end: speculation, batching, chunks and the prefix cache change no token of a real model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forerun.kernels import cpu
from forerun.llm import LLM, LoadedModel
from forerun.models import loading
from forerun.types import SamplingParams

CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError('negative')
    return width * height"""
ASKED = (
    f"Repeat this code word for word:\n{CODE}",
    "Name three rivers in Europe.",
    f"Rename area to surface in this code and return all of it:\n{CODE}",
)
GREEDY = SamplingParams(temperature=0, max_tokens=48)
KV = 4096


ISAS = dict.fromkeys((cpu.isas()[0], *(isa for isa in cpu.isas() if isa == "avx2")))


@pytest.fixture(scope="module", params=[(isa, dtype) for isa in ISAS for dtype in ("auto", "bfloat16")], ids="-".join)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """By the kernels for the best instruction set here and for the commonest, in blocks as the file has them and expanded."""
    isa, dtype = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.SETTING, isa)
        yield LLM.load(dtype=dtype)


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Greedy answers, one request at a time."""
    it = llm(loaded)
    return [it.chat([{"role": "user", "content": text}], GREEDY)[0].token_ids for text in ASKED]


def llm(loaded: LoadedModel, speculative_config: object = None, **settings: object) -> LLM:
    dtype = loading.named(loaded.target.dtype) if loaded.target.quantization is None else "auto"  # a drafter's too
    return LLM(loaded, speculative_config=speculative_config, dtype=dtype, kv_cache_tokens=KV, **settings)  # type: ignore[arg-type]


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in ASKED]


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "suffix"},
    ],
    ids=["ngram k=4", "ngram k=12", "suffix"],
)
def test_drafts_change_no_token(loaded: LoadedModel, plain: list[tuple[int, ...]], config: dict) -> None:
    it = llm(loaded, config)
    assert [o.token_ids for o in it.chat(conversations(), GREEDY)] == plain
    assert it.stats.drafts.accepted > 20
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=32)
    without = llm(loaded).chat(conversations(), sampled)
    assert [o.token_ids for o in it.chat(conversations(), sampled)] == [o.token_ids for o in without]


def test_a_prediction_changes_no_token_and_is_taken(loaded: LoadedModel, plain: list[tuple[int, ...]]) -> None:
    it = llm(loaded, "prediction")
    expected = loaded.tokenizer.decode(plain[0])
    params = SamplingParams(temperature=0, max_tokens=48, prediction=expected)
    assert it.chat(conversations()[0], params)[0].token_ids == plain[0]
    assert (it.stats.drafts.acceptance_rate or 0) > 0.9


def test_the_model_as_its_own_drafter_is_always_right(loaded: LoadedModel) -> None:
    """Past the end of the text too: a stop inside a block would leave drafts behind it that count as not accepted."""
    through = replace(GREEDY, ignore_eos=True)
    without = llm(loaded).chat(conversations(), through)
    it = llm(loaded, {"method": "draft_model", "model": str(loaded.folder), "num_speculative_tokens": 4})
    assert [o.token_ids for o in it.chat(conversations(), through)] == [o.token_ids for o in without]
    assert it.stats.drafts.acceptance_rate == 1.0


def test_small_chunks_and_a_warm_prefix_cache_change_no_token(loaded: LoadedModel, plain: list[tuple[int, ...]]) -> None:
    it = llm(loaded, "ngram", max_num_batched_tokens=32, max_num_seqs=2)
    for _ in range(2):
        assert [o.token_ids for o in it.chat(conversations(), GREEDY)] == plain
    assert it.stats.cached_tokens > 0


def test_it_answers(loaded: LoadedModel) -> None:
    question = "What is the capital of France? Answer with one word."
    answer = llm(loaded, "ngram").chat([{"role": "user", "content": question}], GREEDY)[0]
    assert "Paris" in answer.text and answer.completions[0].finish_reason == "stop"
