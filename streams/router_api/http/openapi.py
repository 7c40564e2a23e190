"""The OpenAPI 3.1 document of the HTTP API, generated from the table of calls and the types that validate bodies.

What lives here: the document, and the page that shows it. What must not: the calls and their types (calls, requests,
answers), and serving them (handlers).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import msgspec
import orjson

from streams.core.ids import U32_MAX, U64_MASK
from streams.cxl.events import POOL_NAME_CHARS_MAX
from streams.router_api.http.answers import ErrorAnswer
from streams.router_api.http.calls import CALLS, JSON, Call, Tag
from streams.router_api.messages.requests import (
    LIST_PARAMETERS,
    NAME_CHARS_MAX,
    NO_PARAMETERS,
    OCTET_STREAM,
    ROUTE_REQUESTS_MAX,
    ConfigOverride,
    RouteRequest,
)

#: Of the paths, which have no version in them.
API_VERSION = "1"

_REF = "#/components/schemas/{name}"

#: The page has its script and style within it, and loads nothing from other hosts.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

#: The parameters of paths.
_PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "request_id": {"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
    "worker_id": {"type": "integer", "minimum": 0, "maximum": U64_MASK},
    "dp_rank": {"type": "integer", "minimum": 0, "maximum": U32_MAX},
    "pool_id": {"type": "string", "minLength": 1, "maxLength": POOL_NAME_CHARS_MAX},
}


@cache
def document() -> dict[str, Any]:
    """The document as a value."""
    types = [ErrorAnswer, *(kind for call in CALLS for kind in (call.answer, call.body, call.query) if kind)]
    types = list(dict.fromkeys([*types, ConfigOverride]))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    for schema in components.values():
        _describe_fields(schema)
    schema_of: dict[Any, dict[str, Any]] = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvstreams router",
            "version": API_VERSION,
            "description": "A KV-cache-aware router for LLM engines. docs/http.md explains how to use it.",
        },
        "tags": [{"name": tag} for tag in Tag],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


#: A paragraph of a docstring that begins with the name of a field, or with several names. Further lines are indented.
_FIELD_TEXT = re.compile(r"^(\w+(?:, \w+)*): (.+(?:\n .+)*)$", re.MULTILINE)


def _describe_fields(schema: dict[str, Any]) -> None:
    """Move what the docstring of a type says of its fields from the schema to those of the fields."""
    about, _, rest = inspect.cleandoc(schema.get("description", "")).partition("\n\n")
    properties = schema.get("properties", {})
    for names, text in _FIELD_TEXT.findall(rest) if properties else ():
        for name in names.split(", "):
            properties[name]["description"] = re.sub(r"\s+", " ", text)
    if about:
        schema["description"] = re.sub(r"\s+", " ", about)


@cache
def document_json() -> bytes:
    """The document as JSON."""
    return orjson.dumps(document(), option=orjson.OPT_SORT_KEYS)


@cache
def page_html() -> bytes:
    """The page that shows the document in a browser. It loads nothing but /openapi.json."""
    return (resources.files("streams.router_api.http") / "docs_page.html").read_bytes()


def _operation(call: Call, schema_of: dict[Any, dict[str, Any]], components: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", call.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name]} for name in names
    ]
    if call.query is not None:
        parameters += _query_parameters(components[call.query.__name__]["properties"])
    operation: dict[str, Any] = {
        "operationId": call.handler,
        "summary": call.summary,
        "tags": [call.tag],
        "responses": _responses(call, schema_of),
    }
    if call.right is not None:
        # The roles of a bearer token; a router without tokens requires none.
        operation["security"] = [{}, {"bearer": [call.right]}]
    if call.body is not None:
        content = {JSON: {"schema": _or_list(schema_of[call.body], call.takes_lists, schema_of[call.body])}}
        if call.packs_tokens:
            content[OCTET_STREAM] = {"schema": {"type": "string", "format": "binary", "description": _PACKED}}
            properties = {**components[RouteRequest.__name__]["properties"]}
            properties |= components[ConfigOverride.__name__]["properties"]
            parameters += _query_parameters({n: schema for n, schema in properties.items() if n not in NO_PARAMETERS})
        operation["requestBody"] = {"required": True, "content": content}
    if parameters:
        operation["parameters"] = parameters
    return operation


_PACKED = "tokens, u32 little-endian; only then may the request's other fields be query parameters"


def _responses(call: Call, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    error = schema_of[ErrorAnswer]
    if call.answer is None:
        schema: dict[str, Any] = {"type": "string"}
        if call.content_type == OCTET_STREAM:
            schema["format"] = "binary"
    else:
        own = schema_of[call.answer]
        schema = _or_list(own, call.takes_lists, {"anyOf": [own, error]})
    answered = {"description": call.summary, "content": {call.content_type: {"schema": schema}}}
    refused = {"description": "Refused; every error has this shape", "content": {JSON: {"schema": error}}}
    return {**{str(status): answered for status in call.statuses}, "default": refused}


def _or_list(one: dict[str, Any], takes_lists: bool, item: dict[str, Any]) -> dict[str, Any]:
    if not takes_lists:
        return one
    return {"anyOf": [one, {"type": "array", "items": item, "minItems": 1, "maxItems": ROUTE_REQUESTS_MAX}]}


def _query_parameters(properties: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for name, schema in properties.items():
        parameter: dict[str, Any] = {"name": name, "in": "query"}
        if about := schema.get("description"):
            parameter["description"] = about
        if name == "moe_query":
            yield {**parameter, "content": {JSON: {"schema": schema}}}
        elif name in LIST_PARAMETERS:
            yield {**parameter, "schema": schema, "style": "form", "explode": False}
        else:
            yield {**parameter, "schema": schema}
