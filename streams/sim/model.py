"""One LLM engine as a state machine: requests in, model time in, outputs out.

What lives here: a paged KV cache with prefix reuse (`_BlockPool`) and a scheduler around it (`EngineModel`), both with
vLLM's rules. What must not: clocks, randomness, I/O. Time is an argument in model milliseconds, answers come from a
seed, and every time in an output is computed from arrivals and lengths alone, so that it never depends on when or how
often `advance()` was called.

What is vLLM's: lookups and allocation when a prefill starts, at least one prompt token always computed, hashed blocks
findable until evicted, eviction of the least recently used, release from the tail, several physical copies of one hash,
refusal of a cache reset while blocks are in use, and no KV for the last token of an answer. What is simpler: prefills
are serial and do not slow decodes down; and where vLLM preempts when a decode finds no block, a request here starts
only when its whole answer is sure to fit, so nothing is ever preempted.

With a shared pool behind it (`use_pool`) a request that starts asks, by an output, how far its prefix goes on there;
whoever holds the pool answers with `pool_answered`, and the prefill begins with loading. What is offloaded, and told of
it, is none of the model's business (pool).
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.hashing import hash_seed, local_hashes, sequence_hashes
from streams.core.ids import U64_MASK, EngineHash, HashArray, SequenceHash
from streams.errors import InvalidRequest, SettingsError

BYTES_PER_TOKEN = 4

#: Answers are printable ASCII: under the live server's byte-level tokenizer their text is their tokens, so a client
#: that appends an answer's text to the next prompt hits the blocks that the answer left behind.
ANSWER_TOKEN_FIRST = 32
ANSWER_TOKENS_DISTINCT = 95

#: Caches of millions of blocks would make every per-block array of a model some 100 MB; the largest GPUs hold 100,000s.
N_BLOCKS_MAX = 1 << 22
#: The largest block of any engine known is 256 tokens; a limit, so that a slip of the keyboard is told at once.
BLOCK_SIZE_MAX = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is like; the defaults are a 70B model on 4 H100 or an 8B one on an A100, which come out alike.

    block_size: tokens a block. n_blocks: blocks of the whole cache. engine_seed: private seed of the engine's hashes.
    Raises SettingsError.
    """

    block_size: int = 16  # vLLM's default on CUDA
    n_blocks: int = 16_384  # 262,144 tokens: 32 GiB at the 128 KiB a token of an 8B model with grouped-query attention
    prefill_ms_base: float = 15.0  # one forward pass of launch and sampling overhead, however short the prompt
    prefill_us_per_token: float = 100.0  # 16 GFLOP a token at half of an A100's 312 TFLOPS; 70B on 4 H100 at a third
    decode_ms_per_token: float = 20.0  # 16 GB of weights at 2 TB/s are 8 ms; the batch's KV reads and overhead the rest
    engine_seed: int = 0x5EED_5EED_7412_D00D  # differs from every public seed, so no engine hash is a sequence hash

    def __post_init__(self) -> None:
        for name, value, most in (
            ("block_size", self.block_size, BLOCK_SIZE_MAX),
            ("n_blocks", self.n_blocks, N_BLOCKS_MAX),
        ):
            if not 1 <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be 1..{most}")
        for name, duration in (
            ("prefill_ms_base", self.prefill_ms_base),
            ("prefill_us_per_token", self.prefill_us_per_token),
            ("decode_ms_per_token", self.decode_ms_per_token),
        ):
            if not 0.0 <= duration < float("inf"):  # also refuses NaN, which would never compare as due
                raise SettingsError(f"{name} is {duration}; it must be finite and not negative")
        if not 0 <= self.engine_seed <= U64_MASK:
            raise SettingsError(f"engine_seed is {self.engine_seed}; it must be a u64")

    @property
    def n_tokens_max(self) -> int:
        """Tokens that the cache holds; prompt and answer of one request must fit."""
        return self.n_blocks * self.block_size

    def prefill_ms(self, n_uncached_tokens: int) -> float:
        """Give the duration of a prefill that computes this many tokens."""
        return self.prefill_ms_base + n_uncached_tokens * self.prefill_us_per_token / 1000.0


class PromptHashes(NamedTuple):
    """Hashes of a prompt's full blocks. local, sequence: uint64[n_tokens // block_size]."""

    local: HashArray
    sequence: HashArray


def hash_prompt(tokens: bytes, block_size: int, lora_name: str | None = None) -> PromptHashes:
    """Hash a packed prompt, so that several engines and policies can share one hashing through `ModelRequest.hashes`.

    tokens: u32 LE. Source: docs/architecture.md, Hashes.
    """
    local = local_hashes(tokens, block_size, hash_seed(lora_name))
    return PromptHashes(local, sequence_hashes(local))


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One completion asked of the engine.

    tokens: the prompt, u32 LE, at least one. n_output_tokens: exact length of the answer, at least 1.
    output_seed: u64; with the position it determines each token of the answer. hashes: `hash_prompt` of just this
    prompt, block size and adapter, where the caller has it already; computed at submit otherwise.
    """

    request_id: str
    tokens: bytes
    n_output_tokens: int
    output_seed: int = 0
    lora_name: str | None = None
    hashes: PromptHashes | None = None


@dataclass(frozen=True, slots=True)
class KvStored:
    """Consecutive full blocks became findable.

    parent: engine hash of the block before, None at the root. engine, local, sequence: uint64[n].
    tokens: u32 LE of the n blocks. start: position of the first on its chain, in blocks.
    """

    at_ms: float
    parent: EngineHash | None
    engine: HashArray
    local: HashArray
    sequence: HashArray
    tokens: bytes
    start: int
    lora_name: str | None


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Hashed blocks were evicted. engine: uint64[n], one entry a physical copy, in the order of eviction."""

    at_ms: float
    engine: HashArray


@dataclass(frozen=True, slots=True)
class KvCleared:
    """Nothing is findable any more."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill ended. ttft_ms: since the arrival. cached_tokens: of the prompt, not computed again.

    pooled_tokens: of the cached ones, those that were loaded from the shared pool.
    """

    request_id: str
    at_ms: float
    ttft_ms: float
    cached_tokens: int
    prompt_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token came and the blocks were released. latency_ms: since the arrival."""

    request_id: str
    at_ms: float
    n_output_tokens: int
    ttft_ms: float
    latency_ms: float
    cached_tokens: int
    prompt_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolAsked:
    """A request starts, and waits for `pool_answered`: how many of these blocks can the shared pool give, in order?

    keys: sequence hashes from the first block on that the cache has not; at least one.
    """

    request_id: str
    at_ms: float
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request can never run here; it has left no trace."""

    request_id: str
    at_ms: float
    reason: str


KvOutput: TypeAlias = KvStored | KvRemoved | KvCleared
RequestOutput: TypeAlias = FirstToken | Finished | Rejected
Output: TypeAlias = KvOutput | RequestOutput | PoolAsked


class CachedBlocks(NamedTuple):
    """Every findable block, one row a physical copy. engine, sequence: uint64[n]; position: int64[n], in blocks."""

    engine: HashArray
    sequence: HashArray
    position: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters as vLLM means them.

    n_running: prefilling and decoding. n_waiting: submitted, not started. n_blocks_used: held by a running request.
    n_blocks_cached: findable, held by none. Since the start: of queried_tokens prompt tokens hit_tokens were found
    cached, loaded_tokens came from the shared pool, which was asked for pool_queried_tokens, and the others are
    computed.
    """

    n_running: int
    n_waiting: int
    n_blocks_used: int
    n_blocks_cached: int
    n_blocks_total: int
    hit_tokens: int
    queried_tokens: int
    loaded_tokens: int = 0
    pool_queried_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that a prefill computed, or is computing."""
        return self.queried_tokens - self.hit_tokens - self.loaded_tokens


def answer_tokens(output_seed: int, start: int, count: int) -> bytes:
    """Give tokens of an answer: a pure function of seed and absolute position in the sequence.

    start: position of the first, counted from the prompt's first token, so a generation that is resumed elsewhere with
    its own output appended to the prompt continues with the very tokens it would have had. Returns u32 LE [count].
    """
    positions = np.arange(start, start + count, dtype=np.uint64)
    mixed = mix64(positions + np.uint64(mix_int(output_seed)))
    return (mixed % np.uint64(ANSWER_TOKENS_DISTINCT) + np.uint64(ANSWER_TOKEN_FIRST)).astype("<u4").tobytes()


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble counters into independent-looking values, one to one. Source: splitmix64's finalizer."""
    # Wrapping is the arithmetic here; NumPy does it silently for arrays, and warns for scalars only.
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """Scramble one integer of any size into a u64."""
    return xxhash.xxh3_64_intdigest((value & U64_MASK).to_bytes(8, "little"))


class _Kind(enum.IntEnum):
    """What happens next. The order settles ties in time: a block fills before its request ends, an end releases blocks
    before a start asks for them, and the GPU is free before it is taken."""

    REJECT = 0
    BLOCK = 1
    FINISH = 2
    PREFILL_END = 3
    START = 4


#: `_Job.blocked_at` of a request that has not met a full cache.
_NEVER = -1


class _Job:
    """One request's life inside the engine. Owned and mutated by `EngineModel` alone."""

    __slots__ = (
        "answer",
        "arrival_ms",
        "blocked_at",
        "blocks",
        "chain",
        "engine_tail",
        "first_ms",
        "local",
        "n_blocks_total",
        "n_hashed",
        "n_hit",
        "n_loaded",
        "n_prompt",
        "order",
        "request",
        "sequence",
        "sequence_list",
        "start_ms",
    )

    def __init__(self, request: ModelRequest, hashes: PromptHashes, arrival_ms: float, order: int, block_size: int):
        self.request = request
        self.arrival_ms = arrival_ms
        self.order = order
        self.n_prompt = len(request.tokens) // BYTES_PER_TOKEN
        # The last token of an answer is never fed back, so it never takes a place in the cache.
        self.n_blocks_total = -(-(self.n_prompt + request.n_output_tokens - 1) // block_size)
        self.local = hashes.local  # uint64[n]; of the prompt, from the prefill's end on of prompt and answer
        self.sequence = hashes.sequence  # as local
        self.sequence_list: list[int] = hashes.sequence.tolist()  # as sequence; a dict wants Python integers
        self.blocks: list[int] = []  # block table: physical ids by position, empty while waiting
        self.n_hashed = 0  # leading entries of `blocks` that are hashed: hits, then what this job announced
        self.n_hit = 0
        self.n_loaded = 0  # blocks behind the hits that came from the shared pool; stored here like computed ones
        self.engine_tail: EngineHash | None = None  # engine hash of block n_hashed - 1
        self.chain: HashArray = hashes.sequence[:0]  # engine hashes of blocks after the prompt's, in order
        self.answer = b""  # prompt's partial block and the answer that has a place in the cache, u32 LE
        self.start_ms = float("inf")  # of the prefill, loading included
        self.first_ms = float("inf")  # end of the prefill
        self.blocked_at = _NEVER  # number of releases when it last found too few blocks; the next one tries again

    def __lt__(self, other: _Job) -> bool:
        """First come, first served; equal arrivals in the order of submission."""
        return (self.arrival_ms, self.order) < (other.arrival_ms, other.order)


class EngineModel:
    """One engine. `submit` puts requests in, `advance` moves model time on and gives what happened, in its order.

    A request may be submitted for any arrival time, also one before the time advanced to (a live server hears of it
    late). It then starts when the GPU became free, or at its arrival if that was later, even in the model's past: its
    time to first token is what it would have been. Only what the cache held is then read late, as it is by now.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._pool = _BlockPool(config.n_blocks)
        self._waiting: list[_Job] = []  # heap by arrival
        self._running: dict[str, _Job] = {}  # by request id: prefilling and decoding
        self._live_ids: set[str] = set()  # waiting and running
        self._events: list[tuple[float, _Kind, int, _Job, str]] = []  # heap; at most one entry a running job
        self._prefilling = False
        self._asked: _Job | None = None  # the job that prefills, while it waits for the pool's answer
        self._uses_pool = False
        self._gpu_free_ms = float("-inf")  # end of the last prefill
        self._reserved = 0  # blocks promised to running jobs and not taken yet; always <= allocatable
        self._n_releases = 0
        self._released_ms = float("-inf")  # when blocks were last released
        self._order = 0
        self._hit_tokens = 0
        self._queried_tokens = 0
        self._loaded_tokens = 0
        self._pool_queried_tokens = 0

    # -- in ------------------------------------------------------------------------------------------------------------

    def submit(self, arrival_ms: float, request: ModelRequest) -> None:
        """Queue a request; nothing happens before `advance`.

        arrival_ms: model time, finite. Raises InvalidRequest for a malformed request or a live id; one that could
        never fit the cache is answered with `Rejected`.
        """
        if request.request_id in self._live_ids:
            raise InvalidRequest("a request with this id is live already", request_id=request.request_id)
        if not request.tokens or len(request.tokens) % BYTES_PER_TOKEN:
            raise InvalidRequest("a prompt is u32 little-endian, at least one token", n_bytes=len(request.tokens))
        if request.n_output_tokens < 1:
            raise InvalidRequest(f"n_output_tokens is {request.n_output_tokens}; it must be at least 1")
        if not abs(arrival_ms) < float("inf"):
            raise InvalidRequest(f"arrival_ms is {arrival_ms}; it must be finite")
        n_tokens = len(request.tokens) // BYTES_PER_TOKEN
        block_size = self.config.block_size
        hashes = request.hashes
        fits = n_tokens + request.n_output_tokens - 1 <= self.config.n_tokens_max
        if hashes is None:
            # What is rejected is not hashed: a client's slip of gigabytes would cost seconds.
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
        heapq.heappush(self._events, (arrival_ms, _Kind.REJECT, job.order, job, reason))

    def clear(self, now_ms: float) -> list[Output]:
        """Reset the prefix cache as of the last `advance`.

        Returns [KvCleared], or [] when refused: as in vLLM, nothing changes while any request holds blocks.
        """
        if self._running:
            return []
        self._pool.clear()
        return [KvCleared(now_ms)]

    def use_pool(self, uses: bool) -> None:
        """Whether requests that start from now on ask for blocks of a shared pool; each `PoolAsked` is answered."""
        self._uses_pool = uses

    def pool_answered(self, request_id: str, n_blocks: int, wait_ms: float) -> None:
        """Begin the prefill of the request that asked.

        n_blocks: leading ones of those asked for that the pool gives, 0 for none. wait_ms: from the asking until they
        are here; they are loaded first, and what is left is computed behind them, as by connectors that load within
        the step. Raises InvalidRequest where this request does not wait for an answer, or for one that cannot be.
        """
        job = self._asked
        if job is None or job.request.request_id != request_id:
            raise InvalidRequest("no request of this id waits for the pool", request_id=request_id)
        n_asked = (job.n_prompt - 1) // self.config.block_size - job.n_hit
        if not (0 <= n_blocks <= n_asked and 0.0 <= wait_ms < float("inf")):
            raise InvalidRequest(f"{n_blocks} blocks of {n_asked} in {wait_ms} ms are no answer", request_id=request_id)
        self._asked = None
        job.n_loaded = n_blocks
        self._loaded_tokens += n_blocks * self.config.block_size
        self._prefill(job.start_ms + (wait_ms if n_blocks else 0.0), job)

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_event_ms(self) -> float | None:
        """Tell when something happens next, None if nothing will without a new request."""
        start_ms = self._start_ms()
        due_ms = self._events[0][0] if self._events else None
        if start_ms is None or due_ms is None:
            return due_ms if start_ms is None else start_ms
        return min(start_ms, due_ms)

    def advance(self, to_ms: float) -> list[Output]:
        """Let everything happen that is due at or before `to_ms`, in the order of time. Returns what came of it."""
        out: list[Output] = []
        while True:
            start_ms = self._start_ms()
            # A start is last among equals (see _Kind), so only a strictly earlier one goes first.
            if start_ms is not None and (not self._events or start_ms < self._events[0][0]):
                if start_ms > to_ms:
                    return out
                self._start(start_ms, out)
                continue
            if not self._events or self._events[0][0] > to_ms:
                return out
            at_ms, kind, _, job, reason = heapq.heappop(self._events)
            if kind is _Kind.BLOCK:
                self._fill_block(at_ms, job, out)
            elif kind is _Kind.FINISH:
                self._finish(at_ms, job, out)
            elif kind is _Kind.PREFILL_END:
                self._end_prefill(at_ms, job, out)
            else:
                self._live_ids.remove(job.request.request_id)
                out.append(Rejected(job.request.request_id, at_ms, reason))

    # -- views ---------------------------------------------------------------------------------------------------------

    def n_decoded(self, request_id: str, at_ms: float) -> int:
        """Count the answer's tokens out by `at_ms`; 0 for a request not yet past its prefill, or not running."""
        job = self._running.get(request_id)
        if job is None or at_ms < job.first_ms:
            return 0
        if self.config.decode_ms_per_token == 0.0:
            return job.request.n_output_tokens
        n_steps = int((at_ms - job.first_ms) / self.config.decode_ms_per_token)
        return min(1 + n_steps, job.request.n_output_tokens)

    def cached_blocks(self) -> CachedBlocks:
        """Give every block that a lookup could find now, in use or not."""
        return self._pool.findable()

    def stats(self) -> EngineStats:
        """Give the gauges and counters as of the last `advance`."""
        return EngineStats(
            n_running=len(self._running),
            n_waiting=len(self._waiting),
            n_blocks_used=self._pool.n_used,
            n_blocks_cached=self._pool.n_cached,
            n_blocks_total=self.config.n_blocks,
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
            loaded_tokens=self._loaded_tokens,
            pool_queried_tokens=self._pool_queried_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests, it visits every block."""
        holders = [0] * self.config.n_blocks
        for job in self._running.values():
            for block in job.blocks:
                holders[block] += 1
        self._pool.check(holders)
        outstanding = sum(job.n_blocks_total - len(job.blocks) for job in self._running.values())
        _require(self._reserved == outstanding, f"{self._reserved} blocks reserved, {outstanding} outstanding")
        _require(self._reserved <= self._pool.n_allocatable, "more blocks reserved than can be had")
        n_rejects = sum(1 for event in self._events if event[1] is _Kind.REJECT)
        n_due = len(self._events) - n_rejects + (self._asked is not None)
        _require(n_due == len(self._running), "each running job has exactly one next event, or waits for the pool")
        _require(
            len(self._live_ids) == len(self._running) + len(self._waiting) + n_rejects, "live ids are not the jobs"
        )
        blocked = bool(self._waiting) and self._is_blocked(self._waiting[0])
        _require(not blocked or bool(self._running), "the first in line waits for blocks that nobody will release")

    # -- the scheduler's steps -----------------------------------------------------------------------------------------

    def _start_ms(self) -> float | None:
        """When the first in line may start its prefill, None if none may or it waits for blocks."""
        if self._prefilling or not self._waiting or self._is_blocked(self._waiting[0]):
            return None
        job = self._waiting[0]
        start_ms = max(job.arrival_ms, self._gpu_free_ms)
        return start_ms if job.blocked_at == _NEVER else max(start_ms, self._released_ms)

    def _is_blocked(self, job: _Job) -> bool:
        """Whether the job found too few blocks and none was released since."""
        return job.blocked_at == self._n_releases

    def _start(self, at_ms: float, out: list[Output]) -> None:
        """Look the prompt up, take blocks, begin the prefill; or block until a release if blocks are short."""
        job = self._waiting[0]
        block_size = self.config.block_size
        # At least one token must be computed, or there would be nothing to sample the first token from.
        hits = self._pool.lookup(job.sequence_list, (job.n_prompt - 1) // block_size)
        n_new_total = job.n_blocks_total - len(hits)
        if n_new_total > self._pool.n_allocatable_excluding(hits) - self._reserved:
            job.blocked_at = self._n_releases
            return
        heapq.heappop(self._waiting)
        self._pool.hold(hits)
        job.start_ms = at_ms
        n_new_now = -(-job.n_prompt // block_size) - len(hits)
        job.blocks = hits + self._take(n_new_now, at_ms, out)
        self._reserved += n_new_total - n_new_now
        job.n_hit = job.n_hashed = len(hits)
        job.engine_tail = EngineHash(int(self._pool.engine[hits[-1]])) if hits else None
        self._running[job.request.request_id] = job
        self._prefilling = True
        n_cached = len(hits) * block_size
        self._hit_tokens += n_cached
        self._queried_tokens += job.n_prompt
        n_hits_most = (job.n_prompt - 1) // block_size
        if self._uses_pool and len(hits) < n_hits_most:
            keys = tuple(job.sequence_list[len(hits) : n_hits_most])
            self._pool_queried_tokens += len(keys) * block_size
            self._asked = job
            out.append(PoolAsked(job.request.request_id, at_ms, keys))
            return
        self._prefill(at_ms, job)

    def _prefill(self, at_ms: float, job: _Job) -> None:
        """Compute what is neither cached nor loaded, from now on."""
        n_cached = (job.n_hit + job.n_loaded) * self.config.block_size
        end_ms = at_ms + self.config.prefill_ms(job.n_prompt - n_cached)
        heapq.heappush(self._events, (end_ms, _Kind.PREFILL_END, job.order, job, ""))

    def _end_prefill(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Announce the prompt's new full blocks, give the first token, begin to decode."""
        self._prefilling = False
        self._gpu_free_ms = job.first_ms = at_ms
        request = job.request
        n_full = len(job.sequence_list)
        # Everything the answer will hash is hashed here at once; a block's event then only registers it.
        width = self.config.block_size * BYTES_PER_TOKEN
        kept = answer_tokens(request.output_seed, job.n_prompt, request.n_output_tokens - 1)
        job.answer = request.tokens[n_full * width :] + kept
        prompt_new = request.tokens[job.n_hit * width : n_full * width]
        n_decode_full = len(job.answer) // width
        if n_decode_full:
            local = local_hashes(job.answer, self.config.block_size, hash_seed(request.lora_name))
            tail = SequenceHash(job.sequence_list[-1]) if n_full else None
            job.local = np.concatenate([job.local, local])
            job.sequence = np.concatenate([job.sequence, sequence_hashes(local, tail)])
            job.sequence_list = job.sequence.tolist()
        job.chain = _engine_hashes(
            prompt_new + job.answer[: n_decode_full * width],
            width,
            job.engine_tail,
            _adapter_seed(self.config.engine_seed, request.lora_name),
        )
        self._announce(at_ms, job, n_full - job.n_hit, prompt_new, out)
        n_pooled = job.n_loaded * self.config.block_size
        n_cached = job.n_hit * self.config.block_size + n_pooled
        out.append(FirstToken(request.request_id, at_ms, at_ms - job.arrival_ms, n_cached, job.n_prompt, n_pooled))
        if len(job.blocks) == n_full and len(job.blocks) < job.n_blocks_total:
            self._grow(at_ms, job, out)  # the prompt ended with its block: the first decode step needs another
        self._schedule(job)

    def _fill_block(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Announce the block that this decode step filled and take the next one, if the answer goes on into it."""
        width = self.config.block_size * BYTES_PER_TOKEN
        at = (job.n_hashed - job.n_prompt // self.config.block_size) * width
        self._announce(at_ms, job, 1, job.answer[at : at + width], out)
        if len(job.blocks) < job.n_blocks_total:
            self._grow(at_ms, job, out)
        self._schedule(job)

    def _finish(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Release the blocks and report."""
        self._pool.release(job.blocks)
        del self._running[job.request.request_id]
        self._live_ids.remove(job.request.request_id)
        self._n_releases += 1
        self._released_ms = at_ms
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

    def _schedule(self, job: _Job) -> None:
        """Put the decoding job's next event on the heap: its next full block, or its end."""
        # Times are products, never sums of steps, so that rounding cannot depend on how many events came before.
        n_steps = (job.n_hashed + 1) * self.config.block_size - job.n_prompt
        n_steps_end = job.request.n_output_tokens - 1
        kind = _Kind.BLOCK if n_steps <= n_steps_end else _Kind.FINISH
        at_ms = job.first_ms + min(n_steps, n_steps_end) * self.config.decode_ms_per_token
        heapq.heappush(self._events, (at_ms, kind, job.order, job, ""))

    def _announce(self, at_ms: float, job: _Job, n_blocks: int, tokens: bytes, out: list[Output]) -> None:
        """Make the job's next `n_blocks` findable and say so in one event. tokens: theirs."""
        if not n_blocks:
            return
        start, end = job.n_hashed, job.n_hashed + n_blocks
        engine = job.chain[start - job.n_hit : end - job.n_hit]
        local, sequence = job.local[start:end], job.sequence[start:end]
        self._pool.register(job.blocks[start:end], job.sequence_list[start:end], engine, sequence, start)
        parent = job.engine_tail
        job.engine_tail = EngineHash(int(engine[-1]))
        job.n_hashed = end
        out.append(KvStored(at_ms, parent, engine, local, sequence, tokens, start, job.request.lora_name))

    def _grow(self, at_ms: float, job: _Job, out: list[Output]) -> None:
        """Take the decoding job's next block out of its reservation."""
        job.blocks += self._take(1, at_ms, out)
        self._reserved -= 1

    def _take(self, n_blocks: int, at_ms: float, out: list[Output]) -> list[int]:
        """Take blocks and say what had to go for them."""
        blocks, evicted = self._pool.take(n_blocks)
        if len(evicted):
            out.append(KvRemoved(at_ms, evicted))
        return blocks


class _BlockPool:
    """Physical blocks. Each is free (no content), used (held by jobs, hashed or not yet), or cached (hashed, held by
    none, in the order of eviction); `check` states it."""

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))  # a stack
        self._n_holders = [0] * n_blocks  # by block id
        self._key: list[int | None] = [None] * n_blocks  # by block id: sequence hash, None while not hashed
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached block ids, the next to be evicted first
        self._found: dict[int, int] = {}  # sequence hash -> the copy that lookups give
        self._others: dict[int, list[int]] = {}  # sequence hash -> its further copies, oldest first
        self.engine: HashArray = np.zeros(n_blocks, dtype=np.uint64)  # by block id, valid where hashed
        self._sequence: HashArray = np.zeros(n_blocks, dtype=np.uint64)  # as engine
        self._position: npt.NDArray[np.int64] = np.zeros(n_blocks, dtype=np.int64)  # as engine

    @property
    def n_cached(self) -> int:
        return len(self._idle)

    @property
    def n_allocatable(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def n_used(self) -> int:
        return self._n_blocks - self.n_allocatable

    def lookup(self, keys: list[int], n_max: int) -> list[int]:
        """Give the blocks of the longest findable prefix, at most `n_max`; none is held by this."""
        found = self._found
        blocks: list[int] = []
        for key in keys[:n_max]:
            block = found.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def n_allocatable_excluding(self, hits: list[int]) -> int:
        """Count what could be taken once `hits` are held."""
        holders = self._n_holders
        return self.n_allocatable - sum(1 for block in hits if not holders[block])

    def hold(self, blocks: list[int]) -> None:
        """Add one holder to each hashed block."""
        holders, idle = self._n_holders, self._idle
        for block in blocks:
            if not holders[block]:
                del idle[block]
            holders[block] += 1

    def take(self, n_blocks: int) -> tuple[list[int], HashArray]:
        """Give `n_blocks` empty blocks with one holder each: free ones first, then the least recently used.

        Returns their ids and the engine hashes of what was evicted, uint64[k]. There must be enough.
        """
        n_free = min(n_blocks, len(self._free))
        blocks = self._free[len(self._free) - n_free :][::-1]
        del self._free[len(self._free) - n_free :]
        evicted = [self._idle.popitem(last=False)[0] for _ in range(n_blocks - n_free)]
        for block in evicted:
            self._forget(block)
        blocks += evicted
        holders = self._n_holders
        for block in blocks:
            holders[block] = 1
        return blocks, self.engine[evicted]

    def register(self, blocks: list[int], keys: list[int], engine: HashArray, sequence: HashArray, start: int) -> None:
        """Make held blocks findable; a hash that has a copy already gets another, as in vLLM."""
        found, key_of = self._found, self._key
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if found.setdefault(key, block) != block:
                self._others.setdefault(key, []).append(block)
        self.engine[blocks] = engine
        self._sequence[blocks] = sequence
        self._position[blocks] = np.arange(start, start + len(blocks))

    def release(self, blocks: list[int]) -> None:
        """Drop one holder of each, the last block first, so that a prefix outlives what follows it."""
        holders, idle, key_of = self._n_holders, self._idle, self._key
        for block in reversed(blocks):
            holders[block] -= 1
            if holders[block]:
                continue
            if key_of[block] is None:
                self._free.append(block)
            else:
                idle[block] = None

    def clear(self) -> None:
        """Forget all content; no block may be held."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._found.clear()
        self._others.clear()
        self._key = [None] * self._n_blocks

    def findable(self) -> CachedBlocks:
        """Give every hashed block, one row a physical copy."""
        blocks = [*self._found.values(), *(block for copies in self._others.values() for block in copies)]
        return CachedBlocks(self.engine[blocks], self._sequence[blocks], self._position[blocks])

    def _forget(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, f"block {block} was cached without a hash"
        self._key[block] = None
        others = self._others.get(key)
        if self._found[key] != block:
            assert others is not None, f"block {block} is no copy of its hash"
            others.remove(block)
        elif others:
            self._found[key] = others.pop(0)
        else:
            del self._found[key]
        if others is not None and not others:
            del self._others[key]

    def check(self, holders: Sequence[int]) -> None:
        """Raise AssertionError unless the three states part the blocks. holders: by block id, counted from the jobs."""
        _require(list(holders) == self._n_holders, "holder counts are not what the running jobs hold")
        used = {block for block, n in enumerate(holders) if n}
        states = [set(self._free), set(self._idle), used]
        _require(len(self._free) == len(states[0]), "a block is free twice")
        _require(sum(map(len, states)) == self._n_blocks, "free + cached + used is not the whole cache")
        _require(set().union(*states) == set(range(self._n_blocks)), "a block is in two states")
        _require(all(self._key[block] is None for block in self._free), "a free block is hashed")
        _require(all(self._key[block] is not None for block in self._idle), "a cached block is not hashed")
        hashed = {block: key for block, key in enumerate(self._key) if key is not None}
        known = {block: key for key, block in self._found.items()}
        known.update((block, key) for key, copies in self._others.items() for block in copies)
        _require(hashed == known, "what is hashed is not what is findable")
        _require(all(self._others.values()), "an empty list of copies was kept")
        _require(all(int(self._sequence[block]) == key for block, key in hashed.items()), "a block's hash is another's")


def _engine_hashes(tokens: bytes, width: int, parent: EngineHash | None, seed: int) -> HashArray:
    """Chain (parent, tokens) under a private seed. tokens: whole blocks of `width` bytes; returns uint64[n]."""
    digest = xxhash.xxh3_64_intdigest
    previous: int = 0 if parent is None else parent
    chained: list[int] = []
    for at in range(0, len(tokens), width):
        previous = digest(previous.to_bytes(8, "little") + tokens[at : at + width], seed)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def _adapter_seed(engine_seed: int, lora_name: str | None) -> int:
    """Blocks of two adapters differ though their tokens are equal."""
    return engine_seed if not lora_name else engine_seed ^ xxhash.xxh3_64_intdigest(lora_name.encode())


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
