"""Which failed tests are run again, and what is written about those that passed only alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import rerun

A, B = "tests/kafka/test_a.py::test_a", "tests/kafka/test_b.py::test_b[x y]"


class Reruns:
    """The second runs of a test, which end with a status; and the files that rerun reads and writes."""

    def __init__(self, folder: Path) -> None:
        self.status = 0
        self.ran: list[list[str]] = []
        self.last_failed = folder / "lastfailed"
        self.flaky = folder / "flaky.txt"

    def run_alone(self, tests: Sequence[str]) -> int:
        self.ran.append(list(tests))
        return self.status

    def fail(self, *tests: str) -> None:
        """The first run ends with these failures, and leaves them as pytest does."""
        self.last_failed.write_text(json.dumps(dict.fromkeys(tests, True)))


@pytest.fixture
def reruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reruns:
    """Give the second runs, with files of their own."""
    given = Reruns(tmp_path)
    monkeypatch.setattr(rerun, "LAST_FAILED", given.last_failed)
    monkeypatch.setattr(rerun, "FLAKY", given.flaky)
    monkeypatch.setattr(rerun, "_run_alone", given.run_alone)
    return given


def test_a_test_that_passes_only_alone_is_excused_once_and_listed(reruns: Reruns) -> None:
    """The list fails the nightly run; a listed test is not run again, and another one is added to the list."""
    assert rerun.main(["--listed"]) == 0
    reruns.fail(B)
    assert (rerun.main(), reruns.flaky.read_text()) == (0, f"{B}\n")
    assert rerun.main(["--listed"]) == 1
    reruns.fail(A, B)
    assert rerun.main() == 1
    reruns.fail(A)
    assert (rerun.main(), reruns.flaky.read_text()) == (0, f"{A}\n{B}\n")
    assert reruns.ran == [[B], [A]]


def test_a_test_that_fails_alone_as_well_is_a_failure(reruns: Reruns) -> None:
    """It is not listed, since it is not flaky."""
    reruns.fail(A, B)
    reruns.status = 1
    assert rerun.main() == 1
    assert reruns.ran == [[A, B]] and not reruns.flaky.exists()


@pytest.mark.parametrize(("n_failed", "n_runs"), [(0, 0), (1, 1), (rerun.FAILED_MAX, 1), (rerun.FAILED_MAX + 1, 0)])
def test_many_failures_are_not_chance(reruns: Reruns, n_failed: int, n_runs: int) -> None:
    """Beyond the limit, and without any failed test, nothing is run again and the run has failed."""
    reruns.fail(*(f"tests/unit/test_a.py::test_{n}" for n in range(n_failed)))
    assert rerun.main() == (0 if n_runs else 1)
    assert len(reruns.ran) == n_runs


def test_without_a_list_of_failed_tests_nothing_is_run_again(reruns: Reruns) -> None:
    """Pytest ended before it could write one."""
    assert rerun.main() == 1
    assert not reruns.ran
