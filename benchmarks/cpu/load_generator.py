"""The errors of the load generator itself: 64 streams of 200 chunks a second from a scripted server, with the client on one
core.

    python benchmarks/cpu/load_generator.py [--out FILE]

The server runs on another core and records when it sent each chunk. Every figure of the client is compared with the script:
number of tokens, time to first token (half a second in the script), time per output token, end-to-end time, chunk gaps,
throughput. There are two cases: requests due 10 ms apart, and all requests due at the same moment. The second is the worst case
for the time to first token, since the last request waits until all others were sent. The output gives the error of each figure
at the median and at the 99th percentile of the streams, and the delay from the sending of a chunk to its arrival. A warm-up
batch opens the connections first, as in any run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.endpoint import Request
from forerun.bench.engines.openai import Address, HttpEndpoint
from forerun.bench.load import latency
from forerun.bench.load import sending as load
from forerun.bench.records.record import Answer, Load
from tests.mock_server import MockServer, Script

STREAMS, RATE, SECONDS, FIRST_S = 64, 200, 5.0, 0.5


def serve(core: int) -> None:
    """Prints its port, then, after a line on standard input, the times at which requests arrived and chunks were sent."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    scripts = {n: Script(tuple((FIRST_S + i / RATE, 1) for i in range(n))) for n in (2, int(RATE * SECONDS))}
    server = MockServer(lambda body: scripts[body["max_tokens"]])

    async def go() -> None:
        async with server:
            print(server.port, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            print(json.dumps({"arrived": server.arrived, "sent": server.sent}), flush=True)

    asyncio.run(go())


async def measure(
    ports: list[int], streams: int, chunks: int, apart_s: float
) -> tuple[tuple[Answer, ...], float, float, list[float]]:
    """The answers, the wall time, the processor time of this process, and the time at which each chunk arrived; in seconds."""
    endpoints = [
        await HttpEndpoint(Address(f"http://127.0.0.1:{p}", "target", DIALECTS["vllm"])).__aenter__() for p in ports
    ]

    class Shared:
        async def generate(self, ask: Request):  # type: ignore[no-untyped-def]
            async for piece in endpoints[int(ask.name) % len(endpoints)].generate(ask):
                if piece.text:
                    seen.append(piece.at_s)
                yield piece

    seen: list[float] = []
    shape = Load("trace" if apart_s else "concurrency", streams, requests=streams)
    due = [apart_s * i for i in range(streams)] if apart_s else None
    warm = Load(concurrency=streams, requests=streams)
    await load.drive(Shared(), [Request(str(i), 2, text="x") for i in range(streams)], warm, None)  # type: ignore[arg-type]
    seen.clear()
    asks = [Request(str(i), chunks, text="x") for i in range(streams)]
    busy = time.process_time()
    answers, wall = await load.drive(Shared(), asks, shape, due)  # type: ignore[arg-type]
    busy = time.process_time() - busy
    for endpoint in endpoints:
        await endpoint.__aexit__()
    return answers, wall, busy, seen


def off(values: list[float], truth: float) -> dict[str, float]:
    """Their errors in %: the median, the 99th percentile and the largest."""
    errors = sorted(100 * abs(v - truth) / truth for v in values)
    return {"median": statistics.median(errors), "p99": errors[int(0.99 * (len(errors) - 1))], "worst": errors[-1]}


def run(streams: int, apart_s: float) -> dict[str, object]:
    chunks = int(RATE * SECONDS)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    others = cores[1:] or cores
    servers = [
        subprocess.Popen([sys.executable, __file__, "--serve", str(others[i % len(others)])],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(min(len(others), 2))
    ]  # fmt: skip
    ports = [int(s.stdout.readline()) for s in servers]  # type: ignore[union-attr]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[0]})
    answers, wall, busy, seen = asyncio.run(measure(ports, streams, chunks, apart_s))
    sent: list[list[float]] = []
    for server in servers:
        said = json.loads(server.communicate("\n")[0])
        sent += [times for times in said["sent"] if len(times) == chunks]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))
    whole = FIRST_S + (chunks - 1) / RATE
    whole_run = whole + apart_s * (streams - 1)
    good = [a for a in answers if not a.failed]
    gaps = [g for a in good for g in latency.chunk_gaps(a)]
    server_gaps = [(t[-1] - t[0]) / (len(t) - 1) for t in sent]
    # matched by their order over all streams; both processes read the same clock
    delays = sorted(s - w for s, w in zip(sorted(seen), sorted(t for times in sent for t in times), strict=False))
    return {
        "streams": streams,
        "chunks_per_second_each": RATE,
        "requests_due_apart_s": apart_s,
        "failed": len(answers) - len(good),
        "tokens_missing": streams * chunks - sum(a.tokens for a in good),
        "client_core_busy_percent": 100 * busy / wall,
        "off_percent_against_script": {
            "tpot": off([t for a in good if (t := latency.tpot(a)) is not None], 1 / RATE),
            "e2e": off([a.e2e_s for a in good], whole),
            "ttft": off([a.ttft_s for a in good], FIRST_S),
            "chunk_gap_mean": off([statistics.fmean(gaps)], 1 / RATE),
            "tokens_per_second": off([sum(a.tokens for a in good) / wall], streams * chunks / whole_run),
        },
        "ttft_late_ms": {"median": 1000 * (statistics.median(a.ttft_s for a in good) - FIRST_S)},
        "chunk_gap_ms": {
            name: 1000 * sorted(gaps)[int(share * (len(gaps) - 1))]
            for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99))
        },
        "server_gap_off_percent": off(server_gaps, 1 / RATE),
        "seen_after_sent_ms": {
            "median": 1000 * statistics.median(delays),
            "p99": 1000 * delays[int(0.99 * (len(delays) - 1))],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
        "runs": [run(args.streams, apart_s) for apart_s in (0.01, 0.0) for _ in range(args.repetitions)],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
