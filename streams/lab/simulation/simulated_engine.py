"""One engine of `kvstreams sim` in the laboratory: its state machine, in the form that a fleet drives (pure).

What lives here: requests and outputs of `EngineModel` in the laboratory's terms. What must not: rules of the engine
(engines.model), content of a pool (lab_pool), and the order of several engines' events (fleet).

A live engine of `kvstreams sim` is this state machine in a process. A laboratory fleet of these engines therefore
differs from a live one only by what is between router and engines.

State: the blocks and requests of one engine.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import assert_never

import numpy as np

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import (
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvReused,
    KvStored,
    ModelRequest,
    Output,
    PoolAsked,
    PromptHashes,
    Rejected,
)
from streams.lab.engines.model import EngineModel
from streams.lab.simulation.lab_engine import LabRequest, Load, Removed, Stored


class SimulatedEngine:
    """One engine. The fleet calls `start` when it is idle and has work, and `finish` at `end_ms`, as with LabEngine.

    Here, a step lasts until the next event of the state machine. speed, load: as for LabEngine.
    """

    n_preempted = 0  # a request starts only when its whole answer is sure to fit

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        stored: Stored,
        removed: Removed,
        *,
        speed: float = 1.0,
        load: Load | None = None,
    ) -> None:
        self.number = number
        self.end_ms = 0.0
        self.is_busy = False
        self.busy_ms = 0.0
        self._config = replace(
            config,
            prefill_ms_base=config.prefill_ms_base * speed,
            prefill_us_per_token=config.prefill_us_per_token * speed,
            decode_ms_per_token=config.decode_ms_per_token * speed,
        )
        self._stored = stored
        self._removed = removed
        self._started_ms = 0.0
        self._load = load
        self._model = self._new_model()
        self._requests: dict[str, LabRequest] = {}
        self._key_of: dict[int, int] = {}  # of the blocks of prompts, by engine hash
        self._copies: Counter[int] = Counter()  # physical copies, by engine hash
        self._new_blocks: tuple[int, int] | None = None  # of the prompt whose first token is next

    def _new_model(self) -> EngineModel:
        model = EngineModel(self._config)
        model.use_pool(self._load is not None)
        return model

    @property
    def has_work(self) -> bool:
        """Whether anything will happen without a new request."""
        return self._model.next_event_ms() is not None

    def fits(self, request: LabRequest) -> bool:
        """Whether a request can ever be served: prompt and answer have to fit in the cache together."""
        return request.n_in + request.n_out - 1 <= self._config.n_tokens_max

    def submit(self, request: LabRequest, now_ms: float) -> bool:
        """Hand in a request; return whether `end_ms` is earlier because of it."""
        chain = np.asarray(request.chain, dtype=np.uint32)
        # A key stands for a block and everything before it, so it serves as the block's content and as its hashes.
        tokens = np.zeros(request.n_in, dtype="<u4")
        tokens[: len(chain) * self._config.block_size] = np.repeat(chain, self._config.block_size)
        hashes = chain.astype(np.uint64)
        name = str(request.number)
        self._requests[name] = request
        self._model.submit(
            now_ms if math.isnan(request.arrived_ms) else request.arrived_ms,
            ModelRequest(
                name,
                tokens.tobytes(),
                request.n_out,
                output_seed=request.number,
                hashes=PromptHashes(hashes, hashes),
            ),
        )
        if not self.is_busy:
            return False
        next_ms = self._model.next_event_ms()
        if next_ms is None or next_ms >= self.end_ms:
            return False
        self.end_ms = max(now_ms, next_ms)
        return True

    def fail(self) -> list[LabRequest]:
        """Lose all requests and blocks, as when the engine's process ends; return the requests."""
        lost = list(self._requests.values())
        self._requests.clear()
        self._key_of.clear()
        self._copies.clear()
        self._model = self._new_model()
        self.is_busy = False
        return lost

    def start(self, now_ms: float) -> None:
        """Wait for the next event."""
        next_ms = self._model.next_event_ms()
        assert next_ms is not None, f"engine {self.number} has no work"
        self.is_busy = True
        self._started_ms = now_ms
        self.end_ms = max(now_ms, next_ms)

    def finish(self) -> tuple[list[LabRequest], list[LabRequest]]:
        """Let the next event happen; return the requests whose first token is out, and those whose last one is."""
        self.is_busy = False
        self.busy_ms += self.end_ms - self._started_ms
        first: list[LabRequest] = []
        ended: list[LabRequest] = []
        for output in self._model.advance(self.end_ms):
            self._note(output, first, ended)
        return first, ended

    def _note(self, output: Output, first: list[LabRequest], ended: list[LabRequest]) -> None:
        match output:
            case KvStored():
                self._note_stored(output)
            case KvRemoved():
                self._note_removed(output)
            case FirstToken():
                request = self._requests[output.request_id]
                request.first_ms = output.at_ms
                request.loaded_tokens = output.pooled_tokens
                request.reused_tokens = output.cached_tokens - output.pooled_tokens
                if self._new_blocks is not None:  # an engine puts them out before the first token
                    self._stored(self.number, request, *self._new_blocks)
                    self._new_blocks = None
                first.append(request)
            case Finished():
                request = self._requests.pop(output.request_id)
                request.last_ms = output.at_ms
                ended.append(request)
            case PoolAsked():
                assert self._load is not None  # the model asks only if there is other memory
                # A sequence hash is the block's key here (see submit).
                chain = self._requests[output.request_id].chain
                n_loaded, took_ms = self._load(chain, chain.index(output.keys[0]), len(output.keys))
                self._model.pool_answered(output.request_id, n_loaded, took_ms)
            case KvReused() | KvCleared() | Rejected():
                raise AssertionError(output)  # nothing here asks for these
            case _:
                assert_never(output)

    def _note_stored(self, stored: KvStored) -> None:
        """Blocks can be found. Those of answers are in no other prompt; they only take space."""
        engine = stored.engine.tolist()
        self._copies.update(engine)
        if stored.generated:
            return
        self._key_of.update(zip(engine, stored.sequence.tolist(), strict=True))
        self._new_blocks = (stored.start, stored.start + len(engine))

    def _note_removed(self, removed: KvRemoved) -> None:
        """Blocks were evicted; those whose last copy it was can no longer be found."""
        keys = []
        for name in removed.engine.tolist():
            self._copies[name] -= 1
            if self._copies[name] == 0:
                del self._copies[name]
                key = self._key_of.pop(name, None)
                if key is not None:
                    keys.append(key)
        if keys:
            self._removed(self.number, keys)
