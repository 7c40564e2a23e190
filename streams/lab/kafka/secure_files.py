"""Certificates and passwords of a local Kafka that requires them, as files in its directory.

What lives here: making these files, and the properties and client settings that name them. What must not: the broker's
process (broker). The authority signs two certificates when it is made, and its key is not kept.

    ca.pem             the authority's certificate, for kafka_tls_ca
    broker.pem         key and certificate of the broker
    client.pem         key and certificate of both users, for a broker that requires one
    admin.password     of the user `admin`, who may do everything and authenticates by PLAIN
    kvstreams.password of the user `kvstreams`, who may do everything and authenticates by SCRAM-SHA-512
    kvstreams.toml     settings of a process that uses this Kafka as `kvstreams`, for KVSTREAMS_CONFIG
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streams.errors import LocalKafkaError
from streams.settings import KafkaSecurity, SaslMechanism

#: The user that clients of a demo are. Both users may do everything.
USER = "kvstreams"
ADMIN = "admin"

#: A broker for one machine is used for years at most, and its authority's key is gone.
VALID_DAYS = 3650

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


@dataclass(frozen=True, slots=True)
class SecureFiles:
    """The files of one directory; see the header."""

    folder: Path

    def make(self) -> None:
        """Make the files that are missing. Raises LocalKafkaError without the package that makes certificates."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = ("ca.pem", "broker.pem", "client.pem")
        if not all((self.folder / name).exists() for name in names):
            for name, content in zip(names, _certificates(), strict=True):
                write_private(self.folder / name, content)
        for user in (ADMIN, USER):
            if not self._password_file(user).exists():
                write_private(self._password_file(user), secrets.token_urlsafe(24).encode())

    def write_settings(self, bootstrap: str) -> None:
        """Write kvstreams.toml."""
        lines = [f'{name} = "{value}"' for name, value in self.client_settings(bootstrap).items()]
        write_private(self.folder / "kvstreams.toml", ("\n".join(lines) + "\n").encode())

    def properties(self) -> dict[str, str]:
        """The broker's properties for encryption, authentication and authorization, without its listeners."""
        admin = f'{_PLAIN} username="{ADMIN}" password="{self.password(ADMIN)}" user_{ADMIN}="{self.password(ADMIN)}";'
        return {
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": admin,
            "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": _SCRAM,
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": _SCRAM,
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": admin,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.folder / "ca.pem"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:{USER}",
        }

    def admin_settings(self, bootstrap: str) -> dict[str, Any]:
        """Settings of a client that is the user `admin`."""
        return self._settings(bootstrap, ADMIN, SaslMechanism.PLAIN)

    def client_settings(self, bootstrap: str) -> dict[str, Any]:
        """Settings of a client that is the user `kvstreams`."""
        return self._settings(bootstrap, USER, SaslMechanism.SCRAM_SHA_512)

    def password(self, user: str) -> str:
        """The password of a user."""
        return self._password_file(user).read_text()

    def _settings(self, bootstrap: str, user: str, mechanism: SaslMechanism) -> dict[str, Any]:
        return {
            "kafka": bootstrap,
            "kafka_security": KafkaSecurity.SASL_SSL,
            "kafka_tls_ca": str(self.folder / "ca.pem"),
            "kafka_tls_certificate": str(self.folder / "client.pem"),
            "kafka_sasl_mechanism": mechanism,
            "kafka_sasl_username": user,
            "kafka_sasl_password_file": str(self._password_file(user)),
        }

    def _password_file(self, user: str) -> Path:
        return self.folder / f"{user}.password"


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _certificates() -> tuple[bytes, bytes, bytes]:
    """The authority's certificate; key and certificate of the broker; key and certificate of a client. All are PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as exc:
        raise LocalKafkaError(
            "The cryptography package is not installed", remedy="Run `pip install 'kvstreams[local]'`"
        ) from exc

    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = name("kvstreams local authority")

    def signed(subject: x509.Name, key: ec.EllipticCurvePublicKey, names: Sequence[x509.GeneralName]) -> bytes:
        is_authority = subject == authority
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(authority_key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM)

    def with_key(text: str, names: Sequence[x509.GeneralName]) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem + signed(name(text), key.public_key(), names)

    here = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    return (
        signed(authority, authority_key.public_key(), []),
        with_key("localhost", here),
        with_key(USER, []),
    )
