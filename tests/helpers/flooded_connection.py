"""`python -m tests.helpers.flooded_connection ROUNDS`: reads from publishers that are killed while they send.

What lives here: a process of its own, because a fault in ZMQ would abort it. What must not: what is expected of it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq
import zmq.asyncio

from streams.engines.connection import Change, EventConnection

_PUBLISHER = """
import time, zmq
socket = zmq.Context().socket(zmq.XPUB)
socket.setsockopt(zmq.SNDHWM, 0)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
socket.recv()
while True:
    socket.send_multipart([b"", b"12345678", b"a batch"])
"""

#: For how long each publisher sends before it is killed.
_SENDS_S = 0.1


def _waiting(socket: Any) -> Iterator[list[bytes]]:
    """Read until nothing waits."""
    try:
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return


async def read_round(context: zmq.asyncio.Context) -> int:
    """Return how many messages of a publisher were read until its connection broke and its socket was empty."""
    n_messages = 0
    with subprocess.Popen([sys.executable, "-c", _PUBLISHER], stdout=subprocess.PIPE) as publisher:
        assert publisher.stdout is not None
        with EventConnection(context, f"tcp://127.0.0.1:{int(publisher.stdout.readline())}") as connection:
            while connection.attend(time.monotonic()) is not Change.COMPLETED:
                await asyncio.sleep(0.001)
            # Not with `take`, which lets ZMQ handle its events after each message. The end of the connection is then
            # rarely handled between two frames, and here within a few hundred messages.
            socket: Any = connection._socket
            threading.Timer(_SENDS_S, publisher.kill).start()
            while connection.attend(time.monotonic()) is not Change.BROKEN:
                n_messages += sum(len(frames) == 3 for frames in _waiting(socket))
                await asyncio.sleep(0)
            n_messages += sum(len(frames) == 3 for frames in _waiting(socket))
    return n_messages


async def main(n_rounds: int) -> None:
    """Read from one publisher after the other, and print how many messages each sent."""
    context = zmq.asyncio.Context()
    try:
        for _ in range(n_rounds):
            print(await read_round(context), flush=True)
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
