"""Routing policies by name: the built-in ones, and those of installed packages.

What lives here: reading entry points. What must not: any policy (core.routing.policies).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from streams.core.routing.policies.interface import ENTRY_POINTS, Policy, PolicyFactory
from streams.core.routing.policies.registry import BUILT_IN
from streams.errors import SettingsError


def policy_names() -> list[str]:
    """The names of all policies, sorted."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def policy_factory(name: str) -> PolicyFactory:
    """Find a policy by name; a built-in one comes first. Raises SettingsError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            factory: PolicyFactory = entry.load()
        except Exception as exc:  # the module of another package may fail in any way
            raise SettingsError(f"policy {name!r} of {entry.value} cannot be loaded: {exc}") from exc
        return factory
    raise SettingsError(f"there is no policy {name!r}; there are {', '.join(policy_names()) or 'none'}")


def find_policy(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """Make the policy of this name; raises SettingsError."""
    return policy_factory(name)(parameters or {})
