"""Topics that a bridge writes and reads are deleted and recreated while it runs."""

from __future__ import annotations

from streams.kafka import delete_topics, ensure_topics
from streams.local.processes import Children
from streams.local.stack import Stack
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

N_BLOCKS = 20

#: Lines that a bridge may log while its topics are away, for one engine: an outage is logged once a minute.
LINES_MAX = 40


def test_a_bridge_outlives_the_deletion_of_its_topics(stack: Stack, children: Children) -> None:
    """It neither ends nor fills its log; once the topics are back, its engine is registered and gets requests again."""
    fleet = TrustFleet(stack, stack.worker(), children)
    specs, model = topics(stack.settings), fleet.model()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        bridge = fleet.bridge(engine_option(1, engine))
        fleet.wait_exact(model, prompt, N_BLOCKS)
        n_before = len(bridge.log_path.read_text().splitlines())
        delete_topics(stack.settings, [specs.workers, specs.kv_events])
        wait_for(lambda: fleet.api.call("GET", "/ready").status == 503, PATIENCE_S, "the router to notice")
        engine.store(5000)
        ensure_topics(stack.settings, specs.all())
        engine.clear()
        engine.store(1000, 3)

        def chosen_with_blocks() -> bool:
            answer = fleet.answered(model, prompt)
            return answer.status == 200 and answer.json["overlap_blocks"] == 3

        wait_for(chosen_with_blocks, 2 * PATIENCE_S, "the engine to get requests again")
        assert bridge.running
        lines = bridge.log_path.read_text().splitlines()[n_before:]
        assert len(lines) < LINES_MAX, lines
        assert not [line for line in lines if "Traceback" in line]


def test_ranks_without_a_batch_are_known_again_after_their_topic_was_recreated(
    stack: Stack, children: Children
) -> None:
    """An idle engine is exact, since its replay socket shows that it is empty; one without events is predicted."""
    fleet = TrustFleet(stack, stack.worker(), children)
    spec, idle_model, eventless_model = topics(stack.settings).kv_events, fleet.model(), fleet.model()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=idle_model) as idle, EngineDouble(model=eventless_model) as eventless:
        fleet.bridge(engine_option(1, idle), f"id=2,url={eventless.url}")

        def are_known() -> None:
            fleet.wait_exact(idle_model, prompt, 0)
            fleet.wait_answer(eventless_model, prompt, lambda found: found["mode"] == "approximate", "a prediction")

        are_known()
        delete_topics(stack.settings, [spec])
        for model in (idle_model, eventless_model):
            fleet.wait_answer(model, prompt, lambda found: found["mode"] == "degraded", "the loss to be noticed")
        ensure_topics(stack.settings, topics(stack.settings).all())
        are_known()
        idle.store(1000, N_BLOCKS)
        fleet.wait_exact(idle_model, prompt, N_BLOCKS)
