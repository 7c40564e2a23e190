"""The overlap that a router promises is the one that the engine finds, request by request."""

from __future__ import annotations

import pytest

from tests.real.engine import BLOCK_SIZE
from tests.real.environment import FULL
from tests.real.fleet import Conversations, Fleet


def test_chats_of_several_turns(fleet: Fleet) -> None:
    """Each turn finds what the turns before it left, and the router said so."""
    conversations = Conversations(1)
    for _ in range(4):
        messages = conversations.begin()
        for turn in range(4):
            answer = fleet.chat(FULL, messages)
            answer.assert_agrees()
            assert turn == 0 or answer.promised > 0
            messages = conversations.go_on(messages, answer.text)
            fleet.settle()


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_prompts_that_end_at_a_block_boundary(fleet: Fleet, beyond: int) -> None:
    """A prompt that ends just before, at or just after a block's end has the same overlap for router and engine."""
    for n_blocks in (1, 2, 5):
        prompt = [3 + (7 * place + 11 * n_blocks + beyond) % 1900 for place in range(n_blocks * BLOCK_SIZE + beyond)]
        for repeated in range(2):
            answer = fleet.complete(FULL, prompt)
            answer.assert_agrees()
            assert repeated == 0 or answer.promised == len(prompt) // BLOCK_SIZE
            fleet.settle()


def test_text_prompts_are_tokenized_as_the_engine_tokenizes(fleet: Fleet) -> None:
    """The number of prompt tokens is that of the front, with every kind of character."""
    conversations = Conversations(2)
    for text in (conversations.words(200), "äöü ß 漢字 🙂 " * 20, "a" * 500, "1 2 3\n\n\t- x" * 30):
        for repeated in range(2):
            answer = fleet.complete(FULL, text)
            answer.assert_agrees()
            assert repeated == 0 or answer.promised == answer.prompt_tokens // BLOCK_SIZE
            fleet.settle()
