"""A tokenizer with more ids than the model's embedding has rows: no such id is drafted, predicted, emitted or drawn for a task,
and where one is asked for it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from forerun.bench.command import Options, plan_of, subject_of
from forerun.bench.records import record
from forerun.config import EngineConfig, Speculation
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.llm import LLM, LoadedModel
from forerun.models.tokenizer import Detokenizer
from forerun.types import Request, SamplingParams, SettingError
from tests.tiny import VOCAB, tiny_model

ROWS = VOCAB - 6  # the last merges of the tokenizer have no row
PROMPT = (5, 6, 5, 6, 5)
METHODS = {
    "plain": None,
    "ngram": Speculation("ngram", 4, 1, 3),
    "ngram_gpu": Speculation("ngram_gpu", 4, 1, 3),
    "suffix": Speculation("suffix", 4),
    "prediction": Speculation("prediction", 4),
    "draft_model": Speculation("draft_model", 4, model="given"),
    "drawn": Speculation("draft_model", 4, model="given", draft_sample_method="probabilistic"),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LLM.load(tiny_model(tmp_path_factory.mktemp("short"), vocab=ROWS, positions=2048))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> dict[str, LoadedModel]:
    """With as many rows as the target, and with more."""
    folder = tmp_path_factory.mktemp("drafter")
    return {"same": loaded, "more": LLM.load(tiny_model(folder, vocab=VOCAB + 8, seed=1, positions=2048))}


def engine(loaded: LoadedModel, method: str, fixed: bool, drafter: LoadedModel) -> Engine:
    """LLM's, or one with steps of fixed shape, as on a GPU."""
    speculation = METHODS[method]
    if speculation is not None and speculation.model is not None:
        speculation = replace(speculation, model=str(drafter.folder))
    config = EngineConfig(
        kv_cache_tokens=2048, max_model_len=256, max_num_seqs=4, adaptive_drafts=False, speculation=speculation
    )
    if not fixed:
        given = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "speculation"}
        return LLM(loaded, speculative_config=speculation, **given).engine
    vocab = min(loaded.tokenizer.size, loaded.target.vocab)

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, fixed: bool) -> Any:
        around = DrafterContext(slots, mirror, sampling, kv, config, fixed, vocab, drafter.target)
        return TABLE[speculation.method](speculation, around) if speculation else None

    return Engine(loaded.target, config, make, lambda: Detokenizer(loaded.tokenizer), fixed)


def answers(it: Engine, prediction: tuple[int, ...] = (), **params: Any) -> list[list[int]]:
    """Of three requests, one of which a stop id that the model lacks would end."""
    found: dict[str, list[int]] = {}
    for i in range(3):
        given = SamplingParams(temperature=1.0 if i else 0.0, max_tokens=40, **params)
        it.add(Request(str(i), PROMPT, given, 40, i, stop_ids=(VOCAB - 1,) * (i == 1), prediction=prediction))
        found[str(i)] = []
    while it.has_work:
        for event in it.step():
            found[event.request_id] += event.tokens
    return list(found.values())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_what_the_model_lacks_is_neither_drafted_nor_emitted(
    loaded: LoadedModel, drafters: dict[str, LoadedModel], method: str, fixed: bool
) -> None:
    plain = answers(engine(loaded, "plain", fixed, loaded))
    prediction = ()
    if method == "prediction":  # right for some tokens; then, where a draft goes on, an id that the model lacks
        right = tuple(plain[0])
        prediction = (*right[:3], VOCAB - 1, *right[3:12], VOCAB - 2, VOCAB - 1, *right[12:])
    for name in ("same", "more") if method in ("draft_model", "drawn") else ("same",):
        it = engine(loaded, method, fixed, drafters[name])
        got = answers(it, prediction)
        assert max(map(max, got)) < ROWS and [len(ids) for ids in got] == [40] * 3
        assert method == "drawn" or got == plain
        assert it.stats.drafts.drafted > 0 or method == "plain"


def test_a_drafter_with_fewer_ids_than_the_target_is_refused(tmp_path: Path, loaded: LoadedModel) -> None:
    folder = tiny_model(tmp_path / "fewer", vocab=ROWS - 1)
    with pytest.raises(SettingError, match=rf"^model=.*{ROWS - 1} token ids and the target {ROWS}; give"):
        LLM(loaded, speculative_config={"method": "draft_model", "model": str(folder)}, kv_cache_tokens=512)


def test_a_request_for_what_the_model_lacks_is_refused(loaded: LoadedModel) -> None:
    it = LLM(loaded, kv_cache_tokens=512)
    text = "ing"
    assert max(it.tokenizer.encode(text)) >= ROWS
    refused: list[tuple[str, Callable[[], object]]] = [
        ("prompt", lambda: it.generate(text)),
        ("prompt", lambda: it.generate([[5, ROWS]])),
        ("stop_token_ids", lambda: it.generate("x", SamplingParams(stop_token_ids=[ROWS]))),
        ("banned_token_ids", lambda: it.generate("x", SamplingParams(banned_token_ids=[[5], [ROWS]]))),
        ("logit_bias", lambda: it.generate("x", SamplingParams(logit_bias={ROWS: 1}))),
    ]
    for name, call in refused:
        with pytest.raises(SettingError, match=rf"^{name}=.*to {ROWS - 1}"):
            call()
    assert not it.engine.has_work


def test_texts_that_need_what_the_model_lacks_are_never_produced_anyway(loaded: LoadedModel) -> None:
    """Bad words, stops and predictions are texts: of what they are written with, the model may lack something."""
    it = LLM(loaded, speculative_config="prediction", kv_cache_tokens=512)
    given = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wanted = it.generate("x", given)[0].token_ids
    texts = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words="ing", stop="the ing", prediction="ing on")
    assert it.generate("x", texts)[0].token_ids == wanted


@pytest.mark.parametrize("load", ["1", "1,2"])
def test_the_random_task_draws_what_the_model_has(loaded: LoadedModel, tmp_path: Path, load: str) -> None:
    output = tmp_path / "run.json"
    asked = ["bench", "-m", str(loaded.folder), "--tasks", "random", "-a", "ngram", "-r", "4", "--warmups", "0", "-n", "2"]
    shown = CliRunner().invoke(cli.app, [*asked, "-c", load, "-o", str(output)])
    assert shown.exit_code == 0, shown.output
    made = record.load(output)
    assert made.finished and all(len(answer.token_ids) == 2 for batch in made.batches for answer in batch.answers)


@pytest.mark.parametrize("config", ["vocab_size", "text_config", "none"])
def test_so_it_does_for_a_server_whose_tokenizer_is_known(loaded: LoadedModel, tmp_path: Path, config: str) -> None:
    folder = tiny_model(tmp_path / "served", vocab=ROWS)
    given = json.loads((folder / "config.json").read_text())
    size = given.pop("vocab_size") if config != "vocab_size" else ROWS
    given |= {"text_config": {"vocab_size": size}} if config == "text_config" else {}
    (folder / "config.json").write_text(json.dumps(given))
    options = Options(
        engine="vllm", model=str(folder), tasks=("random",), arms=("ngram",), program="python", tokenizer=str(folder)
    )
    plan = plan_of(options)
    subject = subject_of(options, plan)
    assert subject.ids is not None
    drawn = {i for variant in range(8) for i in subject.ids(plan.tasks[0].prompt(variant))}
    assert max(drawn) >= ROWS - 20 and (max(drawn) < ROWS or config == "none")
