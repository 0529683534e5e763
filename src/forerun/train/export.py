"""A trained drafter to a folder: a head in its method's layout (heads/saving.py), a draft model in that of Hugging Face."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from forerun.heads import saving
from forerun.heads.block import BlockWeights
from forerun.heads.chain import ChainWeights
from forerun.heads.config import HeadConfig
from forerun.models.config import ModelConfig
from forerun.models.files import SINGLE
from forerun.models.loading import named, parts
from forerun.models.weights import Weights

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save(
    folder: Path, config: HeadConfig | ModelConfig, weights: ChainWeights | BlockWeights | Weights, target_name: str,
    target_folder: Path, shard_bytes: int | None = None,
) -> None:
    """target_folder: that of the target, whose tokenizer a draft model has. shard_bytes: see heads/saving.save; for a head."""
    if isinstance(config, HeadConfig):
        assert not isinstance(weights, Weights)
        saving.save(folder, config, weights, target_name, shard_bytes)
    else:
        assert isinstance(weights, Weights)
        _save_model(folder, config, weights, target_folder)


def _save_model(folder: Path, config: ModelConfig, weights: Weights, target_folder: Path) -> None:
    from safetensors.torch import save_file

    settings: dict[str, Any] = {
        "architectures": [config.architecture], "model_type": "llama", "hidden_act": "silu", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.eps, "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied, "torch_dtype": named(weights.dtype), "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in parts(config, weights)}
        save_file(tensors, made / SINGLE, {"format": "pt"})
        (made / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for name in TOKENIZER:
            if (target_folder / name).is_file():
                shutil.copyfile(target_folder / name, made / name)
        made.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
