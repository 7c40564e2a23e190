"""Pulses of bridges: since when a bridge was not heard from, and which workers it feeds.

What lives here: a pulse, how often it is written, and which bridges are silent. What must not: Kafka, clocks (times are
arguments), and what a silent bridge means for an answer (router_api.knowledge.trust_tracker).

A bridge's heartbeats say for seconds ahead that a rank is being fed; they decide whether the rank gets requests at all.
A pulse says that everything the bridge has received is on its way to Kafka. Without pulses, answers for the bridge's
ranks would be exact until the lease ends, although a bridge that was killed or stopped passes on nothing.

A bridge that has claimed the lease of an engine reads the ranks' state from Kafka first, and may not reach the engine.
Until its feeds have stated their own states, the last records of the former bridge may say that all is well. So a pulse
lists the workers that are fed.

A bridge that was stopped may have written a pulse just before, which Kafka gets when it runs again, ahead of everything
that its engines have sent meanwhile. It has one pulse on its way at a time. So the first pulse after a silence shows
nothing, and the second one ends the silence. The same holds for the first pulse that a reader gets of a bridge, unless
it is the first one of that bridge. Pulses that a reader gets together, because it was stopped itself, count as one.

State: when each bridge was heard from.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from streams.core.ids import WorkerId
from streams.errors import BadRecord

#: Time between two pulses.
PULSE_EVERY_MS = 250

#: A bridge counts as silent after this time without a pulse, or after `behind_after_ms` if that is longer: two pulses
#: may be late or lost.
SILENT_AFTER_MS_MIN = 3 * PULSE_EVERY_MS

#: Pulses that are received within this time count as one: their bridge wrote them further apart.
TOGETHER_MS = PULSE_EVERY_MS // 2

#: Bridges that are kept. The limit keeps a foreign writer from filling memory.
BRIDGES_MAX = 4096

#: Workers that a pulse lists: as many as a bridge has engines (`ENGINES_MAX`).
FED_MAX = 4096

#: A bridge that has been silent for this long is forgotten; its name is never used again.
FORGET_AFTER_MS = 60_000

_NEVER_MS = -(2**62)
_NO_WORKERS: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class BridgePulse:
    """One pulse. number: counts the pulses of the process, from 1.

    fed: the workers whose events the bridge passes on. None if the pulse does not list them: then it passes on those of
    all workers whose leases it holds.
    """

    bridge: str
    number: int
    fed: tuple[WorkerId, ...] | None = None


class BridgePulses:
    """When each bridge was heard from last. Not thread-safe. Times are of one monotonic clock, in milliseconds."""

    def __init__(self, silent_after_ms: int) -> None:
        self._silent_after_ms = max(silent_after_ms, SILENT_AFTER_MS_MIN)
        self._heard_ms: dict[str, int] = {}
        self._returned_ms: dict[str, int] = {}  # when the first pulse after a silence was received
        self._fed: dict[str, frozenset[WorkerId] | None] = {}

    def note(self, pulse: BridgePulse, now_ms: int) -> bool:
        """Take in a pulse; return whether its bridge feeds other workers than before.

        Raises BadRecord if too many bridges are known, or if the pulse lists too many workers.
        """
        if pulse.fed is not None and len(pulse.fed) > FED_MAX:
            raise BadRecord("over_capacity", f"the pulse lists {len(pulse.fed)} workers, at most {FED_MAX} are allowed")
        if pulse.bridge not in self._heard_ms and len(self._heard_ms) >= BRIDGES_MAX:
            self._forget(now_ms)
            if len(self._heard_ms) >= BRIDGES_MAX:
                raise BadRecord("over_capacity", f"pulses of {BRIDGES_MAX} bridges are already kept")
        if pulse.number > 1:
            self._heard_ms.setdefault(pulse.bridge, now_ms - self._silent_after_ms - 1)
        if not 0 <= self.silent_from_ms(pulse.bridge) <= now_ms:
            self._heard_ms[pulse.bridge] = now_ms
        else:
            since_ms = now_ms - self._returned_ms.get(pulse.bridge, _NEVER_MS)
            if since_ms > self._silent_after_ms:
                self._returned_ms[pulse.bridge] = now_ms
            elif since_ms >= TOGETHER_MS:
                self._heard_ms[pulse.bridge] = now_ms
        before = self._fed.get(pulse.bridge)
        after = self._fed[pulse.bridge] = None if pulse.fed is None else frozenset(pulse.fed)
        return before != after

    def silent_from_ms(self, bridge: str) -> int:
        """Return the time from which a bridge counts as silent unless it is heard from before; -1 without a pulse."""
        heard_ms = self._heard_ms.get(bridge)
        return -1 if heard_ms is None else heard_ms + self._silent_after_ms + 1

    def not_fed(self, bridge: str, worker_ids: Set[WorkerId]) -> Set[WorkerId]:
        """Of the workers whose leases a bridge holds, those whose events it does not pass on by its last pulse."""
        fed = self._fed.get(bridge)
        return _NO_WORKERS if fed is None else worker_ids - fed

    def _forget(self, now_ms: int) -> None:
        for name in [name for name, heard_ms in self._heard_ms.items() if now_ms - heard_ms > FORGET_AFTER_MS]:
            del self._heard_ms[name], self._fed[name]
            self._returned_ms.pop(name, None)
