"""The endpoints of engines as gateways name them: an IP address and a port for each URL.

What lives here: the addresses of host names, which pickers and `kvstreams gateway` must name alike. What must not:
which engines there are (fleet).

State: addresses of host names.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection
from typing import NamedTuple
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

#: Interval at which the host names of engines are looked up again, and after a failure.
RESOLVE_S = 30.0
RESOLVE_AGAIN_S = 2.0

#: Interval at which new host names are looked up.
CHECK_S = RESOLVE_AGAIN_S / 4

#: Host names whose addresses are kept. Workers beyond it get no requests from a gateway.
HOSTS_MAX = 16_384


class Endpoint(NamedTuple):
    """Where an engine listens. host: an IP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class EngineAddresses:
    """The addresses of engines' hosts. Used on one loop.

    Of several addresses of a name, the one that was found first stays for as long as the name has it. At first it is
    the lowest one, IPv4 before IPv6.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: dict[str, str] = {}
        self._looked_up_s: dict[str, float] = {}
        #: Grows with each change of an address.
        self.changes = 0

    def endpoint(self, url: str) -> Endpoint | None:
        """Return the endpoint of an engine; None if its host has no address yet."""
        host = _host(url)
        address = host if host is not None and is_address(host) else self._addresses.get(host or "")
        return None if address is None else Endpoint(address, _port(url))

    async def look_up(self, urls: Collection[str]) -> None:
        """Look up the hosts that are due, and forget those of other URLs. Called every CHECK_S."""
        now_s = self._clock()
        hosts = {host for url in urls if (host := _host(url)) is not None}
        for host in self._looked_up_s.keys() - hosts:
            del self._looked_up_s[host]
            self._addresses.pop(host, None)
        for host in hosts:
            if is_address(host) or self._looked_up_s.get(host, float("-inf")) > now_s:
                continue
            if host not in self._looked_up_s and len(self._looked_up_s) >= HOSTS_MAX:
                continue
            await self._look_up(host, now_s)

    async def _look_up(self, host: str, now_s: float) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as exc:
            self._looked_up_s[host] = now_s + RESOLVE_AGAIN_S
            log.warning("the engine host %r has no address, and gets no requests from gateways: %s", host, exc)
            return
        self._looked_up_s[host] = now_s + RESOLVE_S
        addresses = sorted({str(info[4][0]) for info in found}, key=lambda address: (":" in address, address))
        if self._addresses.get(host) not in addresses:
            self._addresses[host] = addresses[0]
            self.changes += 1


@functools.lru_cache(maxsize=HOSTS_MAX)
def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


@functools.lru_cache(maxsize=HOSTS_MAX)
def is_address(host: str) -> bool:
    """Whether a host is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
