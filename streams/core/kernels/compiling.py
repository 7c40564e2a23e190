"""How every kernel is compiled, and when a cached one is stale.

What lives here: the decorator. What must not: kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def _digest_of_sources(*folders: Path) -> str:
    """Digest of the source in these folders; empty where it cannot be read, as in a zip file."""
    digest = hashlib.sha256()
    try:
        for source in sorted(source for folder in folders for source in folder.glob("*.py")):
            digest.update(source.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def kernel(*signatures: Any, beside: tuple[Path, ...] = (), **options: Any) -> Callable[[_Function], _Function]:
    """Compile a function as every kernel of ours is; with signatures at once, else when it is first called.

    beside: folders of packages of kernels that are not this one. A kernel has its callees' code in it, from whatever
    file they come, and numba looks at the kernel's own file alone: what is compiled is kept, beside the source or in
    numba's cache directory, until any source of this package or of those folders changes. Where neither can be written,
    numba raises RuntimeError; such a process compiles for itself, which costs it the seconds that a cache saves.
    """
    sources = _digest_of_sources(Path(__file__).parent, *beside)
    options = {"no_cfunc_wrapper": True, "nogil": True, "boundscheck": False, "error_model": "numpy", **options}

    def compile_it(function: _Function) -> _Function:
        try:
            compiled: Any = njit(cache=True, **options)(function)
            if sources:
                compiled._cache._cache_file._source_stamp = sources
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
