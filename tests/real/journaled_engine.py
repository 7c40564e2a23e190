"""A real engine with a journal of its cache, for a soak that compares a router's answers with it.

What lives here: a reader of the engine's events that shares no code with the bridge, and writes what
streams.lab.engines.journal reads. What must not: the soak (tests.trust_soak). The journal's times are those at which an
event arrived here, some milliseconds after the engine's cache has changed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import SequenceHash
from tests.real.engine import BLOCK_SIZE, RealEngine
from tests.real.environment import FULL

POLL_MS = 100


class EventJournal:
    """Reads the events of every process that listens at one address, until it is closed. Owner of the file."""

    def __init__(self, events: str, path: Path) -> None:
        self._path = path
        path.touch()
        self._sequence_of: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(events,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the reading."""
        self._closing.set()
        self._thread.join()

    def _run(self, events: str) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(events)
        with self._path.open("ab", buffering=0) as file:
            while not self._closing.is_set():
                if not socket.poll(POLL_MS):
                    continue
                _, _, payload = socket.recv_multipart()
                at_ns = time.time_ns()
                for event in msgspec.msgpack.decode(payload)[1]:
                    for change in self._changes(event):
                        file.write(json.dumps({"at_ns": at_ns, **change}).encode() + b"\n")
        socket.close(linger=0)

    def _changes(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        match event:
            case {"type": "BlockStored", "block_size": size, "block_hashes": names, "token_ids": tokens, **more}:
                if size != BLOCK_SIZE:
                    return []  # no prompt of the soak matches blocks of another size
                local = local_hashes(np.asarray(tokens, dtype="<u4").tobytes(), BLOCK_SIZE)
                parent = more.get("parent_block_hash")
                before = None if parent is None else SequenceHash(self._sequence_of[_name(parent)])
                sequence: list[int] = sequence_hashes(local, before).tolist()
                self._sequence_of.update(zip(map(_name, names), sequence, strict=True))
                return [{"stored": [[_name(name) for name in names], sequence]}]
            case {"type": "BlockRemoved", "block_hashes": names}:
                return [{"removed": [_name(name) for name in names if _name(name) in self._sequence_of]}]
            case {"type": "AllBlocksCleared"}:
                return [{"cleared": True}]
        raise AssertionError(f"vLLM reports what this journal does not know: {event['type']}")


def _name(name: int | bytes) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)


class JournaledEngine(RealEngine):
    """A real engine whose cache changes are in a journal. deaths_ns: when its processes were killed."""

    def __init__(self, worker_id: int, directory: Path, flags: Sequence[str] = ()) -> None:
        super().__init__(worker_id, FULL, directory / "engines", flags)
        self.journal = directory / f"journal-{worker_id}"
        self.deaths_ns: list[int] = []
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._events = EventJournal(self.events, self.journal)

    def kill(self) -> None:
        """See RealEngine; notes when the cache was gone."""
        super().kill()
        self.deaths_ns.append(time.time_ns())

    def close(self) -> None:
        """Kill the engine, and end the journal."""
        self.kill()
        self._events.close()
