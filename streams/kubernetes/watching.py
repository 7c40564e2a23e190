"""The objects of one kind that a selector selects, followed through the API server of Kubernetes.

What lives here: listing and watching objects over the API server's HTTPS. What must not: what is read of an object
(pools, engines.sources), and the account (account).

The API is used as its documentation says: list, then watch from the list's resource version; bookmarks move that
version; 410 means that the version is too old, and the objects are listed again.

State: what is read of each object, by its name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp

from streams.errors import KvStreamsError, SettingsError
from streams.kafka.outage import Outage, lasting
from streams.kubernetes.account import ServiceAccount

log = logging.getLogger(__name__)

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

T = TypeVar("T")


class _Outdated(Exception):
    """The API server no longer has the version that the watch begins at."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects. group: with its version, such as `discovery.k8s.io/v1`; `v1` for the core."""

    group: str
    plural: str

    def path(self, namespace: str) -> str:
        """Return the path of the objects of a namespace."""
        root = f"/apis/{self.group}" if "/" in self.group else f"/api/{self.group}"
        return f"{root}/namespaces/{namespace}/{self.plural}"

    def __str__(self) -> str:
        group = self.group.rpartition("/")[0]
        return f"{self.plural} of {group}" if group else self.plural


class Watched(Generic[T]):
    """The selected objects of one kind in one namespace."""

    def __init__(
        self,
        account: ServiceAccount,
        resource: Resource,
        namespace: str,
        selector: Mapping[str, str],
        read: Callable[[Any], T],
        title: str,
    ) -> None:
        """selector: `labelSelector` or `fieldSelector` of the requests. title: of the objects, for the log.

        read: returns what is needed of an object, and raises LookupError, TypeError or AttributeError for one that is
        not as Kubernetes defines it. Raises SettingsError if the account's files cannot be read.
        """
        self._account = account
        self._resource = resource
        self._path = resource.path(namespace)
        self._selector = dict(selector)
        self._read = read
        self._title = title
        self._objects: dict[str, T] = {}
        self._version: str | None = None  # what the objects are as of; None before they are listed
        self._outage = Outage()
        account.text("token")
        try:
            self._tls = ssl.create_default_context(cafile=str(Path(account.folder, "ca.crt")))
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"the service account's ca.crt cannot be used: {exc}") from exc

    @property
    def objects(self) -> Mapping[str, T]:
        """What was read of each object, by its name. While the API server cannot be read, they stay as they are."""
        return self._objects

    async def follow(self, changed: Callable[[], None]) -> None:
        """Keep the objects up to date until cancelled. changed: called once they are listed, and after each change."""
        pause_s = RETRY_S_MIN
        async with aiohttp.ClientSession(
            self._account.server, connector=aiohttp.TCPConnector(ssl=self._tls), read_bufsize=BODY_BYTES_MAX
        ) as http:
            while True:
                try:
                    if self._version is None:
                        self._version = await self._list(http)
                        changed()
                    began_s = time.monotonic()
                    async for _ in self._watch(http, self._version):
                        self._answered()
                        pause_s = RETRY_S_MIN
                        changed()
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
        """Read all objects; return the version that a watch continues from."""
        async with asyncio.timeout(LIST_TIMEOUT_S), self._get(http) as response:
            self._check(response)
            answer = await response.json(content_type=None)
        self._objects = dict(map(self._named, _items(answer)))
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
                if kind in ("ADDED", "MODIFIED", "DELETED"):
                    name, found = self._named(changed)
                    self._objects[name] = found
                    if kind == "DELETED":
                        del self._objects[name]
                self._version = _version(changed)  # of a bookmark as well
                yield

    def _get(self, http: aiohttp.ClientSession, **options: str) -> Any:
        return http.get(
            self._path,
            params={**self._selector, **options},
            headers={"Authorization": f"Bearer {self._account.text('token')}", "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=LIST_TIMEOUT_S, sock_read=SILENT_S),
        )

    def _named(self, of: Any) -> tuple[str, T]:
        """Return an object's name, and what is read of it."""
        try:
            return str(of["metadata"]["name"]), self._read(of)
        except (LookupError, TypeError, AttributeError) as exc:
            raise KvStreamsError(f"the API server sent one of {self._resource} that cannot be read") from exc

    def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == _GONE:
            raise _Outdated
        if response.status == 403:
            raise KvStreamsError(
                f"the service account may not list {self._resource.plural}",
                remedy=f"Allow it `list` and `watch` on {self._resource}",
            )
        if response.status == 401:
            raise KvStreamsError("the API server refuses the service account's token")
        if response.status == 404:
            raise KvStreamsError(f"the API server does not know {self._resource}", remedy="Install their definition")
        if response.status != 200:
            raise KvStreamsError(f"the API server answers {response.status}")

    def _answered(self) -> None:
        lasted_s = self._outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("%s can be read again after %.0f s", self._title, lasted_s)

    def _failed(self, exc: Exception) -> None:
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning("%s cannot be read: %s%s", self._title, str(exc) or repr(exc), lasting(lasted_s))


def _items(answer: Any) -> list[Any]:
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise KvStreamsError("the API server's answer is no list")
    return items


def _version(of: Any) -> str:
    metadata = of.get("metadata") if isinstance(of, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(version, str):
        raise KvStreamsError("the API server's answer has no resource version")
    return version
