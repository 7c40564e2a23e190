"""How every kernel is compiled, when a cached one is stale, and which process compiles it.

What lives here: the decorator, and compiling or finding one kernel before its first use. What must not: kernels, and
which of them a command needs (streams.warming).
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The folder that module names begin at.
_ROOT = Path(__file__).resolve().parents[3]
_IMPORT = re.compile(rb"^from (streams\.[\w.]+) import (?:(\w+)$)?", re.MULTILINE)

#: Types of a kernel's arguments, by their annotations, where the kernel declares no signature.
_TYPES = {"int": types.int64, "bool": types.boolean}

#: In each folder of cached kernels, a file in which a locked byte marks a kernel that is being compiled.
_LOCK_NAME = ".kvstreams-kernels.lock"


@cache
def _sources_of(source: Path) -> frozenset[Path]:
    """A kernel module's own source and every source that its code or its constants can come from.

    They are what it imports from this project, and what the kernel modules among those import.
    """
    sources = {source}
    for name, imported in _IMPORT.findall(source.read_bytes()):
        path = _ROOT.joinpath(*name.decode().split("."))
        if imported and (submodule := path / f"{imported.decode()}.py").exists():
            path = submodule
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
    """Turn a Python function into a kernel, which is compiled by `compile_ahead` or at its first call.

    signatures: the argument types for which it is compiled; any others are refused. Without them it is compiled for the
    arguments of its first call.

    The machine code of a kernel contains its callees, from whatever file they come, but numba checks only the kernel's
    own file. So the cached code, which is stored next to the source or in numba's cache directory, is valid until a
    source changes that the kernel's module imports. If neither folder is writable, every process compiles for itself,
    unless its code was shipped (shipped_cache).
    """
    options = {"no_cfunc_wrapper": True, "nogil": True, "boundscheck": False, "error_model": "numpy", **options}

    def make(function: _Function) -> _Function:
        digest = _digest_of(Path(function.__code__.co_filename).resolve())
        try:
            compiled: Any = njit(cache=True, **options)(function)
            if digest:
                compiled._cache._cache_file._source_stamp = digest
            _save_where_writable(compiled._cache)
        except RuntimeError as exc:
            if "cannot cache function" not in str(exc):
                raise
            compiled = njit(**options)(function)
        _compile_as_declared(compiled, signatures)
        result: _Function = compiled
        return result

    return make


def _save_where_writable(cached: Any) -> None:
    """Have a kernel's cache store nothing in a folder that can only be read, such as the one of the container image."""
    save = cached.save_overload

    def save_overload(signature: Any, compiled: Any) -> None:
        if _lock_file(Path(cached.cache_path)) is not None:
            save(signature, compiled)

    cached.save_overload = save_overload


def _compile_as_declared(compiled: Any, signatures: tuple[Any, ...]) -> None:
    """Have a kernel compiled for the signatures that it declares, and by one process at a time.

    If it declares none, a constant argument counts as any value of its type. numba by itself compiles a kernel again
    for each constant: 219 variants of 138 kernels took 69 s instead of 52 s, and applied and folded events no faster.
    """
    compile_one = compiled.compile

    def compile_(signature: Any) -> Any:
        with _alone(compiled):
            if not signatures:
                plain = tuple(map(types.unliteral, signature)) if isinstance(signature, tuple) else signature
                return compile_one(plain)
            for each in signatures:
                if compiled._can_compile:
                    compile_one(each)
            compiled.disable_compile()
            return None

    def compile_for_arguments(*_: Any, **__: Any) -> Any:
        compile_(None)
        return compiled  # numba calls what is returned here, and by now it accepts only the declared types

    compiled.signatures_declared = signatures
    compiled.compile = compile_
    if signatures:
        compiled._compile_for_args = compile_for_arguments


#: For code that every kernel that calls it contains.
inlined = njit(nogil=True, boundscheck=False, error_model="numpy", forceinline=True)


def is_ready(compiled: Any) -> bool:
    """Whether a kernel has been compiled or loaded in this process."""
    return bool(compiled.signatures)


def is_cached(compiled: Any) -> bool:
    """Whether `compile_ahead` would find a kernel in the cache."""
    if compiled._cache.cache_path is None:
        return False
    index = compiled._cache._cache_file._load_index()
    codegen = compiled.targetctx.codegen()
    return all(compiled._cache._index_key(each, codegen) in index for each in _wanted(compiled))


def is_cacheable(compiled: Any) -> bool:
    """Whether there is a writable folder for the kernel's code."""
    path = compiled._cache.cache_path
    return path is not None and _lock_file(Path(path)) is not None


def compile_ahead(compiled: Any) -> None:
    """Compile a kernel, or load it from the cache, before it is first called."""
    for signature in _wanted(compiled):
        if compiled._can_compile:
            compiled.compile(signature)


def _wanted(compiled: Any) -> tuple[Any, ...]:
    """What a kernel is compiled for: the signatures that it declares, or the types of its annotations."""
    if compiled.signatures_declared:
        declared: tuple[Any, ...] = compiled.signatures_declared
        return declared
    code, annotations = compiled.py_func.__code__, compiled.py_func.__annotations__
    return (tuple(_TYPES[annotations[each]] for each in code.co_varnames[: code.co_argcount]),)


@contextmanager
def _alone(compiled: Any) -> Iterator[None]:
    """Exclude other processes from compiling the same kernel; they wait, and then load what this one has compiled.

    Without this, processes that start together would all compile everything, and two processes that write the same
    index file of numba's cache could lose or mix up its entries. A kernel stays locked while its callees are compiled.
    Callees never call their callers, so processes cannot deadlock.
    """
    # Byte-range locks belong to a process, not to a thread; numba's own lock excludes other threads.
    with global_compiler_lock:
        path = compiled._cache.cache_path
        file = None if path is None else _lock_file(Path(path))
        if file is None:
            yield
            return
        byte = zlib.crc32(compiled.py_func.__qualname__.encode(), zlib.crc32(compiled.py_func.__module__.encode()))
        with suppress(OSError):  # some network file systems do not support locks
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


@cache
def _lock_file(folder: Path) -> int | None:
    """Descriptor of the file whose bytes are locked; None if the folder cannot be written.

    It stays open until the process ends, because closing any descriptor of a file drops all locks on it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK_NAME).open("ab") as file:
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError:
        return None
