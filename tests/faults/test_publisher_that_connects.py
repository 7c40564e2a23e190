"""An engine's publisher may connect instead of listening: the bridge listens, or says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from streams.core.events import EngineEvents, FeedState
from streams.engines import connection
from streams.engines.address import check_distinct, engine_address, needs_lookup, port_above, rank_endpoints
from streams.errors import SettingsError
from streams.kafka.records import decode_worker
from streams.lab.kafka.ports import free_port
from tests.helpers.bridged_engine import EngineUnderTest, address_of
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import batches_of, bridging, warnings_of


class ConnectingEngine(EngineDouble):
    """An engine whose publisher connects to its address of events."""

    def _bind(self, socket: Any, address: str) -> None:
        if address == self.events:
            socket.connect(address)
        else:
            super()._bind(socket, address)


@pytest.fixture
def double() -> Iterator[ConnectingEngine]:
    with ConnectingEngine() as engine:
        yield engine


def is_live_with(engine: EngineUnderTest, n_batches: int) -> bool:
    """Whether the feed is live, and its incarnation has this many batches."""
    batches = batches_of(engine)
    of_last = [each for each in batches if each.incarnation == batches[-1].incarnation]
    numbers = {each.sequence for each in of_last if isinstance(each.body, EngineEvents) and each.sequence >= 0}
    return bool(batches) and batches[-1].feed is FeedState.LIVE and len(numbers) == n_batches


@pytest.mark.parametrize("with_replay", [True, False])
def test_the_bridge_listens_for_an_engine_that_connects(double: ConnectingEngine, with_replay: bool) -> None:
    """Also for its next process, which has another incarnation."""
    address = replace(address_of(double), events=f"bind:{double.events}")

    async def act(engine: EngineUnderTest) -> None:
        async def published() -> None:
            await engine.until(lambda: bool(engine.bridged._feeds), "the feed")
            (feed,) = engine.bridged._feeds.values()
            await engine.until(lambda: feed._receiver.connection.completed_at_s is not None, "the connection")
            await asyncio.sleep(0.5)
            double.store(1)
            await engine.until(lambda: is_live_with(engine, 1), "the first batch")

        await published()
        first = batches_of(engine)[-1].incarnation
        await asyncio.to_thread(double.restart)
        await engine.until(lambda: batches_of(engine)[-1].incarnation > first, "another incarnation")
        await published()
        assert decode_worker(engine.producer.values("workers")[-1]).events_endpoint == f"bind:{double.events}"

    bridging(address if with_replay else replace(address, replay=None), act)


def test_a_second_publisher_at_one_port_is_reported(double: ConnectingEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Their batches would be mixed: each rank needs a port of its own."""

    async def act(engine: EngineUnderTest) -> None:
        await engine.until(lambda: bool(batches_of(engine)), "the feed")
        with ConnectingEngine(ports=(None, int(double.events.rsplit(":", 1)[1]), None)):
            await engine.until(lambda: bool(warnings_of(caplog, "a second publisher has connected")), "the warning")

    bridging(replace(address_of(double), events=f"bind:{double.events}"), act)


@pytest.mark.parametrize("prefix", ["", "bind:"], ids=["the bridge connects too", "nobody connects"])
def test_the_log_names_the_cause(
    prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.5)
    with EngineDouble() as engine_elsewhere:
        events = f"{prefix}tcp://127.0.0.1:{free_port()}"
        cause = "no publisher has connected" if prefix else "then vLLM connects instead of listening"

        async def act(engine: EngineUnderTest) -> None:
            await engine.until(lambda: bool(warnings_of(caplog, cause)), "the warning")

        bridging(replace(address_of(engine_elsewhere), events=events), act)
    assert len(warnings_of(caplog, "no events can be received")) == 1


def test_each_rank_has_a_port_of_its_own_to_connect_to() -> None:
    engine = engine_address("id=1,url=http://gpu1:8000,events=bind:tcp://*:5557,dp=3")
    assert engine.events is not None and not needs_lookup(engine)
    assert rank_endpoints(engine.events, 3) == [f"bind:tcp://*:{port}" for port in (5557, 5558, 5559)]
    assert port_above("bind:ipc:///run/events", 1) == "bind:ipc:///run/events_1"
    with pytest.raises(SettingsError):
        check_distinct([engine, engine_address("id=2,url=http://gpu2:8000,events=bind:tcp://*:5559")])


@pytest.mark.parametrize("part", ["events=bind:http://gpu1:80", "events=bind:tcp://*", "url=bind:tcp://gpu1:80"])
def test_only_a_socket_of_events_with_a_port_can_be_listened_at(part: str) -> None:
    with pytest.raises(SettingsError):
        engine_address(f"id=1,url=http://gpu1:8000,{part}" if part.startswith("events") else f"id=1,{part}")
