"""Loads a server of Forerun with many clients at once, and looks whether anything is lost, mixed up, leaked or left over.

    python benchmarks/server_load.py --out record.json [--clients 32] [--seconds 120] [--short 10000]
        [--speculative-config JSON]

Starts `forerun serve` with the default model. Every kind of request (streaming or not, greedy or with a seed, plain or with a
given form) is first asked alone. Then all clients ask at random for --seconds, and some of them leave in the middle of an
answer. Each answer must be the one that was given alone. Then --short requests of a few tokens follow. The record has the
requests, the differences, the resident memory of both processes (bytes) after each part, and what /health and the last requests
said. Exit code 1 if an answer was lost or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from forerun.bench.records.machine import describe, load_average, versions
from forerun.bench.workloads.tasks import TASKS

LEAVES = 0.05  # of the requests under load end when their client leaves
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"subject": {"type": "string", "maxLength": 20}}, "required": ["subject"],
        "additionalProperties": False,
    }},
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {}, {}, {"structured": {"regex": r"[A-Z][a-z]{3,12}( [a-z]{2,9}){3,8}\."}}, {},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
]  # fmt: skip


def requests(count: int) -> list[dict[str, Any]]:
    """Different bodies for /v1/chat/completions."""
    draw, found = random.Random(0), []
    tasks = [name for name in ("explain", "chat", "return-code", "edit-code") if name in TASKS]
    for i in range(count):
        messages = list(TASKS[tasks[i % len(tasks)]].prompt(i // len(tasks)).conversation or ())
        body = {"messages": messages, "max_tokens": draw.choice((8, 24, 48)), "temperature": 0.0} | FORMS[i % len(FORMS)]
        if i % 4 == 3:
            body |= {"temperature": 0.8, "seed": i}
        found.append(body)
    return found


def said(message: dict[str, Any]) -> str:
    """Of a message or a delta: its content, and names and arguments of its calls."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return (message.get("content") or "") + "".join((f.get("name") or "") + (f.get("arguments") or "") for f in calls)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave: bool = False) -> str | None:
    """The text of the answer; None: the client left."""
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        if not body.get("stream"):
            return said((await answer.json())["choices"][0]["message"])
        text, ended = "", False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += said(choice["delta"])
            if leave and text:
                return None
        if not ended:
            raise RuntimeError("a stream ended without [DONE]")
        return text


def resident(process: subprocess.Popen[str]) -> list[int]:
    """Bytes of the processes of the server, its own first."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = []
    for pid in (str(process.pid), *children):
        status = Path(f"/proc/{pid}/status").read_text()
        found += [int(m[1]) * 1024 for m in re.finditer(r"VmRSS:\s+(\d+) kB", status)]
    return found


async def load(url: str, given: argparse.Namespace, process: subprocess.Popen[str]) -> dict[str, Any]:
    bodies, counts = requests(given.kinds), Counter[str]()
    errors: list[str] = []
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
        alone = [await ask(session, url, body) for body in bodies]
        memory = {"alone": resident(process)}
        print(f"{len(alone)} answers alone; {memory}", flush=True)
        end = time.monotonic() + given.seconds

        async def client(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < end:
                i, stream = draw.randrange(len(bodies)), draw.random() < 0.6
                leave = stream and draw.random() < LEAVES
                body = bodies[i] | ({"stream": True} if stream else {})
                try:
                    text = await ask(session, url, body, leave)
                except Exception as error:
                    counts["lost"] += 1
                    errors.append(f"{type(error).__name__}: {error}"[:300])
                    continue
                differs = f"differs, temperature {body['temperature']}"
                counts["left" if text is None else "same" if text == alone[i] else differs] += 1

        await asyncio.gather(*(client(i) for i in range(given.clients)))
        memory["load"] = resident(process)
        print(dict(counts), memory, flush=True)
        short = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0.0}
        first, left = await ask(session, url, short), [given.short]

        async def shots() -> None:
            while left[0] > 0:
                left[0] -= 1
                counts["short, same" if await ask(session, url, short) == first else "short, differs"] += 1
                if left[0] in (given.short // 2, given.short - given.short // 10):
                    memory[f"after {given.short - left[0]} short ones"] = resident(process)

        await asyncio.gather(*(shots() for _ in range(given.clients)))
        memory["end"] = resident(process)
        again = [await ask(session, url, body) for body in bodies[:8]] == alone[:8]
        async with session.get(f"{url}/health") as answer:
            health = answer.status
        metrics = {}
        async with session.get(f"{url}/metrics") as answer:
            if answer.status == 200:
                lines = (line.rpartition(" ") for line in (await answer.text()).splitlines())
                metrics = {k: v for k, _, v in lines if k[:1] != "#" and re.search("running|waiting|usage", k)}
    return {
        "counts": dict(counts), "errors": errors[:20], "memory_bytes": memory, "again": again, "health": health,
        "gauges": metrics,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kinds", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--short", type=int, default=10000)
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 4}')
    parser.add_argument("--dtype", default="float32", help="float32: the same sums in any batch")
    given = parser.parse_args()
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0", "--dtype", given.dtype]
    if given.speculative_config:
        command += ["--speculative-config", given.speculative_config]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.match(r"(http://\S+) serves ", line)))
        record = {"date": time.strftime("%Y-%m-%d"), "machine": asdict(describe(load_average())), "versions": versions()}
        record |= {"given": {k: str(v) for k, v in vars(given).items() if k != "out"}, **asyncio.run(load(url, given, process))}
    finally:
        process.terminate()
        code = process.wait(60)
    given.out.write_text(json.dumps(record | {"exit_code": code}, indent=1, default=str) + "\n")
    print(json.dumps({k: record[k] for k in ("counts", "errors", "memory_bytes", "again", "health", "gauges")}, indent=1), code)
    sys.exit(any(name == "lost" or "differs" in name for name in record["counts"]) or not record["again"])


if __name__ == "__main__":
    main()
