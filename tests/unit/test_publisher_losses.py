"""Batches for which a publisher finds no room in Kafka's client: the rank is not exact afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams.core.events import Heartbeat
from streams.core.reducer.ordering import Health
from streams.engines import publisher as publishing
from streams.engines.publisher import KvEventPublisher
from streams.errors import KvStreamsError
from streams.kafka.records import decode_batch
from streams.settings import Settings
from tests.helpers.invariants import members_of
from tests.helpers.plain_run_store import PlainHoldings, plain_holdings
from tests.helpers.recording_producer import RecordingProducer

PROMPT = list(range(32))


class Kafka(RecordingProducer):
    """A client whose buffer is full while `full` is set."""

    full = False

    def produce(self, topic: str, *args: Any, **record: Any) -> None:
        if self.full:
            raise BufferError("the queue is full")
        super().produce(topic, *args, **record)


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    monkeypatch.setattr(publishing, "PUBLISH_TIMEOUT_S", 0.01)
    return Kafka(acknowledges=True)


def publisher(kafka: Kafka) -> KvEventPublisher:
    opened = KvEventPublisher(Settings(), 7, "m", incarnation=1, kafka=kafka)
    opened.stored([11, 12], PROMPT)
    return opened


def refused(kafka: Kafka, call: Callable[[], object]) -> None:
    kafka.full = True
    with pytest.raises(KvStreamsError, match="Kafka took no event"):
        call()
    kafka.full = False


def applied(kafka: Kafka) -> PlainHoldings:
    holdings = plain_holdings()
    for value in kafka.values("kv-events"):
        batch = decode_batch(value)
        if isinstance(batch.body, Heartbeat):
            holdings.renew(batch, batch.body)
        else:
            holdings.apply(batch, batch.body.events)  # type: ignore[union-attr]  # nothing is restated here
    return holdings


def health(kafka: Kafka) -> Health:
    (progress,) = applied(kafka).progress.values()
    return progress.health


def test_a_batch_that_waits_is_sent_by_the_next_call(kafka: Kafka) -> None:
    """Its caller got an error, and the batch is not lost."""
    of = publisher(kafka)
    refused(kafka, lambda: of.removed([11]))
    of.removed([12])
    assert health(kafka) is Health.EXACT
    assert not list(members_of(applied(kafka).runs))


@pytest.mark.parametrize("then", ["another batch", "a heartbeat", "a flush"])
def test_a_batch_that_found_no_room_leaves_its_rank_degraded(kafka: Kafka, then: str) -> None:
    """Whatever follows it, even if the caller goes on as if nothing had happened."""
    of = publisher(kafka)
    refused(kafka, lambda: of.removed([11]))  # it waits
    refused(kafka, lambda: of.removed([12]))
    if then == "another batch":
        of.stored([13], range(100, 116))
    elif then == "a heartbeat":
        of._heartbeat("publisher:x", 6000)
    else:
        of.flush()
    assert health(kafka) is Health.DEGRADED
    (chunk,) = of._writer.restatement(1)
    assert not chunk.exact  # a restatement does not make the rank exact either
    of.cleared()
    assert health(kafka) is Health.EXACT


def test_a_transition_that_found_no_room_leaves_its_rank_degraded(kafka: Kafka) -> None:
    """An eviction from a pool may be among them."""
    of = publisher(kafka)
    refused(kafka, lambda: of.removed([11]))
    refused(kafka, lambda: of.publish_cxl_state_transition(1, [12], "evicted"))
    of.flush()
    assert health(kafka) is Health.DEGRADED
