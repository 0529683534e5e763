"""The time of a step of the default model when other processes are busy: none, and one on each core that this process may use.

    python benchmarks/cpu/contention.py [--before SRC] [--requests 1,8] [--rounds 6] [--out FILE]

Each side is a process with an LLM of its own. A sample is the mean time of the steps of one `generate` call, the step of its
prompts included. In a round each side is measured alone and then with the busy processes, and so is one request of the command
`forerun generate`, without its start. --before: the src folder of another source tree, for a comparison. No environment
variable is set for a side, and the busy processes have the priority of this one: do not start it through chrt. --alone gives
all of them precedence over other programs, where Linux groups processes by session (needs root). Prints medians and their
ratio; all samples go to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).resolve().parents[2] / "src"
TOKENS = 48
PROMPT = "Name the planets of the solar system, and say what each of them is known for."
BUSY = "import os; os.write(1, b'.')\nwhile True: pass"

WORKER = """
import sys, time
from forerun import LLM, SamplingParams

llm = LLM(enable_prefix_caching=False)
params = SamplingParams(max_tokens=int(sys.argv[1]), temperature=0.0, ignore_eos=True)
for line in sys.stdin:
    prompts = [sys.argv[2]] * int(line)
    llm.reset_stats()
    start = time.perf_counter()
    llm.generate(prompts, params)
    print((time.perf_counter() - start) / llm.stats.steps, flush=True)
"""


class Side:
    """A process that answers as many prompts at once as each line on its standard input says."""

    def __init__(self, source: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, "-c", WORKER, str(TOKENS), PROMPT]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, requests: int) -> float:
        """The mean time of a step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def command_seconds() -> float:
    """The mean time of a step of the command."""
    command = [sys.executable, "-m", "forerun", "generate", PROMPT, "--max-tokens", str(TOKENS), "--temperature", "0"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run([*command, "--ignore-eos", "--json"], env=env, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout)
    return float(said["timing"]["e2e_s"]) / (said["drafts"]["steps"] + 1)  # the prompt's step is not among them


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Processes that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.read(1)  # it has started
        time.sleep(0.2)  # the system spreads them over the cores
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--before", type=Path, help="the src folder of another source tree")
    options.add_argument("--before-version", help="a description of that tree, for the record")
    options.add_argument("--requests", default="1,8", help="requests at once, separated by commas")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--alone", action="store_true", help="take precedence over other programs")
    options.add_argument("--out", type=Path, default=Path("contention-cpu.json"))
    given = options.parse_args()
    if given.alone:
        if os.getpid() != os.getsid(0):
            os.setsid()
        Path("/proc/self/autogroup").write_text("-20")

    cores = len(os.sched_getaffinity(0))
    sides = {"now": Side(HERE)} | ({"before": Side(given.before.resolve())} if given.before else {})
    requests = [int(n) for n in given.requests.split(",")]
    samples: dict[str, dict[str, list[float]]] = {}
    for side in sides.values():
        side.seconds(1)
    for number in range(given.rounds):
        for busy in (0, cores):
            with busy_cores(busy):
                for name in list(sides) if number % 2 else list(sides)[::-1]:
                    for n in requests:
                        case = f"{name}, {n} requests" if n > 1 else f"{name}, 1 request"
                        samples.setdefault(case, {}).setdefault(str(busy), []).append(sides[name].seconds(n))
                        time.sleep(0.1)  # waiting threads go to sleep
                samples.setdefault("command, 1 request", {}).setdefault(str(busy), []).append(command_seconds())
    medians = {case: {busy: statistics.median(s) for busy, s in found.items()} for case, found in samples.items()}
    print(f"{'ms of a step, medians':28}{'alone':>10}{f'{cores} busy':>10}{'ratio':>10}")
    for case, found in medians.items():
        alone, contended = found["0"], found[str(cores)]
        print(f"{case:28}{1e3 * alone:10.1f}{1e3 * contended:10.1f}{contended / alone:10.2f}")
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), **describe(), "before": given.before_version, "alone": given.alone,
        "tokens": TOKENS,
        "busy": "number of busy processes", "median_s": medians, "samples_s": samples,
    }  # fmt: skip
    given.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
