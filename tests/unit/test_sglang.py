"""SGLang's payloads: every form that SGLang writes, pages and blocks, salts, and what is not indexed."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import pytest

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from streams.core.hashing import hash_seed, local_hashes, request_hashes, salted_seed
from streams.core.ids import U64_MASK, Tier
from streams.engines.dialects import pages
from streams.engines.dialects.interface import DecodedBatch
from streams.engines.dialects.sglang import SGLANG, SglangDecoder
from streams.engines.ledger import Ledger
from streams.router_api.messages.requests import blocks_of, parse_route
from tests.helpers.reference import chain_hashes
from tests.helpers.sglang_events import BLOCK, TOKENS, array, stored

LOCAL = local_hashes(TOKENS, BLOCK).tolist()


def pack(*events: Any) -> bytes:
    raw: bytes = msgpack.packb([1.5, list(events), 0])
    return raw


def only_stored(payload: DecodedBatch) -> BlocksStored:
    (event,) = payload.events
    assert isinstance(event, BlocksStored)
    return event


class Rank:
    """A rank as SGLang reports it: a decoder and its ledger. `held` is what an index would hold, by tier."""

    def __init__(self, block_size: int = BLOCK) -> None:
        self.decoder = SglangDecoder(block_size)
        self.ledger = Ledger(SGLANG.counts_copies)

    def take(self, *events: Any) -> DecodedBatch:
        batch = self.decoder.decode(pack(*events))
        for event in batch.events:
            self.ledger.apply(event, may_wait=True)  # type: ignore[arg-type]
        assert self.ledger.end_batch() == []
        return batch

    def held(self) -> set[tuple[Tier, int]]:
        return {
            (run.tier, block)
            for run in self.ledger.restated()
            for block in chain_hashes(run.local.tolist(), run.parent)
        }


def chain(tokens: list[int], block_size: int = BLOCK, **options: Any) -> list[int]:
    found: list[int] = request_hashes(tokens, block_size, **options)[1].tolist()
    return found


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(array(None), id="until 0.5.8: arrays that end at lora_id"),
        pytest.param(array(None, "GPU"), id="0.5.14 to 0.5.17: arrays that end at medium"),
        pytest.param(array(None, "GPU", {"session_id": "s"}), id="0.5.18: a map at position 7"),
        pytest.param(stored(), id="from 0.5.20: maps"),
        pytest.param(stored(session_id="s", later_field=[1]), id="maps with later fields"),
    ],
)
def test_every_form_of_a_store_is_read(event: Any) -> None:
    """Hashes are signed; fields at the end may be absent, and later ones are ignored (llm-d-router 2944)."""
    batch = SglangDecoder(BLOCK).decode(pack(event))
    found = only_stored(batch)
    assert (found.parent, found.engine.tolist(), found.local.tolist()) == (
        None,
        [U64_MASK - 10, 12, U64_MASK - 12],
        LOCAL,
    )
    assert (batch.n_unindexed, batch.unusable, found.tier) == (0, (), Tier.DEVICE)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", Tier.DEVICE), ("CPU_PINNED", Tier.HOST), ("DISK", Tier.DISK), ("EXTERNAL", Tier.EXTERNAL)],
)
def test_sglangs_media_are_tiers(medium: str, tier: Tier) -> None:
    """Pinned host memory is the host tier, and not an unknown medium, whose weight is 0."""
    batch = SglangDecoder(BLOCK).decode(
        pack(stored(medium=medium), {"type": "BlockRemoved", "block_hashes": [12], "medium": medium})
    )
    first, second = batch.events
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksRemoved)
    assert first.tier is second.tier is tier


def test_a_repeated_store_is_not_a_copy() -> None:
    """SGLang repeats a store when a request inserts the same page; the first removal removes it."""
    rank = Rank()
    rank.take(stored())
    rank.take(stored())
    rank.take(["BlockRemoved", [-13], "GPU"])
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS)[:2]}


@pytest.mark.parametrize("event", [stored(cache_salt="s"), array(None, "GPU", {"cache_salt": "s"})])
def test_salted_blocks_match_only_prompts_with_the_salt(event: Any) -> None:
    """The salt is part of the seed of the first block; the chain carries it on, so later blocks need no salt."""
    rank = Rank()
    rank.take(event)
    more = list(range(50, 54))
    rank.take(stored(block_hashes=[14], parent_block_hash=-13, token_ids=more))  # the salt is not repeated
    seed = hash_seed()
    salted = chain(TOKENS + more, first_seed=salted_seed(seed, "s"))
    assert rank.held() == {(Tier.DEVICE, block) for block in salted}
    assert not {block for _, block in rank.held()} & set(chain(TOKENS + more))
    assert not {block for _, block in rank.held()} & set(chain(TOKENS + more, first_seed=salted_seed(seed, "t")))


@pytest.mark.parametrize("field", [{"cache_salt": "s"}, {"lora_name": "poet"}])
@pytest.mark.parametrize("n_first", [1, 3])
def test_a_block_has_the_salt_and_the_adapter_of_its_first_page(field: dict[str, str], n_first: int) -> None:
    """The pages that complete it need not repeat them, so that its prompt never matches another one."""
    rank = Rank()
    rank.take(stored(block_hashes=list(range(1, n_first + 1)), token_ids=TOKENS[:n_first], block_size=1, **field))
    rest = list(range(n_first + 1, BLOCK + 1))
    rank.take(stored(block_hashes=rest, parent_block_hash=n_first, token_ids=TOKENS[n_first:BLOCK], block_size=1))
    seed = hash_seed(field.get("lora_name"))
    first_seed = salted_seed(seed, field.get("cache_salt"))
    [block] = chain(TOKENS[:BLOCK], seed=seed, first_seed=first_seed)
    assert rank.held() == {(Tier.DEVICE, block)}


@pytest.mark.parametrize("page_size", [1, 2])
def test_pages_that_divide_a_block_make_blocks(page_size: int) -> None:
    """A block is held while all of its pages are, under the same hash as with pages of a block."""
    rank = Rank()
    n = len(TOKENS) // page_size
    names = list(range(100, 100 + n))
    rank.take(stored(block_hashes=names, block_size=page_size))
    whole = [(Tier.DEVICE, block) for block in chain(TOKENS)]
    assert rank.held() == set(whole)
    per_block = BLOCK // page_size
    rank.take({"type": "BlockRemoved", "block_hashes": [names[per_block]], "medium": "GPU"})  # of the second block
    assert rank.held() == {whole[0], whole[2]}
    again = stored(
        block_hashes=[names[per_block]],
        parent_block_hash=names[per_block - 1],
        token_ids=TOKENS[BLOCK : BLOCK + page_size],
        block_size=page_size,
    )
    rank.take(again)
    assert rank.held() == set(whole)
    rank.take({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})
    assert (rank.held(), len(rank.decoder.pages)) == (set(), 0)


def test_prompts_that_differ_within_a_block_share_its_first_pages() -> None:
    """Each of the two blocks is held while its own pages and the shared ones are."""
    rank = Rank()
    rank.take(stored(block_hashes=[1, 2, 3, 4], token_ids=[1, 2, 3, 4], block_size=1))
    rank.take(stored(block_hashes=[5, 6], parent_block_hash=2, token_ids=[8, 9], block_size=1))
    one, other = (Tier.DEVICE, chain([1, 2, 3, 4])[0]), (Tier.DEVICE, chain([1, 2, 8, 9])[0])
    assert rank.held() == {one, other}
    rank.take(["BlockRemoved", [6], "GPU"])
    assert rank.held() == {one}
    rank.take(["BlockRemoved", [2], "GPU"])
    assert rank.held() == set()


def test_pages_in_several_tiers_make_a_block_in_each_tier_that_has_all_of_them() -> None:
    """A block whose pages are spread over two tiers is in neither."""
    rank = Rank()
    rank.take(stored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2))
    rank.take(stored(block_hashes=[1], token_ids=[1, 2], block_size=2, medium="CPU_PINNED"))
    block = chain([1, 2, 3, 4])[0]
    assert rank.held() == {(Tier.DEVICE, block)}
    rank.take(
        stored(block_hashes=[2], parent_block_hash=1, token_ids=[3, 4], block_size=2, medium="CPU_PINNED"),
        ["BlockRemoved", [1, 2], "GPU"],
    )
    assert rank.held() == {(Tier.HOST, block)}


def test_a_short_tail_page_makes_no_block_and_loses_nothing() -> None:
    """The last page of a prompt may have fewer tokens; the rest of its batch is used, and the rank stays exact."""
    rank = Rank()
    batch = rank.take(stored(), stored(block_hashes=[14], parent_block_hash=-13, token_ids=[7, 8, 9], block_size=3))
    assert (batch.unusable, batch.n_unindexed, batch.is_incomplete) == ((), 0, False)
    assert batch.not_indexed == {"tail": 1}
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS)}
    rank.take(["BlockRemoved", [14], "GPU"])
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS)}


def test_eagle_pages_are_hashed_by_their_first_tokens() -> None:
    """With EAGLE, a token is a pair of it and the next one; the last block of a match is uncertain."""
    pairs = [[token, token + 1] for token in TOKENS]
    batch = SglangDecoder(BLOCK).decode(pack(stored(token_ids=pairs)))
    assert only_stored(batch).local.tolist() == LOCAL
    assert (batch.n_unindexed, batch.not_indexed, batch.unusable) == (3, {"lookahead": 3}, ())


def test_eagle_pages_of_one_token_make_blocks() -> None:
    """Pairs and small pages come together."""
    rank = Rank()
    rank.take(stored(block_hashes=list(range(12)), token_ids=[[token, token + 1] for token in TOKENS], block_size=1))
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS)}


def test_an_adapters_name_is_part_of_the_seed() -> None:
    """Blocks of an adapter match its prompts only."""
    rank = Rank()
    rank.take(stored(lora_name="poet"))
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS, seed=hash_seed("poet"))}


def test_a_hash_that_is_repeated_in_one_store_ends_it() -> None:
    """A chain contains no block twice; the blocks before it are indexed and the others counted."""
    batch = SglangDecoder(BLOCK).decode(pack(stored(block_hashes=[1, 2, 1])))
    assert only_stored(batch).engine.tolist() == [1, 2]
    assert (batch.n_unindexed, batch.not_indexed) == (1, {"duplicate_hash": 1})


@pytest.mark.parametrize("size", [1, 4, BLOCK])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_store_that_names_its_first_page_as_its_own_parent_stores_nothing(size: int, is_held: bool) -> None:
    """All of its pages are counted, and the ones that the rank holds stay."""
    rank = Rank()
    whole = stored(block_hashes=list(range(1, len(TOKENS) // size + 1)), token_ids=TOKENS, block_size=size)
    if is_held:
        rank.take(whole)
    batch = rank.take(stored(block_hashes=[1, 2], parent_block_hash=1, token_ids=TOKENS[: 2 * size], block_size=size))
    assert (batch.events, batch.is_incomplete) == ((), False)
    assert (batch.n_unindexed, batch.not_indexed) == (2, {"duplicate_hash": 2})
    if not is_held:
        rank.take(whole)
    assert rank.held() == {(Tier.DEVICE, block) for block in chain(TOKENS)}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_size=8, block_hashes=[1], token_ids=TOKENS[:8]), "wrong_block_size"),
        (stored(block_size=0), "wrong_block_size"),
        (stored(block_size="4"), "wrong_block_size"),
        (stored(token_ids=TOKENS[:-1]), "bad_event"),
        (stored(token_ids=["x"] * 12), "bad_event"),
        (stored(token_ids=[-1] * 12, block_size=1, block_hashes=list(range(12))), "bad_event"),
        (stored(token_ids=[[1]] * 12), "bad_event"),
        (stored(cache_salt=5), "bad_event"),
        (stored(block_hashes=["x"]), "bad_event"),
        (stored(medium=5), "bad_event"),
        (["BlockMoved", [1]], "bad_event"),
        (7, "bad_event"),
    ],
)
def test_an_unusable_event_is_lost_with_its_reason(event: Any, reason: str) -> None:
    """The other events of its batch are used."""
    batch = SglangDecoder(BLOCK).decode(pack(stored(), event))
    assert only_stored(batch).engine.tolist() == [U64_MASK - 10, 12, U64_MASK - 12]
    (unusable,) = batch.unusable
    assert (unusable.error.reason, unusable.index, batch.is_incomplete) == (reason, 1, True)


def test_a_page_in_two_blocks_shows_another_block_size() -> None:
    """Pages of 3 tokens divide no block of 4: the second one begins in the first block and ends in the second."""
    decoder = SglangDecoder(BLOCK)
    batch = decoder.decode(pack(stored(block_hashes=[1, 2, 3, 4], block_size=3)))
    assert [each.error.reason for each in batch.unusable] == ["wrong_block_size"]


def test_a_clear_forgets_all_pages() -> None:
    """What was lost before it in its batch does not matter."""
    decoder = SglangDecoder(BLOCK)
    decoder.decode(pack(stored(block_hashes=list(range(12)), block_size=1)))
    batch = decoder.decode(pack(7, {"type": "AllBlocksCleared"}))
    assert (batch.events, batch.is_incomplete, len(decoder.pages)) == ((AllBlocksCleared(),), False, 0)


def test_the_number_of_pages_that_a_decoder_keeps_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store over the limit is lost with its reason, so the rank is degraded."""
    monkeypatch.setattr(pages, "PAGES_MAX", 10)
    batch = SglangDecoder(BLOCK).decode(pack(stored(block_hashes=list(range(12)), block_size=1)))
    assert [each.error.reason for each in batch.unusable] == ["over_capacity"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_any_history_of_pages_holds_what_a_brute_force_model_holds(seed: int, page_size: int) -> None:
    """Random prompts are inserted and random pages evicted; a block is held if all of its pages are."""
    rng = random.Random(seed)
    rank = Rank()
    names: dict[tuple[int, ...], int] = {}
    held: set[tuple[int, ...]] = set()
    for _ in range(200):
        if rng.random() < 0.6 or not held:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(page_size, 20))]
            n_pages = len(tokens) // page_size
            pages_of = [tuple(tokens[: (at + 1) * page_size]) for at in range(n_pages)]
            for page in pages_of:
                names.setdefault(page, rng.getrandbits(63) - (1 << 62))
            rank.take(
                stored(
                    block_hashes=[names[page] for page in pages_of],
                    token_ids=tokens[: n_pages * page_size],
                    block_size=page_size,
                )
            )
            held |= set(pages_of)
        else:
            # The engine evicts leaves of its tree, and so ends of prefixes.
            leaves = [page for page in held if not any(len(o) > len(page) and o[: len(page)] == page for o in held)]
            page = rng.choice(sorted(leaves))
            held.discard(page)
            rank.take(["BlockRemoved", [names[page]], "GPU"])
        expected = {(Tier.DEVICE, chain(list(page))[-1]) for page in held if len(page) % BLOCK == 0}
        assert rank.held() == expected, f"seed {seed}"


def test_a_request_with_the_salt_has_the_hashes_of_the_engines_blocks() -> None:
    """The router hashes a request's tokens and salt as the bridge hashes the blocks that the engine reports."""
    rank = Rank()
    rank.take(stored(cache_salt="s", lora_name="poet"))
    for fields, matches in (
        ({"cache_salt": "s", "lora_name": "poet"}, True),
        ({"lora_name": "poet"}, False),
        ({"cache_salt": "t", "lora_name": "poet"}, False),
        ({"cache_salt": "s"}, False),
    ):
        request = parse_route(json.dumps({"token_ids": TOKENS, **fields}).encode())
        asked = blocks_of(
            request.token_ids,
            None,
            block_size=BLOCK,
            lora_name=request.lora_name,
            namespace=request.namespace,
            cache_salt=request.cache_salt,
            tokens_max=100,
        )
        assert ({block for _, block in rank.held()} == set(asked.chain.tolist())) is matches
