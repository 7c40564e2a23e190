"""Compare routing policies on a generated chat trace, in one process and without Kafka.

    python examples/compare_policies_offline.py

The engines are simulated, and the router has their events at once. The routing code is the one that a router uses.
"""

from __future__ import annotations

import numpy as np

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation.trace_runs import simulate
from streams.lab.trace import generate

N_REQUESTS, N_ENGINES, SEED = 200, 4, 1


def main() -> None:
    """Print the share of prompt tokens that each policy finds in a cache."""
    trace = generate(N_REQUESTS, np.random.default_rng(SEED))
    for policy in ("kv", "expected-time", "round-robin", "random"):
        outcomes = simulate(trace, N_ENGINES, EngineConfig(n_blocks=4096), policy, SEED)
        prompt = sum(outcome.prompt_tokens for outcome in outcomes)
        cached = sum(outcome.cached_tokens for outcome in outcomes)
        print(f"{policy:<14} {cached / prompt:6.1%} of {prompt:,} prompt tokens were cached")


if __name__ == "__main__":
    main()
