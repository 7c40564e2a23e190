"""Events as TensorRT-LLM encodes them."""

from __future__ import annotations

import json
from typing import Any

BLOCK = 4
TOKENS = list(range(1, 13))
WINDOW = 1024


def block(name: Any, tokens: list[Any], **fields: Any) -> dict[str, Any]:
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": name, "tokens": unique, "cache_level": 0, "priority": 35} | fields


def event(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"event_id": 1, "data": data, "window_size": WINDOW} | fields


def stored(*blocks: dict[str, Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    return event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **fields)


def removed(*names: Any, **fields: Any) -> dict[str, Any]:
    return event({"type": "removed", "block_hashes": list(names)}, **fields)


def updated(name: Any, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "old_value": old, "new_value": new}
    return event({"type": "updated", "block_hash": name, "cache_level": level, "priority": None})


def created(**fields: Any) -> dict[str, Any]:
    return event({"type": "created", "num_blocks_per_cache_level": [101230, 0]}, **fields)


def prompt(names: list[Any], tokens: list[int] = TOKENS, **fields: Any) -> list[dict[str, Any]]:
    return [block(name, tokens[at * BLOCK : (at + 1) * BLOCK], **fields) for at, name in enumerate(names)]


def pack(*events: Any) -> bytes:
    return json.dumps(list(events)).encode()
