"""The built-in policies by name.

What lives here: the table of names. What must not: policies of other packages, whose entry points the shell reads
(policy_plugins).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from streams.core.routing.policies.dynamo import POLICIES as DYNAMO_POLICIES
from streams.core.routing.policies.expected_time import expected_time
from streams.core.routing.policies.interface import PolicyFactory

#: Factories by name. A name is written as users write it, in lower case with hyphens.
BUILT_IN: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "expected-time": expected_time,
        **DYNAMO_POLICIES,
    }
)
