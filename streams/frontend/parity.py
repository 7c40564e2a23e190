"""Whether an engine makes the same tokens of the same prompts as a model's files (pure).

What lives here: the prompts, and the comparison. What must not: asking engines (doctor), and tokenizing (tokenizer). A
result names a prompt and positions, and neither text nor token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.frontend.requests import Kind

_TEXT = "Héllo, wörld! 3.14 + 2 = 5.14\n\n\tif x:\n    return 'naïve 你好 🙂'  # it's"

_MESSAGES: tuple[Mapping[str, Any], ...] = (
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "5.14"},
    {"role": "user", "content": "And 2 + 2?"},
)

_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
)

#: Prompts by name: the call that they are for, and its body without the model. A model without a chat template has only
#: the first one. Some templates refuse a system message, so there is a chat without one.
PROMPTS: Mapping[str, tuple[Kind, Mapping[str, Any]]] = {
    "completion": (Kind.COMPLETION, {"prompt": _TEXT}),
    "chat": (Kind.CHAT, {"messages": _MESSAGES[1:]}),
    "chat with a system message": (Kind.CHAT, {"messages": _MESSAGES}),
    "chat with tools": (Kind.CHAT, {"messages": _MESSAGES[1:], "tools": _TOOLS}),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two lists of tokens that differ. at: position of the first difference. n_ours, n_theirs: their lengths."""

    at: int
    n_ours: int
    n_theirs: int

    def __str__(self) -> str:
        return f"{self.n_theirs} tokens instead of {self.n_ours}, different from token {self.at} on"


def compare(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Return where two lists of tokens differ, None if they are equal."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    return Difference(at, len(ours), len(theirs))
