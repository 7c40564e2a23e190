"""Local copies that a worker cannot continue from, and changelogs that were recreated, on a real Kafka.

A worker either rebuilds the copy in its folder and logs the reason, or leaves the copy alone and logs a remedy. In both
cases the routers reach the reference's state, and the copy on disk then equals the changelog.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams.errors import TableError
from streams.lab.stack import RouterProcess, Stack
from streams.process.waiting import wait_for
from streams.settings import Settings, tables_path
from streams.tables.index_reducer import prefix_index_table
from streams.tables.store import ChangelogPosition, PartitionStore
from tests.helpers.raw_store import raw
from tests.helpers.small_disk import fill, small_disk_at
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal
from tests.helpers.workers import changelog, recreate_changelog

CACHE_MB = 1


def folder(settings: Settings, partition: int) -> Path:
    return tables_path(settings) / f"{settings.app_id}-{partition}"


def opened(settings: Settings, partition: int) -> PartitionStore:
    path = folder(settings, partition)
    return PartitionStore(path, path.name, CACHE_MB)


def empty_current(settings: Settings, partition: int) -> None:
    (folder(settings, partition) / "CURRENT").write_bytes(b"")


def tables_on_disk(settings: Settings, partition: int) -> list[Path]:
    """The files that contain a partition's records, after a flush."""
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
    """Change bytes and keep the size: RocksDB opens the file, and its checksums fail when it reads."""
    for path in tables_on_disk(settings, partition):
        data = bytearray(path.read_bytes())
        # Records are at the beginning of the file; RocksDB reads only the end when it opens the file.
        data[16:48] = bytes(byte ^ 0xFF for byte in data[16:48])
        path.write_bytes(data)


def set_layout(settings: Settings, partition: int) -> None:
    db = raw(folder(settings, partition))
    db[b"\x00version"] = b"1"
    db.close()


def swap_partitions(settings: Settings, partition: int) -> None:
    """Exchange each pair of folders, as restoring the wrong backup would."""
    if partition % 2:
        return
    one, other = folder(settings, partition), folder(settings, partition + 1)
    one.rename(one.with_suffix(".meanwhile"))
    other.rename(one)
    one.with_suffix(".meanwhile").rename(other)


def age(settings: Settings, partition: int) -> None:
    """Make the copy 13 h old, with a row that the changelog no longer contains."""
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
    "too old": (age, "keeps tombstones for 24 h"),
}


def assert_copies(worker: RouterProcess) -> None:
    """Stop a worker, and assert that every copy on its disk equals the changelog."""
    worker.child.stop()
    settings = worker.settings
    for partition in range(settings.partitions):
        store = opened(settings, partition)
        held = dict(store.items(prefix_index_table(settings)))
        store.close()
        assert held == changelog(settings, partition)


def reasons(worker: RouterProcess, text: str) -> int:
    return sum(text in line for line in worker.child.log_path.read_text().splitlines())


@pytest.mark.long_running
def test_an_unusable_copy_is_rebuilt_and_the_reason_is_logged(stack: Stack) -> None:
    """Whatever the fault is, the worker logs its reason once per partition, and no damaged row stays or is read."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    worker = stack.worker()
    engines = Engines(stack.settings, seed)
    engines.publish(300)
    assert_equal(worker.url, engines.reference)
    worker.child.stop()
    n_rebuilt = 0
    for fault, (damage, reason) in FAULTS.items():
        print(fault)
        n_before = reasons(worker, reason)
        for partition in range(stack.settings.partitions):
            damage(worker.settings, partition)
        with engines.publishing(100):
            stack.restart_worker(worker)
        assert_equal(worker.url, engines.reference)
        n_rebuilt += stack.settings.partitions
        assert reasons(worker, reason) - n_before == stack.settings.partitions
        assert reasons(worker, "is rebuilt") == n_rebuilt
        assert reasons(worker, "is opened again") == 0
        assert_copies(worker)  # stops it


def test_a_copy_that_another_process_has_open_is_left_alone(stack: Stack) -> None:
    """The worker logs the conflict and a remedy, tries again, and continues once the copy is free."""
    worker = stack.worker()
    engines = Engines(stack.settings, seed=1)
    engines.publish(200)
    assert_equal(worker.url, engines.reference)
    worker.child.stop()
    held = opened(worker.settings, 0)
    before = dict(held.items(prefix_index_table(worker.settings)))
    worker.child.start()
    with pytest.raises(
        TableError, match=r"is in use: .*Another process uses this data_dir; each process needs its own"
    ):
        opened(worker.settings, 0)
    wait_for(lambda: reasons(worker, "each process needs its own") > 1, VISIBLE_TIMEOUT_S, "the worker to log it twice")
    engines.publish(50)
    assert dict(held.items(prefix_index_table(worker.settings))) == before
    held.close()
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, "is rebuilt") == 0
    assert_copies(worker)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with small_disk_at(tmp_path / "disk") as path:
        yield path


def test_a_full_disk_stops_only_partitions_that_must_be_opened_and_deletes_nothing(
    stack: Stack, small_disk: Path
) -> None:
    """Open partitions continue. A partition that must be opened logs that there is no space, keeps its copy, and
    continues once there is space again."""
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
    wait_for(lambda: reasons(worker, "Free space there") > 1, VISIBLE_TIMEOUT_S, "the worker to log it twice")
    assert worker.child.running
    ballast.unlink()
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    assert reasons(worker, "is rebuilt") == 0
    worker.child.stop()


def test_a_changelog_recreated_while_its_owner_is_stopped_is_detected_by_its_id(stack: Stack) -> None:
    """The copy is ahead of the new changelog and is deleted; the sources are complete and give the same state again."""
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


@pytest.mark.parametrize("then", ["continues", "is killed"])
def test_a_changelog_recreated_under_its_owner_is_noticed_at_the_next_commit(stack: Stack, then: str) -> None:
    """The new changelog has changes without the state before them, so the table starts over, under any owner."""
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
