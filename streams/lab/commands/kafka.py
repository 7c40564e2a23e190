"""`kvstreams kafka`: a Kafka for one machine. `start_kafka` serves `demo` and `up` as well."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from streams.process.options import GroupedGroup, key_and_value
from streams.settings import CONFIG_ENV, ENV_PREFIX

if TYPE_CHECKING:
    from streams.lab.kafka.broker import KafkaState

KAFKA_DIRECTORY = Path(".kvstreams/kafka")

#: Each broker takes half a gigabyte, and more of them than replicas show nothing new.
BROKERS_MAX = 7

_directory = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=KAFKA_DIRECTORY,
    show_default=True,
    help="folder of its data, logs and state",
)


@click.group(cls=GroupedGroup)
def kafka() -> None:
    """Run a real Kafka on this machine, for development and the demo."""


@kafka.command("up")
@_directory
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="broker property, for example log.cleaner.threads=2; repeat for each",
)
@click.option(
    "--secure",
    is_flag=True,
    help="require TLS, SASL and ACLs of clients; certificates and passwords are made in the folder",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, BROKERS_MAX),
    help="brokers, which cannot be changed later: with 3, topics may have 3 replicas, and one broker may be lost; "
    "by default as many as the folder has, and 1 in a new one",
)
def kafka_up(directory: Path, overrides: tuple[str, ...], secure: bool, brokers: int | None) -> None:
    """Start Kafka unless it is running already. The first start downloads it."""
    state = start_kafka(directory, dict(key_and_value(text) for text in overrides), secure=secure, brokers=brokers)
    verb = "is already running" if state.reused else "is up"
    click.echo(f"Kafka {state.version} {verb} at {state.bootstrap} ({_processes(state)})")
    for note in state.notes:
        click.echo(note)
    if secure:
        from streams.lab.kafka.broker import SECURE_FOLDER

        # A variable takes precedence over the file.
        names = (ENV_PREFIX + name.upper() for name in state.settings)
        exported = [name for name in names if name in os.environ]
        first = f"unset {' '.join(exported)} && " if exported else ""
        settings = state.directory / SECURE_FOLDER / "kvstreams.toml"
        click.echo(f"use it:   {first}export {CONFIG_ENV}={settings}{_replication(state)}")
    else:
        click.echo(f"use it:   export {ENV_PREFIX}KAFKA={state.bootstrap}{_replication(state)}")
    where = "" if directory == KAFKA_DIRECTORY else f" --directory {shlex.quote(str(directory))}"
    click.echo(f"stop it:  kvstreams kafka down{where}")


@kafka.command("down")
@_directory
def kafka_down(directory: Path) -> None:
    """Stop Kafka. Its data and ports are kept for the next start."""
    from streams.lab.kafka.broker import LocalKafkaConfig
    from streams.lab.kafka.cluster import local_kafka

    was_running = local_kafka(LocalKafkaConfig(directory)).down()
    click.echo("Kafka is down" if was_running else "no Kafka was running here")


@kafka.command("status")
@_directory
def kafka_status(directory: Path) -> None:
    """Print whether Kafka is running, and its address. The exit status is 1 if it is not running."""
    from streams.lab.kafka.broker import LocalKafkaConfig
    from streams.lab.kafka.cluster import local_kafka

    local = local_kafka(LocalKafkaConfig(directory))
    state = local.status()
    if state is None:
        click.echo(f"no Kafka runs in {directory}")
        raise SystemExit(1)
    status = "answers" if local.answers() else "is running but does not answer"
    click.echo(f"Kafka {state.version} {status} at {state.bootstrap} ({_processes(state)})")


def _processes(state: KafkaState) -> str:
    pids = ", ".join(map(str, state.pids))
    return f"{'pid' if len(state.pids) == 1 else 'pids'} {pids}, {state.java}"


def _replication(state: KafkaState) -> str:
    """The setting that makes use of several brokers, as a part of the command that exports them."""
    return f" {ENV_PREFIX}REPLICATION={state.replication}" if state.replication > 1 else ""


def start_kafka(
    directory: Path, overrides: dict[str, str] | None = None, *, secure: bool = False, brokers: int | None = None
) -> KafkaState:
    """Start the local Kafka and return its KafkaState. Shows progress during the download of its jars and the start."""
    from streams.lab.kafka.broker import LocalKafkaConfig
    from streams.lab.kafka.cluster import local_kafka
    from streams.process.progress import shown

    local = local_kafka(LocalKafkaConfig(directory, overrides or {}, secure=secure), brokers)
    with shown(Console(stderr=True), "starting Kafka") as step:

        def downloaded(done: int, total: int, name: str) -> None:
            if done < total:
                step.name = "downloading Kafka"
                step.update(done, name, total)
            else:
                step.name, step.total, step.doing = "starting Kafka", None, ""

        return local.up(downloaded)


COMMANDS = (kafka,)
