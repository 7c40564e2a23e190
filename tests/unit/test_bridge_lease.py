"""One bridge per engine: several leases on one simulated log, with clocks that are not synchronised."""

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
    """One bridge: its lease, its position in the log, its clock, and its writes that have not reached the log."""

    def __init__(self, log: Log, name: str, skew_s: float = 0.0) -> None:
        self.log = log
        self.skew_s = skew_s
        self.lease = EngineLease(name, LEASE_S)
        self.lease.want(WORKER)
        self.read = 0
        self.in_flight: list[Worker | None] = []

    def perform(self, writes: list[Write[Worker]]) -> None:
        self.in_flight += [write.record for write in writes]

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


def test_the_first_bridge_claims_at_once_and_renews_three_times_per_lease() -> None:
    """A bridge claims a lease that no bridge holds as soon as it has read the log to its end."""
    log = Log()
    node = Node(log, "a")
    node.tick(0.0)
    assert not node.in_flight  # the log has not been read to its end yet
    node.step(0.0)
    assert node.lease.phase is LeasePhase.HOLDING and node.may_publish(0.0)
    assert log.last == replace(WORKER, lease=BridgeLease("a", 1, 6000, 1))
    for at_s in (1.9, 2.0, 3.9, 4.1):
        node.step(at_s)
    assert [record.lease.renewal for record in log.records if record and record.lease] == [1, 2, 3]


def test_a_claim_takes_effect_only_when_it_is_read_back() -> None:
    """A bridge whose claim has not reached the log may not publish."""
    node = Node(Log(), "a")
    node.receive(0.0)
    node.tick(0.0)
    assert node.lease.phase is LeasePhase.CLAIMING and not node.may_publish(0.0)


def test_a_holder_stops_by_its_own_clock_before_another_bridge_can_take_over() -> None:
    """The holder measures from the moment at which it sent a renewal, not from when it read the renewal back."""
    node = Node(Log(), "a")
    node.receive(0.0)
    node.tick(0.0)
    node.send()
    node.receive(3.0)
    assert node.may_publish(LEASE_S * OWN_SHARE - 0.1)
    assert not node.may_publish(LEASE_S * OWN_SHARE)


def test_the_next_bridge_waits_a_whole_lease_after_it_read_the_last_renewal() -> None:
    """The wait does not depend on the machines' clocks, nor on the age of the record."""
    log = Log()
    Node(log, "a").step(0.0)
    other = Node(log, "b", skew_s=-1_000_000.0)
    other.step(100.0)
    other.step(100.0 + LEASE_S - 0.1)
    assert not other.may_publish(100.0 + LEASE_S - 0.1)
    other.step(100.0 + LEASE_S)
    assert other.lease.phase is LeasePhase.HOLDING
    assert log.last.lease == BridgeLease("b", 2, 6000, 1)


def test_a_holder_that_was_stopped_too_long_has_lost_the_lease() -> None:
    """A stopped holder publishes nothing before it finds that out, and its late renewal does not restore its lease."""
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
    assert log.last.lease is not None and log.last.lease.bridge == "b"  # the holder repeats its renewal at once
    a.step(7.2)
    assert a.lease.phase is LeasePhase.WAITING


def test_a_term_is_not_used_again_after_a_deletion() -> None:
    """What publishes under the term before notices that the worker was deleted and registered again."""
    log = Log()
    node = Node(log, "a")
    node.step(0.0)
    terms = [node.lease.term]
    for at_s in (1.0, 2.0):
        log.records += [None, WORKER]
        node.step(at_s)
        assert node.lease.phase is LeasePhase.HOLDING and node.may_publish(at_s)
        terms.append(node.lease.term)
    assert terms == [1, 2, 3]


def test_the_first_of_two_claims_of_one_term_wins() -> None:
    """If two bridges write the same term before either reads the other's, the order in the log decides."""
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


def test_a_cordon_that_crosses_a_renewal_is_kept() -> None:
    """The holder writes the cordon again on top of the renewal that it had made before it read the cordon."""
    log = Log()
    a = Node(log, "a")
    a.step(0.0)
    a.tick(2.0)  # based on the registration before the cordon
    log.records.append(replace(log.last, state=WorkerState.CORDONED, taints=("x",)))
    a.send()
    assert log.last.state is WorkerState.ACTIVE
    a.step(2.0)
    assert (log.last.state, log.last.taints) == (WorkerState.CORDONED, ("x",))
    a.step(4.1)
    assert (log.last.state, log.last.taints) == (WorkerState.CORDONED, ("x",))
    assert a.may_publish(4.1)


def test_a_bridge_that_lists_adapters_registers_them() -> None:
    """An operator's list is kept by a bridge that lists none, and replaced by one that does."""
    log = Log()
    a = Node(log, "a")
    a.step(0.0)
    log.records.append(replace(log.last, lora_names=("x",)))
    a.step(2.0)
    a.step(4.1)
    assert log.last.lora_names == ("x",)
    a.lease.want(replace(WORKER, lora_names=("y",)))
    a.step(6.2)
    assert log.last.lora_names == ("y",)


def test_a_stopped_holders_late_renewal_does_not_undo_a_cordon() -> None:
    """The renewal is based on the registration before the cordon; the new holder writes the cordon again."""
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


def test_a_copy_of_a_lease_is_not_a_renewal() -> None:
    """A router that cordons the worker of a crashed bridge does not extend its lease."""
    log = Log()
    Node(log, "a").step(0.0)
    b = Node(log, "b")
    b.step(0.0)
    log.records.append(replace(log.last, state=WorkerState.CORDONED))
    b.step(LEASE_S - 1.0)
    b.step(LEASE_S)
    assert b.lease.phase is LeasePhase.HOLDING
    assert log.last.state is WorkerState.CORDONED


def test_the_holder_adds_its_lease_to_a_registration_without_one() -> None:
    """A PUT of the worker has no lease, and its other fields are kept."""
    log = Log()
    a = Node(log, "a")
    a.step(0.0)
    log.records.append(replace(WORKER, taints=("y",)))
    a.step(0.5)
    assert log.last.lease is not None and log.last.taints == ("y",)
    assert a.may_publish(0.5)


def test_a_claim_updates_addresses_and_nothing_else() -> None:
    """An engine that moved gets its new addresses; role, state and capacities are the operator's choice."""
    log = Log([replace(WORKER, url="http://old", state=WorkerState.CORDONED, kv_total_blocks=5)])
    Node(log, "a").step(0.0)
    assert (log.last.url, log.last.state, log.last.kv_total_blocks) == ("http://e", WorkerState.CORDONED, 5)


def test_a_deleted_worker_stays_deleted_until_it_is_registered_again() -> None:
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
    newcomer = Node(Log([None]), "c")  # a bridge that starts after the deletion registers the worker
    newcomer.step(0.0)
    assert newcomer.lease.phase is LeasePhase.HOLDING


def test_a_released_lease_is_free_at_once() -> None:
    """The next bridge does not wait when a bridge stops in an orderly way."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    a.step(0.0)
    b.step(0.0)
    a.perform(a.lease.release())
    a.send()
    assert not a.may_publish(0.1)
    b.step(0.1)
    assert b.lease.phase is LeasePhase.HOLDING


def test_a_bridge_claims_no_lease_before_it_wants_one() -> None:
    """A bridge that has not reached the engine leaves the lease to a bridge that has."""
    lease = EngineLease("a", LEASE_S)
    lease.on_end()
    assert lease.tick(0.0) == []


@pytest.mark.parametrize("seed", range(60))
def test_no_two_bridges_may_publish_at_once_whatever_stops_and_continues(seed: int) -> None:
    """Bridges stop for any time and their writes are late; never may two publish at once, and in the end one does.

    A running bridge reads promptly, and its writes arrive within the third of a lease that holders leave for them.
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


def test_a_holder_that_learns_the_engines_block_size_registers_it_at_once() -> None:
    """The next tick writes the size under the same term, and no other writer can change it afterwards."""
    log = Log()
    node = Node(log, "a")
    node.step(0.0)
    node.lease.want(replace(WORKER, block_size=32))
    node.step(0.1)
    assert (log.last.block_size, log.last.lease) == (32, BridgeLease("a", 1, 6000, 2))
    log.records.append(replace(log.last, taints=("x",), block_size=16))  # a router that had not read the size yet
    node.step(0.2)
    assert (log.last.block_size, log.last.taints) == (32, ("x",))
    node.lease.want(WORKER)
    node.step(0.3)
    assert (log.last.block_size, log.last.taints) == (16, ("x",))


def test_a_bridge_that_waits_registers_the_block_size_when_it_takes_over() -> None:
    """A block size that is learnt without the lease is not written before the claim."""
    log = Log()
    a, b = Node(log, "a"), Node(log, "b")
    a.step(0.0)
    b.step(0.0)
    b.lease.want(replace(WORKER, block_size=32))
    b.step(0.1)
    assert len(log.records) == 1
    b.step(0.1 + LEASE_S)
    assert (log.last.block_size, log.last.lease) == (32, BridgeLease("b", 2, 6000, 1))
