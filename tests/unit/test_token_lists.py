"""Payloads whose lists of tokens become arrays: every decoder reads them, and damaged ones, as msgpack alone would."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np
import pytest

from streams.core.hashing import KERNELS_AVAILABLE
from streams.engines.dialects import token_lists
from streams.engines.dialects.registry import DIALECTS
from streams.engines.dialects.token_lists import PAYLOAD_BYTES_MIN, TOKENS_MIN, unpack
from streams.errors import BadRecord
from tests.helpers.event_mutations import Mutator

pytestmark = pytest.mark.skipif(not KERNELS_AVAILABLE, reason="without numba, lists stay lists")

BLOCK_SIZE = 16
NAME = 1 << 40

#: Numbers of every length that msgpack writes, at the ends of their ranges.
NUMBERS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1)


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(NUMBERS) if rng.random() < 0.3 else rng.randrange(1 << 18) for _ in range(n)]


def store(n_blocks: int, *, seed: int = 0, size: int = BLOCK_SIZE, **more: Any) -> dict[str, Any]:
    names = [NAME + seed * 1000 + n for n in range(n_blocks)]
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
    return event | {"token_ids": tokens(n_blocks * size, seed), "block_size": size, "lora_id": None, **more}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The form that older versions send, with the medium after lora_id."""
    return ["BlockStored", *(event[name] for name in list(event)[1:6]), "GPU"]


def payload(*events: Any) -> bytes:
    return bytes(msgpack.packb([1700000000.5, list(events), 0]))


LONG = store(20)
REMOVED = {"type": "BlockRemoved", "block_hashes": [NAME], "medium": "GPU"}
PAYLOADS = {
    "map": payload(LONG),
    "array": payload(as_array(LONG)),
    "two stores": payload(LONG, REMOVED, as_array(store(9, seed=2))),
    "extra keys of no block": payload(store(20, medium="GPU", lora_name=None, extra_keys=[None] * 20)),
    "extra keys in a lower tier": payload(
        store(20, medium="GPU", extra_keys=[["salt"], *[None] * 19]), store(20, medium="CPU", extra_keys=[None] * 20)
    ),
    "pages": payload(as_array(store(128, size=1))),
    "no block": payload({**store(0), "token_ids": tokens(200)}),
    "tail": payload({**LONG, "block_hashes": [NAME], "token_ids": tokens(100), "block_size": 100}),
    "masked": payload({**LONG, "block_hashes": [NAME, NAME + 1]}),
    "another size": payload({**LONG, "block_size": 320, "block_hashes": [NAME]}),
    "bigrams": payload({**LONG, "token_ids": [[n, n + 1] for n in range(320)]}),
    "names that are small numbers": payload({**store(0), "block_hashes": tokens(200), "token_ids": tokens(3200)}),
    "lookahead": payload({**LONG, "lookahead_token_ids": tokens(100)}),
    "numbers in an unknown field": payload({**LONG, "later": tokens(100)}),
    "tokens twice": bytes(payload(LONG)).replace(b"\xa7lora_id", b"\xa9token_ids"),
    "a token that is none": payload({**LONG, "token_ids": [*tokens(319), -1]}),
    "a token that is true": payload({**LONG, "token_ids": [*tokens(319), True]}),
    "a token beyond 32 bits": payload({**LONG, "token_ids": [*tokens(319), 1 << 32]}),
    "another event with tokens": payload({**LONG, "type": "Other"}, LONG),
    "a timestamp": payload({**LONG, "at": msgpack.Timestamp(1, 2)}),
    "an extension": payload({**LONG, "at": msgpack.ExtType(1, b"\x00")}),
    "an unhashable tag": payload([tokens(100), [NAME], None, tokens(320), BLOCK_SIZE]),
    "no events": bytes(msgpack.packb([1.0, tokens(400), 0])),
    "a map": bytes(msgpack.packb({"ts": 1.0, "events": [LONG], "data_parallel_rank": 0})),
    "bytes after it": payload(LONG) + b"\x00",
}


def plain(value: Any) -> Any:
    """A value that can be compared, with its type; arrays count as lists."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, BadRecord):
        return value.reason, value.message, plain(value.detail)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, dict):
        return [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return type(value).__name__, str(value)


def outcome(raw: bytes) -> Any:
    """What unpacking leads to: the value, or the type of the exception."""
    try:
        return plain(unpack(raw))
    except Exception as exc:  # of msgpack
        return type(exc).__name__


def decoded(name: str, payloads: list[bytes]) -> list[Any]:
    """What a decoder makes of payloads that follow each other."""
    decoder, found = DIALECTS[name].decoder(BLOCK_SIZE), []
    for raw in payloads:
        try:
            found.append(plain(decoder.decode(raw)))
        except BadRecord as exc:
            found.append(plain(exc))
    return found


def damaged(seed: int, n: int) -> list[bytes]:
    """The payloads, and damaged copies of those that are well formed."""
    mutator = Mutator(seed)
    well_formed = [raw for name, raw in PAYLOADS.items() if name != "bytes after it"]
    return [*PAYLOADS.values(), *(mutator.mutated(mutator.pick(well_formed)) for _ in range(n))]


def test_the_tokens_of_a_store_are_an_array() -> None:
    """Of both forms of events, and of every store of the payload."""
    _, (first, _, second), _ = unpack(PAYLOADS["two stores"])
    for found, expected in ((first["token_ids"], LONG["token_ids"]), (second[3], store(9, seed=2)["token_ids"])):
        assert isinstance(found, np.ndarray) and found.dtype == np.uint32
        assert found.tolist() == expected


@pytest.mark.parametrize("n", [TOKENS_MIN - 1, TOKENS_MIN, TOKENS_MIN + 1])
def test_short_lists_stay_lists(n: int) -> None:
    """They are read faster by msgpack."""
    raw = payload({**LONG, "token_ids": tokens(n), "padding": "x" * PAYLOAD_BYTES_MIN})
    found = unpack(raw)[1][0]["token_ids"]
    assert isinstance(found, np.ndarray) == (n >= TOKENS_MIN)
    assert list(found) == tokens(n)


@pytest.mark.parametrize("name", ["lookahead", "numbers in an unknown field", "tokens twice", "a timestamp"])
def test_numbers_anywhere_else_leave_the_payload_to_msgpack(name: str) -> None:
    """No other part of a decoder ever meets an array."""
    assert not isinstance(unpack(PAYLOADS[name])[1][0]["token_ids"], np.ndarray)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_payloads_are_unpacked_as_by_msgpack(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the same values or the same error, whatever is cut off, changed, added or repeated."""
    several = damaged(seed, 400) + [raw[:n] for raw in list(PAYLOADS.values())[:3] for n in range(0, len(raw), 37)]
    fast = [outcome(raw) for raw in several]
    monkeypatch.setattr(token_lists, "KERNELS_AVAILABLE", False)
    assert fast == [outcome(raw) for raw in several]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_decoders_read_arrays_as_they_read_lists(dialect: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events, the refusals with their reasons, and what dead letters show are the same."""
    several = damaged(seed, 300)
    fast = decoded(dialect, several)
    monkeypatch.setattr(token_lists, "KERNELS_AVAILABLE", False)
    assert fast == decoded(dialect, several)
