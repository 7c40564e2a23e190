"""The messages of ext_proc as Envoy writes and reads them, with types that are made for protobuf at run time."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from streams.picker.ext_proc_types import ProcessingRequest, Types, message_type
from streams.picker.messages import BodyMode, Part

_TYPES: Types = {
    "ProcessingResponse": {
        1: ("request_headers", "HeadersResponse"),
        2: ("response_headers", "HeadersResponse"),
        3: ("request_body", "HeadersResponse"),
        4: ("response_body", "HeadersResponse"),
        5: ("request_trailers", "TrailersResponse"),
        6: ("response_trailers", "TrailersResponse"),
        7: ("immediate_response", "ImmediateResponse"),
        8: ("dynamic_metadata", ".google.protobuf.Struct"),
    },
    "HeadersResponse": {1: ("response", "CommonResponse")},
    "TrailersResponse": {1: ("header_mutation", "HeaderMutation")},
    "CommonResponse": {
        1: ("status", Field.TYPE_INT32),
        2: ("header_mutation", "HeaderMutation"),
        3: ("body_mutation", "BodyMutation"),
        5: ("clear_route_cache", Field.TYPE_BOOL),
    },
    "HeaderMutation": {1: ("set_headers", "HeaderValueOption"), 2: ("remove_headers", Field.TYPE_STRING)},
    "HeaderValueOption": {1: ("header", "HeaderValue"), 3: ("append_action", Field.TYPE_INT32)},
    "HeaderValue": {1: ("key", Field.TYPE_STRING), 2: ("value", Field.TYPE_STRING), 3: ("raw_value", Field.TYPE_BYTES)},
    "BodyMutation": {1: ("body", Field.TYPE_BYTES), 3: ("streamed_response", "StreamedBodyResponse")},
    "StreamedBodyResponse": {1: ("body", Field.TYPE_BYTES), 2: ("end_of_stream", Field.TYPE_BOOL)},
    "ImmediateResponse": {
        1: ("status", "HttpStatus"),
        2: ("headers", "HeaderMutation"),
        3: ("body", Field.TYPE_BYTES),
        5: ("details", Field.TYPE_STRING),
    },
    "HttpStatus": {1: ("code", Field.TYPE_INT32)},
}
_REPEATED = {("HeaderMutation", "set_headers"), ("HeaderMutation", "remove_headers")}

#: What a picker answers.
ProcessingResponse: Any = message_type("ProcessingResponse", _TYPES, _REPEATED, ("response", range(1, 8)))

FULL_DUPLEX, BUFFERED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED


def request(part: Part, modes: tuple[BodyMode, BodyMode] | None = None, **fields: Any) -> bytes:
    """A message of Envoy. headers: by their names, for the parts that have some. metadata: by their namespaces."""
    message = ProcessingRequest()
    of = getattr(message, part.field)
    of.SetInParent()
    for name, value in fields.pop("headers", {}).items():
        of.headers.headers.add(key=name, raw_value=value.encode())
    for namespace, values in fields.pop("metadata", {}).items():
        message.metadata_context.filter_metadata[namespace].update(values)
    for name, value in fields.items():
        setattr(of, name, value)
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return bytes(message.SerializeToString())
