"""The C kernels for ARM, compiled by a cross compiler and run in an emulator: tests of test_kernels.py and test_blocks.py, in
small. They need Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user, and are skipped without them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from forerun.kernels import cpu
from forerun.models.blocks import FORMATS
from tests import test_blocks, test_kernels
from tests.emulated import COMPILER, EMULATOR, Emulated, build
from tests.test_kernels import ATTENTION, BF16, DTYPES, RAGGED

missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} are not installed"),
    pytest.mark.usefixtures("instead"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    emulated = Emulated(build("neon", tmp_path_factory.mktemp("emulated")))
    yield emulated
    emulated.close()


@pytest.fixture
def isa() -> str:
    return "neon"


@pytest.fixture
def instead(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests below get these kernels whatever they ask for."""

    def emulated(isa: str, dtype: torch.dtype, threads: int = 1) -> cpu.CpuKernels:
        return cpu.CpuKernels(library, dtype, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(test_kernels, "compiled", emulated)
    monkeypatch.setattr(test_blocks, "kernels", emulated)
    torch.manual_seed(0)


def test_the_library_is_of_the_instruction_set(isa: str, library: Emulated) -> None:
    assert library.fr_isa().decode() == isa


@DTYPES
@pytest.mark.parametrize(("k", "outs"), [(100, 17), (64, 40)])
def test_linear_layers(isa: str, k: int, outs: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 5, 7, 10, 13, 65):
        test_kernels.test_linear_layers_agree_with_float64(isa, dtype, k, outs, rows)
    test_kernels.test_rms_norm_rounds_as_the_reference(isa, dtype, k)
    test_kernels.test_parts_are_joined(isa, dtype, 9, 1)
    test_kernels.test_the_best_logits_and_their_probabilities(isa, 4101)
    test_kernels.test_a_token_is_rounded_alike_in_every_batch(isa, dtype, k, outs)


@DTYPES
@pytest.mark.parametrize(("shape", "block"), ATTENTION)
def test_attention(isa: str, shape: test_kernels.AttentionShape, block: int, dtype: torch.dtype) -> None:
    test_kernels.test_attention_agrees_with_the_reference(isa, shape, block, True, dtype)
    test_kernels.test_attention_in_both_directions(isa, shape, block, 3, dtype)
    test_kernels.test_keys_and_values_are_stored(isa, shape, block, True, dtype)
    test_kernels.test_a_token_attends_alike_in_every_batch(isa, [(120, 9), (125, 9)], shape, block, dtype)


@DTYPES
def test_rows_threads_and_chunks(isa: str, dtype: torch.dtype) -> None:
    test_kernels.test_interleaved_heads_are_halves_in_another_order(isa, dtype, True)
    test_kernels.test_threads_do_not_change_a_bit(isa, [(700, 9)], 333, dtype)
    test_kernels.test_empty_rows_and_padding_change_no_bit(isa, RAGGED, 3, dtype)
    if dtype == BF16:
        test_kernels.test_long_contexts_and_prefill_agree_with_the_reference(isa, 2000, 5)


@DTYPES
def test_stacks_of_layers(isa: str, dtype: torch.dtype) -> None:
    for extras in (False, True):
        test_kernels.test_a_stack_of_layers_is_what_the_kernels_do_one_by_one(isa, [(130, 3), (0, 20), (17, 1)], extras, dtype)
    if dtype == BF16:
        test_kernels.test_a_prompt_is_computed_alike_in_any_chunks(isa, 2, dtype)
    test_blocks.test_a_stack_of_layers_is_what_the_kernels_do_one_by_one(isa, dtype, 2)


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_weights(isa: str, format: str, dtype: torch.dtype) -> None:
    for rows, count, tokens in ((50, 3, 21), (5, 9, 1), (33, 1, 7)):
        test_blocks.test_products_agree_with_float64(isa, format, rows, count, tokens, dtype)
    test_blocks.test_normed_products_agree_with_float64(isa, format, dtype)
    test_blocks.test_a_token_is_rounded_alike_in_every_batch(isa, format, dtype)
    test_blocks.test_an_embedding_is_the_expanded_row(isa, format, dtype)
