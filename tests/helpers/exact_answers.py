"""Answers that claim to be exact, compared with the journals of the engines.

What lives here: what is noted of an answer, and whether it was right. What must not: asking (the programs that do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streams.lab.engines.engine_messages import hash_prompt
from streams.lab.engines.journal import CacheHistory

#: How old an answer's knowledge may be: an event needs some milliseconds to reach a router.
LATE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer. prompt: number of the request in the trace. Times are Unix times in nanoseconds."""

    prompt: int
    sent_ns: int
    received_ns: int
    router: int
    worker_id: int
    chosen_mode: str
    mode: str
    overlap: int
    because: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that claims to be exact, and what the engine really held.

    true_until_ns: until when, before the request, the answer would have been right; None if it was never right.
    """

    asked: Asked
    held: set[int]
    true_until_ns: int | None

    @property
    def age(self) -> str:
        """How old the answer's knowledge was when the request was sent."""
        if self.true_until_ns is None:
            return "which was never so"
        return f"which was so until {(self.asked.sent_ns - self.true_until_ns) / 1e9:.2f} s before the request"


def wrong_answers(
    asked: Iterable[Asked],
    tokens_of: Callable[[int], bytes],
    block_size: int,
    histories: dict[int, CacheHistory],
    late_ns: int = LATE_NS,
) -> list[Wrong]:
    """Return the answers that claim to be exact and were true at no moment of the last late_ns.

    tokens_of: returns the prompt of a request, u32 LE.
    """
    wrong: list[Wrong] = []
    for answer in asked:
        if answer.chosen_mode != "exact":
            continue
        sequence = hash_prompt(tokens_of(answer.prompt), block_size).sequence.tolist()
        held = histories[answer.worker_id].overlaps(sequence, answer.sent_ns - late_ns, answer.received_ns)
        if answer.overlap not in held:
            true_until_ns = histories[answer.worker_id].last_held_ns(sequence, answer.overlap, answer.sent_ns)
            wrong.append(Wrong(answer, held, true_until_ns))
    return wrong
