"""Reassigning the booking of an answer whose engine failed, for the front and for `generate`.

What lives here: asking routers for another worker until the stream's deadline, and what the chosen one can reach. What
must not: the decisions (migration), and the engines' answers (engine, frontend.migrating).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from streams.client.booking import Booking
from streams.client.migration import NoWorkerLeft, WorkerChosen
from streams.errors import AllWorkersBusy, KvStreamsError, NotReady, Overloaded, RouterUnavailable

#: Pause before routers are asked again for another worker.
ROUTE_PAUSE_S = 0.1

#: What may pass within the time that a stream may take to migrate.
_PASSING = (RouterUnavailable, NotReady, Overloaded, AllWorkersBusy)


async def choose_worker(
    booking: Booking, token_ids: Sequence[int], expected: int | None, until_s: float
) -> WorkerChosen | NoWorkerLeft:
    """Reassign a booking to another worker. Routers that are away are asked again until until_s, of the loop's clock.

    token_ids: the prompt and the answer so far. expected: tokens that are still to be generated, None if unknown.
    """
    loop = asyncio.get_running_loop()
    failed = booking.worker_id
    while True:
        try:
            async with asyncio.timeout_at(until_s):
                await booking.reassign(token_ids, explain=True, expected_output_tokens=expected)
        except _PASSING:
            if loop.time() + ROUTE_PAUSE_S >= until_s:
                return NoWorkerLeft(loop.time())
        except (KvStreamsError, TimeoutError):
            return NoWorkerLeft(loop.time())
        else:
            break
        await asyncio.sleep(ROUTE_PAUSE_S)
    if booking.worker_id == failed or booking.url is None:  # a router that does not reassign bookings
        return NoWorkerLeft(loop.time())
    own_tokens, pooled_tokens = _reach(booking.answer)
    return WorkerChosen(loop.time(), booking.worker_id, own_tokens + pooled_tokens, pooled_tokens)


def _reach(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many leading tokens the chosen rank has in its own memory, and how many follow them in CXL pools.

    Both are 0 where the answer does not say, as that of an older router.
    """
    chosen = answer["worker_id"], answer["dp_rank"]
    block_size = answer.get("block_size", 0)
    for terms in answer.get("candidates", ()):
        if (terms["worker_id"], terms["dp_rank"]) == chosen:
            return terms["scores"] * block_size, terms["cxl_accessible_scores"] * block_size
    return 0, 0
