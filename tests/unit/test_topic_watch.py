"""Readings of the topics go on whatever one of them raises; answers depend on them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.kafka import topic_watch
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.settings import Settings
from streams.topics import topics

PATIENCE_S = 20.0


def await_reading() -> None:
    """Watch topics until one reading was passed on."""
    settings, read = Settings(kafka="127.0.0.1:1", behind_after_ms=10), threading.Event()
    watch = TopicWatch(settings, topics(settings).all(), (), lambda _: read.set())
    watch.start()
    try:
        assert read.wait(PATIENCE_S)
    finally:
        watch.stop()


@pytest.mark.parametrize("failure", [TimeoutError(), KafkaException(KafkaError(-195)), ValueError("x")])
def test_a_reading_that_fails_does_not_end_the_readings(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker without a processor answers too late, which is an exception of another kind than its refusals."""
    n_failed = 0

    def reading(*_: Any, **__: Any) -> TopicReading:
        nonlocal n_failed
        if n_failed < 3:
            n_failed += 1
            raise failure
        return TopicReading(0, {}, (), {})

    monkeypatch.setattr(TopicWatch, "_read", reading)
    await_reading()
    assert n_failed == 3


def test_a_client_whose_readings_all_fail_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of one client may time out forever, while those of a new one are answered."""
    clients: list[object] = []

    def client(_: Settings) -> object:
        clients.append(object())
        return clients[-1]

    def reading(_: TopicWatch, used: object, *__: Any, **___: Any) -> TopicReading:
        if used is clients[0]:
            raise TimeoutError
        return TopicReading(0, {}, (), {})

    monkeypatch.setattr(topic_watch, "admin", client)
    monkeypatch.setattr(TopicWatch, "_read", reading)
    await_reading()
    assert len(clients) == 2
