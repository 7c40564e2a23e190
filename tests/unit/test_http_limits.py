"""Slow, large and numerous requests to a router on a real server: each is refused, and others are answered."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from streams.core.ids import RankId, SequenceHash, Tier, WorkerId
from streams.core.routing.eligibility import WorkerFilter
from streams.process import connections as connections_module
from streams.process.waiting import wait_for
from streams.router_api.http import inspections as inspections_module
from streams.router_api.http.bodies import SHORT_BODY_BYTES_MAX, UNCOUNTED_BODY_BYTES
from streams.router_api.http.body_parsing import LARGE_BODY_BYTES
from streams.router_api.http.handlers import FACT
from streams.router_api.knowledge import eligible_cache, index_view
from streams.router_api.messages.body_errors import without_middle
from streams.router_api.messages.requests import NAME_CHARS_MAX, WORKER_IDS_MAX
from streams.settings import Settings
from tests.helpers.api import OCTETS, PATIENCE_S, Api, metrics, packed
from tests.helpers.local_router import LocalRouter, hold, local_router, random_blocks, rank

TOKENS = list(range(64))
BODY_TIMEOUT_S = 1.0
BODY_BYTES_MAX = 4 * 1024 * 1024
#: Space for one upload that is over the uncounted size, and not for two.
BODIES_BYTES_MAX = BODY_BYTES_MAX
CONNECTIONS_MAX = 12

SETTINGS = Settings(
    body_timeout_s=BODY_TIMEOUT_S,
    body_bytes_max=BODY_BYTES_MAX,
    bodies_bytes_max=BODIES_BYTES_MAX,
    connections_max=CONNECTIONS_MAX,
)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    """Give a router with small limits."""
    with local_router(SETTINGS) as router:
        yield router


@pytest.fixture
def api(served: LocalRouter) -> Iterator[Api]:
    """Give its API, and check that no body counts as held once the test is over."""
    yield served.api
    wait_for(lambda: metrics(served.api)["kvstreams_body_bytes"] == 0, PATIENCE_S, "all bodies to be dropped")


def asked(**fields: Any) -> dict[str, Any]:
    return {"token_ids": TOKENS, "update_states": False, **fields}


@contextmanager
def upload(api: Api, declared: int, sent: bytes) -> Iterator[HTTPConnection]:
    """Send the headers of a POST /route and a part of its body."""
    with closing(HTTPConnection(urlsplit(api.url).netloc, timeout=PATIENCE_S)) as connection:
        connection.putrequest("POST", "/route")
        connection.putheader("Content-Length", str(declared))
        connection.endheaders(sent)
        yield connection


def refused(connection: HTTPConnection) -> tuple[int, str]:
    """The status and code with which an upload is refused."""
    response = connection.getresponse()
    return response.status, json.loads(response.read())["error"]["code"]


# --- slow and many ------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_in_time_is_408(api: Api) -> None:
    """A body that is cut off is answered with 408 after body_timeout_s, and other requests are answered meanwhile."""
    began = time.monotonic()
    with upload(api, 1000, b'{"token_ids"') as connection:
        api.route(**asked())
        assert refused(connection) == (408, "request_timeout")
    assert time.monotonic() - began >= BODY_TIMEOUT_S
    assert metrics(api)["kvstreams_errors_total/request_timeout"] >= 1


def test_a_body_that_trickles_in_is_408(api: Api) -> None:
    """A client that keeps sending single bytes does not extend the time."""
    with upload(api, 1000, b"{") as connection:

        def trickle() -> None:
            for _ in range(15):
                connection.send(b" ")
                time.sleep(BODY_TIMEOUT_S / 12)

        sending = threading.Thread(target=trickle)
        sending.start()
        assert refused(connection) == (408, "request_timeout")
        sending.join()


def test_bodies_that_are_read_at_the_same_time_are_limited(api: Api) -> None:
    """Large uploads beyond bodies_bytes_max are 503; small requests pass, and large ones do again later."""
    part = b" " * (BODIES_BYTES_MAX * 3 // 4)
    with upload(api, BODY_BYTES_MAX, part) as first:
        wait_for(lambda: metrics(api)["kvstreams_body_bytes"] >= len(part), PATIENCE_S, "the first upload")
        with upload(api, BODY_BYTES_MAX, part) as second:
            assert refused(second) == (503, "overloaded")
        api.route(**asked())
        just_uncounted = json.dumps(asked()).encode().ljust(UNCOUNTED_BODY_BYTES)
        api.call("POST", "/route", just_uncounted).given()
        assert refused(first) == (408, "request_timeout")
    api.call("POST", "/route", json.dumps(asked()).encode().ljust(len(part))).given()


def test_connections_are_limited(api: Api) -> None:
    """Beyond connections_max a connection gets 503 and is closed; when another one closes, there is space again."""
    before = metrics(api)["kvstreams_connections_refused_total/too_many"]
    host, port = urlsplit(api.url).hostname, urlsplit(api.url).port
    with ExitStack() as idle:
        for _ in range(CONNECTIONS_MAX):
            idle.enter_context(closing(socket.create_connection((host, port), timeout=PATIENCE_S)))
        answer = api.call("GET", "/healthz")
        assert "connections_max" in answer.refused(503, "overloaded")
        assert answer.headers["connection"] == "close"

    def freed() -> bool:
        return api.call("GET", "/healthz").status == 200

    wait_for(freed, PATIENCE_S, "space for a connection")
    assert metrics(api)["kvstreams_connections_refused_total/too_many"] > before


def test_a_connection_without_a_request_is_closed() -> None:
    """A connection that sends nothing, or only a part of its headers, is closed; one that sent a request stays."""
    with local_router(replace(SETTINGS, first_request_timeout_s=0.3)) as served, ExitStack() as opened:
        address = urlsplit(served.api.url)
        silent, partial = (
            opened.enter_context(closing(socket.create_connection((address.hostname, address.port), PATIENCE_S)))
            for _ in range(2)
        )
        kept = opened.enter_context(closing(HTTPConnection(address.netloc, timeout=PATIENCE_S)))
        kept.request("GET", "/healthz")
        kept.getresponse().read()
        partial.sendall(b"POST /route HTTP/1.1\r\nHost: x\r\n")
        assert (silent.recv(1), partial.recv(1)) == (b"", b"")
        kept.request("GET", "/healthz")
        assert kept.getresponse().status == 200
        assert metrics(served.api)["kvstreams_connections_refused_total/no_request"] == 2


def test_the_limit_of_connections_leaves_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router asks for the files that it needs; if it may not have them, its limit of connections is lower."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    for soft, hard, limit in ((1024, 1024, 896), (5000, 5000, 4096), (10, 10, 1), (1024, 8192, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        assert connections_module.Connections(4096, 10.0).connections_max == limit
    assert set_to[-1] == (4096 + 128, 8192)


# --- large --------------------------------------------------------------------------------------------------------


def test_id_lists_and_names_have_limits(api: Api) -> None:
    """Lists of more than WORKER_IDS_MAX ids are 400, in small and in large bodies; so are long LoRA names."""
    for name, first in (("allowed_worker_ids", 0), ("excluded_worker_ids", 10)):
        for n, status in ((WORKER_IDS_MAX, 200), (WORKER_IDS_MAX + 1, 400), (300_000, 400)):
            answer = api.call("POST", "/route", asked(**{name: list(range(first, first + n))}))
            assert answer.status == status, answer.body
            if status == 400:
                assert name in answer.refused(400, "invalid_request")
    for name in ("lora_name", "namespace", "cache_salt"):
        api.route(**asked(**{name: "x" * NAME_CHARS_MAX}))
        for n in (NAME_CHARS_MAX + 1, 3_000_000):
            message = api.call("POST", "/route", asked(**{name: "x" * n})).refused(400, "invalid_request")
            assert name in message and len(message) < 2000


def test_an_error_does_not_repeat_a_large_body(api: Api) -> None:
    """The message about an unknown field or a wrong value quotes only the beginning of it."""
    for fields in ({"x" * 3_000_000: 1}, {"phase": "y" * 3_000_000}):
        answer = api.call("POST", "/route", asked(**fields))
        answer.refused(400, "invalid_request")
        assert len(answer.body) < 4000


def test_of_a_name_of_megabytes_only_the_ends_are_searched(api: Api) -> None:
    """The object that has the unknown field is found nevertheless. Searching all of it would stop other requests."""
    fields = {"router_config_override": {"x" * 3_000_000: 1}}
    message = api.call("POST", "/route", asked(**fields)).refused(400, "invalid_request")
    assert "of router_config_override" in message and "router_temperature" in message and "session_id" not in message
    short = "Object contains unknown field `x` - at `$.router_config_override`"
    assert without_middle(short) == short
    kept = without_middle(short.replace("x", "x" * 3_000_000))
    assert len(kept) < 2000 and kept.startswith(short[:32]) and kept.endswith(short[32:])


LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "tokens": lambda: asked(token_ids=[100_000 + n % 50_000 for n in range(100_000)]),
    "hashes": lambda: {"block_hashes": [2**63 + n for n in range(30_000)], "update_states": False},
    "hashes as text": lambda: {"block_hashes": [str(2**63 + n) for n in range(30_000)], "update_states": False},
    "excluded ids": lambda: asked(excluded_worker_ids=[str(2**63 + n) for n in range(WORKER_IDS_MAX)]),
}


@pytest.mark.parametrize("fields", LARGE.values(), ids=LARGE.keys())
def test_a_large_body_is_answered_like_a_small_one(fields: Callable[[], dict[str, Any]], api: Api) -> None:
    """A body that is parsed in pieces gives the same answer as the same request in another form."""
    body = fields()
    raw = json.dumps(body).encode()
    if len(raw) <= LARGE_BODY_BYTES:
        raw = raw.ljust(LARGE_BODY_BYTES + 1)
    large = api.call("POST", "/route", raw).given()
    if "block_hashes" in body:
        n_blocks = len(body["block_hashes"])
        small = api.route(**{**body, "block_hashes": [int(each) for each in body["block_hashes"][:10]]})
        assert small["request_blocks"] == 10
    elif len(body["token_ids"]) > len(TOKENS):
        n_blocks = len(body["token_ids"]) // 16
        octets = api.call("POST", "/route?update_states=false", packed(body["token_ids"]), OCTETS).given()
        assert octets["cost"] == large["cost"]
    else:
        n_blocks = 4
    assert large["request_blocks"] == n_blocks
    potential = api.call("POST", "/loads/potential", raw).given()
    assert api.call("POST", "/matches", raw).given()["request_blocks"] == n_blocks
    assert {row["potential_decode_blocks"] for row in potential["loads"]} == {n_blocks}
    booked = api.call("POST", "/loads/large", json.dumps({**_content(body), "worker_id": 1}).encode()).given()
    assert booked["request_blocks"] == n_blocks
    api.call("DELETE", "/loads/large").given()


def _content(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("token_ids", "block_hashes") if name in body}


_PADDING = " " * (LARGE_BODY_BYTES + 1)
#: Bodies that are invalid in one place. Each is sent with and without LARGE_BODY_BYTES of padding.
INVALID = {
    "token": '{"token_ids": [1, -1]}',
    "float": '{"token_ids": [1, 1.5]}',
    "null": '{"token_ids": null}',
    "empty": '{"token_ids": []}',
    "text": '{"token_ids": "123"}',
    "object": '{"token_ids": {"1": 2}}',
    "comma": '{"token_ids": [1,]}',
    "nested": '{"token_ids": [1, [2, 3]]}',
    "both": '{"token_ids": [1], "block_hashes": [1]}',
    "hash": '{"block_hashes": ["1,2"]}',
    "hashes": '{"block_hashes": [null]}',
    "ids": '{"token_ids": [1], "allowed_worker_ids": ["x"]}',
    "id": '{"token_ids": [1], "worker_id": -1}',
    "unknown": '{"token_ids": [1], "tokens": [1]}',
    "half": '{"token_ids": [1',
    "utf-8": '{"model": "\udcff", "token_ids": [1]}',
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID.keys())
def test_a_large_body_is_refused_like_a_small_one(body: str, api: Api) -> None:
    """What is invalid in a small body is invalid in a large one, with the same code."""
    raw = body.encode(errors="surrogateescape")
    at = raw.index(b"[") + 1 if b"[" in raw else 1
    for sent in (raw, raw[:at] + _PADDING.encode() + raw[at:]):
        answer = api.call("POST", "/route", sent)
        answer.refused(400, "invalid_request")


def test_too_many_tokens_in_a_large_body_are_413() -> None:
    """The limit of tokens applies to bodies that are parsed in pieces, and exactly the limit is allowed."""
    with local_router(replace(SETTINGS, request_tokens_max=80_000)) as served:
        for n, status in ((80_000, 200), (80_001, 413), (300_000, 413)):
            raw = json.dumps(asked(token_ids=[100_000] * n)).encode()
            assert len(raw) > LARGE_BODY_BYTES
            answer = served.api.call("POST", "/route", raw)
            assert answer.status == status, answer.body
            if status == 413:
                answer.refused(413, "too_large")


def test_bodies_without_tokens_have_a_lower_limit(api: Api) -> None:
    """A registration or a report of output that is larger than any valid one is 413."""
    for call in ("PUT /workers/5", "PUT /pools/p", "POST /loads/r/output"):
        method, path = call.split(" ")
        api.call(method, path, b"{" + b" " * SHORT_BODY_BYTES_MAX).refused(413, "too_large")


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)],
)
def test_a_compressed_body_is_read(encoding: str, compress: Callable[[bytes], bytes], api: Api) -> None:
    """Bodies may be compressed with gzip or deflate, whether they are small or large."""
    for n in (64, 100_000):
        body = json.dumps(asked(token_ids=[100_000 + at for at in range(n)])).encode()
        answer = api.call("POST", "/route", compress(body), headers={"Content-Encoding": encoding}).given()
        assert answer["request_blocks"] == n // 16


def test_compressed_bodies_have_limits(api: Api) -> None:
    """A body may not be larger than the limit after decompression, and must be one complete stream."""

    def call(body: bytes, encoding: str = "gzip") -> Any:
        return api.call("POST", "/route", body, headers={"Content-Encoding": encoding})

    body = json.dumps(asked()).encode()
    call(gzip.compress(body.ljust(BODY_BYTES_MAX))).given()
    call(gzip.compress(body.ljust(BODY_BYTES_MAX + 1))).refused(413, "too_large")
    call(gzip.compress(b" " * 100 * BODY_BYTES_MAX)).refused(413, "too_large")
    call(gzip.compress(body)[:-4]).refused(400, "invalid_request")
    call(gzip.compress(body) + b"more").refused(400, "invalid_request")
    call(body).refused(400, "invalid_request")
    for encoding in ("br", "zstd", "gzip, gzip", "x" * 1000):
        assert "gzip" in call(body, encoding).refused(415, "unsupported_encoding")


def test_filters_are_cached_by_bytes(served: LocalRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eligible ranks of filters with many ids are cached up to a limit of bytes, and stay right beyond it."""
    monkeypatch.setattr(eligible_cache, "CACHED_FILTERS_BYTES_MAX", 1_000_000)
    view = served.router.view
    for number in range(200):
        allowed = frozenset(WorkerId(each) for each in range(number, number + 2000))
        found = view.fleet.eligible(WorkerFilter("m", allowed=allowed))
        assert found == tuple(rank(each) for each in (1, 2) if each in allowed)
        assert 0 < view.fleet._eligible.n_bytes <= 1_000_000
        assert found is view.fleet.eligible(WorkerFilter("m", allowed=allowed))


# --- what was said wrongly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("POST /route?model=x", asked()),
        ("POST /route?update_states=false", asked()),
        ("POST /loads/potential?model=x", asked()),
        ("POST /loads/r?worker_id=2", {"worker_id": 1, "token_ids": TOKENS}),
        ("POST /loads/r/output?output_tokens=7", {"output_tokens": 1}),
        ("PUT /workers/5?model=x", {"url": "http://e", "model": "m", "block_size": 16}),
        ("PUT /pools/p?members=1", {"members": [1]}),
    ],
)
def test_query_parameters_next_to_a_json_body_are_400(call: str, body: dict[str, Any], api: Api) -> None:
    """A parameter that would be ignored is refused, and the message names it."""
    method, path = call.split(" ")
    name = path.partition("?")[2].partition("=")[0]
    assert name in api.call(method, path, body).refused(400, "invalid_request")


def test_values_that_a_field_may_not_have_are_answered_with_those_that_it_may(api: Api) -> None:
    """The error lists the values, for fields of the body and of an object in it, and for query parameters."""

    def message(fields: dict[str, Any]) -> str:
        return api.call("POST", "/route", asked(**fields)).refused(400, "invalid_request")

    for odd in ("x", "x` - at `$.token_ids", "\n", ""):
        assert message({"phase": odd}).endswith("use one of both, prefill, decode")
        assert message({"queue": odd}).endswith("use one of off, on")
    assert "use one of kv, round-robin," in message({"router_config_override": {"router_mode": "best"}})
    assert "use one of" not in message({"phase": 1})
    for path in ("/route?router_mode=best&queue=off", "/route?model=m&router_mode="):
        answer = api.call("POST", path, packed(TOKENS), OCTETS).refused(400, "invalid_request")
        assert "use one of kv, round-robin," in answer
    report = api.call("DELETE", "/loads/r?phase=both").refused(400, "invalid_request")
    assert "use one of decode, prefill. The known parameters are phase, " in report


def test_unknown_fields_are_answered_with_the_known_ones(api: Api) -> None:
    """The error about an unknown field lists the fields of the object that has it."""

    def message(fields: dict[str, Any]) -> str:
        return api.call("POST", "/route", asked(**fields)).refused(400, "invalid_request")

    top = message({"max_tokens": 1})
    assert "'max_tokens'" in top and "block_hashes" in top and "session_id" in top
    inner = message({"router_config_override": {"temperature": 1}})
    assert "router_temperature" in inner and "session_id" not in inner
    query = message({"router_config_override": {"moe_query": {"experts": [1]}}})
    assert "expert_ids" in query and "router_temperature" not in query
    for odd in ("a` - at `$.router_config_override", "a` - at `$.x.y", "`", ""):
        assert "session_id" in message({odd: 1}) or "router_temperature" in message({odd: 1})
    answer = api.call("POST", "/route?modle=m", packed(TOKENS), OCTETS).refused(400, "invalid_request")
    assert "'modle'" in answer and "model" in answer and "overlap_score_weight" in answer
    twice = api.call("POST", "/route?model=m&model=x", packed(TOKENS), OCTETS)
    assert "repeated" in twice.refused(400, "invalid_request")


@pytest.mark.parametrize(
    "call", ["POST /route", "POST /loads/potential", "POST /loads/r", "POST /loads/r/output", "PUT /workers/5"]
)
def test_an_empty_body_is_reported_as_empty(call: str, api: Api) -> None:
    """An empty body is 400 with a message that says so."""
    method, path = call.split(" ")
    for body in (None, b"", b" \n"):
        assert "the body is empty" in api.call(method, path, body).refused(400, "invalid_request")
    if "route" in path:
        assert "the body is empty" in api.call(method, path, b"", OCTETS).refused(400, "invalid_request")


# --- the whole state ----------------------------------------------------------------------------------------------


def test_state_blocks_has_every_fact_in_order() -> None:
    """GET /state/blocks returns every fact once and in order, also if it takes many pages."""
    rng = np.random.default_rng(7)
    with local_router(SETTINGS, n_workers=5) as served:
        expected: set[tuple[int, int, int, int]] = set()
        for number in range(1, 6):
            for tier in (Tier.DEVICE, Tier.DISK):
                blocks = hold(served.router, rank(number), random_blocks(rng, 12_345), tier).tolist()
                expected |= {(number, 0, int(tier), block) for block in blocks}
        answer = served.api.call("GET", "/state/blocks")
        assert answer.headers["content-type"] == OCTETS
        facts = list(FACT.iter_unpack(answer.body))
        assert facts == sorted(facts)
        assert set(facts) == expected and len(facts) == len(expected)
        assert len(list(served.router.view.index.fact_pages())) > 1
        head = served.api.call("HEAD", "/state/blocks")
        assert (head.status, head.body) == (200, b"")


def test_decisions_need_not_wait_for_state_blocks() -> None:
    """Between two ranks of the answer, records are folded and requests are routed; the rank itself is of one moment."""
    rng = np.random.default_rng(7)
    with local_router(SETTINGS, n_workers=3) as served:
        for number in (1, 2, 3):
            hold(served.router, rank(number), random_blocks(rng, index_view.PAGE_FACTS))
        pages = served.router.view.index.fact_pages()
        first = np.frombuffer(next(pages), dtype=index_view.FACT)
        assert set(first["worker_id"].tolist()) == {1}
        served.api.route(**asked())  # it would wait for ever if the lock were held
        added = hold(served.router, rank(3), random_blocks(rng, 100), Tier.DISK)
        rest = np.frombuffer(b"".join(pages), dtype=index_view.FACT)
        assert set(rest["worker_id"].tolist()) == {2, 3}
        assert set(rest["block"][rest["tier"] == Tier.DISK].tolist()) == set(added.tolist())


def test_inspections_are_limited(served: LocalRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls for the whole state wait for their turn; beyond the limit of waiting ones they are 503."""
    asking, over = threading.Event(), threading.Event()

    def pages() -> Iterator[bytes]:
        asking.set()
        assert over.wait(PATIENCE_S)
        yield b"x"

    monkeypatch.setattr(served.router.view.index, "fact_pages", pages)
    monkeypatch.setattr(inspections_module, "WAITING_MAX", 2)
    n = inspections_module.RUNNING_MAX + 2
    with ThreadPoolExecutor(n) as threads:
        running = [threads.submit(served.api.call, "GET", "/state/blocks") for _ in range(n)]
        assert asking.wait(PATIENCE_S)

        def full() -> bool:
            return metrics(served.api)["kvstreams_connections"] >= n

        wait_for(full, PATIENCE_S, "all calls to be waiting")
        served.api.call("GET", "/state/blocks").refused(503, "overloaded")
        served.api.call("GET", "/state/cxl").refused(503, "overloaded")
        served.api.route(**asked())
        over.set()
        assert [each.result(PATIENCE_S).body for each in running] == [b"x"] * n
    assert served.api.call("GET", "/state/cxl").status == 200


def test_a_client_that_does_not_read_ends_its_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for the whole state and does not read it is disconnected, so that others get their turns."""
    monkeypatch.setattr(inspections_module, "PAGE_S", 0.3)
    monkeypatch.setattr(inspections_module, "RUNNING_MAX", 1)
    rng = np.random.default_rng(7)
    with local_router(SETTINGS, n_workers=1) as served:
        hold(served.router, rank(1), random_blocks(rng, 600_000))
        address = urlsplit(served.api.url)
        with closing(socket.socket()) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((address.hostname, address.port))
            lazy.sendall(b"GET /state/blocks HTTP/1.1\r\nHost: x\r\n\r\n")
            assert lazy.recv(16).startswith(b"HTTP/1.1 200")
            answer = served.api.call("GET", "/state/blocks")
            assert len(answer.body) == FACT.size * 600_000


def test_members_are_the_facts(served: LocalRouter) -> None:
    """A view's members, which tests compare, are the facts of its pages."""
    blocks = hold(served.router, rank(2), random_blocks(np.random.default_rng(3), 100))
    expected: set[tuple[RankId, Tier, SequenceHash]] = {
        (rank(2), Tier.DEVICE, SequenceHash(block)) for block in blocks.tolist()
    }
    assert served.router.view.index.members() == expected
