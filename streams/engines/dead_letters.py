"""A bridge's dead letters: what is kept of a message that could not be used (pure).

What lives here: their content, which is JSON. What must not: Kafka (feed), and which parts of an event may be shown
(dialects). An engine's messages contain the tokens of prompts, so a message itself never becomes a dead letter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from streams.engines.dialects.interface import UnusableEvent

#: Events that one dead letter shows. With the hashes that a dialect shows of an event, that is at most 100 KB.
EVENTS_SHOWN_MAX = 100


def of_payload(sequence: int, n_bytes: int, digest: int, unusable: Sequence[UnusableEvent]) -> bytes:
    """Return the dead letter of a batch.

    digest: xxh3_64 of the payload, which the batch's record on `kv-events` has as well.
    """
    return _json(
        {
            "sequence": sequence,
            "bytes": n_bytes,
            "digest": f"{digest:016x}",
            "n_unusable": len(unusable),
            "unusable": [_event(event) for event in unusable[:EVENTS_SHOWN_MAX]],
        }
    )


def of_frames(frames: Sequence[bytes]) -> bytes:
    """Return the dead letter of a message that is not a batch with its number."""
    return _json({"n_frames": len(frames), "frame_bytes": [len(frame) for frame in frames[:EVENTS_SHOWN_MAX]]})


def _event(unusable: UnusableEvent) -> dict[str, object]:
    shown: dict[str, object] = {
        "reason": unusable.error.reason,
        "message": unusable.error.message,
        "lost": unusable.is_lost,
    }
    if unusable.index is not None:
        shown["index"] = unusable.index
    if unusable.removed is not None:
        shown["n_removed"] = len(unusable.removed)
    if unusable.shown:
        shown["event"] = dict(unusable.shown)
    return shown


def _json(content: dict[str, object]) -> bytes:
    return json.dumps(content).encode()
