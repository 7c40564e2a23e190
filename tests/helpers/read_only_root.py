"""Run a Python program whose root file system is read-only, as that of a container is.

What lives here: the mounts, in a namespace of the program's own. What must not: which program it is. Needs root.

    python -m tests.helpers.read_only_root FOLDER ... -- ARGUMENTS

The folders stay writable, and so do the compiled kernels of this checkout, which no image of this machine has.
"""

from __future__ import annotations

import os
import shutil
import sys

from tests.helpers.pages import ROOT

_SCRIPT = """
for folder in $WRITABLE; do mount --bind "$folder" "$folder"; done
for mounted in / /tmp /var /home /root; do
    if mountpoint -q "$mounted"; then mount -o remount,bind,ro "$mounted"; fi
done
if touch "$LOCKED/written" 2> /dev/null; then echo "the root file system can be written" >&2; exit 1; fi
exec "$@"
"""


def is_possible() -> bool:
    """Whether this user may mount, and has the commands."""
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "mount", "mountpoint")))


def main() -> None:
    """Become the program."""
    at = sys.argv.index("--")
    folders = [*sys.argv[1:at], str(ROOT / "streams")]
    env = {**os.environ, "WRITABLE": " ".join(folders), "LOCKED": str(ROOT)}
    program = [sys.executable, *sys.argv[at + 1 :]]
    os.execvpe("unshare", ["unshare", "--mount", "sh", "-ec", _SCRIPT, "sh", *program], env)


if __name__ == "__main__":
    main()
