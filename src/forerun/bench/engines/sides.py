"""The sides of a comparison: each brings up and down what answers the requests of one arm. Sends no prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forerun.bench.engines.arms import Arm
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.endpoint import Endpoint, Timeouts
from forerun.bench.engines.inprocess import InProcess
from forerun.bench.engines.launching import key_of
from forerun.bench.engines.openai import Address, HttpEndpoint
from forerun.bench.engines.servers import Server
from forerun.bench.records.record import TIMES_UNKNOWN, Facts, Times

if TYPE_CHECKING:
    from forerun.llm import LLM

DYING_S = 0.5  # a process may outlive its connections by this time

E = TypeVar("E", bound=Endpoint)


class Side(Generic[E]):
    """What answers the requests of one arm. arm: its name and its settings as asked for. settings: the effective ones, as far
    as they are known. facts: what the engine says of itself, None until it was up once. A subclass provides `_start`, and
    `down` where something has to be ended."""

    def __init__(self, arm: Arm, settings: Mapping[str, Any] | None = None) -> None:
        self.arm, self.settings = arm, dict(settings or {})
        self.facts: Facts | None = None
        self._endpoint: E | None = None

    @property
    def endpoint(self) -> E:
        """What answers, while it is up."""
        assert self._endpoint is not None, "it is not up"
        return self._endpoint

    @property
    def is_up(self) -> bool:
        return self._endpoint is not None

    async def up(self) -> None:
        """Make it ready to answer. Raises SettingError if that fails."""
        if self._endpoint is None:
            self._endpoint = await self._start()

    async def _start(self) -> E:
        raise NotImplementedError

    async def down(self) -> None:
        """Release its memory."""
        self._endpoint = None

    async def survived(self) -> bool:
        """After a failed request: whether the engine still works, as far as that is known. If not, it is started again."""
        return True

    async def renew(self) -> None:
        """Called before each task: a drafter must not remember the answers of another task."""

    async def fresh(self) -> None:
        """Called before each batch: empty the prefix cache, where that can be done."""

    def times(self) -> Times:
        """The engine's time by part since `fresh`."""
        return TIMES_UNKNOWN


class Remote(Side[HttpEndpoint]):
    """A server. Its drafter remembers earlier tasks, since starting it again takes too long. Where `fresh` has no request for
    the prefix cache, the salts of the requests keep batches apart."""

    async def _connected(self, address: Address) -> HttpEndpoint:
        endpoint = await HttpEndpoint(address).__aenter__()
        self.facts = self.facts or await endpoint.facts()
        return endpoint

    async def down(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.__aexit__()
        await super().down()

    async def fresh(self) -> None:
        await self.endpoint.flush()


class Running(Remote):
    """A server that runs already, and that this program neither starts nor ends."""

    def __init__(self, arm: Arm, address: Address) -> None:
        super().__init__(arm, {"url": address.root, "model": address.model})
        self._address = address

    async def _start(self) -> HttpEndpoint:
        return await self._connected(self._address)


class Launched(Remote):
    """A server that is started for this arm, and ended with the run."""

    def __init__(self, server: Server, body: Mapping[str, Any], timeouts: Timeouts) -> None:
        launch = server.launch
        super().__init__(server.arm, {"max_model_len": launch.context, "max_num_seqs": launch.slots})
        self._server, self._body, self._timeouts = server, body, timeouts

    async def _start(self) -> HttpEndpoint:
        server, template = self._server, self._server.launch.template
        await server.start()
        key = key_of(server.command())
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        served, dialect = template.served.replace("{model}", server.launch.model), DIALECTS[template.engine]
        endpoint = await self._connected(Address(server.url, served, dialect, headers, self._body, self._timeouts))
        if (own := server.facts) is not None and (said := self.facts) is not None:
            # the log comes first, and what the server says of itself fills the gaps
            self.facts = dataclasses.replace(
                own, version=own.version or said.version, kv_tokens=own.kv_tokens or said.kv_tokens
            )
        return endpoint

    async def down(self) -> None:
        await super().down()
        self._server.stop()

    async def survived(self) -> bool:
        until = time.monotonic() + DYING_S
        while self._server.running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return self._server.running


class Embedded(Side[InProcess]):
    """An engine in this process. build: makes it, with weights that are loaded already."""

    def __init__(self, arm: Arm, build: Callable[[], LLM]) -> None:
        super().__init__(arm)
        self._build = build

    async def _start(self) -> InProcess:
        begin = time.perf_counter()
        endpoint = InProcess(self._build())
        seconds = time.perf_counter() - begin
        self.settings = endpoint.llm.settings()
        self.facts = self.facts or dataclasses.replace(await endpoint.facts(), startup_s=seconds)
        return endpoint

    async def down(self) -> None:
        await super().down()
        gc.collect()  # an engine holds reference cycles, and the next engine needs its memory

    async def survived(self) -> bool:
        return self._endpoint is None or self._endpoint.broken is None

    async def renew(self) -> None:
        if self.arm.settings is not None and self._endpoint is not None:
            await self.down()

    async def fresh(self) -> None:
        self.endpoint.llm.clear_prefix_cache()
        self.endpoint.llm.reset_stats()

    def times(self) -> Times:
        s = self.endpoint.llm.stats
        return Times(s.steps, s.draft_s, s.forward_s, s.verify_s, s.other_s, s.cached_tokens)
