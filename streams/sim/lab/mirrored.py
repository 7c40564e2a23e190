"""The laboratory's version of a fleet of `kvstreams sim` engines, to compare a live run with a simulated one.

What lives here: engines, requests and outcomes in the form of the other side. What must not: the run (experiment).

The two models differ in one respect: prefills and answers share the steps of a laboratory engine, while those of
`kvstreams sim` do not slow each other down. Caches and their evictions follow the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.sim.engine_config import EngineConfig
from streams.sim.lab.engine_config import LabEngineConfig, default_engine
from streams.sim.lab.experiment import run_policy
from streams.sim.lab.fleet import FleetConfig
from streams.sim.lab.workload import RawRequest, Workload, build
from streams.sim.offline import Outcome
from streams.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest


def engine_like(config: EngineConfig) -> LabEngineConfig:
    """An engine of the same size and speed."""
    default = default_engine()
    decode_ms = config.decode_ms_per_token
    return LabEngineConfig(
        block_size=config.block_size,
        n_blocks=config.n_blocks,
        max_sequences=default.max_sequences,
        max_batched_tokens=default.max_batched_tokens,
        bytes_per_token=default.bytes_per_token,
        prefill_ms=(0.0, config.prefill_us_per_token / 1000.0, config.prefill_ms_base),
        decode_ms=(0.0, 0.0, decode_ms),
        decode_ms_min=min(decode_ms, default.decode_ms_min),
    )


def workload_like(requests: Sequence[TraceRequest], block_size: int) -> Workload:
    """The same requests. They must be in the order of their times."""
    raw = (RawRequest(each.timestamp_ms, each.input_length, each.output_length, each.hash_ids) for each in requests)
    return build("requests", raw, TRACE_BLOCK_TOKENS, block_size)


def simulate_like(
    requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, policy: str, seed: int = 1
) -> list[Outcome]:
    """Run requests by a policy's name, as `kvstreams simulate` does; return one outcome per request, in their order."""
    fleet = FleetConfig(engine_like(config), n_engines)
    result = run_policy(workload_like(requests, config.block_size), fleet, policy, seed=seed).result
    ttft_ms, latency_ms = result.ttft_ms, result.last_ms - result.arrived_ms
    return [
        Outcome(
            request=number,
            worker_id=int(result.worker[number]) + 1,
            prompt_tokens=int(result.n_in[number]),
            cached_tokens=int(result.reused_tokens[number]),
            output_tokens=int(result.n_out[number]),
            ttft_ms=float(ttft_ms[number]),
            latency_ms=float(latency_ms[number]),
        )
        for number in range(len(requests))
    ]
