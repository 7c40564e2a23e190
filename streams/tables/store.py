"""One partition's tables on local disk: a RocksDB that may always be thrown away, since the changelogs rebuild it.

What lives here: opening, reading and writing. What must not: deciding what is written. Values and the changelog offsets
that they came from go down in one WriteBatch, so the two never disagree. Owner: the partition's thread.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

from streams.errors import TableError

log = logging.getLogger(__name__)

#: Layout of the keys below; another number on disk is thrown away and rebuilt.
STORE_VERSION = 1

_META = b"\x00"
_WRITE_BUFFER_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table. store_id: first byte of its keys on disk, 1 to 255, never used again for another table."""

    name: str
    store_id: int
    changelog_topic: str


@dataclass(slots=True)
class TableWrite:
    """One changed record; value None is a tombstone."""

    table: TableSpec
    key: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class ChangelogPosition:
    """Up to where a changelog is in the store; topic_id tells a recreated topic of the same name."""

    topic_id: str
    next_offset: int


class PartitionStore:
    """The RocksDB of one partition, all tables in it."""

    def __init__(self, path: Path, cache_mb: int) -> None:
        self.path = path
        self._cache_mb = cache_mb
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]  # its stubs say a method
        self._db = self._open()
        version = self._db.get(_META + b"version")
        if version is None:
            self._db[_META + b"version"] = str(STORE_VERSION).encode()
        elif version != str(STORE_VERSION).encode():
            self.wipe()

    def position(self, table: TableSpec) -> ChangelogPosition | None:
        """Up to where the table's changelog is in the store; None before the first write."""
        raw = self._db.get(_position_key(table))
        return None if raw is None else ChangelogPosition(**json.loads(raw))

    def items(self, table: TableSpec) -> Iterator[tuple[bytes, bytes]]:
        """Every record of a table, in order of keys."""
        prefix = bytes([table.store_id])
        # Its stubs say that a key may be of any kind; in raw mode it is bytes.
        found: Iterator[tuple[bytes, bytes]] = self._db.items(from_key=prefix)  # type: ignore[assignment]
        for key, value in found:
            if not key.startswith(prefix):
                return
            yield key[1:], value

    def write(self, writes: Iterable[TableWrite], positions: dict[TableSpec, ChangelogPosition]) -> None:
        """Apply records and positions in one WriteBatch."""
        batch = WriteBatch(raw_mode=True)
        for write in writes:
            key = bytes([write.table.store_id]) + write.key
            if write.value is None:
                batch.delete(key)
            else:
                batch.put(key, write.value)
        for table, position in positions.items():
            _put_position(batch, table, position)
        self._db.write(batch)

    def keep(
        self, table: TableSpec, changes: Iterable[tuple[bytes, bytes | None]], position: ChangelogPosition
    ) -> None:
        """Apply records read back from a changelog, and where it stands behind them.

        They lie in the changelog, so no log is written here: what is lost with the process is read again. `flush`
        makes them last.
        """
        batch = WriteBatch(raw_mode=True)
        prefix = bytes([table.store_id])
        for key, value in changes:
            if value is None:
                batch.delete(prefix + key)
            else:
                batch.put(prefix + key, value)
        _put_position(batch, table, position)
        self._db.write(batch, self._unlogged)

    def flush(self) -> None:
        """Make what `keep` wrote last."""
        self._db.flush()

    def wipe(self) -> None:
        """Throw everything away; the changelogs bring it back."""
        self._db.close()
        shutil.rmtree(self.path)
        self._db = self._open()
        self._db[_META + b"version"] = str(STORE_VERSION).encode()

    def close(self) -> None:
        """Release the folder's lock."""
        self._db.close()

    def _open(self) -> Rdict:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_max_background_jobs(1)
        blocks = BlockBasedOptions()
        # Each RocksDB would take a 2 GiB block cache unless told otherwise.
        blocks.set_block_cache(Cache(self._cache_mb * 1024 * 1024))
        options.set_block_based_table_factory(blocks)
        try:
            return Rdict(str(self.path), options)
        except Exception as exc:
            if "lock" in str(exc).lower():
                raise TableError(
                    f"{self.path} is in use: {exc}",
                    remedy="Another process uses this data_dir; each needs one of its own",
                ) from exc
            aside = self.path.with_suffix(".damaged")
            log.warning("%s cannot be opened and is rebuilt; what was there is in %s: %s", self.path, aside, exc)
            shutil.rmtree(aside, ignore_errors=True)
            try:
                self.path.rename(aside)
                return Rdict(str(self.path), options)
            except Exception as again:
                raise TableError(f"{self.path} cannot be made: {again}", remedy="Look at disk and rights") from again


def _put_position(batch: WriteBatch, table: TableSpec, position: ChangelogPosition) -> None:
    text = json.dumps({"topic_id": position.topic_id, "next_offset": position.next_offset})
    batch.put(_position_key(table), text.encode())


def _position_key(table: TableSpec) -> bytes:
    return _META + b"changelog:" + bytes([table.store_id])
