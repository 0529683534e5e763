"""Writes tiny random models in Hugging Face's format for tests: config.json, model.safetensors, and a byte-level tokenizer with
a chat template. It does not use transformers, whose import takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forerun.models.config import ModelConfig
from forerun.models.loading import empty, parts

NAMES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; 3 .. 258 are the bytes, then come the merges
MERGES = ("t h", "i n", "e r", "Ġ t", "Ġ a", "a n", "Ġt h", "in g", "o n", "Ġth e")
VOCAB = len(SPECIAL) + 256 + len(MERGES)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_model(
    folder: Path, architecture: str = "llama", *, vocab: int = VOCAB, seed: int = 0, hidden: int = 64, layers: int = 2,
    heads: int = 4, kv_heads: int = 2, head_dim: int = 32, intermediate: int = 128, positions: int = 512,
    tied: bool = False, dtype: torch.dtype = torch.float32, config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of these sizes with random weights into the folder, and return the folder. architecture: llama, mistral,
    qwen2 or qwen3. config: keys of config.json to add or replace. vocab: more than VOCAB gives ids that the tokenizer lacks.
    The end-of-sequence id is 2, <|im_end|>. The same arguments give the same weights."""
    given = {
        "architectures": [NAMES[architecture]], "model_type": architecture, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | dict(config or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    save_file(random_tensors(ModelConfig.parse(given), seed, dtype), folder / "model.safetensors")
    tiny_tokenizer(folder)
    return folder


def random_tensors(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name. Spread wide enough that attention and the choice of the next token are not flat."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, out in parts(config, empty(config, dtype, "meta")):
        noise = torch.randn(tuple(out.shape), generator=generator)
        if "norm" in name:
            noise = 1 + 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.1 * noise
        elif not name.startswith("model.embed"):
            noise = noise * (3.0 if name.startswith("lm_head") else 1.5) * out.shape[1] ** -0.5
        tensors[name] = noise.to(dtype)
    return tensors


def tiny_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: bytes, a few merges and the three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, *(m.replace(" ", "") for m in MERGES)]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split()) for m in MERGES])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
