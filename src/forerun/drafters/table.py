"""The table of drafters by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forerun.config import BUDGET, HEADS, EngineConfig, Speculation
from forerun.drafters import Drafter
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.dflash import DFlash
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.measured import DeviceMeasured, HostMeasured, LookUp
from forerun.drafters.ngram import DeviceNgram, Ngram
from forerun.drafters.prediction import Prediction
from forerun.drafters.suffix import Suffix
from forerun.engine.state import RowState
from forerun.heads.block import Block
from forerun.heads.chain import Chain
from forerun.kernels import reference
from forerun.models.decoder import KVCache, Target
from forerun.types import SettingError, require
from forerun.verify.sampling import SamplingState


class DrafterContext(NamedTuple):
    """What a drafter is built on. state: the device's tables; mirror: tables on the host, which hold the tokens that were read
    (the same tables if the device is the CPU); padded: whether the layout is padded; vocab: ids below it may be drafted, since
    the tokenizer and the target have them; model: the weights for draft_model; head: those of a learned drafter."""

    state: RowState
    mirror: RowState
    sampling: SamplingState
    kv: KVCache
    config: EngineConfig
    padded: bool
    vocab: int
    model: Target | None
    head: Chain | Block | None = None


def _ngram(s: Speculation, c: DrafterContext) -> Drafter:
    return DeviceNgram(c.state, s, c.vocab) if c.padded else Ngram(c.state, s, c.vocab)


def _draft_model(s: Speculation, c: DrafterContext) -> Drafter:
    if c.model is None:
        raise SettingError("model", s.model, "the drafter's weights were not loaded")
    most = c.model.max_positions
    limit = s.max_model_len or most
    require(limit <= most, "max_model_len", limit, f"the drafter takes at most {most}")
    ids = c.model.config.vocab_size
    remedy = f"it has {ids} token ids and the target {c.vocab}; give a drafter that has them all"
    require(ids >= c.vocab, "model", s.model, remedy)
    longest = c.state.tokens.shape[1] - s.num_speculative_tokens - 1  # the engine's max_model_len
    remedy = f"on a GPU the drafter must take the target's context; give max_model_len={limit} to the engine"
    require(not c.padded or longest <= limit, "max_model_len", longest, remedy)
    kv = c.model.kv_cache(c.kv.pages, c.kv.block_size)
    budget = c.config.max_num_batched_tokens or BUDGET[c.state.length.device.type]
    drawn = s.draft_sample_method == "probabilistic"
    vocab = min(c.vocab, c.model.vocab)
    return DraftModel(c.model, kv, c.state, c.sampling, vocab, drawn, c.padded, limit, budget)


def _head(s: Speculation, c: DrafterContext) -> Drafter:
    if c.head is None:
        raise SettingError("model", s.model, "the head's weights were not loaded")
    config, drawn = c.head.config, s.draft_sample_method == "probabilistic"
    k, most = s.num_speculative_tokens, config.block_size - 1
    remedy = f"the head drafts blocks of {config.block_size} tokens, the last committed one included; give at most {most}"
    require(s.method != "dflash" or k <= most, "num_speculative_tokens", k, remedy)
    kv = KVCache(config.decoder, c.kv.pages, c.kv.block_size, c.head.weights.dtype, c.state.length.device)
    if isinstance(c.head, Block):
        return _measured(DFlash(c.head, kv, c.state, c.sampling, drawn, c.padded), s, c)
    kind = ChainDrafter
    if len(c.head.weights.modules) == 1 and c.head.kernels is not reference and c.state.length.device.type == "cuda":
        from forerun.drafters.fused_chain import FusedChain  # needs triton, which comes with torch for CUDA

        kind = FusedChain
    return _measured(kind(c.head, kv, c.state, c.sampling, drawn, c.padded), s, c)


def _measured(model: Drafter, s: Speculation, c: DrafterContext) -> Drafter:
    """The drafter with measured confidence, and with a look-up beside it if one is wanted."""
    look_up = None
    if s.prompt_lookup_min is not None and s.prompt_lookup_max is not None:
        look_up = LookUp(s.prompt_lookup_min, s.prompt_lookup_max, c.vocab)
    drawn, kernels = s.draft_sample_method == "probabilistic", c.head.kernels if c.head is not None else reference
    if c.padded and c.state.length.device.type == "cuda" and kernels is not reference:
        from forerun.drafters.fused_measured import FusedMeasured  # needs triton, as above

        return FusedMeasured(model, c.state, look_up, drawn, kernels)
    return (DeviceMeasured if c.padded else HostMeasured)(model, c.state, look_up, drawn)


TABLE: dict[str, Callable[[Speculation, DrafterContext], Drafter]] = {
    "ngram": _ngram,
    "ngram_gpu": lambda s, c: DeviceNgram(c.state, s, c.vocab),
    "suffix": lambda s, c: Suffix(c.mirror, s, c.vocab),
    "prediction": lambda s, c: Prediction(c.state, s, c.vocab, c.padded),
    "draft_model": _draft_model,
    **dict.fromkeys(HEADS, _head),
}
