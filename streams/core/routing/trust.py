"""How far an answer can be trusted: the answer modes, the reasons why an answer is degraded, and the value of both.

What lives here: values that answers, counts, metrics and the decision log share (docs/trust.md). What must not: what
they follow from (router_api.knowledge.trust_tracker).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from streams.core.ids import WorkerId


class AnswerMode(enum.StrEnum):
    """How far an answer's overlap can be trusted (docs/architecture.md)."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    EXACT = "exact"
    DEGRADED = "degraded"
    APPROXIMATE = "approximate"
    FALLBACK = "fallback"


class DegradedReason(enum.StrEnum):
    """Why an answer is not exact: the first reason found, for one eligible rank or for all of them."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    NO_EVENTS_YET = "no_events_yet"  # no event of the rank is known to have arrived, so its cache is unknown
    BRIDGE_SILENT = "bridge_silent"  # the rank's bridge was not heard from, or does not feed the rank yet
    FEED_BEHIND = "feed_behind"  # the rank's engine published batches that its bridge has not passed on yet
    EVENTS_LOST = "events_lost"  # a batch was lost, or a stored block's parent was never seen
    REMOVED = "removed"  # the rank was removed, and its worker is still registered, or registered again
    OVER_CAPACITY = "over_capacity"  # this router's index is over capacity and lacks a record of the rank
    OWNER_SILENT = "owner_silent"  # no partition record was received for stale_after_ms
    # The partition owner lags behind its source by more than behind_after_ms, or this router behind the owner, or it is
    # not known that they do not.
    OWNER_BEHIND = "owner_behind"
    LABELS_OVER_CAPACITY = "labels_over_capacity"  # the request queries labels, and some of the rank's were dropped
    POOLED_OVER_CAPACITY = "pooled_over_capacity"  # rows of pooled blocks were dropped
    POOLED_OWNER_SILENT = "pooled_owner_silent"
    POOLED_OWNER_BEHIND = "pooled_owner_behind"
    # A rank that put blocks of the model into a pool is itself `no_events_yet`, `bridge_silent`, `feed_behind` or
    # `events_lost`, so that their evictions may be missing.
    POOLED_RANK_UNKNOWN = "pooled_rank_unknown"
    BOOKINGS_NOT_IN_SYNC = "bookings_not_in_sync"  # Kafka is unreachable; routers lack each other's bookings
    # The rank's engine found less than was promised, too often (routing.audit). The answer is `approximate`, the only
    # one with a reason that is not `degraded`.
    AUDIT_DISAGREES = "audit_disagrees"


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an answer can be trusted. reason: why it is `degraded`, or AUDIT_DISAGREES; otherwise None."""

    mode: AnswerMode
    reason: DegradedReason | None = None


class TrustSnapshot(NamedTuple):
    """What the trust in an overlap depends on besides the records. It is taken before the overlap is read.

    recoveries: how often a rank or an owner of a partition could be trusted again so far. pooled_recoveries: the same
    for owners of pooled blocks. bridge_silent: workers whose bridge is silent or does not feed them. run_changes: how
    many records of runs were folded.
    """

    recoveries: int
    pooled_recoveries: int
    bridge_silent: frozenset[WorkerId] = frozenset()
    taken_at_ms: int = 0
    run_changes: int = 0


# One value of each kind is shared, since every answer has one.
EXACT = Trust(AnswerMode.EXACT)
APPROXIMATE = Trust(AnswerMode.APPROXIMATE)
FALLBACK = Trust(AnswerMode.FALLBACK)
DISAGREEING = Trust(AnswerMode.APPROXIMATE, DegradedReason.AUDIT_DISAGREES)
DEGRADED = {reason: Trust(AnswerMode.DEGRADED, reason) for reason in DegradedReason}
NOT_IN_SYNC = DEGRADED[DegradedReason.BOOKINGS_NOT_IN_SYNC]
