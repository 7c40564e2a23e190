"""Cache groups of hybrid models: a block is published while a hit can end after it, or after a block behind it."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, EngineHash, RankId, Tier, WorkerId
from streams.engines import cache_groups
from streams.engines.dialects.interface import GroupChanged
from streams.engines.dialects.vllm import ALL_BLOCKS, VllmDecoder
from streams.engines.ledger import Ledger
from tests.helpers.folded_index import FoldedIndex, apply_event

RANK = RankId(WorkerId(1), DpRank(0))
BLOCK = 4

#: Blocks of the random histories: name to the name of the block before it, 0 at the root. Two branches, and a fork.
TREE = {name: (name - 1) % 100 for name in [*range(1, 9), *range(101, 107)]} | {200: 3, 201: 200, 202: 201}

#: Blocks that a hit needs of each other group: a window, a state, and another group with full attention.
NEEDED = {1: 3, 2: 1, 3: ALL_BLOCKS}


def u64(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def path(name: int) -> list[int]:
    """The blocks from the root to this one."""
    found: list[int] = []
    while name:
        found.insert(0, name)
        name = TREE[name]
    return found


class Indexed:
    """An index of what a ledger publishes."""

    def __init__(self, counts_copies: bool = True) -> None:
        self.ledger = Ledger(counts_copies)
        self.index = FoldedIndex()

    def batch(self, *events: Any) -> list[KvEvent]:
        out: list[KvEvent] = []
        for event in events:
            out += self.ledger.apply(event, may_wait=True)
        out += self.ledger.end_batch()
        for change in out:
            apply_event(self.index, RANK, change)
        return out

    def held(self) -> set[tuple[Tier, int]]:
        return {(tier, int(name)) for _, tier, name in self.index.members()}

    def overlap(self, *names: int) -> int:
        return int(self.index.find_matches(u64(*names)).scores.get(RANK, 0))


def stored(name: int, tier: Tier = Tier.DEVICE) -> BlocksStored:
    """A store of one block, whose local hash is its name."""
    parent = TREE[name]
    return BlocksStored(EngineHash(parent) if parent else None, u64(name), u64(name), tier)


def chain(first: int, last: int) -> BlocksStored:
    names = list(range(first, last + 1))
    return BlocksStored(EngineHash(first - 1) if TREE[first] else None, u64(*names), u64(*names))


def group(number: int, *names: int, is_stored: bool = True, at_root: bool = False) -> GroupChanged:
    return GroupChanged(number, NEEDED[number], u64(*names), is_stored, at_root)


def is_hit(name: int, held: set[tuple[Tier, int]], others: dict[int, dict[int, int]]) -> bool:
    """Whether a hit can end after a block, by the definition."""
    blocks = path(name)
    if not all(any((tier, block) in held for tier in Tier) for block in blocks):
        return False
    return all(all(block in names for block in blocks[-NEEDED[number] :]) for number, names in others.items())


@pytest.mark.parametrize("seed", range(12))
def test_what_is_published_is_what_a_hit_can_use(seed: int) -> None:
    """After each batch of a random history, the index has the blocks that lead to an end of a hit, and no others."""
    rng = random.Random(seed)
    rank = Indexed()
    held: set[tuple[Tier, int]] = set()
    others: dict[int, dict[int, int]] = {}
    restatements = 0
    for _ in range(250):
        events: list[Any] = []
        for _ in range(rng.randint(1, 4)):
            name = rng.choice(list(TREE))
            tier = rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
            match rng.randrange(6):
                case 0 | 1:
                    parents_held = all(any((each, block) in held for each in Tier) for block in path(name)[:-1])
                    if parents_held and (tier, name) not in held:
                        events.append(stored(name, tier))
                        held.add((tier, name))
                case 2:
                    if (tier, name) in held:
                        events.append(BlocksRemoved(u64(name), tier))
                        held.discard((tier, name))
                case 3 | 4:
                    number = rng.choice(list(NEEDED))
                    events.append(group(number, *path(name)))
                    names = others.setdefault(number, {})
                    for block in path(name):
                        names[block] = names.get(block, 0) + 1
                case _:
                    for number, names in others.items():
                        gone = [block for block in names if rng.random() < 0.2]
                        events.append(group(number, *gone, is_stored=False))
                        for block in gone:
                            names[block] -= 1
                            if not names[block]:
                                del names[block]
        if rng.random() < 0.02:
            events.append(AllBlocksCleared())
            held.clear()
            others.clear()
        rank.batch(*events)
        ends = {name for name in TREE if is_hit(name, held, others)}
        useful = {block for name in ends for block in path(name)} if others else {name for _, name in held}
        assert rank.held() == {(tier, name) for tier, name in held if name in useful}
        assert rank.ledger.n_between == (len(useful - ends) if others else 0)
        for name in TREE:
            longest = max((len(path(end)) for end in ends if end in path(name)), default=0)
            if others and not (set(path(name)) & useful) - set(path(name)[:longest]):
                assert rank.overlap(*path(name)) == longest
        restatements += 1
        restated = {(run.tier, block) for run in rank.ledger.restated() for block in run.engine.tolist()}
        assert restated == rank.held()
    assert restatements == 250


def test_a_window_that_was_evicted_shortens_the_match_and_its_return_lengthens_it() -> None:
    """The failure that was seen: the index must say 8, then less, and never 0 while an earlier end is left."""
    rank = Indexed()
    rank.batch(chain(1, 8), group(1, *range(1, 9)))
    assert (rank.overlap(*range(1, 9)), rank.ledger.n_between) == (8, 0)
    rank.batch(group(1, 7, is_stored=False))
    assert (rank.overlap(*range(1, 9)), rank.ledger.n_between) == (6, 0)
    rank.batch(group(1, 1, 2, is_stored=False))
    assert (rank.overlap(*range(1, 9)), rank.overlap(1, 2), rank.ledger.n_between) == (6, 2, 4)  # 1 to 4 are no ends
    rank.batch(group(1, 7))
    assert rank.overlap(*range(1, 9)) == 8


def test_blocks_that_were_held_before_the_first_report_of_a_group_are_judged_by_it() -> None:
    """A state that is stored only at some blocks leaves those as ends."""
    rank = Indexed()
    rank.batch(chain(1, 8))
    assert rank.overlap(*range(1, 9)) == 8
    rank.batch(group(2, 5))
    assert rank.overlap(*range(1, 9)) == 5
    rank.batch(group(2, 5, is_stored=False))
    assert rank.overlap(*range(1, 9)) == 0


def test_copies_in_a_group_are_counted_and_reports_of_reuse_are_not() -> None:
    """A store that names no parent and has no new block may report reuse; a removal then counts, and is approximate."""
    rank = Indexed()
    rank.batch(chain(1, 3), group(2, 3), group(2, 3))
    rank.batch(group(2, 3, is_stored=False))
    assert (rank.overlap(1, 2, 3), rank.ledger.may_lack_blocks) == (3, False)
    rank.batch(group(2, 3, at_root=True))
    rank.batch(group(2, 3, is_stored=False))
    assert (rank.overlap(1, 2, 3), rank.ledger.may_lack_blocks) == (0, True)


def test_adopted_blocks_are_not_judged_by_groups_whose_blocks_are_not_known() -> None:
    """A bridge that resumed from the table does not know what the other groups held, so the rank is approximate."""
    before, rank = Indexed(), Indexed()
    before.batch(chain(1, 3))
    for run in before.ledger.restated():
        rank.ledger.adopt(run)
    rank.batch(group(2, 3))
    assert (len(rank.ledger.restated()[0].engine), rank.ledger.left_out) == (3, 1)


def test_blocks_over_the_limit_of_groups_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and can only shorten a match."""
    monkeypatch.setattr(cache_groups, "GROUP_NAMES_MAX", 2)
    rank = Indexed()
    rank.batch(chain(1, 3), group(2, 1, 2, 3))
    assert (rank.overlap(1, 2, 3), rank.ledger.left_out) == (2, 1)


# -- the events of vLLM ------------------------------------------------------------------------------------------------


def event(number: int, kind: str, names: list[int], first: int = 0, **fields: Any) -> dict[str, Any]:
    """A store of consecutive blocks of one prompt, the first of which is at a position."""
    tokens = list(range(first * BLOCK, (first + len(names)) * BLOCK))
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": names[0] - 1 if first else None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": number,
        "kv_cache_spec_kind": kind,
        **fields,
    }


def test_vllms_groups_shorten_and_lengthen_the_match() -> None:
    """A model with a window of 8 tokens and a state next to full attention; full attention is group 2."""
    decoder, rank = VllmDecoder(BLOCK), Indexed()
    names = list(range(11, 16))
    local = local_hashes(list(range(5 * BLOCK)), BLOCK).tolist()

    def send(*events: dict[str, Any]) -> int:
        """Send a payload; return how many of its blocks are not exact."""
        decoded = decoder.decode(msgpack.packb([1.0, list(events), 0]))
        assert not decoded.unusable
        rank.batch(*decoded.events)
        return decoded.n_unindexed + rank.ledger.n_between

    window = {"kv_cache_spec_sliding_window": 2 * BLOCK}
    assert (
        send(event(0, "sliding_window", names, **window), event(1, "mamba", names), event(2, "full_attention", names))
        == 0
    )
    assert rank.overlap(*local) == 5
    assert send({"type": "BlockRemoved", "block_hashes": [15], "medium": "GPU", "group_idx": 1}) == 0
    assert rank.overlap(*local) == 4
    assert send({"type": "BlockRemoved", "block_hashes": [13], "medium": "GPU", "group_idx": 0}) == 0
    assert rank.overlap(*local) == 2
    assert send(event(1, "mamba", [15], 4)) == 2  # blocks 3 and 4 are no ends
    assert rank.overlap(*local) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_spec_kind": "chunked_local_attention"},
        {"kv_cache_spec_kind": None},
        {"kv_cache_spec_sliding_window": None},
        {"kv_cache_spec_sliding_window": "8"},
        {"block_size": 2 * BLOCK, "block_hashes": [12], "token_ids": list(range(2 * BLOCK))},
    ],
)
def test_groups_that_are_not_described_well_enough_are_counted(fields: dict[str, Any]) -> None:
    """The match follows full attention alone, and the rank is approximate."""
    decoder, rank = VllmDecoder(BLOCK), Indexed()
    other = event(1, "sliding_window", [12], 1, kv_cache_spec_sliding_window=8) | fields
    decoded = decoder.decode(msgpack.packb([1.0, [event(0, "full_attention", [11, 12]), other], 0]))
    rank.batch(*decoded.events)
    assert (decoded.not_indexed, decoded.n_unindexed) == ({"cache_group": 1}, 1)
    assert rank.overlap(*local_hashes(list(range(2 * BLOCK)), BLOCK).tolist()) == 2
