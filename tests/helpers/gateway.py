"""A gateway as a user starts it, with its Envoy and its pickers, and what tests read of it."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streams.kafka.clients import ensure_topics
from streams.lab.kafka.ports import free_port, free_ports_in_a_row
from streams.lab.processes import Child, Children
from streams.lab.stack import READY_TIMEOUT_S, get_bytes, get_json, is_ready
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.commands import environment

MODEL = "m"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a gateway. body: None if it is not JSON."""

    status: int
    body: Any

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had, as it reports them."""
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that was started. folder: has its access log."""

    child: Child
    settings: Settings
    folder: Path
    n_pickers: int

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://127.0.0.1:{self.settings.gateway_port}"

    @property
    def pickers(self) -> list[str]:
        """The HTTP APIs of its pickers."""
        return [f"http://127.0.0.1:{self.settings.port + n}" for n in range(self.n_pickers)]

    def pids(self) -> dict[str, int]:
        """The last process id of each of its processes, from the log."""
        found = re.findall(r"(Envoy|picker \d+) has pid (\d+)", self.child.log_path.read_text())
        return {name: int(pid) for name, pid in found}

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request and read its answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
                return Reply(answer.status, _json(answer.read()))
        except urllib.error.HTTPError as exc:
            with exc:
                return Reply(exc.code, _json(exc.read()))

    def complete(self, prompt: str, **fields: Any) -> Reply:
        """Complete a prompt."""
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields})

    def loads(self, picker: int = 0) -> dict[int, int]:
        """Requests that each worker has, as a picker knows them."""
        loads = get_json(f"{self.pickers[picker]}/loads")["loads"]
        return {row["worker_id"]: row["active_requests"] for row in loads}

    def is_ready(self) -> bool:
        """Whether it and all of its pickers are ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as answer:
                return answer.status == 200 and all(map(is_ready, self.pickers))
        except OSError:
            return False

    def statistics(self, prefix: str) -> dict[str, int]:
        """Counters of its Envoy that are not 0."""
        page = get_json(f"http://127.0.0.1:{self.settings.gateway_admin_port}/stats?filter=^{prefix}&format=json")
        return {row["name"]: row["value"] for row in page["stats"] if row.get("value")}

    def healthy_pickers(self) -> int:
        """Pickers that its Envoy asks."""
        return self.statistics("cluster.pickers.membership_healthy").get("cluster.pickers.membership_healthy", 0)

    def engines(self) -> set[int]:
        """Ports of the engines that its Envoy has."""
        page = get_bytes(f"http://127.0.0.1:{self.settings.gateway_admin_port}/clusters").decode()
        return {int(port) for port in re.findall(r"^engines::[0-9.]+:(\d+)::cx_active", page, re.MULTILINE)}

    def access_log(self) -> list[dict[str, Any]]:
        """The requests that it has served. Envoy writes them within a second."""
        lines = (self.folder / "access.log").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def start_gateway(
    children: Children,
    scope: Settings,
    folder: Path,
    n_pickers: int = 2,
    options: Sequence[str] = (),
    **changes: Any,
) -> RunningGateway:
    """Start `kvstreams gateway` in a scope, with ports that are free. changes: of the scope's settings."""
    settings = replace(
        scope,
        port=free_ports_in_a_row(n_pickers),
        picker_port=free_ports_in_a_row(n_pickers),
        gateway_port=free_port(),
        gateway_admin_port=free_port(),
        gateway_threads=1,
        gateway_access_log=str(folder / "access.log"),
        picker_details=True,
        **changes,
    )
    ensure_topics(settings, topics(settings).all())
    arguments = ["-m", "streams.cli", "gateway", "--pickers", str(n_pickers), *options]
    child = Child("gateway", arguments, folder / "gateway.log", environment(as_environ(settings)))
    return RunningGateway(children.add(child).start(), settings, folder, n_pickers)


def wait_gateway(gateway: RunningGateway) -> None:
    """Wait until a gateway, all of its pickers and an engine are ready."""
    gateway.child.wait_ready(lambda: gateway.is_ready() and _all_healthy(gateway), READY_TIMEOUT_S)


def _all_healthy(gateway: RunningGateway) -> bool:
    try:
        return gateway.healthy_pickers() == gateway.n_pickers
    except OSError:
        return False
