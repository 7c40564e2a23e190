"""Routers of some models: what they keep of the index and of bookings, and what they read again (`models`)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, Tier, WorkerId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.reducer.ordering import Health, Progress
from streams.core.runs import Run
from streams.core.workers import Worker
from streams.errors import UnknownModel
from streams.kafka.clients import Record, partition_of, worker_key
from streams.kafka.records import encode_load, encode_worker
from streams.lab.engines.held_chains import runs_of_chain
from streams.router_api.deciding.router import Router
from streams.router_api.knowledge.served_models import Returning
from streams.router_api.knowledge.view import View
from streams.router_api.messages.requests import RouteRequest
from streams.router_api.sharing.own_bookings import Content
from streams.router_api.sharing.skipped_bookings import ID_BYTES, SkippedBookings
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, RUN_KEY, decode_progress, decode_run, encode_progress, encode_run
from tests.helpers.local_router import random_blocks

N_PARTITIONS = 2
MODELS = ("a", "b", "c")
SERVED = "a,c"
WORKERS = tuple(map(WorkerId, range(1, 7)))


def rank(worker_id: WorkerId) -> RankId:
    return RankId(worker_id, DpRank(0))


class World:
    """A registry and the log of an index, a router of all models, and one of some, whose threads take turns at random.

    Both routers fold the registry at once; each reads the log at its own pace.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.chains = {each: list(runs_of_chain(rank(each), random_blocks(np_rng(rng), 96))) for each in WORKERS}
        self.log: list[list[Message]] = [[] for _ in range(N_PARTITIONS)]
        self.models: dict[WorkerId, str] = {}
        self.generation = dict.fromkeys(WORKERS, 0)
        self.sequence = dict.fromkeys(WORKERS, 0)
        self.every = View(Settings(partitions=N_PARTITIONS), lambda: 0)
        self.some = View(Settings(partitions=N_PARTITIONS, models=SERVED), lambda: 0)
        self.position = [0] * N_PARTITIONS
        self.reading: tuple[int, dict[bytes, Returning], int] | None = None

    def register(self, worker_id: WorkerId, model: str | None) -> None:
        """Register a worker, or remove it."""
        value = None if model is None else encode_worker(Worker(worker_id, f"http://e{worker_id}", model, 16))
        for view in (self.every, self.some):
            view.fold_worker(worker_key(worker_id), value)
        if model is None:
            self.models.pop(worker_id, None)
        else:
            self.models[worker_id] = model

    def write(self, worker_id: WorkerId) -> None:
        """A transaction of a worker's partition: progress first, then runs that were stored or removed."""
        rng = self.rng
        self.sequence[worker_id] += 1
        if rng.random() < 0.1:
            self.generation[worker_id] += 1
        epoch = Epoch(Incarnation(1), self.generation[worker_id])
        progress = Progress(rank(worker_id), epoch, self.sequence[worker_id], health=Health.EXACT, block_size=16)
        self.append(worker_id, PROGRESS_KEY.pack(rank(worker_id)), encode_progress(progress))
        for run in rng.sample(self.chains[worker_id], 2):
            present = rng.randrange(1, 1 << len(run.local))
            held = Run(run.key, epoch, run.start, run.parent, run.local, run.engine, run.sequence, present)
            self.append(worker_id, RUN_KEY.pack(run.key), encode_run(held) if rng.random() < 0.7 else None)

    def append(self, worker_id: WorkerId, key: bytes, value: bytes | None) -> None:
        log = self.log[partition_of(worker_id, N_PARTITIONS)]
        log.append(
            Message(topic="t", partition=partition_of(worker_id, N_PARTITIONS), offset=len(log), key=key, value=value)
        )

    def read(self, partition: int) -> None:
        """The reader of all partitions takes the next messages."""
        at, log = self.position[partition], self.log[partition]
        end = self.rng.randint(at, min(len(log), at + 9))
        self.position[partition] = end
        if end > at:
            assert not self.some.served.fold(log[at:end], True)

    def read_again(self) -> None:
        """The other thread begins with a partition, or takes its next messages."""
        served = self.some.served
        if self.reading is None:
            partitions = served.partitions_to_read()
            if partitions:
                partition = self.rng.choice(partitions)
                self.reading = partition, dict(served.begin_reading(partition)), 0
                served.changed.set()
            return
        partition, of, at = self.reading
        log = self.log[partition]
        end = min(len(log), at + self.rng.randint(1, 9))
        over = served.fold_again(partition, log[at:end], of, end)
        self.reading = None if over else (partition, of, end)

    def check(self) -> None:
        """A rank that is known has what the log has of it, up to where one of the threads has read."""
        members = self.some.index.members()
        for of in self.some.trust.progress:
            partition = partition_of(of.worker_id, N_PARTITIONS)
            kept_from = self.some.served._kept_from.get(of.worker_id.to_bytes(8, "big"), 0)
            position = max(self.position[partition], kept_from)
            found = {each for each in members if each[0] == of}
            assert found == held(self.log[partition][:position], of.worker_id)

    def finish(self) -> None:
        """Let both threads reach the end."""
        while self.reading is not None or self.some.served.partitions_to_read():
            self.read_again()
            for partition in range(N_PARTITIONS):
                self.read(partition)
        for partition, log in enumerate(self.log):
            while self.position[partition] < len(log):
                self.read(partition)
            self.every.fold_index_batch([(m.key() or b"", m.value()) for m in log])

    def served_workers(self) -> set[WorkerId]:
        return {worker_id for worker_id, model in self.models.items() if model in SERVED.split(",")}


def np_rng(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.randrange(1 << 32))


Member = tuple[RankId, Tier, int]


def held(log: list[Message], worker_id: WorkerId) -> set[Member]:
    """What a worker's rank holds by the records of a log, by the rule of architecture.md: its newest epoch's runs."""
    last: dict[bytes, bytes | None] = {message.key() or b"": message.value() for message in log}
    epoch, runs = None, []
    for key, value in last.items():
        if key == PROGRESS_KEY.pack(rank(worker_id)):
            assert value is not None
            epoch = decode_progress(key, value).epoch
        elif value is not None and key.startswith(RUN_KEY.prefix) and RUN_KEY.parse(key).rank == rank(worker_id):
            runs.append(decode_run(key, value))
    return {
        (rank(worker_id), run.key.tier, block)
        for run in runs
        if run.epoch == epoch
        for at, block in enumerate(run.sequence)
        if run.present >> at & 1
    }


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_a_router_of_some_models_has_what_one_of_all_has_of_their_workers(seed: int) -> None:
    """Workers come, go and change their models while both threads read. A rank is known only with all of its blocks.

    A worker that is not registered is kept, unless its records were skipped before. Nothing is left of other workers.
    """
    world = World(random.Random(seed))
    for _ in range(120):
        worker_id = world.rng.choice(WORKERS)
        match world.rng.randrange(9):
            case 0 | 8:
                world.register(worker_id, world.rng.choice((*MODELS, None)))
            case 1 | 2 | 3:
                world.write(worker_id)
            case 4 | 5:
                world.read(world.rng.randrange(N_PARTITIONS))
            case _:
                world.read_again()
        world.check()
    world.finish()
    world.check()
    known, of_all = (
        {each for each in view.index.members() if each[0].worker_id in world.served_workers()}
        for view in (world.some, world.every)
    )
    assert known == of_all
    for worker_id in world.served_workers():
        assert world.some.trust.progress.get(rank(worker_id)) == world.every.trust.progress.get(rank(worker_id))
    others = world.models.keys() - world.served_workers()
    assert others.isdisjoint(each.worker_id for each in world.some.index.runs.ranks())
    assert world.some.fleet.workers.keys() == world.served_workers()


def test_a_worker_that_changes_twice_is_read_from_the_beginning_again() -> None:
    """A reading that began before the last change does not count for it."""
    world, worker_id = World(random.Random(1)), WORKERS[0]
    partition = partition_of(worker_id, N_PARTITIONS)
    world.register(worker_id, "b")
    for _ in range(4):
        world.write(worker_id)
    log, served = world.log[partition], world.some.served
    assert not served.fold(log, True)
    world.register(worker_id, "a")
    assert served.partitions_to_read() == [partition]
    first = dict(served.begin_reading(partition))
    assert not served.fold_again(partition, log[:6], first, 6)
    world.register(worker_id, "b")
    world.register(worker_id, "a")
    assert served.fold_again(partition, log[6:], first, len(log))
    assert world.some.trust.progress == {}
    assert served.partitions_to_read() == [partition]
    second = dict(served.begin_reading(partition))
    assert served.fold_again(partition, log, second, len(log))
    assert world.some.index.members() == held(log, worker_id)
    world.check()


def test_other_models_are_not_found() -> None:
    """A request for another model is refused as unknown_model, and one without a model goes to the only one."""
    router = router_of(models="a, c")
    for number, model in enumerate(("a", "b"), start=1):
        worker = Worker(WorkerId(number), f"http://e{number}", model, 16)
        router.view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))
    with pytest.raises(UnknownModel, match="does not serve model 'b'"):
        router.route(RouteRequest(model="b", token_ids=[1] * 16))
    with pytest.raises(UnknownModel):
        router.route(RouteRequest(model="nobody's", token_ids=[1] * 16))
    assert router.route(RouteRequest(model="a", token_ids=[1] * 16)).rank == rank(WorkerId(1))
    assert router.route(RouteRequest(token_ids=[1] * 16)).rank == rank(WorkerId(1))
    assert [worker.worker_id for worker in router.registry.workers()] == [1]
    with pytest.raises(UnknownModel, match="does not serve model 'b'"):
        router.registry.put_worker(Worker(WorkerId(3), "http://e3", "b", 16))
    router._kafka.close()


def test_bookings_of_other_models_are_skipped() -> None:
    """Nothing is kept of them but a number while they are active, and those of served models count as always."""
    every, some = router_of(), router_of(models="a")
    log: list[Record] = []

    def append(number: int, model: str, phase: BookingPhase) -> None:
        booking = Booking(rank(WorkerId(number % 4)), model, 16, pack_hashes([number]), 0, 1)
        booking_id = BookingId(f"r{number}", "other", number)
        key, value = encode_load(booking_id, phase, booking if phase is BookingPhase.ADD else None, 1000)
        log.append(Record("t", number % 2, len(log), 1000 + len(log), key, value))

    for number in range(40):
        append(number, "a" if number % 10 == 0 else "b", BookingPhase.ADD)
    for number in range(40):
        append(number, "", BookingPhase.PREFILL)
    for record in log:
        every.loads.fold(record)
        some.loads.fold(record)
    with every.loads.locked() as all_of_them, some.loads.locked() as served:
        assert (len(all_of_them), len(served)) == (40, 4)
        assert sum(load.requests for load in served.ranks().values()) == 4
    assert some.loads.skipped_bytes == 36 * ID_BYTES
    assert every.loads.skipped_bytes == 0
    log.clear()
    for number in range(40):
        append(number, "", BookingPhase.FREE)
    for record in log:
        some.loads.fold(record)
    with some.loads.locked() as served:
        assert len(served) == 4  # they have ended, and are known until they expire
    assert some.loads.skipped_bytes == 0
    for router in (every, some):
        router._kafka.close()


def test_ids_of_bookings_that_nobody_ends_are_forgotten() -> None:
    """After two lifetimes of a booking, by the clock of its partition."""
    skipped = SkippedBookings(["a"], ttl_ms=100)

    def add(number: int, at_ms: int) -> None:
        booking = Booking(rank(WorkerId(1)), "b", 16, b"", 0, 1)
        assert skipped.skips(Content(BookingId(str(number), "r", number), BookingPhase.ADD, booking), at_ms, 0)

    add(1, 0)
    add(2, 100)
    assert skipped.skips(Content(BookingId("1", "r", 1), BookingPhase.PREFILL, None), 100, 0)
    add(3, 200)
    assert skipped.n_bytes == 2 * ID_BYTES
    assert not skipped.skips(Content(BookingId("1", "r", 1), BookingPhase.FREE, None), 200, 0)
    assert not skipped.skips(Content(BookingId("2", "r", 2), BookingPhase.FREE, None), 200, 1)


def router_of(**changes: Any) -> Router:
    router = Router(Settings(kafka="127.0.0.1:1", **changes))
    router.feeds.pending = dict  # type: ignore[method-assign]  # nothing is left to be read
    return router
