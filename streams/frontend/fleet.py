"""Which models and engines there are: the registry, as the front reads it from a router.

What lives here: reading it periodically, the list of models and their adapters, and an engine for `/tokenize`. What
must not: which worker a request goes to, which is the router's decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from streams.client.http import KvRouterClient
from streams.errors import Forbidden, KvStreamsError, Unauthorized
from streams.frontend.disaggregation import ModelRoles

log = logging.getLogger(__name__)

#: Interval at which the registry is read.
FLEET_POLL_S = 2.0

#: A registry that could not be read for this long makes the front unready: its routers are away.
FLEET_STALE_S = 10.0


class Fleet:
    """The registered engines by model. If routers forbid reading them, the list is empty, and requests are served."""

    def __init__(
        self,
        router: KvRouterClient,
        clock: Callable[[], float] = time.monotonic,
        on_workers: Callable[[list[dict[str, Any]]], None] = lambda _: None,
        *,
        reads_pools: bool = False,
    ) -> None:
        """on_workers: called with the workers each time that the registry was read. reads_pools: whether CXL pools are
        read as well, which only transfers through pools need."""
        self._router = router
        self._on_workers = on_workers
        self._reads_pools = reads_pools
        self._pools: list[frozenset[int]] | None = None  # the members of each pool; None if they are not known
        self._incarnations: dict[int, int] = {}
        self._clock = clock
        self._engines: dict[str, list[str]] = {}
        self._created_s: dict[str, int] = {}
        self._adapters: dict[str, str] = {}  # the model of each LoRA adapter
        self._roles: dict[str, ModelRoles] = {}
        #: Mode of the router that answered last; "" if it does not say.
        self.router_mode = ""
        self._turn = 0
        self._read_s: float | None = None
        self._error = "the registry has not been read yet"
        self._forbidden = False

    async def poll_forever(self) -> None:
        """Read the registry periodically, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(FLEET_POLL_S)

    async def poll(self) -> None:
        """Read the registry once."""
        try:
            registry = await self._router.registry()
        except (Unauthorized, Forbidden) as exc:
            if not self._forbidden:
                log.warning("the list of models is empty, since the routers do not let the front read it: %s", exc)
            self._forbidden = True
            self._read_s = self._clock()
        except KvStreamsError as exc:
            self._error = str(exc)
        else:
            self._read_s = self._clock()
            self.router_mode = str(registry.get("router_mode", ""))
            self._take(registry["workers"])
            self._on_workers(registry["workers"])
            if self._reads_pools:
                await self._read_pools()

    async def _read_pools(self) -> None:
        try:
            pools = await self._router.pools()
        except KvStreamsError as exc:
            log.debug("the pools could not be read: %s", exc)
            self._pools = None
        else:
            self._pools = [frozenset(pool["members"]) for pool in pools if not pool["lost"]]

    def _take(self, workers: list[dict[str, Any]]) -> None:
        engines: dict[str, list[str]] = {}
        roles: dict[str, ModelRoles] = {}
        created: dict[str, int] = {}
        adapters: dict[str, str] = {}
        for worker in sorted(workers, key=lambda worker: str(worker["model"])):
            model = worker["model"]
            created[model] = min(created.get(model, 1 << 62), worker["registered_at_ms"] // 1000)
            for adapter in worker.get("lora_names") or ():
                adapters.setdefault(adapter, model)
            if worker["url"] and worker["state"] == "active" and len(worker["silent_dp_ranks"]) < worker["dp_size"]:
                engines.setdefault(model, []).append(worker["url"].rstrip("/"))
                known = roles.get(model) or ModelRoles(block_size=worker["block_size"])
                roles[model] = known.including(worker["worker_id"], worker["role"])
        self._engines, self._created_s, self._roles = engines, created, roles
        incarnations = {worker["worker_id"]: worker.get("incarnation") for worker in workers}
        self._incarnations = {worker_id: number for worker_id, number in incarnations.items() if number is not None}
        self._adapters = {adapter: model for adapter, model in adapters.items() if adapter not in created}

    def not_ready(self) -> str | None:
        """Return why the front cannot serve, or None if it can."""
        if self._read_s is None:
            return self._error
        if self._clock() - self._read_s > FLEET_STALE_S:
            return f"no router has answered for {self._clock() - self._read_s:.0f} s: {self._error}"
        if not self._engines and not self._forbidden:
            return "no engine is registered"
        return None

    def resolve(self, name: str | None) -> tuple[str | None, str | None]:
        """Return the model and the LoRA adapter that a request's `model` stands for; an adapter is named like a model.

        A name that is not registered is a model's, so that the router says that it is not served.
        """
        model = self._adapters.get(name or "")
        return (name, None) if model is None else (model, name)

    def engine(self, model: str | None) -> str | None:
        """Return the URL of an engine that serves a model, each in turn. Without a model: if there is only one."""
        if model is None and len(self._engines) == 1:
            (model,) = self._engines
        urls = self._engines.get(model or "")
        if not urls:
            return None
        self._turn += 1
        return urls[self._turn % len(urls)]

    def roles(self, model: str | None) -> ModelRoles | None:
        """Return which roles the engines of a model have. Without a model: if there is only one."""
        if model is None and len(self._roles) == 1:
            (model,) = self._roles
        return self._roles.get(model or "")

    def share_pool(self, worker_ids: Sequence[int]) -> bool:
        """Whether any of these workers is a member of a CXL pool with other workers, or may be."""
        wanted = frozenset(worker_ids)
        return self._pools is None or any(len(members) > 1 and members & wanted for members in self._pools)

    def incarnation(self, worker_id: int) -> int | None:
        """Return the incarnation of a worker's engine as routers showed it last; None if they know none."""
        return self._incarnations.get(worker_id)

    def page(self) -> dict[str, Any]:
        """Return the page of `GET /v1/models`."""
        rows = [
            {
                "id": model,
                "object": "model",
                "created": created_s,
                "owned_by": "kvstreams",
                "root": model,
                "parent": None,
            }
            for model, created_s in sorted(self._created_s.items())
        ]
        rows += [
            {**row, "id": adapter, "root": adapter, "parent": row["id"]}
            for row in list(rows)
            for adapter, model in sorted(self._adapters.items())
            if model == row["id"]
        ]
        return {"object": "list", "data": rows}
