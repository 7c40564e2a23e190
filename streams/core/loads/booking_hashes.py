"""Digests by which bookings are found without their ids: 63 bits of a request id, and 32 of the rest of a booking's id.

What lives here: these digests, which kernels compute as well (kernels.plain). What must not: tables. They have a seed
of their own in each process, so that nobody can choose ids whose digests are equal.
"""

from __future__ import annotations

import functools
import secrets

from xxhash import xxh3_64_intdigest

from streams.core.loads.kernels.layout import DIGEST_BITS

#: Positive as a signed number, since kernels get it as one.
SEED = secrets.randbits(DIGEST_BITS)

#: Ids of routers whose digests are kept. A router has a new id at each start.
_ROUTERS_KEPT_MAX = 1024

#: Request ids whose digests are kept: one call needs that of its request several times.
_REQUESTS_KEPT_MAX = 16

# As in kernels.plain, which this module must not import: it needs numba.
_ROUTER_FACTOR = 0x2545F4914F6CDD1D
_COUNTER_FACTOR = 0x1B873593CC9E2D51
_ID_SHIFT = 32
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1


@functools.lru_cache(_REQUESTS_KEPT_MAX)
def request_digest(request_id: str) -> int:
    """63 bits of a request id."""
    return xxh3_64_intdigest(request_id.encode("utf-8", "surrogatepass"), SEED) >> 1


def booking_digest(request: int, router_id: str, counter: int) -> int:
    """32 bits of a booking's id. request: the digest of its request id."""
    mixed = (request + _router(router_id) * _ROUTER_FACTOR + counter * _COUNTER_FACTOR) & _U64
    return (mixed ^ mixed >> _ID_SHIFT) & _U32


@functools.lru_cache(_ROUTERS_KEPT_MAX)
def _router(router_id: str) -> int:
    return request_digest(router_id)
