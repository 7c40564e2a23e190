"""Checks real answers against the OpenAPI document. Every call of tests.helpers.api.Api does so."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from streams.router_api.http.calls import CALLS, JSON
from streams.router_api.http.openapi import document_json

#: The schema of OpenAPI 3.1 documents, from https://spec.openapis.org/oas/3.1/schema/2022-10-07 (Apache 2.0).
OPENAPI_SCHEMA = Path(__file__).with_name("openapi-3.1.json")


@cache
def strict_document() -> dict[str, Any]:
    """The document with answers that have no fields but those that it names."""
    document: dict[str, Any] = json.loads(document_json())
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    # An OpenAPI document may have any further parts.
    document["components"]["schemas"]["OpenApiAnswer"]["additionalProperties"] = True
    return document


@cache
def _validator(path: str, method: str, answered: str) -> Draft202012Validator:
    document = strict_document()
    schema = document["paths"][path][method]["responses"][answered]["content"][JSON]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


@cache
def _path_of(method: str, target: str) -> str | None:
    plain = target.partition("?")[0]
    found = [
        call.path
        for call in CALLS
        if call.method == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", call.path), plain)
    ]
    return min(found, key=lambda path: path.count("{")) if found else None


def check_answer(method: str, target: str, status: int, content_type: str, body: bytes) -> None:
    """Check that the document allows an answer, with its status, its type and every one of its fields."""
    path = _path_of(method, target)
    if path is None:  # no such call: a refusal by the HTTP server
        path, status = "/route", 404
        method = "POST"
    responses = strict_document()["paths"][path][method.lower()]["responses"]
    answered = str(status) if str(status) in responses else "default"
    assert answered != "default" or status >= 400, f"{method} {target} answers {status}, which is not documented"
    kind = content_type.partition(";")[0]
    assert kind in responses[answered]["content"] or (kind == JSON and status >= 400), f"{method} {target}: {kind}"
    if kind == JSON:
        answered = answered if JSON in responses[answered]["content"] else "default"
        value = json.loads(body)
        if status == 503 and "error" in value:  # /ready has an answer of its own with 503
            answered = "default"
        _validator(path, method.lower(), answered).validate(value)
