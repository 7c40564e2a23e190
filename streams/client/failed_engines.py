"""Which engines fail requests, and which requests fail engines.

What lives here: the failures of each engine in a row, the requests that broke engines, the rules by which a failure
speaks against one or the other, and the calls that let routers avoid an engine, with their limits. What must not: how
an engine is called, and retries (the front's proxy, generation). Nothing waits for these calls, and nothing depends on
them: without one, routers learn of the failure later, when the engine's lease expires.

A request that fails at every engine says nothing about the engines. So a failure counts against an engine if

- the engine could not be reached, so that it has not seen the request, or
- another engine has answered the same request further, or
- it is one of several different requests that the engine failed in a row.

A request that broke two engines is not sent to a third one. It is recognised by a digest for BROKEN_S, also if a client
repeats it; neither prompts nor fields are kept.

State: failures in a row, and digests of requests that broke engines.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import aiohttp

from streams.client.plain_http import ConnectFailed
from streams.errors import EngineFailed, KvStreamsError

log = logging.getLogger(__name__)

#: One call per engine in this time. When an engine dies, all requests that it had fail at the same moment.
REPEAT_S = 1.0

#: Calls that are under way at a time, each for another engine. Beyond it, failures are not reported.
CALLS_MAX = 64

#: Failures in a row with which an engine is avoided. A busy engine may refuse one or two requests.
FAILURES_IN_A_ROW = 3

#: Failures that are further apart are not in a row.
ROW_S = 60.0

#: Engines whose failures are remembered; an engine that answers is forgotten.
ROWS_MAX = 4096

#: Engines that one request may break.
BREAKS_MAX = 2

#: How long a request that broke engines is recognised, and how many such requests are.
BROKEN_S = 300.0
BROKEN_MAX = 4096

#: Why such a request goes no further.
BROKE_ENGINES = f"the request has broken the engines of {BREAKS_MAX} workers, and is not sent to another one"

#: Tokens with which an engine has answered further than the one that broke. A request that breaks engines does so when
#: it arrives, or soon after.
FURTHER_TOKENS = 16

#: An engine that ends breaks all its requests within this time. Those that it has just begun are suspected, and no
#: others.
TOGETHER_S = 1.0

#: Bytes of the digest of a request.
DIGEST_BYTES = 16

#: Errors of requests that no engine has seen.
_NO_CONNECTION = (ConnectFailed, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Failing(enum.Enum):
    """How an engine failed a request."""

    UNREACHABLE = enum.auto()  # there was no connection, so the engine has not seen the request
    BROKE = enum.auto()  # its connection broke, its answer ended early, or it was silent for too long
    REFUSED = enum.auto()  # it answered 408, 429 or 5xx


def how_failed(failure: EngineFailed) -> Failing:
    """Return how an engine failed, by the error of a call."""
    if "status" in failure.detail:
        return Failing.REFUSED
    return Failing.UNREACHABLE if isinstance(failure.__cause__, _NO_CONNECTION) else Failing.BROKE


class Avoiding(Protocol):
    """What reports a failed engine."""

    async def avoid(self, worker_id: int) -> bool:
        """Let routers avoid a worker for a while. Raises KvStreamsError."""


@dataclass(slots=True)
class _Row:
    """Failures of one engine since it last answered.

    requests: digests of some of the requests that it failed. n: failures that count. is_bad: the engine was reported.
    """

    last_s: float
    requests: set[bytes] = field(default_factory=set)
    n: int = 0
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class _Break:
    """One engine that a request broke. young: the engine had only begun its answer."""

    worker_id: int
    at_s: float
    young: bool


class FailedEngines:
    """The engines that failed lately, and the requests that broke engines. Used on one loop.

    n_reported: calls that a router accepted.
    """

    def __init__(self, router: Avoiding) -> None:
        self._router = router
        self._reported_s: dict[int, float] = {}  # of calls in the last REPEAT_S
        self._calls: set[asyncio.Task[None]] = set()
        self._rows: dict[int, _Row] = {}
        self._broken: dict[bytes, list[_Break]] = {}  # by the digest of the request, the latest last
        self._full: set[bytes] = set()  # those of them with BREAKS_MAX engines or more
        self._young_breaks_s: dict[int, float] = {}  # by worker
        self._closed = False
        self.n_reported = 0

    # -- engines -------------------------------------------------------------------------------------------------------

    def note(self, worker_id: int) -> None:
        """Let routers avoid this worker for a while; does nothing after `close`, since failures are noted late."""
        if self._closed:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._reported_s.get(worker_id, float("-inf")) < REPEAT_S or len(self._calls) >= CALLS_MAX:
            return
        self._reported_s = {
            reported_id: at_s for reported_id, at_s in self._reported_s.items() if now_s - at_s < REPEAT_S
        }
        self._reported_s[worker_id] = now_s
        call = asyncio.create_task(self._avoid(worker_id), name=f"kvstreams-avoid-{worker_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def answered(self, worker_id: int) -> None:
        """Note that an engine answers requests: its failures before this are not in a row with later ones."""
        self._rows.pop(worker_id, None)

    def failed(self, worker_id: int, request: bytes) -> bool:
        """Note that an engine failed a request. Returns whether that counts already, without other engines' answers."""
        row = self._row(worker_id)
        if row.is_bad:  # until it answers, it need not be shown again
            self.note(worker_id)
            return True
        if request in row.requests:
            return False
        if len(row.requests) < FAILURES_IN_A_ROW:
            row.requests.add(request)
        self._count(worker_id, row)
        return True

    def proven(self, worker_id: int, how: Failing, *, counted: bool) -> None:
        """Note that another engine answered what this one failed. counted: `failed` returned that it counts."""
        row = self._row(worker_id)
        if how is Failing.BROKE:
            self._report(worker_id, row)
        elif not counted:
            self._count(worker_id, row)

    def _row(self, worker_id: int) -> _Row:
        now_s = asyncio.get_running_loop().time()
        row = self._rows.pop(worker_id, None)
        if row is None or now_s - row.last_s > ROW_S:
            row = _Row(now_s)
        row.last_s = now_s
        if len(self._rows) >= ROWS_MAX:
            del self._rows[next(iter(self._rows))]
        self._rows[worker_id] = row
        return row

    def _count(self, worker_id: int, row: _Row) -> None:
        row.n += 1
        if row.n >= FAILURES_IN_A_ROW:
            self._report(worker_id, row)

    def _report(self, worker_id: int, row: _Row) -> None:
        row.is_bad = True
        self.note(worker_id)

    async def _avoid(self, worker_id: int) -> None:
        try:
            await self._router.avoid(worker_id)
        except KvStreamsError as exc:
            log.debug("the failure of worker %d was not reported to a router: %s", worker_id, exc)
        else:
            self.n_reported += 1

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def withholds_any(self) -> bool:
        """Whether any request may have broken as many engines as it may, so that a digest is worth its time."""
        if self._full:
            now_s = asyncio.get_running_loop().time()
            for request in list(self._full):
                if not self._recent(request, now_s):
                    self._forget(request)
        return bool(self._full)

    def broke(self, request: bytes, worker_id: int, *, young: bool) -> None:
        """Note that a request's engine broke. young: it had only begun its answer."""
        now_s = asyncio.get_running_loop().time()
        breaks = [*self._recent(request, now_s), _Break(worker_id, now_s, young)][-BREAKS_MAX - 1 :]
        self._forget(request)
        if len(self._broken) >= BROKEN_MAX:
            self._forget(next(iter(self._broken)))
        self._broken[request] = breaks
        if len(breaks) >= BREAKS_MAX:
            self._full.add(request)
        if young:
            self._young_breaks_s.pop(worker_id, None)
            if len(self._young_breaks_s) >= ROWS_MAX:
                del self._young_breaks_s[next(iter(self._young_breaks_s))]
            self._young_breaks_s[worker_id] = now_s

    def survived(self, request: bytes) -> None:
        """Note that an engine has answered a request further: it did not break the others."""
        self._forget(request)

    def _forget(self, request: bytes) -> None:
        self._broken.pop(request, None)
        self._full.discard(request)

    def breaks_engines(self, request: bytes) -> bool:
        """Whether a request has broken as many engines as it may."""
        breaks = self._recent(request, asyncio.get_running_loop().time())
        return sum(self._is_suspect(each) for each in breaks) >= BREAKS_MAX

    def _recent(self, request: bytes, now_s: float) -> list[_Break]:
        return [each for each in self._broken.get(request, ()) if now_s - each.at_s <= BROKEN_S]

    def _is_suspect(self, broken: _Break) -> bool:
        """Whether the request itself may have broken the engine, and not one that came after it."""
        young_s = self._young_breaks_s.get(broken.worker_id, float("-inf"))
        return broken.young or abs(young_s - broken.at_s) > TOGETHER_S

    async def close(self) -> None:
        """Cancel calls that are under way, and begin no other."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@dataclass(slots=True)
class _Failure:
    """needs_tokens: of another engine's answer, with which the failure was this engine's fault."""

    worker_id: int
    how: Failing
    needs_tokens: int
    counted: bool
    proven: bool = False


class RequestFailures:
    """What failed one request, until it is known whether that was the engines' fault. Used on one loop.

    identify: makes the digest by which a repetition of the request is recognised; it is called when an engine fails.
    """

    def __init__(self, engines: FailedEngines) -> None:
        self._engines = engines
        self.identify: Callable[[], bytes] = partial(os.urandom, DIGEST_BYTES)
        self._digest: bytes | None = None
        self._failures: list[_Failure] = []
        self._answers: int | None = None  # the worker whose engine answers
        self._n_tokens = 0  # of its answer

    @property
    def digest(self) -> bytes:
        """The digest of the request."""
        if self._digest is None:
            self._digest = self.identify()
        return self._digest

    @property
    def is_withheld(self) -> bool:
        """Whether the request goes no further, because it has broken as many engines as it may."""
        return self._engines.withholds_any and self._engines.breaks_engines(self.digest)

    def failed(self, worker_id: int, how: Failing) -> None:
        """Note that an engine failed the request."""
        if how is Failing.UNREACHABLE:
            self._engines.note(worker_id)
            return
        n_tokens = self._n_tokens if self._answers == worker_id else 0
        self._answers = None
        if how is Failing.BROKE:
            self._engines.broke(self.digest, worker_id, young=n_tokens < FURTHER_TOKENS)
        counted = self._engines.failed(worker_id, self.digest)
        self._failures.append(_Failure(worker_id, how, FURTHER_TOKENS if n_tokens else 1, counted))

    def answered(self, worker_id: int, n_tokens: int) -> None:
        """Note how many tokens an engine has generated so far. It may be called for each piece of an answer."""
        if self._answers != worker_id:
            self._answers = worker_id
            self._engines.answered(worker_id)
        self._n_tokens = n_tokens
        if self._failures:
            self._compare(worker_id, n_tokens)

    def ended(self, worker_id: int) -> None:
        """Note that an engine has answered the request to its end."""
        self.answered(worker_id, max(self._n_tokens, FURTHER_TOKENS))

    def _compare(self, worker_id: int, n_tokens: int) -> None:
        """Blame the engines that failed before this one had got so far."""
        for failure in self._failures:
            if not failure.proven and n_tokens >= failure.needs_tokens and failure.worker_id != worker_id:
                failure.proven = True
                self._engines.proven(failure.worker_id, failure.how, counted=failure.counted)
        if n_tokens >= FURTHER_TOKENS:
            self._failures.clear()
            self._engines.survived(self.digest)
