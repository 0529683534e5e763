"""When to give up on an arm that does not answer, since each further request may cost a whole time-out. Knows how requests
ended, and not what they asked.
"""

from __future__ import annotations

from collections.abc import Hashable

IN_A_ROW = 3


class Patience:
    """The failures of one arm during a run. A cell (a task under a load) is given up when `most` requests in a row failed for
    the same reason and none of the cell has succeeded. The arm is given up when `most` requests in a row had no answer, or
    all of its first batch. Requests that fail for different reasons, such as one prompt that is too long, give nothing up."""

    def __init__(self, most: int = IN_A_ROW) -> None:
        self._most = most
        self._arm: str | None = None
        self._cells: dict[Hashable, str] = {}
        self._cell: Hashable = None
        self._answered = False  # at least once, perhaps with an error
        self._succeeded: set[Hashable] = set()
        self._alike: tuple[str, int] = ("", 0)
        self._silent = 0

    def enter(self, cell: Hashable) -> None:
        """The next requests belong to this cell."""
        if cell != self._cell:
            self._cell, self._alike = cell, ("", 0)

    def saw(self, failure: str | None, unanswered: bool = False) -> None:
        """A request ended. failure: why it failed, None if it did not."""
        self._silent = self._silent + 1 if unanswered else 0
        self._answered = self._answered or not unanswered
        if failure is None:
            self._succeeded.add(self._cell)
            return
        reason, times = self._alike
        self._alike = (failure, times + 1 if failure == reason else 1)
        if self._silent >= self._most:
            self._arm = self._arm or f"{self._silent} requests in a row were not answered: {failure}"
        if self._cell not in self._succeeded and self._alike[1] >= self._most:
            self._cells.setdefault(self._cell, f"{self._alike[1]} requests in a row failed alike: {failure}")

    def batch_ended(self) -> None:
        """All requests of a batch have ended."""
        if self._silent and not self._answered and self._arm is None:
            self._arm = f"no request of the first batch was answered: {self._alike[0]}"

    @property
    def lost(self) -> str | None:
        """Why the present cell or the arm was given up; None: it was not."""
        return self._arm or self._cells.get(self._cell)
