"""Providers of tokens for OAUTHBEARER: those of packages, and the real signer of Amazon MSK."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from streams.errors import KafkaRefused, SettingsError
from streams.security.faust_credentials import ProviderTokens, faust_credentials
from streams.security.kafka import librdkafka_config
from streams.security.token_providers import msk_iam, token_provider
from streams.settings import KafkaSecurity, SaslMechanism, Settings

MSK = Settings(
    kafka="boot-a1.c2.kafka-serverless.eu-central-1.amazonaws.com:9098",
    kafka_security=KafkaSecurity.SASL_SSL,
    kafka_sasl_mechanism=SaslMechanism.OAUTHBEARER,
    kafka_oauth_provider="msk-iam",
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with two providers, one of which cannot be loaded."""
    (tmp_path / "company_tokens.py").write_text("def token(settings):\n    return settings.kafka + '!', 1234.0\n")
    metadata = tmp_path / "company-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: company\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[kvstreams.oauth]\ncompany = company_tokens:token\nbroken = company_tokens:none\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_a_package_may_provide_tokens_to_every_client() -> None:
    """librdkafka is given a token and when it expires, and Faust the token."""
    settings = replace(MSK, kafka_oauth_provider="company")
    assert librdkafka_config(settings)["oauth_cb"]("") == (f"{settings.kafka}!", 1234.0)
    provider = faust_credentials(settings).oauth_cb
    assert isinstance(provider, ProviderTokens)
    assert asyncio.run(provider.token()) == f"{settings.kafka}!"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "company_tokens:none cannot be loaded"), ("other", "broken, company, msk-iam")],
)
def test_a_provider_that_cannot_be_used_is_named(name: str, reason: str) -> None:
    """The error says why, or which providers there are."""
    with pytest.raises(SettingsError, match=reason):
        token_provider(name)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Give the environment of a process that has an identity of AWS."""
    pytest.importorskip("aws_msk_iam_sasl_signer", reason="the extra msk is not installed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return monkeypatch


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("address", "region"),
    [
        (MSK.kafka, "eu-central-1"),
        ("b-1.x.y1.c2.kafka.us-east-1.amazonaws.com:9198,b-2.x.y1.c2.kafka.us-east-1.amazonaws.com:9198", "us-east-1"),
    ],
)
def test_the_signer_of_amazon_signs_for_the_region_of_the_brokers(address: str, region: str) -> None:
    """A token is an address that the process's own key has signed; it is valid for some minutes, and has no secret."""
    token, expires_s = msk_iam(replace(MSK, kafka=address))
    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert urlsplit(url).hostname == f"kafka.{region}.amazonaws.com"
    fields = parse_qs(urlsplit(url).query)
    assert fields["Action"] == ["kafka-cluster:Connect"]
    assert fields["X-Amz-Credential"][0].startswith("AKIAEXAMPLE/")
    assert "sesame" not in url
    assert 60 < expires_s - time.time() < 3600


def test_without_an_identity_or_a_region_the_error_says_so(aws: pytest.MonkeyPatch) -> None:
    """A process ends with one line: what is missing, and what to do."""
    with pytest.raises(SettingsError, match="broker:9092 is no address of Amazon MSK"):
        msk_iam(replace(MSK, kafka="broker:9092"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        aws.delenv(name)
    with pytest.raises(KafkaRefused, match="AWS gives no token"):
        msk_iam(MSK)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base install does not have the signer."""
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)
    with pytest.raises(SettingsError, match="not installed") as caught:
        msk_iam(MSK)
    assert "kvstreams[msk]" in caught.value.remedy
