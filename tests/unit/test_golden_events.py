"""Bytes of engines' own event classes (tests/witness.py), version by version, and damaged copies of them."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest

from streams.core.hashing import hash_seed, local_hashes, salted_seed
from streams.core.ids import U64_MASK
from streams.engines.dialects.interface import DecodedBatch
from streams.engines.dialects.registry import DIALECTS
from streams.engines.ledger import Ledger
from streams.errors import BadRecord
from tests.helpers import trtllm_events
from tests.witness import BLOCK_SIZE, CACHE_SALT, GOLDEN, NAMES, read

GOLDEN_EVENTS: list[dict[str, Any]] = json.loads(GOLDEN.read_text())


def versions(*fields: str, array: bool | None = None) -> list[Any]:
    """Return the recorded versions as parameters; array: only those whose events are arrays, or maps."""
    return [
        pytest.param(
            *(each[field] for field in fields), bytes.fromhex(each["payload"]), id=f"{each['engine']}-{each['version']}"
        )
        for each in GOLDEN_EVENTS
        if array in (None, each["shape"]["array"])
    ]


RECORDED = versions("engine", "version")
ARRAYS, MAPS = versions("engine", array=True), versions("engine", array=False)

#: Damaged copies of each payload. `tests.soak` is the place for more.
MUTATIONS = 300


def expected(engine: str, *, salted: bool) -> list[list[Any]]:
    """What the canonical payload of an engine says, whichever version wrote it."""
    names = [name & U64_MASK for name in NAMES[engine]]
    local = local_hashes(list(range(5 * BLOCK_SIZE)), BLOCK_SIZE).tolist()
    out: list[list[Any]] = [
        ["cleared"],
        ["stored", None, names[:1], local[:1], "DEVICE"],
        ["stored", names[0], names[1:4], local[1:4], "DEVICE"],
        ["removed", names[3:4], "DEVICE"],
    ]
    if salted:
        seed = salted_seed(hash_seed(), CACHE_SALT)
        own = local_hashes(list(range(4 * BLOCK_SIZE, 5 * BLOCK_SIZE)), BLOCK_SIZE, seed).tolist()
        out.append(["stored", None, names[4:], own, "DEVICE"])
    return out


def has_salt(payload: bytes) -> bool:
    return CACHE_SALT.encode() in payload


@pytest.mark.parametrize(("engine", "version", "payload"), RECORDED)
@pytest.mark.parametrize("dialect", ["auto", "by name"])
def test_the_bytes_of_every_version_are_read(engine: str, version: str, payload: bytes, dialect: str) -> None:
    """Each version's bytes mean the same events, with the engine's dialect and with the recognised one.

    Peers lost all events of the versions that write maps: llm-d/llm-d-router 2944 and volcano-sh/kthena 1535.
    """
    decoder = DIALECTS["auto" if dialect == "auto" else engine].decoder(BLOCK_SIZE)
    batch = decoder.decode(payload)
    assert read(batch) == expected(engine, salted=has_salt(payload)), version
    if dialect == "auto":
        assert batch.dialect is DIALECTS[engine]


def test_the_versions_with_salts_are_recorded() -> None:
    """The newest recorded versions of both engines have the salted store."""
    assert sum(has_salt(param.values[2]) for param in RECORDED) >= 6


@pytest.mark.parametrize(("engine", "payload"), ARRAYS)
def test_any_prefix_of_an_arrays_fields_is_read_or_lost_with_a_reason(engine: str, payload: bytes) -> None:
    """Fields are missing from the end, or further ones follow; the other events of the payload are used."""
    ts, events, rank = msgpack.unpackb(payload)
    for length in range(len(events[2]) + 1):
        batch = (
            DIALECTS["auto"].decoder(BLOCK_SIZE).decode(msgpack.packb([ts, [*events[:2], events[2][:length]], rank]))
        )
        n_lost = int(length < 5)  # tag, hashes, parent, tokens and block size are required
        assert (len(batch.events), len(batch.unusable)) == (3 - n_lost, n_lost), length
    longer = [*events[2], None, None, None, None, None, None, None, None, None, None, "later", {"much": "later"}]
    named = DIALECTS[engine].decoder(BLOCK_SIZE)
    assert len(named.decode(msgpack.packb([ts, [*events[:2], longer], rank])).events) == 3


@pytest.mark.parametrize(("engine", "payload"), MAPS)
def test_maps_with_later_fields_are_read(engine: str, payload: bytes) -> None:
    """Unknown fields of events that are maps change nothing."""
    ts, events, rank = msgpack.unpackb(payload)
    later = [event | {"a_later_field": [1, {"x": None}]} for event in events]
    batch = DIALECTS["auto"].decoder(BLOCK_SIZE).decode(msgpack.packb([ts, later, rank]))
    assert read(batch) == expected(engine, salted=has_salt(payload))


def mutated(rng: random.Random, payload: bytes) -> bytes:
    raw = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at : at + rng.randint(1, 8)]
            case _:
                raw[at:at] = rng.randbytes(rng.randint(1, 4))
        if not raw:
            break
    return bytes(raw)


TRTLLM = trtllm_events.pack(
    trtllm_events.created(), trtllm_events.stored(*trtllm_events.prompt([1, 2, 3])), trtllm_events.removed(3)
)


@pytest.mark.parametrize(
    ("engine", "version", "payload"), [*RECORDED, pytest.param("trtllm", "1.0", TRTLLM, id="trtllm")]
)
def test_damaged_bytes_are_events_or_one_refusal_and_change_nothing_for_good(
    engine: str, version: str, payload: bytes
) -> None:
    """No other exception is raised, and after a clear the undamaged payload leads to the right blocks."""
    rng = random.Random(version)
    decoder, ledger = DIALECTS["auto"].decoder(BLOCK_SIZE), Ledger(counts_copies=True)

    def apply(batch: DecodedBatch) -> None:
        if batch.dialect is not None:
            ledger.count_copies(batch.dialect.counts_copies)
        for event in batch.events:
            ledger.apply(event, may_wait=True)  # type: ignore[arg-type]
        ledger.end_batch()

    for _ in range(10):
        apply(decoder.decode(payload))
    for _ in range(MUTATIONS):
        with suppress(BadRecord):
            apply(decoder.decode(mutated(rng, payload)))
    apply(decoder.decode(payload))  # it begins with a clear
    fresh = Ledger(DIALECTS[engine].counts_copies)
    for event in DIALECTS[engine].decoder(BLOCK_SIZE).decode(payload).events:
        fresh.apply(event)  # type: ignore[arg-type]
    assert [run.local.tolist() for run in ledger.restated()] == [run.local.tolist() for run in fresh.restated()]
    assert ledger.complete
