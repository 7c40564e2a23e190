"""What a run measured, and the figures that are compared (pure).

What lives here: times per request, and means and quantiles of them; the result of one request of a trace. What must
not: printing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streams.core.ids import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run.

    mean_ttft_ms, p50_ttft_ms, p99_ttft_ms: from arrival to the first token. itl_ms: between two tokens of an answer,
    over all answers. reuse: share of prompt tokens that were in the engine's cache or in a pool. loaded: in a pool.
    """

    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    itl_ms: float
    requests_per_s: float
    reuse: float
    loaded: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The result of one request of a trace.

    Times are model time; ttft_ms and latency_ms are None if the chosen engine could not serve the request.
    pooled_tokens: those of the cached tokens that were loaded from the pool.
    """

    request: int
    worker_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float | None
    pooled_tokens: int = 0


class RunResult:
    """Times of each request of a run, float64[n] in milliseconds, and what the engines did.

    worker: int64[n], the engine that served it. reused_tokens, loaded_tokens: int64[n], from its cache and from a pool.
    """

    def __init__(self, name: str, n_in: Int64Array, n_out: Int64Array, n_workers: int) -> None:
        n = len(n_in)
        self.name = name
        self.n_in, self.n_out = n_in, n_out
        self.n_workers = n_workers
        self.arrived_ms: Float64Array = np.zeros(n)
        self.first_ms: Float64Array = np.zeros(n)
        self.last_ms: Float64Array = np.zeros(n)
        self.reused_tokens: Int64Array = np.zeros(n, dtype=np.int64)
        self.loaded_tokens: Int64Array = np.zeros(n, dtype=np.int64)
        self.worker: Int64Array = np.zeros(n, dtype=np.int64)
        self.ended_ms = 0.0
        self.busy_ms: list[float] = []
        self.n_preempted = 0

    def close(self, ended_ms: float, busy_ms: list[float]) -> None:
        """Note the end of the run."""
        self.ended_ms = ended_ms
        self.busy_ms = busy_ms

    @property
    def ttft_ms(self) -> Float64Array:
        """Time to the first token of each request."""
        ttft: Float64Array = self.first_ms - self.arrived_ms
        return ttft

    def figures(self, skip_share: float = 0.0) -> Figures:
        """Return the figures, without this share of requests at the beginning."""
        of = slice(int(len(self.n_in) * skip_share), None)
        ttft = self.ttft_ms[of]
        p50, p99 = np.percentile(ttft, [50, 99]).tolist()
        n_gaps = max(1, int((self.n_out[of] - 1).sum()))
        return Figures(
            mean_ttft_ms=float(ttft.mean()),
            p50_ttft_ms=p50,
            p99_ttft_ms=p99,
            itl_ms=float((self.last_ms - self.first_ms)[of].sum()) / n_gaps,
            requests_per_s=len(self.n_in) / (self.ended_ms / 1000.0) if self.ended_ms else 0.0,
            reuse=int((self.reused_tokens + self.loaded_tokens)[of].sum()) / int(self.n_in[of].sum()),
            loaded=int(self.loaded_tokens[of].sum()) / int(self.n_in[of].sum()),
        )
