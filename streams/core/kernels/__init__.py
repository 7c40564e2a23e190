"""Compiled kernels: the loops of the core that Python is too slow for.

What lives here: numba functions over arrays and addresses. What must not: state of their own, I/O, settings, and any
check of what a user handed in; the modules that call kernels own the arrays and check them first. Importing this
package loads nothing, so that the core can be imported where numba cannot.
"""

#: What Python calls, as module and kernel, the slowest to compile first: here the hashing of tokens.
ENTRY_POINTS = ("xxh3.hash_blocks", "xxh3.chain_blocks")
