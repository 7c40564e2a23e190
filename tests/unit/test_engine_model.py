"""An engine that is restarted with another model: under which model it is registered, and what its records say."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from itertools import dropwhile

import pytest

from streams.core.events import BEFORE_FIRST, ENDED_LEASE_MS, EngineBatch, FeedState, Heartbeat
from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Progress
from streams.core.workers import BridgeLease, Worker
from streams.engines import bridged_engine as bridged_engine_module
from streams.engines import feed_machine, process_start
from streams.engines.address import EngineAddress
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank
from streams.kafka.records import decode_batch, decode_worker, encode_worker
from tests.helpers import bridged_engine
from tests.helpers.bridged_engine import RANK, EngineUnderTest
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import (
    NONE_YET,
    batches_of,
    bridging,
    fed_with_a_batch,
    is_live,
    registered,
    stores,
    warnings_of,
)

LIVE, UNPROVEN = FeedState.LIVE, FeedState.UNPROVEN

#: Time in which a feed that is not live for a wrong reason, or is live by mistake, would show it.
SETTLED_S = 1.5


class ModelsDouble(EngineDouble):
    """An engine whose /v1/models may hang while everything else answers."""

    def __init__(self, model: str) -> None:
        self.lists_models = threading.Event()
        self.lists_models.set()
        super().__init__(model=model)

    @property
    def models_body(self) -> str:
        """The answer, once there is one."""
        self.lists_models.wait()
        return self._models_body

    @models_body.setter
    def models_body(self, body: str) -> None:
        self._models_body = body

    def lists(self, *models: str) -> None:
        """Let /v1/models list these models."""
        self.models_body = json.dumps({"data": [{"id": model} for model in models]})

    def stop(self) -> None:
        self.lists_models.set()
        super().stop()


def address_of(engine: EngineDouble) -> EngineAddress:
    """Without a model, which the bridge reads from /v1/models then."""
    return replace(bridged_engine.address_of(engine), model=None)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_an_engine_that_is_restarted_with_another_model_is_registered_and_fed_under_it(
    dp_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No record of the new process says that the feed is live under the model of before."""
    with ModelsDouble("a") as double:
        old = NONE_YET

        async def act(engine: EngineUnderTest) -> None:
            nonlocal old
            old = await fed_with_a_batch(engine, double, "a")
            double.lists("b", "adapter")
            await asyncio.to_thread(double.restart)
            await engine.until(lambda: is_live(engine, "b", old), "the feed to be live under the new model")
            double.store(1000)
            await engine.until(lambda: stores(batches_of(engine)[-1]), "a batch of the new process")
            assert registered(engine) == ["a", "b"] and engine.claimed == ["a", "b"]
            await asyncio.sleep(SETTLED_S)
            assert is_live(engine, "b", old)
            records = [
                decode_worker(record["value"]) if topic.endswith("workers") else decode_batch(record["value"])
                for topic, record in engine.producer.records
                if topic.endswith(("workers", "kv-events"))
            ]
            under_b = list(dropwhile(lambda record: record.model != "b", records))
            assert isinstance(under_b[0], Worker) and all(record.model == "b" for record in under_b)

        batches = bridging(replace(address_of(double), dp_size=dp_size), act)
    new = [batch for batch in batches if batch.incarnation > old]
    assert new and not [batch for batch in new if batch.model == "a" and batch.feed is LIVE]
    for dp_rank in range(dp_size):
        ranks = [batch for batch in new if batch.rank.dp_rank == dp_rank]
        last = [batch for batch in ranks if batch.incarnation == ranks[-1].incarnation]
        assert (last[0].sequence, {batch.model for batch in last}) == (BEFORE_FIRST, {"b"})
    of_before = [batch.body for batch in new if batch.model == "a"]
    assert isinstance(of_before[-1], Heartbeat) and of_before[-1].lease_ms == ENDED_LEASE_MS
    assert len(warnings_of(caplog, "it serves b, not a")) == 1


def test_a_feed_is_not_live_before_the_engine_says_which_model_it_serves() -> None:
    """Its batches are published meanwhile, so that nothing is missing if it is the model of before."""
    with ModelsDouble("a") as double:

        async def act(engine: EngineUnderTest) -> None:
            old = await fed_with_a_batch(engine, double, "a")
            await asyncio.to_thread(double.stop)
            double.lists_models.clear()
            double.start_again()
            await engine.until(lambda: batches_of(engine)[-1].incarnation > old, "another incarnation")
            await asyncio.sleep(SETTLED_S)
            double.store(1000)
            await engine.until(lambda: any(map(stores, new_of(engine, old))), "a batch of the new process")
            await asyncio.sleep(SETTLED_S)
            assert {batch.feed for batch in new_of(engine, old)} <= {UNPROVEN, FeedState.CATCHING_UP}
            double.lists_models.set()
            await engine.until(lambda: is_live(engine, "a", old), "the feed to be live")
            assert len({batch.incarnation for batch in new_of(engine, old)}) == 1

        bridging(address_of(double), act)


def new_of(engine: EngineUnderTest, old: Incarnation) -> list[EngineBatch]:
    return [batch for batch in batches_of(engine) if batch.incarnation > old]


def test_a_restart_with_the_same_model_interrupts_no_feed(caplog: pytest.LogCaptureFixture) -> None:
    """It need not be the first in the list: an engine may have several names."""
    with ModelsDouble("a") as double:

        async def act(engine: EngineUnderTest) -> None:
            old = await fed_with_a_batch(engine, double, "a")
            feed = engine.bridged._feeds[RANK]
            double.lists("alias", "a")
            await asyncio.to_thread(double.restart)
            await engine.until(lambda: is_live(engine, "a", old), "the feed to be live")
            await asyncio.sleep(SETTLED_S)
            assert is_live(engine, "a", old) and len({batch.incarnation for batch in new_of(engine, old)}) == 1
            assert engine.bridged._feeds[RANK] is feed and registered(engine) == ["a"] and engine.claimed == ["a"]

        bridging(address_of(double), act)
    assert not warnings_of(caplog, "it serves")


@pytest.mark.parametrize("with_replay", [True, False])
def test_an_engine_whose_http_server_does_not_answer_is_live_after_a_restart(
    with_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is checked as soon as it answers; batches that have waited for evidence do not wait once more."""
    monkeypatch.setattr(feed_machine, "EVIDENCE_WAIT_S", 1.0)
    monkeypatch.setattr(process_start, "MODEL_WAIT_S", 1.0 if with_replay else 600.0)
    with ModelsDouble("a") as double:

        async def act(engine: EngineUnderTest) -> None:
            old = await fed_with_a_batch(engine, double, "a")
            double.lists("b")
            await asyncio.to_thread(double.stop)
            double.status = 503
            double.start_again()

            def is_live_with_batches(model: str) -> bool:
                double.store(1000 + 100 * double.sequence)
                return is_live(engine, model, old)

            await engine.until(lambda: is_live_with_batches("a"), "the feed to be live under the model of before")
            double.status = 200
            await engine.until(lambda: is_live_with_batches("b"), "the feed to be live under the new model")

        address = address_of(double)
        bridging(address if with_replay else replace(address, replay=None), act)


def test_a_model_that_the_operator_has_set_is_not_live_while_the_engine_no_longer_lists_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not replaced either: the operator may have set another name than the first in the list."""
    with ModelsDouble("m") as double:
        double.lists("other", "m")

        async def act(engine: EngineUnderTest) -> None:
            old = await fed_with_a_batch(engine, double, "m")
            await asyncio.sleep(SETTLED_S)
            double.lists("other")
            await asyncio.to_thread(double.restart)
            await engine.until(lambda: bool(new_of(engine, old)), "another incarnation")
            double.store(1000)
            await asyncio.sleep(2 * SETTLED_S)
            assert LIVE not in {batch.feed for batch in new_of(engine, old)} and registered(engine) == ["m"]
            double.lists("other", "m")
            await engine.until(lambda: is_live(engine, "m", old), "the feed to be live")

        bridging(replace(address_of(double), model="m"), act)
    assert len(warnings_of(caplog, "m is not among the models")) == 1


def test_a_model_that_the_engine_never_listed_is_live_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """An operator may have chosen a name for routing, which the engine does not have."""
    with ModelsDouble("other") as double:

        async def act(engine: EngineUnderTest) -> None:
            old = await fed_with_a_batch(engine, double, "m")
            await asyncio.to_thread(double.restart)
            await engine.until(lambda: is_live(engine, "m", old), "the feed to be live")

        bridging(replace(address_of(double), model="m"), act)
    assert not warnings_of(caplog, "is not among the models")


def test_an_engine_without_events_is_registered_under_its_new_model() -> None:
    """Its metrics page shows that it was restarted."""
    with ModelsDouble("a") as double:

        async def act(engine: EngineUnderTest) -> None:
            await engine.until(lambda: is_live(engine, "a"), "the feed")
            double.lists("b")
            await asyncio.to_thread(double.restart)
            await engine.until(lambda: is_live(engine, "b"), "the feed under the new model")
            assert registered(engine) == ["a", "b"]

        bridging(replace(address_of(double), events=None, replay=None), act)


def test_a_rank_whose_records_are_of_another_model_begins_an_incarnation() -> None:
    """The process is the same; only a new incarnation removes the blocks that were published under the other model."""
    with ModelsDouble("b") as double:

        async def under_a_wrong_name(engine: EngineUnderTest) -> None:
            await fed_with_a_batch(engine, double, "a")

        async def act(engine: EngineUnderTest) -> None:
            await engine.until(lambda: is_live(engine, "b"), "the feed to be live")

        last = bridging(replace(address_of(double), model="a"), under_a_wrong_name)[-1]
        epoch = Epoch(last.incarnation, 0)
        progress = Progress(RANK, epoch, last.sequence, last.digest, model="a", block_size=16, lease_ms=6000, feed=LIVE)
        batches = bridging(address_of(double), act, RecoveredRank(progress, Ledger(False)))
    new = [batch for batch in batches if batch.incarnation > last.incarnation]
    assert new and new[0].sequence == BEFORE_FIRST and any(map(stores, new))
    assert not [batch for batch in batches if batch.incarnation == last.incarnation and batch.feed is LIVE]


def test_a_bridge_that_waits_for_the_lease_takes_over_with_the_model_of_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no feed that finds out that the engine was restarted."""
    monkeypatch.setattr(bridged_engine_module, "STANDBY_CHECK_S", 0.2)
    with ModelsDouble("a") as double:

        async def act(engine: EngineUnderTest) -> None:
            held = Worker(RANK.worker_id, double.url, "a", 16, lease=BridgeLease("other", 1, 4000, 1))
            engine.bridged.lease_handle.on_record(decode_worker(encode_worker(held)))
            await engine.until(lambda: engine.claimed == ["a"], "the model of before")
            double.lists("b")
            await engine.until(lambda: is_live(engine, "b"), "the feed to be live")
            assert registered(engine) == ["b"]

        bridging(address_of(double), act)
