"""Compiled kernels: what the kernels of all flows share.

What lives here: compiling and warming, raw memory, words of a context, XXH3, and arrays of tokens in JSON.
What must not: state, I/O, settings, and checks of what a user passed; the modules that call kernels own the arrays and
check them first. Importing this package loads nothing, so that the core can be imported where numba cannot.
"""

#: The kernels that Python calls, by module and name, the slowest to compile first; here, those that hash tokens.
ENTRY_POINTS = ("xxh3.hash_blocks", "xxh3.chain_blocks")

#: Those that parse requests.
PARSING = ("json_tokens.read_tokens",)

#: Those that find which chunk of LMCache's another one follows.
CHUNKS = ("blake3.find_parent",)
