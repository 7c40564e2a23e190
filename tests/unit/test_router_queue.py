"""Requests with queue=on on a real server: they wait for a rank, in order, within limits, until their deadlines.

The router reads no topics. Bookings, reports and registrations come over HTTP, or are folded by hand.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import orjson
import pytest

from streams.core.hashing import local_hashes
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.queue import QueuePolicy
from streams.core.routing.selection import RouterMode
from streams.kafka.clients import worker_key
from streams.process.waiting import wait_for
from streams.router_api.deciding.admission import Admission, Outcome
from streams.router_api.messages.requests import RouteRequest
from streams.settings import Settings
from tests.helpers.api import JSON, OCTETS, PATIENCE_S, Answer, Api, metrics, packed
from tests.helpers.local_router import LocalRouter, hold, local_router, rank, register

#: A rank with more than this many tokens still to prefill is closed.
BACKLOG_TOKENS = 1000
SETTINGS = Settings(
    router_mode=RouterMode.KV,  # whose backlog is counted in tokens, by the settings alone
    router_queue_backlog_ms=BACKLOG_TOKENS * 0.1,
    prefill_us_per_token=100.0,
    router_queue_requests_max=6,
    router_queue_tenant_requests_max=4,
)

#: Fills a rank.
LONG = 2000

_names = (f"request-{number}" for number in itertools.count())


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """A prompt; prompts with different seeds share no block."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 1 << 17, n_tokens).tolist()
    return tokens


class Asking:
    """A request that waits on a thread of its own."""

    def __init__(self, api: Api, n_tokens: int = LONG, tenant: str = "", **fields: Any) -> None:
        self.name = next(_names)
        self.answer: Answer | None = None
        body = {"request_id": self.name, "model": "m", "queue": "on", "token_ids": prompt(n_tokens), **fields}
        self._thread = threading.Thread(target=self._ask, args=(api, body, {"X-Tenant": tenant} if tenant else {}))
        self._thread.start()

    def _ask(self, api: Api, body: dict[str, Any], headers: dict[str, str]) -> None:
        with suppress(OSError, HTTPException):  # the server ended; `ended` then fails
            self.answer = api.call("POST", "/route", body, headers=headers)

    def ended(self) -> Answer:
        self._thread.join(PATIENCE_S)
        assert self.answer is not None
        return self.answer


class Served:
    """A router with one worker of model `m`, which is full."""

    def __init__(self, served: LocalRouter) -> None:
        self.api, self.router = served.api, served.router
        self.full = self.fill()

    def fill(self) -> str:
        name = next(_names)
        self.api.route(request_id=name, model="m", token_ids=prompt(LONG, seed=1))
        return name

    def wait(self, n_waiting: int) -> None:
        wait_for(lambda: self.waiting() == n_waiting, PATIENCE_S, f"{n_waiting} requests to wait")

    def waiting(self) -> float:
        return sum(
            number
            for name, number in metrics(self.api).items()
            if name.startswith("kvstreams_flow_control_queue_size/")
        )

    def asks(self, n_tokens: int = LONG, **fields: Any) -> Asking:
        """Let a request wait, and return once it does."""
        before = self.waiting()
        asking = Asking(self.api, n_tokens, **fields)
        self.wait(int(before) + 1)
        return asking

    def outcome(self, name: str) -> float:
        return metrics(self.api)[f"kvstreams_queue_outcomes_total/{name}"]

    def free(self, name: str) -> None:
        assert self.api.call("DELETE", f"/loads/{name}").status == 200

    def free_all(self) -> None:
        with self.router.loads.locked() as loads:
            names = {booking_id.request_id for booking_id in loads._states}
        for name in names:
            self.free(name)

    def order(self, asking: list[Asking]) -> list[int]:
        """Free each request that runs, one after the other; return in which order the waiting ones got the rank."""
        order: list[int] = []
        running = self.full
        while len(order) < len(asking):
            self.free(running)
            left = [number for number in range(len(asking)) if number not in order]
            wait_for(lambda left=left: any(asking[number].answer for number in left), PATIENCE_S, "the next request")  # type: ignore[misc]
            [number] = [number for number in left if asking[number].answer]
            order.append(number)
            running = asking[number].name
        self.full = running
        return order


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalRouter]:
    with local_router(SETTINGS, n_workers=1) as served:
        yield served


@pytest.fixture
def served(shared: LocalRouter) -> Iterator[Served]:
    """Give a router whose only worker is full; afterwards nothing waits, listens or is booked."""
    served = Served(shared)
    yield served
    served.wait(0)
    wait_for(lambda: not shared.router.loads._listeners, PATIENCE_S, "the queue to end")
    assert metrics(served.api)["kvstreams_flow_control_queue_bytes"] == 0
    served.free_all()


def test_a_request_waits_until_a_prefill_is_complete(served: Served) -> None:
    """A request goes to its rank once the backlog there is below the threshold, and learns how long it waited."""
    asking = served.asks()
    time.sleep(0.1)
    assert asking.answer is None
    served.api.call("POST", f"/loads/{served.full}/prefill-complete").given()
    answer = asking.ended().given()
    assert answer["worker_id"] == 1
    assert 100.0 <= answer["queued_ms"] < PATIENCE_S * 1000
    assert served.api.loads([1])[1, 0][2] == 2  # requests


def test_a_request_that_finds_room_does_not_wait(served: Served) -> None:
    """With queue=on a request is answered at once if its rank is open, and the answer has no waiting time."""
    served.free(served.full)
    before = served.outcome("at_once")
    assert "queued_ms" not in Asking(served.api).ended().given()
    assert served.outcome("at_once") == before + 1


def test_without_queue_nothing_changes(served: Served) -> None:
    """A request without queue goes to the rank whatever its backlog is, even while others wait."""
    asking = served.asks()
    assert served.api.route(model="m", token_ids=prompt(32))["worker_id"] == 1
    assert "queued_ms" not in Asking(served.api, queue="off").ended().given()
    assert asking.answer is None
    served.free_all()
    asking.ended().given()


def test_requests_that_book_nothing_do_not_wait(served: Served) -> None:
    """A request with update_states false is answered at once."""
    assert Asking(served.api, update_states=False).ended().given()["worker_id"] == 1


def test_greater_priorities_go_first(served: Served) -> None:
    """Among waiting requests the greatest priority goes first, and equal ones in the order of the policy."""
    asking = [served.asks(priority=priority) for priority in (0, -1, 5, 0)]
    lengths = {
        name: n for name, n in metrics(served.api).items() if name.startswith("kvstreams_flow_control_queue_size/")
    }
    assert lengths == {f"kvstreams_flow_control_queue_size/{priority}": n for priority, n in ((-1, 1), (0, 2), (5, 1))}
    assert served.order(asking) == [2, 0, 3, 1]


def test_shorter_prompts_pass_longer_ones(served: Served) -> None:
    """By default a prompt with less to compute goes first if it came soon after a longer one."""
    asking = [served.asks(60_000), served.asks(1500), served.asks(1400, priority_jump=60.0)]
    assert served.order(asking) == [2, 1, 0]


def test_tenants_share(served: Served) -> None:
    """A tenant that waits with one request does not wait for all requests of another one."""
    asking = [served.asks(tenant=tenant) for tenant in ("a", "a", "a", "b")]
    assert served.order(asking) == [0, 3, 1, 2]


def test_a_late_request_is_refused(served: Served) -> None:
    """A request that gets no rank within its queue_timeout_ms gets 503 with a time to try again, and books nothing."""
    started = time.monotonic()
    answer = Asking(served.api, queue_timeout_ms=200).ended()
    assert 0.2 <= time.monotonic() - started < PATIENCE_S
    answer.refused(503, "queue_timeout")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert served.api.loads([1])[1, 0][2] == 1


def test_limits_of_requests_and_of_a_tenant(served: Served) -> None:
    """Beyond the limit of a tenant, and of all requests, a request is refused with a time to try again."""
    asking = [served.asks(32, tenant="a") for _ in range(4)]
    refused = Asking(served.api, 32, tenant="a").ended()
    assert "router_queue_tenant_requests_max" in refused.refused(503, "queue_full")
    asking += [served.asks(32, tenant="b") for _ in range(2)]
    refused = Asking(served.api, 32, tenant="c").ended()
    assert "router_queue_requests_max" in refused.refused(503, "queue_full")
    assert int(refused.headers["retry-after"]) == refused.json["error"]["detail"]["retry_after_s"] >= 1
    served.free(served.full)
    assert all(each.ended().status == 200 for each in asking)  # the rank has room for six short ones


def test_the_limit_of_bytes() -> None:
    """Waiting requests take only as much memory as router_queue_bytes_max says."""
    with local_router(replace(SETTINGS, router_queue_bytes_max=65_536), n_workers=1) as router:
        served = Served(router)
        waiting = served.asks(32)
        refused = Asking(served.api, 48_000).ended()
        assert "router_queue_bytes_max" in refused.refused(503, "queue_full")
        served.free(served.full)
        waiting.ended().given()


def test_a_client_that_disconnects_leaves_the_queue(served: Served) -> None:
    """A waiting request whose connection is closed books nothing, and the next one gets the rank."""
    before = served.outcome("cancelled")
    address = urlsplit(served.api.url)
    body = f'{{"model": "m", "queue": "on", "priority": 9, "token_ids": {prompt(LONG)}}}'.encode()
    head = f"POST /route HTTP/1.1\r\nHost: h\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with closing(socket.create_connection((address.hostname, address.port or 80), PATIENCE_S)) as connection:
        connection.sendall(head + body)
        served.wait(1)
        asking = served.asks()
    wait_for(lambda: served.outcome("cancelled") == before + 1, PATIENCE_S, "the request to leave")
    served.wait(1)
    served.free(served.full)
    assert asking.ended().given()["worker_id"] == 1
    assert served.api.loads([1])[1, 0][2] == 1


def test_overlap_is_looked_up_again(served: Served) -> None:
    """The answer has the overlap of the moment at which the request left the queue."""
    asking = served.asks(1600, token_ids=prompt(1600, seed=7))
    hold(served.router, rank(1), local_hashes(prompt(1600, seed=7)[:800], 16))
    served.free(served.full)
    assert asking.ended().given()["overlap_blocks"] == 50


def test_a_repeated_id_does_not_wait(served: Served) -> None:
    """A retry of a request that is booked already gets its rank at once, although others wait."""
    asking = served.asks()
    again = served.api.route(request_id=served.full, model="m", token_ids=prompt(LONG, seed=1), queue="on")
    assert (again["worker_id"], again["cost"]) == (1, None)
    served.free(served.full)
    asking.ended().given()


def test_a_retry_of_a_waiting_request_gets_the_same_rank(served: Served) -> None:
    """Two requests with one id that wait at the same time are booked once."""
    first = served.asks()
    second = Asking(served.api, request_id=first.name)
    served.wait(2)
    served.free(served.full)
    wait_for(lambda: first.answer is not None, PATIENCE_S, "the first one")
    served.free(first.name)
    assert first.ended().given()["worker_id"] == second.ended().given()["worker_id"] == 1


def test_a_new_worker_ends_the_wait(served: Served) -> None:
    """A worker that is registered while requests wait gets them, although no load fell."""
    asking = served.asks()
    register(served.router, 2)
    try:
        assert asking.ended().given()["worker_id"] == 2
    finally:
        served.router.view.fold_worker(worker_key(rank(2).worker_id), None)


def test_a_request_whose_workers_left_is_refused(served: Served) -> None:
    """If no rank passes its filters any more, a waiting request gets the same error as a new one."""
    register(served.router, 2)
    served.api.route(model="m", worker_id=2, token_ids=prompt(LONG, seed=2))
    asking = served.asks(worker_id=2)
    served.router.view.fold_worker(worker_key(rank(2).worker_id), None)
    asking.ended().refused(503, "no_eligible_worker")


def test_a_request_that_nothing_can_serve_does_not_wait(served: Served) -> None:
    """An error that waiting cannot end is returned at once."""
    Asking(served.api, worker_id=77).ended().refused(503, "no_eligible_worker")
    Asking(served.api, model="unknown").ended().refused(404, "unknown_model")


def test_packed_tokens_may_wait(served: Served) -> None:
    """Tokens as octet-stream have queue and its fields as query parameters."""
    path = "/route?model=m&queue=on&priority=1&priority_jump=0.5&queue_timeout_ms=100"
    served.api.call("POST", path, packed(prompt(LONG)), OCTETS).refused(503, "queue_timeout")


@pytest.mark.parametrize(
    "fields", [{"queue": "yes"}, {"priority_jump": -1}, {"queue_timeout_ms": 0}, {"priority": 1 << 31}]
)
def test_wrong_values_are_refused(served: Served, fields: dict[str, Any]) -> None:
    """A value out of range is a 400."""
    Asking(served.api, **fields).ended().refused(400, "invalid_request")


def test_a_tenant_has_a_limited_name(served: Served) -> None:
    """A header of more than 512 characters is a 400."""
    Asking(served.api, tenant="t" * 513).ended().refused(400, "invalid_request")


def test_a_token_decides_about_the_tenant_and_the_greatest_priority(tmp_path: Path) -> None:
    """With tokens on, a request waits as its token's tenant; a token without one acts for the tenant in the header."""
    gateway, team = "sesame-of-the-gateway", "sesame-of-the-other-team"
    file = tmp_path / "tokens.toml"
    file.write_text(
        f'[gateway]\ntoken = "{gateway}"\nrights = ["route", "read"]\n'
        f'[team-a]\ntoken = "{team}"\nrights = ["route"]\ntenant = "a"\npriority_max = 5\n'
    )
    settings = replace(SETTINGS, tokens_file=str(file), router_queue_tenant_requests_max=1)
    with local_router(settings, n_workers=1) as router:
        theirs = Api(router.api.url, team)
        served = Served(LocalRouter(router.router, Api(router.api.url, gateway)))
        Asking(theirs, tenant="b").ended().refused(403, "forbidden")
        waiting = [Asking(theirs, tenant="a", priority=9)]
        served.wait(1)
        # One request of this tenant may wait, in whichever way it is named.
        for api, tenant in ((theirs, ""), (served.api, "a")):
            refused = Asking(api, tenant=tenant).ended()
            assert "router_queue_tenant_requests_max" in refused.refused(503, "queue_full")
        waiting += [served.asks(tenant="b", priority=4), served.asks(tenant="c", priority=6)]
        assert served.order(waiting) == [2, 0, 1]  # 6, 5 in place of 9, 4


def test_requests_of_a_list_do_not_wait(served: Served) -> None:
    """A request with queue=on in a list is refused by itself."""
    items = [{"model": "m", "token_ids": prompt(32), "queue": queue} for queue in ("on", "off")]
    first, second = served.api.call("POST", "/route", items).given()
    assert first["error"]["code"] == "invalid_request"
    assert second["worker_id"] == 1


def test_requests_wait_while_every_rank_is_busy() -> None:
    """With a busy threshold and queue=on a request waits where it is refused without."""
    settings = replace(SETTINGS, router_queue_backlog_ms=0.0, active_prefill_tokens_threshold=BACKLOG_TOKENS)
    with local_router(settings, n_workers=2) as router:
        served = Served(router)
        other = served.fill()
        served.api.call("POST", "/route", {"model": "m", "token_ids": prompt(32)}).refused(503, "all_workers_busy")
        asking = served.asks()
        served.free(other)
        asking.ended().given()


def test_a_stopping_router_refuses_what_waits_and_what_would_have_to() -> None:
    """Requests that wait are refused at once, so that clients ask another router; one that finds room is answered."""
    with local_router(SETTINGS, n_workers=1) as router:
        served = Served(router)
        waiting = [served.asks() for _ in range(2)]
        router.router.stopping = True
        for asking in (*waiting, Asking(served.api)):
            answer = asking.ended()
            assert "stopping" in answer.refused(503, "not_ready")
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert (served.waiting(), served.outcome("refused")) == (0, 3)
        assert served.api.loads([1])[1, 0][2] == 1
        served.free(served.full)
        Asking(served.api).ended().given()


def test_a_server_that_ends_answers_what_waits() -> None:
    """When the server ends, a waiting request does not hang: its connection ends, with or without an answer."""
    with local_router(replace(SETTINGS, drain_timeout_s=0.2), n_workers=1) as router:
        served = Served(router)
        asking = served.asks()
    asking._thread.join(PATIENCE_S)
    assert not asking._thread.is_alive()
    assert asking.answer is None or asking.answer.status == 503


@pytest.mark.parametrize(
    ("policy", "fields", "first"),
    [
        ("arrival-plus-prefill", [{}, {}], 1),
        ("arrival-plus-prefill", [{"priority": 1}, {}], 0),
        ("arrival-plus-prefill", [{"priority_jump": 30.0}, {}], 0),
        ("wspt", [{}, {}], 1),
        ("fcfs", [{}, {}], 0),
    ],
)
def test_requests_that_come_together_begin_in_the_order_of_the_queue(
    policy: str, fields: list[dict[str, Any]], first: int
) -> None:
    """Of a long and a short prompt in one turn of the event loop, the first by policy and priority gets the open rank.

    No request waits for another one to come: alone, the long one is routed at once.
    """
    settings = replace(SETTINGS, router_queue_policy=QueuePolicy(policy))
    with local_router(settings, n_workers=1) as served:
        router = served.router
        lengths = (LONG, LONG // 2 + 200)

        async def together() -> list[str]:
            admission, names = Admission(router), ["long", "short"]
            done: list[str] = []

            async def route(name: str, n_tokens: int, given: dict[str, Any]) -> None:
                body = {"request_id": name, "model": "m", "queue": "on", **given}
                prepared = router.prepare(msgspec.convert(body, RouteRequest), packed(prompt(n_tokens)))
                await admission.route(prepared, "", lambda: False)
                done.append(name)
                router.report_phase(name, BookingPhase.FREE, None)

            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                for name, n_tokens, given in zip(names, lengths, fields, strict=True):
                    group.create_task(route(name, n_tokens, given))
            assert admission.outcomes[Outcome.AT_ONCE] + admission.outcomes[Outcome.ROUTED] == 2
            assert admission.outcomes[Outcome.AT_ONCE] >= 1
            return done

        assert asyncio.run(together())[0] == ("long", "short")[first]


def active_requests(served: Served) -> int:
    number: int = served.api.call("GET", "/loads").given()["loads"][0]["active_requests"]
    return number


def test_a_request_that_is_repeated_after_it_left_the_queue_stays_booked(served: Served) -> None:
    """The DELETE of a request that was never booked does not end the booking of its repetition under the same id."""
    assert Asking(served.api, request_id="repeated", queue_timeout_ms=1).ended().status == 503
    assert served.api.call("DELETE", "/loads/repeated").status == 202
    served.free(served.full)
    served.api.route(request_id="repeated", model="m", token_ids=prompt(LONG), queue="on")
    assert active_requests(served) == 1
    served.free("repeated")
    assert active_requests(served) == 0


def test_a_delete_ends_the_booking_of_a_request_that_still_waits(served: Served) -> None:
    """A DELETE that arrives while its request waits in the queue applies as soon as the request is booked."""
    asking = served.asks()
    assert served.api.call("DELETE", f"/loads/{asking.name}").status == 202
    served.free(served.full)
    assert asking.ended().status == 200
    assert active_requests(served) == 0


def body_of(kind: str, number: int) -> bytes:
    """A request whose body is much larger than what is kept of it while it waits."""
    asked: dict[str, Any] = {"request_id": f"{kind} {number}", "model": "m", "queue": "on"}
    if kind == "hashes":
        return orjson.dumps({**asked, "block_hashes": [(1 << 63) + number * 100_000 + each for each in range(10_000)]})
    n_tokens = 100_000 if kind == "large" else 40_000
    body = orjson.dumps({**asked, "token_ids": [300 + (each + number) % 500 for each in range(n_tokens)]})
    # The kernel that reads tokens out of a body leaves those with an escape to the parser, which makes lists.
    return body.replace(b'"model":"m"', b'"model":"\\u006d"') if kind == "escaped" else body


@pytest.mark.parametrize("kind", ["plain", "escaped", "large", "hashes"])
def test_what_a_waiting_request_keeps_in_memory_is_counted(kind: str, served: Served) -> None:
    """Neither the body nor the tokens or hashes that were read from it stay alive while the request waits."""
    url = urlsplit(served.api.url)
    bodies = [body_of(kind, number) for number in range(3)]
    connections = [HTTPConnection(url.hostname or "", url.port) for _ in bodies]
    tracemalloc.start(8)
    try:
        for connection, body in zip(connections, bodies, strict=True):
            connection.request("POST", "/route", body, {"Content-Type": "application/json"})
        served.wait(len(bodies))
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
        counted = metrics(served.api)["kvstreams_flow_control_queue_bytes"]
    finally:
        tracemalloc.stop()
        for connection in connections:
            connection.close()
    # What the server's code has allocated, and not the threads of other tests.
    servers = [tracemalloc.Filter(True, pattern, all_frames=True) for pattern in ("*/router_api/*", "*/aiohttp/*")]
    kept = snapshot.filter_traces(servers).statistics("traceback")
    assert sum(each.size for each in kept) < counted + len(bodies[0]), "\n".join(
        [line for each in kept[:5] for line in (f"{each.size} bytes", *each.traceback.format())]
    )
