"""The Python door on a tiny model."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.llm import LLM
from forerun.models.decoder import Target
from forerun.types import SamplingParams, SettingError
from tests.tiny import VOCAB, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path):  # type: ignore[no-untyped-def]
    return LLM.load(folder)


def llm(loaded, speculative_config=None, **settings) -> LLM:  # type: ignore[no-untyped-def]
    return LLM(loaded, speculative_config=speculative_config, **{"kv_cache_tokens": 2048, **settings})


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafters_change_no_token(loaded, method: str) -> None:  # type: ignore[no-untyped-def]
    texts = ["the thing in the thing in the thing", "on and on and on", "one"]
    config = {"method": method, "num_speculative_tokens": 4} | (
        {} if method == "suffix" else {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    )
    plain, drafting = llm(loaded), llm(loaded, config)
    for params in (GREEDY, SamplingParams(temperature=0.3, max_tokens=40, seed=1, repetition_penalty=1.1)):
        expected, got = plain.generate(texts, params), drafting.generate(texts, params)
        assert [o.token_ids for o in got] == [o.token_ids for o in expected]
        assert [o.text for o in got] == [o.text for o in expected]
    assert drafting.stats.drafts.drafted > 0


def test_an_engine_is_gone_with_the_last_who_uses_it(loaded) -> None:  # type: ignore[no-untyped-def]
    """At once: its memory may be what the next one waits for."""
    gc.disable()
    try:
        one = llm(loaded, {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2})
        one.generate("the thing in the thing", GREEDY)
        engine = weakref.ref(one.engine)
        del one
        assert engine() is None
    finally:
        gc.enable()


def test_a_prediction_is_followed(loaded) -> None:  # type: ignore[no-untyped-def]
    plain = llm(loaded).generate("the thing", GREEDY)[0]
    answer = plain.text
    it = llm(loaded, "prediction")
    asked = SamplingParams(temperature=0, max_tokens=24, prediction=answer)
    got = it.generate("the thing", asked)[0]
    assert got.token_ids == plain.token_ids
    wrong = it.generate("the thing", SamplingParams(temperature=0, max_tokens=24, prediction="nothing of the kind"))[0]
    assert wrong.token_ids == plain.token_ids
    with pytest.raises(SettingError, match='start it with speculative_config "prediction"'):
        llm(loaded).generate("the thing", asked)


def test_n_completions_differ_and_a_seed_repeats_them(loaded) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(n=3, temperature=1.5, max_tokens=12, seed=4)
    one = llm(loaded).generate("the", params)[0].completions
    two = llm(loaded, "ngram").generate(["in", "the"], params)[1].completions
    assert len({c.token_ids for c in one}) == 3
    assert [c.token_ids for c in one] == [c.token_ids for c in two]


def test_n_completions_of_equal_prompts_all_differ_without_a_seed(loaded) -> None:  # type: ignore[no-untyped-def]
    """Each request has a seed of its own, and each of its n sequences too; a seed given makes the first of n the only one of
    n = 1."""
    it = llm(loaded)
    answers = it.generate(["the thing"] * 4, SamplingParams(n=4, temperature=5.0, max_tokens=8, ignore_eos=True))
    assert len({c.token_ids for a in answers for c in a.completions}) == 16
    seeded = SamplingParams(temperature=5.0, max_tokens=8, ignore_eos=True, seed=7)
    (four,), (one,) = it.generate("the", replace(seeded, n=4)), it.generate("the", seeded)
    assert four.token_ids == one.token_ids and len({c.token_ids for c in four.completions}) == 4


def test_chunks_carry_logprobs_and_the_counts_of_their_time(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    (whole,) = it.generate("the thing in the thing", params)
    chunks = list(it.stream("the thing in the thing", params))
    assert whole.completions[0].logprobs == sum((c.logprobs or () for c in chunks), ())
    assert all(c.logprobs is not None and [p.token for p in c.logprobs] == list(c.token_ids) for c in chunks)
    assert all(c.logprobs is None for c in it.stream("the thing", GREEDY))
    # read at the end: each chunk still has the counts it came with
    assert [c.stats.steps for c in chunks] == list(range(len(chunks))) and chunks[-1].stats.drafted > 0
    accepted = [sum(len(c.token_ids) - 1 for c in chunks[: i + 1]) for i in range(len(chunks))]
    assert [c.stats.accepted for c in chunks] == accepted == [sum(c.stats.accepted_at) for c in chunks]


def test_a_stream_adds_up_to_the_answer(loaded) -> None:  # type: ignore[no-untyped-def]
    whole = llm(loaded).generate("the thing", GREEDY)[0]
    it = llm(loaded, "ngram")
    chunks = list(it.stream("the thing", GREEDY))
    assert "".join(c.text for c in chunks) == whole.text
    assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    stream = it.stream("the thing", GREEDY)
    next(stream)
    stream.close()
    assert not it.engine.has_work and it.engine.scheduler.pages.free == it.engine.scheduler.pages.count


def test_chat_uses_the_template(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded)
    messages = [{"role": "user", "content": "hello"}]
    assert it.chat(messages, GREEDY)[0].prompt_ids == tuple(it.chat_ids(messages))
    assert len(it.chat([messages, messages], GREEDY)) == 2


def test_bad_words_never_appear(loaded) -> None:  # type: ignore[no-untyped-def]
    """As the tokenizer writes them, alone or behind a space; "b" is one token, "thin" is three."""
    it = llm(loaded)
    free = it.generate("the thing", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0].token_ids
    common = max((i for i in free if 3 <= i < 259), key=free.count)
    pair = next((a, b) for a, b in itertools.pairwise(free) if common not in (a, b) and 3 <= a < 259 and 3 <= b < 259)
    words = tuple(w for ids in ((common,), pair) if it.tokenizer.encode(w := it.tokenizer.decode(ids)) == list(ids))
    assert words
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, bad_words=words)
    ids = it.generate("the thing", params)[0].token_ids
    for word in words:
        spelled = tuple(it.tokenizer.encode(word))
        assert not any(ids[i : i + len(spelled)] == spelled for i in range(len(ids)))


def test_timing_and_statistics_come_with_the_answer(loaded) -> None:  # type: ignore[no-untyped-def]
    done = llm(loaded, "ngram").generate("the thing", GREEDY)[0].completions[0]
    assert 0 <= done.timing.queued_s <= done.timing.ttft_s <= done.timing.e2e_s
    assert done.stats.steps + done.stats.accepted + 1 == len(done.token_ids)
    assert sum(p.tokens for p in done.pieces) == len(done.token_ids) and sum(p.chars for p in done.pieces) == len(done.text)
    assert [done.pieces[0].at_s, done.pieces[-1].at_s] == [done.timing.ttft_s, done.timing.e2e_s]
    assert done.logprobs is None


def test_settings_can_be_read_back(loaded) -> None:  # type: ignore[no-untyped-def]
    got = llm(loaded, {"method": "ngram", "prompt_lookup_max": 3}).settings()
    assert got["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 3,
        "rejection_sample_method": "standard", "num_speculative_tokens_per_batch_size": None,
    }  # fmt: skip
    assert got["kv_cache_tokens"] == 2048 and llm(loaded).settings()["speculative_config"] is None


@pytest.mark.parametrize(
    "config,words",
    [
        ({"method": "ngran"}, "method='ngran'.*ngram"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ({"method": "ngram", "prompt_lookup_min": -1}, "prompt_lookup_min=-1"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "at most prompt_lookup_max"),
        ({"method": "ngram", "model": "x"}, "ngram does not read it"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "suffix does not read it"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2"),
        ({"method": "draft_model"}, "model=None.*path or id"),
        ({"method": "ngram", "rejection_sample_method": "typical"}, "standard or block"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[8, 1, 2]]}, "low, high, k"),
        ("{not json", "not JSON"),
        ({}, "method=None"),
    ],
)
def test_bad_drafting_settings_are_named(loaded, config, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingError, match=words):
        llm(loaded, config)


def test_the_schedule_turns_drafts_off_under_load(loaded) -> None:  # type: ignore[no-untyped-def]
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 64, 0]]}
    it = llm(loaded, config)
    it.generate(["the thing in the thing"] * 3, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert it.stats.drafts.drafted == 0
    it.generate("the thing in the thing", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert it.stats.drafts.drafted > 0


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"max_tokens": 0}, "max_tokens=0.*1 or more"), ({"temperature": -1}, "temperature=-1"), ({"top_p": 0}, "top_p=0"),
        ({"top_k": -2}, "top_k=-2"), ({"min_p": 1.5}, "min_p=1.5"), ({"n": 0}, "n=0"), ({"stop": ("",)}, "stop"),
        ({"min_tokens": 20, "max_tokens": 10}, "at most max_tokens"), ({"logprobs": -1}, "logprobs=-1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"), ({"logit_bias": {1: 200}}, "logit_bias=200"),
    ],
)  # fmt: skip
def test_bad_sampling_settings_are_named(settings: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        SamplingParams(**settings)


def test_the_smallest_context_works(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded, "ngram", max_model_len=2)
    assert len(it.generate([[5]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].token_ids) == 1


def test_an_error_in_one_prompt_leaves_nothing_running(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded, max_model_len=32)
    with pytest.raises(SettingError, match="prompt"):
        it.generate(["the", "the " * 100], GREEDY)
    assert not it.engine.has_work


def test_max_tokens_none_takes_what_the_context_leaves(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded, max_model_len=32)
    done = it.generate([[5] * 10], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(done.token_ids) == 22 and done.completions[0].finish_reason == "length"


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_padding_of_the_vocabulary_is_never_emitted_or_drafted(tmp_path: Path, method: str | None) -> None:
    """A checkpoint with 40 ids more than its tokenizer, and a drafter with 80 more."""
    folder, drafter = (
        tiny_model(tmp_path / "target", vocab=VOCAB + 40),
        tiny_model(tmp_path / "drafter", vocab=VOCAB + 80, seed=1),
    )
    unlimited = Target.load(folder)
    assert unlimited.vocab == VOCAB + 40
    config = None if method is None else {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config = {"method": method, "num_speculative_tokens": 3, "model": str(drafter), "draft_sample_method": "probabilistic"}
    it = LLM(folder, speculative_config=config, kv_cache_tokens=2048)
    params = SamplingParams(temperature=5.0, max_tokens=60, ignore_eos=True, logprobs=5, seed=1, n=3)
    for done in it.generate("the thing", params)[0].completions:
        assert max(done.token_ids) < VOCAB
        assert done.logprobs is not None and max(i for p in done.logprobs for i, _ in p.top) < VOCAB


def test_the_packages_door_names_what_it_has() -> None:
    import forerun

    assert forerun.LLM is LLM and forerun.SamplingParams is SamplingParams and forerun.SettingError is SettingError
    assert all(hasattr(forerun, name) for name in forerun.__all__)
    with pytest.raises(AttributeError, match="Engine"):
        forerun.Engine  # noqa: B018
