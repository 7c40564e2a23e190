"""Processes of the former version and of this one share a scope, in every mixture, under load.

tests/former_version.txt names the former version: a commit, and the last release once there is one. Its code comes from
the history of this repository. One kind of process after the other changes its version, each keeping its ports and its
disk, so that all sixteen mixtures are met, forwards and backwards. Brokers and engines have no version here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child, Children
from streams.lab.stack import READY_TIMEOUT_S, Stack, get_json, held_blocks, is_ready, known_blocks
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from tests.helpers.api import Api
from tests.helpers.cluster_clients import Clients
from tests.helpers.support import VISIBLE_TIMEOUT_S

ROOT = Path(__file__).parents[2]
FORMER = (ROOT / "tests" / "former_version.txt").read_text().strip()
CACHE = EngineConfig(block_size=16, n_blocks=256)
MODEL = "m"

#: The kind that changes first does so in every other step, so the one that takes longest comes last.
KINDS = ("front", "bridge", "router", "worker")

#: Compiling all kernels takes half a minute on an idle machine.
WARM_TIMEOUT_S = 300.0

ANSWER_TIMEOUT_S = 30.0

#: Both cores are needed for the processes that start meanwhile.
N_CLIENTS, CLIENT_PAUSE_S = 3, 0.05


def environment(former: Path | None) -> dict[str, str]:
    """What lets a process take the former version's code. None: this version's."""
    # Otherwise `python -m` would look for the package in the current folder first.
    return {} if former is None else {"PYTHONPATH": str(former), "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the code of the former version. It says so at each start, and its kernels are compiled."""
    packed = subprocess.run(["git", "archive", FORMER, "streams", "schemas"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        pytest.skip(f"the history of this repository lacks {FORMER}: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    with (folder / "streams" / "__init__.py").open("a") as package:
        package.write(f"\nimport sys\n\nprint({FORMER!r}, file=sys.stderr, flush=True)\n")
    warm = [sys.executable, "-m", "streams.cli", "warm"]
    env = {**os.environ, **environment(folder)}
    subprocess.run(warm, env=env, check=True, timeout=WARM_TIMEOUT_S, stdout=subprocess.DEVNULL)
    return folder


@dataclass
class Member:
    """A process of the fleet, which is stopped and started again with another version."""

    kind: str
    name: str
    arguments: list[str]
    settings: Settings
    children: Children
    folder: Path
    starts: list[Child] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self, former: Path | None) -> None:
        """Stop it as a supervisor does, and start it with this version, or with the former one."""
        if self.starts:
            assert self.starts[-1].running, f"{self.name} has ended by itself: {self.starts[-1].log_path}"
            self.starts[-1].stop()
            assert self.starts[-1].exit_code == 0, self.starts[-1].log_path
        log = self.folder / f"{self.name}-{len(self.starts)}.log"
        child = Child(self.name, self.arguments, log, {**as_environ(self.settings), **environment(former)})
        self.starts.append(self.children.add(child).start())
        if self.kind != "bridge":
            child.wait_ready(lambda: is_ready(self.url), READY_TIMEOUT_S)
            assert (FORMER in log.read_text()) == (former is not None), log


class FrontClients(Clients):
    """Clients of the fronts. A front that does not accept a connection, or is starting, is left for the other one."""

    def request(self, rng: random.Random, name: str, prompt: list[int], *, keep: bool) -> None:  # noqa: ARG002 - no booking is theirs
        """Complete a prompt at any front."""
        self.ask(prompt, rng.sample(self.routers, len(self.routers)))

    @staticmethod
    def ask(prompt: list[int], fronts: list[str]) -> tuple[Mapping[str, str], dict[str, Any]]:
        """Complete a prompt at the first front that is ready; returns headers and body."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "X-Kvstreams-Details": "1"}
        for front in fronts:
            request = urllib.request.Request(f"{front}/v1/completions", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                    return answer.headers, json.loads(answer.read())
            except urllib.error.HTTPError as exc:
                with exc:
                    page = exc.read()
                # A load balancer, which these clients stand for, asks `/ready` first.
                if exc.code != 503 or b'"starting"' not in page:
                    raise AssertionError(f"{exc.code} {page!r}") from exc
            except urllib.error.URLError as exc:
                if not isinstance(exc.reason, ConnectionRefusedError):
                    raise
        raise AssertionError("no front is ready")


class Fleet:
    """Two workers with routers, a router, a bridge of two engines and two fronts, each with a version."""

    def __init__(self, scope: Settings, folder: Path, children: Children) -> None:
        self._stack = Stack(scope, folder, children)
        self.engines = self._stack.engines(2, CACHE, MODEL, time_scale=100.0)
        self.members: list[Member] = []

        def add(kind: str, name: str, arguments: list[str], **changes: Any) -> Member:
            settings = replace(scope, port=free_port(), **changes)
            member = Member(kind, name, arguments, settings, children, folder / "logs")
            self.members.append(member)
            return member

        for name in ("first", "second"):
            worker = add("worker", name, [], router=True, data_dir=str(folder / "state" / name))
            worker.arguments += worker.settings.faust_arguments
        add("router", "alone", ["-m", "streams.cli", "router"])
        self.routers = [member.url for member in self.members]
        engines = [
            f"id={each.worker_id},url={each.url},events={each.events},replay={each.replay}" for each in self.engines
        ]
        options = [word for engine in engines for word in ("--engine", engine)]
        add("bridge", "bridge", ["-m", "streams.cli", "bridge", *options])
        urls = [word for url in self.routers for word in ("--router-url", url)]
        self.fronts = [add("front", name, ["-m", "streams.cli", "front", *urls]).url for name in ("front-1", "front-2")]

    def change(self, kind: str, former: Path | None) -> None:
        """Restart the processes of a kind, one after the other."""
        for member in self.members:
            if member.kind == kind:
                member.start(former)

    def assert_right(self) -> None:
        """Every router has what the engines hold, no booking is left, and exact promises are found in the caches."""
        for url in self.routers:
            wait_for(lambda: self._is_settled(url), VISIBLE_TIMEOUT_S, f"{url} to have what the engines hold")  # noqa: B023
        for number in range(4):
            prompt = [number * 7_000 + n for n in range(160)]
            FrontClients.ask(prompt, self.fronts)
            for url in self.routers:
                wait_for(lambda: self._is_settled(url), VISIBLE_TIMEOUT_S, f"{url} to have a new prompt")  # noqa: B023
            for front in self.fronts:
                # On busy cores a router may rightly say that its knowledge is late.
                wait_for(lambda: self._is_promised_and_found(prompt, front), VISIBLE_TIMEOUT_S, "an exact answer")  # noqa: B023

    @staticmethod
    def _is_promised_and_found(prompt: list[int], front: str) -> bool:
        """Whether an answer is exact. Its overlap is then what the engine has found."""
        headers, answer = FrontClients.ask(prompt, [front])
        if headers["X-Kvstreams-Mode"] != "exact":
            return False
        overlap = int(headers["X-Kvstreams-Overlap-Blocks"].partition("/")[0])
        # An engine computes the last token of a prompt that it holds, and with it the block.
        assert (overlap, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (10, 144)
        return True

    def _is_settled(self, url: str) -> bool:
        ids = [engine.worker_id for engine in self.engines]
        ranks = get_json(f"{url}/state").get("ranks", ())
        return (
            len(ranks) == len(ids)
            and all(rank["health"] == "exact" for rank in ranks)
            and known_blocks(url) == held_blocks(self.engines)
            and not any(load[2] for load in Api(url).loads(ids).values())
        )


@pytest.mark.long_running
@pytest.mark.timeout(1800)
def test_versions_share_a_scope_in_every_mixture(
    scope: Settings, tmp_path: Path, children: Children, former: Path
) -> None:
    """No request fails, no knowledge is lost, and no exact answer is wrong while processes change their version."""
    fleet = Fleet(scope, tmp_path, children)
    for kind in reversed(KINDS):
        fleet.change(kind, former)
    clients = FrontClients(fleet.fronts, {}, seed=0)
    fleet.assert_right()
    versions = dict.fromkeys(KINDS, False)
    seen = Counter([tuple(versions.values())])
    # A Gray code: each step changes one kind, and the last one leads back to the beginning.
    for step in range(1, 2 ** len(KINDS) + 1):
        kind = KINDS[min((step & -step).bit_length() - 1, len(KINDS) - 1)]
        versions[kind] = not versions[kind]
        before = clients.n_answered
        with clients.running(N_CLIENTS, CLIENT_PAUSE_S):
            fleet.change(kind, None if versions[kind] else former)
        print(f"{step}: {versions}, {clients.n_answered - before} answers")
        assert not clients.failures, (step, versions, clients.failures[:5])
        assert clients.n_answered > before
        fleet.assert_right()
        seen[tuple(versions.values())] += 1
    assert len(seen) == 2 ** len(KINDS) and not any(versions.values())
    with clients.running(N_CLIENTS, CLIENT_PAUSE_S):
        for kind in KINDS:
            fleet.change(kind, None)
    assert not clients.failures, clients.failures[:5]
    fleet.assert_right()
