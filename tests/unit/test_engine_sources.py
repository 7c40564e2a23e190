"""Sources of engines: a file that changes, a name that is resolved again, and the API server of Kubernetes."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from streams.core.ids import WorkerId
from streams.core.workers import BridgeLease, Role, Worker
from streams.engines.address import EngineAddress, engine_address, engine_template, worker_id_of
from streams.engines.sources import file as file_module
from streams.engines.sources.dns import DnsEngines, resolve
from streams.engines.sources.file import EnginesFile
from streams.engines.sources.interface import EngineSource, MergedEngines
from streams.engines.sources.kubernetes import KubernetesEngines, PoolEngines
from streams.engines.sources.named import sources_of
from streams.engines.sources.registry import RegistryEngines
from streams.errors import SettingsError
from streams.kubernetes import watching
from streams.kubernetes.account import ServiceAccount
from streams.lab.kafka.ports import free_port
from streams.settings import Settings
from tests.helpers.kubernetes_api import ApiServer, Pools, serving, write_account

TEMPLATE = engine_template("url=http://{host}:8000,events=tcp://{host}:5557,replay=tcp://{host}:5558,model=m")

#: Ample for what takes milliseconds on a quiet machine.
PATIENCE_S = 15.0


class Reported:
    """The lists that a source has reported so far."""

    def __init__(self) -> None:
        self.lists: list[tuple[EngineAddress, ...]] = []
        self._changed = asyncio.Event()

    def __call__(self, engines: Sequence[EngineAddress]) -> None:
        self.lists.append(tuple(engines))
        self._changed.set()

    def urls(self) -> list[str] | None:
        """The URLs of the last list, without what is the same for all; None before the first one."""
        return (
            [engine.url.removeprefix("http://").removesuffix(":8000") for engine in self.lists[-1]]
            if self.lists
            else None
        )

    async def until(self, urls: list[str]) -> None:
        """Wait until the last list has these URLs."""
        async with asyncio.timeout(PATIENCE_S):
            while self.urls() != urls:
                self._changed.clear()
                await self._changed.wait()


def following(source: EngineSource, act: Callable[[Reported], Coroutine[Any, Any, None]]) -> Reported:
    """Run a source while `act` runs; return what it reported."""

    async def main() -> Reported:
        reported = Reported()
        running = asyncio.create_task(source.run(reported))
        acting = asyncio.create_task(act(reported))
        done, _ = await asyncio.wait({running, acting}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        for task in done:
            task.result()
        return reported

    return asyncio.run(main())


def entry(worker_id: int, host: str) -> str:
    return f'[[engine]]\nid = {worker_id}\nurl = "http://{host}:8000"\nevents = "tcp://{host}:5557"\n'


def test_a_file_of_engines_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines come and go with their tables; a file that cannot be used leaves the engines as they were."""
    monkeypatch.setattr(file_module, "CHECK_EVERY_S", 0.02)
    path = tmp_path / "engines.toml"
    path.write_text(entry(1, "a") + entry(2, "b") + 'role = "prefill"\ntaints = ["spot", "eu"]\ndp = 2\n')

    async def act(reported: Reported) -> None:
        await reported.until(["a", "b"])
        path.write_text(entry(1, "a") + "[[engine]]\nid = 2\n")  # without a URL
        await asyncio.sleep(0.1)
        assert reported.urls() == ["a", "b"]
        path.write_text(entry(3, "c"))
        await reported.until(["c"])

    reported = following(EnginesFile(str(path)), act)
    second = reported.lists[0][1]
    assert (second.role, second.taints, second.dp_size) == (Role.PREFILL, ("spot", "eu"), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine = 1", "must consist of [[engine]] tables"),
        ("[[engine]]\nid = 1", "engine 1: url missing"),
        (entry(1, "a") + entry(1, "b"), "two engines have id=1"),
        (entry(1, "a") + "colour = 1", "engine 1: colour unknown"),
        ("[[engine", "is not TOML"),
        ("model = 'm'", "must consist of [[engine]] tables"),
    ],
)
def test_an_unusable_file_of_engines_is_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the entry and its fault."""
    path = tmp_path / "engines.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(message)):
        EnginesFile(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the bridge has no engines"),
        ({"dns": "engines"}, "--engines-dns needs --engine-template"),
        ({"dns": "engines", "template": "url=http://x:1"}, "url does not contain {host}"),
        ({"dns": "engines", "template": "id=1,url=http://{host}:1"}, "id unknown"),
        ({"dns": "engines", "template": "url=http://{host}:1,events=tcp://{host}"}, "It must look like tcp://"),
        ({"kubernetes": "engines", "template": "url=http://{host}:1"}, "no service account"),
        ({"inference_pool": "engines", "template": "url=http://{host}:{port}"}, "no service account"),
        ({"dns": "engines", "template": "url=http://{host}:{port}"}, "only an InferencePool has a {port}"),
        ({"engines": ["id=1,url=http://x:1,role=chief"]}, "role 'chief' is unknown. Use one of both, prefill, decode"),
        ({"engines": ["id=1,url=http://x:1,replay=tcp://x:2"]}, "replay without events"),
    ],
)
def test_sources_that_cannot_be_used_are_refused_at_the_start(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge without engines, and options that lack another one, are reported before anything is started."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=re.escape(message)):
        sources_of(Settings(), **options)


def test_a_name_is_resolved_again_and_again() -> None:
    """Each address is one engine with an id of its own; an unanswered question changes nothing, and absence does."""
    answers: list[list[str] | OSError] = [
        ["10.0.0.1", "10.0.0.2"],
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        ["10.0.0.2", "fd00::3"],
        socket.gaierror(socket.EAI_NONAME, "unknown"),
    ]
    asked: list[str] = []

    async def answer(name: str) -> Sequence[str]:
        asked.append(name)
        found = answers[min(len(asked), len(answers)) - 1]
        if isinstance(found, OSError):
            raise found
        return found

    async def act(reported: Reported) -> None:
        await reported.until([])

    source = DnsEngines("engines.local", TEMPLATE, resolver=answer, every_s=0.02, gone_after_s=0.1)
    reported = following(source, act)
    assert [[engine.url for engine in engines] for engines in reported.lists] == [
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ["http://10.0.0.2:8000", "http://[fd00::3]:8000"],
        [],
    ]
    assert reported.lists[0][1] == reported.lists[1][0]  # the same engine with the same id
    assert reported.lists[1][0].worker_id == worker_id_of("http://10.0.0.2:8000")
    assert reported.lists[1][1].events == "tcp://[fd00::3]:5557"
    assert set(asked) == {"engines.local"}


def test_the_systems_resolver_answers_with_addresses() -> None:
    """`localhost` has the loopback addresses, each once."""
    found = asyncio.run(resolve("localhost"))
    assert "127.0.0.1" in found
    assert len(set(found)) == len(found)


def test_of_two_engines_with_one_id_or_address_the_first_source_counts(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that two sources name is fed once; a clash is logged once."""
    merged = MergedEngines(2)
    first = [engine_address("id=1,url=http://a:1,events=tcp://a:2"), engine_address("id=5,url=http://e:1")]
    second = [
        engine_address("id=1,url=http://b:1,events=tcp://b:2"),
        engine_address("id=2,url=http://c:1,events=tcp://a:2"),
        engine_address("id=3,url=http://d:1"),
    ]
    assert merged.n_unread == 2
    merged.replace(1, second)
    assert merged.n_unread == 1
    for _ in range(2):
        found = merged.replace(0, first)
    assert sorted((worker_id, engine.url) for worker_id, engine in found.items()) == [
        (1, "http://a:1"),
        (3, "http://d:1"),
        (5, "http://e:1"),
    ]
    assert sum("http://b:1 is left out" in line for line in caplog.messages) == 1


def registered(worker_id: int, lease: BridgeLease | None = None, events: str | None = "tcp://x:1") -> Worker:
    return Worker(WorkerId(worker_id), f"http://{worker_id}:8000", "m", 16, events_endpoint=events, lease=lease)


def test_workers_with_events_that_no_bridge_leases_are_engines() -> None:
    """Another bridge's worker becomes one when its lease has expired or was released; one without events never does."""
    source = RegistryEngines(lease_s=0.4)
    source.name_bridge("own")

    async def act(reported: Reported) -> None:
        source.on_worker(WorkerId(1), registered(1))
        source.on_worker(WorkerId(2), registered(2, BridgeLease("other", 1, 300, 1)))
        source.on_worker(WorkerId(3), registered(3, BridgeLease("other", 1, 60_000, 1)))
        source.on_worker(WorkerId(4), registered(4, BridgeLease("own", 1, 60_000, 1)))
        source.on_worker(WorkerId(5), registered(5, events=None))
        await asyncio.sleep(0.05)
        assert reported.urls() is None  # older records may follow
        source.on_end()
        await reported.until(["1", "4"])
        await reported.until(["1", "2", "4"])
        source.on_worker(WorkerId(3), registered(3, BridgeLease("other", 1, 0, 2)))
        await reported.until(["1", "2", "3", "4"])
        source.on_worker(WorkerId(1), registered(1, BridgeLease("other", 1, 60_000, 1)))
        source.on_worker(WorkerId(4), None)
        await reported.until(["2", "3"])

    following(source, act)


def test_the_ready_endpoints_of_a_kubernetes_service_are_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices are listed and watched; a watch that ends goes on, one that is too old starts over, and tokens change."""
    monkeypatch.setattr(watching, "RETRY_S_MIN", 0.05)
    api = ApiServer("engines")
    tls = write_account(tmp_path, "models", api.token)
    api.slices["one"] = [("10.0.0.1", True), ("10.0.0.2", False), ("10.0.0.3", None)]

    async def act(reported: Reported) -> None:
        async with serving(api, tls=tls, port=port):
            await reported.until(["10.0.0.1", "10.0.0.3"])
            api.change("two", [("10.0.0.4", True), ("10.0.0.1", True)])  # an endpoint may move between slices
            await reported.until(["10.0.0.1", "10.0.0.3", "10.0.0.4"])
            api.change("one", None)
            await reported.until(["10.0.0.1", "10.0.0.4"])
            api.bookmark()
            await asyncio.sleep(0.05)
            api.end_watches()  # as the server does every few minutes
            while f"watch {api.version}" not in api.requests:
                await asyncio.sleep(0.01)
            assert api.requests.count("list") == 1

            api.fail(410)
            api.slices["two"] = [("10.0.0.5", True)]
            await reported.until(["10.0.0.5"])
            assert api.requests.count("list") == 2
            api.oldest = api.version = api.version + 10
            api.end_watches()
            api.slices["two"] = [("10.0.0.6", True)]
            await reported.until(["10.0.0.6"])
            refused = api.requests.index("410")
            assert "list" in api.requests[refused:]

            api.token = "second"
            api.end_watches()
            while "401" not in api.requests:
                await asyncio.sleep(0.01)
            assert reported.urls() == ["10.0.0.6"]  # nothing is released meanwhile
            (tmp_path / "token").write_text("second\n")
            api.slices["two"] = [("10.0.0.7", True)]
            await reported.until(["10.0.0.7"])

    port = free_port()
    account = ServiceAccount(f"https://127.0.0.1:{port}", str(tmp_path))
    following(KubernetesEngines("engines", TEMPLATE, account), act)


POOL_TEMPLATE = engine_template(
    "url=http://{host}:{port},events=tcp://{host}:5557,replay=tcp://{host}:5657,model=m", ports=True
)


def test_each_target_port_of_a_ready_pod_of_an_inference_pool_is_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods come and go, become ready and end; ports and labels change; a pool that is deleted has no engines."""
    monkeypatch.setattr(watching, "RETRY_S_MIN", 0.05)
    api = Pools()
    tls = write_account(tmp_path, "models", api.pools.token)
    llm, other = {"app": "llm"}, {"app": "other"}

    async def act(reported: Reported) -> None:
        async with serving(api, tls=tls, port=port):
            await reported.until([])  # no such pool yet
            api.put_pod("a", llm, "10.0.0.1")
            api.put_pod("b", llm, "10.0.0.2", ready=False)
            api.put_pod("c", llm, "")
            api.put_pod("d", other, "10.0.0.4")
            api.put_pool("other", other, [1])
            api.put_pool("engines", llm, [8000, 8100])
            await reported.until(["10.0.0.1", "10.0.0.1:8100"])
            assert [engine.events for engine in reported.lists[-1]] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]
            assert [engine.replay for engine in reported.lists[-1]] == ["tcp://10.0.0.1:5657", "tcp://10.0.0.1:5658"]

            api.put_pool("engines", llm, [8000])
            await reported.until(["10.0.0.1"])
            api.put_pod("b", llm, "fd00::2")
            api.put_pod("c", llm, "10.0.0.3")
            await reported.until(["10.0.0.1", "10.0.0.3", "[fd00::2]"])
            api.put_pod("a", llm, "10.0.0.1", deleting=True)  # ready, and about to end
            await reported.until(["10.0.0.3", "[fd00::2]"])
            api.put_pod("b", other, "fd00::2")
            api.put_pod("a", llm, "10.0.0.5", ready=False)
            await reported.until(["10.0.0.3"])

            api.put_pool("engines", other, [8000])
            await reported.until(["10.0.0.4", "[fd00::2]"])
            api.put_pod("c", llm, "10.0.0.6")  # no longer of the pool
            api.put_pod("d", other, "10.0.0.7")
            await reported.until(["10.0.0.7", "[fd00::2]"])

            # Watches break: those of pods continue, and start over where their version is gone.
            api.pods.end_watches()
            api.put_pod("e", other, "10.0.0.8")
            await reported.until(["10.0.0.7", "10.0.0.8", "[fd00::2]"])
            api.pods.fail(410)
            api.pods.objects.pop("e")
            await reported.until(["10.0.0.7", "[fd00::2]"])
            api.pools.token = "second"
            api.pools.end_watches()
            while "401" not in api.pools.requests:
                await asyncio.sleep(0.01)
            api.put_pod("f", other, "10.0.0.9")  # the pool cannot be read, and the pods still can
            await reported.until(["10.0.0.7", "10.0.0.9", "[fd00::2]"])
            api.pools.token = "first"

            n_lists = len(reported.lists)
            api.pools.put("engines", None)
            await reported.until([])
            api.put_pool("engines", other, [8000])
            await reported.until(["10.0.0.7", "10.0.0.9", "[fd00::2]"])
            assert len(reported.lists) == n_lists + 2

    port = free_port()
    account = ServiceAccount(f"https://127.0.0.1:{port}", str(tmp_path))
    reported = following(PoolEngines("models/engines", POOL_TEMPLATE, account), act)
    # While a pool's pods are listed for the first time, nothing is reported, so no engine is released by mistake.
    assert [engines for engines in reported.lists if not engines] == [(), ()]


def test_an_object_that_cannot_be_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool without ports is reported once, and the endpoints stay until it can be read again."""
    monkeypatch.setattr(watching, "RETRY_S_MIN", 0.05)
    api = Pools()
    tls = write_account(tmp_path, "models", api.pools.token)
    llm = {"app": "llm"}
    api.put_pod("a", llm, "10.0.0.1")
    api.put_pool("engines", llm, [8000])

    async def act(reported: Reported) -> None:
        async with serving(api, tls=tls, port=port):
            await reported.until(["10.0.0.1"])
            api.pools.put("engines", {"metadata": {}, "spec": {"selector": {"matchLabels": llm}}})
            while not any("inferencepools" in line and "cannot be read" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
            assert reported.urls() == ["10.0.0.1"]
            api.put_pool("engines", llm, [9000])
            await reported.until(["10.0.0.1:9000"])

    port = free_port()
    account = ServiceAccount(f"https://127.0.0.1:{port}", str(tmp_path))
    following(PoolEngines("engines", POOL_TEMPLATE, account), act)


async def test_an_api_server_with_another_certificate_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The token is sent only to a server whose certificate the account's authority has signed."""
    monkeypatch.setattr(watching, "RETRY_S_MIN", 0.05)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    account = ServiceAccount(f"https://127.0.0.1:{port}", str(tmp_path))
    reported = Reported()
    running = asyncio.create_task(KubernetesEngines("models/engines", TEMPLATE, account).run(reported))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not any("CERTIFICATE_VERIFY_FAILED" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await runner.cleanup()
    assert reported.urls() is None
    assert asked == []


def test_a_service_account_is_found_by_the_pods_environment(tmp_path: Path) -> None:
    """The API server's address comes from the environment, and the token from a mounted folder."""
    (tmp_path / "token").write_text("t")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_ACCOUNT_FOLDER": str(tmp_path)}
    assert ServiceAccount.of_pod("--x", environ).server == "https://[fd00::1]:443"
    with pytest.raises(SettingsError, match="no service account"):
        ServiceAccount.of_pod("--x", {"KUBERNETES_SERVICE_HOST": "x", "KUBERNETES_SERVICE_ACCOUNT_FOLDER": "/nowhere"})
