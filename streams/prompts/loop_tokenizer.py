"""Tokenizing on the event loop: for prompts that take less time there than it takes to reach a process.

What lives here: which prompts these are, and how much time they may take. What must not: how a text becomes tokens
(tokenizer), and processes (tokenizing).

A call of a process takes 0.6 to 0.8 ms, most of which is the time until the kernel runs the process and then the loop.
Rendering a chat of 4,400 characters and encoding the 400 that are new takes 0.07 ms. So a short prompt is rendered
here. What is new in it is encoded here as well if it is short, and otherwise in a process: all other requests wait
while the loop encodes. A template that may take long, whatever the request is, runs only in processes, which can be
killed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from streams.errors import InvalidRequest
from streams.prompts.calls import Kind
from streams.prompts.conversation import NEWEST, Rule
from streams.prompts.tokenizer import Encoded, ModelTokenizer, Rendered

#: Bytes of a body that is rendered here. Reading and rendering one of this size takes 0.1 ms.
BODY_BYTES_MAX = 16 << 10

#: Objects in such a body. A template takes up to 10 us for each message, and tools are objects as well.
OBJECTS_MAX = 128

#: Characters that are encoded here for one request. Tokenizers encode 1 to 5 in a microsecond.
ENCODED_CHARACTERS_MAX = 1024

#: If the prompts of a model take more processor time than this on average, its template or its tokenizer is slow. They
#: then go to the processes for SLOW_PAUSE_S. Prompts of 200 tokens that nobody has sent before take 0.3 ms, and twice
#: as much when the process has just started, or shares its core.
SLOW_S = 0.002
SLOW_PAUSE_S = 60.0

#: Prompts of which the average is taken, or fewer if these take as long.
AVERAGED = 64


class LoopTokenizer:
    """The tokenizer of one model for the event loop. Owner of the time that its prompts take."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        processor_s: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """processor_s: of this thread. By the clock, a busy machine would seem to be a slow tokenizer."""
        self._tokenizer = tokenizer
        self._processor_s = processor_s
        self._clock = clock
        self._spent_s = 0.0
        self._n_prompts = 0
        self._slow_until_s = float("-inf")

    def render(self, kind: Kind, raw: bytes, rules: Rule = NEWEST) -> Rendered | None:
        """Return the text of a prompt; None if a process must render it. Raises InvalidRequest."""
        if len(raw) > BODY_BYTES_MAX or raw.count(b"{") > OBJECTS_MAX:
            return None
        if kind is not Kind.COMPLETION and not self._tokenizer.is_bounded:
            return None
        if self._clock() < self._slow_until_s:
            return None
        began_s = self._processor_s()
        try:
            body = orjson.loads(raw)
            return self._tokenizer.render(kind, body, rules) if _has_plain_arguments(body) else None
        except InvalidRequest:
            raise
        except Exception as exc:  # a template may raise anything; the request is then routed by load
            raise InvalidRequest(type(exc).__name__) from exc
        finally:
            self._n_prompts += 1
            self._note(began_s)

    def missing(self, rendered: Rendered) -> list[str]:
        """Return the pieces that a process must encode; none if `join` may encode what is missing."""
        missing = self._tokenizer.missing(rendered)
        return missing if sum(map(len, missing)) > ENCODED_CHARACTERS_MAX else []

    def join(self, rendered: Rendered, known: Mapping[str, array[int]]) -> Encoded:
        """Return the tokens of a prompt, and cache its pieces. known: those that a process has encoded."""
        began_s = self._processor_s()
        encoded = self._tokenizer.join(rendered, known)
        self._note(began_s)
        return encoded

    def _note(self, began_s: float) -> None:
        """Count the time of a step. Both steps of a prompt count as one prompt."""
        self._spent_s += self._processor_s() - began_s
        is_slow = self._spent_s > SLOW_S * AVERAGED
        if is_slow:
            self._slow_until_s = self._clock() + SLOW_PAUSE_S
        if is_slow or self._n_prompts >= AVERAGED:
            self._spent_s, self._n_prompts = 0.0, 0


def _has_plain_arguments(body: dict[str, Any]) -> bool:
    """Whether the arguments of the template are words and truth values: a template may count up to a number."""
    arguments = body.get("chat_template_kwargs")
    return not isinstance(arguments, dict) or all(
        value is None or isinstance(value, bool | str) for value in arguments.values()
    )
