"""The requests of a run, in the form that engines and routers take (pure).

What lives here: `Workload`, and how it is built from requests whose prompts are lists of content ids. What must not:
formats of files (trace_files), and how traffic is made up (generators).

A key is a small number that stands for one engine block's content and everything before it. It is a position in
`names`, where the block's sequence hash is. Keys from `n_keys` on belong to blocks of answers, one range per request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.errors import InvalidRequest, SettingsError
from streams.lab.engines.synthetic_tokens import mix64

#: `Workload.previous` of a request that waits for no other one.
NO_REQUEST = -1


class RawRequest(NamedTuple):
    """One request of a trace.

    at_ms: since the beginning. content: one id per ids_tokens of the prompt (see `build`). previous: the request of the
    same session whose answer it needs, by its number in the same sequence, or NO_REQUEST. pause_ms: how long after that
    answer it comes; None: at at_ms, or as soon as the answer is there.
    """

    at_ms: float
    n_in: int
    n_out: int
    content: Sequence[int]
    previous: int = NO_REQUEST
    pause_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their times.

    at_ms: float64[n]. n_in, n_out, previous: int64[n]; n_in and n_out are tokens, previous is as in RawRequest.
    pause_ms: float64[n], NaN for none. first:
    int64[n + 1], offsets into `keys`, where the keys of each prompt's full blocks are. own: int64[n], the first key of
    each request's answer. names: uint64[n_keys], sequence hashes.
    """

    name: str
    block_size: int
    at_ms: Float64Array
    n_in: Int64Array
    n_out: Int64Array
    previous: Int64Array
    pause_ms: Float64Array
    first: Int64Array
    keys: npt.NDArray[np.int32]
    own: Int64Array
    names: HashArray

    def __len__(self) -> int:
        return len(self.n_in)

    @property
    def n_keys(self) -> int:
        """Keys of blocks of prompts are below this number."""
        return len(self.names)

    def keys_of(self, number: int) -> npt.NDArray[np.int32]:
        """Keys of the full blocks of one prompt, int32[n]."""
        return self.keys[self.first[number] : self.first[number + 1]]

    def limited(self, n_requests: int) -> Workload:
        """The first requests."""
        if n_requests >= len(self):
            return self
        of = slice(n_requests)
        return replace(
            self,
            at_ms=self.at_ms[of],
            n_in=self.n_in[of],
            n_out=self.n_out[of],
            previous=self.previous[of],
            pause_ms=self.pause_ms[of],
            first=self.first[: n_requests + 1],
            own=self.own[of],
        )

    def reusable_share(self) -> float:
        """The share of prompt tokens that one infinite cache would reuse: the bound for every policy."""
        seen = np.zeros(self.n_keys, dtype=np.bool_)
        reused = 0
        for number in range(len(self)):
            keys = self.keys_of(number)
            n_hits = int(np.count_nonzero(seen[keys]))  # what was seen is a prefix
            reused += min(n_hits, (int(self.n_in[number]) - 1) // self.block_size) * self.block_size
            seen[keys] = True
        return reused / int(self.n_in.sum()) if len(self) else 0.0


def build(name: str, requests: Iterable[RawRequest], ids_tokens: int, block_size: int) -> Workload:
    """Build a workload. ids_tokens: how many tokens a content id stands for, a multiple of the block size.

    Two prompts share a block if their ids are equal from the beginning to the end of the block. Requests are sorted by
    time. Raises SettingsError, InvalidRequest.
    """
    if ids_tokens % block_size:
        raise SettingsError(f"ids of {ids_tokens} tokens cannot be divided into blocks of {block_size}")
    given = list(requests)
    if not given:
        raise InvalidRequest(f"{name} has no requests")
    order = sorted(range(len(given)), key=lambda number: given[number].at_ms)
    place = {number: position for position, number in enumerate(order)}
    per_id = ids_tokens // block_size
    numbers: dict[tuple[int, int], int] = {}  # by the number of the prefix before it, and content
    chains: dict[int, list[int]] = {}  # of requests that others follow
    followed = {request.previous for request in given}
    keys: list[npt.NDArray[np.int32]] = []
    first = np.zeros(len(given) + 1, dtype=np.int64)
    offsets = np.arange(per_id, dtype=np.int32)
    for position, number in enumerate(order):
        request = given[number]
        n_full = request.n_in // block_size
        n_ids = -(-n_full // per_id)
        if len(request.content) < n_ids:
            raise InvalidRequest(f"request {number} of {name} has {len(request.content)} ids for {request.n_in} tokens")
        content = list(request.content)
        chain = _common(given, chains, request, content)
        last = chain[-1] if chain else -1
        for content_id in content[len(chain) :]:
            last = numbers.setdefault((last, content_id), len(numbers))
            chain.append(last)
        if number in followed:
            chains[number] = chain
        own = np.array(chain[:n_ids], dtype=np.int32)
        keys.append((own[:, None] * per_id + offsets).ravel()[:n_full])
        first[position + 1] = first[position] + n_full
    n_keys = len(numbers) * per_id
    sorted_requests = [given[number] for number in order]
    n_in = np.array([request.n_in for request in sorted_requests], dtype=np.int64)
    n_out = np.array([max(1, request.n_out) for request in sorted_requests], dtype=np.int64)
    n_own = -(-(n_in + n_out) // block_size) - n_in // block_size
    own_keys = n_keys + np.concatenate([np.zeros(1, dtype=np.int64), n_own.cumsum()[:-1]])
    return Workload(
        name=name,
        block_size=block_size,
        at_ms=np.array([request.at_ms for request in sorted_requests], dtype=np.float64),
        n_in=n_in,
        n_out=n_out,
        previous=np.array([place.get(request.previous, NO_REQUEST) for request in sorted_requests], dtype=np.int64),
        pause_ms=np.array(
            [math.nan if request.pause_ms is None else request.pause_ms for request in sorted_requests],
            dtype=np.float64,
        ),
        first=first,
        keys=np.concatenate(keys),
        own=own_keys,
        names=mix64(np.arange(n_keys, dtype=np.uint64)),
    )


def _common(
    given: Sequence[RawRequest], chains: dict[int, list[int]], request: RawRequest, content: list[int]
) -> list[int]:
    """The beginning of a chain that is the same as that of the request before it in its session."""
    chain = chains.get(request.previous)
    if chain is None:
        return []
    before = given[request.previous].content
    n = min(len(before), len(content))
    differs = np.flatnonzero(np.asarray(before[:n]) != np.asarray(content[:n]))
    return chain[: int(differs[0]) if differs.size else n]
