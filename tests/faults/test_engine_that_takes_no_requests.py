"""An engine whose sockets are up gets no requests while it cannot serve any: it sleeps, starts, or has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streams.core.events import ENDED_LEASE_MS, EngineEvents, FeedState, Heartbeat
from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Progress, judge, judge_chunk, renew
from streams.engines import evidence, feed_machine
from streams.engines.address import EngineAddress
from streams.engines.continuity import ReplayCheck
from streams.engines.metrics import parse_sleep
from tests.helpers.bridged_engine import EngineUnderTest, address_of
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import SUBSCRIBED_S, batches_of, bridging, fed_with_a_batch, registered
from tests.helpers.holdings import LEASE_MS, RANK, batch, heartbeat

#: Time in which records that must not come would come.
SETTLED_S = 2.5


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    with EngineDouble() as engine:
        yield engine


def sleep_state(awake: int, weights: int = 0, discard: int = 0, engine: int = 0) -> str:
    """The lines of vLLM's gauge."""
    values = {"awake": awake, "weights_offloaded": weights, "discard_all": discard}
    lines = [f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="{name}"}} {n}.0' for name, n in values.items()]
    return "".join(f"{line}\n" for line in [*lines, f'vllm:num_requests_running{{engine="{engine}"}} 0.0'])


def takes_requests(engine: EngineUnderTest) -> bool:
    """Whether the rank's last heartbeat gives it a lease."""
    leases = [each.body.lease_ms for each in batches_of(engine) if isinstance(each.body, Heartbeat)]
    return bool(leases) and leases[-1] != ENDED_LEASE_MS


@pytest.mark.parametrize("level", [(0, 1, 0), (0, 0, 1), (0, 0, 0)], ids=["level 1", "level 2", "paused"])
def test_a_sleeping_engine_gets_no_requests_until_it_is_awake(
    double: EngineDouble, level: tuple[int, int, int]
) -> None:
    """What it held before is not known to be there until its next batch, which clears it."""
    double.gauges = sleep_state(1)

    async def act(engine: EngineUnderTest) -> None:
        await fed_with_a_batch(engine, double, "m")
        assert takes_requests(engine)
        double.gauges = sleep_state(*level)
        await engine.until(lambda: not takes_requests(engine), "no requests")
        await engine.until(lambda: batches_of(engine)[-1].feed is FeedState.UNPROVEN, "its blocks to be uncertain")
        double.gauges = sleep_state(1)
        await engine.until(lambda: takes_requests(engine), "requests")
        await asyncio.sleep(SETTLED_S)
        assert batches_of(engine)[-1].feed is FeedState.UNPROVEN
        double.clear()
        await engine.until(lambda: batches_of(engine)[-1].feed is FeedState.LIVE, "the next batch")

    bridging(address_of(double), act)


def test_a_sleeping_engine_that_is_restarted_is_awake(double: EngineDouble) -> None:
    """The page of the new process need not have the gauge."""
    double.gauges = sleep_state(0, 1)

    async def act(engine: EngineUnderTest) -> None:
        await engine.until(lambda: bool(batches_of(engine)), "the feed")
        await engine.until(lambda: not takes_requests(engine), "no requests")
        double.gauges = 'vllm:num_requests_running{engine="0"} 0\n'
        await asyncio.to_thread(double.restart)
        await engine.until(lambda: takes_requests(engine), "requests")

    bridging(address_of(double), act)


def test_an_engine_without_events_that_sleeps_gets_no_requests(double: EngineDouble) -> None:
    double.gauges = sleep_state(0, 1)

    async def act(engine: EngineUnderTest) -> None:
        await engine.until(lambda: bool(batches_of(engine)) and not takes_requests(engine), "no requests")
        double.gauges = sleep_state(1)
        await engine.until(lambda: takes_requests(engine), "requests")

    bridging(replace(address_of(double), events=None, replay=None), act)


def test_each_rank_has_its_own_sleep_state() -> None:
    page = (sleep_state(1, engine=8) + sleep_state(0, 1, engine=9)).encode()
    assert parse_sleep(page, dp_size=2, dp_start=8) == {8: False, 9: True}
    assert parse_sleep(b"up 1\n", dp_size=1) == {}


@pytest.mark.parametrize("with_replay", [True, False])
@pytest.mark.parametrize("has_batch", [True, False])
def test_an_engine_whose_process_ended_gets_no_requests_at_once(
    double: EngineDouble, with_replay: bool, has_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replay socket never answers, and is not waited for."""

    async def wait_for_ever(*_: object) -> ReplayCheck:
        await asyncio.Event().wait()
        raise AssertionError

    async def act(engine: EngineUnderTest) -> None:
        if has_batch:
            await fed_with_a_batch(engine, double, "m")
        await engine.until(lambda: takes_requests(engine), "requests")
        await asyncio.sleep(SUBSCRIBED_S)
        with monkeypatch.context() as patched:
            patched.setattr(evidence, "check_last_batch", wait_for_ever)
            await asyncio.to_thread(double.stop)
            await engine.until(lambda: not takes_requests(engine), "no requests")
        double.start_again()
        await engine.until(lambda: takes_requests(engine), "requests of the new process")

    bridging(address_of(double) if with_replay else replace(address_of(double), replay=None), act)


def without_http(double: EngineDouble) -> None:
    """Let nothing listen at the HTTP port any more, while the sockets of events and replays go on."""
    double._http.shutdown()
    double._http.server_close()


def test_an_engine_that_publishes_and_does_not_listen_for_http_gets_no_requests(double: EngineDouble) -> None:
    """vLLM listens for events long before it listens for requests; a part of a process may also end."""

    async def act(engine: EngineUnderTest) -> None:
        await fed_with_a_batch(engine, double, "m")
        without_http(double)
        await engine.until(lambda: not takes_requests(engine), "no requests")
        n_before = len(batches_of(engine))
        ends_at_s = time.monotonic() + SETTLED_S
        while time.monotonic() < ends_at_s:
            double.store(1000 + 100 * double.sequence)
            await asyncio.sleep(0.1)
            assert not takes_requests(engine)
        assert any(isinstance(each.body, EngineEvents) for each in batches_of(engine)[n_before:])
        await asyncio.to_thread(double._stop_core)
        double._start()
        await engine.until(lambda: takes_requests(engine), "requests")

    bridging(address_of(double), act)


def test_pages_of_metrics_show_whether_an_engine_takes_requests(
    double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of events does not show it: the process goes on, or a proxy keeps the connection open."""
    double.gauges = sleep_state(1)

    async def act(engine: EngineUnderTest) -> None:
        await fed_with_a_batch(engine, double, "m")
        monkeypatch.setattr(feed_machine, "INCARNATION_CHECK_S", 600.0)
        await asyncio.sleep(SETTLED_S)  # what was due before
        without_http(double)
        await engine.until(lambda: not takes_requests(engine), "no requests")
        double.listen_for_http()
        await engine.until(lambda: takes_requests(engine), "requests")

    bridging(address_of(double), act)


def test_an_engine_is_not_registered_before_it_listens_for_http(double: EngineDouble) -> None:
    """A rank of which nothing is known would get requests."""
    without_http(double)
    events_only: EngineAddress = address_of(double)

    async def act(engine: EngineUnderTest) -> None:
        for _ in range(round(SETTLED_S / 0.1)):
            double.store(1 + 100 * (double.sequence + 1))
            await asyncio.sleep(0.1)
        assert not registered(engine) and not batches_of(engine)
        await asyncio.to_thread(double._stop_core)
        double._start()
        await engine.until(lambda: takes_requests(engine), "requests")

    bridging(events_only, act)


def test_a_rank_whose_lease_has_ended_stays_silent_whatever_it_publishes() -> None:
    """Otherwise it would get requests for a moment after each batch."""
    known = Progress(RANK, Epoch(Incarnation(1), 0), 0, model="m", block_size=16, lease_ms=LEASE_MS)
    ended = renew(known, heartbeat(0, lease_ms=ENDED_LEASE_MS), ENDED_LEASE_MS).progress
    assert ended.silent
    after = judge(ended, batch(1)).progress
    assert after.silent and after.sequence == 1
    assert judge_chunk(after, batch(1)).progress.silent
    assert not renew(after, heartbeat(1), LEASE_MS).progress.silent
