"""What an engine's `/v1/models` says about the model that it is fed under (pure).

What lives here: which entries are names of the model, which are its adapters, and how long its requests may be. What
must not: asking for the list (process_start), and what is registered (registration).

An engine that serves one model under several names lists each of them, in an order that a restart may change. Names of
one model have no parent and the same root, which is where its weights are. An entry whose parent is one of the names is
an adapter. Entries without a root say nothing about each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streams.core.workers import ALIASES_MAX, LORA_NAME_CHARS_MAX, LORA_NAMES_MAX
from streams.errors import KvStreamsError

#: The greatest number of tokens that a record may contain.
_LEN_MAX = (1 << 31) - 1

#: Characters of a name, as the API of routers limits them.
_NAME_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One entry of the list. max_model_len: None if the entry has none that can be used."""

    name: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ListedFacts:
    """What a list says about one model. aliases, adapters: in alphabetical order, whatever the list's order is."""

    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    max_model_len: int | None


def model_entries(body: bytes) -> tuple[ModelEntry, ...]:
    """Return the entries in an answer of /v1/models; the first is the engine's model.

    Raises KvStreamsError for an answer whose first id cannot be used.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise KvStreamsError("the answer is not JSON") from exc
    models = answer.get("data") if isinstance(answer, dict) else None
    listed = [_entry(model) for model in models] if isinstance(models, list) else []
    if not listed or listed[0] is None:
        raise KvStreamsError("the answer names no model")
    if not listed[0].name.isprintable():
        raise KvStreamsError(f"the answer names the model {listed[0].name!r}, which contains control characters")
    return tuple(entry for entry in listed if entry is not None)


def _entry(model: Any) -> ModelEntry | None:
    name = model.get("id") if isinstance(model, dict) else None
    if not isinstance(name, str) or not name:
        return None
    parent, root, length = model.get("parent"), model.get("root"), model.get("max_model_len")
    return ModelEntry(
        name,
        parent if isinstance(parent, str) and parent else None,
        root if isinstance(root, str) and root else None,
        length if type(length) is int and 0 < length <= _LEN_MAX else None,
    )


def names_of(entries: Sequence[ModelEntry], model: str) -> tuple[str, ...]:
    """Return the names of a listed model, in the list's order; only its own if no other entry has its root."""
    own = next((entry for entry in entries if entry.name == model), None)
    root = None if own is None or own.parent is not None else own.root
    same = [entry.name for entry in entries if entry.parent is None and entry.root == root]
    names = dict.fromkeys(name for name in same if _is_usable(name)) if root is not None else {}
    return tuple(names) if model in names else (model,)


def facts_of(entries: Sequence[ModelEntry], model: str) -> ListedFacts:
    """Return what a list says about a model that it has."""
    names = names_of(entries, model)
    adapters = {entry.name for entry in entries if entry.parent in names and entry.name not in names}
    lengths = [entry.max_model_len for entry in entries if entry.name in names and entry.max_model_len is not None]
    return ListedFacts(
        tuple(sorted(name for name in names if name != model))[:ALIASES_MAX],
        tuple(sorted(filter(_is_usable, adapters)))[:LORA_NAMES_MAX],
        min(lengths, default=None),
    )


def _is_usable(name: str) -> bool:
    return len(name) <= min(_NAME_CHARS_MAX, LORA_NAME_CHARS_MAX) and name.isprintable()
