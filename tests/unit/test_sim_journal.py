"""A journal says when an engine held which block; overlaps are right at every moment and in every window."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from streams.core.ids import EngineHash
from streams.lab.engines.engine_messages import KvCleared, KvRemoved, KvStored
from streams.lab.engines.journal import CacheHistory, Journal


def line(at_ns: int, **change: object) -> dict[str, object]:
    return {"at_ns": at_ns, **change}


def test_overlaps_are_those_of_some_moment_in_the_window() -> None:
    """Blocks 1, 2, 3 stored at 10 and 20; 2 evicted at 30 and stored again at 40."""
    history = CacheHistory()
    for change in (
        line(10, stored=[[101, 102], [1, 2]]),
        line(20, stored=[[103], [3]]),
        line(30, removed=[102]),
        line(40, stored=[[102], [2]]),
    ):
        history.apply(change)
    prompt = [1, 2, 3, 4]
    assert history.overlaps(prompt, 0, 9) == {0}
    assert history.overlaps(prompt, 0, 10) == {0, 2}
    assert history.overlaps(prompt, 12, 25) == {2, 3}
    assert history.overlaps(prompt, 31, 39) == {1}
    assert history.overlaps(prompt, 25, 50) == {1, 3}
    assert history.last_held_ns(prompt, 1, 50) == 40
    assert history.last_held_ns(prompt, 3, 45) == 45
    assert history.last_held_ns(prompt, 4, 50) is None


def test_copies_and_second_names_keep_a_block_until_the_last_of_them_is_gone() -> None:
    """A block with two copies under one name and one under another is held until all three are removed."""
    history = CacheHistory()
    for change in (
        line(1, stored=[[101], [1]]),
        line(2, stored=[[101], [1]]),
        line(3, stored=[[909], [1]]),
        line(4, removed=[101]),
        line(5, removed=[101]),
        line(6, removed=[909]),
    ):
        history.apply(change)
    assert history.overlaps([1], 5, 5) == {1}
    assert history.overlaps([1], 6, 6) == {0}


def test_a_journal_survives_its_process_and_knows_when_it_died(tmp_path: Path) -> None:
    """What was written is read back; a death ends every interval, and so does the next process's start."""
    path = tmp_path / "journal"
    journal = Journal(path)
    blocks = np.array([1, 2], dtype=np.uint64)
    journal.note([KvStored(0.0, None, blocks, blocks, blocks, b"", 0, None)])
    journal.note([KvRemoved(0.0, blocks[1:])])
    journal.close()
    (stored_ns, removed_ns) = [json.loads(text)["at_ns"] for text in path.read_text().splitlines()[1:]]
    with path.open("ab") as torn:
        torn.write(b'{"at_ns": 12')
    history = CacheHistory.read(path, deaths_ns=[removed_ns + 1000])
    assert history.overlaps([1, 2], stored_ns, stored_ns) == {2}
    assert history.overlaps([1, 2], removed_ns, removed_ns) == {1}
    assert history.overlaps([1, 2], removed_ns + 1000, removed_ns + 1000) == {0}


def test_a_cleared_cache_holds_nothing(tmp_path: Path) -> None:
    """A reset of the cache, and the start of another process, end every interval."""
    for end in ("cleared", "started"):
        journal = Journal(tmp_path / end)
        blocks = np.array([7], dtype=np.uint64)
        journal.note([KvStored(0.0, EngineHash(3), blocks, blocks, blocks, b"", 0, None)])
        if end == "cleared":
            journal.note([KvCleared(0.0)])
        else:
            Journal(tmp_path / end).close()
        journal.close()
        *_, last = [json.loads(text)["at_ns"] for text in (tmp_path / end).read_text().splitlines()]
        assert CacheHistory.read(tmp_path / end).overlaps([7], last, last) == {0}
