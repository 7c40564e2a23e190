"""One real server of LMCache, without a GPU: starting it, and how an engine is connected to it.

What lives here: the server's process. What must not: engines (engine), and LMCache's events (tests.helpers).
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from tests.real.environment import environment

#: The server loads torch before it listens.
START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 30.0

#: Who copies blocks: the server. With `engine_driven`, the default of engines without a GPU, LMCache 0.5.6 publishes
#: stores without their tokens.
TRANSFER_MODE = "lmcache_driven"

_OWN_ENVIRON = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


class RealLmcache:
    """A server whose events go to Kafka."""

    def __init__(self, name: str, kafka: str, topic: str, directory: Path, gigabytes: float = 1.0) -> None:
        """directory: of its log. gigabytes: of its memory."""
        self.name = name
        self._kafka, self._topic, self._gigabytes = kafka, topic, gigabytes
        self._log_path = directory / f"lmcache-{name}.log"
        self._port, self._http_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it answers. Raises AssertionError with the end of its log otherwise."""
        # A coordinator is named, and does not run: LMCache publishes nothing without its URL.
        command = [
            *(str(environment() / "bin" / "lmcache"), "server", "--instance-id", self.name),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--l1-size-gb", str(self._gigabytes), "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", TRANSFER_MODE),
            *("--coordinator-url", f"http://127.0.0.1:{free_port()}", "--coordinator-event-reporting"),
            *("--coordinator-event-transport", "kafka", "--coordinator-kafka-bootstrap-servers", self._kafka),
            *("--coordinator-kafka-topic", self._topic, "--coordinator-event-flush-interval", "0.2"),
        ]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_OWN_ENVIRON},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_for(self._answers, START_TIMEOUT_S, f"LMCache {self.name}", 0.5)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log_path.read_text()[-4000:]
        try:
            self.call("GET", "/healthcheck")
        except OSError:
            return False
        return True

    def call(self, method: str, path: str) -> Any:
        """Call the server's HTTP API, and return its JSON. Raises HTTPError, URLError."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._http_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=STOP_TIMEOUT_S) as response:
            return json.loads(response.read())

    def engine_flags(self) -> tuple[str, ...]:
        """Return the options of `vllm serve` with which an engine uses this server."""
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
                "lmcache.mp.mp_transfer_mode": TRANSFER_MODE,
            },
        }
        return ("--kv-transfer-config", json.dumps(connector))

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None
