"""One partition's tables on local disk: a RocksDB that may be deleted at any time, since the changelogs rebuild it.

What lives here: opening, reading and writing. What must not: deciding what is written. One WriteBatch contains values
and the changelog offsets from which they come, so the two never disagree. RocksDB's own log is off, since the changelog
serves as the log: what a crash loses is read again from the store's position. Owner: the partition's thread.

State: the local copy, which can always be deleted.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rocksdict import BlockBasedOptions, Cache, MemtableFactory, Options, Rdict, WriteBatch, WriteOptions

from streams.errors import TableError
from streams.tables.records import Change

log = logging.getLogger(__name__)

#: The layout of the keys below; a store with another number is deleted and rebuilt.
STORE_VERSION = 2

_META = b"\x00"
_VERSION = _META + b"version"
_SCOPE = _META + b"scope"
_WRITE_BUFFER_BYTES = 8 * 1024 * 1024

#: RocksDB's message if another handle has the folder open, matched from its start: "block checksum mismatch" also
#: contains "lock".
_LOCKED = re.compile(r"IO error: (While lock file|lock hold by current process)", re.IGNORECASE)

#: Messages of errors that are not a fault of the files. If the files were deleted, they could not be written again.
_REFUSED = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Permission denied|Read-only file system|"
    "Too many open files|Cannot allocate memory|Input/output error"
)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table. store_id: the first byte of its keys on disk, 1 to 255, never reused for another table."""

    name: str
    store_id: int
    changelog_topic: str


#: Changed rows by table, in the order in which readers must see them.
Changes = Mapping[TableSpec, Sequence[Change]]


@dataclass(frozen=True, slots=True)
class ChangelogPosition:
    """The offset up to which a changelog is in the store. topic_id: identifies a recreated topic of the same name.

    as_of_ms: wall clock of the last time that the store was at the changelog's end. The changelog shows later deletions
    only for as long as it keeps tombstones.
    """

    topic_id: str
    next_offset: int
    as_of_ms: int


class PartitionStore:
    """The RocksDB of one partition, with all its tables. scope: a store that names another scope is moved aside."""

    def __init__(self, path: Path, scope: str, cache_mb: int) -> None:
        self.path = path
        self._scope = scope
        self._cache_mb = cache_mb
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]  # its stubs declare a method
        self._db = self._open()
        try:
            self._check()
        except TableError:
            self.close()
            raise
        except Exception as exc:
            if refusal(exc):
                self.close()
                raise self._refused(exc) from exc
            self.rebuild(f"it cannot be read: {exc}", aside=True)

    def _check(self) -> None:
        """Check that the files were written by this version for this scope, and start empty if they were not."""
        version, scope = self._db.get(_VERSION), self._db.get(_SCOPE)
        ours = str(STORE_VERSION).encode(), self._scope.encode()
        if version is None and next(self._pairs(b""), None) is None:
            self._sign()
        elif version != ours[0]:
            self.rebuild(f"its layout is version {(version or b'none').decode()}, ours {STORE_VERSION}")
        elif scope != ours[1]:
            self.rebuild(
                f"it was made for {(scope or b'an unknown scope').decode()}, not for {self._scope}", aside=True
            )

    def position(self, table: TableSpec) -> ChangelogPosition | None:
        """The position of the table's changelog in the store; None before the first write."""
        raw = self._db.get(_position_key(table))
        return None if raw is None else ChangelogPosition(**json.loads(raw))

    def get(self, table: TableSpec, key: bytes) -> bytes | None:
        """Read one row."""
        value = self._db.get(bytes([table.store_id]) + key)
        assert value is None or isinstance(value, bytes)  # raw mode has no other types
        return value

    def items(self, table: TableSpec) -> Iterator[tuple[bytes, bytes]]:
        """Yield every row of a table, in order of keys; raises if the files cannot be read."""
        prefix = bytes([table.store_id])
        return ((key[1:], value) for key, value in self._pairs(prefix))

    def write(self, changes: Changes, positions: Mapping[TableSpec, ChangelogPosition]) -> None:
        """Write rows and the changelogs' positions after them in one WriteBatch; only `flush` makes it durable."""
        batch = WriteBatch(raw_mode=True)
        for table, records in changes.items():
            prefix = bytes([table.store_id])
            for key, value in records:
                if value is None:
                    batch.delete(prefix + key)
                else:
                    batch.put(prefix + key, value)
        for table, position in positions.items():
            batch.put(_position_key(table), json.dumps(asdict(position)).encode())
        self._attempt(lambda: self._db.write(batch, self._unlogged))

    def flush(self) -> None:
        """Make everything that was written durable."""
        self._attempt(self._db.flush)

    def rebuild(self, reason: str, aside: bool = False) -> None:
        """Start empty, and log the reason; the changelogs restore the rows. aside: keep the old files in `.damaged`."""
        self.close()
        if aside:
            log.warning("%s is rebuilt, its old files are in %s: %s", self.path, self._move_aside(), reason)
        else:
            log.warning("%s is rebuilt: %s", self.path, reason)
            shutil.rmtree(self.path)
        self._db = self._open()
        self._sign()

    def close(self) -> None:
        """Release the folder's lock."""
        try:
            self._db.close()
        except Exception as exc:  # the changelog has anything that could not be written
            log.warning("%s was not closed cleanly: %s", self.path, exc)

    def _sign(self) -> None:
        self._db[_SCOPE] = self._scope.encode()
        self._db[_VERSION] = str(STORE_VERSION).encode()

    def _pairs(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys with a prefix, and their values.

        A damaged block ends RocksDB's iterator just as the last key does, so its status is checked at the end.
        """
        rows = self._db.iter()
        rows.seek(prefix)
        while rows.valid():
            key, value = rows.key(), rows.value()
            assert isinstance(key, bytes) and isinstance(value, bytes)  # raw mode has no other types
            if not key.startswith(prefix):
                return
            yield key, value
            rows.next()
        rows.status()

    def _move_aside(self) -> Path:
        aside = self.path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.path.rename(aside)
        return aside

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as exc:
            if refusal(exc):
                raise self._refused(exc) from exc
            raise

    def _refused(self, exc: Exception) -> TableError:
        return TableError(
            f"the system refuses access to {self.path}: {exc}",
            remedy="Free space there, or set data_dir to a folder that this user may write; nothing was deleted",
        )

    def _open(self) -> Rdict:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        # Rows are read only when a partition is opened, so they are sorted when a buffer is written out, on RocksDB's
        # thread, and not at every write. This saves a third of the time of a write.
        options.set_memtable_factory(MemtableFactory.vector())
        options.set_allow_concurrent_memtable_write(False)  # a vector memtable does not support it
        options.set_max_background_jobs(1)
        blocks = BlockBasedOptions()
        # By default each RocksDB would take a block cache of 2 GiB.
        blocks.set_block_cache(Cache(self._cache_mb * 1024 * 1024))
        options.set_block_based_table_factory(blocks)
        try:
            return Rdict(str(self.path), options)
        except Exception as exc:
            if _LOCKED.match(str(exc)):
                raise TableError(
                    f"{self.path} is in use: {exc}",
                    remedy="Another process uses this data_dir; each process needs its own",
                ) from exc
            if refusal(exc):
                raise self._refused(exc) from exc
            try:
                aside = self._move_aside()
                log.warning("%s is rebuilt, its old files are in %s: it cannot be opened: %s", self.path, aside, exc)
                return Rdict(str(self.path), options)
            except Exception as again:
                raise TableError(
                    f"{self.path} cannot be created: {again}",
                    remedy="Check the disk, and that this user may write there",
                ) from again


def refusal(exc: Exception) -> bool:
    """Whether the system refused access, as opposed to damaged files."""
    return bool(_REFUSED.search(str(exc)))


def _position_key(table: TableSpec) -> bytes:
    return _META + b"changelog:" + bytes([table.store_id])
