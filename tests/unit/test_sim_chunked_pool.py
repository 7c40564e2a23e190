"""A simulated pool of chunks: what it stores and finds, and its reports in LMCache's format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streams.core.hashing import BASE_SEED, local_hashes, salted_seed, sequence_hashes
from streams.errors import SettingsError
from streams.lab.engines.chunked_pool import ChunkedPool, LmcacheReports
from streams.lab.engines.pool import Offload, PoolConfig
from streams.lmcache.wire import NO_OFFSET, CacheBatch, EventType, decode_record

BLOCK_SIZE, CHUNK_BLOCKS = 16, 16
CONFIG = PoolConfig("p", BLOCK_SIZE, 1000, capacity_blocks=3 * CHUNK_BLOCKS, latency_us=0.0)
REPORTS = LmcacheReports("node-a")

#: Hashes of the chunks of tokens 0..511, as LMCache's `TokenHasher.compute_chunk_hashes` has them (0.5.6).
DIGESTS = (
    "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4",
    "e5ffee45c2b9db326814c9692dc594369887ba3b0df5761817820b60f864c8e0",
)


def pool_of(config: PoolConfig = CONFIG) -> ChunkedPool:
    return ChunkedPool(config, REPORTS, "m", 7)


def chain_of(first_token: int, n_tokens: int, salt: str | None = None) -> Offload:
    tokens = np.arange(first_token, first_token + n_tokens, dtype="<u4")
    local = local_hashes(tokens, BLOCK_SIZE, first_seed=salted_seed(BASE_SEED, salt))
    return Offload(tuple(sequence_hashes(local).tolist()), tokens=tokens.tobytes())


def part(chain: Offload, first: int, last: int) -> Offload:
    """Return some blocks of a chain that begins at the root."""
    before = chain.keys[first - 1] if first else None
    size = 4 * BLOCK_SIZE
    return Offload(chain.keys[first:last], before, first, chain.tokens[first * size : last * size])


def reported(pool: ChunkedPool, at_ms: float) -> list[CacheBatch]:
    assert pool.advance(at_ms) == []
    pool.check()
    return [batch for record in pool.take_records() for batch in decode_record(record)]


def test_chunks_have_the_names_that_lmcache_gives_them() -> None:
    """A chunk is reported once it is complete and written, whichever blocks came together."""
    pool, chain = pool_of(), chain_of(0, 512)
    (declared,) = reported(pool, 0.0)
    assert (declared.kind, declared.capacity_bytes, declared.number) == (EventType.CONFIG, 3 * 256 * 1000, 1)
    for first, last in ((0, 5), (5, 15), (15, 20), (20, 31)):
        pool.offload(1.0, part(chain, first, last))
    (first_batch,) = reported(pool, 100.0)
    pool.offload(100.0, part(chain, 31, 32))
    (second_batch,) = reported(pool, 200.0)
    assert [(each.kind, each.instance, each.backend, each.incarnation) for each in (first_batch, second_batch)] == [
        (EventType.STORE, "node-a", "devdax", 7)
    ] * 2
    (one,), (two,) = first_batch.entries, second_batch.entries
    assert (one.chunk_hash.hex(), two.chunk_hash.hex()) == DIGESTS
    assert (one.offset, two.offset) == (0, 256) and (one.world_size, one.rank) == (1, 0)
    assert two.tokens == str(list(range(256, 512))).replace(" ", "").encode()
    pool.offload(300.0, chain)  # another engine has computed it as well
    assert reported(pool, 400.0) == []


def test_only_whole_chunks_after_whole_chunks_are_found() -> None:
    """A load begins where the engine's own blocks end, and ends with a chunk."""
    pool, chain = pool_of(), chain_of(0, 700)
    pool.offload(0.0, chain)
    pool.advance(100.0)
    found = [pool.load(100.0, chain.keys[first:], "e").n_blocks for first in (0, 3, 16, 20, 32)]
    assert found == [32, 29, 16, 12, 0]
    assert pool.load(100.0, chain.keys[:30], "e").n_blocks == 16
    assert pool.load(100.0, chain_of(5000, 256).keys, "e").n_blocks == 0


def test_what_is_evicted_is_reported_and_ends_what_follows_it() -> None:
    """The least recently used chunk goes first, and of a prompt the last one."""
    pool, first, second = pool_of(), chain_of(0, 512), chain_of(9000, 512)
    pool.offload(0.0, first)
    reported(pool, 100.0)
    pool.offload(100.0, second)  # three chunks fit
    batches = reported(pool, 200.0)
    assert [(batch.kind, len(batch.entries)) for batch in batches] == [(EventType.DELETE, 1), (EventType.STORE, 2)]
    (gone,) = batches[0].entries
    assert gone.chunk_hash.hex() == DIGESTS[1] and (gone.tokens, gone.offset) == (b"", NO_OFFSET)
    assert pool.load(200.0, first.keys, "e").n_blocks == 16
    pool.offload(200.0, first)
    assert pool.load(300.0, second.keys[16:], "e").n_blocks == 0


def test_blocks_of_adapters_and_salts_are_left_out() -> None:
    """Their hashes are not those of their tokens alone, which is all that a report has."""
    pool = pool_of()
    pool.offload(0.0, chain_of(0, 512, "tenant"))
    pool.offload(0.0, part(chain_of(0, 512), 16, 32))  # what precedes it was never offloaded
    assert [batch.kind for batch in reported(pool, 100.0)] == [EventType.CONFIG]


@pytest.mark.parametrize("changes", [{"block_size": 48}, {"capacity_blocks": 15}, {"link": "own"}])
def test_a_pool_that_cannot_have_chunks_is_refused(changes: dict[str, object]) -> None:
    """Chunks are whole blocks, at least one fits, and all engines write through one process."""
    with pytest.raises(SettingsError):
        pool_of(replace(CONFIG, **changes))  # type: ignore[arg-type]
