"""Measures the engine on the CPU against llama.cpp, with the same .gguf file on both sides. A bar is a limit on a ratio of
figures of one run.

    python benchmarks/cpu/llamacpp.py MODEL.gguf --server LLAMA-SERVER | --python PYTHON [--isa avx2] [--out FILE]

--server: a llama-server program. --python: a Python that has the package xllamacpp, whose llama.cpp is compiled for AVX2.
--isa: the highest instruction set of this engine. llama.cpp has no such setting: give a build of the same level. The record
holds the instruction sets that llama.cpp itself names.

The sides are processes of their own and stay alive. One works at a time, in the order A B B A, and each round has prompts of
its own. A rate of decoding is (tokens - 1) / (time of the last - time of the first token), by the clock of each side. The JSON
file gets all raw samples. If other programs run, start this one through `chrt -f 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from machine import describe, limits

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "src/forerun/bench/engines/llamacpp_server.py"
CONTEXT, SLOTS, THREADS = 2048, 8, 2
SIZES = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m")
MODES = {  # llama.cpp's ways to decode without a draft model, by their flags
    "plain": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple 3/8": ("--spec-type", "ngram-simple", *SIZES, "8"),
    "ngram-simple 3/16": ("--spec-type", "ngram-simple", *SIZES, "16"),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-map-k4v": ("--spec-type", "ngram-map-k4v"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}

WORKER = """
import json, sys, time
from pathlib import Path
from forerun.bench.workloads.tasks import find
from forerun.llm import LLM
from forerun.types import SamplingParams

given = json.loads(sys.argv[1])
loaded = LLM.load(given["model"], **given["load"])
made = {}

def llm(arm):
    if arm not in made:
        speculation = None if arm == "plain" else given["ngram"]
        made[arm] = LLM(loaded, kv_cache_tokens=given["kv_tokens"], speculative_config=speculation)
    return made[arm]

def ids(task, variant):
    prompt = find((task,))[0].prompt(variant)
    return loaded.tokenizer.encode(prompt.text if prompt.text is not None else prompt.message)

def run(arm, prompts, tokens):
    engine = llm(arm)
    engine.clear_prefix_cache()
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return [
        {
            "prompt_n": len(prompt), "prompt_s": one.timing.ttft_s, "n": len(one.token_ids),
            "decode_s": one.timing.e2e_s - one.timing.ttft_s, "drafted": one.stats.drafted, "accepted": one.stats.accepted,
            "ids": list(one.token_ids),
        }
        for prompt, one in zip(prompts, (o.completions[0] for o in outputs))
    ]

def facts():
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "settings": llm("plain").settings() | {"model": Path(given["model"]).name},
        "capacity": llm("plain").engine.capacity(),
        "kv_bytes": given["kv_tokens"] * loaded.target.kv_bytes_per_token,
        "weights": loaded.target.bytes,
        "peak_bytes": next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024,
    }

for line in sys.stdin:
    name, arguments = json.loads(line)
    print("=" + json.dumps({"ids": ids, "run": run, "facts": facts}[name](*arguments), default=str), flush=True)
"""


class Answer(NamedTuple):
    """A request's figures, by the clock of its side. decode_s: from the first to the last token."""

    prompt_n: int
    prompt_s: float
    n: int
    decode_s: float
    drafted: int
    accepted: int
    ids: list[int]

    @property
    def rate(self) -> float:
        """Tokens/s of decoding."""
        return (self.n - 1) / self.decode_s


class Forerun:
    """This engine in a process of its own, plain and with n-gram drafts on the same weights."""

    def __init__(self, model: str, load: dict[str, Any], isa: str, kv_tokens: int) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **limits(isa)}
        given = json.dumps({"model": model, "load": load, "kv_tokens": kv_tokens, "ngram": NGRAM})
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, given], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("="):
                return json.loads(line[1:])
        raise SystemExit("the engine's process ended; its error is above")

    def answers(self, arm: str, prompts: list[list[int]], tokens: int) -> list[Answer]:
        return [Answer(**one) for one in self.call("run", arm, prompts, tokens)]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class LlamaCpp:
    """A llama.cpp server with one way to decode. log: what it has written so far."""

    def __init__(self, command: list[str], model: str, slots: int, mode: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        flags = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--threads", str(THREADS)]
        flags += ["--parallel", str(slots), "--ctx-size", str(slots * CONTEXT), *MODES[mode]]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, *flags], stdout=out, stderr=subprocess.STDOUT)
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"llama.cpp ended:\n{self.log[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"llama.cpp does not answer:\n{self.log[-2000:]}")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def facts(self) -> list[str]:
        """What it says of its build and of its instruction sets, without the folders of this machine."""
        lines = [line for line in self.log.splitlines() if re.search(r"system_info|build.?info|loaded CPU backend", line)]
        return [re.sub(r"(?<= )/\S*/", "", line) for line in lines]

    def answers(self, prompts: list[list[int]], tokens: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self._answer(ids, tokens), prompts))

    def _answer(self, ids: list[int], tokens: int) -> Answer:
        body = {
            "prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        answer = self.post(body)
        times = answer["timings"]
        return Answer(
            times["prompt_n"], times["prompt_ms"] / 1e3, times["predicted_n"], times["predicted_ms"] / 1e3,
            times.get("draft_n", 0), times.get("draft_n_accepted", 0), answer["tokens"],
        )  # fmt: skip

    def post(self, body: dict[str, Any]) -> Any:
        """The reply to a request for a completion."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.loads(reply.read())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def command_of(server: str | None, python: str | None) -> list[str]:
    """How to start llama.cpp, before the flags. With -lv 4 the log names the instruction sets."""
    return [server, "-lv", "4"] if server else [str(python), str(LAUNCHER)]


Run = Callable[[int], list[Answer]]
Prompts = Callable[[int], list[list[int]]]  # the ids of a round's prompts
Rate = Callable[[Iterable[Answer]], float]


def interleaved(arms: dict[str, Run], rounds: int) -> dict[str, list[list[Answer]]]:
    """The answers of each arm in each round, in the order A B B A, after a warm-up. A round's number chooses its prompts."""
    for run in arms.values():
        run(0)
    found: dict[str, list[list[Answer]]] = {name: [] for name in arms}
    for i in range(1, rounds + 1):
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            found[name].append(arms[name](i))
    return found


def decode_rate(answers: Iterable[Answer]) -> float:
    """Tokens/s of requests that decode at the same time."""
    return sum(one.rate for one in answers)


def prompt_rate(answers: Iterable[Answer]) -> float:
    return sum(one.prompt_n / one.prompt_s for one in answers)


class Comparison:
    """The two sides, and the samples of each part. tokens: of an answer."""

    def __init__(self, ours: Forerun, start: Callable[[str, int], LlamaCpp], rounds: int, tokens: int) -> None:
        self.ours, self.start, self.rounds, self.tokens = ours, start, rounds, tokens
        self.samples: dict[str, dict[str, list[list[Answer]]]] = {}
        self.bars: list[dict[str, Any]] = []

    def _prompts(self, task: str, count: int) -> Prompts:
        kept: dict[int, list[list[int]]] = {}

        def prompts(i: int) -> list[list[int]]:
            if i not in kept:
                kept[i] = [self.ours.call("ids", task, i * count + j) for j in range(count)]
            return kept[i]

        return prompts

    def _measure(
        self, part: str, prompts: Prompts, arms: Iterable[str], theirs: dict[str, LlamaCpp], tokens: int
    ) -> dict[str, list[list[Answer]]]:
        def run(call: Callable[..., list[Answer]], *arm: str) -> Run:
            return lambda i: call(*arm, prompts(i), tokens)

        runs = {f"forerun {arm}": run(self.ours.answers, arm) for arm in arms}
        runs |= {f"llama.cpp {mode}": run(server.answers) for mode, server in theirs.items()}
        self.samples[part] = interleaved(runs, self.rounds)
        return self.samples[part]

    def _bar(self, name: str, found: dict[str, list[list[Answer]]], rate: Rate, over: str, least: float) -> None:
        """Print the medians, and compare `over` with the best of llama.cpp's arms, round by round."""
        rates = {arm: [rate(answers) for answers in rounds] for arm, rounds in found.items()}
        medians = {arm: statistics.median(values) for arm, values in rates.items()}
        print(name, {arm: round(value, 1) for arm, value in medians.items()}, flush=True)
        best = max((arm for arm in rates if arm.startswith("llama.cpp")), key=lambda arm: medians[arm])
        value = statistics.median(a / b for a, b in zip(rates[over], rates[best], strict=True))
        name, met = f"{name}: {over} / {best}", value >= least
        self.bars.append({"name": name, "value": value, "bar": least, "met": met, "rates": rates})
        print(f"{name:<70} {value:6.3f}  >= {least:g}  {'met' if met else 'NOT MET'}", flush=True)

    def plain(self) -> None:
        with server(self.start, "plain", 1) as theirs:
            found = self._measure("plain", self._prompts("explain", 1), ("plain",), {"plain": theirs}, self.tokens)
        self._bar("one request", found, decode_rate, "forerun plain", 1.3)

    def copy(self) -> None:
        with ExitStack() as stack:
            theirs = {mode: stack.enter_context(server(self.start, mode, 1)) for mode in MODES}
            found = self._measure("copy", self._prompts("copy", 1), ("plain", "ngram"), theirs, self.tokens)
        self._bar("copying", found, decode_rate, "forerun ngram", 2.0)

    def eight(self) -> None:
        with server(self.start, "plain", SLOTS) as theirs:
            found = self._measure("eight", self._prompts("explain", SLOTS), ("plain",), {"plain": theirs}, self.tokens)
        self._bar(f"{SLOTS} requests", found, decode_rate, "forerun plain", 1.3)

    def prompt(self) -> None:
        copied = self._prompts("copy", 2)
        with server(self.start, "plain", 1) as theirs:
            found = self._measure(
                "prompt", lambda i: [[x for ids in copied(i) for x in ids][:1000]], ("plain",), {"plain": theirs}, 1
            )
        self._bar("a prompt", found, prompt_rate, "forerun plain", 1.0)


@contextmanager
def server(start: Callable[[str, int], LlamaCpp], mode: str, slots: int) -> Iterator[LlamaCpp]:
    made = start(mode, slots)
    try:
        yield made
    finally:
        made.stop()


def peak_memory(model: str, load: dict[str, Any], isa: str) -> dict[str, Any]:
    """Peak resident bytes of a new process that answers 8 prompts of 900 tokens with 100 tokens each, and what it holds."""
    process = Forerun(model, load, isa, SLOTS * CONTEXT)
    process.answers("plain", [[5 + i] * 900 for i in range(SLOTS)], 100)
    facts: dict[str, Any] = process.call("facts")
    process.stop()
    return facts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a .gguf file")
    theirs = options.add_mutually_exclusive_group(required=True)
    theirs.add_argument("--server", help="a llama-server program")
    theirs.add_argument("--python", help="a Python that has xllamacpp")
    options.add_argument("--version", help="llama.cpp's version and how it was built, for the record")
    options.add_argument("--isa", default="auto", help="auto, or one of FORERUN_CPU_ISA")
    options.add_argument("--ours", help="the model that this engine loads, if it is not the same file")
    options.add_argument("--load", type=json.loads, default={}, help="JSON of the other arguments of LLM.load")
    options.add_argument("--parts", default="plain,copy,eight,prompt,memory")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--out", type=Path, default=Path("llamacpp-cpu.json"))
    given = options.parse_args()

    command = command_of(given.server, given.python)
    mine = given.ours or given.model
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), **describe(), "isa": given.isa, "model": Path(given.model).name,
        "ours": Path(mine).name, "load": given.load, "rounds": given.rounds, "tokens": given.tokens, "modes": MODES,
        "bytes": Path(given.model).stat().st_size, "llamacpp_version": given.version,
    }  # fmt: skip
    ours = Forerun(mine, given.load, given.isa, SLOTS * CONTEXT)
    with tempfile.TemporaryDirectory() as logs:

        def start(mode: str, slots: int) -> LlamaCpp:
            made = LlamaCpp(command, given.model, slots, mode, Path(logs) / f"{mode.replace('/', '-')}.{slots}.log")
            if "llamacpp" not in record:
                record["llamacpp"] = made.facts()
                print("\n".join(made.facts()))
            return made

        comparison = Comparison(ours, start, given.rounds, given.tokens)
        record["forerun"] = ours.call("facts")
        print(record["forerun"]["settings"], flush=True)
        for part in given.parts.split(","):
            if part != "memory":
                getattr(comparison, part)()
        ours.stop()
    if "memory" in given.parts.split(","):
        facts = record["memory"] = peak_memory(mine, given.load, given.isa)
        over = (facts["peak_bytes"] - record["bytes"] - facts["kv_bytes"]) / 1e9
        comparison.bars.append({"name": "peak memory - file - KV cache, GB", "value": over, "bar": 0.4, "met": over <= 0.4})
        print(f"{'peak memory - file - KV cache, GB':<70} {over:6.3f}  <= 0.4  {'met' if over <= 0.4 else 'NOT MET'}")
    record |= {"bars": comparison.bars, "samples": comparison.samples}
    given.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
