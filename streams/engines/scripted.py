"""A CXL transition told by a script, for a rank whose publisher or bridge is another process.

What lives here: resolving engine hashes by what Kafka has of the rank, as a bridge that starts does, and writing the
transition behind the rank's last batch. What must not: deciding whether it is legal (the agents do).
"""

from __future__ import annotations

import time

from streams.core.ids import RankId
from streams.cxl.directory import PoolDirectory
from streams.cxl.events import CxlStateChanged
from streams.engines.publisher import PUBLISH_TIMEOUT_S, RankWriter, event_producer
from streams.engines.recollection import recall
from streams.errors import KvStreamsError, UnknownId
from streams.kafka import require_topic
from streams.settings import Settings
from streams.topics import topics


def tell_transition(settings: Settings, rank: RankId, changed: CxlStateChanged) -> list[int]:
    """Tell that blocks of a rank enter a state; gives the hashes that name no block of it, of which nothing is told.

    Raises UnknownId for a rank that Kafka knows nothing of, KvStreamsError where Kafka does not take it.
    """
    require_topic(settings, topics(settings).cxl_events.name)
    memory = recall(settings, rank.worker_id).get(rank.dp_rank)
    if memory is None or memory.gone:
        raise UnknownId(f"rank {rank} has told nothing, or was removed", remedy="GET /state names the ranks")
    kafka, pools = event_producer(settings), PoolDirectory(settings)
    try:
        model = memory.progress.model
        writer = RankWriter(settings, kafka, rank, model, memory.incarnation, False, pools.epoch_of)
        writer.resume(memory.sequence, memory.digest, memory.ledger, memory.names)
        unknown = writer.change_state(changed, time.time_ns() // 1_000_000)
        if kafka.flush(PUBLISH_TIMEOUT_S) or writer.failed:
            raise KvStreamsError(f"Kafka did not take it: {writer.failed[0] if writer.failed else 'no answer'}")
        return unknown
    finally:
        pools.close()
