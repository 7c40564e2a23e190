"""TLS over HTTP: a server's context from certificate files, and why a client's connection failed.

What lives here: loading and checking the files, and the words for errors of OpenSSL. What must not: serving with the
context (http_server), and the TLS of Kafka's clients (kafka).
"""

from __future__ import annotations

import ssl

from streams.errors import SettingsError
from streams.settings import AccessSettings


def server_context(settings: AccessSettings, protocol: str) -> ssl.SSLContext:
    """A context of the certificate, key and authorities that the settings name. protocol: the one that clients speak.

    Raises SettingsError, which names the setting and the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    certificate, key = settings.tls_certificate, settings.tls_key or settings.tls_certificate
    named = f"tls_certificate and tls_key ({certificate}, {key})" if settings.tls_key else f"tls_certificate ({key})"
    try:
        # Without this function, OpenSSL would ask on the terminal for the password of an encrypted key.
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise SettingsError(f"{named} cannot be used: {reason_of(exc)}") from exc
    if settings.tls_client_ca:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ValueError) as exc:
            raise SettingsError(f"tls_client_ca ({settings.tls_client_ca}) cannot be used: {reason_of(exc)}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def reason_of(exc: OSError | ValueError) -> str:
    """Why a certificate file cannot be used, in a few words."""
    if isinstance(exc, ssl.SSLError):
        if exc.reason == "KEY_VALUES_MISMATCH":
            return "the key belongs to another certificate"
        if exc.reason == "NO_CERTIFICATE_OR_CRL_FOUND":
            return "it contains no certificate in PEM format"
        if "PEM lib" in str(exc):  # the error of Python for everything that OpenSSL does not find in a file
            return "it must contain a certificate and a key in PEM format, and the key must have no password"
    return getattr(exc, "strerror", None) or str(exc)


#: For a certificate that a client does not trust.
UNTRUSTED_REMEDY = "If an authority of your own signed it, set SSL_CERT_FILE to a file with that authority"


def why_no_connection(exc: ssl.SSLError) -> str:
    """Why a client of ours cannot speak TLS with a server, in a few words."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {exc.verify_message}"
    if exc.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; its URL begins with http://"
    return (exc.reason or str(exc)).replace("_", " ").lower()


def _no_password() -> str:
    return ""
