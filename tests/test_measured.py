"""A head with measured confidence, and a look-up beside it, in the engine: on both layouts the answers are those of plain
decoding, drafts are the candidates' own, and passes that do not pay are not made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.engine.state import RowState
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.models.decoder import KVCache, Target
from forerun.types import Request
from forerun.verify.sampling import SamplingState
from tests.test_device import NoText, prompts
from tests.test_head_drafters import request
from tests.test_observe import SHAPE
from tests.tiny import tiny_model
from tests.tiny_heads import random_head

K = 4
LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(tiny_model(tmp_path_factory.mktemp("tiny"), **SHAPE), torch.float32)


def engine(
    target: Target, head: Chain | Block, padded: bool, look_up: tuple[int, int] | None = (1, 3), drawn: bool = False,
    **settings: Any,
) -> Engine:
    method = head.config.method
    sample = "probabilistic" if drawn else "greedy"
    low, high = look_up or (None, None)
    speculation = Speculation(method, K, low, high, model="given", draft_sample_method=sample)
    given: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 3, "kv_cache_tokens": 1024, "block_size": 8} | settings
    config = EngineConfig(speculation=speculation, **given)

    def make(state: RowState, mirror: RowState, sampling: SamplingState, kv: KVCache, padded: bool) -> Drafter:
        return TABLE[method](speculation, DrafterContext(state, mirror, sampling, kv, config, padded, target.vocab, None, head))

    return Engine(target, config, make, NoText, padded)


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
@pytest.mark.parametrize("adaptive", [True, False])
def test_answers_are_those_of_plain_decoding(target: Target, kind: str, padded: bool, adaptive: bool) -> None:
    asked = [request(str(i), text, 40) for i, text in enumerate(prompts(6, 1, 260))]
    head = random_head(target, kind)
    it = engine(target, head, padded, adaptive_drafts=adaptive)
    it.warm_up()
    assert run(it, asked) == plain(target, asked, padded)
    assert it.stats.drafts.accepted > 0 or adaptive
