"""Compiled kernels of the sets of facts about blocks."""
