"""The image of docker/Dockerfile, and the system of docker/compose.yaml with it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.lab.kafka.jars import ensure_jars
from tests.helpers.containers import Builder, Image, debian, missing
from tests.helpers.pages import ROOT

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"images cannot be built here: {missing()}"),
    pytest.mark.long_running,
    pytest.mark.timeout(1800),
]

#: The program is the first process of its namespace, so every service ends with it, however it ends.
ALONE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

#: Of the release that the image of Prometheus stands in for.
_SUITE = "trixie"

#: Lists what a user can write. Folders that the user cannot open are skipped; find would end with an error.
_WRITABLE = (
    "find / -xdev -type d '(' -not -readable -o -not -executable ')' -prune"
    " -o -writable -not -type l -not -path '/proc/*' -print"
)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    """The image. Building it takes minutes, so that one test has everything that needs it."""
    builder = Builder(tmp_path / "image")
    yield builder.build()
    builder("umount", "--all")
    builder("rm", "--all")


def in_image(image: Image, *command: str, user: str) -> str:
    """Run a command with the files and variables of the image, as a user."""
    arguments = ["chroot", f"--userspec={user}", str(image.root), "/usr/bin/env", "-i", "-C", image.working_folder]
    settings = [f"{name}={value}" for name, value in image.variables.items()]
    done = subprocess.run([*arguments, *settings, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_user(image: Image) -> None:
    """A container is not root, and finds its kernels compiled.

    The image's user, and any other one, such as a cluster chooses. Neither can write anything outside /data.
    """
    uid, _, gid = image.user.partition(":")
    assert uid.isdigit() and gid.isdigit() and int(uid) > 0
    for user in (image.user, "12345:0"):
        assert in_image(image, "kvstreams", "warm", user=user) == "no kernel had to be compiled\n"
    allowed = ("/data", "/tmp", "/var/tmp", "/run/lock", "/dev", "/home/kvstreams")
    found = in_image(image, *shlex.split(_WRITABLE), user=image.user).split()
    assert "/data" in found
    assert [path for path in found if not path.startswith(allowed)] == []


def test_the_image_is_built_and_every_service_runs_as_written(image: Image, tmp_path: Path) -> None:
    """Each service's command, environment and health check; then requests, and Prometheus with rules and targets."""
    check_user(image)
    ensure_jars()  # before the network is cut off
    prometheus = Image(
        root=debian(_SUITE, ["prometheus"], tmp_path / "prometheus"),
        user="65534:65534",
        entrypoint=("/bin/prometheus",),
        command=(),
        working_folder="/prometheus",
        variables={"PATH": "/usr/bin:/bin"},
    )
    services = {"kvstreams": image, "prom/prometheus:v3.5.0": prometheus}
    described = {name: {**dataclasses.asdict(each), "root": str(each.root)} for name, each in services.items()}
    (tmp_path / "images.json").write_text(json.dumps(described))
    done = subprocess.run(
        [*ALONE, sys.executable, "-m", "tests.release.compose_system", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
