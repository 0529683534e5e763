"""From a method's name to its drafter: the only place that knows both."""

from __future__ import annotations

from collections.abc import Callable

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.ngram import DeviceNgram, Ngram
from forerun.drafters.prediction import Prediction
from forerun.drafters.suffix import Suffix
from forerun.engine.slots import Slots
from forerun.models.decoder import KVCache, Target
from forerun.types import SettingError, require
from forerun.verify.sampling import SamplingState


class Surroundings:
    """What a drafter can be built on: the engine's state, and for draft_model the drafter's weights.
    vocab: the ids that the tokenizer has."""

    def __init__(
        self, slots: Slots, sampling: SamplingState, kv: KVCache, config: EngineConfig, vocab: int, model: Target | None
    ) -> None:
        self.slots, self.sampling, self.kv, self.config, self.vocab, self.model = slots, sampling, kv, config, vocab, model


def _ngram(s: Speculation, e: Surroundings) -> Drafter:
    return DeviceNgram(e.slots, s, e.vocab) if e.slots.tokens.is_cuda else Ngram(e.slots, s, e.vocab)


def _draft_model(s: Speculation, e: Surroundings) -> Drafter:
    if e.model is None:
        raise SettingError("model", s.model, "the drafter's weights were not loaded")
    most = e.model.max_positions
    limit = s.max_model_len or most
    require(limit <= most, "max_model_len", limit, f"the drafter takes at most {most}")
    kv = e.model.kv_cache(e.kv.pages, e.kv.block_size)
    vocab = min(e.vocab, e.model.config.vocab_size)
    sampled = s.draft_sample_method == "probabilistic"
    return DraftModel(e.model, kv, e.slots, e.sampling, vocab, limit, e.config.max_num_batched_tokens, sampled)


TABLE: dict[str, Callable[[Speculation, Surroundings], Drafter]] = {
    "ngram": _ngram,
    "ngram_gpu": lambda s, e: DeviceNgram(e.slots, s, e.vocab),
    "suffix": lambda s, e: Suffix(e.slots, s, e.vocab),
    "prediction": lambda s, e: Prediction(e.slots, s, e.vocab),
    "draft_model": _draft_model,
}
