"""Kernels that were compiled in advance into a folder that no process writes later, as in the container image.

What lives here: the rule by which numba accepts such a folder. What must not: how kernels are compiled (compiling).
numba owns the files.

numba loads this class by its name, which the variable NUMBA_CACHE_LOCATOR_CLASSES has in the image.
"""

from __future__ import annotations

from pathlib import Path

from numba.core.caching import UserProvidedCacheLocator


class ShippedCacheLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """The folder NUMBA_CACHE_DIR, also if it cannot be written, as long as it has compiled kernels.

    numba by itself ignores a folder that it cannot write, and a process without another one then compiles every kernel
    at every start: 50 to 100 s of processor time.
    """

    def ensure_cache_path(self) -> None:
        """Raise OSError if the folder cannot be written and has nothing to read."""
        try:
            super().ensure_cache_path()
        except OSError:
            if not any(Path(self.get_cache_path()).glob("*.nbi")):
                raise
