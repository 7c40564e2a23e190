"""How Faust's clients authenticate and encrypt: from the settings to Faust's credentials.

What lives here: those credentials, and tokens for OAUTHBEARER, which aiokafka asks for. What must not: the other
clients (kafka).
"""

from __future__ import annotations

import asyncio
import base64
import json
from time import monotonic as monotonic_s
from typing import Any

import faust
from aiohttp import ClientError, ClientSession, ClientTimeout
from aiokafka.abc import AbstractTokenProvider

from streams.errors import KafkaRefused
from streams.security.files import read_secret
from streams.security.kafka import (
    UNDATED_TOKEN_S,
    check_kafka_security,
    client_context,
    client_secret_of,
    password_of,
)
from streams.security.token_providers import token_provider
from streams.settings import KafkaSettings, SaslMechanism

#: A token of an OpenID provider is replaced after this share of its lifetime, as librdkafka does.
_RENEW_AT = 0.8

#: An OpenID provider answers within a second. A worker that waits longer loses its place in its group.
TOKEN_TIMEOUT_S = 10.0

#: An answer with a token has a few thousand bytes.
_ANSWER_BYTES_MAX = 64 * 1024


def faust_credentials(settings: KafkaSettings) -> Any:
    """The credentials of Faust's clients, or None. Raises SettingsError, which names the setting."""
    security = settings.kafka_security
    check_kafka_security(settings)
    context = client_context(settings) if security.uses_tls else None
    if not security.uses_sasl:
        return None if context is None else faust.SSLCredentials(context)
    if settings.kafka_sasl_mechanism is SaslMechanism.OAUTHBEARER:
        return faust.OAuthCredentials(oauth_cb=_tokens(settings), ssl_context=context)
    return faust.SASLCredentials(
        username=settings.kafka_sasl_username,
        password=password_of(settings),
        mechanism=settings.kafka_sasl_mechanism.value,
        ssl_context=context,
    )


def _tokens(settings: KafkaSettings) -> AbstractTokenProvider:
    if settings.kafka_oauth_token_file:
        return FileTokens(settings)
    return ProviderTokens(settings) if settings.kafka_oauth_provider else OidcTokens(settings)


class ProviderTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Gives Faust's clients tokens of a provider, which other clients use as well."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._provider = token_provider(settings.kafka_oauth_provider)

    async def token(self) -> str:
        """A token; raises what the provider raises."""
        token, _ = await asyncio.to_thread(self._provider, self._settings)
        return token


class FileTokens(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka ships no types that mypy follows
    """Gives Faust's clients the token that a file has at the moment."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._path = settings.kafka_oauth_token_file

    async def token(self) -> str:
        """The token; raises SettingsError."""
        return await asyncio.to_thread(read_secret, "kafka_oauth_token_file", self._path)


class OidcTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Gives Faust's clients tokens of an OpenID provider, as librdkafka gets them for the other clients."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._token = ""
        self._renew_at_s = 0.0  # monotonic

    async def token(self) -> str:
        """A token that has not expired; raises KafkaRefused if the provider gives none."""
        if monotonic_s() >= self._renew_at_s:
            asked_s = monotonic_s()
            self._token, lifetime_s = await self._request()
            self._renew_at_s = asked_s + _RENEW_AT * lifetime_s
        return self._token

    async def _request(self) -> tuple[str, float]:
        url, client_id = self._settings.kafka_oidc_token_url, self._settings.kafka_oidc_client_id
        secret = await asyncio.to_thread(client_secret_of, self._settings)
        scope = {"scope": self._settings.kafka_oidc_scope} if self._settings.kafka_oidc_scope else {}
        basic = base64.b64encode(f"{client_id}:{secret}".encode()).decode()
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=TOKEN_TIMEOUT_S)) as http,
                http.post(
                    url,
                    data={"grant_type": "client_credentials", **scope},
                    headers={"Authorization": f"Basic {basic}"},
                    allow_redirects=False,
                ) as response,
            ):
                if response.status != 200:
                    raise KafkaRefused(
                        f"{url} gives no token for {client_id!r}: status {response.status}",
                        remedy="Check kafka_oidc_client_id and its secret",
                    )
                answer = json.loads(await response.content.read(_ANSWER_BYTES_MAX))
                return str(answer["access_token"]), float(answer.get("expires_in", UNDATED_TOKEN_S))
        except (ClientError, OSError, TimeoutError) as exc:
            raise KafkaRefused(f"{url} gives no token: {exc or 'no answer in time'}") from exc
        except (ValueError, KeyError, TypeError):  # not as the cause, since it may hold the token
            raise KafkaRefused(f"{url} gives no token: its answer is not that of a token endpoint") from None
