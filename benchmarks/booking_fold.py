"""`python -m benchmarks.booking_fold`: the processor time of reading and folding another router's bookings.

What lives here: records of bookings that are freed 200 bookings later, in batches as a router reads them, and the time
that this process needs for them. What must not: Kafka and reading (http, case `visible`, measures a whole router).
"""

from __future__ import annotations

import gc
import time
from collections import deque

import click
import numpy as np

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.kafka.clients import producer
from streams.kafka.load_records import encoded_load, load_key
from streams.kafka.records import decode_load
from streams.router_api.sharing.loads_sync import LoadsSync
from streams.settings import Settings
from streams.topics import topics

_ALIVE, _RANKS, _PROMPTS, _BLOCKS = 200, 8, 64, 128

_Batch = list[tuple[bytes, bytes | None, int, int]]


def batches(n_pairs: int, per_batch: int, partitions: int) -> list[_Batch]:
    """Keys, values, append times and partitions of all records, by batch."""
    rng = np.random.default_rng(1)
    shared = rng.integers(1, 1 << 63, size=_BLOCKS, dtype=np.uint64)
    prompts = []
    for number in range(_PROMPTS):
        own = rng.integers(1, 1 << 63, size=_BLOCKS // 4 + number, dtype=np.uint64)
        prompts.append(pack_hashes(np.concatenate([shared[: _BLOCKS - len(own)], own])))
    alive: deque[tuple[BookingId, int]] = deque()
    made: list[_Batch] = []
    at_ms = 1_700_000_000_000
    for first in range(0, n_pairs, per_batch):
        batch: _Batch = []
        for number in range(first, first + per_batch):
            booking_id = BookingId(f"{number:032x}", "r" * 32, number)
            rank = RankId(WorkerId(1 + number % _RANKS), DpRank(0))
            booking = Booking(rank, "model", 16 * _BLOCKS, prompts[number % _PROMPTS], 0, _BLOCKS)
            value = encoded_load(booking_id, BookingPhase.ADD, booking, at_ms)
            batch.append((load_key(booking_id, BookingPhase.ADD), value, at_ms, number % partitions))
            alive.append((booking_id, number % partitions))
        while len(alive) > _ALIVE:
            booking_id, partition = alive.popleft()
            value = encoded_load(booking_id, BookingPhase.FREE, None, at_ms)
            batch.append((load_key(booking_id, BookingPhase.FREE), value, at_ms, partition))
        made.append(sorted(batch, key=lambda record: record[3]))
        at_ms += per_batch
    return made


@click.command(help=__doc__)
@click.option("--pairs", default=3_000, show_default=True)
@click.option("--per-batch", default=12, show_default=True, help="Bookings that are read together.")
@click.option("--repeats", default=5, show_default=True, help="The fastest one counts.")
def main(pairs: int, per_batch: int, repeats: int) -> None:
    knobs = Settings(kafka="127.0.0.1:1")  # nothing is sent
    records = batches(pairs, per_batch, knobs.partitions)
    client = producer(knobs, log_level=0)
    decoding: list[float] = []
    both: list[float] = []
    gc.disable()
    for _ in range(repeats):
        sync = LoadsSync(knobs, topics(knobs).router_loads, client, lambda: time.monotonic_ns() // 1_000_000)
        began_s = time.process_time()
        for batch in records:
            for _, value, _, _ in batch:
                decode_load(value)
        found_s = time.process_time()
        for batch in records:
            assert not sync._fold_all(batch)
        decoding.append(found_s - began_s)
        both.append(time.process_time() - found_s)
    click.echo(f"decoding:             {min(decoding) / pairs * 1e6:5.1f} us per booking and its free")
    click.echo(f"decoding and folding: {min(both) / pairs * 1e6:5.1f} us")


if __name__ == "__main__":
    main()
