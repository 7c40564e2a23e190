"""The endpoints of an InferencePool: each target port of each ready pod that it selects.

What lives here: what an InferencePool (inference.networking.k8s.io/v1) and a pod say, and following both. What must
not: requests to the API server (watching), and what an endpoint is used for.

State: the last endpoints. No service needs to select the pods: a pool has labels of its own, so the pods are watched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streams.kubernetes.account import ServiceAccount
from streams.kubernetes.watching import Resource, Watched

log = logging.getLogger(__name__)

POOLS = Resource("inference.networking.k8s.io/v1", "inferencepools")
PODS = Resource("v1", "pods")


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One server of a pod. index: of its port among the pool's, which is its data-parallel rank in the pod."""

    host: str
    port: int
    index: int = 0

    def __str__(self) -> str:
        """As gateways write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Pool:
    """What is read of a pool. labels: as a label selector."""

    labels: str
    ports: tuple[int, ...]


class PoolEndpoints:
    """The endpoints of one pool, followed."""

    def __init__(self, pool: str, account: ServiceAccount, option: str) -> None:
        """pool: NAME, or NAMESPACE/NAME. option: the one that names it. Raises SettingsError.

        The account's files must be readable.
        """
        self._account = account
        self._namespace, self._name = account.named(option, pool)
        self._pool = Watched(
            account, POOLS, self._namespace, {"fieldSelector": f"metadata.name={self._name}"}, _pool, str(self)
        )

    def __str__(self) -> str:
        return f"the InferencePool {self._namespace}/{self._name}"

    async def follow(self, changed: Callable[[Sequence[Endpoint]], None]) -> None:
        """Report all endpoints at the start and after each change, until cancelled; none if there is no such pool.

        While the API server cannot be read, and until the pods of new labels are listed, the last ones stay.
        """
        reported: list[Endpoint] | None = None
        pods: Watched[str] | None = None  # those of the labels below, once they are listed
        labels: str | None = None
        following: asyncio.Task[None] | None = None

        def report() -> None:
            nonlocal reported
            pool = self._pool.objects.get(self._name)
            if pool is not None and pods is None:
                return
            hosts = () if pool is None or pods is None else sorted({host for host in pods.objects.values() if host})
            ports = () if pool is None else pool.ports
            endpoints = [Endpoint(host, port, index) for host in hosts for index, port in enumerate(ports)]
            if endpoints != reported:
                log.info("%s has %d ready endpoints", self, len(endpoints))
                reported = endpoints
                changed(endpoints)

        async def follow_pods(selector: dict[str, str]) -> None:
            watched = Watched(self._account, PODS, self._namespace, selector, _ready_host, f"the pods of {self}")

            def pods_changed() -> None:
                nonlocal pods
                pods = watched
                report()

            await watched.follow(pods_changed)

        async with asyncio.TaskGroup() as tasks:

            def pool_changed() -> None:
                nonlocal pods, labels, following
                pool = self._pool.objects.get(self._name)
                wanted = None if pool is None else pool.labels
                if wanted != labels:
                    if following is not None:
                        following.cancel()
                    labels, pods = wanted, None
                    following = None if wanted is None else tasks.create_task(follow_pods({"labelSelector": wanted}))
                report()

            await self._pool.follow(pool_changed)


def _pool(of: Any) -> _Pool:
    spec = of["spec"]
    labels = spec["selector"]["matchLabels"].items()
    ports = tuple(int(port["number"]) for port in spec["targetPorts"])
    return _Pool(",".join(f"{key}={value}" for key, value in labels), ports)


def _ready_host(of: Any) -> str:
    """Return the address of a pod that may get requests, and "" for another one.

    A pod that is being deleted is left out at once, before it is no longer ready.
    """
    status = of.get("status") or {}
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    return str(status.get("podIP") or "") if ready and "deletionTimestamp" not in of["metadata"] else ""
