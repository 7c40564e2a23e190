"""Events as SGLang encodes them."""

from __future__ import annotations

from typing import Any

BLOCK = 4
TOKENS = list(range(1, 13))


def stored(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [-11, 12, -13],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }
    return event | changes


def array(*fields: Any) -> list[Any]:
    return ["BlockStored", [-11, 12, -13], None, TOKENS, BLOCK, *fields]
