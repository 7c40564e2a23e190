"""The states of a block in CXL memory: every pair, legal or not, the metadata, and the diagram that the docs show."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest

from streams.core.ids import WorkerId
from streams.cxl import CxlMemoryMetadata, CxlMemoryState
from streams.cxl.states import (
    NOT_POOLED,
    RULES,
    RefusalReason,
    TransitionRefused,
    after_owner_ended,
    stored_as,
    transition,
)
from streams.errors import InvalidEvent

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState

HERE = (WorkerId(1), WorkerId(2))
THERE = (WorkerId(3),)


def test_metadata_has_defaults_and_takes_plain_strings_and_lists() -> None:
    """Without arguments a block is in the GPU's memory; a state's value and a list of workers are converted."""
    assert CxlMemoryMetadata() == NOT_POOLED == CxlMemoryMetadata(LOCAL, None, [])
    metadata = CxlMemoryMetadata(state="cxl_pooled", pool_id="rack1", accessible_workers=[7, 8])
    assert metadata == CxlMemoryMetadata(POOLED, "rack1", (WorkerId(7), WorkerId(8)))
    assert metadata.state is POOLED
    assert metadata.accessible_workers == (7, 8)
    assert hash(metadata) == hash(replace(metadata))


@pytest.mark.parametrize("state", ["elsewhere", "", "CXL_POOLED", None, 3])
def test_metadata_with_an_unknown_state_cannot_be_built(state: Any) -> None:
    """The error lists the states that exist."""
    with pytest.raises(InvalidEvent, match="local_gpu, in_transit, cxl_pooled, evicted"):
        CxlMemoryMetadata(state)


def test_metadata_cannot_be_changed() -> None:
    """Rows of a table share one value."""
    with pytest.raises(FrozenInstanceError):
        NOT_POOLED.pool_id = "rack1"  # type: ignore[misc]


def test_the_public_metadata_is_imported_without_kafka() -> None:
    """An engine that only builds values loads no client library."""
    script = "import sys; from streams.cxl import CxlMemoryMetadata; print([m for m in sys.modules if 'kafka' in m])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def known(state: CxlMemoryState) -> CxlMemoryMetadata:
    return NOT_POOLED if state is LOCAL else CxlMemoryMetadata(state, "here", HERE)


def expected(source: CxlMemoryState, target: CxlMemoryState, pool: str | None) -> CxlMemoryMetadata | RefusalReason:
    """Return what the documented table has for a transition, written a second time without the rules."""
    if target is TRANSIT:
        return RefusalReason.NO_POOL if pool is None else CxlMemoryMetadata(TRANSIT, pool, THERE)
    if target is POOLED and source is not TRANSIT:
        return RefusalReason.NOT_IN_TRANSIT
    if pool == "there" and source in (TRANSIT, POOLED):
        return RefusalReason.OTHER_POOL
    if target is LOCAL:
        return NOT_POOLED
    return CxlMemoryMetadata(target, known(source).pool_id, known(source).accessible_workers)


@pytest.mark.parametrize("pool", [None, "here", "there"])
@pytest.mark.parametrize(("source", "target"), list(product(CxlMemoryState, CxlMemoryState)))
def test_every_pair_of_states_with_and_without_a_pool(
    source: CxlMemoryState, target: CxlMemoryState, pool: str | None
) -> None:
    """A legal transition gives the metadata of the documented table; an illegal one gives the reason."""
    found = transition(known(source), target, pool, THERE)
    outcome = expected(source, target, pool)
    if isinstance(outcome, RefusalReason):
        assert isinstance(found, TransitionRefused)
        assert found.reason is outcome
        assert found.message
    else:
        assert found == outcome


def test_every_state_has_a_rule() -> None:
    """A state without a rule could never be entered, and the lookup would raise."""
    assert set(RULES) == set(CxlMemoryState)


@pytest.mark.parametrize("state", CxlMemoryState)
def test_the_end_of_an_incarnation_takes_nothing_out_of_a_pool(state: CxlMemoryState) -> None:
    """A block in transit becomes evicted and keeps its placement; a block in any other state does not change."""
    found = after_owner_ended(known(state))
    assert found == (CxlMemoryMetadata(EVICTED, "here", HERE) if state is TRANSIT else known(state))


@pytest.mark.parametrize("state", CxlMemoryState)
def test_a_block_stored_in_a_state_gets_there_by_legal_transitions(state: CxlMemoryState) -> None:
    """A block that is stored in a pool is in transit first."""
    metadata = NOT_POOLED
    for each in stored_as(state):
        found = transition(metadata, each, "here", HERE)
        assert isinstance(found, CxlMemoryMetadata)
        metadata = found
    assert metadata.state is state
