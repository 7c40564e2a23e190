"""The rules of a laboratory engine, one step and one block at a time: the reference for simulation.lab_engine.

It lists every block and every token, and is therefore slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streams.lab.simulation.lab_engine_config import LabEngineConfig


@dataclass
class _Copy:
    key: int | None = None  # None until the block is full
    n_users: int = 1


@dataclass
class NaiveRequest:
    """One request. keys: of all its blocks, those of its answer included."""

    number: int
    n_in: int
    n_out: int
    keys: list[int]
    n_generated: int = 0
    computed: int = 0
    blocks: list[_Copy] = field(default_factory=list)
    reused_tokens: int = -1


@dataclass
class NaiveEngine:
    """One engine. Outputs are (number, time of the first token), (number, time of the last token)."""

    config: LabEngineConfig
    waiting: list[NaiveRequest] = field(default_factory=list)
    running: list[NaiveRequest] = field(default_factory=list)
    cached: list[_Copy] = field(default_factory=list)  # all full blocks, in order of their hashing
    idle: list[_Copy] = field(default_factory=list)  # the next to be evicted first
    n_used: int = 0
    n_preempted: int = 0
    first_ms: dict[int, float] = field(default_factory=dict)
    last_ms: dict[int, float] = field(default_factory=dict)
    reused: dict[int, int] = field(default_factory=dict)

    def run(self, arrivals: list[tuple[float, NaiveRequest]]) -> None:
        """Serve requests that arrive at these times, in order."""
        now_ms, at = 0.0, 0
        while at < len(arrivals) or self.waiting or self.running:
            if not self.waiting and not self.running:
                now_ms = max(now_ms, arrivals[at][0])
            while at < len(arrivals) and arrivals[at][0] <= now_ms + 1e-6:
                self.waiting.append(arrivals[at][1])
                at += 1
            now_ms = self._step(now_ms)

    def _find(self, key: int) -> _Copy | None:
        return next((copy for copy in self.cached if copy.key == key), None)

    def _take(self, request: NaiveRequest, n_blocks: int, hits: list[_Copy]) -> bool:
        n_new = n_blocks - len(request.blocks) - len(hits)
        n_evicted = max(0, n_new - (self.config.n_blocks - self.n_used))
        if n_evicted > len(self.idle) - sum(1 for copy in hits if not copy.n_users):
            return False
        for copy in hits:
            if not copy.n_users:
                self.idle = [each for each in self.idle if each is not copy]
            copy.n_users += 1
        request.blocks += hits
        for _ in range(n_evicted):
            gone = self.idle.pop(0)
            self.cached = [each for each in self.cached if each is not gone]
            self.n_used -= 1
        request.blocks += [_Copy() for _ in range(n_new)]
        self.n_used += n_new
        return True

    def _release(self, request: NaiveRequest) -> None:
        for copy in reversed(request.blocks):
            if copy.key is None:
                self.n_used -= 1
                continue
            copy.n_users -= 1
            if not copy.n_users:
                self.idle.append(copy)
        request.blocks = []

    def _compute(self, request: NaiveRequest, hits: list[_Copy], budget: int) -> tuple[int, int] | None:
        size = self.config.block_size
        before = request.computed or len(hits) * size
        after = min(before + budget, request.n_in + request.n_generated)
        while not self._take(request, -(-after // size), hits):
            last = self.running.pop()
            self._release(last)
            last.computed = 0
            self.n_preempted += 1
            self.waiting.insert(0, last)
            if last is request:
                return None
        request.computed = after
        for at in range(before // size, after // size):
            request.blocks[at].key = request.keys[at]
            self.cached.append(request.blocks[at])
        return after - before, min(after, request.n_in) - min(before, request.n_in)

    def _hits(self, request: NaiveRequest) -> list[_Copy]:
        n_tokens = request.n_in + request.n_generated
        hits: list[_Copy] = []
        for key in request.keys[: n_tokens // self.config.block_size]:
            copy = self._find(key)
            if copy is None:
                break
            hits.append(copy)
        return hits[:-1] if hits and len(hits) * self.config.block_size >= n_tokens else hits

    def _step(self, now_ms: float) -> float:
        config, budget, n_prompt = self.config, self.config.max_batched_tokens, 0
        n_preempted, at = self.n_preempted, 0
        while at < len(self.running) and budget:
            done = self._compute(self.running[at], [], budget)
            if done is None:
                break
            budget, n_prompt, at = budget - done[0], n_prompt + done[1], at + 1
        while n_preempted == self.n_preempted and self.waiting and budget and len(self.running) < config.max_sequences:
            request = self.waiting[0]
            hits = self._hits(request)
            n_blocks = -(-(request.n_in + request.n_generated) // config.block_size)
            n_in_use = self.n_used - len(self.idle)
            if n_blocks - sum(1 for copy in hits if copy.n_users) > config.n_blocks - n_in_use:
                break
            self.running.append(self.waiting.pop(0))
            done = self._compute(request, hits, budget)
            if done is None:
                break
            self.reused.setdefault(request.number, min(len(hits) * config.block_size, request.n_in))
            budget, n_prompt = budget - done[0], n_prompt + done[1]
        emits = [each for each in self.running if each.computed >= each.n_in + each.n_generated]
        step_ms = config.prefill_step_ms(n_prompt)
        if any(each.n_generated for each in emits):
            step_ms += config.decode_step_ms(min(1.0, (self.n_used - len(self.idle)) / config.n_blocks))
        end_ms = now_ms + step_ms
        for request in emits:
            request.n_generated += 1
            if request.n_generated == 1:
                self.first_ms[request.number] = end_ms
            if request.n_generated == request.n_out:
                self.last_ms[request.number] = end_ms
                self._release(request)
                self.running.remove(request)
        return end_ms
