"""What a bridge makes of lost batches, restarts and rivals, on a real Kafka: what engines hold is what the log says."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from streams.codec import decode_batch, decode_worker, encode_resync
from streams.core.events import (
    BEFORE_FIRST,
    EngineBatch,
    EngineEvents,
    Heartbeat,
    RestatementChunk,
    ResyncRequest,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import DpRank, Incarnation, RankId, Tier, WorkerId
from streams.core.reducer.holdings import plain_holdings
from streams.core.workers import Worker
from streams.kafka import Record, ensure_topics, partition_of, producer
from streams.local.processes import Child
from streams.local.stack import Engine, RouterProcess, Stack, get_json, known_blocks, wait_workers
from streams.settings import Settings
from streams.sim.engine_config import EngineConfig
from streams.tables.changelog import read_to_end
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S, assert_known
from tests.kafka.test_bridge import complete, health, incarnation

WORKER_ID = WorkerId(7)
RANK = RankId(WORKER_ID, DpRank(0))

#: Short, so that a rival takes over soon; long enough for processes that share two cores with five others.
LEASE_S = 3.0


@dataclass
class KafkaLog:
    """All that kv-events say of one rank, folded as an agent would that knows events only."""

    batches: list[EngineBatch] = field(default_factory=list)

    @property
    def facts(self) -> set[tuple[Tier, int]]:
        holdings = plain_holdings()
        for batch in self.batches:
            if isinstance(batch.body, EngineEvents):
                holdings.apply(batch, batch.body.events)
        return {(tier, int(block)) for _, tier, block in holdings.members()}

    def numbers(self, incarnation: int | None = None) -> list[int]:
        life = self.lives[-1] if incarnation is None else incarnation
        return [
            batch.sequence
            for batch in self.batches
            if isinstance(batch.body, EngineEvents) and batch.incarnation == life and batch.sequence >= 0
        ]

    @property
    def lives(self) -> list[int]:
        return list(dict.fromkeys(int(batch.incarnation) for batch in self.batches))

    @property
    def chunks(self) -> list[EngineBatch]:
        return [batch for batch in self.batches if isinstance(batch.body, RestatementChunk)]


def read_log(settings: Settings) -> KafkaLog:
    told = KafkaLog()

    def take(records: list[Record]) -> None:
        told.batches += [decode_batch(record.value) for record in records]

    read_to_end(settings, topics(settings).kv_events.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return told


def registered(settings: Settings) -> Worker | None:
    found: list[Worker | None] = [None]

    def take(records: list[Record]) -> None:
        found.extend(None if record.value is None else decode_worker(record.value) for record in records)

    read_to_end(settings, topics(settings).workers.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return found[-1]


def await_log(settings: Settings, truth: Callable[[KafkaLog], bool], what: str) -> KafkaLog:
    last = [KafkaLog()]

    def reached() -> bool:
        last[0] = read_log(settings)
        return truth(last[0])

    wait_for(reached, VISIBLE_TIMEOUT_S, what, 0.1)
    return last[0]


def ask(settings: Settings, incarnation: int, sequence: int) -> None:
    client = producer(settings)
    request = ResyncRequest(RANK, Incarnation(incarnation), sequence, 1, "a test", 0)
    client.produce(topics(settings).kv_control.name, key=str(WORKER_ID).encode(), value=encode_resync(request))
    assert client.flush(10.0) == 0


def restated(told: KafkaLog) -> tuple[bool, set[tuple[Tier, int]]]:
    """The last restatement: whether it says exact, and what it holds."""
    last = told.chunks[-1].body
    assert isinstance(last, RestatementChunk)
    pieces = [b.body for b in told.chunks if isinstance(b.body, RestatementChunk)]
    runs = [run for piece in pieces if piece.restatement_id == last.restatement_id for run in piece.runs]
    return last.exact, {(run.tier, block) for run in runs for block in sequence_hashes(run.local, run.parent).tolist()}


@pytest.fixture
def short(stack: Stack) -> Stack:
    """A stack whose bridges' leases are short; its topics are there."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    ensure_topics(stack.settings, topics(stack.settings).all())
    return stack


def bridge_to(stack: Stack, engine: EngineDouble) -> Child:
    stand_in = Engine(int(WORKER_ID), None, engine.url, engine.events, engine.replay)  # type: ignore[arg-type]
    return stack.bridge([stand_in])


@pytest.fixture(params=[True, False], ids=["metrics tell", "metrics silent"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineDouble]:
    """An engine that tells when it started, or not."""
    with EngineDouble(reports_start=request.param) as double:
        yield double


@pytest.mark.parametrize("prefix", [(b"",), (b"", b"kv")], ids=["three frames", "four frames"])
def test_dropped_batches_are_filled_in_order_and_what_is_forgotten_is_told(
    short: Stack, prefix: tuple[bytes, ...]
) -> None:
    """Batches that never came by the live socket stand in the log in their place; a ledger without a gap says exact."""
    with EngineDouble(kept=6, prefix=prefix) as engine:
        engine.store(1)
        bridge = bridge_to(short, engine)
        await_log(short.settings, lambda told: told.numbers() == [0] if told.lives else False, "the first batch")
        engine.store(100, live=False)
        engine.remove(1, 1, live=False)
        engine.store(200)
        told = await_log(short.settings, lambda told: told.facts == engine.truth, "the gap to be filled")
        assert told.numbers() == [0, 1, 2, 3]
        engine.store(300, live=False)  # the last before a quiet time is asked for as well
        told = await_log(short.settings, lambda told: told.facts == engine.truth, "the last batch")
        ask(short.settings, told.lives[-1], 2)
        told = await_log(short.settings, lambda told: bool(told.chunks), "a restatement")
        assert restated(told) == (True, engine.truth)
        assert told.chunks[-1].sequence == 4

        bridge.signal(signal.SIGSTOP)  # while it does not listen, the engine goes beyond what it keeps
        for n in range(9):
            engine.store(1000 + 100 * n, live=n > 4)
        bridge.signal(signal.SIGCONT)
        told = await_log(short.settings, lambda told: told.numbers()[-1:] == [13], "what the engine has kept")
        lost = sorted(set(range(14)) - set(told.numbers()))
        assert lost and max(lost) <= 7 and told.numbers() == sorted(set(told.numbers()))
        time.sleep(1.1)  # a restatement a second at most
        ask(short.settings, told.lives[-1], told.numbers()[-1])
        n_chunks = len(told.chunks)
        told = await_log(short.settings, lambda told: len(told.chunks) > n_chunks, "a second restatement")
        exact, facts = restated(told)
        assert not exact and facts < engine.truth

        engine.clear()
        engine.store(5000)
        await_log(short.settings, lambda told: told.facts == engine.truth, "what is held behind a clear")
        time.sleep(1.1)
        ask(short.settings, told.lives[-1], 15)
        n_chunks = len(told.chunks)
        told = await_log(short.settings, lambda told: len(told.chunks) > n_chunks, "a third restatement")
        assert restated(told) == (True, engine.truth)


def test_an_engine_that_restarts_keeps_credit_for_nothing(short: Stack, engine: EngineDouble) -> None:
    """While the bridge is up or down, whether its metrics tell or not, though its numbers fit those of before."""
    engine.store(1)
    engine.store(100)
    bridge = bridge_to(short, engine)
    told = await_log(short.settings, lambda told: told.facts == engine.truth, "what it holds")
    assert len(told.lives) == 1

    engine.restart()
    engine.store(1000, live=False)
    engine.store(2000, live=False)
    engine.store(3000, live=False)
    engine.store(4000)  # the first number that the bridge hears of lies behind the last that it knew
    told = await_log(short.settings, lambda told: told.facts == engine.truth, "the second life")
    assert len(told.lives) == 2 and told.numbers() == [0, 1, 2, 3]

    bridge.kill()
    engine.restart()
    for n in range(5):
        engine.store(10_000 + 100 * n, live=False)
    bridge.start()
    told = await_log(short.settings, lambda told: told.facts == engine.truth, "the third life")
    assert len(told.lives) == 3 and told.numbers() == [0, 1, 2, 3, 4]
    assert told.lives == sorted(told.lives)


def test_a_bridge_that_restarts_goes_on_where_the_dead_one_ended(short: Stack, engine: EngineDouble) -> None:
    """In the same life nothing is published again, what came meanwhile is, and names of before are known."""
    engine.store(1)
    engine.store(100)
    bridge = bridge_to(short, engine)
    await_log(short.settings, lambda told: told.facts == engine.truth, "what it holds")
    bridge.kill()
    engine.store(200, live=False)
    engine.remove(1, 1, live=False)
    bridge.start()
    told = await_log(short.settings, lambda told: told.facts == engine.truth, "what came meanwhile")
    engine.remove(100, 1)
    told = await_log(short.settings, lambda told: told.facts == engine.truth, "the removal of an old name")
    assert len(told.lives) == 1 and told.numbers() == [0, 1, 2, 3, 4]


def test_a_ledger_is_rebuilt_from_the_table_when_the_engine_has_forgotten(short: Stack, engine: EngineDouble) -> None:
    """With the first batches gone from the replay buffer, nothing is lost, doubled or taken for a new life."""
    forgetful = EngineDouble(kept=2, reports_start=engine.reports_start)
    with forgetful:
        worker = short.worker()
        bridge = bridge_to(short, forgetful)
        wait_workers(worker.url, 1)
        for n in range(6):
            forgetful.store(1 + 100 * n)
            assert_truth(worker, forgetful)  # one by one, since what is dropped is forgotten too
        before = incarnation(worker, 7)
        bridge.kill()
        forgetful.store(2000, live=False)
        bridge.start()
        assert_truth(worker, forgetful)
        forgetful.remove(1, 1)
        forgetful.remove(101, 0)
        assert_truth(worker, forgetful)
        assert (incarnation(worker, 7), health(worker)[7]) == (before, "exact")
        assert read_log(short.settings).numbers() == list(range(9))


def assert_truth(router: RouterProcess, engine: EngineDouble) -> None:
    truth = {(int(WORKER_ID), block) for _, block in engine.truth}
    wait_for(lambda: known_blocks(router.url) == truth, VISIBLE_TIMEOUT_S, "what the engine holds", 0.1)


def test_of_two_bridges_one_feeds_and_the_other_takes_over(short: Stack) -> None:
    """Killed or stopped, the holder is followed; when it goes on it feeds nothing, and routers know what is held."""
    worker = short.worker()
    engines = short.engines(1, EngineConfig(block_size=16, n_blocks=64), "m", time_scale=100.0, first_worker_id=7)

    def prompts(first: int) -> None:
        for n in range(4):
            complete(engines[0], list(range(first + 200 * n, first + 200 * n + 160)))

    def holder() -> str:
        found = registered(short.settings)
        return found.lease.bridge if found is not None and found.lease is not None else ""

    def followed(before: str) -> bool:
        return holder() not in ("", before)

    bridges = {f":{child.pid}:": child for child in (short.bridge(engines), short.bridge(engines))}

    def child_of(name: str) -> Child:
        return next(child for part, child in bridges.items() if part in name)

    wait_workers(worker.url, 1)
    prompts(0)
    assert_known(worker, engines)
    first = holder()

    # What others say of the worker stays, whoever renews.
    request = urllib.request.Request(f"{worker.url}/workers/7/cordon", method="PUT", data=b"")
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200

    child_of(first).signal(signal.SIGSTOP)
    prompts(10_000)
    wait_for(lambda: followed(first), VISIBLE_TIMEOUT_S, "the second bridge to take over")
    assert_known(worker, engines)
    child_of(first).signal(signal.SIGCONT)
    prompts(20_000)
    assert_known(worker, engines)
    second = holder()
    assert second != first
    time.sleep(LEASE_S)  # the first has had every opportunity to take it back
    assert holder() == second

    child_of(second).kill()
    prompts(30_000)
    wait_for(lambda: followed(second), VISIBLE_TIMEOUT_S, "the first bridge to take over again")
    assert holder() == first
    prompts(40_000)
    assert_known(worker, engines)
    assert health(worker) == {7: "exact"}
    told = read_log(short.settings)
    assert len(told.lives) == 1 and told.numbers() == sorted(set(told.numbers()))  # nothing was fed twice
    found = registered(short.settings)
    assert found is not None and found.state.value == "cordoned"


def test_a_worker_that_is_deleted_stays_so_while_its_bridge_runs(short: Stack) -> None:
    """Its lease is not renewed into a registration, and what its engine tells is nobody's business."""
    with EngineDouble() as engine:
        worker = short.worker()
        bridge = bridge_to(short, engine)
        wait_workers(worker.url, 1)
        engine.store(1)
        assert_truth(worker, engine)
        request = urllib.request.Request(f"{worker.url}/workers/7", method="DELETE")
        with urllib.request.urlopen(request, timeout=30.0) as response:
            assert response.status == 200
        engine.store(100)
        time.sleep(LEASE_S)
        assert registered(short.settings) is None
        assert known_blocks(worker.url) == set() and not get_json(f"{worker.url}/workers")["workers"]
        bridge.stop()
        bridge.start()
        assert_truth(worker, engine)


def test_a_bridge_says_that_it_is_there(short: Stack) -> None:
    """A heartbeat right behind a life's beginning, and then each third of a lease, while the engine answers."""
    with EngineDouble() as engine:
        engine.store(1)
        bridge_to(short, engine)

        def beats(told: KafkaLog) -> list[EngineBatch]:
            return [batch for batch in told.batches if isinstance(batch.body, Heartbeat)]

        told = await_log(short.settings, lambda told: len(beats(told)) >= 3, "three heartbeats")
        # A bridge that dies before its first third is over is missed, too: it has promised to be heard of.
        begun, promised = told.batches[:2]
        assert begun.sequence == promised.sequence == BEFORE_FIRST and isinstance(promised.body, Heartbeat)
        last = beats(told)[-1]
        assert isinstance(last.body, Heartbeat)
        assert (last.sequence, last.body.lease_ms) == (0, round(LEASE_S * 1000))
        assert len(told.numbers()) == 1


def test_no_request_goes_to_an_engine_whose_process_is_gone_though_its_lease_is_long(stack: Stack) -> None:
    """Its bridge says so at once: both its sockets refuse. It is back as soon as it listens again."""
    stack.settings = replace(stack.settings, bridge_lease_s=600.0)  # nobody would be missed while this test runs
    worker = stack.worker()

    def silent() -> list[int]:
        (known,) = get_json(f"{worker.url}/workers")["workers"]
        ranks: list[int] = known["silent_dp_ranks"]
        return ranks

    with EngineDouble() as engine:
        engine.store(1)
        bridge_to(stack, engine)
        assert_truth(worker, engine)
        assert silent() == []
        engine.stop()
        wait_for(lambda: silent() == [RANK.dp_rank], VISIBLE_TIMEOUT_S, "the engine to be missed")
        engine.start_again()
        wait_for(lambda: silent() == [], VISIBLE_TIMEOUT_S, "the engine to be back")
        engine.store(5000)
        assert_truth(worker, engine)
