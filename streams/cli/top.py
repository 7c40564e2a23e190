"""`kvstreams top`: workers, loads, hit share, lag, modes and decisions of a router, live in the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streams.errors import KvStreamsError, ProcessError
from streams.process.options import GroupedCommand, http_urls
from streams.process.output import console
from streams.process.router_calls import router_json

#: A router answers GET /live within milliseconds.
TIMEOUT_S = 5.0

#: Samples that the figures of the header cover. One is taken every 2 s, so this is about a minute.
SAMPLES_SHOWN = 30

#: Workers that fit on a screen; the router orders them by their requests.
WORKERS_SHOWN_MAX = 40

#: Workers in these states get no requests, or their answers may be wrong.
_STYLES = {"exact": "green", "approximate": "yellow", "degraded": "red", "fallback": "yellow"}

COLUMNS = ("worker", "model", "ranks", "state", "requests", "to prefill", "blocks in use", "hit share", "cache")

#: Columns that are left out first where a terminal is too narrow for all of them.
_LEFT_OUT_FIRST = ("ranks", "cache", "model", "to prefill", "blocks in use")

#: Decisions below the workers, the newest first.
DECISIONS_SHOWN = 3

#: Terms that would be shown as 0.
_TERM_MIN = 0.05


@click.command(cls=GroupedCommand)
@click.argument("url", default="http://127.0.0.1:8000", callback=http_urls)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    default=None,
    help="file with a token for the router, which has the right `read`",
)
@click.option(
    "--every", "every_s", type=click.FloatRange(0.2, 60.0), default=2.0, show_default=True, help="seconds between reads"
)
@click.option("--once", is_flag=True, help="print the figures once; also without a terminal")
@click.option("--json", "as_json", is_flag=True, help="print the router's answer of GET /live once, as JSON")
def top(url: str, token_file: Path | None, every_s: float, once: bool, as_json: bool) -> None:
    """Show what the router at URL is doing, live: workers, loads, hit share, lag, modes, decisions. Ctrl-C ends it."""
    from streams.security.files import read_secret

    token = None if token_file is None else read_secret("--token-file", str(token_file))
    live = read_live(url, token)
    if as_json:
        click.echo(orjson.dumps(live, option=orjson.OPT_INDENT_2))
        return
    screen = console()
    if once or not sys.stdout.isatty():
        screen.print(shown(url, live))
        return
    # Not KeyboardInterrupt, which is lost if it is raised while an object is being destroyed.
    over = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: over.set())
    with Live(shown(url, live), console=screen, screen=True, auto_refresh=False) as display:
        while not over.wait(every_s):
            problem = ""
            try:
                live = read_live(url, token)
            except KvStreamsError as exc:
                problem = f"{exc.message}; these are the last figures"
            display.update(shown(url, live, problem), refresh=True)


COMMANDS = (top,)


def read_live(url: str, token: str | None) -> dict[str, Any]:
    """Read GET /live. Raises ProcessError if no router answers as one should."""
    answer = router_json(url, "/live", token, TIMEOUT_S)
    if not isinstance(answer, dict) or not {"router", "samples", "partitions", "workers"} <= answer.keys():
        raise ProcessError(f"what answers at {url} is no router of kvstreams")
    return answer


def shown(url: str, live: Mapping[str, Any], problem: str = "") -> Group:
    """The figures of one answer of GET /live. problem: why there is no newer one."""
    lines = [Text(problem, style="red")] * bool(problem)
    return Group(*lines, *_header(url, live), _Workers(live), *_explanations(live), *_decisions(live))


def _header(url: str, live: Mapping[str, Any]) -> list[RenderableType]:
    router, samples = live["router"], live["samples"]
    state = Text(f"router {url}  mode {router['router_mode']}  ", style="bold")
    if router["not_ready_because"]:
        state.append(f"not ready: {router['not_ready_because']}", style="red")
    else:
        state.append("ready", style="green")
    if not router["bookings_in_sync"]:
        state.append("  bookings not in sync", style="red")
    figures = (
        ("decisions/s", _number(_mean(samples["decisions_per_s"]), 1)),
        ("hit share", _share(_mean(samples["hit_rate"]))),
        ("p50", _number(_last(samples["latency_ms_p50"]), 2, " ms")),
        ("p99", _number(_last(samples["latency_ms_p99"]), 2, " ms")),
        ("requests", _number(_last(samples["requests"]))),
        ("waiting", _number(_last(samples["queue"]))),
        ("imbalance", _number(_last(samples["imbalance"]), 2)),
        ("blocks", _number(router["index_blocks"])),
        ("dead letters", _number(router["dead_letters"])),
        ("engines agreed", _agreed(router)),
    )
    modes = {mode: _mean(rates) or 0.0 for mode, rates in samples["modes"].items()}
    total = sum(modes.values())
    by_mode = "  ".join(f"{mode} {_share(rate / total)}" for mode, rate in modes.items() if rate) if total else "-"
    return [
        state,
        Columns([f"{name} {value}" for name, value in figures], padding=(0, 2)),
        Text(f"modes {by_mode}"),
        Text(f"lag {_lags(live['partitions'])}"),
        *(Text(f"pool {_pool(pool)}") for pool in live.get("pools", ())),
        Text(""),
    ]


def _pool(pool: Mapping[str, Any]) -> str:
    """A worker pool with its signals for autoscalers."""
    name = pool["model"] if pool["role"] == "both" else f"{pool['model']} ({pool['role']})"
    replicas = f"{pool['replicas']} replicas, {pool['replicas_wanted']:.1f} wanted"
    return (
        f"{name}: saturation {_share(pool['saturation'])}, backlog {_number(pool['backlog_ms'], 0, ' ms')}, {replicas}"
    )


def _agreed(router: Mapping[str, Any]) -> str:
    """The share of exact answers whose overlap the engine found, and how many contradict; none of earlier versions."""
    share, n_over = router.get("agreed_share"), router.get("audited", {}).get("over", 0)
    return "-" if share is None else f"{100 * share:.1f} %" + f" ({n_over:,} over)" * bool(n_over)


def _lags(partitions: Sequence[Mapping[str, Any]]) -> str:
    """The greatest lag, and how many partitions have one that is not known."""
    known = [partition for partition in partitions if partition["lag_s"] is not None]
    unknown = len(partitions) - len(known)
    parts = []
    if known:
        worst = max(known, key=lambda partition: partition["lag_s"])
        records = sum(partition["lag_records"] or 0 for partition in known)
        parts.append(f"at most {worst['lag_s']:.2f} s (partition {worst['partition']}), {records} records in all")
    if unknown:
        parts.append(f"unknown for {unknown} of {len(partitions)} partitions")
    return "; ".join(parts) or "-"


class _Workers:
    """The table of workers with as many columns as there is space for."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        self._live = live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(COLUMNS)
        for name in (*_LEFT_OUT_FIRST, None):
            table = self._table(columns)
            if name is None or Measurement.get(console, options.update(width=1000), table).maximum <= options.max_width:
                break
            columns.remove(name)
        yield table
        shown_here = min(len(self._live["workers"]), WORKERS_SHOWN_MAX)
        left_out = self._live["workers_left_out"] + len(self._live["workers"]) - shown_here
        if left_out:
            yield Text(f"and {left_out} more")

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="left" if name in ("worker", "model", "state") else "right", no_wrap=True)
        for row in self._live["workers"][:WORKERS_SHOWN_MAX]:
            state = row["state"] if row["reason"] is None else f"{row['state']}: {row['reason']}"
            cells = {
                "worker": row["worker_id"],
                "model": row["model"],
                "ranks": str(row["ranks"]),
                "state": Text(state, style=_STYLES.get(row["state"], "red")),
                "requests": _number(row["requests"]),
                "to prefill": _number(row["prefill_tokens"]),
                "blocks in use": _number(row["decode_blocks"]),
                "hit share": _share(row["hit_rate"]),
                "cache": _share(row["cache_usage"]),
            }
            table.add_row(*(cells[name] for name in columns))
        return table


def _explanations(live: Mapping[str, Any]) -> list[RenderableType]:
    """What each reason of a worker means, and what to do about it; none of earlier versions."""
    lines: list[RenderableType] = []
    for name, explanation in live.get("explanations", {}).items():
        text = Text(name, style="bold").append(f": {explanation['meaning']} {explanation['remedy']}", style="not bold")
        lines += [Text(), text]
    return lines


def _decisions(live: Mapping[str, Any]) -> list[RenderableType]:
    """The newest decisions of the last minute, each with the terms of its cost; none of earlier versions."""
    meanings = live.get("term_meanings", {})
    lines: list[RenderableType] = []
    for decision in live.get("decisions", ())[:DECISIONS_SHOWN]:
        unit, best = " ms" * (decision["router_mode"] == "expected-time"), decision["next_best"]
        text = Text(f"{decision['age_s']:.0f} s ago  {_rank(decision)}", style="bold")
        parts = [f"held {decision['overlap_blocks']:,} of {decision['request_blocks']:,}"]
        parts.append(f"cost {_term(decision['cost'])}{unit}")
        if best is not None:
            difference = best["cost"] - decision["cost"]
            parts.append(f"next best {_rank(best)} {'+' * (difference >= 0)}{_term(difference)}{unit}")
        text.append(f"  {'  '.join(parts)}  ", style="not bold")
        text.append(decision["mode"], style=_STYLES.get(decision["mode"], "red"))
        terms = [(name, value) for name, value in decision["terms"].items() if value is None or abs(value) >= _TERM_MIN]
        listed = [f"{_term(value)} {meanings.get(name, name)}" for name, value in terms]
        lines += [text, Padding(Text(", ".join(listed) or "all terms are 0", style="dim"), (0, 0, 0, 2), expand=False)]
    return [Text("\ndecisions of the last minute", style="bold"), *lines] if lines else []


def _rank(choice: Mapping[str, Any]) -> str:
    return f"{choice['worker_id']}/{choice['dp_rank']}"


def _term(value: float | None) -> str:
    return _number(value, 0 if value is None or abs(value) >= 10 or value == round(value) else 1)


def _last(values: Sequence[float | None]) -> float | None:
    """The newest known value of the last minute."""
    return next((value for value in reversed(values[-SAMPLES_SHOWN:]) if value is not None), None)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values of the last minute."""
    known = [value for value in values[-SAMPLES_SHOWN:] if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
