"""When periodic work of one engine or rank is due, so that the work of hundreds is spread over the interval (pure).

What lives here: each one's share of an interval. What must not: the work, and reading a clock.

Without this, engines that started together would all be asked in the same moment, again and again, and the events of
all ranks would wait until the answers are read: 200 pages of metrics take 150 ms.
"""

from __future__ import annotations

import math

import xxhash

#: Offset of a second kind of work within the interval of the first.
HALF = 0.5


def share_of(name: object) -> float:
    """Return the part of every interval, from 0 to 1, after which the work of an engine or rank is due."""
    return xxhash.xxh3_64_intdigest(str(name).encode()) / (1 << 64)


def next_turn(now_s: float, every_s: float, share: float) -> float:
    """Return the next time after now_s at which work is due that is done every `every_s` seconds."""
    turn = (math.floor(now_s / every_s - share) + 1 + share) * every_s
    return turn if turn > now_s else turn + every_s
