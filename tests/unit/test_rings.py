"""The first ring of tests, which `make test` runs, is complete."""

from __future__ import annotations

import pytest

from streams.cli import cli
from streams.core.routing.trust import AnswerMode, DegradedReason
from tests.helpers.pages import ROOT
from tests.helpers.rings import Mark, marks

#: Every command, and what has no command of its own.
PROCESSES = frozenset(cli.commands) | {
    "client",  # streams.client in the process of a gateway
    "faust worker",  # `faust -A streams worker`, which `kvstreams worker` starts
    "live page",  # in a browser, which is installed in a few seconds where npm and node are
    "publisher",  # streams.engines.publisher in the process of an engine
    "router --processes",
    "worker --router-process",
}

#: `mode` of an answer; in place of `degraded`, each value of `degraded_because`.
ANSWERS = frozenset(each.value for each in (*AnswerMode, *DegradedReason)) - {AnswerMode.DEGRADED.value}

MARKS = tuple(marks(ROOT / "tests"))
SHOWN = frozenset(name for mark in MARKS for name in mark.shows)


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_every_process_runs_in_the_first_ring(process: str) -> None:
    """A command of the command line, or another way to start a process, has a test that runs it for real."""
    assert process in SHOWN, f'mark a test that runs it: @pytest.mark.first_ring("{process}")'


@pytest.mark.parametrize("answer", sorted(ANSWERS))
def test_every_answer_is_given_in_the_first_ring(answer: str) -> None:
    """Each mode of an answer, and each reason for `degraded`, has a test in which a router gives it."""
    assert answer in SHOWN, f'mark a test that gets this answer: @pytest.mark.first_ring("{answer}")'


@pytest.mark.parametrize("mark", MARKS, ids=[f"{mark.file}:{mark.line}" for mark in MARKS])
def test_marks_name_what_exists(mark: Mark) -> None:
    """Each name in a marker is a process or an answer, so that a removed one is removed here as well."""
    assert set(mark.shows) <= PROCESSES | ANSWERS
