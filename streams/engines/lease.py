"""Which bridge feeds an engine, or instance of LMCache: the lease, as a state machine over `workers` (docs/bridges.md).

What lives here: the rules (pure; the clock is an argument). What must not: Kafka (registry_reader) and what a holder
does (bridge).

The log decides. A lease has a term. A bridge that takes over writes the next term; if two bridges write the same term,
the first record in the log wins. The order of the log thus serves as a compare-and-set. A bridge that reads a term
greater than its own has lost the lease. A lease has expired when a reader has seen no renewal for its length, *measured
by the reader's own clock since it read the last one*; clocks of different machines are never compared. A holder stops
before that: it measures from the moment at which it sent a renewal, which is earlier than any reader saw it, and uses
the renewal only after reading it back from the log.

The record belongs to the registry, and others write it as well (a cordon, a PUT). A bridge keeps what they wrote last
and changes only the lease. If a renewal and such a write cross in the log, the renewal is repeated on top of the write.

```
READING ──end of log──► WAITING ──lease free──► CLAIMING ──own claim read back──► HOLDING
                          ▲ ▲                      │ another's term came first        │ a greater term came
                          │ └──────────────────────┴──────────────────────────────────┘
                          └── registered again ── DISMISSED ◄── tombstone, from each of the other states
```
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from streams.core.workers import BridgeLease, Worker

#: Renewals per lease: two may be lost or late before another bridge takes over.
RENEWALS_PER_LEASE = 3

#: A holder publishes nothing after this share of a lease; the rest is time for its last records to reach the log.
OWN_SHARE = 2 / 3

#: Renewals of one term that are on their way at once. They are read back within milliseconds. The limit keeps a bridge
#: from queueing more while no broker answers.
RENEWALS_IN_FLIGHT_MAX = 8

#: Writes of any term that are recognised as our own when they are read back. An older write of ours is treated like one
#: of another bridge.
WRITES_TRACKED_MAX = 64

#: Other bridges whose last renewal is kept. Every start of a bridge adds a name.
BRIDGES_TRACKED_MAX = 64


class LeasePhase(enum.Enum):
    """The state of a bridge regarding one engine."""

    READING = "reading"
    WAITING = "waiting"
    CLAIMING = "claiming"
    HOLDING = "holding"
    DISMISSED = "dismissed"


class Leased(Protocol):
    """A record of the registry that a bridge leases."""

    @property
    def lease(self) -> BridgeLease | None:
        """The lease, None without a bridge."""


R = TypeVar("R", bound=Leased)


@dataclass(frozen=True, slots=True)
class Write(Generic[R]):
    """Instruction: write this record; None is its tombstone."""

    record: R | None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A write of ours that has not been read back. base: the number of the registration that it was based on."""

    sent_at_s: float
    base: int
    term: int


class Lease(Generic[R]):
    """One lease as one bridge sees it. Takes records and times, returns writes.

    Subclasses say what a holder changes in a record besides its lease.
    """

    def __init__(self, bridge: str, lease_s: float, renewal: int = 0) -> None:
        """bridge: a name that no other process has. lease_s: the length of the lease.

        renewal: the number of the process's last write of this record, if it had the lease before.
        """
        self.bridge = bridge
        self.phase = LeasePhase.READING
        self.term = 0  # of ours, once claimed
        self._lease_s = lease_s
        self._own: R | None = None
        self._fixed: tuple[str, ...] = ()
        self._base: R | None = None  # the registration that our writes add the lease to
        self._base_number = 0
        self._seen: dict[str, int] = {}  # other bridges' last renewals
        self._known: BridgeLease | None = None  # the lease in effect, ours or another bridge's
        self._known_at_s = 0.0
        self._sent: dict[int, _Sent] = {}
        self.renewal = renewal  # of our last write
        self._renew_at_s = 0.0
        self._confirmed_at_s: float | None = None  # when the last renewal that was read back was sent
        self._not_before_s = float("-inf")  # until then the previous holder may still publish

    def want(self, own: R, fixed: tuple[str, ...] = ()) -> None:
        """Claim the lease from now on whenever it is free. own: the registration to write if there is none yet.

        fixed: names of fields, in addition to the addresses, whose values replace those of a registration. Called
        again, it changes these fields, the addresses and the block size of what a holder has registered.
        """
        self._fixed = fixed
        changed = self._own is not None and own != self._own
        self._own = own
        if changed and self.phase in (LeasePhase.CLAIMING, LeasePhase.HOLDING):
            self._base, self._base_number = self._changed(self._base, own), self._base_number + 1
            self._renew_at_s = float("-inf")

    @property
    def registered(self) -> R | None:
        """The record as the registry has it; None if it has none, or has not been read to its end."""
        return self._base

    # -- what subclasses say -------------------------------------------------------------------------------------------

    def _claimed(self, registered: R | None, own: R) -> R:
        """Return the record that a claim writes."""
        raise NotImplementedError

    def _changed(self, registered: R | None, own: R) -> R:
        """Return the record that a holder writes after `want` was called again."""
        raise NotImplementedError

    def _with_lease(self, record: R, lease: BridgeLease) -> R:
        """Return a record with a lease."""
        raise NotImplementedError

    # -- records of the log --------------------------------------------------------------------------------------------

    def on_record(self, record: R | None, now_s: float) -> list[Write[R]]:
        """Take one record, in log order; None is its tombstone."""
        if record is None:
            return self._on_tombstone()
        lease = record.lease
        if lease is not None and lease.bridge == self.bridge and lease.renewal in self._sent:
            return self._on_own(lease, now_s)
        registration = self._is_registration(lease)
        if self._base is None or registration:
            self._base, self._base_number = record, self._base_number + 1
        self._renew_at_s = now_s  # a holder adds its lease to what another writer wrote
        if self.phase is LeasePhase.DISMISSED:
            self.phase = LeasePhase.WAITING
        if lease is not None and (lease.bridge != self.bridge or self._known is None) and self._takes_effect(lease):
            self._known, self._known_at_s = lease, now_s
            if self.phase in (LeasePhase.CLAIMING, LeasePhase.HOLDING):
                self._stop(LeasePhase.WAITING)
        return []

    def on_end(self) -> None:
        """Note that the topic has been read to its end."""
        if self.phase is LeasePhase.READING:
            self.phase = LeasePhase.WAITING

    def _is_registration(self, lease: BridgeLease | None) -> bool:
        """Return whether a record sets the worker's registration, and is not just a bridge's renewal.

        A writer that is not a bridge leaves the lease out or copies it, so its record has no renewal number or one that
        was seen before. A record with a new number is a bridge's renewal. That bridge may have been suspended and not
        have read later registrations yet, so its record must not undo them.
        """
        if lease is None:
            return True
        seen = self.renewal if lease.bridge == self.bridge else self._seen.pop(lease.bridge, -1)
        self._seen[lease.bridge] = max(seen, lease.renewal)
        if len(self._seen) > BRIDGES_TRACKED_MAX:
            del self._seen[next(iter(self._seen))]
        return lease.renewal <= seen

    def _takes_effect(self, lease: BridgeLease) -> bool:
        """Return whether a lease in the log takes effect: a greater term, or a renewal of the one in effect."""
        known = self._known
        if known is None or lease.term > known.term:
            return True
        return lease.term == known.term and lease.bridge == known.bridge and lease.renewal > known.renewal

    def _on_own(self, lease: BridgeLease, now_s: float) -> list[Write[R]]:
        sent = self._sent.pop(lease.renewal)
        if self.phase is LeasePhase.DISMISSED:
            return [Write(None)]  # this write crossed the deletion, and must not register the worker again
        if lease.term != self.term or not self._takes_effect(lease):
            return []
        if self._known is not None and self._known.bridge != self.bridge:
            # The other bridge may have renewed while our claim was on its way, and continues until it reads the claim.
            self._not_before_s = self._known_at_s + self._known.lease_ms / 1000
        self._known, self._known_at_s = lease, now_s
        self.phase = LeasePhase.HOLDING
        self._confirmed_at_s = sent.sent_at_s
        if sent.base != self._base_number:
            self._renew_at_s = now_s  # this write crossed another writer's, which must not be lost
        return []

    def _on_tombstone(self) -> list[Write[R]]:
        self._base, self._base_number = None, self._base_number + 1
        self._known = None  # every reader drops the lease here, so any term takes effect again
        if self.phase is not LeasePhase.READING:  # a bridge that starts after a deletion registers the worker again
            self._stop(LeasePhase.DISMISSED)
        return []

    def _stop(self, phase: LeasePhase) -> None:
        self.phase = phase
        self._confirmed_at_s = None

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Write[R]]:
        """Claim or renew the lease if that is due."""
        if self.phase is LeasePhase.WAITING and self._own is not None and self._is_free(now_s):
            # After a tombstone, any term takes effect. This process nevertheless uses no term twice: what publishes
            # under an earlier one must notice that it has ended.
            self.term = 1 + max(self.term, self._known.term if self._known else 0)
            self.phase = LeasePhase.CLAIMING
            self._base = self._claimed(self._base, self._own)
            return [self._write(now_s)]
        late = self.phase in (LeasePhase.CLAIMING, LeasePhase.HOLDING) and now_s >= self._renew_at_s
        if not late or sum(sent.term == self.term for sent in self._sent.values()) >= RENEWALS_IN_FLIGHT_MAX:
            return []
        return [self._write(now_s)]

    def may_publish(self, now_s: float) -> bool:
        """Return whether it is certain that no other bridge may publish now."""
        confirmed_at_s = self._confirmed_at_s
        if confirmed_at_s is None:
            return False
        return self._not_before_s <= now_s < confirmed_at_s + self._lease_s * OWN_SHARE

    def release(self) -> list[Write[R]]:
        """Give the lease up, so that the next bridge need not wait until it expires."""
        if self.phase is not LeasePhase.HOLDING:
            return []
        self._stop(LeasePhase.DISMISSED)
        return [Write(self._leased(lease_ms=0))]

    def _is_free(self, now_s: float) -> bool:
        known = self._known
        if known is None or known.bridge == self.bridge:
            return True
        return now_s >= self._known_at_s + known.lease_ms / 1000

    def _write(self, now_s: float) -> Write[R]:
        self.renewal += 1
        self._sent[self.renewal] = _Sent(now_s, self._base_number, self.term)
        if len(self._sent) > WRITES_TRACKED_MAX:
            del self._sent[next(iter(self._sent))]
        self._renew_at_s = now_s + self._lease_s / RENEWALS_PER_LEASE
        return Write(self._leased(round(self._lease_s * 1000)))

    def _leased(self, lease_ms: int) -> R:
        lease = BridgeLease(self.bridge, self.term, lease_ms, self.renewal + (lease_ms == 0))
        record = self._base or self._own
        assert record is not None  # only a bridge that wants the lease writes
        return self._with_lease(record, lease)


class EngineLease(Lease[Worker]):
    """The lease of an engine, in its worker's record."""

    @property
    def registered_model(self) -> str | None:
        """The model that the registry has for the worker; None if it has none, or has not been read to its end."""
        return None if self._base is None else self._base.model

    def _claimed(self, registered: Worker | None, own: Worker) -> Worker:
        return _addressed(registered, own, self._fixed)

    def _changed(self, registered: Worker | None, own: Worker) -> Worker:
        return _addressed(registered, own, self._fixed)

    def _with_lease(self, record: Worker, lease: BridgeLease) -> Worker:
        # Only the bridge knows the size of its engine's blocks, so no other writer can change it.
        return replace(record, lease=lease, block_size=record.block_size if self._own is None else self._own.block_size)


def _addressed(registered: Worker | None, own: Worker, fixed: tuple[str, ...]) -> Worker:
    """Return the registration with this bridge's addresses and adapters; everything else is an operator's choice.

    fixed: further fields that the operator has set at this bridge.
    """
    if registered is None:
        return own
    return replace(
        registered,
        url=own.url,
        model=own.model,
        block_size=own.block_size,
        dp_size=own.dp_size,
        dp_start=own.dp_start,
        events_endpoint=own.events_endpoint,
        replay_endpoint=own.replay_endpoint,
        lora_names=registered.lora_names if own.lora_names is None else own.lora_names,
        **{name: getattr(own, name) for name in fixed},
    )
