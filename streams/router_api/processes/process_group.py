"""Router processes that another process keeps running: `kvstreams router --processes N`, and a worker's own ones.

What lives here: starting, watching and ending the processes, and their ports. What must not: what a process does
(server), and its command line (cli.serving).

Each process is a router of its own, a replica of the topics with its own copy of the index. They share one port by
SO_REUSEPORT, so that the system spreads new connections over them, and each has a port of its own besides. The parent
serves no requests. A single process has only the one port.

A process notices that its parent is gone when its standard input ends, however the parent ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streams.errors import ProcessError, SettingsError
from streams.process.http_server import HttpServer
from streams.security.access import Access
from streams.settings import RouterServerSettings, as_environ

log = logging.getLogger(__name__)

#: A process that ended is started again after this time, which doubles with each further end up to the second value.
#: A crash at a client's request is over in a second; a Kafka that is away should not be asked much more often.
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0

#: A process that ran for this long counts as having started well: the next end is its first one again.
STABLE_S = 60.0

#: If a process ends this often in a row, a restart does not help. The parent then ends the others and fails, so that
#: what watches the parent sees the fault.
ENDS_MAX = 6

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
        self._env = {**os.environ, **as_environ(self._settings)}
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Keep the processes running until cancelled, then end them.

        Raises SettingsError if the ports are not available, and ProcessError if a process cannot be kept running.
        """
        await self.check_address()
        numbers = range(1, self._settings.processes + 1)
        tasks = [asyncio.create_task(self._keep_running(number)) for number in numbers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()

    async def check_address(self) -> None:
        """Raise SettingsError if the ports are not available."""
        if self._settings.processes > 1:
            check_ports(self._settings)
        # Listening without SO_REUSEPORT finds another program there, and other processes of an earlier command as well.
        await HttpServer(self._settings.host, self._settings.port, access=Access(self._settings)).close()

    def _port(self, place: ProcessPlace) -> int:
        return self._settings.port if self._settings.processes == 1 else place.own_port(self._settings)

    async def _keep_running(self, number: int) -> None:
        place, n_ends, wait_s = ProcessPlace(number), 0, RESTART_FIRST_S
        while True:
            started_s = time.monotonic()
            process = await self._start(place)
            log.info("process %d has pid %d and port %d", number, process.pid, self._port(place))
            code = await process.wait()
            del self._running[number]
            if time.monotonic() - started_s >= STABLE_S:
                n_ends, wait_s = 0, RESTART_FIRST_S
            n_ends += 1
            if n_ends >= ENDS_MAX:
                raise ProcessError(
                    f"process {number} ended with code {code}, {n_ends} times in a row",
                    remedy="Its messages are above",
                )
            log.error("process %d ended with code %d; it is started again in %g s", number, code, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_MAX_S)
            place = replace(place, joins_at_once=False)

    async def _start(self, place: ProcessPlace) -> asyncio.subprocess.Process:
        options = ["--ends-with-parent"]
        if self._settings.processes > 1:
            joins = "at-once" if place.joins_at_once else "when-ready"
            options += ["--process-number", str(place.number), "--process-joins", joins]
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *options,
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends them
        )
        self._running[place.number] = process
        return process

    async def _end_all(self) -> None:
        """Send SIGTERM to all, wait until they have drained, and kill those that have not."""
        left = list(self._running.values())
        for process in left:
            _signal(process, signal.SIGTERM)
        limit_s = self._settings.drain_notice_s + self._settings.drain_timeout_s + END_MARGIN_S
        waiting = [asyncio.create_task(process.wait()) for process in left]
        if waiting:
            await asyncio.wait(waiting, timeout=limit_s)
        for number, process in self._running.items():
            if process.returncode is None:
                log.error("process %d did not end within %g s and is killed", number, limit_s)
                _signal(process, signal.SIGKILL)
        await asyncio.gather(*waiting)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:  # it has ended meanwhile
        pass


def end_with_parent() -> None:
    """End this process as SIGTERM does once its parent is gone. Call it in a process that ProcessGroup started."""

    def wait() -> None:
        while os.read(0, 1024):  # the parent writes nothing
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
