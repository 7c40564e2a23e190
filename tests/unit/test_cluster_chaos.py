"""The faults that a seed draws for a fleet on three brokers."""

from __future__ import annotations

import random

from tests.cluster_chaos import KINDS, schedule


def test_the_same_seed_draws_the_same_faults() -> None:
    """A difference that a run finds can be looked for again with its seed; another seed draws other faults."""
    first, again, other = (schedule(random.Random(seed), 600.0) for seed in (1, 1, 2))
    assert first == again != other


def test_every_kind_of_process_is_broken_and_only_one_of_each_at_a_time() -> None:
    """Ten minutes break all of them in each way; two brokers are never away at once."""
    lanes = schedule(random.Random(1), 600.0)
    assert len(lanes) == len(KINDS)
    for lane in lanes:
        ends = [fault.at_s + fault.lasts_s for fault in lane]
        assert all(end < later.at_s for end, later in zip(ends, lane[1:], strict=False))
        assert len(lane) > 10
