"""Avro frames: the bytes of a record, and the datum of a schema in them.

What lives here: loading schemas, framing, encoding and decoding a datum. What must not: which values a datum stands for
(shapes, and the descriptions of the records that use them).

A frame is Avro's single-object encoding: C3 01, the schema's CRC-64-AVRO fingerprint, the datum. It costs 10 bytes and
lets a reader distinguish bytes that are not Avro from an unknown schema. The Confluent wire header (00, schema id) is
also read, for the ids in the settings.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from streams.errors import BadRecord, KvStreamsError

#: Folders in that of the schemas: of the last release, and of earlier forms.
RELEASED = "released"
PREVIOUS = "previous"

_SINGLE_OBJECT = b"\xc3\x01"
_SINGLE_OBJECT_HEADER_BYTES = 10
_CONFLUENT_MAGIC = 0
_CONFLUENT_HEADER_BYTES = 5


def schemas_dir() -> Path:
    """Return the folder of the .avsc files: inside the package in a wheel, at the top level in a checkout."""
    packaged = Path(__file__).parent.parent / "_schemas"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "schemas"


class RecordCodec:
    """Encodes and decodes the records of one schema, including the frame.

    Records of earlier schemas are read too, with the defaults of the fields that they lack, since a topic or a table
    has such records after an upgrade. The schema of the last release is `schemas/released/<name>.avsc`, earlier ones
    are `schemas/previous/<name>.<number>.avsc`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: dict[str, Any] = json.loads((schemas_dir() / f"{name}.avsc").read_text())
        self._schema = fastavro.parse_schema(self.source)
        # fastavro returns the fingerprint as hex, in the byte order of the frame (little-endian).
        self.fingerprint = bytes.fromhex(fingerprint(to_parsing_canonical_form(self._schema), "CRC-64-AVRO"))
        #: The first bytes of a record of the current schema.
        self.header = _SINGLE_OBJECT + self.fingerprint
        #: By fingerprint, what records may have been written with.
        self._writers: dict[bytes, Any] = {self.fingerprint: self._schema}
        folder = schemas_dir()
        for path in (*(folder / PREVIOUS).glob(f"{name}.*.avsc"), *(folder / RELEASED).glob(f"{name}.avsc")):
            earlier = fastavro.parse_schema(json.loads(path.read_text()))
            # A current one stays: a reader that has the same schema twice compares their fields for every record.
            self._writers.setdefault(
                bytes.fromhex(fingerprint(to_parsing_canonical_form(earlier), "CRC-64-AVRO")), earlier
            )

    def encode(self, datum: Mapping[str, Any]) -> bytes:
        """Frame and encode; raises KvStreamsError for a value that does not fit the schema."""
        out = io.BytesIO()
        out.write(self.header)
        try:
            fastavro.schemaless_writer(out, self._schema, datum)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            raise KvStreamsError(f"cannot encode a {self.name} record: {exc}") from exc
        return out.getvalue()

    def decode(self, raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Check the frame and decode.

        schema_ids: Confluent ids by schema name, if a registry is configured.
        Raises BadRecord with reason not_avro, unknown_schema or bad_avro.
        """
        if not raw:
            raise BadRecord("not_avro", "the record is empty")
        start, writer = self._frame(raw, schema_ids or {})
        stream = io.BytesIO(raw)
        stream.seek(start)
        try:
            datum: Any = fastavro.schemaless_reader(stream, writer, None if writer is self._schema else self._schema)
        except EOFError as exc:  # without its own message, which contains a memory address
            raise BadRecord("bad_avro", f"the datum is not a {self.name} record: it ends early") from exc
        except Exception as exc:  # fastavro passes on any exception of its C code
            # Some of them quote the datum, which a foreign writer may have filled with anything.
            raise BadRecord("bad_avro", f"the datum is not a {self.name} record ({type(exc).__name__})") from None
        if stream.tell() != len(raw):
            raise BadRecord("bad_avro", f"{len(raw) - stream.tell()} bytes follow the {self.name} datum")
        assert isinstance(datum, dict)
        return datum

    def _frame(self, raw: bytes, schema_ids: Mapping[str, int]) -> tuple[int, Any]:
        """Return where the datum begins, and the schema that it was written with."""
        if raw[:2] == _SINGLE_OBJECT and len(raw) >= _SINGLE_OBJECT_HEADER_BYTES:
            fingerprint = raw[2:_SINGLE_OBJECT_HEADER_BYTES]
            writer = self._writers.get(fingerprint)
            if writer is None:
                raise BadRecord("unknown_schema", f"schema fingerprint {fingerprint.hex()} is not that of {self.name}")
            return _SINGLE_OBJECT_HEADER_BYTES, writer
        if raw[0] == _CONFLUENT_MAGIC and len(raw) >= _CONFLUENT_HEADER_BYTES:
            found_id = int.from_bytes(raw[1:_CONFLUENT_HEADER_BYTES], "big")
            if schema_ids.get(self.name) != found_id:
                raise BadRecord("unknown_schema", f"registry id {found_id} is not the one configured for {self.name}")
            return _CONFLUENT_HEADER_BYTES, self._schema
        raise BadRecord("not_avro", "the record does not begin with the header of an Avro datum")


@cache
def codec(name: str) -> RecordCodec:
    """Return the codec of a schema by its file name without the extension."""
    return RecordCodec(name)
