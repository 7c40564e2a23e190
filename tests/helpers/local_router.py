"""A router on a real server without Kafka: its view is filled by folding records directly.

For tests and measurements of the HTTP server itself: limits, slow clients, and large states.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from streams.core.hashing import sequence_hashes
from streams.core.ids import DpRank, HashArray, RankId, Tier, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.request import Matches
from streams.core.routing.trust import EXACT, Trust
from streams.core.workers import Role, Worker
from streams.kafka.clients import worker_key
from streams.kafka.records import encode_worker
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.lab.kafka.ports import free_port
from streams.process.http_server import HttpServer
from streams.process.interpreter import prefer_request_threads
from streams.router_api.deciding.router import Router
from streams.router_api.processes.server import api_runner, tick_forever
from streams.security.access import Access
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run
from tests.helpers.api import Api


@dataclass(frozen=True, slots=True)
class LocalRouter:
    """A router that is served, and its API."""

    router: Router
    api: Api


@contextmanager
def local_router(
    settings: Settings,
    n_workers: int = 2,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    make: Callable[[Settings], Router] = Router,
) -> Iterator[LocalRouter]:
    """Serve a router with these workers of model `m`, as `kvstreams router` does, until the block ends.

    make: another kind of router. new_loop: the event loop that serves it.
    """

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve())

    own = replace(settings, port=free_port(), kafka=f"127.0.0.1:{free_port()}", router_replica_sync=False)
    access = Access(own)
    router = make(own)
    router.feeds.pending = dict  # type: ignore[method-assign]  # nothing is left to be read
    for number in range(1, n_workers + 1):
        register(router, number)
    started, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = HttpServer(own.host, own.port, access=access)
        await server.serve(api_runner(router, access=access))
        ticking = asyncio.create_task(tick_forever(router))
        loops.append(asyncio.get_running_loop())
        started.set()
        await over.wait()
        ticking.cancel()
        await server.close()

    prefer_request_threads()
    thread = threading.Thread(target=run, name=f"router-{own.port}")
    thread.start()
    assert started.wait(30)
    try:
        yield LocalRouter(router, Api(f"http://{own.host}:{own.port}"))
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join()
        router._kafka.close()  # otherwise it keeps trying to connect until the process ends, and logs that


class SureRouter(Router):
    """A router that trusts what it has read, although no partition owner confirms it."""

    def _assess(self, ranks: Sequence[RankId], matches: Matches, *, pooled: str | None, labelled: bool) -> Trust:  # noqa: ARG002
        return EXACT


def register(router: Router, number: int, model: str = "m", url: str | None = None, role: Role = Role.BOTH) -> None:
    """Register a worker with one rank."""
    worker = Worker(WorkerId(number), url or f"http://engine-{number}:8000", model, 16, role=role)
    router.view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))


def hold(router: Router, rank: RankId, local: HashArray, tier: Tier = Tier.DEVICE) -> HashArray:
    """Fold run records with which a rank holds a chain of blocks; return their sequence hashes."""
    records: list[tuple[bytes, bytes | None]] = [
        (RUN_KEY.pack(run.key), encode_run(run)) for run in runs_of_chain(rank, local, tier=tier)
    ]
    progress = Progress(rank, FIRST_EPOCH, 0, health=Health.EXACT, model="m", block_size=16)
    records.append((PROGRESS_KEY.pack(rank), encode_progress(progress)))
    assert router.view.fold_index_batch(records) == []
    return sequence_hashes(local)


def random_blocks(rng: np.random.Generator, n: int) -> HashArray:
    """Local hashes of n blocks at random."""
    return rng.integers(0, 2**64 - 1, n, dtype=np.uint64)


def rank(number: int) -> RankId:
    """The only rank of a worker."""
    return RankId(WorkerId(number), DpRank(0))
