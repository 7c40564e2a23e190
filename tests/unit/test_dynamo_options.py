"""Every option that NVIDIA Dynamo's documents name is accepted by `kvstreams router`, or explained.

What lives here: the comparison of one list of options with the command line and with docs/from-dynamo.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from streams.cli import cli
from streams.settings import ALIASES, UNNEEDED_OPTIONS, Settings, load, unknown_variables
from tests.helpers.pages import ROOT

PAGE = "docs/from-dynamo.md"

OPTIONS = [
    line for line in (ROOT / "tests/dynamo_options.txt").read_text().splitlines() if line and not line.startswith("#")
]

#: Columns of the tables of the page: Dynamo's options, ours, the difference.
Row = tuple[str, ...]


def rows() -> list[Row]:
    """Return the rows of the page's tables of options, without the options of a request."""
    text = (ROOT / PAGE).read_text()
    text = text[: text.index("## Options of a request")]
    cells = (
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line[:1] == "|"
    )
    return [row for row in cells if row[0].startswith("`--")]


def names(cell: str) -> list[str]:
    """Return the options that a cell names; one that ends with an ellipsis is the beginning of several.

    `--no-…` stands for the negative form of the options that precede it.
    """
    return [name for name in re.findall(r"(--[a-z][a-z-]*…?)", cell) if name != "--no-…"]


def is_named_in(row: Row, option: str) -> bool:
    """Whether a row is about an option. It may name only the positive form of a switch."""
    forms = (option, f"--{option.removeprefix('--no-')}")
    return any(name in forms or (name[-1] == "…" and option.startswith(name[:-1])) for name in names(row[0]))


def accepted() -> set[str]:
    """Return the options that `kvstreams router` accepts."""
    params = cli.commands["router"].params
    return {option for param in params for option in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_dynamo_is_accepted_or_explained(option: str) -> None:
    """The page has one row for it, which says what takes its place, or why nothing does."""
    found = [row for row in rows() if is_named_in(row, option)]
    assert len(found) == 1, f"{PAGE} has {len(found)} rows for {option}"
    (row,) = found
    if len(row) == 2 or row[1] == "none":
        assert row[-1] not in ("", "none"), f"{PAGE} gives no reason for {option}"
    elif row[1] == "accepted without effect":
        assert option in accepted()
    else:
        assert set(names(row[1])) <= accepted()
    assert option in accepted() or row[1] not in ("", option)


def test_what_the_page_names_in_place_of_an_option_of_the_frontend_exists() -> None:
    """A row without a middle column names options of `kvstreams front`."""
    front = {option for param in cli.commands["front"].params for option in param.opts}
    named = {name for row in rows() if len(row) == 2 for name in names(row[1])}
    assert "--tls-certificate" in named and "--tokenizer" in named
    assert named <= front


def test_the_list_has_every_option_of_the_page() -> None:
    """A row that is added to the page is added to the list of options too."""
    named = {name for row in rows() for name in names(row[0]) if not name.endswith("…")}
    assert named <= set(OPTIONS)
    assert len(set(OPTIONS)) == len(OPTIONS)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False)])
def test_another_name_of_a_setting_works_from_every_source(alias: str, text: str, value: bool, tmp_path: Path) -> None:
    """The setting's source is the name that was given, and there is no warning."""
    file = tmp_path / "settings.toml"
    file.write_text(f"{alias} = {str(value).lower()}\n")
    variable = f"KVSTREAMS_{alias.upper()}"
    sources = [load({}, {variable: text}), load({}, {}, file), load({alias: value}, {})]
    for resolved, source in zip(sources, (variable, str(file), "command line"), strict=True):
        assert resolved.settings == Settings(kv_events=value)
        assert resolved.sources["kv_events"] == source
        assert not resolved.warnings
    assert not unknown_variables({variable: text})


def test_the_setting_s_own_name_counts_within_a_source_and_the_order_of_sources_stays() -> None:
    """A child process inherits the other name from the environment and gets the setting's own name from its parent."""
    both = {"KVSTREAMS_USE_KV_EVENTS": "off", "KVSTREAMS_KV_EVENTS": "on"}
    assert load({}, both).settings.kv_events
    assert load({}, dict(reversed(both.items()))).settings.kv_events
    assert not load({"use_kv_events": False}, {"KVSTREAMS_KV_EVENTS": "on"}).settings.kv_events


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--use-kv-events"], "True"),
        (["--no-kv-events"], "False"),
        (["--no-use-kv-events"], "False"),
        (["--no-router-kv-events"], "False"),
    ],
)
def test_the_command_line_accepts_dynamo_s_names_of_kv_events(flags: list[str], value: str) -> None:
    """`kvstreams config` shows the value that these options give."""
    done = CliRunner().invoke(cli, ["config", *flags])
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(rf"^kv_events +{value} +command line", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "flags",
    [
        ["--event-plane", "zmq"],
        ["--enable-local-indexer"],
        ["--enable-local-indexer", "true"],
        ["--no-enable-local-indexer"],
    ],
)
def test_an_option_that_is_not_needed_is_accepted_in_each_form_that_dynamo_has(flags: list[str]) -> None:
    """One warning says why, and the command runs."""
    done = CliRunner().invoke(cli, ["config", *flags])
    assert done.exit_code == 0
    name = flags[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    assert done.stderr == f"kvstreams: {name} (from: command line) is not needed: {UNNEEDED_OPTIONS[name]}\n"
