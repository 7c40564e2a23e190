"""Damaged copies of engines' event payloads, for tests that nothing an engine sends stops a bridge.

What lives here: the payloads of every dialect, and the ways to damage one. What must not: what is expected of a decoder
(tests/unit/test_event_fuzz.py, tests/event_fuzz_soak.py).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import msgpack

from tests.helpers import trtllm_events
from tests.witness import GOLDEN

#: Values that a field may have instead of its own.
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    16,
    1 << 31,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
    1.5,
    float("inf"),
    float("nan"),
    "",
    "GPU",
    "CPU",
    "sliding_window",
    "x" * 300,
    [],
    {},
    [[]],
    [None],
    [1, 2, 3, 4],
    {"type": "BlockStored"},
    {"a": {"b": [1]}},
)

#: Values that only msgpack has.
_ODD_BYTES: tuple[Any, ...] = (b"", b"\xff" * 7, b"\x00" * 32, b"x" * 40)

_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "CxlStateTransition", "BlockPondered", "")


def payloads(block_size: int = trtllm_events.BLOCK) -> dict[str, list[bytes]]:
    """Return undamaged payloads by dialect: every recorded version, and TensorRT-LLM's kinds of events."""
    assert block_size == trtllm_events.BLOCK  # that of the recorded payloads
    found: dict[str, list[bytes]] = {}
    for each in json.loads(GOLDEN.read_text()):
        found.setdefault(each["engine"], []).append(bytes.fromhex(each["payload"]))
    blocks = trtllm_events.prompt([1, 2, 3])
    found["trtllm"] = [
        trtllm_events.pack(trtllm_events.created(), trtllm_events.stored(*blocks), trtllm_events.removed(3)),
        trtllm_events.pack(
            trtllm_events.created(), trtllm_events.stored(*blocks, attention_dp_rank=0), trtllm_events.updated(2, 0, 1)
        ),
    ]
    return found


class Mutator:
    """Damages payloads, reproducibly."""

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)

    def mutated(self, payload: bytes) -> bytes:
        """Return a damaged copy of a payload, or a message that has nothing to do with it."""
        kind = self._rng.randrange(20)
        if kind == 0:
            return self._noise()
        if kind == 1:
            return self._nonsense(is_json=payload[:1] == b"[")
        if kind < 9:
            return self._with_other_bytes(payload)
        return self._with_other_fields(payload)

    def pick(self, found: Sequence[bytes]) -> bytes:
        """Return one of several payloads."""
        return self._rng.choice(found)

    def _noise(self) -> bytes:
        return self._rng.randbytes(self._rng.randrange(200))

    def _nonsense(self, *, is_json: bool) -> bytes:
        """Return valid msgpack or JSON that no engine sends."""
        value = self._value(0, is_json=is_json)
        if self._rng.random() < 0.5:
            value = [1.5, [[self._rng.choice(_TAGS), *(self._value(1, is_json=is_json) for _ in range(6))]], 0]
        return _packed(value, is_json=is_json)

    def _with_other_bytes(self, payload: bytes) -> bytes:
        """Change, remove and insert bytes, or cut the payload off."""
        rng, raw = self._rng, bytearray(payload)
        if rng.random() < 0.2:
            return bytes(raw[: rng.randrange(len(raw))])
        for _ in range(rng.randint(1, 4)):
            if not raw:
                break
            at = rng.randrange(len(raw))
            match rng.randrange(4):
                case 0:
                    raw[at] = rng.randrange(256)
                case 1:
                    raw[at] ^= 1 << rng.randrange(8)
                case 2:
                    del raw[at : at + rng.randint(1, 8)]
                case _:
                    raw[at:at] = rng.randbytes(rng.randint(1, 4))
        return bytes(raw)

    def _with_other_fields(self, payload: bytes) -> bytes:
        """Drop, add, exchange and retype fields, at any depth; the result is well formed."""
        is_json = payload[:1] == b"["
        outer = json.loads(payload) if is_json else msgpack.unpackb(payload, strict_map_key=False)
        for _ in range(self._rng.randint(1, 3)):
            self._change(outer, is_json=is_json)
        return _packed(outer, is_json=is_json)

    def _change(self, outer: Any, *, is_json: bool) -> None:
        rng = self._rng
        containers = [each for each in _containers(outer) if each]
        if not containers:
            return
        found = rng.choice(containers)
        key = rng.choice(list(found) if isinstance(found, dict) else range(len(found)))
        match rng.randrange(6):
            case 0:
                del found[key]
            case 1 if isinstance(found, list):
                del found[key:]  # any prefix of the fields
            case 2 if isinstance(found, list):
                found.insert(key, self._value(1, is_json=is_json))
            case 2:
                found[rng.choice(("later", "group_idx", "locality", "cache_salt", "extra_keys"))] = self._value(
                    1, is_json=is_json
                )
            case 3 if isinstance(found, list):
                found += [self._value(1, is_json=is_json) for _ in range(rng.randint(1, 9))]  # later fields
            case 4 if isinstance(found, list):
                other = rng.randrange(len(found))
                found[key], found[other] = found[other], found[key]
            case _:
                found[key] = self._value(1, is_json=is_json)

    def _value(self, depth: int, *, is_json: bool) -> Any:
        rng = self._rng
        if depth < 4 and rng.random() < 0.3:
            values = [self._value(depth + 1, is_json=is_json) for _ in range(rng.randrange(5))]
            if rng.random() < 0.5:
                return values
            names = ("type", "block_hashes", "token_ids", "data", "blocks", "later")
            return {rng.choice(names): value for value in values}
        return copy.deepcopy(rng.choice(_ODD if is_json else _ODD + _ODD_BYTES))  # a later change may be within it


def _containers(outer: Any) -> list[Any]:
    """Return every list and map within a value, itself first."""
    found, at = [outer], 0
    while at < len(found):
        each = found[at]
        values = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        found += [value for value in values if isinstance(value, list | dict)]
        at += 1
    return found


def _packed(value: Any, *, is_json: bool) -> bytes:
    return json.dumps(value).encode() if is_json else bytes(msgpack.packb(value))
