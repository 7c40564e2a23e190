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
