"""Requests of a recorded or generated time, as values.

What lives here: `TraceRequest`, which the decision log makes of a recorded hour and which simulations take. What must
not: the format of files (lab.trace), and where requests come from (decision_log.trace, lab).
"""

from __future__ import annotations

from dataclasses import dataclass

#: A prompt of 10 million tokens, longer than any engine accepts. The longest line of Mooncake's real trace is 2 kB.
HASH_IDS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. input_length, output_length: tokens. hash_ids: one per block; the last may be partial."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
