"""`kvstreams replay`: what a router knew, rebuilt from the topics of a scope (docs/replay.md)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streams.errors import InvalidRequest
from streams.process.options import GroupedCommand, OutputFile, http_urls, time_ms, with_settings
from streams.settings import Resolved, RouterServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streams.kafka.log_offsets import Place
    from streams.replay.cuts import Cut
    from streams.replay.rebuilding import Replay
    from streams.router_api.messages.requests import RouteRequest
    from streams.topics import TopicSpec


@click.command(cls=GroupedCommand)
@with_settings
@click.option(
    "--until",
    metavar="TIME|@FILE",
    default=None,
    help="end at a moment, for example 15m (ago), 14:03 or 2026-01-31T14:03 (UTC), or at the offsets in a file that "
    "was made with --json or --out  [default: everything]",
)
@click.option(
    "--route",
    "request_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="answer this body of POST /route by what is replayed, with the terms of every candidate, as JSON",
)
@click.option(
    "--verify",
    "url",
    metavar="URL",
    default=None,
    callback=lambda context, parameter, value: value and http_urls(context, parameter, value),
    help="compare a router that runs with the topics, at the same offsets; the exit status is 1 if anything differs",
)
@click.option(
    "--out",
    "out_file",
    metavar="FILE",
    type=OutputFile(),
    default=None,
    help="write the state as JSON lines, without tokens or text (docs/replay.md)",
)
@click.option(
    "--into",
    metavar="SCOPE",
    default=None,
    help="load the state into the scope with this topic_prefix, and follow until this process ends (docs/replay.md)",
)
@click.option(
    "--into-kafka",
    metavar="ADDRESS",
    default=None,
    help="address of that scope's Kafka, for which the same credentials are used  [default: the same Kafka]",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    default=None,
    help="file with a token for that router, which has the right `read`",
)
@click.option("--json", "as_json", is_flag=True, help="print the summary as JSON")
def replay(
    resolved: Resolved,
    until: str | None,
    request_file: Path | None,
    url: str | None,
    out_file: Path | None,
    into: str | None,
    into_kafka: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Rebuild what a router knew from the topics of a scope, and print how much that is.

    It reads Kafka only, with the readers and folds of a router, and changes nothing. With --route, it prints what a
    router with these settings would have answered. With --verify, it compares a router with the topics. With --out, it
    writes the state to a file. With --into, it copies the scope to another one, whose partitions may differ in number,
    until it is stopped.
    """
    import orjson
    from rich.console import Console

    from streams import warming
    from streams.kafka.clients import require_topics
    from streams.process import log
    from streams.process.progress import shown
    from streams.replay.answering import answer_at
    from streams.replay.rebuilding import Replay
    from streams.replay.state_lines import write_lines
    from streams.replay.summary import as_text, summary
    from streams.security.files import read_secret
    from streams.topics import topics

    if into is not None:
        if as_json or any(each is not None for each in (until, request_file, url, out_file, token_file)):
            raise click.UsageError("--into copies what a scope has now; it cannot be combined with the other options")
        _move(resolved.settings, into, into_kafka)
        return
    for option, given, needed, other in (
        ("--into-kafka", into_kafka, "--into", into),
        ("--token-file", token_file, "--verify", url),
    ):
        if given is not None and other is None:
            raise click.UsageError(f"{option} is of use with {needed} only")
    if url is not None and any(each is not None for each in (until, request_file, out_file)):
        raise click.UsageError("--verify is about what a router has now; it cannot be combined with the other options")
    # What cannot be read is refused before the topics are read, which may take minutes.
    token = None if token_file is None else read_secret("--token-file", str(token_file))
    request = None if request_file is None else _request_of(request_file)
    settings = resolved.settings
    log.configure(settings)
    errors = Console(stderr=True)
    require_topics(settings, topics(settings).all())
    replayed = Replay(settings)
    cut = _cut(settings, replayed.router.feeds.topics, until)
    warming.warm(warming.ROUTER)
    with shown(errors, "offsets", 0) as step:
        replayed.advance(cut, step)
    if url is not None:
        _verify(replayed, url, token, as_json=as_json)
        return
    if out_file is not None:
        with shown(errors, "partitions", settings.partitions) as step:
            write_lines(replayed, out_file, step)
    if request is not None:
        click.echo(orjson.dumps(answer_at(replayed, request), option=orjson.OPT_INDENT_2))
        return
    values = summary(replayed)
    click.echo(orjson.dumps(values, option=orjson.OPT_INDENT_2) if as_json else as_text(values).rstrip("\n"))


def _move(settings: RouterServerSettings, topic_prefix: str, kafka: str | None) -> None:
    """Copy a scope to another one until a signal."""
    import signal
    import threading
    from contextlib import closing

    from rich.console import Console

    from streams.kafka.clients import describe_topics, require_topics
    from streams.process import log
    from streams.process.progress import shown
    from streams.replay.moving import Move
    from streams.topics import topics

    log.configure(settings)
    new = replace(settings, topic_prefix=topic_prefix, kafka=kafka or settings.kafka)
    if (new.kafka, new.topic_prefix) == (settings.kafka, settings.topic_prefix):
        raise click.UsageError("--into names the scope that is read")
    require_topics(settings, topics(settings).all())
    source = topics(new).kv_events
    state = describe_topics(new, (source,))[source.name]
    if state is not None:
        new = replace(new, partitions=state.partitions)
    # Their settings are those of the new scope's workers, which check them: it may have another profile or window.
    require_topics(new, [replace(spec, config={}) for spec in topics(new).all()])
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with closing(Move(settings, new)) as move:
        with shown(Console(stderr=True), "partitions", settings.partitions) as step:
            move.load(stopping.is_set, step)
        move.follow(stopping.is_set)


def _verify(replayed: Replay, url: str, token: str | None, *, as_json: bool) -> None:
    """Compare a router, print what differs, and end with status 1 if anything does."""
    import orjson
    from rich.console import Console

    from streams.process.progress import shown
    from streams.process.router_calls import router_json
    from streams.replay.verifying import STATE_TIMEOUT_S, as_values, verify

    with shown(Console(stderr=True), "offsets", 0) as step:
        result = verify(replayed, lambda path: router_json(url, path, token, STATE_TIMEOUT_S), step=step)
    if as_json:
        click.echo(orjson.dumps(as_values(result), option=orjson.OPT_INDENT_2))
    elif not result.differences:
        click.echo(f"{url} has what the topics have: {result.n_ranks} ranks and the registry, at the same offsets")
    else:
        for difference in result.differences:
            click.echo(str(difference))
            for line in result.records.get(difference, ()):
                click.echo(f"    {line}")
    if result.differences:
        raise SystemExit(1)


def _request_of(file: Path) -> RouteRequest:
    """The request in a file; raises InvalidRequest, which names the file."""
    from streams.router_api.messages.requests import parse_route

    try:
        return parse_route(file.read_bytes())
    except InvalidRequest as exc:
        raise InvalidRequest(f"{file} is no body of POST /route: {exc.message}", remedy=exc.remedy) from exc


def _cut(settings: RouterServerSettings, specs: Sequence[TopicSpec], until: str | None) -> Cut:
    """Where the replay ends; raises KvStreamsError."""
    from streams.replay.cuts import cut_now
    from streams.replay.window import moment_in_window, offsets_in_window

    if until is None:
        return cut_now(settings, specs)
    now_ms = time.time_ns() // 1_000_000
    if until.startswith("@"):
        offsets, moment_ms = _offsets_of(Path(until[1:]))
        return offsets_in_window(settings, specs, offsets, moment_ms, now_ms)
    return moment_in_window(settings, specs, time_ms(until, now_ms), now_ms)


def _offsets_of(file: Path) -> tuple[dict[Place, int], int]:
    """The offsets in a file, and the moment that it names, or 0."""
    import orjson

    try:
        with file.open("rb") as lines:
            first = lines.readline()  # of --out, all that is needed; of --json, an opening brace
            values = orjson.loads(first if first.rstrip().endswith(b"}") else first + lines.read())
        offsets = {
            (str(topic), int(partition)): int(offset)
            for topic, of_topic in values["offsets"].items()
            for partition, offset in of_topic.items()
        }
        return offsets, int(values.get("moment_ms", 0))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise InvalidRequest(
            f"{file} has no offsets: {exc}", remedy="Take a file that `kvstreams replay` made with --json or --out"
        ) from exc


COMMANDS = (replay,)
