"""Routers and fronts work with a version of aiohttp that lacks the private parts which they use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT

#: Tests that assert what the installed version of aiohttp makes possible.
OF_THIS_VERSION = (
    "tests/unit/test_fast_lane.py::test_this_version_of_aiohttp_has_the_fast_lane",
    "tests/unit/test_fast_lane.py::test_a_middleware_sees_every_request",
    "tests/processes/test_front.py::test_headers_and_the_first_token_come_together",
    "tests/processes/test_front.py::test_a_connection_without_a_request_has_no_task_and_ends_with_the_front",
)


@pytest.mark.first_ring
@pytest.mark.parametrize(
    ("file", "names", "servers_per_test"),
    [
        ("tests/unit/test_fast_lane.py", "test", 0),
        ("tests/unit/test_http_limits.py", "408 or are_limited or at_the_same_time", 0),
        (
            "tests/processes/test_front.py",
            "unchanged or client or replace or refusals or full or stopping or before",
            1,
        ),
    ],
)
def test_aiohttp_serves_everything_if_its_private_parts_have_moved(
    tmp_path: Path, file: str, names: str, servers_per_test: int
) -> None:
    """Answers and limits are the same, and each server logs one line about it when it starts."""
    log = tmp_path / "log"
    options = ["-q", "--numprocesses=0", "-p", "tests.helpers.moved_aiohttp", "-o", f"log_file={log}"]
    options += [f"--deselect={test}" for test in OF_THIS_VERSION]
    command = [sys.executable, "-m", "pytest", *options, "-k", names, file]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    n_passed = int(re.findall(r"(\d+) passed", run.stdout)[-1])
    assert n_passed >= 5
    # There is a router for all tests of a file, and a front for each test that needs one.
    assert len(re.findall(r"aiohttp \S+ lacks parts", log.read_text())) == 1 + servers_per_test * n_passed
