"""What commands share: every setting as an option, help in sections, and the reading of values.

What lives here: decorators and classes for commands, and parsers of option values. What must not: a command.

Every setting is an option of the commands that use settings, except secrets, which the list of processes would show. A
value that is not given on the command line comes from `KVSTREAMS_*`, then from a TOML file, then from the default;
`kvstreams config` shows which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from streams.core.ids import U64_MASK, WorkerId
from streams.errors import InvalidRequest, SettingsError
from streams.settings import ALIASES, ENV_PREFIX, SECRETS, UNNEEDED_OPTIONS, Settings, load

_F = TypeVar("_F", bound=Callable[..., Any])

#: Settings that most commands need; --help shows them before all others.
ESSENTIAL = (
    "kafka",
    "topic_prefix",
    "partitions",
    "replication",
    "block_size",
    "host",
    "port",
    "router_mode",
    "data_dir",
)

_SECTIONS = (
    "Options",
    "Settings",
    f"Other settings; all of them also as {ENV_PREFIX}... variables or in a file (see kvstreams config)",
)

#: Options of UNNEEDED_OPTIONS that have a value, and one that is a switch in some releases of Dynamo and has a value in
#: others. The other ones are switches.
_WITH_VALUE = ("router_snapshot_threshold", "event_plane")
_WITH_OR_WITHOUT_VALUE = "enable_local_indexer"

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TIME_OF_DAY = re.compile(r"\d{2}:\d{2}(:\d{2}(\.\d+)?)?")
#: Help of an option that is read by `time_ms`.
SINCE_HELP = "how far back, for example 90s, 15m, 1h or 2d, or a time such as 2026-01-31T14:00 or 14:00 (UTC)"

#: Prefix of the parameters that carry settings: an option of a command may have a setting's name.
_SETTING_PARAM = "setting_"


class GroupedCommand(click.Command):
    """A command whose help shows its own options first, then the essential settings, then the other settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in up to three sections; a command without settings has one."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                setting = (param.name or "").removeprefix(_SETTING_PARAM)
                essential = setting in ESSENTIAL or setting == "config"
                rows[_SECTIONS[0 if setting == param.name and not essential else 1 if essential else 2]].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class GroupedGroup(click.Group):
    """A group whose commands, and those of its groups, are GroupedCommands."""

    command_class = GroupedCommand
    group_class = type


def with_settings(command: _F, without: Collection[str] = ()) -> _F:
    """Give a command every setting as an option; it is called with `resolved`.

    without: settings that are no options of this command, since it has an option of the same name.
    """
    no_options = SECRETS | set(without)

    def run(config: Path | None, **options: Any) -> Any:
        names = (*(setting.name for setting in fields(Settings)), *UNNEEDED_OPTIONS, *ALIASES)
        given = {name: options.pop(f"{_SETTING_PARAM}{name}") for name in names if name not in no_options}
        resolved = load(given, config_file=config)
        for warning in resolved.warnings:
            click.echo(f"kvstreams: {warning}", err=True)
        return command(resolved=resolved, **options)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    # Decorators below ours attached a command's own options to it; they belong to the wrapper now.
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    wrapped: Any = run
    for setting in reversed(fields(Settings)):
        if setting.name in no_options:
            continue
        flag, param = setting.name.replace("_", "-"), f"{_SETTING_PARAM}{setting.name}"
        text = str(setting.metadata["help"])
        if setting.type == "bool":
            # NVIDIA Dynamo has a name of its own for the opposite of this one.
            opposite = "router-persist-states" if setting.name == "router_reset_states" else f"no-{flag}"
            option = click.option(f"--{flag}/--{opposite}", param, default=None, help=text)
        else:
            option = click.option(f"--{flag}", param, default=None, metavar="VALUE", help=text)
        wrapped = option(wrapped)
    for name in (*UNNEEDED_OPTIONS, *ALIASES):
        flag, param = name.replace("_", "-"), f"{_SETTING_PARAM}{name}"
        if name == _WITH_OR_WITHOUT_VALUE:
            option = click.option(f"--{flag}", param, default=None, hidden=True, is_flag=False, flag_value="on")
            wrapped = click.option(f"--no-{flag}", param, default=None, hidden=True, flag_value="off")(option(wrapped))
        else:
            form = f"--{flag}" if name in _WITH_VALUE else f"--{flag}/--no-{flag}"
            wrapped = click.option(form, param, default=None, hidden=True)(wrapped)
    wrapped = click.option(
        "--config", type=click.Path(path_type=Path), default=None, help="TOML file with values of settings"
    )(wrapped)
    result: _F = wrapped
    return result


class OutputFile(click.Path):
    """A file that a command writes at its end. What could not be written is refused before the command has begun."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; its folder has to exist already."""
        file = Path(str(super().convert(value, param, ctx)))
        if not file.parent.is_dir():
            self.fail(f"{file}: there is no folder {file.parent}", param, ctx)
        if not (file.exists() or os.access(file.parent, os.W_OK)):
            self.fail(f"{file}: no file can be made in {file.parent}", param, ctx)
        return file


def http_urls(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Check that an option or argument, or each value of a repeated one, is the address of an HTTP server."""
    for url in value if isinstance(value, tuple) else (value,):
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets without an IPv6 address, or a port that is not a number up to 65535
            usable = False
        if not usable:
            raise click.BadParameter(f"{url!r} is not http://HOST:PORT or https://HOST:PORT", context, parameter)
    return value


def worker_ids(values: tuple[int, ...]) -> tuple[WorkerId, ...]:
    """Worker ids of a command line; raises InvalidRequest."""
    for value in values:
        if not 0 <= value <= U64_MASK:
            raise InvalidRequest(f"worker {value} is outside 0..2^64-1")
    return tuple(map(WorkerId, values))


def key_and_value(text: str) -> tuple[str, str]:
    """Split KEY=VALUE of --set; raises SettingsError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text!r} is not KEY=VALUE")
    return key, value


def duration_s(text: str) -> float:
    """Read a duration such as 90s or 1h; raises SettingsError."""
    found = _AGO.fullmatch(text)
    if found is None:
        raise SettingsError(f"{text!r} is not a duration such as 90s, 15m, 1h or 2d")
    return float(found[1]) * _UNITS_S[found[2]]


def time_ms(text: str, now_ms: int) -> int:
    """Read a time of the past, as a duration or as ISO 8601; raises SettingsError.

    A time without a date is the last one: of today, or of yesterday.
    """
    if _AGO.fullmatch(text):
        return now_ms - round(duration_s(text) * 1000.0)
    try:
        if _TIME_OF_DAY.fullmatch(text):
            now = datetime.fromtimestamp(now_ms / 1000.0, UTC)
            time = datetime.combine(now.date(), time_of_day.fromisoformat(text), UTC)
            time -= timedelta(days=int(time > now))
        else:
            time = datetime.fromisoformat(text)
    except ValueError as exc:
        raise SettingsError(f"{text!r} is neither a duration such as 15m nor a time such as 2026-01-31T14:00") from exc
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000.0)
