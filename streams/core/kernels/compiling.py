"""How every kernel is compiled, and when a cached one is stale.

What lives here: the decorator. What must not: kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _digest_of_sources() -> str:
    """Digest of all kernels' source; empty where it cannot be read, as in a zip file."""
    digest = hashlib.sha256()
    try:
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


#: A kernel has its callees' code in it, from whatever file they come, and numba looks at the kernel's own file alone.
_SOURCES = _digest_of_sources()


def kernel(*signatures: Any, **options: Any) -> Callable[[_Function], _Function]:
    """Compile a function as every kernel of ours is; with signatures at once, else when it is first called.

    What is compiled is kept beside the source, or in numba's cache directory, until any kernel's source changes. Where
    neither can be written, numba raises RuntimeError; such a process compiles for itself, which costs it the seconds
    that a cache saves.
    """
    options = {"no_cfunc_wrapper": True, "nogil": True, "boundscheck": False, "error_model": "numpy", **options}

    def compile_it(function: _Function) -> _Function:
        try:
            compiled: Any = njit(cache=True, **options)(function)
            if _SOURCES:
                compiled._cache._cache_file._source_stamp = _SOURCES
        except RuntimeError as exc:
            if "cannot cache function" not in str(exc):
                raise
            compiled = njit(**options)(function)
        for signature in signatures:
            compiled.compile(signature)
        if signatures:
            compiled.disable_compile()
        result: _Function = compiled
        return result

    return compile_it


#: For what each kernel that calls it takes into itself.
inlined = njit(nogil=True, boundscheck=False, error_model="numpy", forceinline=True)
