"""Every call of the HTTP API, in one table. Routes, rights, the OpenAPI document and its page all derive from it.

What lives here: each call's method, path, handler, types, right and summary. What must not: handling calls (handlers),
the types themselves (messages/requests, answers for answers), and tokens that carry rights (security).

To add a call: add a row here, its method to handlers.Handlers, and its line to docs/http.md. Tests compare the three.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from streams.router_api.http.answers import (
    AvoidedAnswer,
    BookingAnswer,
    HealthAnswer,
    LiveAnswer,
    LoadsAnswer,
    MatchesAnswer,
    OpenApiAnswer,
    OutputAnswer,
    PhaseAnswer,
    PoolAnswer,
    PooledStateAnswer,
    PoolsAnswer,
    PotentialAnswer,
    RankFactsAnswer,
    ReadyAnswer,
    RemovedAnswer,
    RenderAnswer,
    RouteAnswerBody,
    ScaleAnswer,
    StateAnswer,
    StateDigestAnswer,
    UncordonedAnswer,
    WorkerAnswer,
    WorkersAnswer,
)
from streams.router_api.messages.requests import (
    OCTET_STREAM,
    BookRequest,
    OutputBody,
    PhaseReportQuery,
    PoolBody,
    RenderBody,
    ReportQuery,
    RouteRequest,
    WorkerBody,
)
from streams.security.tokens import Right

JSON = "application/json"
HTML = "text/html"
CSS = "text/css"
SCRIPT = "text/javascript"
PROMETHEUS = "text/plain"


class Tag(enum.StrEnum):
    """The groups in which calls are shown."""

    ROUTING = "Routing"
    LOADS = "Loads"
    WORKERS = "Workers"
    POOLS = "CXL pools"
    STATE = "State"
    API = "API"


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    path: with its parameters in braces. handler: the name of the method of Handlers. right: what a token must carry;
    None if the call needs no token. answer: the type of the JSON with which a call that succeeds is answered; None if
    content_type is not JSON. body: the type of the JSON body; None if the call has no body. packs_tokens: tokens may
    also be sent as application/octet-stream, with the fields of `body` as query parameters. takes_lists: the body may
    be a list of such objects, which is answered with a list of answers and errors. query: the type of other query
    parameters. statuses: those with which `answer` comes.
    """

    method: str
    path: str
    handler: str
    tag: Tag
    right: Right | None
    summary: str
    answer: Any = None
    body: type[msgspec.Struct] | None = None
    packs_tokens: bool = False
    takes_lists: bool = False
    query: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)
    content_type: str = JSON

    @property
    def pattern(self) -> str:
        """The path for aiohttp. Its own pattern for parameters does not match ids with braces, which /route accepts."""
        return re.sub(r"\{(\w+)\}", r"{\1:[^/]+}", self.path)


CALLS: tuple[Call, ...] = (
    Call(
        "POST",
        "/route",
        "route",
        Tag.ROUTING,
        Right.ROUTE,
        "Choose a rank and book it",
        RouteAnswerBody,
        RouteRequest,
        packs_tokens=True,
        takes_lists=True,
    ),
    Call(
        "POST",
        "/matches",
        "matches",
        Tag.ROUTING,
        Right.ROUTE,
        "Return the matched blocks of every worker and rank",
        MatchesAnswer,
        RouteRequest,
        packs_tokens=True,
    ),
    Call("GET", "/loads", "loads", Tag.LOADS, Right.READ, "Return the load of every rank", LoadsAnswer),
    Call(
        "GET",
        "/scale",
        "scale",
        Tag.LOADS,
        Right.READ,
        "Return the saturation, the backlog and the wanted replicas of every worker pool",
        ScaleAnswer,
    ),
    Call(
        "POST",
        "/loads/potential",
        "potential",
        Tag.LOADS,
        Right.ROUTE,
        "Return the load that each eligible rank would have with a request",
        PotentialAnswer,
        RouteRequest,
        packs_tokens=True,
    ),
    Call(
        "POST",
        "/loads/{request_id}",
        "book",
        Tag.LOADS,
        Right.ROUTE,
        "Book a choice that was made elsewhere",
        BookingAnswer,
        BookRequest,
    ),
    Call(
        "POST",
        "/loads/{request_id}/prefill-complete",
        "prefill_complete",
        Tag.LOADS,
        Right.ROUTE,
        "Report that the prompt is computed",
        PhaseAnswer,
        query=PhaseReportQuery,
        statuses=(200, 202),
    ),
    Call(
        "POST",
        "/loads/{request_id}/output",
        "output",
        Tag.LOADS,
        Right.ROUTE,
        "Report how many tokens are generated so far",
        OutputAnswer,
        OutputBody,
        query=ReportQuery,
        statuses=(200, 202),
    ),
    Call(
        "DELETE",
        "/loads/{request_id}",
        "free",
        Tag.LOADS,
        Right.ROUTE,
        "Report that a request has ended",
        PhaseAnswer,
        query=PhaseReportQuery,
        statuses=(200, 202),
    ),
    Call("GET", "/workers", "workers", Tag.WORKERS, Right.READ, "Return the registered workers", WorkersAnswer),
    Call(
        "PUT",
        "/workers/{worker_id}",
        "put_worker",
        Tag.WORKERS,
        Right.OPERATE,
        "Register a worker, or change its registration",
        WorkerAnswer,
        WorkerBody,
    ),
    Call(
        "DELETE", "/workers/{worker_id}", "delete_worker", Tag.WORKERS, Right.OPERATE, "Remove a worker", RemovedAnswer
    ),
    Call(
        "PUT",
        "/workers/{worker_id}/cordon",
        "cordon",
        Tag.WORKERS,
        Right.OPERATE,
        "Keep new requests from a worker",
        WorkerAnswer,
    ),
    Call(
        "DELETE",
        "/workers/{worker_id}/cordon",
        "uncordon",
        Tag.WORKERS,
        Right.OPERATE,
        "Let a worker get new requests again",
        UncordonedAnswer,
    ),
    Call(
        "PUT",
        "/workers/{worker_id}/avoid",
        "avoid",
        Tag.WORKERS,
        Right.ROUTE,
        "Let requests avoid a worker for a short time",
        AvoidedAnswer,
    ),
    Call(
        "PUT",
        "/workers/{worker_id}/render",
        "put_render",
        Tag.WORKERS,
        Right.ROUTE,
        "Report whether a worker's engine makes the same tokens as a front",
        RenderAnswer,
        RenderBody,
    ),
    Call("GET", "/pools", "pools", Tag.POOLS, Right.READ, "Return the registered CXL pools", PoolsAnswer),
    Call(
        "PUT",
        "/pools/{pool_id}",
        "put_pool",
        Tag.POOLS,
        Right.OPERATE,
        "Register a CXL pool, or change it",
        PoolAnswer,
        PoolBody,
    ),
    Call(
        "DELETE",
        "/pools/{pool_id}",
        "delete_pool",
        Tag.POOLS,
        Right.OPERATE,
        "Mark a CXL pool and its contents as lost",
        PoolAnswer,
    ),
    Call("GET", "/state", "state", Tag.STATE, Right.READ, "Return what this router has of each rank", StateAnswer),
    Call(
        "GET",
        "/state/blocks",
        "state_blocks",
        Tag.STATE,
        Right.READ,
        "Return every fact in the index, 21 bytes each",
        content_type=OCTET_STREAM,
    ),
    Call(
        "GET",
        "/state/digest",
        "state_digest",
        Tag.STATE,
        Right.READ,
        "Return digests of everything, with the offsets that they include",
        StateDigestAnswer,
    ),
    Call(
        "GET",
        "/state/facts/{worker_id}/{dp_rank}",
        "state_facts",
        Tag.STATE,
        Right.READ,
        "Return all facts of a rank, with the offsets that they include",
        RankFactsAnswer,
    ),
    Call("GET", "/state/cxl", "state_cxl", Tag.STATE, Right.READ, "Return every pooled block", PooledStateAnswer),
    Call("GET", "/healthz", "healthz", Tag.STATE, None, "Return 200 while the process is running", HealthAnswer),
    Call("GET", "/health", "health", Tag.STATE, None, "Return the same as /healthz, at an engine's path", HealthAnswer),
    Call(
        "GET",
        "/ready",
        "ready",
        Tag.STATE,
        None,
        "Return whether the router is ready",
        ReadyAnswer,
        statuses=(200, 503),
    ),
    Call(
        "GET",
        "/metrics",
        "metrics",
        Tag.STATE,
        Right.READ,
        "Return the metrics for Prometheus",
        content_type=PROMETHEUS,
    ),
    Call("GET", "/openapi.json", "openapi", Tag.API, None, "Return this API as OpenAPI 3.1", OpenApiAnswer),
    Call("GET", "/docs", "docs", Tag.API, None, "Show this API in a browser", content_type=HTML),
    Call("GET", "/live", "live", Tag.STATE, Right.READ, "Return what the live page shows", LiveAnswer),
    Call("GET", "/", "page", Tag.STATE, None, "Return the live page", content_type=HTML),
    Call("GET", "/live.css", "page_style", Tag.STATE, None, "Return the live page's style", content_type=CSS),
    Call("GET", "/live.js", "page_script", Tag.STATE, None, "Return the live page's script", content_type=SCRIPT),
)
