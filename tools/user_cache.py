"""Things that take long to download or build, kept in the user's cache.

What lives here: making such a folder once, whatever else runs or is interrupted. What must not: how one is made
(npm_package, tests/helpers/go_program.py).
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(name: str, make: Callable[[Path, Path], None]) -> Path:
    """Return the folder with this name, and make it if it is missing.

    `make(scratch, folder)` gets two empty folders and fills the second one, which is kept if it raises nothing. Raises
    what `make` raises.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstreams" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w") as lock:  # several processes may need it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            # Next to it, so that it can be renamed when it is complete.
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                into = Path(scratch, "kept")
                into.mkdir()
                make(Path(scratch), into)
                into.rename(folder)
    return folder
