"""Ids that a router gives to requests without one."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from streams.kafka.load_records import request_partition
from streams.router_api.sharing.request_ids import RequestIds

N_IDS = 16_384
N_THREADS = 4
N_PARTITIONS = 8


def partition(request_id: str) -> int:
    return request_partition(request_id, N_PARTITIONS)


def test_no_two_requests_get_the_same_id_even_from_several_threads() -> None:
    """Ids are 32 hexadecimal digits, and none is given twice."""
    ids = RequestIds(partition)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(N_THREADS) as pool:
            parts = pool.map(lambda _: [ids.next() for _ in range(N_IDS)], range(N_THREADS))
            made = [each for part in parts for each in part]
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set(made)) == N_THREADS * N_IDS
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_two_routers_make_different_ids() -> None:
    """Ids come from the system's random numbers, so that nothing has to be agreed."""
    first, second = RequestIds(partition), RequestIds(partition)
    assert not {first.next() for _ in range(1000)} & {second.next() for _ in range(1000)}


def test_requests_that_follow_each_other_mostly_have_the_same_partition() -> None:
    """The partition changes every 64 ids or so, and all partitions get about as many."""
    ids = RequestIds(partition)
    made = [partition(ids.next()) for _ in range(N_IDS)]
    n_changes = sum(one != other for one, other in itertools.pairwise(made))
    assert n_changes <= N_IDS / 64 + N_PARTITIONS
    counts = Counter(made)
    assert len(counts) == N_PARTITIONS
    assert max(counts.values()) < 1.5 * min(counts.values())
