"""The threads of the C kernels: how many, that callers in several threads and forked processes get the same bits, that idle
threads sleep, and that torch's own threads stay out of a step."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.engine.cycle import Cycle
from forerun.kernels import cpu, cpu_threads
from forerun.models.weights import Dense
from forerun.types import SettingError
from tests.test_kernels import EPS, fresh
from tests.tiny import tiny_model

BEST = cpu.isas()[0]


@pytest.fixture
def two_torch_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_callers_in_many_threads_get_their_own_results() -> None:
    """More callers than threads, and products of many sizes, some with several stages."""
    kernels, alone = (cpu.CpuKernels(cpu.library(BEST), torch.bfloat16, threads) for threads in (3, 1))
    generator = torch.Generator().manual_seed(0)
    norm = torch.rand(192, generator=generator).bfloat16()
    cases = []
    for tokens, outs in ((1, 960), (5, 33), (70, 400), (200, 64), (17, 1), (1, 4000)):
        x, w = (torch.randn(n, 192, generator=generator).bfloat16() for n in (tokens, outs))
        cases.append((x, Dense(w), alone.norm_linear(x, norm, EPS, Dense(w), None)))
    wrong: list[object] = []

    def call(seed: int) -> None:
        for x, w, want in random.Random(seed).choices(cases, k=150):
            if not torch.equal(kernels.norm_linear(x, norm, EPS, w, None), want):
                wrong.append(want.shape)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKED = """
import os, threading, torch
from forerun.kernels import cpu
from forerun.models.weights import Dense

kernels = cpu.CpuKernels(cpu.library(cpu.isas()[0]), torch.bfloat16, 3)
x, w = torch.randn(40, 96).bfloat16(), Dense(torch.randn(500, 96).bfloat16())
product = lambda: kernels.linear_add(x, w, None, torch.zeros(40, 500).bfloat16())
want, stop = product(), threading.Event()
workers = lambda: [t for t in os.listdir("/proc/self/task") if open(f"/proc/self/task/{t}/comm").read() == "forerun\\n"]
busy = threading.Thread(target=lambda: [product() for _ in iter(stop.is_set, True)])
busy.start()
good = 0
for _ in range(20):  # most forks fall into a job of the other thread
    child = os.fork()
    if not child:
        none = workers() == []
        os._exit(0 if torch.equal(product(), want) and none and len(workers()) == 2 else 1)
    good += os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
print(good, len(workers()), torch.equal(product(), want))
"""


def test_a_forked_process_starts_threads_of_its_own() -> None:
    assert fresh(FORKED).split() == ["20", "2", "True"]


IDLE = """
import os, time, torch
from forerun.kernels import cpu
from forerun.models.weights import Dense

kernels = cpu.CpuKernels(cpu.library(cpu.isas()[0]), torch.bfloat16, 4)
kernels.linear_add(torch.randn(4, 96).bfloat16(), Dense(torch.randn(500, 96).bfloat16()), None, torch.zeros(4, 500).bfloat16())
folders = [f"/proc/self/task/{t}" for t in os.listdir("/proc/self/task")]
workers = [f for f in folders if open(f + "/comm").read() == "forerun\\n"]
for _ in range(1000):
    states = [open(f + "/stat").read().rpartition(")")[2].split()[0] for f in workers]
    if set(states) == {"S"}:
        break
    time.sleep(0.01)
print(*states)
"""


def test_threads_without_work_sleep() -> None:
    assert fresh(IDLE).split() == ["S", "S", "S"]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


V1, V2 = "4:cpu,cpuacct:/a/b\n0::/", "0::/a/b"
GROUPS = {
    "none": ({}, 8),
    "no limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
    "its own limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
    "rounded up": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "210000 100000"}, 3),
    "less than one core": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "10000 100000"}, 1),
    "more than there are": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "6400000 100000"}, 8),
    "of a group above": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/a/cpu.max": "2 1", "sys/fs/cgroup/a/b/cpu.max": "500000 100000"},
        2,
    ),
    "seen as the root": ({"proc/self/cgroup": "0::/docker/9f", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "of another root": ({"proc/self/cgroup": "0::/../other", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "version 1": (
        {
            "proc/self/cgroup": V1, "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "50000",
        },
        5,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": V1, "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000",
        },
        8,
    ),
    "the cpuset controller": ({"proc/self/cgroup": "3:cpuset:/a", "sys/fs/cgroup/a/cpu.max": "1 1"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_cores_are_limited_by_the_quota_of_cgroups(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, want = GROUPS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu_threads.cores(write(tmp_path, files)) == want


def test_cores_are_those_of_the_affinity_and_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {i: f"{i % 4},{i % 4 + 4}" for i in range(8)}  # 4 cores with 2 hardware threads each
    write(tmp_path, {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": text for i, text in siblings.items()})
    for cpus, want in (({*range(8)}, 4), ({0, 4}, 1), ({0, 1, 4}, 2), ({2}, 1), ({8, 9, 3}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus)
        assert cpu_threads.cores(tmp_path) == want


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that gives FORERUN_CPU_THREADS a value, which is then read anew."""

    def set_to(value: str) -> None:
        monkeypatch.setenv(cpu_threads.SETTING, value)
        cpu_threads.threads.cache_clear()

    yield set_to
    monkeypatch.undo()
    cpu_threads.threads.cache_clear()


def test_the_number_can_be_set(setting: object, tmp_path: Path) -> None:
    assert callable(setting)
    for value, want in (("3", 3), ("256", 256), ("auto", cpu_threads.cores()), ("", cpu_threads.cores())):
        setting(value)
        assert cpu_threads.threads() == want and cpu.CpuKernels(cpu.library(BEST), torch.bfloat16).threads == want
    setting("3")
    assert LLM(tiny_model(tmp_path)).settings()["threads"] == 3
    for value in ("0", "257", "-1", "2.5", "two", "³"):
        setting(value)
        with pytest.raises(SettingError, match=f"{cpu_threads.SETTING}=.*{value}.*give auto or a number from 1 to 256"):
            cpu_threads.threads()


@pytest.mark.usefixtures("two_torch_threads")
def test_torch_is_limited_in_this_thread_only() -> None:
    def ask() -> None:
        seen.append(torch.get_num_threads())

    seen: list[int] = []
    with cpu_threads.only_this_thread():
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
    ask()
    assert seen == [1, 2, 2]
    with pytest.raises(ValueError, match="inside"), cpu_threads.only_this_thread():
        raise ValueError("inside")
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_torch_threads")
def test_torchs_threads_stay_out_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = set(), Cycle.run

    def watched(*given: object) -> object:
        seen.add(torch.get_num_threads())
        return run(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Cycle, "run", watched)
    llm = LLM(tiny_model(tmp_path))
    llm.generate(["one", "two"], SamplingParams(max_tokens=4))
    assert seen == {1} and torch.get_num_threads() == 2
