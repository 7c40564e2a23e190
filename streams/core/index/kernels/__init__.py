"""Compiled kernels of the run tree; `layout` is the format of its memory."""
