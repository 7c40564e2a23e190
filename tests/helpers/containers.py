"""Images and containers without a container engine: mmdebstrap makes a base image, buildah builds the Dockerfile on it.

What lives here: building docker/Dockerfile as written, and running a process in the result, in a network and a mount
namespace of its own. What must not: which services there are (docker/compose.yaml) and what tests check.

The base image is not the one of the Dockerfile, which is on a server: it is the same Debian release with Debian's
packages of the same Python. All of this needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.pages import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"

#: The Pythons that the wheel is run with, which are those of the classifiers in pyproject.toml.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

#: What building and running need, by their commands; all are Debian packages.
TOOLS = ("mmdebstrap", "buildah", "ip", "unshare", "chroot")

_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def missing() -> str:
    """Why no image can be built here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can build a root file system"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def run(*command: str | Path) -> str:
    """Run a command and return its output; an AssertionError has the output of one that fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-5000:]}"
    return done.stdout


def debian(suite: str, packages: Sequence[str], target: Path) -> Path:
    """Make a clean root of a Debian release, as a folder or as a tar file, and return it."""
    hooks = ['ln -s python3 "$1/usr/bin/python"']
    if _CERTIFICATES.exists():  # of a proxy, for example
        hooks.append(f"copy-in {_CERTIFICATES} {_CERTIFICATES.parent}")
    arguments = [f"--customize-hook={hook}" for hook in hooks]
    names = ",".join(["ca-certificates", *packages])
    # The release file of a mirror that is not updated expires. Its signature is checked all the same.
    options = ["--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"', f"--include={names}"]
    run("mmdebstrap", "--quiet", *options, *arguments, suite, target)
    return target


@dataclass(frozen=True)
class Image:
    """A built image: the folder of its files, and what its configuration says."""

    root: Path
    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    working_folder: str
    variables: Mapping[str, str]


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        """folder: for the store, which takes some gigabytes."""
        folder.mkdir()
        store = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
        self._buildah = ["buildah", *store]
        self._folder = folder

    def __call__(self, *arguments: str | Path) -> str:
        """Run buildah; returns its output without the line end."""
        return run(*self._buildah, *arguments).strip()

    def build(self) -> Image:
        """Build docker/Dockerfile, with every step as written, on a base image made of Debian's packages."""
        (base,) = set(re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE))
        match = re.fullmatch(r"python:(\d+\.\d+)-slim-(\w+)", base)
        assert match is not None, base
        archive = debian(match[2], ["python3", "python3-venv"], self._folder / "base.tar")
        container = self("from", "scratch")
        self("add", "--quiet", container, archive, "/")
        self("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", container)
        self("commit", "--quiet", "--rm", container, f"docker.io/library/{base}")
        options = ["--pull-never", "--isolation", "chroot"]
        self("bud", *options, "--tag", "kvstreams", "--file", DOCKERFILE, ROOT)
        settings: dict[str, Any] = json.loads(self("inspect", "--type", "image", "kvstreams"))["OCIv1"]["config"]
        root = Path(self("mount", self("from", "--pull-never", "kvstreams")))
        # A COPY or RUN that runs the wrong Python would build an image of another version than the Dockerfile names.
        assert (root / f"opt/kvstreams/lib/python{match[1]}").is_dir()
        return Image(
            root,
            settings["User"],
            tuple(settings["Entrypoint"]),
            tuple(settings["Cmd"]),
            settings["WorkingDir"],
            dict(each.split("=", 1) for each in settings["Env"]),
        )


#: Mounts what a container sees, then becomes its process. The root is read-only, as a careful deployment has it.
_CONTAINER = """
echo "$HOST" > /proc/sys/kernel/hostname
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/tmp"
for pair in $MOUNTS; do
    source=${pair%%:*} target=$ROOT${pair#*:}
    mkdir -p "$(dirname "$target")"
    if [ -d "$source" ]; then mkdir -p "$target"; else [ -e "$target" ] || touch "$target"; fi
    mount --bind "$source" "$target"
done
mount -o remount,bind,ro "$ROOT"
exec chroot --userspec="$USERSPEC" "$ROOT" /usr/bin/env -i -C "$FOLDER" "$@"
"""


@dataclass(frozen=True)
class Network:
    """A bridge in this process's network namespace; each host on it has a namespace, an address and a name."""

    hosts: Mapping[str, str]
    hosts_file: Path

    @classmethod
    def make(cls, names: Sequence[str], folder: Path) -> Network:
        """Connect a host for each name. The caller has a network and a mount namespace of its own."""
        run("mount", "-t", "tmpfs", "tmpfs", "/run")
        hosts = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=2)}
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "hosts", "type", "bridge")
        run("ip", "address", "add", "10.77.0.1/24", "dev", "hosts")
        run("ip", "link", "set", "hosts", "up")
        for number, (name, address) in enumerate(hosts.items()):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"host{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"host{number}", "master", "hosts", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        file.write_text("\n".join(lines) + "\n")
        return cls(hosts, file)

    def container(
        self,
        host: str,
        root: Path,
        user: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: str,
        mounts: Mapping[Path, str],
    ) -> list[str]:
        """The command that runs a process on a host, with a root file system of its own. mounts: files and folders."""
        pairs = {self.hosts_file: "/etc/hosts", **mounts}
        environment = {
            "HOST": host,
            "ROOT": str(root),
            "USERSPEC": user,
            "FOLDER": folder,
            "MOUNTS": " ".join(f"{source}:{target}" for source, target in pairs.items()),
        }
        settings = [f"{name}={value}" for name, value in environment.items()]
        own = [f"{name}={value}" for name, value in variables.items()]
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        inside = ["sh", "-ec", _CONTAINER, "container", *own, *command]
        return ["ip", "netns", "exec", host, *namespaces, "env", *settings, *inside]
