"""What happens if numba is missing: functions in pure Python are used instead, and one warning is printed.

What lives here: that decision. What must not: kernels. A module that uses kernels imports them only if this allows it.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache


@cache
def kernels_available() -> bool:
    """Whether numba is installed. If it is not, this warns once, with a RuntimeWarning.

    Raises ImportError if numba is installed but cannot be imported, for example with a NumPy that it does not support.
    """
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
