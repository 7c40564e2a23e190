"""Events that say less than they seem to, through a real bridge, Kafka and router.

Salts, boundaries within a block, chunks and clears of lower tiers, and stores behind a parent that the engine never
reported. Each test also shows that later correct events are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streams.process.waiting import wait_for
from streams.router_api.messages.requests import NAME_CHARS_MAX
from tests.helpers.engine_double import EngineDouble
from tests.helpers.reported_rank import as_array, store, tokens_from
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option, state_of

#: What each engine holds from the beginning, under names that no test uses otherwise.
HELD = tokens_from(9000, 32)

PROMPT = tokens_from(1000, 96)
CLEARED = {"type": "AllBlocksCleared"}
ALL_TIERS: dict[str, Any] = {"router_config_override": {"tier_weights": [1, 1, 1, 1]}}

#: How vLLM writes events: maps since 0.26, arrays before. SGLang leaves out fields without a value.
FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "map": lambda event: event,
    "array": as_array,
    "sglang": lambda event: {name: value for name, value in event.items() if value is not None},
}
VLLM_FORMS = pytest.mark.parametrize("form", ["map", "array"])
ALL_FORMS = pytest.mark.parametrize("form", FORMS)


def removed(names: list[int], medium: str = "GPU") -> dict[str, Any]:
    """One BlockRemoved event."""
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium, "group_idx": 0}


class Reporting:
    """An engine that reports events, and what the router answers about it."""

    def __init__(self, fleet: TrustFleet, engine: EngineDouble, worker_id: int, form: str) -> None:
        self.engine = engine
        self._fleet, self._worker_id, self._written = fleet, worker_id, FORMS[form]
        self._n_clears = 0

    def send(self, *events: dict[str, Any]) -> None:
        """Publish one batch."""
        self._n_clears += events.count(CLEARED)
        self.engine.publish(*map(self._written, events))

    def expect(
        self, tokens: list[int], n_blocks: int, mode: str = "exact", because: str | None = None, **asked: Any
    ) -> None:
        """Wait for this answer. From the moment when all batches were applied, no exact answer may be another one."""
        expected = n_blocks, mode, mode, because
        wait_for(lambda: self._state()["sequence"] == self.engine.sequence, PATIENCE_S, "the last batch")

        def is_expected(answer: dict[str, Any]) -> bool:
            shown = (answer["overlap_blocks"], answer["mode"], answer["chosen_mode"], answer.get("degraded_because"))
            assert answer["mode"] != "exact" or shown == expected, (shown, expected)
            return shown == expected

        self._fleet.wait_answer(self.engine.model, tokens, is_expected, f"the answer {expected}", **asked)

    def expect_no_resync(self) -> None:
        """Check that the rank's blocks were never requested again. A clear begins a generation as well."""
        assert self._state()["generation"] == self._n_clears

    def _state(self) -> dict[str, Any]:
        return state_of(self._fleet, self._worker_id)

    def size_of_worker(self) -> int:
        """Return the block size with which the engine is registered."""
        workers = self._fleet.api.get("/workers")["workers"]
        [size] = [worker["block_size"] for worker in workers if worker["worker_id"] == self._worker_id]
        return int(size)

    def refused(self, tokens: list[int], **asked: Any) -> int:
        """Return the status with which the router refuses a request."""
        return self._fleet.answered(self.engine.model, tokens, **asked).status


@contextmanager
def reporting(fleet: TrustFleet, form: str, kept: int = 1000) -> Iterator[Reporting]:
    """Give an engine that holds HELD, with its bridge. kept: batches that it can send again."""
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model, kept=kept) as engine:
        fleet.bridge(engine_option(worker_id, engine, dialect="sglang" if form == "sglang" else ""))
        rank = Reporting(fleet, engine, worker_id, form)
        rank.send(store([901, 902], None, HELD))
        fleet.wait_exact(model, HELD, 2)
        yield rank


@ALL_FORMS
def test_salts_of_every_length_separate_prompts(fleet: TrustFleet, form: str) -> None:
    """One character, 64 digits, a digest, and as many characters as a request may have."""
    salts = ["z", "0123456789" * 6 + "0123", hashlib.sha256(b"tenant").hexdigest(), "s" * NAME_CHARS_MAX]

    def salted(salt: str, n_blocks: int) -> dict[str, Any]:
        return {"cache_salt": salt} if form == "sglang" else {"extra_keys": [[salt], *[None] * (n_blocks - 1)]}

    with reporting(fleet, form) as rank:
        for number, salt in enumerate(salts):
            names = [100 * number + n for n in range(1, 7)]
            rank.send(store(names[:4], None, PROMPT[:64], **salted(salt, 4)))
            rank.send(
                store(names[4:], names[3], PROMPT[64:], **({} if form == "sglang" else {"extra_keys": [None] * 2}))
            )
        for salt in salts:
            rank.expect(PROMPT, 6, cache_salt=salt)
        for other in ({}, {"cache_salt": "s"}, {"cache_salt": salts[2].upper()}):
            rank.expect(PROMPT, 0, **other)
        rank.send(store([2001], None, PROMPT[:16], **salted("s" * (NAME_CHARS_MAX + 1), 1)))
        assert rank.refused(PROMPT, cache_salt="s" * (NAME_CHARS_MAX + 1)) == 400
        rank.send(removed([103, 104, 105, 106]))
        rank.expect(PROMPT, 2, cache_salt=salts[1])
        rank.expect(PROMPT, 6, cache_salt=salts[2])
        rank.expect(HELD, 2)
        rank.expect_no_resync()


@VLLM_FORMS
def test_an_image_without_its_place_makes_a_rank_approximate(fleet: TrustFleet, form: str) -> None:
    """It looks like a salt, but reaches into the second block. After a clear, a salt is a salt again."""
    image = hashlib.sha256(b"an image").hexdigest()
    with reporting(fleet, form) as rank:
        rank.send(store([1, 2], None, PROMPT[:32], extra_keys=[[image], [image]]))
        rank.send(store([3], 2, PROMPT[32:48], extra_keys=[None]))
        rank.expect(HELD, 2, "approximate")
        rank.expect(PROMPT, 0, "approximate", cache_salt=image)
        rank.send(CLEARED, store([1, 2], None, PROMPT[:32], extra_keys=[["tenant"], None]))
        rank.expect(PROMPT, 2, cache_salt="tenant")
        rank.expect_no_resync()


@VLLM_FORMS
def test_boundaries_within_a_block_lose_nothing(fleet: TrustFleet, form: str) -> None:
    """Before the first whole block, behind a parent that was never reported, and at the end of a prompt."""
    with reporting(fleet, form) as rank:
        rank.send(CLEARED)
        rank.send(store([8], 4, PROMPT[4:8], block_size=4))
        rank.send(store([12], 8, PROMPT[8:12], block_size=4))
        rank.expect(PROMPT, 0)
        assert rank.size_of_worker() == 16
        rank.send(store([16], None, PROMPT[:16]))
        rank.send(store([20], 16, PROMPT[16:20], block_size=4))
        rank.send(store([24, 28], 20, PROMPT[20:28], block_size=4))
        rank.expect(PROMPT, 1)
        rank.send(store([32], 16, PROMPT[16:32]))
        rank.expect(PROMPT, 2)
        rank.send(removed([20, 24, 28]), store([48], 32, PROMPT[32:48]))
        rank.expect(PROMPT, 3)
        rank.send(removed([48]))
        rank.expect(PROMPT, 2)
        rank.expect_no_resync()


@pytest.mark.parametrize("size", [1, 8])
def test_pages_at_the_end_of_a_prompt_become_a_block_once_it_is_full(fleet: TrustFleet, size: int) -> None:
    """SGLang's pages may be smaller than a block of the scope."""
    n = 24 // size
    names = list(range(1, 32 // size + 1))
    with reporting(fleet, "sglang") as rank:
        rank.send(store(names[:n], None, PROMPT[:24], block_size=size))
        rank.expect(PROMPT, 1)
        rank.send(store(names[n:], names[n - 1], PROMPT[24:32], block_size=size))
        rank.expect(PROMPT, 2)
        rank.send(removed(names[n:]))
        rank.expect(PROMPT, 1)
        rank.expect_no_resync()


@VLLM_FORMS
@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_a_chunk_of_a_lower_tier_is_never_exact(fleet: TrustFleet, form: str, medium: str) -> None:
    """The engine loads all of its blocks or none. It may remove them one after the other."""
    names, tokens = [11, 12, 13, 14], PROMPT[:64]
    with reporting(fleet, form) as rank:
        rank.send(store(names, None, tokens, medium=medium, group_idx=0))
        rank.expect([*tokens[:48], *tokens_from(7000, 16)], 3, "approximate", **ALL_TIERS)
        for left in (3, 1):
            rank.send(removed(names[left:][:1], medium))
            rank.expect(tokens, left, "approximate", **ALL_TIERS)
        rank.send(removed([11, 13], medium))
        rank.expect(tokens, 0, "approximate", **ALL_TIERS)
        rank.send(store(names, None, tokens))
        rank.expect(tokens, 4, "approximate")
        rank.expect(HELD, 2, "approximate")
        rank.expect_no_resync()


@VLLM_FORMS
def test_single_blocks_of_a_lower_tier_are_exact(fleet: TrustFleet, form: str) -> None:
    """Each of them is loaded by itself, and follows the one before it in either tier."""
    with reporting(fleet, form) as rank:
        rank.send(store([11, 12, 13], None, PROMPT[:48]))
        for n, name in enumerate((11, 12, 13)):
            tokens = PROMPT[16 * n : 16 * n + 16]
            rank.send(store([name], name - 1 if n else None, tokens, medium="CPU", group_idx=0))
        rank.send(removed([13, 12]))
        rank.expect(PROMPT, 3, **ALL_TIERS)
        rank.send(removed([12], "CPU"))
        rank.expect(PROMPT, 1, **ALL_TIERS)
        rank.send(store([12], 11, PROMPT[16:32]))
        rank.expect(PROMPT, 3, **ALL_TIERS)
        rank.expect_no_resync()


@VLLM_FORMS
def test_a_clear_of_vllm_leaves_open_what_a_lower_tier_holds(fleet: TrustFleet, form: str) -> None:
    """A removal and a store that name such a block afterwards are no loss."""
    names, tokens = [21, 22, 23, 24], PROMPT[:64]
    with reporting(fleet, form) as rank:
        rank.send(store(names, None, tokens))
        for n, name in enumerate(names):
            block = tokens[16 * n : 16 * n + 16]
            rank.send(store([name], name - 1 if n else None, block, medium="CPU", group_idx=0))
        rank.expect(tokens, 4, **ALL_TIERS)
        rank.send(CLEARED)
        rank.expect(tokens, 0, "approximate", **ALL_TIERS)
        rank.send(removed([24], "CPU"))
        rank.send(store([25], 24, PROMPT[64:80]))
        rank.expect(PROMPT, 0, "approximate", **ALL_TIERS)
        rank.send(store(names, None, tokens))
        rank.expect(tokens, 4, "approximate", **ALL_TIERS)
        rank.send(CLEARED)
        rank.expect(tokens, 0, "approximate", **ALL_TIERS)
        rank.expect_no_resync()


@pytest.mark.parametrize("is_map", [True, False])
def test_a_clear_of_one_tier_is_exact(fleet: TrustFleet, is_map: bool) -> None:
    """The other tier keeps its blocks."""
    names, tokens = [21, 22, 23, 24], PROMPT[:64]

    def clear(medium: str) -> Any:
        return {"type": "TierBlocksCleared", "medium": medium} if is_map else ["TierBlocksCleared", medium]

    with reporting(fleet, "map") as rank:
        rank.send(store(names, None, tokens))
        for n, name in enumerate(names[:3]):
            block = tokens[16 * n : 16 * n + 16]
            rank.send(store([name], name - 1 if n else None, block, medium="CPU", group_idx=0))
        rank.engine.publish(clear("GPU"))
        rank.expect(tokens, 3, **ALL_TIERS)
        rank.expect(HELD, 0, **ALL_TIERS)
        rank.send(store([24, 25], 23, PROMPT[48:80]))
        rank.expect(PROMPT, 5, **ALL_TIERS)
        rank.engine.publish(clear("CPU"))
        rank.expect(PROMPT, 0, **ALL_TIERS)
        rank.send(store(names, None, tokens))
        rank.expect(PROMPT, 5, **ALL_TIERS)
        rank.expect_no_resync()


@ALL_FORMS
def test_a_clear_of_an_engine_that_clears_everything_is_exact(fleet: TrustFleet, form: str) -> None:
    """vLLM without a lower tier, and SGLang, whose host pool is reset as well."""
    with reporting(fleet, form) as rank:
        if form == "sglang":
            rank.send(store([901, 902], None, HELD, medium="CPU_PINNED"), removed([901, 902]))
            rank.expect(HELD, 2, **ALL_TIERS)
        rank.send(CLEARED)
        rank.expect(HELD, 0, **ALL_TIERS)
        rank.send(store([901], None, HELD[:16]))
        rank.expect(HELD, 1, **ALL_TIERS)
        rank.expect_no_resync()


@ALL_FORMS
def test_stores_behind_a_parent_that_was_never_reported_are_no_loss(fleet: TrustFleet, form: str) -> None:
    """Such as blocks that came by transfer. The parent's own store, and a store behind it, are used later."""
    with reporting(fleet, form) as rank:
        for number in range(301):
            rank.send(store([39 + 100 * number, 40 + 100 * number], 38 + 100 * number, PROMPT[16:48]))
        rank.expect(HELD, 2, "approximate")
        rank.expect(PROMPT, 0, "approximate")
        rank.send(store([38], None, PROMPT[:16]))
        rank.expect(PROMPT, 1, "approximate")
        rank.send(store([39, 40], 38, PROMPT[16:48]), store([41], 40, PROMPT[48:64]))
        rank.expect(PROMPT, 4, "approximate")
        rank.expect_no_resync()
        rank.send(CLEARED, store([38], None, PROMPT[:16]))
        rank.expect(PROMPT, 1)


@VLLM_FORMS
def test_a_parent_that_comes_later_makes_a_chain_exact(fleet: TrustFleet, form: str) -> None:
    """In the same batch, and for a lower tier in a later one."""
    with reporting(fleet, form) as rank:
        rank.send(store([2], 1, PROMPT[16:32]), store([1], None, PROMPT[:16]))
        rank.expect(PROMPT, 2)
        rank.send(store([4], 3, PROMPT[48:64], medium="CPU", group_idx=0))
        rank.expect(PROMPT, 2, **ALL_TIERS)
        rank.send(store([3], 2, PROMPT[32:48], medium="CPU", group_idx=0))
        rank.expect(PROMPT, 4, **ALL_TIERS)
        rank.expect_no_resync()


@VLLM_FORMS
def test_stores_behind_prompt_embeddings_leave_a_rank_exact(fleet: TrustFleet, form: str) -> None:
    """No request can name their content, nor that of the answer behind them."""
    with reporting(fleet, form) as rank:
        rank.send(store([1, 2], None, PROMPT[:32], extra_keys=[[b"\x01" * 32], [b"\x02" * 32]]))
        rank.send(store([3], 2, PROMPT[32:48]), store([4], 3, PROMPT[48:64]))
        rank.expect(PROMPT, 0)
        rank.expect(HELD, 2)
        rank.send(store([903], 902, tokens_from(9032, 16)))
        rank.expect([*HELD, *tokens_from(9032, 16)], 3)
        rank.expect_no_resync()


@ALL_FORMS
def test_a_store_behind_a_lost_batch_is_a_loss(fleet: TrustFleet, form: str) -> None:
    """The numbers show that a batch is missing, which may have had the parent. A clear makes the rank known again."""
    with reporting(fleet, form, kept=1) as rank:
        rank.engine.publish(["AllBlocksCleared"], live=False)
        rank.send(store([39, 40], 38, PROMPT[16:48]))
        rank.expect(HELD, 2, "degraded", "events_lost")
        rank.send(CLEARED)
        rank.expect(HELD, 0)
        rank.send(store([38, 39], None, PROMPT[:32]))
        rank.expect(PROMPT, 2)
