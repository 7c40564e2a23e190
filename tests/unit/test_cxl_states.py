"""The states of a block in CXL memory: every pair, legal or not, and the diagram that the docs show."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from streams.core.ids import WorkerId
from streams.cxl.states import (
    PLAIN,
    RULES,
    CxlMemoryMetadata,
    CxlMemoryState,
    RefusalReason,
    Refused,
    after_owner_ended,
    diagram,
    stored_as,
    transition,
)

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState

HERE = (WorkerId(1), WorkerId(2))
THERE = (WorkerId(3),)
DOCS = Path(__file__).parents[2] / "docs" / "cxl.md"


def known(state: CxlMemoryState) -> CxlMemoryMetadata:
    return PLAIN if state is LOCAL else CxlMemoryMetadata(state, "here", HERE)


def expected(source: CxlMemoryState, target: CxlMemoryState, pool: str | None) -> CxlMemoryMetadata | RefusalReason:
    """The contract's table, written once more without the rules."""
    if target is TRANSIT:
        return RefusalReason.NO_POOL if pool is None else CxlMemoryMetadata(TRANSIT, pool, THERE)
    if target is POOLED and source is not TRANSIT:
        return RefusalReason.NOT_IN_TRANSIT
    if pool == "there" and source in (TRANSIT, POOLED):
        return RefusalReason.OTHER_POOL
    if target is LOCAL:
        return PLAIN
    return CxlMemoryMetadata(target, known(source).pool_id, known(source).accessible_workers)


@pytest.mark.parametrize("pool", [None, "here", "there"])
@pytest.mark.parametrize(("source", "target"), list(product(CxlMemoryState, CxlMemoryState)))
def test_every_pair_of_states_with_and_without_a_pool(
    source: CxlMemoryState, target: CxlMemoryState, pool: str | None
) -> None:
    """What is legal gives the metadata of the table, what is not says why."""
    found = transition(known(source), target, pool, THERE)
    wanted = expected(source, target, pool)
    if isinstance(wanted, RefusalReason):
        assert isinstance(found, Refused)
        assert found.reason is wanted
        assert found.message
    else:
        assert found == wanted


def test_every_state_has_a_rule() -> None:
    """A state without one could be entered by nobody, and the look-up would raise."""
    assert set(RULES) == set(CxlMemoryState)


@pytest.mark.parametrize("state", CxlMemoryState)
def test_the_end_of_a_life_takes_nothing_out_of_a_pool(state: CxlMemoryState) -> None:
    """What was on its way counts as evicted and keeps its place; everything else stays what it is."""
    found = after_owner_ended(known(state))
    assert found == (CxlMemoryMetadata(EVICTED, "here", HERE) if state is TRANSIT else known(state))


@pytest.mark.parametrize("state", CxlMemoryState)
def test_a_block_stored_in_a_state_gets_there_by_legal_transitions(state: CxlMemoryState) -> None:
    """One stored in a pool was on its way there first."""
    metadata = PLAIN
    for each in stored_as(state):
        found = transition(metadata, each, "here", HERE)
        assert isinstance(found, CxlMemoryMetadata)
        metadata = found
    assert metadata.state is state


def test_the_diagram_of_the_docs_is_the_rules() -> None:
    """It is drawn from them, so it can be pasted and never goes stale."""
    assert f"```mermaid\n{diagram()}\n```" in DOCS.read_text()
