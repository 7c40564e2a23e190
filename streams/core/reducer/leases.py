"""Leases of ranks: who has not been heard of for longer than it promised, and for long enough to be given up.

What lives here: when each rank was last heard of, on the clock of whoever asks. What must not: reading a clock, and
what follows for the rank (caretaker, holdings).

A rank is heard of when a record of it is applied, and was heard of when its partition was opened. Both are later than
the record was appended, so a lease is never judged over before it is, whatever clocks bridges have; and it is judged as
of a time up to which all that was appended is known to be applied, which may lag under load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streams.core.ids import RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress

#: An expiry that was written and not applied by then was refused, or came to nothing; it is written again.
EXPIRY_RETRY_MS = 30_000


@dataclass(frozen=True, slots=True)
class Overdue:
    """silent: ranks that fell silent. dead: workers whose every rank has been silent for the grace on top."""

    silent: list[RankId]
    dead: list[WorkerId]


class RankLeases:
    """When the ranks of one partition were last heard of. Times are of one monotonic clock, in ms."""

    def __init__(self, opened_ms: int, grace_ms: int) -> None:
        self._opened_ms = opened_ms
        self._grace_ms = grace_ms
        self._last_applied_ms: dict[RankId, int] = {}
        self._expired_ms: dict[WorkerId, int] = {}

    def note_applied(self, ranks: Iterable[RankId], now_ms: int) -> None:
        """Records of these ranks have been applied."""
        self._last_applied_ms.update(dict.fromkeys(ranks, now_ms))

    def overdue(self, progress: Mapping[RankId, Progress], now_ms: int) -> Overdue:
        """Judge every rank. A worker is dead only as a whole: one rank that lives, or never promised to, keeps it."""
        silent: list[RankId] = []
        dead: dict[WorkerId, bool] = {}
        for rank, known in progress.items():
            if known.health is Health.REMOVED:
                self._last_applied_ms.pop(rank, None)
                continue
            quiet_ms = now_ms - self._last_applied_ms.get(rank, self._opened_ms)
            if known.lease_ms and not known.silent and quiet_ms > known.lease_ms:
                silent.append(rank)
            gone = known.silent and quiet_ms > known.lease_ms + self._grace_ms
            dead[rank.worker_id] = dead.get(rank.worker_id, True) and gone
        found = [worker_id for worker_id, gone in dead.items() if gone]
        self._expired_ms = {worker_id: at for worker_id, at in self._expired_ms.items() if dead.get(worker_id)}
        return Overdue(silent, [each for each in found if now_ms >= self._expired_ms.get(each, now_ms)])

    def expired(self, worker_id: WorkerId, now_ms: int) -> None:
        """A worker's expiry has been written; it is not due again until it had time to be applied."""
        self._expired_ms[worker_id] = now_ms + EXPIRY_RETRY_MS
