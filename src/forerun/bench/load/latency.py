"""The times of one request from its chunks, as docs/measuring.md defines them."""

from __future__ import annotations

import itertools

from forerun.bench.records.record import Answer


def tpot(answer: Answer) -> float | None:
    """Seconds for each output token after the first chunk: (end - first) / (n - tokens of the first chunk), where n is the
    number of output tokens that were streamed. None for a failed answer and for one that came in a single chunk.

    If the server does not say how many tokens the first chunk holds, it counts as one, the token of the step that ends the
    prompt.
    """
    rest = answer.tokens - answer.hidden_tokens - first_tokens(answer)
    return (answer.e2e_s - answer.ttft_s) / rest if not answer.failed and rest > 0 else None


def first_tokens(answer: Answer) -> int:
    """The number of tokens in the first chunk with content."""
    known = answer.chunks[0].tokens if answer.chunks else None
    return 1 if known is None else known


def chunk_gaps(answer: Answer) -> list[float]:
    """Seconds between consecutive chunks. With speculation a chunk holds several tokens, so these are not times of tokens."""
    if answer.failed:
        return []
    times = [chunk.at_s for chunk in answer.chunks]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
