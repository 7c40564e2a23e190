"""A CXL transition that a script publishes, for a rank whose publisher or bridge is another process.

What lives here: resolving engine hashes by the rank's state on Kafka, as a starting bridge does, writing the transition
after the rank's last batch, and waiting for the agents' verdict. What must not: deciding whether the transition is
legal (the agents do).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import RankId
from streams.cxl.events import CxlStateChanged
from streams.cxl.pool_registry import PoolDirectory
from streams.engines.publisher import PUBLISH_TIMEOUT_S
from streams.engines.rank_records import event_producer
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import recover_ranks
from streams.engines.verdicts import TransitionVerdict, VerdictWatch
from streams.errors import KvStreamsError, UnknownId
from streams.kafka.clients import require_topic
from streams.settings import ScopeSettings
from streams.topics import topics

#: The error for an unknown pool lists at most this many registered pools.
_NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class SentTransition:
    """The result of a script's transition.

    unknown: hashes that name no block of the rank; nothing was published for these. verdict: None if the caller did not
    wait, or nothing was published.
    """

    unknown: list[int]
    verdict: TransitionVerdict | None


def send_transition(
    settings: ScopeSettings,
    rank: RankId,
    changed: CxlStateChanged,
    *,
    any_pool: bool = False,
    wait_s: float | None = None,
) -> SentTransition:
    """Publish that blocks of a rank enter a state.

    any_pool: publish even if the registry does not have the pool yet, or has it as lost. wait_s: how long to wait for
    the agents' verdict, None for not at all. Raises UnknownId for a rank that has published nothing, and for a pool
    that the registry does not have or has as lost; KvStreamsError if Kafka does not take the record.
    """
    require_topic(settings, topics(settings).cxl_events.name)
    with contextlib.ExitStack() as opened:
        pools = PoolDirectory(settings)
        opened.callback(pools.close)
        if not any_pool:
            check_pool(pools, changed)
        recovered = recover_ranks(settings, rank.worker_id).get(rank.dp_rank)
        if recovered is None or recovered.is_removed:
            raise UnknownId(f"rank {rank} has published nothing, or was removed", remedy="GET /state lists the ranks")
        watch = None if wait_s is None else opened.enter_context(VerdictWatch(settings, rank.worker_id))
        kafka = event_producer(settings)
        model = recovered.progress.model
        writer = RankWriter(settings, kafka, rank, model, recovered.incarnation, False, pools.epoch_of)
        writer.resume(recovered.sequence, recovered.digest, recovered.ledger, recovered.names)
        sent_at: list[int] = []
        writer.records.transitions_at = sent_at
        unknown = writer.change_state(changed, time.time_ns() // 1_000_000)
        writer.records.send_within(PUBLISH_TIMEOUT_S)
        if kafka.flush(PUBLISH_TIMEOUT_S) or writer.records.failed:
            raise KvStreamsError(
                f"Kafka did not take the record: {writer.records.failed[0] if writer.records.failed else 'no answer'}"
            )
        if watch is None or wait_s is None or not sent_at:
            return SentTransition(unknown, None)
        return SentTransition(unknown, watch.verdict(sent_at, wait_s))


def check_pool(pools: PoolDirectory, changed: CxlStateChanged) -> None:
    """Raise UnknownId for a pool that the registry does not have, and for a lost pool that blocks are to enter."""
    if changed.pool_id is None:
        return
    known = pools.pools()
    pool = known.get(changed.pool_id)
    if pool is None:
        raise UnknownId(
            f"no pool {changed.pool_id} is registered; there are: {', '.join(sorted(known)[:_NAMED_MAX]) or 'none'}",
            remedy="`kvstreams cxl pool` registers one; --force publishes the transition anyway",
        )
    if pool.lost and changed.state is CxlMemoryState.IN_TRANSIT:
        raise UnknownId(
            f"pool {changed.pool_id} is lost",
            remedy="`kvstreams cxl pool` with its members brings it back; --force publishes the transition anyway",
        )
