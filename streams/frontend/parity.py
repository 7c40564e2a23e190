"""Whether an engine makes the same tokens of the same prompts as a model's files (pure).

What lives here: the prompts, and the comparison. What must not: asking engines (parity_probes, doctor), and tokenizing
(tokenizer). A result names a prompt and positions, and neither text nor token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.core.workers import RenderOutcome, RenderPart, RenderReason, RenderResult
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

#: The prompts: the call that each is for, and its body without the model. A model without a chat template has only the
#: first one. Some templates refuse a system message, so there is a chat without one.
PROMPTS: Mapping[RenderPart, tuple[Kind, Mapping[str, Any]]] = {
    RenderPart.COMPLETION: (Kind.COMPLETION, {"prompt": _TEXT}),
    RenderPart.CHAT: (Kind.CHAT, {"messages": _MESSAGES[1:]}),
    RenderPart.CHAT_WITH_SYSTEM: (Kind.CHAT, {"messages": _MESSAGES}),
    RenderPart.CHAT_WITH_TOOLS: (Kind.CHAT, {"messages": _MESSAGES[1:], "tools": _TOOLS}),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two lists of tokens that differ. position: of the first difference. n_ours, n_theirs: their lengths."""

    position: int
    n_ours: int
    n_theirs: int

    def __str__(self) -> str:
        return f"{self.n_theirs} tokens instead of {self.n_ours}, different from token {self.position} on"


def compare(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Return where two lists of tokens differ, None if they are equal."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    position = next(
        (position for position, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs))
    )
    return Difference(position, len(ours), len(theirs))


@dataclass(frozen=True, slots=True)
class RenderedPair:
    """The tokens of one prompt. ours, theirs: of the front and of the engine; None if it refuses the prompt."""

    ours: Sequence[int] | None
    theirs: Sequence[int] | None


def judge(rendered: Mapping[RenderPart, RenderedPair]) -> RenderResult:
    """Return the result of a probe from the tokens of its prompts.

    A difference counts more than a prompt that only one side accepts: it makes prompts match nothing, while such a
    prompt is refused by the engine, or routed by load. Prompts that both sides refuse do not count.
    """
    unknown: RenderResult | None = None
    n_compared = 0
    for part, tokens in rendered.items():
        if tokens.ours is not None and tokens.theirs is not None:
            n_compared += 1
            difference = compare(tokens.ours, tokens.theirs)
            if difference is not None:
                return RenderResult(RenderOutcome.DIFFERS, part=part, from_token=difference.position)
        elif tokens.ours is not tokens.theirs and unknown is None:
            reason = RenderReason.ENGINE_REFUSED if tokens.theirs is None else RenderReason.FRONT_REFUSED
            unknown = RenderResult(RenderOutcome.UNKNOWN, reason, part)
    if unknown is not None:
        return unknown
    if not n_compared:
        return RenderResult(RenderOutcome.UNKNOWN, RenderReason.ENGINE_REFUSED)
    return RenderResult(RenderOutcome.EQUAL)
