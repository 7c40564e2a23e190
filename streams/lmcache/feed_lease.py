"""Which bridge passes a feed of LMCache on: the lease in the feed's record (pure).

What lives here: what a holder writes besides its lease. What must not: the rules of a lease (engines.lease).
"""

from __future__ import annotations

from dataclasses import replace

from streams.core.workers import BridgeLease
from streams.engines.lease import Lease
from streams.lmcache.feeds import KnownFeed


class FeedLease(Lease[KnownFeed]):
    """The lease of a feed. A claim keeps what the registry says; after that, the holder says where it is."""

    def _claimed(self, registered: KnownFeed | None, own: KnownFeed) -> KnownFeed:
        return registered or own

    def _changed(self, registered: KnownFeed | None, own: KnownFeed) -> KnownFeed:  # noqa: ARG002 - the signature of every lease
        return own

    def _with_lease(self, record: KnownFeed, lease: BridgeLease) -> KnownFeed:
        return replace(record, lease=lease)

    def _is_registration(self, lease: BridgeLease | None) -> bool:
        """Whether a record replaces what this bridge knows: the holder of the lease says what has been passed on."""
        return lease is None or self._known is None or lease.term >= self._known.term
