"""What happens where numba is missing: the functions in plain Python serve, and a warning says so, once.

What lives here: that decision. What must not: kernels; modules that have them import them only after asking here.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache


@cache
def kernels_available() -> bool:
    """Whether numba is installed. Warns once, with a RuntimeWarning, where it is not.

    Raises ImportError where numba is installed and cannot be imported, as with a NumPy that it does not support.
    """
    try:
        importlib.import_module("numba")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in ("numba", "llvmlite"):
            raise
        warnings.warn(
            f"kvstreams runs in plain Python, which is much slower, because {exc.name} is not installed:"
            " run `pip install numba`",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
