"""Free ports for servers of this machine.

What lives here: choosing a port that is free, and that no other process is likely to get before its server has started.
What must not: servers.
"""

from __future__ import annotations

import random
import socket
from collections import deque

from streams.errors import KvStreamsError

#: Below the ports that Linux (from 32768) and macOS (from 49152) give to outgoing connections. A server that takes
#: seconds to start could find such a port taken by a client. Worse, a client that keeps reconnecting to a stopped
#: server there gets that very port sooner or later, connects to itself, and prevents the server from binding it again.
PORTS = range(20_000, 32_000)

#: The last ports that this process was given are not given again: their servers may not listen yet, or be restarting.
GIVEN_KEPT = 200

#: How many candidates are tried. If all of them are taken, more attempts do not help.
PORT_TRIES = 400

_given: deque[int] = deque(maxlen=GIVEN_KEPT)


def free_port() -> int:
    """Return a port that no process listens on at this moment. Raises KvStreamsError."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports, at random so that two callers seldom collide. Raises KvStreamsError."""
    free: list[int] = []
    candidates = _candidates()
    for port in candidates:
        if _may_give(port):
            free.append(port)
        if len(free) == count:
            _given.extend(free)
            return free
    raise _none_found(len(candidates))


def free_ports_in_a_row(count: int) -> int:
    """Return the first of `count` consecutive free ports, for the processes of a group. Raises KvStreamsError."""
    candidates = _candidates()
    for first in candidates:
        row = range(first, first + count)
        if row[-1] in PORTS and all(map(_may_give, row)):
            _given.extend(row)
            return first
    raise _none_found(len(candidates))


def _candidates() -> list[int]:
    # The system's generator, because tests seed Python's and would all get the same ports.
    return random.SystemRandom().sample(PORTS, min(PORT_TRIES, len(PORTS)))


def _may_give(port: int) -> bool:
    return port not in _given and is_free(port)


def _none_found(n_tried: int) -> KvStreamsError:
    return KvStreamsError(
        f"no free port was found in {n_tried} attempts between {PORTS.start} and {PORTS.stop - 1}",
        remedy="Stop some of the servers on this machine",
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on the port, with the socket options that Java uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
