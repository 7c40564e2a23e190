"""The part of Kubernetes' API server that bridges and pickers use: lists and watches over HTTPS.

What lives here: its answers, and the files of a pod's service account. What must not: what is made of them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

Object = dict[str, Any]


class Collection:
    """Objects of one kind, which the API server lists and watches. token: the one that is accepted."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 100
        self.oldest = 0  # versions before this one are gone
        self.token = "first"
        self.requests: list[str] = []
        # Every change, with its version, and the object before and after it. A bookmark has no name.
        self._history: list[tuple[int, Object | None, Object | None]] = []
        self._watchers: list[tuple[Mapping[str, str], asyncio.Queue[Object | None]]] = []

    def put(self, name: str, of: Object | None) -> None:
        """Add or change an object, or delete it, and notify the watchers."""
        self.version += 1
        before = self.objects.pop(name, None)
        if of is not None:
            labels = of.get("metadata", {}).get("labels", {})
            self.objects[name] = of | {"metadata": {"name": name, "labels": labels, **self._at()} | of["metadata"]}
        self._changed(before, self.objects.get(name))

    def bookmark(self) -> None:
        self.version += 1
        for _, events in self._watchers:
            events.put_nowait({"type": "BOOKMARK", "object": {"metadata": self._at()}})

    def fail(self, code: int) -> None:
        """End all watches with an event of an error."""
        for _, events in self._watchers:
            events.put_nowait({"type": "ERROR", "object": {"code": code, "message": "too old resource version"}})
        self.end_watches()

    def end_watches(self) -> None:
        for _, events in self._watchers:
            events.put_nowait(None)

    def _at(self) -> dict[str, str]:
        return {"resourceVersion": str(self.version)}

    def _changed(self, before: Object | None, after: Object | None) -> None:
        self._history.append((self.version, before, after))
        for query, events in self._watchers:
            self._send(query, events, self.version, before, after)

    def _send(
        self,
        query: Mapping[str, str],
        events: asyncio.Queue[Object | None],
        version: int,
        before: Object | None,
        after: Object | None,
    ) -> None:
        """Notify one watcher: an object that no longer fits its selector is deleted for it."""
        was, fits = (of is not None and self._selects(query, of) for of in (before, after))
        kind = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, fits))
        if kind is not None:
            of = after if fits else before
            assert of is not None
            now = of | {"metadata": of["metadata"] | {"resourceVersion": str(version)}}
            events.put_nowait({"type": kind, "object": now})

    def _selects(self, query: Mapping[str, str], of: Object) -> bool:
        """Whether the selectors of a request select an object. One of the two must be given."""
        metadata = of["metadata"]
        if "fieldSelector" in query:
            return query["fieldSelector"] == f"metadata.name={metadata['name']}"
        wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
        return bool(wanted.items() <= metadata["labels"].items())

    def _listed(self) -> list[Object]:
        return list(self.objects.values())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        if request.headers["Authorization"] != f"Bearer {self.token}":
            self.requests.append("401")
            return web.json_response({"code": 401}, status=401)
        if "watch" not in query:
            self.requests.append("list")
            items = [of for of in self._listed() if self._selects(query, of)]
            return web.json_response({"metadata": self._at(), "items": items})
        since = int(query["resourceVersion"])
        if since < self.oldest:
            self.requests.append("410")
            return web.json_response({"code": 410}, status=410)
        self.requests.append(f"watch {since}")
        events: asyncio.Queue[Object | None] = asyncio.Queue()
        for version, before, after in self._history:
            if version > since:
                self._send(query, events, version, before, after)
        watcher = (query, events)
        self._watchers.append(watcher)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await events.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watchers.remove(watcher)
        return response


class ApiServer(Collection):
    """The EndpointSlices. Each service has the same ones.

    slices: the hosts of each slice, with whether each is ready.
    """

    def __init__(self, *services: str) -> None:
        """services: those that may be asked about."""
        super().__init__()
        self._selectors = [f"kubernetes.io/service-name={service}" for service in services]
        self.slices: dict[str, list[tuple[str, bool | None]]] = {}

    def change(self, name: str, hosts: list[tuple[str, bool | None]] | None) -> None:
        """Add or change a slice, or delete it, and notify the watchers."""
        self.version += 1
        before = self.slices.pop(name, None)
        if hosts is not None:
            self.slices[name] = hosts
        self._changed(*(None if of is None else self._slice(name, of) for of in (before, hosts)))

    def _selects(self, query: Mapping[str, str], of: Object) -> bool:
        assert query["labelSelector"] in self._selectors
        return bool(of)

    def _listed(self) -> list[Object]:
        return [self._slice(name, hosts) for name, hosts in self.slices.items()]

    def _slice(self, name: str, hosts: list[tuple[str, bool | None]]) -> Object:
        return {
            "metadata": {"name": name, **self._at()},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": [host], "conditions": {} if ready is None else {"ready": ready}} for host, ready in hosts
            ],
        }


@dataclass
class Pools:
    """The InferencePools and pods of a namespace."""

    pools: Collection = field(default_factory=Collection)
    pods: Collection = field(default_factory=Collection)

    def put_pool(self, name: str, labels: Mapping[str, str], ports: Sequence[int]) -> None:
        numbers = [{"number": port} for port in ports]
        spec = {"selector": {"matchLabels": dict(labels)}, "targetPorts": numbers}
        self.pools.put(name, {"metadata": {}, "spec": spec})

    def put_pod(
        self, name: str, labels: Mapping[str, str], host: str, *, ready: bool = True, deleting: bool = False
    ) -> None:
        """A pod without a host is not scheduled yet."""
        metadata: Object = {"labels": dict(labels)}
        if deleting:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": host, "conditions": conditions} if host else {"phase": "Pending"}
        self.pods.put(name, {"metadata": metadata, "status": status})


def write_account(folder: Path, namespace: str, token: str) -> ssl.SSLContext:
    """Write the files that Kubernetes mounts into a pod; return what the API server needs for TLS."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    (folder / "token").write_text(f"{token}\n")
    (folder / "namespace").write_text(namespace)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    return tls


@asynccontextmanager
async def serving(*apis: ApiServer | Pools, tls: ssl.SSLContext, port: int) -> AsyncIterator[None]:
    """Answer on a port of this machine while the block runs."""
    app = web.Application()
    for api in apis:
        _add_routes(app, api)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


def _add_routes(app: web.Application, api: ApiServer | Pools) -> None:
    groups = "/apis/{}/namespaces/{{namespace}}/{}"
    if isinstance(api, Pools):
        app.router.add_get(groups.format("inference.networking.k8s.io/v1", "inferencepools"), api.pools.answer)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", api.pods.answer)
    else:
        app.router.add_get(groups.format("discovery.k8s.io/v1", "endpointslices"), api.answer)
