"""A worker that Kafka would never give a partition ends, and names the setting."""

from __future__ import annotations

import pytest

from streams.errors import SettingsError
from streams.kafka.group_limits import check_session_timeout
from streams.settings import Settings


@pytest.mark.parametrize("session_timeout_s", [0.5, 5000.0])
def test_a_session_timeout_that_the_broker_refuses_names_the_setting(scope: Settings, session_timeout_s: float) -> None:
    check_session_timeout(scope, scope.session_timeout_s)
    with pytest.raises(SettingsError, match=f"session_timeout_s is {session_timeout_s:g}, but Kafka at .* takes 1 to"):
        check_session_timeout(scope, session_timeout_s)
