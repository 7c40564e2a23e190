"""What happens without numba: functions in pure Python are used instead, and one warning is printed if it is missing.

What lives here: that decision. What must not: kernels. A module that uses kernels imports them only if this allows it.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache

#: False in a process that does without.
_is_wanted = True


def do_without_kernels() -> None:
    """Use pure Python in this process, as if numba were not installed, but without a warning.

    For processes that hash little: numba takes 110 MB of their memory and half of the time of their start. It has no
    effect in a process that has imported a module which uses kernels.
    """
    global _is_wanted
    _is_wanted = bool(kernels_available.cache_info().currsize)


@cache
def kernels_available() -> bool:
    """Whether numba is installed. If it is not, this warns once, with a RuntimeWarning.

    False in a process that does without. Raises ImportError if numba is installed but cannot be imported, for example
    with a NumPy that it does not support.
    """
    if not _is_wanted:
        return False
    try:
        importlib.import_module("numba")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in ("numba", "llvmlite"):
            raise
        warnings.warn(
            f"kvstreams runs in pure Python, which is much slower, because {exc.name} is not installed:"
            " run `pip install numba`",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
