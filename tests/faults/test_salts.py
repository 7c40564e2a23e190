"""A cache salt is a salt by its place in the event, whatever its length and form."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from streams.core.hashing import content_hash, with_pad_values
from streams.core.reducer.ordering import Health
from tests.helpers.reported_rank import ReportedRank, as_array, store, tokens_from

pytestmark = pytest.mark.first_ring()

PROMPT = tokens_from(1000, 96)
OTHER = tokens_from(5000, 32)
IMAGE = hashlib.sha256(b"an image").hexdigest()

SALTS = {
    "sha256": hashlib.sha256(b"tenant-1").hexdigest(),
    "digits": "0123456789" * 6 + "0123",
    "capitals": hashlib.sha256(b"tenant-2").hexdigest().upper(),
    "text of 32 bytes": "".join(chr(n) for n in range(1, 33)),
    "base64": "dGVuYW50LTE=",
    "uuid": "0b7cbd7a-6c3a-4b5c-8a53-6a4f2c1f7f4b",
    "one letter": "z",
    "not ascii": "é" * 32,
    **{f"z{n}": "z" * n for n in (31, 32, 33, 63, 64, 65, 128, 4096)},
}


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("name", SALTS)
def test_a_salted_prompt_is_found_with_its_salt_and_the_rest_of_the_rank_stays_exact(name: str, form: str) -> None:
    """Its answer follows in another batch. Neither another salt nor none finds the blocks."""
    salt, rank = SALTS[name], ReportedRank()
    events = (
        store([901, 902], None, OTHER),
        store([1, 2, 3, 4], None, PROMPT[:64], extra_keys=[[salt], None, None, None]),
        store([5, 6], 4, PROMPT[64:], extra_keys=[None, None]),
    )
    for event in events:
        rank.send(as_array(event) if form == "array" else event)
    assert rank.answer(PROMPT[:64], salt) == (4, Health.EXACT)
    assert rank.answer(PROMPT, salt) == (6, Health.EXACT)
    assert rank.answer(PROMPT, salt + "x") == (0, Health.EXACT)
    assert rank.answer(PROMPT) == (0, Health.EXACT)
    assert rank.answer(OTHER) == (2, Health.EXACT)
    assert (rank.not_indexed, rank.n_resyncs) == ({}, 0)


@pytest.mark.parametrize("name", ["sha256", "digits", "z64"])
def test_a_prompt_of_one_salted_block_is_found(name: str) -> None:
    """There is no second block in its store to compare with."""
    rank = ReportedRank()
    rank.send(store([1], None, PROMPT[:16], extra_keys=[[SALTS[name]]]))
    rank.send(store([2], 1, PROMPT[16:32], extra_keys=[None]))
    assert rank.answer(PROMPT[:32], SALTS[name]) == (2, Health.EXACT)


@pytest.mark.parametrize("name", ["sha256", "z32"])
def test_a_salt_is_found_next_to_an_adapter_and_an_image(name: str) -> None:
    """In vLLM's order: the adapter's name, images with their places, the salt."""
    salt, rank = SALTS[name], ReportedRank()
    tokens = [*PROMPT[:8], *[7] * 20, *PROMPT[28:48]]
    keys = [["poet", [IMAGE, 8], salt], ["poet", [IMAGE, -8]], ["poet"]]
    rank.send(store([1, 2, 3], None, tokens, extra_keys=keys, lora_name="poet", lora_id=1))
    asked = with_pad_values(tokens, [(8, 20, content_hash(IMAGE))])
    assert rank.answer(asked, salt, lora="poet") == (3, Health.EXACT)


@pytest.mark.parametrize("name", ["sha256", "z32"])
def test_the_same_prompt_under_two_salts_is_held_twice(name: str) -> None:
    """Each removal ends the blocks of one of them."""
    salt, rank = SALTS[name], ReportedRank()
    for first, each in ((1, salt), (11, salt[::-1] + "2")):
        rank.send(store([first, first + 1], None, PROMPT[:32], extra_keys=[[each], None]))
    rank.send({"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "GPU"})
    assert rank.answer(PROMPT[:32], salt) == (2, Health.EXACT)
    assert rank.answer(PROMPT[:32], salt[::-1] + "2") == (0, Health.EXACT)


@pytest.mark.parametrize("dialect", ["sglang", "auto"])
@pytest.mark.parametrize("name", SALTS)
def test_a_salt_of_sglang_is_a_field_of_its_own(name: str, dialect: str) -> None:
    """So its form decides nothing."""
    rank = ReportedRank(dialect)
    event = {key: value for key, value in store([1, 2], None, PROMPT[:32]).items() if value is not None}
    rank.send(event | {"cache_salt": SALTS[name]})
    assert rank.answer(PROMPT[:32], SALTS[name]) == (2, Health.EXACT)


IMAGES_WITHOUT_PLACES: dict[str, list[Any]] = {
    "into the second block": [[IMAGE], [IMAGE], None],
    "in a later block": [None, [IMAGE], None],
    "with a salt": [[IMAGE, "a salt"], [IMAGE], None],
}


@pytest.mark.parametrize("keys", IMAGES_WITHOUT_PLACES.values(), ids=IMAGES_WITHOUT_PLACES.keys())
def test_an_image_without_its_place_is_no_salt_and_the_rank_is_approximate(keys: list[Any]) -> None:
    """A request can name its content, which the index cannot have; other prompts keep their blocks."""
    rank = ReportedRank()
    rank.send(store([901, 902], None, OTHER))
    rank.send(store([1, 2, 3], None, PROMPT[:48], extra_keys=keys))
    rank.send(store([4], 3, PROMPT[48:64], extra_keys=[None]))
    assert rank.answer(OTHER) == (2, Health.APPROXIMATE)
    assert rank.answer(PROMPT[:48], IMAGE)[0] == 0
    assert rank.is_complete and set(rank.not_indexed) == {"key_unknown"}


def test_once_images_have_come_without_places_a_text_in_the_first_block_is_not_read_as_a_salt() -> None:
    """It may be the identifier of a small image, so the block is left out, until a clear."""
    rank = ReportedRank()
    rank.send(store([1, 2, 3], None, PROMPT[:48], extra_keys=[[IMAGE], [IMAGE], None]))
    rank.send(store([11, 12], None, OTHER, extra_keys=[["tenant"], None]))
    assert rank.answer(OTHER, "tenant") == (0, Health.APPROXIMATE)
    rank.send({"type": "AllBlocksCleared"})
    rank.send(store([11, 12], None, OTHER, extra_keys=[["tenant"], None]))
    assert rank.answer(OTHER, "tenant") == (2, Health.EXACT)
