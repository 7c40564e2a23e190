"""Engines behind a service of Kubernetes, from its EndpointSlices.

What lives here: listing and watching the slices over the API server's HTTPS, and which endpoints are engines. What must
not: the address of an engine on a host (address).

The API is used as its documentation says: list, then watch from the list's resource version; bookmarks move that
version; 410 means that the version is too old, and the slices are listed again. The account's token is read from its
file for each request, because Kubernetes replaces it every hour.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from streams.engines.address import EngineTemplate
from streams.engines.sources.interface import Wanted
from streams.errors import KvStreamsError, SettingsError
from streams.kafka.outage import Outage, lasting
from streams.security.files import read_secret

log = logging.getLogger(__name__)

#: Where Kubernetes puts a pod's service account.
ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"

#: The API server ends a watch after this time; the next one goes on from the same version.
WATCH_S = 300

#: A watch from which nothing has come for this long is given up: bookmarks come about once a minute.
SILENT_S = 180.0

#: Pauses between attempts while the API server does not answer or refuses.
RETRY_S_MIN = 1.0
RETRY_S_MAX = 30.0

#: The answer to a list request is given up after this time.
LIST_TIMEOUT_S = 30.0

#: Bytes of a list, and of one line of a watch. A slice has at most 1,000 endpoints, some 300 KB.
BODY_BYTES_MAX = 64 * 1024 * 1024

_GONE = 410


class _Outdated(Exception):
    """The API server no longer has the version that the watch begins at."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """What a pod needs to ask the API server. server: its URL. folder: has the files token, ca.crt and namespace."""

    server: str
    folder: str = ACCOUNT_FOLDER

    @classmethod
    def of_pod(cls, environ: Mapping[str, str] = os.environ) -> ServiceAccount:
        """Return the account of the pod that this process runs in. Raises SettingsError outside of a pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        folder = environ.get("KUBERNETES_SERVICE_ACCOUNT_FOLDER", ACCOUNT_FOLDER)
        if not host or not Path(folder, "token").exists():
            raise SettingsError(
                "--engines-kubernetes: this process has no service account of Kubernetes",
                remedy="Run it in a pod, or name the engines with --engine, --engines-file or --engines-dns",
            )
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    def text(self, name: str) -> str:
        """Return the content of one of its files. Raises SettingsError."""
        return read_secret(f"the service account's {name}", str(Path(self.folder, name)))


class KubernetesEngines:
    """The engines behind one service: the ready endpoints of all its slices."""

    is_fixed = False

    def __init__(self, service: str, template: EngineTemplate, account: ServiceAccount) -> None:
        """service: NAME, or NAMESPACE/NAME. Raises SettingsError if the account's files cannot be read."""
        namespace, slash, name = service.rpartition("/")
        self._namespace = namespace if slash else account.text("namespace")
        self._service = name
        if not name or not self._namespace or "/" in self._namespace:
            raise SettingsError(f"--engines-kubernetes {service!r} is not NAME or NAMESPACE/NAME")
        self._template = template
        self._account = account
        self._slices: dict[str, tuple[str, ...]] = {}  # the hosts of each slice, by its name
        self._version: str | None = None  # what the slices are as of; None before they are listed
        self._outage = Outage()
        account.text("token")
        try:
            self._tls = ssl.create_default_context(cafile=str(Path(account.folder, "ca.crt")))
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"the service account's ca.crt cannot be used: {exc}") from exc

    def __str__(self) -> str:
        return f"the service {self._namespace}/{self._service} of Kubernetes"

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        reported: list[str] | None = None

        def report() -> None:
            nonlocal reported
            hosts = sorted({host for of_slice in self._slices.values() for host in of_slice})
            if hosts != reported:
                log.info("%s has %d ready endpoints", self, len(hosts))
                wanted([self._template.at(host) for host in hosts])
                reported = hosts

        pause_s = RETRY_S_MIN
        async with aiohttp.ClientSession(
            self._account.server, connector=aiohttp.TCPConnector(ssl=self._tls), read_bufsize=BODY_BYTES_MAX
        ) as http:
            while True:
                try:
                    if self._version is None:
                        self._version = await self._list(http)
                        report()
                    began_s = time.monotonic()
                    async for _ in self._watch(http, self._version):
                        self._answered()
                        pause_s = RETRY_S_MIN
                        report()
                    await asyncio.sleep(max(0.0, began_s + RETRY_S_MIN - time.monotonic()))
                except _Outdated:
                    self._version = None
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, KvStreamsError) as exc:
                    # The list is read again afterwards: changes may have been missed in the meantime.
                    self._version = None
                    self._failed(exc)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _list(self, http: aiohttp.ClientSession) -> str:
        """Read all slices; return the version that a watch continues from."""
        async with asyncio.timeout(LIST_TIMEOUT_S), self._get(http) as response:
            self._check(response)
            answer = await response.json(content_type=None)
        slices = {name: hosts for name, hosts in map(_slice, _items(answer)) if name}
        self._slices = slices
        self._answered()
        return _version(answer)

    async def _watch(self, http: aiohttp.ClientSession, version: str) -> AsyncIterator[None]:
        """Follow the changes after a version; yield after each one, and at the start."""
        options = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            "resourceVersion": version,
        }
        async with self._get(http, **options) as response:
            self._check(response)
            yield
            async for line in response.content:
                event = json.loads(line)
                kind, changed = event["type"], event["object"]
                if kind == "ERROR":
                    if changed.get("code") == _GONE:
                        raise _Outdated
                    raise KvStreamsError(f"the API server ended the watch: {changed.get('message')}")
                name, hosts = _slice(changed)
                if kind == "DELETED":
                    self._slices.pop(name, None)
                elif kind in ("ADDED", "MODIFIED"):
                    self._slices[name] = hosts
                self._version = _version(changed)  # of a bookmark as well
                yield

    def _get(self, http: aiohttp.ClientSession, **options: str) -> Any:
        return http.get(
            f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices",
            params={"labelSelector": f"kubernetes.io/service-name={self._service}", **options},
            headers={"Authorization": f"Bearer {self._account.text('token')}", "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=LIST_TIMEOUT_S, sock_read=SILENT_S),
        )

    @staticmethod
    def _check(response: aiohttp.ClientResponse) -> None:
        if response.status == _GONE:
            raise _Outdated
        if response.status == 403:
            raise KvStreamsError(
                "the service account may not list endpointslices",
                remedy="Allow it `list` and `watch` on endpointslices of discovery.k8s.io",
            )
        if response.status == 401:
            raise KvStreamsError("the API server refuses the service account's token")
        if response.status != 200:
            raise KvStreamsError(f"the API server answers {response.status}")

    def _answered(self) -> None:
        lasted_s = self._outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("%s can be read again after %.0f s", self, lasted_s)

    def _failed(self, exc: Exception) -> None:
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning("%s cannot be read: %s%s", self, str(exc) or repr(exc), lasting(lasted_s))


def _items(answer: Any) -> list[Any]:
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise KvStreamsError("the API server's answer is no list of slices")
    return items


def _version(of: Any) -> str:
    metadata = of.get("metadata") if isinstance(of, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(version, str):
        raise KvStreamsError("the API server's answer has no resource version")
    return version


def _slice(of: Any) -> tuple[str, tuple[str, ...]]:
    """Return a slice's name and the hosts of its ready endpoints; a missing condition means ready.

    An endpoint has several addresses only for hosts with several network cards; the first one is used, as Kubernetes
    recommends.
    """
    try:
        name = of["metadata"].get("name", "")
        hosts = [
            endpoint["addresses"][0]
            for endpoint in of.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
        ]
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise KvStreamsError("the API server sent a slice that cannot be read") from exc
    return str(name), tuple(map(str, hosts))
