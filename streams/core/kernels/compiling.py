"""How every kernel is compiled, and when a cached one is stale.

What lives here: the decorator. What must not: kernels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The folder that module names begin at.
_ROOT = Path(__file__).resolve().parents[3]
_IMPORT = re.compile(rb"^from (streams\.[\w.]+) import ", re.MULTILINE)


@cache
def _sources_of(source: Path) -> frozenset[Path]:
    """A kernel module's own source and every source that its code or its constants can come from.

    They are what it imports from this project, and what the kernel modules among those import.
    """
    sources = {source}
    for name in _IMPORT.findall(source.read_bytes()):
        path = _ROOT.joinpath(*name.decode().split("."))
        module = path.with_suffix(".py")
        if not module.exists():
            sources.update(path.glob("*.py"))  # a package: any of its modules may be what is imported
        elif path.parent.name == "kernels":
            sources |= _sources_of(module)
        else:
            sources.add(module)
    return frozenset(sources)


@cache
def _digest_of(source: Path) -> str:
    """Digest of all that a kernel module is compiled from; empty where it cannot be read, as in a zip file."""
    digest = hashlib.sha256()
    try:
        for each in sorted(_sources_of(source)):
            digest.update(each.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def kernel(*signatures: Any, **options: Any) -> Callable[[_Function], _Function]:
    """Compile a function as every kernel of ours is; with signatures at once, else when it is first called.

    The machine code of a kernel contains its callees, from whatever file they come, but numba checks only the kernel's
    own file. So the cached code, which lies next to the source or in numba's cache directory, is valid until any source
    changes that the kernel's module imports. Where neither place can be written, numba raises RuntimeError; such a
    process compiles for itself, at every start.
    """
    options = {"no_cfunc_wrapper": True, "nogil": True, "boundscheck": False, "error_model": "numpy", **options}

    def compile_it(function: _Function) -> _Function:
        digest = _digest_of(Path(function.__code__.co_filename).resolve())
        try:
            compiled: Any = njit(cache=True, **options)(function)
            if digest:
                compiled._cache._cache_file._source_stamp = digest
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


#: For code that every kernel that calls it contains.
inlined = njit(nogil=True, boundscheck=False, error_model="numpy", forceinline=True)
