"""Ranks whose events do not arrive, arrive late, or arrive incompletely: no answer about them says exact."""

from __future__ import annotations

import math
import threading
import time

import pytest

from streams.engines.connection import PING_INTERVAL_S, PING_TIMEOUT_S, PING_TIMEOUT_WITHOUT_REPLAY_S
from streams.engines.link_delay import LATE_S
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.slow_link import slow_link
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

N_BLOCKS = 20
PROMPT = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)

#: How long the answers are watched for a claim that must never be made.
WATCHED_S = 3.0

#: What an engine did this long ago must not be missing from an answer that claims to be exact.
KNOWN_AFTER_S = 1.0

#: A batch is late once it needed LATE_S more than the fastest one. Its record may then need 0.75 s to reach Kafka, and
#: as long from there to a router, before an answer is degraded for that. The rest is a batch's time on the link.
LATE_KNOWN_AFTER_S = LATE_S + 2 * 0.75 + 1.0


@pytest.mark.parametrize("case", ["nothing listens", "ports swapped", "idle, without replay"])
def test_a_rank_whose_event_stream_is_not_proven_is_not_exact(fleet: TrustFleet, case: str) -> None:
    """The engine holds blocks, but no event of it arrives; the answers are degraded, no_events_yet."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.gauges = "vllm:num_requests_running 1\n"
        engine.store(PROMPT.start, N_BLOCKS)
        match case:
            case "nothing listens":
                option = engine_option(worker_id, engine, events=f"tcp://127.0.0.1:{free_port()}", replay="")
            case "ports swapped":
                option = engine_option(worker_id, engine, events=engine.replay, replay=engine.events)
            case _:
                option = engine_option(worker_id, engine, replay="")
        with fleet.watching(model, PROMPT) as watch:
            bridge = fleet.bridge(option)
            fleet.wait_answer(model, PROMPT, lambda found: bool(found["candidates"]), "the worker")
            time.sleep(WATCHED_S)
        assert watch.samples and not watch.wrong_while_exact(N_BLOCKS)
        assert {sample.answer.get("degraded_because") for sample in watch.samples} == {"no_events_yet"}
        if case == "idle, without replay":
            engine.store(50_000)  # the number of this batch shows that another one is missing
            fleet.wait_answer(model, PROMPT, lambda found: found.get("degraded_because") == "events_lost", "a gap")
        elif case == "nothing listens":
            log = bridge.log_path
            wait_for(lambda: "requests are running, but no event" in log.read_text(), PATIENCE_S, "the warning")
        if case != "idle, without replay":
            assert bridge.log_path.read_text().count("no events can be received") == 1


@pytest.mark.first_ring("feed_behind")
def test_a_gap_that_the_bridge_knows_of_is_stated_before_it_is_filled(fleet: TrustFleet) -> None:
    """While the replay socket is silent, answers are degraded, feed_behind; then the blocks appear, exact."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.store(50_000)
        fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_answer(model, PROMPT, lambda found: found["mode"] == "exact", "exact answers")
        engine.stop_replays()
        engine.store(PROMPT.start, N_BLOCKS, live=False)
        engine.store(60_000)
        stored_s = time.monotonic()
        with fleet.watching(model, PROMPT) as watch:
            fleet.wait_answer(model, PROMPT, lambda found: found.get("degraded_because") == "feed_behind", "the gap")
            time.sleep(WATCHED_S)
        assert not [one for one in watch.wrong_while_exact(N_BLOCKS) if one.sent_s > stored_s + KNOWN_AFTER_S]
        engine.answer_replays()
        answer = fleet.wait_answer(model, PROMPT, lambda found: found["mode"] == "exact", "exact answers again")
        assert answer["overlap_blocks"] == N_BLOCKS


def test_a_hanging_metrics_page_does_not_delay_events(fleet: TrustFleet) -> None:
    """No exact answer lacks a block that the engine stored more than a second before."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.store(50_000)
        fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_answer(model, PROMPT, lambda found: found["mode"] == "exact", "exact answers")
        engine.answers.clear()
        time.sleep(WATCHED_S)
        with fleet.watching(model, PROMPT) as watch:
            engine.store(PROMPT.start, N_BLOCKS)
            stored_s = time.monotonic()
            time.sleep(WATCHED_S)
        late = [one for one in watch.wrong_while_exact(N_BLOCKS) if one.sent_s > stored_s + KNOWN_AFTER_S]
        assert watch.samples and not late


def test_a_feed_that_catches_up_over_a_slow_link_is_not_exact(fleet: TrustFleet) -> None:
    """A bridge that starts late reads what the engine has kept at 60 KB/s; answers are exact only at the end."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine, slow_link(engine.replay, 60_000) as replay:
        for n in range(20):
            engine.store(100_000 + 10_000 * n, 100)
        engine.store(PROMPT.start, N_BLOCKS)
        with fleet.watching(model, PROMPT) as watch:
            fleet.bridge(engine_option(worker_id, engine, replay=replay))
            answer = fleet.wait_answer(model, PROMPT, lambda found: found["mode"] == "exact", "exact answers")
        assert answer["overlap_blocks"] == N_BLOCKS
        assert not watch.wrong_while_exact(N_BLOCKS)
        assert "feed_behind" in {sample.answer.get("degraded_because") for sample in watch.samples}


@pytest.mark.parametrize("has_replay", [True, False])
def test_live_batches_that_arrive_late_are_not_exact(fleet: TrustFleet, has_replay: bool) -> None:
    """The blocks of a prompt wait behind six seconds of other batches; no exact answer lacks them for long."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with (
        EngineDouble(model=model) as engine,
        slow_link(engine.events, 60_000) as events,
        slow_link(engine.replay, 60_000) as replay,
    ):
        fleet.bridge(engine_option(worker_id, engine, events=events, replay=replay if has_replay else ""))

        def exact() -> bool:
            engine.clear()  # without a replay socket, a batch proves the stream; and a clear, that nothing is missing
            return bool(fleet.route(model, PROMPT)["mode"] == "exact")

        fleet.wait_answer(model, PROMPT, lambda found: bool(found["candidates"]), "the worker")
        wait_for(exact, PATIENCE_S, "exact answers", 0.5)
        time.sleep(WATCHED_S)
        with fleet.watching(model, PROMPT) as watch:
            for n in range(80):
                engine.store(1_000_000 + 10_000 * n, 60)
            engine.store(PROMPT.start, N_BLOCKS)
            stored_s = time.monotonic()
            answer = fleet.wait_answer(
                model, PROMPT, lambda found: (found["mode"], found["overlap_blocks"]) == ("exact", N_BLOCKS), "the end"
            )
        assert answer["chosen_mode"] == "exact"
        assert time.monotonic() > stored_s + LATE_KNOWN_AFTER_S + 1.0, "the link was not slow"
        after_s = [one.sent_s - stored_s for one in watch.wrong_while_exact(N_BLOCKS)]
        assert not [each for each in after_s if each > LATE_KNOWN_AFTER_S]


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_link_that_loses_everything_is_noticed(fleet: TrustFleet, has_replay: bool) -> None:
    """The engine stores blocks while nothing passes between it and its bridge, and no connection is closed."""
    model, worker_id, cut = fleet.model(), fleet.worker_id(), threading.Event()
    with (
        EngineDouble(model=model) as engine,
        slow_link(engine.events, math.inf, cut) as events,
        slow_link(engine.replay, math.inf, cut) as replay,
        slow_link(engine.url, math.inf, cut) as url,
    ):
        fleet.bridge(engine_option(worker_id, engine, url=url, events=events, replay=replay if has_replay else ""))
        fleet.wait_answer(model, PROMPT, lambda found: bool(found["candidates"]), "the worker")

        def exact() -> bool:
            engine.store(50_000)
            engine.clear()  # without a replay socket, a batch proves the stream; and a clear, that nothing is missing
            return bool(fleet.route(model, PROMPT)["mode"] == "exact")

        wait_for(exact, PATIENCE_S, "exact answers", 0.5)
        cut.set()
        with fleet.watching(model, PROMPT) as watch:
            stored_s = time.monotonic()
            engine.store(PROMPT.start, N_BLOCKS)
            time.sleep(PING_INTERVAL_S + PING_TIMEOUT_WITHOUT_REPLAY_S + WATCHED_S)
            cut.clear()
            if has_replay:
                fleet.wait_exact(model, PROMPT, N_BLOCKS)
        noticed_s = PING_INTERVAL_S + (PING_TIMEOUT_S if has_replay else PING_TIMEOUT_WITHOUT_REPLAY_S)
        wrong_after_s = [one.sent_s - stored_s for one in watch.wrong_while_exact(N_BLOCKS)]
        assert wrong_after_s, "the link was not cut"
        assert max(wrong_after_s) < noticed_s + KNOWN_AFTER_S


def test_an_engine_whose_http_port_does_not_answer_is_fed_from_its_events(fleet: TrustFleet) -> None:
    """Until it is fed, no answer is exact; its events prove that it is running, and the blocks appear."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.answers.clear()
        with fleet.watching(model, PROMPT) as watch:
            fleet.bridge(engine_option(worker_id, engine, model=model))
            engine.store(PROMPT.start, N_BLOCKS)
            fleet.wait_answer(model, PROMPT, lambda found: bool(found["candidates"]), "the worker")
            numbers = iter(range(50_000, 90_000, 100))

            def known() -> bool:
                engine.store(next(numbers))  # it reaches the bridge once the bridge is connected
                answer = fleet.route(model, PROMPT)
                return (answer["mode"], answer["overlap_blocks"]) == ("exact", N_BLOCKS)

            wait_for(known, PATIENCE_S, "the blocks", 0.2)
        assert not watch.wrong_while_exact(N_BLOCKS)


@pytest.mark.parametrize("answer", ["[]", '{"data":[{}]}', "not json", '{"data":{"id":1}}'])
def test_what_one_engine_answers_does_not_end_the_feed_of_another(fleet: TrustFleet, answer: str) -> None:
    """An engine whose /v1/models cannot be used is fed once it can; meanwhile the other engine's blocks appear."""
    model, worker_id, bad_model, bad_id = fleet.model(), fleet.worker_id(), fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine, EngineDouble(model=bad_model) as bad:
        good_body, bad.models_body = bad.models_body, answer
        engine.store(PROMPT.start, N_BLOCKS)
        bad.store(PROMPT.start, N_BLOCKS)
        bridge = fleet.bridge(engine_option(bad_id, bad), engine_option(worker_id, engine))
        found = fleet.wait_answer(model, PROMPT, lambda found: found["overlap_blocks"] == N_BLOCKS, "the blocks")
        assert found["mode"] in ("exact", "degraded")
        assert bridge.log_path.read_text().count("does not name the engine's model") == 1
        bad.models_body = good_body
        fleet.wait_answer(bad_model, PROMPT, lambda found: found["overlap_blocks"] == N_BLOCKS, "the other blocks")
