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
        self._engines: dict[str, list[str]] = {}  # of engines that may get requests, by every name of their model
        self._models: dict[str, str] = {}  # the model of each name, of all registered workers
        self._adapters: dict[str, str] = {}  # the model of each LoRA adapter, likewise
        self._page: list[dict[str, Any]] = []
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
        models: dict[str, str] = {}
        adapters: dict[str, str] = {}
        page = ModelsPage()
        for worker in sorted(workers, key=lambda worker: str(worker["model"])):
            model, names = worker["model"], (worker["model"], *worker.get("aliases", ()))
            for adapter in worker.get("lora_names") or ():
                adapters.setdefault(adapter, model)
            for name in names:
                models.setdefault(name, model)
            if worker["url"] and worker["state"] == "active" and len(worker["silent_dp_ranks"]) < worker["dp_size"]:
                page.add(worker)
                for name in names:
                    engines.setdefault(name, []).append(worker["url"].rstrip("/"))
                    known = roles.get(name) or ModelRoles(block_size=worker["block_size"])
                    roles[name] = known.including(worker["worker_id"], worker["role"])
        models |= {worker["model"]: worker["model"] for worker in workers}
        self._engines, self._roles, self._models, self._page = engines, roles, models, page.rows()
        incarnations = {worker["worker_id"]: worker.get("incarnation") for worker in workers}
        self._incarnations = {worker_id: number for worker_id, number in incarnations.items() if number is not None}
        self._adapters = {adapter: model for adapter, model in adapters.items() if adapter not in models}

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

        Of several names of a model, that of its registration is returned. A name that is not registered is a model's,
        so that the router says that it is not served.
        """
        model = self._adapters.get(name or "")
        return (self._models.get(name or "", name), None) if model is None else (model, name)

    def engine(self, model: str | None) -> str | None:
        """Return the URL of an engine that serves a model, each in turn. Without a model: if there is only one."""
        urls = self._engines.get(model or self._only_model)
        if not urls:
            return None
        self._turn += 1
        return urls[self._turn % len(urls)]

    def roles(self, model: str | None) -> ModelRoles | None:
        """Return which roles the engines of a model have. Without a model: if there is only one."""
        return self._roles.get(model or self._only_model)

    @property
    def _only_model(self) -> str:
        """The model whose engines may get requests, if there is only one; otherwise an empty text."""
        models = {self._models[name] for name in self._engines}
        return models.pop() if len(models) == 1 else ""

    def share_pool(self, worker_ids: Sequence[int]) -> bool:
        """Whether any of these workers is a member of a CXL pool with other workers, or may be."""
        wanted = frozenset(worker_ids)
        return self._pools is None or any(len(members) > 1 and members & wanted for members in self._pools)

    def incarnation(self, worker_id: int) -> int | None:
        """Return the incarnation of a worker's engine as routers showed it last; None if they know none."""
        return self._incarnations.get(worker_id)

    def page(self) -> dict[str, Any]:
        """Return the page of `GET /v1/models`: what can be served now."""
        return {"object": "list", "data": self._page}


class ModelsPage:
    """The rows of `GET /v1/models`, from workers whose engines may get requests."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._adapters: dict[str, str] = {}  # the model of each

    def add(self, worker: dict[str, Any]) -> None:
        """Add a worker's model under all its names, with the greatest length that all of its engines take."""
        model, length = worker["model"], worker.get("max_model_len")
        for name in (model, *worker.get("aliases", ())):
            row = self._rows.setdefault(name, _row(name, model, 1 << 62))
            row["created"] = min(row["created"], worker["registered_at_ms"] // 1000)
            if length is not None:
                row["max_model_len"] = min(row.get("max_model_len", length), length)
        for adapter in worker.get("lora_names") or ():
            self._adapters.setdefault(adapter, model)

    def rows(self) -> list[dict[str, Any]]:
        """Return the models by name, then their adapters."""
        of_adapters = [
            {**self._rows[model], "id": adapter, "root": adapter, "parent": model}
            for adapter, model in sorted(self._adapters.items(), key=lambda pair: (pair[1], pair[0]))
            if adapter not in self._rows
        ]
        return [*(row for _, row in sorted(self._rows.items())), *of_adapters]


def _row(name: str, model: str, created_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvstreams",
        "root": model,
        "parent": None,
    }
