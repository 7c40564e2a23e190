"""Asking brokers for topics while the client replaces its first connections.

The double stands for a race inside of librdkafka, which a Kafka of several brokers shows now and then at a start.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection

from streams.errors import KvStreamsError
from streams.kafka import clients
from streams.settings import Settings
from streams.topics import topics


class Brokers:
    """An admin client of which the first n_failed requests fail with an error; then no topic exists."""

    def __init__(self, error: int, n_failed: int) -> None:
        self._error = error
        self.n_failed = n_failed

    def describe_topics(self, asked: TopicCollection, request_timeout: float) -> dict[str, Future[Any]]:
        assert request_timeout > 0
        self.n_failed -= 1
        code = self._error if self.n_failed >= 0 else KafkaError.UNKNOWN_TOPIC_OR_PART
        failed: Future[Any] = Future()
        failed.set_exception(KafkaException(KafkaError(code)))
        return dict.fromkeys(asked.topic_names, failed)

    def poll(self, timeout_s: float) -> int:
        return round(timeout_s)


def describe(monkeypatch: pytest.MonkeyPatch, brokers: Brokers) -> dict[str, Any]:
    monkeypatch.setattr(clients, "admin", lambda *_: brokers)
    settings = Settings()
    return dict(clients.describe_topics(settings, [topics(settings).workers]))


def test_a_request_whose_connection_was_replaced_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process does not end at its start because its client has found the brokers in the meantime."""
    brokers = Brokers(KafkaError._DESTROY_BROKER, clients.BOOTSTRAPS_REPLACED_MAX - 1)
    assert list(describe(monkeypatch, brokers).values()) == [None]
    assert brokers.n_failed == -1


@pytest.mark.parametrize(
    ("error", "n_sent"),
    [(KafkaError._DESTROY_BROKER, clients.BOOTSTRAPS_REPLACED_MAX), (KafkaError.CLUSTER_AUTHORIZATION_FAILED, 1)],
)
def test_other_errors_and_endless_replacements_are_raised(
    monkeypatch: pytest.MonkeyPatch, error: int, n_sent: int
) -> None:
    """Only that error is worth another request, and not for ever."""
    brokers = Brokers(error, 100)
    with pytest.raises(KvStreamsError):
        describe(monkeypatch, brokers)
    assert brokers.n_failed == 100 - n_sent
