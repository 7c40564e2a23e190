"""The ACLs of docs/security.md are those of the code, and are printed as commands."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from streams.cli import cli
from streams.security.acls import TOPIC_OPERATIONS, acls_of
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs/security.md").read_text()


def tables() -> dict[str, dict[str, str]]:
    """The page's tables of topics: operations by topic, by process."""
    found: dict[str, dict[str, str]] = {}
    for head, rows in re.findall(r"^\| topic \|(.*)\|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        processes = re.findall(r"`([^`]+)`", head)
        for row in rows.splitlines():
            topic, *cells = (cell.strip() for cell in row.strip("|").split("|"))
            for process, cell in zip(processes, cells, strict=True):
                found.setdefault(process, {})[topic.strip("`")] = cell
    return found


def test_the_page_has_the_operations_of_each_process() -> None:
    """Each table of docs/security.md has the operations of the code, for every process and topic."""
    specs = topics(Settings())
    shown = tables()
    assert shown.keys() == TOPIC_OPERATIONS.keys()
    for process, by_field in TOPIC_OPERATIONS.items():
        for field in specs.__dataclass_fields__:
            name = getattr(specs, field).name.replace("kvstreams-", "…-")
            assert shown[process][name] == ", ".join(by_field.get(field, ())), (process, name)


def test_the_page_has_the_other_resources_of_each_process() -> None:
    """Groups and transactional ids are those of the code."""
    kinds = {"group": "group", "transactional-id": "transactional ids with the prefix"}
    expected = {
        (process, f"{kinds[acl.kind]} `{{topic_prefix}}{acl.name}`", ", ".join(acl.operations))
        for process in TOPIC_OPERATIONS
        for acl in acls_of(process, Settings())
        if acl.kind != "topic"
    }
    rows = PAGE.partition("| process | other resource |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {(process.strip("`"), resource, operations) for process, resource, operations in shown} == expected


@pytest.mark.parametrize("process", TOPIC_OPERATIONS)
def test_the_commands_name_each_resource_of_the_scope(process: str) -> None:
    """`kvstreams topics acls` prints one line for each ACL, with the scope's names."""
    done = CliRunner().invoke(
        cli, ["topics", "acls", process, "--principal", "User:x", "--topic-prefix", "a."], catch_exceptions=False
    )
    lines = done.output.splitlines()
    acls = acls_of(process, Settings(topic_prefix="a."))
    assert len(lines) == len(acls)
    for line, acl in zip(lines, acls, strict=True):
        assert f"--{acl.kind} '{acl.name}'" in line and acl.name.startswith("a.")
        assert re.findall(r"--operation (\w+)", line) == list(acl.operations)
