"""One npm package in the user's cache: downloaded once, checked by its checksum, and unpacked.

What lives here: how a package of npm gets onto this machine. What must not: which packages there are, and what is done
with their files (tests/helpers/browser.py, tools/site.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

_DOWNLOAD_TIMEOUT_S = 240


class NoPackage(Exception):
    """A package cannot be had here. The message says what to do."""


def installed(package: str, sha512: str, prepare: Callable[[Path, Path], None]) -> Path:
    """Return the folder of a package, and install it if it is missing.

    `prepare(unpacked, folder)` gets the unpacked package and an empty folder, and puts into the folder what is kept.
    Raises NoPackage.
    """
    folder = _cache() / f"{package.rpartition('@')[0].rpartition('/')[2]}-{sha512[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:  # several processes may need it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _install(package, sha512, prepare, folder)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstreams"


def _install(package: str, sha512: str, prepare: Callable[[Path, Path], None], folder: Path) -> None:
    """Download and unpack into a folder next to it, which is renamed when it is complete."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoPackage(f"npm is needed to install {package}, and it is not on the PATH")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        into = Path(scratch)
        packed = subprocess.run(
            [npm, "pack", package, "--silent", "--ignore-scripts"],
            cwd=into,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
        archives = list(into.glob("*.tgz"))
        if packed.returncode or not archives:
            raise NoPackage(f"npm pack {package} failed: {packed.stderr.strip()[-500:]}")
        found = hashlib.sha512(archives[0].read_bytes()).hexdigest()
        if found != sha512:
            raise NoPackage(f"{package} has another checksum than expected: {found}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(into, filter="data")
        kept = into / "kept"
        kept.mkdir()
        prepare(into / "package", kept)
        kept.rename(folder)
