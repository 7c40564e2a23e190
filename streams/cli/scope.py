"""`kvstreams config`, `topics`, `schemas` and `reset`: a scope's settings, its topics and records, and emptying it."""

from __future__ import annotations

import json
from dataclasses import fields

import click
from rich.table import Table

from streams.process import log
from streams.process.options import GroupedCommand, GroupedGroup, duration_s, http_urls, with_settings
from streams.process.output import ONE_LINE_WIDTH, console
from streams.security.acls import TOPIC_OPERATIONS, commands
from streams.security.as_code import CodeFormat, as_code
from streams.settings import ENV_PREFIX, AgentSettings, Resolved, Settings, WorkerServerSettings, shown_value
from streams.topics import HISTORY_BYTES_PER_S, HISTORY_READ_BYTES_PER_S
from streams.topics import topics as scope_topics


@click.command(cls=GroupedCommand)
@with_settings
def config(resolved: Resolved) -> None:
    """Print every setting, its value, and where the value came from."""
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "from", "environment", "meaning"):
        table.add_column(column, overflow="fold")
    for setting in fields(Settings):
        table.add_row(
            setting.name,
            shown_value(resolved.settings, setting.name),
            resolved.sources[setting.name],
            ENV_PREFIX + setting.name.upper(),
            str(setting.metadata["help"]),
        )
    console(ONE_LINE_WIDTH).print(table)
    window_s = resolved.settings.history_window_s
    if window_s:
        click.echo(f"history_window_s: {history_cost(window_s)}", err=True)


@click.group(cls=GroupedGroup)
def topics() -> None:
    """Create and check the topics of a scope, and print the ACLs that its processes need."""


@topics.command("create")
@with_settings
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in CodeFormat]),
    help="print the topics, and the least ACLs of a user for each process, as code of this tool, and create nothing",
)
@click.option(
    "--strimzi-cluster",
    default="my-cluster",
    show_default=True,
    metavar="NAME",
    help="with --format strimzi: name of the Kafka resource",
)
def topics_create(resolved: Resolved, form: CodeFormat | None, strimzi_cluster: str) -> None:
    """Create the topics that are missing and check the others. Existing topics are never altered."""
    if form is not None:
        click.echo(as_code(CodeFormat(form), resolved.settings, strimzi_cluster), nl=False)
        return
    from streams.kafka.clients import ensure_topics

    states = ensure_topics(resolved.settings, scope_topics(resolved.settings).all())
    for state in states.values():
        click.echo(f"{state.name}: partitions {state.partitions}, replicas {state.replication}")


@topics.command("describe")
@with_settings
def topics_describe(resolved: Resolved) -> None:
    """Compare every topic's settings with those that the broker has. The exit status is 1 if any differ."""
    from streams.errors import TopicMismatch
    from streams.kafka.clients import check_topic, describe_topics

    specs = scope_topics(resolved.settings).all()
    states = describe_topics(resolved.settings, specs)
    table = Table(box=None, pad_edge=False)
    for column in ("topic", "key", "schema", "partitions", "settings", "broker"):
        table.add_column(column, overflow="fold")
    remedies: list[str] = []
    wrong = False
    for spec in specs:
        state = states[spec.name]
        result = "as wanted"
        if state is None:
            result = "missing: kvstreams topics create"
        else:
            try:
                check_topic(spec, state)
            except TopicMismatch as exc:
                result = "differs, see below"
                remedies.append(str(exc))
        wrong = wrong or result != "as wanted"
        settings = " ".join(f"{key}={value}" for key, value in spec.config.items())
        table.add_row(spec.name, spec.key, spec.schema or "as received", str(spec.partitions), settings, result)
    console().print(table)
    for remedy in remedies:  # not in the table, whose columns would break a command into lines that cannot be copied
        click.echo(remedy)
    if wrong:
        raise SystemExit(1)


@topics.command("window")
@with_settings
@click.argument("duration")
def topics_window(resolved: Resolved, duration: str) -> None:
    """Let the existing topics keep every record for DURATION, for example 1h, so that `kvstreams replay --until` can go
    back that far.

    What was compacted before is lost, so the history begins now. Processes need not be restarted.
    """
    from streams.replay.window import set_window

    seconds = duration_s(duration)
    for state in set_window(resolved.settings, seconds):
        click.echo(f"{state.name}: " + " ".join(f"{key}={value}" for key, value in sorted(state.config.items())))
    if seconds:
        click.echo(history_cost(seconds))


@topics.command("acls")
@with_settings
@click.option("--principal", required=True, metavar="User:NAME", help="the user that the process is for Kafka")
@click.argument("process", type=click.Choice(list(TOPIC_OPERATIONS)))
def topics_acls(resolved: Resolved, principal: str, process: str) -> None:
    """Print the least ACLs that a PROCESS needs in this scope, as commands of Kafka's kafka-acls.

    A worker with its router needs those of both.
    """
    for line in commands(process, resolved.settings, principal):
        click.echo(line)


def history_cost(window_s: float) -> str:
    """What a window costs, in words."""
    gigabytes = window_s * HISTORY_BYTES_PER_S / 1000**3
    minutes = window_s * HISTORY_BYTES_PER_S / HISTORY_READ_BYTES_PER_S / 60
    return (
        f"at 1,000 event records and 1,000 bookings per second, a window of {window_s:g} s keeps up to {gigabytes:.1f} "
        "GB of superseded records, times the replication, "
        f"which take a starting router {minutes:.1f} minutes more to read"
    )


@click.command(cls=GroupedCommand)
@with_settings
@click.option("--force", is_flag=True, help="reset even if another process of the scope is running")
def reset(resolved: Resolved, force: bool) -> None:
    """Empty a scope: its index, loads, events and models. Workers, cordons, pools and dead letters
    stay.

    Using a new topic prefix instead is safer.
    """
    log.configure(resolved.settings)
    empty_scope(resolved.settings, force or resolved.settings.router_reset_force)


def prepare_scope(settings: WorkerServerSettings) -> None:
    """Check the schemas, and empty the scope if the settings say so. Routers and pickers do this before they start."""
    from streams.kafka.schema_compatibility import check_schemas

    check_schemas()
    if settings.router_reset_states:
        empty_scope(settings, settings.router_reset_force, may_be_new=True)


def empty_scope(settings: AgentSettings, force: bool, *, may_be_new: bool = False) -> None:
    """Empty the scope and print what was removed.

    may_be_new: without any topics, there is nothing to do. Otherwise missing topics are an error; they are never
    created here.
    """
    from streams.kafka.clients import missing_topics, require_topics
    from streams.reset import reset_scope

    specs = scope_topics(settings).all()
    if may_be_new and len(missing_topics(settings, specs)) == len(specs):
        click.echo(f"{settings.app_id} has no topics, so there is nothing to reset")
        return
    require_topics(settings, specs)
    done = reset_scope(settings, force=force)
    click.echo(
        f"{settings.app_id} is empty: {done.records} records of the index deleted, "
        f"{done.partitions} partitions of events, loads and requests truncated, {done.copies} local copies removed, "
        f"block sizes of {done.models} models forgotten, {done.feeds} feeds of LMCache begin again"
    )


@click.group(cls=GroupedGroup)
def schemas() -> None:
    """Give the schemas of records to a schema registry, or describe them as AsyncAPI."""


@schemas.command("register")
@with_settings
@click.option(
    "--url",
    required=True,
    callback=http_urls,
    help="address of a registry with the API of Confluent's, as http://HOST:PORT",
)
@click.option("--user", default="", metavar="NAME", help="user name for the registry")
@click.option("--password-file", default="", metavar="FILE", help="file that contains the password of --user")
@click.option("--ca", default="", metavar="FILE", help="PEM file with the authorities of the registry's certificate")
def schemas_register(resolved: Resolved, url: str, user: str, password_file: str, ca: str) -> None:
    """Register the schemas of the scope's records, and print the setting with their ids.

    A topic's schema has the subject TOPIC-value, and further ones TOPIC-NAMESPACE.RECORD.
    """
    from streams.kafka.schema_registry import Registry, register, subjects
    from streams.security.files import read_secret

    if bool(user) != bool(password_file):
        raise click.UsageError("--user and --password-file belong together")
    credentials = (user, read_secret("--password-file", password_file)) if user else None
    registry, ids = Registry(url, credentials, ca), dict[str, int]()
    for subject in subjects(resolved.settings):
        ids[subject.schema] = register(registry, subject)
        click.echo(f"{subject.name}: {subject.schema} has the id {ids[subject.schema]}", err=True)
    click.echo(f"{ENV_PREFIX}SCHEMA_IDS={','.join(f'{name}={number}' for name, number in ids.items())}")


@schemas.command("asyncapi")
@with_settings
def schemas_asyncapi(resolved: Resolved) -> None:
    """Print the scope's topics, their records, and who writes and reads them as an AsyncAPI 3 document."""
    from streams.kafka.asyncapi import asyncapi

    click.echo(json.dumps(asyncapi(resolved.settings), indent=2))


COMMANDS = (config, topics, schemas, reset)
