"""The results of a driven trace, as figures, text and a plot.

What lives here: summaries of outcomes, and how they are shown. What must not: running anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from streams.lab.demo.drive import LiveOutcome
from streams.lab.simulation.results import RequestOutcome


def summarise(outcomes: Sequence[RequestOutcome], n_engines: int) -> dict[str, Any]:
    """Figures of one policy.

    hit_share: the share of prompt tokens that an engine found in its cache. Times are model time. load_imbalance:
    tokens computed by the busiest engine, divided by the mean over all engines; 1 is perfectly even.
    """
    served = [outcome for outcome in outcomes if outcome.ttft_ms is not None]
    ttft = np.array([outcome.ttft_ms for outcome in served], dtype=np.float64)
    computed: Counter[int] = Counter()
    for outcome in served:
        computed[outcome.worker_id] += outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens
    prompt_tokens = sum(outcome.prompt_tokens for outcome in served)
    return {
        "requests": len(served),
        "rejected": len(outcomes) - len(served),
        "hit_share": sum(outcome.cached_tokens for outcome in served) / prompt_tokens,
        "ttft_ms_mean": float(ttft.mean()),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "load_imbalance": max(computed.values()) * n_engines / sum(computed.values()),
    }


def summarise_live(outcomes: Sequence[LiveOutcome], n_engines: int) -> dict[str, Any]:
    """Figures of one policy, live: those of `summarise`, and route_ms, the wall time of POST /route over HTTP."""
    route_ms = np.array([outcome.route_ms for outcome in outcomes])
    return {
        **summarise([outcome.outcome for outcome in outcomes], n_engines),
        "route_ms_p50": float(np.percentile(route_ms, 50)),
        "route_ms_p99": float(np.percentile(route_ms, 99)),
        "modes": dict(Counter(outcome.mode for outcome in outcomes)),
    }


def mean_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of several runs of one policy: means of those of `summarise`, and hit_share_sd, how much runs differ."""
    shares = [run["hit_share"] for run in runs]
    return {
        **{name: float(np.mean([run[name] for run in runs])) for name in runs[0]},
        "hit_share_sd": float(np.std(shares, ddof=1)) if len(runs) > 1 else 0.0,
        "runs": len(runs),
    }


def print_policies(
    console: Console,
    live: Mapping[str, Mapping[str, Any]],
    followed: Mapping[str, Mapping[str, Any]],
    offline: Mapping[str, Mapping[str, Any]],
    bound: float,
) -> None:
    """Print the table of act one. followed, offline: of the laboratory, with the live run's choices and its own."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for column in (
        "prefix\nhits",
        "offline, same\nchoices",
        "offline, own\nchoices",
        "TTFT\nmean",
        "TTFT\np99",
        "load\nskew",
        "route\np50",
        "route\np99",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in live.items():
        table.add_row(
            name,
            f"{row['hit_share']:.1%}",
            f"{followed[name]['hit_share']:.1%}",
            f"{offline[name]['hit_share']:.1%} ± {100 * offline[name]['hit_share_sd']:.1f}",
            f"{row['ttft_ms_mean']:.0f} ms",
            f"{row['ttft_ms_p99']:.0f} ms",
            f"{row['load_imbalance']:.2f}",
            f"{row['route_ms_p50']:.1f} ms",
            f"{row['route_ms_p99']:.1f} ms",
            style="bold green" if name == "kv" else None,
        )
    console.print(table)
    console.print(
        f"Bound: one infinite cache would hit {bound:.1%}. Offline: the laboratory of `kvstreams simulate`, with the "
        "live run's choices, and with choices of its own: mean and standard deviation of "
        f"{next(iter(offline.values()))['runs']:.0f} runs, whose index is never late. TTFT: time to first token, in "
        "model time. Load skew: tokens computed by the busiest engine, divided by the mean. Route: time of POST /route "
        "over HTTP, on this machine, which also runs everything else."
    )


def explain(answer: Mapping[str, Any], n_tokens: int, block_size: int) -> str:
    """Explain one decision as text, from an answer of POST /route with `explain`."""
    candidates = sorted(answer["candidates"], key=lambda terms: terms["cost"])
    chosen = next(terms for terms in candidates if terms["worker_id"] == answer["worker_id"])
    others = [terms for terms in candidates if terms is not chosen]
    words = [
        f"A request of {n_tokens:,} tokens is {answer['request_blocks']} blocks of {block_size}.",
        f"Worker {chosen['worker_id']} holds the first {chosen['scores']} of them, so "
        f"{chosen['own_prefill_blocks']:.0f} are left to compute; {chosen['active_prefill_blocks']:.0f} blocks wait "
        f"for prefill there and {chosen['decode_blocks']:.0f} would be in use: cost {chosen['cost']:.0f}.",
    ]
    if others:
        next_best = others[0]
        words.append(
            f"The next best, worker {next_best['worker_id']}, holds {next_best['scores']} and would cost "
            f"{next_best['cost']:.0f}; the most expensive, worker {others[-1]['worker_id']}, {others[-1]['cost']:.0f}."
        )
    words.append(f"So the request goes to worker {chosen['worker_id']}. The mode of this answer is {answer['mode']}.")
    return " ".join(words)


def draw(
    path: Path, live: Mapping[str, Sequence[LiveOutcome]], figures: Mapping[str, Mapping[str, Any]], bound: float
) -> None:
    """Draw the plot of act one: hits and their bound, times to first token, and tokens computed per engine."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {
        "kv": "#1a7f37",
        "expected-time": "#0969da",
        "dynamo-agentic": "#8250df",
        "round-robin": "#9a6700",
        "random": "#6e7781",
    }
    figure, (hits, times, loads) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    names = list(live)
    bars = hits.bar(
        names, [figures[name]["hit_share"] * 100 for name in names], color=[colours[name] for name in names]
    )
    hits.bar_label(bars, fmt="%.1f %%")
    hits.tick_params(axis="x", labelrotation=15)
    hits.axhline(bound * 100, color="black", linestyle="--", linewidth=1)
    hits.annotate(f"one infinite cache: {bound:.1%}", (len(names) - 0.5, bound * 100), ha="right", va="bottom")
    hits.set_title("Prompt tokens found in a cache")
    hits.set_ylabel("%")
    for name in names:
        ttft = np.sort([o.outcome.ttft_ms for o in live[name] if o.outcome.ttft_ms is not None])
        times.step(ttft, np.arange(1, len(ttft) + 1) / len(ttft) * 100, label=name, color=colours[name], where="post")
    times.set_xscale("log")
    times.set_title("Time to first token")
    times.set_xlabel("model ms")
    times.set_ylabel("% of requests served")
    times.legend(frameon=False)
    workers = sorted({o.outcome.worker_id for outcomes in live.values() for o in outcomes})
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        computed: Counter[int] = Counter()
        for o in live[name]:
            computed[o.outcome.worker_id] += o.outcome.prompt_tokens - o.outcome.cached_tokens
        places = np.arange(len(workers)) + (index - (len(names) - 1) / 2) * width
        loads.bar(places, [computed[worker] / 1000 for worker in workers], width, label=name, color=colours[name])
    loads.set_xticks(np.arange(len(workers)), [str(worker) for worker in workers])
    loads.set_title("Prompt tokens computed per worker")
    loads.set_xlabel("worker")
    loads.set_ylabel("thousands")
    for axes in (hits, times, loads):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
