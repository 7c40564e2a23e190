"""The prefix index: which rank holds which leading blocks of a request (docs/index.md)."""
