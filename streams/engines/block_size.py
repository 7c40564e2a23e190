"""The size of an engine's blocks, as its bridge has it from what the engine reports (pure).

What lives here: which report counts. What must not: reading the reports (scraping, feed), and what follows from a wrong
size (bridge).

State: the block size of each engine.
"""

from __future__ import annotations


class EngineBlockSize:
    """The size of one engine's blocks, in tokens. Shared by the feeds of all of its ranks.

    An event that stores blocks says their size, until the engine restarts. Without one, the engine's metrics page says
    it, except for a size that divides the scope's: with context parallelism, vLLM's page has the size of one device's
    share of a block. Without either, the engine is assumed to have the scope's size; it has no blocks yet then.
    """

    def __init__(self, scope: int) -> None:
        """scope: the size of the model's blocks in this scope."""
        self.scope = scope
        self._from_events: int | None = None
        self._from_page: int | None = None

    @property
    def size(self) -> int:
        """The engine's size."""
        if self._from_events is not None:
            return self._from_events
        page = self._from_page
        return self.scope if page is None or self.scope % page == 0 else page

    @property
    def is_wrong(self) -> bool:
        """Whether the engine has another size than the scope."""
        return self.size != self.scope

    def on_page(self, size: int | None) -> None:
        """Take the size on the engine's metrics page, None if the page has none."""
        if size is not None:
            self._from_page = size

    def on_stored(self, size: int) -> None:
        """Take the size of blocks that the engine reported as stored."""
        self._from_events = size

    def on_incarnation(self, *, page_is_read: bool) -> None:
        """Note that the engine was restarted, and may have another size now.

        page_is_read: whether its metrics page is read periodically. Otherwise what it said before counts no longer.
        """
        self._from_events = None
        if not page_is_read:
            self._from_page = None
