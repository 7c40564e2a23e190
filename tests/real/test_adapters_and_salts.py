"""Adapters at the start and at run time, and salts: what one of them computed is no other's."""

from __future__ import annotations

from streams.process.waiting import wait_for
from tests.real.engine import BLOCK_SIZE
from tests.real.environment import ADAPTER, FULL, model_folder
from tests.real.fleet import NOTICE_S, Fleet

AT_START, LATER = "spoken", "written"
FLAGS = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{AT_START}={model_folder(ADAPTER)}")

PROMPT = [11 + place % 1800 for place in range(6 * BLOCK_SIZE)]


def test_an_adapter_has_blocks_of_its_own(fleet: Fleet) -> None:
    """The base model and its adapter share no blocks, for the engine and for the router."""
    for name in (FULL, AT_START, FULL, AT_START):
        answer = fleet.complete(name, PROMPT)
        answer.assert_agrees()
        fleet.settle()
    assert answer.promised == len(PROMPT) // BLOCK_SIZE


def test_an_adapter_that_is_loaded_at_run_time(fleet: Fleet) -> None:
    """Once an engine lists an adapter, requests for it are answered there, and agree; once it is gone, they are not."""
    for engine in fleet.engines.values():
        loaded = {"lora_name": LATER, "lora_path": str(model_folder(ADAPTER))}
        engine.call("POST", "/v1/load_lora_adapter", loaded)
    wait_for(lambda: fleet.complete(LATER, [1, 2, 3]).status == 200, NOTICE_S, "the adapter to be served", 0.5)
    for _ in range(2):
        answer = fleet.complete(LATER, PROMPT)
        answer.assert_agrees()
        fleet.settle()
    assert answer.promised == len(PROMPT) // BLOCK_SIZE
    for engine in fleet.engines.values():
        engine.call("POST", "/v1/unload_lora_adapter", {"lora_name": LATER})
    wait_for(lambda: fleet.complete(LATER, [1, 2, 3]).status == 404, NOTICE_S, "the adapter to be unknown", 0.5)


def test_a_salt_separates_tenants(fleet: Fleet) -> None:
    """Salts of any length, hexadecimal or not, separate prompts; the same salt finds what it left."""
    n_blocks = len(PROMPT) // BLOCK_SIZE
    for salt in ("tenant-1", "0" * 64, "af" * 32, "z" * 64, "x" * 128):
        for repeated in range(2):
            answer = fleet.complete(FULL, PROMPT, cache_salt=salt)
            answer.assert_agrees()
            assert answer.promised == (n_blocks if repeated else 0)
            held_by = answer.worker_id
            wait_for(
                lambda: fleet.matches(PROMPT, FULL, cache_salt=salt).get(held_by) == n_blocks,  # noqa: B023
                NOTICE_S,
                "the salted blocks",
                0.05,
            )
            fleet.settle()
    answer = fleet.complete(FULL, PROMPT)
    answer.assert_agrees()
    for name in ("x" * 129, "a/b"):  # vLLM takes no such salt
        assert fleet.complete(FULL, PROMPT, cache_salt=name).status == 400
