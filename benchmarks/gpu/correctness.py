"""Checks the results on the GPU: logits against transformers, greedy answers against the CPU engine and against plain decoding,
sampled tokens against exact probabilities. Also checks that steps never wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ARMS, CUDA, DEVICE, NGRAM, NoText, capture, engine, release, run
from torch import Tensor

from forerun.config import EngineConfig, Speculation
from forerun.engine.engine import Engine
from forerun.kernels import Batch
from forerun.models import loading
from forerun.models.decoder import KVCache, Target
from forerun.types import Request, SamplingParams

Prompts = Sequence[Sequence[int]]


class Laid:
    """Texts with a KV cache of their own, which are computed part by part."""

    def __init__(self, target: Target, texts: Prompts, block: int = 16) -> None:
        self.target, self.texts = target, texts
        pages = max(-(-len(text) // block) for text in texts)
        self.table = torch.arange(1, len(texts) * pages + 1, dtype=torch.int32, device=DEVICE).view(len(texts), pages)
        self.kv: KVCache = target.kv_cache(len(texts) * pages + 1, block)

    def logits(self, begin: Sequence[int], count: Sequence[int], width: int | None = None) -> Tensor:
        """Logits [sum(count),V] of `count` positions of each text, from `begin` on. width: every count is this, as in a decode
        step."""
        parts = list(zip(self.texts, begin, count, strict=True))
        ids = torch.tensor([token for text, b, n in parts for token in text[b : b + n]], device=DEVICE)
        positions = torch.cat([torch.arange(b, b + n) for _, b, n in parts]).to(DEVICE)
        start = torch.tensor(np.cumsum([0, *count]), dtype=torch.int32, device=DEVICE)
        batch = Batch(ids, positions, start, self.table, torch.arange(len(ids), device=DEVICE))
        kernels = self.target.kernels.bounded(width, max(map(len, self.texts)) + 1) if width else None
        with torch.inference_mode():
            return self.target.forward(batch, self.kv, kernels=kernels).logits


def against_transformers(folder: Path, prompts: Prompts, tail: int = 5) -> dict[str, Any]:
    """Relative error and top-1 agreement of the logits at all positions of a few prompts, in float32 and bfloat16. Ours come
    from one prefill, and for the last `tail` positions of each prompt from a verify step. The reference is transformers in
    float32."""
    # transformers imports a package named `kernels`, and would find the script of this folder
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    from transformers import AutoConfig, AutoModelForCausalLM

    whole, ends = [len(p) for p in prompts], np.cumsum([len(p) for p in prompts])
    last = torch.tensor([i for end in ends for i in range(int(end) - tail, int(end))], device=DEVICE)
    logits: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        target = Target.load(folder, dtype, DEVICE)
        theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).to(DEVICE).eval()
        theirs.load_state_dict(dict(loading.parts(target.config, target.weights)), strict=False)  # a tied head is not listed
        with torch.inference_mode():
            rows = [theirs(input_ids=torch.tensor([list(p)], device=DEVICE)).logits[0].float() for p in prompts]
        logits[f"transformers {name}"] = torch.cat(rows)
        del theirs
        zeros = [0] * len(prompts)
        logits[f"prefill {name}"] = Laid(target, prompts).logits(zeros, whole)
        laid = Laid(target, prompts)
        laid.logits(zeros, [n - tail for n in whole])
        logits[f"verify {name}"] = laid.logits([n - tail for n in whole], [tail] * len(prompts), tail)
        del target, laid
        release()

    def compare(mine: str, its: str) -> dict[str, float]:
        a, b = logits[mine].double(), logits[its].double()
        b = b[last] if len(a) < len(b) else b
        return {
            "relative_error": float((a - b).norm() / b.norm()),
            "largest_error": float((a - b).abs().max()),
            "top1_agreement": float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        }

    exact = "transformers float32"
    found: dict[str, Any] = {f"{name} against {exact}": compare(name, exact) for name in logits if name != exact}
    found["prefill bfloat16 against transformers bfloat16"] = compare("prefill bfloat16", "transformers bfloat16")
    return found | {"prompts": len(prompts), "positions": sum(whole)}


def like_plain(target: Target, prompts: Prompts) -> dict[str, Any]:
    """The number of answers with n-gram drafts that equal those of plain decoding, in the engine's dtype."""
    plain, ngram = engine(target), engine(target, NGRAM)
    found: dict[str, Any] = {}
    everything = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2, "min_tokens": 4}
    cases: list[tuple[str, int, int, float, dict[str, Any]]] = [
        ("greedy", 1, 128, 0.0, {}), ("greedy", 8, 128, 0.0, {}), ("greedy", 32, 128, 0.0, {}),
        ("seeded", 8, 64, 0.8, {}), ("every parameter", 4, 48, 0.9, everything),
    ]  # fmt: skip
    for name, count, tokens, temperature, more in cases:
        a, b = (run(it, prompts[:count], tokens, temperature, **more) for it in (plain, ngram))
        same = sum(x == y for x, y in zip(a.answers, b.answers, strict=True))
        found[f"{name}, {count} requests"] = {"identical": same, "acceptance_rate": b.stats.drafts.acceptance_rate}
    return found


def like_the_cpu(folder: Path, prompts: Prompts, tokens: int = 128) -> dict[str, Any]:
    """Compares greedy answers in float32 with the CPU engine's. For each difference gives the gap of the two likeliest
    tokens."""
    on_gpu, on_cpu = (Target.load(folder, torch.float32, device) for device in (DEVICE, "cpu"))
    answers = run(engine(on_gpu, None, len(prompts)), prompts, tokens, 0.0).answers
    config = EngineConfig(max_model_len=2048, max_num_seqs=len(prompts), kv_cache_tokens=len(prompts) * 512)
    it = Engine(on_cpu, config, lambda *_: None, NoText)
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    tops: dict[str, list[Any]] = {name: [] for name in ids}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2)
        it.add(Request(str(i), tuple(prompt), params, tokens, i))
    while it.has_work:
        for event in it.step():
            ids[event.request_id] += event.tokens
            tops[event.request_id] += event.logprobs
    differences = []
    for i, answer in enumerate(answers):
        at = next((j for j, (x, y) in enumerate(zip(answer, ids[str(i)], strict=True)) if x != y), None)
        if at is not None:
            top = tops[str(i)][at].top
            differences.append({"prompt": i, "at": at, "top2_gap": top[0][1] - top[1][1]})
    return {"prompts": len(prompts), "tokens": tokens, "identical": len(answers) - len(differences), "differences": differences}


def filtered(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution of one row of logits [V] in float64, by sorting, independent of the engine's code. Of equal logits at
    the edge of a filter it may keep a part; the engine keeps all of them."""
    x = logits.double().cpu().numpy() / temperature
    p = np.exp(x - x.max())
    order = np.argsort(-x, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        keep = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[keep:]] = 0
    return p / p.sum()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> dict[str, float]:
    """The chi-square test of counts against probabilities. Cells with fewer than 5 expected counts are pooled. outside: the
    counts of tokens with probability 0; they are pooled too, so they need a look."""
    want = probs * counts.sum()
    small = want < 5
    seen = np.append(counts[~small], counts[small].sum()).astype(float)
    want = np.append(want[~small], want[small].sum())
    seen, want = seen[want > 0], want[want > 0]
    freedom = len(want) - 1
    p = 1.0
    if freedom > 0:
        x = torch.tensor([freedom / 2, ((seen - want) ** 2 / want).sum() / 2], dtype=torch.float64)
        p = float(torch.special.gammaincc(x[0], x[1]))
    return {"p": p, "cells": len(want), "samples": int(counts.sum()), "outside": int(counts[probs == 0].sum())}


def samples(
    target: Target,
    exact: Target,
    prompt: Sequence[int],
    speculation: Speculation | None,
    count: int,
    places: Sequence[int] = (0, 1, 4),
    **params: Any,
) -> dict[str, Any]:
    """Chi-square tests of the tokens of `count` seeds at some places of the answer. A place is tested on the answers that have
    the likeliest tokens before it. The probabilities are float64 and come from the float32 model `exact`, from the target's own
    logits, and from a temperature that is 20 % off, which must fail. The first token comes from the prompt's step. With drafts,
    the others come from verify steps."""
    rows, tokens = min(128, count), max(places) + 3
    it = engine(target, speculation, rows, rows * (-(-(len(prompt) + tokens + 5) // 16) + 1) * 16)
    answers: list[list[int]] = []
    drafted = accepted = 0
    for begin in range(0, count, rows):
        seeds = range(begin, min(begin + rows, count))
        ran = run(it, [prompt] * len(seeds), tokens, 1.0, seeds=seeds, fresh=begin == 0, **params)
        answers += ran.answers
        drafted, accepted = drafted + ran.stats.drafts.drafted, accepted + ran.stats.drafts.accepted
    found: dict[str, Any] = {"drafted": drafted, "accepted": accepted}
    before: list[int] = []
    for place in range(max(places) + 1):
        alike = [a for a in answers if a[:place] == before]
        counts = np.bincount([a[place] for a in alike], minlength=target.vocab)
        if place in places:
            text = [*prompt, *before]
            wide, own = (Laid(model, [text]).logits([0], [len(text)])[-1] for model in (exact, target))
            found[f"token {place}"] = {
                "likeliest": int(counts.max()),
                "float32": chi_square(counts, filtered(wide, 1.0, **params)),
                "own_logits": chi_square(counts, filtered(own, 1.0, **params)),
                "wrong_temperature_p": chi_square(counts, filtered(wide, 1.2, **params))["p"],
            }
        before.append(int(counts.argmax()))
    return found


def distribution(target: Target, folder: Path | None, prompts: dict[str, Any], count: int = 4000) -> dict[str, Any]:
    """`samples` of the real model, with a temperature only and with filters. Prompts of random ids allow many tokens; with
    n-gram drafts, prompts to copy have many drafts."""
    exact = Target.load(folder, torch.float32, DEVICE) if folder else target
    filters = {"top_k": 20, "top_p": 0.9}
    cases: list[tuple[str, str, Speculation | None, dict[str, Any]]] = [
        ("random, plain", "random", None, {}),
        ("random, n-gram", "random", NGRAM, {}),
        ("random, plain, top_k 20 top_p 0.9", "random", None, filters),
        ("copy, plain", "repeat", None, {}),
        ("copy, n-gram", "repeat", NGRAM, {}),
        ("copy, n-gram, top_k 20 top_p 0.9", "repeat", NGRAM, filters),
    ]
    found = {}
    for name, kind, speculation, params in cases:
        found[name] = samples(target, exact, prompts[kind][0], speculation, count, **params)
        print(name, found[name], flush=True)
        release()
    return found


def no_waiting(target: Target, prompts: Prompts, rows: int = 8, steps: int = 15) -> dict[str, Any]:
    """Decode in the steady state while torch treats every synchronisation as an error. Only the wait for a step's own event is
    allowed. Gives each drafter's problem, None if there is none. The last entry is the control, which must have a problem."""
    guesses = run(engine(target, None, rows), prompts[:rows], 200, 0.0).answers
    found: dict[str, Any] = {}
    for name, speculation in ARMS.items():
        it = engine(target, speculation, rows)
        capture(it, rows)
        for i, prompt in enumerate(prompts[:rows]):
            params = SamplingParams(temperature=0, max_tokens=200)
            it.add(Request(str(i), tuple(prompt), params, 200, i, prediction=tuple(guesses[i])))
        problem = _steady(it.step, steps) if _warm(it) else "not all rows decode"
        while it.has_work:
            it.step()
        found[name] = {"problem": problem, "waits": it._step.waits, "steps": it.stats.steps}
        release()
    x = torch.zeros(1, device=DEVICE)
    return found | {"control": {"problem": _steady(x.item, 1)}}


def _warm(it: Engine, steps: int = 8) -> bool:
    for _ in range(steps):
        it.step()
    return all(sequence.pending == 1 for sequence in it.scheduler.running)


def _steady(step: Callable[[], Any], count: int) -> str | None:
    if not CUDA:
        return "no CUDA"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(count):
            step()
    except RuntimeError as error:
        return str(error)[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None
