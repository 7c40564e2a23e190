"""A model with sliding windows next to full attention: a match ends where the engine's hit ends."""

from __future__ import annotations

from collections import Counter

from tests.real.engine import BLOCK_SIZE
from tests.real.environment import SLIDING
from tests.real.fleet import Conversations, Fleet

MODEL = SLIDING


def test_chats_longer_than_the_window(fleet: Fleet) -> None:
    """Answers that claim to be exact are right. Once the engine has evicted blocks from the middle of a window's chain,
    answers about it are approximate (docs/trust.md), and they never promise a hit that begins where no window is held.
    """
    conversations, modes, found = Conversations(5), Counter[str](), 0
    for _ in range(3):
        messages = conversations.begin()
        for _ in range(5):
            answer = fleet.chat(SLIDING, messages)
            assert answer.status == 200, answer.body
            assert answer.mode in ("exact", "approximate"), answer
            modes[answer.mode] += 1
            found += answer.cached_tokens
            if answer.mode == "exact":
                answer.assert_agrees()
            messages = conversations.go_on(messages, answer.text)
            fleet.settle()
    assert modes["exact"] and found, modes


def test_a_prompt_that_leaves_another_in_its_middle(fleet: Fleet) -> None:
    """Where two prompts part inside a window, the engine's hit ends where the router said."""
    prompt = [9 + place % 1700 for place in range(12 * BLOCK_SIZE)]
    fleet.complete(SLIDING, prompt)
    fleet.settle()
    for n_common in (1, 3, 6, 11):
        other = [*prompt[: n_common * BLOCK_SIZE], *range(20, 20 + 2 * BLOCK_SIZE)]
        answer = fleet.complete(SLIDING, other)
        assert answer.status == 200, answer.body
        if answer.mode == "exact":
            answer.assert_agrees()
        fleet.settle()
