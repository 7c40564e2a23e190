"""Engines behind a DNS name, which is resolved again and again.

What lives here: when the name is resolved, and what follows from an answer. What must not: how a resolver works; it is
that of the operating system.

Each address of the name is one engine, as with a headless service of Kubernetes, or a name of Docker's with several
containers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from streams.engines.address import EngineTemplate
from streams.engines.sources.interface import Wanted
from streams.kafka.outage import Outage, lasting

log = logging.getLogger(__name__)

#: Time between two resolutions. Records of headless services are cached for 5 s (Kubernetes) to 30 s.
RESOLVE_EVERY_S = 5.0

#: A name that does not exist for this long has no engines. A shorter absence may be a restart of the name server.
GONE_AFTER_S = 30.0

#: A resolution that takes longer counts as not answered. The system's resolver tries for up to a minute.
RESOLVE_TIMEOUT_S = 10.0

#: Errors of the resolver that say that the name, or an address of it, does not exist. Others say that it is not known.
_ABSENT = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})

Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def resolve(name: str) -> list[str]:
    """Return the name's addresses, in the same order each time. Raises socket.gaierror."""
    addresses = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in addresses})


class DnsEngines:
    """The engines behind one name."""

    is_fixed = False

    def __init__(
        self,
        name: str,
        template: EngineTemplate,
        *,
        resolver: Resolve = resolve,
        every_s: float = RESOLVE_EVERY_S,
        gone_after_s: float = GONE_AFTER_S,
    ) -> None:
        self._name = name
        self._template = template
        self._resolve = resolver
        self._every_s = every_s
        self._gone_after_s = gone_after_s
        self._outage = Outage()
        self._absent_since_s: float | None = None

    def __str__(self) -> str:
        return f"the DNS name {self._name}"

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        last: Sequence[str] | None = None
        while True:
            hosts = await self._hosts()
            if hosts is not None and hosts != last:
                log.info("%s has %d addresses", self, len(hosts))
                wanted([self._template.at(host) for host in hosts])
                last = hosts
            await asyncio.sleep(self._every_s)

    async def _hosts(self) -> Sequence[str] | None:
        """Return the name's addresses; None if they are not known now."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                hosts = await self._resolve(self._name)
        except (OSError, UnicodeError, TimeoutError) as exc:
            now_s = time.monotonic()
            lasted_s = self._outage.failed(now_s)
            if lasted_s is not None:
                log.warning("%s cannot be resolved: %s%s", self, str(exc) or "no answer", lasting(lasted_s))
            if not isinstance(exc, socket.gaierror) or exc.errno not in _ABSENT:
                return None
            self._absent_since_s = now_s if self._absent_since_s is None else self._absent_since_s
            return [] if now_s - self._absent_since_s >= self._gone_after_s else None
        self._absent_since_s = None
        lasted_s = self._outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("%s is resolved again after %.0f s", self, lasted_s)
        return hosts
