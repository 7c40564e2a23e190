"""A fleet on three brokers whose processes are killed and paused, in the short form of `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streams.lab.processes import Children
from streams.lab.stack import Stack
from tests.cluster_chaos import run, settings_of
from tests.helpers.broken_cluster import breakable_cluster


@pytest.mark.long_running
@pytest.mark.timeout(900)
def test_everything_agrees_after_every_kind_of_process_was_broken(tmp_path: Path, children: Children) -> None:
    """After a minute of faults nothing differs, no booking is left over, and no exact answer was wrong."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with breakable_cluster(tmp_path / "kafka") as cluster:
        try:
            print(run(Stack(settings_of(cluster), tmp_path, children), cluster, seed, 1.0, print))
        finally:
            children.stop()
