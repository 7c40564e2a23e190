"""Failures of a simulated engine on command: which stream meets them, and after how many tokens."""

from __future__ import annotations

from typing import Any

import pytest

from streams.errors import InvalidRequest
from streams.lab.engines.faults import Fault, FaultKind, Faults, parse_fault


def test_the_first_stream_that_reaches_the_number_of_tokens_meets_the_fault_once() -> None:
    """A stream that could send 4 of 5 tokens goes on, one that could send 9 stops at 5, and a later one does not."""
    faults = Faults(Fault(FaultKind.STALL, 5))
    assert faults.tokens_before(0, 4) is None
    assert faults.tokens_before(0, 5) == 5
    assert faults.tokens_before(4, 9) == 5
    assert faults.begin() is FaultKind.STALL
    assert faults.stalled
    assert faults.tokens_before(0, 100) is None


def test_a_stream_that_is_longer_already_meets_the_fault_at_once() -> None:
    """Nothing more is sent of it."""
    assert Faults(Fault(FaultKind.DIE, 5)).tokens_before(7, 7) == 7


def test_arming_replaces_what_was_armed_and_ends_a_stall() -> None:
    """The new fault counts from the next chunk on, and `none` leaves nothing."""
    faults = Faults(Fault(FaultKind.STALL, 0))
    faults.begin()
    assert faults.arm(Fault(FaultKind.REFUSE, 3)) is None
    assert not faults.stalled
    assert faults.tokens_before(0, 9) == 3
    assert faults.arm(None) is None
    assert faults.tokens_before(0, 9) is None


@pytest.mark.parametrize(
    ("kind", "begins"), [(FaultKind.DIE, FaultKind.DIE), (FaultKind.STALL, FaultKind.STALL), (FaultKind.REFUSE, None)]
)
def test_without_a_number_of_tokens_an_engine_fails_at_once_or_refuses_the_next_stream(
    kind: FaultKind, begins: FaultKind | None
) -> None:
    """A refusal needs a stream; it does not wait for a number of tokens of it."""
    faults = Faults()
    assert faults.arm(Fault(kind)) is begins
    assert faults.tokens_before(2, 2) == 2


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"kind": "die", "after_tokens": 3}, Fault(FaultKind.DIE, 3)),
        ({"kind": "refuse"}, Fault(FaultKind.REFUSE)),
        ({"kind": "none"}, None),
    ],
)
def test_a_fault_is_read_from_json(body: dict[str, Any], fault: Fault | None) -> None:
    """`none` stands for no fault."""
    assert parse_fault(body) == fault


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "sleep"},
        {"kind": "die", "after_tokens": -1},
        {"kind": "die", "after_tokens": True},
        {"kind": ["die"]},
    ],
)
def test_an_impossible_fault_is_refused(body: dict[str, Any]) -> None:
    """The kind must be a known one, and the number of tokens a whole number that is not negative."""
    with pytest.raises(InvalidRequest):
        parse_fault(body)
