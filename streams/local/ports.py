"""Free ports for servers of this machine.

What lives here: choosing a port that nobody has, and that nobody is likely to be given before its server is up. What
must not: servers.
"""

from __future__ import annotations

import random
import socket

from streams.errors import KvStreamsError

#: Below the ports that Linux (32768 up) and macOS (49152 up) give to outgoing connections. On one of those a server
#: that takes seconds to start finds that a client has it. Worse, a client that reconnects to a stopped server there is
#: sooner or later given that very port, connects to itself, and keeps the server from ever binding it again.
PORTS = range(20_000, 32_000)

#: So many candidates are tried for a free port; if all are taken, something is wrong that another try does not mend.
PORT_TRIES = 100


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many different ones, at random, so that two starts at once seldom meet. Raises KvStreamsError."""
    free: list[int] = []
    # The system's generator: tests seed Python's, and would all be given the same ones.
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        if is_free(port):
            free.append(port)
        if len(free) == count:
            return free
    raise KvStreamsError(
        f"no free port was found in {PORT_TRIES} tries between {PORTS.start} and {PORTS.stop - 1}",
        remedy="End some of the servers on this machine",
    )


def is_free(port: int) -> bool:
    """Whether a server could listen there, with the options that Java's sockets have."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
