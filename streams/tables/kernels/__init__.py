"""Compiled kernels that read and write the bytes of records; they need numba and a little-endian machine."""
