"""What a picker reads of the registered engines: endpoints, adapters, and which engines make tokens.

What lives here: the endpoints of workers as gateways name them, `IP:PORT`, and the names of adapters. What must not:
the addresses of host names (addresses), which worker a request may go to (core.routing.eligibility), and who registers
workers.

State: the endpoints of the picker's pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from streams.core.ids import RankId, WorkerId
from streams.core.workers import Role, Worker, WorkerState
from streams.errors import UnknownModel
from streams.picker.addresses import CHECK_S, EngineAddresses

#: Subset hints whose workers are kept. A gateway sends the same one with each request.
SUBSETS_MAX = 64


@dataclass(slots=True)
class _Model:
    """What is known of one model. urls: of its engines that may get requests."""

    urls: list[str] = field(default_factory=list)
    has_roles: bool = False


@dataclass(slots=True)
class _Snapshot:
    """The registry at one time.

    endpoints: of the workers that a gateway can reach. is_part: whether there are others: their host names have no
    address, or the pool does not have them.
    """

    endpoints: dict[WorkerId, str] = field(default_factory=dict)
    workers_at: dict[str, set[WorkerId]] = field(default_factory=lambda: defaultdict(set))
    models: dict[str, _Model] = field(default_factory=lambda: defaultdict(_Model))
    adapters: dict[str, str] = field(default_factory=dict)
    is_part: bool = False
    subsets: dict[tuple[str, ...], frozenset[WorkerId]] = field(default_factory=dict)


class PickerFleet:
    """The registry as a picker reads it. Used on one loop."""

    def __init__(
        self,
        workers: Callable[[], Mapping[WorkerId, Worker]],
        changes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """workers: the registered ones. changes: grows with each change of them."""
        self._workers = workers
        self._changes = changes
        self._seen = (-1, -1)
        self._snapshot = _Snapshot()
        self._addresses = EngineAddresses(clock)
        self._turn = 0
        self._pool: frozenset[str] | None = None  # the only endpoints that count; None for all

    # -- addresses -----------------------------------------------------------------------------------------------------

    def limit_to(self, endpoints: Collection[str]) -> None:
        """Leave out all workers but those at these endpoints."""
        self._pool = frozenset(endpoints)
        self._seen = (-1, -1)

    def endpoint(self, worker_id: WorkerId) -> str | None:
        """Return the endpoint of a worker; None if its host name has no address yet, or if it is not registered."""
        return self._now().endpoints.get(worker_id)

    def allowed(self, subset: tuple[str, ...] | None) -> frozenset[WorkerId] | None:
        """Return the workers that a gateway can reach, of those that it names; None for all that are registered."""
        now = self._now()
        if subset is None:
            return frozenset(now.endpoints) if now.is_part else None
        found = now.subsets.get(subset)
        if found is None:
            if len(now.subsets) >= SUBSETS_MAX:
                now.subsets.clear()
            at = now.workers_at
            found = frozenset(worker_id for endpoint in subset if endpoint in at for worker_id in at[endpoint])
            now.subsets[subset] = found
        return found

    def rank_at(self, endpoint: str) -> RankId | None:
        """Return the first rank of the first worker with this endpoint."""
        for worker_id in sorted(self._now().workers_at.get(endpoint, ())):
            worker = self._workers().get(worker_id)
            if worker is not None:
                return next(iter(worker.ranks()))
        return None

    def endpoints(self) -> Collection[str]:
        """Return the endpoints of all workers."""
        return self._now().workers_at.keys()

    async def resolve_forever(self) -> None:
        """Look up the host names of engines, until cancelled."""
        while True:
            await self._addresses.look_up([worker.url for worker in list(self._workers().values())])
            await asyncio.sleep(CHECK_S)

    # -- models --------------------------------------------------------------------------------------------------------

    def resolve(self, name: str | None) -> tuple[str | None, str | None]:
        """Return the model and the LoRA adapter that a request's `model` stands for. Both have names alike."""
        model = self._now().adapters.get(name or "")
        return (name, None) if model is None else (model, name)

    def engine(self, model: str) -> str | None:
        """Return the URL of an engine that serves a model, each in turn."""
        urls = self._now().models[model].urls if model in self._now().models else ()
        if not urls:
            return None
        self._turn += 1
        return urls[self._turn % len(urls)]

    def has_roles(self, model: str) -> bool:
        """Whether some workers of a model only compute prompts, or only decode."""
        models = self._now().models
        return model in models and models[model].has_roles

    def any_model(self) -> str:
        """Return the name of a model, for calls that name none. Raises UnknownModel if there is no engine."""
        for model in sorted(self._now().models):
            return model
        raise UnknownModel("no engine is registered", models=[])

    def _now(self) -> _Snapshot:
        changes = self._changes(), self._addresses.changes
        if changes != self._seen:
            self._seen, self._snapshot = changes, self._read(list(self._workers().values()))
        return self._snapshot

    def _read(self, workers: list[Worker]) -> _Snapshot:
        now = _Snapshot()
        for worker in workers:
            found = self._addresses.endpoint(worker.url)
            endpoint = "" if found is None else str(found)
            if self._pool is not None and endpoint not in self._pool:
                now.is_part = True
                continue
            model = now.models[worker.model]
            if worker.state is WorkerState.ACTIVE:
                model.urls.append(worker.url.rstrip("/"))
            model.has_roles |= worker.role is not Role.BOTH
            for adapter in worker.lora_names or ():
                now.adapters.setdefault(adapter, worker.model)
            if not endpoint:
                now.is_part = True
                continue
            now.endpoints[worker.worker_id] = endpoint
            now.workers_at[endpoint].add(worker.worker_id)
        names = {name for worker in workers for name in (worker.model, *worker.aliases)}
        now.adapters = {adapter: model for adapter, model in now.adapters.items() if adapter not in names}
        return now
