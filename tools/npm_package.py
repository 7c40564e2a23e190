"""One npm package in the user's cache: downloaded once, checked by its checksum, and unpacked.

What lives here: how a package of npm gets onto this machine. What must not: where it is kept (user_cache), which
packages there are, and what is done with their files (tests/helpers/browser.py, tools/site.py).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.user_cache import kept

_DOWNLOAD_TIMEOUT_S = 240


class NoPackage(Exception):
    """A package cannot be had here. The message says what to do."""


def installed(package: str, sha512: str, prepare: Callable[[Path, Path], None]) -> Path:
    """Return the folder of a package, and install it if it is missing.

    `prepare(unpacked, folder)` gets the unpacked package and an empty folder, and puts into the folder what is kept.
    Raises NoPackage.
    """
    name = f"{package.rpartition('@')[0].rpartition('/')[2]}-{sha512[:16]}"
    return kept(name, partial(_install, package, sha512, prepare))


def _install(package: str, sha512: str, prepare: Callable[[Path, Path], None], scratch: Path, folder: Path) -> None:
    """Download and unpack into a scratch folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoPackage(f"npm is needed to install {package}, and it is not on the PATH")
    packed = subprocess.run(
        [npm, "pack", package, "--silent", "--ignore-scripts"],
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_TIMEOUT_S,
    )
    archives = list(scratch.glob("*.tgz"))
    if packed.returncode or not archives:
        raise NoPackage(f"npm pack {package} failed: {packed.stderr.strip()[-500:]}")
    found = hashlib.sha512(archives[0].read_bytes()).hexdigest()
    if found != sha512:
        raise NoPackage(f"{package} has another checksum than expected: {found}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(scratch, filter="data")
    prepare(scratch / "package", folder)
