"""Plots of docs/quality.md, as small SVG files that are readable on light and on dark pages.

What lives here: drawing with matplotlib (kvstreams[local]). What must not: runs (benchmarks.quality).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Neither white nor black has less than a contrast of 3 with any of these. The background is transparent.
TEXT = "#7a828e"
BLUE, ORANGE, GREEN, PURPLE = "#3b82f6", "#d97706", "#1f9d61", "#9061d6"

_STYLE = {
    "svg.fonttype": "none",  # text stays text, which keeps files small
    "svg.hashsalt": "kvstreams",  # equal figures give equal files
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.titlesize": 11,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": TEXT,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@contextmanager
def _figure(path: Path, title: str) -> Iterator[Axes]:
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
        try:
            axes.set_title(title)
            axes.set_axisbelow(True)
            yield axes
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)


def _bars(axes: Axes, groups: Sequence[str], series: Mapping[str, tuple[str, Sequence[float]]], form: str) -> None:
    width = 0.8 / len(series)
    for number, (name, (colour, values)) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(at, values, width * 0.92, label=name, color=colour)
        # On the bars, where no line crosses them.
        axes.bar_label(bars, fmt=form, fontsize=8, label_type="center", color="white")
    axes.set_xticks(range(len(groups)), groups)


def _legend(axes: Axes) -> None:
    """Explain the colours below the plot, where nothing is drawn."""
    _, names = axes.get_legend_handles_labels()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2 if axes.get_xlabel() else -0.1), ncols=min(3, len(names)))


def lengths(folder: Path, rows: Sequence[tuple[int, float, float]]) -> Path:
    """Times to the first token with and without reuse. rows: prompt tokens, ms without it, ms with 90 % cached."""
    path = folder / "reuse.svg"
    with _figure(path, "Time to the first token on an idle engine") as axes:
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.set_xlabel("prompt")
        series = {
            "nothing cached": (ORANGE, [row[1] for row in rows]),
            "90 % cached": (BLUE, [row[2] for row in rows]),
        }
        _bars(axes, [f"{row[0]:,} tokens" for row in rows], series, "%.0f")
        axes.set_ylim(10.0, max(1000.0, *(row[1] for row in rows)))
        axes.yaxis.set_major_formatter("{x:g}")
        _legend(axes)
    return path


def pools(folder: Path, without_ms: float, rows: Mapping[tuple[bool, bool], Mapping[int, float]]) -> Path:
    """Mean time to the first token by size of the pool. rows: by (shared link, credited), ms by size."""
    path = folder / "pools.svg"
    styles = {
        (False, True): ("own link of 64 GB/s, credited", BLUE, "o-"),
        (False, False): ("own link, router does not know it", BLUE, "o:"),
        (True, True): ("one link of 64 GB/s for all, credited", ORANGE, "s-"),
        (True, False): ("one link for all, router does not know it", ORANGE, "s:"),
    }
    with _figure(path, "Sessions of agents whose histories take twice the device memory") as axes:
        for key, (name, colour, form) in styles.items():
            sizes = sorted(rows[key])
            axes.plot([0, *sizes], [without_ms, *(rows[key][size] for size in sizes)], form, color=colour, label=name)
        axes.set_xlabel("pool, times the device memory of the fleet")
        axes.set_ylabel("mean time to the first token, ms")
        axes.set_xticks([0, *sizes])
        axes.set_ylim(bottom=0)
        axes.legend()
    return path


def conversation(folder: Path, rows: Mapping[str, Mapping[str, float]]) -> Path:
    """Mean times to the first token relative to the preset's. rows: by load and policy."""
    path = folder / "conversation.svg"
    policies = {"dynamo-tuned": PURPLE, "expected-time": GREEN, "expected-time+queue": BLUE}
    with _figure(path, "Mean time to the first token, relative to Dynamo's best preset") as axes:
        series = {name: (colour, [row[name] for row in rows.values()]) for name, colour in policies.items()}
        _bars(axes, list(rows), series, "%.2f")
        axes.axhline(1.0, color=TEXT, linewidth=1, linestyle="--")
        _legend(axes)
    return path


def live(folder: Path, result: Mapping[str, Any]) -> Path:
    """Hit shares of the demo's live runs and of the laboratory. result: the demo's result.json."""
    path = folder / "live.svg"
    names = list(result["policies"])
    with _figure(path, "Share of prompt tokens that engines found in a cache") as axes:
        series = {
            "live, on a real Kafka": (BLUE, [100.0 * result["policies"][name]["hit_share"] for name in names]),
            "laboratory, same choices": (ORANGE, [100.0 * result["followed"][name]["hit_share"] for name in names]),
            "laboratory, its own": (PURPLE, [100.0 * result["offline"][name]["hit_share"] for name in names]),
        }
        _bars(axes, names, series, "%.1f")
        bound = 100.0 * result["bound"]["infinite_cache_hit_share"]
        axes.axhline(bound, color=TEXT, linewidth=1, linestyle="--", label="one infinite cache")
        axes.set_ylabel("%")
        _legend(axes)
    return path
