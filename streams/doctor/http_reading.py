"""HTTP as the doctor uses it: one GET or POST with a limit on its time and size, and what its Date header says.

What lives here: the call, and parsing of metrics pages. What must not: which calls are made (readers).
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from streams.doctor.observations import ClockReading, PageSeen, Samples
from streams.engines.process_start import PAGE_BYTES_MAX, read_body
from streams.security.tls import UNTRUSTED_REMEDY, why_no_connection

#: A process that is well answers within milliseconds; on a busy machine, within seconds.
HTTP_TIMEOUT_S = 5.0

OK = 200
NOT_ALLOWED = (401, 403)


@dataclass(frozen=True, slots=True)
class HttpReading:
    """One answer. error: why there is none, or None; then status is 0. clock: by its Date header."""

    status: int = 0
    body: bytes = b""
    error: str | None = None
    clock: ClockReading | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is 200."""
        return self.status == OK

    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


async def call(
    http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None, body: Any = None
) -> HttpReading:
    """GET a URL, or POST a JSON body to it. It raises nothing: what failed is in the answer."""
    sent = {"Content-Type": "application/json", **(headers or {})} if body is not None else dict(headers or {})
    data = None if body is None else orjson.dumps(body)
    began_s = time.time()
    try:
        async with (
            asyncio.timeout(HTTP_TIMEOUT_S),
            http.request("GET" if body is None else "POST", url, headers=sent, data=data) as response,
        ):
            clock = _clock(response.headers.get("Date"), began_s, time.time())
            return HttpReading(response.status, await read_body(response, PAGE_BYTES_MAX), None, clock)
    except TimeoutError:
        return HttpReading(error=f"it does not answer within {HTTP_TIMEOUT_S:g} s")
    except aiohttp.ClientConnectorError as exc:  # its own text names the address again, and Python's types
        if isinstance(exc.os_error, ssl.SSLCertVerificationError):
            return HttpReading(error=f"{why_no_connection(exc.os_error)}. {UNTRUSTED_REMEDY}")
        if isinstance(exc.os_error, ssl.SSLError):  # its number is not one of the system's
            return HttpReading(error=why_no_connection(exc.os_error))
        number = exc.os_error.errno
        return HttpReading(error=os.strerror(number) if number and number > 0 else exc.os_error.strerror or str(exc))
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        return HttpReading(error=str(exc) or repr(exc))


def _clock(date: str | None, began_s: float, ended_s: float) -> ClockReading | None:
    """How far the clock of a Date header is ahead. It has whole seconds, and was written between the two times."""
    try:
        at_s = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    return ClockReading(at_s - ended_s, at_s + 1.0 - began_s)


async def read_page(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> PageSeen:
    """Read a metrics page of kvstreams."""
    answer = await call(http, url, headers)
    if not answer.ok:
        return PageSeen(url, answer.error or f"the answer's status is {answer.status}")
    try:
        return PageSeen(url, None, samples_of(answer.body.decode(errors="replace")))
    except ValueError:
        return PageSeen(url, "the answer is not in Prometheus' text format")


def samples_of(text: str) -> Samples:
    """The samples of a page, without the buckets of histograms. Raises ValueError."""
    return tuple(
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    )
