"""A model whose cache groups are not all full attention: a prefix counts as far as every group holds it."""

from __future__ import annotations

from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import TrustFleet, engine_option

N_BLOCKS = 20

#: Group of sliding windows in the events below; group 0 is full attention.
WINDOWS = 1


def test_an_engine_with_sliding_windows_is_approximate(fleet: TrustFleet) -> None:
    """The blocks of the first group are indexed; those of the others are counted, and the rank is approximate."""
    model, worker_id = fleet.model(), fleet.worker_id()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        engine.store(1000, N_BLOCKS)
        fleet.wait_exact(model, prompt, N_BLOCKS)
        tokens = list(range(9000, 9000 + BLOCK_SIZE))
        engine.publish(["BlockStored", [77], None, tokens, BLOCK_SIZE, None, "GPU", None, None, WINDOWS])
        answer = fleet.wait_answer(model, prompt, lambda found: found["mode"] == "approximate", "the second group")
        assert (answer["overlap_blocks"], answer["chosen_mode"]) == (N_BLOCKS, "approximate")


def test_a_model_whose_first_group_has_windows_matches_by_its_group_with_full_attention(fleet: TrustFleet) -> None:
    """The engine stores both groups under the same names; the overlap is that of full attention."""
    model, worker_id = fleet.model(), fleet.worker_id()
    tokens = list(range(1000, 1000 + N_BLOCKS * BLOCK_SIZE))
    names = list(range(1, N_BLOCKS + 1))

    def stored(group: int, kind: str, first: int) -> dict[str, object]:
        return {
            "type": "BlockStored",
            "block_hashes": names[first:],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * BLOCK_SIZE :],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": group,
            "kv_cache_spec_kind": kind,
        }

    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        engine.publish(stored(0, "sliding_window", N_BLOCKS - 4), stored(1, "full_attention", 0))
        engine.publish({"type": "BlockRemoved", "block_hashes": names[-4:], "medium": "GPU", "group_idx": 0})
        fleet.wait_answer(
            model,
            tokens,
            lambda found: (found["overlap_blocks"], found["chosen_mode"]) == (N_BLOCKS, "approximate"),
            "full attention",
        )


def test_a_window_that_is_held_makes_a_prefix_exact_and_one_that_is_evicted_shortens_it(fleet: TrustFleet) -> None:
    """A prefix counts as far as every group that a hit needs still holds it, and the answer is exact."""
    model, worker_id = fleet.model(), fleet.worker_id()
    tokens = list(range(1000, 1000 + N_BLOCKS * BLOCK_SIZE))
    names = list(range(1, N_BLOCKS + 1))
    store = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
    }
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4 * BLOCK_SIZE}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    with EngineDouble(model=model) as engine:
        fleet.bridge(engine_option(worker_id, engine))
        engine.publish(store | window, store | full)
        fleet.wait_exact(model, tokens, N_BLOCKS)
        engine.publish({"type": "BlockRemoved", "block_hashes": [names[17]], "medium": "GPU", "group_idx": 0})
        fleet.wait_exact(model, tokens, 17)
        engine.publish(store | window)
        fleet.wait_exact(model, tokens, N_BLOCKS)
