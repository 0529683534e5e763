"""A target without weights. Its KV cache holds the token ids, and its logits depend on every token that it reads there. So a
stale, missing or foreign entry of the cache changes the logits. Nothing is rounded: the same text gives the same logits in any
batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.kernels import Batch, reference
from forerun.models.decoder import Forward

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 24  # the last id is POISON
POISON = 23  # a text with this id has logits that are not finite
STALE = -9.0  # the first content of pages


class Config:
    eos_ids = (2,)
    layers = 1
    vocab_size = VOCAB


class Ledger:
    """Replaces models.decoder.Target. salt: models with different salts agree often, but not always."""

    def __init__(self, salt: int = 0, positions: int = 160) -> None:
        self.salt, self.max_positions, self.vocab = salt, positions, VOCAB
        self.config, self.dtype, self.device, self.kernels = Config(), torch.float32, torch.device("cpu"), reference
        self.bytes, self.kv_bytes_per_token, self.quantization = 0, 4, None

    def kv_cache(self, pages: int, block_size: int) -> Pages:
        return Pages(pages, block_size)

    def forward(
        self, batch: Batch, kv: Pages, layers: tuple[int, ...] = (), kernels: object = None, x: Tensor | None = None
    ) -> Forward:
        starts, size = batch.row_start.tolist(), kv.block_size
        ids, positions, table = batch.ids.numpy(), batch.positions.numpy(), batch.block_table.numpy()
        logits = np.zeros((len(ids), VOCAB), np.float32)
        wanted = set(range(len(ids)) if batch.logits_at is None else batch.logits_at.tolist())
        for row in range(len(starts) - 1):
            for t in range(starts[row], starts[row + 1]):
                at = positions[t]
                kv.held[table[row, at // size], at % size] = ids[t]
            for t in range(starts[row], starts[row + 1]):
                if t in wanted:
                    seen = np.arange(positions[t] + 1)
                    logits[t] = self.say(kv.held[table[row, seen // size], seen % size])
        rows = logits if batch.logits_at is None else logits[batch.logits_at.numpy()]
        return Forward(torch.from_numpy(rows), ())

    def say(self, text: np.ndarray) -> np.ndarray:
        """Logits [VOCAB] float32 after a text [n]. The last two tokens raise one logit; the whole text seeds noise on all."""
        if POISON in text:
            return np.full(VOCAB, np.nan if len(text) % 2 else np.inf, np.float32)
        key = (int(np.dot(text + 11, (np.arange(len(text)) * 7919 + 13) % 10007)) * 2654435761 + len(text)) % (1 << 32)
        noise = np.random.Generator(np.random.PCG64(key + self.salt)).random(VOCAB, np.float32)
        last = int(text[-1]) * 5 + int(text[-2] if len(text) > 1 else 3)
        noise[(last * 31 + 7) % (POISON - 1)] += 0.7
        noise[POISON] = -20
        return noise * 4


class Pages:
    """Replaces KVCache."""

    def __init__(self, pages: int, block_size: int) -> None:
        self.pages, self.block_size = pages, block_size
        self.held = np.full((pages, block_size), STALE)
        self.keys = [torch.zeros(1)]


class LetterTokens:
    """A tokenizer for grammars: a letter for each id."""

    size, special_ids = VOCAB, frozenset({2, POISON})

    def token_bytes(self, token: int) -> bytes:
        return LETTERS[token].encode()

    def encode(self, text: str, **_: object) -> list[int]:
        return [LETTERS.index(letter) for letter in text]


class Letters:
    """A detokenizer: a letter for each id."""

    def push(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids if i != 2)

    def finish(self) -> str:
        return ""

    def mark(self, strings: object) -> tuple[()]:
        return ()
