"""docker/compose.yaml as written, without a container engine: every service is a process in namespaces of its own.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.release.compose_system FOLDER

FOLDER/images.json has the files and the configuration of each image, by the name that the compose file gives it. Kafka
runs with the Java and the jars of `kvstreams kafka up`, and with the properties that the compose file's environment
stands for. Grafana is left out: no package registry has it.

The program starts the services in the order that the compose file requires, runs their health checks, and then uses the
system as its first lines say. It fails with what a service printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from streams.lab.kafka.jars import ensure_jars
from streams.lab.kafka.java import find_java
from tests.helpers.containers import Image, Network
from tests.helpers.pages import ROOT
from tests.helpers.promql import dashboard

COMPOSE = ROOT / "docker" / "compose.yaml"

#: Services whose image cannot be had.
ABSENT = ("grafana",)

#: A service becomes healthy within seconds; ten of them share two cores with whatever else runs.
PATIENCE_S = 180.0

#: For one health check.
CHECK_S = 30.0

#: The program of Kafka's health check, which our jars do not have, and what it does with `--bootstrap-server X --list`.
_KAFKA_TOPICS = "/opt/kafka/bin/kafka-topics.sh"
_LIST_TOPICS = """
import sys
from confluent_kafka.admin import AdminClient
AdminClient({"bootstrap.servers": sys.argv[1]}).list_topics(timeout=10)
"""


class System:
    """The services of the compose file, their processes and their logs."""

    def __init__(self, folder: Path) -> None:
        self.services: dict[str, dict[str, Any]] = {
            name: service
            for name, service in yaml.safe_load(COMPOSE.read_text())["services"].items()
            if name not in ABSENT
        }
        self.folder = folder
        self.images = {
            name: Image(**{**each, "root": Path(each["root"])})
            for name, each in json.loads((folder / "images.json").read_text()).items()
        }
        self.network = Network.make(list(self.services), folder)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self) -> None:
        """Start every service after those that it depends on are healthy, and wait until all are."""
        waiting = dict(self.services)
        while waiting:
            for name, service in list(waiting.items()):
                if not waiting.keys() & service.get("depends_on", {}).keys():
                    for needed in service.get("depends_on", {}):
                        self.await_healthy(needed)
                    self._start(name)
                    del waiting[name]
        for name in self.services:
            self.await_healthy(name)

    def await_healthy(self, name: str) -> None:
        """Run the health check of a service until it passes. Without one, its process must run."""
        service = self.services[name]
        deadline = time.monotonic() + PATIENCE_S
        said = ""
        while True:
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not become healthy: {said}\n{self.log(name)[-5000:]}")
            check = service.get("healthcheck")
            if check is None:
                return
            how, *command = check["test"]
            assert how == "CMD", name
            done = subprocess.run(self._in(name, command, self._variables(name)), capture_output=True, timeout=CHECK_S)
            if done.returncode == 0:
                return
            said = done.stderr.decode(errors="replace")[-1000:]
            time.sleep(1.0)

    def log(self, name: str) -> str:
        """What a service has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def call(self, url: str, body: object = None) -> bytes:
        """Call a service by its name, as `curl` on the network of the services does. Raises SystemExit for an error."""
        host, _, rest = url.removeprefix("http://").partition(":")
        command = ["curl", "-sS", "--fail-with-body", "--max-time", "30", f"http://{self.network.hosts[host]}:{rest}"]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{url}: {done.stdout.decode()}{done.stderr.decode()}\n{self.log(host)[-3000:]}")
        return done.stdout

    def stop(self) -> None:
        """Kill what was started. The services end with this program, the first process of their namespace."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str) -> None:
        service = self.services[name]
        if name == "kafka":
            command = self._kafka()
        else:
            image = self.images[service["image"]]
            arguments = service.get("command", list(image.command))
            command = self._in(name, [*image.entrypoint, *arguments], self._variables(name))
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        print(f"started {name}", flush=True)

    def _variables(self, name: str) -> dict[str, str]:
        service = self.services[name]
        image = self.images.get(service["image"])
        own = {key: str(value) for key, value in service.get("environment", {}).items()}
        return {**(image.variables if image else {}), **own}

    def _in(self, name: str, command: list[str], variables: Mapping[str, str]) -> list[str]:
        """A command as the service's container runs it."""
        service = self.services[name]
        if name == "kafka":
            assert command[0] == _KAFKA_TOPICS
            return self._on_host(name, [sys.executable, "-c", _LIST_TOPICS, command[2]])
        image = self.images[service["image"]]
        mounts = {self._data(name): image.working_folder}
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                mounts[(COMPOSE.parent / source).resolve()] = target
        return self.network.container(name, image.root, image.user, command, variables, image.working_folder, mounts)

    def _data(self, name: str) -> Path:
        """A folder for the service's volume, which belongs to the image's user."""
        folder = self.folder / "data" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            user, _, group = self.images[self.services[name]["image"]].user.partition(":")
            os.chown(folder, int(user), int(group))
        return folder

    def _on_host(self, name: str, command: list[str]) -> list[str]:
        """A command on a service's network, with the files of this machine."""
        script = 'mount --bind "$0" /etc/hosts; echo "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'
        hosts = str(self.network.hosts_file)
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-ec", script, hosts, name, *command]

    def _kafka(self) -> list[str]:
        """Kafka with the properties of the environment, as its image derives them: KAFKA_NODE_ID is node.id."""
        data = self.folder / "data" / "kafka"
        data.mkdir(parents=True)
        properties = {"log.dirs": str(data / "logs")}
        for key, value in self._variables("kafka").items():
            properties[key.removeprefix("KAFKA_").lower().replace("_", ".")] = value
        file = data / "server.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        form = ["kafka.tools.StorageTool", "format", "--cluster-id", "5L6g3nShT-eMCtK--X86sw", "--config", str(file)]
        subprocess.run(self._on_host("kafka", [*_java(), *form]), check=True, stdout=subprocess.DEVNULL)
        return self._on_host("kafka", [*_java(), "kafka.Kafka", str(file)])


def _java() -> list[str]:
    return [str(find_java().executable), "-Xmx512m", "-cp", os.pathsep.join(map(str, ensure_jars()))]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[System]:
    """Give the system with all services healthy; it is stopped in the end."""
    system = System(folder)
    try:
        system.start_all()
        yield system
    finally:
        system.stop()


def use(system: System) -> None:
    """Send requests through the front, and ask both routers where the next one goes."""
    for router in ("router-1", "router-2"):
        workers = json.loads(system.call(f"http://{router}:8000/workers"))["workers"]
        assert sorted(each["worker_id"] for each in workers) == [1, 2], workers
    tokens = list(range(1000, 1512))
    answer = json.loads(system.call("http://front:8000/v1/completions", {"prompt": tokens, "max_tokens": 4}))
    assert answer["choices"][0]["text"], answer
    streamed = system.call("http://front:8000/v1/completions", {"prompt": "Hello", "stream": True})
    assert streamed.rstrip().endswith(b"data: [DONE]"), streamed[-200:]
    chosen = {}
    deadline = time.monotonic() + PATIENCE_S
    for router in ("router-1", "router-2"):
        while True:  # until the engine's events have reached the router
            route = {"token_ids": tokens, "update_states": False}
            chosen[router] = json.loads(system.call(f"http://{router}:8000/route", route))
            if chosen[router]["overlap_blocks"] > 0:
                break
            assert time.monotonic() < deadline, chosen
            time.sleep(0.5)
    assert len({each["worker_id"] for each in chosen.values()}) == 1, chosen
    print(f"routed to worker {chosen['router-1']['worker_id']}, {chosen['router-1']['overlap_blocks']} blocks cached")


def check_monitoring(system: System) -> None:
    """Prometheus reads every process, has the alert rules, and understands each expression of the dashboard."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        targets = json.loads(system.call("http://prometheus:9090/api/v1/targets"))["data"]["activeTargets"]
        down = [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]
        if targets and not down:
            break
        assert time.monotonic() < deadline, down
        time.sleep(1.0)
    groups = json.loads(system.call("http://prometheus:9090/api/v1/rules"))["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert not [rule["name"] for rule in rules if rule.get("lastError")]
    replaced = {"$router": ".*", "$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    for expression in expressions:
        for name, value in replaced.items():
            expression = expression.replace(name, value)
        answer = json.loads(system.call(f"http://prometheus:9090/api/v1/query?query={quote(expression, safe='')}"))
        assert answer["status"] == "success", expression
    print(f"{len(targets)} targets are up, {len(rules)} rules, {len(expressions)} expressions of the dashboard")


def main(folder: Path) -> None:
    """Run the system once."""
    began = time.monotonic()
    with running(folder) as system:
        print(f"all services are healthy after {time.monotonic() - began:.0f} s")
        use(system)
        check_monitoring(system)
        for name in system.services:
            assert "ompiling" not in system.log(name), f"{name} compiled kernels"
            assert "Traceback" not in system.log(name), system.log(name)[-5000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
