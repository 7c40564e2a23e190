"""How clients of Kafka authenticate and encrypt: from the settings to the configuration of librdkafka.

What lives here: the security part of that configuration, and what Faust's clients have in common with it. What must
not: every other part (streams.kafka.clients), and Faust (faust_credentials). Secrets are read when a client is created.
"""

from __future__ import annotations

import base64
import binascii
import json
import ssl
import time
from typing import Any

from streams.errors import SettingsError
from streams.security.files import read_secret
from streams.security.tls import reason_of
from streams.security.token_providers import token_provider
from streams.settings import KafkaSettings, SaslMechanism

#: A token that does not say when it expires is read from its file again after this time.
UNDATED_TOKEN_S = 300.0


def librdkafka_config(settings: KafkaSettings) -> dict[str, Any]:
    """The security part of a client of confluent_kafka. Raises SettingsError, which names the setting."""
    security = settings.kafka_security
    check_kafka_security(settings)
    config: dict[str, Any] = {}
    if security.uses_tls or security.uses_sasl:
        config["security.protocol"] = security.value
    if security.uses_tls:
        if settings.kafka_tls_ca or settings.kafka_tls_certificate:
            client_context(settings)  # its errors name the setting and the file
        if settings.kafka_tls_ca:
            config["ssl.ca.location"] = settings.kafka_tls_ca
        if settings.kafka_tls_certificate:
            config["ssl.certificate.location"] = settings.kafka_tls_certificate
            config["ssl.key.location"] = settings.kafka_tls_key or settings.kafka_tls_certificate
    if security.uses_sasl:
        config["sasl.mechanism"] = settings.kafka_sasl_mechanism.value
        config |= _sasl_config(settings)
    return config


def _sasl_config(settings: KafkaSettings) -> dict[str, Any]:
    if settings.kafka_sasl_mechanism is not SaslMechanism.OAUTHBEARER:
        return {"sasl.username": settings.kafka_sasl_username, "sasl.password": password_of(settings)}
    if settings.kafka_oauth_token_file:
        file = settings.kafka_oauth_token_file
        return {"oauth_cb": lambda _: dated_token(read_secret("kafka_oauth_token_file", file))}
    if settings.kafka_oauth_provider:
        provider = token_provider(settings.kafka_oauth_provider)
        return {"oauth_cb": lambda _: provider(settings)}
    scope = {"sasl.oauthbearer.scope": settings.kafka_oidc_scope} if settings.kafka_oidc_scope else {}
    return {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": settings.kafka_oidc_token_url,
        "sasl.oauthbearer.client.id": settings.kafka_oidc_client_id,
        "sasl.oauthbearer.client.secret": client_secret_of(settings),
        **scope,
    }


def check_kafka_security(settings: KafkaSettings) -> None:
    """Raise SettingsError if settings of Kafka's security contradict each other or have no effect."""
    security = settings.kafka_security
    for name in ("kafka_tls_ca", "kafka_tls_certificate", "kafka_tls_key"):
        if getattr(settings, name) and not security.uses_tls:
            raise SettingsError(
                f"{name} is set, but kafka_security is {security}", remedy="Set kafka_security to ssl or sasl_ssl"
            )
    if settings.kafka_tls_key and not settings.kafka_tls_certificate:
        raise SettingsError("kafka_tls_key is set, but kafka_tls_certificate is not")
    if not security.uses_sasl:
        if settings.kafka_sasl_username:
            raise SettingsError(
                f"kafka_sasl_username is set, but kafka_security is {security}",
                remedy="Set kafka_security to sasl_ssl (or sasl_plaintext, which encrypts nothing)",
            )
        return
    if settings.kafka_sasl_mechanism is not SaslMechanism.OAUTHBEARER:
        if not settings.kafka_sasl_username:
            raise SettingsError(f"kafka_sasl_username is not set, but kafka_security is {security}")
        _one_of(settings, "kafka_sasl_password", "kafka_sasl_password_file")
        return
    _one_of(settings, "kafka_oauth_token_file", "kafka_oauth_provider", "kafka_oidc_token_url")
    if settings.kafka_oidc_token_url:
        if not settings.kafka_oidc_client_id:
            raise SettingsError("kafka_oidc_client_id is not set, but kafka_oidc_token_url is")
        _one_of(settings, "kafka_oidc_client_secret", "kafka_oidc_client_secret_file")


def _one_of(settings: KafkaSettings, *names: str) -> None:
    given = [name for name in names if getattr(settings, name)]
    if len(given) != 1:
        raise SettingsError(
            f"{' or '.join(names)} must be set, and {' and '.join(given)} are"
            if given
            else f"{' or '.join(names)} must be set, and none is",
            remedy="Set one of them",
        )


def password_of(settings: KafkaSettings) -> str:
    """The password for PLAIN and SCRAM; raises SettingsError."""
    if settings.kafka_sasl_password:
        return settings.kafka_sasl_password
    return read_secret("kafka_sasl_password_file", settings.kafka_sasl_password_file)


def client_secret_of(settings: KafkaSettings) -> str:
    """The secret for the OpenID provider; raises SettingsError."""
    if settings.kafka_oidc_client_secret:
        return settings.kafka_oidc_client_secret
    return read_secret("kafka_oidc_client_secret_file", settings.kafka_oidc_client_secret_file)


def client_context(settings: KafkaSettings) -> ssl.SSLContext:
    """The TLS context of Faust's clients; raises SettingsError, which names the setting and the file."""
    try:
        context = ssl.create_default_context(cafile=settings.kafka_tls_ca or None)
    except (OSError, ValueError) as exc:
        raise SettingsError(f"kafka_tls_ca ({settings.kafka_tls_ca}) cannot be used: {reason_of(exc)}") from exc
    if settings.kafka_tls_certificate:
        key = settings.kafka_tls_key or settings.kafka_tls_certificate
        try:
            context.load_cert_chain(settings.kafka_tls_certificate, key, password="")
        except (OSError, ValueError) as exc:
            raise SettingsError(
                f"kafka_tls_certificate and its key ({settings.kafka_tls_certificate}, {key}) cannot be used: "
                f"{reason_of(exc)}"
            ) from exc
    return context


def dated_token(token: str) -> tuple[str, float]:
    """A token, and when it expires, in seconds since the epoch. A JWT says that; the broker checks its signature."""
    parts = token.split(".")
    if len(parts) == 3:
        try:
            payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
            return token, float(payload["exp"])
        except (binascii.Error, ValueError, KeyError, TypeError):
            pass  # an opaque token that happens to have two dots
    return token, time.time() + UNDATED_TOKEN_S
