"""`kvstreams explain`: why a request was routed to its rank, by the decision log (docs/decisions.md)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from streams.process.options import SINCE_HELP, GroupedCommand, time_ms, with_settings
from streams.process.output import console
from streams.settings import Resolved

if TYPE_CHECKING:
    from streams.decision_log.reading import ReadLog


@click.command(cls=GroupedCommand)
@with_settings
@click.argument("request_id")
@click.option("--since", default="24h", show_default=True, help=SINCE_HELP)
def explain(resolved: Resolved, request_id: str, since: str) -> None:
    """Explain in words why a request was routed to its rank: what was known, every candidate's terms, what decided.

    It reads the decision log, which routers write with decision_log=on. The exit status is 1 if the log does not have
    the request.
    """
    from rich.table import Table

    from streams.decision_log.reading import read_log
    from streams.decision_log.words import candidate_rows, explanation, time_text

    name = request_id.encode("utf-8", "surrogatepass")
    log = read_log(resolved.settings, time_ms(since, time.time_ns() // 1_000_000), lambda value: name in value)
    decisions = sorted(
        (decision for batch in log.batches for decision in batch.decisions() if decision.request_id == request_id),
        key=lambda decision: decision.decided_at_ms,
    )
    reports = [report for batch in log.batches for report in batch.reports if report.request_id == request_id]
    if log.warning:
        click.echo(f"kvstreams: {log.warning}", err=True)
    if not decisions:
        click.echo(f"kvstreams: {_not_found(log, request_id, since, time_text)}", err=True)
        raise SystemExit(1)
    for position, decision in enumerate(decisions):
        until_ms = decisions[position + 1].decided_at_ms if position + 1 < len(decisions) else None
        if position:
            click.echo("")
        own = [
            each
            for each in reports
            if decision.decided_at_ms <= (each.ended_at_ms or each.prefilled_at_ms or decision.decided_at_ms)
            and (until_ms is None or (each.ended_at_ms or each.prefilled_at_ms) <= until_ms)
        ]
        for line in explanation(decision, own):
            click.echo(line)
        header, rows = candidate_rows(decision)
        table = Table(box=None, pad_edge=False)
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        click.echo("")
        console().print(table)
        left_out = decision.n_eligible - len(rows)
        if left_out > 0:
            click.echo(f"{left_out} more candidates were not recorded; decision_log_candidates sets how many are.")


def _not_found(log: ReadLog, request_id: str, since: str, time_text: Any) -> str:
    from streams.decision_log.reading import nothing_recorded

    if not log.n_records:
        return nothing_recorded(since)
    return (
        f"no decision for request {request_id!r} is recorded since {since}. The log has records from "
        f"{time_text(log.first_ms)} to {time_text(log.last_ms)}; a decision is recorded within a second. "
        "Routers without decision_log=on record nothing, decision_log_share below 1 leaves requests out, a repeated "
        "request id gets its existing rank without a decision, and a request that is refused has none"
    )


COMMANDS = (explain,)
