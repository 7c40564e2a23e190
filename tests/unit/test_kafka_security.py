"""From the settings to the credentials of Kafka's clients; contradictions are refused with the setting's name."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from streams.errors import KafkaRefused, SettingsError
from streams.security.faust_credentials import FileTokens, OidcTokens, faust_credentials
from streams.security.kafka import UNDATED_TOKEN_S, dated_token, librdkafka_config
from streams.settings import KafkaSecurity, SaslMechanism, Settings

TLS = Settings(kafka_security=KafkaSecurity.SSL)
SCRAM = Settings(kafka_security=KafkaSecurity.SASL_PLAINTEXT, kafka_sasl_username="u", kafka_sasl_password="sesame")
OAUTH = Settings(kafka_security=KafkaSecurity.SASL_PLAINTEXT, kafka_sasl_mechanism=SaslMechanism.OAUTHBEARER)
OIDC = replace(
    OAUTH, kafka_oidc_token_url="http://127.0.0.1:1/token", kafka_oidc_client_id="me", kafka_oidc_client_secret="sesame"
)


def test_without_security_nothing_is_added() -> None:
    """A client of a broker without authentication is configured as before."""
    assert librdkafka_config(Settings()) == {}
    assert faust_credentials(Settings()) is None


def test_a_password_comes_from_a_file_or_a_setting(tmp_path: Path) -> None:
    """Both give the same configuration, for every client."""
    file = tmp_path / "password"
    file.write_text("sesame\n")
    from_file = replace(SCRAM, kafka_sasl_password="", kafka_sasl_password_file=str(file))
    for settings in (SCRAM, from_file):
        assert librdkafka_config(settings) == {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "u",
            "sasl.password": "sesame",
        }
        credentials = faust_credentials(settings)
        assert (credentials.username, credentials.password, credentials.mechanism.value) == (
            *("u", "sesame"),
            "SCRAM-SHA-512",
        )
        assert credentials.protocol.value == "SASL_PLAINTEXT"
        assert "sesame" not in repr(credentials)


def test_certificates_are_given_to_every_client(tmp_path: Path) -> None:
    """librdkafka gets the files, and Faust a context that checks names and presents the client's certificate."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    settings = Settings(
        kafka_security=KafkaSecurity.SSL,
        kafka_tls_ca=str(tmp_path / "ca.pem"),
        kafka_tls_certificate=str(tmp_path / "client.pem"),
    )
    assert librdkafka_config(settings) == {
        "security.protocol": "ssl",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "ssl.certificate.location": str(tmp_path / "client.pem"),
        "ssl.key.location": str(tmp_path / "client.pem"),
    }
    credentials = faust_credentials(settings)
    assert credentials.context.check_hostname
    assert len(credentials.context.get_ca_certs()) == 1


WRONG: list[tuple[Settings, str]] = [
    (Settings(kafka_tls_ca="a"), "kafka_tls_ca is set, but kafka_security is plaintext"),
    (replace(SCRAM, kafka_tls_certificate="a"), "kafka_tls_certificate is set, but kafka_security is sasl_plaintext"),
    (replace(TLS, kafka_tls_key="a"), "kafka_tls_key is set, but kafka_tls_certificate is not"),
    (replace(TLS, kafka_tls_ca="/no/ca"), r"kafka_tls_ca \(/no/ca\) cannot be used: No such"),
    (Settings(kafka_sasl_username="u"), "kafka_sasl_username is set, but kafka_security is plaintext"),
    (replace(SCRAM, kafka_sasl_username=""), "kafka_sasl_username is not set"),
    (replace(SCRAM, kafka_sasl_password=""), "kafka_sasl_password or kafka_sasl_password_file .* none is"),
    (replace(SCRAM, kafka_sasl_password_file="f"), "set, and kafka_sasl_password and kafka_sasl_password_file are"),
    (replace(SCRAM, kafka_sasl_password="", kafka_sasl_password_file="/no/f"), "kafka_sasl_password_file: /no/f"),
    (OAUTH, "kafka_oauth_token_file or kafka_oauth_provider or kafka_oidc_token_url must be set, and none is"),
    (replace(OIDC, kafka_oauth_token_file="f"), "set, and kafka_oauth_token_file and kafka_oidc_token_url are"),
    (replace(OIDC, kafka_oauth_provider="p"), "set, and kafka_oauth_provider and kafka_oidc_token_url are"),
    (replace(OAUTH, kafka_oauth_provider="p"), "no kafka_oauth_provider 'p'; there are msk-iam"),
    (replace(OIDC, kafka_oidc_client_id=""), "kafka_oidc_client_id is not set"),
    (replace(OIDC, kafka_oidc_client_secret=""), "kafka_oidc_client_secret or .* none is"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG, ids=[reason[:60] for _, reason in WRONG])
def test_settings_that_contradict_each_other_are_refused(settings: Settings, reason: str) -> None:
    """The error names the setting and shows no secret, for librdkafka and for Faust."""
    for make in (librdkafka_config, faust_credentials):
        with pytest.raises(SettingsError, match=reason) as caught:
            make(settings)
        assert "sesame" not in str(caught.value)


def jwt(**claims: Any) -> str:
    """A token without a signature."""
    parts = ({"alg": "none"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


@pytest.mark.parametrize("token", ["opaque", "a.b", "a.b.c", jwt(sub="me"), jwt(exp="soon"), jwt(exp=None)])
def test_a_token_that_does_not_say_when_it_expires_is_used_for_some_minutes(token: str) -> None:
    """It is read again after UNDATED_TOKEN_S."""
    same, expires_s = dated_token(token)
    assert same == token
    assert expires_s == pytest.approx(time.time() + UNDATED_TOKEN_S, abs=5)


def test_a_token_says_when_it_expires() -> None:
    """The claim `exp` of a JWT counts."""
    assert dated_token(jwt(exp=1234.0))[1] == 1234.0


def test_a_file_of_tokens_is_read_for_each_connection(tmp_path: Path) -> None:
    """A token that was replaced in the file is used from then on, by Faust's clients and by librdkafka."""
    file = tmp_path / "token"
    settings = replace(OAUTH, kafka_oauth_token_file=str(file))
    callback = librdkafka_config(settings)["oauth_cb"]
    provider = FileTokens(settings)
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert asyncio.run(provider.token()) == token
        assert callback("")[0] == token


@asynccontextmanager
async def provider_of(answer: Any, status: int = 200) -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """Serve a token endpoint; give its URL and the requests that it got."""
    requests: list[dict[str, str]] = []

    async def token(request: web.Request) -> web.Response:
        form = await request.post()
        requests.append({"authorization": request.headers["Authorization"], **{k: str(v) for k, v in form.items()}})
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer), status=status)

    app = web.Application()
    app.add_routes([web.post("/token", token)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/token", requests
    await runner.cleanup()


async def test_a_token_of_a_provider_is_requested_once_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client authenticates with its id and secret, and keeps the token for most of its lifetime."""
    now = 1000.0
    monkeypatch.setattr("streams.security.faust_credentials.monotonic_s", lambda: now)
    async with provider_of({"access_token": "abc", "expires_in": 100}) as (url, requests):
        tokens = OidcTokens(replace(OIDC, kafka_oidc_token_url=url, kafka_oidc_scope="kafka"))
        assert [await tokens.token(), await tokens.token()] == ["abc", "abc"]
        basic = "Basic " + base64.b64encode(b"me:sesame").decode()
        assert requests == [{"authorization": basic, "grant_type": "client_credentials", "scope": "kafka"}]
        now += 81.0
        await tokens.token()
        assert len(requests) == 2


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ({"error": "sesame"}, 401, "gives no token for 'me': status 401"),
        ("sesame", 200, "not that of a token endpoint"),
        ({"token": "sesame"}, 200, "not that of a token endpoint"),
        ({"access_token": "a", "expires_in": "sesame"}, 200, "not that of a token endpoint"),
    ],
)
async def test_a_provider_that_gives_no_token_is_named(answer: Any, status: int, reason: str) -> None:
    """The error has the URL and shows nothing of the answer and of the secret."""
    async with provider_of(answer, status) as (url, _):
        with pytest.raises(KafkaRefused, match=reason) as caught:
            await OidcTokens(replace(OIDC, kafka_oidc_token_url=url)).token()
        assert url in str(caught.value) and "sesame" not in f"{caught.value!r}{caught.value.__cause__!r}"


def test_a_provider_that_does_not_answer_is_named() -> None:
    """The error has the URL and the reason."""
    with pytest.raises(KafkaRefused, match=r"http://127.0.0.1:1/token gives no token: "):
        asyncio.run(OidcTokens(OIDC).token())
