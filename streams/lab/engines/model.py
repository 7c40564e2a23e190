"""One LLM engine as a state machine: requests and model time go in, outputs come out (pure).

What lives here: the scheduler (`EngineModel`) around a paged KV cache (block_cache), with vLLM's rules. What must not:
clocks, randomness, I/O. Time is an argument in model milliseconds, and answers follow from a seed. Every time in an
output is computed from arrivals and lengths alone, so it never depends on when or how often `advance()` was called.

As in vLLM: lookups and allocation happen when a prefill starts, and at least one prompt token is always computed.
Hashed blocks can be found until they are evicted, the least recently used first. Blocks are released from the tail.
One hash may have several physical copies. A cache reset is refused while blocks are in use. The last token of an
answer has no KV.

Simpler than vLLM: prefills are serial and do not slow decodes down. vLLM preempts a request when a decode finds no
block; here a request starts only when its whole answer is sure to fit, so nothing is ever preempted.

With a shared pool (`use_pool`), a request that starts puts out `PoolAsked`, which asks how far its prefix continues in
the pool. The caller replies with `pool_answered`, and the prefill begins by loading. Offloading, and the transitions
that are reported for it, belong to `pool`. An engine may also read these blocks in the pool for as long as the request
runs, without blocks of its own for them. It reports them as blocks of the medium SHARED, so that consumers of the
events know the parents of the blocks that it stores after them. Blocks that a request has on another engine are loaded
in the same way.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import asdict, dataclass
from typing import assert_never

import numpy as np

from streams.core.hashing import hash_seed, local_hashes, sequence_hashes
from streams.core.ids import EngineHash, HashArray, SequenceHash
from streams.errors import InvalidRequest
from streams.lab.engines.block_cache import BlockCache, CachedBlocks, adapter_seed, engine_hashes, require
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import (
    EngineStats,
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvReused,
    KvStored,
    Medium,
    ModelRequest,
    Output,
    PoolAsked,
    PromptHashes,
    Rejected,
    hash_prompt,
)
from streams.lab.engines.synthetic_tokens import BYTES_PER_TOKEN


class _Due(enum.IntEnum):
    """What is due for a request.

    The order settles ties in time: a block fills before its request ends, an end releases blocks before a start asks
    for them, and the GPU becomes free before it is taken. Starts are not on the heap; they come after all of these.
    """

    REJECT = 0
    BLOCK = 1
    FINISH = 2
    PREFILL_END = 3


#: `_Job.blocked_at` of a request that has not met a full cache.
_NEVER = -1


class _Job:
    """One request inside the engine. Owned and changed by `EngineModel` alone."""

    __slots__ = (
        "answer",
        "arrival_ms",
        "blocked_at",
        "blocks",
        "cancelled",
        "chain",
        "engine_tail",
        "first_ms",
        "hashes",
        "n_blocks_total",
        "n_hashed",
        "n_hit",
        "n_loaded",
        "n_prompt",
        "order",
        "reads_in_place",
        "request",
        "sequence_list",
        "start_ms",
        "step_ms",
    )

    def __init__(self, request: ModelRequest, hashes: PromptHashes, arrival_ms: float, order: int, block_size: int):
        self.request = request
        self.arrival_ms = arrival_ms
        self.order = order
        self.n_prompt = len(request.tokens) // BYTES_PER_TOKEN
        # Blocks of this engine. The last token of an answer is never fed back, so it takes no space in the cache.
        self.n_blocks_total = -(-(self.n_prompt + request.n_output_tokens - 1) // block_size)
        self.hashes = hashes  # of the prompt, and of prompt and answer once the prefill has ended
        self.sequence_list: list[int] = hashes.sequence.tolist()  # as in hashes; dict keys are Python integers
        self.blocks: list[int] = []  # block table: physical ids by position without those in place, empty while waiting
        self.n_hashed = 0  # leading positions that are hashed: hits, those in place, then the blocks that it stored
        self.n_hit = 0
        # Blocks after the hits that came from the shared pool or another engine; stored here like computed ones.
        self.n_loaded = 0
        self.reads_in_place = False  # the loaded blocks stay in the pool; it takes blocks once the pool has answered
        self.engine_tail: EngineHash | None = None  # engine hash of block n_hashed - 1
        self.chain: HashArray = hashes.sequence[:0]  # engine hashes of the blocks after the hits, in order
        self.answer = b""  # the prompt's partial block and the answer without its last token, u32 LE
        self.start_ms = float("inf")  # of the prefill, loading included
        self.first_ms = float("inf")  # end of the prefill
        self.step_ms = 0.0  # of one decode step
        self.cancelled = False  # while its prefill was running
        self.blocked_at = _NEVER  # number of releases when it last found too few blocks; it retries after the next one

    @property
    def n_in_place(self) -> int:
        """Blocks that it reads in the pool, and for which it takes none."""
        return self.n_loaded if self.reads_in_place else 0

    def __lt__(self, other: _Job) -> bool:
        """First come, first served; equal arrivals in the order of submission."""
        return (self.arrival_ms, self.order) < (other.arrival_ms, other.order)


@dataclass(slots=True)
class _Totals:
    """What was counted since the start; see EngineStats."""

    hit_tokens: int = 0
    queried_tokens: int = 0
    loaded_tokens: int = 0
    pool_queried_tokens: int = 0
    n_blocks_used_max: int = 0
    in_place_tokens: int = 0
    generated_tokens: int = 0
    n_finished: int = 0


class EngineModel:
    """One engine. `submit` takes requests; `advance` moves model time on and returns what happened, in order.

    A request may be submitted for any arrival time, even one before the time advanced to, because a live server learns
    of it late. It then starts when the GPU became free, or at its arrival if that was later, even in the model's past.
    Its time to first token is therefore what it would have been. Only the cache is read late, in its present state.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._cache = BlockCache(config.n_blocks)
        self._waiting: list[_Job] = []  # heap by arrival
        self._running: dict[str, _Job] = {}  # by request id: prefilling and decoding
        self._live_ids: set[str] = set()  # waiting and running
        self._due: list[tuple[float, _Due, int, _Job, str]] = []  # heap; at most one entry per running job
        self._prefilling = False
        self._asked: _Job | None = None  # the prefilling job while it waits for the pool's answer
        self._uses_pool = self._reads_in_place = False
        self._later: list[Output] = []  # of calls that return none; put out by the next `advance`
        self._gpu_free_ms = float("-inf")  # end of the last prefill
        self._reserved = 0  # blocks promised to running jobs and not taken yet; always <= allocatable
        self._n_releases = 0
        self._released_ms = float("-inf")  # when blocks were last released
        self._order = 0
        self._totals = _Totals()

    # -- in ------------------------------------------------------------------------------------------------------------

    def submit(self, arrival_ms: float, request: ModelRequest) -> None:
        """Queue a request; nothing happens before `advance`.

        arrival_ms: model time, finite. Raises InvalidRequest for a malformed request, or if a request with this id is
        waiting or running. A request that can never fit the cache is answered with `Rejected`.
        """
        if request.request_id in self._live_ids:
            raise InvalidRequest("a request with this id is already active", request_id=request.request_id)
        if not request.tokens or len(request.tokens) % BYTES_PER_TOKEN:
            raise InvalidRequest("a prompt is u32 little-endian, at least one token", n_bytes=len(request.tokens))
        if request.n_output_tokens < 1:
            raise InvalidRequest(f"n_output_tokens is {request.n_output_tokens}; it must be at least 1")
        if request.answer is not None and len(request.answer) != request.n_output_tokens * BYTES_PER_TOKEN:
            raise InvalidRequest(f"an answer of {len(request.answer)} bytes for {request.n_output_tokens} tokens")
        if not abs(arrival_ms) < float("inf"):
            raise InvalidRequest(f"arrival_ms is {arrival_ms}; it must be finite")
        n_tokens = len(request.tokens) // BYTES_PER_TOKEN
        block_size = self.config.block_size
        hashes = request.hashes
        fits = n_tokens + request.n_output_tokens - 1 <= self.config.n_tokens_max
        if hashes is None:
            # A rejected prompt is not hashed: gigabytes sent by mistake would take seconds.
            hashes = hash_prompt(request.tokens if fits else b"", block_size, request.lora_name)
        elif len(hashes.sequence) != n_tokens // block_size or len(hashes.local) != n_tokens // block_size:
            raise InvalidRequest(
                f"{len(hashes.sequence)} hashes for {n_tokens} tokens in blocks of {block_size}",
                request_id=request.request_id,
            )
        self._order += 1
        job = _Job(request, hashes, arrival_ms, self._order, block_size)
        self._live_ids.add(request.request_id)
        if fits:
            heapq.heappush(self._waiting, job)
            return
        reason = (
            f"prompt of {n_tokens} and answer of {request.n_output_tokens} tokens exceed the cache's "
            f"{self.config.n_tokens_max} tokens"
        )
        heapq.heappush(self._due, (arrival_ms, _Due.REJECT, job.order, job, reason))

    def cancel(self, now_ms: float, request_id: str) -> None:
        """End a request without further output, in its state after the last `advance`; an unknown id has ended.

        As in vLLM, its blocks are released at once and stay in the cache if they are hashed. A prefill that has begun
        is computed to its end, which is when its blocks are released.
        """
        job = self._running.get(request_id)
        if job is None:
            index = next(
                (index for index, job in enumerate(self._waiting) if job.request.request_id == request_id), None
            )
            if index is not None:
                del self._waiting[index]
                heapq.heapify(self._waiting)
                self._live_ids.remove(request_id)
        elif job.first_ms == float("inf"):
            job.cancelled = True
        else:
            self._due = [entry for entry in self._due if entry[3] is not job]
            heapq.heapify(self._due)
            self._release(now_ms, job, self._later)

    def clear(self, now_ms: float) -> list[Output]:
        """Reset the prefix cache in its state after the last `advance`.

        Returns [KvCleared], or [] if refused: as in vLLM, nothing changes while any request holds blocks.
        """
        if self._running:
            return []
        self._cache.clear()
        return [KvCleared(now_ms)]

    def use_pool(self, uses: bool, in_place: bool = False) -> None:
        """Set whether requests that start from now on ask a shared pool. The caller answers each `PoolAsked`.

        in_place: whether they read what it has there instead of loading it.
        """
        self._uses_pool, self._reads_in_place = uses, in_place

    def pool_answered(self, request_id: str, n_blocks: int, wait_ms: float) -> None:
        """Begin the prefill of the request that asked the pool.

        n_blocks: how many leading blocks of those asked for the pool gives, 0 for none. wait_ms: from the question
        until they are loaded. Loading comes first and the rest is computed after it, as with connectors that load
        within the step. Raises InvalidRequest if this request does not wait for an answer, or if the answer is
        impossible.
        """
        job = self._asked
        if job is None or job.request.request_id != request_id:
            raise InvalidRequest("no request with this id waits for the pool", request_id=request_id)
        n_asked = (job.n_prompt - 1) // self.config.block_size - job.n_hit
        if not (0 <= n_blocks <= n_asked and 0.0 <= wait_ms < float("inf")):
            raise InvalidRequest(
                f"{n_blocks} blocks of {n_asked} in {wait_ms} ms is not a possible answer", request_id=request_id
            )
        self._asked = None
        job.n_loaded = n_blocks
        self._totals.loaded_tokens += n_blocks * self.config.block_size
        if job.reads_in_place:
            job.n_blocks_total -= n_blocks
            self._reserved -= n_blocks
            self._totals.in_place_tokens += n_blocks * self.config.block_size
            self._take_for_prompt(job.start_ms, job, self._later)
        self._prefill(job.start_ms + (wait_ms if n_blocks else 0.0), job)

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_event_ms(self) -> float | None:
        """Return the time of the next event, or None if nothing will happen without a new request."""
        start_ms = self._start_ms()
        due_ms = self._due[0][0] if self._due else None
        if start_ms is None or due_ms is None:
            return due_ms if start_ms is None else start_ms
        return min(start_ms, due_ms)

    def advance(self, to_ms: float) -> list[Output]:
        """Let everything happen that is due at or before `to_ms`, in the order of time. Returns the outputs."""
        out, self._later = self._later, []
        while True:
            start_ms = self._start_ms()
            # Among equal times a start is last (see _Due), so it goes first only if it is strictly earlier.
            if start_ms is not None and (not self._due or start_ms < self._due[0][0]):
                if start_ms > to_ms:
                    return out
                self._start(start_ms, out)
                continue
            if not self._due or self._due[0][0] > to_ms:
                return out
            at_ms, due, _, job, reason = heapq.heappop(self._due)
            if due is _Due.BLOCK:
                self._fill_block(at_ms, job, out)
            elif due is _Due.FINISH:
                self._finish(at_ms, job, out)
            elif due is _Due.PREFILL_END:
                self._end_prefill(at_ms, job, out)
            elif due is _Due.REJECT:
                self._live_ids.remove(job.request.request_id)
                out.append(Rejected(job.request.request_id, at_ms, reason))
            else:
                assert_never(due)

    # -- views ---------------------------------------------------------------------------------------------------------

    def n_decoded(self, request_id: str, at_ms: float) -> int:
        """Count the answer's tokens that are out at `at_ms`; 0 before the prefill's end, or if it is not running."""
        job = self._running.get(request_id)
        if job is None or at_ms < job.first_ms:
            return 0
        if job.step_ms == 0.0:
            return job.request.n_output_tokens
        n_steps = int((at_ms - job.first_ms) / job.step_ms)
        return min(1 + n_steps, job.request.n_output_tokens)

    def cached_blocks(self) -> CachedBlocks:
        """Return every block that a lookup would find now, in use or not."""
        return self._cache.findable()

    def stats(self) -> EngineStats:
        """Return the gauges and counters after the last `advance`."""
        return EngineStats(
            n_running=len(self._running),
            n_waiting=len(self._waiting),
            n_blocks_used=self._cache.n_used,
            n_blocks_cached=self._cache.n_cached,
            n_blocks_total=self.config.n_blocks,
            **asdict(self._totals),
        )

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests: it visits every block."""
        holders = [0] * self.config.n_blocks
        for job in self._running.values():
            for block in job.blocks:
                holders[block] += 1
        self._cache.check(holders)
        outstanding = sum(job.n_blocks_total - len(job.blocks) for job in self._running.values())
        require(self._reserved == outstanding, f"{self._reserved} blocks reserved, {outstanding} outstanding")
        require(self._reserved <= self._cache.n_allocatable, "more blocks are reserved than can be allocated")
        n_rejects = sum(1 for entry in self._due if entry[1] is _Due.REJECT)
        n_due = len(self._due) - n_rejects + (self._asked is not None)
        require(n_due == len(self._running), "a running job lacks its next event, or has more than one")
        require(
            len(self._live_ids) == len(self._running) + len(self._waiting) + n_rejects, "the live ids are not the jobs'"
        )
        blocked = bool(self._waiting) and self._is_blocked(self._waiting[0])
        require(not blocked or bool(self._running), "the first in line waits for blocks that no request will release")

    # -- the scheduler's steps -----------------------------------------------------------------------------------------

    def _start_ms(self) -> float | None:
        """Return when the first in line may start its prefill, or None if none may start or it waits for blocks."""
        if self._prefilling or not self._waiting or self._is_blocked(self._waiting[0]):
            return None
        job = self._waiting[0]
        start_ms = max(job.arrival_ms, self._gpu_free_ms)
        return start_ms if job.blocked_at == _NEVER else max(start_ms, self._released_ms)

    def _is_blocked(self, job: _Job) -> bool:
        """Whether the job found too few blocks and none has been released since."""
        return job.blocked_at == self._n_releases

    def _start(self, at_ms: float, out: list[Output]) -> None:
        """Look up the prompt, take blocks and begin the prefill; with too few blocks, wait for a release."""
        job = self._waiting[0]
        block_size = self.config.block_size
        # At least one token must be computed; otherwise there would be nothing to sample the first token from.
        n_hits_max = (job.n_prompt - 1) // block_size
        hits = self._cache.lookup(job.sequence_list, n_hits_max)
        n_new_total = job.n_blocks_total - len(hits)
        if n_new_total > self._cache.n_allocatable_excluding(hits) - self._reserved:
            job.blocked_at = self._n_releases
            return
        heapq.heappop(self._waiting)
        if hits and job.request.reports_reuse:
            tokens = job.request.tokens[: len(hits) * block_size * BYTES_PER_TOKEN]
            out.append(KvReused(at_ms, self._cache.engine[hits], tokens, job.request.lora_name))
        self._cache.hold(hits)
        job.start_ms = at_ms
        job.blocks = list(hits)
        self._reserved += n_new_total
        n_transferred = max(0, min(job.request.n_transferred_blocks, n_hits_max) - len(hits))
        asks = self._uses_pool and len(hits) < n_hits_max and not n_transferred
        job.reads_in_place = asks and self._reads_in_place
        if not job.reads_in_place:
            self._take_for_prompt(at_ms, job, out)
        job.n_hit = job.n_hashed = len(hits)
        job.engine_tail = EngineHash(int(self._cache.engine[hits[-1]])) if hits else None
        self._running[job.request.request_id] = job
        self._prefilling = True
        self._totals.hit_tokens += len(hits) * block_size
        self._totals.queried_tokens += job.n_prompt
        if n_transferred:
            job.n_loaded = n_transferred
            self._totals.loaded_tokens += n_transferred * block_size
            self._prefill(at_ms + self.config.transfer_ms(n_transferred * block_size), job)
            return
        if asks:
            keys = tuple(job.sequence_list[len(hits) : n_hits_max])
            self._totals.pool_queried_tokens += len(keys) * block_size
            self._asked = job
            out.append(PoolAsked(job.request.request_id, at_ms, keys))
            return
        self._prefill(at_ms, job)

    def _take_for_prompt(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Take the blocks of the prompt that are neither hits nor read in place, out of the reservation."""
        n_new = -(-job.n_prompt // self.config.block_size) - len(job.blocks) - job.n_in_place
        job.blocks += self._take(n_new, at_ms, out)
        self._reserved -= n_new

    def _prefill(self, at_ms: float, job: _Job) -> None:
        """Begin to compute the tokens that are neither cached nor loaded.

        The prompt's engine hashes are computed here, which takes milliseconds: in a live engine, while it loads.
        """
        width = self.config.block_size * BYTES_PER_TOKEN
        prompt_new = job.request.tokens[job.n_hit * width : len(job.sequence_list) * width]
        job.chain = self._engine_hashes(job, prompt_new, job.engine_tail)
        n_cached = (job.n_hit + job.n_loaded) * self.config.block_size
        end_ms = at_ms + self.config.prefill_ms(job.n_prompt - n_cached)
        heapq.heappush(self._due, (end_ms, _Due.PREFILL_END, job.order, job, ""))

    def _end_prefill(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Store the prompt's new full blocks, put out the first token, and begin to decode."""
        self._prefilling = False
        self._gpu_free_ms = job.first_ms = at_ms
        job.step_ms = self.config.decode_ms(job.n_in_place * self.config.block_size)
        self._totals.n_blocks_used_max = max(self._totals.n_blocks_used_max, self._cache.n_used)
        request = job.request
        n_full = len(job.sequence_list)
        # The answer's blocks are all hashed here at once; when one of them fills, it is only registered.
        width = self.config.block_size * BYTES_PER_TOKEN
        kept = request.answered(0, request.n_output_tokens - 1)
        job.answer = request.tokens[n_full * width :] + kept
        prompt_new = request.tokens[job.n_hit * width : n_full * width]
        n_decode_full = len(job.answer) // width
        if n_decode_full:
            local = local_hashes(job.answer, self.config.block_size, hash_seed(request.lora_name))
            tail = SequenceHash(job.sequence_list[-1]) if n_full else None
            job.hashes = PromptHashes(
                np.concatenate([job.hashes.local, local]),
                np.concatenate([job.hashes.sequence, sequence_hashes(local, tail)]),
            )
            job.sequence_list = job.hashes.sequence.tolist()
            before = EngineHash(int(job.chain[-1])) if len(job.chain) else job.engine_tail
            answered = self._engine_hashes(job, job.answer[: n_decode_full * width], before)
            job.chain = np.concatenate([job.chain, answered])
        if job.n_in_place:
            out.append(self._next_stored(at_ms, job, job.n_in_place, prompt_new[: job.n_in_place * width], "SHARED"))
        n_before = job.n_hit + job.n_in_place
        self._store(at_ms, job, n_full - n_before, prompt_new[job.n_in_place * width :], out)
        if job.cancelled:
            self._release(at_ms, job, out)
            return
        n_pooled = job.n_loaded * self.config.block_size
        n_cached = job.n_hit * self.config.block_size + n_pooled
        out.append(FirstToken(request.request_id, at_ms, at_ms - job.arrival_ms, n_cached, job.n_prompt, n_pooled))
        if len(job.blocks) + job.n_in_place == n_full and len(job.blocks) < job.n_blocks_total:
            self._grow(at_ms, job, out)  # the prompt ended with its block: the first decode step needs another
        self._schedule(job)

    def _engine_hashes(self, job: _Job, tokens: bytes, parent: EngineHash | None) -> HashArray:
        """Chain the engine hashes of whole blocks of a job."""
        seed = adapter_seed(self.config.engine_seed, job.request.lora_name)
        return engine_hashes(tokens, self.config.block_size * BYTES_PER_TOKEN, parent, seed)

    def _fill_block(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Store the block that this decode step filled, and take the next one if the answer continues into it."""
        width = self.config.block_size * BYTES_PER_TOKEN
        offset = (job.n_hashed - job.n_prompt // self.config.block_size) * width
        self._store(at_ms, job, 1, job.answer[offset : offset + width], out, generated=True)
        if len(job.blocks) < job.n_blocks_total:
            self._grow(at_ms, job, out)
        self._schedule(job)

    def _finish(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Release the blocks and put out the request's figures."""
        self._release(at_ms, job, out)
        self._totals.generated_tokens += job.request.n_output_tokens
        self._totals.n_finished += 1
        out.append(
            Finished(
                request_id=job.request.request_id,
                at_ms=at_ms,
                n_output_tokens=job.request.n_output_tokens,
                ttft_ms=job.first_ms - job.arrival_ms,
                latency_ms=at_ms - job.arrival_ms,
                cached_tokens=(job.n_hit + job.n_loaded) * self.config.block_size,
                prompt_tokens=job.n_prompt,
                pooled_tokens=job.n_loaded * self.config.block_size,
            )
        )

    def _release(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Release the blocks of a running request, those that were promised to it, and those that it read in place."""
        if job.n_in_place:
            out.append(KvRemoved(at_ms, job.chain[: job.n_in_place], "SHARED"))
        self._cache.release(job.blocks)
        self._reserved -= job.n_blocks_total - len(job.blocks)
        del self._running[job.request.request_id]
        self._live_ids.remove(job.request.request_id)
        self._n_releases += 1
        self._released_ms = at_ms

    def _schedule(self, job: _Job) -> None:
        """Put the decoding job's next event on the heap: its next full block, or its end."""
        # Times are products, never sums of steps, so that rounding cannot depend on how many events came before.
        n_steps = (job.n_hashed + 1) * self.config.block_size - job.n_prompt
        n_steps_end = job.request.n_output_tokens - 1
        due = _Due.BLOCK if n_steps <= n_steps_end else _Due.FINISH
        at_ms = job.first_ms + min(n_steps, n_steps_end) * job.step_ms
        heapq.heappush(self._due, (at_ms, due, job.order, job, ""))

    def _store(
        self, at_ms: float, job: _Job, n_blocks: int, tokens: bytes, out: list[Output], *, generated: bool = False
    ) -> None:
        """Register the job's next `n_blocks` in the cache and put out one `KvStored`. tokens: those of the blocks."""
        if not n_blocks:
            return
        stored = self._next_stored(at_ms, job, n_blocks, tokens, "GPU", generated=generated)
        start, end = stored.start, stored.start + n_blocks
        blocks = job.blocks[start - job.n_in_place : end - job.n_in_place]
        self._cache.register(blocks, job.sequence_list[start:end], stored.engine, stored.sequence, start)
        out.append(stored)

    def _next_stored(
        self, at_ms: float, job: _Job, n_blocks: int, tokens: bytes, medium: Medium, *, generated: bool = False
    ) -> KvStored:
        """Return the store of the job's next `n_blocks`, and count them as hashed."""
        start, end = job.n_hashed, job.n_hashed + n_blocks
        engine = job.chain[start - job.n_hit : end - job.n_hit]
        local, sequence = job.hashes.local[start:end], job.hashes.sequence[start:end]
        parent = job.engine_tail
        job.engine_tail = EngineHash(int(engine[-1]))
        job.n_hashed = end
        before = SequenceHash(job.sequence_list[start - 1]) if start else None
        lora_name = job.request.lora_name
        return KvStored(at_ms, parent, engine, local, sequence, tokens, start, lora_name, generated, medium, before)

    def _grow(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Take the decoding job's next block out of its reservation."""
        job.blocks += self._take(1, at_ms, out)
        self._reserved -= 1
        self._totals.n_blocks_used_max = max(self._totals.n_blocks_used_max, self._cache.n_used)

    def _take(self, n_blocks: int, at_ms: float, out: list[Output]) -> list[int]:
        """Take blocks, and put out the evictions that this needed."""
        blocks, evicted = self._cache.take(n_blocks)
        if len(evicted):
            out.append(KvRemoved(at_ms, evicted))
        return blocks
