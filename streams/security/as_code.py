"""Topics and the least ACLs as code, for those who keep their Kafka in a repository (pure).

What lives here: the topics of a scope (streams.topics) and the ACLs of each process (acls) in the words of Strimzi, of
Terraform and of Kafka's own tools. What must not: topics or ACLs that those modules do not have, and calls to Kafka.
"""

from __future__ import annotations

import enum
import json
import re
import shlex
from collections.abc import Iterator

from streams.security.acls import TOPIC_OPERATIONS, acls_of, commands
from streams.settings import ScopeSettings
from streams.topics import TopicSpec, topics

#: Every process but the one that creates the topics, which this code does instead.
PROCESSES = tuple(process for process in TOPIC_OPERATIONS if process != "topics create")


class CodeFormat(enum.StrEnum):
    """A tool that the code is for."""

    STRIMZI = "strimzi"
    TERRAFORM = "terraform"
    KAFKA_TOPICS = "kafka-topics"


def as_code(form: CodeFormat, settings: ScopeSettings, strimzi_cluster: str) -> str:
    """The topics of a scope, and a user for each process. strimzi_cluster: name of the Kafka resource."""
    if form is CodeFormat.STRIMZI:
        return "".join(_strimzi(settings, strimzi_cluster))
    if form is CodeFormat.TERRAFORM:
        return json.dumps(_terraform(settings), indent=2) + "\n"
    return "".join(f"{line}\n" for line in _kafka_tools(settings))


def user_of(process: str, settings: ScopeSettings) -> str:
    """The name of a process's user."""
    return f"{settings.app_id}-{process.replace(' ', '-')}"


def _strimzi(settings: ScopeSettings, cluster: str) -> Iterator[str]:
    """Resources as YAML; texts and maps are JSON, which is YAML as well."""
    for spec in topics(settings).all():
        yield _resource("KafkaTopic", spec.name, cluster)
        yield f"  topicName: {json.dumps(spec.name)}\n"
        yield f"  partitions: {spec.partitions}\n"
        yield f"  replicas: {spec.replication}\n"
        yield f"  config: {json.dumps(dict(spec.config))}\n"
    for process in PROCESSES:
        yield _resource("KafkaUser", user_of(process, settings), cluster)
        yield "  authentication: {type: scram-sha-512}\n  authorization:\n    type: simple\n    acls:\n"
        for acl in acls_of(process, settings):
            resource = {"type": _STRIMZI_KINDS[acl.kind], "name": acl.name}
            if acl.prefixed:
                resource["patternType"] = "prefix"
            yield f"    - {json.dumps({'resource': resource, 'operations': acl.operations})}\n"


_STRIMZI_KINDS = {"topic": "topic", "group": "group", "transactional-id": "transactionalId"}


def _resource(kind: str, name: str, cluster: str) -> str:
    # A resource's name has fewer characters than a topic's.
    allowed = re.sub(r"[^a-z0-9.-]", "-", name.lower()).strip(".-")
    labels = json.dumps({"strimzi.io/cluster": cluster})
    return (
        f"---\napiVersion: kafka.strimzi.io/v1\nkind: {kind}\nmetadata:\n  name: {json.dumps(allowed)}\n"
        f"  labels: {labels}\nspec:\n"
    )


def _terraform(settings: ScopeSettings) -> dict[str, object]:
    """Resources of the provider Mongey/kafka, in Terraform's JSON syntax."""
    acls = {
        f"{process}_{acl.kind}_{acl.name}_{operation}": {
            "resource_name": acl.name,
            "resource_type": _TERRAFORM_KINDS[acl.kind],
            "resource_pattern_type_filter": "Prefixed" if acl.prefixed else "Literal",
            "acl_principal": f"User:{user_of(process, settings)}",
            "acl_host": "*",
            "acl_operation": operation,
            "acl_permission_type": "Allow",
        }
        for process in PROCESSES
        for acl in acls_of(process, settings)
        for operation in acl.operations
    }
    return {
        "terraform": {"required_providers": {"kafka": {"source": "Mongey/kafka"}}},
        "resource": {
            "kafka_topic": {_identifier(spec.name): _terraform_topic(spec) for spec in topics(settings).all()},
            "kafka_acl": {_identifier(name): acl for name, acl in acls.items()},
        },
    }


_TERRAFORM_KINDS = {"topic": "Topic", "group": "Group", "transactional-id": "TransactionalID"}


def _terraform_topic(spec: TopicSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "partitions": spec.partitions,
        "replication_factor": spec.replication,
        "config": dict(spec.config),
        # The topics are the state of the fleet.
        "lifecycle": {"prevent_destroy": True},
    }


def _identifier(text: str) -> str:
    """A name of Terraform, which has only letters, digits, hyphens and underscores, and does not begin with a digit."""
    return "_" + re.sub(r"[^A-Za-z0-9_-]", "_", text)


def _kafka_tools(settings: ScopeSettings) -> Iterator[str]:
    for spec in topics(settings).all():
        config = " ".join(f"--config {name}={value}" for name, value in spec.config.items())
        yield (
            f"kafka-topics --bootstrap-server {shlex.quote(settings.kafka)} --create --if-not-exists "
            f"--topic {shlex.quote(spec.name)} --partitions {spec.partitions} "
            f"--replication-factor {spec.replication} {config}"
        )
    for process in PROCESSES:
        yield from commands(process, settings, f"User:{user_of(process, settings)}")
