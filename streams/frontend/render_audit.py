"""Whether engines have the prompts that the front computed, request by request (docs/front.md) (pure).

What lives here: the comparison of a prompt with what its engine reports of it, the counts, and when a model's prompts
differ too often. What must not: asking engines (auditing), and what is done about it (parity_probes).

State: the last prompts of each model.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter, deque

from streams.client.payloads import token_array

#: Prompts of a model that are looked back on, and how many of them must differ before its engines render its prompts.
WINDOW = 20
DIFFERENT_MAX = 3

#: Models that are looked back on, and pairs of a model and a version that are counted.
MODELS_MAX = 1024


class Rendering(enum.StrEnum):
    """How an engine's prompt compares with that of the front. The values are those of a label."""

    EQUAL = "equal"  # the same tokens
    SAME_LENGTH = "same_length"  # as many tokens; the engine did not report which
    OTHER_LENGTH = "other_length"
    OTHER_TOKENS = "other_tokens"  # as many tokens, but others

    @property
    def differs(self) -> bool:
        """Whether the engine's prompt is another one."""
        return self in (Rendering.OTHER_LENGTH, Rendering.OTHER_TOKENS)


def compare(packed: bytes, prompt_tokens: int, prompt_ids: array[int] | None) -> Rendering:
    """Compare a prompt with what its engine reports of it.

    packed: the front's tokens, u32 LE. prompt_tokens: how many the engine had. prompt_ids: these, as uint32; None if
    the engine does not report them.
    """
    if prompt_tokens * 4 != len(packed):
        return Rendering.OTHER_LENGTH
    if prompt_ids is None:
        return Rendering.SAME_LENGTH
    return Rendering.EQUAL if prompt_ids == token_array(packed) else Rendering.OTHER_TOKENS


class RenderAudit:
    """The counts of one front, and the last prompts of each model.

    renderings: prompts by how they compare. different: those that differ, by model and version of the engine.
    """

    def __init__(self) -> None:
        self.renderings: Counter[Rendering] = Counter()
        self.different: Counter[tuple[str, str]] = Counter()
        self._last: dict[str, deque[bool]] = {}

    def note(self, model: str, rendering: Rendering) -> bool:
        """Take in a prompt that the front rendered with a model's files; returns whether they differ too often."""
        last = self._last.get(model)
        if last is None:
            if len(self._last) >= MODELS_MAX:
                del self._last[next(iter(self._last))]
            last = self._last[model] = deque(maxlen=WINDOW)
        last.append(rendering.differs)
        if not rendering.differs or sum(last) < DIFFERENT_MAX:
            return False
        last.clear()
        return True

    def note_different(self, model: str, version: str) -> None:
        """Count a prompt that differs. version: of the engine, "" if it is not known."""
        key = (model, version)
        if key in self.different or len(self.different) < MODELS_MAX:
            self.different[key] += 1
