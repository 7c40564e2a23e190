"""`python -m benchmarks.quality [TRACE]`: the tables of docs/quality.md, and what must hold of `expected-time`.

What lives here: which runs are compared, and the limits of their ratios. What must not: the simulation
(streams.lab.simulation). Prints Markdown and exits 1 if a limit is exceeded. All of it takes about twenty minutes of
one core; --only runs one part, --demo compares the demo's live runs with the laboratory, and --plots draws
(quality_plots).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from streams.lab.simulation.experiment import Row, load_workload, run_policy
from streams.lab.simulation.fleet import FleetConfig, LabFailure
from streams.lab.simulation.lab_engine_config import default_engine
from streams.lab.simulation.lab_pool import LabPoolConfig
from streams.lab.simulation.workload import RawRequest, Workload, build
from streams.lmcache.wire import CHUNK_TOKENS

N_WORKERS = 8
ENGINE = default_engine()
FLEET = FleetConfig(ENGINE, N_WORKERS)
OURS, OURS_AT_ONCE = "expected-time+queue", "expected-time"

#: Load of the conversation trace as (concurrency, speedup), and the greatest ratio of our mean TTFT to the preset's.
CONVERSATION = {(64, 1.0): 0.97, (128, 1.0): 0.94, (256, 1.0): 0.84, (0, 1.0): 0.95, (0, 6.0): 0.81}
AGENTIC_MAX, GENERATED_MAX, TUNED_MAX, POOLED_MAX = 0.6, 1.02, 1.02, 0.4

#: Generated traffic: its name, the loads, and how many times the time runs as fast.
GENERATED = ("uniform", "hot", "cold", "bursts", "agentic")

Check = tuple[str, float, float]  # what, ratio, limit

#: By how many standard deviations of the laboratory's own runs a live one may differ from their mean in addition.
LIVE_SDS = 2.0

#: The demo's live runs and the laboratory agree on the share of prompt tokens found in caches within this.
LIVE_POINTS_MAX = 2.0


class Figures:
    """What the parts that were run found, for plots."""

    def __init__(self) -> None:
        self.conversation: dict[str, dict[str, float]] = {}
        self.pools: dict[tuple[bool, bool], dict[int, float]] = {}
        self.without_pool_ms = 0.0
        self.lengths: list[tuple[int, float, float]] = []
        self.live: dict[str, Any] = {}

    def draw(self, folder: Path) -> list[Path]:
        """Draw what there is; return the files."""
        from benchmarks import quality_plots

        folder.mkdir(parents=True, exist_ok=True)
        drawn = []
        if self.conversation:
            drawn.append(quality_plots.conversation(folder, self.conversation))
        if self.pools:
            drawn.append(quality_plots.pools(folder, self.without_pool_ms, self.pools))
        if self.lengths:
            drawn.append(quality_plots.lengths(folder, self.lengths))
        if self.live:
            drawn.append(quality_plots.live(folder, self.live))
        return drawn


FIGURES = Figures()


def row(values: Iterable[object]) -> None:
    """Print one row of a table."""
    click.echo("| " + " | ".join(map(str, values)) + " |")


def head(*names: str) -> None:
    """Print the head of a table."""
    click.echo()
    row(names)
    row(["---"] * len(names))


def figures_of(each: Row) -> list[str]:
    """Figures of a run as cells."""
    figures = each.figures
    return [
        f"{figures.mean_ttft_ms:.0f} / {figures.p99_ttft_ms:.0f}",
        f"{figures.itl_ms:.1f}",
        f"{figures.requests_per_s:.2f}",
        f"{figures.reuse:.3f}",
    ]


def load_name(concurrency: int, speedup: float) -> str:
    """A load in words."""
    return f"{concurrency} at once" if concurrency else f"by time x{speedup:g}"


def workload_of(text: str) -> Workload:
    """A workload by name."""
    return load_workload(text, ENGINE, N_WORKERS)


def conversation(trace: Path | None) -> list[Check]:
    """Every policy on the published trace."""
    if trace is None:
        return []
    workload, checks = workload_of(str(trace)), []
    policies = ("round-robin", "dynamo-default", "dynamo-agentic", "dynamo-tuned", "lmetric", OURS_AT_ONCE, OURS)
    head("load", "policy", "mean / p99 TTFT ms", "ITL ms", "requests/s", "reuse")
    for (concurrency, speedup), limit in CONVERSATION.items():
        config, load = replace(FLEET, concurrency=concurrency, speedup=speedup), load_name(concurrency, speedup)
        runs = {policy: run_policy(workload, config, policy) for policy in policies}
        for policy, each in runs.items():
            row([load, f"`{policy}`", *figures_of(each)])
        ours, preset = runs[OURS].figures, runs["dynamo-agentic"].figures
        FIGURES.conversation[load] = {
            policy: each.figures.mean_ttft_ms / preset.mean_ttft_ms for policy, each in runs.items()
        }
        tuned = runs["dynamo-tuned"].figures
        checks += [
            (f"{load}: mean TTFT, preset", ours.mean_ttft_ms / preset.mean_ttft_ms, limit),
            (f"{load}: mean TTFT, tuned", ours.mean_ttft_ms / tuned.mean_ttft_ms, TUNED_MAX),
            (f"{load}: p99 TTFT, preset", ours.p99_ttft_ms / preset.p99_ttft_ms, 1.05),
            (f"{load}: ITL, preset", ours.itl_ms / preset.itl_ms, 1.0 if concurrency else 1.05),
            (f"{load}: reuse, preset (inverse)", preset.reuse / ours.reuse, 1 / 1.1),
        ]
    return checks


def generated() -> list[Check]:
    """Generated traffic, at 64 requests at once."""
    checks = []
    policies = ("round-robin", "dynamo-default", "dynamo-agentic", "dynamo-tuned", OURS_AT_ONCE, OURS)
    head("traffic", "policy", "mean / p99 TTFT ms", "ITL ms", "requests/s", "reuse")
    for name in GENERATED:
        workload = workload_of(name)
        for concurrency in (64, 0):
            config = replace(FLEET, concurrency=concurrency)
            runs = {policy: run_policy(workload, config, policy) for policy in policies}
            for policy, each in runs.items():
                row([f"{name}, {load_name(concurrency, 1.0)}", f"`{policy}`", *figures_of(each)])
            ours = runs[OURS].figures.mean_ttft_ms
            checks.append((f"{name}: default", ours / runs["dynamo-default"].figures.mean_ttft_ms, GENERATED_MAX))
            if name == "agentic" and concurrency:
                checks.append((f"{name}: preset", ours / runs["dynamo-agentic"].figures.mean_ttft_ms, AGENTIC_MAX))
    return checks


def pools() -> list[Check]:
    """Pools of 1, 2 and 4 times the device memory, with sessions of twice that."""
    workload, checks = workload_of("agentic:working_set=2:requests=12000"), []
    config = replace(FLEET, concurrency=64)
    policy = OURS_AT_ONCE + ":pool_gb_per_s=64"
    without = run_policy(workload, config, policy)
    FIGURES.without_pool_ms = without.figures.mean_ttft_ms
    head("pool", "link", "router", "mean / p99 TTFT ms", "ITL ms", "requests/s", "reuse", "loaded")
    row(["none", "", "", *figures_of(without), "0"])
    for is_shared in (False, True):
        for size in (1, 2, 4):
            for is_credited in (True, False):
                pool = LabPoolConfig(size * N_WORKERS * ENGINE.n_blocks, 64.0, is_shared, is_credited)
                each = run_policy(workload, replace(config, pool=pool), policy)
                FIGURES.pools.setdefault((is_shared, is_credited), {})[size] = each.figures.mean_ttft_ms
                link = "64 GB/s for all" if is_shared else "64 GB/s per engine"
                credited = "credits it" if is_credited else "does not know it"
                row([f"{size} x device", link, credited, *figures_of(each), f"{each.figures.loaded:.3f}"])
                if size == 2 and is_credited and not is_shared:
                    ratio = each.figures.mean_ttft_ms / without.figures.mean_ttft_ms
                    checks.append(("credited pool of 2 x device", ratio, POOLED_MAX))
    chunked = LabPoolConfig(2 * N_WORKERS * ENGINE.n_blocks, chunk_blocks=CHUNK_TOKENS // ENGINE.block_size)
    each = run_policy(workload, replace(config, pool=chunked), policy)
    row(["2 x device, LMCache", "64 GB/s per engine", "credits it", *figures_of(each), f"{each.figures.loaded:.3f}"])
    ratio = each.figures.mean_ttft_ms / without.figures.mean_ttft_ms
    checks.append(("credited pool of 2 x device in chunks of LMCache", ratio, POOLED_MAX))
    return checks


def disturbed() -> list[Check]:
    """Late events, engines that fail, and unequal engines."""
    checks: list[Check] = []
    head("fleet", "traffic", "`round-robin`", "`dynamo-agentic`", f"`{OURS_AT_ONCE}`", f"`{OURS}`")
    failures = tuple(LabFailure(worker, 20_000.0 + 15_000.0 * worker, 20_000.0) for worker in range(4))
    fleets = {f"events {lag_ms} ms late": {"event_lag_ms": float(lag_ms)} for lag_ms in (0, 20, 100, 1000)}
    fleets |= {
        "4 engines fail for 20 s each": {"failures": failures},  # type: ignore[dict-item]
        "4 engines at 1, 2 at 1/1.5, 2 at 1/2 of the speed": {"speeds": (1.0,) * 4 + (1.5,) * 2 + (2.0,) * 2},  # type: ignore[dict-item]
    }
    for traffic in ("uniform", "agentic"):
        workload = workload_of(traffic)
        for name, change in fleets.items():
            config = replace(FLEET, concurrency=64, **change)  # type: ignore[arg-type]
            policies = ("round-robin", "dynamo-agentic", OURS_AT_ONCE, OURS)
            times = [run_policy(workload, config, policy).figures.mean_ttft_ms for policy in policies]
            row([name, traffic, *(f"{each:.0f}" for each in times)])
            checks.append((f"{name}, {traffic}: round robin", max(times[2:]) / times[0], 1.0))
    return checks


def lengths() -> list[Check]:
    """The time to the first token with and without reuse, by the length of the prompt, on an idle engine."""
    head("prompt", "without reuse, ms", "90 % cached, ms", "saved")
    for n_in in (500, 2000, 8000, 32000):
        shared = list(range(n_in * 9 // 10 // 64))
        raw = [
            RawRequest(60_000.0 * at, n_in, 2, shared + [1_000_000 * (at + 1) + each for each in range(n_in // 64 + 1)])
            for at in range(2)
        ]
        result = run_policy(build("length", raw, 64, 64), replace(FLEET, n_workers=1), "kv").result
        first, second = result.ttft_ms.tolist()
        FIGURES.lengths.append((n_in, first, second))
        row([f"{n_in:,} tokens", f"{first:.0f}", f"{second:.0f}", f"{1 - second / first:.0%}"])
    return []


def live(result: Path) -> list[Check]:
    """The demo's live runs next to the laboratory's of the same requests. result: the demo's result.json."""
    FIGURES.live = found = json.loads(result.read_text())
    head("policy", "live", "same choices", "difference, points", "would change", "own choices", "difference, points")
    checks = []
    for name, each in found["policies"].items():
        followed, own = found["followed"][name], found["offline"][name]
        points = 100.0 * (each["hit_share"] - followed["hit_share"])
        own_points = 100.0 * (each["hit_share"] - own["hit_share"])
        sd = 100.0 * own["hit_share_sd"]
        row(
            [
                f"`{name}`",
                f"{each['hit_share']:.1%}",
                f"{followed['hit_share']:.1%}",
                f"{points:+.1f}",
                f"{followed['changed']:.1%}",
                f"{own['hit_share']:.1%} ± {sd:.1f}",
                f"{own_points:+.1f}",
            ]
        )
        checks.append((f"live and laboratory with the same choices, {name}: points", abs(points), LIVE_POINTS_MAX))
        # The live run is one draw of what single runs vary by.
        checks.append(
            (f"live and laboratory with its own, {name}: points", abs(own_points), LIVE_POINTS_MAX + LIVE_SDS * sd)
        )
    return checks


PARTS: dict[str, Callable[[Path | None], list[Check]]] = {
    "conversation": conversation,
    **{each.__name__: partial(lambda part, _: part(), each) for each in (generated, pools, disturbed, lengths)},
}


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to run; all without this.")
@click.option("--demo", type=click.Path(path_type=Path, exists=True), help="The demo's result.json, for the part live.")
@click.option("--plots", type=click.Path(path_type=Path), help="Folder for plots of the parts that were run.")
def main(trace: Path | None, only: tuple[str, ...], demo: Path | None, plots: Path | None) -> None:
    """Print the tables of docs/quality.md. TRACE: conversation_trace.jsonl."""
    checks: list[Check] = []
    for name in only or (() if demo else PARTS):
        click.echo(f"\n## {name}")
        checks += PARTS[name](trace)
    if demo is not None:
        click.echo("\n## live")
        checks += live(demo)
    if plots is not None:
        for path in FIGURES.draw(plots):
            click.echo(f"\nplot: {path}", err=True)
    head("ratio", "is", "at most", "")
    for what, ratio, limit in checks:
        row([what, f"{ratio:.3f}", f"{limit:.3f}", "" if ratio <= limit else "exceeded"])
    sys.exit(1 if any(ratio > limit for _, ratio, limit in checks) else 0)


if __name__ == "__main__":
    main()
