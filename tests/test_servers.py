"""Launch templates, processes and what logs say: with a mock engine that is really started, and with commands and logs in the
form in which the engines document them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.engines import launching, servers
from forerun.bench.engines.arms import Arm
from forerun.bench.engines.servers import Launch, Server
from forerun.config import Speculation
from forerun.types import SettingError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": "small"}
BASELINE = Arm("baseline", None)

MOCK = f"""
engine = "vllm"
command = ["python", "{Path(__file__).parent / 'mock_server.py'}", "--port", "{{port}}"]
served = "target"
ready = "/health"
ready_seconds = 20
[environment]
PYTHONPATH = "{Path(__file__).parent.parent}"
[speculative]
ngram = ["--speculative-config", "{{speculative_json}}", "--per", "{{k}}"]
[log]
kv_tokens = 'KV cache size: ([\\d,]+) tokens'
fallbacks = ['will be disabled']
warnings = ['never said']
[[log.scheduler]]
name = "async scheduling"
found = [['Async scheduling not supported', "off"]]
otherwise = "on"
[[log.scheduler]]
name = "model runner"
found = [['Using V2 Model Runner', "V2"]]
otherwise = "V1"
"""


def command(engine: str, settings: dict[str, Any] | None, flags: tuple[str, ...] = ()) -> list[str]:
    template, arm = launching.load_template(engine, None), Arm("arm", settings, flags)
    return launching.command_of(template, arm, launching.places(arm, "MODEL", 8000, 4096, 8, "FILE"))


def test_speculation_in_each_engine_s_own_words() -> None:
    ngram = command("vllm", NGRAM)
    at = ngram.index("--speculative-config")
    assert ngram[:3] == ["vllm", "serve", "MODEL"]
    assert ngram[at + 1] == (
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
    )
    eagle = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert '"method": "eagle3"' in " ".join(command("vllm", eagle)), "methods of its own are handed on"
    llama = " ".join(command("llamacpp", NGRAM))
    assert llama.startswith("llama-server --model MODEL") and "--ctx-size 32768 --parallel 8" in llama
    assert "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 4" in llama
    assert "--spec-type draft-simple --spec-draft-model small --spec-draft-n-max 3" in " ".join(command("llamacpp", DRAFT))
    assert "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5" in " ".join(command("sglang", NGRAM))
    standalone = " ".join(command("sglang", DRAFT))
    assert "--speculative-algorithm STANDALONE --speculative-draft-model-path small --speculative-num-steps 3" in standalone
    assert "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in standalone
    assert command("tensorrt-llm", NGRAM)[-2:] == ["--config", "FILE"]
    plain = command("vllm", None, ("--enforce-eager",))
    assert plain[-1] == "--enforce-eager" and "--speculative-config" not in plain
    assert "--gpu-memory-utilization 0.9" in " ".join(plain)


def test_the_configuration_file_of_tensorrt_llm() -> None:
    template = launching.load_template("tensorrt-llm", None)

    def file(settings: dict[str, Any] | None) -> dict[str, Any] | None:
        arm = Arm("arm", settings)
        return launching.file_of(template, arm, launching.places(arm, "MODEL", 1, 2, 3, "FILE"))

    memory = {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}}
    always = {"enable_iter_perf_stats": True, "return_perf_metrics": True, **memory}
    assert file(None) == always
    assert file(NGRAM) == always | {
        "disable_overlap_scheduler": True,
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 5},
    }
    assert file(DRAFT) == always | {
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "small"}
    }
    assert launching.file_of(launching.load_template("vllm", None), BASELINE, {}) is None


@pytest.mark.parametrize("engine", ["llamacpp", "sglang", "tensorrt-llm"])
def test_a_method_that_the_template_does_not_know(engine: str) -> None:
    with pytest.raises(SettingError, match=r"medusa.*ngram"):
        command(engine, {"method": "medusa", "num_speculative_tokens": 2})


def test_every_template_can_be_read_and_filled() -> None:
    for engine in launching.ENGINES:
        template = launching.parse(launching.text_of(engine))
        assert template.ready.startswith("/") and "{" not in " ".join(command(engine, NGRAM)).replace('{"method"', "")
    with pytest.raises(SettingError, match="vllm"):
        launching.text_of("ollama")


@pytest.mark.parametrize(
    "change",
    [("command", "comand"), ("[speculative]", "[speculative"), ("{port}", "{prot}"), ('engine = "vllm"', 'engine = "v"'),
     ("'will be disabled'", "'(will'"), ("served = ", "# ")],
)
def test_templates_that_cannot_be(change: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(MOCK.replace(*change, 1))
    with pytest.raises(SettingError):
        template = launching.load_template("vllm", tmp_path / "t.toml")
        launching.command_of(template, BASELINE, launching.places(BASELINE, "M", 1, 2, 3, "F"))
    with pytest.raises(SettingError, match="cannot be read"):
        launching.load_template("vllm", tmp_path / "none.toml")


# logs in the form of the engines

VLLM_LOG = """\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 11-29 18:00:00 [utils.py:1] vLLM API server version 0.32.0
WARNING 11-29 [vllm.py:1606] Async scheduling not supported with ngram-based speculative decoding and will be disabled.
WARNING 11-29 [vllm.py:740] Model Runner V2 does not support ngram; falling back to V1.
INFO 11-29 [kv_cache.py:1] GPU KV cache size: 40,208 tokens, Maximum concurrency for 4,096 tokens per request: 9.8x
INFO 11-29 [kv_cache_utils.py:1] GPU KV cache size: 30,832 tokens, Maximum concurrency for 4,096 tokens per request: 7.53x
"""


def test_what_logs_say() -> None:
    found = launching.read_log(launching.load_template("vllm", None), VLLM_LOG)
    assert found.kv_tokens == 30832 and found.version == "0.32.0"
    assert found.scheduler == {"async scheduling": "off", "model runner": "V1"}
    assert len(found.fallbacks) == 2 and found.fallbacks[0].endswith("will be disabled.")
    said = "vLLM version 0.32.0\nUsing V2 Model Runner"
    plain = launching.read_log(launching.load_template("vllm", None), said)
    assert plain.scheduler == {"async scheduling": "on", "model runner": "V2"}
    assert plain.kv_tokens is None and not plain.fallbacks
    sglang = launching.read_log(
        launching.load_template("sglang", None),
        "server_args=ServerArgs(disable_overlap_schedule=True)\nmax_total_num_tokens=30832, chunked_prefill_size=2048",
    )
    assert sglang.kv_tokens == 30832 and sglang.scheduler == {"overlap scheduling": "off"}


# processes


def launch(text: str = MOCK, **settings: Any) -> Launch:
    return Launch(launching.parse(text), "MODEL", program=sys.executable, **settings)


def test_a_server_is_started_described_and_ended() -> None:
    plain, drafting = Server(launch(), BASELINE), Server(launch(), Arm("ngram k=4", NGRAM, ("--start", "0.3")))
    try:
        asyncio.run(plain.start())
        asyncio.run(drafting.start())
        assert plain.running and drafting.running and plain.port != drafting.port
        assert plain.facts is not None and drafting.facts is not None
        assert (plain.facts.kv_tokens, drafting.facts.kv_tokens) == (16384, 12288)
        assert plain.facts.scheduler == {"async scheduling": "on", "model runner": "V2"}
        assert drafting.facts.scheduler == {"async scheduling": "off", "model runner": "V1"}
        assert len(drafting.facts.fallbacks) == 1 and plain.facts.fallbacks == () and plain.facts.warnings == ()
        assert drafting.facts.startup_s is not None and drafting.facts.startup_s >= 0.3
        assert "--speculative-config" in drafting.facts.command
        if sys.platform == "linux":
            assert plain.facts.memory_bytes is not None and plain.facts.memory_bytes > 5_000_000
        pids = [s._process.pid for s in (plain, drafting) if s._process is not None]
    finally:
        plain.stop()
        drafting.stop()
    assert not plain.running and not any(servers.session_of(pid) for pid in pids)
    asyncio.run(plain.start())
    assert plain.running, "it can be started again"
    plain.stop()


def test_children_that_ignore_the_request_to_end_are_ended_too(tmp_path: Path) -> None:
    """The leader ends when asked; its child ignores that. Nothing of either may be left."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    leader = f"import subprocess, sys, http.server\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n" + (
        "class H(http.server.BaseHTTPRequestHandler):\n def do_GET(self):\n  self.send_response(200); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    (tmp_path / "leader.py").write_text(leader)
    text = f'engine = "vllm"\ncommand = ["python", "{tmp_path}/leader.py", "{{port}}"]\nserved = "t"\nready = "/"\n'
    server = Server(launch(text), BASELINE)
    asyncio.run(server.start())
    assert server._process is not None
    pid = server._process.pid
    until = time.monotonic() + 10
    while len(servers.session_of(pid)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(servers.session_of(pid)) == 2
    server.grace_s = 1.0
    server.stop()
    assert servers.session_of(pid) == []


def test_a_server_that_does_not_come_up_says_why() -> None:
    server = Server(launch(), Arm("arm", None, ("--die",)))
    with pytest.raises(SettingError, match=r"code 3 before it was ready: ValueError: the drafter does not fit") as found:
        asyncio.run(server.start())
    whole = Path(str(found.value).rpartition("The whole log: ")[2])
    assert "engine is starting" in whole.read_text(), "the log is there when this program has ended"
    slow = Server(launch(MOCK.replace("ready_seconds = 20", "ready_seconds = 0.3")), Arm("arm", None, ("--start", "30")))
    with pytest.raises(SettingError, match=r"not ready after 0.3 s"):
        asyncio.run(slow.start())
    assert not slow.running
    with pytest.raises(SettingError, match="--program"):
        asyncio.run(Server(Launch(launching.parse(MOCK), "M", program="/nowhere/vllm"), BASELINE).start())


def test_the_reason_in_the_middle_of_a_long_log_is_shown(tmp_path: Path) -> None:
    said = ["print('WARNING RuntimeError: slow')", "print('(EngineCore pid=3) ValueError: 3.4 GiB of memory are not there')"]
    said.append("[print('then', i) for i in range(99)]")
    (tmp_path / "speaks.py").write_text("\n".join([*said, "print('RuntimeError: see above', flush=True); raise SystemExit(1)"]))
    text = f'engine = "vllm"\ncommand = ["python", "{tmp_path}/speaks.py"]\nserved = "t"\nready = "/"\n'
    server = Server(launch(text), BASELINE)
    with pytest.raises(SettingError, match=r"ready: ValueError: 3.4 GiB of memory are not there\nThe end") as found:
        asyncio.run(server.start())
    assert "then 98\n  RuntimeError: see above\nThe whole log: " in str(found.value)
    assert "then 50" not in str(found.value) and "slow" not in str(found.value)


def test_the_users_folder_is_not_written_down() -> None:
    home = os.path.expanduser("~")
    assert [servers._from_home(word) for word in (f"{home}/x", "/opt/x")] == ["~/x", "/opt/x"]
    assert servers._from_home(servers.__file__) == "forerun/bench/engines/servers.py"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_servers_that_are_up_at_once_share_the_memory(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in use already: together they never ask for more than is free."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for available in (1, 5, 9, 16):
        monkeypatch.setattr(servers, "available_memory", lambda available=available: available << 30)
        monkeypatch.setattr(servers, "total_memory", lambda: 16 << 30)
        share = servers.memory_share(count)
        assert 0 < share <= 0.9 and (count * share <= 0.9 * available / 16 + 1e-9 or share == 0.01)
        assert share >= 0.9 * available / 16 / count - 0.01
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((80 - 40 * i) << 30, 80 << 30))
    assert servers.memory_share(count) == pytest.approx(0.45 / count, abs=0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(servers, "available_memory", lambda: None)
    assert servers.memory_share(1) == 0.9, "where nothing is known of the memory"


@pytest.mark.parametrize("alive, share", [("together", 0.45), ("in-turns", 0.9)])
def test_the_share_is_on_the_command_line(alive: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.bench import command as commands
    from forerun.bench.options import Options

    monkeypatch.setattr(commands, "memory_share", lambda count: 0.9 / count)
    options = Options(engine="vllm", model="some/model", tasks=("explain",), alive=alive)
    for side in commands.subject_of(options, commands.plan_of(options)).sides:
        words = side._server.command()  # type: ignore[attr-defined]
        assert words[words.index("--gpu-memory-utilization") + 1] == str(share)


def test_settings_of_the_engine_here_are_keys_that_templates_use() -> None:
    speculation = Speculation.parse("ngram")
    assert speculation is not None
    assert "--spec-ngram-simple-size-n 5" in " ".join(command("llamacpp", speculation.effective()))
    assert os.path.exists(launching.places(BASELINE, "", 0, 1, 1, "")["llamacpp_server"])


def test_forerun_s_own_server_has_the_drafters_that_come_with_forerun() -> None:
    """By their names, and as the engine in this process gets them."""
    from forerun.bench.command import served_arms

    (arm,) = served_arms(("eagle3",), "smollm2-135m-instruct")
    words = command("forerun-server", dict(arm.settings or {}))
    assert words[:5] == [sys.executable, "-m", "forerun", "serve", "MODEL"]
    assert '"model": "smollm2-135m-instruct/eagle3"' in words[words.index("--speculative-config") + 1]
    with pytest.raises(SettingError, match="needs the drafter"):
        served_arms(("eagle3",))
