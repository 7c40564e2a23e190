"""The built-in policies by name.

What lives here: the table of names. What must not: policies of other packages, whose entry points the shell reads
(policy_plugins).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from streams.core.routing.policies.dynamo import POLICIES as DYNAMO_POLICIES
from streams.core.routing.policies.expected_time import expected_time
from streams.core.routing.policies.interface import Policy, PolicyFactory
from streams.errors import SettingsError

#: Factories by name. A name is written as users write it, in lower case with hyphens.
BUILT_IN: Mapping[str, PolicyFactory] = MappingProxyType({"expected-time": expected_time, **DYNAMO_POLICIES})


def built_in_policy(name: str) -> Policy:
    """Make a built-in policy with its default parameters; raises SettingsError."""
    factory = BUILT_IN.get(name)
    if factory is None:
        raise SettingsError(f"there is no built-in policy {name!r}; there are {', '.join(sorted(BUILT_IN))}")
    return factory({})
