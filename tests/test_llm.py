"""The Python interface, LLM, on a tiny model."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.models.decoder import Target
from forerun.models.generation import default_sampling
from forerun.types import Request, SamplingParams, SettingError
from tests.test_files import HOSTILE, works_or_names
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
    """The memory of an engine is free at once. The next engine may need it."""
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
    """Each request has its own seed, and so has each of its n sequences. With a seed given, the first of n sequences is the one
    that n = 1 gives."""
    it = llm(loaded)
    answers = it.generate(["the thing"] * 4, SamplingParams(n=4, temperature=5.0, max_tokens=8, ignore_eos=True))
    assert len({c.token_ids for a in answers for c in a.completions}) == 16
    seeded = SamplingParams(temperature=5.0, max_tokens=8, ignore_eos=True, seed=7)
    (four,), (one,) = it.generate("the", replace(seeded, n=4)), it.generate("the", seeded)
    assert four.token_ids == one.token_ids and len({c.token_ids for c in four.completions}) == 4


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_the_prompt_of_n_completions_is_computed_once(  # type: ignore[no-untyped-def]
    loaded, folder: Path, method: str | None, lag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others find its full pages in the prefix cache, if that is on. The answers equal those without sharing: for short and
    long prompts, answers of one token, and more sequences than run at once."""
    monkeypatch.setattr("forerun.llm.Engine", partial(Engine, padded=lag))
    prompts = [[5 + i % 200 for i in range(start, start + length)] for start, length in ((0, 100), (7, 96), (30, 9), (50, 17))]
    config = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1} if method == "ngram" else None
    if method == "draft_model":
        config = {"method": method, "num_speculative_tokens": 3, "model": str(folder)}
    for tokens in (1, 12):
        params = SamplingParams(n=4, temperature=3.0, max_tokens=tokens, ignore_eos=True)
        found = []
        for caching in (True, False):
            it = llm(loaded, config, enable_prefix_caching=caching, max_num_seqs=6)
            seen: list[tuple[int, int]] = []
            outputs = it.generate(prompts, params, lambda done, produced, seen=seen: seen.append((done, produced)))  # type: ignore[misc]
            found.append([[c.token_ids for c in o.completions] for o in outputs])
            assert seen[-1] == (16, 16 * tokens) and seen == sorted(seen)
            assert all(0 <= c.timing.queued_s <= c.timing.ttft_s <= c.timing.e2e_s for o in outputs for c in o.completions)
            whole = [(len(p) - 1) // 16 * 16 for p in prompts]
            assert it.stats.cached_tokens == (3 * sum(whole) if caching else 0)
            assert it.stats.prompt_tokens == 4 * sum(map(len, prompts)) - it.stats.cached_tokens
        assert found[0] == found[1]


def test_nothing_is_left_of_n_completions_that_are_interrupted(loaded) -> None:  # type: ignore[no-untyped-def]
    """The interrupt comes before the other completions are submitted, and after."""
    for steps in range(1, 6):
        it, calls = llm(loaded), itertools.count(1)

        def stop(done: int, produced: int, calls=calls, steps=steps) -> None:  # type: ignore[no-untyped-def]
            if next(calls) == steps:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            it.generate([[5] * 40, [6] * 9], SamplingParams(n=3, max_tokens=20, ignore_eos=True), stop)
        assert not it.engine.has_work and it.engine.scheduler.pages.free == it.engine.scheduler.pages.count


def test_chunks_carry_logprobs_and_the_counts_of_their_time(loaded) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    (whole,) = it.generate("the thing in the thing", params)
    chunks = list(it.stream("the thing in the thing", params))
    assert whole.completions[0].logprobs == sum((c.logprobs or () for c in chunks), ())
    assert all(c.logprobs is not None and [p.token for p in c.logprobs] == list(c.token_ids) for c in chunks)
    assert all(c.logprobs is None for c in it.stream("the thing", GREEDY))
    # the chunks are read at the end, and each still has the counts that it came with
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
    """A bad word is banned with and without a space before it. "b" is one token, "thin" is three."""
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
    it = llm(loaded, config, adaptive_drafts=False)
    it.generate(["the thing in the thing"] * 3, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert it.stats.drafts.drafted == 0
    it.generate("the thing in the thing", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert it.stats.drafts.drafted > 0


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
    """The checkpoint has 40 ids more than its tokenizer, and the drafter has 80 more."""
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


def test_the_package_exports_what_it_lists() -> None:
    import forerun

    assert forerun.LLM is LLM and forerun.SamplingParams is SamplingParams and forerun.SettingError is SettingError
    assert all(hasattr(forerun, name) for name in forerun.__all__)
    with pytest.raises(AttributeError, match="Engine"):
        forerun.Engine  # noqa: B018


# ---- settings from the model's files


def changed(folder: Path, name: str, **keys: object) -> Path:
    """Change values in one of a model's JSON files."""
    path = folder / name
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | keys))
    return folder


def test_a_chat_ends_at_the_stop_ids_of_every_file(tmp_path: Path) -> None:
    """They come from generation_config.json, config.json, the tokenizer's eos_token, and the chat template."""
    folder = changed(tiny_model(tmp_path), "config.json", eos_token_id=[40, 41])
    changed(folder, "generation_config.json", eos_token_id=42)
    changed(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    it = LLM(folder, kv_cache_tokens=512)
    for token in (0, 2, 40, 41, 42):
        forced = SamplingParams(temperature=0, max_tokens=4, logit_bias={token: 100})
        (done,) = it.chat([{"role": "user", "content": "hi"}], forced)[0].completions
        assert (done.token_ids, done.finish_reason) == ((token,), "stop")
        (done,) = it.generate("the", replace(forced, ignore_eos=True))[0].completions
        assert (done.token_ids, done.finish_reason) == ((token,) * 4, "length")


def test_a_stop_string_may_name_a_special_token(loaded) -> None:  # type: ignore[no-untyped-def]
    """The answer ends before the token, whether the stop string is the token alone or has text before it, and whether the token
    is an eos token or not. The token's text is in the answer only with include_stop_str_in_output."""
    it = llm(loaded, {"method": "ngram", "prompt_lookup_min": 1})
    text = it.tokenizer.token_text
    seeded = [SamplingParams(temperature=6.0, max_tokens=40, ignore_eos=True, seed=seed) for seed in range(60)]
    cases: list[tuple[SamplingParams, tuple[int, ...], str]] = []
    for free, answer in zip(seeded, it.generate(["the"] * len(seeded), seeded), strict=True):
        ids = answer.token_ids
        at = next((i for i in range(1, len(ids)) if ids[i] < 3 <= ids[i - 1] and text(ids[i - 1]).isascii()), 0)
        if at == 0 or ids[at] in ids[:at]:
            continue
        for stop, kept in ((text(ids[at]), ids[:at]), (text(ids[at - 1]) + text(ids[at]), ids[: at - 1])):
            for ignore_eos in (True, False) if 2 not in ids[:at] else (True,):
                for shown in (True, False):
                    params = replace(free, stop=(stop,), ignore_eos=ignore_eos, include_stop_str_in_output=shown)
                    cases.append((params, ids[: at + 1], it.tokenizer.decode(kept) + stop * shown))
    assert len(cases) > 40
    for (_, ids, expected), answer in zip(cases, it.generate(["the"] * len(cases), [c[0] for c in cases]), strict=True):
        (done,) = answer.completions
        assert (done.token_ids, done.text, done.finish_reason) == (ids, expected, "stop")


MESSAGES = [{"role": "user", "content": "hello"}]


def asked(it: LLM, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The sampling parameters of the requests that a call makes."""
    found: list[SamplingParams] = []
    add = it.engine.add

    def note(request: Request):  # type: ignore[no-untyped-def]
        found.append(request.params)
        return add(request)

    with monkeypatch.context() as patch:
        patch.setattr(it.engine, "add", note)
        call()
    return found


def test_sampling_that_the_model_recommends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold where no SamplingParams are given, and only there. LLM.settings() shows them."""
    keys = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
    folder = changed(tiny_model(tmp_path), "generation_config.json", **keys, max_new_tokens=2048)
    it = LLM(folder, kv_cache_tokens=512)
    wanted = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.05)
    assert asked(it, lambda: it.generate(["the", "in"]), monkeypatch) == [wanted, wanted]
    assert asked(it, lambda: it.chat(MESSAGES), monkeypatch) == [wanted]
    assert asked(it, lambda: list(it.stream("the")), monkeypatch) == [wanted]
    for given in (SamplingParams(), GREEDY):
        assert asked(it, lambda given=given: it.generate("the", given), monkeypatch) == [given]  # type: ignore[misc]
        assert asked(it, lambda given=given: list(it.stream("the", given)), monkeypatch) == [given]  # type: ignore[misc]
    del keys["do_sample"]
    assert it.settings()["default_sampling"] == keys
    changed(folder, "generation_config.json", do_sample=False)
    assert LLM.load(folder).sampling == replace(wanted, temperature=0.0)


def test_without_a_recommendation_it_is_the_default(loaded, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    it = llm(loaded)
    assert asked(it, lambda: it.generate("the"), monkeypatch) == [SamplingParams()] and it.settings()["default_sampling"] == {}


@pytest.mark.parametrize("value", HOSTILE)
def test_any_sampling_that_a_file_recommends(value: object, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample"):
        changed(folder, "generation_config.json", **{key: value})
        fine = works_or_names("generation_config.json", lambda: default_sampling(folder))
        assert fine or value is not None
        changed(folder, "generation_config.json", **{key: None})


def test_what_a_chat_template_reads_can_be_given(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for d in documents or [] %}({{ d.title }}){% endfor %}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}>{% if not enable_thinking | default(true) %}no{% endif %}{% endif %}"
    )
    it = LLM(changed(tiny_model(tmp_path), "tokenizer_config.json", chat_template=template), kv_cache_tokens=512)
    more = [*MESSAGES, {"role": "assistant", "content": "well "}]
    cases: list[tuple[list[dict[str, str]], dict[str, Any], str]] = [
        (MESSAGES, {}, "hello<|im_end|>>"),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}, "hello<|im_end|>>no"),
        (MESSAGES, {"chat_template_kwargs": {"documents": [{"title": "a"}]}}, "(a)hello<|im_end|>>"),
        (MESSAGES, {"tools": [{"name": "f"}, {"name": "g"}]}, "[f][g]hello<|im_end|>>"),
        (MESSAGES, {"add_generation_prompt": False}, "hello<|im_end|>"),
        (more, {"continue_final_message": True}, "hello<|im_end|>well "),
    ]
    for messages, given, text in cases:
        assert it.tokenizer.decode(it.chat_ids(messages, **given), skip_special_tokens=False) == text
        (one,), two = it.chat(messages, GREEDY, **given), it.chat([messages, messages], GREEDY, **given)
        assert [o.prompt_ids for o in two] == [one.prompt_ids] * 2 and one.prompt_ids == tuple(it.chat_ids(messages, **given))
    for given, says in (
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "'enable_thinkin': .*it reads add_gen.*enable_thinking"),
        ({"chat_template_kwargs": {"tools": []}}, "give tools as an argument"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of the two"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=says):
            it.chat(MESSAGES, GREEDY, **given)


# ---- a drafter that does not draft


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    caplog.clear()
    return found


def test_a_drafter_that_cannot_draft_is_warned_of_once(
    loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture  # type: ignore[no-untyped-def]
) -> None:
    never = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 0]]}
    llm(loaded, never, max_num_seqs=8)
    (said,) = warnings(caplog)
    assert "ngram does not draft" in said and "[[1, 8, 0]] has k = 0 wherever 1 to 8 sequences run" in said
    llm(loaded, never, max_num_seqs=9)  # with nine sequences it drafts
    llm(loaded, {"method": "ngram", "num_speculative_tokens_per_batch_size": [[2, 8, 0]]}, max_num_seqs=8)
    assert warnings(caplog) == []

    it = llm(loaded, "prediction")
    it.generate("the thing", replace(GREEDY, prediction="the thing"))
    assert warnings(caplog) == []
    it.generate(["the", "in"], GREEDY)
    list(it.stream("the", GREEDY))
    (said,) = warnings(caplog)
    assert "prediction does not draft: a request brings no prediction" in said

    drafter = tiny_model(tmp_path, layers=1)
    config = {"method": "draft_model", "model": str(drafter), "max_model_len": 16, "num_speculative_tokens": 2}
    it = llm(loaded, config)
    it.generate([[5] * 15], GREEDY)
    assert warnings(caplog) == []
    it.generate([[5] * 16, [5] * 20], GREEDY)
    (said,) = warnings(caplog)
    assert "a prompt of 16 tokens is not shorter than the drafter's context of 16" in said


def test_a_drafter_that_never_drafted_is_warned_of_once(loaded, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """The warning comes after many steps without a draft. It does not come after few, if something was drafted, or without a
    drafter."""
    nothing = {"method": "ngram", "prompt_lookup_min": 40, "prompt_lookup_max": 40}
    params = SamplingParams(temperature=8.0, max_tokens=110, ignore_eos=True, seed=1)
    it = llm(loaded, nothing)
    it.generate("the thing", params)
    assert warnings(caplog) == []
    it.generate("the thing", params)
    (said,) = warnings(caplog)
    assert "ngram does not draft: not once in 218 steps" in said
    it.generate(["the thing"] * 3, params)
    assert warnings(caplog) == []
    llm(loaded).generate(["the thing"] * 3, params)
    it = llm(loaded, {"method": "ngram", "prompt_lookup_min": 1}, adaptive_drafts=False)
    it.generate(["the thing"] * 3, params)
    assert it.stats.drafts.drafted > 0 and warnings(caplog) == []
    llm(loaded, nothing).generate(["the thing"] * 3, replace(params, num_speculative_tokens=0))
    assert warnings(caplog) == []
    streamed = llm(loaded, nothing)
    for _ in range(2):
        list(streamed.stream("the thing", params))
    assert len(warnings(caplog)) == 1
