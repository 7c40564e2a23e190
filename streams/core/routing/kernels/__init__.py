"""Compiled kernels of the cost of a request on each candidate."""
