"""A bridge and lost batches, restarts and rivals, on a real Kafka: the log leads to what the engines hold."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streams.core.events import (
    BEFORE_FIRST,
    EngineBatch,
    Heartbeat,
    RestatementChunk,
    ResyncRequest,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import Incarnation, Tier
from streams.core.workers import Worker
from streams.kafka.clients import Record, ensure_topics, partition_of, producer
from streams.kafka.records import decode_worker, encode_resync
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Child
from streams.lab.stack import RouterProcess, Stack, get_json, known_blocks, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.bridges import (
    LEASE_S,
    RANK,
    WORKER_ID,
    KafkaLog,
    await_log,
    bridge_to,
    complete,
    health,
    incarnation,
    read_log,
)
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S, assert_known


def registered(settings: Settings) -> Worker | None:
    found: list[Worker | None] = [None]

    def take(records: list[Record]) -> None:
        found.extend(None if record.value is None else decode_worker(record.value) for record in records)

    read_to_end(settings, topics(settings).workers.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return found[-1]


def request_resync(settings: Settings, incarnation: int, sequence: int) -> None:
    client = producer(settings)
    request = ResyncRequest(RANK, Incarnation(incarnation), sequence, 1, "a test", 0)
    client.produce(topics(settings).kv_control.name, key=str(WORKER_ID).encode(), value=encode_resync(request))
    assert client.flush(10.0) == 0


def restated(seen: KafkaLog) -> tuple[bool, set[tuple[Tier, int]]]:
    """The last restatement: whether it is exact, and which blocks it contains."""
    last = seen.chunks[-1].body
    assert isinstance(last, RestatementChunk)
    pieces = [b.body for b in seen.chunks if isinstance(b.body, RestatementChunk)]
    runs = [run for piece in pieces if piece.restatement_id == last.restatement_id for run in piece.runs]
    return last.exact, {(run.tier, block) for run in runs for block in sequence_hashes(run.local, run.parent).tolist()}


@pytest.fixture
def short(stack: Stack) -> Stack:
    """A stack whose bridges have short leases, with its topics created."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    ensure_topics(stack.settings, topics(stack.settings).all())
    return stack


@pytest.fixture(params=[True, False], ids=["start time reported", "start time not reported"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineDouble]:
    """An engine whose metrics report when it started, or do not."""
    with EngineDouble(reports_start=request.param) as double:
        yield double


@pytest.mark.parametrize("prefix", [(b"",), (b"", b"kv")], ids=["three frames", "four frames"])
def test_dropped_batches_are_filled_in_order_and_lost_ones_leave_a_gap(short: Stack, prefix: tuple[bytes, ...]) -> None:
    """Batches that the live socket dropped are in the log in order, and only a ledger without a gap is exact."""
    with EngineDouble(kept=6, prefix=prefix) as engine:
        engine.store(1)
        bridge = bridge_to(short, engine)
        await_log(
            short.settings,
            lambda seen: seen.numbers() == [0] if seen.incarnations else False,
            "the first batch",
        )
        engine.store(100, live=False)
        engine.remove(1, 1, live=False)
        engine.store(200)
        seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the gap to be filled")
        assert seen.numbers() == [0, 1, 2, 3]
        engine.store(300, live=False)  # the last batch before a quiet time is requested as well
        seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the last batch")
        request_resync(short.settings, seen.incarnations[-1], 2)
        seen = await_log(short.settings, lambda seen: bool(seen.chunks), "a restatement")
        assert restated(seen) == (True, engine.truth)
        assert seen.chunks[-1].sequence == 4

        bridge.signal(signal.SIGSTOP)  # meanwhile the engine publishes more than it keeps
        for n in range(9):
            engine.store(1000 + 100 * n, live=n > 4)
        bridge.signal(signal.SIGCONT)
        seen = await_log(short.settings, lambda seen: seen.numbers()[-1:] == [13], "what the engine has kept")
        lost = sorted(set(range(14)) - set(seen.numbers()))
        assert lost and max(lost) <= 7 and seen.numbers() == sorted(set(seen.numbers()))
        time.sleep(1.1)  # at most one restatement per second
        request_resync(short.settings, seen.incarnations[-1], seen.numbers()[-1])
        n_chunks = len(seen.chunks)
        seen = await_log(short.settings, lambda seen: len(seen.chunks) > n_chunks, "a second restatement")
        exact, facts = restated(seen)
        assert not exact and facts < engine.truth

        engine.clear()
        engine.store(5000)
        await_log(short.settings, lambda seen: seen.facts == engine.truth, "what is held after a clear")
        time.sleep(1.1)
        request_resync(short.settings, seen.incarnations[-1], 15)
        n_chunks = len(seen.chunks)
        seen = await_log(short.settings, lambda seen: len(seen.chunks) > n_chunks, "a third restatement")
        assert restated(seen) == (True, engine.truth)


def test_an_engine_that_restarts_keeps_credit_for_nothing(short: Stack, engine: EngineDouble) -> None:
    """The old blocks are dropped whether the bridge runs or not, although the new numbers continue the old ones."""
    engine.store(1)
    engine.store(100)
    bridge = bridge_to(short, engine)
    seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "what it holds")
    assert len(seen.incarnations) == 1

    engine.restart()
    engine.store(1000, live=False)
    engine.store(2000, live=False)
    engine.store(3000, live=False)
    engine.store(4000)  # the first number that the bridge receives is after the last one that it published
    seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the second incarnation")
    assert len(seen.incarnations) == 2 and seen.numbers() == [0, 1, 2, 3]

    bridge.kill()
    engine.restart()
    for n in range(5):
        engine.store(10_000 + 100 * n, live=False)
    bridge.start()
    seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the third incarnation")
    assert len(seen.incarnations) == 3 and seen.numbers() == [0, 1, 2, 3, 4]
    assert seen.incarnations == sorted(seen.incarnations)


def test_a_bridge_that_restarts_continues_where_the_killed_one_ended(short: Stack, engine: EngineDouble) -> None:
    """Within the incarnation no batch is published twice, missed batches are published, and old names are known."""
    engine.store(1)
    engine.store(100)
    bridge = bridge_to(short, engine)
    await_log(short.settings, lambda seen: seen.facts == engine.truth, "what it holds")
    bridge.kill()
    engine.store(200, live=False)
    engine.remove(1, 1, live=False)
    bridge.start()
    seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the missed batches")
    engine.remove(100, 1)
    seen = await_log(short.settings, lambda seen: seen.facts == engine.truth, "the removal of an old name")
    assert len(seen.incarnations) == 1 and seen.numbers() == [0, 1, 2, 3, 4]


def test_a_ledger_is_rebuilt_from_the_table_if_the_engine_no_longer_has_its_first_batches(
    short: Stack, engine: EngineDouble
) -> None:
    """No batch is lost or published twice, and the incarnation continues; after a removal, a copy may be missing."""
    forgetful = EngineDouble(kept=2, reports_start=engine.reports_start)
    with forgetful:
        worker = short.worker()
        bridge = bridge_to(short, forgetful)
        wait_workers(worker.url, 1)
        for n in range(6):
            forgetful.store(1 + 100 * n)
            assert_truth(worker, forgetful)  # one by one, since a dropped batch could not be replayed either
        before = incarnation(worker, 7)
        bridge.kill()
        forgetful.store(2000, live=False)
        bridge.start()
        assert_truth(worker, forgetful)
        assert (incarnation(worker, 7), health(worker)[7]) == (before, "exact")
        forgetful.remove(1, 1)
        forgetful.remove(101, 0)
        assert_truth(worker, forgetful)
        assert (incarnation(worker, 7), health(worker)[7]) == (before, "approximate")
        assert read_log(short.settings).numbers() == list(range(9))


def assert_truth(router: RouterProcess, engine: EngineDouble) -> None:
    truth = {(int(WORKER_ID), block) for _, block in engine.truth}
    wait_for(lambda: known_blocks(router.url) == truth, VISIBLE_TIMEOUT_S, "what the engine holds", 0.1)


@pytest.mark.long_running
def test_of_two_bridges_one_feeds_and_the_other_takes_over(short: Stack) -> None:
    """The other bridge takes over from a killed or stopped holder, which publishes nothing when it continues."""
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

    # A cordon stays, whichever bridge renews the lease.
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
    time.sleep(LEASE_S)  # long enough for the first bridge to take the lease back if it could
    assert holder() == second

    child_of(second).kill()
    prompts(30_000)
    wait_for(lambda: followed(second), VISIBLE_TIMEOUT_S, "the first bridge to take over again")
    assert holder() == first
    prompts(40_000)
    assert_known(worker, engines)
    assert health(worker) == {7: "exact"}
    seen = read_log(short.settings)
    assert len(seen.incarnations) == 1 and seen.numbers() == sorted(set(seen.numbers()))  # no batch was published twice
    assert Api(worker.url).workers()[7]["state"] == "cordoned"


def test_a_deleted_worker_stays_deleted_while_its_bridge_runs(short: Stack) -> None:
    """The bridge does not register the worker again, and does not publish its engine's further events."""
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


def test_a_worker_that_is_deleted_and_registered_again_is_fed_again(stack: Stack) -> None:
    """Also if its engine reported nothing in between, so that no task of the bridge noticed the deletion."""
    worker = stack.worker()
    engines = stack.engines(1, EngineConfig(block_size=16, n_blocks=64), "m", time_scale=100.0, first_worker_id=7)
    bridge = stack.bridge(engines)
    wait_workers(worker.url, 1)
    complete(engines[0], list(range(160)))
    assert_known(worker, engines)
    api = Api(worker.url)
    api.call("DELETE", "/workers/7").given()
    wait_for(lambda: registered(stack.settings) is None, VISIBLE_TIMEOUT_S, "the deletion")
    body = {"url": engines[0].url, "model": "m", "block_size": 16}
    api.call("PUT", "/workers/7", body).given()
    wait_for(lambda: bool(api.workers()[7]["lease"]), VISIBLE_TIMEOUT_S, "its lease")
    complete(engines[0], list(range(1000, 1160)))
    assert_known(worker, engines)
    wait_for(lambda: health(worker) == {7: "exact"}, VISIBLE_TIMEOUT_S, "exact answers")
    assert "TaskGroup" not in bridge.log_path.read_text()


def test_a_bridge_publishes_heartbeats(short: Stack) -> None:
    """A heartbeat follows the beginning of an incarnation, and another every third of a lease while the engine runs."""
    with EngineDouble() as engine:
        engine.store(1)
        bridge_to(short, engine)

        def beats(seen: KafkaLog) -> list[EngineBatch]:
            return [batch for batch in seen.batches if isinstance(batch.body, Heartbeat)]

        seen = await_log(short.settings, lambda seen: len(beats(seen)) >= 3, "three heartbeats")
        # With the first heartbeat at once, a bridge that crashes before the second is noticed as well.
        begun, promised = seen.batches[:2]
        assert begun.sequence == promised.sequence == BEFORE_FIRST and isinstance(promised.body, Heartbeat)
        last = beats(seen)[-1]
        assert isinstance(last.body, Heartbeat)
        assert (last.sequence, last.body.lease_ms) == (0, round(LEASE_S * 1000))
        assert len(seen.numbers()) == 1


def test_an_engine_whose_process_exits_becomes_silent_although_its_lease_is_long(stack: Stack) -> None:
    """The bridge makes its rank silent once its sockets refuse connections, until the engine listens again."""
    stack.settings = replace(stack.settings, bridge_lease_s=600.0)  # no lease expires while this test runs
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
        wait_for(lambda: silent() == [RANK.dp_rank], VISIBLE_TIMEOUT_S, "the rank to be silent")
        engine.start_again()
        wait_for(lambda: silent() == [], VISIBLE_TIMEOUT_S, "the rank to be fed again")
        engine.store(5000)
        assert_truth(worker, engine)
