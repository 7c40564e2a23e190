"""Processes on a real Kafka, as an operator sees them: their logs during an outage, their pages, their readiness."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams.kafka.clients import describe_topics
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Children
from streams.lab.stack import Stack, get_bytes, get_json, is_ready, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics
from streams.worker import create_app
from tests.helpers.api import Api
from tests.helpers.broker import BreakableKafka, broker_config
from tests.helpers.commands import PATIENCE_S, Start, environment

MODEL = "m"

#: Long enough that each process complained a hundred times before, and that transactions fail and are repeated.
AWAY_S = 10.0

#: Lines that a process logged per second before, while Kafka was away: 148 (worker), 78 (router), 23 (bridge).
PUBLISHER = """
import time
from streams.process import log
from streams.engines.publisher import KvEventPublisher
from streams.settings import load

settings = load().settings
log.configure(settings)
with KvEventPublisher(settings, worker_id=99, model="m") as publisher:
    print("publishing", flush=True)
    while True:
        publisher.cleared()
        time.sleep(0.2)
"""


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[BreakableKafka]:
    """Give a broker of the test's own, which it may kill or pause."""
    own = BreakableKafka(broker_config(tmp_path / "kafka"))
    own.up()
    yield own
    own.down()


def test_an_outage_of_kafka_is_two_lines_in_the_log_of_each_process(
    own_kafka: BreakableKafka, tmp_path: Path, children: Children
) -> None:
    """Worker, router, bridge and publisher log that a killed broker is away and that it is back, as JSON."""
    state = own_kafka.status()
    assert state is not None
    settings = Settings(kafka=state.bootstrap, partitions=4, log_json=True, session_timeout_s=3.0)
    stack = Stack(settings, tmp_path, children)
    worker = stack.worker()
    router = stack.router("router")
    bridge = stack.bridge(stack.engines(1, EngineConfig(), MODEL, 1.0))
    publisher = stack._start("publisher", ["-c", PUBLISHER], as_environ(settings))
    wait_workers(router.url, 1)
    publisher.wait_ready(lambda: "publishing" in publisher.tail(), PATIENCE_S)
    wait_for(lambda: mode(router.url) is not None, PATIENCE_S, "an answer")
    processes = {"worker": worker.child, "router": router.child, "bridge": bridge, "publisher": publisher}
    before = {name: len(lines(child.log_path)) for name, child in processes.items()}
    os.kill(state.pid, signal.SIGKILL)
    time.sleep(AWAY_S)
    own_kafka.up()
    wait_for(lambda: is_ready(router.url) and is_ready(worker.url), PATIENCE_S, "the routers")
    for name, child in processes.items():
        path, first = child.log_path, before[name]
        wait_for(lambda: "answers again" in path.read_text(), PATIENCE_S, f"{name} to notice")  # noqa: B023
        if name == "worker":
            wait_for(lambda: opened(path, first) >= 4, PATIENCE_S, "the partitions")  # noqa: B023
        assert child.running
        # Every line is JSON, which `lines` checks, and every warning is about the outage as a whole.
        added = lines(path)[first:]
        warnings = [line["message"] for line in added if line["level"] != "info"]
        assert len(warnings) == 2, (name, warnings)
        assert f"Kafka at {state.bootstrap} does not answer: " in warnings[0]
        assert "refused" in warnings[0]
        assert f"Kafka at {state.bootstrap} answers again, after " in warnings[1]
        assert len(added) <= 2 + 3 * settings.partitions, (name, Counter(line["message"] for line in added))


@pytest.mark.parametrize("away", [BreakableKafka.kill, BreakableKafka.pause])
def test_processes_end_on_sigterm_while_kafka_does_not_answer(
    own_kafka: BreakableKafka, tmp_path: Path, children: Children, away: Callable[[BreakableKafka], None]
) -> None:
    """A worker, a router and a bridge need no broker for it, whether it refuses connections or keeps them open."""
    state = own_kafka.status()
    assert state is not None
    settings = Settings(kafka=state.bootstrap, partitions=4, session_timeout_s=3.0, drain_notice_s=0.0)
    stack = Stack(settings, tmp_path, children)
    worker = stack.worker()
    router = stack.router("router")
    bridge = stack.bridge(stack.engines(1, EngineConfig(), MODEL, 1.0))
    wait_workers(router.url, 1)
    away(own_kafka)
    processes = [worker.child, router.child, bridge]
    time.sleep(settings.session_timeout_s)  # by then, requests fail or wait in every client
    for child in processes:
        child.signal(signal.SIGTERM)
    for child in processes:
        wait_for(lambda: not child.running, PATIENCE_S, f"{child.name} to end")  # noqa: B023
        assert child.exit_code == 0, child.tail()


def opened(path: Path, first: int) -> int:
    return sum("is open" in line["message"] for line in lines(path)[first:])


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each of which is a JSON object; what a publisher printed is left out."""
    text = path.read_text().splitlines()
    return [json.loads(line) for line in text if line != "publishing"]


def mode(url: str) -> Any:
    """The mode of an answer, or None."""
    answer = Api(url).call("POST", "/route", {"token_ids": [0], "update_states": False})
    return answer.json.get("mode")


def test_commands_of_faust_create_no_topics(scope: Settings, tmp_path: Path) -> None:
    """`faust -A streams agents` with a broker at hand leaves it as it is."""
    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "streams", "agents"],
        env=environment(as_environ(replace(scope, router_reset_states=True))),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(describe_topics(scope, topics(scope).all()).values()) == {None}


def test_a_worker_serves_our_pages_and_none_of_fausts(stack: Stack) -> None:
    """Faust's pages about partitions, tables and services are answered with 404, in the shape of our errors."""
    worker = stack.worker()
    api = Api(worker.url)
    for path in ("/router/", "/table/", "/table", "/graph", "/graph/", "/performance/", "/stats/"):
        api.call("GET", path).refused(404, "not_found")
    assert api.call("GET", "/healthz").given() == {"status": "ok"}
    assert b"kvstreams_agent_transactions_total" in api.call("GET", "/metrics").body


def test_a_worker_answers_while_the_loop_of_its_agents_is_busy(scope: Settings) -> None:
    """The HTTP API does not wait for Faust's loop, which this test blocks until the answer is there."""

    async def main() -> None:
        process = create_app(replace(scope, port=port)).worker_process
        await process.prepare()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(get_json(f"http://127.0.0.1:{port}/healthz")))
        asking.start()
        asking.join(PATIENCE_S)
        await process.stop()
        assert answers == [{"status": "ok"}]

    port = free_port()
    asyncio.run(main())


def test_a_worker_without_a_router_and_a_bridge_serve_health_readiness_and_metrics(
    scope: Settings, tmp_path: Path, children: Children
) -> None:
    """Both are ready once they can work, and both refuse a metrics_port that is in use, in one line."""
    port, bridge_port = free_port(), free_port()
    worker = Stack(replace(scope, metrics_port=port), tmp_path, children).worker(router=False)
    bridge_stack = Stack(replace(scope, metrics_port=bridge_port), tmp_path, children)
    engines = bridge_stack.engines(1, EngineConfig(), MODEL, 1.0)
    urls = {f"http://127.0.0.1:{port}": "kvstreams_agent_", f"http://127.0.0.1:{bridge_port}": "kvstreams_bridge_"}
    worker_url, bridge_url = urls
    wait_for(lambda: is_ready(worker_url), PATIENCE_S, "the worker to be ready")
    bridge_stack.bridge(engines)
    wait_for(lambda: is_ready(bridge_url), PATIENCE_S, "the bridge to be ready")
    for url, prefix in urls.items():
        assert get_json(f"{url}/healthz") == {"status": "ok"}
        assert get_json(f"{url}/ready") == {"ready": True}
        assert prefix in get_bytes(f"{url}/metrics").decode()
        assert get_bytes(f"{url}/router/").startswith(b"404")
    assert "/healthz, /ready and /metrics on " in worker.child.log_path.read_text()


@pytest.mark.parametrize("command", [pytest.param("worker", marks=pytest.mark.first_ring("worker")), "router"])
def test_a_process_that_compiles_kernels_is_alive_and_says_why_it_is_not_ready(
    command: str, scope: Settings, stack: Stack, tmp_path: Path, start: Start
) -> None:
    """The server is up before the kernels are compiled. Progress is in the log, and a signal ends the process."""
    if command == "router":
        subprocess.run(
            [sys.executable, "-m", "streams.cli", "topics", "create"], env=environment(as_environ(scope)), check=True
        )
    port = free_port()
    env = {**as_environ(replace(scope, log_json=True)), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    process = start(command, "--port", str(port), env=env)
    url = f"http://127.0.0.1:{port}"

    def reason() -> str:
        try:
            answer = get_json(f"{url}/ready")
        except OSError:
            return ""
        assert answer["ready"] is False
        return str(answer["reason"])

    wait_for(lambda: reason().startswith("compiling kernels, "), PATIENCE_S, "kernels to be compiled")
    assert get_json(f"{url}/healthz") == {"status": "ok"}
    message = Api(url).call("POST", "/route", {"token_ids": [1]}).refused(503, "not_ready")
    assert message.startswith("compiling kernels, ")
    assert (tmp_path / "kernels").is_dir()  # NUMBA_CACHE_DIR is honoured
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    assert messages[0].startswith("Compiling ")


def test_a_bridge_that_waits_for_topics_says_so(scope: Settings, start: Start) -> None:
    """While topics of the scope are missing, /ready of a bridge says it, and /healthz is 200."""
    port = free_port()
    engine = "id=1,url=http://127.0.0.1:9,events=tcp://127.0.0.1:9"
    start("bridge", "--engine", engine, "--metrics-port", str(port), env=as_environ(scope))
    url = f"http://127.0.0.1:{port}"

    def reason() -> str:
        try:
            return str(get_json(f"{url}/ready").get("reason"))
        except OSError:
            return ""

    wait_for(lambda: "topics of this scope are missing" in reason(), PATIENCE_S, "the reason")
    assert get_json(f"{url}/healthz") == {"status": "ok"}
