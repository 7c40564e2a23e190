"""Plots of runs: times to the first token, reuse over time, and load by worker.

What lives here: drawing with matplotlib, which is installed with `kvstreams[local]`. What must not: figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streams.errors import SettingsError
from streams.lab.simulation.experiment import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Requests over which reuse is averaged, as a share of all.
_WINDOW_SHARE = 0.05


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw three files per load into a folder; return their paths. Raises SettingsError without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as exc:
        raise SettingsError(
            "plots need matplotlib, which is not installed", remedy="pip install 'kvstreams[local]'"
        ) from exc
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for concurrency in dict.fromkeys(row.concurrency for row in rows):
        these = [row for row in rows if row.concurrency == concurrency]
        load = f"{concurrency} requests at once" if concurrency else f"by time, x{these[0].speedup:g}"
        for name, title, draw in _PLOTS:
            written.append(_draw(folder / f"{name}-{concurrency}.png", f"{title} ({load})", draw, these))
    return written


def _draw(path: Path, title: str, draw: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row]) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        draw(axes, rows)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
    return path


def _ttft(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        ttft = np.sort(row.result.ttft_ms)
        axes.plot(ttft, np.arange(1, len(ttft) + 1) / len(ttft), label=row.policy)
    axes.set(xscale="log", xlabel="time to the first token, ms", ylabel="share of requests")
    axes.legend()


def _reuse(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        result = row.result
        window = max(1, int(len(result.n_in) * _WINDOW_SHARE))
        order = np.argsort(result.first_ms)
        reused = np.convolve(result.reused_tokens[order], np.ones(window), "valid")
        tokens = np.convolve(result.n_in[order], np.ones(window), "valid")
        axes.plot(result.first_ms[order][window - 1 :] / 1000.0, reused / tokens, label=row.policy)
    axes.set(xlabel="simulated time, s", ylabel="share of prompt tokens that were cached")
    axes.legend()


def _load(axes: Axes, rows: Sequence[Row]) -> None:
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        busy = np.array(row.result.busy_ms) / row.result.ended_ms
        axes.bar(np.arange(1, len(busy) + 1) + (index - (len(rows) - 1) / 2) * width, busy, width, label=row.policy)
    axes.set(xlabel="worker", ylabel="share of time in which it computes")
    axes.legend()


_PLOTS: tuple[tuple[str, str, Callable[[Any, Sequence[Row]], None]], ...] = (
    ("ttft", "Time to the first token", _ttft),
    ("reuse", "Reuse over time", _reuse),
    ("load", "Load by worker", _load),
)
