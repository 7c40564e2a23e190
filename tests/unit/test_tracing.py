"""Traces of decisions: their context, their attributes, and that nothing of them runs while they are off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from streams.client import KvRouterClient
from streams.core.ids import WorkerId
from streams.core.routing.selection import RouterMode
from streams.core.workers import Worker
from streams.errors import SettingsError
from streams.kafka.clients import worker_key
from streams.kafka.records import encode_worker
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.http import tracing
from streams.router_api.http.tracing import SERVICE_NAME, TracedRouter
from streams.router_api.messages.requests import RouteRequest
from streams.router_api.processes.server import make_router
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, metrics
from tests.helpers.local_router import LocalRouter, hold, local_router, random_blocks, rank
from tests.helpers.posting import collector, posting_server

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT_ID = 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"

#: An engine's answer of one token.
COMPLETION = b'data: {"choices": [{"text": "x", "token_ids": [7], "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'

BLOCKS = random_blocks(np.random.default_rng(7), 4)


@dataclass(frozen=True, slots=True)
class Traced:
    """A served router with traces, and the spans that it has ended."""

    served: LocalRouter
    exporter: InMemorySpanExporter

    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()


@pytest.fixture(scope="module")
def running() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with local_router(
        Settings(tracing=True, router_mode=RouterMode.KV), make=lambda own: TracedRouter(own, provider)
    ) as served:
        hold(served.router, rank(2), BLOCKS)
        yield Traced(served, exporter)


@pytest.fixture
def traced(running: Traced) -> Traced:
    running.exporter.clear()
    return running


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_decision_is_a_span_in_the_trace_of_its_request(traced: Traced) -> None:
    """The request's traceparent is the parent of the call, which is the parent of the decision."""
    body = {"request_id": "r1", "block_hashes": list(map(str, BLOCKS.tolist())), "worker_id": 2}
    traced.served.api.call("POST", "/route", body, headers={"traceparent": TRACEPARENT}).given()
    decision, call = traced.spans()
    assert call.context.trace_id == decision.context.trace_id == TRACE_ID
    assert call.parent is not None and call.parent.span_id == PARENT_ID
    assert decision.parent is not None and decision.parent.span_id == call.context.span_id
    assert (call.name, call.kind) == ("POST /route", SpanKind.SERVER)
    assert attributes(call) == {
        "http.request.method": "POST",
        "http.route": "/route",
        "http.response.status_code": 200,
    }
    assert decision.name == "route m"
    # Exactly these: no attribute has tokens, hashes or text of a prompt.
    assert attributes(decision) == {
        "gen_ai.operation.name": "route",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 64,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "kvstreams.request_id": "r1",
        "kvstreams.router_mode": "kv",
        "kvstreams.request_blocks": 4,
        "kvstreams.candidates": 1,
        "kvstreams.worker_id": "2",
        "kvstreams.dp_rank": 0,
        "kvstreams.overlap_blocks": 4,
        "kvstreams.mode": "degraded",
        "kvstreams.degraded_because": "no_events_yet",
        "kvstreams.chosen_mode": "degraded",
        "kvstreams.repeated": False,
        "kvstreams.cost": 4.0,
    }
    assert not decision.events


def test_a_decision_for_a_request_that_waits_is_one_span_in_its_own_trace() -> None:
    """With queue=on a decision has a span, at once or after waiting, and each is a child of its own request's call."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = Settings(tracing=True, router_mode=RouterMode.KV, router_queue_backlog_ms=100.0)
    with local_router(settings, 1, make=lambda own: TracedRouter(own, provider)) as served:

        def ask(request_id: str) -> None:
            body = {"request_id": request_id, "queue": "on", "token_ids": list(range(5000))}
            served.api.call("POST", "/route", body).given()

        def n_waiting() -> float:
            return metrics(served.api).get("kvstreams_flow_control_queue_size/0", 0.0)

        ask("at-once")
        asking = []
        for number in (1, 2):
            asking.append(threading.Thread(target=ask, args=(f"waits-{number}",)))
            asking[-1].start()
            wait_for(lambda number=number: n_waiting() == number, PATIENCE_S, "the request to wait")  # type: ignore[misc]
        for request_id in ("at-once", "waits-1", "waits-2"):
            wait_for(
                lambda given=request_id: served.api.call("DELETE", f"/loads/{given}").status == 200,  # type: ignore[misc]
                PATIENCE_S,
                "the request to be booked",
            )
        for thread in asking:
            thread.join(PATIENCE_S)
    spans = exporter.get_finished_spans()
    calls = {span.context.span_id for span in spans if span.name == "POST /route"}
    decisions = [span for span in spans if span.name == "route m"]
    assert {attributes(each)["kvstreams.request_id"] for each in decisions} == {"at-once", "waits-1", "waits-2"}
    assert len(decisions) == 3
    assert {each.parent.span_id for each in decisions if each.parent is not None} == calls


def test_every_request_of_a_list_has_its_own_decision(traced: Traced) -> None:
    """One call with several requests has one span of the call, and one span per decision within it."""
    traced.served.api.call("POST", "/route", [{"token_ids": [1] * 16, "update_states": False}] * 3).given()
    *decisions, call = traced.spans()
    assert [each.name for each in decisions] == ["route m"] * 3
    assert all(each.parent is not None and each.parent.span_id == call.context.span_id for each in decisions)


def test_a_refusal_names_its_code_and_not_what_was_sent(traced: Traced) -> None:
    """A span of an error has the error's code; its message may quote the request."""
    traced.served.api.call("POST", "/route", {"token_ids": [1], "worker_id": 99}).refused(503, "no_eligible_worker")
    traced.served.api.call("POST", "/route", {"token_ids": ["secret"]}).refused(400, "invalid_request")
    refused, first, second = traced.spans()
    for span, code, status in (
        (refused, "no_eligible_worker", None),
        (first, "no_eligible_worker", 503),
        (second, "invalid_request", 400),
    ):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, code)
        assert attributes(span)["error.type"] == code
        assert attributes(span).get("http.response.status_code") == status
        assert not span.events
        assert "secret" not in span.to_json()


def test_other_calls_have_no_span(traced: Traced) -> None:
    """Scrapes and polled pages would outnumber the requests."""
    for path in ("/metrics", "/live", "/loads", "/"):
        assert traced.served.api.call("GET", path).status == 200
    assert not traced.spans()


def test_a_router_in_the_same_process_joins_the_span_around_the_call(traced: Traced) -> None:
    """An application that routes in its own process has the decision in its own trace."""
    router = traced.served.router
    assert isinstance(router, TracedRouter)
    with router.tracer.start_as_current_span("application") as around:
        router.route(RouteRequest(token_ids=[1] * 16, update_states=False))
    decision, _ = traced.spans()
    assert decision.parent is not None and decision.parent.span_id == around.get_span_context().span_id


def test_without_the_setting_nothing_of_opentelemetry_is_imported() -> None:
    """Traces cost nothing while they are off: the router is a plain one, and the packages need not be installed."""
    check = (
        "import sys; from streams.router_api.processes.server import api_runner, make_router;"
        "from streams.settings import Settings;"
        "router = make_router(Settings(kafka='127.0.0.1:1')); api_runner(router);"
        "print(type(router).__name__, [name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "Router []", done.stderr


def test_tracing_without_its_packages_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package that is missing and the extra that has it."""
    monkeypatch.delitem(sys.modules, "streams.router_api.http.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"opentelemetry.sdk.trace is not installed.*kvstreams\[otel\]"):
        make_router(Settings(tracing=True))


def test_spans_reach_a_collector_before_the_router_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT says where spans go; the last ones are sent when the router stops."""
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with local_router(Settings(tracing=True), make=make_router) as served:
            served.api.route(token_ids=[1] * 16, update_states=False)
            served.router.stop()
        spans = received.spans()
    assert spans.keys() == {"route m", "POST /route"}
    assert spans["route m"][1]["service.name"] == SERVICE_NAME


def test_the_client_passes_the_trace_of_its_caller_to_routers_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a span, the router's spans and the engine's request are part of its trace; without one, they are not."""
    asked: list[str | None] = []

    def complete(path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, bytes]:
        asked.append(headers.get("traceparent"))
        return "text/event-stream", COMPLETION

    with collector() as (url, received), posting_server(complete) as engine:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with local_router(Settings(tracing=True), n_workers=0, make=make_router) as served:
            worker = Worker(WorkerId(1), engine, "m", 16)
            served.router.view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))
            application = TracerProvider().get_tracer("application")

            async def generate() -> None:
                async with KvRouterClient(served.api.url) as client:
                    with application.start_as_current_span("application") as around:
                        context.append(around.get_span_context())
                        async for _ in await client.generate([1] * 16):
                            pass
                    async for _ in await client.generate([1] * 16, model="m"):
                        pass

            context: list[SpanContext] = []
            asyncio.run(generate())
            served.router.stop()
        calls = [span for span in received.all_spans() if span.name == "POST /route"]
    (around,) = context
    trace_id, span_id = around.trace_id.to_bytes(16, "big"), around.span_id.to_bytes(8, "big")
    assert [(call.trace_id == trace_id, call.parent_span_id) for call in calls] == [(True, span_id), (False, b"")]
    first, second = asked
    assert first is not None and first.startswith(f"00-{around.trace_id:032x}-{around.span_id:016x}-")
    assert second is None


def test_a_collector_that_is_away_delays_the_end_of_a_router_briefly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter would try for longer than a stopping router may wait; the log says what was left."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(tracing, "LAST_SPANS_S", 0.1)
    with local_router(Settings(tracing=True), make=make_router) as served:
        served.api.route(token_ids=[1] * 16, update_states=False)
        served.router.stop()
    assert "the last spans were not sent" in caplog.text
