"""The shape of a head. layouts.py reads it from the config.json of a checkpoint; the trainer makes one."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.models.config import ModelConfig

METHODS = ("eagle", "eagle3", "mtp", "dflash")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """method: one of METHODS. decoder: the shape of its layers, one for each module (DFlash: all its layers); vocab_size is
    that of its draft vocabulary, max_positions and rope those it was trained with. target_hidden, target_vocab,
    target_layers: of the target.

    states: the target's hidden states that it reads, as Target.forward numbers them (state i is the input of layer i).
    normed: the state is read behind the target's final norm (EAGLE-1, and MTP but for MiMo's; states is the last one alone).
    state_norms: norms before fc: "none", "each" (one for every state: EAGLE-3.1, fc_norm) or "all" (one over the concatenated
    states: norm_before_fc).
    embedding_first: the order of embedding and feature where a module joins them.
    norm_before_residual: the residual of the layer is the normed feature (EAGLE-3 only).
    norm_output: what a module hands on to the next drafted token is its output behind the final norm.
    zero_first: the embedding at position 0 is zero (DeepSeek's MTP and MiMo's).
    own_embedding, own_head: the checkpoint has these; otherwise they are the target's.
    modules: MTP: how many; others: 1. block_size, mask_id: DFlash: tokens of a block, the anchor included, and the id whose
    embedding stands for a token to be drafted."""

    method: str
    decoder: ModelConfig
    target_hidden: int
    target_vocab: int
    target_layers: int
    states: tuple[int, ...]
    normed: bool = False
    state_norms: str = "none"
    embedding_first: bool = True
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    zero_first: bool = False
    own_embedding: bool = False
    own_head: bool = False
    modules: int = 1
    block_size: int = 0
    mask_id: int = 0

    @property
    def draft_vocab(self) -> int:
        return self.decoder.vocab_size

    @property
    def mapped(self) -> bool:
        """Whether the draft vocabulary is a part of the target's, so that draft ids are mapped to the target's."""
        return self.own_head and self.draft_vocab != self.target_vocab
