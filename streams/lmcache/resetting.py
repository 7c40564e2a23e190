"""`kvstreams reset` and LMCache's events: after the tables were emptied, each feed is to be published again.

What lives here: setting the records of all feeds back. What must not: what a bridge does then (bridge), and the reset
itself (streams.reset).

A feed's record stays, since bridges do not take up again what was deleted. Without a position and without a lease, it
says that nothing was passed on. A bridge that holds the feed publishes what it has in memory; another one begins with
the oldest record of the topic that is left.
"""

from __future__ import annotations

from streams.errors import BadRecord
from streams.kafka.clients import Record
from streams.lmcache.feeds import KnownFeed, decode_feed, encode_feed
from streams.lmcache.pools import parse_feed
from streams.model_registry import write_registry
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.topics import topics


def set_back(settings: ScopeSettings) -> int:
    """Set all feeds of a scope back, and return their number. Raises KvStreamsError."""
    name = topics(settings).workers.name
    feeds: dict[bytes, KnownFeed] = {}

    def take(records: list[Record]) -> None:
        for record in records:
            if parse_feed(record.key.decode(errors="replace")) is None:
                continue
            feeds.pop(record.key, None)
            if record.value is not None:
                try:
                    feeds[record.key] = decode_feed(record.value, settings.schema_ids)
                except BadRecord:
                    continue  # bridges skip it as well

    for partition in range(settings.partitions):
        read_to_end(settings, name, partition, None, take)
    records = [(key, encode_feed(KnownFeed(feed.key, feed.topic))) for key, feed in feeds.items()]
    write_registry(settings, records, "feeds")
    return len(feeds)
