"""Pulses of bridges: since when a bridge was not heard from.

What lives here: a pulse, how often it is written, and which bridges are silent. What must not: Kafka, clocks (times are
arguments), and what a silent bridge means for an answer (router_api.trust).

A bridge's heartbeats say for seconds ahead that a rank is being fed; they decide whether the rank gets requests at all.
A pulse says that everything the bridge has received is on its way to Kafka. Without pulses, answers for the bridge's
ranks would be exact until the lease ends, although a bridge that was killed or stopped passes on nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from streams.errors import BadRecord

#: Time between two pulses.
PULSE_EVERY_MS = 250

#: A bridge counts as silent after this time without a pulse, or after `behind_after_ms` if that is longer: two pulses
#: may be late or lost.
SILENT_AFTER_MS_MIN = 3 * PULSE_EVERY_MS

#: Bridges that are kept. The limit keeps a foreign writer from filling memory.
BRIDGES_MAX = 4096

#: A bridge that has been silent for this long is forgotten; its name is never used again.
FORGET_AFTER_MS = 60_000


@dataclass(frozen=True, slots=True)
class BridgePulse:
    """One pulse. number: counts the pulses of the process, from 1."""

    bridge: str
    number: int


class BridgePulses:
    """When each bridge was heard from last. Not thread-safe. Times are of one monotonic clock, in milliseconds."""

    def __init__(self, silent_after_ms: int) -> None:
        self._silent_after_ms = max(silent_after_ms, SILENT_AFTER_MS_MIN)
        self._heard_ms: dict[str, int] = {}

    def note(self, pulse: BridgePulse, now_ms: int) -> None:
        """Take in a pulse. Raises BadRecord if too many bridges are known."""
        if pulse.bridge not in self._heard_ms and len(self._heard_ms) >= BRIDGES_MAX:
            self._forget(now_ms)
            if len(self._heard_ms) >= BRIDGES_MAX:
                raise BadRecord("over_capacity", f"pulses of {BRIDGES_MAX} bridges are already kept")
        self._heard_ms[pulse.bridge] = now_ms

    def silent_from_ms(self, bridge: str) -> int:
        """Return the time from which a bridge counts as silent unless it is heard from again; -1 without a pulse."""
        heard_ms = self._heard_ms.get(bridge)
        return -1 if heard_ms is None else heard_ms + self._silent_after_ms + 1

    def _forget(self, now_ms: int) -> None:
        for name in [name for name, heard_ms in self._heard_ms.items() if now_ms - heard_ms > FORGET_AFTER_MS]:
            del self._heard_ms[name]
