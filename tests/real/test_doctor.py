"""The doctor finds nothing wrong with a fleet of real engines, and its probe uses tokens that they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from streams.settings import as_environ
from tests.real.fleet import Fleet

TIMEOUT_S = 120.0


def test_the_probe_is_found_by_the_router(fleet: Fleet) -> None:
    """The probe's blocks get the hashes that a router computes, in an engine with a vocabulary of 2,048 tokens."""
    command = [sys.executable, "-m", "streams.cli", "doctor", "--probe", "--json", "--router", fleet.worker.url]
    environ = {**os.environ, **as_environ(fleet.worker.settings)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    report = json.loads(ended.stdout)
    of_the_probe = [finding for finding in report["findings"] if finding["group"] == "probe"]
    assert not of_the_probe, of_the_probe
    assert ended.returncode == 0, report
