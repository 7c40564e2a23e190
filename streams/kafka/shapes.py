"""Descriptions of records, from which both directions follow.

What lives here: how the attributes of a value become the fields of an Avro record and back, and the keys of records.
What must not: any particular record, and the bytes of a frame (avro_frames).

A `Shape` describes one class: attributes that need a conversion are named with it, all others are written as they are
under their own names. `Record` adds the schema, so that values become bytes:

    _CORDON = Record("cordons", Shape(Cordon, worker_id=U64))
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.ids import U64_MASK, DpRank, Epoch, HashArray, RankId, WorkerId
from streams.errors import BadRecord, InvalidEvent, InvalidRequest, KvStreamsError
from streams.kafka.avro_frames import RecordCodec, codec

T = TypeVar("T")

#: fastavro reads ints that are longer than Avro allows, so they are checked.
I32_MAX = (1 << 31) - 1

_U63 = 1 << 63
_U64_DIGITS = 20
_NAMESPACE = "io.kvstreams."


def to_long(value: int) -> int:
    """Return a u64 as the signed long with the same bits."""
    return value - (1 << 64) if value >= _U63 else value


def from_long(value: int) -> int:
    """Return a signed long as the u64 with the same bits."""
    return value & U64_MASK


def to_hash(value: int) -> bytes:
    """Return a u64 as an Avro fixed(8), little-endian."""
    return value.to_bytes(8, "little")


def from_hash(value: bytes) -> int:
    """Return an Avro fixed(8) as a u64."""
    return int.from_bytes(value, "little")


def hashes(packed: bytes) -> HashArray:
    """Unpack u64 little-endian; raises BadRecord for a length that is not a multiple of 8."""
    try:
        return unpack_hashes(packed)
    except InvalidRequest as exc:
        raise BadRecord("bad_hashes", exc.message, **exc.detail) from exc


class Field(NamedTuple):
    """How one attribute is written and read. name: of the field in the schema, if it is not the attribute's own."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    name: str = ""

    def named(self, name: str) -> Field:
        """The same conversion for a field with another name than the attribute."""
        return self._replace(name=name)


def optional(field: Field) -> Field:
    """A field that may be null, for an attribute that may be None."""
    write, read, name = field
    return Field(
        lambda value: None if value is None else write(value),
        lambda datum: None if datum is None else read(datum),
        name,
    )


def many(field: Field) -> Field:
    """An array, for a tuple."""
    write, read, name = field
    return Field(lambda values: list(map(write, values)), lambda data: tuple(map(read, data)), name)


def by_value(members: type[enum.StrEnum]) -> Field:
    """The value of a member of an enum. Reading raises ValueError for any other, if the schema allows one."""
    return Field(attrgetter("value"), members)


def by_name(members: type[enum.Enum]) -> Field:
    """The name of a member of an enum, in lower case."""
    names = {member: member.name.lower() for member in members}
    return Field(names.__getitem__, {name: member for member, name in names.items()}.__getitem__)


U64 = Field(to_long, from_long)
HASH = Field(to_hash, from_hash)
HASHES = Field(pack_hashes, hashes)
TEXTS = Field(list, tuple)  # of text, bytes or numbers


def _getter(kind: Callable[..., Any], names: tuple[str, ...]) -> Callable[[Any], Any]:
    """An `attrgetter` or `itemgetter` that always returns a sequence."""
    if len(names) > 1:
        getter: Callable[[Any], Any] = kind(*names)
        return getter
    return lambda source: [kind(name)(source) for name in names]


class Shape(Generic[T]):
    """The attributes of a class as the fields of an Avro record.

    of: a dataclass or a named tuple. in_key: attributes that are in the record's key instead of its value. check:
    raises BadRecord for a value that is read and not allowed. refused: the reason of the BadRecord if the class itself
    refuses a value. fields: attributes with a conversion; one that has a Shape has its fields in the whole record.
    """

    def __init__(
        self,
        of: type[T],
        *,
        in_key: tuple[str, ...] = (),
        check: Callable[[T], None] | None = None,
        refused: str = "",
        **fields: Field | Shape[Any],
    ) -> None:
        self.of = of
        self._check, self._refused = check, refused
        names: Iterable[str] = getattr(of, "_fields", None) or [field.name for field in dataclasses.fields(of)]  # type: ignore[arg-type]
        converted = {name: field for name, field in fields.items() if isinstance(field, Field)}
        self._flat = {name: shape for name, shape in fields.items() if isinstance(shape, Shape)}
        # To read: by attribute, its field and its conversion.
        field_of = {
            name: (name in converted and converted[name].name) or name for name in names if name not in self._flat
        }
        self._attributes = tuple(field_of)
        self._fields_of = _getter(itemgetter, tuple(field_of.values()))
        self._reads = tuple((name, field.read) for name, field in converted.items())
        # To write: by field, the path of its attribute and its conversion.
        self._paths = {field: name for name, field in field_of.items() if name not in in_key}
        self._writes = tuple((field_of[name], field.write) for name, field in converted.items())
        for name, shape in self._flat.items():
            self._paths |= {field: f"{name}.{path}" for field, path in shape._paths.items()}
            self._writes += shape._writes
        self._attributes_of = _getter(attrgetter, tuple(self._paths.values()))
        #: The fields of the record, in no particular order.
        self.names = frozenset(self._paths)

    def write(self, value: T) -> dict[str, Any]:
        """Return the datum of a value."""
        datum = dict(zip(self._paths, self._attributes_of(value), strict=True))
        for name, write in self._writes:
            datum[name] = write(datum[name])
        return datum

    def read(self, datum: Mapping[str, Any]) -> T:
        """Return the value of a datum, which also has what its key contains; raises BadRecord."""
        try:
            attributes = dict(zip(self._attributes, self._fields_of(datum), strict=True))
            for name, read in self._reads:
                attributes[name] = read(attributes[name])
            for name, shape in self._flat.items():
                attributes[name] = shape.read(datum)
            value = self.of(**attributes)
        except (InvalidRequest, InvalidEvent, ValueError) as exc:
            if not self._refused:
                raise
            raise BadRecord(self._refused, exc.message if isinstance(exc, KvStreamsError) else str(exc)) from exc
        if self._check is not None:
            self._check(value)
        return value

    def nested(self) -> Field:
        """A record of its own inside another one."""
        return Field(self.write, self.read)


def one_of(*shapes: Shape[Any]) -> Field:
    """A union of records, each named like its class. No two of them may have the same fields.

    fastavro does not return the union's branch, so a reader recognises it by its fields.
    """
    by_class = {shape.of: (_NAMESPACE + shape.of.__name__, shape.write) for shape in shapes}
    by_fields = {shape.names: shape.read for shape in shapes}

    def write(value: Any) -> tuple[str, dict[str, Any]]:
        name, write_branch = by_class[type(value)]
        return name, write_branch(value)

    return Field(write, lambda datum: by_fields[frozenset(datum)](datum))


def _check_rank(rank: RankId) -> None:
    # A greater rank would not fit in a key.
    if not 0 <= rank.dp_rank <= I32_MAX:
        raise BadRecord("bad_rank", f"data-parallel rank is {rank.dp_rank}")


RANK = Shape(RankId, check=_check_rank, worker_id=U64)
EPOCH = Shape(Epoch, incarnation=U64)


class RecordShape(Generic[T]):
    """Values of one class as the records of one schema.

    fast: returns the datum of an ordinary value in bytes, the same as fastavro's; None leaves the value to fastavro.
    """

    def __init__(self, schema: str, shape: Shape[T], *, fast: Callable[[T], bytes | None] | None = None) -> None:
        self.schema = schema
        self.shape = shape
        self._fast = fast

    @property
    def codec(self) -> RecordCodec:
        """The schema's frames."""
        return codec(self.schema)

    def encode(self, value: T) -> bytes:
        """Encode one record; raises KvStreamsError for a value that does not fit the schema."""
        datum = None if self._fast is None else self._fast(value)
        return self.encode_by_schema(value) if datum is None else self.codec.header + datum

    def encode_by_schema(self, value: T) -> bytes:
        """Encode one record with fastavro."""
        return codec(self.schema).encode(self.shape.write(value))

    def decode(self, raw: bytes | None, schema_ids: Mapping[str, int] | None = None, **of_key: Any) -> T:
        """Decode one record; raises BadRecord. of_key: the attributes that its key has."""
        datum = codec(self.schema).decode(raw, schema_ids)
        if of_key:
            datum.update(of_key)
        return self.shape.read(datum)


class NameKey(NamedTuple):
    """A key of a prefix and a name. what: the record that has it, for people."""

    prefix: bytes
    what: str

    def pack(self, name: str) -> bytes:
        """Return the key."""
        return self.prefix + name.encode(errors="replace")

    def parse(self, key: bytes) -> str:
        """Return the name in a key."""
        return key.removeprefix(self.prefix).decode(errors="replace")


class WorkerKey(NamedTuple):
    """A key of a prefix and a worker id in decimal digits. what: the record that has it, for people."""

    prefix: bytes
    what: str

    def pack(self, worker_id: WorkerId) -> bytes:
        """Return the key."""
        return self.prefix + str(worker_id).encode()

    def parse(self, key: bytes) -> WorkerId:
        """Return the worker in a key; raises BadRecord for any other key."""
        text = key.removeprefix(self.prefix)
        worker_id = WorkerId(int(text)) if text.isdigit() and len(text) <= _U64_DIGITS else None
        if worker_id is None or worker_id > U64_MASK or self.pack(worker_id) != key:
            raise BadRecord("bad_key", f"{key!r} is not {self.prefix!r} followed by a worker id")
        return worker_id


K = TypeVar("K", WorkerKey, NameKey)


class KeyedRecord(RecordShape[T], Generic[T, K]):
    """Records whose key is a prefix and one of their attributes; `keys` says which prefix, `name` which attribute."""

    def __init__(self, schema: str, shape: Shape[T], keys: K, name: str) -> None:
        super().__init__(schema, shape)
        self.keys: K = keys
        self._name = attrgetter(name)

    def decode_row(self, key: bytes, value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> T:
        """Decode one record; raises BadRecord, also if its key is not its own."""
        decoded = self.decode(value, schema_ids)
        name = self._name(decoded)
        if self.keys.pack(name) != key:
            self.keys.parse(key)  # refuses a key that no record can have
            raise BadRecord("wrong_key", f"key {key!r} is not that of {self.keys.what} {name}")
        return decoded


class FixedKey(Generic[T]):
    """A key of one letter and big-endian numbers, so that rows of one kind are adjacent in RocksDB."""

    def __init__(
        self, prefix: bytes, numbers: str, what: str, write: Callable[[T], Iterable[int]], read: Callable[..., T]
    ) -> None:
        """numbers: their widths as in `struct`. what: has such a key, for people.

        write: returns the numbers of a value. read: makes a value of its numbers; raises ValueError if there is none.
        """
        self.prefix = prefix
        self._struct = struct.Struct(f">c{numbers}")
        self._what = what
        self._write = write
        self._read = read
        self.n_bytes = self._struct.size

    def pack(self, value: T) -> bytes:
        """Return the key of a value."""
        return self._struct.pack(self.prefix, *self._write(value))

    def parse(self, raw: bytes) -> T:
        """Return the value of a key; raises BadRecord for any other key."""
        try:
            prefix, *numbers = self._struct.unpack(raw)
            value = self._read(*numbers)
        except (struct.error, ValueError) as exc:
            raise self.bad(raw) from exc
        if prefix != self.prefix:
            raise self.bad(raw)
        return value

    def bad(self, raw: bytes) -> BadRecord:
        """The error for a key of another kind."""
        return BadRecord("bad_key", f"{raw.hex()} is not the key of {self._what}")


def rank_key(prefix: bytes, what: str) -> FixedKey[RankId]:
    """Return the key of rows of which each rank has one."""
    return FixedKey(prefix, "QI", what, tuple, rank_of)


def rank_of(worker_id: int, dp_rank: int) -> RankId:
    """Return a rank by the numbers of a key."""
    return RankId(WorkerId(worker_id), DpRank(dp_rank))
