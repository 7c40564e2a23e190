"""`KvRouterClient`: the client over HTTP, with one or several routers.

What lives here: the choice of a router for each call, what counts as a refusal that another router may not repeat, and
errors of the API as the exceptions that they were. What must not: pauses between rounds (base), and bookings
(generation).
"""

from __future__ import annotations

import asyncio
import re
import ssl as tls
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import orjson

from streams.client.base import (
    REPORT_TIMEOUT_S,
    RETRY_PAUSE_S_MAX,
    RETRY_PAUSE_S_MIN,
    RETRY_TIMEOUT_S,
    Attempt,
    Call,
    CallRefused,
    KvRouter,
)
from streams.client.engine import EngineOptions
from streams.client.payloads import query_of, unpack_tokens
from streams.client.plain_http import ConnectFailed, PlainHttp
from streams.client.reports import BookingKey, OutstandingReport
from streams.client.trace_context import add_trace_context
from streams.errors import API_ERRORS, InvalidRequest, KvStreamsError, QueueFull, RouterUnavailable

#: Time for one call, connection included. A decision takes about a millisecond; a router that drains or waits for a
#: processor may take longer.
CALL_TIMEOUT_S = 5.0

#: Time for a connection. A router whose host vanished must not hold each request for as long as a slow answer may take.
CONNECT_TIMEOUT_S = 1.0

#: Open connections to all routers, for calls that do not wait in a router's queue. Calls beyond that wait for one.
CONNECTIONS_MAX = 128

#: Calls with queue=on at one router, each with a connection of its own: they wait for the reports that the other calls
#: make. It is the default of the routers' router_queue_requests_max. A call beyond it is refused as the router would
#: refuse it, since a queue in the client would be outside the router's order and limits.
WAITING_MAX = 1024

#: Pause after such a refusal: the least that routers ask for.
_QUEUE_FULL_RETRY_AFTER_S = 1.0

#: Connections to routers that no call uses are closed after this time.
KEEPALIVE_S = 15.0

#: A router that failed is tried after all others for this long.
ROUTER_PENALTY_S = 1.0

#: Router addresses of one client.
URLS_MAX = 256

#: Statuses of a load balancer or proxy that has no router to ask, or asks to wait.
_UNAVAILABLE = (429, 502, 504)

#: Codes of refusals that every router of the fleet would repeat at this moment.
_OF_THE_FLEET = ("no_eligible_worker", "all_workers_busy")

#: Pause after a refusal without Retry-After.
_RETRY_AFTER_S = 0.1

#: Characters of query parameters that are sent as they are.
_PLAIN_QUERY = re.compile(r"[\w.~=&-]*", re.ASCII)

_ERRORS = {kind.code: kind for kind in API_ERRORS}

#: The code of a refusal that came after the caller's own deadline.
_DEADLINE = "queue_timeout"

#: How long a call with queue=on may wait if it does not say so itself: the default of the routers'
#: router_queue_timeout_s. It is sent with the call, so that a router which answers has the last word; one that does not
#: answer by then, and by the end of the call's own time, has failed.
QUEUE_TIMEOUT_S = 30.0

JSON, OCTET_STREAM = "application/json", "application/octet-stream"
AUTHORIZATION, TENANT_HEADER = "Authorization", "X-Tenant"

#: W3C trace context: fields of a request that are sent as headers.
TRACE_HEADERS = ("traceparent", "tracestate")


class KvRouterClient(KvRouter):
    """Routes requests through routers elsewhere, over HTTP, and generates with their engines.

    A call goes to one router, and to the next one if that refuses or breaks its connection. Only requests with the same
    request id are repeated, which routers answer with the same choice.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | Callable[[], str] | None = None,
        ssl: tls.SSLContext | None = None,
        engine: EngineOptions | None = None,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        waiting_max: int = WAITING_MAX,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        no_worker_timeout_s: float | None = None,
    ) -> None:
        """urls: addresses of routers, such as http://127.0.0.1:8000. token: sent as a bearer token; a function is
        called for each request, so that it may read a file that changes. ssl: for https, in place of the system's
        authorities. no_worker_timeout_s: how long a call is repeated that no worker may serve at the moment; None for
        retry_timeout_s. Raises InvalidRequest for an address that is not a URL.
        """
        super().__init__(engine, retry_timeout_s, no_worker_timeout_s)
        given_urls = [urls] if isinstance(urls, str) else list(urls)
        if not 0 < len(given_urls) <= URLS_MAX:
            raise InvalidRequest(f"{len(given_urls)} router addresses; give 1 to {URLS_MAX}")
        self.urls = tuple(_checked(url) for url in given_urls)
        self._token = token
        self._ssl = ssl
        self._call_timeout_s = call_timeout_s
        self._connections = asyncio.Semaphore(connections_max)
        self._waiting_max = waiting_max
        self._queue_timeout_s = queue_timeout_s
        self._n_waiting = [0] * len(self.urls)
        self._routers: PlainHttp | None = None
        self._turn = 0
        self._penalised_until_s = [float("-inf")] * len(self.urls)

    async def start(self) -> Self:
        """Open sessions on the running loop; nothing is connected yet."""
        if self._routers is None:
            self._routers = PlainHttp(keepalive_s=KEEPALIVE_S, connect_timeout_s=CONNECT_TIMEOUT_S, ssl=self._ssl)
        await super().start()
        return self

    async def close(self) -> None:
        """End what is still running, send the last reports, and close all connections."""
        await super().close()
        if self._routers is not None:
            self._routers.close()
            self._routers = None

    async def workers(self) -> list[dict[str, Any]]:
        """Return the registered workers, as `GET /workers` does. It is not repeated if all routers are away.

        Raises RouterUnavailable, NotReady, Unauthorized, Forbidden: a token needs the right `read`.
        """
        workers: list[dict[str, Any]] = (await self.registry())["workers"]
        return workers

    async def registry(self) -> dict[str, Any]:
        """Return the whole answer of `GET /workers`: the workers, and the router's mode. Errors are as of `workers`."""
        try:
            return await self._round("GET", "/workers", Attempt(), None, None, {})
        except CallRefused as exc:
            raise exc.error from exc

    async def pools(self) -> list[dict[str, Any]]:
        """Return the registered CXL pools, as `GET /pools` does. Errors are as of `workers`."""
        try:
            pools: list[dict[str, Any]] = (await self._round("GET", "/pools", Attempt(), None, None, {}))["pools"]
        except CallRefused as exc:
            raise exc.error from exc
        return pools

    async def avoid(self, worker_id: int) -> bool:
        """Let all routers avoid a worker for a short time; it is not repeated if all routers are away."""
        try:
            answer = await self._round("PUT", f"/workers/{worker_id}/avoid", Attempt(), None, None, {})
        except CallRefused as exc:
            raise exc.error from exc
        avoided: bool = answer["avoided"]
        return avoided

    async def report_render(self, worker_id: int, body: dict[str, Any]) -> dict[str, Any]:
        """Report what a front found when it probed an engine; returns the answer of `PUT /workers/{id}/render`.

        It is not repeated if all routers are away. Raises UnknownId, WorkerChanged, and the errors of routers.
        """
        headers = {"Content-Type": JSON}
        try:
            return await self._round(
                "PUT", f"/workers/{worker_id}/render", Attempt(), None, orjson.dumps(body), headers
            )
        except CallRefused as exc:
            raise exc.error from exc

    async def _call(self, call: Call, fields: dict[str, Any], packed: bytes, attempt: Attempt) -> dict[str, Any]:
        fields = dict(fields)
        tenant = fields.pop("tenant", None)
        headers = {} if tenant is None else {TENANT_HEADER: tenant}
        add_trace_context(headers)
        headers |= {name: fields.pop(name) for name in TRACE_HEADERS if name in fields}
        wait_s = 0.0
        if fields.get("queue") == "on":
            wait_s = fields.setdefault("queue_timeout_ms", max(1, int(self._queue_timeout_s * 1000))) / 1000.0
        # Packed tokens save most of the time that a router needs to parse a long prompt.
        query = query_of(fields)
        if query is not None:
            headers["Content-Type"] = OCTET_STREAM
            return await self._round("POST", call, attempt, query, packed, headers, wait_s)
        headers["Content-Type"] = JSON
        body = orjson.dumps({**fields, "token_ids": unpack_tokens(packed)})
        return await self._round("POST", call, attempt, None, body, headers, wait_s)

    async def _send_report(self, key: BookingKey, report: OutstandingReport) -> None:
        usage = {} if report.usage is None else report.usage._asdict()
        found = {name: str(value) for name, value in usage.items() if value is not None}
        if report.free:
            await self._repeated("DELETE", key, "", report.router, query=found)
            return
        if report.prefill_complete:
            await self._repeated("POST", key, "/prefill-complete", report.router, query=found)
        if report.output_tokens:
            body = orjson.dumps({"output_tokens": report.output_tokens})
            await self._repeated("POST", key, "/output", report.router, body)

    async def _repeated(
        self,
        method: str,
        key: BookingKey,
        call: str,
        router: int | None,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Make a call on a booking until a router accepts it, for at most REPORT_TIMEOUT_S."""
        attempt = Attempt()
        attempt.router = router
        path = f"/loads/{quote(key.request_id, safe='')}{call}"
        parameters = {**({} if key.phase is None else {"phase": key.phase}), **(query or {})} or None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + REPORT_TIMEOUT_S
        while True:
            try:
                await self._round(
                    method, path, attempt, parameters, body, {} if body is None else {"Content-Type": JSON}
                )
                return
            except CallRefused as exc:
                if loop.time() >= until_s:
                    raise exc.error from exc
                pause_s = min(max(exc.retry_after_s, RETRY_PAUSE_S_MIN), RETRY_PAUSE_S_MAX)
            await asyncio.sleep(pause_s)

    async def _round(
        self,
        method: str,
        path: str,
        attempt: Attempt,
        query: dict[str, str] | None,
        body: bytes | None,
        headers: dict[str, str],
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Make a call at one router after the other, until one answers. wait_s: how long a request may wait there.

        Raises Refused if all are unavailable, or if one says that the fleet is; the error of any other refusal.
        """
        http = self._routers
        if http is None:
            raise RouterUnavailable("the client is not open", remedy="Use `async with`, or call start() first")
        timeout_s = self._call_timeout_s + wait_s
        target = path if query is None else f"{path}?{_encoded(query)}"
        if self._token is not None:
            headers[AUTHORIZATION] = f"Bearer {self._token if isinstance(self._token, str) else self._token()}"
        last: KvStreamsError | None = None
        retry_after_s = 0.0
        for router in self._in_order(attempt.router):
            url = self.urls[router]
            try:
                await self._take_place(router, timeout_s, may_wait=wait_s > 0.0)
                try:
                    # Only a POST may be a booking, which is repeated elsewhere with the same request id.
                    response = await http.request(
                        method, url, target, headers, body, timeout_s, repeatable=method != "POST", is_short=True
                    )
                    try:
                        raw = await response.read()
                    finally:
                        response.close()
                finally:
                    self._leave_place(router, may_wait=wait_s > 0.0)
            except QueueFull as exc:
                last, retry_after_s = exc, max(retry_after_s, _QUEUE_FULL_RETRY_AFTER_S)
                continue
            except ConnectFailed as exc:
                self._penalise(router)
                last = _unavailable(url, exc)
                continue
            except (TimeoutError, OSError) as exc:
                attempt.may_be_booked = True  # the router may have booked, and its answer was lost
                self._penalise(router)
                last = _unavailable(url, exc)
                continue
            except asyncio.CancelledError:
                attempt.may_be_booked = True
                raise
            if response.status in (200, 202):
                try:
                    answer: dict[str, Any] = orjson.loads(raw)
                except orjson.JSONDecodeError as exc:
                    raise RouterUnavailable(f"{url} answers, and is not a router") from exc
                attempt.router = router
                return answer
            error = _error_of(response.status, raw)
            if (response.status != 503 and response.status not in _UNAVAILABLE) or error.code == _DEADLINE:
                raise error
            pause_s = _retry_after_s(response.headers.get("Retry-After"))
            if error.code in _OF_THE_FLEET:
                raise CallRefused(error, pause_s)
            self._penalise(router)
            last, retry_after_s = error, max(retry_after_s, pause_s)
        assert last is not None  # there is at least one router
        raise CallRefused(last, retry_after_s)

    async def _take_place(self, router: int, timeout_s: float, *, may_wait: bool) -> None:
        """Take the place of a call, which may wait in the router's queue. Raises QueueFull, TimeoutError."""
        if may_wait:
            if self._n_waiting[router] >= self._waiting_max:
                raise QueueFull(f"{self._waiting_max} requests of this client wait at {self.urls[router]}")
            self._n_waiting[router] += 1
        elif self._connections.locked():
            async with asyncio.timeout(timeout_s):
                await self._connections.acquire()
        else:
            await self._connections.acquire()  # at once

    def _leave_place(self, router: int, *, may_wait: bool) -> None:
        if may_wait:
            self._n_waiting[router] -= 1
        else:
            self._connections.release()

    def _in_order(self, first: int | None) -> list[int]:
        """Return the routers in the order in which a call tries them: by turns, and those that failed recently last."""
        n = len(self.urls)
        if n == 1:
            return [0]
        if first is None:
            self._turn = (self._turn + 1) % n
            first = self._turn
        order = [(first + offset) % n for offset in range(n)]
        now_s = asyncio.get_running_loop().time()
        return sorted(order, key=lambda router: self._penalised_until_s[router] > now_s)  # sorting is stable

    def _penalise(self, router: int) -> None:
        self._penalised_until_s[router] = asyncio.get_running_loop().time() + ROUTER_PENALTY_S


def _encoded(query: dict[str, str]) -> str:
    """Return query parameters as part of an address."""
    plain = "&".join([f"{name}={value}" for name, value in query.items()])
    # Most have no character with a meaning in addresses. An & or = inside a value would change their number.
    if _PLAIN_QUERY.fullmatch(plain) and plain.count("=") == len(query) == plain.count("&") + 1:
        return plain
    return urlencode(query)


def _checked(url: str) -> str:
    """Return an address without a final slash; raises InvalidRequest."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as exc:
        raise InvalidRequest(f"the router address {url!r} is not a URL: {exc}") from exc
    if not usable or parts.query or parts.fragment:
        raise InvalidRequest(f"the router address is {url!r}; it must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def _unavailable(url: str, exc: Exception) -> RouterUnavailable:
    return RouterUnavailable(f"the router at {url} does not answer: {str(exc) or type(exc).__name__}", url=url)


def _error_of(status: int, raw: bytes) -> KvStreamsError:
    """Return the error of an answer as the exception that the router raised."""
    try:
        shown = orjson.loads(raw)["error"]
        code, message, detail = str(shown["code"]), str(shown["message"]), dict(shown["detail"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):  # a load balancer's own page
        return RouterUnavailable(f"a router's address answered {status}", status=status)
    # A code that this client does not know: the router is newer.
    unknown = InvalidRequest if 400 <= status < 500 else RouterUnavailable if status == 503 else KvStreamsError
    kind = _ERRORS.get(code, unknown)
    error = kind(message)
    error.detail = {**detail, "status": status, "code": code}
    return error


def _retry_after_s(header: str | None) -> float:
    """Read Retry-After. Its other form, a date, is not used by routers."""
    try:
        return max(0.0, float(header)) if header is not None else _RETRY_AFTER_S
    except ValueError:
        return _RETRY_AFTER_S
