"""A certificate that a server makes for itself, for clients that encrypt and do not check certificates.

What lives here: making it. What must not: certificates from files (tls), and those of a local Kafka (lab.kafka).
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from pathlib import Path

from streams.errors import SettingsError

#: As long as that of the endpoint picker of the Gateway API Inference Extension. Each start makes another one.
VALID_DAYS = 3650

_NAME = "kvstreams"


def self_signed_context(protocol: str) -> ssl.SSLContext:
    """A context with a new certificate, which no authority signed. protocol: as of tls.server_context.

    Raises SettingsError without the package that makes certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    # OpenSSL reads certificates from files only. The folder is this user's, and gone after that.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "self-signed.pem"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_key_and_certificate())
        context.load_cert_chain(path)
    return context


def _key_and_certificate() -> bytes:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as exc:
        raise SettingsError(
            "a self-signed certificate needs the cryptography package",
            remedy="Run `pip install 'kvstreams[picker]'`, or set tls_certificate",
        ) from exc

    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(pem)
