"""Counts of drafting, for one request or summed over many. drafted: draft tokens that the target verified; accepted: draft
tokens that were committed; steps: verify steps (one row in one step), drafted or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class DraftStats:
    """drafted_at[i], accepted_at[i]: the same counts for the i-th draft position. drafting_steps: steps that had a draft."""

    steps: int = 0
    drafting_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, rows: int = 1) -> None:
        """Count one row of one step, or several with the same numbers: `drafted` tokens verified, the first `accepted`
        committed."""
        self.steps += rows
        if drafted == 0:
            return
        self.drafting_steps += rows
        self.drafted += drafted * rows
        self.accepted += accepted * rows
        drafted_at, accepted_at = self.drafted_at, self.accepted_at
        while len(drafted_at) < drafted:
            drafted_at.append(0)
            accepted_at.append(0)
        for i in range(drafted):
            drafted_at[i] += rows
        for i in range(accepted):
            accepted_at[i] += rows

    def copy(self) -> DraftStats:
        """A copy of the counts."""
        return replace(self, drafted_at=list(self.drafted_at), accepted_at=list(self.accepted_at))

    def add(self, other: DraftStats) -> None:
        self.steps += other.steps
        self.drafting_steps += other.drafting_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        for mine, its in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(its) - len(mine)))
            for i, n in enumerate(its):
                mine[i] += n

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps: tokens of a verify step; None without steps."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def joint(self) -> list[float]:
        """By position: the share of all verify steps whose draft was accepted up to and with it."""
        return [a / self.steps for a in self.accepted_at]

    @property
    def conditional(self) -> list[float | None]:
        """By position: the share accepted of the tokens drafted there whose predecessors were all accepted."""
        before = [self.drafted_at[0], *self.accepted_at] if self.drafted_at else []
        return [
            a / min(b, d) if min(b, d) else None for a, b, d in zip(self.accepted_at, before, self.drafted_at, strict=False)
        ]
