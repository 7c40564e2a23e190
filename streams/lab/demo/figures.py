"""The results of a driven trace, as figures, text and a plot.

What lives here: summaries of outcomes, and how they are shown. What must not: running anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

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
        computed[outcome.worker_id] += _computed_tokens(outcome)
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


def _computed_tokens(outcome: RequestOutcome) -> int:
    """Tokens that an engine computed for a request: those of the prompt that were not cached, and the output."""
    return outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens


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


@dataclass(frozen=True, slots=True)
class Scheme:
    """The colours of a plot: of its ground, of text on it, of an empty cell and of the fullest one, and of policies."""

    ground: str
    text: str
    empty: str
    full: str
    policies: Mapping[str, str]


#: By its name: for light pages, and for dark ones.
SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "light": Scheme(
            "#ffffff",
            "#1b2430",
            "#f2f6fb",
            "#5b9bd8",
            {
                "kv": "#1a7f37",
                "expected-time": "#0969da",
                "dynamo-agentic": "#8250df",
                "round-robin": "#9a6700",
                "random": "#6e7781",
            },
        ),
        "dark": Scheme(
            "#12161c",
            "#e6eaf0",
            "#1a2028",
            "#2f6cab",
            {
                "kv": "#58c39d",
                "expected-time": "#7fb2ea",
                "dynamo-agentic": "#b99bf8",
                "round-robin": "#eba653",
                "random": "#98a3b0",
            },
        ),
    }
)

#: Inches of a cell with the number of one worker, of all other columns of that table, and of the smallest plot.
_CELL_IN, _NAMES_IN, _WIDTH_IN = 0.75, 3.0, 12.0

#: A bar of at least this share of the axis contains its own label.
_LABEL_INSIDE_SHARE = 0.2


def draw(
    path: Path,
    live: Mapping[str, Sequence[LiveOutcome]],
    figures: Mapping[str, Mapping[str, Any]],
    bound: float,
    scheme: Scheme = SCHEMES["light"],
) -> None:
    """Write the plot of act one to a file."""
    plot(live, figures, bound, scheme).savefig(path, dpi=110)


def plot(
    live: Mapping[str, Sequence[LiveOutcome]], figures: Mapping[str, Mapping[str, Any]], bound: float, scheme: Scheme
) -> Any:
    """The plot of act one, a Figure: hits and their bound, times to first token, and tokens computed per worker."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(live)
    workers = sorted({outcome.outcome.worker_id for outcomes in live.values() for outcome in outcomes})
    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    with rc_context({**dict.fromkeys(parts, scheme.text), "font.size": 11, "axes.titlesize": 12}):
        height = 5.2 + 0.4 * len(names)
        figure = Figure(
            (max(_WIDTH_IN, _NAMES_IN + _CELL_IN * len(workers)), height),
            facecolor=scheme.ground,
        )
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        above, below = cast(Any, figure).subfigures(2, 1, height_ratios=(3.6, height - 3.6), facecolor=scheme.ground)
        hits, times = above.subplots(1, 2)
        loads = below.subplots()
        for axes in (hits, times, loads):
            axes.set_facecolor(scheme.ground)
            axes.spines[["top", "right"]].set_visible(False)
        _draw_hits(hits, {name: figures[name]["hit_share"] for name in names}, bound, scheme)
        _draw_times(times, live, scheme)
        _draw_loads(loads, live, workers, scheme)
    return figure


def _draw_hits(axes: Any, shares: Mapping[str, float], bound: float, scheme: Scheme) -> None:
    names, greatest = list(shares), max(bound, *shares.values()) * 100
    bars = axes.barh(names, [100 * share for share in shares.values()], color=[scheme.policies[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, greatest * 1.15)
    for bar, share in zip(bars, shares.values(), strict=True):
        is_inside = 100 * share > _LABEL_INSIDE_SHARE * greatest
        axes.annotate(
            f"{share:.1%}",
            (bar.get_width(), bar.get_y() + bar.get_height() / 2),
            (-6 if is_inside else 6, 0),
            textcoords="offset points",
            ha="right" if is_inside else "left",
            va="center",
            color=scheme.ground if is_inside else scheme.text,
            weight="bold",
        )
    axes.axvline(bound * 100, color=scheme.text, linestyle="--", linewidth=1)
    axes.set_title("Prompt tokens found in a cache")
    axes.set_xlabel(f"%, at most {bound:.1%}: one infinite cache (dashed)")


def _draw_times(axes: Any, live: Mapping[str, Sequence[LiveOutcome]], scheme: Scheme) -> None:
    for name, outcomes in live.items():
        ttft = np.sort([o.outcome.ttft_ms for o in outcomes if o.outcome.ttft_ms is not None])
        shares = np.arange(1, len(ttft) + 1) / len(ttft) * 100
        axes.step(ttft, shares, label=name, color=scheme.policies[name], where="post", linewidth=1.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Time to first token")
    axes.set_xlabel("model ms")
    axes.set_ylabel("% of requests served")
    axes.legend(frameon=False, loc="lower right")


def _draw_loads(axes: Any, live: Mapping[str, Sequence[LiveOutcome]], workers: Sequence[int], scheme: Scheme) -> None:
    """Draw a table with a row for each policy: thousands of tokens by worker, and the greatest over the mean."""
    from matplotlib.colors import LinearSegmentedColormap

    computed = np.zeros((len(live), len(workers)))
    for row, outcomes in enumerate(live.values()):
        for each in outcomes:
            if each.outcome.ttft_ms is not None:
                computed[row, workers.index(each.outcome.worker_id)] += _computed_tokens(each.outcome) / 1000.0
    skew = computed.max(axis=1) / computed.mean(axis=1)
    axes.imshow(computed, LinearSegmentedColormap.from_list("load", [scheme.empty, scheme.full]), aspect="auto", vmin=0)
    for (row, column), thousands in np.ndenumerate(computed):
        axes.text(column, row, f"{thousands:,.0f}", ha="center", va="center")
    for row, ratio in enumerate(skew):
        axes.text(len(workers) - 0.3, row, f"{ratio:.2f}", va="center", weight="bold")
    axes.text(len(workers) - 0.3, -0.65, "max / mean", va="bottom")
    axes.set_yticks(range(len(live)), list(live))
    axes.set_xticks(range(len(workers)), [str(worker) for worker in workers])
    axes.set_xlabel("worker")
    axes.set_title("Tokens computed per worker, in thousands")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
