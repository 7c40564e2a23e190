"""`python -m benchmarks.calibrate [TRACE]`: the laboratory next to NVIDIA Dynamo's own replay of the same trace.

What lives here: both sets of figures side by side, and how far apart they may be. What must not: the simulation
(streams.lab.simulation). Exits 1 if any figure is further apart than its limit.

Dynamo's replay runs in a Python of its own, which --dynamo names (`make calibrate DYNAMO=.venv-dynamo/bin/python`):

    python3 -m venv .venv-dynamo
    .venv-dynamo/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    .venv-dynamo/bin/pip install numpy pydantic pyyaml msgspec typing_extensions

Without --dynamo, the figures in calibration.json are used, which this command wrote with --save. Dynamo breaks ties at
random and takes no seed, so its figures vary by about a percent from run to run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from benchmarks.report import wide_console
from streams.lab.simulation.experiment import load_workload, run_policy
from streams.lab.simulation.fleet import FleetConfig
from streams.lab.simulation.lab_engine_config import default_engine
from streams.lab.trace import ChatShape, dump, generate

STORED = Path(__file__).with_name("calibration.json")

#: The same for a generated trace that takes seconds; tests compare the laboratory with it.
STORED_SMALL = Path(__file__).with_name("calibration_small.json")
SMALL_REQUESTS, SMALL_SEED, SMALL_WORKERS, SMALL_LOADS = 500, 7, 2, (32,)

#: What may differ by how much. Requests per second by time are given by the trace.
FIGURES = ("mean_ttft_ms", "itl_ms", "requests_per_s", "reuse")
LIMITS = {"round-robin": 0.05, "dynamo-default": 0.07, "dynamo-agentic": 0.07, "dynamo-tuned": 0.07}

#: Concurrency; 0: by time.
LOADS = (64, 128, 256, 0)

#: Arguments of Dynamo's KvRouterConfig for each policy.
ROUTER_CONFIGS: dict[str, dict[str, float] | None] = {
    "round-robin": None,
    "dynamo-default": {},
    "dynamo-agentic": {"overlap_score_credit": 2.0, "prefill_load_scale": 4.0, "decode_active_request_weight": 64.0},
    "dynamo-tuned": {"overlap_score_credit": 2.55, "prefill_load_scale": 23.9, "decode_active_request_weight": 278.0},
}

#: Runs in Dynamo's Python: one JSON line per run.
REPLAY = """
import json, os, sys
os.environ.setdefault("DYN_LOG", "error")
from dynamo.llm import KvRouterConfig
from dynamo.replay import run_trace_replay
trace, workers, runs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for policy, config, concurrency in runs:
    how = dict(replay_concurrency=concurrency) if concurrency else dict(arrival_speedup_ratio=1.0)
    if config is None:
        how["router_mode"] = "round_robin"
    else:
        how.update(router_mode="kv_router", router_config=KvRouterConfig(**config))
    s = run_trace_replay(trace, num_workers=workers, **how).summary
    print(json.dumps(dict(
        policy=policy, concurrency=concurrency, mean_ttft_ms=s["mean_ttft_ms"], p99_ttft_ms=s["p99_ttft_ms"],
        itl_ms=s["mean_itl_ms"], requests_per_s=s["request_throughput_rps"], reuse=s["prefix_cache_reused_ratio"])),
        flush=True)
"""

#: One run of the replay takes 3 to 15 s.
REPLAY_TIMEOUT_S = 1200.0


def replayed(python: Path, trace: Path, workers: int, runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Run Dynamo's replay in its own Python."""
    wanted = json.dumps([(policy, ROUTER_CONFIGS[policy], concurrency) for policy, concurrency in runs])
    done = subprocess.run(
        [python, "-c", REPLAY, str(trace), str(workers), wanted],
        stdout=subprocess.PIPE,
        text=True,
        timeout=REPLAY_TIMEOUT_S,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def laboratory(trace: Path, workers: int, runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Run the same in the laboratory."""
    engine = default_engine()
    workload = load_workload(str(trace), engine, workers)
    return [
        run_policy(workload, FleetConfig(engine, workers, concurrency=concurrency), policy).as_json()
        for policy, concurrency in runs
    ]


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Relative difference of each figure."""
    return {name: ours[name] / theirs[name] - 1.0 for name in FIGURES}


def small_trace(folder: Path) -> Path:
    """Write the generated trace, chat traffic, to a folder."""
    path = folder / "small.jsonl"
    requests = generate(SMALL_REQUESTS, np.random.default_rng(SMALL_SEED), ChatShape(first_text_mean=6000))
    path.write_text("".join(line + "\n" for line in dump(requests)))
    return path


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--dynamo", type=click.Path(path_type=Path), help="A Python that has Dynamo.")
@click.option("--policy", "policies", default=",".join(LIMITS), show_default=True)
@click.option("--workers", default=8, show_default=True)
@click.option("--save", is_flag=True, help="Store Dynamo's figures in calibration.json.")
def main(trace: Path | None, dynamo: Path | None, policies: str, workers: int, save: bool) -> None:
    """Compare the laboratory with Dynamo's replay of TRACE, or of a small generated trace without one."""
    if trace is None:
        with tempfile.TemporaryDirectory() as folder:
            compare(small_trace(Path(folder)), dynamo, policies, SMALL_WORKERS, STORED_SMALL, save, SMALL_LOADS)
    else:
        compare(trace, dynamo, policies, workers, STORED, save, LOADS)


def compare(
    trace: Path,
    dynamo: Path | None,
    policies: str,
    workers: int,
    file: Path,
    save: bool,
    loads: tuple[int, ...],
) -> None:
    """Print both sets of figures, and exit 1 if they are too far apart. file: of Dynamo's stored figures."""
    runs = [(policy, concurrency) for policy in policies.split(",") for concurrency in loads]
    if dynamo is None:
        stored = json.loads(file.read_text())
        theirs = [row for row in stored["rows"] if (row["policy"], row["concurrency"]) in runs]
    else:
        theirs = replayed(dynamo, trace, workers, runs)
        if save:
            record = {"trace": trace.name, "workers": workers, "dynamo": "1.6.1", "rows": theirs}
            file.write_text(json.dumps(record, indent=1) + "\n")
    ours = {(row["policy"], row["concurrency"]): row for row in laboratory(trace, workers, runs)}
    table = Table("policy", "load", *(f"{name}: Dynamo / ours" for name in FIGURES), "largest difference")
    apart = []
    for row in theirs:
        mine = ours[row["policy"], row["concurrency"]]
        differs = differences(row, mine)
        largest = max(differs, key=lambda name: abs(differs[name]))
        if abs(differs[largest]) > LIMITS[row["policy"]]:
            apart.append(f"{row['policy']} at {row['concurrency']}: {largest} differs by {differs[largest]:+.1%}")
        figures = (f"{row[name]:.4g} / {mine[name]:.4g}" for name in FIGURES)
        table.add_row(row["policy"], str(row["concurrency"]), *figures, f"{largest} {differs[largest]:+.1%}")
    wide_console().print(table)
    for each in apart:
        click.echo(each, err=True)
    sys.exit(1 if apart else 0)


if __name__ == "__main__":
    main()
