"""The interface of a source of engines, and the combination of several.

What lives here: the protocol, the fixed list of the command line, and merging. What must not: where other lists come
from.

State: the last list of a source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from streams.core.ids import WorkerId
from streams.engines.address import EngineAddress, first_clash

log = logging.getLogger(__name__)

#: Engines of one bridge. A core can serve some hundreds; more are split over several bridges.
ENGINES_MAX = 4096

#: Takes the whole list of a source, each time it may have changed.
Wanted = Callable[[Sequence[EngineAddress]], None]


class EngineSource(Protocol):
    """Reports which engines the bridge shall feed. An engine that is no longer reported is released."""

    @property
    def is_fixed(self) -> bool:
        """Whether the list never changes, so that a bridge that may feed none of its engines can end."""

    def __str__(self) -> str:
        """For the log: where the list comes from."""

    async def run(self, wanted: Wanted) -> None:
        """Report the list at the start and after each change, until cancelled.

        A source that cannot be read keeps its last list: engines are not released because a name server, a file or an
        API server cannot be read for a while.
        """


class FixedEngines:
    """The engines of the command line."""

    is_fixed = True

    def __init__(self, engines: Sequence[EngineAddress]) -> None:
        self._engines = tuple(engines)

    def __str__(self) -> str:
        return "the command line"

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        wanted(self._engines)
        await asyncio.Event().wait()


class MergedEngines:
    """The lists of several sources as one. Of two engines with one id or address, that of the earlier source counts."""

    def __init__(self, n_sources: int) -> None:
        self._lists: list[tuple[EngineAddress, ...] | None] = [None] * n_sources
        self._logged: set[str] = set()

    def replace(self, source: int, engines: Sequence[EngineAddress]) -> dict[WorkerId, EngineAddress]:
        """Take a source's list; return the engines of all sources by their id, at most ENGINES_MAX."""
        self._lists[source] = tuple(engines)
        merged = [engine for engines_of in self._lists for engine in engines_of or ()]
        left_out: set[str] = set()
        while (clash := first_clash(merged)) is not None:
            engine, value = clash
            left_out.add(f"the engine at {engine.url} is left out: another engine has {value}")
            position = max(index for index, other in enumerate(merged) if other == engine)
            del merged[position]
        if len(merged) > ENGINES_MAX:
            left_out.add(f"all but {ENGINES_MAX} engines are left out; start further bridges for the others")
        for reason in sorted(left_out - self._logged):
            log.warning("%s", reason)
        self._logged = left_out
        return {engine.worker_id: engine for engine in merged[:ENGINES_MAX]}

    @property
    def n_unread(self) -> int:
        """How many sources have not reported a list yet."""
        return sum(engines is None for engines in self._lists)
