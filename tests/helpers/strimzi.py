"""What Strimzi's operators make of the chart's resources, for tests without Strimzi.

What lives here: ACLs of a KafkaUser, and the settings of a container. What must not: calls to Kafka.
"""

from __future__ import annotations

from typing import Any

from streams.security.acls import Acl
from streams.settings import Settings, load

_KINDS = {"topic": "topic", "group": "group", "transactionalId": "transactional-id"}


def acls_of_user(user: dict[str, Any]) -> list[Acl]:
    """Return the ACLs that the User Operator makes for a user."""
    return [
        Acl(
            _KINDS[acl["resource"]["type"]],
            acl["resource"]["name"],
            tuple(acl["operations"]),
            prefixed=acl["resource"].get("patternType", "literal") == "prefix",
        )
        for acl in user["spec"]["authorization"]["acls"]
    ]


def settings_of_user(container: dict[str, Any]) -> Settings:
    """Return the settings that a container of the manifest has."""
    return load({}, {each["name"]: each["value"] for each in container["env"] if "value" in each}).settings
