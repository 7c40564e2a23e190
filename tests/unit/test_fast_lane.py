"""Short requests are answered as soon as they arrive, with the same answers as aiohttp's own way gives."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from streams.process import aiohttp_internals
from streams.process.aiohttp_internals import HOLD_S, is_supported
from streams.process.waiting import wait_for
from streams.router_api.http import fast_lane
from streams.router_api.http.body_parsing import LARGE_BODY_BYTES
from streams.router_api.http.fast_lane import FastLane
from streams.settings import Settings
from tests.helpers.api import OCTETS, PATIENCE_S, Api, metrics, packed
from tests.helpers.local_router import LocalRouter, local_router

TOKENS = list(range(64))
BODY_TIMEOUT_S = 1.0
#: Two equal requests cost the same only if what a rank computed lately has no weight.
SETTINGS = Settings(body_timeout_s=BODY_TIMEOUT_S, body_bytes_max=2 * LARGE_BODY_BYTES, recent_prefill_weight=0.0)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    with local_router(SETTINGS) as router:
        yield router


@pytest.fixture
def api(served: LocalRouter) -> Api:
    return served.api


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests that the fast lane answers, and those that it hands back once it has read their body.

    known: those of the first that did not go through the parser.
    """
    counts: Counter[str] = Counter()
    answer, answer_known = FastLane.answer, FastLane.answer_known

    def counting_known(lane: FastLane, data: bytes) -> bytes | None:
        found = answer_known(lane, data)
        counts["known"] += found is not None
        return found

    def counting(lane: FastLane, call: Any, message: Any, body: bytes) -> bytes | None:
        found = answer(lane, call, message, body)
        counts["handed back" if found is None else "answered"] += 1
        return found

    monkeypatch.setattr(FastLane, "answer", counting)
    monkeypatch.setattr(FastLane, "answer_known", counting_known)
    return counts


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request as bytes."""
    sent = {"Host": "router", "Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Client:
    """A connection that sends bytes and reads whole answers."""

    def __init__(self, api: Api) -> None:
        url = urlsplit(api.url)
        assert url.hostname is not None and url.port is not None
        self.socket = socket.create_connection((url.hostname, url.port), PATIENCE_S)
        self._read = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, part in enumerate(parts):
            if number:
                time.sleep(HOLD_S / 10)
            self.socket.sendall(part)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._read.readline().split()[1])
        headers = {}
        while line := self._read.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, self._read.read(int(headers["content-length"]))

    def ask(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(*parts)
        return self.answer()

    def close(self) -> None:
        self._read.close()
        self.socket.close()


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with closing(Client(api)) as connection:
        yield connection


def test_this_version_of_aiohttp_has_the_fast_lane() -> None:
    """The private parts of aiohttp that are used exist. If this fails, aiohttp answers everything, only slower."""
    assert is_supported()


ROUTE = b'{"token_ids": [1, 2, 3], "request_id": "r1"}'
FREE = request("DELETE", "/loads/r1")


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (request("POST", "/route", ROUTE), True),
        (request("POST", "/route", b'{"token_ids": [1, 2, 3], "update_states": false, "explain": true}'), True),
        (request("POST", "/route?request_id=r1&model=m", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route", packed(TOKENS)[:-1], Content_Type=OCTETS), True),
        (request("POST", "/route?worker_id=1&dp_rank=9", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id=a%2Fb+c&update_states=false", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id=&model=m", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id", packed(TOKENS), Content_Type=OCTETS), True),
        (
            request("POST", "/route?allowed_worker_ids=1,2&tier_weights=1,1,1,0", packed(TOKENS), Content_Type=OCTETS),
            True,
        ),
        (request("POST", "/route?unknown=1", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?model=a&model=b", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route", b"", Content_Type=OCTETS), False),
        (request("POST", "/route", packed(TOKENS), Content_Type="Application/Octet-Stream; x=y"), False),
        (request("POST", "/route?model=m", ROUTE), False),
        (request("POST", "/route", b""), True),
        (request("POST", "/route", b"{"), True),
        (request("POST", "/route", b'{"token_ids": [], "model": "m"}'), True),
        (request("POST", "/route", b'{"token_ids": [1], "model": "other"}'), True),
        (request("POST", "/route", b'{"token_ids": [1], "worker_id": 99}'), True),
        (request("POST", "/route", b" [{}, 1]"), False),
        (request("POST", "/route", ROUTE, Content_Encoding="gzip"), False),
        (request("POST", "/route", b" " * (LARGE_BODY_BYTES + 1)), False),
        (request("POST", "/route", ROUTE.ljust(LARGE_BODY_BYTES)), True),
        (request("POST", "/route", b" " * (SETTINGS.body_bytes_max + 1)), False),
        (request("POST", "/routes", ROUTE), False),
        (request("PUT", "/route", ROUTE), False),
        (request("DELETE", "/loads/never"), True),
        (request("DELETE", "/loads/never", b"a body that means nothing"), True),
        (request("DELETE", "/loads/never", Content_Length=""), True),
        (request("DELETE", "/loads/r%31"), False),
        (request("DELETE", "/loads/"), False),
        (request("DELETE", "/loads/never/more"), False),
        (request("DELETE", "/loads/never?phase=decode"), True),
        (request("DELETE", "/loads/never?phase=none"), True),
        (request("DELETE", "/loads/" + 512 * "a"), True),
        (request("DELETE", "/loads/" + 513 * "a"), False),
        (request("POST", "/loads/never/prefill-complete"), True),
        (request("POST", "/loads/never/output", b'{"output_tokens": 5}'), True),
        (request("POST", "/loads/never/output", b'{"output_tokens": -5}'), True),
        (request("POST", "/loads/never/output?phase=prefill&phase=prefill", b'{"output_tokens": 5}'), True),
        (request("GET", "/loads/never"), False),
        (request("GET", "/healthz"), False),
    ],
)
def test_both_ways_give_the_same_answer(client: Client, api: Api, fast: Counter[str], sent: bytes, taken: bool) -> None:
    """Status, headers and body are the same, whichever way a request takes."""
    first = client.ask(sent)
    assert bool(fast["answered"]) == taken
    free(client, first)
    n_known = fast["known"]
    again = client.ask(sent)  # its headers are remembered now
    if len(sent) < LARGE_BODY_BYTES:  # a larger one may arrive in pieces, which go through the parser
        assert (fast["known"] > n_known) == (taken and not any(part in sent for part in UNUSUAL))
    assert again[:1] == first[:1] and comparable(again[2]) == comparable(first[2])
    free(client, again)
    with closing(Client(api)) as other:
        n_answered = fast["answered"]
        # aiohttp itself answers a request after which the connection closes.
        second = other.ask(sent.replace(b"Host: router", b"Host: router\r\nConnection: close", 1))
        assert fast["answered"] == n_answered
    free(client, second)
    assert second[1].pop("connection", "close") == "close"
    for _, headers, _ in (first, second):
        assert headers.pop("date").endswith("GMT")
        headers.pop("connection", None)
    assert first[:2] == (second[0], {**second[1], "content-length": first[1]["content-length"]})
    assert comparable(first[2]) == comparable(second[2])


def test_headers_are_remembered_after_a_request_that_aiohttp_answered(client: Client, fast: Counter[str]) -> None:
    """aiohttp lets the parser continue when it has read a body. No bytes come then, so none are unread."""
    by_aiohttp = request("POST", "/route", packed(range(20_000)), Content_Type="Application/Octet-Stream; x=y")
    for _ in range(2):
        client.ask(by_aiohttp)
        client.ask(FREE)
        n_known = fast["known"]
        client.ask(FREE)
        assert fast["known"] == n_known + 1
    assert fast["answered"] == 4


def free(client: Client, answer: tuple[int, dict[str, str], bytes]) -> None:
    """End the booking of an answer, if it is one."""
    request_id = json.loads(answer[2]).get("request_id", "") if answer[2].startswith(b"{") else ""
    if answer[0] == 200 and "/" not in request_id:
        client.ask(request("DELETE", f"/loads/{request_id}"))


#: Queries that are left to the parser: with encoded characters, a name without a value, or a repeated name.
UNUSUAL = (b"%2F", b"?request_id ", b"model=b", b"phase=prefill&phase=")


def comparable(body: bytes) -> Any:
    """An answer without what is drawn at random: generated ids, and ties."""
    answer = json.loads(body)
    if isinstance(answer, list):
        return answer
    for name in ("worker_id", "url", "candidates"):
        answer.pop(name, None)
    if len(answer.get("request_id", "")) == 32:
        del answer["request_id"]
    return answer


def test_requests_in_one_packet_are_answered_in_order(client: Client, fast: Counter[str]) -> None:
    """Pipelined requests that take both ways, and more of them than the parser has ready, are answered in order."""
    asked = [request("DELETE", "/loads/a"), request("GET", "/healthz"), request("POST", "/route", b"{")]
    for n, by_lane in ((1, 1), (100, 0)):
        before = fast["answered"]
        client.send(b"".join(asked * n))
        assert [client.answer()[0] for _ in range(3 * n)] == [202, 200, 400] * n
        assert fast["answered"] >= before + by_lane
    before = fast["answered"]
    for _ in range(100):
        client.send(asked[0] * 5 + asked[2] * 5)
        assert [client.answer()[0] for _ in range(10)] == [202] * 5 + [400] * 5
    assert fast["answered"] > before + 900


def test_a_body_may_arrive_in_pieces(client: Client, fast: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a body that arrives soon is waited for, and a later one is read by aiohttp."""
    whole = request("POST", "/route", ROUTE)
    monkeypatch.setattr(aiohttp_internals, "HOLD_S", PATIENCE_S)
    for at in (whole.index(b"\r\n\r\n") + 4, len(whole) - 3, 10):
        assert client.ask(whole[:at], whole[at:])[0] == 200
        assert client.ask(FREE)[0] == 200
    assert fast["answered"] == 6
    monkeypatch.setattr(aiohttp_internals, "HOLD_S", HOLD_S)
    client.send(whole[:-3])
    time.sleep(3 * HOLD_S)
    assert client.ask(whole[-3:])[0] == 200
    assert client.ask(FREE)[0] == 200
    assert fast["answered"] == 7
    n = len(whole) - len(ROUTE)
    assert client.ask(whole[:n], *(whole[at : at + 1] for at in range(n, len(whole))))[0] == 200


def test_bytes_of_a_known_request_within_another_one_are_not_a_request(api: Api, fast: Counter[str]) -> None:
    """Wherever the bytes of a connection are divided, the answers are those of the whole."""
    known = request("DELETE", "/loads/never")
    stream = [
        known,
        request("POST", "/loads/never/output", known),  # a body that looks like a request
        known.replace(b"Host: router", b"Host: router\r\nX-Note: " + known.partition(b"\r\n")[0]),
        known[:-2] + b"X-Last: 1\r\n\r\n",
        request("POST", "/route", ROUTE + b" " * 20),
        known,
    ]
    statuses = [202, 400, 202, 202, 200, 202]
    with closing(Client(api)) as client:
        for _ in range(3):
            assert client.ask(known)[0] == 202
        assert fast["known"] >= 2
        for each, status in zip(stream, statuses, strict=True):
            assert client.ask(each)[0] == status
        client.ask(FREE)
    whole = b"".join(stream)
    for at in range(1, len(whole), 3):
        with closing(Client(api)) as client:
            client.send(whole[:at], whole[at:])
            assert [client.answer()[0] for _ in stream] == statuses, at
            client.ask(FREE)
    # A second packet that begins like a known request, in the middle of headers and of a body.
    for begun, expected in (
        (b"DELETE /loads/never HTTP/1.1\r\nX-Note: ", 202),
        # No other request has its headers, as both packets may be read at once on a busy machine.
        (request("POST", "/loads/never/output", b"x" * len(known), X_Alone="1")[: -len(known)], 400),
    ):
        with closing(Client(api)) as client:
            assert client.ask(known)[0] == 202
            n_known = fast["known"]
            assert client.ask(begun, known)[0] == expected
            assert fast["known"] == n_known
            assert client.ask(known)[0] == 202


def test_a_remembered_query_is_that_of_its_own_request(client: Client, fast: Counter[str]) -> None:
    """Requests whose queries differ get answers of their own, also if their headers and tokens are the same."""
    for _ in range(2):
        for query, status in (("worker_id=1", 200), ("worker_id=2", 200), ("worker_id=9", 503), ("worker_id=x", 400)):
            sent = request("POST", f"/route?update_states=false&{query}", packed(TOKENS), Content_Type=OCTETS)
            found = client.ask(sent)
            assert found[0] == status
            if status == 200:
                assert json.loads(found[2])["worker_id"] == int(query[-1])
    assert fast["known"] >= 7


def test_a_remembered_query_takes_the_id_of_its_request(client: Client, fast: Counter[str]) -> None:
    """Requests that differ in nothing but their ids are booked under these, and one that has two ids is refused."""

    def ask(query: str) -> tuple[int, dict[str, Any]]:
        status, _, body = client.ask(request("POST", f"/route?{query}", packed(TOKENS), Content_Type=OCTETS))
        return status, json.loads(body)

    for request_id in ("own-a", "own_2", "own%2F3", "own-a"):
        status, answer = ask(f"worker_id=1&expected_output_tokens=7&request_id={request_id}")
        assert (status, answer["request_id"]) == (200, request_id.replace("%2F", "/"))
    assert ask("worker_id=1&expected_output_tokens=7")[1]["request_id"] not in ("own-a", "own_2", "own/3")
    for query in ("request_id=own-x&worker_id=1", "worker_id=1", "worker_id=1&session_id=s"):
        for _ in range(2):
            status, answer = ask(f"{query}&request_id=own-e")
            assert status == (400 if "own-x" in query else 200)
            assert status == 400 or answer["request_id"] == "own-e"
    for query in (
        "request_id=own-x&worker_id=1",
        "worker_id=1&session_id=s&request_id=own-f",
        "worker_id=1&request_id=",
    ):
        assert ask(query)[0] == (400 if query.endswith("=") else 200)
    assert fast["known"] > 5
    for request_id in ("own-a", "own_2", "own%2F3", "own-e", "own-f", "own-x"):
        client.ask(request("DELETE", f"/loads/{request_id}"))


def test_what_is_remembered_is_limited(client: Client, served: LocalRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends ever new headers and queries does not fill the memory, and is answered."""
    monkeypatch.setattr(fast_lane, "_HEADERS_MAX", 10)
    monkeypatch.setattr(fast_lane, "_QUERIES_MAX", 10)
    for number in range(50):
        query = f"update_states=false&expected_output_tokens={number}"
        sent = request("POST", f"/route?{query}", packed(TOKENS), Content_Type=OCTETS, X_Number=str(number))
        assert client.ask(sent)[0] == 200
        assert client.ask(sent.replace(b"X-Number", b"X" * fast_lane._HEADERS_BYTES_MAX))[0] == 200
    lanes = [each for each in gc.get_objects() if isinstance(each, FastLane) and each._router is served.router]
    assert lanes
    for lane in lanes:
        assert len(lane._headers) <= 10 and len(lane._requests) <= 10


def test_a_body_that_does_not_arrive_is_408(client: Client) -> None:
    """The limit of time for a body applies to short requests as well."""
    began = time.monotonic()
    status, _, body = client.ask(request("POST", "/route", ROUTE)[:-1])
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert time.monotonic() - began >= BODY_TIMEOUT_S


def test_a_client_that_leaves_in_the_middle_of_a_body_does_no_harm(api: Api) -> None:
    """Connections that end within a request leave nothing behind."""
    for _ in range(20):
        with closing(Client(api)) as leaving:
            leaving.send(request("POST", "/route", ROUTE)[:-1])
    wait_for(lambda: metrics(api)["kvstreams_connections"] <= 1, PATIENCE_S, "the connections to be gone")


def test_answers_that_are_not_read_do_not_pile_up(api: Api) -> None:
    """A client that sends and does not read is not served further once the system's buffers are full."""
    ask = request("POST", "/route", b'{"token_ids": [1], "unknown": 1}')
    with closing(Client(api)) as silent:
        silent.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            silent.socket.sendall(ask * 500_000)
    assert api.call("DELETE", "/loads/x").status == 202


def test_errors_of_the_fast_lane_are_counted(client: Client, api: Api) -> None:
    """kvstreams_errors_total and kvstreams_route_seconds count requests of both ways."""
    before = metrics(api)
    assert client.ask(request("POST", "/route", b"{"))[0] == 400
    assert client.ask(request("POST", "/route", ROUTE))[0] == 200
    assert client.ask(FREE)[0] == 200
    after = metrics(api)
    for name in ("kvstreams_errors_total/invalid_request", "kvstreams_route_seconds_count"):
        assert after[name] == before[name] + 1


def test_an_unexpected_fault_is_500(
    client: Client, served: LocalRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that nothing expects is logged and answered with 500, and the connection can be used again."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched:
        patched.setattr(served.router, "report_phase", fail)
        status, _, body = client.ask(FREE)
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
    assert b"secret" not in body
    assert "DELETE /loads/r1 failed" in caplog.text
    assert client.ask(FREE)[0] in (200, 202)


def test_a_middleware_sees_every_request(served: LocalRouter) -> None:
    """With a further middleware, such as one that checks tokens, no request takes the fast lane."""
    from streams.router_api.http.handlers import Handlers, error_shape

    @web.middleware
    async def other(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        return response

    for middlewares, has_lane in (([error_shape], True), ([error_shape, other], False)):
        app = web.Application(middlewares=middlewares)
        handlers = Handlers(served.router)
        handlers.add_to(app)
        _, lane, _ = handlers.runner(app)._new_protocol.args
        assert (lane is not None) == has_lane
