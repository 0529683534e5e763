"""The tile configuration of each product, by shape and number of tokens. benchmarks/gpu/kernels.py measured the tables on an
H200; other shapes take the tiles of similar ones. cuda_products.py says what Tiles means.
"""

from __future__ import annotations

from forerun.kernels.cuda_products import Tiles
from forerun.models.weights import Matrix

FEW_TOKENS = 16


def few_tokens(hidden: int) -> int:
    """Up to how many tokens the Triton products are faster than cuBLAS, in a model of this hidden size. Measured on an H200,
    ms a step, Triton / cuBLAS: hidden 576, 32 tokens 0.79 / 1.11, 40 tokens 0.78 / 1.03, 160 tokens 0.98 / 1.20; 1024, 32
    tokens 2.01 / 2.17, 40 tokens 1.29 / 1.55, 160 tokens 2.72 / 2.34; 4096, 40 tokens 5.68 / 5.51."""
    return 320 if hidden <= 768 else 64 if hidden <= 1536 else FEW_TOKENS


# (outputs, k, gate): the fastest tiles for up to 16 tokens, of the shapes that were measured
TUNED: dict[tuple[int, int, bool], Tiles] = {
    # SmolLM2-135M: qkv, out, gate_up, down, head
    (960, 576, False): Tiles(16, 8, 0, 2),
    (576, 576, False): Tiles(8, 4, 0, 3),
    (1536, 576, True): Tiles(16, 8, 0, 3),
    (576, 1536, False): Tiles(8, 4, 0, 2),
    (49152, 576, False): Tiles(64, 8, 128, 4),
    # Qwen3-0.6B
    (4096, 1024, False): Tiles(16, 8, 0, 2, apart=True),
    (1024, 2048, False): Tiles(8, 4, 0, 4),
    (3072, 1024, True): Tiles(16, 8, 0, 2, apart=True),
    (1024, 3072, False): Tiles(8, 8, 0, 2),
    (151936, 1024, False): Tiles(64, 4, 128, 4, apart=True),
    # Llama-3.1-8B
    (6144, 4096, False): Tiles(16, 4, 512, 3, 4, apart=True),
    (4096, 4096, False): Tiles(8, 4, 512, 3, 4),
    (14336, 4096, True): Tiles(32, 4, 256, 3, apart=True),
    (4096, 14336, False): Tiles(8, 4, 512, 3, 4),
    (128256, 4096, False): Tiles(64, 4, 128, 4, apart=True),
}

# the same for more tokens, by the largest number of them; only shapes for which the defaults in `choose` were not the fastest
WIDE = Tiles(32, 4, 128, 4, apart=True, tokens=64)
MANY: dict[int, dict[tuple[int, int, bool], Tiles]] = {
    32: {(1536, 576, True): WIDE, (576, 1536, False): WIDE._replace(tokens=32), (960, 576, False): WIDE._replace(tokens=32)},
    64: {(3072, 1024, True): WIDE},
    128: {(1536, 576, True): WIDE},
    256: {(1536, 576, True): WIDE, (960, 576, False): Tiles(32, 4, 64, 5, apart=True, tokens=64)},
}


def choose(weight: Matrix, total: int, gate: bool = False) -> Tiles:
    """The tiles for the product of `total` tokens with a matrix [n,k] (with gate [2n,k]): as measured, or those of similar
    shapes."""
    n, k = weight.rows // 2 if gate else weight.rows, weight.columns
    table = TUNED if total <= FEW_TOKENS else next((MANY[most] for most in MANY if total <= most), MANY[256])
    for (tuned_n, tuned_k, tuned_gate), tiles in table.items():
        if (tuned_k, tuned_gate) == (k, gate) and abs(tuned_n - n) * 100 <= tuned_n:  # a head may lack padding ids
            return tiles
    if total > FEW_TOKENS:
        if n >= 32768:  # a head
            return Tiles(64, 4, 128, 3, apart=True, tokens=64) if total <= 32 else Tiles(128, 8, 64, 4, apart=True, tokens=64)
        return Tiles(16, 4, 128, 4, apart=True, tokens=64)
    apart = k >= 1024
    if n >= 32768:  # a head
        return Tiles(64, 4, 128, 4, apart=apart)
    if n >= 6144 and not gate and k <= 1024:  # a draft vocabulary's head
        return Tiles(64 if n >= 12288 else 32, 4, 0, 3)
    if gate:
        return Tiles(32, 4, 256, 3, apart=True) if k > 2048 else Tiles(16, 8, 0, 2 if apart else 3, apart=apart)
    if k <= 3072:
        return Tiles(8, 4 if k <= 2048 else 8, 0, 2, apart=apart)
    return Tiles(8 if n <= k else 16, 4, 512, 3, 4, apart=apart)


def fitting(tiles: Tiles, gate: bool, shared: int) -> Tiles:
    """The tiles, with fewer stages or shorter steps where they would need more than `shared` bytes of shared memory. The
    tables above come from a device with 227 KiB a program; others have 99 or 163 KiB."""
    values = tiles.columns * (2 if gate else 1) + tiles.tokens  # in shared memory, for each position along K
    while values * tiles.step * tiles.stages * 2 > shared:
        shorter = tiles._replace(step=tiles.step // 2)
        tiles = shorter if tiles.stages <= 2 else tiles._replace(stages=tiles.stages - 1)
    return tiles
