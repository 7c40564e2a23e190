"""Registers the schemas of a scope's records in a schema registry.

What lives here: the names of subjects, and the call that registers a schema. What must not: the schemas themselves
(`schemas/`), and which topic has which (streams.topics).
"""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from streams.errors import KvStreamsError, SettingsError
from streams.kafka.avro_frames import codec
from streams.security.tls import why_no_connection
from streams.settings import ScopeSettings
from streams.topics import topics

#: A registry answers within milliseconds, or within seconds if its Kafka is far away.
ANSWER_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 1024 * 1024
_REASON_BYTES_MAX = 500

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"

_CREDENTIALS_REMEDY = "--user and --password-file name the credentials for the registry"

#: What to do about a refusal, by its status.
_REMEDIES = {
    401: _CREDENTIALS_REMEDY,
    403: _CREDENTIALS_REMEDY,
    409: "The subject has an earlier schema with which this one is not compatible (docs/upgrades.md)",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject of a registry, and the name of its schema."""

    name: str
    schema: str


@dataclass(frozen=True, slots=True)
class Registry:
    """Where a registry is. credentials: user and password. ca: PEM file; by default the system's authorities."""

    url: str
    credentials: tuple[str, str] | None = None
    ca: str = ""


def subjects(settings: ScopeSettings) -> Iterator[Subject]:
    """The subjects of a scope.

    The schema of a topic is TOPIC-value, as Confluent's TopicNameStrategy has it. Further schemas of a topic are
    TOPIC-NAMESPACE.RECORD, as TopicRecordNameStrategy has them.
    """
    for spec in topics(settings).all():
        for number, schema in enumerate(spec.schemas):
            source = codec(schema).source
            suffix = f"{source['namespace']}.{source['name']}" if number else "value"
            yield Subject(f"{spec.name}-{suffix}", schema)


def register(registry: Registry, subject: Subject) -> int:
    """Register a schema, unless the subject has it already; returns its id. Raises KvStreamsError."""
    url = f"{registry.url.rstrip('/')}/subjects/{quote(subject.name, safe='')}/versions"
    headers = {"Content-Type": _CONTENT_TYPE, "Accept": _CONTENT_TYPE}
    if registry.credentials is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(':'.join(registry.credentials).encode()).decode()}"
    body = json.dumps({"schema": json.dumps(codec(subject.schema).source)}).encode()
    try:
        context = ssl.create_default_context(cafile=registry.ca or None)
    except OSError as exc:
        raise SettingsError(f"--ca {registry.ca} cannot be used: {exc.strerror or exc}") from exc
    try:
        request = urllib.request.Request(url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S, context=context) as response:
            return int(json.loads(response.read(_ANSWER_BYTES_MAX))["id"])
    except urllib.error.HTTPError as exc:
        with exc:
            # What is no registry may answer with a page of HTML.
            reason = " ".join(exc.read(_REASON_BYTES_MAX).decode(errors="replace").split())
        raise KvStreamsError(
            f"the registry refuses the schema {subject.schema} of {subject.name}: {exc.code} {reason}",
            remedy=_REMEDIES.get(exc.code, "Check --url"),
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        cause = getattr(exc, "reason", None) or exc
        remedy = "Check --url"
        if isinstance(cause, ssl.SSLError):
            remedy = "Check --url, and --ca if an authority of your own has signed the registry's certificate"
            cause = why_no_connection(cause)
        raise KvStreamsError(f"{registry.url} does not answer as a schema registry: {cause}", remedy=remedy) from exc
