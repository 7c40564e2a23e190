"""Engines in Kubernetes: behind a service, from its EndpointSlices, or of an InferencePool.

What lives here: which endpoints are engines. What must not: following objects of Kubernetes (streams.kubernetes), and
the address of an engine on a host (address).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from streams.engines.address import EngineTemplate
from streams.engines.sources.interface import Wanted
from streams.kubernetes.account import ServiceAccount
from streams.kubernetes.pools import Endpoint, PoolEndpoints
from streams.kubernetes.watching import Resource, Watched

log = logging.getLogger(__name__)

SLICES = Resource("discovery.k8s.io/v1", "endpointslices")


class KubernetesEngines:
    """The engines behind one service: the ready endpoints of all its slices."""

    is_fixed = False

    def __init__(self, service: str, template: EngineTemplate, account: ServiceAccount) -> None:
        """service: NAME, or NAMESPACE/NAME. Raises SettingsError if the account's files cannot be read."""
        self._namespace, self._service = account.named("--engines-kubernetes", service)
        self._template = template
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        self._slices = Watched(account, SLICES, self._namespace, selector, _ready_hosts, str(self))

    def __str__(self) -> str:
        return f"the service {self._namespace}/{self._service} of Kubernetes"

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        reported: list[str] | None = None

        def report() -> None:
            nonlocal reported
            hosts = sorted({host for of_slice in self._slices.objects.values() for host in of_slice})
            if hosts != reported:
                log.info("%s has %d ready endpoints", self, len(hosts))
                wanted([self._template.at(host) for host in hosts])
                reported = hosts

        await self._slices.follow(report)


class PoolEngines:
    """The engines of one InferencePool: each target port of a ready pod is one."""

    is_fixed = False

    def __init__(self, pool: str, template: EngineTemplate, account: ServiceAccount) -> None:
        """pool: NAME, or NAMESPACE/NAME. Raises SettingsError if the account's files cannot be read."""
        self._endpoints = PoolEndpoints(pool, account, "--engines-inference-pool")
        self._template = template

    def __str__(self) -> str:
        return str(self._endpoints)

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""

        def report(endpoints: Sequence[Endpoint]) -> None:
            wanted([self._template.at(each.host, each.port, each.index) for each in endpoints])

        await self._endpoints.follow(report)


def _ready_hosts(of: Any) -> tuple[str, ...]:
    """Return the hosts of a slice's ready endpoints; a missing condition means ready.

    An endpoint has several addresses only for hosts with several network cards; the first one is used, as Kubernetes
    recommends.
    """
    return tuple(
        str(endpoint["addresses"][0])
        for endpoint in of.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready") is not False
    )
