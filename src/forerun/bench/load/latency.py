"""The times of one request from its chunks. Knows the definitions of docs/measuring.md and the record; nothing of cells."""

from __future__ import annotations

import itertools

from forerun.bench.records.record import Answer


def tpot(answer: Answer) -> float | None:
    """Seconds for each output token after the first chunk: (end - first) / (n - tokens in the first chunk), n from the server's
    usage less the tokens that were not streamed. None of a failed answer and of one that came in a single piece.

    Where the server does not say how many tokens the first chunk holds it is taken to be one, which the step that ends the
    prompt gives.
    """
    rest = answer.tokens - answer.hidden_tokens - first_tokens(answer)
    return (answer.e2e_s - answer.ttft_s) / rest if not answer.failed and rest > 0 else None


def first_tokens(answer: Answer) -> int:
    """Tokens in the first chunk that has content."""
    known = answer.chunks[0].tokens if answer.chunks else None
    return 1 if known is None else known


def chunk_gaps(answer: Answer) -> list[float]:
    """Seconds between one chunk and the next. Not the time between tokens: with speculation a chunk holds several."""
    if answer.failed:
        return []
    times = [chunk.at_s for chunk in answer.chunks]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
