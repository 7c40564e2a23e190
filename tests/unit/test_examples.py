"""The examples that need no Kafka run, and print what their docstrings announce."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def printed(name: str, *arguments: str) -> str:
    """Run an example in a process of its own and return what it printed."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("name", ["gateway.py", "generate.py", "least_prefill.py"])
def test_the_examples_that_need_a_router_explain_themselves(name: str) -> None:
    """They start nothing then."""
    assert "kvstreams up" in printed(name, "--help")


def test_the_library_example_shows_that_a_hole_ends_a_match() -> None:
    """After the eviction of its third block, rank 1/0 matches two blocks and rank 2/0 is the best."""
    assert "best rank: 2/0 with 5 of 8 blocks" in printed("index_as_a_library.py")


def test_the_offline_comparison_finds_more_in_caches_with_kv_routing() -> None:
    """Each policy prints one share, and those of the two that read the index are the largest."""
    shares = {
        mode: float(share)
        for mode, share in re.findall(r"^(\S+) +([\d.]+)%", printed("compare_policies_offline.py"), re.M)
    }
    assert shares.keys() == {"kv", "expected-time", "round-robin", "random"}
    assert min(shares["kv"], shares["expected-time"]) > max(shares["round-robin"], shares["random"])
    assert len(set(shares.values())) == 4
