"""Arrival times, what is in flight, and from when latency counts; on a scripted endpoint and a clock that jumps ahead."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator

import pytest

from forerun.bench.engines import failures
from forerun.bench.engines.endpoint import Piece, Request, RequestFailed
from forerun.bench.load import sending as load
from forerun.bench.load.patience import Patience
from forerun.bench.records.record import Answer, Facts, Load, ServerCounters
from forerun.types import SettingError


class SlowServer:
    """Answers one request at a time, each in so many seconds of the loop's own time, in the order in which they came."""

    def __init__(self, seconds: float, fail: int = -1) -> None:
        self.seconds, self.fail = seconds, fail
        self.turn = asyncio.Lock()
        self.in_flight = self.most = 0
        self.came: list[float] = []

    async def generate(self, ask: Request) -> AsyncIterator[Piece]:
        now = asyncio.get_running_loop().time
        self.came.append(now())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            async with self.turn:
                await asyncio.sleep(self.seconds)
                if len(self.came) - 1 == self.fail:
                    raise RequestFailed("broken")
                yield Piece(now(), "x", (1,), "length", {"completion_tokens": 1, "prompt_tokens": 2}, None, 2)
        finally:
            self.in_flight -= 1

    async def facts(self) -> Facts:
        return Facts("slow")

    async def counters(self) -> ServerCounters | None:
        return None


class Jumping(asyncio.SelectorEventLoop):
    """Time jumps to the next timer instead of passing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:  # asyncio's own loop step, preceded by the jump
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and scheduled:
            self._now = max(self._now, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


def drive(
    seconds: float, shape: Load, fail: int = -1, trace: tuple[float, ...] = ()
) -> tuple[tuple[Answer, ...], float, SlowServer]:
    async def run() -> tuple[tuple[Answer, ...], float, SlowServer]:
        server = SlowServer(seconds, fail)
        asks = [Request(f"p {i}", 1, text="t") for i in range(shape.requests)]
        due = load.arrivals(shape, 5, trace)
        answers, wall = await load.drive(server, asks, shape, due, asyncio.get_running_loop().time)
        return answers, wall, server

    with asyncio.Runner(loop_factory=Jumping) as runner:
        return runner.run(run())


def test_a_fixed_concurrency_is_kept_up() -> None:
    answers, wall, server = drive(1.0, Load(concurrency=3, requests=9))
    assert server.most == 3 and wall == pytest.approx(9.0), "one at a time, nine of them"
    assert [a.prompt for a in answers] == [f"p {i}" for i in range(9)]
    # the first three were due at once; each later one when its predecessor in the same stream ended
    assert [a.scheduled_s for a in answers] == pytest.approx([0, 0, 0, 1, 2, 3, 4, 5, 6])
    assert [a.e2e_s for a in answers] == pytest.approx([1, 2, 3, 3, 3, 3, 3, 3, 3])


def test_open_loop_latency_counts_the_queue() -> None:
    """A request every second on a server that takes two: each waits a second longer than the one before. A client that waited
    for answers before sending would have seen two seconds every time."""
    answers, wall, server = drive(2.0, Load("trace", requests=10), trace=tuple(float(i) for i in range(10)))
    assert [a.e2e_s for a in answers] == pytest.approx([2 + i for i in range(10)]) and wall == pytest.approx(20.0)
    assert server.most > 5 and [a.scheduled_s for a in answers] == pytest.approx(list(range(10)))
    assert [came - 1000.0 for came in server.came] == pytest.approx(list(range(10)))


def test_a_client_that_is_late_does_not_hide_it() -> None:
    """The loop is stalled for five seconds while two requests fall due: they are sent late, and the wait is in their times."""

    async def run() -> tuple[Answer, ...]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Jumping)

        def stall() -> None:
            loop._now += 5.0

        loop.call_later(0.5, stall)
        server, shape = SlowServer(0.001), Load("trace", requests=2)
        asks = [Request(f"p {i}", 1, text="t") for i in range(2)]
        return (await load.drive(server, asks, shape, [1.0, 2.0], loop.time))[0]

    with asyncio.Runner(loop_factory=Jumping) as runner:
        answers = runner.run(run())
    assert [a.sent_s for a in answers] == pytest.approx([4.5, 3.5])
    assert answers[0].ttft_s >= 4.5 and answers[1].ttft_s >= 3.5


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = load.arrivals(Load("poisson", rate=4.0, requests=4001), 7)
    assert times is not None and times[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.06) and statistics.stdev(gaps) == pytest.approx(mean, rel=0.08)
    assert times == load.arrivals(Load("poisson", rate=4.0, requests=4001), 7), "every arm gets the same arrivals"
    assert times != load.arrivals(Load("poisson", rate=4.0, requests=4001), 8)


def test_a_trace_keeps_its_times_or_is_sped_up() -> None:
    trace = (0.0, 1.5, 1.5, 9.0)
    assert load.arrivals(Load("trace", requests=4), 0, trace) == list(trace)
    assert load.arrivals(Load("trace", requests=3, speed=3.0), 0, trace) == pytest.approx([0.0, 0.5, 0.5])
    with pytest.raises(SettingError, match="shorter"):
        load.arrivals(Load("trace", requests=5), 0, trace)


def test_one_failure_does_not_stop_the_others() -> None:
    answers, _, _ = drive(1.0, Load(concurrency=1, requests=4), fail=1)
    assert [a.failed for a in answers] == [False, True, False, False] and answers[1].failure == "broken"
    assert [a.tokens for a in answers] == [1, 0, 1, 1] and answers[1].e2e_s == pytest.approx(1.0)


# when to stop asking


class Scripted:
    """Each request ends as the next word says: ok, no (an error at once), slow (no answer for 600 s), raise (a fault of the
    endpoint's own)."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.asked = words, 0

    async def generate(self, ask: Request) -> AsyncIterator[Piece]:
        word = self.words[min(self.asked, len(self.words) - 1)]
        self.asked += 1
        now = asyncio.get_running_loop().time
        if word == "slow":
            await asyncio.sleep(600.0)
            raise RequestFailed("not finished after 600 s", unanswered=True)
        await asyncio.sleep(1.0)
        if word == "raise":
            raise KeyError("odd")
        if word.startswith("no"):
            raise RequestFailed(f"HTTP 401: {word}")
        yield Piece(now(), "x", (1,), "length")

    async def facts(self) -> Facts:
        return Facts("scripted")

    async def counters(self) -> ServerCounters | None:
        return None


def asked(
    words: list[str], shape: Load, patience: Patience | None = None, due: list[float] | None = None
) -> tuple[tuple[Answer, ...], float, int]:
    server = Scripted(words)
    asks = [Request(f"p {i}", 1, text="t") for i in range(shape.requests)]
    with asyncio.Runner(loop_factory=Jumping) as runner:
        loop = runner.get_loop()
        answers, wall = runner.run(load.drive(server, asks, shape, due, loop.time, patience))
    return answers, wall, server.asked


def test_requests_that_fail_alike_from_the_first_are_not_sent_on() -> None:
    answers, wall, sent = asked(["no"], Load(concurrency=1, requests=8))
    assert sent == 3 and wall == pytest.approx(3.0) and len(answers) == 8 and all(a.failed for a in answers)
    assert [a.failure for a in answers[:3]] == ["HTTP 401: no"] * 3
    assert all(a.failure == "not sent: 3 requests in a row failed alike: HTTP 401: no" for a in answers[3:])


@pytest.mark.parametrize("words", [["no 1", "no 2", "no 3", "no 4", "no 5", "no 6"], ["ok", "no"], ["no", "no", "ok", "no"]])
def test_failures_of_single_requests_do_not_end_a_batch(words: list[str]) -> None:
    """Some prompts are too long, each by another length; or the server has answered before."""
    _, _, sent = asked(words, Load(concurrency=1, requests=6))
    assert sent == 6


def test_a_server_that_hangs_ends_the_arm_after_one_batch() -> None:
    patience = Patience()
    patience.enter("a")
    _, wall, sent = asked(["slow"], Load(concurrency=2, requests=2), patience)
    assert sent == 2 and wall == pytest.approx(600.0) and "first batch" in str(patience.lost)
    patience.enter("b")
    answers, wall, sent = asked(["ok"], Load(concurrency=2, requests=2), patience)
    assert sent == 0 and wall == 0.0 and all("not sent: no request of the first batch" in str(a.failure) for a in answers)


def test_a_server_that_hangs_later_ends_the_arm_after_three_requests() -> None:
    patience = Patience()
    patience.enter("a")
    _, wall, sent = asked(["ok", "slow"], Load(concurrency=1, requests=9), patience)
    assert sent == 4 and wall == pytest.approx(1801.0)
    patience.enter("b")
    assert "3 requests in a row were not answered: not finished after 600 s" in str(patience.lost)


def test_in_an_open_loop_requests_that_are_not_due_yet_are_given_up_at_once() -> None:
    answers, wall, sent = asked(["no"], Load("trace", requests=9), due=[0.0, 0.0, 0.0, 0.0, 5.0, 50.0, 5e3, 5e4, 5e5])
    assert sent == 4 and wall == pytest.approx(1.0) and len(answers) == 9
    assert [a.scheduled_s for a in answers] == [0.0, 0.0, 0.0, 0.0, 5.0, 50.0, 5e3, 5e4, 5e5]


def test_what_fails_in_one_cell_may_work_in_the_next() -> None:
    patience = Patience()
    for cell, words, expected in (("a", ["no"], 3), ("b", ["ok"], 8), ("a", ["ok"], 0)):
        patience.enter(cell)
        assert asked(words, Load(concurrency=1, requests=8), patience)[2] == expected
    patience.enter("b")
    assert patience.lost is None


def test_a_fault_of_the_endpoint_is_the_failure_of_one_request() -> None:
    answers, _, _ = asked(["ok", "raise", "ok"], Load(concurrency=1, requests=3))
    assert [a.failed for a in answers] == [False, True, False] and answers[1].failure == "KeyError: 'odd'"


# reasons, counted


def test_reasons_are_counted_by_kind() -> None:
    texts = [
        "HTTP 401: invalid key", "HTTP 400: 600 tokens are more than 512", "HTTP 401: invalid key",
        "HTTP 400: 711 tokens are more than 512", "HTTP 500: request chatcmpl-9f8e7d6c5b failed",
        "HTTP 500: request chatcmpl-0011223344 failed", "HTTP 401: invalid key", "HTTP 503: invalid key",
    ]  # fmt: skip
    assert failures.counted(texts) == [
        ("HTTP 401: invalid key", 3), ("HTTP 400: 600 tokens are more than 512", 2),
        ("HTTP 500: request chatcmpl-9f8e7d6c5b failed", 2), ("HTTP 503: invalid key", 1),
    ]  # fmt: skip
    assert failures.counted([]) == []
