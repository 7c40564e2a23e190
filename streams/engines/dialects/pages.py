"""Pages that are smaller than a block: which blocks of the scope they make (pure).

What lives here: the pages that one rank holds, and when all pages of a block are held. What must not: the format of any
engine.

With a block size of 16 in the scope and pages of 1 token in the engine, 16 pages make one block. The block is held in a
tier while all 16 are, and its engine hash is that of its last page, which names the whole prefix. Prompts that differ
within a block share the pages before the difference, so the pages of a block are a tree. A page that ends at no block's
end is the short tail of a prompt; it makes no block unless further pages complete it.

The last page of a block is enough to continue after it. So a decoder that begins in the middle of an incarnation reads
everything but blocks that had begun before. The ledger leaves the further pages of these out (PagesStored).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streams.core.events import BlocksRemoved, BlocksStored
from streams.core.ids import EngineHash, HashArray, Tier
from streams.engines.dialects.fields import hash_blocks, wrong_block_size
from streams.errors import BadRecord

#: Pages of one rank, about 300 bytes each. An engine with pages of one token reaches it with 1 M tokens of cache;
#: larger pages avoid the limit and its cost.
PAGES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Salting:
    """What the hashes of a store's blocks depend on, besides their tokens.

    A block has that of its first page: engines need not repeat a salt with the pages that complete the block.
    """

    lora: str | None = None
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class _Page:
    """One page, or the part of a prompt's last page that has tokens.

    before: the page before it in its block, None for the first one. parent: the last page of the block before, None at
    the root. end: tokens of the block up to the end of this page. tiers: bits of those that hold it. published: bits of
    the tiers in which its block is held, if the page is the last one of a block.
    """

    name: int
    before: _Page | None
    parent: EngineHash | None
    tokens: list[Any]
    end: int
    salting: Salting
    tiers: int = 0
    published: int = 0
    after: dict[int, _Page] = field(default_factory=dict)


class Pages:
    """The pages that one rank holds. block_size: tokens, of the scope."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pages: dict[int, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: int) -> bool:
        return name in self._pages

    def clear(self) -> None:
        """Drop all pages."""
        self._pages.clear()

    def store(
        self, parent: EngineHash | None, names: HashArray, tokens: list[Any], tier: Tier, salting: Salting
    ) -> list[BlocksStored]:
        """Store consecutive pages of equal size; return the blocks that are held now and were not before.

        parent: the page before the first one. Raises BadRecord for a page that is in two blocks, or over the limit.
        """
        size = len(tokens) // len(names)
        if len(self._pages) + len(names) > PAGES_MAX:
            raise BadRecord("over_capacity", f"a rank holds {len(self._pages)} pages; the limit is {PAGES_MAX}")
        out: list[BlocksStored] = []
        for index, name in enumerate(names.tolist()):
            page = self._add(parent, name, tokens[index * size : (index + 1) * size], salting)
            page.tiers |= 1 << tier
            out += [self._stored(last, tier) for last in self._completed(page, tier)]
            parent = EngineHash(name)
        return out

    def remove(self, names: HashArray, tier: Tier) -> tuple[list[BlocksRemoved], list[int]]:
        """Remove pages; return the removals of the blocks that they belong to, and the names that are no pages."""
        gone: list[int] = []
        unknown: list[int] = []
        for name in names.tolist():
            page = self._pages.get(name)
            if page is None:
                unknown.append(name)
                continue
            for last in _ends(page):
                if last.published >> tier & 1:
                    last.published &= ~(1 << tier)
                    gone.append(last.name)
            page.tiers &= ~(1 << tier)
            self._drop(page)
        return ([BlocksRemoved(np.array(gone, dtype=np.uint64), tier)] if gone else []), unknown

    def tiers_of(self, name: int) -> list[Tier]:
        """Return the tiers that hold a page."""
        page = self._pages.get(name)
        return [] if page is None else [tier for tier in Tier if page.tiers >> tier & 1]

    def _add(self, parent: EngineHash | None, name: int, tokens: list[Any], salting: Salting) -> _Page:
        known = self._pages.get(name)
        if known is not None:
            if known.tokens != tokens:
                raise BadRecord("bad_event", "the name of a page stands for other tokens than before")
            return known
        before = None if parent is None else self._pages.get(parent)
        if before is not None and before.end == self._block_size:
            before = None
        if before is not None:
            parent = before.parent
        end = len(tokens) + (0 if before is None else before.end)
        if end > self._block_size:
            raise wrong_block_size(len(tokens), self._block_size)
        page = self._pages[name] = _Page(name, before, parent, tokens, end, salting)
        if before is not None:
            before.after[name] = page
        return page

    def _completed(self, page: _Page, tier: Tier) -> Iterator[_Page]:
        """Return the last pages of the blocks through this page that are held in the tier now."""
        before = page.before
        while before is not None:
            if not before.tiers >> tier & 1:
                return
            before = before.before
        stack = [page]
        while stack:
            following = stack.pop()
            if not following.tiers >> tier & 1:
                continue
            if following.end == self._block_size and not following.published >> tier & 1:
                yield following
            stack += following.after.values()

    def _stored(self, last: _Page, tier: Tier) -> BlocksStored:
        tokens: list[Any] = []
        salting = last.salting
        page: _Page | None = last
        while page is not None:
            tokens[:0] = page.tokens
            salting = page.salting
            page = page.before
        at_root = last.parent is None
        local = hash_blocks(tokens, self._block_size, salting.lora, salting.cache_salt, at_root=at_root)
        last.published |= 1 << tier
        return BlocksStored(last.parent, np.array([last.name], dtype=np.uint64), local, tier)

    def _drop(self, page: _Page | None) -> None:
        """Forget a page that no tier holds and that no other page follows, and those before it."""
        while page is not None and not page.tiers and not page.after:
            if self._pages.get(page.name) is page:
                del self._pages[page.name]
            before = page.before
            if before is not None and before.after.get(page.name) is page:
                del before.after[page.name]
            page = before


def _ends(page: _Page) -> Iterator[_Page]:
    """Return the pages after a page that end a block which is held, and the page itself if it does."""
    stack = [page]
    while stack:
        following = stack.pop()
        if following.published:
            yield following
        stack += following.after.values()
