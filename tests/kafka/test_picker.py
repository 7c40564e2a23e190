"""What gateways and other routers see of real pickers, on a real Kafka with simulated engines behind a bridge.

The requests of the table of obligations are in tests/helpers/picker_obligations.py. Everything is sent by the official
client of gRPC.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1 import health_pb2

from streams.kafka.clients import ensure_topics
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.processes import Children
from streams.lab.stack import Engine, PickerProcess, RouterProcess, Stack, wait_workers
from streams.picker.grpc.health import WATCH
from streams.picker.messages import LB, SERVED, BodyMode, Part
from streams.picker.picks import FAIRNESS, OBJECTIVE
from streams.picker.process import LIVENESS, READINESS, SERVICE
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import Api, metrics
from tests.helpers.authority import Authority
from tests.helpers.bridges import SMALL, complete
from tests.helpers.broker import BreakableKafka, broker_config
from tests.helpers.ext_proc import BUFFERED, FULL_DUPLEX
from tests.helpers.picker_client import PATIENCE_S, Answered, Gateway, GatewayStream, gateway
from tests.helpers.picker_obligations import BODY_BYTES_MAX, COMPLETION, MODEL, NOTHING, ROWS, Row, hint
from tests.helpers.scopes import ScopeFactory

#: Tokens of a prompt that closes a rank to others: 2.5 s of prefill, where a backlog of a second closes it.
LONG = 25_000

POST = {":method": "POST", ":path": "/v1/completions"}
NAMES = (LIVENESS, READINESS, SERVICE, "", "unknown")


@dataclass(frozen=True, slots=True)
class Fleet:
    """stays: a picker that sees how its requests end. ends: one that ends its streams with its picks."""

    stack: Stack
    worker: RouterProcess
    engines: list[Engine]
    stays: PickerProcess
    ends: PickerProcess

    def endpoints(self) -> list[str]:
        """Those of the engines, in order of their worker ids."""
        return [endpoint_of(engine) for engine in self.engines]

    def routers(self) -> list[Api]:
        """The APIs of a router and of both pickers."""
        return [Api(url) for url in (self.worker.url, self.stays.router.url, self.ends.router.url)]

    def until_quiet(self) -> None:
        """Wait until no router counts a booking."""
        for api in self.routers():
            until(partial(is_idle, api), "the end of every booking")


def is_idle(api: Api) -> bool:
    return n_requests(api) == 0


def has_any(api: Api) -> bool:
    return n_requests(api) > 0


def endpoint_of(engine: Engine) -> str:
    return urlsplit(engine.url).netloc


def n_requests(api: Api) -> int:
    return sum(row["active_requests"] for row in api.get("/loads")["loads"])


def has_requests(api: Api, wanted: Mapping[int, int]) -> bool:
    return {row["worker_id"]: row["active_requests"] for row in api.get("/loads")["loads"]} == wanted


def prefill_tokens(api: Api) -> int:
    return sum(row["active_prefill_tokens"] for row in api.get("/loads")["loads"])


def until(condition: Callable[[], object], what: str) -> None:
    wait_for(lambda: bool(condition()), PATIENCE_S, what)


def tokenizer(folder: Path) -> list[str]:
    """The option that gives pickers the files of the engines' tokenizer."""
    folder.mkdir()
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    return ["--tokenizer", f"{MODEL}={folder}"]


@contextmanager
def running(scope: Settings, folder: Path) -> Iterator[Fleet]:
    """Start a worker with a router, two engines behind a bridge, and two pickers."""
    options = tokenizer(folder / "model")
    common: dict[str, Any] = {
        "picker_details": True,
        "body_bytes_max": BODY_BYTES_MAX,
        "body_timeout_s": 2.0,
        "picker_objectives": "batch=-5",
        "router_queue_timeout_s": 0.5,
        "decision_log": False,
    }
    with Children() as children:
        stack = Stack(replace(scope, booking_ttl_s=25.0), folder, children)
        worker = stack.worker()
        engines = stack.engines(2, SMALL, MODEL, 10.0)
        stack.bridge(engines)
        stays = stack.picker("stays", options, wait=False, picker_ends_stream=False, picker_fallbacks=1, **common)
        ends = stack.picker("ends", options, wait=False, **common)
        for picker in (stays, ends):
            stack.wait_ready(picker.router)
        for router in (worker, stays.router, ends.router):
            wait_workers(router.url, 2)
        yield Fleet(stack, worker, engines, stays, ends)


@pytest.fixture(scope="module")
def fleet(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give a fleet that the tests share."""
    folder = tmp_path_factory.mktemp("picker")
    with running(new_scope(folder / "state"), folder) as started:
        yield started


# -- obligations -------------------------------------------------------------------------------------------------------


@pytest.mark.first_ring("picker")
@pytest.mark.parametrize("name", ["stays", "ends"])
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_obligations(fleet: Fleet, row: Row, name: str) -> None:
    """Each row of the table, for a picker that sees the ends of requests, and for one that does not."""
    picker: PickerProcess = getattr(fleet, name)
    known, asks = set(fleet.endpoints()), dict(row.asks)
    if row.subset is not None:
        known = {fleet.endpoints()[1]}
        asks["metadata"] = hint(row.subset([*known, "10.9.9.9:1"]))
    api, source = Api(picker.router.url), f"kvstreams_picker_prompts_total/{row.source}"
    before = metrics(api).get(source, 0)
    with gateway(picker.picks) as client:
        found = client.ask(row.body, **asks)
    assert found.status is grpc.StatusCode.OK
    if row.refused:
        assert found.refused == row.refused and found.error["message"], found
        assert found.headers["content-type"] == "application/json"
        assert ("retry-after" in found.headers) == (row.refused == 503)
    else:
        named = found.destination.split(",")
        assert set(named) <= known and len(named) == len(set(named))
    if row.parts:
        assert found.parts == list(row.parts)
    if row.source:
        assert metrics(api)[source] == before + 1
    assert row.also(found), found


def begun(
    client: Gateway, body: Mapping[str, Any] = COMPLETION, headers: Mapping[str, str] | None = None
) -> GatewayStream:
    """A stream whose whole request was sent."""
    stream = asking(client, headers)
    stream.send(Part.REQUEST_BODY, body=json.dumps(body).encode(), end_of_stream=True)
    return stream


def asking(
    client: Gateway,
    headers: Mapping[str, str] | None = None,
    modes: tuple[BodyMode, BodyMode] = (FULL_DUPLEX, NOTHING),
) -> GatewayStream:
    """A stream whose headers were sent, and no body yet."""
    stream = client.open()
    stream.send(Part.REQUEST_HEADERS, modes, headers={**POST, **(headers or {})})
    return stream


def long_prompt(n: int) -> dict[str, Any]:
    """A request that closes a rank. Each number has a prompt of its own."""
    return {**COMPLETION, "prompt": list(range(n * LONG, (n + 1) * LONG))}


@pytest.mark.first_ring("picker")
def test_a_pick_lists_fallbacks_and_moves_to_the_one_that_served(fleet: Fleet) -> None:
    """The cheapest endpoint is the first one; `served` in the response says which one it was."""
    fleet.until_quiet()
    ids = {endpoint_of(engine): engine.worker_id for engine in fleet.engines}
    with gateway(fleet.stays.picks) as client:
        stream = begun(client)
        first, fallback = stream.until_picked().destination.split(",")
        assert {first, fallback} == set(fleet.endpoints())
        second = begun(client, {**COMPLETION, "prompt": list(range(500, 540))})
        assert second.until_picked().destination == f"{fallback},{first}"  # the other one has more to do now
        second.cancel()
        stream.send(Part.RESPONSE_HEADERS, headers={":status": "200"}, metadata={LB: {SERVED: fallback}})
        assert stream.answer().parts == ["response_headers"]
        wanted = {ids[first]: 0, ids[fallback]: 1}
        for api in fleet.routers():
            until(partial(has_requests, api, wanted), "the booking to move")
            assert prefill_tokens(api) == 0
        stream.cancel()
    fleet.until_quiet()


@pytest.mark.first_ring("picker")
def test_an_answer_in_full_duplex_passes_unchanged(fleet: Fleet) -> None:
    """Headers, each part of the body and trailers come back; a picker that ends streams with picks has none of it."""
    parts = [b"data: 1\n\n", b"", b"y" * 100_000, b"data: [DONE]\n\n"]
    for trailers in (False, True):
        with gateway(fleet.stays.picks) as client:
            stream = asking(client, modes=(FULL_DUPLEX, FULL_DUPLEX))
            stream.send(Part.REQUEST_BODY, body=json.dumps(COMPLETION).encode(), end_of_stream=True)
            stream.until_picked()
            stream.send(Part.RESPONSE_HEADERS, headers={":status": "200"})
            for n, part in enumerate(parts):
                stream.send(Part.RESPONSE_BODY, body=part, end_of_stream=not trailers and n == len(parts) - 1)
            if trailers:
                stream.send(Part.RESPONSE_TRAILERS)
            found = stream.rest()
        assert (found.body, found.ends_body) == (b"".join(parts), not trailers)
        assert (found.parts[0], found.parts[-1]) == (
            "response_headers",
            "response_trailers" if trailers else "response_body",
        )
        assert found.status is grpc.StatusCode.OK
    with gateway(fleet.ends.picks) as client:
        found = client.ask(COMPLETION, modes=(FULL_DUPLEX, FULL_DUPLEX))
        assert (found.parts, found.status) == (["request_headers", "request_body"], grpc.StatusCode.OK)


@pytest.mark.first_ring("picker")
def test_a_request_that_is_seen_is_booked_until_its_end(fleet: Fleet) -> None:
    """Other routers know it at once, its prompt as computed at the first byte, and its end."""
    fleet.until_quiet()
    other = Api(fleet.ends.router.url)
    with gateway(fleet.stays.picks) as client:
        stream = begun(client)
        stream.until_picked()
        until(lambda: n_requests(other) == 1 and prefill_tokens(other) > 0, "the booking")
        stream.send(Part.RESPONSE_HEADERS, headers={":status": "200"})
        until(lambda: n_requests(other) == 1 and prefill_tokens(other) == 0, "the first byte")
        stream.half_close()
        stream.rest()
    fleet.until_quiet()


def test_a_request_that_is_not_seen_ends_by_its_forecast(fleet: Fleet) -> None:
    """The stream ended with its pick, and so does the booking of a short request, with a metric that says so."""
    ends_unseen(fleet, 4)


def test_a_request_that_is_not_seen_ends_by_the_metrics_of_its_engine(fleet: Fleet) -> None:
    """Its forecast is half an hour. The engine, which never got it, reports that nothing runs."""
    ends_unseen(fleet, 100_000)


def ends_unseen(fleet: Fleet, max_tokens: int) -> None:
    fleet.until_quiet()
    api, name = Api(fleet.ends.router.url), "kvstreams_picker_assumed_ends_total"
    before = metrics(api)[name]
    with gateway(fleet.ends.picks) as client:
        assert client.ask({**COMPLETION, "max_tokens": max_tokens}).status is grpc.StatusCode.OK
    # The end of an earlier one, which no longer counts as load, may be counted a second later.
    until(lambda: metrics(api)[name] > before, "the assumed end")
    fleet.until_quiet()


@pytest.mark.first_ring("picker")
def test_a_request_that_is_shed_gets_429(fleet: Fleet) -> None:
    """Retry-After says when to come again."""
    fleet.until_quiet()
    with gateway(fleet.stays.picks) as client:
        running = [begun(client, long_prompt(n)) for n in (1, 2)]
        for stream in running:
            stream.until_picked()
        found = client.ask(long_prompt(3))
        assert found.refused == 429 and int(found.headers["retry-after"]) >= 1, found
        for stream in running:
            stream.cancel()
    fleet.until_quiet()


def test_tenant_and_priority_reach_the_queue(fleet: Fleet) -> None:
    """A higher priority goes first although it came later, and the requests of a tenant that may wait are limited."""
    limits: dict[str, Any] = {
        "router_queue_timeout_s": 60.0,
        "router_queue_tenant_requests_max": 1,
        "picker_objectives": "batch=-5",
    }
    picker = fleet.stack.picker("queues", picker_ends_stream=False, **limits)
    wait_workers(picker.router.url, 2)
    fleet.until_quiet()
    api = Api(picker.router.url)

    def waiting(priority: int) -> float:
        return metrics(api).get(f"kvstreams_flow_control_queue_size/{priority}", 0)

    with gateway(picker.picks) as client:
        running = [begun(client, long_prompt(n)) for n in (1, 2)]
        for stream in running:
            stream.until_picked()
        batch = begun(client, long_prompt(3), {FAIRNESS: "a", OBJECTIVE: "batch"})
        until(lambda: waiting(-5) == 1, "the request of the objective")
        urgent = begun(client, long_prompt(4), {FAIRNESS: "b"})
        until(lambda: waiting(0) == 1, "the request without one")
        found = client.ask(long_prompt(5), headers={FAIRNESS: "a"})
        assert found.refused == 429 and "retry-after" in found.headers
        assert metrics(api)["kvstreams_queue_outcomes_total/tenant"] == 1
        running[0].cancel()
        assert urgent.until_picked().destination
        assert (waiting(-5), waiting(0)) == (1, 0)
        running[1].cancel()
        assert batch.until_picked().destination
        for stream in (urgent, batch):
            stream.cancel()
    picker.router.child.stop()
    fleet.until_quiet()


@pytest.mark.first_ring("picker")
def test_a_body_that_never_ends_gets_408(fleet: Fleet) -> None:
    """Envoy has no deadline for a body in full duplex; one that sends nothing at all is ended as well."""
    with gateway(fleet.stays.picks) as client:
        stream, silent = asking(client), client.open()
        stream.send(Part.REQUEST_BODY, body=b"{")
        assert stream.rest().refused == 408
        assert silent.rest().status is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.first_ring("picker")
def test_a_stream_that_breaks_the_protocol_is_ended(fleet: Fleet) -> None:
    """A message at the wrong time, or one that is none, is INVALID_ARGUMENT, and leaves no booking."""
    fleet.until_quiet()
    with gateway(fleet.stays.picks) as client:
        early, garbage, twice = client.open(), client.open(), begun(client)
        early.send(Part.RESPONSE_HEADERS, headers={":status": "200"})
        garbage.send_raw(b"\xff\xff")
        twice.until_picked()
        twice.send(Part.REQUEST_HEADERS, headers=POST)
        for stream in (early, garbage, twice):
            assert stream.rest().status is grpc.StatusCode.INVALID_ARGUMENT
    fleet.until_quiet()


# -- equal knowledge ---------------------------------------------------------------------------------------------------

#: Prompts by the engines that are sent them. The second one begins like the third, with 5 of 7 blocks.
PROMPTS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "of one engine": (list(range(700, 780)), [1]),
    "of both engines": (list(range(900, 964)), [0, 1]),
    "that begins like another one": ([*range(700, 780), *range(1200, 1232)], []),
    "of the other engine": (list(range(1300, 1332)), [0]),
    "that no engine has": (list(range(1500, 1560)), []),
    "of less than a block": ([1, 2, 3], []),
}


def table_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of POST /route without what differs between two that are equal: its id, and a draw between equals."""
    candidates = sorted(answer["candidates"], key=lambda each: each["worker_id"])
    lowest = min(each["cost"] for each in candidates)
    cheapest = [each["worker_id"] for each in candidates if each["cost"] == lowest]
    assert answer["worker_id"] in cheapest and answer["cost"] == lowest
    own = {"request_id", "worker_id", "url", "overlap_blocks", "alternatives", "candidates"}
    rest = {name: value for name, value in answer.items() if name not in own}
    return {**rest, "candidates": candidates, "cheapest": cheapest}


def knows(api: Api, asked: Mapping[str, Any], wanted: Mapping[int, int]) -> bool:
    """Whether a router has exactly these blocks of a prompt, by worker."""
    answer = api.ask(**asked)
    return {each["worker_id"]: each["scores"] for each in answer["candidates"]} == wanted and answer["mode"] == "exact"


@pytest.mark.long_running
def test_equal_knowledge(scope: Settings, tmp_path: Path) -> None:
    """At a quiet moment all routers have the same candidates, overlaps, modes and costs, and pickers pick by them.

    The whole tables are compared, for prompts that no, one and every engine has, in mode kv. In expected-time, costs
    depend on times that each router has measured; all else is equal.
    """
    with running(scope, tmp_path) as fleet:
        for tokens, engines in PROMPTS.values():
            for engine in engines:
                complete(fleet.engines[engine], list(tokens))
        for name in PROMPTS:
            assert_equal_knowledge(fleet, name)


def assert_equal_knowledge(fleet: Fleet, name: str) -> None:
    tokens, engines = PROMPTS[name]
    apis = fleet.routers()
    ids = {endpoint_of(engine): engine.worker_id for engine in fleet.engines}
    asked = {"token_ids": list(tokens), "model": MODEL, "expected_output_tokens": 4, "alternatives": 1}
    n_blocks = len(tokens) // SMALL.block_size
    shared = 5 if name == "that begins like another one" else 0
    wanted = {
        engine.worker_id: n_blocks if n in engines else shared * (n == 1) for n, engine in enumerate(fleet.engines)
    }
    for api in apis:
        until(partial(knows, api, asked, wanted), f"the blocks of a prompt {name}")
    for picker in (fleet.stays, fleet.ends):
        fleet.until_quiet()
        tables = [table_of(api.ask(**asked)) for api in apis]
        assert tables[0] == tables[1] == tables[2], name
        with gateway(picker.picks) as client:
            stream = begun(client, {**COMPLETION, "prompt": list(tokens)})
            found = stream.until_picked()
            if picker is fleet.stays:
                # A booking that ends within milliseconds is not published, and counts as lately computed here alone.
                for api in apis:
                    until(partial(has_any, api), "the booking")
            stream.cancel()
        endpoints = [ids[each] for each in found.destination.split(",")]
        assert int(found.details["worker_id"]) == endpoints[0] and endpoints[0] in tables[0]["cheapest"]
        assert found.details["overlap_blocks"] == wanted[endpoints[0]]
        for term in ("request_blocks", "mode", "chosen_mode", "cost", "router_mode"):
            assert found.details[term] == tables[0][term], (name, term)
        if picker is fleet.stays:
            costs = {each["worker_id"]: each["cost"] for each in tables[0]["candidates"]}
            assert [costs[each] for each in endpoints] == sorted(costs.values())
    fleet.until_quiet()
    timed = [api.ask(**asked, router_config_override={"router_mode": "expected-time"}) for api in apis]
    scores = [sorted((each["worker_id"], each["scores"]) for each in answer["candidates"]) for answer in timed]
    assert scores == [sorted(wanted.items())] * 3
    assert [answer["mode"] for answer in timed] == ["exact"] * 3


# -- health, start and end ---------------------------------------------------------------------------------------------


@pytest.mark.first_ring("picker")
def test_health_of_a_picker_that_is_ready(fleet: Fleet) -> None:
    """All names of the protocol, on both ports."""
    for target in (fleet.stays.picks, fleet.stays.health):
        with gateway(target) as client:
            assert [client.health(name) for name in NAMES] == ["SERVING"] * 4 + ["NOT_FOUND"]


def listening(picker: PickerProcess) -> PickerProcess:
    """Wait until a picker answers health checks; it need not be ready."""
    child = picker.router.child
    child.wait_ready(lambda: "gateways may ask" in child.log_path.read_text(), PATIENCE_S)
    return picker


def test_a_picker_that_starts_is_alive_and_takes_no_request(
    new_scope: ScopeFactory, tmp_path: Path, children: Children
) -> None:
    """It becomes ready with its topics; without an engine that is ready, requests get 503."""
    stack = Stack(new_scope(tmp_path / "state"), tmp_path, children)
    picker = listening(stack.picker("picker", wait=False))
    for target in (picker.picks, picker.health):
        with gateway(target) as client:
            assert [client.health(name) for name in NAMES] == ["SERVING", *["NOT_SERVING"] * 3, "NOT_FOUND"]
    with gateway(picker.picks) as client:
        assert client.ask(COMPLETION).status is grpc.StatusCode.UNAVAILABLE
        ensure_topics(stack.settings, topics(stack.settings).all())
        until(lambda: client.health(READINESS) == "SERVING", "the picker to be ready")
        for found in (client.ask(COMPLETION), client.ask(None, "/v1/models", method="GET")):
            assert (found.refused, found.headers["retry-after"]) == (503, "1"), found


@pytest.mark.long_running
def test_while_kafka_is_away_a_picker_goes_on_and_a_new_one_is_not_ready(scope: Settings, tmp_path: Path) -> None:
    """Picks find the prompt as before, and say that they may be wrong. After Kafka is back, they are exact again."""
    broker = BreakableKafka(broker_config(tmp_path / "kafka"))
    try:
        settings = replace(scope, kafka=broker.up().bootstrap)
        with Children() as children:
            stack = Stack(settings, tmp_path / "stack", children)
            stack.worker(router=False)
            engines = stack.engines(2, SMALL, MODEL, 10.0)
            stack.bridge(engines)
            picker = stack.picker("picker", picker_ends_stream=False, picker_details=True)
            prompt = list(range(700, 780))
            complete(engines[1], prompt)
            with gateway(picker.picks) as client:

                def found(mode: str) -> bool:
                    answer = client.ask({**COMPLETION, "prompt": prompt})
                    assert answer.status is grpc.StatusCode.OK
                    return bool(answer.details.get("overlap_blocks") == 5 and answer.details["chosen_mode"] == mode)

                wait_workers(picker.router.url, 2)
                until(lambda: found("exact"), "the blocks of the prompt")
                broker.kill()
                until(lambda: found("degraded"), "a pick that says that Kafka is away")
                for _ in range(20):
                    assert found("degraded")
                assert client.health(READINESS) == "SERVING"
                late = listening(stack.picker("late", wait=False))
                with gateway(late.health) as checks:
                    assert (checks.health(LIVENESS), checks.health(READINESS)) == ("SERVING", "NOT_SERVING")
                with gateway(late.picks) as asks:
                    assert asks.ask(COMPLETION).status is grpc.StatusCode.UNAVAILABLE
                broker.up()
                until(lambda: found("exact"), "an exact pick")
    finally:
        broker.down()


@pytest.mark.long_running
def test_sigterm_fails_no_request(fleet: Fleet) -> None:
    """Those who watch the health hear of it first; what was asked for is picked, and no stream is cut off.

    Streams wait for the body, in full duplex and buffered, for a rank, for the first byte and for the answer's end.
    """
    limits: dict[str, Any] = {"drain_notice_s": 1.0, "drain_timeout_s": 120.0, "router_queue_timeout_s": 120.0}
    picker = fleet.stack.picker("leaves", picker_ends_stream=False, body_timeout_s=60.0, **limits)
    wait_workers(picker.router.url, 2)
    fleet.until_quiet()
    child, api = picker.router.child, Api(picker.router.url)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with gateway(picker.picks) as client, grpc.insecure_channel(picker.health, options) as channel:
        watch = channel.unary_stream(WATCH, response_deserializer=health_pb2.HealthCheckResponse.FromString)
        statuses = watch(health_pb2.HealthCheckRequest(service=READINESS).SerializeToString(), timeout=PATIENCE_S)
        assert next(statuses).status == health_pb2.HealthCheckResponse.SERVING
        answering = begun(client)
        answering.until_picked()
        answering.send(Part.RESPONSE_HEADERS, headers={":status": "200"})
        answering.answer()
        running = [begun(client, long_prompt(n)) for n in (1, 2)]
        for stream in running:
            stream.until_picked()
        waiting = begun(client, long_prompt(3))
        until(lambda: metrics(api).get("kvstreams_flow_control_queue_size/0") == 1, "a request in the queue")
        half, buffered = asking(client), asking(client, modes=(BUFFERED, NOTHING))
        half.send(Part.REQUEST_BODY, body=b'{"model": ')
        first = buffered.answer()
        until(lambda: metrics(api)["kvstreams_picker_streams"] == 6, "all streams")
        child.ask_to_stop()
        assert next(statuses).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert picked(fleet, waiting.rest())
        for stream in (answering, *running):
            assert stream.rest().status is grpc.StatusCode.OK
        half.send(Part.REQUEST_BODY, body=b'"m", "prompt": [1, 2, 3]}', end_of_stream=True)
        buffered.send(Part.REQUEST_BODY, body=json.dumps(COMPLETION).encode(), end_of_stream=True)
        assert picked(fleet, half.rest()) and picked(fleet, buffered.rest(first))
        until(lambda: not child.running, "the picker to end, before its limit")
    assert child.exit_code == 0
    fleet.until_quiet()


def picked(fleet: Fleet, found: Answered) -> bool:
    """Whether a stream ended well, with an endpoint."""
    return found.status is grpc.StatusCode.OK and not found.refused and found.destination in fleet.endpoints()


@pytest.mark.long_running
def test_a_picker_that_is_killed_leaves_bookings_that_end(fleet: Fleet) -> None:
    """Others count them until they are over by their forecasts, or by their TTL."""
    picker = fleet.stack.picker("dies", picker_ends_stream=False)
    wait_workers(picker.router.url, 2)
    other = Api(fleet.stays.router.url)
    fleet.until_quiet()
    with gateway(picker.picks) as client:
        stream = begun(client)
        stream.until_picked()
        until(lambda: n_requests(other) == 1, "the booking")
        picker.router.child.kill()
        stream.cancel()
    assert n_requests(other) == 1
    fleet.until_quiet()


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_tls_with_client_certificates(fleet: Fleet, tmp_path: Path) -> None:
    """Where a client certificate is required, a gateway without one is not served, and health has a port of its own."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server, client = ours.sign("server", "localhost", "127.0.0.1"), ours.sign("client", "gateway")
    picker = listening(fleet.stack.picker("tls", wait=False, tls_certificate=server, tls_client_ca=ours.file))
    ca, pem, foreign = (Path(name).read_bytes() for name in (ours.file, client, theirs.sign("other", "gateway")))
    with gateway(picker.picks, grpc.ssl_channel_credentials(ca, pem, pem)) as asks:
        until(lambda: asks.health(READINESS) == "SERVING", "the picker to be ready")
        until(lambda: picked(fleet, asks.ask(COMPLETION)), "the engines")
    for credentials in (grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, foreign, foreign), None):
        with gateway(picker.picks, credentials) as asks:
            assert asks.ask(COMPLETION).status is grpc.StatusCode.UNAVAILABLE
    with gateway(picker.health) as asks:
        assert asks.health(LIVENESS) == "SERVING"


def test_tls_with_a_self_signed_certificate(fleet: Fleet) -> None:
    """A gateway that does not check it, as this client trusts what it gets, is served; one that checks it is not."""
    picker = fleet.stack.picker("self-signed", picker_self_signed=True)
    wait_workers(picker.router.url, 2)
    host, _, port = picker.picks.partition(":")
    own = ssl.get_server_certificate((host, int(port))).encode()
    with gateway(picker.picks, grpc.ssl_channel_credentials(own)) as asks:
        assert picked(fleet, asks.ask(COMPLETION))
    with gateway(picker.picks, grpc.ssl_channel_credentials()) as asks:
        assert asks.ask(COMPLETION).status is grpc.StatusCode.UNAVAILABLE
