"""Engines that a bridge is given while it runs, and engines without events: what a real router answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.engines.address import worker_id_of
from streams.lab.processes import Child, Children
from streams.process.waiting import wait_for
from streams.settings import as_environ
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

N_BLOCKS = 4
PROMPT = list(range(1000, 1000 + N_BLOCKS * BLOCK_SIZE))

Bridge = Callable[..., Child]


@pytest.fixture
def bridge(fleet: TrustFleet, children: Children, tmp_path: Path) -> Bridge:
    """Start bridges with any options; each has a lease of 2 s."""

    def start(*options: str) -> Child:
        log = tmp_path / f"bridge-{time.monotonic_ns()}.log"
        environ = {**as_environ(fleet.stack.settings), "KVSTREAMS_BRIDGE_LEASE_S": "2"}
        return children.add(Child("bridge", ["-m", "streams.cli", "bridge", *options], log, environ)).start()

    return start


def refused(fleet: TrustFleet, model: str) -> dict[str, int]:
    """Return which filters refuse the ranks of a model, without other tests' workers; {} for an answer."""
    answer = fleet.answered(model, PROMPT)
    if answer.status == 200:
        return {}
    counts: dict[str, int] = answer.json["error"]["detail"].get("refused_ranks", {})
    return {reason: n for reason, n in counts.items() if reason != "other_model"}


def test_engines_of_a_file_come_and_go_while_the_bridge_runs(fleet: TrustFleet, bridge: Bridge, tmp_path: Path) -> None:
    """An engine that is taken out of the file gets no request soon after; it returns with its blocks, and exactly."""
    model, first_id, second_id = fleet.model(), fleet.worker_id(), fleet.worker_id()
    path = tmp_path / "engines.toml"

    def table(worker_id: int, engine: EngineDouble) -> str:
        parts = dict(part.split("=", 1) for part in engine_option(worker_id, engine).split(",")[1:])
        return f"[[engine]]\nid = {worker_id}\n" + "".join(f'{name} = "{value}"\n' for name, value in parts.items())

    with EngineDouble(model=model) as first, EngineDouble(model=model) as second:
        first.store(PROMPT[0], N_BLOCKS)
        path.write_text(table(first_id, first) + 'taints = ["spot"]\n')
        bridge("--engines-file", str(path))
        assert fleet.wait_exact(model, PROMPT, N_BLOCKS)["worker_id"] == first_id
        assert fleet.api.workers()[first_id]["taints"] == ["spot"]

        path.write_text(table(second_id, second))
        removed_s = time.monotonic()
        answer = fleet.wait_answer(model, PROMPT, lambda answer: answer["worker_id"] == second_id, "the second engine")
        wait_for(lambda: fleet.route(model, PROMPT)["mode"] == "exact", PATIENCE_S, "the second engine to be known")
        wait_for(
            lambda: {each["worker_id"] for each in fleet.route(model, PROMPT)["candidates"]} == {second_id},
            PATIENCE_S,
            "the first engine to be no candidate",
        )
        print(f"released after {time.monotonic() - removed_s:.1f} s, {answer['mode']}")
        assert fleet.api.workers()[first_id]["url"] == first.url  # its record belongs to the operator

        first.store(7000, 2)  # while no bridge feeds it
        path.write_text(table(first_id, first) + table(second_id, second))
        assert fleet.wait_exact(model, PROMPT, N_BLOCKS)["worker_id"] == first_id
        assert fleet.wait_exact(model, list(range(7000, 7000 + 2 * BLOCK_SIZE)), 2)["worker_id"] == first_id


def test_a_bridge_takes_over_workers_of_the_registry_that_no_bridge_feeds(fleet: TrustFleet, bridge: Bridge) -> None:
    """An engine is fed if it was registered with its addresses, and if the bridge that fed it was killed.

    From when the silence was noticed, no answer is exact before the other bridge feeds the engine.
    """
    model, worker_id, other_id = fleet.model(), fleet.worker_id(), fleet.worker_id()
    with EngineDouble(model=model) as engine, EngineDouble(model=model) as other:
        engine.store(PROMPT[0], N_BLOCKS)
        leased = bridge("--engine", engine_option(worker_id, engine))
        fleet.wait_exact(model, PROMPT, N_BLOCKS)
        bridge("--engines-registry")
        body = {"url": other.url, "model": model, "block_size": BLOCK_SIZE, "events_endpoint": other.events}
        assert fleet.api.call("PUT", f"/workers/{other_id}", body | {"replay_endpoint": other.replay}).status in (
            200,
            201,
        )
        other.store(9000, 2)
        assert fleet.wait_exact(model, list(range(9000, 9000 + 2 * BLOCK_SIZE)), 2)["worker_id"] == other_id
        with fleet.watching(model, PROMPT) as watch:
            leased.kill()
            engine.clear()
            engine.store(8000, 2)
            answer = fleet.wait_exact(model, list(range(8000, 8000 + 2 * BLOCK_SIZE)), 2)
        assert answer["worker_id"] == worker_id
        noticed_s = next(sample.received_s for sample in watch.samples if sample.mode == "degraded")
        assert not [sample for sample in watch.wrong_while_exact(0) if sample.sent_s > noticed_s]


def test_each_address_of_a_name_is_an_engine(fleet: TrustFleet, bridge: Bridge) -> None:
    """The operating system resolves the name; the engine's id follows from its URL."""
    model = fleet.model()
    with EngineDouble(model=model) as engine:
        engine.store(PROMPT[0], N_BLOCKS)
        parts = engine_option(0, engine).split(",", 1)[1].replace("127.0.0.1", "{host}")
        bridge("--engines-dns", "127.0.0.1", "--engine-template", parts)
        assert fleet.wait_exact(model, PROMPT, N_BLOCKS)["worker_id"] == worker_id_of(engine.url)


def test_an_engine_without_events_is_predicted(fleet: TrustFleet, bridge: Bridge) -> None:
    """It is registered, leased and scraped; answers are approximate, also for what was routed to it before."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.gauges = "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"
        log = bridge("--engine", engine_option(worker_id, engine, events="", replay="")).log_path

        def is_answer(answer: dict[str, Any]) -> bool:
            return bool(answer["mode"] == "approximate")

        answer = fleet.wait_answer(model, PROMPT, is_answer, "an approximate answer")
        assert (answer["overlap_blocks"], answer.get("degraded_because")) == (0, None)
        routed = fleet.api.route(model=model, token_ids=PROMPT)
        answer = fleet.route(model, PROMPT)
        assert (answer["overlap_blocks"], answer["mode"], answer["chosen_mode"]) == (N_BLOCKS, *2 * ["approximate"])
        assert fleet.api.call("DELETE", f"/loads/{routed['request_id']}").status in (200, 202)

        def reported() -> list[int]:
            rows = fleet.api.get("/loads")["loads"]
            found = [row["engine_metrics"] for row in rows if row["worker_id"] == worker_id]
            return [row["num_requests_waiting"] for row in found if row is not None]

        wait_for(lambda: reported() == [2], PATIENCE_S, "its metrics")

        engine.restart()  # what was predicted is gone, and nobody has to report it
        fleet.wait_answer(model, PROMPT, lambda answer: answer["overlap_blocks"] == 0, "the prediction to be dropped")
        engine.stop()
        wait_for(lambda: refused(fleet, model) == {"silent": 1}, PATIENCE_S, "its end to be noticed")
        engine.start_again()
        fleet.wait_answer(model, PROMPT, is_answer, "an approximate answer after the return")
        assert "requests are running, but no event" not in log.read_text()
