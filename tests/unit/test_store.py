"""The RocksDB of one partition: what is rebuilt, what is refused, and what is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.errors import TableError
from streams.process.waiting import wait_for
from streams.tables.store import ChangelogPosition, PartitionStore, TableSpec
from tests.helpers.raw_store import raw
from tests.helpers.small_disk import fill, small_disk_at
from tests.helpers.support import VISIBLE_TIMEOUT_S

CACHE_MB = 1
TABLE = TableSpec("table", 1, "changelog")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with small_disk_at(tmp_path / "disk") as path:
        yield path


def test_a_copy_of_another_scope_is_moved_aside(tmp_path: Path) -> None:
    """A copy that was made under another name is not taken for ours, and the other scope's own copy is left alone."""
    theirs = PartitionStore(tmp_path / "theirs-kvstreams-0", "theirs-kvstreams-0", CACHE_MB)
    theirs.write({TABLE: [(b"key", b"value")]}, {})
    theirs.close()
    shutil.copytree(theirs.path, tmp_path / "ours-kvstreams-0")
    ours = PartitionStore(tmp_path / "ours-kvstreams-0", "ours-kvstreams-0", CACHE_MB)
    assert list(ours.items(TABLE)) == []
    ours.close()
    assert raw(tmp_path / "ours-kvstreams-0.damaged")[b"\x01key"] == b"value"
    again = PartitionStore(theirs.path, "theirs-kvstreams-0", CACHE_MB)
    assert list(again.items(TABLE)) == [(b"key", b"value")]
    again.close()


def test_a_store_that_cannot_be_flushed_raises_and_keeps_its_contents(small_disk: Path) -> None:
    """Once there is space again, the same handle continues, and a new handle finds everything that was written."""
    store = PartitionStore(small_disk / "store", "scope", 8)
    store.write({TABLE: [(b"first", b"1")]}, {})
    store.flush()
    ballast = small_disk / "ballast"
    fill(ballast)
    store.write({TABLE: [(b"second", bytes(64 * 1024))]}, {})
    with pytest.raises(TableError, match="the system refuses") as refused:
        store.flush()
    assert "Free space there" in refused.value.remedy
    ballast.unlink()

    def continues() -> bool:
        try:
            store.write({TABLE: [(b"third", b"3")]}, {})
            store.flush()
        except TableError:
            return False  # RocksDB itself checks for space from time to time
        return True

    wait_for(continues, VISIBLE_TIMEOUT_S, "the store to continue")
    store.close()
    again = PartitionStore(small_disk / "store", "scope", 8)
    assert [key for key, _ in again.items(TABLE)] == [b"first", b"second", b"third"]
    again.close()


def test_a_position_is_stored_as_json_with_its_time(tmp_path: Path) -> None:
    """The fields of the JSON object are those of ChangelogPosition."""
    store = PartitionStore(tmp_path / "store", "store", CACHE_MB)
    store.write({}, {TABLE: ChangelogPosition("id", 7, 123)})
    assert store.position(TABLE) == ChangelogPosition("id", 7, 123)
    store.close()
    text = raw(tmp_path / "store")[b"\x00changelog:\x01"]
    assert text == b'{"topic_id": "id", "next_offset": 7, "as_of_ms": 123}'
