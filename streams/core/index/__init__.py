"""The prefix index: which leading blocks of a request each rank holds (docs/prefix-index.md)."""
