"""The files of a release, and the wheel in an empty environment of every Python that is here."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.api import Api
from tests.helpers.commands import environment
from tests.helpers.containers import PYTHONS, debian, missing
from tests.helpers.pages import block_of, blocks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("build") is None, reason="the tools are not installed: pip install -e '.[release]'"
    ),
    pytest.mark.long_running,
    pytest.mark.timeout(1200),
]

#: A Debian release that has the Python, for versions that are not installed.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}

#: For `kvstreams up` with a download of Kafka and with compiling kernels.
PATIENCE_S = 600.0

#: A Python in a root of its own: what `kvstreams up` starts sees only that root, and this machine's network.
_IN_ROOT = """
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount --bind "$FOLDER" "$ROOT/mnt"
cp /etc/resolv.conf "$ROOT/etc/"
exec chroot "$ROOT" /usr/bin/env -C /mnt "$@"
"""


@dataclass(frozen=True)
class Release:
    """What `make release` has made and printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """`make release`, once."""
    from tools import release

    folder = tmp_path_factory.mktemp("release") / "dist"
    folder.mkdir()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        release.main(folder)
    return Release(folder, printed.getvalue())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, as `make release` builds it."""
    from tools import release

    return next(path for path in release.build(tmp_path_factory.mktemp("wheel")) if path.suffix == ".whl")


def test_a_release_is_complete(release: Release) -> None:
    """It has a wheel, an sdist, an SBOM, the notices of what it needs, and the checksums of all these."""
    _, check = block_of("docs/install.md", "make release").splitlines()
    checked = subprocess.run(["sh", "-c", check], cwd=release.folder.parent, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    names = re.findall(r"^(\S+): OK$", checked.stdout, re.MULTILINE)
    assert {f"{name}: OK" for name in names} == set(checked.stdout.splitlines())
    assert sorted(names) == sorted(path.name for path in release.folder.iterdir() if path.name != "SHA256SUMS")
    assert [name.partition("-0.1.0")[2] for name in sorted(names)] == [
        "-NOTICES.txt", "-py3-none-any.whl", ".cdx.json", ".tar.gz",
    ]  # fmt: skip
    sbom = json.loads((release.folder / "kvstreams-0.1.0.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    components = {each["name"].lower(): each for each in sbom["components"]}
    assert {"aiokafka", "faust-streaming", "numba", "numpy", "rocksdict"} <= components.keys()
    notices = (release.folder / "kvstreams-0.1.0-NOTICES.txt").read_text()
    for name in ("faust-streaming", "numba", "rocksdict"):
        assert re.search(rf"^{name}$", notices, re.MULTILINE), name


def test_no_package_of_a_release_has_a_known_vulnerability(release: Release) -> None:
    """pip-audit looks up each of them. `make release` fails if there is one."""
    (line,) = re.findall(r"^pip-audit: .*$", release.printed, re.MULTILINE)
    if "nothing was checked" in line:
        pytest.skip(line)
    assert re.match(r"pip-audit: no known vulnerability in [1-9]", line)


class Environment:
    """An empty environment of a Python, either of this machine or of a root file system."""

    def __init__(self, folder: Path, python: str, root: Path | None = None) -> None:
        """folder: an empty one, in which the commands run."""
        self._folder = folder
        self._root = root
        self._python = python

    def interrupt(self, process: subprocess.Popen[str]) -> None:
        """Send a started command what Ctrl-C sends it. In a root, it is the child of `unshare`."""
        pid = process.pid
        if self._root is not None:
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(child)
        os.kill(pid, signal.SIGINT)

    def command(self, *command: str) -> list[str]:
        """A command in the environment, in an empty folder."""
        if self._root is None:
            return list(command)
        settings = ["env", f"ROOT={self._root}", f"FOLDER={self._folder}"]
        inside = ["sh", "-ec", _IN_ROOT, "root", *command]
        return [*settings, "unshare", "--mount", "--pid", "--fork", "--kill-child", *inside]

    def install(self, wheel: Path) -> None:
        """Make the environment and install the wheel into it, with what `kvstreams up` needs."""
        shutil.copy(wheel, self._folder)
        self.run(self._python, "-m", "venv", "environment")
        self.run("environment/bin/pip", "install", "--quiet", f"./{wheel.name}[local]")

    def run(self, *command: str) -> str:
        """Run a command and return its output."""
        done = subprocess.run(
            self.command(*command), cwd=self._folder, env=environment({}), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command whose output is a pipe."""
        return subprocess.Popen(
            self.command(*command),
            cwd=self._folder,
            env=environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def installed(version: str) -> str | None:
    """A Python of this machine: on the path, or one of pyenv's, most of which are not on the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for python in (f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}"))):
        found = shutil.which(python)
        if found and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return found
    return None


@pytest.fixture
def empty(version: str, tmp_path: Path) -> Iterator[Environment]:
    """An environment of this Python, if it can be had: installed, or in a clean root of Debian."""
    folder = tmp_path / "empty"
    folder.mkdir()
    if (python := installed(version)) is not None:
        yield Environment(folder, python)
        return
    if version not in SUITES or missing():
        pytest.skip(f"Python {version} is not installed, and no root with it can be made: {missing()}")
    root = debian(SUITES[version], ["python3", "python3-venv"], tmp_path / "root")
    yield Environment(folder, f"python{version}", root)


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_routes_a_request_in_an_empty_environment(wheel: Path, version: str, empty: Environment) -> None:
    """`pip install` and `kvstreams up`, in an empty folder, without a checkout; then the calls that `up` prints."""
    for page, extra in (("docs/first-request.md", "local"), ("docs/install.md", "front")):
        (install,) = re.findall(r"^pip install '(.*)'$", "".join(code for _, code in blocks(page, "sh")), re.MULTILINE)
        name, extras = install.removesuffix("]").split("[")
        assert name in ("kvstreams", wheel.name) and extra in extras.split(","), page
    *_, up = block_of("docs/first-request.md", "python3 -m venv").splitlines()
    empty.install(wheel)
    assert version in empty.run("environment/bin/python", "--version")
    began = time.monotonic()
    process = empty.start(*f"environment/bin/{up}".split())
    assert process.stdout is not None
    shown: list[str] = []
    try:
        while not shown or "Ctrl-C" not in shown[-1]:
            line = process.stdout.readline()
            assert line, "".join(shown)
            assert time.monotonic() - began < PATIENCE_S, "".join(shown)
            shown.append(line)
        (url,) = re.findall(r"^curl -s (http://\S+)/loads$", "".join(shown), re.MULTILINE)
        answer = Api(url).route(request_id="r1", token_ids=list(range(32)))
        assert answer["worker_id"] in (1, 2)
        print(f"Python {version}: a routed request {time.monotonic() - began:.0f} s after `kvstreams up`", answer)
    finally:
        empty.interrupt(process)
        rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, "".join(shown) + rest


def test_without_its_extra_the_command_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    """The base install is for a fleet with its own Kafka: `up` names the extra in one line."""
    environment_ = Environment(tmp_path, "python3")
    environment_.run("python3", "-m", "venv", "environment")
    environment_.run("environment/bin/pip", "install", "--quiet", str(wheel))
    done = subprocess.run(["environment/bin/kvstreams", "up"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'kvstreams[local]'" in done.stderr
    assert done.stderr.count("\n") == 1
