"""Compares the next-token distributions of this engine with those of llama.cpp on the same .gguf file, for real text: the
topics of Python's own documentation.

    python benchmarks/cpu/logits.py MODEL.gguf --server LLAMA-SERVER | --python PYTHON [--tokens 2000] [--out FILE]

--server, --python: as for llamacpp.py. Three sides are compared: this engine with the blocks as stored ("blocks"), with the
same weights expanded to float32 ("float32"), and llama.cpp. The text is computed in windows of 500 tokens that know nothing of
each other. llama.cpp's server gives the probabilities of its likeliest tokens. So a distribution is over 1,001 outcomes: the
1,000 likeliest tokens of llama.cpp at a position, and all others together. For each pair: the share of positions with the same
likeliest token, and the Kullback-Leibler divergence in nats. For each side: the perplexity, over the positions whose next token
is one of the 1,000.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import tempfile
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from llamacpp import LlamaCpp, command_of
from machine import describe
from torch import Tensor

from forerun.kernels import Batch
from forerun.llm import LLM

WINDOW, KNOWN = 500, 1000


def of_llamacpp(theirs: LlamaCpp, windows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """At each position: the ids of the likeliest next tokens, and their log-probabilities; each [positions, KNOWN]."""
    ids, logprobs = [], []
    for window in windows:
        for end in range(1, len(window) + 1):
            top = theirs.post(
                {"prompt": window[:end], "n_predict": 1, "temperature": 0, "n_probs": KNOWN, "cache_prompt": True}
            )["completion_probabilities"][0]["top_logprobs"]  # fmt: skip
            ids.append([one["id"] for one in top])
            logprobs.append([one["logprob"] for one in top])
    return torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float64)


@torch.inference_mode()
def of_forerun(model: str, dtype: str, windows: list[list[int]]) -> tuple[Tensor, dict[str, Any]]:
    """The log-probabilities [positions, vocabulary], and which weights they are of."""
    target = LLM.load(model, dtype, "cpu").target
    pages = -(-WINDOW // 16)
    kv, table = target.kv_cache(pages + 1, 16), torch.arange(1, pages + 1, dtype=torch.int32)[None]
    found = []
    for window in windows:
        at = torch.arange(len(window))
        batch = Batch(torch.tensor(window), at, torch.tensor([0, len(window)], dtype=torch.int32), table, at)
        found.append(target.forward(batch, kv).logits.log_softmax(-1))
    return torch.cat(found), {"dtype": str(target.dtype), "quantization": target.quantization, "bytes": target.bytes}


def with_rest(logprobs: Tensor) -> Tensor:
    """Those of the known tokens, and behind them the one of all other tokens together."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-12).log()
    return torch.cat([logprobs, rest], -1)


def compare(one: Tensor, other: Tensor) -> dict[str, float]:
    """Agreement of the likeliest tokens, and the divergence KL(one || other) in nats."""
    kl = (one.exp() * (one - other)).sum(-1)
    same = (one[:, :-1].argmax(-1) == other[:, :-1].argmax(-1)).double().mean()
    return {"top1": same.item(), "kl_mean": kl.mean().item(), "kl_p99": kl.quantile(0.99).item(), "kl_max": kl.max().item()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a .gguf file")
    theirs = options.add_mutually_exclusive_group(required=True)
    theirs.add_argument("--server", help="a llama-server program")
    theirs.add_argument("--python", help="a Python that has xllamacpp")
    options.add_argument("--version", help="llama.cpp's version and how it was built, for the record")
    options.add_argument("--tokens", type=int, default=2000, help=f"rounded down to a multiple of {WINDOW}")
    options.add_argument("--out", type=Path, default=Path("logits-cpu.json"))
    given = options.parse_args()

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = LLM.load(given.model).tokenizer.encode(text[: 10 * given.tokens], add_special_tokens=False)
    windows = [ids[i : i + WINDOW] for i in range(0, given.tokens - WINDOW + 1, WINDOW)]
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = LlamaCpp(command_of(given.server, given.python), given.model, 1, "plain", Path(folder) / "log")
        try:
            known, values = of_llamacpp(server, windows)
        finally:
            server.stop()
        sides["llama.cpp"] = {"version": given.version, "log": server.facts()}
    logprobs = {"llama.cpp": with_rest(values)}
    for name, dtype in (("blocks", "auto"), ("float32", "float32")):
        found, sides[name] = of_forerun(given.model, dtype, windows)
        logprobs[name] = with_rest(found.gather(1, known).double())
    following = torch.tensor([[*window[1:], -1] for window in windows]).flatten()
    at, column = (known == following[:, None]).nonzero(as_tuple=True)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), **describe(), "model": Path(given.model).name, "positions": len(known),
        "window": WINDOW, "known": KNOWN, "sides": sides,
        "perplexity": {name: (-one[at, column].mean()).exp().item() for name, one in logprobs.items()},
        "perplexity_positions": len(at),
        "pairs": {f"{a} || {b}": compare(logprobs[a], logprobs[b]) for a, b in permutations(logprobs, 2)},
    }  # fmt: skip
    print(json.dumps({name: record[name] for name in ("sides", "perplexity", "pairs")}, indent=2))
    given.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
