"""Decisions whether an engine is still the same process, from the evidence that could be found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.events import BEFORE_FIRST
from streams.core.ids import Incarnation
from streams.engines.continuity import (
    Decision,
    Evidence,
    KnownIncarnation,
    NewIncarnation,
    ReplayCheck,
    SameIncarnation,
    Undecided,
    decide_at_start,
    decide_while_feeding,
    needs_replay_check,
)

NOW = 5_000
KNOWN = KnownIncarnation(Incarnation(1_000), 7, 99)
UNKNOWN_DIGEST = KnownIncarnation(Incarnation(1_000), BEFORE_FIRST, 0)


def evidence(started: int | None, replay_check: ReplayCheck = ReplayCheck.SILENT, reachable: bool = True) -> Evidence:
    return Evidence(reachable, None if started is None else Incarnation(started), replay_check)


def begins(incarnation: int) -> NewIncarnation:
    return NewIncarnation(Incarnation(incarnation))


@pytest.mark.parametrize(
    ("known", "found", "decision"),
    [
        (None, evidence(3_000), begins(3_000)),
        (None, evidence(None), begins(NOW)),
        (None, evidence(None, reachable=False), Undecided()),
        (KNOWN, evidence(1_000), SameIncarnation()),
        (KNOWN, evidence(1_000, ReplayCheck.FORGOTTEN), SameIncarnation()),
        # The start time is that of the process that serves HTTP; the one that publishes was replaced.
        (KNOWN, evidence(1_000, ReplayCheck.OTHER), begins(NOW)),
        (KNOWN, evidence(1_000, ReplayCheck.UNSENT), begins(NOW)),
        (KNOWN, evidence(3_000), begins(3_000)),
        # An earlier start than the known one: that was minted without a start time, or the clock was set back.
        (KNOWN, evidence(500, ReplayCheck.SAME), SameIncarnation()),
        (KNOWN, evidence(500, ReplayCheck.OTHER), begins(NOW)),
        (KNOWN, evidence(500, ReplayCheck.SILENT), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SAME), SameIncarnation()),
        (KNOWN, evidence(None, ReplayCheck.SAME, reachable=False), SameIncarnation()),
        (KNOWN, evidence(None, ReplayCheck.OTHER), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.UNSENT), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.FORGOTTEN), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.FORGOTTEN, reachable=False), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SILENT), begins(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SILENT, reachable=False), Undecided()),
        (UNKNOWN_DIGEST, evidence(None), begins(NOW)),
    ],
)
def test_a_starting_bridge_decides(known: KnownIncarnation | None, found: Evidence, decision: Decision) -> None:
    """A later start time decides first, then the bytes of the last known batch, then an equal start time."""
    assert decide_at_start(known, found, NOW) == decision


@pytest.mark.parametrize(
    ("seen", "found", "contradicted", "decision"),
    [
        (1_000, evidence(1_000), False, SameIncarnation()),
        (1_000, evidence(1_000), True, begins(1_001)),  # another process publishes behind the same HTTP server
        (1_000, evidence(1_000, ReplayCheck.SAME), True, SameIncarnation()),  # a late batch of an older incarnation
        (1_000, evidence(1_000, ReplayCheck.FORGOTTEN), True, begins(1_001)),
        (1_000, evidence(1_000, ReplayCheck.FORGOTTEN), False, SameIncarnation()),
        (1_000, evidence(1_000, ReplayCheck.OTHER), False, begins(1_001)),
        (1_000, evidence(1_000, ReplayCheck.UNSENT), False, begins(1_001)),
        (1_000, evidence(2_000), False, begins(2_000)),
        (1_000, evidence(900), False, begins(1_001)),  # restarted on a machine whose clock was set back
        (1_000, evidence(None, ReplayCheck.SILENT, reachable=False), False, SameIncarnation()),
        (1_000, evidence(None, ReplayCheck.OTHER, reachable=False), False, begins(NOW)),
        (None, evidence(2_000, ReplayCheck.SAME), False, SameIncarnation()),  # its metrics report it only now
        (None, evidence(2_000, ReplayCheck.UNSENT), False, begins(2_000)),
        (None, evidence(None, ReplayCheck.SAME), True, SameIncarnation()),
        (None, evidence(None, ReplayCheck.OTHER), False, begins(NOW)),
        (None, evidence(None, ReplayCheck.UNSENT), False, begins(NOW)),
        (None, evidence(None, ReplayCheck.FORGOTTEN), False, SameIncarnation()),
        (None, evidence(None, ReplayCheck.SILENT), False, SameIncarnation()),
        (None, evidence(None, ReplayCheck.SILENT), True, begins(NOW)),
    ],
)
def test_a_feeding_bridge_decides(seen: int | None, found: Evidence, contradicted: bool, decision: Decision) -> None:
    """A bridge that is feeding continues the incarnation until something contradicts it."""
    start = None if seen is None else Incarnation(seen)
    assert decide_while_feeding(KNOWN, start, found, NOW, contradicted=contradicted) == decision


@pytest.mark.parametrize(
    ("seen", "found", "decision"),
    [
        (1_000, evidence(1_000), SameIncarnation()),
        (1_000, evidence(1_000, ReplayCheck.OTHER), begins(1_001)),
        (1_000, evidence(2_000), begins(2_000)),
        (None, evidence(None), begins(NOW)),
    ],
)
def test_a_stray_batch_ends_no_incarnation_whose_start_time_is_known(
    seen: int | None, found: Evidence, decision: Decision
) -> None:
    """A single batch of an older incarnation may arrive late, through a connection that had brought known batches."""
    start = None if seen is None else Incarnation(seen)
    assert decide_while_feeding(KNOWN, start, found, NOW, contradicted=True, stray=True) == decision


def test_the_replay_socket_is_asked_only_if_its_answer_matters() -> None:
    """A bridge does not ask it if the start time is later than the known one, nor without a batch to compare with."""
    assert not needs_replay_check(None, evidence(None))
    assert not needs_replay_check(UNKNOWN_DIGEST, evidence(None))
    assert needs_replay_check(KNOWN, evidence(1_000))
    assert not needs_replay_check(KNOWN, evidence(2_000))
    assert needs_replay_check(KNOWN, evidence(999))
    assert needs_replay_check(KNOWN, evidence(None))


@given(
    known=st.builds(KnownIncarnation, st.integers(0, 10_000).map(Incarnation), st.integers(-1, 5), st.just(1)),
    found=st.builds(
        Evidence,
        st.booleans(),
        st.one_of(st.none(), st.integers(0, 10_000).map(Incarnation)),
        st.sampled_from(ReplayCheck),
    ),
    now=st.integers(0, 10_000),
    contradicted=st.booleans(),
)
def test_a_new_incarnation_is_always_greater_than_the_last(
    known: KnownIncarnation, found: Evidence, now: int, contradicted: bool
) -> None:
    """A new incarnation is greater whatever the clocks show, since agents reject records of older ones."""
    for decision in (
        decide_at_start(known, found, now),
        decide_while_feeding(known, known.incarnation, found, now, contradicted=contradicted),
        decide_while_feeding(known, None, found, now, contradicted=contradicted),
    ):
        assert not isinstance(decision, NewIncarnation) or decision.incarnation > known.incarnation


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (evidence(3_000), "its metrics report that the engine started at 3000 us"),
        (
            evidence(3_000, ReplayCheck.OTHER),
            "it started at 3000 us by its metrics, and the engine has another batch of that number",
        ),
        (
            evidence(None, ReplayCheck.UNSENT),
            "its metrics do not report when the engine started, and the engine has never sent that number",
        ),
        (
            evidence(None, reachable=False),
            "its metrics do not answer, and the engine did not answer, or there is nothing to compare with",
        ),
        (SameIncarnation(), "the known incarnation continues"),
        (begins(7), "incarnation 7 begins"),
        (Undecided(), "the incarnation is not known yet"),
    ],
)
def test_evidence_and_decisions_are_readable_in_a_log(value: Evidence | Decision, text: str) -> None:
    """Their text is a phrase and not a representation of the object."""
    assert str(value) == text
