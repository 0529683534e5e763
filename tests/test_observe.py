"""Drafters observe the target. A synthetic drafter keeps every hidden state that it observes. After each step all its states of
running sequences are compared with a forward pass over the tokens from scratch. Both layouts run, operation by operation and in
graphs, with prompt chunks, decode and verify steps with 0 .. k accepted tokens, prefix hits and preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import EngineConfig, Speculation
from forerun.drafters import Needs, Observed, Rows, Stateless
from forerun.engine.engine import Engine
from forerun.engine.pages import Pages
from forerun.engine.scheduler import Sequence
from forerun.engine.state import RowState
from forerun.kernels import Batch
from forerun.models.decoder import KVCache, Target
from forerun.types import Draft, Request, SamplingParams
from tests.test_device import DEVICES, NoText, prompts
from tests.tiny import tiny_model

K = 3
SHAPE: dict[str, Any] = {"hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 256}


class Witness(Stateless):
    """Keeps the hidden states, the position and the next token of each observed position, under the target's page numbers. It
    drafts the known answer, with 0 .. k right tokens, but only if the position before the last token was observed."""

    def __init__(self, state: RowState, kv: KVCache, layers: tuple[int, ...], hidden: int) -> None:
        self.needs = Needs(device=True, layers=layers, kv_bytes_per_token=1)
        self.state, self.size = state, kv.block_size
        device = state.length.device
        self.features = torch.zeros(kv.pages, kv.block_size, len(layers) * hidden, device=device)
        self.position = torch.full((kv.pages, kv.block_size), -1, device=device)
        self.following = torch.full((kv.pages, kv.block_size), -1, device=device)
        self.answer = torch.zeros_like(state.tokens)
        self.known: dict[str, list[int]] = {}

    def admit(self, slot: int, request: Request) -> None:
        ids = [*request.prompt_ids, *self.known.get(request.id, ())]
        self.answer[slot, : len(ids)] = torch.tensor(ids).to(self.answer.device)

    def place(self, table: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return table.gather(1, (position // self.size)[:, None])[:, 0].long(), position % self.size

    def observe(self, seen: Observed) -> None:
        start, total = seen.batch.row_start.long(), len(seen.batch.positions)
        at = torch.arange(total, device=start.device)
        row = torch.searchsorted(start[1:], at, right=True).clamp(max=len(seen.slot) - 1)
        true = at - start[row] < seen.true[row]
        position = seen.batch.positions
        page, offset = self.place(seen.batch.block_table[row], position)
        page = torch.where(true, page, 0)
        self.features[page, offset] = torch.cat([h.float() for h in seen.hidden], 1)
        self.position[page, offset] = position
        self.following[page, offset] = self.state.tokens[seen.slot[row], position + 1]

    def propose(self, rows: Rows) -> Draft:
        length = self.state.length[rows.slot]
        page, offset = self.place(self.state.block_table[rows.slot], (length - 2).clamp(min=0))
        fresh = self.position[page, offset] == length - 2
        at = (length[:, None] + torch.arange(K, device=length.device)).clamp(max=self.answer.shape[1] - 1)
        right = torch.arange(K, device=length.device) < ((length + rows.slot) % (K + 1))[:, None]
        tokens = self.answer[rows.slot].gather(1, at)
        tokens = torch.where(right, tokens, (tokens + 1) % 260)[:, : rows.width]
        return Draft(tokens, torch.where(fresh, rows.k, 0))


def request(name: str, prompt: list[int], tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return Request(name, tuple(prompt), params, tokens, 0)


def from_scratch(target: Target, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """The hidden states of all tokens, [T, layers * H], from one pass on pages of their own."""
    count, device = len(ids), target.device
    kv = target.kv_cache(count // 8 + 2, 8)
    whole = {"dtype": torch.int64, "device": device}
    batch = Batch(
        torch.tensor(ids, **whole), torch.arange(count, **whole), torch.tensor([0, count], dtype=torch.int32, device=device),
        torch.arange(1, kv.pages, dtype=torch.int32, device=device)[None], torch.tensor([0], **whole),
    )  # fmt: skip
    with torch.inference_mode():
        return torch.cat([h.float() for h in target.forward(batch, kv, layers).hidden], 1)


def missing(it: Engine, witness: Witness, sequence: Sequence, target: Target, tolerance: float) -> int:
    """Positions of a running sequence for which the witness has no entry or a wrong one."""
    slot = sequence.slot
    length = int(it.state.length[slot]) if sequence.decodes else sequence.settled + 1
    ids = it.state.tokens[slot, : length + 1].tolist()
    if length < 2:
        return 0
    pages = torch.tensor(sequence.pages, device=it.state.length.device)
    at = torch.arange(length - 1, device=pages.device)
    page, offset = pages[at // witness.size], at % witness.size
    want = from_scratch(target, ids[: length - 1], witness.needs.layers)
    apart = (witness.features[page, offset] - want).abs().amax(1) > tolerance * want.abs().max()
    wrong = apart | (witness.position[page, offset] != at)
    wrong |= witness.following[page, offset] != torch.tensor(ids[1:length], device=at.device)
    return int(wrong.sum())


def lived(target: Target, padded: bool, tolerance: float, seen: set[str]) -> tuple[int, dict[str, list[int]]]:
    """Serve chats of several turns on small pages. Return the missing or wrong positions over all steps, and the answers."""
    layers = (0, 1, target.config.layers)
    config = EngineConfig(
        max_model_len=120, max_num_seqs=3, kv_cache_tokens=128, block_size=8, max_num_batched_tokens=20, adaptive_drafts=False,
        speculation=Speculation("ngram", K),
    )  # fmt: skip
    witnesses: list[Witness] = []

    def make(state: RowState, mirror: RowState, sampling: Any, kv: KVCache, padded: bool) -> Witness:
        witnesses.append(Witness(state, kv, layers, target.config.hidden_size))
        return witnesses[-1]

    plain = Engine(target, EngineConfig(max_model_len=120, kv_cache_tokens=512), lambda *_: None, NoText, padded)
    it = Engine(target, config, make, NoText, padded)
    witness, wrong, answers = witnesses[-1], 0, dict[str, list[int]]()

    def answer(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
        nonlocal wrong
        found: dict[str, list[int]] = {one.id: [] for one in requests}
        for one in requests:
            engine.add(one)
        while engine.has_work:
            for event in engine.step():
                found[event.request_id] += event.tokens
                if event.counts is not None and engine is it:
                    seen.add(f"{event.counts[1]} of {event.counts[0]}")
            if engine is it:
                for sequence in it.scheduler.running:
                    if it._step.lag == 0 or sequence.decodes:
                        wrong += missing(it, witness, sequence, target, tolerance)
                        seen.add("part" if not sequence.generated else "answer")
        return found

    rng, texts = random.Random(5), prompts(4, 3, 260)
    for turn in range(3):
        asked = [request(f"{turn}.{i}", text, rng.randint(12, 20)) for i, text in enumerate(texts)]
        witness.known = answer(plain, asked)
        got = answer(it, asked)
        answers |= got
        texts = [text + got[f"{turn}.{i}"] + [7 + turn, 9] for i, text in enumerate(texts)]
    for last in (31, 32):  # the same tokens to the end of a page, then another one
        asked = [request(f"edge {last}", [*range(40, 56), last, 5, 6], 6)]
        witness.known = answer(plain, asked)
        answers |= answer(it, asked)
    seen |= {"preempted"} if it.stats.preemptions else set()
    seen |= {"cached"} if it.stats.cached_tokens else set()
    assert it.stats.drafts.accepted > 0
    return wrong, answers


CASES = {"preempted", "cached", "answer", *(f"{n} of {K}" for n in range(K + 1))}


@DEVICES
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_every_committed_position_is_observed(tmp_path: Path, padded: bool, device: str) -> None:
    if device == "cuda" and not padded:
        pytest.skip("the exact layout is for the CPU")
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.float32, device)
    seen: set[str] = set()
    wrong, _ = lived(target, padded, 1e-4, seen)
    assert wrong == 0 and seen >= CASES | ({"part"} if not padded else set())


@DEVICES
def test_graphs_observe_too(tmp_path: Path, device: str) -> None:
    """In bfloat16, which is captured on CUDA. Rounding differs between the shapes of launches."""
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), torch.bfloat16, device)
    seen: set[str] = set()
    wrong, _ = lived(target, True, 0.06, seen)
    assert wrong == 0 and seen >= CASES


@pytest.mark.parametrize("fault", ["hits are whole", "states of the token before", "drafts are not observed"])
def test_the_witness_notices_faults(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), "float32")
    if fault == "hits are whole":
        real_match = Pages.match
        monkeypatch.setattr(Pages, "match", lambda self, ids, recomputed=0, salt=None: real_match(self, ids, 0, salt))
    else:
        real = Witness.observe

        def observe(self: Witness, seen: Observed) -> None:
            if fault == "states of the token before":
                real(self, seen._replace(hidden=tuple(h.roll(1, 0) for h in seen.hidden)))
            else:
                real(self, seen._replace(committed=seen.committed.clamp(max=1)) if not seen.prompts else seen)

        monkeypatch.setattr(Witness, "observe", observe)
    wrong, _ = lived(target, True, 1e-4, set())
    assert wrong > 0


def test_a_drafter_without_layers_costs_no_hidden_states(tmp_path: Path) -> None:
    target = Target.load(tiny_model(tmp_path / "tiny", **SHAPE), "float32")
    asked: list[tuple[int, ...]] = []
    forward = target.forward

    def watched(batch: Batch, kv: KVCache, layers: tuple[int, ...] = (), *rest: Any, **named: Any) -> Any:
        asked.append(layers)
        return forward(batch, kv, layers, *rest, **named)

    target.forward = watched  # type: ignore[method-assign]
    it = Engine(target, EngineConfig(max_model_len=64, kv_cache_tokens=128), lambda *_: None, NoText, True)
    it.add(request("a", [5, 6, 7], 5))
    while it.has_work:
        it.step()
    assert set(asked) == {()}
