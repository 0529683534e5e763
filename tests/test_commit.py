"""Both forms of a commit agree on random states: accepted drafts, stops, limits, broken logits, inactive rows."""

from __future__ import annotations

import pytest
import torch

from forerun.engine.commit import commit, commit_on_host
from forerun.engine.state import RowState
from forerun.types import Draft, Verdict
from forerun.verify.sampling import BROKEN


@pytest.mark.parametrize("verdicts", [False, True])
@pytest.mark.parametrize("width", [0, 1, 4])
def test_both_forms_agree(width: int, verdicts: bool) -> None:
    seen = torch.zeros(5, dtype=torch.int64)
    ended = 0
    for seed in range(60):
        at = torch.Generator().manual_seed(seed)

        def random(low: int, high: int, *shape: int, at: torch.Generator = at) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=at)

        states = []
        for _ in range(2):
            at.manual_seed(seed)
            state = RowState(7, 60, 3, torch.device("cpu"), width)
            state.tokens[:] = random(0, 5, 7, 60)
            state.length[:] = random(1, 40, 7)
            state.limit[:] = state.length + random(0, 8, 7)
            state.active[:] = random(0, 5, 7) > 0
            state.stop_ids[:, :3] = random(0, 12, 7, 3)
            slot = torch.randperm(7, generator=at)[: 1 + seed % 7]
            draft = Draft(random(0, 5, len(slot), width), random(0, width + 1, len(slot)))
            tokens = random(BROKEN, 8, len(slot), width + 1)
            agree = random(0, 4, len(slot), width) > 0
            tokens[:, :width] = torch.where(agree, draft.tokens, tokens[:, :width])
            verdict = Verdict(tokens, 1 + torch.minimum(random(0, width + 1, len(slot)), draft.size)) if verdicts else None
            form = (commit, commit_on_host)[len(states)]
            states.append((form(state, slot, draft, tokens, verdict), state))
        (counts, want), (other, got) = states
        assert torch.equal(counts, other)
        for name in ("length", "active", "limit", "stop_ids"):
            assert torch.equal(getattr(want, name), getattr(got, name)), name
        committed = torch.arange(60) < want.length[:, None]
        assert torch.equal(want.tokens[committed], got.tokens[committed])
        seen += (counts > 0).sum(0)
        ended += int((~want.active[slot]).sum())
    assert seen[0] > 50 and seen[3] > 2 and ended > 20 and (not width or (seen[1] > 50 and seen[2] > 20))


def test_no_rows() -> None:
    state, nothing = RowState(2, 9, 1, torch.device("cpu"), 2), torch.zeros(0, dtype=torch.int64)
    draft = Draft(torch.zeros(0, 2, dtype=torch.int64), nothing)
    assert commit_on_host(state, nothing, draft, torch.zeros(0, 3, dtype=torch.int64), None).shape == (0, 5)
