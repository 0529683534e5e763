"""Chats of several turns on the GPU, with the prefix cache on and off. In float32 the answers must be equal token by token.
Also gives the time that the cache saves. Turns end by a stop id or at their limit, in some chats at the end of a page.

    PYTHONPATH=src python3 benchmarks/gpu/chats.py --model FOLDER_OR_GGUF --out DIR

Without CUDA it runs on the CPU with the padded layout, to try the script.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from forerun.config import EngineConfig, Speculation
from forerun.drafters.table import TABLE, DrafterContext
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.models.tokenizer import Detokenizer
from forerun.types import Request, SamplingParams

ASKED = [
    "Name a colour.", "And another one?", "Which of the two is darker?", "Write both of them twice.", "Thank you. Say goodbye.",
]  # fmt: skip
FIRST = [
    "Hello!", "Let us talk about paint.", "I am choosing a colour for my room.", "You are a painter.", "Answer in one word.",
    "Answer shortly.", "My name is Ann.", "What is a colour?",
]  # fmt: skip
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "draft_model": {"method": "draft_model", "model": "the target itself", "num_speculative_tokens": 4},
}


def engine(model: Any, arm: dict[str, Any] | None, caching: bool) -> Engine:
    speculation = Speculation.parse(arm)
    config = EngineConfig(
        max_model_len=1024, max_num_seqs=16, kv_cache_tokens=32768, enable_prefix_caching=caching, speculation=speculation,
    )  # fmt: skip

    def make(slots: Any, mirror: Any, sampling: Any, kv: Any, padded: bool) -> Any:
        if speculation is None:
            return None
        around = DrafterContext(slots, mirror, sampling, kv, config, padded, model.tokenizer.size, model.target)
        return TABLE[speculation.method](speculation, around)

    return Engine(model.target, config, make, lambda: Detokenizer(model.tokenizer), padded=True)


def chats(it: Engine, model: Any, turns: int, length: int) -> tuple[list[list[list[int]]], list[list[list[float]]], float]:
    """All answers by chat and turn, their logprobs, and the seconds for all of them."""
    messages: list[list[dict[str, str]]] = [[{"role": "user", "content": text}] for text in FIRST * 2]
    prompts = [model.tokenizer.encode(model.tokenizer.render_chat(m), add_special_tokens=False) for m in messages]
    answers: list[list[list[int]]] = [[] for _ in prompts]
    values: list[list[list[float]]] = [[] for _ in prompts]
    start = time.perf_counter()
    for turn in range(turns):
        for chat, ids in enumerate(prompts):
            # the limit differs from chat to chat, so that in some of them prompt and answer end at the end of a page
            params = SamplingParams(temperature=0, max_tokens=length + chat, logprobs=0)
            it.add(Request(str(chat), tuple(ids), params, length + chat, 0, tuple(model.target.config.eos_ids)))
            answers[chat].append([])
            values[chat].append([])
        while it.has_work:
            for event in it.step():
                answers[int(event.request_id)][-1] += event.tokens
                values[int(event.request_id)][-1] += [one.logprob for one in event.logprobs]
        for chat, ids in enumerate(prompts):
            asked = f"\n<|im_start|>user\n{ASKED[(turn + chat) % len(ASKED)]}<|im_end|>\n<|im_start|>assistant\n"
            ids += answers[chat][-1]
            if ids[-1] not in model.target.config.eos_ids:
                ids += list(model.target.config.eos_ids)[:1]
            ids += model.tokenizer.encode(asked, add_special_tokens=False)
    return answers, values, time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--length", type=int, default=24)
    options.add_argument("--dtypes", default="float32,bfloat16")
    given = options.parse_args()
    cuda = torch.cuda.is_available()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__, "turns": given.turns, "chats": len(FIRST) * 2, "runs": [],
    }  # fmt: skip
    for dtype in given.dtypes.split(","):
        model = LLM.load(given.model, dtype, "cuda" if cuda else "cpu")
        for name, arm in ARMS.items():
            found = {}
            for caching in (False, True):
                it = engine(model, arm, caching)
                found[caching] = (*chats(it, model, given.turns, given.length), it.stats)
            (plain, before, seconds, _), (cached, after, faster, stats) = found[False], found[True]
            turns = [(a, b) for one, other in zip(plain, cached, strict=True) for a, b in zip(one, other, strict=True)]
            pairs = [
                (x, y) for one, other in zip(before, after, strict=True) for a, b in zip(one, other, strict=True)
                for x, y in zip(a, b, strict=False)
            ]  # fmt: skip
            run = {
                "dtype": dtype, "arm": name, "turns": len(turns), "equal": sum(a == b for a, b in turns),
                "largest_logprob_difference": max(abs(x - y) for x, y in pairs) if plain == cached else None,
                "cached_tokens": stats.cached_tokens, "computed_tokens": stats.prompt_tokens,
                "accepted": stats.drafts.accepted, "drafted": stats.drafts.drafted,
                "seconds_without_cache": seconds, "seconds_with_cache": faster,
                "answer_tokens": sum(len(a) for a, _ in turns),
            }  # fmt: skip
            assert all(math.isfinite(x) for x, _ in pairs)
            record["runs"].append(run)
            print(json.dumps(run), flush=True)
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "chats.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
