"""The sides of a comparison: each is an arm with something behind it that answers, be it a server that is started for it, one
that runs already, or an engine in this process. Knows how to bring them up and down; sends no prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from forerun.bench.engines.endpoint import Endpoint
from forerun.bench.engines.inprocess import InProcess
from forerun.bench.engines.launching import ServedArm
from forerun.bench.engines.openai import DIALECTS, Address, HttpEndpoint, Timeouts
from forerun.bench.engines.servers import Server
from forerun.bench.records.record import TIMES_UNKNOWN, Facts, Times

if TYPE_CHECKING:
    from forerun.llm import LLM


DYING_S = 0.5


class Side(Protocol):
    """arm: its name and settings."""

    arm: ServedArm

    @property
    def endpoint(self) -> Endpoint:
        """Between up and down only."""

    @property
    def settings(self) -> dict[str, Any]:
        """Those in force, as far as they are known here."""

    @property
    def facts(self) -> Facts | None:
        """What is known of the engine; None if it never came up."""

    @property
    def is_up(self) -> bool:
        """Whether `up` would have nothing to do."""

    async def survived(self) -> bool:
        """After a request that failed: whether what is behind it still works, as far as that is known here. One that does not
        is started again."""

    async def up(self) -> None:
        """Ready to answer; nothing to do if it is. Raises SettingError if it cannot be."""

    async def down(self) -> None:
        """Its memory is free again; nothing to do if it is."""

    async def renew(self) -> None:
        """Before a task: a drafter in this process that remembers answers is made anew. It may be down then."""

    async def fresh(self) -> None:
        """Before a batch: nothing of an earlier one is in the prefix cache, where that can be had."""

    def times(self) -> Times:
        """Where the engine's time went since `fresh`."""


class Remote:
    """A server, by its address once it is there."""

    def __init__(self, arm: ServedArm, settings: Mapping[str, Any]) -> None:
        self.arm, self.settings = arm, dict(settings)
        self._http: HttpEndpoint | None = None
        self._facts: Facts | None = None

    @property
    def endpoint(self) -> HttpEndpoint:
        assert self._http is not None, "it is not up"
        return self._http

    @property
    def facts(self) -> Facts | None:
        """As in Side."""
        return self._facts

    @property
    def is_up(self) -> bool:
        """As in Side."""
        return self._http is not None

    async def survived(self) -> bool:
        """As in Side: a server that somebody else started is theirs to watch."""
        return True

    async def _connect(self, address: Address) -> None:
        self._http = await HttpEndpoint(address).__aenter__()
        if self._facts is None:
            self._facts = await self._http.facts()

    async def down(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.__aexit__()
            self._http = None

    async def renew(self) -> None:
        """A server keeps what its drafter remembers: to start it again takes too long."""

    async def fresh(self) -> None:
        """As in Side; salts of the requests do the same where there is no request for it."""
        await self.endpoint.flush()

    def times(self) -> Times:
        """A server does not say."""
        return TIMES_UNKNOWN


class Running(Remote):
    """A server that somebody else started."""

    def __init__(self, arm: ServedArm, address: Address) -> None:
        super().__init__(arm, {"url": address.root, "model": address.model})
        self._address = address

    async def up(self) -> None:
        """As in Side."""
        if self._http is None:
            await self._connect(self._address)


class Launched(Remote):
    """A server that is started for this arm and ended with the run."""

    def __init__(self, server: Server, body: Mapping[str, Any], timeouts: Timeouts) -> None:
        launch = server.launch
        super().__init__(server.arm, {"max_model_len": launch.context, "max_num_seqs": launch.slots})
        self._server, self._body, self._timeouts = server, body, timeouts

    async def up(self) -> None:
        """As in Side."""
        if self._http is not None:
            return
        await self._server.start()
        launch = self._server.launch
        served = launch.template.served.replace("{model}", launch.model)
        dialect = DIALECTS[launch.template.engine]
        await self._connect(Address(self._server.url, served, dialect, {}, self._body, self._timeouts))

    async def down(self) -> None:
        """As in Side."""
        await super().down()
        self._server.stop()

    async def survived(self) -> bool:
        """Whether its process did. It may live a moment longer than its connections."""
        until = time.monotonic() + DYING_S
        while self._server.running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return self._server.running

    @property
    def facts(self) -> Facts | None:
        """What the log and the launch say, and what the server says of itself where those are silent."""
        own, said = self._server.facts, self._facts
        if own is None or said is None:
            return own
        return dataclasses.replace(own, version=own.version or said.version, kv_tokens=own.kv_tokens or said.kv_tokens)


class Embedded:
    """An engine in this process. build makes it over weights that are loaded already."""

    def __init__(self, arm: ServedArm, build: Callable[[], LLM]) -> None:
        self.arm, self._build = arm, build
        self.facts: Facts | None = None
        self.settings: dict[str, Any] = {}
        self._inside: InProcess | None = None

    @property
    def endpoint(self) -> InProcess:
        assert self._inside is not None, "it is not up"
        return self._inside

    @property
    def is_up(self) -> bool:
        """As in Side."""
        return self._inside is not None

    async def survived(self) -> bool:
        """Not an exception that its owner raised."""
        return self._inside is None or self._inside.broken is None

    async def up(self) -> None:
        """As in Side."""
        if self._inside is None:
            begin = time.perf_counter()
            self._inside = InProcess(self._build())
            seconds = time.perf_counter() - begin
            self.settings = self._inside.llm.settings()
            self.facts = self.facts or dataclasses.replace(await self._inside.facts(), startup_s=seconds)

    async def down(self) -> None:
        """As in Side."""
        self._inside = None
        gc.collect()  # an engine is a ring of references, and the next one wants its memory

    async def renew(self) -> None:
        """An engine without a drafter remembers nothing."""
        if self.arm.settings is not None and self._inside is not None:
            await self.down()

    async def fresh(self) -> None:
        """As in Side."""
        self.endpoint.llm.clear_prefix_cache()
        self.endpoint.llm.reset_stats()

    def times(self) -> Times:
        """As the engine counted them."""
        s = self.endpoint.llm.stats
        return Times(s.steps, s.draft_s, s.forward_s, s.verify_s, s.other_s, s.cached_tokens)
