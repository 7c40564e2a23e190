"""What the front reads from a request about the answer that it passes on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from streams.frontend.resuming import COMPLETION_TOKENS_DEFAULT, AnswerOptions, answer_options
from streams.prompts.calls import Kind


def options(kind: Kind, **fields: Any) -> AnswerOptions:
    return answer_options(kind, orjson.dumps(fields))


def test_a_request_without_options_gets_openais_defaults() -> None:
    """A chat has no limit; a completion has one."""
    chat, completion = options(Kind.CHAT, messages=[]), options(Kind.COMPLETION, prompt="a")
    assert (chat.is_chat, chat.tokens_max) == (True, None)
    assert (completion.is_chat, completion.tokens_max) == (False, COMPLETION_TOKENS_DEFAULT)
    for defaults in (chat, completion):
        assert not (defaults.wants_ids or defaults.wants_usage or defaults.is_greedy or defaults.is_several)
        assert defaults.tokens_min == 0


@pytest.mark.parametrize(
    ("fields", "tokens_max"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "n": 2}, None),
        ({"max_tokens": 5, "best_of": 2}, None),
        ({"max_tokens": 5, "n": 1, "best_of": None}, 5),
        ({"max_tokens": "5"}, 5),  # engines read all of these as numbers
        ({"max_tokens": 5.0}, 5),
        ({"max_tokens": " 5.0 "}, 5),
        ({"max_tokens": True}, 1),
        ({"max_tokens": 5, "max_completion_tokens": "7"}, 7),
        ({"max_tokens": "many"}, None),  # the engine refuses these
        ({"max_tokens": 5.5}, None),
        ({"max_tokens": 2**63}, None),  # no limit that could be reached
        ({"max_tokens": 1e300}, None),
    ],
)
def test_the_limit_is_that_of_the_only_answer(fields: dict[str, Any], tokens_max: int | None) -> None:
    """With several answers, no limit of one stream follows from it."""
    assert options(Kind.CHAT, **fields).tokens_max == tokens_max


@pytest.mark.parametrize(
    ("fields", "tokens_max"),
    [
        ({"max_tokens": None}, None),
        ({"max_completion_tokens": 100}, COMPLETION_TOKENS_DEFAULT),
        ({"max_tokens": 5, "max_completion_tokens": 100}, 5),
    ],
)
def test_the_limit_of_a_completion_is_max_tokens_which_may_be_null(fields: Any, tokens_max: int | None) -> None:
    """Null is no limit. Engines do not read max_completion_tokens, so a stream that moves must not go on up to it."""
    assert options(Kind.COMPLETION, **fields).tokens_max == tokens_max


def test_numbers_and_truth_values_are_read_as_engines_read_them() -> None:
    """Otherwise a stream that moved would have other limits, and its client no token ids."""
    asked = options(Kind.CHAT, min_tokens="3", return_token_ids="true")
    assert (asked.tokens_min, asked.wants_ids) == (3, True)


@pytest.mark.parametrize(
    ("stream_options", "usage", "so_far"),
    [
        (None, False, False),
        ("no object", False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": 1}, True, False),  # as engines read it
        ({"include_usage": "true", "continuous_usage_stats": 1}, True, True),
        ({"include_usage": "false"}, False, False),
    ],
)
def test_usage_so_far_is_only_for_clients_that_want_usage(stream_options: Any, usage: bool, so_far: bool) -> None:
    """Truth values are read as engines read them."""
    asked = options(Kind.CHAT, stream_options=stream_options)
    assert (asked.wants_usage, asked.wants_usage_so_far) == (usage, so_far)


def test_decoding_is_greedy_at_temperature_zero_only() -> None:
    """The default of engines is another one."""
    assert options(Kind.CHAT, temperature=0).is_greedy
    assert options(Kind.CHAT, temperature=0.0).is_greedy
    assert not options(Kind.CHAT, temperature=0.1).is_greedy


def test_stop_strings_are_kept_as_the_request_has_them() -> None:
    """How much text they hold back is decided by the migration."""
    asked = options(Kind.CHAT, stop=["a", "bc"], include_stop_str_in_output=True, min_tokens=3)
    assert asked.stops == {"stop": ["a", "bc"], "include_stop_str_in_output": True}
    assert asked.tokens_min == 3
