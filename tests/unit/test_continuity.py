"""Whether an engine is still the process that it was, from what it could be brought to tell."""

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


def life(incarnation: int) -> NewIncarnation:
    return NewIncarnation(Incarnation(incarnation))


@pytest.mark.parametrize(
    ("known", "told", "decision"),
    [
        (None, evidence(3_000), life(3_000)),
        (None, evidence(None), life(NOW)),
        (None, evidence(None, reachable=False), Undecided()),
        (KNOWN, evidence(1_000), SameIncarnation()),
        (KNOWN, evidence(1_000, ReplayCheck.OTHER), SameIncarnation()),  # the start time is above every other evidence
        (KNOWN, evidence(3_000), life(3_000)),
        # An earlier start than what is known: that was minted when nobody told, or the clock was set back.
        (KNOWN, evidence(500, ReplayCheck.SAME), SameIncarnation()),
        (KNOWN, evidence(500, ReplayCheck.OTHER), life(NOW)),
        (KNOWN, evidence(500, ReplayCheck.SILENT), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SAME), SameIncarnation()),
        (KNOWN, evidence(None, ReplayCheck.SAME, reachable=False), SameIncarnation()),
        (KNOWN, evidence(None, ReplayCheck.OTHER), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.UNSENT), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.FORGOTTEN), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.FORGOTTEN, reachable=False), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SILENT), life(NOW)),
        (KNOWN, evidence(None, ReplayCheck.SILENT, reachable=False), Undecided()),
        (UNKNOWN_DIGEST, evidence(None), life(NOW)),
    ],
)
def test_a_bridge_that_starts(known: KnownIncarnation | None, told: Evidence, decision: Decision) -> None:
    """Start time first, then the bytes of the last batch known, then a life greater than the last."""
    assert decide_at_start(known, told, NOW) == decision


@pytest.mark.parametrize(
    ("seen", "told", "contradicted", "decision"),
    [
        (1_000, evidence(1_000), False, SameIncarnation()),
        (1_000, evidence(1_000), True, SameIncarnation()),  # a late batch of an older life is no new one
        (1_000, evidence(2_000), False, life(2_000)),
        (1_000, evidence(900), False, life(1_001)),  # restarted on a machine whose clock was set back
        (1_000, evidence(None, ReplayCheck.SILENT, reachable=False), False, SameIncarnation()),
        (1_000, evidence(None, ReplayCheck.OTHER, reachable=False), False, life(NOW)),
        (None, evidence(2_000, ReplayCheck.SAME), False, SameIncarnation()),  # its metrics tell only now
        (None, evidence(2_000, ReplayCheck.UNSENT), False, life(2_000)),
        (None, evidence(None, ReplayCheck.SAME), True, SameIncarnation()),
        (None, evidence(None, ReplayCheck.OTHER), False, life(NOW)),
        (None, evidence(None, ReplayCheck.UNSENT), False, life(NOW)),
        (None, evidence(None, ReplayCheck.FORGOTTEN), False, SameIncarnation()),
        (None, evidence(None, ReplayCheck.SILENT), False, SameIncarnation()),
        (None, evidence(None, ReplayCheck.SILENT), True, life(NOW)),
    ],
)
def test_a_bridge_that_feeds(seen: int | None, told: Evidence, contradicted: bool, decision: Decision) -> None:
    """It goes on until something contradicts."""
    start = None if seen is None else Incarnation(seen)
    assert decide_while_feeding(KNOWN, start, told, NOW, contradicted=contradicted) == decision


def test_proof_is_asked_for_only_where_it_decides() -> None:
    """A start time that is known, or newer than all that is, needs none; nor has a life without batches any."""
    assert not needs_replay_check(None, evidence(None))
    assert not needs_replay_check(UNKNOWN_DIGEST, evidence(None))
    assert not needs_replay_check(KNOWN, evidence(1_000))
    assert not needs_replay_check(KNOWN, evidence(2_000))
    assert needs_replay_check(KNOWN, evidence(999))
    assert needs_replay_check(KNOWN, evidence(None))


@given(
    known=st.builds(KnownIncarnation, st.integers(0, 10_000).map(Incarnation), st.integers(-1, 5), st.just(1)),
    told=st.builds(
        Evidence,
        st.booleans(),
        st.one_of(st.none(), st.integers(0, 10_000).map(Incarnation)),
        st.sampled_from(ReplayCheck),
    ),
    now=st.integers(0, 10_000),
    contradicted=st.booleans(),
)
def test_a_new_life_is_always_greater_than_the_last(
    known: KnownIncarnation, told: Evidence, now: int, contradicted: bool
) -> None:
    """Whatever the clocks say, since agents refuse what is older."""
    for decision in (
        decide_at_start(known, told, now),
        decide_while_feeding(known, known.incarnation, told, now, contradicted=contradicted),
        decide_while_feeding(known, None, told, now, contradicted=contradicted),
    ):
        assert not isinstance(decision, NewIncarnation) or decision.incarnation > known.incarnation


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (evidence(3_000), "its metrics say that the engine started at 3000 us"),
        (
            evidence(None, ReplayCheck.UNSENT),
            "its metrics do not say when the engine started, and the engine has never sent that number",
        ),
        (
            evidence(None, reachable=False),
            "its metrics do not answer, and the engine did not answer, or there is nothing to compare with",
        ),
        (SameIncarnation(), "the life known goes on"),
        (life(7), "life 7 begins"),
        (Undecided(), "nobody tells which life it is"),
    ],
)
def test_evidence_and_decisions_are_words_in_a_log(value: Evidence | Decision, words: str) -> None:
    """And no reprs of ours."""
    assert str(value) == words
