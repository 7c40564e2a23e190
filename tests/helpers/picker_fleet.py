"""Several pickers behind one real Envoy under load, of which some are killed, and what became of the requests.

What lives here: starting them, the load, and reading the outcome from Envoy's access log. What must not: which pickers
are killed when, and what must hold then (tests/kafka/test_picker_kills.py, tests/picker_failures.py).
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from streams.core.routing.selection import RouterMode
from streams.gateway.envoy_config import GatewayConfig, engines_config, envoy_config
from streams.gateway.process import LOOPBACK, envoy_program
from streams.kafka.clients import ensure_topics
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port, free_ports_in_a_row
from streams.lab.processes import Child, Children
from streams.lab.stack import READY_TIMEOUT_S, Engine, RouterProcess, Stack, is_ready, wait_workers
from streams.picker.addresses import Endpoint
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.commands import environment
from tests.helpers.gateway import MODEL, RunningGateway

#: An answer that is not streamed has its first byte after 24 steps of 20 ms, and a short prefill: 500 ms and more.
ENGINE = EngineConfig(block_size=16, n_blocks=4096, prefill_ms_base=1.0, prefill_us_per_token=10.0)
OUTPUT_TOKENS = 24

_EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Setting:
    """How Envoy asks pickers. buffers: bodies; otherwise full duplex. ends_stream: the picker does with its pick."""

    buffers: bool = True
    ends_stream: bool = False


#: What `kvstreams gateway` does.
RECOMMENDED = Setting()


@dataclass(slots=True)
class Outcome:
    """What became of a load. statuses: of HTTP, or the names of errors. answers: by Envoy's access log."""

    statuses: Counter[str] = field(default_factory=Counter)
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_requests(self) -> int:
        """Requests that were sent."""
        return self.statuses.total()

    @property
    def n_failed(self) -> int:
        """Requests without an answer of status 200."""
        return self.n_requests - self.statuses["200"]

    @property
    def undecided(self) -> list[dict[str, Any]]:
        """Answers of requests that reached an engine without a decision."""
        return [answer for answer in self.answers if "picked" not in answer and "served" in answer]

    @property
    def causes(self) -> Counter[tuple[str, str]]:
        """How often each pair of gRPC statuses left a request undecided: of the answers to its headers and its body."""
        return Counter((each.get("headers_status", ""), each.get("pick_status", "")) for each in self.undecided)

    @property
    def elsewhere(self) -> list[dict[str, Any]]:
        """Answers of another engine than the picked one."""
        return [answer for answer in self.answers if "picked" in answer and answer["picked"] != answer.get("served")]

    @property
    def doubts(self) -> Counter[str]:
        """Why pickers did not know the chosen engines exactly: how often for each reason, or mode without one."""
        details = [answer["details"] for answer in self.answers if "details" in answer]
        return Counter(
            each.get("chosen_degraded_because", each["chosen_mode"])
            for each in details
            if each["chosen_mode"] != "exact"
        )


class PickerFleet:
    """Pickers, Envoy and engines of one scope; `children` ends them."""

    def __init__(self, stack: Stack, setting: Setting, n_pickers: int = 3, n_engines: int = 4) -> None:
        """stack: of the scope. Everything is ready when this returns."""
        self._stack, self._folder = stack, stack.directory
        scope, children = stack.settings, stack._children
        settings = replace(
            scope,
            port=free_ports_in_a_row(n_pickers),
            picker_port=free_ports_in_a_row(n_pickers),
            picker_health_port=0,
            picker_ends_stream=setting.ends_stream,
            picker_details=True,
            gateway_port=free_port(),
            gateway_admin_port=free_port(),
            drain_timeout_s=5.0,
            router_mode=RouterMode.EXPECTED_TIME,  # the default
        )
        ensure_topics(settings, topics(settings).all())
        self.pickers = [self._picker(settings, number, children) for number in range(n_pickers)]
        self.worker = stack.worker(router=False)
        self.engines = stack.engines(n_engines, ENGINE, MODEL, 1.0)
        stack.bridge(self.engines)
        self.gateway = self._envoy(settings, setting, children)
        for process in self.pickers:
            Stack.wait_ready(process)
            wait_workers(process.url, n_engines)
        self.wait_healthy()
        asyncio.run(self._fill_caches())

    async def _fill_caches(self) -> None:
        """Send a few requests, so that every engine has reported events."""

        async def nothing() -> None:
            pass

        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while (await self.load(40.0, 2.0, nothing)).doubts:
            assert time.monotonic() < deadline_s, "no picker knows the engines"

    def _picker(self, settings: Settings, number: int, children: Children) -> RouterProcess:
        own = replace(settings, port=settings.port + number, picker_port=settings.picker_port + number)
        child = Child(
            f"picker-{number}",
            ["-m", "streams.cli", "picker"],
            self._folder / "logs" / f"picker-{number}.log",
            environment(as_environ(own)),
        )
        return RouterProcess(children.add(child).start(), f"http://{LOOPBACK}:{own.port}", own)

    def _envoy(self, settings: Settings, setting: Setting, children: Children) -> RunningGateway:
        folder = self._folder / "envoy"
        folder.mkdir()
        engines_file = folder / "engines.json"
        engines_file.write_text(json.dumps(engines_config(endpoint_of(engine) for engine in self.engines)))
        config = GatewayConfig(
            listens=Endpoint(LOOPBACK, settings.gateway_port),
            admin=Endpoint(LOOPBACK, settings.gateway_admin_port),
            pickers=[Endpoint(LOOPBACK, process.settings.picker_port) for process in self.pickers],
            engines_file=str(engines_file),
            body_bytes_max=settings.body_bytes_max,
            access_log=str(folder / "access.log"),
            buffers=setting.buffers,
        )
        file = folder / "envoy.json"
        file.write_text(json.dumps(envoy_config(config)))
        (folder / "access.log").touch()
        arguments = ["-c", _EXEC, str(envoy_program()), "-c", str(file), "--log-level", "error", "--concurrency", "1"]
        child = children.add(Child("envoy", [*arguments, "--disable-hot-restart"], folder / "envoy.log", {})).start()
        return RunningGateway(child, settings, folder, len(self.pickers))

    # -- pickers -------------------------------------------------------------------------------------------------------

    def n_healthy(self) -> int:
        """Pickers that Envoy asks."""
        try:
            return self.gateway.healthy_pickers()
        except OSError:
            return 0

    def all_healthy(self) -> bool:
        """Whether all pickers are ready, and Envoy asks them."""
        return self.n_healthy() == len(self.pickers) and all(is_ready(process.url) for process in self.pickers)

    def wait_healthy(self) -> None:
        """Wait until Envoy asks all pickers."""
        wait_for(self.all_healthy, READY_TIMEOUT_S, "all pickers")

    async def end(self, number: int, how: signal.Signals) -> None:
        """End a picker, and start it again half a second after it has ended. SIGSTOP: it goes on after 5 s instead."""
        child = self.pickers[number].child
        child.signal(how)
        if how is signal.SIGSTOP:
            await asyncio.sleep(5.0)
            child.signal(signal.SIGCONT)
            return
        while child.running:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        child.start()

    def wait_idle(self) -> None:
        """Wait until every picker knows that no request is left."""

        def are_idle() -> bool:
            loads = [self.gateway.loads(number) for number in range(len(self.pickers))]
            return all(len(each) == len(self.engines) and not any(each.values()) for each in loads)

        wait_for(are_idle, READY_TIMEOUT_S, "loads of 0")

    # -- load ----------------------------------------------------------------------------------------------------------

    async def load(
        self, rate: float, seconds: float, meanwhile: Callable[[], Awaitable[None]], body_bytes: int = 3000
    ) -> Outcome:
        """Send requests at a rate, whether or not earlier ones have been answered."""
        outcome = Outcome()
        n_before = len(self.gateway.access_log())
        url = f"{self.gateway.url}/v1/completions"
        timeout = aiohttp.ClientTimeout(total=90.0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

            async def ask(number: int) -> None:
                prompt = f"conversation {number % 20} ".ljust(body_bytes - 200, "o") + f" {number} ".ljust(200, "x")
                body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
                try:
                    async with http.post(url, json=body) as answer:
                        await answer.read()
                        outcome.statuses[str(answer.status)] += 1
                except (aiohttp.ClientError, TimeoutError) as exc:
                    outcome.statuses[type(exc).__name__] += 1

            asking = []
            other = asyncio.create_task(_forever(meanwhile))
            started_s = time.monotonic()
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, started_s + number / rate - time.monotonic()))
                asking.append(asyncio.create_task(ask(number)))
            await asyncio.gather(*asking)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            if not other.cancelled() and other.exception() is not None:
                raise AssertionError("what was done meanwhile failed") from other.exception()

        def are_logged() -> bool:
            return len(self.gateway.access_log()) >= n_before + outcome.n_requests

        await asyncio.to_thread(wait_for, are_logged, READY_TIMEOUT_S, "the access log")
        outcome.answers = self.gateway.access_log()[n_before:]
        return outcome


async def _forever(once: Callable[[], Awaitable[None]]) -> None:
    await once()
    await asyncio.Event().wait()


def endpoint_of(engine: Engine) -> Endpoint:
    """Where an engine listens."""
    return Endpoint(LOOPBACK, int(engine.url.rpartition(":")[2]))


def started_s(answer: dict[str, Any]) -> float:
    """When a request of the access log began, by the clock of time.time."""
    return datetime.fromisoformat(answer["time"]).timestamp()


def killing(
    fleet: PickerFleet, how: signal.Signals, pause_s: float, spans: list[tuple[float, float]]
) -> Callable[[], Awaitable[None]]:
    """End a picker after each pause, in turn, but only while all are ready. spans: from each end to the new start."""

    async def kill_in_turn() -> None:
        number = 0
        while True:
            await asyncio.sleep(pause_s)
            while not await asyncio.to_thread(fleet.all_healthy):
                await asyncio.sleep(0.1)
            from_s = time.time()
            ending = asyncio.ensure_future(fleet.end(number % len(fleet.pickers), how))
            try:
                await asyncio.shield(ending)
            finally:  # the load may be over meanwhile, and the picker has to come back
                await ending
            spans.append((from_s, time.time()))
            number += 1

    return kill_in_turn


def log_lines(fleet: PickerFleet) -> Sequence[str]:
    """The faults in the logs of pickers."""
    return [
        line
        for process in fleet.pickers
        for line in Path(process.child.log_path).read_text().splitlines()
        if " ERROR " in line or "Traceback" in line
    ]
