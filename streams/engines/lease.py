"""One bridge an engine: who holds the lease, as a state machine over `workers` (docs/architecture.md, Bridges).

What lives here: the rules (pure; the clock is passed in). What must not: Kafka (inbox) and what a holder does (bridge).

The log decides. A lease has a term; whoever takes one over writes the next term, and of two that write the same one the
first in the log has it: a compare-and-set, made of log order. Whoever reads a greater term than his own has lost. A
lease is over when a reader has seen no renewal for its length *by his own clock since he read the last one*, so clocks
of machines are never compared. A holder stops by himself before that: he counts from the moment at which he sent a
renewal, which is before anybody read it, and only once it came back to him in the log.

A record is the registry's, and others write it too (a cordon, a PUT): whatever they wrote last is kept, only the lease
is put beside it. Where a renewal and such a write crossed in the log, the renewal is repeated on top of it.

```
READING ──end of log──► WAITING ──lease over──► CLAIMING ──own claim read back──► HOLDING
                          ▲ ▲                      │ another's term came first        │ a greater term came
                          │ └──────────────────────┴──────────────────────────────────┘
                          └── registered again ── DISMISSED ◄── tombstone, from each of the other states
```
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from streams.core.workers import BridgeLease, Worker

#: A holder renews this often in a lease: two renewals may be lost or late before anybody takes over.
RENEWALS_PER_LEASE = 3

#: A holder publishes nothing beyond this share of a lease; the rest is for what he has sent already to reach the log.
OWN_SHARE = 2 / 3

#: Renewals of one term on their way at once. They come back within milliseconds; without a broker no more are queued.
RENEWALS_IN_FLIGHT_MAX = 8

#: Writes of any term that may still come back and are then known as ours; older ones pass for somebody's.
WRITES_TRACKED_MAX = 64

#: Other bridges whose last renewal is kept; each start of a bridge is a new name.
BRIDGES_TRACKED_MAX = 64


class LeasePhase(enum.Enum):
    """Where a bridge stands with one engine."""

    READING = "reading"
    WAITING = "waiting"
    CLAIMING = "claiming"
    HOLDING = "holding"
    DISMISSED = "dismissed"


@dataclass(frozen=True, slots=True)
class Write:
    """Instruction: write this record of the worker; None is its tombstone."""

    worker: Worker | None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A write of ours on its way. base: the registration that it was put on, by number."""

    sent_at_s: float
    base: int
    term: int


class EngineLease:
    """One engine's lease as one bridge sees it. Records and moments in, writes out."""

    def __init__(self, bridge: str, lease_s: float) -> None:
        """bridge: a name that no other process has."""
        self.bridge = bridge
        self.phase = LeasePhase.READING
        self.term = 0  # of ours, once claimed
        self._lease_s = lease_s
        self._own: Worker | None = None
        self._base: Worker | None = None  # the last registration that somebody else wrote, or that we found
        self._base_number = 0
        self._seen: dict[str, int] = {}  # other bridges' last renewals
        self._known: BridgeLease | None = None  # the lease that counts, ours or another's
        self._known_at_s = 0.0
        self._sent: dict[int, _Sent] = {}
        self._renewal = 0
        self._renew_at_s = 0.0
        self._confirmed_at_s: float | None = None  # when the last renewal that came back was sent
        self._not_before_s = float("-inf")  # until then whoever held it before may publish still

    def want(self, own: Worker) -> None:
        """From now on the lease is claimed when it is free. own: the registration where there is none yet."""
        self._own = own

    # -- what the log says ---------------------------------------------------------------------------------------------

    def on_record(self, worker: Worker | None, now_s: float) -> list[Write]:
        """Take one record of this worker, in log order; None is its tombstone."""
        if worker is None:
            return self._on_tombstone()
        lease = worker.lease
        if lease is not None and lease.bridge == self.bridge and lease.renewal in self._sent:
            return self._on_own(lease, now_s)
        registration = self._is_registration(lease)
        if self._base is None or registration:
            self._base, self._base_number = worker, self._base_number + 1
        self._renew_at_s = now_s  # a holder puts his lease on what somebody else wrote
        if self.phase is LeasePhase.DISMISSED:
            self.phase = LeasePhase.WAITING
        if lease is not None and (lease.bridge != self.bridge or self._known is None) and self._counts(lease):
            self._known, self._known_at_s = lease, now_s
            if self.phase in (LeasePhase.CLAIMING, LeasePhase.HOLDING):
                self._stop(LeasePhase.WAITING)
        return []

    def on_end(self) -> None:
        """The topic has been read to its end."""
        if self.phase is LeasePhase.READING:
            self.phase = LeasePhase.WAITING

    def _is_registration(self, lease: BridgeLease | None) -> bool:
        """Whether a record is somebody's word on the worker, and no bridge's renewal on top of what it knew then.

        Who is no bridge leaves the lease out or copies it, so that its renewal was seen before. One that is new may
        be a stopped holder's, who has not read yet what was said meanwhile.
        """
        if lease is None:
            return True
        seen = self._renewal if lease.bridge == self.bridge else self._seen.pop(lease.bridge, -1)
        self._seen[lease.bridge] = max(seen, lease.renewal)
        if len(self._seen) > BRIDGES_TRACKED_MAX:
            del self._seen[next(iter(self._seen))]
        return lease.renewal <= seen

    def _counts(self, lease: BridgeLease) -> bool:
        """Whether a lease in the log is news: a greater term, or a renewal of the one that counts."""
        known = self._known
        if known is None or lease.term > known.term:
            return True
        return lease.term == known.term and lease.bridge == known.bridge and lease.renewal > known.renewal

    def _on_own(self, lease: BridgeLease, now_s: float) -> list[Write]:
        sent = self._sent.pop(lease.renewal)
        if self.phase is LeasePhase.DISMISSED:
            return [Write(None)]  # it crossed the deletion, and must not register the worker again
        if lease.term != self.term or not self._counts(lease):
            return []
        if self._known is not None and self._known.bridge != self.bridge:
            # It may have renewed while our claim was on its way, and goes on until it reads that.
            self._not_before_s = self._known_at_s + self._known.lease_ms / 1000
        self._known, self._known_at_s = lease, now_s
        self.phase = LeasePhase.HOLDING
        self._confirmed_at_s = sent.sent_at_s
        if sent.base != self._base_number:
            self._renew_at_s = now_s  # it crossed somebody else's write, which must not be lost
        return []

    def _on_tombstone(self) -> list[Write]:
        self._base, self._base_number = None, self._base_number + 1
        self._known = None  # every reader forgets it here, so terms begin again for all of them
        if self.phase is not LeasePhase.READING:  # deleted before our time: whoever starts a bridge wants it back
            self._stop(LeasePhase.DISMISSED)
        return []

    def _stop(self, phase: LeasePhase) -> None:
        self.phase = phase
        self._confirmed_at_s = None

    # -- what time says ------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Write]:
        """Claim or renew where it is time."""
        if self.phase is LeasePhase.WAITING and self._own is not None and self._is_over(now_s):
            self.term = 1 + (self._known.term if self._known else 0)
            self.phase = LeasePhase.CLAIMING
            self._base = _addressed(self._base, self._own)
            return [self._write(now_s)]
        late = self.phase in (LeasePhase.CLAIMING, LeasePhase.HOLDING) and now_s >= self._renew_at_s
        if not late or sum(sent.term == self.term for sent in self._sent.values()) >= RENEWALS_IN_FLIGHT_MAX:
            return []
        return [self._write(now_s)]

    def may_publish(self, now_s: float) -> bool:
        """Whether what is published now is certain to be nobody else's turn."""
        confirmed_at_s = self._confirmed_at_s
        if confirmed_at_s is None:
            return False
        return self._not_before_s <= now_s < confirmed_at_s + self._lease_s * OWN_SHARE

    def release(self) -> list[Write]:
        """Give the lease up at once; the next bridge need not wait for its end."""
        if self.phase is not LeasePhase.HOLDING:
            return []
        self._stop(LeasePhase.DISMISSED)
        return [Write(self._leased(lease_ms=0))]

    def _is_over(self, now_s: float) -> bool:
        known = self._known
        if known is None or known.bridge == self.bridge:
            return True
        return now_s >= self._known_at_s + known.lease_ms / 1000

    def _write(self, now_s: float) -> Write:
        self._renewal += 1
        self._sent[self._renewal] = _Sent(now_s, self._base_number, self.term)
        if len(self._sent) > WRITES_TRACKED_MAX:
            del self._sent[next(iter(self._sent))]
        self._renew_at_s = now_s + self._lease_s / RENEWALS_PER_LEASE
        return Write(self._leased(round(self._lease_s * 1000)))

    def _leased(self, lease_ms: int) -> Worker:
        lease = BridgeLease(self.bridge, self.term, lease_ms, self._renewal + (lease_ms == 0))
        worker = self._base or self._own
        assert worker is not None  # only who wants the lease writes
        return replace(worker, lease=lease)


def _addressed(found: Worker | None, own: Worker) -> Worker:
    """What is registered, at the addresses that this bridge was given; everything else is somebody's choice."""
    if found is None:
        return own
    return replace(
        found,
        url=own.url,
        model=own.model,
        block_size=own.block_size,
        dp_size=own.dp_size,
        events_endpoint=own.events_endpoint,
        replay_endpoint=own.replay_endpoint,
    )
