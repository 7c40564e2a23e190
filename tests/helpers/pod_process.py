"""Pods of the chart as processes of this machine: each runs what its manifest says, with its volumes as folders.

What lives here: what the kubelet does with a pod: volumes, environment, probes and the end. What must not: which pods
there are, and what is expected of them.

Differences from a cluster: paths of volumes begin in a folder of the pod, each pod has a port of its own in place of
8000, names of services are addresses of this machine, and the process is this checkout's, as this user. NUMBA_CACHE_DIR
is not set, so that the processes share the kernels that the tests have compiled. If this user is root, they can write
only to their volumes and these kernels.
"""

from __future__ import annotations

import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child, Children
from streams.process.waiting import wait_for
from tests.helpers import read_only_root

#: A pod that is not ready after this time hangs. Ten processes may share two cores.
READY_TIMEOUT_S = 90.0
_PROBE_TIMEOUT_S = 10.0

#: The port of HTTP of every container of the chart, and the settings that have its ports.
CONTAINER_PORT = 8000
PORTS = ("KVSTREAMS_PORT", "KVSTREAMS_METRICS_PORT", "KVSTREAMS_PICKER_PORT", "KVSTREAMS_PICKER_HEALTH_PORT")


@dataclass
class Node:
    """Where pods run. folder: of their volumes and logs. children: owns their processes.

    secrets: contents by Secret and key. claims: folders of volumes that exist already, by their claims. names: what
    stands for names of services, such as {"kvs-router:8000": "127.0.0.1:40123"}. api_port: of the API server.
    tls: how probes check certificates.
    """

    folder: Path
    children: Children
    secrets: Mapping[str, Mapping[str, str]]
    claims: Mapping[str, Path] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    api_port: int = 0
    account: Path = Path()
    tls: ssl.SSLContext | None = None


class PodProcess:
    """One running pod."""

    def __init__(self, node: Node, name: str, pod: Mapping[str, Any], port: int | None = None) -> None:
        self.name = name
        self.port = free_port() if port is None else port
        self._node = node
        self._pod = pod
        (self._container,) = pod["containers"]
        listed = [each["containerPort"] for each in self._container["ports"]]
        self._ports = {each: self.port if each == CONTAINER_PORT else free_port() for each in listed}
        self._folder = node.folder / name
        self._mounts = {mount["name"]: mount["mountPath"] for mount in self._container["volumeMounts"]}
        for volume in pod["volumes"]:
            self._mount(volume)
        for claimed in self._mounts.keys() - {volume["name"] for volume in pod["volumes"]}:
            self._at(self._mounts[claimed]).mkdir(parents=True)
        env = self._environment()
        program = ["-m", "streams.cli", *map(self._here, self._container["args"])]
        if self._container["securityContext"]["readOnlyRootFilesystem"] and read_only_root.is_possible():
            writable = [mount["mountPath"] for mount in self._container["volumeMounts"] if not mount.get("readOnly")]
            program = ["-m", read_only_root.__name__, *(str(self._at(path)) for path in writable), "--", *program]
        log = node.folder / "logs" / f"{name}.log"
        self.child = node.children.add(Child(name, program, log, env)).start()

    @property
    def url(self) -> str:
        """Where the pod listens."""
        has_tls = any(each["name"] == "KVSTREAMS_TLS_CERTIFICATE" for each in self._container["env"])
        return f"{'https' if has_tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def grace_s(self) -> float:
        """How long the kubelet waits after SIGTERM."""
        return float(self._pod["terminationGracePeriodSeconds"])

    def wait_ready(self) -> None:
        """Wait until all three probes succeed."""
        probes = [self._container[f"{probe}Probe"] for probe in ("startup", "liveness", "readiness")]
        self.child.wait_ready(lambda: all(map(self._succeeds, probes)), READY_TIMEOUT_S)

    def _succeeds(self, probe: Mapping[str, Any]) -> bool:
        """Whether a probe of the kubelet's succeeds. Those over gRPC have no TLS."""
        if "grpc" in probe:
            return self._serves(self._ports[probe["grpc"]["port"]], probe["grpc"]["service"])
        try:
            return self.call(probe["httpGet"]["path"])[0] == 200
        except OSError:
            return False

    def call(self, path: str, body: Any = None, token: str | None = None) -> tuple[int, bytes]:
        """Call the pod; return the status and the body of its answer."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S, context=self._node.tls) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read()

    def ask_to_stop(self) -> None:
        """Send SIGTERM, as the kubelet does first."""
        self.child.signal(signal.SIGTERM)

    def wait_stopped(self) -> int | None:
        """Return the exit code. Raises ProcessError if the kubelet would have killed the pod."""
        wait_for(lambda: not self.child.running, self.grace_s, f"{self.name} to end within its grace period")
        return self.child.exit_code

    @staticmethod
    def _serves(port: int, service: str) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_PROBE_TIMEOUT_S)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    # -- volumes and environment ---------------------------------------------------------------------------------------

    def _mount(self, volume: Mapping[str, Any]) -> None:
        at = self._at(self._mounts[volume["name"]])
        if "secret" in volume:
            at.mkdir(parents=True)
            for item in volume["secret"]["items"]:
                (at / item["path"]).write_text(self._node.secrets[volume["secret"]["secretName"]][item["key"]])
        elif "persistentVolumeClaim" in volume:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.symlink_to(self._node.claims[volume["persistentVolumeClaim"]["claimName"]])
        else:
            assert volume.keys() == {"name", "emptyDir"}
            at.mkdir(parents=True)

    def _at(self, path: str) -> Path:
        return self._folder / path.removeprefix("/")

    def _here(self, text: str) -> str:
        """A text of the manifest, with this machine's paths and addresses."""
        for mount in self._mounts.values():
            before, found, after = text.partition(f"{mount}/")
            if found and (not before or before.endswith("=")):
                return f"{before}{self._at(mount)}/{after}"
            if text == mount:
                return str(self._at(mount))
        for name, address in self._node.names.items():
            text = text.replace(name, address)
        return text

    def _environment(self) -> dict[str, str]:
        env = {}
        for variable in self._container["env"]:
            if "value" in variable:
                env[variable["name"]] = self._here(variable["value"])
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                env[variable["name"]] = self._node.secrets[reference["name"]][reference["key"]]
        for name in PORTS:
            if name in env:
                env[name] = str(self._ports[int(env[name])])
        env["TMPDIR"] = str(self._at("/tmp"))
        if self._pod["automountServiceAccountToken"]:
            env |= {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(self._node.api_port),
                "KUBERNETES_SERVICE_ACCOUNT_FOLDER": str(self._node.account),
            }
        return env
