"""One laboratory engine: vLLM's scheduler in steps whose time is a formula (pure).

What lives here: which requests a step computes, what that does to the blocks, and how long it takes. What must not:
routing, the index, and the order of several engines' steps (fleet).

Blocks that the engine can load from other memory are loaded in the step that admits a request, which takes longer by
that, as with connectors that load within the step.

A step continues every running answer by one token, computes prompts in chunks within what is left of its token budget,
and admits waiting requests while their blocks fit. If a block is missing, the request that was admitted last is
preempted and waits in front. Blocks can be found from the beginning of the step that computes them; tokens are out at
its end. The rules are those of the engine in NVIDIA Dynamo's replay, so that results can be compared.

Most steps only continue answers. Their time changes when an answer needs a new block or ends, and not before. So the
engine runs such steps as one stretch, which a new request cuts short at the end of the step that it arrives in. A run
costs time per block of an answer then, not per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from streams.lab.simulation.block_pool import BlockPool
from streams.lab.simulation.lab_engine_config import LabEngineConfig

#: Times closer than this are the same: a stretch's end is a product, and a request may arrive exactly at one.
_EPSILON_MS = 1e-9

#: Steps in a row that neither compute nor emit anything. A preemption may cause one; more are a mistake in the rules.
_IDLE_STEPS_MAX = 64

#: In place of the tick before an answer's first token, while the prompt is not computed.
NOT_DECODING = -1


class LabRequest:
    """One request inside an engine. `number` is its place in the workload; the engine owns the other fields.

    chain: keys of the full blocks of its prompt. own: the first of the keys that only this request uses, for the blocks
    after those.
    """

    __slots__ = (
        "arrived_ms",
        "chain",
        "computed",
        "epoch",
        "first_ms",
        "last_ms",
        "loaded_tokens",
        "n_blocks",
        "n_generated",
        "n_in",
        "n_out",
        "number",
        "order",
        "own",
        "reused_tokens",
        "shared",
        "tick0",
    )

    def __init__(self, number: int, n_in: int, n_out: int, chain: Sequence[int], own: int) -> None:
        self.number = number
        self.n_in = n_in
        self.n_out = n_out
        self.chain = chain
        self.own = own
        self.shared: list[int] = []  # keys of the shared blocks that it uses
        self.n_blocks = 0  # all blocks that it uses
        self.computed = 0  # tokens in these blocks; while it decodes, this follows from the engine's ticks
        self.n_generated = 0  # as computed
        self.tick0 = NOT_DECODING  # while it decodes, n_generated is the engine's tick minus this
        self.order = 0  # of its last admission
        self.epoch = 0  # number of preemptions, so that what was due before them is ignored
        self.reused_tokens = -1  # found in the cache at its first admission
        self.loaded_tokens = 0  # of other memory, in all admissions
        self.arrived_ms = math.nan  # in SimulatedEngine: if it is submitted late, when it would have arrived
        self.first_ms = self.last_ms = math.nan  # in SimulatedEngine: when its first and its last token were out


#: Called with the engine's number, a request, and the first and last of its prompt's blocks that can be found now.
Stored = Callable[[int, LabRequest, int, int], None]
#: Called with the engine's number and the keys that can no longer be found.
Removed = Callable[[int, list[int]], None]
#: Called with the keys of a request's blocks, how many of them the engine has, and how many more it wants at most;
#: returns how many of those it can load from other memory without a hole, and loads them: how long that takes in ms.
Load = Callable[[Sequence[int], int, int], tuple[int, float]]


class LabEngine:
    """One engine. The fleet calls `start` when it is idle and has work, and `finish` at `end_ms`.

    speed: how many times as long its steps take as the configuration says.
    """

    def __init__(
        self,
        number: int,
        config: LabEngineConfig,
        stored: Stored,
        removed: Removed,
        *,
        speed: float = 1.0,
        load: Load | None = None,
    ) -> None:
        self.number = number
        self.config = config.slowed(speed)
        self.end_ms = 0.0
        self.is_busy = False
        self.n_preempted = 0
        self.busy_ms = 0.0
        self.pool = BlockPool(config.n_blocks)
        self.waiting: deque[LabRequest] = deque()
        self.running: dict[int, LabRequest] = {}  # by number, in order of admission
        self._stored = stored
        self._removed = removed
        self._load = load
        self._partial: LabRequest | None = None  # the running request whose prompt is not computed yet, always the last
        self._due: list[tuple[int, int, int, LabRequest]] = []  # heap: tick, order, epoch; when an answer needs care
        self._tick = 0  # steps so far
        self._order = 0
        self._stretch = (0.0, 0.0, 0)  # start, time of a step, number of steps
        self._is_blocked = False  # the first waiting request did not fit, and nothing has changed since
        self._first: list[LabRequest] = []  # requests whose first token is out at end_ms
        self._ended: list[LabRequest] = []  # requests whose last token is out at end_ms

    @property
    def has_work(self) -> bool:
        """Whether there is anything to start."""
        return bool(self.running or self.waiting)

    def fits(self, request: LabRequest) -> bool:
        """Whether a request can ever be served: prompt and answer have to fit in the cache together."""
        return -(-(request.n_in + request.n_out) // self.config.block_size) <= self.config.n_blocks

    def submit(self, request: LabRequest, now_ms: float) -> bool:
        """Let a request wait for the next step; return whether `end_ms` is earlier because of it."""
        self.waiting.append(request)
        start_ms, step_ms, n_steps = self._stretch
        if not self.is_busy or not n_steps or len(self.waiting) > 1:
            return False
        n_kept = min(n_steps, max(0, int(-(-(now_ms - start_ms - _EPSILON_MS) // step_ms))))
        if n_kept == n_steps:
            return False
        self._stretch = (start_ms, step_ms, n_kept)
        self.busy_ms -= (n_steps - n_kept) * step_ms
        self.end_ms = start_ms + n_kept * step_ms
        return True

    def fail(self) -> list[LabRequest]:
        """Lose all requests and blocks, as when the engine's process ends; return the requests."""
        lost = [*self.running.values(), *self.waiting]
        lost += [request for request in self._ended if request.number not in self.running]
        self.running.clear()
        self.waiting.clear()
        self.pool = BlockPool(self.config.n_blocks)
        self._due.clear()
        self._partial = None
        self._first, self._ended = [], []
        self._stretch = (0.0, 0.0, 0)
        self.is_busy = False
        self._is_blocked = False
        return lost

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start(self, now_ms: float) -> None:
        """Begin the next step, or a stretch of steps that only continue answers."""
        self.is_busy = True
        n_steps = self._boring_steps()
        if n_steps:
            step_ms = self._decode_ms()
            self._stretch = (now_ms, step_ms, n_steps)
            self.end_ms = now_ms + n_steps * step_ms
            self.busy_ms += n_steps * step_ms
            return
        self._stretch = (now_ms, 0.0, 0)
        for _ in range(_IDLE_STEPS_MAX):
            step_ms = self._step()
            if step_ms > 0.0:
                self.end_ms = now_ms + step_ms
                self.busy_ms += step_ms
                return
        raise AssertionError(
            f"engine {self.number} has {len(self.waiting)} waiting and {len(self.running)} running requests and can "
            "compute nothing"
        )

    def finish(self) -> tuple[list[LabRequest], list[LabRequest]]:
        """End the step; return the requests whose first token is out, and those whose last one is."""
        self._tick += self._stretch[2]
        self._stretch = (0.0, 0.0, 0)
        self.is_busy = False
        first, ended = self._first, self._ended
        self._first, self._ended = [], []
        return first, ended

    def n_generated(self, request: LabRequest) -> int:
        """Tokens of a running request's answer that were out at the end of the last step."""
        return request.n_generated if request.tick0 == NOT_DECODING else self._tick - request.tick0

    def _boring_steps(self) -> int:
        """How many of the next steps only continue answers and take the same time."""
        if self._partial is not None or (self.waiting and self._may_admit()):
            return 0
        due = self._due
        while due and due[0][3].epoch != due[0][2]:
            heapq.heappop(due)
        return due[0][0] - self._tick - 1 if due else 0

    def _may_admit(self) -> bool:
        return not self._is_blocked and len(self.running) < self.config.max_sequences

    def _decode_ms(self) -> float:
        utilisation = min(1.0, self.pool.n_in_use / self.config.n_blocks)
        return self.config.decode_step_ms(utilisation)

    def _step(self) -> float:
        """Compute one step; return how long it takes, 0 if there was nothing to compute."""
        self._tick += 1
        n_preempted = self.n_preempted
        loading_ms = 0.0
        ended = self._continue_answers()
        budget = self.config.max_batched_tokens - len(self.running) + (self._partial is not None)
        completed: list[LabRequest] = []
        n_prompt_tokens = 0
        n_decoding = len(self.running) - (self._partial is not None)
        if self._partial is not None:
            request = self._partial
            done = self._compute(request, 0, budget)
            if done:
                n_prompt_tokens += done[1]
                budget -= done[0]
                self._settle(request, completed)
        if self.n_preempted == n_preempted:
            while self.waiting and budget > 0 and self._may_admit():
                request = self.waiting[0]
                n_hits = self._fitting_hits(request)
                if n_hits < 0:
                    self._is_blocked = True
                    break
                self.waiting.popleft()
                self.running[request.number] = request
                self._order += 1
                request.order = self._order
                done = self._compute(request, n_hits, budget)
                if not done:
                    break
                if request.reused_tokens < 0:
                    request.reused_tokens = min(n_hits * self.config.block_size, request.n_in)
                n_prompt_tokens += done[1]
                budget -= done[0]
                loading_ms += done[2]
                self._settle(request, completed)
        step_ms = self.config.prefill_step_ms(n_prompt_tokens) + loading_ms
        if n_decoding or any(request.n_generated for request in completed):
            step_ms += self._decode_ms()
        for request in ended:
            self._release(request, request.n_in + request.n_out - 1)
        for request in completed:
            request.n_generated += 1
            if request.n_generated == 1:
                self._first.append(request)
            if request.n_generated >= request.n_out:
                self._release(request, request.computed)
                self._ended.append(request)
            else:
                request.tick0 = self._tick - request.n_generated
                self._note_due(request)
        self._ended += ended
        return step_ms

    def _continue_answers(self) -> list[LabRequest]:
        """Give answers that need one a block; return those that end in this step."""
        due, ended = self._due, []
        block_size = self.config.block_size
        while due and due[0][0] <= self._tick:
            _, _, epoch, request = heapq.heappop(due)
            if request.epoch != epoch:
                continue
            n_generated = self._tick - request.tick0  # after this step
            if not (request.n_in + n_generated - 2) % block_size:
                evicted = self.pool.take([], [], 1)
                while evicted is None:
                    if self._preempt() is request:
                        break
                    evicted = self.pool.take([], [], 1)
                if evicted is None:
                    continue
                request.n_blocks += 1
                self._evicted(evicted)
            if n_generated >= request.n_out:
                ended.append(request)
            else:
                self._note_due(request)
        return ended  # none of them was preempted since: those that are preempted were admitted later

    def _note_due(self, request: LabRequest) -> None:
        """Note the next step in which an answer needs a block or ends."""
        n_generated = self._tick - request.tick0
        n_until_block = 1 + (1 - request.n_in - n_generated) % self.config.block_size
        n_steps = min(n_until_block, request.n_out - n_generated)
        heapq.heappush(self._due, (self._tick + n_steps, request.order, request.epoch, request))

    def _settle(self, request: LabRequest, completed: list[LabRequest]) -> None:
        """Note whether a prompt that was computed in this step is complete."""
        if request.computed >= request.n_in + request.n_generated:
            completed.append(request)
            self._partial = None
        else:
            self._partial = request

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _fitting_hits(self, request: LabRequest) -> int:
        """How many blocks of a waiting request are cached, or -1 if the others do not fit."""
        pool, block_size = self.pool, self.config.block_size
        n_tokens = request.n_in + request.n_generated
        n_hits = pool.n_cached(request.chain)
        n_used = pool.n_used(request.chain, n_hits)
        if n_hits == len(request.chain) and request.n_generated:
            while (n_hits + 1) * block_size <= n_tokens and pool.has_idle(request.own + n_hits - len(request.chain)):
                n_hits += 1
        if n_hits and n_hits * block_size >= n_tokens:
            n_hits -= 1  # at least one token is always computed
            n_used = min(n_used, n_hits)
        n_needed = -(-n_tokens // block_size) - n_used
        return n_hits if n_needed <= pool.n_blocks - pool.n_in_use else -1

    def _compute(self, request: LabRequest, n_hits: int, budget: int) -> tuple[int, int, float] | None:
        """Compute as much of a request as the budget allows.

        Returns its tokens, how many of them are the prompt's, and how long loading took in ms; None if it was preempted
        for lack of blocks. Only a request that is admitted loads.
        """
        block_size = self.config.block_size
        before, loading_ms = request.computed, 0.0
        if not before:
            n_loaded, loading_ms = self._loaded(request, n_hits)
            before = (n_hits + n_loaded) * block_size
        after = min(before + budget, request.n_in + request.n_generated)
        hits = list(request.chain[:n_hits]) if n_hits else []
        own_hits = [request.own + offset for offset in range(n_hits - len(hits))]
        n_blocks = -(-after // block_size)
        evicted = self.pool.take(hits, own_hits, n_blocks - request.n_blocks - n_hits)
        if evicted is None:
            preempted = self._preempt()
            assert preempted is request  # it was admitted last
            return None
        self._evicted(evicted)
        if hits:
            request.shared = hits
        request.n_blocks = n_blocks
        request.computed = after
        first, last = len(request.shared), min(after // block_size, len(request.chain))
        if first < last:
            request.shared += self.pool.share(list(request.chain[first:last]))
            self._is_blocked = False
            self._stored(self.number, request, first, last)
        return after - before, min(after, request.n_in) - min(before, request.n_in), loading_ms

    def _loaded(self, request: LabRequest, n_hits: int) -> tuple[int, float]:
        """Load what follows the cached blocks of a request from other memory; return how many blocks, and the time."""
        n_max = (request.n_in + request.n_generated - 1) // self.config.block_size - n_hits
        if self._load is None or n_max <= 0 or n_hits >= len(request.chain):
            return 0, 0.0
        n_loaded, took_ms = self._load(request.chain, n_hits, n_max)
        request.loaded_tokens += n_loaded * self.config.block_size
        return n_loaded, took_ms

    def _preempt(self) -> LabRequest:
        """Take the blocks of the request that was admitted last, which then waits in front; return it."""
        number = next(reversed(self.running))
        request = self.running[number]
        self.n_preempted += 1
        computed = request.computed
        if request.tick0 != NOT_DECODING:
            request.n_generated = self._tick - 1 - request.tick0
            computed = request.n_in + request.n_generated - 1
        self._release(request, computed)
        request.computed = 0
        request.tick0 = NOT_DECODING
        request.epoch += 1
        self.waiting.appendleft(request)
        return request

    def _release(self, request: LabRequest, computed: int) -> None:
        """End the use of a running request's blocks. computed: tokens in them."""
        n_full = computed // self.config.block_size
        n_own = n_full - len(request.shared)
        own = range(request.own, request.own + n_own)
        self.pool.release(request.shared, own, request.n_blocks - n_full)
        request.shared = []
        request.n_blocks = 0
        del self.running[request.number]
        if self._partial is request:
            self._partial = None
        self._is_blocked = False

    def _evicted(self, keys: list[int]) -> None:
        if keys:
            self._removed(self.number, keys)
