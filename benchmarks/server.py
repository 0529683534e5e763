"""What the server costs: tokens/s and time to the first token through `forerun serve` and through the Python API, in one run.

    python benchmarks/server.py [--device cuda] [--clients 1] [--tokens 256] [--rounds 10] [--out FILE]

For each arm (plain, ngram) there are two engines with the same settings: an LLM in this process, and one behind a server. They
answer the same greedy requests in turn; the first of a round changes. Prefix caches are off and drafts have their full length,
so both make the same steps. With one client each request is alone. With more, all are sent at once, and LLM.generate gets them
in one call. A sample is the tokens of all answers over the time until the last one has ended. The client is a few lines on the
sockets of asyncio, since its work is on the same machine; its process is the one with the LLM, which waits meanwhile.

Printed are the medians, the median of the paired ratios (server over API) with its range, and the time to the first piece of
text (one client only). All samples go to the JSON file. --alone gives all of it precedence over other programs, where Linux
groups processes by session (needs root).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.records.machine import describe, load_average, versions

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ARMS: dict[str, Any] = {"plain": None, "ngram": NGRAM}
CODE = "\n".join(f"def area_{i}(width, height):\n    return width * height + {i}" for i in range(8))
PROMPTS = {
    "plain": "Tell a long story about a lighthouse keeper and the sea. Story number {}.",
    "ngram": "Repeat this code word for word, then repeat it again. Copy number {}.\n" + CODE,
}


class Server:
    """A server process on a free port."""

    def __init__(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "forerun", "serve", "--port", "0", *options]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("http://"):
                self.port = int(line.split()[0].rpartition(":")[2])
                return
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server did not start")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Stream(asyncio.Protocol):
    """Receives an answer. first: when its first text came (perf_counter seconds)."""

    def __init__(self) -> None:
        self.first, self.parts = 0.0, list[bytes]()
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def ask(port: int, body: dict[str, Any]) -> tuple[float, list[bytes]]:
    """Stream an answer. Returns when its first text came (perf_counter seconds) and its lines."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    transport, stream = await asyncio.get_running_loop().create_connection(Stream, "127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    transport.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await stream.ended
    return stream.first, b"".join(stream.parts).split(b"\n")


def parsed(lines: list[bytes]) -> tuple[str, int]:
    """The text of a streamed answer and its number of tokens."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert chunks and chunks[-1]["usage"], "the answer did not end well"
    text = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    return "".join(text), chunks[-1]["usage"]["completion_tokens"]


def through_server(port: int, prompts: list[str], tokens: int) -> tuple[float, float, list[str]]:
    """Tokens/s, seconds to the first text of the first request, and the texts."""
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    bodies = [{"messages": [{"role": "user", "content": prompt}], **sampling} for prompt in prompts]

    async def all_of_them() -> list[tuple[float, list[bytes]]]:
        return await asyncio.gather(*(ask(port, body) for body in bodies))

    start = time.perf_counter()
    found = asyncio.run(all_of_them())
    seconds = time.perf_counter() - start
    answers = [parsed(lines) for _, lines in found]
    return sum(tokens for _, tokens in answers) / seconds, found[0][0] - start, [text for text, _ in answers]


def through_api(llm: LLM, prompts: list[str], tokens: int) -> tuple[float, float, list[str]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    seconds = time.perf_counter() - start
    first = outputs[0].completions[0].timing.ttft_s
    return sum(len(output.token_ids) for output in outputs) / seconds, first, [output.text for output in outputs]


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The samples of an arm."""
    seqs, share = max(given.clients, 1), 0.4
    settings = {"device": given.device, "max_num_seqs": seqs, "max_model_len": 2048, "kv_cache_tokens": 2048 * seqs}
    llm = LLM(
        given.model, speculative_config=ARMS[name], enable_prefix_caching=False, adaptive_drafts=False,
        gpu_memory_utilization=share, **settings,
    )  # fmt: skip
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    options += ["--no-enable-prefix-caching", "--no-adaptive-drafts", f"--gpu-memory-utilization={share}"]
    options += ["-s", json.dumps(ARMS[name])] if ARMS[name] else []
    server = Server([*([given.model] if given.model else []), *options])
    samples: dict[str, list[float]] = {key: [] for key in ("api_tps", "server_tps", "api_first_s", "server_first_s")}
    same = total = 0
    for number in range(-1, given.rounds):  # the first one warms up
        prompts = [PROMPTS[name].format(1000 * (number + 1) + i) for i in range(given.clients)]
        texts: dict[str, list[str]] = {}
        for side in ("api", "server") if number % 2 else ("server", "api"):
            if side == "api":
                speed, first, texts[side] = through_api(llm, prompts, given.tokens)
            else:
                speed, first, texts[side] = through_server(server.port, prompts, given.tokens)
            if number >= 0:
                samples[f"{side}_tps"].append(speed)
                samples[f"{side}_first_s"].append(first)
            time.sleep(0.05)
        if number >= 0:
            same += sum(one == other for one, other in zip(texts["api"], texts["server"], strict=True))
            total += len(prompts)
    drafts = llm.stats.drafts
    server.close()
    return {"samples": samples, "same_answers": [same, total], "api_drafts": asdict(drafts), "settings": llm.settings()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model")
    options.add_argument("--device", default="auto")
    options.add_argument("--clients", type=int, default=1)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--arms", default="plain,ngram")
    options.add_argument("--alone", action="store_true", help="take precedence over other programs")
    options.add_argument("--out", type=Path, default=Path("server.json"))
    given = options.parse_args()
    if given.alone:
        if os.getpid() != os.getsid(0):
            os.setsid()
        Path("/proc/self/autogroup").write_text("-20")
    arms = {name: measure(name, given) for name in given.arms.split(",")}
    for name, arm in arms.items():
        samples = arm["samples"]
        ratios = [s / a for s, a in zip(samples["server_tps"], samples["api_tps"], strict=True)]
        firsts = [s / a for s, a in zip(samples["server_first_s"], samples["api_first_s"], strict=True)]
        arm["speed_ratio"], arm["first_ratio"] = statistics.median(ratios), statistics.median(firsts)
        median = {key: statistics.median(found) for key, found in samples.items()}
        print(
            f"{name}, {given.clients} clients: API {median['api_tps']:.1f} tokens/s, server {median['server_tps']:.1f}; ratio "
            f"{arm['speed_ratio']:.3f} ({min(ratios):.3f} .. {max(ratios):.3f}); first text {1e3 * median['api_first_s']:.1f} "
            f"and {1e3 * median['server_first_s']:.1f} ms, ratio {arm['first_ratio']:.2f} "
            f"({min(firsts):.2f} .. {max(firsts):.2f}); same answers {arm['same_answers']}"
        )
    record = {
        "date": time.strftime("%Y-%m-%d"), "machine": asdict(describe(load_average())), "versions": versions(),
        "clients": given.clients, "tokens": given.tokens, "alone": given.alone, "arms": arms,
    }  # fmt: skip
    given.out.write_text(json.dumps(record, default=str))


if __name__ == "__main__":
    main()
