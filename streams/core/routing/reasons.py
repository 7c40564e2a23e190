"""Why a worker is not exact or gets no requests, and what an operator does about it, in sentences.

What lives here: the texts that the live page, `kvstreams top` and the doctor share. What must not: finding out which of
them applies (router_api.knowledge.trust_tracker), and the faults behind a reason (docs/trust.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from streams.core.routing.trust import AnswerMode, DegradedReason


class Explanation(NamedTuple):
    """What is the case, and what an operator does about it. Both are whole sentences."""

    meaning: str
    remedy: str


#: Of every reason, and of the states that GET /live gives a worker without a reason, except `exact`.
EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType(
    {
        DegradedReason.NO_EVENTS_YET: Explanation(
            "No event of a rank has arrived yet, so the router does not know its cache.",
            "Check events= and replay= of its --engine option. An idle engine without a replay socket stays so until "
            "its next request.",
        ),
        DegradedReason.BRIDGE_SILENT: Explanation(
            "The bridge that feeds a rank is silent, or does not feed the rank yet.",
            "Check that the bridge runs and reaches Kafka and the engine.",
        ),
        DegradedReason.FEED_BEHIND: Explanation(
            "The engine has published events that its bridge has not passed on yet.",
            "Its bridge lags: give it more processor, or divide its engines among several bridges.",
        ),
        DegradedReason.EVENTS_LOST: Explanation(
            "Events of a rank were lost, so evictions or blocks may be missing.",
            "Give the engine a replay socket. A restatement, a clear or a restart of the engine ends it.",
        ),
        DegradedReason.REMOVED: Explanation(
            "The rank was removed, and its bridge has published nothing since.",
            "Restart its bridge, or start one, or remove the worker with DELETE /workers/{id}.",
        ),
        DegradedReason.OVER_CAPACITY: Explanation(
            "The index of this router is full and lacks records of a rank.",
            "Use more tokens per block, or fewer engines per scope.",
        ),
        DegradedReason.OWNER_SILENT: Explanation(
            "The Faust worker that owns the partition is silent.",
            "Check that a Faust worker runs and reaches Kafka.",
        ),
        DegradedReason.OWNER_BEHIND: Explanation(
            "The index lags behind the events of a rank.",
            "Check the Faust workers; they lag behind the events. Kafka may also be slow or away.",
        ),
        DegradedReason.LABELS_OVER_CAPACITY: Explanation(
            "Labels of experts were dropped because there were too many.",
            "Report fewer labels per block. Requests without a moe_query are not affected.",
        ),
        DegradedReason.POOLED_OVER_CAPACITY: Explanation(
            "Rows of pooled blocks were dropped because there were too many.",
            "Use fewer pools or smaller ones per scope. Requests without pooled blocks are not affected.",
        ),
        DegradedReason.POOLED_OWNER_SILENT: Explanation(
            "The Faust worker that owns pooled blocks is silent.",
            "Check that a Faust worker runs and reaches Kafka.",
        ),
        DegradedReason.POOLED_OWNER_BEHIND: Explanation(
            "The table of pooled blocks lags behind its events.",
            "Check the Faust workers; they lag behind the events.",
        ),
        DegradedReason.POOLED_RANK_UNKNOWN: Explanation(
            "A rank with blocks in a pool is not known, so evictions from the pool may be missing.",
            "Look for the rank that is degraded itself, and follow its reason.",
        ),
        DegradedReason.BOOKINGS_NOT_IN_SYNC: Explanation(
            "Kafka does not answer, so routers do not see each other's bookings.",
            "Check Kafka; the router's log says since when it does not answer.",
        ),
        DegradedReason.AUDIT_DISAGREES: Explanation(
            "The engine found fewer cached blocks than the index has, too often.",
            "The engine has evicted blocks without reporting it, or something else sends it requests that change its "
            "cache. Compare its version with docs/engines.md, reset its prefix cache or restart it, and report it.",
        ),
        AnswerMode.APPROXIMATE: Explanation(
            "Blocks of a rank are predicted, or known only in part.",
            "Nothing is broken: docs/trust.md lists the causes, such as an engine without events.",
        ),
        "cordoned": Explanation(
            "An operator keeps new requests from the worker.",
            "DELETE /workers/{id}/cordon ends it.",
        ),
        "wrong_block_size": Explanation(
            "The worker's blocks have another size than the model's, so it gets no requests.",
            "Start the engine with the block size of the scope, or give it a scope of its own.",
        ),
        "silent": Explanation(
            "The worker was not heard from within its lease, so it gets no requests.",
            "Check the engine and the bridge that feeds it.",
        ),
        "avoided": Explanation(
            "A client reported that the worker failed, so requests avoid it for a short time.",
            "It ends by itself. If it comes back, check the engine.",
        ),
    }
)
