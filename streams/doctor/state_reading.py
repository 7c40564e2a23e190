"""Compares what routers have with the topics, for one partition of the tables, the registry and the bookings.

What lives here: the replay of that sample. What must not: what is compared, and how (replay.verifying).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from streams import warming
from streams.doctor.observations import StateSeen
from streams.errors import KvStreamsError
from streams.process.router_calls import router_json
from streams.replay.rebuilding import Replay
from streams.replay.verifying import STATE_TIMEOUT_S, verify
from streams.settings import RouterServerSettings


def read_states(settings: RouterServerSettings, urls: Sequence[str], token: str | None) -> tuple[StateSeen, ...]:
    """Compare each router with the topics. The partition is chosen at random, and the same for all of them."""
    warming.warm(warming.ROUTER)
    partition = random.randrange(settings.partitions)
    return tuple(_read(settings, url.rstrip("/"), token, partition) for url in urls)


def _read(settings: RouterServerSettings, url: str, token: str | None, partition: int) -> StateSeen:
    try:
        result = verify(Replay(settings), lambda path: router_json(url, path, token, STATE_TIMEOUT_S), [partition])
    except KvStreamsError as exc:
        return StateSeen(url, partition, exc)
    return StateSeen(url, partition, None, tuple(str(difference) for difference in result.differences))
