"""The part of Kubernetes' API server that bridges use: lists and watches of EndpointSlices over HTTPS.

What lives here: its answers, and the files of a pod's service account. What must not: what bridges make of them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web


class ApiServer:
    """A server that behaves like the API server of Kubernetes for EndpointSlices, over HTTPS.

    Each service has the same slices. slices: the hosts of each slice, with whether each is ready. token: the one that
    is accepted.
    """

    def __init__(self, *services: str) -> None:
        """services: those that may be asked about."""
        self._selectors = [f"kubernetes.io/service-name={service}" for service in services]
        self.slices: dict[str, list[tuple[str, bool | None]]] = {}
        self.version = 100
        self.oldest = 0  # versions before this one are gone
        self.token = "first"
        self.requests: list[str] = []
        self._history: list[tuple[int, dict[str, Any]]] = []  # every event, with its version
        self._watchers: list[asyncio.Queue[dict[str, Any] | None]] = []

    def change(self, name: str, hosts: list[tuple[str, bool | None]] | None) -> None:
        """Add or change a slice, or delete it, and notify the watchers."""
        kind = "DELETED" if hosts is None else "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        if hosts is None:
            former = self.slices.pop(name)
            self._send(kind, self._slice(name, former))
        else:
            self.slices[name] = hosts
            self._send(kind, self._slice(name, hosts))

    def bookmark(self) -> None:
        self.version += 1
        self._send("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def fail(self, code: int) -> None:
        """End all watches with an event of an error."""
        self._send("ERROR", {"code": code, "message": "too old resource version"})
        self.end_watches()

    def end_watches(self) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def _send(self, kind: str, of: dict[str, Any]) -> None:
        self._history.append((self.version, {"type": kind, "object": of}))
        for watcher in self._watchers:
            watcher.put_nowait({"type": kind, "object": of})

    def _slice(self, name: str, hosts: list[tuple[str, bool | None]]) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": [host], "conditions": {} if ready is None else {"ready": ready}} for host, ready in hosts
            ],
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] in self._selectors
        if request.headers["Authorization"] != f"Bearer {self.token}":
            self.requests.append("401")
            return web.json_response({"code": 401}, status=401)
        if "watch" not in request.query:
            self.requests.append("list")
            items = [self._slice(name, hosts) for name, hosts in self.slices.items()]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        if int(request.query["resourceVersion"]) < self.oldest:
            self.requests.append("410")
            return web.json_response({"code": 410}, status=410)
        self.requests.append(f"watch {request.query['resourceVersion']}")
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for version, past in self._history:
            if version > int(request.query["resourceVersion"]) and past["type"] != "ERROR":
                events.put_nowait(past)
        self._watchers.append(events)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await events.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watchers.remove(events)
        return response


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
async def serving(api: ApiServer, tls: ssl.SSLContext, port: int) -> AsyncIterator[None]:
    """Answer on a port of this machine while the block runs."""
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()
