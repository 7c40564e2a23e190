"""The sources that a command line names.

What lives here: from options to sources, with the errors of options that do not fit together. What must not: the
sources themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.engines.address import PORT, EngineTemplate, check_distinct, engine_address, engine_template
from streams.engines.engine_http import read_key
from streams.engines.sources.dns import DnsEngines
from streams.engines.sources.file import EnginesFile
from streams.engines.sources.interface import EngineSource, FixedEngines
from streams.engines.sources.kubernetes import KubernetesEngines, PoolEngines
from streams.engines.sources.registry import RegistryEngines
from streams.errors import SettingsError
from streams.kubernetes.account import ServiceAccount
from streams.settings import BridgeSettings


def sources_of(
    settings: BridgeSettings,
    engines: Sequence[str] = (),
    *,
    file: str | None = None,
    registry: bool = False,
    dns: str | None = None,
    kubernetes: str | None = None,
    inference_pool: str | None = None,
    template: str | None = None,
) -> list[EngineSource]:
    """Return the sources that the options name. Raises SettingsError if there is none, or one cannot be used."""
    sources: list[EngineSource] = []
    if engines:
        addresses = [engine_address(text) for text in engines]
        check_distinct(addresses)
        for address in addresses:
            if address.key_file is not None:
                read_key(address.key_file)
        sources.append(FixedEngines(addresses))
    if file:
        sources.append(EnginesFile(file))
    if registry:
        sources.append(RegistryEngines(settings.bridge_lease_s))
    if dns:
        sources.append(DnsEngines(dns, _template(template, "--engines-dns")))
    if kubernetes:
        account = ServiceAccount.of_pod("--engines-kubernetes")
        sources.append(KubernetesEngines(kubernetes, _template(template, "--engines-kubernetes"), account))
    if inference_pool:
        option = "--engines-inference-pool"
        account = ServiceAccount.of_pod(option)
        sources.append(PoolEngines(inference_pool, _template(template, option, PORT), account))
    if not sources:
        raise SettingsError(
            "the bridge has no engines",
            remedy="Use --engine, --engines-file, --engines-registry, --engines-dns, --engines-kubernetes or "
            "--engines-inference-pool",
        )
    return sources


def _template(text: str | None, option: str, port: str = "8000") -> EngineTemplate:
    if text is None:
        raise SettingsError(
            f"{option} needs --engine-template",
            remedy=f"For example --engine-template url=http://{{host}}:{port},events=tcp://{{host}}:5557",
        )
    return engine_template(text, ports=port == PORT)
