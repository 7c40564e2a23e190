"""The obligations of an endpoint picker, and the requests that show most of them.

What lives here: OBLIGATIONS, the words of proposal 004 of the Gateway API Inference Extension (version 1.0.0), and
ROWS, what a gateway sends and what must come. What must not: sending it (tests/kafka/test_picker.py).

docs/picker-protocol.md has both as a table. `python -m tests.helpers.picker_obligations` writes it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streams.picker.messages import DESTINATION, SERVED, SUBSET, SUBSET_HINT, BodyMode
from streams.picker.picks import FAIRNESS, MODEL_REWRITE, OBJECTIVE
from tests.helpers.ext_proc import BUFFERED
from tests.helpers.picker_client import Answered

PAGE = Path(__file__).parents[2] / "docs/picker-protocol.md"
BEGIN, END = "<!-- obligations -->\n", "<!-- end of obligations -->\n"

MODEL = "m"
BODY_BYTES_MAX = 400_000
COMPLETION = {"model": MODEL, "prompt": list(range(1, 40)), "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
RESPONSE = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
NOTHING = BodyMode.NONE


class Obligation(NamedTuple):
    """The words of the proposal. tests: that show it in addition to ROWS."""

    words: str
    tests: tuple[str, ...] = ()


KAFKA = "kafka/test_picker.py::"

OBLIGATIONS: Mapping[str, Obligation] = {
    "process": Obligation(
        "The picker MUST implement the Envoy external processing service",
        (
            f"{KAFKA}test_a_body_that_never_ends_gets_408",
            f"{KAFKA}test_a_stream_that_breaks_the_protocol_is_ended",
            "kafka/test_gateway.py::test_requests_go_where_their_prompts_are",
            "kafka/test_picker_kills.py::test_a_picker_that_is_asked_to_end_fails_no_request",
        ),
    ),
    "streaming": Obligation(
        "It MUST support streaming mode for inference requests and responses, with full-duplex communication",
        (
            f"{KAFKA}test_an_answer_in_full_duplex_passes_unchanged",
            "kafka/test_picker_kills.py::test_a_picker_that_is_asked_to_end_fails_no_request",
        ),
    ),
    "calls": Obligation("(not of the proposal) Requests of every API get an endpoint, and wrong ones an error"),
    "subset": Obligation("If the subset is set, the picker MUST only select endpoints from the specified list"),
    "none eligible": Obligation(
        "If none of the endpoints in the list is eligible or the list is empty, it MUST return an ImmediateResponse "
        "with 503"
    ),
    "pool": Obligation(
        "If the subset is not set, it MUST select from the set defined by the InferencePool selector",
        (
            "unit/test_picker_picks.py::test_only_endpoints_of_the_pool_are_picked",
            "unit/test_picker_picks.py::test_a_picker_with_a_pool_is_ready_once_it_has_read_it",
        ),
    ),
    "destination": Obligation(
        f"It MUST communicate one or more endpoints by setting the header {DESTINATION}, and an entry in "
        "dynamic_metadata with the outer key envoy.lb; the two MUST not differ"
    ),
    "endpoints": Obligation(
        "The value MUST contain one endpoint in IP:PORT format or several, separated by commas, of which the first "
        "valid one is used, and a retry goes down the list",
        (
            f"{KAFKA}test_a_pick_lists_fallbacks_and_moves_to_the_one_that_served",
            "unit/test_picker_picks.py::test_fallbacks_are_listed_in_order",
        ),
    ),
    "not ready": Obligation(
        "It MUST return an ImmediateResponse with 503 if there are no ready endpoints",
        (
            f"{KAFKA}test_a_picker_that_starts_is_alive_and_takes_no_request",
            "unit/test_picker_picks.py::test_without_an_engine_nothing_is_picked",
        ),
    ),
    "shed": Obligation(
        "It MUST return an ImmediateResponse with 429 if the request should be dropped",
        (
            f"{KAFKA}test_a_request_that_is_shed_gets_429",
            f"{KAFKA}test_tenant_and_priority_reach_the_queue",
        ),
    ),
    "served": Obligation(
        f"The data plane MUST communicate the endpoint that served the request, under {SERVED}",
        (
            f"{KAFKA}test_a_pick_lists_fallbacks_and_moves_to_the_one_that_served",
            "kafka/test_gateway.py::test_requests_go_where_their_prompts_are",
        ),
    ),
    "another pool": Obligation(
        "On failover to another InferencePool, the data plane MUST invoke the picker of that pool and report what "
        "served to it"
    ),
    "liveness": Obligation(
        "Health: liveness is SERVING if the process can respond to gRPC requests",
        (
            f"{KAFKA}test_health_of_a_picker_that_is_ready",
            f"{KAFKA}test_a_picker_that_starts_is_alive_and_takes_no_request",
            f"{KAFKA}test_while_kafka_is_away_a_picker_goes_on_and_a_new_one_is_not_ready",
        ),
    ),
    "readiness": Obligation(
        "Health: readiness is SERVING if the datastore has synced, and NOT_SERVING otherwise",
        (
            f"{KAFKA}test_health_of_a_picker_that_is_ready",
            f"{KAFKA}test_a_picker_that_starts_is_alive_and_takes_no_request",
            f"{KAFKA}test_while_kafka_is_away_a_picker_goes_on_and_a_new_one_is_not_ready",
            f"{KAFKA}test_sigterm_fails_no_request",
        ),
    ),
    "service": Obligation(
        "Health: envoy.service.ext_proc.v3.ExternalProcessor has the same criteria as readiness",
        (
            f"{KAFKA}test_health_of_a_picker_that_is_ready",
            f"{KAFKA}test_a_picker_that_starts_is_alive_and_takes_no_request",
        ),
    ),
}

#: Duties of the gateway alone: no test of ours can show them.
OF_THE_GATEWAY = frozenset({"another pool"})


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a gateway. shows: an obligation. asks: what is sent, as in Gateway.ask.

    subset: makes the subset hint from a list of endpoints. refused: the status that the client gets, 0 if the request
    is picked. parts: the answers, if their order is part of it. source: where the prompt's tokens must come from, as in
    the metric kvstreams_picker_prompts_total. also: a further check of the answer.
    """

    name: str
    shows: str
    body: bytes | Mapping[str, Any] | None = field(default_factory=lambda: COMPLETION)
    asks: Mapping[str, Any] = field(default_factory=dict)
    subset: Callable[[list[str]], Any] | None = None
    refused: int = 0
    parts: tuple[str, ...] = ()
    source: str = ""
    also: Callable[[Answered], bool] = lambda _: True


def hint(subset: Any) -> dict[str, Any]:
    """The metadata of a gateway that limits the endpoints."""
    return {SUBSET_HINT: {SUBSET: subset}}


def _unchanged(found: Answered) -> bool:
    return bool(json.loads(found.body) == COMPLETION)


def _has_blocks(n: int) -> Callable[[Answered], bool]:
    return lambda found: bool(found.details["request_blocks"] >= n)


HEADERS, BODY, TRAILERS = "request_headers", "request_body", "request_trailers"

ROWS: Sequence[Row] = (
    Row("one endpoint, in header and metadata", "destination", parts=(HEADERS, BODY), also=_unchanged),
    Row(
        "an endpoint in the client's header is replaced",
        "destination",
        asks={"headers": {DESTINATION: "10.9.9.9:1"}},
        also=lambda found: "10.9.9.9" not in found.destination,
    ),
    Row(
        "BUFFERED: the headers are answered first, and the pick answers the body",
        "process",
        asks={"modes": (BUFFERED, NOTHING)},
        parts=(HEADERS, BODY),
        also=lambda found: found.body == b"",
    ),
    Row(
        "BUFFERED_PARTIAL: the same",
        "process",
        asks={"modes": (BodyMode.BUFFERED_PARTIAL, NOTHING)},
        parts=(HEADERS, BODY),
    ),
    Row(
        "STREAMED: the pick answers the headers",
        "process",
        asks={"modes": (BodyMode.STREAMED, NOTHING)},
        parts=(HEADERS,),
    ),
    Row("NONE: the pick answers the headers", "process", asks={"modes": (NOTHING, NOTHING)}, parts=(HEADERS,)),
    Row(
        "a request without a body is answered at once",
        "process",
        None,
        {"method": "GET", "path": "/v1/models"},
        parts=(HEADERS,),
    ),
    Row(
        "every byte of a body in many parts is sent back",
        "streaming",
        {**COMPLETION, "x": "y" * 200_000},
        {"n_chunks": 7},
        also=lambda found: json.loads(found.body)["x"] == "y" * 200_000,
    ),
    Row(
        "a body with trailers is ended by them",
        "streaming",
        asks={"trailers": True},
        parts=(HEADERS, BODY, TRAILERS),
        also=_unchanged,
    ),
    Row("chats", "calls", CHAT, {"path": "/v1/chat/completions"}, source="files", also=_has_blocks(1)),
    Row("completions of text", "calls", {**COMPLETION, "prompt": "x" * 64}, source="files", also=_has_blocks(4)),
    Row("completions of token ids", "calls", source="ids", also=_has_blocks(2)),
    Row("responses", "calls", RESPONSE, {"path": "/v1/responses"}, source="files", also=_has_blocks(1)),
    Row("messages", "calls", CHAT, {"path": "/v1/messages"}, source="files", also=_has_blocks(1)),
    Row("embeddings", "calls", {"model": MODEL, "input": "Hello"}, {"path": "/v1/embeddings"}),
    Row("other paths", "calls", {"anything": 1}, {"path": "/v1/audio/transcriptions"}),
    Row(
        "the model's name is rewritten for the engine",
        "calls",
        {**COMPLETION, "model": "public"},
        {"headers": {MODEL_REWRITE: MODEL}},
        also=_unchanged,
    ),
    Row(
        "fairness id, objective, session and trace",
        "calls",
        asks={"headers": {FAIRNESS: "team", OBJECTIVE: "batch", "x-session-id": "s", "traceparent": TRACE}},
    ),
    Row("a subset as a list", "subset", subset=list),
    Row("a subset as a text", "subset", subset=",".join),
    Row("a subset for a request without a body", "subset", None, {"method": "GET", "path": "/v1/models"}, subset=list),
    Row("an empty subset as a list", "none eligible", subset=lambda _: [], refused=503),
    Row("an empty subset as a text", "none eligible", subset=lambda _: "", refused=503),
    Row("a subset of unknown endpoints", "none eligible", subset=lambda _: ["10.9.9.9:1"], refused=503),
    Row(
        "an empty subset, BUFFERED",
        "none eligible",
        asks={"modes": (BUFFERED, NOTHING)},
        subset=lambda _: [],
        refused=503,
    ),
    Row("a body over the limit is 413", "calls", {**COMPLETION, "x": "y" * BODY_BYTES_MAX}, refused=413),
    Row("a body that is no JSON is 400", "calls", b"{", refused=400),
    Row("a model that no engine serves is 404", "calls", {**COMPLETION, "model": "other"}, refused=404),
)


def shown_by(name: str) -> list[str]:
    """What shows an obligation: names of ROWS, and tests."""
    return [*(row.name for row in ROWS if row.shows == name), *(f"`{test}`" for test in OBLIGATIONS[name].tests)]


def _lines() -> Iterator[str]:
    yield "| the protocol says | what shows it |\n|---|---|\n"
    for name, obligation in OBLIGATIONS.items():
        first, *others = shown_by(name) or ["a duty of the gateway alone"]
        yield f"| {obligation.words} | {first} |\n"
        yield from (f"| | {other} |\n" for other in others)


def table() -> str:
    """The table of the page."""
    return "".join(_lines())


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
