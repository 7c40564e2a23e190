"""The ring of bookings in shared memory: what readers see while the writer goes on, in one process and in two."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.load_batches import OFFSET, PADDING
from streams.router_api import booking_ring
from streams.router_api.booking_ring import (
    CAPACITY,
    POSITION_AT,
    Frame,
    RingReader,
    RingRecord,
    RingWriter,
    Span,
    encode_frame,
    encoded_bytes,
)

#: The head of a frame, and the bytes to a multiple of which it is filled.
HEAD = 16
FILLED = 16


def pair(capacity: int = 1024, n_partitions: int = 3) -> tuple[RingWriter, RingReader]:
    writer = RingWriter(n_partitions, capacity)
    return writer, RingReader(writer.fd)


def frame_bytes(payload: bytes) -> int:
    return -(-(HEAD + len(payload)) // FILLED) * FILLED


records = st.lists(
    st.builds(
        RingRecord,
        st.integers(0, 3),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 44),
        st.binary(max_size=40),
        st.none() | st.binary(max_size=40),
    ),
    min_size=1,
    max_size=8,
)

#: Where each partition's span in an earlier frame ended.
FOLLOWS = {0: 7, 1: 0, 2: 1 << 40, 3: 5}


@given(given=records, read_ms=st.integers(0, 1 << 50))
def test_a_frame_gives_back_its_records_one_by_one_and_as_a_batch(given: list[RingRecord], read_ms: int) -> None:
    """Records, tombstones and empty keys included, the spans of partitions, and the form that kernels read."""
    payload = encode_frame(given, read_ms, FOLLOWS)
    frame = Frame(payload)
    assert (frame.records(), frame.read_ms, frame.n_records) == (given, read_ms, len(given))
    batch = frame.batch()
    found = [batch.part(1, len(given)).record(number) for number in range(len(given) - 1)]
    assert found == [(each.key, each.value, each.append_ms, each.partition) for each in given[1:]]
    assert payload.endswith(PADDING)
    assert batch.places[:, OFFSET].tolist() == [each.offset for each in given]
    for partition in {record.partition for record in given}:
        offsets = [record.offset for record in given if record.partition == partition]
        assert Span(partition, offsets[0], offsets[-1] + 1, FOLLOWS[partition]) in frame.spans
    assert len(payload) <= HEAD + len(PADDING) + sum(encoded_bytes(each.key, each.value) for each in given)


@given(
    steps=st.lists(st.tuples(st.integers(1, 240), st.integers(0, 3)), min_size=1, max_size=80),
    capacity=st.sampled_from([1024, 1040, 4096]),
)
def test_a_reader_gets_every_frame_in_order_unless_it_is_overtaken(steps: list[tuple[int, int]], capacity: int) -> None:
    """Frames of any length, at any place of the ring. A reader is overtaken exactly if more than the ring is unread."""
    writer, reader = pair(capacity)
    unread: deque[bytes] = deque()
    try:
        for number, (n_bytes, n_reads) in enumerate(steps):
            payload = bytes([number % 256]) * n_bytes
            writer.write(payload)
            unread.append(payload)
            for _ in range(n_reads):
                is_overtaken = sum(map(frame_bytes, unread)) > capacity
                found = reader.read()
                assert reader.overtaken is is_overtaken
                if is_overtaken:
                    assert found is None
                    assert reader.seek(writer.position)
                    unread.clear()
                else:
                    assert found == (unread.popleft() if unread else None)
            assert reader.has_news() is bool(unread)
    finally:
        os.close(writer.fd)


def test_a_frame_may_begin_at_every_place_of_the_ring() -> None:
    """Frames that end at the end of the data, or go on at its beginning, are read as they were written."""
    writer, reader = pair(256)
    for number in range(64):
        payload = bytes([number]) * (17 + number % 31)
        writer.write(payload)
        assert reader.read() == payload


def test_a_frame_that_is_not_complete_yet_is_read_later() -> None:
    """While any byte of a frame differs, it is not read; then it is, and nothing was skipped."""
    writer, reader = pair()
    writer.write(b"first" * 9)
    at = writer._data_at
    for n in range(HEAD + 45):
        right = writer._map[at + n]
        writer._map[at + n] = right ^ 0x55
        assert reader.read() is None
        assert reader.has_news()
        writer._map[at + n] = right
    assert not reader.overtaken
    assert reader.read() == b"first" * 9


def test_an_older_frame_at_the_same_place_is_not_taken_for_a_new_one() -> None:
    """If the position is seen before the frame, an older frame of the same length is there, with its own checksum."""
    writer, reader = pair(256)
    for number in range(4):  # four frames fill the ring
        writer.write(bytes([number]) * 48)
        assert reader.read() == bytes([number]) * 48
    writer._cells[POSITION_AT] = writer.position + 64
    assert reader.read() is None
    writer.write(b"x" * 48)
    assert reader.read() == b"x" * 48


def test_a_frame_that_is_overwritten_while_it_is_copied_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader notices after the copy that the writer has come round, whatever the checksum says."""
    writer = RingWriter(1, 256)
    writer.write(b"a" * 48)
    head = bytes(writer._map[writer._data_at : writer._data_at + HEAD])

    def checksum(*_: object) -> int:
        return int(booking_ring._HEAD.unpack(head)[1])

    class Slow(RingReader):
        looks = 0

        @property
        def written(self) -> int:
            self.looks += 1
            if self.looks == 2:  # after the copy
                for _ in range(4):
                    writer.write(b"b" * 48)
            return super().written

    reader = Slow(writer.fd)
    monkeypatch.setattr(booking_ring, "_checksum", checksum)
    assert reader.read() is None
    assert reader.overtaken


def test_a_reader_cannot_write() -> None:
    """The memory of a reader is read-only."""
    _, reader = pair()
    with pytest.raises(TypeError):
        reader._cells[POSITION_AT] = 1
    with pytest.raises(TypeError):
        reader._map[0:1] = b"x"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory that can be sealed")
def test_no_other_process_can_change_the_memory_through_its_descriptor() -> None:
    """Its size stays, and nothing but the writer's own map can be written."""
    writer, reader = pair()
    writer.write(b"x")
    for n_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, n_bytes)
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, os.fstat(writer.fd).st_size)
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"x", 0)
    assert reader.read() == b"x"


def test_what_the_writer_notes_reaches_readers() -> None:
    """Coverage, progress, epochs, heartbeats and the end."""
    writer, reader = pair()
    assert (reader.covered_from(), reader.read_to(), reader.epoch) == ([-1] * 3, [0] * 3, 0)
    assert not reader.heartbeat_ns
    assert not reader.closed
    for partition, offset in enumerate([4, 0, 9]):
        writer.cover(partition, offset)
    writer.note_read(1, 3)
    writer.beat(12345)
    assert (reader.covered_from(), reader.read_to(), reader.heartbeat_ns) == ([4, 0, 9], [4, 3, 9], 12345)
    writer.begin_epoch()
    assert (reader.covered_from(), reader.epoch) == ([-1] * 3, 1)
    writer.close()
    assert reader.closed


def test_only_a_ring_is_read() -> None:
    """Memory of another size or content is refused."""
    for content in (b"", bytes(8192)):
        fd = os.memfd_create("other")
        os.write(fd, content)
        with pytest.raises((OSError, ValueError)):
            RingReader(fd)
        os.close(fd)


def test_without_memfd_the_memory_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On systems that have no memfd_create, the ring is in a temporary file that is gone already."""
    monkeypatch.delattr(os, "memfd_create")
    writer, reader = pair()
    writer.write(b"x")
    assert reader.read() == b"x"
    assert os.fstat(writer.fd).st_nlink == 0


#: Writes frames of growing numbers as fast as it can, in bursts; the last one is shorter.
WRITING = """
import sys, time
import numpy as np
from streams.router_api import booking_ring
fd, capacity, n_frames, burst = map(int, sys.argv[1:])
booking_ring._shared_memory = lambda n_bytes: fd
writer = booking_ring.RingWriter(1, capacity)
for number in range(n_frames):
    writer.write(np.full(1 + number * 7919 % 400, number, dtype=np.uint32).tobytes())
    if number % burst == burst - 1:
        time.sleep(0.001)
writer.close()
"""


@pytest.mark.parametrize(("capacity", "burst"), [(CAPACITY, 20), (16_384, 10)])
def test_a_reader_in_another_process_never_reads_a_wrong_frame(capacity: int, burst: int) -> None:
    """Every frame that is read is as it was written. None is missing in a large ring; a small one is overtaken."""
    n_frames = 20_000
    fd = os.memfd_create("ring")
    os.ftruncate(fd, capacity + 4096)
    program = [sys.executable, "-c", WRITING, str(fd), str(capacity), str(n_frames), str(burst)]
    with subprocess.Popen(program, pass_fds=[fd]) as writing:
        reader = None
        while reader is None:
            try:
                reader = RingReader(fd)
            except ValueError:
                time.sleep(0.001)
        expected, n_read, n_overtaken = 0, 0, 0
        while True:
            closed = reader.closed
            payload = reader.read()
            if payload is not None:
                numbers = np.frombuffer(payload, dtype=np.uint32)
                number = int(numbers[0])
                assert len(numbers) == 1 + number * 7919 % 400
                assert (numbers == number).all()
                assert number == expected if not n_overtaken else number >= expected
                expected, n_read = number + 1, n_read + 1
                if capacity < CAPACITY and n_read % 50 == 0:
                    time.sleep(0.02)  # the writer goes round meanwhile
            elif reader.overtaken:
                n_overtaken += 1
                reader.seek(reader.written)
            elif closed:
                break
    assert writing.returncode == 0
    os.close(fd)
    if capacity == CAPACITY:
        assert (n_read, n_overtaken) == (n_frames, 0)
    else:
        assert n_overtaken
        assert n_read
