"""The order of a whole run on several processes: what takes long begins first, and short tests fill the end.

What lives here: the order (pure). What must not: pytest, and which tests are long (their mark).

pytest-xdist gives each process one contiguous part of the list, and a process that has none left takes half of what
another one still has. In the order of files one process began with all tests on Kafka, the others with all unit tests,
and at the end a process ran a test of a minute or two alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def dealt(long: Sequence[_Item], heavy: Sequence[_Item], rest: Sequence[_Item], n_processes: int) -> list[_Item]:
    """Order items so that each process begins with its share of long ones, goes on with heavy ones, and then the rest.

    Heavy ones and the rest stay in their order, since neighbours share fixtures.
    """
    left = len(long) + len(heavy) + len(rest)
    order: list[_Item] = []
    heavy_at = rest_at = 0
    for number in range(n_processes):
        size = left // (n_processes - number)  # as pytest-xdist cuts the list
        left -= size
        mine = list(long[number::n_processes])
        n_heavy = (len(heavy) - heavy_at) // (n_processes - number)
        mine += heavy[heavy_at : heavy_at + n_heavy]
        heavy_at += n_heavy
        n_rest = max(0, size - len(mine)) if number < n_processes - 1 else len(rest) - rest_at
        order += mine
        order += rest[rest_at : rest_at + n_rest]
        rest_at = min(len(rest), rest_at + n_rest)
    return order
