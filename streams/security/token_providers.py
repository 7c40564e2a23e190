"""Providers of tokens for OAUTHBEARER by name: the built-in one, and those of installed packages.

What lives here: reading entry points, and the signer of Amazon MSK. What must not: clients (kafka, faust_credentials).

A provider is a function of the settings. It returns a token, and when the token expires, in seconds since the epoch. A
package offers one as an entry point of the group ENTRY_POINTS. Clients call it from a thread of theirs, before each
token expires.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points

from streams.errors import KafkaRefused, SettingsError
from streams.settings import KafkaSettings

ENTRY_POINTS = "kvstreams.oauth"

TokenProvider = Callable[[KafkaSettings], tuple[str, float]]

#: The address of a broker of MSK has its region, as in boot-a1.c2.kafka-serverless.eu-central-1.amazonaws.com:9098.
_MSK_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


def token_provider(name: str) -> TokenProvider:
    """Find a provider by name; a built-in one comes first. Raises SettingsError."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = entry_points(group=ENTRY_POINTS)
    for entry in found.select(name=name):
        try:
            provider: TokenProvider = entry.load()
        except Exception as exc:  # the module of another package may fail in any way
            raise SettingsError(f"kafka_oauth_provider {name!r} of {entry.value} cannot be loaded: {exc}") from exc
        return provider
    names = ", ".join(sorted({*_BUILT_IN, *found.names}))
    raise SettingsError(f"there is no kafka_oauth_provider {name!r}; there are {names}")


def msk_iam(settings: KafkaSettings) -> tuple[str, float]:
    """A token of Amazon MSK for the identity that AWS's own tools find; raises SettingsError or KafkaRefused."""
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError as exc:
        raise SettingsError(
            "kafka_oauth_provider is msk-iam, and its signer is not installed", remedy="pip install 'kvstreams[msk]'"
        ) from exc
    region = _MSK_REGION.search(settings.kafka)
    if region is None:
        raise SettingsError(f"kafka_oauth_provider is msk-iam, but {settings.kafka} is no address of Amazon MSK")
    try:
        token, expires_ms = MSKAuthTokenProvider.generate_auth_token(region[1])
    except Exception as exc:  # of several packages of AWS: no identity, no role, no answer
        raise KafkaRefused(f"AWS gives no token: {exc}", remedy="Check the identity of this process") from exc
    return str(token), expires_ms / 1000


_BUILT_IN: dict[str, TokenProvider] = {"msk-iam": msk_iam}
