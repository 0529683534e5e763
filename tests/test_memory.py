"""Tokens of the KV cache, by the numbers, and what memory this process can get, with made-up /proc and cgroup trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Draft, Needs, Rows, Stateless
from forerun.engine.engine import Engine
from forerun.engine.memory import tokens_on_cpu, tokens_on_gpu
from forerun.models.decoder import Target
from forerun.system import available_memory, total_memory
from forerun.types import Request, SamplingParams, SettingError
from tests.test_device import NoText
from tests.tiny import tiny_model

GB = 10**9


def tokens(**changed: float) -> int:
    given = {"total": 100 * GB, "free": 80 * GB, "share": 0.9, "weights": 16 * GB, "other": 2 * GB, "each": 1000}
    given |= {"longest": 8000, "captured": True} | changed
    return tokens_on_gpu(**given)  # type: ignore[arg-type]


def test_the_cache_gets_the_rest_of_the_share() -> None:
    assert tokens() == 72_000_000
    assert tokens(share=0.3) == 12_000_000, "engines side by side each get what they were given"
    assert tokens(share=0.3, free=50 * GB) == 12_000_000, "another engine was started first"
    assert tokens(each=3000) == 24_000_000, "a drafter has keys and values of its own"
    assert tokens(other=3 * GB) == 71_000_000


def test_never_more_than_is_free() -> None:
    assert tokens(free=32 * GB) == 29_100_000  # 97 % of the free memory
    assert tokens(free=32 * GB, captured=False) == 25_500_000


def test_the_error_names_all_figures_if_no_sequence_fits() -> None:
    said = r"gpu_memory_utilization=0.18.*weights take 16.0.*graphs 2.0.*8000 tokens 0.0"
    with pytest.raises(SettingError, match=said):
        tokens(share=0.18)
    with pytest.raises(SettingError, match=r"80.0 were free.*lower max_model_len"):
        tokens(longest=10**9)


# ---- a CPU: what the process can get


MEMORY = 40_000_000 * 1024
V1, V2 = "4:memory:/a/b\n1:name=systemd:/x\n0::/\n", "0::/a/b\n"
STAT = f"anon 999\nactive_file {2 * GB}\ninactive_file {GB}\nslab_reclaimable {GB // 2}\n"
OLD_STAT = "active_file 7\ntotal_active_file 1000\ntotal_inactive_file 2000\n"


def machine(root: Path, groups: str = "", files: dict[str, str | int] | None = None) -> Path:
    """A tree of /proc and /sys: 64 GB of memory, of which 40 can be had. groups: /proc/self/cgroup; files: of the groups."""
    meminfo = "MemTotal: 64000000 kB\nMemFree: 1000000 kB\nMemAvailable: 40000000 kB\nCached: 39000000 kB\n"
    given = {"proc/meminfo": meminfo, "proc/self/cgroup": groups}
    for name, text in (given | {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in (files or {}).items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


AROUND: dict[str, str | int] = {
    "a/b/memory.max": 8 * GB, "a/b/memory.current": GB, "a/memory.max": 6 * GB, "a/memory.current": 2 * GB,
}  # fmt: skip
WITHIN: dict[str, tuple[str, dict[str, str | int], int]] = {
    "no group": ("", {}, MEMORY),
    "no limit": (V2, {"a/b/memory.max": "max", "a/b/memory.high": "max", "a/b/memory.current": 5 * GB}, MEMORY),
    "version 2": (V2, {"a/b/memory.max": 8 * GB, "a/b/memory.current": 3 * GB}, 5 * GB),
    "the group around it": (V2, AROUND, 4 * GB),
    "memory.high": (V2, {"a/b/memory.max": "max", "a/b/memory.high": 2 * GB, "a/b/memory.current": GB}, GB),
    "above memory.high": (V2, {"a/b/memory.high": 2 * GB, "a/b/memory.current": 3 * GB}, 0),
    "the page cache can be had": (
        V2, {"a/b/memory.max": 8 * GB, "a/b/memory.current": 7 * GB, "a/b/memory.stat": STAT}, 4 * GB + GB // 2,
    ),
    "version 1": (
        V1,
        {
            "memory/memory.limit_in_bytes": 9223372036854771712, "memory/a/b/memory.limit_in_bytes": 8 * GB,
            "memory/a/b/memory.usage_in_bytes": 6 * GB, "memory/a/b/memory.stat": OLD_STAT,
        },
        2 * GB + 3000,
    ),
    "a container that is told the path outside": (
        "4:cpu,memory:/docker/123\n", {"memory/memory.limit_in_bytes": 4 * GB, "memory/memory.usage_in_bytes": GB}, 3 * GB,
    ),
    "both versions": ("4:cpu:/\n0::/a\n", {"unified/a/memory.max": 4 * GB, "unified/a/memory.current": 0}, 4 * GB),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_what_this_process_can_get(name: str, tmp_path: Path) -> None:
    groups, files, expected = WITHIN[name]
    assert available_memory(machine(tmp_path, groups, files)) == expected


def test_what_there_is_in_all(tmp_path: Path) -> None:
    assert total_memory(machine(tmp_path)) == 64_000_000 * 1024
    assert total_memory(machine(tmp_path, V2, AROUND)) == 6 * GB


def test_this_machine() -> None:
    assert 0 < available_memory() <= total_memory()


# ---- a CPU: tokens of the cache


def on_cpu(**changed: int) -> tuple[int, int]:
    given = {"free": 8 * GB, "each": 1000, "block": 16, "seqs": 4, "longest": 4096, "given": False} | changed
    return tokens_on_cpu(**given)  # type: ignore[arg-type]


def test_all_sequences_get_room_if_a_quarter_of_the_memory_has_it() -> None:
    assert on_cpu() == (4 * 4096 + 16, 4096)
    assert on_cpu(given=True) == (4 * 4096 + 16, 4096)
    assert on_cpu(free=4 * 1000 * 16 * 600) == (598 * 16 + 16, 4096), "a quarter, with the dummy page"
    assert on_cpu(free=4 * 1000 * 16 * 600, each=2000) == (298 * 16 + 16, 4096), "a drafter has keys and values of its own"


def test_a_context_that_does_not_fit_is_cut_or_refused() -> None:
    assert on_cpu(free=4 * 1000 * 16 * 100) == (98 * 16 + 16, 98 * 16)
    said = r"max_model_len=4096.*quarter of the free 0.0 GB holds 1568 tokens.*give 1568 or less, or give kv_cache_tokens"
    with pytest.raises(SettingError, match=said):
        on_cpu(free=4 * 1000 * 16 * 100, given=True)
    assert on_cpu(free=4 * 1000 * 16 * 100, given=True, longest=1568) == (98 * 16 + 16, 1568)
    for given in (False, True):
        with pytest.raises(SettingError, match=r"kv_cache_tokens=None.*holds 0 tokens.*end what else runs"):
            on_cpu(free=4 * 1000 * 16, given=given)


class Own(Stateless):
    """A drafter that guesses nothing, with keys and values of its own."""

    def __init__(self, each: int) -> None:
        self.needs = Needs(kv_bytes_per_token=each)

    def propose(self, rows: Rows) -> Draft:
        return Draft(torch.zeros(len(rows.slot), 0, dtype=torch.int64), torch.zeros_like(rows.slot))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(tiny_model(tmp_path_factory.mktemp("tiny")))  # positions: 512


@pytest.fixture
def engine(target: Target, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on a machine that has so many pages of 16 tokens for the target's keys and values free."""

    def make(pages: int, own: int = 0, **settings: Any) -> Engine:
        free = 4 * pages * 16 * target.kv_bytes_per_token
        monkeypatch.setattr("forerun.engine.engine.free_memory", lambda device: free)
        config = EngineConfig(max_num_seqs=2, speculation=Speculation("ngram", 4) if own else None, **settings)
        it = Engine(target, config, lambda *_: Own(own * target.kv_bytes_per_token) if own else None, NoText)
        needs = it.drafter_needs.kv_bytes_per_token
        if "kv_cache_tokens" not in settings:
            assert it.kv.pages * 16 * (target.kv_bytes_per_token + needs) * 4 <= free
        return it

    return make


def ask(it: Engine, prompt: int, answer: int) -> None:
    it.add(Request("a", tuple(range(3, 3 + prompt)), SamplingParams(), answer, 0))
    it.abort("a")


def test_a_context_that_fits_is_left_alone(engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    for it in (engine(1000), engine(34), engine(1000, own=3), engine(34, max_model_len=512)):
        assert it.max_model_len == 512 and it.kv_tokens >= 512
        ask(it, 100, 412)
    assert engine(1000).kv_tokens == 2 * 512 + 16
    assert caplog.records == []


def test_the_models_context_is_cut_to_what_fits(engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    it = engine(12)
    assert it.max_model_len == 160 and it.settings()["max_model_len"] == 160
    (said,) = (record.getMessage() for record in caplog.records)
    assert "context is 160 tokens, not the model's 512" in said and "kv_cache_tokens" in said
    ask(it, 100, 60)
    with pytest.raises(SettingError, match=r"max_tokens=61.*context of 160 leaves 60; give that or raise kv_cache_tokens"):
        ask(it, 100, 61)
    with pytest.raises(SettingError, match=r"prompt='160 tokens'.*context is 160 tokens.*raise kv_cache_tokens \(a quarter"):
        ask(it, 160, 1)


def test_the_drafters_keys_and_values_count(engine: Callable[..., Engine]) -> None:
    assert engine(30, own=2).max_model_len == 8 * 16
    assert engine(30).max_model_len == 28 * 16


def test_a_context_that_was_asked_for_is_not_cut(engine: Callable[..., Engine]) -> None:
    with pytest.raises(SettingError, match=r"max_model_len=200.*holds 160 tokens.*give 160 or less, or give kv_cache_tokens"):
        engine(12, max_model_len=200)
    assert engine(12, max_model_len=160).kv_tokens == 176


def test_a_cache_that_was_asked_for_is_taken_as_it_is(engine: Callable[..., Engine]) -> None:
    it = engine(12, kv_cache_tokens=1024)
    assert (it.kv_tokens, it.max_model_len) == (1024, 512)
    it = engine(12, kv_cache_tokens=128, max_model_len=256)
    assert (it.kv_tokens, it.max_model_len) == (128, 256)
    with pytest.raises(SettingError, match="the KV cache holds 128; raise kv_cache_tokens"):
        ask(it, 100, 100)
