"""A simulated engine's journal: every change of its cache with the time at which it happened.

What lives here: writing the file (`Journal`), and reading it as intervals of time (`CacheHistory`). What must not: the
cache (block_cache). A check of a router compares its answers with this file, which survives SIGKILL of the engine. It
also has what each prefill computed. A pool writes such a file too: what it holds, and what it has given.
"""

from __future__ import annotations

import bisect
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Self

from streams.lab.engines.engine_messages import FirstToken, KvCleared, KvRemoved, KvStored

#: End of an interval that has not ended yet.
_OPEN_NS = (1 << 63) - 1


class Journal:
    """Appends changes to a file; each line is written before the change is published."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._write({"started": True})  # the caches of earlier processes are gone

    def note(self, events: Iterable[object]) -> None:
        """Write those of an engine's events that change its cache."""
        for event in events:
            match event:
                case KvStored(medium="GPU"):
                    self._write({"stored": [event.engine.tolist(), event.sequence.tolist()]})
                case KvRemoved(medium="GPU"):
                    self._write({"removed": event.engine.tolist()})
                case KvCleared():
                    self._write({"cleared": True})

    def note_prefill(self, request: str | None, first: FirstToken) -> None:
        """Write what a prefill computed. request: the client's id of it."""
        self._write(
            {
                "prefilled": {
                    "request": request,
                    "prompt_tokens": first.prompt_tokens,
                    "cached_tokens": first.cached_tokens,
                    "pooled_tokens": first.pooled_tokens,
                }
            }
        )

    def note_sent(self, request: str | None) -> None:
        """Write that the first tokens of a stream are being sent."""
        self._write({"sent": request})

    def note_pool(self, change: str, keys: Sequence[int], n_given: int | None = None) -> None:
        """Write a change of a pool's content, or with n_given, how many of the keys asked for it has given."""
        self._write({change: [str(key) for key in keys], **({} if n_given is None else {"n_given": n_given})})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, change: dict[str, object]) -> None:
        self._file.write(json.dumps({"at_ns": time.time_ns(), **change}).encode() + b"\n")


class CacheHistory:
    """When an engine held which block, as its journal says. Times are Unix times in nanoseconds."""

    def __init__(self) -> None:
        self._sequence_of: dict[int, int] = {}  # engine hash to sequence hash, of the blocks that are held
        self._copies: dict[int, int] = {}  # engine hash to the number of its physical copies
        self._names: dict[int, int] = {}  # sequence hash to the number of engine hashes that name it
        self._from_ns: dict[int, list[int]] = {}  # sequence hash to the beginnings of its intervals, ascending
        self._to_ns: dict[int, list[int]] = {}  # and to their ends

    @classmethod
    def read(cls, path: Path, deaths_ns: Sequence[int] = ()) -> Self:
        """Read a journal. deaths_ns: when processes of the engine were killed, which the journal cannot say."""
        history = cls()
        deaths = sorted(deaths_ns)
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the engine is writing it
                change = json.loads(line)
                while deaths and deaths[0] <= change["at_ns"]:
                    history.clear(deaths.pop(0))
                history.apply(change)
        for death_ns in deaths:
            history.clear(death_ns)
        return history

    def apply(self, change: dict[str, object]) -> None:
        """Apply one line of a journal."""
        at_ns = change["at_ns"]
        assert isinstance(at_ns, int)
        match change:
            case {"stored": [list(engine), list(sequence)]}:
                for name, block in zip(engine, sequence, strict=True):
                    self._store(name, block, at_ns)
            case {"removed": list(engine)}:
                for name in engine:
                    self._remove(name, at_ns)
            case {"prefilled": _} | {"sent": _}:
                pass
            case _:
                self.clear(at_ns)

    def clear(self, at_ns: int) -> None:
        """Note that the cache became empty."""
        for block in self._names:
            self._to_ns[block][-1] = at_ns
        self._sequence_of.clear()
        self._copies.clear()
        self._names.clear()

    def overlaps(self, sequence: Sequence[int], from_ns: int, to_ns: int) -> set[int]:
        """Return every number of leading blocks of a prompt that was held at some moment from from_ns to to_ns.

        sequence: the prompt's sequence hashes.
        """
        moments = {from_ns}
        for block in sequence:
            for times in (self._from_ns.get(block, ()), self._to_ns.get(block, ())):
                first = bisect.bisect_right(times, from_ns)
                moments.update(times[first : bisect.bisect_right(times, to_ns)])
        return {self._overlap(sequence, moment) for moment in moments}

    def last_held_ns(self, sequence: Sequence[int], overlap: int, until_ns: int) -> int | None:
        """Return until when, at the latest before until_ns, exactly `overlap` leading blocks of a prompt were held.

        None if that was never so. sequence: the prompt's sequence hashes.
        """
        changes = {0, until_ns}
        for block in sequence:
            for times in (self._from_ns.get(block, ()), self._to_ns.get(block, ())):
                changes.update(times[: bisect.bisect_left(times, until_ns)])
        descending = sorted(changes, reverse=True)
        for end_ns, began_ns in itertools.pairwise(descending):
            if self._overlap(sequence, began_ns) == overlap:
                return end_ns
        return None

    def _overlap(self, sequence: Sequence[int], at_ns: int) -> int:
        for position, block in enumerate(sequence):
            n_begun = bisect.bisect_right(self._from_ns.get(block, ()), at_ns)
            if not n_begun or self._to_ns[block][n_begun - 1] <= at_ns:
                return position
        return len(sequence)

    def _store(self, name: int, block: int, at_ns: int) -> None:
        self._copies[name] = self._copies.get(name, 0) + 1
        if name in self._sequence_of:
            return
        self._sequence_of[name] = block
        self._names[block] = self._names.get(block, 0) + 1
        if self._names[block] == 1:
            self._from_ns.setdefault(block, []).append(at_ns)
            self._to_ns.setdefault(block, []).append(_OPEN_NS)

    def _remove(self, name: int, at_ns: int) -> None:
        self._copies[name] -= 1
        if self._copies[name]:
            return
        del self._copies[name]
        block = self._sequence_of.pop(name)
        self._names[block] -= 1
        if not self._names[block]:
            del self._names[block]
            self._to_ns[block][-1] = at_ns
