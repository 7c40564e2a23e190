"""The types that a picker reads from Envoy, compared with messages that Envoy's own types have written."""

from __future__ import annotations

import gc
import weakref

import pytest
from google.protobuf.message import DecodeError

from streams.picker.ext_proc_types import ProcessingRequest

#: Written by the types of xds-protos 1.85.0. The first one has every field that is read, and some that are not.
HEADERS = bytes.fromhex(
    "12320a1d0a110a053a706174681a082f76312f636861740a080a03782d61120162120f0a0161120a0a080a016212031a0163"
    "18014288010a540a14656e766f792e6c622e7375627365745f68696e74123c0a3a0a25782d676174657761792d6465737469"
    "6e6174696f6e2d656e64706f696e742d7375627365741211320f0a0d1a0b31302e302e302e313a38300a250a08656e766f79"
    "2e6c6212190a170a06736572766564120d1a0b31302e302e302e323a383012090a027a7a12030a01784a150a017112100a0e"
    "0a016e120911000000000000004050015a0408041002"
)
BODY = bytes.fromhex("2a090a0300ff7810011801")
TRAILERS = bytes.fromhex("320a0a080a060a01741a0131")


def test_headers_are_read_with_what_comes_along() -> None:
    """Headers, metadata, body modes and the observing mode have the values that were written."""
    read = ProcessingRequest.FromString(HEADERS)
    assert read.WhichOneof("request") == "request_headers"
    headers = [(each.key, each.value, each.raw_value) for each in read.request_headers.headers.headers]
    assert headers == [(":path", "", b"/v1/chat"), ("x-a", "b", b"")]
    assert read.request_headers.end_of_stream
    metadata = read.metadata_context.filter_metadata
    assert sorted(metadata) == ["envoy.lb", "envoy.lb.subset_hint"]
    assert metadata["envoy.lb"].fields["served"].string_value == "10.0.0.2:80"
    subset = metadata["envoy.lb.subset_hint"].fields["x-gateway-destination-endpoint-subset"]
    assert subset.WhichOneof("kind") == "list_value"
    assert [each.string_value for each in subset.list_value.values] == ["10.0.0.1:80"]
    assert (read.protocol_config.request_body_mode, read.protocol_config.response_body_mode) == (4, 2)
    assert read.observability_mode


def test_bodies_and_trailers_are_read() -> None:
    """A body keeps its bytes; a field that is missing is not the same as an empty one."""
    body = ProcessingRequest.FromString(BODY)
    assert (body.WhichOneof("request"), body.response_body.body) == ("response_body", b"\0\xffx")
    assert body.response_body.end_of_stream
    assert not body.HasField("metadata_context")
    assert not body.HasField("protocol_config")
    trailers = ProcessingRequest.FromString(TRAILERS)
    assert trailers.WhichOneof("request") == "request_trailers"
    assert [each.key for each in trailers.request_trailers.trailers.headers] == ["t"]
    assert ProcessingRequest.FromString(b"").WhichOneof("request") is None


def test_other_bytes_are_refused() -> None:
    """A message that is cut off is an error, and none of its fields count."""
    for n in range(1, len(BODY)):
        with pytest.raises(DecodeError):
            ProcessingRequest.FromString(BODY[:n])


def test_the_classes_of_inner_types_outlive_their_messages() -> None:
    """Protobuf would make them again for the next message."""

    def classes() -> list[weakref.ref[type]]:
        read = ProcessingRequest.FromString(HEADERS).metadata_context.filter_metadata["envoy.lb.subset_hint"]
        subset = read.fields["x-gateway-destination-endpoint-subset"]
        return [weakref.ref(type(each)) for each in (read, subset, subset.list_value)]

    known = classes()
    gc.collect()
    assert all(each() is not None for each in known)
