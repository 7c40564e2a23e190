"""What the doctor reports (pure).

What lives here: one finding, the groups of checks, and how findings become text and JSON. What must not: the checks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Group(enum.StrEnum):
    """A group of checks, which `--skip` can leave out."""

    KAFKA = "kafka"
    TOPICS = "topics"
    SCHEMAS = "schemas"
    INDEX = "index"
    REGISTRY = "registry"
    LEASES = "leases"
    LMCACHE = "lmcache"
    DEAD_LETTERS = "dead-letters"
    ENGINES = "engines"
    TOKENIZERS = "tokenizers"
    PROBE = "probe"
    ROUTERS = "routers"
    CLOCKS = "clocks"
    MEMORY = "memory"
    VERSIONS = "versions"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    code: a name for scripts, which stays the same from version to version. subject: what it is about. problem: what is
    wrong. remedy: what to do about it.
    """

    group: Group
    code: str
    subject: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of one run. groups: those that were checked. versions: of everything that reports one, by subject."""

    findings: tuple[Finding, ...]
    groups: tuple[Group, ...]
    versions: Mapping[str, str]


def as_text(findings: Sequence[Finding]) -> str:
    """Findings for people: one line for the problem and one for the remedy; "" without findings."""
    return "".join(f"{finding.subject}: {finding.problem}\n    {finding.remedy}\n" for finding in findings)


def as_json(report: DoctorReport) -> dict[str, Any]:
    """The JSON of `--json`."""
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "groups": list(report.groups),
        "versions": dict(sorted(report.versions.items())),
    }


def listed(names: Sequence[object], shown_max: int = 8) -> str:
    """Names separated by commas; beyond `shown_max`, only their number."""
    text = ", ".join(map(str, names[:shown_max]))
    return text if len(names) <= shown_max else f"{text} and {len(names) - shown_max} more"
