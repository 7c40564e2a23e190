"""Events as vLLM encodes them."""

from __future__ import annotations

from typing import Any

BLOCK = 4
TOKENS = list(range(1, 13))


def stored_event(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [11, 12, 13],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | changes
