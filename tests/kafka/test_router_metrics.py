"""Metrics on a real Kafka: ranks by state, errors by code, dead letters by reason, and what each process serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Health, Progress
from streams.engines.bridge_metrics import BRIDGE_METRICS
from streams.errors import BadRecord
from streams.kafka.clients import dead_letter_headers, partition_of, producer
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.stack import READY_TIMEOUT_S, Stack, get_bytes, get_json, wait_workers
from streams.process.metrics import Metric
from streams.process.process_metrics import PROCESS_METRICS
from streams.process.waiting import wait_for
from streams.router_api.http.metrics import ROUTER_METRICS
from streams.router_api.knowledge.dead_letters import ENGINE, OTHER, PAIRS_MAX, REASON_CHARS_MAX, DeadLetterCounts
from streams.settings import Settings, as_environ
from streams.tables.agent_metrics import AGENT_METRICS
from streams.tables.records import PROGRESS_KEY, encode_progress
from streams.topics import topics
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, Agents, Api, metrics, rank_of, served
from tests.helpers.promql import Selection, selections


def of(api: Api, name: str) -> dict[str, float]:
    """Samples of one metric by their labels."""
    return {key.partition("/")[2]: value for key, value in metrics(api).items() if key.partition("/")[0] == name}


def await_ranks(api: Api, states: dict[str, int], reasons: dict[str, int]) -> None:
    def counted() -> tuple[dict[str, float], dict[str, float]]:
        degraded_reasons = {reason: n for reason, n in of(api, "kvstreams_degraded_ranks").items() if n}
        return of(api, "kvstreams_ranks"), degraded_reasons

    try:
        wait_for(lambda: counted() == (states, reasons), PATIENCE_S, "ranks by state")
    finally:
        assert counted() == (states, reasons)


def test_ranks_are_counted_by_state_and_degraded_ones_by_reason(scope: Settings) -> None:
    """Every rank is counted as registered, and in each other state that applies to it."""
    settings = replace(scope, block_size=BLOCK_SIZE, stale_after_ms=2000)
    fresh, stale = range(settings.partitions - 1), settings.partitions - 1
    agents = Agents(settings, fresh)
    with served(settings) as api, agents.keeping_fresh():
        ids = [*agents.worker_ids(4, fresh[0]), *agents.worker_ids(1, stale)]
        body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}
        states = ("registered", "cordoned", "wrong_block_size", "silent", "avoided", "degraded", "approximate")
        none = dict.fromkeys(states, 0)
        await_ranks(api, none, {})
        for worker_id in ids:
            api.call("PUT", f"/workers/{worker_id}", body).given()
        await_ranks(api, {**none, "registered": 5, "degraded": 5}, {"no_events_yet": 5})
        for worker_id, health in zip(
            ids, (Health.EXACT, Health.DEGRADED, Health.APPROXIMATE, Health.REMOVED, Health.EXACT), strict=True
        ):
            agents.progress(rank_of(worker_id), health)
        counts = {**none, "registered": 5, "degraded": 3, "approximate": 1}
        # The last one's partition has no owner, so the transaction with its progress never ends.
        reasons = {"events_lost": 1, "removed": 1, "no_events_yet": 1}
        await_ranks(api, counts, reasons)
        silent = Progress(rank_of(ids[1]), Epoch(Incarnation(1), 0), 1, health=Health.DEGRADED, silent=True)
        agents.write(rank_of(ids[1]), PROGRESS_KEY.pack(rank_of(ids[1])), encode_progress(silent))
        api.call("PUT", f"/workers/{ids[1]}/cordon").given()
        api.call("PUT", f"/workers/{ids[0]}/cordon").given()
        await_ranks(api, {**counts, "silent": 1, "cordoned": 2}, reasons)
        other_size = Progress(rank_of(ids[0]), Epoch(Incarnation(1), 0), 2, model="m", block_size=2 * BLOCK_SIZE)
        agents.write(rank_of(ids[0]), PROGRESS_KEY.pack(rank_of(ids[0])), encode_progress(other_size))
        await_ranks(api, {**counts, "silent": 1, "cordoned": 2, "wrong_block_size": 1}, reasons)
        agents.state_partition(stale, behind_ms=settings.behind_after_ms + 1)
        wait_for(lambda: of(api, "kvstreams_degraded_ranks")["owner_behind"] == 1, PATIENCE_S, "an owner that lags")


def test_errors_are_counted_by_code(scope: Settings) -> None:
    """Every refusal is counted, whether due to the caller, the fleet or the HTTP server; other answers are not."""
    with served(scope) as api:
        assert of(api, "kvstreams_errors_total") == {}
        api.call("GET", "/nowhere").refused(404, "not_found")
        api.call("POST", "/route", b"x").refused(400, "invalid_request")
        for _ in range(2):
            api.call("POST", "/route", {"token_ids": TOKENS}).refused(503, "no_eligible_worker")
        api.get("/loads")
        counted = {"not_found": 1, "invalid_request": 1, "no_eligible_worker": 2}
        assert of(api, "kvstreams_errors_total") == counted


def test_dead_letters_of_every_writer_are_counted(scope: Settings) -> None:
    """Dead letters are counted by source and reason from the router's start; foreign writers' ones are `other`."""
    names = topics(scope)
    kafka = producer(scope)

    def write(origin: str | None, reason: str) -> None:
        headers = [] if origin is None else dead_letter_headers(origin, BadRecord(reason, "why"), 1)
        kafka.produce(names.dead_letters.name, key=b"1", value=b"x", headers=headers)
        assert kafka.flush(PATIENCE_S) == 0

    with served(scope) as first:
        write(names.cxl_events.name, "not_in_transit")
        with served(scope) as late:
            write(names.cxl_events.name, "not_in_transit")
            write(names.kv_events.name, "wrong_key")
            write("tcp://127.0.0.1:5557", "bad_payload")
            write("strange", "x" * (REASON_CHARS_MAX + 1))
            write(None, "")
            expected = {
                "not_in_transit/cxl-events": 1.0,
                "wrong_key/kv-events": 1.0,
                f"bad_payload/{ENGINE}": 1.0,
                f"{OTHER}/{OTHER}": 2.0,
            }
            for api, counts in ((late, expected), (first, {**expected, "not_in_transit/cxl-events": 2.0})):
                wait_for(
                    lambda api=api, counts=counts: of(api, "kvstreams_dead_letters_total") == counts,  # type: ignore[misc]
                    PATIENCE_S,
                    "dead letters to be counted",
                )


@pytest.mark.parametrize(("n", "others"), [(PAIRS_MAX, 0), (PAIRS_MAX + 1, 1), (PAIRS_MAX + 2, 2)])
def test_a_foreign_writer_cannot_fill_memory_with_reasons(n: int, others: int) -> None:
    """Reasons beyond the limit are counted together, and no count is lost."""
    counts = DeadLetterCounts(Settings())
    for number in range(n):
        counts._count("tcp://e", f"reason{number}")
    counted = counts.counts()
    assert sum(counted.values()) == n
    assert counted.get((OTHER, OTHER), 0) == others


def test_a_router_serves_every_metric_that_is_declared_and_no_other(scope: Settings) -> None:
    """A router's /metrics has exactly the metrics that are declared, from which the table in the docs is made."""
    with served(scope) as api:
        api.call("GET", "/nowhere").refused(404, "not_found")
        kafka = producer(scope)
        kafka.produce(
            topics(scope).dead_letters.name, key=b"1", value=b"x", partition=partition_of(1, scope.partitions)
        )
        assert kafka.flush(PATIENCE_S) == 0
        wait_for(lambda: bool(of(api, "kvstreams_dead_letters_total")), PATIENCE_S, "a dead letter to be counted")
        page = api.call("GET", "/metrics").body.decode()
    assert declared_types(page) == types_of(ROUTER_METRICS)


def types_of(declared: Sequence[Metric[Any]]) -> dict[str, str]:
    """Metrics and their kinds as declared, with those that every process has."""
    return {metric.name: str(metric.kind) for metric in (*declared, *PROCESS_METRICS)}


def declared_types(page: str) -> dict[str, str]:
    """Metrics of a page and their kinds, without the time at which a histogram was created."""
    found = re.findall(r"^# TYPE (\w+) (gauge|counter|histogram)$", page, re.MULTILINE)
    return {name: kind for name, kind in found if not name.endswith("_created")}


def test_every_process_serves_its_own_metrics(stack: Stack) -> None:
    """A worker with the API serves its own metrics after the router's; other workers and bridges use metrics_port."""
    ports = [free_port(), free_port()]
    agents = types_of(AGENT_METRICS)
    routers = types_of(ROUTER_METRICS)
    bridges = types_of(BRIDGE_METRICS)
    worker = stack.worker()
    stack.worker("second", router=False, env={"KVSTREAMS_METRICS_PORT": str(ports[0])})
    (engine,) = stack.engines(1, EngineConfig(block_size=16, n_blocks=64), "m", 100.0)
    settings, stack.settings = stack.settings, replace(stack.settings, metrics_port=ports[1])
    stack.bridge([engine])
    stack.settings = settings
    wait_workers(worker.url, 1)
    second, bridge = (f"http://127.0.0.1:{port}" for port in ports)

    def page(url: str) -> str:
        return get_bytes(f"{url}/metrics").decode()

    def total(url: str, name: str) -> float:
        (number,) = re.findall(rf"^{name} (\S+)$", page(url), re.MULTILINE)
        return float(number)

    def healthy(url: str) -> bool:
        try:
            return bool(get_json(f"{url}/healthz") == {"status": "ok"})
        except OSError:
            return False

    for url in (second, bridge):
        wait_for(lambda url=url: healthy(url), READY_TIMEOUT_S, f"{url} to answer")  # type: ignore[misc]
    assert declared_types(page(worker.url)) == routers | agents
    # A process that is starting answers before it has anything to report.
    wait_for(lambda: declared_types(page(second)) == agents, READY_TIMEOUT_S, "the second worker's metrics")
    wait_for(lambda: declared_types(page(bridge)) == bridges, READY_TIMEOUT_S, "the bridge's metrics")
    # The first batch of an incarnation is written by the bridge, and processed by one of the workers.
    wait_for(lambda: total(bridge, "kvstreams_bridge_incarnations_total") == 1, READY_TIMEOUT_S, "the bridge to count")
    wait_for(
        lambda: sum(total(url, "kvstreams_agent_source_records_total") for url in (worker.url, second)) >= 1,
        READY_TIMEOUT_S,
        "an agent to count",
    )
    # What the dashboard shows is on these pages, once there was a decision, an error and a dead letter.
    api = Api(worker.url)
    api.route(token_ids=TOKENS, request_id="r")
    api.call("POST", "/route", b"x").refused(400, "invalid_request")
    kafka = producer(settings)
    kafka.produce(topics(settings).dead_letters.name, key=b"1", value=b"x", partition=0)
    assert kafka.flush(PATIENCE_S) == 0

    def not_served() -> list[Selection]:
        served = {
            (sample.name, frozenset(sample.labels))
            for url in (worker.url, second, bridge)
            for family in text_string_to_metric_families(page(url))
            for sample in family.samples
        }
        return [
            each
            for each in selections()
            if each.metric
            != "kvstreams_flow_control_queue_size"  # empty while nothing waits; test_router_queue reads it
            and not any(name == each.metric and each.labels - {"instance"} <= labels for name, labels in served)
        ]

    try:
        wait_for(lambda: not not_served(), READY_TIMEOUT_S, "every metric of the dashboard")
    finally:
        assert not_served() == []


def test_a_bridge_whose_metrics_port_is_taken_ends_with_the_remedy(scope: Settings) -> None:
    """If the metrics port is taken, a bridge ends with one line that names the address and the setting."""
    taken = scope.kafka.rpartition(":")[2]  # the broker itself listens there
    command = [sys.executable, "-m", "streams.cli", "bridge", "--engine", "id=1,url=http://u,events=tcp://e:1"]
    environ = {**os.environ, **as_environ(replace(scope, metrics_port=int(taken)))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot listen on 127.0.0.1:{taken}" in done.stderr.splitlines()[-1]
    assert "--metrics-port" in done.stderr.splitlines()[-1]
