"""The least ACLs of each process on a Kafka with an authorizer, as data.

What lives here: which operations each process needs on which topics, groups and transactional ids. What must not:
creating ACLs, which is the administrator's. docs/security.md has the table, tests compare it with this module, and run
each process with exactly these ACLs.

Kafka's own rules apply: Read, Write, Delete and Alter imply Describe. An idempotent producer needs Write on any topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streams.settings import ScopeSettings
from streams.topics import Topics, history_group, topics


@dataclass(frozen=True, slots=True)
class Acl:
    """One resource, and what a principal may do with it. kind: topic, group or transactional-id."""

    kind: str
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False


#: What a process that checks the topics of its scope at its start needs on each of them.
CHECK = ("Describe", "DescribeConfigs")

#: What a process needs that reads what a router knows, and changes nothing.
_REPLAYED: Mapping[str, tuple[str, ...]] = {
    "kv_events": CHECK,
    "cxl_events": CHECK,
    "workers": ("Read", "DescribeConfigs"),
    "worker_metrics": ("Read", "DescribeConfigs"),
    "router_loads": ("Read", "DescribeConfigs"),
    "kv_control": CHECK,
    "dead_letters": CHECK,
    "router_decisions": CHECK,
    "index_changelog": ("Read", "DescribeConfigs"),
    "cxl_changelog": ("Read", "DescribeConfigs"),
}

#: By process: operations by field of `Topics`. `Describe` stands only where no other operation implies it.
TOPIC_OPERATIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "worker": {
        "kv_events": ("Read", "Write", "DescribeConfigs"),
        "cxl_events": ("Read", "DescribeConfigs"),
        "workers": ("Read", "DescribeConfigs"),
        "worker_metrics": CHECK,
        "router_loads": CHECK,
        "kv_control": ("Write", "DescribeConfigs"),
        "dead_letters": ("Write", "DescribeConfigs"),
        "router_decisions": CHECK,
        "index_changelog": ("Read", "Write", "DescribeConfigs"),
        "cxl_changelog": ("Read", "Write", "DescribeConfigs"),
    },
    "router": {
        "kv_events": ("Write", "DescribeConfigs"),
        "cxl_events": CHECK,
        "workers": ("Read", "Write", "DescribeConfigs"),
        "worker_metrics": ("Read", "DescribeConfigs"),
        "router_loads": ("Read", "Write", "DescribeConfigs"),
        "kv_control": CHECK,
        "dead_letters": ("Read", "DescribeConfigs"),
        "router_decisions": ("Write", "DescribeConfigs"),
        "index_changelog": ("Read", "DescribeConfigs"),
        "cxl_changelog": ("Read", "DescribeConfigs"),
    },
    "bridge": {
        "kv_events": ("Read", "Write", "DescribeConfigs"),
        "cxl_events": ("Read", "Write", "DescribeConfigs"),
        "workers": ("Read", "Write", "DescribeConfigs"),
        "worker_metrics": ("Write", "DescribeConfigs"),
        "router_loads": CHECK,
        "kv_control": ("Read", "DescribeConfigs"),
        "dead_letters": ("Write", "DescribeConfigs"),
        "router_decisions": CHECK,
        "index_changelog": ("Read", "DescribeConfigs"),
        "cxl_changelog": ("Read", "DescribeConfigs"),
    },
    "publisher": {
        "kv_events": ("Write",),
        "cxl_events": ("Write",),
        "workers": ("Read", "Write"),
    },
    "topics create": dict.fromkeys(Topics.__dataclass_fields__, ("Create", *CHECK)),
    "topics describe": dict.fromkeys(Topics.__dataclass_fields__, CHECK),
    "topics window": dict.fromkeys(
        ("workers", "worker_metrics", "router_loads", "index_changelog", "cxl_changelog"),
        ("Read", "AlterConfigs", "DescribeConfigs"),
    ),
    "reset": {
        "kv_events": ("Delete", "DescribeConfigs"),
        "cxl_events": ("Delete", "DescribeConfigs"),
        "workers": ("Read", "Write", "DescribeConfigs"),
        "worker_metrics": CHECK,
        "router_loads": ("Delete", "DescribeConfigs"),
        "kv_control": ("Delete", "DescribeConfigs"),
        "dead_letters": CHECK,
        "router_decisions": CHECK,
        "index_changelog": ("Read", "Write", "DescribeConfigs"),
        "cxl_changelog": ("Read", "Write", "DescribeConfigs"),
    },
    "doctor": {**_REPLAYED, "dead_letters": ("Read", "DescribeConfigs")},
    "replay": _REPLAYED,
    "cxl pool": {"workers": ("Read", "Write")},
    "cxl transition": {
        "kv_events": ("Read",),
        "cxl_events": ("Read", "Write"),
        "workers": ("Read",),
        "dead_letters": ("Read",),
        "index_changelog": ("Read",),
        "cxl_changelog": ("Read",),
    },
    "explain": {"router_decisions": ("Read", "DescribeConfigs")},
    "replay-decisions": {"router_decisions": ("Read", "DescribeConfigs")},
}

#: Processes that open the tables' transactions, one transactional id per partition.
_TRANSACTIONAL = ("worker", "reset")

#: Operations on the group whose offsets say since when topics keep their history: committing needs Read.
_HISTORY: Mapping[str, tuple[str, ...]] = {"topics window": ("Read",), "replay": ("Describe",)}


def acls_of(process: str, settings: ScopeSettings) -> list[Acl]:
    """The ACLs that a process of TOPIC_OPERATIONS needs in a scope. Those of a worker do not include its router's."""
    specs = topics(settings)
    acls = [
        Acl("topic", getattr(specs, field).name, operations) for field, operations in TOPIC_OPERATIONS[process].items()
    ]
    reads = any("Read" in operations for operations in TOPIC_OPERATIONS[process].values())
    if reads and process != "topics window":  # which reads no records, and needs Read to commit offsets
        # librdkafka looks up the coordinator of a consumer's group, which it never joins (kafka.reader).
        acls.append(Acl("group", f"{settings.app_id}-reader", ("Describe",)))
    if process == "worker":
        acls.append(Acl("group", settings.app_id, ("Read",)))
    if process in ("reset", "doctor"):
        acls.append(Acl("group", settings.app_id, ("Describe",)))
    if process in _HISTORY:
        acls.append(Acl("group", history_group(settings), _HISTORY[process]))
    if process in _TRANSACTIONAL:
        acls.append(Acl("transactional-id", f"{settings.app_id}-", ("Write",), prefixed=True))
    return acls


def commands(process: str, settings: ScopeSettings, principal: str) -> list[str]:
    """The same as commands of Kafka's own tool."""
    lines = []
    for acl in acls_of(process, settings):
        pattern = " --resource-pattern-type prefixed" if acl.prefixed else ""
        operations = " ".join(f"--operation {operation}" for operation in acl.operations)
        lines.append(
            f"kafka-acls --bootstrap-server {settings.kafka} --add --allow-principal {principal} {operations} "
            f"--{acl.kind} '{acl.name}'{pattern}"
        )
    return lines
