"""Compiled kernels of the fact sets."""
