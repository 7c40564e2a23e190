"""Metrics that engines report reach routers through a real bridge and a real Kafka, and the older policies use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.routing.selection import RouterMode
from streams.kafka.clients import producer
from streams.kafka.records import encode_metrics
from streams.lab.stack import Engine, Stack
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import PATIENCE_S, TOKENS, Api, metrics, rank_of, served
from tests.helpers.engine_double import EngineDouble

#: Short, so that an engine's last report soon expires when the engine stops reporting.
INTERVAL_S = 0.2

#: A page that cannot be used, so that the engine's last report stays.
UNUSABLE = "vllm:num_requests_waiting lots\n"

ASKED = {"token_ids": TOKENS, "model": "m"}


def report_metrics(engine: EngineDouble, *, usage: float, waiting: int = 0, running: int = 0) -> None:
    """Make the engine report these metrics from its next scrape on."""
    engine.gauges = (
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}\n'
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="200"} 1.0\n'
    )


def reported(api: Api) -> dict[int, dict[str, Any]]:
    """Return the metrics of each worker's only rank, for workers that have any."""
    return {worker_id: row["metrics"][0] for worker_id, row in api.workers().items() if row["metrics"]}


def usages(api: Api) -> dict[int, float]:
    return {worker_id: gauges["gpu_cache_usage_perc"] for worker_id, gauges in reported(api).items()}


def await_usages(api: Api, expected: dict[int, float]) -> None:
    wait_for(lambda: usages(api) == expected, PATIENCE_S, f"engines to report {expected}")


@pytest.fixture
def engines() -> Iterator[tuple[EngineDouble, EngineDouble]]:
    with EngineDouble() as first, EngineDouble() as second:
        yield first, second


def bridged(stack: Stack, engines: tuple[EngineDouble, ...], interval_s: float = INTERVAL_S) -> Settings:
    """Start a bridge for these engines as workers 1, 2, ...; return the scope's settings."""
    stack.settings = replace(stack.settings, metrics_interval_s=interval_s)
    addresses = [
        Engine(number, None, engine.url, engine.events, engine.replay)  # type: ignore[arg-type]
        for number, engine in enumerate(engines, 1)
    ]
    stack.bridge(addresses)
    return stack.settings


def test_routers_choose_by_what_engines_report(stack: Stack, engines: tuple[EngineDouble, EngineDouble]) -> None:
    """Both older policies follow the engines' metrics, on a running router and on one that starts late."""
    first, second = engines
    report_metrics(first, usage=0.9, waiting=4, running=2)
    report_metrics(second, usage=0.1)
    settings = bridged(stack, engines)
    with served(replace(settings, router_mode=RouterMode.HIT_USAGE_WAITING)) as api:
        await_usages(api, {1: 0.9, 2: 0.1})
        assert reported(api)[1] | {"scraped_at_ms": 0, "scrapes_failed": 0} == {
            "dp_rank": 0,
            "gpu_cache_usage_perc": 0.9,
            "num_requests_waiting": 4,
            "request_active_slots": 2,
            "request_total_slots": 0,
            "kv_active_blocks": 180,
            "kv_total_blocks": 200,
            "scraped_at_ms": 0,
            "scrapes_failed": 0,
        }
        by_rank = {row["worker_id"]: row["engine_metrics"] for row in api.get("/loads")["loads"]}
        assert (by_rank[1]["kv_active_blocks"], by_rank[2]["kv_active_blocks"]) == (180, 20)
        assert metrics(api)["kvstreams_ranks_with_metrics"] == 2.0
        chosen = api.ask(**ASKED)
        # Metrics are available; the mode is degraded because no agent writes the index in this test.
        assert (chosen["worker_id"], chosen["mode"]) == (2, "degraded")
        assert {row["worker_id"]: row["cost"] for row in chosen["candidates"]} == {1: 0.9 + 1.0, 2: 0.1}
        with served(replace(settings, router_mode=RouterMode.LOAD_DEVIATION)) as late:
            await_usages(late, {1: 0.9, 2: 0.1})
            assert late.ask(**ASKED)["worker_id"] == 2
            report_metrics(first, usage=0.2)
            report_metrics(second, usage=0.7, waiting=1)
            for each in (api, late):
                await_usages(each, {1: 0.2, 2: 0.7})
                assert each.ask(**ASKED)["worker_id"] == 1
            report_metrics(second, usage=1.0)
            await_usages(late, {1: 0.2, 2: 1.0})
            message = late.call("POST", "/route", {**ASKED, "allowed_worker_ids": [2]}).refused(503, "all_workers_busy")
            assert "full" in message


def test_a_burst_between_two_scrapes_spreads_and_ends(stack: Stack, engines: tuple[EngineDouble, EngineDouble]) -> None:
    """Of 12 cold requests to two routers over two engines with 4 slots each, 8 are accepted and spread evenly."""
    for engine in engines:
        engine.gauges = (
            "trtllm_num_requests_running 0\ntrtllm_max_num_active_requests 4\n"
            "trtllm_kv_cache_used_blocks 0\ntrtllm_kv_cache_max_blocks 200\n"
        )
    settings = replace(stack.settings, router_mode=RouterMode.LOAD_DEVIATION)
    with served(settings) as api, served(settings) as peer:
        bridged(stack, engines, interval_s=60.0)  # after the routers started, which read reports from then on
        for each in (api, peer):
            await_usages(each, {1: 0.0, 2: 0.0})
        for engine in engines:
            engine.gauges = UNUSABLE  # a further report would say that its engine has none of the requests
        chosen = []
        for number in range(12):
            router, other = (api, peer) if number % 2 else (peer, api)
            asked = {"model": "m", "request_id": f"cold{number}", "token_ids": [number] * 40}
            answer = router.call("POST", "/route", asked)
            if number < 8:
                chosen.append(answer.given()["worker_id"])
                in_flight = number + 1
                wait_for(
                    lambda other=other, n=in_flight: sum(load[2] for load in other.loads([1, 2]).values()) == n,  # type: ignore[misc]
                    PATIENCE_S,
                    "the booking on the other router",
                )
            else:
                assert "full" in answer.refused(503, "all_workers_busy")
        assert [chosen.count(worker_id) for worker_id in (1, 2)] == [4, 4]
        api.call("DELETE", "/loads/cold3").given()
        assert api.route(model="m", request_id="next", token_ids=[12] * 40)["worker_id"] == chosen[3]


def test_the_last_report_of_a_silent_engine_expires(stack: Stack, engines: tuple[EngineDouble, EngineDouble]) -> None:
    """The last report of an engine that stops answering, or answers with an unusable page, expires.

    The failed scrapes are counted, the engine's next report is used again, and the other engine's reports continue.
    """
    first, second = engines
    report_metrics(first, usage=0.3)
    report_metrics(second, usage=0.5)
    settings = bridged(stack, engines)
    with served(replace(settings, router_mode=RouterMode.LOAD_DEVIATION)) as api:
        await_usages(api, {1: 0.3, 2: 0.5})
        assert reported(api)[1]["scrapes_failed"] == 0
        first.answers.clear()
        await_usages(api, {2: 0.5})
        first.answers.set()
        await_usages(api, {1: 0.3, 2: 0.5})
        failed = reported(api)[1]["scrapes_failed"]
        assert failed >= 1
        assert metrics(api)["kvstreams_scrapes_failed_total"] >= failed
        first.gauges = UNUSABLE
        second.gauges = ""
        await_usages(api, {})
        assert api.ask(**ASKED)["mode"] == "fallback"
        report_metrics(first, usage=0.4)
        await_usages(api, {1: 0.4})
        assert reported(api)[1]["scrapes_failed"] > failed


def test_an_unusable_record_is_skipped(scope: Settings) -> None:
    """An unusable record of worker-metrics is counted and skipped. Records from before a router's start are ignored."""
    kafka = producer(scope)

    def write(worker_id: int, key: bytes, value: bytes | None = None, usage: float = 0.5) -> None:
        report = MetricsReport(rank_of(worker_id), WorkerMetrics(usage), 60_000, 0)
        raw = encode_metrics(report) if value is None else value
        kafka.produce(topics(scope).worker_metrics.name, key=key, value=raw)
        assert kafka.flush(PATIENCE_S) == 0

    with served(scope) as api:
        for worker_id in (1, 2):
            api.call("PUT", f"/workers/{worker_id}", {"url": "http://e", "model": "m", "block_size": 16}).given()
        for bad in (b"junk", b"\xc3\x01" + bytes(8)):
            write(1, b"1", bad)
        write(1, b"2")
        write(1, b"1")
        await_usages(api, {1: 0.5})
        wait_for(lambda: metrics(api)["kvstreams_bad_records_total"] == 3.0, PATIENCE_S, "three records to be counted")
        with served(scope) as late:
            assert usages(late) == {}
            write(2, b"2", usage=0.25)
            for each, known in ((api, {1: 0.5, 2: 0.25}), (late, {2: 0.25})):
                await_usages(each, known)
        api.call("DELETE", "/workers/1").given()
        assert usages(api) == {2: 0.25}
