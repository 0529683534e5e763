"""A warning, given once, that a configured drafter does not draft, with the reason."""

from __future__ import annotations

import logging

from forerun.config import HEADS, Speculation
from forerun.engine.policy import Policy
from forerun.engine.stats import DraftStats

LOG = logging.getLogger("forerun")
MANY = 200  # verify steps; a drafter that drafts nothing in as many is reported

NOTHING_FOUND = {
    "ngram": "no text occurred twice, or drafts of it did not pay",
    "ngram_gpu": "no text occurred twice, or drafts of it did not pay",
    "suffix": "no text occurred twice, or drafts of it did not pay",
    "draft_model": "its drafts did not pay, or its context is full",
    **dict.fromkeys(HEADS, "its drafts did not pay"),
    "prediction": "the answers differ from the predictions at the start, or drafts of them did not pay",
}


class IdleDrafter:
    """Watches the requests of one engine. speculation: the engine's settings; None: nothing is reported. sequences: its
    max_num_seqs. context: the drafter's context length in tokens; None if it has no limit of its own."""

    def __init__(self, speculation: Speculation | None, sequences: int, context: int | None) -> None:
        """Warns if the schedule has k = 0 for every number of running sequences."""
        self._speculation, self._context = speculation, context
        self._said = self._off = False
        policy = Policy(speculation)
        if speculation is not None and not any(policy.width(running) for running in range(1, sequences + 1)):
            schedule = [list(entry) for entry in speculation.num_speculative_tokens_per_batch_size or ()]
            self._say(f"num_speculative_tokens_per_batch_size={schedule} has k = 0 wherever 1 to {sequences} sequences run")

    def asked(self, prompt: int, prediction: bool, off: bool = False) -> None:
        """Call this for each request. Warns if nothing can be drafted for it. prompt: its length in tokens; prediction: whether
        it has one; off: whether it wants no drafts, so that none are missed."""
        self._off = self._off or off
        if self._speculation is None or off:
            return
        if self._speculation.method == "prediction" and not prediction:
            self._say("a request brings no prediction; give it SamplingParams(prediction=...)")
        elif self._context is not None and prompt >= self._context:
            self._say(f"a prompt of {prompt} tokens is not shorter than the drafter's context of {self._context}")

    def ended(self, stats: DraftStats) -> None:
        """Call this when all requests have ended. Warns if there were many steps and no draft."""
        if self._speculation is not None and stats.drafted == 0 and stats.steps >= MANY and not self._off:
            self._say(f"not once in {stats.steps} steps: {NOTHING_FOUND[self._speculation.method]}")

    def _say(self, why: str) -> None:
        assert self._speculation is not None
        if not self._said:
            self._said = True
            LOG.warning("The drafter %s does not draft: %s", self._speculation.method, why)
