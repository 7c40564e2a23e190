"""`kvstreams doctor`: what is wrong with a fleet, and how to fix it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import orjson

from streams.errors import KvStreamsError
from streams.process.options import GroupedCommand, http_urls, with_settings
from streams.settings import Resolved

#: Exit status of `doctor`: 0 nothing is wrong, FOUND, COULD_NOT_RUN (which is also that of a wrong option).
FOUND = 1
COULD_NOT_RUN = 2

_GROUPS = (
    *("kafka", "topics", "schemas", "index", "registry", "leases", "lmcache", "dead-letters", "engines"),
    *("routers", "clocks", "memory", "versions"),
)


class _OwnStatus(GroupedCommand):
    """A command whose errors end it with COULD_NOT_RUN: for scripts, 1 means that something is wrong with the fleet."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a KvStreamsError is one line."""
        try:
            return super().invoke(ctx)
        except KvStreamsError as exc:
            click.echo(f"kvstreams: {exc}", err=True)
            raise SystemExit(COULD_NOT_RUN) from exc


@click.command(cls=_OwnStatus)
@partial(with_settings, without=("router",))  # --router names a router here
@click.option(
    "--router", "routers", multiple=True, metavar="URL", callback=http_urls, help="a router to examine; repeat for each"
)
@click.option(
    "--metrics",
    "pages",
    multiple=True,
    metavar="URL",
    callback=http_urls,
    help="metrics of a worker or a bridge (metrics_port) to examine; repeat for each",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    default=None,
    help="file with a token for routers and metrics; it needs the right `read`, and `route` for --probe",
)
@click.option(
    "--engine-key-file", type=click.Path(path_type=Path), default=None, help="file with the key that engines require"
)
@click.option(
    "--probe",
    is_flag=True,
    help="send each engine a prompt of two blocks, and compare its hashes of them with those that a router computes",
)
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="MODEL=PATH",
    help="files of a model's tokenizer, as for `kvstreams front`; each engine's /tokenize is compared with them",
)
@click.option(
    "--verify",
    "verifies",
    is_flag=True,
    help="compare what each router has with one partition of the tables, the registry and the bookings in the topics",
)
@click.option("--skip", multiple=True, type=click.Choice(_GROUPS), help="a group of checks to leave out")
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(0.5, 600.0),
    default=None,
    metavar="SECONDS",
    help="longest time to wait for records of workers and bridges  [default: until their silence is certain]",
)
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON, also if there are none")
def doctor(
    resolved: Resolved,
    routers: tuple[str, ...],
    pages: tuple[str, ...],
    token_file: Path | None,
    engine_key_file: Path | None,
    probe: bool,
    verifies: bool,
    tokenizers: tuple[str, ...],
    skip: tuple[str, ...],
    watch_s: float | None,
    as_json: bool,
) -> None:
    """Find out what is wrong with a fleet, and how to fix it. Prints nothing if all is well.

    It reads Kafka, the registered engines and the given routers, and changes nothing; only --probe makes engines
    compute. The exit status is 0 if nothing is wrong, 1 if something is, and 2 if the doctor could not run.
    """
    from streams import warming
    from streams.doctor import findings
    from streams.doctor.run import Order, examine
    from streams.security.files import read_secret

    if verifies and not routers:
        raise click.UsageError("--verify compares routers with the topics; name them with --router")
    by_model = {}
    if tokenizers:
        from streams.prompts.engine_keys import parse_by_model

        by_model = parse_by_model("--tokenizer", tokenizers)
    order = Order(
        routers=routers,
        pages=pages,
        token=None if token_file is None else read_secret("--token-file", str(token_file)),
        engine_key=None if engine_key_file is None else read_secret("--engine-key-file", str(engine_key_file)),
        probe=probe,
        tokenizers=by_model,
        skip=frozenset(map(findings.Group, skip)),
        watch_s=watch_s,
        verify=resolved.settings if verifies else None,
    )
    warming.warm(warming.HASHING)
    report = examine(resolved.settings, order)
    if as_json:
        click.echo(orjson.dumps(findings.as_json(report), option=orjson.OPT_INDENT_2))
    else:
        click.echo(findings.as_text(report.findings), nl=False)
    sys.stdout.flush()
    if report.findings:
        raise SystemExit(FOUND)


COMMANDS = (doctor,)
