"""Tests; a package, so that its helpers can be imported by name."""
