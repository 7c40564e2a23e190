"""A ring of frames in shared memory: one process writes records of `router-loads`, its processes read them.

What lives here: the layout of the memory, and writing and reading a frame. What must not: Kafka, threads, clocks (time
is an argument), and what a record means (load_records). The writer owns the memory. Readers map it read-only, so that
none of them can disturb another, and each has a position of its own.

    header cells, int64 each:  magic, capacity, partitions, data begins at, position, epoch, heartbeat, state, digest of
                               the topic's id
    from cell 16 on:           for each partition the offset from which the ring covers it (-1 until that is known),
                               then for each partition the offset up to which the writer has read it
    data:                      frames, one after the other, over the end of the data to its beginning

A position is the number of bytes that were ever written, so that it only grows. A frame has a head (the payload's
length and checksum), then the payload, then zeros up to a multiple of 16 bytes. The writer stores the position after
the frame. Python has no memory barriers, so a processor may show another one the position before the frame: the
checksum, whose seed is the frame's position, does not fit then, and the reader looks again later. The same happens
while the writer overwrites a frame that is being read.

    payload:  number of records, number of spans (i32), time of reading in ms (i64)
              spans:    partition, first offset, offset after the last one, and where the span before it in an earlier
                        frame ended (i64 each); one for each partition in it
              headers:  the columns of LoadBatch.places, i64 each
              for each record its key, then its value; then eight zeros
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from streams.load_batches import N_COLUMNS, PADDING, LoadBatch

#: Bytes of frames that the ring holds. At 1,000 bookings per second of prompts of 8,000 tokens, a reader may pause for
#: 7 s before it is overtaken; then it reads Kafka. The system provides the memory when it is first written.
CAPACITY = 32 * 1024 * 1024

#: A frame has at most this share of the ring, so that a reader has time to copy it.
_FRAME_SHARE = 4

_MAGIC = 0x6B76_7374_7269_6E67
_MAGIC_AT, _CAPACITY_AT, _PARTITIONS_AT, _DATA_AT, POSITION_AT = range(5)
_EPOCH_AT, _HEARTBEAT_AT, _STATE_AT, _TOPIC_AT = range(5, 9)
_COVERED_AT = 16
_CELL_BYTES = 8
_PAGE_BYTES = 4096

_RUNNING, _CLOSED = 1, 2

#: F_SEAL_FUTURE_WRITE of Linux 5.1, which Python does not name.
_SEAL_FUTURE_WRITE = 0x10

_HEAD = struct.Struct("=qQ")
_ALIGNED = 16
_SEED_MASK = (1 << 64) - 1

_COUNTS = struct.Struct("=iiq")
_SPAN = struct.Struct("=qqqq")
_HEADER = struct.Struct(f"={N_COLUMNS}q")


class RingRecord(NamedTuple):
    """One record of a partition. value: None for a tombstone."""

    partition: int
    offset: int
    append_ms: int
    key: bytes
    value: bytes | None


class Span(NamedTuple):
    """What a frame has of one partition: its first offset, and the one after its last.

    follows: the end of the partition's span in an earlier frame, or the offset from which the ring covers it. A reader
    that has not read up to there lacks records. `first` may be greater: offsets of markers are in no frame.
    """

    partition: int
    first: int
    end: int
    follows: int


class Frame:
    """Records that were read together, as one buffer.

    spans: in no order. read_ms: when the writer read them, by the monotonic clock that all processes of a machine have.
    """

    __slots__ = ("_batch", "_headers_at", "n_records", "payload", "read_ms", "spans")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self._batch: LoadBatch | None = None
        self.n_records: int
        self.n_records, n_spans, self.read_ms = _COUNTS.unpack_from(payload)
        self._headers_at = _COUNTS.size + n_spans * _SPAN.size
        self.spans = [Span(*each) for each in _SPAN.iter_unpack(payload[_COUNTS.size : self._headers_at])]

    def records(self) -> list[RingRecord]:
        """All records as objects."""
        found = []
        for number, (*_, offset) in enumerate(self.batch().places.tolist()):
            key, value, append_ms, partition = self.batch().record(number)
            found.append(RingRecord(partition, offset, append_ms, key, value))
        return found

    def batch(self) -> LoadBatch:
        """All records in this buffer."""
        if self._batch is None:
            places = np.frombuffer(self.payload, np.int64, self.n_records * N_COLUMNS, self._headers_at)
            self._batch = LoadBatch(self.payload, places.reshape(-1, N_COLUMNS))
        return self._batch


def encode_frame(
    records: Sequence[tuple[int, int, int, bytes, bytes | None]], read_ms: int, follows: Mapping[int, int]
) -> bytes:
    """The payload of a frame. records: fields of RingRecord; those of a partition are in the order of their offsets.

    follows: of each partition in it, what Span has.
    """
    firsts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for partition, offset, _, _, _ in records:
        if partition not in firsts:
            firsts[partition] = offset
        ends[partition] = offset + 1
    spans = [_SPAN.pack(partition, first, ends[partition], follows[partition]) for partition, first in firsts.items()]
    parts = [_COUNTS.pack(len(records), len(spans), read_ms), *spans]
    at = _COUNTS.size + len(spans) * _SPAN.size + len(records) * _HEADER.size
    bodies = []
    pack = _HEADER.pack
    for partition, offset, append_ms, key, value in records:
        begin = at + len(key)
        bodies.append(key)
        if value is None:
            parts.append(pack(begin, -1, append_ms, partition, at, offset))
            at = begin
        else:
            end = begin + len(value)
            parts.append(pack(begin, end, append_ms, partition, at, offset))
            bodies.append(value)
            at = end
    return b"".join((*parts, *bodies, PADDING))


def encoded_bytes(key: bytes, value: bytes | None) -> int:
    """At most how many bytes a record adds to a payload."""
    return _SPAN.size + _HEADER.size + len(key) + (0 if value is None else len(value))


def _frame_bytes(payload_bytes: int) -> int:
    return -(-(_HEAD.size + payload_bytes) // _ALIGNED) * _ALIGNED


def _checksum(payload: bytes, position: int) -> int:
    return xxhash.xxh3_64_intdigest(payload, position & _SEED_MASK)


def _topic_digest(topic_id: str) -> int:
    return xxhash.xxh3_64_intdigest(topic_id.encode()) >> 1


def _shared_memory(n_bytes: int) -> int:
    """A file descriptor of memory without a name, which is gone as soon as no process has it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("kvstreams-bookings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, n_bytes)
        _seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux
        file.write(bytes(n_bytes))  # not sparse: a full disk would end the process that writes to the memory later
        file.flush()
        return os.dup(file.fileno())


def _seal(fd: int, seals: int) -> None:
    """Let no process change the memory in these ways any more, whatever its descriptor allows."""
    with contextlib.suppress(OSError):  # an older kernel, or memory that is a file
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


class RingWriter:
    """Owner of the memory. All calls come from one thread."""

    def __init__(self, n_partitions: int, capacity: int = CAPACITY) -> None:
        """capacity: a multiple of 16 bytes. Raises OSError if the system provides no shared memory."""
        assert capacity % _ALIGNED == 0
        self._capacity = capacity
        self._n_partitions = n_partitions
        header_bytes = (_COVERED_AT + 2 * n_partitions) * _CELL_BYTES
        self._data_at = -(-header_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.fd = _shared_memory(self._data_at + capacity)
        self._map = mmap.mmap(self.fd, self._data_at + capacity)
        _seal(self.fd, _SEAL_FUTURE_WRITE)  # this map alone can be written from now on
        # An element of such a view is stored in one step, which a reader sees either before or after it.
        self._cells = memoryview(self._map)[: self._data_at].cast("q")
        self._position = 0
        cells = self._cells
        cells[_CAPACITY_AT], cells[_PARTITIONS_AT], cells[_DATA_AT] = capacity, n_partitions, self._data_at
        for partition in range(n_partitions):
            cells[_COVERED_AT + partition] = -1
        cells[_STATE_AT] = _RUNNING
        cells[_MAGIC_AT] = _MAGIC

    @property
    def payload_bytes_max(self) -> int:
        """The longest payload that `write` takes."""
        return self._capacity // _FRAME_SHARE - _HEAD.size

    @property
    def position(self) -> int:
        """The number of bytes that were ever written."""
        return self._position

    def write(self, payload: bytes) -> None:
        """Append a frame, and then let readers know of it."""
        assert 0 < len(payload) <= self.payload_bytes_max
        position, n_bytes = self._position, _frame_bytes(len(payload))
        frame = _HEAD.pack(len(payload), _checksum(payload, position)) + payload
        begin = position % self._capacity
        until_end = self._capacity - begin
        at = self._data_at + begin
        if len(frame) <= until_end:
            self._map[at : at + len(frame)] = frame
        else:
            self._map[at : at + until_end] = frame[:until_end]
            self._map[self._data_at : self._data_at + len(frame) - until_end] = frame[until_end:]
        self._position = position + n_bytes
        self._cells[POSITION_AT] = self._position

    def beat(self, now_ns: int) -> None:
        """Note that the writer runs."""
        self._cells[_HEARTBEAT_AT] = now_ns

    def note_topic(self, topic_id: str) -> None:
        """Note of which topic the records are that will be written. Called before any partition is covered."""
        self._cells[_TOPIC_AT] = _topic_digest(topic_id)

    def cover(self, partition: int, offset: int) -> None:
        """Note that every record of a partition from this offset on will be written."""
        self.note_read(partition, offset)
        self._cells[_COVERED_AT + partition] = offset

    def note_read(self, partition: int, offset: int) -> None:
        """Note that every record of a partition up to this offset was written, if it is covered."""
        self._cells[_COVERED_AT + self._n_partitions + partition] = offset

    def begin_epoch(self) -> None:
        """Note that the topic was truncated or recreated: no partition is covered, and readers must begin anew."""
        for partition in range(self._n_partitions):
            self._cells[_COVERED_AT + partition] = -1
        self._cells[_EPOCH_AT] += 1

    def close(self) -> None:
        """Note that nothing more will be written. The memory stays until all processes are gone."""
        self._cells[_STATE_AT] = _CLOSED


class RingReader:
    """One reader. Not thread-safe.

    position: up to where it has read. overtaken: whether the writer has overwritten what comes next; `seek` ends that.
    """

    def __init__(self, fd: int) -> None:
        """Raises OSError or ValueError if the descriptor is not that of a ring."""
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        self._data = memoryview(self._map)
        cells = self._data[: size // _CELL_BYTES * _CELL_BYTES].cast("q")
        if len(cells) < _COVERED_AT or cells[_MAGIC_AT] != _MAGIC:
            raise ValueError("this is not a ring of bookings")
        self._capacity, self._data_at = cells[_CAPACITY_AT], cells[_DATA_AT]
        self.n_partitions = cells[_PARTITIONS_AT]
        if size != self._data_at + self._capacity:
            raise ValueError("this ring of bookings has another size")
        self._cells = cells
        self.position = 0
        self.overtaken = False

    @property
    def written(self) -> int:
        """The writer's position."""
        return self._cells[POSITION_AT]

    @property
    def epoch(self) -> int:
        """How often the topic was truncated or recreated."""
        return self._cells[_EPOCH_AT]

    def is_of(self, topic_id: str) -> bool:
        """Whether the records are of this topic, and not of one that had its name."""
        return self._cells[_TOPIC_AT] == _topic_digest(topic_id)

    @property
    def heartbeat_ns(self) -> int:
        """When the writer last ran, by the monotonic clock; 0 if it did not yet."""
        return self._cells[_HEARTBEAT_AT]

    @property
    def closed(self) -> bool:
        """Whether nothing more will be written."""
        return self._cells[_STATE_AT] != _RUNNING

    def covered_from(self) -> list[int]:
        """For each partition the offset from which on its records are written; -1 if that is not known yet."""
        return self._cells[_COVERED_AT : _COVERED_AT + self.n_partitions].tolist()

    def read_to(self) -> list[int]:
        """For each partition the offset up to which the writer has read it; 0 before it has read any."""
        begin = _COVERED_AT + self.n_partitions
        return self._cells[begin : begin + self.n_partitions].tolist()

    def has_news(self) -> bool:
        """Whether the writer has written more than was read. Every decision asks; it takes 0.1 us."""
        return self._cells[POSITION_AT] != self.position

    def seek(self, position: int) -> bool:
        """Read from a position that the writer had; returns False if it has been overwritten already."""
        self.position = position
        self.overtaken = self.written - position > self._capacity
        return not self.overtaken

    def read(self) -> bytes | None:
        """The payload of the next frame; None if there is none, if it is not complete yet, or if it was overwritten."""
        position, written = self.position, self.written
        if written == position or self.overtaken:
            return None
        begin = position % self._capacity
        length, checksum = _HEAD.unpack_from(self._data, self._data_at + begin)
        payload = None
        if 0 < length <= written - position - _HEAD.size:
            start = begin + _HEAD.size
            at = self._data_at + start
            until_end = self._capacity - start
            if length <= until_end:
                payload = self._map[at : at + length]
            else:
                rest = self._data_at + length - until_end
                payload = self._map[at : at + until_end] + self._map[self._data_at : rest]
        # After the copy: what was overwritten meanwhile may have a checksum that fits by chance.
        if self.written - position > self._capacity:
            self.overtaken = True
            return None
        if payload is None or _checksum(payload, position) != checksum:
            return None
        self.position = position + _frame_bytes(length)
        return payload
