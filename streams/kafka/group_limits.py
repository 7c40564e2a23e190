"""Whether the broker takes the session timeout of a worker's consumer group.

What lives here: asking the broker for its limits before the worker joins the group. What must not: joining it (Faust).
A member whose timeout is refused never gets a partition, and Faust waits for one for ever.
"""

from __future__ import annotations

import logging

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

from streams.errors import SettingsError
from streams.kafka.clients import ANSWER_TIMEOUT_S, admin
from streams.settings import ScopeSettings

log = logging.getLogger(__name__)

#: The broker's settings that limit the timeout, in ms.
_LOW, _HIGH = "group.min.session.timeout.ms", "group.max.session.timeout.ms"


def check_session_timeout(settings: ScopeSettings, session_timeout_s: float) -> None:
    """Raise SettingsError if the broker refuses session_timeout_s. Blocks.

    A broker that does not show its settings, as access lists may have it, is not asked again.
    """
    client = admin(settings)
    try:
        brokers = client.list_topics(timeout=ANSWER_TIMEOUT_S).brokers
        resource = ConfigResource(ConfigResource.Type.BROKER, str(min(brokers)))
        (described,) = client.describe_configs([resource], request_timeout=ANSWER_TIMEOUT_S).values()
        entries = described.result(ANSWER_TIMEOUT_S)
        low_ms, high_ms = (int(entries[name].value) for name in (_LOW, _HIGH))
    except (KafkaException, TimeoutError, KeyError, TypeError, ValueError) as exc:
        log.debug("the broker's limits of session timeouts are not known: %s", exc)
        return
    if not low_ms <= session_timeout_s * 1000 <= high_ms:
        raise SettingsError(
            f"session_timeout_s is {session_timeout_s:g}, but Kafka at {settings.kafka} takes "
            f"{low_ms / 1000:g} to {high_ms / 1000:g} s",
            remedy=f"Change session_timeout_s, or the broker's {_LOW} and {_HIGH}",
        )
