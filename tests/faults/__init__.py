"""Inputs of public bug reports and of real engines on which an answer was wrong, one module for each kind."""
