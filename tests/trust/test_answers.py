"""What answers say about the chosen rank, about prompts that never match, and about a filter that did not apply."""

from __future__ import annotations

from typing import Any

from streams.process.waiting import wait_for
from streams.router_api.deciding.prompt_matches import UNMATCHED_DECISIONS
from tests.helpers.api import metrics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

N_BLOCKS = 4


def prompt(first: int) -> range:
    return range(first, first + N_BLOCKS * BLOCK_SIZE)


def exact(answer: dict[str, Any]) -> bool:
    """Whether all blocks of the prompt have arrived, and the feed has been proven."""
    return bool(answer["overlap_blocks"] == N_BLOCKS and answer["mode"] == "exact")


def test_the_chosen_mode_is_exact_while_another_rank_is_degraded(fleet: TrustFleet) -> None:
    """One engine loses a batch for good: `mode` is degraded, and `chosen_mode` only if that engine is chosen."""
    model, well, lossy = fleet.model(), fleet.worker_id(), fleet.worker_id()
    with EngineDouble(model=model) as first, EngineDouble(model=model, kept=1) as second:
        first.store(1000, N_BLOCKS)
        second.store(2000, N_BLOCKS)
        fleet.bridge(engine_option(well, first), engine_option(lossy, second))
        for start in (1000, 2000):
            answer = fleet.wait_answer(model, prompt(start), exact, "the blocks")
            assert answer["chosen_mode"] == "exact"
            assert "chosen_degraded_because" not in answer
        second.store(3000, N_BLOCKS, live=False)  # the replay buffer keeps only the next batch
        second.store(4000, N_BLOCKS)
        answer = fleet.wait_answer(
            model, prompt(1000), lambda found: found.get("degraded_because") == "events_lost", "the gap"
        )
        assert (answer["worker_id"], answer["overlap_blocks"]) == (well, 4)
        assert (answer["mode"], answer["chosen_mode"]) == ("degraded", "exact")
        answer = fleet.route(model, prompt(2000))
        assert (answer["worker_id"], answer["overlap_blocks"]) == (lossy, 4)
        reasons = answer["degraded_because"], answer["chosen_degraded_because"]
        assert (answer["mode"], answer["chosen_mode"], *reasons) == ("degraded", "degraded", *["events_lost"] * 2)


def test_a_model_whose_prompts_never_match_is_reported(fleet: TrustFleet) -> None:
    """Prompts of another tokenizer match nothing; the router's metrics and one line of its log name the model."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        fleet.bridge(engine_option(worker_id, engine))
        key = f"kvstreams_unmatched_prompts/{model}"

        def holds() -> bool:
            ranks = fleet.api.get("/state")["ranks"]
            return any(rank["worker_id"] == worker_id and rank["blocks"] == N_BLOCKS for rank in ranks)

        wait_for(holds, PATIENCE_S, "the engine's blocks")
        other = [token + 50_000 for token in prompt(1000)]  # the same text, by another tokenizer
        for _ in range(UNMATCHED_DECISIONS + 20):  # the first few may be before the rank's next progress record
            assert fleet.route(model, other)["overlap_blocks"] == 0
        assert metrics(fleet.api)[key] >= UNMATCHED_DECISIONS
        logged = fleet.worker.child.log_path.read_text()
        (line,) = [each for each in logged.splitlines() if f"prompts for model '{model}'" in each]
        for cause in ("tokenizer", "block size", "hash seed", "lora_name", "namespace"):
            assert cause in line
        before = metrics(fleet.api)["kvstreams_prompts_without_blocks_total"]
        assert fleet.route(model, [1] * (BLOCK_SIZE - 1))["overlap_blocks"] == 0
        assert metrics(fleet.api)["kvstreams_prompts_without_blocks_total"] == before + 1
        assert fleet.route(model, prompt(1000))["overlap_blocks"] == N_BLOCKS
        assert key not in metrics(fleet.api)


def test_a_strict_filter_that_did_not_apply_is_named(fleet: TrustFleet) -> None:
    """No engine reports labels: with `fallback_to_unlabeled` false the answer says that the filter did not apply."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        fleet.bridge(engine_option(worker_id, engine))
        fleet.wait_answer(model, prompt(1000), exact, "the blocks")
        query = {"layer_id": 2, "expert_ids": [7], "fallback_to_unlabeled": False}
        answer = fleet.route(model, prompt(1000), router_config_override={"moe_query": query})
        assert answer["moe_filter_applied"] is False
        moe = {"layer_id": 2, "expert_id": 7}
        tokens = list(prompt(5000))
        stored = {"block_hashes": [9], "token_ids": tokens[:BLOCK_SIZE], "block_size": BLOCK_SIZE, "moe": moe}
        engine.publish({"type": "BlockStored", "parent_block_hash": None, "lora_id": None, "medium": "GPU", **stored})
        fleet.wait_answer(model, tokens, lambda found: found["overlap_blocks"] == 1, "the labelled block")
        answer = fleet.route(model, tokens, router_config_override={"moe_query": query})
        assert (answer["overlap_blocks"], answer["moe_filter_applied"]) == (1, True)
