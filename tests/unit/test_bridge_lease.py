"""One bridge an engine: several lease machines on one simulated log, with clocks that have nothing in common."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from streams.core.ids import WorkerId
from streams.core.workers import BridgeLease, Worker, WorkerState
from streams.engines.lease import OWN_SHARE, EngineLease, LeasePhase, Write

LEASE_S = 6.0
WORKER = Worker(WorkerId(1), "http://e", "m", 16)


@dataclass
class Log:
    """One worker's records, in order."""

    records: list[Worker | None] = field(default_factory=list)

    @property
    def last(self) -> Worker:
        worker = self.records[-1]
        assert worker is not None
        return worker


class Node:
    """One bridge: its lease, its place in the log, its own clock. What is in flight has not reached the log."""

    def __init__(self, log: Log, name: str, skew_s: float = 0.0) -> None:
        self.log = log
        self.skew_s = skew_s
        self.lease = EngineLease(name, LEASE_S)
        self.lease.want(WORKER)
        self.read = 0
        self.in_flight: list[Worker | None] = []

    def perform(self, writes: list[Write]) -> None:
        self.in_flight += [write.worker for write in writes]

    def tick(self, at_s: float) -> None:
        self.perform(self.lease.tick(at_s + self.skew_s))

    def send(self) -> None:
        self.log.records += self.in_flight
        self.in_flight.clear()

    def receive(self, at_s: float) -> None:
        while self.read < len(self.log.records):
            self.read += 1
            self.perform(self.lease.on_record(self.log.records[self.read - 1], at_s + self.skew_s))
        self.lease.on_end()

    def step(self, at_s: float) -> None:
        self.receive(at_s)
        self.tick(at_s)
        self.send()
        self.receive(at_s)

    def may_publish(self, at_s: float) -> bool:
        return self.lease.may_publish(at_s + self.skew_s)


def test_the_first_bridge_claims_at_once_and_renews_every_third() -> None:
    """Nobody is waited for where nobody holds; three renewals fit into a lease."""
    log = Log()
    node = Node(log, "a")
    node.tick(0.0)
    assert not node.in_flight  # not before the log was read to its end
    node.step(0.0)
    assert node.lease.phase is LeasePhase.HOLDING and node.may_publish(0.0)
    assert log.last == replace(WORKER, lease=BridgeLease("a", 1, 6000, 1))
    for at_s in (1.9, 2.0, 3.9, 4.1):
        node.step(at_s)
    assert [record.lease.renewal for record in log.records if record and record.lease] == [1, 2, 3]


def test_a_claim_counts_only_once_it_is_read_back() -> None:
    """A write that has not reached the log allows nothing."""
    node = Node(Log(), "a")
    node.receive(0.0)
    node.tick(0.0)
    assert node.lease.phase is LeasePhase.CLAIMING and not node.may_publish(0.0)


def test_a_holder_stops_by_its_own_clock_before_anybody_can_take_over() -> None:
    """Its time counts from the sending of a renewal, not from its return."""
    node = Node(Log(), "a")
    node.receive(0.0)
    node.tick(0.0)
    node.send()
    node.receive(3.0)
    assert node.may_publish(LEASE_S * OWN_SHARE - 0.1)
    assert not node.may_publish(LEASE_S * OWN_SHARE)


def test_the_next_bridge_waits_a_whole_lease_since_it_read_the_last_renewal() -> None:
    """Whatever the machines' clocks say, and however old the record is."""
    log = Log()
    Node(log, "a").step(0.0)
    other = Node(log, "b", skew_s=-1_000_000.0)
    other.step(100.0)
    other.step(100.0 + LEASE_S - 0.1)
    assert not other.may_publish(100.0 + LEASE_S - 0.1)
    other.step(100.0 + LEASE_S)
    assert other.lease.phase is LeasePhase.HOLDING
    assert log.last.lease == BridgeLease("b", 2, 6000, 1)


def test_a_stopped_holder_has_lost_when_it_goes_on() -> None:
    """It may publish nothing before it knows, and its late renewal takes nothing back."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b", skew_s=77.0)
    a.step(0.0)
    b.step(0.1)
    b.step(0.1 + LEASE_S)
    assert b.lease.phase is LeasePhase.HOLDING
    assert not a.may_publish(7.0)
    a.tick(7.0)  # it renews before it has read what happened
    a.send()
    a.receive(7.0)
    assert a.lease.phase is LeasePhase.WAITING and not a.may_publish(7.0)
    b.step(7.1)
    assert b.may_publish(7.1)
    assert log.last.lease is not None and log.last.lease.bridge == "b"  # put beside what the other wrote, at once
    a.step(7.2)
    assert a.lease.phase is LeasePhase.WAITING


def test_of_two_claims_of_one_term_the_first_in_the_log_counts() -> None:
    """Both wrote before either read; one holds, the other waits, and nobody asks a third time."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    for node in (a, b):
        node.receive(0.0)
        node.tick(0.0)
    b.send()
    a.send()
    for node in (a, b):
        node.receive(0.0)
    assert (a.lease.phase, b.lease.phase) == (LeasePhase.WAITING, LeasePhase.HOLDING)


def test_what_others_write_is_kept_even_where_it_crosses_a_renewal() -> None:
    """A cordon that lands between a renewal's making and its arrival is written again on top of it."""
    log = Log()
    a = Node(log, "a")
    a.step(0.0)
    a.tick(2.0)  # made from the registration as it was
    log.records.append(replace(log.last, state=WorkerState.CORDONED, taints=("x",)))
    a.send()
    assert log.last.state is WorkerState.ACTIVE
    a.step(2.0)
    assert (log.last.state, log.last.taints) == (WorkerState.CORDONED, ("x",))
    a.step(4.1)
    assert (log.last.state, log.last.taints) == (WorkerState.CORDONED, ("x",))
    assert a.may_publish(4.1)


def test_a_stopped_holders_late_renewal_takes_no_word_back() -> None:
    """It knew nothing of the cordon that came while it was stopped; whoever holds now writes that again."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    a.step(0.0)
    b.step(0.0)
    log.records.append(replace(log.last, state=WorkerState.CORDONED))
    b.step(LEASE_S)
    states = [log.last.state]
    a.tick(LEASE_S + 1.0)
    a.send()
    states.append(log.last.state)
    b.step(LEASE_S + 1.0)
    states.append(log.last.state)
    assert states == [WorkerState.CORDONED, WorkerState.ACTIVE, WorkerState.CORDONED]
    assert log.last.lease is not None and log.last.lease.bridge == "b"


def test_a_copy_of_a_lease_is_no_renewal() -> None:
    """A router that cordons a dead bridge's worker does not keep its lease alive."""
    log = Log()
    Node(log, "a").step(0.0)
    b = Node(log, "b")
    b.step(0.0)
    log.records.append(replace(log.last, state=WorkerState.CORDONED))
    b.step(LEASE_S - 1.0)
    b.step(LEASE_S)
    assert b.lease.phase is LeasePhase.HOLDING
    assert log.last.state is WorkerState.CORDONED


def test_a_registration_without_a_lease_gets_the_holders_back() -> None:
    """PUT /workers knows nothing of bridges."""
    log = Log()
    a = Node(log, "a")
    a.step(0.0)
    log.records.append(replace(WORKER, taints=("y",)))
    a.step(0.5)
    assert log.last.lease is not None and log.last.taints == ("y",)
    assert a.may_publish(0.5)


def test_a_claim_updates_addresses_and_nothing_else() -> None:
    """An engine that moved is registered where it is; role, state and capacities are somebody's choice."""
    log = Log([replace(WORKER, url="http://old", state=WorkerState.CORDONED, kv_total_blocks=5)])
    Node(log, "a").step(0.0)
    assert (log.last.url, log.last.state, log.last.kv_total_blocks) == ("http://e", WorkerState.CORDONED, 5)


def test_a_deleted_worker_stays_deleted_until_somebody_registers_it() -> None:
    """A renewal that crossed the deletion is deleted again; a PUT brings the worker and its bridge back."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    a.step(0.0)
    b.step(0.0)
    a.tick(2.0)
    log.records.append(None)
    a.send()
    for node in (a, b):
        node.step(2.1)
        node.step(50.0)
    assert (a.lease.phase, b.lease.phase) == (LeasePhase.DISMISSED, LeasePhase.DISMISSED)
    assert log.records[-1] is None and not a.may_publish(2.1)
    log.records.append(WORKER)
    a.step(51.0)
    b.step(51.0)
    assert (a.lease.phase, b.lease.phase) == (LeasePhase.HOLDING, LeasePhase.WAITING)
    newcomer = Node(Log([None]), "c")  # deleted before it started: whoever starts a bridge wants the worker
    newcomer.step(0.0)
    assert newcomer.lease.phase is LeasePhase.HOLDING


def test_a_lease_given_up_is_free_at_once() -> None:
    """A bridge that is asked to stop keeps nobody waiting."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    a.step(0.0)
    b.step(0.0)
    a.perform(a.lease.release())
    a.send()
    assert not a.may_publish(0.1)
    b.step(0.1)
    assert b.lease.phase is LeasePhase.HOLDING


def test_an_engine_that_nobody_wants_yet_is_not_claimed() -> None:
    """A bridge whose engine has not answered leaves the lease to one whose has."""
    lease = EngineLease("a", LEASE_S)
    lease.on_end()
    assert lease.tick(0.0) == []


@pytest.mark.parametrize("seed", range(60))
def test_never_two_holders_whatever_stops_and_goes_on(seed: int) -> None:
    """Bridges are stopped for any time, their writes are late; no two may publish at one moment, and one does again.

    Reading is prompt for who runs, and a write arrives within the third of a lease that holders leave for it.
    """
    rng = random.Random(seed)
    print("seed", seed)
    log = Log()
    nodes = [Node(log, name, rng.uniform(-1e6, 1e6)) for name in "abc"]
    stopped_until = [0.0] * len(nodes)
    at_s = 0.0
    published = 0
    while at_s < 200.0:
        at_s += rng.uniform(0.05, 0.3)
        quiet = at_s > 170.0
        for number, node in enumerate(nodes):
            if not quiet and rng.random() < 0.01:
                stopped_until[number] = at_s + rng.uniform(0.0, 20.0)
            if at_s < stopped_until[number] and not quiet:
                continue
            node.receive(at_s)
            node.tick(at_s)
            if quiet or rng.random() < 0.7:
                node.send()
                node.receive(at_s)
        if rng.random() < 0.02:
            copied = next((record for record in reversed(log.records) if record), None)
            log.records.append(replace(copied or WORKER, taints=(str(at_s),)))
        publishing = [node for node in nodes if node.may_publish(at_s)]
        assert len(publishing) <= 1
        published += len(publishing)
    assert published > 100
    assert sum(node.may_publish(at_s) for node in nodes) == 1
