"""The topics of a scope as an AsyncAPI 3 document (pure).

What lives here: the words of AsyncAPI for topics, records, and who writes and reads them. What must not: topics
(streams.topics), schemas (`schemas/`) and rights (streams.security.acls), from which it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streams.kafka.avro_frames import codec
from streams.security.acls import TOPIC_OPERATIONS
from streams.settings import ScopeSettings
from streams.topics import Topics, TopicSpec, topics
from streams.version import __version__

_AVRO = "application/vnd.apache.avro"

#: The processes whose operations the document has.
_PROCESSES = ("worker", "router", "bridge", "publisher")

#: Settings of topics that AsyncAPI's binding has a name for.
_BINDING_SETTINGS = ("cleanup.policy", "retention.ms", "retention.bytes", "delete.retention.ms", "max.message.bytes")

#: The message of a topic without a schema.
_AS_RECEIVED = "as-received"


def asyncapi(settings: ScopeSettings) -> dict[str, Any]:
    """The topics of a scope, their records, and who writes and reads them, as an AsyncAPI 3 document."""
    specs = topics(settings)
    fields = {field: getattr(specs, field) for field in Topics.__dataclass_fields__}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"kvstreams: the topics of {settings.app_id}",
            "version": __version__,
            "description": "Records contain hashes of tokens, never tokens or text of a prompt.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": _AVRO,
        "servers": {
            f"kafka{number}": {
                "host": address.strip(),
                "protocol": "kafka-secure" if settings.kafka_security.uses_tls else "kafka",
            }
            for number, address in enumerate(settings.kafka.split(","), 1)
        },
        "channels": {field: _channel(spec) for field, spec in fields.items()},
        "operations": dict(_operations()),
        "components": {
            "messages": {schema: _message(schema) for spec in specs.all() for schema in spec.schemas}
            | {_AS_RECEIVED: {"contentType": "application/octet-stream", "summary": "Bytes as they were received"}}
        },
    }


def _channel(spec: TopicSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        name: spec.config[name].split(",") if name == "cleanup.policy" else int(spec.config[name])
        for name in _BINDING_SETTINGS
        if name in spec.config
    }
    return {
        "address": spec.name,
        "description": f"Key: {spec.key}.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in spec.schemas or (_AS_RECEIVED,)},
        "bindings": {
            "kafka": {
                "partitions": spec.partitions,
                "replicas": spec.replication,
                "topicConfiguration": config,
                "bindingVersion": "0.5.0",
            }
        },
    }


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each topic that a process reads or writes. Processes are the application, so reading is receiving."""
    for process in _PROCESSES:
        for field, operations in TOPIC_OPERATIONS[process].items():
            for operation, action in (("Write", "send"), ("Read", "receive")):
                if operation in operations:
                    name = f"{process}-{'writes' if action == 'send' else 'reads'}-{field}"
                    yield name, {"action": action, "channel": {"$ref": f"#/channels/{field}"}}


def _message(schema: str) -> dict[str, Any]:
    source = codec(schema).source
    return {
        "name": source["name"],
        "summary": source.get("doc", ""),
        "contentType": _AVRO,
        "payload": {"schemaFormat": f"{_AVRO};version=1.9.0", "schema": source},
    }
