"""The KV blocks of one laboratory engine: which are in use, which are cached, and which is evicted next (pure).

What lives here: physical blocks, counted and found by key. What must not: requests and steps (lab_engine).

A key is a number that stands for a block's content and everything before it, so that equal keys mean equal prefixes.
Requests use a chain from its root and release it from its tail. Therefore whatever can be found is a prefix of its
chain, and the length of a match is found by bisection.

Several requests that compute the same block at the same time have a copy each. The second copy gets a key of its own,
below 0; it takes space, and it is found only when the first one is evicted before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks of one engine.

    n_private: blocks in use that no other request can find: those that are not full, and those of answers.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_private = 0
        self._held: dict[int, int] = {}  # number of requests that use each shared block
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and not in use, the next to be evicted first
        self._copies: dict[int, list[int]] = {}  # further copies of a key, the oldest first
        self._original: dict[int, int] = {}  # the key of a further copy
        self._found_as: dict[int, int] = {}  # the copy that stands for a key whose first copy was evicted
        self._next_copy = -1

    @property
    def n_in_use(self) -> int:
        """Blocks that running requests use."""
        return len(self._held) + self.n_private

    @property
    def n_free(self) -> int:
        """Blocks that hold nothing."""
        return self.n_blocks - self.n_in_use - len(self._idle)

    @property
    def n_idle(self) -> int:
        """Blocks that are cached and not in use."""
        return len(self._idle)

    def n_cached(self, chain: Sequence[int]) -> int:
        """Number of leading blocks of a chain that can be found."""
        low, high = 0, len(chain)
        if not high or not self._finds(chain[0]):
            return 0
        if self._finds(chain[high - 1]):
            return high
        while high - low > 1:  # block `low` is found, block `high` is not
            middle = (low + high) // 2
            if self._finds(chain[middle - 1]):
                low = middle
            else:
                high = middle
        return low

    def n_used(self, chain: Sequence[int], n: int) -> int:
        """How many of the first n blocks of a chain, all of which can be found, are in use."""
        held = self._held
        if not self._found_as:
            return sum(map(held.__contains__, chain[:n]))
        return sum(self._key_of(key) in held for key in chain[:n])

    def take(self, hits: list[int], own_hits: list[int], n_new: int) -> list[int] | None:
        """Use cached blocks and n_new others; return the keys that can no longer be found, or None if none is possible.

        hits: keys from n_cached; replaced in place by the keys of the copies that are used, which `release` takes.
        own_hits: cached blocks that only this request can have made; they become private.
        """
        if self._found_as:
            hits[:] = map(self._key_of, hits)
        held, idle = self._held, self._idle
        n_evicted = max(0, n_new - self.n_free)
        if n_evicted:
            n_idle_hits = len(hits) + len(own_hits) - sum(map(held.__contains__, hits))
            if n_evicted > len(idle) - n_idle_hits:
                return None
        for key in hits:
            n_users = held.get(key)
            if n_users is None:
                del idle[key]
                held[key] = 1
            else:
                held[key] = n_users + 1
        for key in own_hits:
            del idle[key]
        self.n_private += len(own_hits) + n_new
        return self._evict(n_evicted) if n_evicted else []

    def share(self, keys: list[int]) -> list[int]:
        """Make as many private blocks findable, in the order of a chain; return the keys that `release` takes."""
        held, idle = self._held, self._idle
        self.n_private -= len(keys)
        # Nearly always none of them is there: what follows a block that is not found is not found either.
        if not self._finds(keys[0]):
            held.update(dict.fromkeys(keys, 1))
            return keys
        shared = []
        for key in keys:
            if self._finds(key):
                copy = self._next_copy
                self._next_copy -= 1
                self._copies.setdefault(key, []).append(copy)
                self._original[copy] = key
                key = copy
            held[key] = 1
            shared.append(key)
        assert not any(key in idle for key in shared)
        return shared

    def release(self, shared: Sequence[int], own: Sequence[int], n_unfinished: int) -> None:
        """End the use of a request's blocks, the last one first, so that it is evicted first.

        shared: keys from `take` and `share`, in the order of the chain. own: keys of the private blocks after them that
        are full, and remain cached. n_unfinished: private blocks that are not full.
        """
        held, idle = self._held, self._idle
        self.n_private -= len(own) + n_unfinished
        for key in reversed(own):
            idle[key] = None
        for key in reversed(shared):
            n_users = held[key]
            if n_users == 1:
                del held[key]
                idle[key] = None
            else:
                held[key] = n_users - 1

    def clear(self) -> None:
        """Lose everything, as an engine that starts again."""
        self.__init__(self.n_blocks)  # type: ignore[misc]  # the state of a new engine is that of a new pool

    def has_idle(self, key: int) -> bool:
        """Whether a block is cached and not in use."""
        return key in self._idle

    def _finds(self, key: int) -> bool:
        return key in self._held or key in self._idle or key in self._found_as

    def _key_of(self, key: int) -> int:
        return self._found_as.get(key, key)

    def _evict(self, n: int) -> list[int]:
        popitem = self._idle.popitem
        evicted = [popitem(last=False)[0] for _ in range(n)]
        return evicted if not self._copies else [key for key in map(self._gone, evicted) if key is not None]

    def _gone(self, copy: int) -> int | None:
        """A copy was evicted; return its key unless another copy can be found."""
        key = self._original.pop(copy, copy)
        others = self._copies.get(key)
        if others is None:
            self._found_as.pop(key, None)
            return key
        if copy != key:
            others.remove(copy)
            if not others:
                del self._copies[key]
        if copy == key or self._found_as.get(key) == copy:  # it was the one that is found
            if others:
                self._found_as[key] = others[0]
                return None
            self._found_as.pop(key, None)
            return key
        return None

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests: it visits every block."""
        assert not self._held.keys() & self._idle.keys(), "a block is in use and idle"
        assert self.n_free >= 0 and self.n_private >= 0, "more blocks are in use than there are"
        assert all(n > 0 for n in self._held.values()), "a block in use has no user"
        copies = {copy for copies in self._copies.values() for copy in copies}
        assert copies == self._original.keys(), "copies differ from their originals"
        assert all(copy in self._held or copy in self._idle for copy in copies), "a copy has no block"
        for key, copy in self._found_as.items():
            assert key not in self._held and key not in self._idle, "a key is found twice"
            assert self._copies[key][0] == copy, "a key is found as a copy that is not its oldest one"
