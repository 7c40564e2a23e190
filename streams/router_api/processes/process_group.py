"""Router processes that another process keeps running: `kvstreams router --processes N`, and a worker's own ones.

What lives here: the processes, and their ports. What must not: starting, watching and ending a process
(process.kept_processes), what it does (server), and its command line (cli.serving).

Each process is a router of its own, a replica of the topics with its own copy of the index. They share one port by
SO_REUSEPORT, so that the system spreads new connections over them, and each has a port of its own besides. The parent
serves no requests. A single process has only the one port.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streams.errors import SettingsError
from streams.process.http_server import HttpServer
from streams.process.kept_processes import KeptProcess, KeptProcesses
from streams.security.access import Access
from streams.settings import RouterServerSettings, as_environ

#: Time that a process has for its end in addition to `drain_notice_s` and `drain_timeout_s`, before it is killed.
END_MARGIN_S = 5.0

ROUTER_COMMAND = (sys.executable, "-m", "streams.cli", "router")


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Which of several processes this one is.

    number: from 1. joins_at_once: it listens on the common port from its start. A process that is started again joins
    once it is ready, since the others answer meanwhile.
    """

    number: int
    joins_at_once: bool = True

    def own_port(self, settings: RouterServerSettings) -> int:
        """The port of this process alone."""
        return (settings.process_port or settings.port + 1) + self.number - 1


def check_ports(settings: RouterServerSettings) -> None:
    """Raise SettingsError if the processes cannot have their ports."""
    if settings.port == 0:
        raise SettingsError("port is 0, but several processes need a port that they share", remedy="Set --port")
    first = ProcessPlace(1).own_port(settings)
    last = ProcessPlace(settings.processes).own_port(settings)
    if last > 65535 or first <= settings.port <= last:
        raise SettingsError(
            f"process_port is {settings.process_port}: the processes would have the ports {first} to {last}, but these "
            f"must be at most 65535 and differ from port, which is {settings.port}",
            remedy="Set --process-port",
        )


class ProcessGroup:
    """The router processes of one parent. Used on one loop; `run` returns or raises once they have all ended."""

    def __init__(self, settings: RouterServerSettings, command: Sequence[str] = ROUTER_COMMAND) -> None:
        """command: what each process runs; options that name its parent and its place are added to it."""
        # The parent has reset the scope already.
        self._settings = replace(settings, router_reset_states=False, router_reset_force=False)
        self._command = command

    async def run(self) -> None:
        """Keep the processes running until cancelled, then end them.

        Raises SettingsError if the ports are not available, and ProcessError if a process cannot be kept running.
        """
        await self.check_address()
        settings = self._settings
        places = [ProcessPlace(number) for number in range(1, settings.processes + 1)]
        end_s = settings.drain_notice_s + settings.drain_timeout_s + END_MARGIN_S
        await KeptProcesses().run([self._kept(place) for place in places], end_s)

    async def check_address(self) -> None:
        """Raise SettingsError if the ports are not available."""
        if self._settings.processes > 1:
            check_ports(self._settings)
        # Listening without SO_REUSEPORT finds another program there, and other processes of an earlier command as well.
        await HttpServer(self._settings.host, self._settings.port, access=Access(self._settings)).close()

    def _kept(self, place: ProcessPlace) -> KeptProcess:
        settings = self._settings
        is_one = settings.processes == 1

        def command(is_again: bool) -> Sequence[str]:
            joins = "when-ready" if is_again else "at-once"
            number = () if is_one else ("--process-number", str(place.number), "--process-joins", joins)
            return (*self._command, "--ends-with-parent", *number)

        port = settings.port if is_one else place.own_port(settings)
        return KeptProcess(f"process {place.number}", command, {**os.environ, **as_environ(settings)}, port)
