"""A proxy between an engine's event socket and a bridge, which damages messages while it should.

What lives here: messages that arrive twice, in another order, or with a damaged payload. What must not: what the bridge
makes of them (tests), and damage at one place of a message that a test chooses (event_mutations).
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

#: A message that waits for the next one, to arrive after it, waits at most this long.
HELD_MS = 50

#: Of so many messages, one arrives twice, one after the next one, and one with another first byte.
DAMAGED_EVERY = 8

#: The one byte that MessagePack never uses.
NO_MSGPACK = b"\xc1"


class EventProxy:
    """Passes on the messages of one engine. It outlives the engine. Owner of its sockets."""

    def __init__(self, events: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._damaging = threading.Event()
        self._closing = threading.Event()
        self._held: list[bytes] | None = None
        self.counts: Counter[str] = Counter()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._out: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._out.setsockopt(zmq.SNDHWM, 0)
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._run, args=(context, events), name="event-proxy")
        self._thread.start()

    def close(self) -> None:
        """End the proxy."""
        self._closing.set()
        self._thread.join()

    @contextmanager
    def damaging(self) -> Iterator[None]:
        """Damage messages while the block runs."""
        self._damaging.set()
        try:
            yield
        finally:
            self._damaging.clear()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], events: str) -> None:
        source: zmq.Socket[bytes] = context.socket(zmq.SUB)
        source.setsockopt(zmq.RCVHWM, 0)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.connect(events)
        while not self._closing.is_set():
            received = source.recv_multipart() if source.poll(HELD_MS) else None
            for message in self._passed(received):
                self._out.send_multipart(message)
        source.close(linger=0)
        self._out.close(linger=0)

    def _passed(self, received: list[bytes] | None) -> list[list[bytes]]:
        """The messages to send now. received: None if there was no message for HELD_MS."""
        late = [] if self._held is None else [self._held]
        self._held = None
        if received is None:
            return late
        fate = self._rng.randrange(DAMAGED_EVERY) if self._damaging.is_set() else DAMAGED_EVERY
        if fate == 0:
            self.counts["doubled"] += 1
            return [received, *late, received]
        if fate == 1 and not late:
            self.counts["reordered"] += 1
            self._held = received
            return []
        if fate == 2:
            self.counts["poisoned"] += 1
            return [[*received[:-1], NO_MSGPACK + received[-1][1:]], *late]
        return [received, *late]
