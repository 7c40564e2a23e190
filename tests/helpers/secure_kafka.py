"""A real broker that requires TLS, SASL and ACLs, and its users.

What lives here: starting the broker, creating users with ACLs, and reading from its log what the authorizer decided.
What must not: what is tested with it.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from streams.kafka.clients import admin
from streams.lab.kafka.broker import SECURE_FOLDER, KafkaState, LocalKafka, LocalKafkaConfig
from streams.lab.kafka.secure_files import SecureFiles
from streams.security.acls import Acl
from streams.settings import SaslMechanism, Settings

#: Clients also need a certificate, and OAUTHBEARER accepts tokens without a signature, as Kafka does for tests.
OVERRIDES = {
    "group.min.session.timeout.ms": "1000",
    "listener.name.sasl_ssl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
    "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="broker";'
    ),
    "listener.name.sasl_ssl.ssl.client.auth": "required",
}

_KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "Describe": AclOperation.DESCRIBE,
    "AlterConfigs": AclOperation.ALTER_CONFIGS,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}

_DECISION = re.compile(
    r"Principal = User:(\S+) is (Allowed|Denied) operation = (\w+) from host = \S+ on resource = (\w+):\w+:(\S+)"
)

_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the authorizer decided. kind, name: of the resource, as Kafka writes them."""

    user: str
    allowed: bool
    operation: str
    kind: str
    name: str


class SecureKafka:
    """One broker; `stop` ends it."""

    def __init__(self, folder: Path, overrides: Mapping[str, str] = OVERRIDES) -> None:
        self._local = LocalKafka(
            LocalKafkaConfig(folder / "kafka", overrides, secure=True, authorizer_log_level="debug")
        )
        self._folder = folder
        self.state: KafkaState = self._local.up()
        self.files = SecureFiles(self._local.directory / SECURE_FOLDER)

    def stop(self) -> None:
        self._local.down()

    @property
    def admin(self) -> Settings:
        """Settings of the user that may do everything."""
        return Settings(**self.files.admin_settings(self.state.bootstrap))

    def user(self, name: str, acls: Iterable[Acl] = (), sha: int = 512) -> Settings:
        """Create a user with a password of its own, and ACLs; return settings of a client that is this user."""
        password = f"sesame-of-{name}"
        client = admin(self.admin)
        mechanism = {256: ScramMechanism.SCRAM_SHA_256, 512: ScramMechanism.SCRAM_SHA_512}[sha]
        stored = UserScramCredentialUpsertion(name, ScramCredentialInfo(mechanism, 4096), password.encode())
        for future in client.alter_user_scram_credentials([stored]).values():
            future.result(_ANSWER_S)
        self.allow(name, acls)
        file = self._folder / f"{name}.password"
        file.write_text(password)
        return replace(
            self.admin,
            kafka_sasl_mechanism=SaslMechanism(f"SCRAM-SHA-{sha}"),
            kafka_sasl_username=name,
            kafka_sasl_password_file=str(file),
        )

    def allow(self, name: str, acls: Iterable[Acl]) -> None:
        """Create ACLs of a user, which may be those of several processes."""
        bindings = {
            AclBinding(
                _KINDS[acl.kind],
                acl.name,
                ResourcePatternType.PREFIXED if acl.prefixed else ResourcePatternType.LITERAL,
                f"User:{name}",
                "*",
                _OPERATIONS[operation],
                AclPermissionType.ALLOW,
            )
            for acl in acls
            for operation in acl.operations
        }
        if bindings:
            client = admin(self.admin)  # kept until its requests have ended
            for future in client.create_acls(list(bindings)).values():
                future.result(_ANSWER_S)

    def decisions(self) -> set[Decision]:
        """Everything that the authorizer has decided about users so far."""
        found: set[Decision] = set()
        for log in self._local.directory.glob("server.log*"):
            for user, verdict, operation, kind, name in _DECISION.findall(log.read_text(errors="replace")):
                found.add(Decision(user, verdict == "Allowed", operation, kind, name))
        return found


def unsigned_token(subject: str, lifetime_s: float, **claims: Any) -> str:
    """A JWT without a signature, which the broker accepts."""
    now = time.time()
    payload: Mapping[str, Any] = {"sub": subject, "iat": now - 1, "exp": now + lifetime_s, **claims}
    parts = ({"alg": "none"}, payload)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."
