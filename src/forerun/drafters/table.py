"""From a method's name to its drafter: the only place that knows both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forerun.config import BUDGET, EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.draft_model import DeviceDraftModel, DraftModel
from forerun.drafters.ngram import DeviceNgram, Ngram
from forerun.drafters.prediction import DevicePrediction, Prediction
from forerun.drafters.suffix import Suffix
from forerun.engine.slots import Slots
from forerun.models.decoder import KVCache, Target
from forerun.types import SettingError, require
from forerun.verify.sampling import SamplingState


class Surroundings(NamedTuple):
    """What a drafter can be built on: the engine's state, and for draft_model the drafter's weights. slots are those of
    the steps and may lie on a GPU; mirror follows them on the host, a step late on a GPU, else they are the same. fixed: steps
    are of fixed shape. vocab: ids below it may be drafted: the tokenizer has them, and so does the target."""

    slots: Slots
    mirror: Slots
    sampling: SamplingState
    kv: KVCache
    config: EngineConfig
    fixed: bool
    vocab: int
    model: Target | None


def _ngram(s: Speculation, e: Surroundings) -> Drafter:
    return DeviceNgram(e.slots, s, e.vocab) if e.fixed else Ngram(e.slots, s, e.vocab)


def _prediction(s: Speculation, e: Surroundings) -> Drafter:
    return DevicePrediction(e.slots, s, e.vocab) if e.fixed else Prediction(e.slots, s, e.vocab)


def _draft_model(s: Speculation, e: Surroundings) -> Drafter:
    if e.model is None:
        raise SettingError("model", s.model, "the drafter's weights were not loaded")
    most = e.model.max_positions
    limit = s.max_model_len or most
    require(limit <= most, "max_model_len", limit, f"the drafter takes at most {most}")
    ids = e.model.config.vocab_size
    remedy = f"it has {ids} token ids and the target {e.vocab}; give a drafter that has them all"
    require(ids >= e.vocab, "model", s.model, remedy)
    kv = e.model.kv_cache(e.kv.pages, e.kv.block_size)
    vocab = min(e.vocab, e.model.vocab)
    sampled = s.draft_sample_method == "probabilistic"
    if not e.fixed:
        budget = e.config.max_num_batched_tokens or BUDGET[e.slots.length.device.type]
        return DraftModel(e.model, kv, e.slots, e.sampling, vocab, limit, budget, sampled)
    longest = e.slots.tokens.shape[1] - s.num_speculative_tokens - 1  # the engine's max_model_len
    remedy = f"on a GPU the drafter must take the target's context; give max_model_len={limit} to the engine"
    require(longest <= limit, "max_model_len", longest, remedy)
    return DeviceDraftModel(e.model, kv, e.slots, e.sampling, vocab, sampled)


TABLE: dict[str, Callable[[Speculation, Surroundings], Drafter]] = {
    "ngram": _ngram,
    "ngram_gpu": lambda s, e: DeviceNgram(e.slots, s, e.vocab),
    "suffix": lambda s, e: Suffix(e.mirror, s, e.vocab),
    "prediction": _prediction,
    "draft_model": _draft_model,
}
