"""What vLLM's extra keys say about the content of blocks (pure).

What lives here: reading them. What must not: the rest of an event (vllm), and how tokens are hashed (core.hashing).

An event has a list of keys for each block, or None. In the order in which vLLM writes them:

| key | form | in which blocks | what is done with it |
|---|---|---|---|
| adapter | its name | all of the prompt | skipped, since the name is part of the seed |
| image, video, sound | [identifier, offset in block] | all that contain a part of it | its tokens get its pad value |
| cache salt | the salt | the first of the prompt | part of the seed of the first block |
| prompt embeddings | bytes | all that have some | the content of the block is unknown, and no request can name it |

Which text is a salt depends on its place alone, since a salt may have any length: it is the only text in the first
block of a prompt, and the second block does not have it. Versions from before March 2026 report an item as its
identifier alone. Text in another block shows that the engine is of such a version, since an image has more tokens than
a block. From then on, an identifier and a salt cannot be distinguished.

The offset is negative if the item began in an earlier block. Its length is not reported. vLLM fills the place of an
item with repetitions of one token, so the item ends where another token begins. If that token comes again later in the
block without a further item, the item has a structure that is not known, such as line breaks. Versions that report
identifiers without offsets report nothing about where an item is either. A request can name such a block, and the
index cannot have it.

From the first block of unknown content on, no block of the prompt can be matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streams.core.hashing import content_hash, pad_value


class Contents(NamedTuple):
    """The contents of a store's blocks.

    tokens: with pad values in place of images. cache_salt: of the first block. n_known: leading blocks whose content is
    known. unknown: why the content of the next block is not, empty if all are known: a reason of NOT_INDEXED_REASONS.
    """

    tokens: list[Any]
    cache_salt: str | None
    n_known: int
    unknown: str = ""


class _Item(NamedTuple):
    """An image or another item: where it begins in its block, and the token that stands for it."""

    offset: int
    pad: int


def block_contents(
    tokens: list[Any],
    block_size: int,
    extra_keys: Sequence[Any],
    lora_name: str | None,
    *,
    at_root: bool,
    has_bare_items: bool = False,
) -> Contents:
    """Read the extra keys of a store.

    at_root: whether its first block is the first one of the prompt. has_bare_items: whether the engine reports
    identifiers without offsets.
    """
    padded = tokens
    cache_salt: str | None = None
    may_be_salt = at_root and not has_bare_items
    second = _without_adapter(extra_keys[1], lora_name) if len(extra_keys) > 1 and extra_keys[1] else []
    for number, keys in enumerate(extra_keys):
        if not keys:
            continue
        rest = _without_adapter(keys, lora_name)
        items: list[_Item] = []
        is_only_text = sum(isinstance(key, str) for key in rest) == 1
        for key in rest:
            if _is_item(key):
                items.append(_Item(key[1], pad_value(content_hash(key[0]))))
            elif may_be_salt and number == 0 and isinstance(key, str) and is_only_text and key not in second:
                cache_salt = key
            else:
                has_embeddings = any(isinstance(key, bytes) for key in rest)
                return Contents(padded, cache_salt, number, "content_unknown" if has_embeddings else "key_unknown")
        if items:
            block = _padded(tokens[number * block_size : (number + 1) * block_size], items)
            if block is None:
                return Contents(padded, cache_salt, number, "key_unknown")
            padded = list(padded) if padded is tokens else padded
            padded[number * block_size : (number + 1) * block_size] = block
    return Contents(padded, cache_salt, len(tokens) // block_size)


def _is_item(key: Any) -> bool:
    return isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int


def shows_bare_item(extra_keys: Sequence[Any], lora_name: str | None, *, at_root: bool) -> bool:
    """Whether a store has text in a block after the first one of the prompt that is not the adapter's name."""
    blocks = extra_keys[1:] if at_root else extra_keys
    return any(isinstance(key, str) for keys in blocks if keys for key in _without_adapter(keys, lora_name))


def _without_adapter(keys: Sequence[Any], lora_name: str | None) -> list[Any]:
    """Return a block's keys without the adapter's name, which comes first."""
    return list(keys[1:] if lora_name and keys[0] == lora_name else keys)


def _padded(block: list[Any], items: list[_Item]) -> list[Any] | None:
    """Return a block's tokens with pad values; None if it is not known which tokens belong to an item."""
    padded, covered = list(block), [False] * len(block)
    placeholders = set()
    ends = [max(item.offset, 0) for item in items[1:]] + [len(block)]
    for item, end in zip(items, ends, strict=True):
        start = max(item.offset, 0)
        if start >= len(block):
            continue  # it begins in the tokens after the block, which a lookahead hash includes
        placeholders.add(block[start])
        position = start
        while position < min(end, len(block)) and block[position] == block[start]:
            padded[position], covered[position] = item.pad, True
            position += 1
    if any(token in placeholders and not known for token, known in zip(block, covered, strict=True)):
        return None
    return padded
