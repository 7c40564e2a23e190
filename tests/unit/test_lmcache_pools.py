"""LMCache's cache events, as its own classes publish them, become pools that agree with its own directory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import BASE_SEED, request_hashes, salted_seed
from streams.core.ids import Incarnation
from streams.core.kernels.blake3 import SCRATCH_WORDS, find_parent
from streams.cxl.records import decode_transition, encode_transition
from streams.errors import BadRecord
from streams.lmcache import chunk_names
from streams.lmcache.chunk_names import ChunkNames, Unnamed, name_space
from streams.lmcache.feeds import KnownFeed, decode_feed, encode_feed, known_cursors
from streams.lmcache.pools import (
    Change,
    Chunk,
    Cursor,
    Feed,
    FeedPools,
    ModelNames,
    Owner,
    Pool,
    Verdict,
    parse_feed,
    parse_pool,
)
from streams.lmcache.recovery import RecoveredFeed
from streams.lmcache.rows import chunk_of, transitions
from streams.lmcache.wire import Tier, decode_record

BLOCK_SIZE = 16
MODELS = ModelNames(lambda _: BLOCK_SIZE)
FEEDS = (Feed("node-a"), Feed("node-b"), Feed("s3", True))

#: Made by `tests/helpers/lmcache_producer.py golden`, with lmcache 0.5.6: two servers with two ranks each, a shared
#: backend, restarts, and batches that were dropped.
GOLDEN = Path(__file__).parents[1] / "golden_lmcache.json"

POOLED, IN_TRANSIT, EVICTED = CxlMemoryState.CXL_POOLED, CxlMemoryState.IN_TRANSIT, CxlMemoryState.EVICTED


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


class Fold:
    """What a bridge does with records, without Kafka: all feeds with one set of names, and the published rows."""

    def __init__(self, feeds: Iterable[Feed] = FEEDS) -> None:
        self.names = ChunkNames()
        self.feeds = [FeedPools(feed, self.names, MODELS) for feed in feeds]
        self.rows: dict[tuple[Owner, bytes, int], tuple[CxlMemoryState, int]] = {}
        self.verdicts: list[Verdict] = []

    def take(self, value: bytes, at_s: int = 100) -> None:
        for batch in decode_record(value):
            for pools in self.feeds:
                self.verdicts.append(pools.apply(batch, at_s))
            for pools in self.feeds:
                pools.take_names(self.names.added)
            self.names.added.clear()

    def publish(self) -> list[Change]:
        changes = [change for pools in self.feeds for change in pools.take_changes()]
        for change in changes:
            for chunk in change.chunks:
                self.rows[change.owner, *_chunk_key(chunk)] = change.states[-1], chunk.ranks
        return changes

    def held(self) -> list[list[object]]:
        """The objects that ranks hold, as LMCache's directory lists them."""
        return sorted(
            [*_name_of(chunk), rank, owner.pool.instance or "", owner.pool.tier.value, owner.pool.backend]
            for pools in self.feeds
            for owner, chunk in pools.chunks()
            for rank in range(owner.world_size)
            if chunk.ranks >> rank & 1
        )


def _name_of(chunk: Chunk) -> tuple[str, int]:
    return chunk.key[0].hex(), chunk.key[1].first_seed


def _chunk_key(chunk: Chunk) -> tuple[bytes, int]:
    return chunk.key[0], chunk.key[1].first_seed


def directory_objects(contents: list[list[Any]]) -> list[list[object]]:
    """The same of LMCache's directory."""
    return sorted(
        [chunk, salted_seed(BASE_SEED, salt or None), kv_rank >> 16 & 0xFF, "" if shared else instance, tier, backend]
        for chunk, _, kv_rank, salt, instance, tier, backend, shared in contents
    )


def store(number: int, *entries: dict[str, Any], **fields: Any) -> bytes:
    batch = {
        "instance_id": "node-a",
        "incarnation": 7,
        "seq": number,
        "event_type": "store",
        "tier": "l1",
        "backend": "dram",
        "entries": list(entries),
        "shared": False,
        "ts": 1.0,
        **fields,
    }
    return json.dumps({"batches": [batch]}).encode()


def entry(
    chunk_hash: str, rank: int = 0, world: int = 1, tokens: list[int] | None = None, at: int = -1
) -> dict[str, Any]:
    key = {"chunk_hash_hex": chunk_hash, "model_name": "m", "kv_rank": world << 24 | rank << 16 | world << 8 | rank}
    return {"key": key, "size_bytes": 5, "token_ids": tokens or [], "token_offset": at}


def states(changes: list[Change]) -> list[tuple[CxlMemoryState, list[str]]]:
    return [(state, [chunk.key[0].hex() for chunk in each.chunks]) for each in changes for state in each.states]


def test_pools_agree_with_the_directory_of_lmcache() -> None:
    """After the golden records, the pools have exactly the objects that LMCache's own directory lists."""
    fold = Fold()
    for record in golden()["records"]:
        fold.take(record["value"].encode())
    assert fold.held() == directory_objects(golden()["directory"])
    assert Verdict.GAP in fold.verdicts
    assert all(chunk.address is not None for pools in fold.feeds for _, chunk in pools.chunks())


def test_chunks_have_the_hashes_of_the_prompts_blocks() -> None:
    """A chunk's address is the one that a request with its whole prompt has, also behind a cache salt."""
    fold = Fold()
    tokens: dict[str, list[int]] = {}
    for record in golden()["records"]:
        fold.take(record["value"].encode())
        for each in json.loads(record["value"])["batches"][0]["entries"]:
            if each["token_offset"] == 0:
                tokens[each["key"]["chunk_hash_hex"]] = each["token_ids"]
    checked = set()
    for pools in fold.feeds:
        for _, chunk in pools.chunks():
            name, space = chunk.key
            if name.hex() in tokens and chunk.address is not None:
                _, sequence = request_hashes(tokens[name.hex()], BLOCK_SIZE, first_seed=space.first_seed)
                assert chunk.address == (sequence[-1], sequence[-2], len(sequence) - 1, len(sequence))
                checked.add(space.first_seed)
    assert len(checked) == 2


def test_what_was_published_is_what_is_held_whenever_it_is_taken() -> None:
    """Changes can be taken at any time: the states published last are those of all chunks."""
    chance = random.Random(3)
    fold = Fold()
    for record in golden()["records"]:
        fold.take(record["value"].encode())
        if chance.random() < 0.3:
            fold.publish()
    fold.publish()
    held = {
        (owner, *_chunk_key(chunk)): (POOLED if chunk.ranks == 3 else IN_TRANSIT, chunk.ranks)
        for pools in fold.feeds
        for owner, chunk in pools.chunks()
    }
    l1 = {where: row for where, row in fold.rows.items() if where[0].pool.tier is Tier.L2 and row[0] is not EVICTED}
    assert l1 == {where: row for where, row in held.items() if where[0].pool.tier is Tier.L2}
    assert held.items() <= fold.rows.items()  # rows of L1 of earlier incarnations end with their pool's epoch


def test_a_bridge_that_takes_over_continues_from_the_rows() -> None:
    """Rows, as they are on Kafka, bring back every published chunk with its ranks; what follows is the same."""
    records = golden()["records"]
    fold, after = Fold(), Fold()
    for record in records[:50]:
        fold.take(record["value"].encode())
    rows: dict[tuple[object, ...], tuple[Owner, Chunk, int]] = {}
    for pools in fold.feeds:
        for record in transitions(pools.take_changes(), Incarnation(9), pools.epoch_of, 5):
            read = decode_transition(encode_transition(record))
            notes = read.blocks.notes or (b"",) * len(read.blocks)
            for block, note in zip(read.blocks.rows(), notes, strict=True):
                where = read.rank, block[0].sequence
                found = chunk_of(read.rank, read.pool_id, read.model, read.state, block, note, read.span, BLOCK_SIZE)
                if found is None:
                    rows.pop(where, None)
                else:
                    rows[where] = *found, read.pool_epoch
    for pools, before in zip(after.feeds, fold.feeds, strict=True):
        pools.cursors.update(before.cursors)
        found_rows = [row for row in rows.values() if row[0].rank.worker_id == pools.feed.worker_id]
        RecoveredFeed(found_rows, Incarnation(9)).adopted_by(pools, MODELS)
        assert not pools.take_changes()
    assert after.held() == fold.held()
    for record in records[40:]:  # the position is older than the rows
        after.take(record["value"].encode())
    assert after.held() == directory_objects(golden()["directory"])


def test_rows_that_have_ended_still_name_what_follows_their_chunks() -> None:
    """The server was restarted after the position, so that what is read again follows chunks that it does not have."""
    beginning, following = prompt_chunks(2)
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    address = ChunkNames().resolve("i", beginning[0], space, *beginning[1:])
    assert not isinstance(address, Unnamed)
    pools = FeedPools(Feed("i"), names, MODELS)
    pools.cursors["i"] = Cursor(incarnation=1)
    row = Chunk((beginning[0], space), 1, 5, address, CxlMemoryState.CXL_POOLED, 1)
    owner = Owner(Pool("i", Tier.L1, "dram"), "m", 1)
    RecoveredFeed([(owner, row, 2)], Incarnation(9)).adopted_by(pools, MODELS)
    assert not isinstance(names.resolve("i", following[0], space, *following[1:]), Unnamed)


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_chunks_of_a_model_that_gets_another_name_are_published_under_it(block_size: int) -> None:
    """A bridge with other lmcache_models takes over. Rows under the former name are evicted; the hashes depend on the
    block size, so that with another one the chunks count once they are stored again."""
    fold = Fold([Feed("node-a")])
    fold.take(store(1, entry("ab", tokens=list(range(BLOCK_SIZE)), at=0)))
    fold.publish()
    ((owner, chunk),) = fold.feeds[0].chunks()
    models = ModelNames(lambda name: block_size if name == "ours" else BLOCK_SIZE, {"m": "ours"})
    fold.feeds = [FeedPools(Feed("node-a"), ChunkNames(), models)]
    RecoveredFeed([(owner, chunk, 0)], Incarnation(1)).adopted_by(fold.feeds[0], models)
    fold.publish()
    expected = {owner: (EVICTED, 0)}
    if block_size == BLOCK_SIZE:
        expected[owner._replace(model="ours")] = POOLED, 1
    assert {where[0]: row for where, row in fold.rows.items()} == expected
    assert fold.feeds[0].models() == ([] if block_size != BLOCK_SIZE else ["ours"])


def test_a_chunk_counts_once_all_ranks_hold_it() -> None:
    """Some ranks: in transit. All: pooled. One less: in transit again. None: evicted."""
    fold = Fold()
    tokens = list(range(32))
    fold.take(store(1, entry("aa", 0, 2, tokens, 0)))
    assert states(fold.publish()) == [(IN_TRANSIT, ["aa"])]
    fold.take(store(2, entry("aa", 1, 2, tokens, 0)))
    assert states(fold.publish()) == [(IN_TRANSIT, ["aa"]), (POOLED, ["aa"])]
    fold.take(store(3, entry("aa", 1, 2, tokens, 0)))
    assert not fold.publish()
    fold.take(store(4, entry("aa", 0, 2), event_type="delete"))
    assert states(fold.publish()) == [(IN_TRANSIT, ["aa"])]
    fold.take(store(5, entry("aa", 1, 2), event_type="delete"))
    assert states(fold.publish()) == [(EVICTED, ["aa"])]
    fold.take(store(6, entry("aa", 1, 2), event_type="delete"))
    assert not fold.publish()


def test_a_chunk_that_comes_and_goes_between_two_looks_is_evicted() -> None:
    """A published chunk that was deleted, stored and deleted again is evicted, not forgotten."""
    fold = Fold()
    fold.take(store(1, entry("aa", tokens=list(range(32)), at=0)))
    fold.publish()
    fold.take(store(2, entry("aa"), event_type="delete"))
    fold.take(store(3, entry("aa", tokens=list(range(32)), at=0)))
    fold.take(store(4, entry("aa"), event_type="delete"))
    assert states(fold.publish()) == [(EVICTED, ["aa"])]
    assert not fold.held()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (entry("aa"), Unnamed.NO_TOKENS),
        (entry("aa", tokens=list(range(32))), Unnamed.NO_TOKENS),
        (entry("aa", tokens=list(range(30)), at=0), Unnamed.CHUNK_SIZE),
        (entry("aa", tokens=list(range(32)), at=8), Unnamed.CHUNK_SIZE),
        (entry("aa", tokens=list(range(32)), at=32), Unnamed.UNKNOWN_PARENT),
        (entry("aa", tokens=[-1] * 32, at=0), Unnamed.BAD_TOKENS),
        ({**entry("aa", at=0), "token_ids": "text"}, Unnamed.BAD_TOKENS),
        ({**entry("aa", at=0), "token_ids": [1.5] * 32}, Unnamed.BAD_TOKENS),
    ],
)
def test_a_store_without_usable_content_is_counted(given: dict[str, Any], reason: Unnamed) -> None:
    """Such a chunk is held, but in no pool of ours, until a store shows its content."""
    fold = Fold()
    fold.take(store(1, given))
    assert not fold.publish()
    assert fold.feeds[0].counts == {reason: 1}
    fold.take(store(2, entry("aa", tokens=list(range(32)), at=0)))
    assert states(fold.publish()) == [(IN_TRANSIT, ["aa"]), (POOLED, ["aa"])]


def test_a_chunk_waits_for_the_one_that_it_follows() -> None:
    """Chunks that arrive in any order get the same names, in whichever instance their predecessors are stored."""
    entries = {}
    for record in golden()["records"]:
        for batch in json.loads(record["value"])["batches"]:
            for each in batch["entries"]:
                if each["token_ids"] and not each["key"]["cache_salt"]:
                    entries[each["key"]["chunk_hash_hex"]] = each
    chance = random.Random(1)
    order = list(entries.values())
    fold, shuffled = Fold(), Fold()
    fold.take(store(1, *order))
    chance.shuffle(order)
    for number, each in enumerate(order[:30], 1):
        shuffled.take(store(number, each))
    shuffled.take(store(1, *order[30:], instance_id="node-b"))
    addresses = [
        {chunk.key: chunk.address for pools in each.feeds for _, chunk in pools.chunks()} for each in (fold, shuffled)
    ]
    assert addresses[0] == addresses[1] and None not in addresses[0].values() and len(addresses[0]) > 40


def prompt_chunks(n_chunks: int, seed: int = 1) -> list[tuple[bytes, bytes, int]]:
    """Return chunks of a random prompt: LMCache's hash (of the first one any), tokens as JSON and position."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, (n_chunks, 32), dtype=np.uint32)
    scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
    chunks, name = [], bytes(32)
    for number, of_chunk in enumerate(tokens):
        find_parent(octets(name), of_chunk, octets(bytes(32)), scratch)
        name = scratch[:8].astype("<u4").tobytes()
        chunks.append((name, json.dumps(of_chunk.tolist()).encode(), number * 32))
    return chunks


def test_what_follows_an_unknown_beginning_has_names_once_that_is_stored() -> None:
    """Whichever instance stores it, and although no chunk between them had a name when the last one was stored."""
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    beginning, *rest = prompt_chunks(6)
    for name, tokens, offset in rest:
        assert names.resolve("a", name, space, tokens, offset) is Unnamed.UNKNOWN_PARENT
    assert not isinstance(names.resolve("b", beginning[0], space, *beginning[1:]), Unnamed)
    assert [name for name, _ in names.added] == [beginning[0], *(name for name, _, _ in rest)]
    all_tokens = [token for _, tokens, _ in (beginning, *rest) for token in json.loads(tokens)]
    _, sequence = request_hashes(all_tokens, BLOCK_SIZE)
    last = names.get(rest[-1][0], space)
    assert last is not None and last == (sequence[-1], sequence[-2], len(sequence) - 1, 2)


def test_chunks_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no longer wait get names when they are stored again."""
    monkeypatch.setattr(chunk_names, "WAITING_MAX", 4)
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    beginning, *rest = prompt_chunks(10)
    for name, tokens, offset in rest:
        names.resolve("a", name, space, tokens, offset)
    names.resolve("a", beginning[0], space, *beginning[1:])
    assert len(names) == 1
    for name, tokens, offset in rest[:5]:
        assert not isinstance(names.resolve("a", name, space, tokens, offset), Unnamed)
    assert len(names) == 10  # the last four had waited


@pytest.mark.parametrize(
    ("of_instances_max", "found_again"), [(64, {*range(14, 30, 2), *range(22, 30)}), (16, {*range(22, 30)})]
)
def test_only_the_last_chunks_are_tried(
    monkeypatch: pytest.MonkeyPatch, of_instances_max: int, found_again: set[int]
) -> None:
    """Those of the same instance, if they are still kept, and then those of all instances."""
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    monkeypatch.setattr(chunk_names, "TRIED_MAX", 8)
    monkeypatch.setattr(chunk_names, "OF_INSTANCES_MAX", of_instances_max)
    prompts = [prompt_chunks(2, seed) for seed in range(30)]
    for number, (name, tokens, offset) in enumerate(prompt[0] for prompt in prompts):
        names.resolve("ab"[number % 2], name, space, tokens, offset)
    found = [names.resolve("a", name, space, tokens, offset) for name, tokens, offset in (each[1] for each in prompts)]
    assert found_again == {number for number, address in enumerate(found) if not isinstance(address, Unnamed)}


def test_a_chunk_that_waits_is_tried_again_when_it_is_stored_after_the_one_that_it_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its predecessor had a name, and was too far back in the search; then a server stored both again."""
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    monkeypatch.setattr(chunk_names, "TRIED_MAX", 8)
    (first, second), *others = [prompt_chunks(2, seed) for seed in range(20)]
    for name, tokens, offset in (first, *(each[0] for each in others)):
        names.resolve("a", name, space, tokens, offset)
    for _ in range(2):
        assert names.resolve("a", second[0], space, *second[1:]) is Unnamed.UNKNOWN_PARENT
    names.used("b", first[0], space)
    assert not isinstance(names.resolve("b", second[0], space, *second[1:]), Unnamed)
    assert not names._waiting and not names._orphans


def test_orphans_that_begin_at_the_same_token_are_limited() -> None:
    """The oldest one waits no longer, and nothing of it is left."""
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    prompts = [prompt_chunks(3, seed) for seed in range(2 * chunk_names.WAITING_AT_MAX)]
    for prompt in prompts:
        for name, tokens, offset in prompt[1:]:
            assert names.resolve("a", name, space, tokens, offset) is Unnamed.UNKNOWN_PARENT
    for prompt in prompts:
        names.resolve("a", prompt[0][0], space, *prompt[0][1:])
    assert len(names) == len(prompts) + 2 * chunk_names.WAITING_AT_MAX


def test_a_chunk_of_another_hash_algorithm_has_a_name_only_at_the_beginning_of_a_prompt() -> None:
    """Such hashes cannot be verified, so that what precedes a later chunk is unknown."""
    names, space = ChunkNames(), name_space("", BLOCK_SIZE)
    tokens = json.dumps(list(range(32))).encode()
    assert not isinstance(names.resolve("a", b"12345678", space, tokens, 0), Unnamed)
    assert names.resolve("a", b"abcdefgh", space, tokens, 32) is Unnamed.UNKNOWN_PARENT


def test_a_restart_empties_the_memory_and_keeps_what_was_offloaded() -> None:
    """L1 begins another epoch; L2 stays, and stale batches change nothing."""
    fold = Fold()
    tokens = list(range(32))
    fold.take(store(1, entry("aa", tokens=tokens, at=0)))
    fold.take(store(2, entry("aa", tokens=tokens, at=0), tier="l2", backend="fs"))
    pools = fold.feeds[0]
    l1, l2 = Pool("node-a", Tier.L1, "dram"), Pool("node-a", Tier.L2, "fs")
    assert (pools.epoch_of(l1), pools.epoch_of(l2), len(pools)) == (7, 0, 2)
    fold.take(store(1, entry("bb", tokens=tokens, at=0), incarnation=8, event_type="access", backend=""))
    assert (pools.epoch_of(l1), len(pools)) == (8, 1)
    assert [change.owner.pool for change in fold.publish()] == [l2]
    fold.verdicts.clear()
    fold.take(store(3, entry("aa", tokens=tokens, at=0)))
    assert fold.verdicts[0] is Verdict.STALE and len(pools) == 1
    assert pools.is_incomplete()  # perhaps its clock was set back, and it is the server that runs now


def test_a_gap_leaves_chunks_in_doubt_until_they_are_stored_again() -> None:
    """What was stored before a gap is evicted after a time, unless it was stored since; then nothing is in doubt."""
    fold = Fold()
    tokens = list(range(64))
    fold.take(store(1, entry("aa", tokens=tokens[:32], at=0), entry("bb", tokens=tokens[16:48], at=0)), at_s=100)
    fold.publish()
    fold.take(store(3, entry("cc", tokens=tokens[32:], at=0)), at_s=150)
    pools = fold.feeds[0]
    assert fold.verdicts[-3] is Verdict.GAP and pools.is_incomplete()
    fold.take(store(4, entry("bb", tokens=tokens[16:48], at=0)), at_s=160)
    assert pools.expire(1000, 0) == 0 and pools.expire(209, 60) == 0
    assert pools.expire(210, 60) == 1 and not pools.is_incomplete()
    assert states(fold.publish()) == [(EVICTED, ["aa"]), (IN_TRANSIT, ["cc"]), (POOLED, ["cc"])]


def test_what_was_stored_before_a_gap_is_in_doubt_whatever_the_clocks_say() -> None:
    """Also in the same second, and by a server whose clock is ahead of that of the one with the gap."""
    shared = {"tier": "l2", "backend": "s3", "shared": True}
    fold = Fold([Feed("s3", True)])
    fold.take(store(1, **shared), at_s=100)
    fold.take(store(1, entry("aa", tokens=list(range(32)), at=0), instance_id="node-b", **shared), at_s=100)
    fold.take(store(2, entry("bb", tokens=list(range(1, 33)), at=0), instance_id="node-b", **shared), at_s=130)
    fold.take(store(3, entry("cc", tokens=list(range(2, 34)), at=0), **shared), at_s=100)
    (pools,) = fold.feeds
    assert pools.is_incomplete() and pools.expire(1000, 60) == 2
    assert [chunk.key[0].hex() for _, chunk in pools.chunks()] == ["cc"]


def test_a_restart_ends_a_gap_only_of_memory() -> None:
    """What was stored in L2 before the gap stays in doubt: the restart does not show what storage has."""
    tokens, fold = list(range(32)), Fold([Feed("node-a")])
    (pools,) = fold.feeds
    fold.take(store(1, entry("aa", tokens=tokens, at=0)), at_s=100)
    fold.take(store(3, entry("aa", tokens=tokens, at=0)), at_s=100)
    assert pools.is_incomplete()
    fold.take(store(1, entry("aa", tokens=tokens, at=0), incarnation=8, tier="l2", backend="fs"), at_s=101)
    assert not pools.is_incomplete()
    fold.take(store(3, entry("aa", tokens=tokens, at=0), incarnation=8), at_s=102)
    fold.take(store(1, entry("aa", tokens=tokens, at=0), incarnation=9), at_s=103)
    assert pools.is_incomplete() and pools.expire(1000, 60) == 1
    assert [owner.pool.backend for owner, _ in pools.chunks()] == ["dram"]


def test_a_shared_backend_is_read_by_the_instances_that_name_it() -> None:
    """Each one from the first batch in which it does so after its start. Only its batches can be missing."""
    shared = {"tier": "l2", "backend": "s3", "shared": True}
    feed = Feed("s3", True)
    fold, pool = Fold([feed]), Pool(None, Tier.L2, "s3")
    (pools,) = fold.feeds
    fold.take(store(2, event_type="config", **shared))  # the declaration of its memory is the first batch
    fold.take(store(9, instance_id="node-b"))
    assert fold.verdicts == [Verdict.APPLIED] * 2 and pools.instances_of(pool) == {"node-a"}
    fold.take(store(11, instance_id="node-b"))
    fold.take(store(12, instance_id="node-b", **{**shared, "backend": "other"}))
    assert not pools.is_incomplete() and pools.instances_of(pool) == {"node-a"}
    fold.take(store(13, instance_id="node-b", event_type="access", **shared))
    assert pools.instances_of(pool) == {"node-a", "node-b"}
    fold.take(store(1, incarnation=8))
    assert pools.instances_of(pool) == {"node-b"} and not pools.is_incomplete()
    fold.take(store(2, incarnation=9))
    fold.take(store(15, instance_id="node-b"))
    assert [cursor.gap_s > 0 for cursor in pools.cursors.values()] == [False, True]
    known = KnownFeed(feed.key, "topic", cursors=known_cursors(pools.cursors))
    assert decode_feed(encode_feed(known)).cursors_by_instance() == pools.cursors


def test_an_access_without_a_backend_names_no_shared_one() -> None:
    """LMCache's coordinator takes such a batch, whose backend would be one without a name."""
    (batch,) = decode_record(store(1, event_type="access", backend="", shared=True))
    assert not batch.shared


def test_a_shared_backend_is_one_pool_of_all_instances() -> None:
    """Whichever instance deletes an object there, it is gone."""
    fold = Fold()
    shared = {"tier": "l2", "backend": "s3", "shared": True}
    fold.take(store(1, entry("aa", tokens=list(range(32)), at=0), **shared))
    fold.take(store(1, entry("aa", tokens=list(range(32)), at=0), instance_id="node-b", **shared))
    assert {change.owner.pool.id for change in fold.publish()} == {"lmcache-shared/s3"}
    fold.take(store(2, entry("aa"), event_type="delete", instance_id="node-b", **shared))
    assert states(fold.publish()) == [(EVICTED, ["aa"])]


def test_objects_of_other_groups_of_layers_are_counted() -> None:
    """A chunk is pooled by the objects of the first group alone."""
    fold = Fold()
    other = entry("aa", tokens=list(range(32)), at=0)
    other["key"]["object_group_id"] = 1
    fold.take(store(1, other))
    assert not fold.publish() and fold.feeds[0].counts == {"other_group": 1}


@pytest.mark.parametrize(
    ("pool", "pool_id"),
    [
        (Pool("node-a", Tier.L1, "dram"), "lmcache/node-a/dram"),
        (Pool("a/b", Tier.L1, "devdax"), "lmcache/a%2Fb/devdax"),
        (Pool("node-a", Tier.L2, "fs"), "lmcache/node-a/l2/fs"),
        (Pool("node-a", Tier.L2, "l2"), "lmcache/node-a/l2/l2"),
        (Pool(None, Tier.L2, "s3"), "lmcache-shared/s3"),
        (Pool(None, Tier.L1, "cxl"), "lmcache-shared/cxl/l1"),
    ],
)
def test_a_pools_id_names_it(pool: Pool, pool_id: str) -> None:
    """Both directions agree, so that two pools never have one id."""
    assert pool.id == pool_id and parse_pool(pool_id) == pool


@pytest.mark.parametrize(
    "other", ["rack1", "lmcache/", "lmcache/a", "lmcache/a/l3/x", "lmcache/a/b/c/d", "lmcache-shared"]
)
def test_another_pools_id_is_none_of_lmcache(other: str) -> None:
    """Pools of other writers may have any id."""
    assert parse_pool(other) is None


def test_a_feeds_key_names_it() -> None:
    """Both directions agree."""
    for feed in (*FEEDS, Feed("a/b%"), Feed("s3/x", True)):
        assert parse_feed(feed.key) == feed
    assert parse_feed("pool/lmcache") is None and parse_feed("lmcache/a/dram") is None


DAMAGED: list[tuple[bytes | None, str]] = [
    (None, "empty"),
    (b"", "empty"),
    (b"\x00\x01", "not_json"),
    (b"{", "not_json"),
    (b"[]", "not_cache_events"),
    (b"{}", "not_cache_events"),
    (b'{"batches": 1}', "not_cache_events"),
    (b'{"batches": [1]}', "not_cache_events"),
    (b'{"batches": [{}]}', "not_cache_events"),
    (store(1, event_type="relocate"), "not_cache_events"),
    (store(1, tier="l3"), "not_cache_events"),
    (store(1, entries=[{"key": "aa"}]), "not_cache_events"),
    (store(1, entries={"packed": "AAAA"}), "not_cache_events"),
    (store(1, seq="1"), "not_cache_events"),
    (store(0), "bad_sequence"),
    (store(1, incarnation=-1), "bad_sequence"),
    (store(1, incarnation=1 << 60), "bad_sequence"),
    (store(1, instance_id=""), "bad_name"),
    (store(1, instance_id="a\n"), "bad_name"),
    (store(1, instance_id="x" * 100), "bad_name"),
    (store(1, backend=""), "bad_name"),
    (store(1, ts=-1.0), "bad_batch"),
    (store(1, capacity_bytes=-1), "bad_batch"),
    (store(1, entry("aa"), event_type="config"), "bad_batch"),
    (store(1, entry("xy")), "bad_key"),
    (store(1, entry("")), "bad_key"),
    (store(1, entry("aa", 2, 2)), "bad_key"),
    (store(1, {**entry("aa"), "size_bytes": -1}), "bad_entry"),
    (store(1, entry("aa", at=-2)), "bad_entry"),
    (store(1, entry("aa")).replace(b'"m"', b'"' + b"m" * 513 + b'"'), "bad_key"),
    (store(1, backend="x" * 100, event_type="access"), "bad_name"),
    (b'{"later":' + b"[" * 100_000 + b"]" * 100_000 + b',"batches":[]}', "not_json"),
]


@pytest.mark.parametrize(("value", "reason"), DAMAGED)
def test_a_record_that_is_not_of_this_format_is_refused_with_its_reason(value: bytes | None, reason: str) -> None:
    """The reason is the one of the dead letter, whose text contains nothing of the record's content."""
    with pytest.raises(BadRecord) as refused:
        decode_record(value)
    assert refused.value.reason == reason and "relocate" not in refused.value.message


def test_a_later_version_that_only_adds_fields_is_read() -> None:
    """Unknown fields are ignored at every level."""
    added = {**entry("aa", tokens=list(range(32)), at=0), "parent_hash": "00", "later": {"a": 1}}
    added["key"]["adapter"] = "x"
    fold = Fold()
    fold.take(json.dumps({**json.loads(store(1, added, priority=3)), "version": 2}).encode())
    assert states(fold.publish()) == [(IN_TRANSIT, ["aa"]), (POOLED, ["aa"])]


@pytest.mark.parametrize("n_tokens", [1, 8, 248, 249, 256, 1000, 5000])
def test_the_kernel_computes_blake3(n_tokens: int) -> None:
    """It agrees with the digests of the blake3 package, over messages of one to twenty of its chunks."""
    wanted = bytearray.fromhex(golden()["blake3"][str(n_tokens)])
    tokens = (np.arange(n_tokens, dtype=np.int64) * 2_654_435_761 % (1 << 32)).astype(np.uint32)
    parents = octets(bytes(32) + bytes(range(32)))
    scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
    assert find_parent(parents, tokens, octets(bytes(wanted)), scratch) == 1
    wanted[0] ^= 1
    assert find_parent(parents, tokens, octets(bytes(wanted)), scratch) == -1


def octets(content: bytes) -> Any:
    return np.frombuffer(content, dtype=np.uint8)
