"""Processes that hash little and do without numba: `kvstreams sim` and `sim-pool`.

What lives here: that decision. What must not: kernels. A module that such a process imports, and that uses kernels,
imports them only if this allows it; all other modules import them as usual.
"""

from __future__ import annotations

#: Whether this process uses kernels; None until the first module has asked.
_is_using: bool | None = None


def do_without_kernels() -> None:
    """Hash in pure Python in this process.

    Numba takes 110 MB of a process's memory and half of the time of its start. This has no effect in a process that has
    imported a module which uses kernels.
    """
    global _is_using
    if _is_using is None:
        _is_using = False


def kernels_available() -> bool:
    """Whether this process uses kernels, which it decides once."""
    global _is_using
    if _is_using is None:
        _is_using = True
    return _is_using
