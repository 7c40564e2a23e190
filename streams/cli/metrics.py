"""`kvstreams metrics`: every metric that is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from streams.process.options import GroupedCommand
from streams.process.output import ONE_LINE_WIDTH, console

if TYPE_CHECKING:
    from streams.process.metrics import Metric


@click.command(cls=GroupedCommand)
def metrics() -> None:
    """Print every Prometheus metric: its name, kind, meaning and labels."""
    from streams.process.metrics import label_text

    for title, declared in declared_metrics().items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("metric", "kind", "meaning", "labels"):
            table.add_column(column, overflow="fold")
        for metric in declared:
            labels = "; ".join(map(label_text, metric.labels)).replace("`", "")
            table.add_row(metric.name, metric.kind, metric.help.replace("`", ""), labels)
        console(ONE_LINE_WIDTH).print(table)


def declared_metrics() -> Mapping[str, Sequence[Metric[Any]]]:
    """The declarations of every kind of process, by the heading that the docs have for it."""
    from streams.engines.bridge_metrics import BRIDGE_METRICS
    from streams.frontend.metrics import FRONT_METRICS
    from streams.process.process_metrics import PROCESS_METRICS
    from streams.router_api.http.metrics import ROUTER_METRICS
    from streams.tables.agent_metrics import AGENT_METRICS

    declared: dict[str, Sequence[Metric[Any]]] = {
        "Router": ROUTER_METRICS,
        "Faust worker": AGENT_METRICS,
        "Bridge": BRIDGE_METRICS,
        "Front": FRONT_METRICS,
    }
    with suppress(ImportError):  # the extra `picker` is not installed
        from streams.picker.metrics import PICKER_METRICS

        declared["Picker"] = PICKER_METRICS
    return {**declared, "Every process": PROCESS_METRICS}


COMMANDS = (metrics,)
