"""One real vLLM: starting it, asking it directly, and the ways in which it dies.

What lives here: the process group of an engine. What must not: the product's processes (streams.lab.stack). vLLM runs
an API server, a core and a worker as processes, so a kill of the engine is one of its process group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from tests.helpers.pages import block_of
from tests.real.environment import environment, model_folder

#: Two engines that start at once on two busy cores take up to 235 s.
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
#: An answer of a tiny model takes tenths of a second; only a hang takes longer.
ANSWER_TIMEOUT_S = 120.0

#: The attention kernel for CPUs takes multiples of 32.
BLOCK_SIZE = 32

#: A cache of some thousand blocks, in GiB.
CACHE_GIB = 1

_OWN_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


class RealEngine:
    """A vLLM server. Its event and replay sockets are files, so that nothing listens beyond this machine."""

    def __init__(self, worker_id: int, model: str, directory: Path, flags: Sequence[str] = ()) -> None:
        """directory: of its log and its sockets. flags: further options of `vllm serve`."""
        self.worker_id = worker_id
        self.model = model
        self.log_path = directory / f"vllm-{worker_id}.log"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.events = f"ipc://{directory}/events-{worker_id}"
        self.replay = f"ipc://{directory}/replay-{worker_id}"
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str] | None = None, block_size: int = BLOCK_SIZE) -> None:
        """Start the processes, and return at once."""
        _, option = shlex.split(block_of("docs/own-fleet.md", "--kv-events-config"))
        published = json.loads(option)
        published |= {"endpoint": self.events, "replay_endpoint": self.replay, "topic": "kv-events"}
        command = [
            *(
                str(environment() / "bin" / "vllm"),
                "serve",
                str(model_folder(self.model)),
                "--served-model-name",
                self.model,
            ),
            *("--dtype", "float32", "--host", "127.0.0.1", "--port", str(self._port), "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--max-model-len", "4096", "--block-size", str(block_size)),
            *("--kv-events-config", json.dumps(published), *self._flags),
        ]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_OWN_ENVIRON, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log if it ends before."""

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log_path.read_text()[-4000:]
            return self.is_ready()

        wait_for(ready, START_TIMEOUT_S, f"vLLM {self.worker_id}", 0.5)

    def is_ready(self) -> bool:
        """Whether it answers `/health`."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the engine itself; return its JSON, or None for an empty answer. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            raw = response.read()
        return json.loads(raw) if raw[:1] in (b"{", b"[") else None

    def tokens_of(self, **asked: Any) -> list[int]:
        """The token ids of a chat or a prompt, as the engine has them."""
        tokens: list[int] = self.call("POST", "/tokenize", {"model": self.model, **asked})["tokens"]
        return tokens

    @property
    def pid(self) -> int:
        """The process id of the API server, which is its process group's."""
        assert self._process is not None
        return self._process.pid

    def core_pid(self) -> int:
        """The process id of its core, the child that schedules requests."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    of = os.getpgid(int(entry.name))
                    title = (entry / "cmdline").read_bytes()
                except (ProcessLookupError, FileNotFoundError):
                    continue
                if of == self.pid and b"EngineCore" in title:
                    return int(entry.name)
        raise AssertionError("no core of this engine runs")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """End all of its processes at once, and wait until they are gone."""
        if self._process is None:
            return
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def stop(self) -> None:
        """End it as an operator does; kill what is left."""
        if self._process is None:
            return
        self._process.terminate()
        began_s = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began_s < STOP_TIMEOUT_S:
            time.sleep(0.1)
        self.kill()
