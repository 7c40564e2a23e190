"""One partition's tables on local disk: a RocksDB that may always be thrown away, since the changelogs rebuild it.

What lives here: opening, reading and writing. What must not: deciding what is written. Values and the changelog offsets
that they came from go down in one WriteBatch, so the two never disagree. RocksDB keeps no log: it is the changelog that
does, and what is lost with the process is read again from where the store stands. Owner: the partition's thread.
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

#: Layout of the keys below; another number on disk is thrown away and rebuilt.
STORE_VERSION = 2

_META = b"\x00"
_VERSION = _META + b"version"
_SCOPE = _META + b"scope"
_WRITE_BUFFER_BYTES = 8 * 1024 * 1024

#: How RocksDB says that another handle has the folder. From the start: "block checksum mismatch" has a lock in it too.
_LOCKED = re.compile(r"IO error: (While lock file|lock hold by current process)", re.IGNORECASE)

#: What the system refuses is no fault of the files: thrown away they could not even be written again.
_REFUSED = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Permission denied|Read-only file system|"
    "Too many open files|Cannot allocate memory|Input/output error"
)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table. store_id: first byte of its keys on disk, 1 to 255, never used again for another table."""

    name: str
    store_id: int
    changelog_topic: str


#: Changed records of tables, each table's in the order in which readers are to see them.
Changes = Mapping[TableSpec, Sequence[Change]]


@dataclass(frozen=True, slots=True)
class ChangelogPosition:
    """Up to where a changelog is in the store; topic_id tells a recreated topic of the same name.

    as_of_ms: wall clock when the store was last known to stand at the changelog's end. Of what was deleted since, the
    changelog tells only for as long as it keeps tombstones.
    """

    topic_id: str
    next_offset: int
    as_of_ms: int


class PartitionStore:
    """The RocksDB of one partition, all tables in it. scope: what it is made for; another one's is moved aside."""

    def __init__(self, path: Path, scope: str, cache_mb: int) -> None:
        self.path = path
        self._scope = scope
        self._cache_mb = cache_mb
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]  # its stubs say a method
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
        """See whether what lies here is ours to go on with."""
        version, scope = self._db.get(_VERSION), self._db.get(_SCOPE)
        ours = str(STORE_VERSION).encode(), self._scope.encode()
        if version is None and next(self._pairs(b""), None) is None:
            self._sign()
        elif version != ours[0]:
            self.rebuild(f"its layout is version {(version or b'none').decode()}, ours {STORE_VERSION}")
        elif scope != ours[1]:
            self.rebuild(f"it was made for {(scope or b'nobody').decode()}, not for {self._scope}", aside=True)

    def position(self, table: TableSpec) -> ChangelogPosition | None:
        """Up to where the table's changelog is in the store; None before the first write."""
        raw = self._db.get(_position_key(table))
        return None if raw is None else ChangelogPosition(**json.loads(raw))

    def items(self, table: TableSpec) -> Iterator[tuple[bytes, bytes]]:
        """Every record of a table, in order of keys; raises where the files cannot be read."""
        prefix = bytes([table.store_id])
        return ((key[1:], value) for key, value in self._pairs(prefix))

    def write(self, changes: Changes, positions: Mapping[TableSpec, ChangelogPosition]) -> None:
        """Apply records, and where the changelogs stand behind them, in one WriteBatch; `flush` makes it last."""
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
        self._asking(lambda: self._db.write(batch, self._unlogged))

    def flush(self) -> None:
        """Make what was written last."""
        self._asking(self._db.flush)

    def rebuild(self, reason: str, aside: bool = False) -> None:
        """Begin empty, and say why; the changelogs bring everything back. aside: what was here is kept beside it."""
        self.close()
        if aside:
            log.warning("%s is rebuilt, what was there is in %s: %s", self.path, self._move_aside(), reason)
        else:
            log.warning("%s is rebuilt: %s", self.path, reason)
            shutil.rmtree(self.path)
        self._db = self._open()
        self._sign()

    def close(self) -> None:
        """Release the folder's lock."""
        try:
            self._db.close()
        except Exception as exc:  # what could not be written at last is in the changelog
            log.warning("%s was not closed well: %s", self.path, exc)

    def _sign(self) -> None:
        self._db[_SCOPE] = self._scope.encode()
        self._db[_VERSION] = str(STORE_VERSION).encode()

    def _pairs(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys with a prefix, and values; a damaged block ends RocksDB's iterator as the end does, so it is asked."""
        found = self._db.iter()
        found.seek(prefix)
        while found.valid():
            key, value = found.key(), found.value()
            assert isinstance(key, bytes) and isinstance(value, bytes)  # in raw mode there is nothing else
            if not key.startswith(prefix):
                return
            yield key, value
            found.next()
        found.status()

    def _move_aside(self) -> Path:
        aside = self.path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.path.rename(aside)
        return aside

    def _asking(self, write: Callable[[], object]) -> None:
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
        # What is written is read when a partition is opened and never before, so it is put in order when a buffer is
        # written out, on RocksDB's thread, and not at every write: a third of the time that a write takes.
        options.set_memtable_factory(MemtableFactory.vector())
        options.set_allow_concurrent_memtable_write(False)  # which that one cannot
        options.set_max_background_jobs(1)
        blocks = BlockBasedOptions()
        # Each RocksDB would take a 2 GiB block cache unless told otherwise.
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
                log.warning("%s is rebuilt, what was there is in %s: it cannot be opened: %s", self.path, aside, exc)
                return Rdict(str(self.path), options)
            except Exception as again:
                raise TableError(f"{self.path} cannot be made: {again}", remedy="Look at disk and rights") from again


def refusal(exc: Exception) -> bool:
    """Whether it is the system that refuses, and not the files that are damaged."""
    return bool(_REFUSED.search(str(exc)))


def _position_key(table: TableSpec) -> bytes:
    return _META + b"changelog:" + bytes([table.store_id])
