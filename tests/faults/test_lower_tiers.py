"""An event about tiers means no more than it says: a clear of one tier, and chunks that are loaded as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.reducer.ordering import Health
from tests.helpers.reported_rank import ReportedRank, store, tokens_from

pytestmark = pytest.mark.first_ring()

PROMPT = tokens_from(3000, 64)
NAMES = [21, 22, 23, 24]
CLEARED = {"type": "AllBlocksCleared"}


def offload(rank: ReportedRank, medium: str = "CPU") -> None:
    """Store four blocks on the device, and each of them in a lower tier as well."""
    rank.send(store(NAMES, None, PROMPT))
    for number, name in enumerate(NAMES):
        tokens = PROMPT[16 * number : 16 * number + 16]
        rank.send(store([name], NAMES[number - 1] if number else None, tokens, medium=medium, group_idx=0))
    assert rank.answer(PROMPT) == (4, Health.EXACT)


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "REMOTE"])
@pytest.mark.parametrize("n_clears", [1, 3])
def test_a_clear_leaves_open_what_lower_tiers_hold(medium: str, n_clears: int) -> None:
    """vLLM clears its device tier and reports that everything is cleared. The lower tier may have kept its blocks."""
    rank = ReportedRank()
    offload(rank, medium)
    for _ in range(n_clears):
        rank.send(CLEARED)
        assert rank.answer(PROMPT) == (0, Health.APPROXIMATE)
    rank.send({"type": "BlockRemoved", "block_hashes": [24], "medium": medium, "group_idx": 0})
    rank.send(store([25], 24, tokens_from(3064, 16)))
    assert (rank.health, rank.is_complete, rank.n_resyncs) == (Health.APPROXIMATE, True, 0)
    rank.send(store(NAMES, None, PROMPT))
    assert rank.answer(PROMPT) == (4, Health.APPROXIMATE)


def test_a_clear_after_a_restart_leaves_open_what_the_table_has_in_lower_tiers() -> None:
    """The bridge's decoder has read nothing of them."""
    rank = ReportedRank()
    offload(rank)
    rank.restart_bridge()
    rank.send(CLEARED)
    assert rank.answer(PROMPT) == (0, Health.APPROXIMATE)


UNPLACED: dict[str, Any] = {
    "by name alone": store([77], None, [], block_size=0, medium="CPU"),
    "without its parent": store([77], 76, PROMPT[:16], medium="CPU", group_idx=0),
    "of unknown content": store([77], None, PROMPT[:16], medium="CPU", group_idx=0, extra_keys=[[b"\x01" * 32]]),
    "removed": {"type": "BlockRemoved", "block_hashes": [77], "medium": "CPU", "group_idx": 0},
}


@pytest.mark.parametrize("event", UNPLACED.values(), ids=UNPLACED.keys())
def test_a_clear_leaves_open_what_a_lower_tier_held_without_being_indexed(event: Any) -> None:
    """Any report of a lower tier shows that the engine has one."""
    rank = ReportedRank()
    rank.send(store([1], None, PROMPT[:16]))
    rank.send(event)
    rank.send(CLEARED)
    assert rank.health is Health.APPROXIMATE


@pytest.mark.parametrize("dialect", ["vllm", "auto"])
def test_a_clear_of_an_engine_without_lower_tiers_is_exact(dialect: str) -> None:
    """The device tier is all that it has."""
    rank = ReportedRank(dialect)
    rank.send(store(NAMES, None, PROMPT, group_idx=0))
    rank.send(CLEARED)
    rank.send(store(NAMES[:2], None, PROMPT[:32], group_idx=0))
    assert rank.answer(PROMPT) == (2, Health.EXACT)


def test_a_clear_of_sglang_clears_all_tiers() -> None:
    """Its flush resets the host's pool together with the device's."""
    rank = ReportedRank("sglang")
    rank.send(store(NAMES, None, PROMPT))
    rank.send(store(NAMES, None, PROMPT, medium="CPU_PINNED"))
    assert rank.answer(PROMPT) == (4, Health.EXACT)
    rank.send(CLEARED)
    assert rank.answer(PROMPT) == (0, Health.EXACT)


@pytest.mark.parametrize("event", [["TierBlocksCleared", "GPU"], {"type": "TierBlocksCleared", "medium": "GPU"}])
def test_a_clear_of_the_device_leaves_the_lower_tier(event: Any) -> None:
    """Its blocks are still found, and are removed when the engine says so."""
    rank = ReportedRank()
    offload(rank)
    rank.send(event)
    assert rank.answer(PROMPT) == (4, Health.EXACT)
    rank.send(store([25], 24, tokens_from(3064, 16)))
    assert rank.answer([*PROMPT, *tokens_from(3064, 16)]) == (5, Health.EXACT)
    rank.send({"type": "BlockRemoved", "block_hashes": [24], "medium": "CPU", "group_idx": 0})
    assert rank.answer(PROMPT) == (3, Health.EXACT)
    assert rank.n_resyncs == 0


def test_a_clear_of_a_lower_tier_leaves_the_device() -> None:
    """The blocks that the device has evicted are gone then."""
    rank = ReportedRank()
    offload(rank)
    rank.send({"type": "BlockRemoved", "block_hashes": [23, 24], "medium": "GPU"})
    assert rank.answer(PROMPT) == (4, Health.EXACT)
    rank.send(["TierBlocksCleared", "CPU"])
    assert rank.answer(PROMPT) == (2, Health.EXACT)
    rank.send(["TierBlocksCleared", "GPU"])
    assert rank.answer(PROMPT) == (0, Health.EXACT)


def test_a_clear_of_one_tier_with_an_unusable_name_is_a_loss() -> None:
    """Nothing shows which tier it was."""
    rank = ReportedRank()
    offload(rank)
    rank.send(["TierBlocksCleared", ["GPU"]])
    assert rank.health is Health.DEGRADED


@pytest.mark.parametrize("keys", [{}, {"extra_keys": [None] * 4}], ids=["without keys", "with keys"])
@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_chunk_of_a_lower_tier_makes_the_rank_approximate(
    is_on_device: bool, medium: str, keys: dict[str, Any]
) -> None:
    """A prompt that ends within the chunk finds none of its blocks, unless the device holds them."""
    rank = ReportedRank()
    if is_on_device:
        rank.send(store([11, 12, 13, 14], None, tokens_from(2000, 64)))
    rank.send(store([11, 12, 13, 14], None, tokens_from(2000, 64), medium=medium, group_idx=0, **keys))
    assert rank.answer([*tokens_from(2000, 48), *tokens_from(7000, 16)]) == (3, Health.APPROXIMATE)
    assert rank.not_indexed == {"chunk": 3}
    rank.send({"type": "BlockRemoved", "block_hashes": [11, 12, 13, 14], "medium": medium, "group_idx": 0})
    assert rank.answer(tokens_from(2000, 64))[0] == (4 if is_on_device else 0)


def test_a_chunk_whose_end_cannot_be_named_can_never_be_loaded() -> None:
    """What of it is indexed counts too much, so the rank is approximate."""
    rank = ReportedRank()
    keys = [None, None, [b"an embedding"]]
    rank.send(store([1, 2, 3], None, PROMPT[:48], medium="CPU", group_idx=0, extra_keys=keys))
    assert rank.health is Health.APPROXIMATE
    assert rank.not_indexed["chunk"] == 2


def test_single_blocks_of_a_lower_tier_are_exact() -> None:
    """Each of them is loaded by itself, whatever the device still holds."""
    rank = ReportedRank()
    offload(rank)
    rank.send({"type": "BlockRemoved", "block_hashes": NAMES, "medium": "GPU"})
    assert rank.answer([*PROMPT[:48], *tokens_from(7000, 16)]) == (3, Health.EXACT)


def test_pages_of_sglangs_host_are_exact() -> None:
    """Its host cache is matched page by page."""
    rank = ReportedRank("sglang")
    rank.send(store([11, 12, 13, 14], None, tokens_from(2000, 64), medium="CPU_PINNED"))
    assert rank.answer([*tokens_from(2000, 48), *tokens_from(7000, 16)]) == (3, Health.EXACT)
