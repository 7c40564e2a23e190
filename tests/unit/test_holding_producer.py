"""What a producer gives its client, and what it holds back."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.kafka import holding_producer
from streams.kafka.clients import IN_FLIGHT_FREELY, partition_of_key
from streams.kafka.holding_producer import HoldingProducer

TOPIC = "t"
PARTITIONS = 4
#: Two keys of different partitions.
A, B = b"1", b"2"


class Watched(HoldingProducer):
    """A producer whose client is never given a record: it notes them, and the test makes the reports."""

    def __init__(self, n_max: int = 100, bytes_max: int = 10_000) -> None:
        config = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
        super().__init__(config, partitions={TOPIC: PARTITIONS}, n_max=n_max, bytes_max=bytes_max)
        self.records: list[tuple[int, Any]] = []
        self.refusing: Exception | None = None

    def _give(self, topic: str, value: Any, key: Any, on_delivery: Any, how: Any) -> None:  # noqa: ARG002
        if self.refusing is not None:
            raise self.refusing
        self.records.append((int(value), on_delivery))

    @property
    def values(self) -> list[int]:
        return [value for value, _ in self.records]

    @property
    def n_held(self) -> int:
        return len(self) - Producer.__len__(self)  # a client counts what it has to report of its broker as well

    def acknowledge(self, begin: int, end: int) -> None:
        for _, on_delivery in self.records[begin:end]:
            on_delivery(None, Message())


def send(kafka: Watched, values: range, key: bytes = A, **more: Any) -> None:
    for value in values:
        kafka.produce(TOPIC, key=key, value=str(value).encode(), **more)


def test_a_partition_gets_its_next_records_in_order_when_those_before_are_acknowledged() -> None:
    """Another partition does not wait for it."""
    assert partition_of_key(A, PARTITIONS) != partition_of_key(B, PARTITIONS)
    kafka = Watched()
    reported: list[KafkaError | None] = []
    send(kafka, range(20), on_delivery=lambda error, _: reported.append(error))
    assert kafka.values == list(range(IN_FLIGHT_FREELY))
    assert kafka.n_held == 20 - IN_FLIGHT_FREELY
    send(kafka, range(100, 103), B)
    assert kafka.values == [*range(IN_FLIGHT_FREELY), 100, 101, 102]
    kafka.acknowledge(0, 1)
    assert kafka.values[IN_FLIGHT_FREELY + 3 :] == list(range(IN_FLIGHT_FREELY, 20))
    kafka.acknowledge(1, IN_FLIGHT_FREELY)
    send(kafka, range(20, 21))
    assert kafka.values[-1] == 19, "15 records are on their way"
    kafka.acknowledge(IN_FLIGHT_FREELY + 3, len(kafka.records))
    assert kafka.values[-1] == 20
    kafka.acknowledge(len(kafka.records) - 1, len(kafka.records))
    assert reported == [None] * 20  # and the last one has no callback
    assert kafka.n_held == 0


def test_at_most_so_many_are_handed_over_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones follow when these are acknowledged."""
    monkeypatch.setattr(holding_producer, "TOGETHER_MAX", 7)
    kafka = Watched()
    send(kafka, range(20))
    kafka.acknowledge(0, IN_FLIGHT_FREELY)
    assert kafka.values == list(range(IN_FLIGHT_FREELY + 7))
    kafka.acknowledge(IN_FLIGHT_FREELY, IN_FLIGHT_FREELY + 7)
    assert kafka.values[-1] == 18
    kafka.acknowledge(IN_FLIGHT_FREELY + 7, 19)
    assert kafka.values == list(range(20))


def test_records_without_a_key_and_of_other_topics_are_not_held_back() -> None:
    kafka = Watched()
    for value in range(9):
        kafka.produce(TOPIC, value=str(value).encode(), key=None)
        kafka.produce("other", value=str(value).encode(), key=A)
    assert len(kafka.records) == 18


@pytest.mark.parametrize("limits", [{"n_max": 3}, {"bytes_max": 6}])
def test_beyond_its_limits_the_queue_is_full_as_a_clients_is(limits: dict[str, int]) -> None:
    """Each record has two bytes. Once some are acknowledged, there is room again."""
    kafka = Watched(**limits)
    send(kafka, range(IN_FLIGHT_FREELY + 3))
    with pytest.raises(BufferError):
        send(kafka, range(9, 10))
    kafka.acknowledge(0, IN_FLIGHT_FREELY)
    send(kafka, range(8, 10))
    assert kafka.values == list(range(10))


def test_a_record_that_is_refused_later_is_reported_and_one_without_room_is_tried_again() -> None:
    kafka = Watched()
    reported: list[KafkaError | None] = []
    send(kafka, range(IN_FLIGHT_FREELY + 2), on_delivery=lambda error, _: reported.append(error))
    kafka.refusing = BufferError()
    kafka.acknowledge(0, IN_FLIGHT_FREELY)
    assert kafka.n_held == 2
    kafka.refusing = KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    kafka.poll(0)
    assert kafka.n_held == 0
    refused = KafkaError.MSG_SIZE_TOO_LARGE
    assert [error and error.code() for error in reported] == [*[None] * IN_FLIGHT_FREELY, refused, refused]


def test_flush_waits_for_what_is_held_back_and_says_what_is_left() -> None:
    kafka = Watched()
    send(kafka, range(IN_FLIGHT_FREELY + 2))
    began_s = time.monotonic()
    assert kafka.flush(0.2) >= 2
    assert time.monotonic() - began_s >= 0.2
    kafka.acknowledge(0, IN_FLIGHT_FREELY)
    kafka.flush(0.2)
    assert kafka.n_held == 0
