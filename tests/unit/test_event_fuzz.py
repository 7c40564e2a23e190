"""Damaged events of every dialect: a few thousand here, 200,000 in `make fuzz-events`."""

from __future__ import annotations

import json

import msgpack
import pytest

from tests.helpers.event_fuzz import fuzz
from tests.helpers.event_mutations import Mutator, payloads

PAYLOADS = payloads()


@pytest.mark.parametrize("seed", range(3))
def test_no_damaged_message_raises_and_a_clear_ends_what_it_did(seed: int) -> None:
    """Each is events or a refusal with a reason; afterwards the records lead to the engine's own blocks."""
    refused = fuzz(PAYLOADS, seed, 1200, 200)
    assert refused["bad_event"] and refused["not_msgpack"] and refused["not_json"]


def test_the_generator_damages_bytes_and_fields() -> None:
    """It makes messages that are not well formed as well as those that are, and repeats itself with the same seed."""
    originals = PAYLOADS["vllm"] * 40
    first, second = Mutator(5), Mutator(5)
    several = [first.mutated(payload) for payload in originals]
    assert several == [second.mutated(payload) for payload in originals]
    assert len(several) // 4 < sum(map(_is_well_formed, several)) < len(several)
    assert len(set(several)) > len(several) * 0.9


def _is_well_formed(payload: bytes) -> bool:
    try:
        msgpack.unpackb(payload, strict_map_key=False)
    except Exception:  # msgpack raises exceptions of its own
        try:
            json.loads(payload)
        except ValueError:
            return False
    return True
