"""The OpenAPI document is valid, is complete, and describes the bodies and answers that the router has.

Every test that uses tests.helpers.api.Api also checks each answer against the document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from jsonschema import Draft202012Validator

from streams.errors import InvalidRequest
from streams.router_api.http.calls import CALLS, JSON, Call
from streams.router_api.http.handlers import Handlers
from streams.router_api.http.openapi import document
from streams.router_api.messages.requests import ROUTE_REQUESTS_MAX, parse_route
from streams.settings import Settings
from tests.helpers.api import OCTETS, Api, packed
from tests.helpers.local_router import LocalRouter, local_router
from tests.helpers.openapi import OPENAPI_SCHEMA, check_answer

TOKENS = list(range(64))


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    with local_router(Settings()) as router:
        yield router


@pytest.fixture
def api(served: LocalRouter) -> Api:
    return served.api


def test_the_served_document_is_valid(api: Api) -> None:
    """GET /openapi.json returns a document that the schema of OpenAPI 3.1 accepts, and every schema in it is valid."""
    served = api.get("/openapi.json")
    Draft202012Validator(json.loads(OPENAPI_SCHEMA.read_text())).validate(served)
    assert served == json.loads(json.dumps(document()))
    for schema in served["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(served)))
    assert references <= served["components"]["schemas"].keys()


def test_every_call_is_in_the_document_with_its_right_and_parameters() -> None:
    """The document has exactly the calls of the table, each with the parameters of its path."""
    paths = document()["paths"]
    assert {(method, path) for path, calls in paths.items() for method in calls} == {
        (call.method.lower(), call.path) for call in CALLS
    }
    for call in CALLS:
        shown = paths[call.path][call.method.lower()]
        in_path = [each["name"] for each in shown.get("parameters", []) if each["in"] == "path"]
        assert in_path == re.findall(r"\{(\w+)\}", call.path)
        assert ("security" not in shown) == (call.right is None)
    names = [call.handler for call in CALLS]
    assert len(names) == len(set(names))  # they are the operations' ids


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_every_call_has_a_handler_whose_body_it_declares(call: Call) -> None:
    """Each row names a method of Handlers, and only JSON answers have a type."""
    assert callable(getattr(Handlers, call.handler))
    assert (call.answer is not None) == (call.content_type == JSON)
    assert not call.packs_tokens or call.body is not None


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [1, 2], "worker_id": "7", "router_config_override": {"router_temperature": 0.5}},
        {"token_ids": [1], "unknown": 1},
        {"token_ids": [1], "priority": "high"},
        {"token_ids": [1], "phase": "neither"},
        {"token_ids": [1], "required_taints": [""]},
        {"token_ids": [1], "router_config_override": {"overlap_score_weight": -1}},
        {"token_ids": "1"},
    ],
)
def test_the_document_accepts_the_bodies_that_the_router_accepts(body: dict[str, Any]) -> None:
    """The schema of a body and the parser agree, since one is generated from the other."""
    shown = document()["paths"]["/route"]["post"]["requestBody"]["content"][JSON]["schema"]
    validator = Draft202012Validator({**shown, "components": document()["components"]})
    try:
        parse_route(msgspec.json.encode(body))
    except InvalidRequest:
        assert not validator.is_valid(body)
    else:
        validator.validate(body)


def test_the_page_loads_nothing_from_elsewhere(api: Api) -> None:
    """GET /docs returns a page that names no other host, and that takes the document from this router."""
    answer = api.call("GET", "/docs")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = answer.body.decode()
    assert 'fetch("openapi.json")' in page
    assert "prefers-color-scheme: dark" in page
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", page)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", page)


def test_an_answer_that_the_document_does_not_allow_is_found() -> None:
    """The check of answers refuses a missing field, an unknown field, a wrong type and an undocumented status."""
    answer = {"request_id": "r", "phase": "free", "buffered": False}
    ask = ("DELETE", "/loads/r?phase=prefill", 200, JSON)
    check_answer(*ask, json.dumps(answer).encode())
    for wrong in ({**answer, "more": 1}, {"request_id": "r", "phase": "free"}, {**answer, "buffered": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check_answer(*ask, json.dumps(wrong).encode())
    with pytest.raises(AssertionError, match="not documented"):
        check_answer("DELETE", "/loads/r", 201, JSON, json.dumps(answer).encode())


# --- a list of requests in one call -------------------------------------------------------------------------------


def test_a_list_of_requests_is_answered_in_order(api: Api) -> None:
    """Each request of a list gets an answer or an error, in the order of the list."""
    changes: list[dict[str, Any]] = [{}, {"model": "other"}, {"worker_id": 2}, {"priority": "x"}, {}]
    asked = [
        {"request_id": f"list-{number}", "token_ids": TOKENS[: 16 * (number + 1)], **more}
        for number, more in enumerate(changes)
    ]
    answers = api.call("POST", "/route", asked).given()
    assert [each.get("request_id") for each in answers] == ["list-0", None, "list-2", None, "list-4"]
    assert [each["error"]["code"] for each in answers if "error" in each] == ["unknown_model", "invalid_request"]
    assert answers[2]["worker_id"] == 2
    assert [answers[at]["request_blocks"] for at in (0, 2, 4)] == [1, 3, 4]
    loads = api.get("/loads")["loads"]
    assert sum(row["active_requests"] for row in loads) == 3
    for number in (0, 2, 4):
        assert api.call("DELETE", f"/loads/list-{number}").given()["buffered"] is False


@pytest.mark.parametrize("n", [1, ROUTE_REQUESTS_MAX])
def test_a_list_may_be_as_long_as_its_limit(api: Api, n: int) -> None:
    """A list of the greatest length is answered completely."""
    asked = [{"token_ids": TOKENS, "update_states": False}] * n
    assert len(api.call("POST", "/route", asked).given()) == n


@pytest.mark.parametrize("body", [[], [{"token_ids": [1]}] * (ROUTE_REQUESTS_MAX + 1), b"[{]", b"[", b"[{}] x"])
def test_a_list_that_is_empty_or_too_long_or_no_json_is_refused(api: Api, body: Any) -> None:
    """Such a list is refused as a whole, and nothing is booked."""
    api.call("POST", "/route", body).refused(400, "invalid_request")


def test_items_of_a_list_that_are_no_objects_are_refused_one_by_one(api: Api) -> None:
    """A list, a number and null within a list get an error each, and the requests around them are answered."""
    good = {"token_ids": TOKENS, "update_states": False}
    answers = api.call("POST", "/route", [good, [good], 1, None, "", good]).given()
    assert ["error" in each for each in answers] == [False, True, True, True, True, False]


def test_a_list_of_packed_tokens_does_not_exist(api: Api) -> None:
    """A body of octets that begins with a bracket is tokens, and not a list."""
    body = packed([0x5B, *TOKENS])
    assert body[:1] == b"["
    answer = api.call("POST", "/route?update_states=false", body, OCTETS).given()
    assert answer["request_blocks"] == 5


def test_a_report_may_name_a_phase(api: Api) -> None:
    """A report that names a phase leaves the booking of the other phase; an unknown phase or parameter is refused."""
    for phase in ("prefill", "decode"):
        api.route(request_id="two", phase=phase, token_ids=TOKENS)
    assert sum(row["active_requests"] for row in api.get("/loads")["loads"]) == 2
    assert api.call("POST", "/loads/two/prefill-complete?phase=prefill").given()["phase"] == "prefill"
    api.call("POST", "/loads/two/output?phase=decode", {"output_tokens": 5}).given()
    api.call("DELETE", "/loads/two?phase=prefill").given()
    assert sum(row["active_requests"] for row in api.get("/loads")["loads"]) == 1
    for query in ("phase=both", "phase=", "phase=decode&phase=decode", "fase=decode", "x"):
        api.call("DELETE", f"/loads/two?{query}").refused(400, "invalid_request")
    api.call("DELETE", "/loads/two").given()
    assert sum(row["active_requests"] for row in api.get("/loads")["loads"]) == 0
