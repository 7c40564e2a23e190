"""The report of a benchmark: rows of medians with ratios, and whether bars are met, as a table and as JSON.

What lives here: samples, rows, bars, the machine's description. What must not: measuring.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

#: The series with which every other series of the same metric is compared.
OURS = "ours"


#: Columns of a table that is written to a file or a pipe. In rich's 80 columns, figures would be cut off.
FILE_COLUMNS = 160


def wide_console() -> Console:
    """Return the console for a report: as wide as the terminal, or wide enough for every figure."""
    return Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)


@dataclass(frozen=True, slots=True)
class Row:
    """One of our figures and one peer's; both are medians over `repeats`. ratio: ours / theirs, less is better.

    peer, peer_value, ratio: None if the figure has no peer or the peer is missing.
    """

    case: str
    metric: str
    unit: str
    value: float
    peer: str | None
    peer_value: float | None
    ratio: float | None
    repeats: int


@dataclass(frozen=True, slots=True)
class Bar:
    """One requirement, and whether the rows meet it. held: None if the rows that it needs are missing."""

    name: str
    held: bool | None
    figures: str

    @property
    def verdict(self) -> str:
        """The verdict as text: "met", "not met" or "not measured"."""
        return "not measured" if self.held is None else "met" if self.held else "not met"


class Samples:
    """Figures by case, metric and series, one per repetition."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, str], str] = {}
        self._values: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(self, case: str, metric: str, unit: str, series: str, value: float) -> None:
        """Add the figure of one repetition."""
        self._units[case, metric] = unit
        self._values.setdefault((case, metric), {}).setdefault(series, []).append(value)

    def rows(self) -> list[Row]:
        """One row for each peer of each metric, and one row without a peer for each metric that has none.

        A metric that only peers have, because ours could not be measured, has no row.
        """
        rows: list[Row] = []
        for (case, metric), series in self._values.items():
            if OURS not in series:
                continue
            unit = self._units[case, metric]
            own = series[OURS]
            value = statistics.median(own)
            peers = {name: values for name, values in series.items() if name != OURS}
            for name, values in peers.items():
                theirs = statistics.median(values)
                repeats = min(len(own), len(values))
                rows.append(Row(case, metric, unit, value, name, theirs, value / theirs if theirs else None, repeats))
            if not peers:
                rows.append(Row(case, metric, unit, value, None, None, None, len(own)))
        return rows


@dataclass(slots=True)
class Report:
    """All results of one run of a benchmark. missing: peers and workloads that were left out, each with its reason."""

    benchmark: str
    versions: dict[str, str]
    rows: list[Row]
    bars: list[Bar] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """Print the table, missing parts, errors, and each bar."""
        table = Table(title=f"{self.benchmark}: medians; ratio is ours / peer", title_justify="left")
        for name in ("case", "metric"):
            table.add_column(name, no_wrap=True)
        for name in ("ours", "peer's", "ratio"):
            table.add_column(name, justify="right")
        table.add_column("unit")
        table.add_column("peer", overflow="fold")
        previous = None
        for row in self.rows:
            if previous is not None and row.case != previous:
                table.add_section()
            previous = row.case
            table.add_row(
                row.case,
                row.metric,
                _figure(row.value),
                _figure(row.peer_value),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                row.unit,
                row.peer or "",
            )
        console.print(table)
        for line in self.missing:
            console.print(f"missing: {line}", markup=False)
        for line in self.wrong:
            console.print(f"wrong: {line}", style="bold red", markup=False)
        for bar in self.bars:
            console.print(f"{bar.verdict:>12}  {bar.name}: {bar.figures}", markup=False, highlight=False)

    def write(self, path: Path) -> None:
        """Write the report as one JSON object."""
        figures = {
            "benchmark": self.benchmark,
            "machine": machine(),
            "versions": self.versions,
            "rows": [asdict(row) for row in self.rows],
            "bars": [{"name": bar.name, "verdict": bar.verdict, "figures": bar.figures} for bar in self.bars],
            "missing": self.missing,
            "wrong": self.wrong,
        }
        path.write_text(json.dumps(figures, indent=1) + "\n")


def ratio_bar(name: str, rows: Iterable[Row], most: float) -> Bar:
    """Require each of these rows' ratio to be at most `most`."""
    with_ratio = [row for row in rows if row.ratio is not None]
    worst = max(with_ratio, key=lambda row: row.ratio or 0.0, default=None)
    if worst is None or worst.ratio is None:
        return Bar(name, None, f"at most {most:g}")
    above = sum((row.ratio or 0.0) > most for row in with_ratio)
    figures = f"at most {most:g}; worst {worst.ratio:.2f} at {worst.case}, {above} of {len(with_ratio)} above"
    return Bar(name, worst.ratio <= most, figures)


def value_bar(name: str, rows: Iterable[Row], most: float, unit: str) -> Bar:
    """Require each of these rows' own value to be at most `most`."""
    worst = max(rows, key=lambda row: row.value, default=None)
    if worst is None:
        return Bar(name, None, f"at most {most:g} {unit}")
    figures = f"at most {most:g} {unit}; worst {_figure(worst.value)} at {worst.case}"
    return Bar(name, worst.value <= most, figures)


def select(rows: Sequence[Row], metric: str, peer: str = "", where: Callable[[str], bool] | None = None) -> list[Row]:
    """The rows of a metric whose peer's name contains `peer` and whose case passes `where`."""
    return [
        row for row in rows if row.metric == metric and peer in (row.peer or "") and (where is None or where(row.case))
    ]


def machine() -> dict[str, str | int | float]:
    """Describe the properties of this machine that figures depend on, without anything that identifies it."""
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def installed(*packages: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
