"""What tests of faults share with those on Kafka: the fixtures of tests.helpers.scopes."""

from __future__ import annotations

from tests.helpers.scopes import kafka, new_scope, scope, stack

__all__ = ["kafka", "new_scope", "scope", "stack"]  # fixtures, which pytest finds in this module
