"""`kvstreams picker`: a router that gateways ask over gRPC.

What lives here: making the parts of a picker, starting and stopping them next to the router's HTTP API. What must not:
the calls of the router's API (router_api), and the ext_proc service (serving).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from streams.client.plain_http import PlainHttp
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.errors import KvStreamsError, NotReady
from streams.kubernetes.account import ServiceAccount
from streams.kubernetes.pools import Endpoint, PoolEndpoints
from streams.picker.fleet import PickerFleet
from streams.picker.grpc.call import Call, Service, Stream, first_of
from streams.picker.grpc.health import Health, ServingStatus
from streams.picker.grpc.limits import Limits
from streams.picker.grpc.server import GrpcServer
from streams.picker.grpc.words import Status
from streams.picker.lifetimes import Lifetimes
from streams.picker.metrics import PICKER_METRICS, PickerParts
from streams.picker.picks import Picks
from streams.picker.serving import PROCESS, ExtProc
from streams.process.interpreter import collect_by_the_clock
from streams.process.listener import Listener
from streams.process.metrics import MetricsRegistry
from streams.prompts.engine_keys import EngineKeys
from streams.prompts.parity_probes import ParityProbes
from streams.prompts.tokenizing import Tokenizing
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import render_json
from streams.router_api.messages.requests import parse_render
from streams.router_api.processes.server import serve
from streams.security.access import HTTP_2, CertificateAccess
from streams.settings import AccessSettings, PickerServerSettings

log = logging.getLogger(__name__)

#: Interval at which bookings are ended whose ends are assumed, and leases are renewed.
TICK_S = 1.0

#: A worker that a gateway could not reach is avoided for the router's own time, and this long at least.
AVOID_S = 2.0

#: Interval at which the registry is looked at for engines that are new, to compare their tokens with the files'.
PARITY_S = 2.0

#: Time to connect to an engine that makes tokens, and for which its connection is kept.
CONNECT_TIMEOUT_S, KEEPALIVE_S = 2.0, 4.0

#: The names of the health service: the process answers; it may be asked for picks; and the service itself.
LIVENESS, READINESS, SERVICE = "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"


#: The option that names the pool.
POOL_OPTION = "--inference-pool"

#: Bytes of a message besides a body in it: its headers and metadata.
MESSAGE_MORE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PickerOptions:
    """What a picker needs in addition to the settings: files by model; "" is for all other models.

    pool: the InferencePool whose endpoints it picks; "" for all workers of the registry.
    """

    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    engine_key_files: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""


class PickerDoor:
    """The gRPC servers of a picker, and what answers on them. Used on one loop."""

    def __init__(self, settings: PickerServerSettings, options: PickerOptions) -> None:
        """Raises SettingsError for a file that cannot be used."""
        self._settings = settings
        self._keys = EngineKeys(options.engine_key_files)
        cache_bytes = settings.tokenizer_cache_mb << 20
        self._tokenizing = Tokenizing(options.tokenizers, settings.tokenizer_processes, cache_bytes)
        self._http = PlainHttp(keepalive_s=KEEPALIVE_S, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._pool: PoolEndpoints | None = None
        if options.pool:
            self._pool = PoolEndpoints(options.pool, ServiceAccount.of_pod(POOL_OPTION), POOL_OPTION)
        self._has_pool = not options.pool  # whether the pool's endpoints are known, if it has a pool
        self._router: Router | None = None
        self._service: ExtProc | None = None
        self._health = Health(self._status)
        self._servers: list[GrpcServer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        """Listen, and answer that the picker is not ready. Raises SettingsError for an address that is not available.

        Health is asked on the port of picks as well, over TLS where that port has it; the port of its own has none,
        since kubelets and load balancers ask there.
        """
        settings, health = self._settings, self._health
        picks = Listener(
            settings.host,
            settings.picker_port,
            "picker_port",
            CertificateAccess(settings, HTTP_2, self_signed=settings.picker_self_signed),
        )
        await self._serve(picks, first_of([health, self._open]))
        if settings.picker_health_port:
            plain = CertificateAccess(AccessSettings(allow_anonymous=True))
            listener = Listener(settings.host, settings.picker_health_port, "picker_health_port", plain)
            await self._serve(listener, health)
        host, port = picks.address
        log.info("gateways may ask for picks on %s:%d", host, port)

    async def _serve(self, listener: Listener, service: Service) -> None:
        server = GrpcServer(service, Limits(message_bytes_max=self._settings.body_bytes_max + MESSAGE_MORE_BYTES))
        self._servers.append(server)
        await server.start(listener)

    async def open(self, router: Router, admission: Admission) -> Sequence[MetricsRegistry[Any]]:
        """Pick with this router from now on."""
        settings = self._settings
        await self._tokenizing.start()
        fleet = PickerFleet(lambda: router.view.fleet.workers.copy(), lambda: router.view.fleet.changes)
        lifetimes = Lifetimes(router, fleet, Avoiding(router))
        picks = Picks(settings, router, admission, self._tokenizing, fleet, self._keys.of, self._http)
        self._router = router
        self._service = ExtProc(settings, picks, lifetimes, self._is_ready)
        background = [
            fleet.resolve_forever(),
            self._keys.check_forever(),
            _tick_forever(lifetimes),
            self._probe_forever(router),
            # Python would examine the objects of all bookings again after every few hundred requests.
            collect_by_the_clock(),
        ]
        if self._pool is not None:
            fleet.limit_to(())
            background.append(self._pool.follow(partial(self._limit, fleet)))
        self._tasks = [asyncio.create_task(each) for each in background]
        parts = PickerParts(router, self._service, picks, lifetimes, self._tokenizing, self._servers)
        return [MetricsRegistry(PICKER_METRICS, lambda: parts)]

    async def close(self, timeout_s: float) -> None:
        """Report to those who watch the health, end streams with their picks, and stop listening."""
        self._health.leave()
        if self._service is not None:
            self._service.leave()
        await asyncio.gather(*(server.drain(timeout_s) for server in self._servers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tokenizing.close()
        self._http.close()

    def _limit(self, fleet: PickerFleet, endpoints: Sequence[Endpoint]) -> None:
        fleet.limit_to([str(endpoint) for endpoint in endpoints])
        self._has_pool = True

    def _open(self, call: Call) -> Stream | None:
        if self._service is None:
            if call.method == PROCESS:
                call.finish(Status.UNAVAILABLE, "the picker is starting")
            return None
        return self._service.open(call)

    def _status(self, name: str) -> ServingStatus | None:
        """The status of a service by its name, as the protocol of endpoint pickers defines them."""
        if name == LIVENESS:
            return ServingStatus.SERVING
        if name not in ("", READINESS, SERVICE):
            return None
        is_asked = self._is_ready() and self._router is not None and not self._router.stopping
        return ServingStatus.SERVING if is_asked else ServingStatus.NOT_SERVING

    def _is_ready(self) -> bool:
        """Whether picks are made: the router and the pool are read. A stopping router still decides."""
        if self._router is None or not self._has_pool:
            return False
        try:
            self._router.readiness.check()
        except NotReady:
            return False
        return True

    async def _probe_forever(self, router: Router) -> None:
        """Compare the tokens of new engines with those of the files, until cancelled."""

        async def report(worker_id: int, body: dict[str, Any]) -> None:
            parity = parse_render(WorkerId(worker_id), orjson.dumps(body), time.time_ns() // 1_000_000)
            await asyncio.to_thread(router.registry.put_render, parity)

        probes = ParityProbes(report, self._tokenizing, self._keys.of, "picker")
        try:
            while True:
                await asyncio.sleep(PARITY_S)
                probes.note(_row(router, worker) for worker in router.registry.workers())
        finally:
            await probes.close()


def _row(router: Router, worker: Worker) -> dict[str, Any]:
    """What the probes read of a worker, as in GET /workers."""
    fleet = router.view.fleet
    return {
        "worker_id": worker.worker_id,
        "url": worker.url,
        "model": worker.model,
        "dp_size": worker.dp_size,
        "silent_dp_ranks": fleet.silent_ranks(worker.worker_id),
        "incarnation": fleet.incarnation_of(worker),
        "render": render_json(fleet.render_of(worker)),
    }


class Avoiding:
    """Lets every router avoid a worker, through its record in the registry, at most once per AVOID_S."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._asked_s: dict[WorkerId, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, worker_id: WorkerId) -> None:
        """Ask for it, without waiting."""
        now_s = time.monotonic()
        self._asked_s = {each: at_s for each, at_s in self._asked_s.items() if now_s - at_s < AVOID_S}
        if worker_id in self._asked_s:
            return
        self._asked_s[worker_id] = now_s
        task = asyncio.create_task(self._avoid(worker_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _avoid(self, worker_id: WorkerId) -> None:
        try:
            await asyncio.to_thread(self._router.registry.avoid, worker_id)
        except KvStreamsError as exc:  # it was removed, or Kafka is away
            log.warning("worker %d is not avoided, although a gateway could not reach it: %s", worker_id, exc)


async def _tick_forever(lifetimes: Lifetimes) -> None:
    """End bookings that are over by now, and renew the leases of the others, until cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        try:
            lifetimes.tick()
            while lifetimes.renew():
                await asyncio.sleep(0)
        except Exception:  # nothing may end this: running requests would no longer count
            log.exception("bookings could not be ended or renewed")


async def serve_picker(settings: PickerServerSettings, options: PickerOptions) -> None:
    """Serve until cancelled. Raises KvStreamsError as the router's `serve` does."""
    await serve(settings, door=PickerDoor(settings, options))
