"""Local copies of tables that cannot be gone on with, and changelogs that are not what they were, on a real Kafka.

Whatever lies in a worker's folder, it is thrown away with a reason and rebuilt, or left alone with a remedy; the
routers reach the plain reference's state, and the copy on disk is what the changelog says.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from rocksdict import Options, Rdict

from streams.errors import KvStreamsError, TableError
from streams.indexer_agent import prefix_index_table
from streams.kafka import Record, delete_topics, ensure_topics
from streams.local.stack import RouterProcess, Stack
from streams.settings import Settings, tables_path
from streams.tables.changelog import read_to_end
from streams.tables.store import ChangelogPosition, PartitionStore, TableSpec
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal

CACHE_MB = 1

#: Of the small disk that is filled: some of it RocksDB takes for itself at once.
DISK_MB = 48


def folder(settings: Settings, partition: int) -> Path:
    return tables_path(settings) / f"{settings.app_id}-{partition}"


def opened(settings: Settings, partition: int) -> PartitionStore:
    path = folder(settings, partition)
    return PartitionStore(path, path.name, CACHE_MB)


def raw(path: Path) -> Rdict:
    options = Options(raw_mode=True)
    options.set_allow_concurrent_memtable_write(False)  # the memtable is as the store was made with
    return Rdict(str(path), options)


def empty_current(settings: Settings, partition: int) -> None:
    (folder(settings, partition) / "CURRENT").write_bytes(b"")


def tables_on_disk(settings: Settings, partition: int) -> list[Path]:
    """The files that hold a partition's records, all of them written out."""
    store = opened(settings, partition)
    store.flush()
    store.close()
    found = list(folder(settings, partition).glob("*.sst"))
    assert found
    return found


def cut_files(settings: Settings, partition: int) -> None:
    for path in tables_on_disk(settings, partition):
        path.write_bytes(path.read_bytes()[:-100])


def break_blocks(settings: Settings, partition: int) -> None:
    """Same size, other bytes: RocksDB opens and its checksums fail when it reads."""
    for path in tables_on_disk(settings, partition):
        data = bytearray(path.read_bytes())
        # At the beginning lie records; what RocksDB reads when it opens a file lies at its end.
        data[16:48] = bytes(byte ^ 0xFF for byte in data[16:48])
        path.write_bytes(data)


def set_layout(settings: Settings, partition: int) -> None:
    db = raw(folder(settings, partition))
    db[b"\x00version"] = b"1"
    db.close()


def swap_partitions(settings: Settings, partition: int) -> None:
    """Each pair of folders exchanged, as somebody who restores the wrong backup does."""
    if partition % 2:
        return
    one, other = folder(settings, partition), folder(settings, partition + 1)
    one.rename(one.with_suffix(".meanwhile"))
    other.rename(one)
    one.with_suffix(".meanwhile").rename(other)


def age(settings: Settings, partition: int) -> None:
    """Thirteen hours, of which the changelog has forgotten something: a record that the copy has and nobody else."""
    table = prefix_index_table(settings)
    store = opened(settings, partition)
    position = store.position(table)
    assert position is not None
    old = ChangelogPosition(position.topic_id, position.next_offset, position.as_of_ms - 13 * 3_600_000)
    store.write({table: [(b"forgotten", b"long ago")]}, {table: old})
    store.close()


FAULTS: dict[str, tuple[Callable[[Settings, int], None], str]] = {
    "CURRENT is empty": (empty_current, "it cannot be opened: Corruption"),
    "files are cut": (cut_files, "it cannot be opened: Corruption"),
    "blocks are broken": (break_blocks, "it cannot be read: Corruption"),
    "another layout": (set_layout, "its layout is version 1, ours 2"),
    "another partition's": (swap_partitions, "it was made for"),
    "too old": (age, "tells for 24 h what was deleted"),
}


def changelog(settings: Settings, partition: int) -> dict[bytes, bytes]:
    """What is left of a changelog when each key's last record counts."""
    found: dict[bytes, bytes] = {}

    def fold(records: list[Record]) -> None:
        for record in records:
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, fold)
    return found


def assert_copies(worker: RouterProcess) -> None:
    """End a worker in order, and see that every copy on its disk is what the changelog says."""
    worker.child.stop()
    settings = worker.settings
    for partition in range(settings.partitions):
        store = opened(settings, partition)
        held = dict(store.items(prefix_index_table(settings)))
        store.close()
        assert held == changelog(settings, partition)


def reasons(worker: RouterProcess, text: str) -> int:
    return sum(text in line for line in worker.child.log_path.read_text().splitlines())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_cannot_be_gone_on_with_is_rebuilt_and_says_why(stack: Stack, fault: str) -> None:
    """One line a partition with the reason; nothing of what was wrong is left in the copy or reaches a router."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    hurt, reason = FAULTS[fault]
    worker = stack.worker()
    engines = Engines(stack.settings, seed)
    engines.publish(300)
    assert_equal(worker.url, engines.reference)
    worker.child.stop()
    for partition in range(stack.settings.partitions):
        hurt(worker.settings, partition)
    with engines.publishing(100):
        stack.restart_worker(worker)
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, reason) == reasons(worker, "is rebuilt") == stack.settings.partitions
    assert reasons(worker, "is opened again") == 0
    assert_copies(worker)


def test_a_copy_of_another_scope_in_the_same_folder_is_moved_aside(scope: Settings, tmp_path: Path) -> None:
    """Under its own name it is left alone; under ours it is not taken for ours."""
    table = prefix_index_table(scope)
    theirs = PartitionStore(tmp_path / "theirs-kvstreams-0", "theirs-kvstreams-0", CACHE_MB)
    theirs.write({table: [(b"key", b"value")]}, {})
    theirs.close()
    shutil.copytree(theirs.path, tmp_path / "ours-kvstreams-0")
    ours = PartitionStore(tmp_path / "ours-kvstreams-0", "ours-kvstreams-0", CACHE_MB)
    assert list(ours.items(table)) == []
    ours.close()
    assert raw(tmp_path / "ours-kvstreams-0.damaged")[b"\x01key"] == b"value"
    again = PartitionStore(theirs.path, "theirs-kvstreams-0", CACHE_MB)
    assert list(again.items(table)) == [(b"key", b"value")]
    again.close()


def test_a_copy_that_another_process_holds_is_left_alone(stack: Stack) -> None:
    """The worker says who uses it and what to do, asks again, and goes on when it is free."""
    worker = stack.worker()
    engines = Engines(stack.settings, seed=1)
    engines.publish(200)
    assert_equal(worker.url, engines.reference)
    worker.child.stop()
    held = opened(worker.settings, 0)
    before = dict(held.items(prefix_index_table(worker.settings)))
    worker.child.start()
    with pytest.raises(TableError, match=r"is in use: .*Another process uses this data_dir; each needs one of its own"):
        opened(worker.settings, 0)
    wait_for(lambda: reasons(worker, "each needs one of its own") > 1, VISIBLE_TIMEOUT_S, "the worker to say so twice")
    engines.publish(50)
    assert dict(held.items(prefix_index_table(worker.settings))) == before
    held.close()
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, "is rebuilt") == 0
    assert_copies(worker)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes; skips where this user may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "kvstreams-test", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no file system can be mounted here: {exc}")
    try:
        yield path
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    """Also while a worker that is about to end has files open there: it is gone when the last one is closed."""
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(ballast: Path) -> None:
    """Write until the file system has no room."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_stops_nothing_but_the_partition_and_throws_nothing_away(stack: Stack, small_disk: Path) -> None:
    """What is open goes on; one that must be opened says that there is no room, keeps what it has, and then goes on."""
    worker = stack.worker(env={"KVSTREAMS_DATA_DIR": str(small_disk)})
    engines = Engines(stack.settings, seed=2)
    engines.publish(200)
    assert_equal(worker.url, engines.reference)
    ballast = small_disk / "ballast"
    fill(ballast)
    engines.publish(200)
    assert_equal(worker.url, engines.reference)
    worker.child.kill()
    worker.child.start()
    wait_for(lambda: reasons(worker, "Make room there") > 1, VISIBLE_TIMEOUT_S, "the worker to say so twice")
    assert worker.child.running
    ballast.unlink()
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, "is rebuilt") == 0
    worker.child.stop()


def test_a_store_that_cannot_be_flushed_says_so_and_keeps_what_it_has(small_disk: Path) -> None:
    """With room again the same handle goes on, and all of it is there when it is opened again."""
    table = TableSpec("table", 1, "changelog")
    store = PartitionStore(small_disk / "store", "scope", 8)
    store.write({table: [(b"first", b"1")]}, {})
    store.flush()
    ballast = small_disk / "ballast"
    fill(ballast)
    store.write({table: [(b"second", bytes(64 * 1024))]}, {})
    with pytest.raises(TableError, match="is refused by the system") as refused:
        store.flush()
    assert "Make room there" in refused.value.remedy
    ballast.unlink()

    def goes_on() -> bool:
        try:
            store.write({table: [(b"third", b"3")]}, {})
            store.flush()
        except TableError:
            return False  # RocksDB looks for room by itself, from time to time
        return True

    wait_for(goes_on, VISIBLE_TIMEOUT_S, "the store to go on")
    store.close()
    again = PartitionStore(small_disk / "store", "scope", 8)
    assert [key for key, _ in again.items(table)] == [b"first", b"second", b"third"]
    again.close()


def recreate_changelog(settings: Settings) -> None:
    spec = topics(settings).index_changelog
    delete_topics(settings, [spec])

    def made() -> bool:
        try:
            ensure_topics(settings, [spec])
        except (KvStreamsError, KafkaException):
            return False  # its deletion is not over yet
        return True

    wait_for(made, VISIBLE_TIMEOUT_S, "the changelog to be there again")


def test_a_changelog_made_anew_while_nobody_looked_is_told_by_its_id(stack: Stack) -> None:
    """The copy is ahead of it and thrown away; the sources, which are all there, give the same state again."""
    worker = stack.worker()
    engines = Engines(stack.settings, seed=3)
    engines.publish(300)
    assert_equal(worker.url, engines.reference)
    worker.child.stop()
    recreate_changelog(stack.settings)
    with engines.publishing(100):
        stack.restart_worker(worker)
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, "was recreated") == reasons(worker, "is rebuilt") == stack.settings.partitions
    assert_copies(worker)


@pytest.mark.parametrize("then", ["goes on", "is killed"])
def test_a_changelog_made_anew_under_its_owner_is_noticed_at_the_next_commit(stack: Stack, then: str) -> None:
    """What was written to the new one alone is no state: the table begins anew, also when another owner finds it."""
    worker = stack.worker()
    router = stack.router("router")
    engines = Engines(stack.settings, seed=4)
    engines.publish(300)
    assert_equal(router.url, engines.reference)
    with engines.publishing(200):
        recreate_changelog(stack.settings)
        if then == "is killed":
            worker.child.kill()
    engines.publish(50)
    if then == "is killed":
        shutil.rmtree(worker.settings.data_dir)
        stack.restart_worker(worker)
    assert_equal(router.url, engines.reference)
    assert_equal(worker.url, engines.reference)
    assert_copies(worker)


def test_positions_keep_the_time_as_of_which_they_are(tmp_path: Path) -> None:
    """As JSON, whose fields are the position's."""
    table = prefix_index_table(Settings())
    store = PartitionStore(tmp_path / "store", "store", CACHE_MB)
    store.write({}, {table: ChangelogPosition("id", 7, 123)})
    assert store.position(table) == ChangelogPosition("id", 7, 123)
    store.close()
    text = raw(tmp_path / "store")[b"\x00changelog:\x01"]
    assert text == b'{"topic_id": "id", "next_offset": 7, "as_of_ms": 123}'
