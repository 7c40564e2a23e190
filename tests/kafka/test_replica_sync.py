"""Routers as processes on a Kafka of the test's own: they share bookings while one is killed and Kafka is away.

This is a small run of tests.replicas, which `make replicas` plays in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, TOKENS, metrics, served
from tests.helpers.broker import BreakableKafka
from tests.replicas import CLEANER, MODES, Replicas, settings_of

SEED = 11


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BreakableKafka]:
    """A broker that the test may stop."""
    own = BreakableKafka(LocalKafkaConfig(tmp_path / "kafka", CLEANER))
    yield own
    own.down()


@pytest.mark.parametrize("mode", MODES)
def test_routers_agree_whatever_happens_to_them_and_to_kafka(
    broker: BreakableKafka, tmp_path: Path, children: Children, mode: str
) -> None:
    """After a killed router, a paused Kafka, a compacted topic and a late start, all have the loads of the log."""
    settings = settings_of(broker.up().bootstrap, stale_after_ms=500, router_mode=mode)
    Replicas(Stack(settings, tmp_path, children), broker, SEED).run(150, 1.0, broker.pause, broker.resume)


def test_after_expiry_nothing_remains_anywhere(scope: Settings) -> None:
    """Bookings expire, freed or not, on routers that read them as they were made and on one that starts late."""
    short = replace(scope, booking_ttl_s=3.0)
    with served(short) as api, served(short) as peer:
        api.call("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": 16}).given()
        for number in range(6):
            api.route(token_ids=TOKENS, request_id=str(number))
        for number in range(3):
            api.call("DELETE", f"/loads/{number}").given()
        with served(short) as late:
            for each in (api, peer, late):
                wait_for(
                    lambda each=each: metrics(each)["kvstreams_bookings_known"] == 0,  # type: ignore[misc]
                    PATIENCE_S,
                    "every booking to expire",
                )
                assert each.loads([1]) == {(1, 0): (0, 0, 0)}
