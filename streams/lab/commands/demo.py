"""`kvstreams demo`, `up` and `warm`: everything on one machine, and compiling the kernels ahead of time."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from streams.errors import SettingsError
from streams.lab.commands.kafka import KAFKA_DIRECTORY, start_kafka
from streams.process.options import GroupedCommand
from streams.process.output import console

DEMO_DIRECTORY = Path(".kvstreams/demo")
UP_DIRECTORY = Path(".kvstreams/up")

_kafka_directory = click.option(
    "--kafka-directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=KAFKA_DIRECTORY,
    show_default=True,
    help="folder of the Kafka to use, as in kvstreams kafka up",
)


@click.command(cls=GroupedCommand)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    default=None,
    help="trace in Mooncake's format  [default: a generated one]",
)
@click.option("--workers", default=8, show_default=True, help="number of simulated engines")
@click.option("--requests", default=400, show_default=True, help="requests per policy")
@click.option(
    "--speedup",
    default=None,
    type=float,
    help="model seconds per second  [default: chosen for this machine]",
)
@click.option(
    "--blocks", default=16384, show_default=True, help="capacity of each engine's cache, in blocks of 16 tokens"
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="kv, expected-time, dynamo-agentic, round-robin or random; repeat for several  [default: all of them]",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEMO_DIRECTORY,
    show_default=True,
    help="folder of its logs and results",
)
@click.option(
    "--secure",
    is_flag=True,
    help=f"use a Kafka that requires TLS, SASL and ACLs, by default in {KAFKA_DIRECTORY}-secure, and require tokens "
    "for the HTTP API",
)
@click.option("--lmcache", is_flag=True, help="the pool of act three stores chunks and reports them as LMCache does")
@_kafka_directory
def demo(
    trace: Path | None,
    workers: int,
    requests: int,
    speedup: float | None,
    blocks: int,
    policies: tuple[str, ...],
    directory: Path,
    secure: bool,
    lmcache: bool,
    kafka_directory: Path,
) -> None:
    """Compare routing policies on this machine, with simulated engines and a real Kafka."""
    from streams.lab.demo.run import DEMO_POLICIES, DemoConfig, require_extra, run_demo
    from streams.warming import WORKER
    from streams.warming import warm as warm_kernels

    require_extra("psutil", "matplotlib", *(("cryptography",) if secure else ()))
    if secure and kafka_directory == KAFKA_DIRECTORY:
        kafka_directory = Path(f"{KAFKA_DIRECTORY}-secure")
    chosen = policies or DEMO_POLICIES
    unknown = [policy for policy in chosen if policy not in DEMO_POLICIES]
    if unknown:
        raise SettingsError(
            f"--policy: {unknown[0]!r} is not a policy of the demo", remedy=f"Use {', '.join(DEMO_POLICIES)}"
        )
    if "kv" not in chosen:
        raise SettingsError("--policy: kv must be among the policies, since the others are compared with it")
    config = DemoConfig(
        trace=trace,
        workers=workers,
        requests=requests,
        speedup=speedup,
        directory=directory,
        kafka_directory=kafka_directory,
        blocks=blocks,
        policies=tuple(policy for policy in DEMO_POLICIES if policy in chosen),
        secure=secure,
        lmcache=lmcache,
    )
    warm_kernels(WORKER)  # once, here: otherwise each of the demo's processes would compile the kernels
    run_demo(config, start_kafka)


@click.command(cls=GroupedCommand)
@click.option("--workers", default=2, show_default=True, help="number of simulated engines")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=UP_DIRECTORY,
    show_default=True,
    help="folder of its logs",
)
@_kafka_directory
def up(workers: int, directory: Path, kafka_directory: Path) -> None:
    """Run everything on this machine in the foreground, to try the HTTP API."""
    from streams.lab.demo.run import require_extra, run_up
    from streams.warming import WORKER
    from streams.warming import warm as warm_kernels

    require_extra("psutil")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops a service ends it as Ctrl-C does
    warm_kernels(WORKER)
    run_up(workers, directory, kafka_directory, start_kafka)


@click.command(cls=GroupedCommand)
def warm() -> None:
    """Compile the kernels, once per installation. Otherwise the first process that starts compiles them."""
    from streams.warming import warm as warm_kernels

    if not warm_kernels(console=console()):
        click.echo("no kernel had to be compiled")


COMMANDS = (demo, up, warm)
